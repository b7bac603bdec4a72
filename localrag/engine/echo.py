"""An engine that needs no model: each byte is a token, and the answer repeats the question.

It ships with localrag, and most tests use it.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from localrag.citation import TAG
from localrag.engine.backend import Logprobs, PartOf
from localrag.engine.engine import Engine
from localrag.engine.grammar import byte_vocabulary, grammar_of
from localrag.engine.speed import Speed
from localrag.engine.template_layout import to_json_lines
from localrag.errors import EngineError
from localrag.text.thinking import ThinkingForm
from localrag.text.tokens import ChatTemplate, Segment
from localrag.text.tool_calls import PLAIN
from localrag.types import Message, ModelInfo, SamplingParams, Slot, ToolCall, ToolSpec

N_CTX_TRAIN = 131_072
PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S = 1000.0, 100.0
"""The stated speed, fixed so that time plans are the same on every machine. It is slow, so that time limits in tests can be long."""
SPEEDUP = 100.0
"""The echo is at least this many times faster, even on a slow machine. Interactive use is planned with the product."""
_START, _END = 256, 257
_SURE = 10.0
"""Logit of the token that comes next; all others have 0."""
_SPECIAL = (("<|im_start|>", _START), ("<|im_end|>", _END))
_CALL = re.compile(r"\bcall\b", re.IGNORECASE)
"""If the question matches, the echo calls a tool even where text is allowed."""
_TIMES = re.compile(r"\bSay it ([1-9][0-9]{0,5}) times\b")
"""Makes the answer long if it follows the question, as a persona does."""


_NAMED = re.compile(rb'"const":("(?:[^"\\]|\\.)*")|"enum":(\[[^\]]*\])')
"""Matches the values listed in a JSON schema."""
_KEY, _MAP = b"text", "map"
"""Name for a property that the schema does not name, and the mark of an object with such properties."""
_MAX_NESTING, _MAX_JSON_BYTES = 8, 100_000
"""Limits for recursive schemas. Beyond them, the echo closes what it can."""


class EchoTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and the two control tokens of ChatML."""

    name = "echo"
    bos_id = None
    bos_text = ""
    eos_text = "<|im_end|>"
    adds_bos = False
    special_texts = _SPECIAL
    tag_texts: tuple[tuple[str, int], ...] = ()

    def strips(self, _token_id: int) -> tuple[bool, bool]:
        return False, False

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def count(self, text: str) -> int:
        return len(text.encode("utf-8", "replace"))

    def piece(self, token_id: int, *, special: bool = True) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return _SPECIAL[token_id - 256][0].encode() if special else b""

    def is_end(self, token_id: int) -> bool:
        return token_id == _END


class EchoTemplate:
    """ChatML without Jinja. Tools come first, as one line of JSON each."""

    thinking = None
    call_markup = PLAIN
    notes: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, thinks: bool = True) -> list[Segment]:  # noqa: ARG002
        segments, text = [], ""
        if tools:
            listed = "\n".join(to_json_lines(tools))
            segments += [Segment("<|im_start|>tools\n", tools=True), Segment(listed, tools=True, is_content=True)]
            segments += [Segment("<|im_end|>\n", tools=True)]
        for index, message in enumerate(messages):
            segments += [Segment(f"{text}<|im_start|>{message.role}\n"), Segment(message.content, index)]
            for at, call in enumerate(message.tool_calls):
                segments += [Segment("\n", call=index)] if at or message.content else []
                segments += [Segment(call.text, is_content=True, call=index)]
            text = "<|im_end|>\n"
        return [*segments, Segment(f"{text}<|im_start|>assistant\n")]


@dataclass(slots=True, eq=False)
class _Cell:
    """An evaluated token. Sequences with a common prefix share its cells."""

    token: int
    num_holders: int = 1


