"""One run of a council. Each event is reported as it happens and, if requested, recorded in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from localrag.conversation import search_query
from localrag.deliberation import JUDGE, Ask, Council, Reply, RoleTurn, Search, Step, Tell, Use, Used, Verdict, deliberate, first_turns
from localrag.errors import BudgetExceededError, EngineError, InterruptedRunError, LocalragError, TimeLimitError, UsageError
from localrag.journal import FILE_NAME, Journal
from localrag.question import Question
from localrag.session import retrieval
from localrag.session.answer import Answer, evidence
from localrag.session.member_turns import CouncilSetup, MemberTurn, model_role, needs, write
from localrag.session.model_pool import ModelPool
from localrag.session.opening import names_of, open_council, open_embedder, open_knowledge_bases
from localrag.session.recorder import open_journal
from localrag.session.timing import check_seconds
from localrag.session.toolbox import Toolbox
from localrag.settings import Settings
from localrag.types import Hit, Message

if TYPE_CHECKING:
    from localrag.budget import Ledger
    from localrag.engine.engine import Engine
    from localrag.journal import Journal
    from localrag.session.session import Session


Event = dict[str, Any]
"""One event as JSON data; "event" holds its name. See docs/how-to/council.md for the list."""


class EventLog:
    """Passes each event to `on_event` and records it. If the journal fails, it adds a warning and stops recording; the run continues."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._journal: Journal | None = None
        self.id: int | None = None
        """Id of the run in the journal; None if it is not recorded."""
        self.warnings: list[str] = []

    def begin(self, home: Path, council: str, task: str, about: Mapping[str, Any]) -> None:
        """Start recording the run."""
        self._journal, warnings = open_journal(home)
        self.warnings += warnings
        self.id = self._kept(lambda journal: journal.councils.begin(council, task, about))

    def record(self, event: str, data: Mapping[str, Any]) -> None:
        entry: Event = {"event": event, **data}
        number = self.id
        if number is not None:
            self._kept(lambda journal: journal.councils.add(number, entry))
        self._on_event(entry)

    def end(self, state: str) -> None:
        number = self.id
        if number is not None:
            self._kept(lambda journal: journal.councils.end(number, state))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _kept(self, keep: Callable[[Journal], int | None]) -> int | None:
        try:
            return None if self._journal is None else keep(self._journal)
        except (LocalragError, OSError) as error:
            self.warnings.append(f"This was not recorded in the journal: {error}")
            self.id = None
            return None


TIME_SHARES = {"plan": 0.2, "proposal": 0.5, "review": 0.4, "call": 0.3}
"""Share of the remaining time that each kind of turn may use, in a run with a time limit. The verdict gets the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CouncilResult:
    """The result of a council. `id` is the run's id in the journal, None if it was not recorded."""

    verdict: Verdict
    answers: tuple[tuple[str, Answer], ...]
    """Pairs of a role and one of its answers, in order."""
    hits: tuple[Hit, ...]
    """All hits shown to any role."""
    id: int | None = None
    warnings: tuple[str, ...] = ()


def run_council(
    council: Council,
    task: str | Sequence[Message],
    *,
    settings: Settings | None = None,
    kbs: Sequence[str] = (),
    piped: str = "",
    keep: bool = True,
    about: Mapping[str, Any] | None = None,
    max_seconds: float | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
    on_text: Callable[[str, str], None] = lambda _role, _text: None,
) -> CouncilResult:
    """Let a council decide a task: a text, or a conversation that ends with one.

    `on_event` receives each event, `on_text` each piece of text with the role that writes it. With `keep`, the run is recorded in the
    journal together with `about`. Before any evaluation, the smallest prompt of every role must fit; otherwise BudgetExceededError names
    the role. `max_seconds` limits the whole run. Raises EngineError if the judge gives no verdict, TimeLimitError if there is no time for
    one, and InterruptedRunError if the user stops the run; the events so far stay in the journal.
    """
    metadata = (about or {}) if keep else None
    with CouncilRun(
        council,
        task,
        settings=settings,
        kbs=kbs,
        piped=piped,
        metadata=metadata,
        max_seconds=max_seconds,
        on_event=on_event,
        on_text=on_text,
    ) as run:
        return run.decide()


