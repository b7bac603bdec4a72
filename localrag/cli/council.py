"""The command council, and budget --council: the token budget of each role, computed before any model is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from localrag.budget import SECTIONS, Section, negotiate
from localrag.budget.ledger import ANSWER
from localrag.budget.sections import LIMITED, PROTECTED
from localrag.catalog import Catalog
from localrag.cli import options, render
from localrag.cli.terminal import emit, first_interrupt, note
from localrag.deliberation import JUDGE, PLANNER, Council, first_turns
from localrag.deliberation.roles import Judge, Member
from localrag.deliberation.turns import PLAN_TOKENS
from localrag.errors import BudgetExceededError, ModelNotFoundError, UsageError
from localrag.prompt.measure import SUMMARY_TOKENS
from localrag.session.member_turns import CouncilSetup
from localrag.session.opening import open_engine
from localrag.settings import Settings
from localrag.text.sanitize import safe
from localrag.types import Message

if TYPE_CHECKING:
    from localrag.deliberation import Council
    from localrag.session.council_run import CouncilCall


_PARTS: Mapping[str, tuple[str, ...]] = {
    "template": ("template",),
    "system": ("system",),
    "tools": ("tools",),
    "memories": ("memories",),
    "conversation": ("summary", "history"),
    "attachments": ("attachments",),
    "cited": ("cited",),
    "evidence": ("evidence",),
    "proposals": ("proposals",),
    "task": ("question", "plan", "instructions"),
    "margin": ("gap",),
}
"""The lines of a budget table, each with the prompt sections that it sums up."""
_TAKEN = ("--council", "--models", "--model", "--ctx", "--max-tokens", "--json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTable:
    """The division of a window, in tokens, when every section has its maximum content. Shared by the roles in `roles`.

    `tokens` maps the prompt sections and the answer to their allotments. `counted` holds the measured size of the sections that are
    always sent whole, or None without a task. `error` says why the table exceeds the window, or why the task does not fit.
    """

    roles: tuple[str, ...]
    model: str
    window: int
    budget: str
    tokens: Mapping[str, int]
    answer_min: int
    unbounded: tuple[str, ...]
    counted: Mapping[str, int] | None = None
    error: BudgetExceededError | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.total_tokens - self.tokens[ANSWER]

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def lines(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield each line of the table with its sections and their tokens."""
        for line, names in _PARTS.items():
            if parts := {name: self.tokens[name] for name in names if name in self.tokens}:
                yield line, parts

    def percent(self, tokens: int) -> float:
        return round(100 * tokens / self.window, 1)

    def to_dict(self) -> dict[str, Any]:
        lines = [
            {"name": line, "tokens": sum(parts.values()), "percent": self.percent(sum(parts.values())), "sections": parts}
            for line, parts in self.lines
        ]
        return {
            "roles": list(self.roles),
            "model": self.model,
            "window": self.window,
            "budget": self.budget,
            "lines": lines,
            "prompt_tokens": self.prompt_tokens,
            "answer": {"min": self.answer_min, "max": self.tokens[ANSWER]},
            "total_tokens": self.total_tokens,
            "spare": self.window - self.total_tokens,
            "unbounded": list(self.unbounded),
            **({} if self.counted is None else {"counted": dict(self.counted)}),
            "fits": self.error is None,
        }


def show(name: str, task: str | None, *, settings: Settings, model: str | None, n_ctx: int | None, max_tokens: int, as_json: bool) -> None:
    """Print the budget tables of a council, then raise BudgetExceededError for the first role that exceeds its window."""
    option_names = _given_options()
    if other := [option for option in option_names if option not in _TAKEN]:
        raise UsageError(f"{other[0]} does not work with --council.", hint=f"These options do: {', '.join(_TAKEN[1:])}.")
    catalog = Catalog.load(settings)
    council = catalog.council(name).changed(  # by the command line only: members keep their models whatever the defaults are
        model=model if "--model" in option_names else None,
        n_ctx=n_ctx if "--ctx" in option_names else None,
        max_tokens=max_tokens if "--max-tokens" in option_names else None,
    )
    tables = role_tables(council, catalog, task=task, settings=settings)
    error = next((table.error for table in tables if table.error is not None), None)
    if as_json:
        data = {"council": council.name, "tables": [table.to_dict() for table in tables]}
        emit(data if error is None else data | {"error": error.to_dict()})
        if error is not None:
            raise click.exceptions.Exit(error.exit_code)
        return
    for table in tables:
        _print(table)
    if unbounded := dict.fromkeys(name for table in tables for name in table.unbounded):
        note(f"Not shown, because the budget sets no limit: {', '.join(unbounded)}. Give a TASK to count them.")
    if error is not None:
        raise error


