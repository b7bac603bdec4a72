"""The Hugging Face hub, through its own library: what a repository holds, its files with the sha256 that the hub states, and its cache.

HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to that library. Only `Catalog.pull` and `Catalog.listing` lead here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrag.errors import ModelError
from localrag.files import split_parts
from localrag.types import ModelSpec

ByteProgress = Callable[[str, int, int | None], None]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_0|BF16|F16|F32|FP16|(?:MXFP4|NVFP4)(?:_MOE)?))(?=$|[-._])", re.IGNORECASE
)
_NO_MODELS = re.compile(r"(?:^|[-._])(?:mmproj|mtp|imatrix|draft|vocab)(?=$|[-._])", re.IGNORECASE)
_START_BYTES = (1 << 20, 4 << 20, 16 << 20, 32 << 20)
"""Sizes of the starts of a file that are fetched, one after the other, until one holds the whole header."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A GGUF file of a repository, in one or several parts; its quantization as in its name, and its size in bytes."""

    quantization: str
    parts: tuple[str, ...]
    size_bytes: int

    @property
    def file(self) -> str:
        """The file, or the first part of a split one."""
        return self.parts[0]


@dataclass(frozen=True, slots=True)
class Listing:
    """The models in a repository, smallest first, and the license that its card names."""

    repo: str
    license: str | None
    files: tuple[HubFile, ...]

    def choose(self, quantization: str) -> HubFile:
        """Return the file of a quantization, ignoring case. ModelError with those that there are."""
        found = [each for each in self.files if each.quantization.lower() == quantization.lower()]
        if not found:
            known = list(dict.fromkeys(each.quantization for each in self.files))
            hint = f"Choose one: {', '.join(known)}." if known else None
            raise ModelError(f"{self.repo} has no GGUF file with {quantization}.", hint=hint, repo=self.repo, known=known)
        return found[0]


def quantization_of(file: str) -> str:
    """Return the quantization that a file's name ends with, such as "Q4_K_M"; "" if it names none."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.rpartition("/")[2].removesuffix(".gguf"))
    found = _QUANTIZATION.findall(stem)
    return found[-1].upper() if found else ""


def list_repository(repo: str, revision: str | None = None) -> Listing:
    """Ask the hub for the GGUF models of a repository. Raises ModelError."""
    from huggingface_hub import HfApi  # noqa: PLC0415  # heavy

    spec = ModelSpec(name=repo, kind="repo", source=repo, revision=revision)
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except Exception as error:  # the library's errors have no common root
        raise explain(spec, error) from error
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or () if _is_model(each.rfilename)}
    license_id = getattr(info.card_data, "license", None)
    license_id = license_id if isinstance(license_id, str) else None
    return Listing(repo, license_id, tuple(sorted(_files(sizes), key=lambda each: each.size_bytes)))


def _is_model(file: str) -> bool:
    """Whether a file may hold a whole language model, by its name. The name is later a path in the cache and printed."""
    is_plain = file.isprintable() and "\\" not in file and not any(part in {"", ".", ".."} for part in file.split("/"))
    return is_plain and file.endswith(".gguf") and not _NO_MODELS.search(file.rpartition("/")[2].removesuffix(".gguf"))


def _files(sizes: dict[str, int]) -> Iterator[HubFile]:
    """Group parts to files. A split file that lacks a part is left out."""
    for file in sizes:
        parts = split_parts(file)
        if file == parts[0] and all(part in sizes for part in parts):
            yield HubFile(quantization_of(file) or file.rpartition("/")[2].removesuffix(".gguf"), parts, sum(sizes[part] for part in parts))


def starts(repo: str, file: str) -> Iterator[bytes]:
    """Yield longer and longer starts of a file, up to 32 MiB, for a reader of its header. Ends at the first error."""
    from huggingface_hub import get_session, hf_hub_url  # noqa: PLC0415  # heavy
    from huggingface_hub.utils import build_hf_headers  # noqa: PLC0415

    start = b""
    with suppress(Exception):  # the fit is then judged by the size alone
        for size in _START_BYTES:
            headers = {**build_hf_headers(), "Range": f"bytes={len(start)}-{size - 1}"}
            answer = get_session().get(hf_hub_url(repo, file), headers=headers, follow_redirects=True, timeout=20)
            if answer.status_code != 206 or len(answer.content) > size - len(start):
                return
            start += answer.content
            yield start
            if len(start) < size:
                return


def stated_sha256(spec: ModelSpec, part: str) -> str | None:
    """Return the sha256 that the hub states for a file; None for a small file, which it does not hash so. Raises ModelError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415  # heavy

    try:
        etag = get_hf_file_metadata(hf_hub_url(spec.source, part, revision=spec.revision)).etag or ""
    except Exception as error:  # the library's errors have no common root
        raise explain(spec, error, part) from error
    return etag if _SHA256.fullmatch(etag) else None


def fetch(spec: ModelSpec, part: str, progress: ByteProgress, *, again: bool) -> Path:
    """Download a file into the hub's cache with its usual resume, and return its path. `again` replaces a cached file.

    Raises ModelError with a hint.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  # heavy

    what = f"downloading {spec.source}/{part}"
    progress(what, 0, None)
    try:
        return Path(hf_hub_download(spec.source, part, revision=spec.revision, force_download=again, tqdm_class=_bar(what, progress)))
    except Exception as error:  # the library's errors have no common root
        raise explain(spec, error, part) from error


def _bar(what: str, progress: ByteProgress) -> Any:  # noqa: ANN401  # a class of tqdm, which has no types
    """Return a progress bar for the hub's library that draws nothing and reports to `progress`."""
    from tqdm import tqdm  # noqa: PLC0415  # heavy

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, iterable: Iterable[object] | None = None, **options: Any) -> None:  # noqa: ANN401
            super().__init__(iterable, **{**options, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.n and self.unit == "B":
                progress(what, int(self.n), int(self.total) if self.total and self.total >= self.n else None)
            return shown

    return Bar


def cached(spec: ModelSpec) -> Path | None:
    """Return the file in the hub's cache, the first part of a split one; None if it or a part is missing.

    The hub's library (0.2 s) is loaded only if the repository has a folder there.
    """
    from huggingface_hub import constants  # noqa: PLC0415  # heavy

    folder = Path(constants.HF_HUB_CACHE) / f"models--{spec.source.replace('/', '--')}"
    try:
        if not folder.is_dir():
            return None
    except (OSError, ValueError):
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  # heavy

    try:
        paths = [try_to_load_from_cache(spec.source, part, revision=spec.revision) for part in split_parts(spec.file)]
    except (OSError, ValueError):  # a damaged cache, or a name that the library refuses
        return None
    return Path(str(paths[0])) if all(isinstance(path, str) for path in paths) else None


def explain(spec: ModelSpec, error: Exception, file: str = "") -> ModelError:
    """Explain an error of the hub's library in one line. The order matters: a gated repository is also reported as not found."""
    from huggingface_hub import errors  # noqa: PLC0415  # heavy

    at = f" at {spec.revision}" if spec.revision else ""
    what, hint = (
        f"{spec.source} cannot be fetched: {(str(error).splitlines() or [''])[0] or type(error).__name__}",
        "Pull again: the download resumes where it stopped.",
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
        what, hint = f"{spec.source}{at} has no file {file}.", f"To see its files: localrag models pull {spec.source}"
    return ModelError(what, hint=hint, name=spec.name)
