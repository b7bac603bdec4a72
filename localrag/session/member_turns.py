"""The turns of council members that share a model: each has its own prompt, and all run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localrag import prompt
from localrag.deliberation import JUDGE, PLANNER, Council, RoleTurn
from localrag.engine.jobs import COUNCIL, Job, JobEvent
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
"""KV cells for the part of a further member's prompt that comes after the prefix shared by all members."""


@dataclass(slots=True)
class MemberTurn:
    """A council member's turn with its prompt and, once finished, its answer."""

    turn: RoleTurn
    session: Session
    prepared: Prepared
    allowances: Mapping[str, int]
    """Maximum number of tokens of each section that has a limit, in this window."""
    answer: Answer | LocalragError | None = None
    """The answer, or the error that ended it; None while it is unfinished."""

    @property
    def sampling(self) -> SamplingParams:
        """The turn's sampling, limited to the room that is left, with a schema that allows only labels in the prompt."""
        composed = self.prepared.prompt
        sampling = self.turn.sampling.with_max_tokens(composed.max_tokens)
        if self.turn.make_schema is None:
            return sampling
        return replace(sampling, json_schema=self.turn.make_schema([hit.label for hit in composed.hits], composed.max_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class CouncilSetup:
    """What all roles of a council share: the task, the knowledge bases and the embedder."""

    council: Council
    messages: Sequence[Message]
    knowledge_bases: Sequence[KnowledgeBase]
    embedder: Embedder | None
    learning: Learning

    def session(self, engine: Engine, role: str) -> Session:
        """A session with the window and budget of a role on this engine."""
        spec = self.council.role(role)
        return Session(
            engine,
            knowledge_bases=self.knowledge_bases,
            embedder=self.embedder,
            n_ctx=spec.n_ctx,
            profile=spec.profile,
            learning=self.learning,
        )

    def _question(self, turn: RoleTurn) -> Question:
        """The turn as a question to its model."""
        return Question(messages=tuple(self.messages), sampling=turn.sampling, search=Search(top_k=self.council.top_k), id=turn.role)

    def inputs(self, session: Session, turn: RoleTurn) -> PromptInputs:
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
        """Return the session of a turn's role. Raises BudgetExceededError, naming the role, if the uncuttable sections do not fit."""
        session = self.session(engine, turn.role)
        try:
            session.measure(self.inputs(session, turn)).share(session.slot.n_ctx)
        except BudgetExceededError as error:
            raise error.of(turn.role) from None
        return session

    def prepare(self, engine: Engine, turns: Sequence[RoleTurn]) -> list[MemberTurn]:
        """Prepare the prompts of these turns. Each one reserves room for the longest instructions, so that all hold the same evidence.

        Raises BudgetExceededError, naming the role, if its budget demands all evidence whole and there is no room for it.
        """
        sessions = [self.session(engine, turn.role) for turn in turns]
        measured = [session.measure(self.inputs(session, turn)) for session, turn in zip(sessions, turns, strict=True)]
        prepared_turns = []
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
            prepared_turns.append(MemberTurn(turn, session, prepared, _allowances(session, wants)))
        return prepared_turns


def _composed(session: Session, padded: Demand, wants: Demand) -> Prompt:
    """Compose with the reserved room, or without it if only the turn's own instructions fit."""
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
    member_turns: Sequence[MemberTurn],
    *,
    num_sequences: int,
    deadline: float | None = None,
    on_text: Callable[[str, str], None],
    on_end: Callable[[MemberTurn], None],
) -> None:
    """Answer all turns of one model at the same time. The prefix that their prompts share is evaluated once.

    Answers end at the `deadline` (time.perf_counter()). `on_text` receives each piece with its role, `on_end` each turn when it ends, with
    an answer or an error. KeyboardInterrupt ends all turns with the text that they have.
    """
    policy, is_interrupted = replace(COUNCIL, num_sequences=num_sequences), False
    with closing(engine.run([_job(member_turn, deadline) for member_turn in member_turns], policy)) as events:
        while True:
            try:
                for event in events:
                    _hear(event, on_text, on_end)
                break
            except KeyboardInterrupt:
                is_interrupted = True
                engine.cancel_all()
    if is_interrupted or any(isinstance(each.answer, Answer) and each.answer.finish_reason == "cancelled" for each in member_turns):
        raise KeyboardInterrupt


def _hear(event: JobEvent, on_text: Callable[[str, str], None], on_end: Callable[[MemberTurn], None]) -> None:
    if event.job is None:
        return
    member_turn: MemberTurn = event.job.tag
    if event.text:
        on_text(member_turn.turn.role, event.text)
    if event.error is not None:
        member_turn.answer = event.error
    elif event.completion is not None:
        member_turn.answer = member_turn.session.to_answer(member_turn.prepared, event.completion)
    if member_turn.answer is not None:
        on_end(member_turn)


def _job(member_turn: MemberTurn, deadline: float | None) -> Job:
    composed = member_turn.prepared.prompt
    return Job(
        prompt_ids=list(composed.token_ids),
        sampling=member_turn.sampling,
        deadline=deadline,
        breakpoints=composed.breakpoints,
        thinking=composed.thinking,
        num_cells=composed.num_cells,
        tag=member_turn,
    )


def needs(council: Council) -> dict[str, Need]:
    """What each role needs of its model: a context large enough for all members that use the model."""
    role_needs = {}
    for role in [*(member.name for member in council.members), JUDGE]:
        spec = council.role(role)
        same = [each for each in council.members if each.model == spec.model]
        num_cells = spec.n_ctx
        if num_cells is not None:
            sees_other = len({each.tags for each in same}) > 1
            num_cells += sum(num_cells if sees_other else each.sampling.num_answer_tokens + _MORE_CELLS for each in same[1:])
        if all(each.sampling.repeatable for each in [spec, *same]):  # repeatable answers run one at a time
            role_needs[role] = Need(model=spec.model, num_cells=spec.n_ctx, repeatable=True)
        else:
            role_needs[role] = Need(model=spec.model, num_cells=num_cells, num_sequences=max(1, len(same)))
    return role_needs


def model_role(role: str) -> str:
    """The role whose model this role uses: the planner uses the judge's."""
    return JUDGE if role == PLANNER else role
