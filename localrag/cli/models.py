"""The commands models and tokens: list, fetch, verify and optimize the models of models.toml, and count tokens with one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.catalog import Catalog, VerifyResult
from localrag.cli import options, render
from localrag.cli.terminal import emit, note
from localrag.errors import ModelFileError, TemplateError, counted
from localrag.session import open_engine
from localrag.settings import Settings
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.engine.optimize import Candidate, Comparison, Kept, Limits, Measured
    from localrag.types import ModelSpec


@click.command("tokens")
@click.argument("text", type=options.Text())
@options.models_file
@options.model
@click.option("--show", is_flag=True, help="Show the text of each token.")
@options.as_json
def tokens_command(text: str, settings: Settings, model: str | None, chat_template: Path | None, show: bool, as_json: bool) -> None:
    """Count the tokens of TEXT with the model's own tokenizer. Special tokens are not parsed, and no BOS token is added."""
    with open_engine(model, settings=settings, chat_template=chat_template, vocab_only=True) as engine:
        token_ids = engine.tokenizer.encode(text)
        pieces = [engine.tokenizer.piece(token_id) for token_id in token_ids] if show else []
    render.tokens(token_ids, pieces, as_json=as_json, show=show)


MANY_BITS = ("F32", "F16", "BF16")


def optimize(
    name: str | None,
    settings: Settings,
    *,
    types: Sequence[str],
    max_kl: float,
    min_speedup: float,
    yes: bool,
    as_json: bool,
) -> None:
    """Make and measure the candidates, show the comparison, and keep the best one if confirmed."""
    from localrag.engine.optimize import Bench, Limits, check_type, keep, sha256_of, workshop  # noqa: PLC0415  # weight  # noqa: PLC0415  # weight
    from localrag.engine.sandbox import ensure_safe  # noqa: PLC0415  # weight

    weight_types = [check_type(each) for each in types]
    limits = Limits(max_kl=max_kl, min_speedup=min_speedup)
    catalog = Catalog.load(settings)
    spec = catalog.model(name)
    source = catalog.open(spec)
    folder = settings.models_dir / "optimized"
    with workshop(folder) as stage:
        with render.Progress(f"optimize {spec.name}") as progress:
            bench = Bench(source, stage=stage, home=settings.home, progress=progress)
            if spec.sha256 is None:
                ensure_safe(source, home=settings.home)
            compared = bench.compare(weight_types, limits)
        if not as_json:
            _show_comparison(compared, limits)
        candidate = compared.best if yes or (not as_json and _confirm(compared.best)) else None
        file = None
        if candidate is not None and candidate.measured is not None:
            file = keep(candidate.measured, folder, source=source, source_sha256=spec.sha256 or sha256_of(source))
    if as_json:
        facts = None if file is None or candidate is None else {**file.to_dict(), "models_toml": toml_lines(spec, candidate, file)}
        emit(_comparison_facts(spec, compared, limits, facts))
    elif file is not None and candidate is not None:
        _show_kept(spec, candidate, file)
    elif compared.best is not None:
        note("Nothing was kept. Use --yes to keep the fastest candidate within the limits.")


def _confirm(best: Candidate | None) -> bool:
    """Ask at the terminal whether to keep the candidate. Returns False without a terminal."""
    if best is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return click.confirm(f"Keep {best.file_type}? The original is not changed.", default=False, err=True)


def _show_comparison(compared: Comparison, limits: Limits) -> None:
    """Print a table of the original and the candidates, and notes about the result."""
    from localrag.engine.attention import ANSWER_TOKENS, PROMPT_TOKENS  # noqa: PLC0415  # weight

    original = compared.original
    columns = ("Type", "Size", "Prompt tok/s", "Decode tok/s", "Speed", "Perplexity", "KL", "Same top 1", "Verdict")
    rows = [(f"{original.file_type} (original)", *_figures(original, 1.0), "")]
    for each in compared.candidates:
        best = "the fastest within the limits" if each is compared.best else "within the limits"
        figures = ("",) * 7 if each.measured is None else _figures(each.measured, each.speedup or 0.0)
        rows.append((each.file_type, *figures, each.problem or best))
    render.table(columns, rows, right=columns[1:8])
    note(
        f"Speed is relative to the original, for a prompt of {PROMPT_TOKENS} tokens and an answer of {ANSWER_TOKENS}. "
        f"KL (in nats) and same top 1 are measured over {original.quality.num_tokens} tokens of a built-in text. "
        f"Limits: KL at most {limits.max_kl:g} (--max-kl), speed at least {limits.min_speedup:g} times (--min-speedup)."
    )
    if compared.best is None:
        note("No candidate is better within these limits. Nothing was kept, and the original is unchanged.")
    if original.file_type not in MANY_BITS:
        note(f"The original is already quantised ({original.file_type}). Starting from the model's 16-bit file would lose less quality.")


