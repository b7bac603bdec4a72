"""The command score: score how relevant files are to a task, factor by factor."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from localrag.budget import TIERS, Profile
from localrag.cli import options, render
from localrag.cli.files import label_of, read_source, text_of
from localrag.cli.terminal import emit, note
from localrag.errors import ConfigError, KnowledgeBaseError, ModelNotFoundError, UsageError, counted
from localrag.relevance import FACTORS, MAX_TASK_CHARS, METHODS, File, Method, Score, Weights, score
from localrag.session import open_embedder, open_profile
from localrag.settings import Settings
from localrag.text.sanitize import safe
from localrag.text.tokens import Embedder

COLUMNS = dict(zip(FACTORS, ("Alignment", "Recency", "Mentions", "Depth", "Type"), strict=True))


class Weight(click.ParamType[tuple[str, float]]):
    """A factor and its weight, e.g. `recency=0.5`."""

    name = "weight"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:  # noqa: ANN401  # click's
        name, _, number = str(value).partition("=")
        if name not in FACTORS:
            self.fail(f"{name[:80]!r} is not a factor. Factors: {', '.join(FACTORS)}.", param, ctx)
        try:
            return name, float(number)
        except ValueError:
            self.fail(f"{name} needs a number, e.g. {name}=0.5.", param, ctx)


@dataclass(slots=True)
class Gathered:
    """The files that were read, and those that were skipped, as (label, reason)."""

    files: list[File] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


def _thresholds(command: options.Command) -> options.Command:
    for tier in reversed(TIERS):
        text = f"Minimum score of the tier {tier.name}.  [default: {tier.threshold}]"
        command = click.option(f"--{tier.name}", type=options.Number(0, 1), metavar="SCORE", help=text)(command)
    return command


@click.command("score")
@click.argument("paths", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--task", required=True, type=options.Text(), metavar="TEXT", help="Task to score the files for (- for stdin, @file for a file)."
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    help="How to measure alignment with the task.  [default: hybrid if an embedder is on this machine, otherwise keyword]",
)
@click.option(
    "--weight",
    "weights",
    multiple=True,
    type=Weight(),
    metavar="NAME=VALUE",
    help=f"Weight of a factor: {', '.join(FACTORS)}. Repeatable.",
)
@click.option("--half-life", type=float, metavar="DAYS", help="Age at which the recency score has halved.  [default: 7]")
@_thresholds
@options.models_file
@options.as_json
def score_command(
    paths: tuple[Path, ...],
    task: str,
    method: Method | None,
    weights: tuple[tuple[str, float], ...],
    half_life: float | None,
    primary: float | None,
    supporting: float | None,
    reference: float | None,
    settings: Settings,
    as_json: bool,
) -> None:
    """Score how relevant each FILE is to a task, best first. For a folder, score all files that index would read.

    \b
      localrag score src docs --task "Update authentication to use JWT"
      git diff | localrag score src --task - --method keyword
    """
    if not task.strip():
        raise UsageError("The task is empty.", hint="Describe it with --task.")
    if len(task) > MAX_TASK_CHARS:
        raise UsageError(f"The task has {counted(len(task), 'character')}; the limit is {MAX_TASK_CHARS}.", num_chars=len(task))
    profile, weight_fields = open_profile(None, settings=settings)
    score_weights = Weights(**weight_fields)  # type: ignore[arg-type]  # checked by the catalogue
    try:
        profile = _with_thresholds(profile, {"primary": primary, "supporting": supporting, "reference": reference})
        score_weights = _with_weights(score_weights, weights, half_life, method)
    except ConfigError as error:  # here the invalid value comes from the command line
        raise UsageError(error.message) from None
    gathered = _gather(paths)
    if not gathered.files and len(gathered.skipped) == 1:
        raise UsageError("{}: {}.".format(*gathered.skipped[0]))
    for source, reason in gathered.skipped:
        note(f"skipped {safe(source)}: {reason}")
    if not gathered.files:
        raise UsageError("None of the files can be read.", hint="See the reasons above.", num_skipped=len(gathered.skipped))
    embedder = _embedder(score_weights.method, settings, is_asked_for=method is not None)
    if embedder is None:
        score_weights = replace(score_weights, method="keyword")
    scores = _score(gathered.files, task, score_weights, embedder)
    tiers = [profile.tier(one.score) or "below" for one in scores]
    if as_json:
        emit(
            {
                "task": task,
                "method": score_weights.method,
                "weights": score_weights.shares,
                "half_life_days": score_weights.half_life_days,
                "files": [{**_row(one), "tier": name} for one, name in zip(scores, tiers, strict=True)],
                "skipped": [{"path": source, "reason": reason} for source, reason in gathered.skipped],
            }
        )
    else:
        _table(scores, tiers, score_weights)


def _with_thresholds(profile: Profile, overrides: Mapping[str, float | None]) -> Profile:
    limits = {tier.name: tier.threshold for tier in profile.tiers} | {name: value for name, value in overrides.items() if value is not None}
    return replace(profile, tiers=tuple(replace(tier, threshold=limits[tier.name]) for tier in profile.tiers))


def _with_weights(weights: Weights, overrides: Sequence[tuple[str, float]], half_life: float | None, method: Method | None) -> Weights:
    changed: dict[str, Any] = dict(overrides)
    if half_life is not None:
        changed["half_life_days"] = half_life
    if method is not None:
        changed["method"] = method
    return replace(weights, **changed)


def _embedder(method: Method, settings: Settings, *, is_asked_for: bool) -> Embedder | None:
    """Open the default embedder unless the method is keyword. If it is missing and `is_asked_for` is false, print a note, return None."""
    if method == "keyword":
        return None
    try:
        return open_embedder(settings, for_queries=True)
    except ModelNotFoundError as error:
        if is_asked_for:
            raise
        note(f"Scoring by keywords only: {error.message} {error.hint or ''}".rstrip())
        return None


def _score(files: Sequence[File], task: str, weights: Weights, embedder: Embedder | None) -> list[Score]:
    if embedder is None:
        return score(files, task, weights=weights, now=time.time())
    with render.Progress("Scoring") as progress:
        return score(
            files,
            task,
            weights=weights,
            embedder=embedder,
            now=time.time(),
            progress=lambda done, total: progress("embedding", done, total),
        )


def _gather(paths: Sequence[Path]) -> Gathered:
    """Read each file once. Paths in the result start as given on the command line."""
    from localrag.kb.readers import UnreadableError  # noqa: PLC0415  # weight: none of it is needed to print help
    from localrag.kb.reading import Readers  # noqa: PLC0415
    from localrag.kb.walk import read_file  # noqa: PLC0415

    gathered = Gathered()
    real_paths: set[str] = set()
    with Readers() as readers:
        for path in (file for argument in paths for file in _files(argument, gathered)):
            if str(path) == "-":
                source = read_source(path, "scored")
                gathered.files.append(File(source.label, source.text, time.time()))
                continue
            real = os.path.realpath(path)
            if real in real_paths:
                continue
            real_paths.add(real)
            try:
                text = text_of(path.name, read_file(real).data, readers)
                gathered.files.append(File(label_of(path), text, Path(real).stat().st_mtime))
            except UnreadableError as error:
                gathered.skipped.append((label_of(path), str(error)))
            except OSError as error:
                gathered.skipped.append((label_of(path), error.strerror or str(error)))
    return gathered


def _files(path: Path, gathered: Gathered) -> Iterator[Path]:
    """Yield the file itself, or the files of a folder."""
    if not path.is_dir():
        yield path
        return
    from localrag.kb.walk import walk  # noqa: PLC0415  # weight

    try:
        listing = walk([path])
    except KnowledgeBaseError as error:
        gathered.skipped.append((label_of(path), error.message))
        return
    gathered.skipped += listing.skipped
    if not listing.files:
        gathered.skipped.append((label_of(path), "the folder has no readable files"))
    for file in listing.files:
        yield path / os.path.relpath(file.path, listing.roots[0])


def _row(one: Score) -> dict[str, object]:
    return {"path": one.path, "score": one.score, "contributions": dict(one.contributions), "details": dict(one.details)}


def _table(scores: Sequence[Score], tiers: Sequence[str], weights: Weights) -> None:
    numbers = ("Score", *COLUMNS.values())
    rows = [
        (one.path.replace("\n", " "), f"{one.score:.3f}", *(f"{part:.3f}" for part in one.contributions.values()), name)
        for one, name in zip(scores, tiers, strict=True)
    ]
    render.table(("File", *numbers, "Tier"), rows, right=numbers)
    shares = ", ".join(f"{COLUMNS[name]} {share:.2f}" for name, share in weights.shares.items())
    note(f"A score is the sum of its columns. Their maximums: {shares}.")
