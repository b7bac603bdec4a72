"""The commands models and tokens: list, recommend, fetch, verify and optimize the models of models.toml, and count tokens with one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from localrag.catalog import Catalog, VerifyResult
from localrag.cli import options, render
from localrag.cli.terminal import can_ask, emit, note
from localrag.errors import ModelError, ModelFileError, TemplateError, counted
from localrag.session import open_engine
from localrag.settings import Settings
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.catalog.hub import HubFile, Listing
    from localrag.engine.optimize import Candidate, Comparison, Kept, Limits, Measured
    from localrag.session.recommend import Candidate as ModelChoice
    from localrag.session.recommend import Recommendation
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
    from localrag.engine.gguf import read_header  # noqa: PLC0415  # weight
    from localrag.engine.optimize import Bench, Limits, check_type, keep, sha256_of, trained_for, workshop  # noqa: PLC0415  # weight
    from localrag.engine.sandbox import ensure_safe  # noqa: PLC0415  # weight

    weight_types = [check_type(each) for each in types]
    limits = Limits(max_kl=max_kl, min_speedup=min_speedup)
    catalog = Catalog.load(settings)
    spec = catalog.model(name)
    source = catalog.open(spec)
    folder = settings.models_dir / "optimized"
    trained = trained_for(read_header(source))
    if trained is not None:
        note(
            f"Warning: {spec.name} seems to have been trained for its quantization ({trained}). Other types usually lose quality and "
            "gain little."
        )
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
        emit({**_comparison_facts(spec, compared, limits, facts), "trained_for_quantization": trained})
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
    """List, show, recommend, fetch, verify and optimize models, embedders and rerankers."""


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
@click.argument("names", nargs=-1, metavar="[NAME|OWNER/REPO[:QUANT]]...")
@options.models_file
@options.as_json
def pull_command(names: tuple[str, ...], settings: Settings, as_json: bool) -> None:
    """Fetch models, embedders and rerankers, by default the default model and embedder. An interrupted pull can be resumed.

    \b
      localrag models pull qwen3.5-4b
      localrag models pull unsloth/Qwen3.5-9B-GGUF            lists the quantizations that it has
      localrag models pull unsloth/Qwen3.5-9B-GGUF:Q4_K_M     fetches one, and adds it to models.toml in the home

    A file of the hub is verified with the sha256 that the hub states, which is kept for later. A split file is fetched with all its parts.
    """
    catalog = Catalog.load(settings)
    if not names and not as_json and can_ask():
        options.offer_model(settings, None)
        catalog = Catalog.load(settings)
    specs = []
    for name in names:
        if name not in catalog.names() and (repo := _repository(name)) is not None:
            if (spec := _choose_file(catalog, settings, *repo, as_json=as_json)) is None:
                return
            specs.append(spec)
        else:
            specs.append(catalog.entry(name))
    paths = {spec.name: str(options.fetch(catalog, spec)) for spec in specs or [catalog.model(), catalog.embedder()]}
    if as_json:
        emit({"pulled": [{"name": name, "path": path} for name, path in paths.items()]})
        return
    for name, path in paths.items():
        click.echo(f"{name}: {path}")


_REPOSITORY = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[\w][\w.-]{0,95}?)(?::(?P<quantization>[\w.-]{1,64}))?", re.ASCII)


def _repository(text: str) -> tuple[str, str | None] | None:
    """Read `owner/repo` or `owner/repo:QUANT`. None for anything else."""
    match = _REPOSITORY.fullmatch(text)
    if match is None or ".." in text or "--" in match["repo"] or text.endswith(".gguf"):
        return None
    return match["repo"], match["quantization"]


def _choose_file(catalog: Catalog, settings: Settings, repo: str, quantization: str | None, *, as_json: bool) -> ModelSpec | None:
    """Return the entry of a repository's file, added to the home's models.toml. Without a quantization, list what there is if several."""
    from localrag.catalog import save_in_home  # noqa: PLC0415  # only for a repository

    listing = catalog.listing(repo)
    if not listing.files:
        raise ModelError(f"{repo} holds no GGUF model.", hint="Look for a repository whose name ends with GGUF.", repo=repo)
    if quantization is None and len(listing.files) > 1:
        _show_listing(listing, settings, as_json=as_json)
        return None
    file = listing.files[0] if quantization is None else listing.choose(quantization)
    spec = catalog.pulled_entry(listing, file)
    if spec.name not in catalog.names():
        where = save_in_home(settings, entry=spec)
        note(f"Added [models.{json.dumps(spec.name)}] to {safe(str(where))}.")
    return spec


def _show_listing(listing: Listing, settings: Settings, *, as_json: bool) -> None:
    """Show the files of a repository with their sizes, the window that fits here, and their speed."""
    from localrag.session.recommend import judge_listing  # noqa: PLC0415  # weight

    choices = judge_listing(listing, settings, on_measure=options.tell_measuring)
    if as_json:
        emit({"repo": listing.repo, "license": listing.license, "files": [_file_facts(*each) for each in choices]})
        return
    rows = [
        (file.quantization, render.size(file.size_bytes), len(file.parts), *_figures_of(choice), choice.problem or "runs well")
        for file, choice in choices
    ]
    columns = ("Quantization", "Size", "Parts", "Window", "First token", "Tokens/s", "Here")
    render.table(columns, rows, right=columns[1:6])
    note(f"License: {safe(listing.license or 'not stated')}. Fetch one with: localrag models pull {listing.repo}:{_suggested(choices)}")


def _file_facts(file: HubFile, choice: ModelChoice) -> dict[str, object]:
    facts = choice.to_dict()
    kept = ("size_bytes", "n_ctx_train", "window", "needed_bytes", "first_token_s", "tokens_per_s", "problem")
    return {"quantization": file.quantization, "parts": list(file.parts), **{name: facts[name] for name in kept}}


def _suggested(choices: Sequence[tuple[HubFile, ModelChoice]]) -> str:
    """The quantization to name in the hint: Q4_K_M if it runs, else the largest that does, else the smallest."""
    good = [file.quantization for file, choice in choices if choice.problem is None]
    return "Q4_K_M" if "Q4_K_M" in good else good[-1] if good else choices[0][0].quantization


class Memory(click.ParamType[int]):
    """An amount of memory such as `8GB`, in bytes."""

    name = "size"
    _UNITS: ClassVar = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401  # click's signature
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([kmgt]i?)?b?", str(value).strip().lower(), re.ASCII)
        if match is None or not float(match[1]):
            self.fail(f"{value!r} is not a size such as 8GB.", param, ctx)
        return round(float(match[1]) * self._UNITS[match[2] or ""])


@models_command.command("recommend")
@click.option("--memory", "memory_bytes", type=Memory(), metavar="SIZE", help="Plan for a machine with this much memory, e.g. 8GB.")
@click.option("--kb", metavar="NAME", help="Plan for questions to this knowledge base.")
@click.option(
    "--max-seconds",
    type=options.Number(0, 86_400, min_open=True),
    default=30,
    show_default=True,
    metavar="S",
    help="Maximum time to the first token of an answer.",
)
@click.option(
    "--min-speed",
    type=options.Number(0),
    default=5,
    show_default=True,
    metavar="TOKENS",
    help="Minimum tokens per second of an answer. People read about 5.",
)
@click.option("--measure", "again", is_flag=True, help="Measure the speed of this machine again.")
@options.models_file
@options.as_json
def recommend_command(
    memory_bytes: int | None, kb: str | None, max_seconds: float, min_speed: float, again: bool, settings: Settings, as_json: bool
) -> None:
    """Compare the models of models.toml on this machine, and recommend the largest that fits and is fast enough.

    \b
      localrag models recommend
      localrag models recommend --kb handbook --max-seconds 10
      localrag models recommend --memory 8GB

    Times are for a typical question: its evidence is the median of the questions recorded so far. They are estimated from the speed of
    llama.cpp on this machine, or measured if the model already ran here. --memory keeps the speed of this machine.
    """
    from localrag.session.opening import open_knowledge_base  # noqa: PLC0415  # weight
    from localrag.session.recommend import Limits, recommend  # noqa: PLC0415  # weight

    limits = Limits(first_token_s=max_seconds, tokens_per_s=min_speed)
    if kb is not None:
        with open_knowledge_base(kb, settings=settings) as knowledge_base:
            kb = knowledge_base.name
    found = recommend(settings, memory_bytes=memory_bytes, kb=kb, limits=limits, again=again, on_measure=options.tell_measuring)
    if as_json:
        emit(found.to_dict())
        return
    rows = [
        (
            each.name,
            render.size(each.size_bytes) + _mark(each, "size_bytes"),
            "yes" if each.is_here else "no",
            *_figures_of(each),
            (each.license or "") + _mark(each, "license"),
            each.problem or ("recommended" if each is found.best else "runs well"),
        )
        for each in found.candidates
    ]
    columns = ("Name", "Size", "Here", "Window", "First token", "Tokens/s", "License", "On this machine")
    render.table(columns, rows, right=("Size", "Window", "First token", "Tokens/s"))
    _explain(found)


def _mark(choice: ModelChoice, field: str) -> str:
    return " ?" if field in choice.unverified else ""


def _figures_of(choice: ModelChoice) -> tuple[str, str, str]:
    """The window, seconds to the first token and tokens per second of a model, with ~ for estimates."""
    window = f"{choice.window:,}" if choice.window else ""
    if choice.first_token_s is None or choice.tokens_per_s is None:
        return window, "", ""
    about = "" if choice.is_measured else "~"
    return window, f"{about}{choice.first_token_s:.{1 if choice.first_token_s < 10 else 0}f} s", f"{about}{choice.tokens_per_s:.1f}"


def _explain(found: Recommendation) -> None:
    """Say what the table assumes, and what to do."""
    from localrag.engine.attention import BUSY_CORES  # noqa: PLC0415  # weight

    where = "on the GPU" if found.on_gpu else "for the model, of the memory given" if found.is_planned else "free"
    note(
        f"{render.size(found.available_bytes)} of memory {where}. A prompt of {found.workload.prompt_tokens:,} tokens, with "
        f"{found.workload.evidence_tokens:,} of evidence: {found.workload.origin}. ~ is estimated from the speed of this machine. "
        "? could not be checked."
    )
    if found.busy_cores >= BUSY_CORES:
        note(
            f"Other programs kept {found.busy_cores:.1f} cores busy, so this machine was measured slower than it is. When they are done, "
            "run this again."
        )
    if found.best is None:
        note(f"No recommendation: {found.why}.")
    elif found.best.is_here:
        note(
            f"Recommended: {found.best.name}, {found.why}. It is here: use --model {found.best.name}, or set default_model in models.toml."
        )
    else:
        note(f"Recommended: {found.best.name}, {found.why}. Fetch it with: {found.command}")
    slower = [each for each in found.candidates if found.best is not None and each.size_bytes > found.best.size_bytes and each.window]
    if slower:
        note(f"Larger ones fit but are slower, up to {slower[-1].name}. To allow that: --max-seconds and --min-speed.")


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
        words = {True: "ok", False: "DIFFERS", None: "no sha256 to compare with"}
        render.table(("Name", "sha256", "Check"), [(result.name, result.actual, words[result.ok]) for result in results])
    wrong = [result.name for result in results if result.ok is False]
    if wrong and not as_json:
        raise ModelFileError(
            f"{', '.join(wrong)} differs from what models.toml or the hub stated.", hint=f"localrag models pull {wrong[0]}"
        )
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
