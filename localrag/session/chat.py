"""A conversation that is kept: each turn is on disk as soon as it was asked, and evaluates only what is new in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

from localrag.conversation import search_query
from localrag.engine.policy import CHAT
from localrag.errors import BudgetExceededError, InterruptedRunError, LocalragError, UsageError, counted
from localrag.question import Question, Thread
from localrag.session import retrieval
from localrag.session.answer import Answer, Prepared, outcome
from localrag.session.history_window import Forgotten, Giving, HistoryWindow, Turn, let_go_of_strangers, restored, sent_message, to_keep
from localrag.session.memory import propose
from localrag.session.query_rewrite import QueryRewrite, QueryRewriter
from localrag.types import Hit, Message, comparable

if TYPE_CHECKING:
    from localrag.budget import Ledger
    from localrag.journal import Ending, Journal
    from localrag.session.session import Session

WRITE_EVERY_S = 0.5
"""An answer is put on disk so often while it is written: what is killed loses no more than that."""
MAX_AGAIN = 4
"""Of the passages that stand in the prompt already, so many are named as those that the question is about."""
WRITING_CELLS = 1536
"""A summary is written in so many cells of the KV cache beside the conversation's, if the window has them: more than it can need."""


class Chat:
    """A conversation of the journal over an open session.

    The prompt of a turn begins with all that the one before it held and said: passages stay in the message with which they were
    given, and a passage is given once. Used by one thread; `session.engine.cancel_all` may come from another.
    """

    def __init__(self, session: Session, journal: Journal, conversation_id: int, *, system: str = "") -> None:
        self.session = session
        self.id = conversation_id
        self.system = system
        self._kept = journal.conversations
        self.warnings: list[str] = []
        self.rewrites = False
        """Whether the model rewrites short follow-ups before they are searched for."""
        self._last_ids: list[int] = []
        self._standing = HistoryWindow()
        """Of the prompt that was prepared last."""
        self.turns = [restored(stored) for stored in self._kept.turns(conversation_id)]
        session.policy = CHAT
        session.engine.share_contexts()

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
        question: Question | str,
        *,
        on_text: Callable[[str], None] = lambda _: None,
        on_thought: Callable[[str], None] = lambda _: None,
        on_prepared: Callable[[Prepared], None] = lambda _: None,
    ) -> Answer:
        """Ask, and keep the turn. An answer that is stopped is kept as far as it was written; one that fails leaves its question.

        The question is a single text. One that is stopped before its answer begins stays too, and is sent again with the next one; one
        that cannot be asked at all, because it does not fit, does not. `on_prepared` gets the prompt before it is evaluated. Errors are
        those of Session.ask.
        """
        question = question if isinstance(question, Question) else Question.of(question)
        text, sampling = question.messages[-1].content, question.sampling
        about: dict[str, Any] = {"model": self.session.engine.name, "seed": sampling.seed, "temperature": sampling.temperature}
        turn = Turn(id=self._kept.begin_turn(self.id, text, about), question=text, began_at=time.time())
        try:
            prepared = self.prepare(question)
            on_prepared(prepared)
        except BaseException as error:
            self._end_unasked(turn, error, about)
            raise
        if prepared.rewriting is not None:
            about["rewriting"] = prepared.rewriting.to_dict()
        self.turns.append(turn)
        writer = _Writer(lambda text: self._kept.write(turn.id, text), on_text)
        try:
            answer = self.session.answer(prepared, on_text=writer, on_thought=on_thought)
        except BaseException:
            self._end(turn, "stopped" if writer.text.strip() else "failed", writer.text, about)
            raise
        self._last_ids = list(prepared.prompt.token_ids)
        turn.sent, turn.hits = sent_message(prepared) if answer.text.strip() else "", answer.hits
        state: Ending = "stopped" if answer.finish_reason in ("cancelled", "time") else "done"
        self._end(turn, state, answer.text, about | to_keep(turn, answer) | {"standing": self._standing.to_keep()})
        return answer

    def prepare(self, question: Question | str) -> Prepared:
        """The prompt of the next turn. Passages that are in it already are not given again, but named."""
        question = question if isinstance(question, Question) else Question.of(question)
        said = self._messages(question)
        whole = replace(question, messages=said)
        before = next((turn.question for turn in reversed(self.turns) if turn.is_told), "")
        unsearched = self.session.unsearched(whole)
        rewriting = None if unsearched or question.given.hits is not None else self._rewriting(question, before)
        rewritten = "" if rewriting is None else rewriting.text
        offered = self.session.retriever.offered(
            question, search_query(said), before=before, rewritten=rewritten, searches=unsearched is None
        )
        hits = retrieval.distinct(offered)
        let_go_of_strangers(self.turns, hits, {kb.name for kb in self.session.knowledge_bases})
        try:
            prepared, self._standing = self._fitting(question, hits)
        except BudgetExceededError as error:
            raise self._with_way_out(error) from None
        sources = (*prepared.prompt.hits, *self._above(hits, self._standing))
        return replace(prepared, bypass=outcome(unsearched, hits, sources), rewriting=rewriting)

    def _fitting(self, question: Question, hits: Sequence[Hit]) -> tuple[Prepared, HistoryWindow]:
        """The prompt of a question with its evidence, and what had to give way."""
        giving, standing = self._giving(question), HistoryWindow.of(self.turns)
        while True:
            above = self._above(hits, standing)
            asked = self._asked(question, standing).but(
                hits=[hit for hit in hits if hit.label not in above],
                left_out=_left_out(hits, above),
                again=list(dict.fromkeys(above.values()))[:MAX_AGAIN],
            )
            prepared = self.session.prepare(asked)
            forgotten = self.forgotten(prepared.prompt.ledger)
            reached = max((*forgotten.summarised, *forgotten.left_out), default=0)
            next_standing = giving.after(standing, prepared.prompt, reached=reached)
            if next_standing == standing:
                return prepared, standing
            standing = next_standing

    def _giving(self, question: Question) -> Giving:
        session = self.session
        most = session.profile_of(question).max_messages
        return Giving(turns=self.turns, count=session.engine.counter, n_ctx=session.slot.n_ctx, max_messages=most)

    def _above(self, hits: Iterable[Hit], standing: HistoryWindow) -> dict[str, str]:
        """Labels of those hits whose text stands in earlier messages, each with the label that it has there."""
        labels: dict[str, str] = {}
        for at in standing.carrying(self.turns):
            for hit in self.turns[at].hits:
                labels.setdefault(comparable(hit.chunk.text), hit.label)
        texts = {hit.label: comparable(hit.chunk.text) for hit in hits}
        return {label: labels[text] for label, text in texts.items() if text in labels}

    def _rewriting(self, question: Question, before: str) -> QueryRewrite | None:
        """A follow-up as a question that can be understood alone, if rewriting is on."""
        said = self._messages(question)
        if not self.rewrites or not retrieval.is_follow_up(search_query(said), before):
            return None
        coming = self.session.prepare(self._asked(question, HistoryWindow.of(self.turns))).prompt.token_ids
        return QueryRewriter(self.session.engine, n_ctx=self.session.slot.n_ctx)(said, beside=coming)

    def _messages(self, question: Question, *, bare: int = 0) -> tuple[Message, ...]:
        """The conversation with a question, the first `bare` turns without their sources."""
        system = next((each for each in question.messages if each.role == "system"), None)
        messages = [Message("system", self.system)] if self.system.strip() else [] if system is None else [system]
        for at, turn in enumerate(self.turns):
            messages.append(Message("user", turn.question, sent=turn.sent if at >= bare else ""))
            if turn.is_told:
                messages.append(Message("assistant", turn.answer))
        return (*messages, question.messages[-1])

    def _asked(self, question: Question, standing: HistoryWindow) -> Question:
        """A question within its conversation, with what is pinned, summarised and given in earlier messages, and without hits."""
        numbers = self._question_numbers()
        thread = Thread(
            pinned=frozenset(numbers[at] for at, turn in enumerate(self.turns) if turn.is_pinned),
            settled=numbers[standing.settled] - 1,
            earlier={numbers[at]: self.turns[at].hits for at in standing.carrying(self.turns)},
        )
        return replace(question, messages=self._messages(question, bare=standing.bare), thread=thread).but(hits=())

    def _question_numbers(self) -> list[int]:
        """The number of each turn's question among the messages, and that of the next one's."""
        lengths = (1 + turn.is_told for turn in self.turns)
        return list(accumulate(lengths, initial=1 + bool(self.system.strip())))

    def _with_way_out(self, error: BudgetExceededError) -> BudgetExceededError:
        """The same; where an earlier question without an answer takes some of the room, with what to do about it."""
        if not self.turns or self.turns[-1].is_told:
            return error
        hint = "The question before it has no answer, so it is sent again with this one. Take it back first (/undo), or ask for less."
        return BudgetExceededError(error.numbers["window"], error.numbers["sections"], hint=hint)  # type: ignore[arg-type]  # as given

    def _end_unasked(self, turn: Turn, error: BaseException, about: Mapping[str, Any]) -> None:
        """Keep a question that a person stopped before its answer began; take back one that could not be asked."""
        if isinstance(error, InterruptedRunError) or not isinstance(error, Exception):
            self.turns.append(turn)
            self._end(turn, "stopped", "", about)
        else:
            with suppress(LocalragError):
                self._kept.undo([turn.id])

    def _end(self, turn: Turn, state: Ending, answer: str, about: Mapping[str, Any]) -> None:
        turn.answer, turn.state, turn.about = answer, state, about
        try:
            self._kept.end_turn(turn.id, state, answer, about)
        except LocalragError as error:  # a full disk costs no answer
            self.warnings.append(f"This turn is not kept: {error}")

    # --- between turns ---

    def forgets(self, question: Question | None = None, *, write: bool = False) -> Forgotten:
        """The turns that the model would not see in full if something short were asked now, and those that are summarised next.

        `question` gives the options. With `write` the model writes the summaries that this takes, so that nobody waits for them later;
        `cancel_all` stops it. If what cannot be cut leaves no room to ask anything, nothing is reported here: the next question is refused
        with the numbers.
        """
        if not self.turns:
            return Forgotten()
        asked = self._short(question)
        try:
            prepared, standing = self._fitting(asked, ())
        except BudgetExceededError:
            return Forgotten()
        planned = self._giving(asked).planned(standing)
        if write and self.session.engine.can_generate:
            self.session.engine.reserve(min(self.session.slot.n_ctx, prepared.prompt.num_cells + WRITING_CELLS))
            for settled in dict.fromkeys((standing.settled, planned)):
                self.session.prepare(self._asked(asked, replace(standing, settled=settled)), write=True)
        coming = tuple(at + 1 for at in range(standing.settled, planned) if not self.turns[at].is_pinned)
        return replace(self.forgotten(prepared.prompt.ledger), coming=coming)

    @staticmethod
    def _short(question: Question | None) -> Question:
        """The shortest question, with the options of another one."""
        short = Message("user", "?")
        return Question(messages=(short,)) if question is None else replace(question, messages=(short,))

    def forgotten(self, ledger: Ledger) -> Forgotten:
        """Which turns the prompt of a ledger does not hold in full."""
        entries = {entry.name: entry for entry in ledger.entries}
        omitted = set(entries["history"].omitted) if "history" in entries else set()
        covered = set(entries["summary"].covered) if "summary" in entries else set()
        numbers = {f"message {first + each}": turn for turn, first in enumerate(self._question_numbers(), 1) for each in (0, 1)}
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
            raise UsageError(f"{counted(len(self.turns), 'turn')} can be taken back, not {num}.", hint="Take back fewer.")
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

    def facts(self) -> list[str]:
        """What the model proposes to remember of what the person said last. None is kept: that is for the person to say."""
        messages = self._messages(self._short(None))[:-1]
        return propose(self.session.engine, messages, n_ctx=self.session.slot.n_ctx, beside=self._last_ids)

    # --- across processes ---

    def recall(self, question: Question | None = None) -> None:
        """Have the engine hold what an earlier process evaluated of this conversation, if that was kept and fits this window.

        `question` gives the options of the next one.
        """
        asked = self._short(question)
        if not self.turns or asked.sampling.repeatable:  # those resume from the disk cache by themselves
            return
        try:
            prepared = self.session.prepare(self._asked(asked, HistoryWindow.of(self.turns)))
        except BudgetExceededError:
            return
        self.session.engine.recall(list(prepared.prompt.token_ids), prepared.prompt.num_cells)

    def remember(self) -> None:
        """Keep what the engine evaluated, for `recall`. Nothing may run."""
        self.session.engine.remember(self._last_ids)


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


def _left_out(hits: Iterable[Hit], above: Mapping[str, str]) -> dict[str, str]:
    """What the ledger says of passages that were found and whose text stands in an earlier message under another label."""
    return {
        chunk.label: f"identical to {above[hit.label]}"
        for hit in hits
        if hit.label in above
        for chunk in (hit.chunk, *hit.copies)
        if chunk.label != above[hit.label]
    }


def _numbers(numbers: Mapping[str, int], names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({numbers[name] for name in names if name in numbers}))