class EchoRunner:
    """A Runner whose KV cache is a list of tokens. It raises errors where llama.cpp would abort: invalid positions, ids and sizes.

    With `uncounted_space`, a space takes two cells, which the tokenizer does not know, so token counts are estimates. With `thinking`, it
    reasons before it answers, between the marks of that form.
    """

    def __init__(
        self,
        num_cells: int,
        num_sequences: int,
        *,
        repeatable: bool = True,  # noqa: ARG002  # always true here
        uncounted_space: bool = False,
        thinking: ThinkingForm | None = None,
    ) -> None:
        self.num_cells = num_cells
        self._thinking = thinking
        self._uncounted = ord(" ") if uncounted_space else None
        self._held: list[list[_Cell]] = [[] for _ in range(num_sequences)]
        self._num_used = 0
        self._replies: dict[int, deque[int]] = {}
        self._answers: dict[int, tuple[int, ...]] = {}
        self._copies: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._outputs: dict[int, int] = {}
        self.num_evaluated_tokens = 0

    def check(self, sampling: SamplingParams) -> None:
        if sampling.json_schema is not None:
            grammar_of(sampling.json_schema)

    def begin(self, seq_id: int, prompt_ids: list[int], sampling: SamplingParams) -> None:
        answer, thought = _reply(prompt_ids, sampling.num_answer_tokens), ""
        if sampling.json_schema is not None and not (sampling.or_text and _CALL.search(answer) is None):
            answer = _as_json(str(sampling.json_schema), answer)
            if sampling.call_rules is not None:
                call = json.loads(answer)
                answer = sampling.call_rules.written([ToolCall(call["name"], call["arguments"])])
        elif self._thinking is not None:
            thought = _thought(prompt_ids, self._thinking, answer)
        elif quoted := _quoting(answer, sampling):
            answer, self._copies[seq_id] = quoted
        self._answers[seq_id] = (*answer.encode(), _END)
        self._replies[seq_id] = deque((*thought.encode(), *self._answers[seq_id]))

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> bool:
        self._outputs = {}
        for index, (token, position, seq_id, wants_logits) in enumerate(entries):
            if position != len(self._held[seq_id]) or not 0 <= token <= _END:
                raise EngineError(f"Token {token} at position {position} of sequence {seq_id} is out of order.")
            self._held[seq_id].append(_Cell(token))
            self._num_used += self._size(token)
            if wants_logits:
                self._outputs[index] = seq_id
        self.num_evaluated_tokens += len(entries)
        if self._num_used > self.num_cells:
            raise EngineError("The KV cache is full.")
        return True

    def _size(self, token: int) -> int:
        return 2 if token == self._uncounted else 1

    def sample(self, seq_id: int, index: int, part_of: PartOf | None = None) -> int:  # noqa: ARG002  # it has no grammar
        if self._outputs.get(index) != seq_id:
            raise EngineError(f"Entry {index} of the last batch has no logits for sequence {seq_id}.")
        reply = self._replies[seq_id]
        if self._thinking is not None and self._ends(seq_id, self._thinking.end):  # the engine may have ended the reasoning
            self._replies[seq_id] = reply = deque(self._answers[seq_id])
        return reply.popleft()

    def take_copied(self, seq_id: int) -> tuple[int, ...]:
        num_left, token_ids = self._copies.get(seq_id, (-1, ()))
        return self._copies.pop(seq_id)[1] if token_ids and len(self._replies[seq_id]) == num_left else ()

    def _ends(self, seq_id: int, text: str) -> bool:
        """Whether a sequence's tokens end with this text."""
        ending = text.encode()
        return bytes(cell.token for cell in self._held[seq_id][-len(ending) :] if cell.token < _START) == ending

    def logits(self, index: int, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Logits in which the next token of the reply is almost certain."""
        coming = self._replies[self._outputs[index]][0]
        return tuple(_SURE if token == coming else 0.0 for token in token_ids)

    def logprobs(self, index: int, num_top: int) -> Logprobs:
        others = [token for token in range(_END + 1) if token != self._replies[self._outputs[index]][0]]
        coming = self._replies[self._outputs[index]][0]
        total = math.log(math.exp(_SURE) + len(others))
        return Logprobs(lambda token: (_SURE if token == coming else 0.0) - total, tuple([coming, *others][:num_top]))

    def num_tokens(self, seq_id: int) -> int:
        return sum(self._size(cell.token) for cell in self._held[seq_id])

    def end(self, seq_id: int) -> None:
        self._replies.pop(seq_id)
        self._answers.pop(seq_id)
        self._copies.pop(seq_id, None)

    def copy(self, source: int, seq_id: int, num_tokens: int, _checkpoint: bytes | None = None) -> bool:
        self.cut(seq_id, 0)
        self._held[seq_id] = self._held[source][:num_tokens]
        for cell in self._held[seq_id]:
            cell.num_holders += 1
        return True

    def cut(self, seq_id: int, num_tokens: int, _checkpoint: bytes | None = None) -> bool:
        cells = self._held[seq_id]
        for cell in cells[num_tokens:]:
            cell.num_holders -= 1
            self._num_used -= 0 if cell.num_holders else self._size(cell.token)
        del cells[num_tokens:]
        return True

    moves_cells = is_recurrent = False

    def checkpoint(self, _seq_id: int) -> bytes:
        return b""

    def save(self, seq_id: int) -> bytes:
        return json.dumps([cell.token for cell in self._held[seq_id]]).encode()

    def restore(self, seq_id: int, state: bytes | bytearray, num_tokens: int) -> bool:
        self.cut(seq_id, 0)
        self._held[seq_id] = [_Cell(token) for token in json.loads(state)]
        self._num_used += self.num_tokens(seq_id)
        return len(self._held[seq_id]) == num_tokens

    def prepare(self) -> None:
        """Do nothing: other processes do not affect the echo."""

    def cancel(self) -> None:
        """Do nothing: no step takes long."""

    def resume(self) -> None:
        """Do nothing: `cancel` has no effect."""

    def close(self) -> None:
        self._held = []


def _reply(prompt_ids: Sequence[int], max_tokens: int) -> str:
    """Repeat the last question of the last user message, with the first source tag in the prompt.

    If the prompt says "Say it N times", repeat the question N times, each on its own line with the next tag, or until there are more than
    `max_tokens` tokens.
    """
    end = max((i for i, token in enumerate(prompt_ids) if token == _END), default=len(prompt_ids))
    start = max((i for i in range(end) if prompt_ids[i] == _START), default=-1) + 1
    message = bytes(token for token in prompt_ids[start:end] if token < 256).decode("utf-8", "replace").removeprefix("user\n")
    tags = [f" [{label}]" for label in dict.fromkeys(match[0] for match in TAG.finditer(message))] or [""]
    _, separator, rest = message.rpartition("\nQuestion: ")
    request = (rest if separator else message).strip()
    question = request.partition("\n")[0][:400]
    times = _TIMES.search(request)
    most = min(int(times[1]), 1 + max_tokens // len(f"2 times: {question}")) if times else 1
    more = (f"{number} times{tags[(number - 1) % len(tags)]}: {question}" for number in range(2, most + 1))
    return "\n".join((f"You asked: {question}{tags[0]}", *more))


def _quoting(answer: str, sampling: SamplingParams) -> tuple[str, tuple[int, tuple[int, ...]]] | None:
    """Make the first tag of an answer that of a quote that fits. Also return the number of tokens after that tag, and those of the quote.

    None if no quote fits, or if the answer has no tag.
    """
    tag = TAG.search(answer)
    if tag is None:
        return None
    for label, token_ids in sampling.quotes:
        before, after = f"{answer[: tag.start()]}{label}]", answer[tag.end() + 1 :]
        if label.rpartition(".")[0] == tag[0] and len(before.encode()) + len(token_ids) <= sampling.num_answer_tokens:
            return before + after, (len(after.encode()) + 1, token_ids)
    return None


def _as_json(schema: str, text: str) -> str:
    """Write JSON that matches a schema: the first allowed names and values, one item per list, and `text` in every free string."""
    matcher, spoken = byte_vocabulary().matcher(grammar_of(schema)), json.dumps(text, ensure_ascii=False)[1:-1].encode()
    names = b"".join(b"".join(groups) for groups in _NAMED.findall(schema.encode()))
    output, nested, last, start = bytearray(), [""], "", 0
    rest: bytes | None = None  # remainder of the current string; None outside strings
    is_escaped = False
    while not (may := matcher.allowed())[_END] and len(output) < _MAX_JSON_BYTES:
        if rest is not None:
            is_free = may[ord("a")] and may[ord("Z")] and may[ord(" ")]
            if is_free and nested[-1] == "{" and rest == _KEY:
                nested[-1] = _MAP
            preferred = rest[:1] + b'".' if is_free or is_escaped else _first_named(names, bytes(output[start:]), may) + b'"'
        elif last in ("", "{", "[", ",", ":"):
            preferred = b'"{[0123456789-tfn]}' if len(nested) < _MAX_NESTING else b']}"0123456789-tfn{['
        else:
            preferred = b",}]" if nested[-1] == "{" else b"]},"
        byte = next((each for each in preferred if may[each]), int(may.argmax()))
        char = chr(byte)
        if rest is not None:
            ends = char == '"' and not is_escaped
            is_escaped = char == "\\" and not is_escaped
            rest = None if ends else rest[1:] if rest[:1] == bytes([byte]) else b""
        elif char == '"':
            rest = _KEY if nested[-1] in ("{", _MAP) and last in ("{", ",") else spoken
            start = len(output)
        elif char in "{[":
            nested.append(char)
        elif char in "}]":
            nested.pop()
        last = last if char == " " else char
        matcher.accept(byte)
        output.append(byte)
    return output.decode()


def _first_named(names: bytes, prefix: bytes, may: Collection[bool]) -> bytes:
    """Byte that continues a partial text towards the first matching name in `names`; empty if no name matches."""
    places = {each: names.find(prefix + bytes([each])) for each, is_allowed in enumerate(may) if is_allowed and each < _START}
    return bytes(sorted((each for each, place in places.items() if place >= 0), key=places.__getitem__)[:1])


def _thought(prompt_ids: Sequence[int], form: ThinkingForm, answer: str) -> str:
    """The reasoning before an answer, with the marks that the prompt leaves to the model."""
    start = max((i for i, token in enumerate(prompt_ids) if token == _START), default=-1) + 1
    tail = bytes(token for token in prompt_ids[start:] if token < _START).decode("utf-8", "replace")
    if not form.closes or form.has_ended(tail):
        return ""
    return f"{'' if form.is_open(tail) else form.opens}\nI shall say this. {answer}{form.end}"


class EchoBackend:
    """Runs the echo, which needs no model. Its tokens are bytes, so its counts are exact unless estimates are requested."""

    can_generate = True
    memory_plan = None

    def __init__(self, n_ctx_train: int, template: ChatTemplate, *, counts_are_exact: bool, speedup: float) -> None:
        self.name = "echo"
        self.sha256: str | None = None
        self.load_s = 0.0
        self.template: ChatTemplate = template
        self.tokenizer = EchoTokenizer()
        self.counts_are_exact = counts_are_exact
        self.speed = Speed.fixed(prefill_tokens_per_s=PREFILL_TOKENS_PER_S * speedup, decode_tokens_per_s=DECODE_TOKENS_PER_S * speedup)
        self.info = ModelInfo(
            path=Path("echo"),
            file_size=0,
            gguf_version=3,
            architecture="echo",
            name="echo",
            n_ctx_train=n_ctx_train,
            num_layers=0,
            num_heads=0,
            num_kv_heads=(),
            embedding_length=0,
            head_size_k=0,
            head_size_v=0,
            rope_scaling=None,
            rope_freq_base=None,
            sliding_window=None,
            vocab_size=258,
            tokenizer_model="bytes",
            tokenizer_pre=None,
            chat_template=None,
            num_tensors=1,
            quantization=None,
        )

    def save_speed(self) -> None:
        """Do nothing: the speed is fixed."""

    def make_slot(self, n_ctx: int | None, /) -> Slot:
        limit = self.info.n_ctx_train
        if n_ctx is not None and n_ctx <= limit:
            return Slot(0, n_ctx, limit, n_ctx, "requested")
        return Slot(0, limit, limit, n_ctx, "training")

    def make_runner(self, num_cells: int, num_sequences: int, /, *, repeatable: bool = False) -> EchoRunner:
        return EchoRunner(
            num_cells, num_sequences, repeatable=repeatable, uncounted_space=not self.counts_are_exact, thinking=self.template.thinking
        )

    def close(self) -> None:
        """Do nothing: no resources are open."""


def open_echo(
    n_ctx_train: int = N_CTX_TRAIN, *, counts_are_exact: bool = True, template: ChatTemplate | None = None, speedup: float = 1.0
) -> Engine:
    """Open an engine whose model repeats the question, with a training context of `n_ctx_train` tokens. Its counts can be made estimates.

    With a ChatML `template` of a reasoning model, it reasons before it answers.
    """

    return Engine(EchoBackend(n_ctx_train, template or EchoTemplate(), counts_are_exact=counts_are_exact, speedup=speedup))
