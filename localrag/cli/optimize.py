"""models optimize: other weight types of a model, measured here and offered."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.catalog import Catalog
from localrag.cli import display
from localrag.cli.text import emit, note, safe
from localrag.settings import Settings

if TYPE_CHECKING:
    from localrag.engine.optimize import Candidate, Comparison, Kept, Limits, Measured
    from localrag.model import ModelSpec

MANY_BITS = ("F32", "F16", "BF16")


def run(
    name: str | None,
    settings: Settings,
    *,
    types: Sequence[str],
    max_kl: float,
    min_speedup: float,
    yes: bool,
    as_json: bool,
) -> None:
    """The body of the command: make and measure, show, ask, keep."""
    from localrag.engine.optimize import Bench, Limits, keep, sha256_of  # noqa: PLC0415  # weight
    from localrag.engine.quantize import check_type, workshop  # noqa: PLC0415  # weight
    from localrag.engine.trial import ensure_safe  # noqa: PLC0415  # weight

    wanted = [check_type(each) for each in types]
    limits = Limits(max_kl=max_kl, min_speedup=min_speedup)
    catalog = Catalog.load(settings)
    spec = catalog.model(name)
    source = catalog.open(spec)
    folder = settings.models_dir / "optimized"
    with workshop(folder) as stage:
        with display.Progress(f"optimize {spec.name}") as progress:
            bench = Bench(source, stage=stage, home=settings.home, progress=progress)
            if spec.sha256 is None:
                ensure_safe(source, home=settings.home)
            compared = bench.compare(wanted, limits)
        if not as_json:
            show(compared, limits)
        chosen = compared.best if yes or (not as_json and _asked(compared.best)) else None
        kept = None
        if chosen is not None and chosen.measured is not None:
            kept = keep(chosen.measured, folder, source=source, source_sha256=spec.sha256 or sha256_of(source))
    if as_json:
        facts = None if kept is None or chosen is None else {**kept.to_dict(), "models_toml": toml_lines(spec, chosen, kept)}
        emit(_facts(spec, compared, limits, facts))
    elif kept is not None and chosen is not None:
        _show_kept(spec, chosen, kept)
    elif compared.best is not None:
        note("Nothing was kept; --yes keeps the fastest within the limits.")


def _asked(best: Candidate | None) -> bool:
    """What the person at the terminal says; no where there is none."""
    if best is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return click.confirm(f"Keep {best.file_type}? The original stays as it is.", default=False, err=True)


def show(compared: Comparison, limits: Limits) -> None:
    """The original and every candidate in a table, and what follows."""
    from localrag.engine.attention import ANSWER_TOKENS, PROMPT_TOKENS  # noqa: PLC0415  # weight

    original = compared.original
    columns = ("Type", "Size", "Prompt tok/s", "Decode tok/s", "Speed", "Perplexity", "KL", "Same top 1", "Verdict")
    rows = [(f"{original.file_type} (original)", *_figures(original, 1.0), "")]
    for each in compared.candidates:
        best = "the fastest within the limits" if each is compared.best else "within the limits"
        figures = ("",) * 7 if each.measured is None else _figures(each.measured, each.speedup or 0.0)
        rows.append((each.file_type, *figures, each.problem or best))
    display.table(columns, rows, right=columns[1:8])
    note(
        f"Speed is that of a question and its sources ({PROMPT_TOKENS} tokens) and an answer ({ANSWER_TOKENS}), against the original's. "
        f"KL in nats and the same likeliest token: over {original.quality.num_tokens} tokens of a text that ships. "
        f"Limits: KL at most {limits.max_kl:g} (--max-kl), speed at least {limits.min_speedup:g} times (--min-speedup)."
    )
    if compared.best is None:
        note("Nothing is better here within these limits: the original stays, and nothing was kept.")
    if original.file_type not in MANY_BITS:
        note(
            f"The original is {original.file_type}: what is made of it is quantised twice. From the model's 16-bit file it would lose less."
        )


def _figures(measured: Measured, speedup: float) -> tuple[str, ...]:
    found = measured.quality
    return (
        display.size(measured.size_bytes),
        f"{measured.prompt_tokens_per_s:.0f}",
        f"{measured.decode_tokens_per_s:.0f}",
        f"{speedup:.2f} x",
        f"{found.perplexity:.2f}",
        f"{found.mean_kl:.4f}",
        f"{found.top1_agreement:.1%}",
    )


def _show_kept(spec: ModelSpec, chosen: Candidate, kept: Kept) -> None:
    click.echo(str(kept.path))
    note("Use it by its path wherever a model's name is taken (--model), or by a name with these lines in models.toml:")
    note(safe("\n" + toml_lines(spec, chosen, kept)))


def toml_lines(spec: ModelSpec, chosen: Candidate, kept: Kept) -> str:
    """The table of models.toml that names a kept file; what the original's table asks for is asked for again."""
    stem = Path(spec.source).stem if spec.kind == "path" and spec.name.endswith(".gguf") else spec.name
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{stem}-{chosen.file_type}".lower()).strip("-")
    values: list[tuple[str, object]] = [("path", str(kept.path)), ("sha256", kept.sha256)]
    if spec.n_ctx is not None:
        values.append(("n_ctx", spec.n_ctx))
    if spec.chat_template is not None:
        values.append(("chat_template", str(spec.chat_template.absolute())))
    lines = [f"[models.{name}]", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values)]
    return "\n".join(lines)


def _facts(spec: ModelSpec, compared: Comparison, limits: Limits, kept: dict[str, object] | None) -> dict[str, object]:
    return {
        "model": spec.name,
        "original": {**compared.original.to_dict(), "path": str(compared.original.path)},
        "candidates": [each.to_dict() for each in compared.candidates],
        "limits": asdict(limits),
        "best": None if compared.best is None else compared.best.file_type,
        "kept": kept,
    }
