"""The turns of a council that one model answers at once: each with its prompt, all of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrag import prompt
from localrag.deliberation import JUDGE, PLANNER, Council, Turn
from localrag.engine.radix_tree import common_length
from localrag.errors import BudgetExceededError, LocalragError
from localrag.prompt import Demand, Prompt, PromptInputs
from localrag.session import retrieval
from localrag.session.answer import Answer, Prepared
from localrag.session.model_pool import Need
from localrag.session.session import Session
from localrag.types import Message, SamplingParams, expanded

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.engine.sequence import Sequence as Running
    from localrag.kb import KnowledgeBase
    from localrag.settings import Learning
    from localrag.text.tokens import Embedder


_MORE_CELLS = 256
"""Cells for what a further member's prompt has behind the beginning that all share."""


@dataclass(slots=True)
class Seat:
    """A turn with its prompt, and what is written for it."""

    turn: Turn
    session: Session
    prepared: Prepared
    allowances: Mapping[str, int]
    """The most tokens that sections may have in this window, of those that have a limit."""
    running: Running | None = None

    @property
    def sampling(self) -> SamplingParams:
        """As the turn asks, in the room that is left, and in a form that names what stands in the prompt."""
        composed = self.prepared.prompt
        sampling = self.turn.sampling.with_max_tokens(composed.max_tokens)
        if self.turn.make_schema is None:
            return sampling
        return replace(sampling, json_schema=self.turn.make_schema([hit.label for hit in composed.hits], composed.max_tokens))

    @property
    def answer(self) -> Answer | LocalragError | None:
        """What was written, if it has ended, or why it could not go on."""
        if self.running is None or not self.running.is_finished:
            return None
        return self.running.error or self.session.to_answer(self.prepared, self.running.completion())


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

    def offer(self, session: Session, turn: Turn) -> PromptInputs:
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
            profile=session.profile_of({"top_k": self.council.top_k}),
        )

    def check(self, engine: Engine, turn: Turn) -> Session:
        """The session of a turn's role; BudgetExceededError, naming it, if what cannot be cut of the turn does not fit there."""
        session = self.session(engine, turn.role)
        try:
            session.measure(self.offer(session, turn)).share(session.slot.n_ctx)
        except BudgetExceededError as error:
            raise error.of(turn.role) from None
        return session

    def seats(self, engine: Engine, turns: Sequence[Turn]) -> list[Seat]:
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
                prompt=composed, slot=session.slot, offered=tuple(expanded(wants.offer.hits)), num_chunks=session.num_chunks, retrieve_s=0.0
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
    profile, fixed = wants.offer.profile, sum(wants.fixed.values())
    limited = [name for name, flex in profile.sections.items() if flex.max is not None]
    return dict(profile.limits) | {name: profile.allowance(name, session.slot.n_ctx, fixed) for name in limited}


def write(
    engine: Engine,
    seats: Sequence[Seat],
    *,
    num_sequences: int,
    deadline: float | None = None,
    earlier: Iterable[Seat] = (),
    on_text: Callable[[str, str], None],
    on_end: Callable[[Seat], None],
) -> None:
    """Have all seats written, as many at once as `num_sequences` and the cells allow.

    What is not written by the `deadline` (time.perf_counter()) ends there. Of what those written `earlier` hold, only what these begin
    with is kept. `on_text` hears pieces with their roles, `on_end` each seat when its answer has ended, also where it cannot go on.
    KeyboardInterrupt ends all of them, with what they had written.
    """
    prompts = [list(seat.prepared.prompt.token_ids) for seat in seats]
    beside = [seat.prepared.prompt.num_cells for seat in seats if not seat.sampling.repeatable]
    if beside:
        engine.reserve(max(beside), num_sequences=num_sequences)
    engine.keep_for(prompts, [seat.running for seat in earlier if seat.running is not None])
    shared = prompts[0][: min((common_length(prompts[0], each) for each in prompts[1:]), default=0)]
    with engine.sharing(shared), engine.whole_prompts():
        _run(engine, seats, prompts, deadline, on_text, on_end)
    if any(seat.running is not None and seat.running.finish_reason == "cancelled" for seat in seats):
        raise KeyboardInterrupt


def _run(
    engine: Engine,
    seats: Sequence[Seat],
    prompts: Sequence[list[int]],
    deadline: float | None,
    on_text: Callable[[str, str], None],
    on_end: Callable[[Seat], None],
) -> None:
    try:
        for seat, ids in zip(seats, prompts, strict=True):
            composed = seat.prepared.prompt
            seat.running = engine.add(ids, seat.sampling, deadline=deadline, breakpoints=composed.breakpoints, thinking=composed.thinking)
        by_id = {seat.running.seq_id: seat for seat in seats if seat.running is not None}
        while not engine.is_idle:
            for piece in engine.step():
                if piece.text:
                    on_text(by_id[piece.seq_id].turn.role, piece.text)
                if piece.finish_reason is not None and piece.finish_reason != "cancelled":
                    on_end(by_id.pop(piece.seq_id))
    finally:
        engine.abandon(seat.running for seat in seats if seat.running is not None)
        for seat in seats:
            if seat.running is not None and seat.running.finish_reason == "cancelled":
                on_end(seat)


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