def _given_options() -> list[str]:
    context = click.get_current_context()
    options = [each for each in context.command.params if isinstance(each, click.Option) and each.name is not None]
    given = click.core.ParameterSource.COMMANDLINE
    return [each.opts[0] for each in options if context.get_parameter_source(each.name or "") is given]


def role_tables(council: Council, catalog: Catalog, *, task: str | None, settings: Settings) -> list[RoleTable]:
    """Build the tables, one for all roles with equal budgets; the judge's is last. ModelNotFoundError if a window is unknown."""
    groups: list[tuple[Member | Judge, list[str]]] = []
    for name in (*(member.name for member in council.members), JUDGE):
        role = council.role(name)
        same = next((names for other, names in groups if _table_key(other) == _table_key(role)), None)
        if same is None:
            groups.append((role, same := []))
        same.append(name)
    tables: list[RoleTable] = []
    for role, names in groups:
        evidence_tokens = max((table.tokens.get("evidence", 0) for table in tables), default=0)
        tables.append(_role_table(council, role, tuple(names), catalog, task=task, shown_tokens=evidence_tokens, settings=settings))
    return tables


def _table_key(role: Member | Judge) -> tuple[object, ...]:
    return isinstance(role, Judge), role.model, role.n_ctx, role.profile, role.sampling.num_answer_tokens


def _role_table(
    council: Council,
    role: Member | Judge,
    names: tuple[str, ...],
    catalog: Catalog,
    *,
    task: str | None,
    shown_tokens: int,
    settings: Settings,
) -> RoleTable:
    """Build one table. `shown_tokens` is the largest evidence allotment of a specialist, all of which may be cited."""
    model, window = _window(catalog, role)
    counted, error = (None, None) if task is None else _counted(council, role, names, task, window, settings)
    sections = _sections(council, role, window, counted or {}, shown_tokens)
    tokens: dict[str, int]
    try:
        tokens = dict(negotiate(window, sections).allocations)
    except BudgetExceededError as raised:
        error = error or _of(raised, names[0], role.profile.name)
        tokens = raised.numbers["sections"]  # type: ignore[assignment]  # of that error
    return RoleTable(
        roles=names,
        model=model,
        window=window,
        budget=role.profile.name,
        tokens=tokens,
        answer_min=_least_answer(role, tokens[ANSWER]),
        unbounded=() if counted else tuple(name for name in LIMITED if name not in role.profile.limits),
        counted=counted,
        error=error,
    )


def _least_answer(role: Member | Judge, most: int) -> int:
    flex = role.profile.sections[ANSWER]
    least = flex.min if flex.shrink else flex.basis
    return min(least, most) if isinstance(least, int) else most


def _window(catalog: Catalog, role: Member | Judge) -> tuple[str, int]:
    """Return a role's model name and window, capped by the training context if the model's file is on this machine."""
    from localrag.engine.echo import N_CTX_TRAIN  # noqa: PLC0415  # weight
    from localrag.engine.gguf import read_header  # noqa: PLC0415  # weight

    if role.model == "echo":
        return "echo", min(role.n_ctx or N_CTX_TRAIN, N_CTX_TRAIN)
    spec = catalog.model(role.model)
    n_ctx = role.n_ctx or spec.n_ctx
    try:
        trained = read_header(catalog.locate(spec)).n_ctx_train
    except ModelNotFoundError:
        if n_ctx is None:
            raise
        return spec.name, n_ctx
    return spec.name, min(n_ctx or trained, trained)


def _sections(council: Council, role: Member | Judge, window: int, counted: Mapping[str, int], shown_tokens: int) -> list[Section]:
    """Return the sections of a role's prompt with their maximum content. A maximum given in tokens is reserved in full."""
    profile = role.profile
    sections = [Section.fixed(name, profile.limits.get(name, counted.get(name, 0))) for name in PROTECTED]
    sections = [section for section in sections if section.basis or section.name in profile.limits]
    if profile.gap:
        sections.append(Section(name="gap", basis=profile.gap, min=profile.gap, max=profile.gap, shrink=0.0))
    had = _had(council, role)
    proposed = sum(member.sampling.num_answer_tokens for member in council.members)
    contents = {"cited": shown_tokens, "proposals": proposed, "plan": PLAN_TOKENS, "summary": SUMMARY_TOKENS}
    contents[ANSWER] = role.sampling.num_answer_tokens
    for name in SECTIONS:
        flex = profile.sections[name]
        content = contents.get(name, window)
        if isinstance(flex.max, int):
            most = min(flex.max, role.sampling.num_answer_tokens) if name == ANSWER else flex.max
            if most or name == ANSWER:
                sections.append(Section(name=name, basis=most, min=most, max=most, shrink=0.0, content=most))
        elif name in had:
            basis = min(flex.basis, content) if name == ANSWER and isinstance(flex.basis, int) else flex.basis
            sections.append(replace(flex, basis=basis, cut="never").section(name, content))
    return sections