class CouncilRun:
    """One run of a council; see `run_council`. `metadata` is stored with the run in the journal; with None, nothing is stored on disk."""

    def __init__(
        self,
        council: Council,
        task: str | Sequence[Message],
        *,
        settings: Settings | None = None,
        kbs: Sequence[str] = (),
        piped: str = "",
        metadata: Mapping[str, Any] | None = None,
        max_seconds: float | None = None,
        started_at: float | None = None,
        on_event: Callable[[Event], None],
        on_text: Callable[[str, str], None],
    ) -> None:
        self._council = council
        messages = [Message("user", task)] if isinstance(task, str) else list(task)
        self._task = search_query(messages)
        self._settings = settings or Settings.from_env()
        self._piped = piped
        self._on_text = on_text
        self._answers: list[tuple[str, Answer]] = []
        self._written: list[MemberTurn] = []
        self._hits: dict[str, Hit] = {}
        self._event_log = EventLog(on_event)
        self._toolbox: Toolbox | None = None
        self._judged: RoleTurn | None = None
        self._writing: Engine | None = None
        self._is_cancelled = False
        self._started = time.perf_counter() if started_at is None else started_at
        check_seconds(max_seconds)
        self._max_seconds = max_seconds
        self._late: dict[str, None] = {}
        """Roles whose answers were ended by the time limit, in order."""
        with ExitStack() as stack:
            stack.callback(self._event_log.close)
            opened_kbs = open_knowledge_bases(kbs, settings=self._settings, opened=stack)
            self._setup = CouncilSetup(
                council=council,
                messages=messages,
                knowledge_bases=opened_kbs,
                embedder=open_embedder(self._settings, for_queries=True, kbs=opened_kbs) if opened_kbs else None,
                learning=self._settings.learn,
            )
            self._needs = needs(council)
            self._models = stack.enter_context(ModelPool(self._needs, settings=self._settings, keep=metadata is not None))
            if metadata is not None:
                self._event_log.begin(self._settings.home, council.name, self._task, {"digest": council.digest, **metadata})
            self._opened = stack.pop_all()

    def decide(self) -> CouncilResult:
        """Run the council from the task to the verdict."""
        state = "failed"
        try:
            self._begin()
            verdict = self._drive()
            state = "decided"
            if self._late:
                self._event_log.warnings.append(f"Ended by the time limit: {', '.join(self._late)}.")
        except (KeyboardInterrupt, InterruptedRunError):
            state = "cancelled"
            hint = None if self._event_log.id is None else f"To see the turns so far: localrag report --council {self._event_log.id}"
            raise InterruptedRunError("Interrupted.", hint=hint) from None
        except LocalragError as error:
            reported = self._timed_out(error)
            self._event_log.record("error", reported.to_dict())
            raise reported from None
        finally:
            self._end(state)
        hits_by_label = {hit.label: hit for _, answer in self._answers for hit in answer.hits}
        return CouncilResult(
            verdict=verdict,
            answers=tuple(self._answers),
            hits=tuple(hits_by_label.values()),
            id=self._event_log.id,
            warnings=tuple(self._event_log.warnings),
        )

    def cancel(self) -> None:
        """End the run as soon as possible, keeping the events so far. Safe to call from a signal handler."""
        self._is_cancelled = True
        if self._writing is not None:
            self._writing.cancel_all()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Check that every role's smallest prompt fits its window, before anything is evaluated."""
        roles: dict[str, dict[str, object]] = {}
        for turn in first_turns(self._council):
            with self._models.use(model_role(turn.role)) as engine:
                session = self._setup.check(engine, turn)
                roles[turn.role] = {"role": turn.role, "model": engine.name, "slot": session.slot.to_dict()}
        residence = self._models.plan().to_dict()
        about = {"id": self._event_log.id, "council": self._council.name, "task": self._task}
        self._event_log.record("start", {**about, "roles": list(roles.values()), "models": residence})

    def _drive(self) -> Verdict:
        flow, reply = deliberate(self._council, self._task), None
        while True:
            try:
                step: Step = flow.send(reply)
            except StopIteration as end:
                verdict: Verdict = end.value
                self._event_log.record("verdict", verdict.to_dict() | {"sources": self._sources(verdict)})
                return verdict
            reply = self._answered(step)

    def _answered(self, step: Step) -> Any:  # noqa: ANN401  # deliberation/flow.py documents the reply to each step
        self._check_cancelled()
        match step:
            case Ask(turns):
                return self._ask(turns)
            case Search(queries):
                return self._search(queries)
            case Use():
                return self._use(step)
            case Tell(event, data):
                return self._event_log.record(event, data)

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise KeyboardInterrupt

    def _ask(self, turns: Sequence[RoleTurn]) -> tuple[Reply, ...]:
        """Answer the turns. Turns of the same model run at the same time."""
        self._judged = turns[-1]
        groups: dict[str | None, list[RoleTurn]] = {}
        for turn in turns:
            groups.setdefault(self._council.role(turn.role).model, []).append(turn)
        replies: dict[str, Reply] = {}

        def on_end(member_turn: MemberTurn) -> None:
            replies[member_turn.turn.role] = self._reply(member_turn)

        ends_at = self._ends_at(turns[0].kind)
        for number, group in enumerate(groups.values()):
            role = model_role(group[0].role)
            with self._models.use(role) as engine:
                member_turns = self._setup.prepare(engine, group)
                for member_turn in member_turns:
                    about = {"role": member_turn.turn.role, "kind": member_turn.turn.kind}
                    ledger = member_turn.prepared.prompt.ledger.to_dict()
                    self._event_log.record("budget", {**about, "ledger": ledger, "allowances": dict(member_turn.allowances)})
                self._writing = engine
                try:
                    self._check_cancelled()
                    at_once = self._needs[role].num_sequences
                    write(
                        engine,
                        member_turns,
                        num_sequences=at_once,
                        deadline=None if ends_at is None else _part_of(ends_at, len(groups) - number),
                        on_text=self._on_text,
                        on_end=on_end,
                    )
                finally:
                    self._writing = None
                    self._written += member_turns
        return tuple(replies[turn.role] for turn in turns)

    def _reply(self, member_turn: MemberTurn) -> Reply:
        """Record a finished turn, even an incomplete one, and return the reply for the deliberation."""
        answer, about = member_turn.answer, {"role": member_turn.turn.role, "kind": member_turn.turn.kind}
        if not isinstance(answer, Answer):
            assert answer is not None, "it has ended"
            self._event_log.record("said", {**about, "error": answer.to_dict()})
            return Reply(text="", finish_reason="error")
        if answer.finish_reason == "time":
            self._late[member_turn.turn.role] = None
        self._answers.append((member_turn.turn.role, answer))
        self._event_log.record("said", {**about, **answer.to_dict()})
        for each in answer.warnings:
            warning = each if each in member_turn.session.warnings else f"{member_turn.turn.role}: {each}"
            if warning not in self._event_log.warnings:
                self._event_log.warnings.append(warning)
        return Reply(text=answer.text, finish_reason=answer.finish_reason, hits=answer.hits)

    def _ends_at(self, kind: str) -> float | None:
        """When turns of this kind must end: each kind gets a share of the time left, the verdict all of it."""
        if self._max_seconds is None:
            return None
        now = time.perf_counter()
        left_s = max(0.0, self._started + self._max_seconds - now)
        return now + TIME_SHARES.get(kind, 1.0) * left_s

    def _timed_out(self, error: LocalragError) -> LocalragError:
        """The error to report for a run without a verdict: TimeLimitError if the judge ran out of time, else `error`."""
        if self._max_seconds is None or JUDGE not in self._late or not isinstance(error, EngineError):
            return error
        judged = [member_turn for member_turn in self._written if member_turn.turn.role == JUDGE]
        speed, prompt = judged[-1].session.engine.speed, judged[-1].prepared.prompt
        spent_s = time.perf_counter() - self._started
        return TimeLimitError(self._max_seconds, spent_s + speed.plan_s(len(prompt.token_ids), prompt.max_tokens))

    def _search(self, queries: Sequence[str]) -> dict[str, tuple[Hit, ...]]:
        """Search once for all roles; if member tags restrict the sources, once for each set of tags."""
        tags = {member.name: member.tags for member in self._council.members} | {JUDGE: ()}
        with self._models.use(JUDGE) as engine:
            session = self._setup.session(engine, JUDGE)
            by_tags = {each: self._best(session, queries, each) for each in dict.fromkeys(tags.values())}
        self._hits = {hit.label: hit for hits in by_tags.values() for hit in hits}
        by_role = {role: by_tags[each] for role, each in tags.items()} | {JUDGE: _ranked(self._hits.values())}
        numbers = {role: len(hits) for role, hits in by_role.items()}
        self._event_log.record("search", {"queries": list(queries), "found": len(self._hits), "roles": numbers})
        return by_role

    def _best(self, session: Session, queries: Sequence[str], tags: Sequence[str]) -> tuple[Hit, ...]:
        """The best hits of all queries together, each passage once."""
        from localrag.kb.filters import Where  # noqa: PLC0415  # weight

        where, hits = Where.parse([f"tag={tag}" for tag in tags]), list[Hit]()
        for number, query in enumerate(queries):
            piped = "" if number else self._piped
            question = Question.of(query, top_k=self._council.top_k, where=where, piped=piped)
            hits += session.retriever.offered(question, query)
        return tuple(retrieval.distinct(_ranked(hits)))

    def _use(self, call: Use) -> Used:
        """Run a tool. The result is empty if the judge's prompt has no room for another round."""
        assert self._judged is not None, "a call is a reply to a turn"
        with self._models.use(JUDGE) as engine:
            session = self._setup.session(engine, JUDGE)
            if self._toolbox is None:
                room, num_calls = self._room_for_tools(session, self._judged), self._council.judge.max_calls
                self._toolbox = Toolbox(session, room, ledgers=self._ledgers, hits=self._hits, num_calls=num_calls)
            used, data = self._toolbox.use(call.tool, call.arguments)
            more = (*self._judged.rounds, *call.messages(used.text))
            try:
                self._setup.check(engine, replace(self._judged, rounds=more))
            except BudgetExceededError:
                used, data = Used(text="", is_exhausted=True), data | {"text": "", "num_tokens": 0, "is_exhausted": True}
        self._hits |= {hit.label: hit for hit in used.hits}
        self._event_log.record("tool", data)
        return used

    def _ledgers(self) -> dict[str, Ledger]:
        """The latest ledger of each role."""
        return {role: answer.ledger for role, answer in self._answers}

    def _room_for_tools(self, session: Session, turn: RoleTurn) -> int:
        """Token limit for all tool results together: the maximum of the tools section, less the tool definitions and the calls."""
        wants = session.measure(self._setup.inputs(session, turn))
        most = session.profile.allowance("tools", session.slot.n_ctx, sum(wants.fixed.values()))
        return max(0, most - wants.wanted("tools") - self._council.judge.rounds * turn.sampling.num_answer_tokens)

    def _sources(self, verdict: Verdict) -> list[dict[str, object]]:
        """The passages that a verdict cites, as evidence entries."""
        return [evidence(self._hits[each.label]) for each in verdict.citations if each.label in self._hits]

    def _end(self, state: str) -> None:
        answers = [answer for _, answer in self._answers]
        prompt_tokens, cached_tokens = (sum(getattr(each, name) for each in answers) for name in ("prompt_tokens", "cached_tokens"))
        usage = {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "evaluated_tokens": prompt_tokens - cached_tokens,
            "completion_tokens": sum(answer.completion_tokens for answer in answers),
        }
        loads = [{"model": each.model, "load_s": each.load_s, "closed": list(each.closed)} for each in self._models.loads]
        warnings = {"warnings": list(self._event_log.warnings)} if self._event_log.warnings else {}
        total_s = round(time.perf_counter() - self._started, 4)
        self._event_log.record("end", {"state": state, "usage": usage, "loads": loads, "total_s": total_s, **warnings})
        self._event_log.end(state)


