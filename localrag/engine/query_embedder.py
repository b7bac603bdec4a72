"""Which program embeds a question: llama.cpp from a copy of the embedder, where one was made and found as good, else the original.

Importing sentence-transformers takes seconds, before a question that is answered in milliseconds. So indexing, where they are paid
anyway, makes the copy once; a query takes it if it is there, and never makes it. The verdict lies beside the copy and holds for an
embedder's fingerprint, this converter and this package of llama.cpp's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from localrag.engine.embed import LlamaEmbedder
from localrag.engine.embedder_parity import IdEmbedder, accept, acceptance_texts
from localrag.engine.json_cache import replace_text
from localrag.errors import LocalragError
from localrag.files import make_private_folder, open_private
from localrag.locking import try_lock
from localrag.settings import Settings
from localrag.tokens import Embedder

CONVERTER = 1
"""Rises with what a copy is made of, or by what it is judged: older verdicts then hold no more."""
_KEY_LENGTH = 32
OF_GGUF = "llama.cpp, since the embedder is a GGUF file."


@runtime_checkable
class FolderEmbedder(IdEmbedder, Protocol):
    """An embedder whose weights, tokenizer and settings lie in a folder."""

    @property
    def folder(self) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the copy is taken, and why, in one clause. The numbers are 0 where nothing could be compared.

    `sha256`, `file_bytes` and `mtime_ns` are of the copy that was judged; the seconds are those of embedding all `num_texts`.
    """

    is_accepted: bool
    reason: str
    maker: str
    worst_cosine: float = 0.0
    median_cosine: float = 0.0
    num_texts: int = 0
    original_s: float = 0.0
    converted_s: float = 0.0
    sha256: str = ""
    file_bytes: int = 0
    mtime_ns: int = 0


def query_embedder(original: Embedder, settings: Settings) -> Embedder:
    """The accepted copy, loaded, with the fingerprint, limit and token counts of the original; else the original itself.

    It never converts, and imports no torch. A copy that was changed or that does not load any more is passed over.
    """
    if isinstance(original, FolderEmbedder):
        place = _Place(original, settings)
        verdict = place.verdict()
        if verdict is not None and verdict.is_accepted and place.is_whole(verdict):
            with suppress(LocalragError):
                return place.open(original, sha256=verdict.sha256)
    return original


def convert_for_queries(original: Embedder, settings: Settings, *, on_start: Callable[[], None] | None = None) -> Verdict | None:
    """Make the copy and judge it, unless that was done: seconds to a minute, in which `original` embeds several hundred texts.

    `on_start` is called before work that takes so long. None where there is nothing to copy (the embedder is a GGUF file), while another
    process is at it, or where the home cannot be written: the next call tries again.
    """
    if not isinstance(original, FolderEmbedder):
        return None
    place = _Place(original, settings)
    if (known := place.settled()) is not None:
        return known
    with suppress(OSError):
        make_private_folder(place.gguf.parent)
        with open_private(place.lock, "ab") as lock:
            if not try_lock(lock.fileno()):
                return None
            if (known := place.settled()) is not None:  # by another process meanwhile
                return known
            if on_start is not None:
                on_start()
            verdict = _judge(place, original)
            if not verdict.is_accepted:
                place.gguf.unlink(missing_ok=True)
            place.keep(verdict)
            return verdict
    return None


def query_path(original: Embedder, settings: Settings) -> str:
    """What embeds a question, and why, in one sentence; nothing heavy is imported for it."""
    if not isinstance(original, FolderEmbedder):
        return OF_GGUF
    place = _Place(original, settings)
    verdict = place.verdict()
    if verdict is None:
        return "sentence-transformers, since no copy for llama.cpp has been tried yet: the next `localrag index` does."
    if not verdict.is_accepted:
        return f"sentence-transformers, since llama.cpp cannot stand in for it: {verdict.reason}."
    if not place.is_whole(verdict):
        return "sentence-transformers, since the copy for llama.cpp is gone or was changed: the next `localrag index` makes it anew."
    return f"llama.cpp, from a copy of the embedder: {verdict.reason}."


