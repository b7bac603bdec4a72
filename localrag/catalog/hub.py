"""The Hugging Face hub, through its own library: what a repository holds, its files with the sha256 that the hub states, and its cache.

HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to that library. Only `Catalog.pull` and `Catalog.listing` lead here.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from localrag.errors import ModelError, ModelFileError
from localrag.files import locked, split_parts
from localrag.types import ModelSpec

ByteProgress = Callable[[str, int, int | None], None]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_0|BF16|F16|F32|FP16|(?:MXFP4|NVFP4)(?:_MOE)?))(?=$|[-._])", re.IGNORECASE
)
_NO_MODELS = re.compile(r"(?:^|[-._])(?:mmproj|mtp|imatrix|draft|vocab)(?=$|[-._])", re.IGNORECASE)
_PIECE_BYTES = 1 << 20
_TRIALS, _TIMEOUT_S = 5, 30.0
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
    is_plain = file.isprintable() and not {"\\", ":"} & set(file) and not any(part in {"", ".", ".."} for part in file.split("/"))
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
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

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


@dataclass(frozen=True, slots=True)
class Stated:
    """What the hub states of a file: the name of its content in the cache, its size, and its sha256 unless it is a small file."""

    etag: str
    size_bytes: int | None
    url: str

    @property
    def sha256(self) -> str | None:
        return self.etag if _SHA256.fullmatch(self.etag) else None


def ask(spec: ModelSpec, part: str) -> Stated:
    """Ask the hub about a file. Raises ModelError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415  # heavy

    url = hf_hub_url(spec.source, part, revision=spec.revision)
    try:
        about = get_hf_file_metadata(url)
    except Exception as error:  # the library's errors have no common root
        raise explain(spec, error, part) from error
    return Stated(about.etag or "", about.size, url)


def fetch(spec: ModelSpec, part: str, stated: Stated, progress: ByteProgress, *, again: bool) -> tuple[Path, str | None]:
    """Download a file into the hub's cache, unless it is there. Return its path, and its sha256 if the hub stated one.

    A cached file with another sha256 is replaced; one whose sha256 nobody stated only with `again`. A download that was interrupted goes on
    where it stopped, which the hub's library does not do: it only gives the file its name in the cache. A file that arrives with another
    sha256 never gets there. Raises ModelError or ModelFileError.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  # heavy

    digest = None
    try:
        if _SHA256.fullmatch(stated.etag) and stated.size_bytes is not None:
            digest, again = _download(spec, part, stated, progress), False
        return Path(hf_hub_download(spec.source, part, revision=spec.revision, force_download=again)), digest
    except (ModelError, OSError):
        raise
    except Exception as error:  # the library's errors have no common root
        raise explain(spec, error, part) from error


def _download(spec: ModelSpec, part: str, stated: Stated, progress: ByteProgress) -> str:
    """Download the content of a file to its place in the cache, unless it is there. Return its sha256, which is the stated one."""
    blob = _folder(spec) / "blobs" / stated.etag
    blob.parent.mkdir(parents=True, exist_ok=True)
    what, size = f"downloading {spec.source}/{part}", stated.size_bytes or 0
    start = blob.with_name(f"{blob.name}.localrag")
    with locked(
        blob.with_name(f"{blob.name}.localrag.lock"), wait_s=-1, on_wait=lambda: progress("waiting for another pull to end", 0, None)
    ):
        if blob.exists():
            progress(f"checking sha256 of {part}", 0, None)
            with blob.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == stated.etag:
                    return stated.etag
            blob.unlink()
        with start.open("a+b") as out:
            done, digest = _hashed(out, size)
            free = shutil.disk_usage(blob.parent).free
            if size - done > free:
                message = f"{part} needs {size - done} more bytes, but only {free} are free."
                raise ModelError(message, hint="Free some space.", needed_bytes=size - done, free_bytes=free)
            for trial in range(_TRIALS):
                progress(what, done, size)
                before = done
                try:
                    done = _stream(stated.url, out, done, digest, lambda num_bytes: progress(what, num_bytes, size))
                except Exception as error:  # of the connection; no common root
                    done = out.tell()
                    if trial == _TRIALS - 1 or isinstance(error, OSError) or done == before:
                        raise
                if done >= size:
                    break
        if (actual := digest.hexdigest()) != stated.etag:
            start.unlink()
            raise ModelFileError(
                f"The file {part} of {spec.source} arrived damaged: its sha256 is {actual}, not {stated.etag}.",
                hint="It was not kept. Pull again.",
                name=spec.name,
                expected=stated.etag,
                actual=actual,
            )
        start.replace(blob)
    return stated.etag


def _hashed(out: IO[bytes], size: int) -> tuple[int, Any]:
    """Hash what an interrupted download has left. Return its length and the hash to go on with."""
    digest = hashlib.sha256()
    out.seek(0)
    while piece := out.read(_PIECE_BYTES):
        digest.update(piece)
    if out.tell() > size:
        out.truncate(0)
        return 0, hashlib.sha256()
    return out.tell(), digest


def _stream(url: str, out: IO[bytes], done: int, digest: Any, tell: Callable[[int], None]) -> int:  # noqa: ANN401  # a hash, without a type
    """Append the bytes of a file from `done` on to `out`, and return how many there are then."""
    from huggingface_hub import get_session  # noqa: PLC0415  # heavy
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]  # noqa: PLC0415

    headers = build_hf_headers() | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as answer:
        if done and answer.status_code == 416:  # nothing is left
            return done
        hf_raise_for_status(answer)
        if done and answer.status_code != 206:
            raise ModelError("The hub does not continue downloads.", hint="Remove the file that ends with .localrag, and pull again.")
        told = done
        for piece in answer.iter_raw():  # as they arrive: what a broken connection has brought is kept
            out.write(piece)
            digest.update(piece)
            done += len(piece)
            if done - told >= _PIECE_BYTES:
                out.flush()
                tell(told := done)
    out.flush()
    return done


def _folder(spec: ModelSpec) -> Path:
    """The folder of a repository in the hub's cache."""
    from huggingface_hub import constants  # noqa: PLC0415  # heavy

    return Path(constants.HF_HUB_CACHE) / f"models--{spec.source.replace('/', '--')}"


def cached(spec: ModelSpec) -> Path | None:
    """Return the file in the hub's cache, the first part of a split one; None if it or a part is missing.

    The hub's library (0.2 s) is loaded only if the repository has a folder there.
    """
    try:
        if not _folder(spec).is_dir():
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