def _ranked(hits: Iterable[Hit]) -> tuple[Hit, ...]:
    return tuple(sorted(hits, key=lambda hit: (-hit.score, hit.label)))


def _part_of(ends_at: float, num_groups: int) -> float:
    """When the first of several groups must end, if all of them run in turn and take equal time."""
    now = time.perf_counter()
    return now + max(0.0, ends_at - now) / num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class CouncilCall:
    """The arguments of a council run; see docs/how-to/council.md. With None, the council's own setting applies."""

    task: str
    council: str = "default"
    kbs: tuple[str, ...] = ()
    model: str | None = None
    n_ctx: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    piped: str = ""
    max_seconds: float | None = None

    def open(self, settings: Settings) -> Council:
        """Open the council and apply this call's settings. Raises ConfigError if it does not exist."""
        council = open_council(self.council, settings=settings)
        return council.changed(model=self.model, n_ctx=self.n_ctx, seed=self.seed, max_tokens=self.max_tokens)

    @property
    def about(self) -> dict[str, Any]:
        """The fields that the journal stores, so that the run can be repeated."""
        values = asdict(self) | {"kbs": list(self.kbs)}
        unset = {name for name in ("piped", "max_seconds") if not values[name]}
        return {name: value for name, value in values.items() if name not in unset}

    @classmethod
    def kept(cls, run_id: int, *, settings: Settings) -> tuple[Self, str]:
        """Restore the call of a run in the journal, with the digest of its council. Raises UsageError if the run cannot be repeated."""
        run = None
        if (settings.home / FILE_NAME).exists():
            with Journal.open(settings.home) as journal:
                run = journal.councils.get(run_id)
        if run is None:
            raise UsageError(f"There is no council run {run_id} in the journal.", hint="See localrag report --councils.")
        if not {"task", "council"} <= run.about.keys():
            raise UsageError(f"Run {run_id} did not use a council of models.toml.", hint="Give its task again.")
        values = {field.name: run.about[field.name] for field in fields(cls) if field.name in run.about}
        return cls(**values | {"kbs": tuple(values.get("kbs", ()))}), str(run.about.get("digest", ""))


