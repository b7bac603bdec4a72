"""Verify a knowledge base: check its file and derived data, and compare it with the documents on disk.

Wrong derived data (full text, files of vectors) is rebuilt. Damaged chunks are removed, and the next `localrag index` reads their
documents again. Documents that changed since they were indexed are reported but are not problems. Documents that were indexed on another
machine, or from a folder that is absent now, are not compared and so never reported as missing.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from os.path import lexists
from pathlib import PurePath

from localrag.errors import LocalragError, counted
from localrag.kb.database import embedded_sha256
from localrag.kb.filters import entries_of
from localrag.kb.names import escaped, has_control
from localrag.kb.protocols import AnyStore, KbLocation
from localrag.kb.readers import UnreadableError, keeps_lines
from localrag.kb.reading import MAX_TEXT_CHARS
from localrag.kb.texts import Text
from localrag.kb.walk import is_unchanged, read_file

_AT_ONCE = 1000
_TERMINAL = re.compile("[\x00-\x1f\x7f]")
"""Control characters that readers remove from headings and fields. Those from U+0080 on may occur in a wrongly decoded title."""
_MAX_PLACE_CHARS = 64  # "lines 1048576-1048577"
_MAX_LENGTH_ERROR = 1e-3  # tolerance of a vector's length of 1; float32 in a thousand dimensions is within 1e-6


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of a check. `problems` could not be repaired; `changed` and `missing` are sources.

    `not_compared` says how many documents have no files here to compare with, and where their files are.
    """

    num_documents: int
    num_chunks: int
    problems: tuple[str, ...]
    repaired: tuple[str, ...]
    changed: tuple[str, ...]
    missing: tuple[str, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, object]:
        """Return the result as JSON-serializable data."""
        return {"sound": self.is_sound, **asdict(self)}


def verify(location: KbLocation) -> VerifyResult:
    """Check a whole knowledge base and repair its derived data. The caller holds the index lock."""
    store = location.store
    assert store is not None, "the knowledge base does not exist"
    repaired = [f"{name} was rebuilt" for name in store.full_texts if _rebuilt(store, name)]
    problems = store.problems()
    if problems:  # further reads would only repeat them
        return VerifyResult(0, 0, tuple(problems), tuple(repaired), (), ())
    bad = dict(bad_chunks(store))
    if bad:
        with store.writing():
            sources = store.drop_chunks(list(bad))
        repaired += [f"{reason}: {counted(num, 'chunk')} removed" for reason, num in _counted(bad)]
        there = ", on the machine that has it" if store.elsewhere() else ""
        repaired += [f"{source} will be read again by the next `localrag index`{there}" for source in sources]
    repaired += [f"{problem}; it was removed and will be rebuilt when needed" for problem in location.index_problems()]
    problems = [*bad_names(store)]
    with store.reading():
        changed, missing, not_compared = _against_files(store)
        problems += bad_texts(store)
        return VerifyResult(store.num_documents, store.num_chunks, tuple(problems), tuple(repaired), changed, missing, not_compared)


def bad_chunks(store: AnyStore) -> Iterator[tuple[int, str]]:
    """Yield (chunk id, problem) of every chunk that `localrag index` cannot have written."""
    import numpy as np  # noqa: PLC0415  # heavy

    yield from _shifted(store)
    dim = store.embedder[1] if store.embedder else 0
    rows = store.all_rows()
    while batch := list(islice(rows, _AT_ONCE)):
        whole = []
        for chunk in batch:
            if embedded_sha256(chunk.heading, chunk.text) != chunk.sha256:
                yield chunk.id, "text that differs from the embedded text"
            elif chunk.ordinal < 0 or not 0 <= chunk.start <= chunk.end <= MAX_TEXT_CHARS or chunk.end - chunk.start != len(chunk.text):
                yield chunk.id, "a position that cannot be in its document"
            elif has_control(chunk.place) or len(chunk.place) > _MAX_PLACE_CHARS or _TERMINAL.search(chunk.heading):
                yield chunk.id, "a heading or a place with control characters"
            elif not isinstance(chunk.vector, bytes) or len(chunk.vector) != 4 * dim:
                yield chunk.id, "a vector that is missing or has the wrong size"
            else:
                whole.append((chunk.id, chunk.vector))
        lengths = np.linalg.norm(np.frombuffer(b"".join(vector for _, vector in whole), dtype="<f4").reshape(len(whole), dim), axis=1)
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(lengths - 1) <= _MAX_LENGTH_ERROR)  # true for NaN as well
        yield from ((whole[at][0], "a vector that is not of length 1") for at in np.flatnonzero(wrong))