def _had(council: Council, role: Member | Judge) -> set[str]:
    """Return the sections that a role's prompts can have, besides those for which its budget reserves tokens."""
    had = {"history", "evidence", ANSWER} | ({"summary"} if role.profile.sections["history"].cut == "summarize" else set())
    if isinstance(role, Judge):
        return had | {"cited", "proposals", "plan"} | ({"tools"} if role.max_calls else set())
    return had | ({"plan"} if council.plan else set()) | ({"proposals"} if council.review else set())


def _counted(
    council: Council, role: Member | Judge, names: tuple[str, ...], task: str, window: int, settings: Settings
) -> tuple[Counter[str], BudgetExceededError | None]:
    """Measure the sections of a task that are always sent whole, with the maximum over these roles; and return the error if any."""
    counted, error = Counter[str](), None
    setup = CouncilSetup(council=council, messages=[Message("user", task)], knowledge_bases=(), embedder=None, learning=settings.learn)
    engine = open_engine(role.model, settings=settings, vocab_only=True)
    try:
        for turn in first_turns(council):
            if (JUDGE if turn.role == PLANNER else turn.role) not in names:
                continue
            session = setup.session(engine, turn.role)
            wants = session.measure(setup.inputs(session, turn))
            counted |= wants.fixed
            try:
                wants.share(window)
            except BudgetExceededError as raised:
                error = error or raised.of(turn.role)
    finally:
        engine.close()
    return counted, error


def _of(error: BudgetExceededError, role: str, budget: str) -> BudgetExceededError:
    """Return the error with a hint for a budget table."""
    needed = error.numbers["needed"]
    return error.of(role, hint=f"Lower the maximums of [budgets.{budget}] in models.toml, or use --ctx {needed} or more.")


def _print(table: RoleTable) -> None:
    click.secho(safe(", ".join(table.roles)), bold=True)
    click.echo(f"{table.model}, window {table.window:,}, budget {table.budget}")
    columns = ("Section", "Tokens", "Window", *(("Counted",) if table.counted is not None else ()), "")
    render.table(columns, list(_rows(table)), right=("Tokens", "Window", "Counted"))
    fits = table.total_tokens <= table.window and table.error is None
    click.echo(f"Total {table.total_tokens:,} of {table.window:,} {'✓' if fits else '✗'}\n")


def _rows(table: RoleTable) -> Iterator[tuple[str, ...]]:
    def row(name: str, tokens: int, counted: int | None, more: str) -> tuple[str, ...]:
        in_task = () if table.counted is None else ("" if counted is None else f"{counted:,}",)
        return name, f"{tokens:,}", f"{table.percent(tokens):.1f}%", *in_task, more

    fixed = table.counted or {}
    for line, parts in table.lines:
        counted = sum(fixed.get(name, 0) for name in parts) if set(parts) & set(PROTECTED) else None
        yield row(line, sum(parts.values()), counted, ", ".join(f"{name} {of:,}" for name, of in parts.items()) if len(parts) > 1 else "")
    yield row("  prompt", table.prompt_tokens, None, "")
    most = table.tokens[ANSWER]
    yield row("answer", most, None, f"at least {table.answer_min:,}" if table.answer_min < most else "")