def accepted_copy(original: Embedder, settings: Settings) -> tuple[Path, Path] | None:
    """The files of the copy that questions are embedded with, and of its verdict; None where there is none."""
    if not isinstance(original, FolderEmbedder):
        return None
    place = _Place(original, settings)
    verdict = place.verdict()
    return (place.gguf, place.record) if verdict is not None and verdict.is_accepted and place.is_whole(verdict) else None


class _Place:
    """Where the copy of an embedder and its verdict lie."""

    def __init__(self, original: FolderEmbedder, settings: Settings) -> None:
        stem = settings.embedders_dir / original.fingerprint[:_KEY_LENGTH]
        self.home = settings.home
        self.gguf, self.record, self.lock = (stem.with_suffix(suffix) for suffix in (".gguf", ".json", ".lock"))

    def verdict(self) -> Verdict | None:
        """What was found; None if nothing was, or by another converter or llama.cpp, or the record is damaged."""
        with suppress(OSError, ValueError, TypeError, RecursionError):
            fields = json.loads(self.record.read_text(encoding="utf-8"))
            verdict = Verdict(**fields)
            types = {field.name: type(field.default) for field in dataclasses.fields(Verdict) if field.default is not dataclasses.MISSING}
            types |= {"is_accepted": bool, "reason": str, "maker": str}
            if verdict.maker == _maker() and all(isinstance(getattr(verdict, name), kind) for name, kind in types.items()):
                return verdict
        return None

    def settled(self) -> Verdict | None:
        """The verdict, unless there is none or its copy is no more."""
        verdict = self.verdict()
        return verdict if verdict is not None and (not verdict.is_accepted or self.is_whole(verdict)) else None

    def keep(self, verdict: Verdict) -> None:
        replace_text(self.record, json.dumps(dataclasses.asdict(verdict), indent=1))

    def is_whole(self, verdict: Verdict) -> bool:
        """Whether the copy is the one that was judged: told by its size and time, or else by its sha256."""
        with suppress(OSError):
            status = self.gguf.stat()
            if status.st_size == verdict.file_bytes:
                return status.st_mtime_ns == verdict.mtime_ns or _sha256(self.gguf) == verdict.sha256
        return False

    def open(self, original: FolderEmbedder, *, sha256: str | None = None) -> LlamaEmbedder:
        """The copy in llama.cpp. It gets its tokens from the original's tokenizer, which llama.cpp's differs from in some scripts."""
        return LlamaEmbedder(
            self.gguf,
            home=self.home,
            sha256=sha256,
            fingerprint=original.fingerprint,
            max_tokens=original.max_tokens,
            input_ids=original.input_ids,
        )


def _judge(place: _Place, original: FolderEmbedder) -> Verdict:
    """Converts, and compares. OSError where the copy cannot be written: that says nothing about the embedder."""
    from localrag.engine.convert import convert  # noqa: PLC0415  # not on a query's path

    try:
        convert(original.folder, place.gguf)
        sha256 = _sha256(place.gguf)
        copy = place.open(original, sha256=sha256)
    except LocalragError as error:
        return Verdict(is_accepted=False, reason=error.message.rstrip("."), maker=_maker())
    try:
        found = accept(copy, original, acceptance_texts(original.count, original.max_tokens))
    except LocalragError as error:
        return Verdict(is_accepted=False, reason=error.message.rstrip("."), maker=_maker())
    finally:
        copy.close()
    status = place.gguf.stat()
    return Verdict(
        is_accepted=found.is_accepted,
        reason=found.reason,
        maker=_maker(),
        worst_cosine=found.worst_cosine,
        median_cosine=found.median_cosine,
        num_texts=found.num_texts,
        original_s=found.original_s,
        converted_s=found.converted_s,
        sha256=sha256,
        file_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _maker() -> str:
    """This converter and this llama.cpp; what another pair found is tried again when something is indexed."""
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return f"{CONVERTER}, llama-cpp-python {version}"


def _sha256(path: Path) -> str:
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