def council(
    task: str,
    council: str = "default",
    *,
    kbs: str | Sequence[str] = (),
    model: str | None = None,
    n_ctx: int | None = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    max_seconds: float | None = None,
    keep: bool = True,
    on_event: Callable[[Event], None] | None = None,
    settings: Settings | None = None,
) -> CouncilResult:
    """Let a council of models.toml decide a task, using these knowledge bases. Exported as `localrag.council`.

    `model`, `n_ctx` (tokens) and `max_tokens` override those of every role. A `seed` is added to the roles' seeds and makes the whole run
    repeatable (see SamplingParams). `max_seconds` limits the whole run. `on_event` receives each event (docs/how-to/council.md), and `keep`
    records them in the journal too. Raises ConfigError if the council does not exist, and whatever `run_council` raises.
    """
    names = tuple(names_of(kbs))
    call = CouncilCall(
        task=task, council=council, kbs=names, model=model, n_ctx=n_ctx, max_tokens=max_tokens, seed=seed, max_seconds=max_seconds
    )
    resolved = settings or Settings.from_env()
    with open_run(call, call.open(resolved), settings=resolved, keep=keep, on_event=on_event or (lambda _: None)) as run:
        return run.decide()


def open_run(
    call: CouncilCall,
    council: Council,
    *,
    settings: Settings,
    keep: bool = True,
    started_at: float | None = None,
    on_event: Callable[[Event], None],
    on_text: Callable[[str, str], None] = lambda _role, _text: None,
) -> CouncilRun:
    """Create the run for a call, to be used in a `with` block and started with `decide`. `council` is the result of `call.open`."""
    return CouncilRun(
        council,
        call.task,
        settings=settings,
        kbs=call.kbs,
        piped=call.piped,
        metadata=call.about if keep else None,
        max_seconds=call.max_seconds,
        started_at=started_at,
        on_event=on_event,
        on_text=on_text,
    )
