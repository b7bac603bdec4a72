"""Plain data that all layers exchange: messages, chunks and hits, models and slots, sampling parameters and completions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from localrag.errors import UsageError

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an answer. Name, arguments and id are untrusted, like any content.

    `arguments` is the JSON text of an object; a mapping is stored as such text. Text that is not a JSON object, such as a call that was cut
    off, is kept as it is. `id` is what the call's result refers to; without one, results belong to calls in order. Raises UsageError for
    a mapping that is not JSON.
    """

    name: str
    arguments: str | Mapping[str, Any] = "{}"
    id: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str):
            return
        try:
            text = json.dumps(dict(self.arguments), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"The arguments of the call of {self.name[:80]!r} are not JSON: {str(error)[:200]}.") from None
        object.__setattr__(self, "arguments", text)

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments, {} if their text is empty, or None if it is not a JSON object."""
        try:
            value = json.loads(str(self.arguments).strip() or "{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @property
    def text(self) -> str:
        """The call as one line of JSON: how it is written where a model has no form of its own for calls."""
        parsed = self.parsed
        arguments = self.arguments if parsed is None else parsed
        return json.dumps({"name": self.name, "arguments": arguments}, ensure_ascii=False, separators=(",", ":"))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `content` is plain text: nothing in it is read as markup.

    `tool_calls` are the calls that an assistant message makes, after its content. A tool message is the result of the call with the id
    `tool_call_id`.
    """

    role: Role
    content: str
    sent: str = ""
    """The text that was sent for this message, if it was more than its content: it came with sources. It is sent again in the same form."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def text(self) -> str:
        """The content, and the calls as one line of JSON each."""
        return "\n".join([*([self.content] if self.content or not self.tool_calls else []), *(call.text for call in self.tool_calls)])


_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call. `parameters` is a JSON Schema of its arguments. Raises UsageError for an invalid name."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _TOOL_NAME.fullmatch(self.name):
            raise UsageError(f"A tool's name is 1 to 64 letters, digits, '-' and '_', not {self.name[:80]!r}.", hint="Rename the tool.")

    def to_dict(self) -> dict[str, Any]:
        """Return the tool in the format of OpenAI's API and of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A fact kept across conversations. `importance` is 0 to 1; `label` is its name in ledgers."""

    label: str
    text: str
    importance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file that came with the question. `label` is its path as given; `relevance` to the task is 0 to 1."""

    label: str
    text: str
    relevance: float = 1.0
    modified: float | None = None
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The proposal of a council member. `label` is its name in the prompt and in ledgers."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of one document: `text` is its characters `start` to `end` (code points, end exclusive).

    `id` is unique within `kb` and never reused. `heading` is the path of headings above it, joined by " > ". `scope` becomes
    part of the label if one prompt mixes ids of several knowledge bases, or of piped text. `place` tells people where it is in
    the file, such as "page 3" or "lines 10-24"; empty if unknown.
    """

    id: int
    document_id: int
    ordinal: int
    text: str
    start: int
    end: int
    source: str
    heading: str = ""
    kb: str = ""
    scope: str = ""
    place: str = ""

    @property
    def label(self) -> str:
        """The name of this chunk in citations and ledgers, such as `KB#12` or `KB#pets/12`."""
        return f"KB#{self.scope}/{self.id}" if self.scope else f"KB#{self.id}"


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk returned by a search. `score` is the sum of `contributions`; higher is better.

    `relevance` says how close the chunk is to the question, 0 to 1, independent of other hits; None if unknown. `scores` are
    the scores of the rankings that include it, each on its own scale: "semantic" is the cosine similarity, "keyword" is BM25.
    `copies` are other chunks with the same text (see `merged`): this one represents them in a prompt. `spans` are the parts of the
    chunk's text to send, in order, as (start, end) in it; empty for all of it.
    """

    chunk: Chunk
    score: float
    contributions: Mapping[str, float] = field(default_factory=dict)
    relevance: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    copies: tuple[Chunk, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def label(self) -> str:
        return self.chunk.label


def comparable(text: str) -> str:
    """Normalise a text for comparison: fold case, and reduce white space to single spaces. Identical results mean identical texts."""
    return " ".join(text.split()).casefold()


def merged(hits: Iterable[Hit], *, kept: Collection[str] = ()) -> list[Hit]:
    """Return each text once, in the order of the hits. The first hit of a text represents the others, which become its `copies`.

    Hits whose labels are in `kept` are never merged into another hit, and represent the others first. Texts are equal if they
    are equal after `comparable`; a single different word keeps them apart.
    """
    hits = list(hits)
    keys = [comparable(hit.chunk.text) for hit in hits]
    heads: dict[str, str] = {}
    for hit, key in zip(hits, keys, strict=True):
        if hit.label in kept:
            heads.setdefault(key, hit.label)
    results: dict[tuple[str, str], Hit] = {}
    copies: dict[str, dict[str, Chunk]] = {}
    for hit, key in zip(hits, keys, strict=True):
        if heads.setdefault(key, hit.label) == hit.label or hit.label in kept:
            results.setdefault((key, hit.label), hit)
        copies.setdefault(key, {}).update({chunk.label: chunk for chunk in (hit.chunk, *hit.copies)})
    return [
        replace(hit, copies=tuple(chunk for name, chunk in copies[key].items() if heads[key] == label and (key, name) not in results))
        if len(copies[key]) > 1 or hit.copies
        else hit
        for (key, label), hit in results.items()
    ]


def expanded(hits: Iterable[Hit]) -> list[Hit]:
    """Undo `merged`: return each hit followed by its copies as separate hits."""
    return [replace(hit, chunk=chunk, copies=()) for hit in hits for chunk in (hit.chunk, *hit.copies)]


@dataclass(frozen=True, slots=True)
class Citation:
    """One source that an answer cites. `supplied` tells whether that chunk was in the prompt.

    `spans` are the places in the answer that cite it, as (start, end) in code points, end exclusive; empty if unknown.
    """

    label: str
    supplied: bool
    spans: tuple[tuple[int, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """A sentence that the engine copied into an answer: number `sentence`, from 1, of the passage `label`.

    `span` is its place in the answer, without the quotation marks; `start` and `end` are its place in the document `source`. All are in
    code points, ends exclusive. Both texts are the same.
    """

    label: str
    sentence: int
    source: str
    start: int
    end: int
    span: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return an entry of `quotes` in `--json` output."""
        place = {"source": self.source, "start": self.start, "end": self.end}
        return {"id": self.label, "sentence": self.sentence, **place, "span": list(self.span)}


