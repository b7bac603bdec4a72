"""council: specialists propose, a judge decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from localrag.cli import options, render
from localrag.cli.live_area import first_interrupt
from localrag.cli.text import emit, note
from localrag.errors import UsageError
from localrag.settings import Settings

if TYPE_CHECKING:
    from localrag.deliberation import Council
    from localrag.session.council_run import CouncilCall


@click.command("council")
@click.argument("task", type=options.Text(), required=False)
@options.evidence_argument
@click.option("--council", "name", metavar="NAME", help="A [councils.NAME] table of models.toml.  [default: default]")
@click.option("--kb", "kbs", multiple=True, metavar="NAME", help="A knowledge base to decide from. Repeatable.")
@click.option("--model", metavar="NAME|FILE", help="Model for all roles: a name in models.toml, a .gguf file, or echo.")
@options.window
@click.option(
    "--max-tokens", type=click.IntRange(min=1), metavar="N", help="Maximum length of each proposal and of the verdict, in tokens."
)
@options.max_seconds
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Number added to the seed of each role.")
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

    Text from a pipe is evidence; - after TASK makes any standard input evidence.

    \b
      localrag council "Which plastic lasts outdoors?" --kb handbook
      cat build.log | localrag council "Why did it fail?"
      localrag council --replay 3
    """
    from localrag.session.council_run import CouncilCall  # noqa: PLC0415  # weight

    given: dict[str, object] = {
        "--council": name,
        "--kb": kbs,
        "--model": model,
        "--ctx": n_ctx,
        "--max-tokens": max_tokens,
        "--seed": seed,
    }
    given |= {"--max-seconds": max_seconds}
    named = [option for option, value in {"TASK": task, **given}.items() if value not in (None, ())]
    if lists:
        _check_alone("--list", [*named, *(["--replay"] if run_id is not None else [])])
        _show_list(settings, as_json=as_json)
        return
    if run_id is not None:
        _check_alone("--replay", named)
        call, digest = CouncilCall.kept(run_id, settings=settings)
        _run(call, call.open(settings), settings, keep=not no_keep, as_json=as_json, digest=digest)
        return
    if task is None:
        raise UsageError("There is no TASK.", hint="Give one, or a run to repeat with --replay ID.")
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
    """Have the council sit and show it. `digest` is what it had when it sat before."""
    from localrag.cli.council_render import CouncilView  # noqa: PLC0415  # weight
    from localrag.session.council_run import open_run  # noqa: PLC0415  # weight

    if digest is not None and digest != council.digest:
        note(f"Warning: the council {council.name} was changed since: the verdict can be another one.")
    view = CouncilView(council.name)
    on_event = emit if as_json else view.on_event
    with (
        view,
        open_run(
            call, council, settings=settings, keep=keep, started_at=options.started_at(), on_event=on_event, on_text=view.on_text
        ) as sitting,
        first_interrupt(sitting.cancel),
    ):
        sitting.hold()


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
