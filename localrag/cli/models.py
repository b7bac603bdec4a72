"""models: what models.toml names, and what is on this machine."""

from __future__ import annotations

import click

from localrag.catalog import Catalog, VerifyResult
from localrag.cli import display, options
from localrag.cli.text import emit, note
from localrag.errors import ModelFileError
from localrag.settings import Settings


@click.group("models")
def models_command() -> None:
    """List, show, fetch, verify and optimize models, embedders and rerankers."""


@models_command.command("list")
@options.models_file
@options.as_json
def list_command(settings: Settings, as_json: bool) -> None:
    """List the models, embedders and rerankers of models.toml."""
    catalog = Catalog.load(settings)
    rows = catalog.rows()
    if as_json:
        emit({"file": str(catalog.file), "models": [row.to_dict() for row in rows]})
        return
    cells = [
        (
            f"{row.name}{' (default)' if row.is_default else ''}",
            row.thing,
            "yes" if row.present else "no",
            display.size(row.size_bytes),
            row.source,
        )
        for row in rows
    ]
    display.table(("Name", "Kind", "Here", "Size", "Source"), cells, right=("Size",))
    absent = [row.name for row in rows if not row.present]
    if absent:
        note(f"Fetch one with: localrag models pull {absent[0]}")


@models_command.command("show")
@click.argument("name", required=False)
@options.models_file
@options.window
@options.as_json
def show_command(name: str | None, settings: Settings, n_ctx: int | None, as_json: bool) -> None:
    """Show what a model's file says of itself, and the window it would get here. NAME can be a .gguf file."""
    catalog = Catalog.load(settings)
    if name in catalog.embedders or name in catalog.rerankers:
        data = next(row for row in catalog.rows() if row.name == name).to_dict()
    else:
        data = _model_facts(catalog, name, n_ctx)
    if as_json:
        emit(data)
        return
    if data.get("chat_template"):
        data["chat_template"] = f"{len(str(data['chat_template']))} characters"
    display.table(("Field", "Value"), data.items())


def _model_facts(catalog: Catalog, name: str | None, n_ctx: int | None) -> dict[str, object]:
    from localrag.engine.gguf import read_header  # noqa: PLC0415  # weight
    from localrag.engine.memory import make_slot  # noqa: PLC0415  # weight

    spec = catalog.model(name)
    info = read_header(catalog.locate(spec))
    slot = make_slot(info, n_ctx if n_ctx is not None else spec.n_ctx)
    return {"model": spec.name, **info.to_dict(), "slot": slot.to_dict()}


@models_command.command("pull")
@click.argument("names", nargs=-1)
@options.models_file
def pull_command(names: tuple[str, ...], settings: Settings) -> None:
    """Fetch models, embedders and rerankers by NAME; without one, the defaults. Interrupt it and pull again as you like."""
    catalog = Catalog.load(settings)
    specs = [catalog.entry(name) for name in names] or [catalog.model(), catalog.embedder()]
    for spec in specs:
        with display.Progress(spec.name) as progress:
            path = catalog.pull(spec, progress)
        click.echo(f"{spec.name}: {path}")


@models_command.command("verify")
@click.argument("names", nargs=-1)
@options.models_file
@options.as_json
def verify_command(names: tuple[str, ...], settings: Settings, as_json: bool) -> None:
    """Hash the files of NAMEs, or of everything that is here, and compare with models.toml."""
    catalog = Catalog.load(settings)
    chosen = [catalog.entry(name) for name in names] or [catalog.entry(row.name) for row in catalog.rows() if row.present]
    results: list[VerifyResult] = [catalog.verify(spec) for spec in chosen]
    if as_json:
        emit({"results": [result.to_dict() for result in results]})
    else:
        words = {True: "ok", False: "DIFFERS", None: "no sha256 in models.toml"}
        display.table(("Name", "sha256", "Check"), [(result.name, result.actual, words[result.ok]) for result in results])
    wrong = [result.name for result in results if result.ok is False]
    if wrong and not as_json:
        raise ModelFileError(f"{', '.join(wrong)} differs from models.toml.", hint=f"localrag models pull {wrong[0]}")
    if wrong:
        raise click.exceptions.Exit(ModelFileError.exit_code)


@models_command.command("optimize")
@click.argument("name", required=False)
@click.option("--type", "types", multiple=True, metavar="TYPE", help="A weight type to try, such as Q8_0; repeat it for several.")
@click.option(
    "--max-kl",
    type=options.Number(min=0.0),
    default=0.05,
    show_default=True,
    metavar="NATS",
    help="How far a file may be from the original: mean KL divergence of the next token.",
)
@click.option(
    "--min-speedup",
    type=options.Number(min=0.0),
    default=1.1,
    show_default=True,
    metavar="TIMES",
    help="How much faster it must be; less than 1.1 is noise on most machines.",
)
@click.option("--yes", is_flag=True, help="Keep the fastest file within the limits without asking.")
@options.models_file
@options.as_json
def optimize_command(
    name: str | None, types: tuple[str, ...], max_kl: float, min_speedup: float, yes: bool, settings: Settings, as_json: bool
) -> None:
    """Make NAME anew in weight types that suit this processor, and measure them beside it: speed, and how close they are.

    Nothing is kept unless you say so, and the original is never changed. A KL divergence of 0.05 is about what 4-bit weights cost
    against 16-bit ones; Q8_0 and BF16 stay far below it. A file that is quantised already loses more with few bits.
    """
    from localrag.cli.optimize import run  # noqa: PLC0415  # weight

    run(name, settings, types=types, max_kl=max_kl, min_speedup=min_speedup, yes=yes, as_json=as_json)
