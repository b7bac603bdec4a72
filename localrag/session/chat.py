"""A conversation that is kept: each turn is on disk as soon as it was asked, and evaluates only what is new in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Self, Unpack

from localrag.conversation import search_query
from localrag.decoding import SamplingParams
from localrag.errors import LocalragError, UsageError
from localrag.messages import Message
from localrag.passages import Chunk, Hit
from localrag.prompt.offer import AGAIN
from localrag.session import finding
from localrag.session.answers import Answer, Prepared

if TYPE_CHECKING:
    from localrag.budget import Ledger
    from localrag.journal import Ending, Journal, StoredTurn, TurnState
    from localrag.session.walk import Options, Session

WRITE_EVERY_S = 0.5
"""An answer is put on disk so often while it is written: what is killed loses no more than that."""
CARRIED_SHARE = 0.5
"""Sources of earlier turns stay in the prompt where they were given until they take this share of the window."""
MIN_SEQUENCES = 2
"""See Engine.min_sequences."""
MAX_AGAIN = 4
"""Of the passages that stand in the prompt already, so many are named as those that the question is about."""
_POINTER = AGAIN.partition("{")[0]
_SOURCES = ("attachments", "cited", "evidence", "pointers")


@dataclass(slots=True, kw_only=True)
class Turn:
    """A question with its answer. `sent` is the whole message that the model was sent for it, if sources came with it: `hits`."""

    id: int
    question: str
    answer: str = ""
    state: TurnState = "running"
    about: Mapping[str, Any] = field(default_factory=dict)
    is_pinned: bool = False
    began_at: float = 0.0
    sent: str = ""
    hits: tuple[Hit, ...] = ()

    @property
    def points(self) -> bool:
        """Whether the message names passages that stand above it."""
        return _POINTER in self.sent

    @property
    def is_told(self) -> bool:
        """Whether there is an answer, if only its beginning."""
        return bool(self.answer.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What the model will see less of: turns, by their numbers from 1, of which it is sent a summary, and those of which it is sent
    nothing."""

    summarised: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.summarised or self.left_out)

    def beyond(self, before: Forgotten) -> Forgotten:
        """What was not so before."""
        return Forgotten(
            summarised=tuple(each for each in self.summarised if each not in before.summarised),
            left_out=tuple(each for each in self.left_out if each not in before.left_out),
        )


