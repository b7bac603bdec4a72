"""Where a source's file is on this machine, without the network; and huggingface_hub, the only import of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Literal

from localrag.errors import ModelError
from localrag.model import ModelSpec

Progress = Callable[[str, int, int | None], None]
"""What is being done, how many bytes of it are done, and of how many, if that is known."""


def find(spec: ModelSpec, models_dir: Path) -> Path | None:
    """The file or folder of an entry, or None where this machine does not hold it."""
    if spec.kind == "wheel":
        return _installed(spec) or _existing(published_path(spec, models_dir))
    if spec.kind == "repo":
        return _in_hub_cache(spec)
    return _existing(Path(spec.source))


def published_path(spec: ModelSpec, models_dir: Path) -> Path:
    """The final place of what is taken out of a wheel."""
    return models_dir / spec.source.replace("==", "-") / spec.file


def kind_on_disk(path: Path) -> Literal["file", "folder"] | None:
    """What a path leads to; None for nothing, for what may not be looked at, and for what is neither (a pipe, a device)."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return "file" if S_ISREG(mode) else "folder" if S_ISDIR(mode) else None


def size_bytes(path: Path) -> int:
    """The bytes of a file, or of all the files of a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size


def _existing(path: Path) -> Path | None:
    return path if kind_on_disk(path) is not None else None


def _installed(spec: ModelSpec) -> Path | None:
    """The file in an installed distribution of exactly the pinned version."""
    from importlib import metadata  # noqa: PLC0415  # weight

    name, _, version = spec.source.partition("==")
    for distribution in metadata.distributions(name=name):
        try:
            said = distribution.metadata
        except (TypeError, metadata.PackageNotFoundError):  # what a broken uninstall leaves: a folder without metadata
            continue
        if "Version" in said and said["Version"] == version and (found := _existing(Path(str(distribution.locate_file(spec.file))))):
            return found
    return None


def _in_hub_cache(spec: ModelSpec) -> Path | None:
    """The file in the cache of the hub's library. The library itself (0.2 s) is loaded only if the repository has a folder there."""
    from huggingface_hub import constants  # noqa: PLC0415  # weight

    if kind_on_disk(Path(constants.HF_HUB_CACHE) / f"models--{spec.source.replace('/', '--')}") != "folder":
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  # weight

    try:
        found = try_to_load_from_cache(spec.source, spec.file, revision=spec.revision)
    except (OSError, ValueError):  # a damaged cache, or a name that the library refuses
        return None
    return Path(found) if isinstance(found, str) else None


def pull_from_hub(spec: ModelSpec, progress: Progress, *, again: bool) -> Path:
    """Download through huggingface_hub: its resume, bar, token, cache and HF_HUB_OFFLINE, as its users know them.

    `again` replaces a file that the cache holds. Raises ModelError with the way out.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  # weight

    progress(f"downloading {spec.source}/{spec.file}", 0, None)
    try:
        return Path(hf_hub_download(spec.source, spec.file, revision=spec.revision, force_download=again))
    except Exception as error:  # the library's errors have no common root
        raise _hub_error(spec, error) from error


def _hub_error(spec: ModelSpec, error: Exception) -> ModelError:
    """A failure of the hub's library in one line. The order matters: a gated repository is also one that was not found."""
    from huggingface_hub import errors  # noqa: PLC0415  # weight

    at = f" at {spec.revision}" if spec.revision else ""
    what, hint = (
        f"{spec.source} cannot be fetched: {(str(error).splitlines() or [''])[0] or type(error).__name__}",
        "Pull again: what came in so far is kept.",
    )
    if isinstance(error, errors.GatedRepoError):
        what, hint = f"{spec.source} is gated.", "Accept its terms on its page, then log in with `hf auth login`."
    elif isinstance(error, errors.RepositoryNotFoundError):
        what, hint = f"There is no repository {spec.source}, or it is private.", "Check its name, or log in with `hf auth login`."
    elif isinstance(error, errors.RevisionNotFoundError):
        what, hint = f"{spec.source} has no revision {spec.revision}.", 'Check "revision" in models.toml.'
    elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        what, hint = f"{spec.source}{at} cannot be reached.", "Check the connection, and that HF_HUB_OFFLINE is not set; then pull again."
    elif isinstance(error, errors.EntryNotFoundError):
        what, hint = f"{spec.source}{at} has no file {spec.file}.", 'Check "file" in models.toml.'
    return ModelError(what, hint=hint, name=spec.name)
