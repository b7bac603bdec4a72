"""The commands bundle and unbundle: move localrag to a machine without a network."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import options, render
from localrag.cli.files import STANDARD_OUTPUT, InputFile, binary_stdout, check_free_stdout
from localrag.cli.terminal import emit, note
from localrag.errors import UsageError
from localrag.settings import Settings
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.bundle.manifest import Manifest
    from localrag.bundle.requirements import Wheels

_LABELS = {
    "starter": "installer",
    "models_file": "models.toml",
    "model": "model",
    "template": "chat template",
    "embedder": "embedder",
    "copy": "llama.cpp copy",
    "kb": "knowledge base",
    "wheels": "wheels",
}


@click.command("bundle", short_help="Pack localrag, models and knowledge bases into one file for an offline machine.")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--kb", "kbs", multiple=True, metavar="NAME", help="Knowledge base to include. Repeatable.  [default: all]")
@click.option("--model", "models", multiple=True, metavar="NAME|FILE", help="Model to include. Repeatable.  [default: the default model]")
@click.option(
    "--embedder",
    "embedders",
    multiple=True,
    metavar="NAME|FILE",
    help="Embedder to include. Repeatable.  [default: the default embedder]",
)
@click.option(
    "--wheelhouse",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Include the wheels in DIR instead of fetching them. Needs no network.",
)
@click.option("--no-wheelhouse", is_flag=True, help="Include no wheels. For a machine that already has localrag. Needs no network.")
@options.models_file
@options.as_json
def bundle_command(
    out: Path,
    kbs: tuple[str, ...],
    models: tuple[str, ...],
    embedders: tuple[str, ...],
    wheelhouse: Path | None,
    no_wheelhouse: bool,
    settings: Settings,
    as_json: bool,
) -> None:
    """Pack localrag, its packages, models, knowledge bases and models.toml into the zip OUT, or - for stdout. An existing OUT is replaced.

    pip fetches each package in the version installed here, from its cache or the package index. That is the only step that needs a
    network.

    The other machine needs the same version of Python (e.g. 3.11) and no network: `python3 OUT FOLDER` installs the bundle. If localrag
    is installed there already, use `localrag unbundle OUT`.

    \b
      localrag bundle /media/stick/localrag.zip
      localrag bundle notes.zip --kb notes --no-wheelhouse
    """
    if wheelhouse is not None and no_wheelhouse:
        raise UsageError("--wheelhouse and --no-wheelhouse exclude each other.", hint="Leave one out.")
    if out == STANDARD_OUTPUT:
        check_free_stdout("OUT", as_json=as_json)
    elif not out.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {out.absolute().parent}.", hint="Create it, or name another OUT.")
    from localrag.bundle.pack import bundle  # noqa: PLC0415  # weight
    from localrag.bundle.select import select  # noqa: PLC0415

    with render.Progress("Bundle") as progress:
        progress("checking models and knowledge bases", 0, None)
        selection = select(settings, models=models, embedders=embedders, kbs=kbs)
        wheels = _wheels(wheelhouse, progress, none=no_wheelhouse)
        if out == STANDARD_OUTPUT:
            with binary_stdout("OUT") as file:
                archive = bundle(file, selection, wheels, settings, progress)
            note(f"Wrote {render.size(archive.num_bytes)}, sha256 {archive.sha256}")
            return
        archive = bundle(out, selection, wheels, settings, progress)
    if as_json:
        emit(archive.to_dict())
        return
    render.table(("What", "Name", "Files", "Size"), _rows(archive.manifest), right=("Files", "Size"))
    for text in archive.notes:
        note(f"Note: {safe(text)}")
    note(f"Wrote {safe(str(out))}: {render.size(archive.num_bytes)}, sha256 {archive.sha256}")
    command = f"localrag unbundle {safe(out.name)}" if no_wheelhouse else f"python3 {safe(out.name)} FOLDER"
    if archive.manifest.python:
        platform = f"{archive.manifest.system} on {archive.manifest.machine}"
        note(f"For Python {archive.manifest.python}, {platform}, with a processor like this one. Install it with: {command}")
    else:
        note(f"Install it with: {command}")


def _wheels(wheelhouse: Path | None, progress: render.Progress, *, none: bool) -> AbstractContextManager[Wheels]:
    from localrag.bundle.requirements import Wheels, fetched_wheels, ready_wheels  # noqa: PLC0415  # weight

    if none:
        return nullcontext(Wheels())
    return fetched_wheels(progress) if wheelhouse is None else nullcontext(ready_wheels(wheelhouse))


def _rows(manifest: Manifest) -> list[tuple[str, str, int, str]]:
    unnamed = {"starter", "models_file", "wheels"}
    return [
        (
            _LABELS[thing.kind],
            "" if thing.kind in unnamed else thing.name,
            len(manifest.files_of(thing)),
            render.size(manifest.num_bytes_of(thing)),
        )
        for thing in manifest.things
    ]


@click.command("unbundle", short_help="Unpack models and knowledge bases from a bundle.")
@click.argument("file", type=InputFile(exists=True))
@click.option("--force", is_flag=True, help="Replace existing models, knowledge bases and models.toml entries that differ.")
@options.models_file
@options.as_json
def unbundle_command(file: Path, force: bool, settings: Settings, as_json: bool) -> None:
    """Install the models, embedders, knowledge bases and models.toml of a bundle. All of FILE is checked first.

    Identical models and knowledge bases are skipped. If one differs, the command fails and changes nothing, unless --force is given. An
    existing models.toml gets the entries it lacks, and is otherwise unchanged.
    """
    from localrag.bundle.install import unbundle  # noqa: PLC0415  # weight

    with render.Progress("Unbundle") as progress:
        result = unbundle(file, settings, progress, force=force)
    if as_json:
        emit(
            {
                "file": str(file),
                "localrag": result.manifest.localrag,
                "default_model": result.manifest.default_model,
                "default_embedder": result.manifest.default_embedder,
                "contents": [each.to_dict() for each in result.installed],
                "notes": list(result.notes),
            }
        )
        return
    rows = [(_LABELS[each.kind], each.name, render.size(each.num_bytes), each.state, each.path) for each in result.installed]
    render.table(("What", "Name", "Size", "State", "Path"), rows, right=("Size",))
    for text in result.notes:
        note(f"Note: {safe(text)}")
