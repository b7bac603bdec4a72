"""A stored conversation. Each turn is on disk as soon as it is asked, and only its new part is evaluated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self

from localrag.conversation import search_query
from localrag.engine.jobs import CHAT
from localrag.errors import BudgetExceededError, InterruptedRunError, LocalragError, UsageError, counted
from localrag.question import Question, Thread
from localrag.session import retrieval
from localrag.session.answer import Answer, Prepared, outcome
from localrag.session.history_window import (
    Forgotten,
    HistoryFitter,
    HistoryWindow,
    Turn,
    drop_stale_sources,
    restored,
    sent_message,
    turn_record,
)
from localrag.session.memory import propose
from localrag.session.query_rewrite import QueryRewrite, QueryRewriter
from localrag.session.retrieval import Selection
from localrag.types import Hit, Message, comparable

if TYPE_CHECKING:
    from localrag.budget import Ledger
    from localrag.journal import Ending, Journal
    from localrag.session.session import Session

WRITE_EVERY_S = 0.5
"""Seconds between writes of an unfinished answer to disk. A killed process loses at most this much of its text."""
MAX_AGAIN = 4
"""Maximum number of passages already in the prompt that a question points to."""
WRITING_CELLS = 1536
"""KV cells reserved next to the conversation for writing a summary, if the window has them. More than a summary can need."""


class Chat:
    """A conversation from the journal, continued in an open session.

    Each prompt begins with the full prompt and answer of the turn before. A passage is sent once and stays in the message that brought it.
    Use a chat from one thread; only `session.engine.cancel_all` may be called from another.
    """

    def __init__(self, session: Session, journal: Journal, conversation_id: int, *, system: str = "") -> None:
        self.session = session
        self.id = conversation_id
        self.system = system
        self._kept = journal.conversations
        self.warnings: list[str] = []
        self.rewrites = False
        """Whether the model rewrites short follow-ups before the search."""
        self._last_ids: list[int] = []
        self._standing = HistoryWindow()
        """History window of the last prepared prompt."""
        self.turns = [restored(stored) for stored in self._kept.turns(conversation_id)]
        session.policy = CHAT
        session.engine.share_contexts()

    @classmethod
    def of(cls, session: Session, name: str, *, system: str = "") -> Self:
        """Open the conversation with this name in the session's journal, or create it. Raises UsageError if the session has no journal."""
        if session.journal is None:
            raise UsageError("A conversation needs a journal, and this session has none.", hint="Open the session with keep=True.")
        conversations = session.journal.conversations
        row = conversations.named(name)
        return cls(session, session.journal, conversations.create(name, {}) if row is None else row.id, system=system)

    # --- asking ---

    def say(
        self,
        question: Question | str,
        *,
        on_text: Callable[[str], None] = lambda _: None,
        on_thought: Callable[[str], None] = lambda _: None,
        on_prepared: Callable[[Prepared], None] = lambda _: None,
    ) -> Answer:
        """Ask a question and store the turn. If the answer is interrupted, its text so far is stored; if it fails, only the question is.

        The question is a single text. A question interrupted before its answer begins is stored as well, and is sent again with the next
        one. A question that does not fit is not stored. `on_prepared` receives the prompt before it is evaluated. Raises what Session.ask
        raises.
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
        if not answer.abstained:
            self._last_ids = list(prepared.prompt.token_ids)
            turn.sent, turn.hits = sent_message(prepared) if answer.text.strip() else "", answer.hits
        state: Ending = "stopped" if answer.finish_reason in ("cancelled", "time") else "done"
        self._end(turn, state, answer.text, about | turn_record(turn, answer) | {"standing": self._standing.to_keep()})
        return answer

    def prepare(self, question: Question | str) -> Prepared:
        """Prepare the prompt of the next turn. Passages already in the prompt are pointed to, not sent again."""
        question = question if isinstance(question, Question) else Question.of(question)
        messages = self._messages(question)
        whole = replace(question, messages=messages)
        before = [turn.question for turn in self.turns if turn.is_answered]
        unsearched = self.session.unsearched(whole)
        rewriting = None if unsearched or question.given.hits is not None else self._rewriting(question, before)
        rewritten = "" if rewriting is None else rewriting.text
        query, top_k = search_query(messages), self.session.rule_for(question).top_k
        candidates, answerability = self.session.retriever.assessed(
            question, query, top_k=top_k, before=before, rewritten=rewritten, searches=unsearched is None
        )
        drop_stale_sources(self.turns, candidates, {kb.name for kb in self.session.knowledge_bases})
        selection = self.session.chosen(question, rewritten or query, candidates)
        try:
            prepared, self._standing = self._fitting(question, selection)
        except BudgetExceededError as error:
            raise self._with_way_out(error) from None
        sources = (*prepared.prompt.hits, *self._above(selection.hits, self._standing))
        return replace(prepared, bypass=outcome(unsearched, candidates, sources), rewriting=rewriting, answerability=answerability)

    def _fitting(self, question: Question, selection: Selection) -> tuple[Prepared, HistoryWindow]:
        """Fit a question and its evidence into the window, and return the prompt with the history window that made it fit."""
        hits, fitter, standing = selection.hits, self._fitter(question), HistoryWindow.of(self.turns)
        while True:
            above = self._above(hits, standing)
            full_question = self._asked(question, standing).but(
                hits=[hit for hit in hits if hit.label not in above],
                left_out=selection.left_out | _left_out(hits, above),
                again=list(dict.fromkeys(above.values()))[:MAX_AGAIN],
            )
            prepared = self.session.prepare(full_question)
            forgotten = self.forgotten(prepared.prompt.ledger)
            reached = max((*forgotten.summarised, *forgotten.left_out), default=0)
            next_standing = fitter.after(standing, prepared.prompt, reached=reached)
            if next_standing == standing:
                return prepared, standing
            standing = next_standing

    def _fitter(self, question: Question) -> HistoryFitter:
        session = self.session
        most = session.profile_of(question).max_messages
        return HistoryFitter(turns=self.turns, count=session.engine.counter, n_ctx=session.slot.n_ctx, max_messages=most)

    def _above(self, hits: Iterable[Hit], standing: HistoryWindow) -> dict[str, str]:
        """Map the label of each hit whose text is in an earlier message, all that is to be sent of it, to the label that it has there."""
        sent: dict[str, list[Hit]] = {}
        for at in standing.carrying(self.turns):
            for hit in self.turns[at].hits:
                sent.setdefault(comparable(hit.chunk.text), []).append(hit)
        labels = {hit.label: [each.label for each in sent.get(comparable(hit.chunk.text), ()) if _holds(each, hit)] for hit in hits}
        return {label: earlier[0] for label, earlier in labels.items() if earlier}

    def _rewriting(self, question: Question, before: Sequence[str]) -> QueryRewrite | None:
        """Rewrite a follow-up as a standalone question, if rewriting is on."""
        messages = self._messages(question)
        if not self.rewrites or not retrieval.is_short(search_query(messages), before):
            return None
        coming = self.session.prepare(self._asked(question, HistoryWindow.of(self.turns))).prompt.token_ids
        return QueryRewriter(self.session.engine, n_ctx=self.session.slot.n_ctx)(messages, beside=coming)

    def _messages(self, question: Question, *, bare: int = 0) -> tuple[Message, ...]:
        """The conversation with a new question at its end. The first `bare` turns come without their sources."""
        system = next((each for each in question.messages if each.role == "system"), None)
        messages = [Message("system", self.system)] if self.system.strip() else [] if system is None else [system]
        for at, turn in enumerate(self.turns):
            messages.append(Message("user", turn.question, sent=turn.sent if at >= bare else ""))
            if turn.is_answered:
                messages.append(Message("assistant", turn.answer))
        return (*messages, question.messages[-1])

    def _asked(self, question: Question, standing: HistoryWindow) -> Question:
        """A question within its conversation: pinned turns, summarised turns and earlier sources are set; the hits are empty."""
        numbers = self._question_numbers()
        thread = Thread(
            pinned=frozenset(numbers[at] for at, turn in enumerate(self.turns) if turn.is_pinned),
            settled=numbers[standing.settled] - 1,
            earlier={numbers[at]: self.turns[at].hits for at in standing.carrying(self.turns)},
        )
        return replace(question, messages=self._messages(question, bare=standing.bare), thread=thread).but(hits=())

    def _question_numbers(self) -> list[int]:
        """The message number of each turn's question, and that of the next question."""
        lengths = (1 + turn.is_answered for turn in self.turns)
        return list(accumulate(lengths, initial=1 + bool(self.system.strip())))

    def _with_way_out(self, error: BudgetExceededError) -> BudgetExceededError:
        """The same error, with a hint if an earlier unanswered question takes up part of the window."""
        if not self.turns or self.turns[-1].is_answered:
            return error
        hint = "The previous question has no answer, so it is sent again with this one. Remove it first (/undo), or ask for less."
        return BudgetExceededError(error.numbers["window"], error.numbers["sections"], hint=hint)  # type: ignore[arg-type]  # as passed in

    def _end_unasked(self, turn: Turn, error: BaseException, about: Mapping[str, Any]) -> None:
        """Store a question that the user interrupted before its answer began. Remove one that failed."""
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
        except LocalragError as error:  # a full disk must not lose the answer
            self.warnings.append(f"This turn was not saved: {error}")

    # --- between turns ---

    def forgets(self, question: Question | None = None, *, write: bool = False) -> Forgotten:
        """Turns that the model would not see in full if a short question were asked now, and those to be summarised next.

        `question` supplies the options. With `write`, the model writes the pending summaries now, so that no later answer waits for them;
        `cancel_all` interrupts it. Returns an empty result if the sections that cannot be cut leave no room for any question. In that case,
        the next question raises BudgetExceededError.
        """
        if not self.turns:
            return Forgotten()
        short_question = self._short(question)
        try:
            prepared, standing = self._fitting(short_question, Selection())
        except BudgetExceededError:
            return Forgotten()
        planned = self._fitter(short_question).planned(standing)
        if write and self.session.engine.can_generate:
            self.session.engine.reserve(min(self.session.slot.n_ctx, prepared.prompt.num_cells + WRITING_CELLS))
            for settled in dict.fromkeys((standing.settled, planned)):
                self.session.prepare(self._asked(short_question, replace(standing, settled=settled)), write=True)
        coming = tuple(at + 1 for at in range(standing.settled, planned) if not self.turns[at].is_pinned)
        return replace(self.forgotten(prepared.prompt.ledger), coming=coming)

    @staticmethod
    def _short(question: Question | None) -> Question:
        """The shortest possible question, with the options of another."""
        short = Message("user", "?")
        return Question(messages=(short,)) if question is None else replace(question, messages=(short,))

    def forgotten(self, ledger: Ledger) -> Forgotten:
        """Turns that a prompt with this ledger does not contain in full."""
        entries = {entry.name: entry for entry in ledger.entries}
        omitted = set(entries["history"].omitted) if "history" in entries else set()
        covered = set(entries["summary"].covered) if "summary" in entries else set()
        numbers = {f"message {first + each}": turn for turn, first in enumerate(self._question_numbers(), 1) for each in (0, 1)}
        return Forgotten(summarised=_numbers(numbers, covered), left_out=_numbers(numbers, omitted - covered))

    # --- what was said ---

    def turn(self, number: int) -> Turn:
        """Return a turn by its number, from 1; negative numbers count from the end. Raises UsageError if it does not exist."""
        at = number - 1 if number > 0 else number
        if not number or not -len(self.turns) <= at < len(self.turns):
            raise UsageError(f"There is no turn {number}: the conversation has {len(self.turns)}.", hint="Turns count from 1.")
        return self.turns[at]

    def undo(self, num: int = 1) -> list[Turn]:
        """Remove the last turns and return them. Raises UsageError if there are not that many."""
        if not 0 < num <= len(self.turns):
            raise UsageError(f"Cannot undo {num}: the conversation has {counted(len(self.turns), 'turn')}.", hint="Undo fewer.")
        undone = self.turns[-num:]
        self._kept.undo([turn.id for turn in undone])
        del self.turns[-num:]
        return undone

    def pin(self, number: int, *, is_pinned: bool = True) -> Turn:
        """Pin or unpin a turn. A pinned turn is never summarised or left out; its sources are dropped like those of other turns."""
        turn = self.turn(number)
        self._kept.pin(turn.id, is_pinned=is_pinned)
        turn.is_pinned = is_pinned
        return turn

    def fork(self, number: int, name: str) -> int:
        """Copy the turns up to this one into a new conversation and return its id. Raises UsageError if the name is taken."""
        return self._kept.fork(self.id, self.turn(number).id, name)

    def facts(self) -> list[str]:
        """Facts from the user's latest messages that the model proposes to remember. They are not stored; that is the user's decision."""
        messages = self._messages(self._short(None))[:-1]
        return propose(self.session.engine, messages, n_ctx=self.session.slot.n_ctx, beside=self._last_ids)

    # --- across processes ---

    def recall(self, question: Question | None = None) -> None:
        """Restore the KV cache that an earlier process saved for this conversation, if it was saved and fits this window.

        `question` supplies the options of the next question.
        """
        short_question = self._short(question)
        if not self.turns or short_question.sampling.repeatable:  # repeatable prompts resume from the disk cache on their own
            return
        try:
            prepared = self.session.prepare(self._asked(short_question, HistoryWindow.of(self.turns)))
        except BudgetExceededError:
            return
        self.session.engine.recall(list(prepared.prompt.token_ids), prepared.prompt.num_cells)

    def remember(self) -> None:
        """Save the KV cache of this conversation for `recall`. No job may be running."""
        self.session.engine.remember(self._last_ids)


class _Writer:
    """Writes an answer to disk at intervals and passes each piece on."""

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
            with suppress(LocalragError):  # the end of the turn reports it
                self._write(self.text)
        self._on_text(piece)


def _holds(sent: Hit, hit: Hit) -> bool:
    """Whether all that is to be sent of a hit is in one with the same text that was sent before."""
    return not sent.spans or (bool(hit.spans) and set(hit.spans) <= set(sent.spans))


def _left_out(hits: Iterable[Hit], above: Mapping[str, str]) -> dict[str, str]:
    """The ledger's reason for each retrieved passage whose text is already in an earlier message under another label."""
    return {
        chunk.label: f"identical to {above[hit.label]}"
        for hit in hits
        if hit.label in above
        for chunk in (hit.chunk, *hit.copies)
        if chunk.label != above[hit.label]
    }


def _numbers(numbers: Mapping[str, int], names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({numbers[name] for name in names if name in numbers}))