def _figures(measured: Measured, speedup: float) -> tuple[str, ...]:
    quality = measured.quality
    return (
        render.size(measured.size_bytes),
        f"{measured.prompt_tokens_per_s:.0f}",
        f"{measured.decode_tokens_per_s:.0f}",
        f"{speedup:.2f} x",
        f"{quality.perplexity:.2f}",
        f"{quality.mean_kl:.4f}",
        f"{quality.top1_agreement:.1%}",
    )


def _show_kept(spec: ModelSpec, candidate: Candidate, file: Kept) -> None:
    click.echo(str(file.path))
    note("To use it, give its path as --model, or add these lines to models.toml to give it a name:")
    note(safe("\n" + toml_lines(spec, candidate, file)))


def toml_lines(spec: ModelSpec, candidate: Candidate, file: Kept) -> str:
    """Return a models.toml table for a kept file, with the settings of the original's table."""
    stem = Path(spec.source).stem if spec.kind == "path" and spec.name.endswith(".gguf") else spec.name
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{stem}-{candidate.file_type}".lower()).strip("-")
    values: list[tuple[str, object]] = [("path", str(file.path)), ("sha256", file.sha256)]
    if spec.n_ctx is not None:
        values.append(("n_ctx", spec.n_ctx))
    if spec.chat_template is not None:
        values.append(("chat_template", str(spec.chat_template.absolute())))
    lines = [f"[models.{name}]", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values)]
    return "\n".join(lines)


def _comparison_facts(spec: ModelSpec, compared: Comparison, limits: Limits, file_facts: dict[str, object] | None) -> dict[str, object]:
    return {
        "model": spec.name,
        "original": {**compared.original.to_dict(), "path": str(compared.original.path)},
        "candidates": [each.to_dict() for each in compared.candidates],
        "limits": asdict(limits),
        "best": None if compared.best is None else compared.best.file_type,
        "kept": file_facts,
    }


@click.group("models")
def models_command() -> None:
    """List, show, fetch, verify and optimize models, embedders and rerankers."""


@models_command.command("list")
@options.models_file
@options.as_json
def list_command(settings: Settings, as_json: bool) -> None:
    """List the models, embedders and rerankers in models.toml, and name the models.toml files in use."""
    catalog = Catalog.load(settings)
    rows, files = catalog.rows(), [str(file.absolute()) for file in catalog.files]
    if as_json:
        emit({"file": files[0], "files": files, "models": [row.to_dict() for row in rows]})
        return
    cells = [
        (
            f"{row.name}{' (default)' if row.is_default else ''}",
            row.thing,
            "yes" if row.present else "no",
            render.size(row.size_bytes),
            row.source,
        )
        for row in rows
    ]
    render.table(("Name", "Kind", "Here", "Size", "Source"), cells, right=("Size",))
    render.models_files(settings)
    absent = [row.name for row in rows if not row.present and catalog.entry(row.name).kind != "path"]
    if absent:
        note(f"Fetch one with: localrag models pull {absent[0]}")


@models_command.command("show")
@click.argument("name", required=False)
@options.models_file
@options.window
@options.as_json
def show_command(name: str | None, settings: Settings, n_ctx: int | None, as_json: bool) -> None:
    """Show the metadata of a model's file and its window on this machine. NAME can be a .gguf file."""
    catalog = Catalog.load(settings)
    if name in catalog.embedders or name in catalog.rerankers:
        data = next(row for row in catalog.rows() if row.name == name).to_dict()
    else:
        data = _model_facts(catalog, name, n_ctx)
    if as_json:
        emit(data)
        return
    if data.get("chat_template"):
        data["chat_template"] = counted(len(str(data["chat_template"])), "character")
    render.table(("Field", "Value"), [(field, _readable(value)) for field, value in data.items()])