@click.command("council")
@click.argument("task", type=options.Text(), required=False)
@options.evidence_argument
@click.option("--council", "name", metavar="NAME", help="A [councils.NAME] table of models.toml.  [default: default]")
@click.option(
    "--kb",
    "-k",
    "kbs",
    multiple=True,
    callback=options.without_empty,
    metavar="NAME",
    help="Knowledge base with evidence for the decision. Repeatable.",
)
@click.option("--model", metavar="NAME|FILE", help="Model for all roles: a name in models.toml, a .gguf file, or echo.")
@options.window
@click.option(
    "--max-tokens", type=click.IntRange(min=1), metavar="N", help="Maximum length of each proposal and of the verdict, in tokens."
)
@options.max_seconds
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Number to add to the seed of each role.")
@click.option("--no-keep", is_flag=True, help="Do not record this in the journal.")
@click.option("--replay", "run_id", type=click.IntRange(min=1), metavar="ID", help="Repeat council run ID from the journal.")
@click.option("--list", "lists", is_flag=True, help="List the available councils.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event and nothing else.")
@options.models_file
def council_command(
    task: str | None,
    piped: bytes | None,
    name: str | None,
    kbs: tuple[str, ...],
    model: str | None,
    n_ctx: int | None,
    max_tokens: int | None,
    max_seconds: float | None,
    seed: int | None,
    no_keep: bool,
    run_id: int | None,
    lists: bool,
    as_json: bool,
    settings: Settings,
) -> None:
    """Have specialists propose answers to TASK and a judge decide.

    Piped text is used as evidence. To use a file on standard input too, add - after TASK.

    \b
      localrag council "Which plastic lasts outdoors?" --kb handbook
      cat build.log | localrag council "Why did it fail?"
      localrag council --replay 3
    """
    from localrag.session.council_run import CouncilCall  # noqa: PLC0415  # weight

    option_values: dict[str, object] = {
        "--council": name,
        "--kb": kbs,
        "--model": model,
        "--ctx": n_ctx,
        "--max-tokens": max_tokens,
        "--seed": seed,
    }
    option_values |= {"--max-seconds": max_seconds}
    option_names = [option for option, value in {"TASK": task, **option_values}.items() if value not in (None, ())]
    if lists:
        _check_alone("--list", [*option_names, *(["--replay"] if run_id is not None else [])])
        _show_list(settings, as_json=as_json)
        return
    if run_id is not None:
        _check_alone("--replay", option_names)
        call, digest = CouncilCall.kept(run_id, settings=settings)
        _run(call, call.open(settings), settings, keep=not no_keep, as_json=as_json, digest=digest)
        return
    if task is None:
        raise UsageError("TASK is missing.", hint="Give a task, or repeat an earlier run with --replay ID.")
    evidence, _ = options.piped_evidence(piped)
    call = CouncilCall(
        task=task,
        council=name or "default",
        kbs=tuple(dict.fromkeys(kbs)),
        model=model,
        n_ctx=n_ctx,
        max_tokens=max_tokens,
        seed=seed,
        piped=evidence,
        max_seconds=max_seconds,
    )
    _run(call, call.open(settings), settings, keep=not no_keep, as_json=as_json)


def _check_alone(option: str, others: list[str]) -> None:
    if others:
        raise UsageError(f"{option} and {others[0]} exclude each other.", hint="Leave one out.")


def _run(call: CouncilCall, council: Council, settings: Settings, *, keep: bool, as_json: bool, digest: str | None = None) -> None:
    """Run a council and show its progress. For a replay, `digest` is the council's digest in the earlier run."""
    from localrag.cli.council_render import CouncilView  # noqa: PLC0415  # weight
    from localrag.session.council_run import open_run  # noqa: PLC0415  # weight

    if digest is not None and digest != council.digest:
        note(f"Warning: the council {council.name} has changed since that run, so the verdict may differ.")
    view = CouncilView(council.name)
    on_event = emit if as_json else view.on_event
    with (
        view,
        open_run(
            call, council, settings=settings, keep=keep, started_at=options.started_at(), on_event=on_event, on_text=view.on_text
        ) as run,
        first_interrupt(run.cancel),
    ):
        run.decide()


def _show_list(settings: Settings, *, as_json: bool) -> None:
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    councils = [catalog.council(name) for name in catalog.councils()]
    if as_json:
        emit({"councils": [_entry(each) for each in councils]})
        return
    rows = [
        (each.name, ", ".join(member.name for member in each.members), *("yes" if is_so else "" for is_so in (each.plan, each.review)))
        for each in councils
    ]
    render.table(("Council", "Members", "Plan", "Review"), rows)


def _entry(council: Council) -> dict[str, object]:
    members = [{"name": each.name, "model": each.model, "n_ctx": each.n_ctx, "tags": list(each.tags)} for each in council.members]
    judge = {"model": council.judge.model, "n_ctx": council.judge.n_ctx, "tools": list(council.judge.tools)}
    return {"name": council.name, "members": members, "judge": judge, "plan": council.plan, "review": council.review}
