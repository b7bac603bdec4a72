"""The turns of a council that one model answers at once: each with its prompt, all of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrag import prompt
from localrag.deliberation import JUDGE, PLANNER, Council, RoleTurn
from localrag.engine.policy import COUNCIL, Job, JobEvent
from localrag.errors import BudgetExceededError, LocalragError
from localrag.prompt import Demand, Prompt, PromptInputs
from localrag.question import Question, Search
from localrag.session import retrieval
from localrag.session.answer import Answer, Prepared
from localrag.session.model_pool import Need
from localrag.session.session import Session
from localrag.types import Message, SamplingParams, expanded

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.kb import KnowledgeBase
    from localrag.settings import Learning
    from localrag.text.tokens import Embedder


_MORE_CELLS = 256
"""Cells for what a further member's prompt has behind the beginning that all share."""


@dataclass(slots=True)
class Seat:
    """A turn with its prompt, and what is written for it."""

    turn: RoleTurn
    session: Session
    prepared: Prepared
    allowances: Mapping[str, int]
    """The most tokens that sections may have in this window, of those that have a limit."""
    answer: Answer | LocalragError | None = None
    """What was written, or why it could not go on; None until it has ended."""

    @property
    def sampling(self) -> SamplingParams:
        """As the turn asks, in the room that is left, and in a form that names what stands in the prompt."""
        composed = self.prepared.prompt
        sampling = self.turn.sampling.with_max_tokens(composed.max_tokens)
        if self.turn.make_schema is None:
            return sampling
        return replace(sampling, json_schema=self.turn.make_schema([hit.label for hit in composed.hits], composed.max_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """What all roles of a council share: its task and what can be searched."""

    council: Council
    messages: Sequence[Message]
    knowledge_bases: Sequence[KnowledgeBase]
    embedder: Embedder | None
    learning: Learning

    def session(self, engine: Engine, role: str) -> Session:
        """The window and the budget that a role has with this engine."""
        who = self.council.role(role)
        return Session(
            engine,
            knowledge_bases=self.knowledge_bases,
            embedder=self.embedder,
            n_ctx=who.n_ctx,
            profile=who.profile,
            learning=self.learning,
        )

    def _question(self, turn: RoleTurn) -> Question:
        """A turn as a question to its model."""
        return Question(messages=tuple(self.messages), sampling=turn.sampling, search=Search(top_k=self.council.top_k), id=turn.role)

    def offer(self, session: Session, turn: RoleTurn) -> PromptInputs:
        system = self.council.system.strip()
        return PromptInputs(
            messages=[*([Message("system", system)] if system else []), *self.messages, *turn.rounds],
            hits=retrieval.distinct(turn.hits, kept=turn.cited),
            tools=turn.tools,
            cite=turn.cite,
            cited=turn.cited,
            tells_omitted=True,
            proposals=turn.proposals,
            plan=turn.plan,
            instructions=turn.instructions,
            max_tokens=turn.sampling.max_tokens,
            think_tokens=turn.sampling.room_to_think,
            profile=session.profile_of(self._question(turn)),
        )

    def check(self, engine: Engine, turn: RoleTurn) -> Session:
        """The session of a turn's role; BudgetExceededError, naming it, if what cannot be cut of the turn does not fit there."""
        session = self.session(engine, turn.role)
        try:
            session.measure(self.offer(session, turn)).share(session.slot.n_ctx)
        except BudgetExceededError as error:
            raise error.of(turn.role) from None
        return session

    def seats(self, engine: Engine, turns: Sequence[RoleTurn]) -> list[Seat]:
        """Each turn with its prompt. Room for the longest instructions is set aside in all, so that all hold the same evidence.

        BudgetExceededError, naming the role, where its budget has what was found sent whole, and there is no room for it.
        """
        sessions = [self.session(engine, turn.role) for turn in turns]
        measured = [session.measure(self.offer(session, turn)) for session, turn in zip(sessions, turns, strict=True)]
        found = []
        for turn, session, wants, padded in zip(turns, sessions, measured, prompt.alike(measured), strict=True):
            try:
                composed = _composed(session, padded, wants)
            except BudgetExceededError as error:
                raise error.of(turn.role) from None
            prepared = Prepared(
                question=self._question(turn),
                prompt=composed,
                slot=session.slot,
                offered=tuple(expanded(wants.inputs.hits)),
                num_chunks=session.num_chunks,
                retrieve_s=0.0,
            )
            found.append(Seat(turn, session, prepared, _allowances(session, wants)))
        return found


def _composed(session: Session, padded: Demand, wants: Demand) -> Prompt:
    """With the room that is set aside, or without it where only the turn's own instructions fit."""
    try:
        return session.compose(padded)
    except BudgetExceededError:
        return session.compose(wants)


def _allowances(session: Session, wants: Demand) -> dict[str, int]:
    profile, fixed = wants.inputs.profile, sum(wants.fixed.values())
    limited = [name for name, flex in profile.sections.items() if flex.max is not None]
    return dict(profile.limits) | {name: profile.allowance(name, session.slot.n_ctx, fixed) for name in limited}


def write(
    engine: Engine,
    seats: Sequence[Seat],
    *,
    num_sequences: int,
    deadline: float | None = None,
    on_text: Callable[[str, str], None],
    on_end: Callable[[Seat], None],
) -> None:
    """Have all seats of one model written at once; what their prompts share is evaluated once.

    Answers end at the `deadline` (time.perf_counter()). `on_text` gets each piece with its role, `on_end` each seat when its answer has
    ended, also if it failed. KeyboardInterrupt ends all of them, with what they had written.
    """
    policy, is_interrupted = replace(COUNCIL, num_sequences=num_sequences), False
    with closing(engine.run([_job(seat, deadline) for seat in seats], policy)) as events:
        while True:
            try:
                for event in events:
                    _hear(event, on_text, on_end)
                break
            except KeyboardInterrupt:
                is_interrupted = True
                engine.cancel_all()
    if is_interrupted or any(isinstance(seat.answer, Answer) and seat.answer.finish_reason == "cancelled" for seat in seats):
        raise KeyboardInterrupt


def _hear(event: JobEvent, on_text: Callable[[str, str], None], on_end: Callable[[Seat], None]) -> None:
    if event.job is None:
        return
    seat: Seat = event.job.tag
    if event.text:
        on_text(seat.turn.role, event.text)
    if event.error is not None:
        seat.answer = event.error
    elif event.completion is not None:
        seat.answer = seat.session.to_answer(seat.prepared, event.completion)
    if seat.answer is not None:
        on_end(seat)


def _job(seat: Seat, deadline: float | None) -> Job:
    composed = seat.prepared.prompt
    return Job(
        prompt_ids=list(composed.token_ids),
        sampling=seat.sampling,
        deadline=deadline,
        breakpoints=composed.breakpoints,
        thinking=composed.thinking,
        num_cells=composed.num_cells,
        tag=seat,
    )


def needs(council: Council) -> dict[str, Need]:
    """What each role needs of its model: a context for all members of the model at once."""
    found = {}
    for role in [*(member.name for member in council.members), JUDGE]:
        who = council.role(role)
        same = [each for each in council.members if each.model == who.model]
        num_cells = who.n_ctx
        if num_cells is not None:
            sees_other = len({each.tags for each in same}) > 1
            num_cells += sum(num_cells if sees_other else each.sampling.num_answer_tokens + _MORE_CELLS for each in same[1:])
        if all(each.sampling.repeatable for each in [who, *same]):  # one after another
            found[role] = Need(model=who.model, num_cells=who.n_ctx, repeatable=True)
        else:
            found[role] = Need(model=who.model, num_cells=num_cells, num_sequences=max(1, len(same)))
    return found


def seat_of(role: str) -> str:
    """Whose model a role has: the planner is the judge."""
    return JUDGE if role == PLANNER else role