SourceKind = Literal["wheel", "repo", "path"]
Bound = Literal["requested", "training", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model table of models.toml: where to get the file, and how to load it.

    `kind` is the type of the source and `source` its value: a pinned requirement, a hub repository or a path. `file` is the
    file inside it (empty for a path). `sha256` is of the GGUF file, or of an embedder folder's model.safetensors. `n_ctx` is
    the requested context in tokens; `revision` is a branch, tag or commit of a hub repository. An embedder reads each question after
    `query_prefix` and each passage after `passage_prefix`. `card` describes the file before it is here.
    """

    name: str
    kind: SourceKind
    source: str
    file: str = ""
    revision: str | None = None
    sha256: str | None = None
    n_ctx: int | None = None
    chat_template: Path | None = None
    query_prefix: str = ""
    passage_prefix: str = ""
    card: ModelCard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a model's card says of a file, for choosing it before it is here. Its header replaces these numbers later.

    Sizes are in bytes, `kv_bytes` per token of an f16 KV cache. One token is multiplied with `active` of the `weights`, fewer than all in
    a mixture of experts. `unverified` names the fields that no stored card or file list confirmed.
    """

    size_bytes: int
    license: str
    n_ctx_train: int
    weights: int
    active: int
    kv_bytes: int
    unverified: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Contents of a GGUF header, checked before any weights are read.

    Lengths are in tokens, sizes in bytes; `head_size_k` and `head_size_v` are elements per head, of the layer where they are
    largest. `num_kv_heads` has one entry per layer, 0 for a layer without keys and values. `layer_kv` has the numbers of elements
    of a token's keys and of its values, for each layer that stores any. `state_bytes` is the size of the state that recurrent
    layers keep for a sequence of any length. `sliding_window` is None if the file has none. `name` is safe to print on a terminal.
    Missing values are None, or 0 for the shape of a vocabulary-only file; invalid values raise ModelFileError.
    """

    path: Path
    file_size: int
    gguf_version: int
    architecture: str
    name: str | None
    n_ctx_train: int
    num_layers: int
    num_heads: int
    num_kv_heads: tuple[int, ...]
    embedding_length: int
    head_size_k: int
    head_size_v: int
    rope_scaling: str | None
    rope_freq_base: float | None
    sliding_window: int | None
    vocab_size: int
    tokenizer_model: str
    tokenizer_pre: str | None
    chat_template: str | None
    num_tensors: int
    quantization: str | None
    layer_kv: tuple[tuple[int, int], ...] = ()
    state_bytes: int = 0

    @property
    def is_vocab_only(self) -> bool:
        """Whether the file holds a tokenizer but no weights."""
        return self.num_tensors == 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token in an f16 KV cache for flash attention. Layers with a sliding window keep all tokens too."""
        return 2 * sum(keys + values for keys, values in self.layer_kv)

    @property
    def plain_kv_bytes_per_token(self) -> int:
        """The same for plain attention, for which llama.cpp stores the values of every layer like those of the largest one."""
        most = max((values for _, values in self.layer_kv), default=0)
        return 2 * sum(keys + most for keys, _ in self.layer_kv)

    @property
    def prefix_reuse(self) -> str:
        """Where a prompt can resume that begins like an earlier one, and why only there."""
        if self.state_bytes:
            return "at cache breakpoints, where checkpoints are kept (recurrent layers have one state, which cannot be truncated)"
        if self.sliding_window:
            return "at any token in memory; a prefix on disk only at its end (a stored state holds no more than the sliding window)"
        return "at any token"

    def to_dict(self) -> dict[str, object]:
        own = {name: value for name, value in asdict(self).items() if name != "layer_kv"}
        return {**own, "path": str(self.path), "kv_bytes_per_token": self.kv_bytes_per_token, "prefix_reuse": self.prefix_reuse}


@dataclass(frozen=True, slots=True)
class Slot:
    """A sequence's share of the KV cache: `n_ctx` tokens, and the limit that determined it."""

    id: int
    n_ctx: int
    n_ctx_train: int
    requested: int | None
    bound: Bound

    def to_dict(self) -> dict[str, object]:
        return {"n_ctx": self.n_ctx, "n_ctx_train": self.n_ctx_train, "requested": self.requested, "bound": self.bound}


FinishReason = Literal["stop", "length", "time", "cancelled", "error"]
"""The model ended the answer; `max_tokens` was reached; the deadline passed; the user cancelled; an error occurred."""

MIN_THINK_TOKENS = 32
"""Fewest tokens for a reasoning model's thoughts, including the tokens that end them."""
DEFAULT_THINK_TOKENS = 1024

MAX_LOGPROBS = 20
"""Most alternatives per token, as in OpenAI's API."""
_MAX_SCHEMA_CHARS = 128 * 1024


def schema_text(schema: Mapping[str, Any] | str) -> str:
    """Return a JSON schema as compact JSON, with properties in order. A string is parsed and serialised again. Raises UsageError
    for invalid JSON.
    """
    try:
        if isinstance(schema, str) and len(schema) > _MAX_SCHEMA_CHARS:
            raise UsageError(f"The JSON schema has {len(schema)} characters; the limit is {_MAX_SCHEMA_CHARS}.")
        value = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:  # a cycle, a lone surrogate, a number of 5,000 digits, or not JSON
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:200]
        raise UsageError(f"The JSON schema cannot be used: {reason}.") from error
    if not isinstance(value, dict):
        raise UsageError("A JSON schema must be a JSON object.")
    if len(text) > _MAX_SCHEMA_CHARS:
        raise UsageError(f"The JSON schema has {len(text)} characters; the limit is {_MAX_SCHEMA_CHARS}.")
    return text