def _shifted(store: AnyStore) -> Iterator[tuple[int, str]]:
    """Yield (chunk id, problem) of every chunk that overlaps the one before it or ends after its document."""
    for _, positions in groupby(store.positions(), key=lambda at: at.document_id):
        end = 0
        for at in positions:
            if at.ordinal < 0 or at.start < end or (keeps_lines(at.source, at.place) and at.end > at.num_bytes):
                yield at.chunk_id, "a position that cannot be in its document"
            else:
                end = at.end


def bad_names(store: AnyStore) -> Iterator[str]:
    """Yield the problems in names, tags and fields of documents, and in the name of the embedder."""
    if store.embedder and has_control(store.embedder[0]):
        yield "the name of its embedder has control characters"
    for source, title in store.titles():
        if _TERMINAL.search(title):
            yield f"the title of the document {escaped(source[:80])!r} has control characters"
    for source, path in store.source_paths():
        if has_control(path) and not _is_named(source, path) and not lexists(path):
            yield f"the path of the document {escaped(source[:80])!r} has control characters"
    for source, _ in store.sources():
        if has_control(source):
            yield f"the document {escaped(source[:80])!r} has control characters in its name"
    for source, fields in store.fields().items():
        if any(_TERMINAL.search(text) for key, values in fields.items() for text in (key, *values)):
            yield f"a tag or field of the document {escaped(source[:80])!r} has control characters"


def _is_named(source: str, path: str) -> bool:
    """Whether all control characters of a path are in the part that the source contains in escaped form."""
    names = source.split("/")
    parts = PurePath(path).parts
    below, above = parts[-len(names) :], parts[: -len(names)]
    return [escaped(part) for part in below] == names and not any(map(has_control, above))


def bad_texts(store: AnyStore) -> Iterator[str]:
    """Yield the problems in documents that were passed as texts."""
    for row, entries in store.texts.all():
        try:
            text = Text.of(row.text, row.metadata, text_id=row.id)
            is_right = text.sha256 == row.sha256 and entries == entries_of(text.metadata)
        except LocalragError:
            is_right = False
        if not is_right:
            yield f"the text {row.id[:80]!r} is damaged"


def _rebuilt(store: AnyStore, name: str) -> bool:
    """Rebuild a full-text index if it disagrees with the chunks. Return whether it was rebuilt."""
    if store.full_text_is_sound(name):
        return False
    with store.writing(moves_on=False):
        store.rebuild_full_text(name)
    return True


def _against_files(store: AnyStore) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the sources whose files changed, the sources whose files are missing, and notes on documents without files here."""
    documents = store.documents()
    changed, missing, away = [], [], Counter[str]()
    for source, path in store.source_paths():
        document = documents[path]
        if not lexists(path):
            folder = _folder(source, path)
            if lexists(folder):
                missing.append(source)
            else:
                away[folder] += 1
        elif not is_unchanged(path, document.num_bytes, document.mtime_ns) and _sha256(path) != document.sha256:
            changed.append(source)
    not_compared = [f"{_documents(num)} indexed on another machine ({machine})" for machine, num in store.elsewhere().items()]
    not_compared += [f"{_documents(num)} indexed from {folder}, which does not exist now" for folder, num in sorted(away.items())]
    return tuple(changed), tuple(missing), tuple(not_compared)


def _folder(source: str, path: str) -> str:
    """Return the folder that a document was indexed from. A source begins with that folder's name, or is the file name alone."""
    above = PurePath(path).parents
    return str(above[min(max(source.count("/") - 1, 0), len(above) - 1)])


def _documents(num: int) -> str:
    return "1 document was" if num == 1 else f"{num} documents were"


def _sha256(path: str) -> str:
    try:
        return hashlib.sha256(read_file(path).data).hexdigest()
    except (OSError, UnreadableError):
        return ""


def _counted(bad: dict[int, str]) -> list[tuple[str, int]]:
    reasons = list(bad.values())
    return [(reason, reasons.count(reason)) for reason in dict.fromkeys(reasons)]