class Chat:
    """A conversation of the journal over an open session.

    The prompt of a turn begins with all that the one before it held and said: passages stay in the message with which they were
    given, and a passage is given once. Used by one thread; `session.engine.cancel_all` may come from another.
    """

    def __init__(self, session: Session, journal: Journal, conversation_id: int, *, system: str = "") -> None:
        self.session = session
        self.id = conversation_id
        self.system = system
        self._journal = journal
        self._kept = journal.conversations
        self.warnings: list[str] = []
        self._last_ids: list[int] = []
        self.turns = [restored(stored) for stored in self._kept.turns(conversation_id)]
        session.engine.min_sequences = MIN_SEQUENCES

    @classmethod
    def of(cls, session: Session, name: str, *, system: str = "") -> Self:
        """The conversation of that name in the session's journal, begun if it is not there. UsageError for a session that keeps none."""
        if session.journal is None:
            raise UsageError("A conversation is kept in the journal, and this session has none.", hint="Open the session with keep=True.")
        kept = session.journal.conversations
        row = kept.named(name)
        return cls(session, session.journal, kept.create(name, {}) if row is None else row.id, system=system)

    # --- asking ---

    def say(
        self,
        question: str,
        *,
        sampling: SamplingParams,
        on_text: Callable[[str], None] = lambda _: None,
        on_prepared: Callable[[Prepared], None] = lambda _: None,
        **options: Unpack[Options],
    ) -> Answer:
        """Ask, and keep the turn. An answer that is stopped is kept as far as it was written; one that fails leaves its question.

        `on_prepared` is told what is about to be sent. Errors as those of Session.ask.
        """
        prepared = self.prepare(question, max_tokens=sampling.max_tokens, **options)
        on_prepared(prepared)
        about = {"model": self.session.engine.name, "seed": sampling.seed, "temperature": sampling.temperature}
        turn = Turn(id=self._kept.begin_turn(self.id, question, about), question=question, began_at=time.time())
        self.turns.append(turn)
        writer = _Writer(lambda text: self._kept.write(turn.id, text), on_text)
        try:
            messages = self._messages(question, self.turns[:-1])
            answer = self.session.answer(prepared, messages, sampling=sampling, on_text=writer, **options)
        except BaseException:
            self._end(turn, "stopped" if writer.text.strip() else "failed", writer.text, about)
            raise
        self._last_ids = list(prepared.prompt.token_ids)
        turn.sent, turn.hits = _sent(prepared), answer.hits
        self._end(turn, "stopped" if answer.finish_reason in ("cancelled", "time") else "done", answer.text, about | _about(turn, answer))
        return answer

    def prepare(self, question: str, *, max_tokens: int, write: bool = False, **options: Unpack[Options]) -> Prepared:
        """The prompt of the next turn. Passages that stand in it already are not given again, but named."""
        query = search_query(self._messages(question, self.turns))
        before = next((turn.question for turn in reversed(self.turns) if turn.is_told), "")
        hits = finding.offered(self.session, query, options, before=before)
        self._let_go_of_strangers(hits)
        while True:
            above = {hit.label for turn in self.turns if turn.sent for hit in turn.hits}
            messages, asked = self._asked(question, options)
            asked["hits"] = [hit for hit in hits if hit.label not in above]
            asked["again"] = [hit.label for hit in hits if hit.label in above][:MAX_AGAIN]
            prepared = self.session.prepare(messages, max_tokens=max_tokens, write=write, **asked)
            kept = {hit.label for hit in prepared.prompt.earlier}
            if above <= kept and not self._carries_too_much():
                return prepared
            self._let_go(kept)

    def _messages(self, question: str, turns: Sequence[Turn]) -> list[Message]:
        messages = [Message("system", self.system)] if self.system.strip() else []
        for turn in turns:
            messages.append(Message("user", turn.question, sent=turn.sent))
            if turn.is_told:
                messages.append(Message("assistant", turn.answer))
        return [*messages, Message("user", question)]

    def _asked(self, question: str, options: Options) -> tuple[list[Message], Options]:
        """The conversation with a question, and the options, with what is pinned and given in its messages, and no hits."""
        numbers = dict(zip((turn.id for turn in self.turns), self._question_numbers(), strict=True))
        asked = options.copy()
        asked["hits"] = ()
        asked["pinned"] = [numbers[turn.id] for turn in self.turns if turn.is_pinned]
        asked["earlier"] = {numbers[turn.id]: turn.hits for turn in self.turns if turn.sent}
        return self._messages(question, self.turns), asked

    def _question_numbers(self) -> list[int]:
        """The number of each turn's question among the messages."""
        lengths = (1 + turn.is_told for turn in self.turns)
        first = 1 + bool(self.system.strip())
        return list(accumulate(lengths, initial=first))[: len(self.turns)]

    def _carries_too_much(self) -> bool:
        tokens = sum(self.session.engine.counter(turn.sent) for turn in self.turns if turn.sent)
        return tokens > CARRIED_SHARE * self.session.slot.n_ctx

    def _let_go(self, kept: set[str]) -> None:
        """Sources of turns that are too far back leave the prompt; all but the last turn's go at once, as each time costs an evaluation."""
        carrying = [turn for turn in self.turns if turn.sent]
        last = carrying[-1]
        is_last_kept = len(carrying) > 1 and not last.points and all(hit.label in kept for hit in last.hits)
        for turn in carrying[: -1 if is_last_kept else None]:
            turn.sent = ""

    def _let_go_of_strangers(self, hits: Iterable[Hit]) -> None:
        """Sources whose tags mean something else now leave the prompt: of knowledge bases that are not asked any more, or made anew."""
        names = {kb.name for kb in self.session.knowledge_bases}
        texts = {hit.label: hit.chunk.text for hit in hits}
        for turn in self.turns:
            for hit in turn.hits:
                chunk = hit.chunk
                is_asked = not chunk.kb or not names or (chunk.kb in names and chunk.scope == (chunk.kb if len(names) > 1 else ""))
                if not is_asked or texts.get(hit.label, chunk.text) != chunk.text:
                    turn.sent = ""

    def _end(self, turn: Turn, state: Ending, answer: str, about: Mapping[str, Any]) -> None:
        turn.answer, turn.state, turn.about = answer, state, about
        try:
            self._kept.end_turn(turn.id, state, answer, about)
        except LocalragError as error:  # a full disk costs no answer
            self.warnings.append(f"This turn is not kept: {error}")

    # --- between turns ---

    def forgets(self, *, max_tokens: int, write: bool = False, **options: Unpack[Options]) -> Forgotten:
        """What the model would not see in full of this conversation if something short were asked now.

        With `write` it writes the summaries that this takes, so that nobody waits for them later; `cancel_all` stops it.
        """
        if not self.turns:
            return Forgotten()
        messages, asked = self._asked("?", options)
        return self.forgotten(self.session.prepare(messages, max_tokens=max_tokens, write=write, **asked).prompt.ledger)

    def forgotten(self, ledger: Ledger) -> Forgotten:
        """Which turns the prompt of a ledger does not hold in full."""
        entries = {entry.name: entry for entry in ledger.entries}
        omitted = set(entries["history"].omitted) if "history" in entries else set()
        covered = set(entries["summary"].covered) if "summary" in entries else set()
        firsts = self._question_numbers()
        numbers = {f"message {first + each}": turn for turn, first in enumerate(firsts, 1) for each in (0, 1)}
        return Forgotten(summarised=_numbers(numbers, covered), left_out=_numbers(numbers, omitted - covered))

    # --- what was said ---

    def turn(self, number: int) -> Turn:
        """The turn of that number, from 1; negative ones count from the last. UsageError if there is none."""
        at = number - 1 if number > 0 else number
        if not number or not -len(self.turns) <= at < len(self.turns):
            raise UsageError(f"There is no turn {number}: the conversation has {len(self.turns)}.", hint="Turns count from 1.")
        return self.turns[at]

    def undo(self, num: int = 1) -> list[Turn]:
        """Take the last turns back, and return them. UsageError if there are fewer."""
        if not 0 < num <= len(self.turns):
            raise UsageError(f"There are {len(self.turns)} turns to take back, not {num}.", hint="Take back fewer.")
        taken = self.turns[-num:]
        self._kept.undo([turn.id for turn in taken])
        del self.turns[-num:]
        return taken

    def pin(self, number: int, *, is_pinned: bool = True) -> Turn:
        """Have a turn never be summarised nor left out. Its sources are sent as long as those of others are."""
        turn = self.turn(number)
        self._kept.pin(turn.id, is_pinned=is_pinned)
        turn.is_pinned = is_pinned
        return turn

    def fork(self, number: int, name: str) -> int:
        """A new conversation that begins with the turns up to this one; its id. UsageError for a name that is taken."""
        return self._kept.fork(self.id, self.turn(number).id, name)

    # --- across processes ---

    def recall(self, *, max_tokens: int, **options: Unpack[Options]) -> None:
        """Have the engine hold what it evaluated of this conversation in an earlier process, if that was kept."""
        engine = self.session.engine
        if not self.turns or engine.keeper is None or not engine.can_generate:
            return
        messages, asked = self._asked("?", options)
        found = self.session.prepare(messages, max_tokens=max_tokens, **asked)
        engine.reserve(found.prompt.num_cells)
        if engine.context is not None and engine.context.shared is not None:
            engine.keeper.recall_shared(engine.context.shared, list(found.prompt.token_ids))

    def remember(self) -> None:
        """Keep what the engine evaluated, for `recall`. Nothing may run."""
        engine = self.session.engine
        shared = None if engine.context is None else engine.context.shared
        if self._last_ids and engine.keeper is not None and shared is not None and engine.is_idle:
            prefill_s = engine.speed.prefill_s(len(self._last_ids), 0)
            engine.keeper.remember_shared(shared, self._last_ids, prefill_s=prefill_s)


