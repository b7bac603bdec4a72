"""bundle and unbundle: localrag on a USB stick, for a machine without a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrag.cli import options, render
from localrag.cli.files import STANDARD_OUTPUT, InputFile, binary_stdout, check_free_stdout
from localrag.cli.text import emit, note
from localrag.errors import UsageError
from localrag.settings import Settings
from localrag.text.sanitize import safe

if TYPE_CHECKING:
    from localrag.bundle.manifest import Manifest
    from localrag.bundle.pack import Wheels

_KINDS = {
    "starter": "what starts it",
    "models_file": "models.toml",
    "model": "model",
    "template": "chat template",
    "embedder": "embedder",
    "copy": "its copy for llama.cpp",
    "kb": "knowledge base",
    "wheels": "wheels",
}


@click.command("bundle", short_help="Pack localrag, models and knowledge bases into one file for an offline machine.")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--kb", "kbs", multiple=True, metavar="NAME", help="A knowledge base to include. Repeatable.  [default: all]")
@click.option("--model", "models", multiple=True, metavar="NAME|FILE", help="A model to include. Repeatable.  [default: the default model]")
@click.option(
    "--embedder",
    "embedders",
    multiple=True,
    metavar="NAME|FILE",
    help="An embedder to include. Repeatable.  [default: the default embedder]",
)
@click.option(
    "--wheelhouse",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="A folder of wheels to include, instead of the packages installed here.",
)
@click.option("--no-wheelhouse", is_flag=True, help="Include no wheels, for a machine that already has localrag.")
@options.models_file
@options.as_json
def bundle_command(
    out: Path,
    kbs: tuple[str, ...],
    models: tuple[str, ...],
    embedders: tuple[str, ...],
    folder: Path | None,
    no_wheelhouse: bool,
    settings: Settings,
    as_json: bool,
) -> None:
    """Pack localrag as it is installed here, models, knowledge bases and models.toml into the zip OUT, or - for stdout.

    An OUT that exists is replaced.

    On the other machine, which needs the same Python (3.11, say) and nothing else, `python3 OUT FOLDER` installs it; one that has
    localrag takes it in by `localrag unbundle OUT`. Neither uses the network.

    \b
      localrag bundle /media/stick/localrag.zip
      localrag bundle notes.zip --kb notes --no-wheelhouse
    """
    if folder is not None and no_wheelhouse:
        raise UsageError("--wheelhouse and --no-wheelhouse exclude each other.", hint="Leave one out.")
    if out == STANDARD_OUTPUT:
        check_free_stdout("OUT", as_json=as_json)
    elif not out.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {out.absolute().parent}.", hint="Make it, or name another OUT.")
    from localrag.bundle.pack import Wheels, bundle  # noqa: PLC0415  # weight
    from localrag.bundle.select import select  # noqa: PLC0415

    with render.Progress("Bundle") as progress:
        progress("looking at what is here", 0, None)
        chosen = select(settings, models=models, embedders=embedders, kbs=kbs)
        wheels = Wheels() if no_wheelhouse else _wheels(Wheels, folder)
        if out == STANDARD_OUTPUT:
            with binary_stdout("OUT") as file:
                made = bundle(file, chosen, wheels, settings, progress)
            note(f"Wrote {render.size(made.num_bytes)}, sha256 {made.sha256}")
            return
        made = bundle(out, chosen, wheels, settings, progress)
    if as_json:
        emit(made.to_dict())
        return
    render.table(("What", "Name", "Files", "Size"), _rows(made.manifest), right=("Files", "Size"))
    for each in made.notes:
        note(f"Note: {safe(each)}")
    note(f"Wrote {safe(str(out))}: {render.size(made.num_bytes)}, sha256 {made.sha256}")
    if made.manifest.python:
        where = f"{made.manifest.system} on {made.manifest.machine}"
        note(f"For Python {made.manifest.python}, {where}, with a processor like this one: python3 {safe(out.name)} FOLDER")
    else:
        note(f"There: {'python3 ' + safe(out.name) + ' FOLDER' if wheels.ready else 'localrag unbundle ' + safe(out.name)}")


def _wheels(kind: type[Wheels], folder: Path | None) -> Wheels:
    return kind.of_installed() if folder is None else kind.of_folder(folder)


def _rows(manifest: Manifest) -> list[tuple[str, str, int, str]]:
    return [
        (_KINDS[thing.kind], "" if thing.kind in {"starter", "models_file", "wheels"} else thing.name, len(files), render.size(num_bytes))
        for thing in manifest.things
        for files in (manifest.files_of(thing),)
        for num_bytes in (sum(content.num_bytes for content in files.values()),)
    ]


@click.command("unbundle", short_help="Unpack models and knowledge bases from a bundle.")
@click.argument("file", type=InputFile(exists=True))
@click.option("--force", is_flag=True, help="Replace existing models, knowledge bases and models.toml entries that differ.")
@options.models_file
@options.as_json
def unbundle_command(file: Path, force: bool, settings: Settings, as_json: bool) -> None:
    """Take the models, embedders, knowledge bases and models.toml of a bundle into the home. All of FILE is checked before anything lands.

    What is here already and the same is left. What differs is an error, and nothing lands, unless --force is given. A models.toml that is
    here gets the entries that it lacks, and stays as it is otherwise.
    """
    from localrag.bundle.install import unbundle  # noqa: PLC0415  # weight

    with render.Progress("Unbundle") as progress:
        done = unbundle(file, settings, progress, force=force)
    if as_json:
        emit(
            {
                "file": str(file),
                "localrag": done.manifest.localrag,
                "default_model": done.manifest.default_model,
                "default_embedder": done.manifest.default_embedder,
                "contents": [each.to_dict() for each in done.landed],
                "notes": list(done.notes),
            }
        )
        return
    rows = [(_KINDS[each.kind], each.name, render.size(each.num_bytes), each.state, each.path) for each in done.landed]
    render.table(("What", "Name", "Size", "State", "Path"), rows, right=("Size",))
    for each in done.notes:
        note(f"Note: {safe(each)}")