@dataclass(frozen=True, slots=True, eq=False)
class CallRules:
    """How an answer that may call tools is written: its grammar, the control tokens whose text is part of the answer, and a function that
    writes calls.

    One of `opener_ids` begins a call anywhere in a text; with none of them, only the first token does, with the text `opener`.
    """

    grammar: str
    shown_ids: frozenset[int]
    written: Callable[[Sequence[ToolCall]], str]
    opener: str = ""
    opener_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of llama.cpp's sampler chain. With `temperature` 0, decoding is greedy and only the penalties have an effect.

    `seed` seeds the sampler. With `repeatable`, the same prompt and seed give the same text, bit by bit, whatever else the
    machine and the engine do: such answers are computed one at a time, in a separate context. `max_tokens` limits the answer;
    None means the rest of the window, which a session computes. `think_tokens` limits the thoughts of a reasoning model before
    the answer (0 turns thinking off). `stop` are strings that end the answer; they are left out of it.

    `json_schema` forces the answer to be JSON that is valid under a schema (engine/grammar.py lists the supported keywords). It
    is given as a mapping or as JSON text, and stored as text. An answer that reaches `max_tokens` before the JSON is closed is
    not valid. With `or_text`, the answer may also be any text that does not begin like such JSON. With `citations`, the
    answer names at least one of these labels (or `[none]`), and can name no other source; with `cites_first`, it begins with
    one. `quotes` are pairs of a further label and tokens: once the answer names that label, the engine appends these tokens.
    `call_rules` replaces the grammar of `json_schema`, if that is the schema of a tool call, by the model's own form of calls.
    `logprobs` returns the log probability of each token of the answer and that many alternatives; it turns thinking off.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    repeatable: bool = field(default=False, repr=False)  # not part of a council's digest, which is older than this field
    max_tokens: int | None = 512
    think_tokens: int = DEFAULT_THINK_TOKENS
    stop: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | str | None = None
    or_text: bool = False
    citations: tuple[str, ...] = field(default=(), repr=False)
    cites_first: bool = field(default=False, repr=False)
    quotes: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), repr=False)
    logprobs: int | None = None
    call_rules: CallRules | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_k", 0 <= self.top_k <= 1_000_000, "0 to 1000000"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, up to 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("repeat_penalty", 0.0 < self.repeat_penalty <= 100.0, "above 0, up to 100"),
            ("repeat_last_n", 0 <= self.repeat_last_n <= 1_000_000, "0 to 1000000"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"),
            ("seed", 0 <= self.seed < 2**32, "0 to 4294967295"),
            ("max_tokens", self.max_tokens is None or 1 <= self.max_tokens < 2**31, "1 to 2147483647"),
            (
                "think_tokens",
                self.think_tokens == 0 or MIN_THINK_TOKENS <= self.think_tokens < 2**31,
                f"0, or {MIN_THINK_TOKENS} to 2147483647",
            ),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            ("stop", len(self.stop) <= 64 and all(0 < len(s) <= 1024 for s in self.stop), "up to 64 strings of 1 to 1024 characters"),
        )
        for name, ok, allowed in checks:
            if not ok:  # also for NaN, which fails every comparison
                raise UsageError(f"{name} is {getattr(self, name)!r}, but must be {allowed}.")

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        return replace(self, max_tokens=max_tokens)

    @property
    def num_answer_tokens(self) -> int:
        """`max_tokens` as a number. Raises UsageError if it is None and no session has replaced it by the rest of the window."""
        if self.max_tokens is None:
            raise UsageError("max_tokens is None, and the room left for the answer is unknown.", hint="Give a number of tokens.")
        return self.max_tokens

    @property
    def room_to_think(self) -> int:
        """Tokens for thoughts: 0 for an answer with a schema or with logprobs, which must start at the first token."""
        return 0 if self.json_schema is not None or self.logprobs is not None else self.think_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer: its bytes, its log probability, and the most likely alternatives with theirs.

    The probabilities are the model's own, before temperature, penalties, grammar and other samplers.
    """

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """The output of one engine step for one sequence. `text` and `thought` hold whole characters only and can be empty; `thought`
    comes before the answer and is not part of it.
    """

    seq_id: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    thought: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Wall-clock seconds. `first_token_s` counts from the call to the first sampled token.

    `load_s` is the time to load the model and create its context, in the first answer that waited for it.
    """

    load_s: float = 0.0
    retrieve_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0

    def tokens_per_s(self, num_tokens: int) -> float | None:
        """Return the decoding speed for `num_tokens` tokens; None for fewer than two, since the first one belongs to the prefill."""
        return (num_tokens - 1) / self.decode_s if num_tokens > 1 and self.decode_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished sequence.

    `prompt_tokens` is the length of the prompt, of which `cached_tokens` were not evaluated again. `completion_ids` are the
    generated tokens, including the one that ended the answer; `reasoning_tokens` of them are thoughts, whose text is
    `reasoning`, and `copied_tokens` of them were copied, not written: they are the text at the spans `copied`.
    """

    text: str
    completion_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    timings: Timings = Timings()
    reasoning: str = ""
    reasoning_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    copied: tuple[tuple[int, int], ...] = ()
    copied_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        return len(self.completion_ids)