class _Writer:
    """Puts an answer on disk every now and then, and hands each piece on."""

    def __init__(self, write: Callable[[str], None], on_text: Callable[[str], None]) -> None:
        self._write = write
        self._on_text = on_text
        self._written_at = 0.0
        self.text = ""

    def __call__(self, piece: str) -> None:
        self.text += piece
        now = time.perf_counter()
        if now - self._written_at >= WRITE_EVERY_S:
            self._written_at = now
            with suppress(LocalragError):  # the end of the turn says it
                self._write(self.text)
        self._on_text(piece)


def _sent(prepared: Prepared) -> str:
    """The last message as it was sent, if sources came with it."""
    contents = [list(parts) for is_markup, parts in groupby(prepared.prompt.parts, key=lambda each: each.part.is_markup) if not is_markup]
    asked = next((parts for parts in reversed(contents) if any(each.part.section == "question" for each in parts)), [])
    has_sources = any(each.part.section in _SOURCES for each in asked)
    return "".join(each.part.text for each in asked) if has_sources else ""


def _about(turn: Turn, answer: Answer) -> dict[str, Any]:
    cited = {each.label for each in answer.citations if each.supplied}
    return {
        "finish_reason": answer.finish_reason,
        "sent": turn.sent,
        "hits": [asdict(hit.chunk) | {"score": hit.score} for hit in turn.hits],
        "citations": sorted(cited),
        "unsupported_citations": answer.unsupported_citations,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
    }


def restored(stored: StoredTurn) -> Turn:
    """A turn as it was kept. What cannot be read of its sources is left out: its question and answer stand."""
    try:
        hits = tuple(_hit(each) for each in stored.about.get("hits", ()))
        sent = str(stored.about.get("sent", ""))
    except (TypeError, ValueError, KeyError):
        hits, sent = (), ""
    return Turn(
        id=stored.id,
        question=stored.question,
        answer=stored.answer,
        state=stored.state,
        about=stored.about,
        is_pinned=stored.is_pinned,
        began_at=stored.began_at,
        sent=sent,
        hits=hits,
    )


def _hit(kept: Mapping[str, Any]) -> Hit:
    fields = dict(kept)
    score = float(fields.pop("score"))
    return Hit(Chunk(**fields), score)


def _numbers(numbers: Mapping[str, int], names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({numbers[name] for name in names if name in numbers}))