def _readable(value: object) -> str:
    """Format a JSON value for people: "yes" for true, commas between items."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_readable(each)}" for key, each in value.items() if each is not None)
    if isinstance(value, list | tuple):
        runs = [(_readable(each), len(list(same))) for each, same in groupby(value)]
        return ", ".join(each if num == 1 else f"{each} ({num} times)" for each, num in runs)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _model_facts(catalog: Catalog, name: str | None, n_ctx: int | None) -> dict[str, object]:
    from localrag.engine.gguf import read_header  # noqa: PLC0415  # weight
    from localrag.engine.memory import make_slot  # noqa: PLC0415  # weight
    from localrag.session.opening import read_template  # noqa: PLC0415  # weight

    spec = catalog.model(name)
    info = read_header(catalog.locate(spec))
    slot = make_slot(info, n_ctx if n_ctx is not None else spec.n_ctx)
    source = read_template(spec.chat_template) if spec.chat_template is not None else info.chat_template
    return {"model": spec.name, **info.to_dict(), "tool_calls": None if source is None else _tool_calls(source), "slot": slot.to_dict()}


def _tool_calls(source: str) -> dict[str, object] | None:
    """Return how models of a chat template write a tool call, and whether that is the template's own form; None for one that fails."""
    from localrag.engine.template import JinjaChatTemplate  # noqa: PLC0415  # weight
    from localrag.types import ToolCall  # noqa: PLC0415  # weight

    try:
        with JinjaChatTemplate(source) as template:
            example = template.call_markup.written([ToolCall("tool", {"parameter": "value"}, "call00000")])
            return {"known": template.knows_calls, "example": example}
    except TemplateError:
        return None


@models_command.command("pull")
@click.argument("names", nargs=-1)
@options.models_file
def pull_command(names: tuple[str, ...], settings: Settings) -> None:
    """Fetch models, embedders and rerankers by NAME, by default the default model and embedder. An interrupted pull can be resumed."""
    catalog = Catalog.load(settings)
    specs = [catalog.entry(name) for name in names] or [catalog.model(), catalog.embedder()]
    for spec in specs:
        with render.Progress(spec.name) as progress:
            path = catalog.pull(spec, progress)
        click.echo(f"{spec.name}: {path}")


@models_command.command("verify")
@click.argument("names", nargs=-1)
@options.models_file
@options.as_json
def verify_command(names: tuple[str, ...], settings: Settings, as_json: bool) -> None:
    """Hash the files of NAMES, by default of everything on this machine, and compare the hashes with models.toml."""
    catalog = Catalog.load(settings)
    specs = [catalog.entry(name) for name in names] or [catalog.entry(row.name) for row in catalog.rows() if row.present]
    results: list[VerifyResult] = [catalog.verify(spec) for spec in specs]
    if as_json:
        emit({"results": [result.to_dict() for result in results]})
    else:
        words = {True: "ok", False: "DIFFERS", None: "models.toml has no sha256"}
        render.table(("Name", "sha256", "Check"), [(result.name, result.actual, words[result.ok]) for result in results])
    wrong = [result.name for result in results if result.ok is False]
    if wrong and not as_json:
        raise ModelFileError(f"{', '.join(wrong)} differs from models.toml.", hint=f"localrag models pull {wrong[0]}")
    if wrong:
        raise click.exceptions.Exit(ModelFileError.exit_code)


@models_command.command("optimize")
@click.argument("name", required=False)
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Weight type to try, such as Q8_0. Repeatable.")
@click.option(
    "--max-kl",
    type=options.Number(min=0.0),
    default=0.05,
    show_default=True,
    metavar="NATS",
    help="Maximum distance from the original: mean KL divergence of the next token.",
)
@click.option(
    "--min-speedup",
    type=options.Number(min=0.0),
    default=1.1,
    show_default=True,
    metavar="TIMES",
    help="Minimum speedup. Below 1.1, differences are noise on most machines.",
)
@click.option("--yes", is_flag=True, help="Keep the fastest file within the limits without confirmation.")
@options.models_file
@options.as_json
def optimize_command(
    name: str | None, types: tuple[str, ...], max_kl: float, min_speedup: float, yes: bool, settings: Settings, as_json: bool
) -> None:
    """Convert NAME to weight types that suit this processor, and compare their speed and quality with the original.

    Nothing is kept unless you confirm it, and the original is never changed. A KL divergence of 0.05 is about the cost of 4-bit weights
    compared with 16-bit weights; Q8_0 and BF16 are far below it. Files that are already quantised lose more with few bits.
    """
    optimize(name, settings, types=types, max_kl=max_kl, min_speedup=min_speedup, yes=yes, as_json=as_json)
