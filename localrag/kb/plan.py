"""What indexing would do with the files of a folder, without reading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from localrag.kb.documents import Known, Unread
from localrag.kb.known_files import KnownFiles
from localrag.kb.walk import Skipped, walk


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do, as far as that shows without reading: the sources of new files, of those that may have changed, and so on."""

    new: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, object]:
        """Fit for JSON."""
        return {**asdict(self), "skipped": [skip._asdict() for skip in self.skipped]}


def plan(
    paths: Sequence[Path],
    known: Mapping[str, Known],
    unread: Mapping[str, Unread] = MappingProxyType({}),
    sources: Mapping[str, str] = MappingProxyType({}),
    *,
    hidden: bool = False,
) -> Plan:
    """What `ingest` would do with the files below `paths`. A file with a new name counts as new, and under its old one as removed.

    `known`, `unread` and `sources` are by absolute paths; a document whose source is not among them is named by its path.
    """
    found = walk(paths, hidden=hidden)
    files = KnownFiles(found, dict(known), dict(unread))
    kinds: dict[str, list[str]] = {"new": [], "changed": [], "unchanged": []}
    for file in found.files:
        if files.document(file):
            kinds["unchanged"].append(file.source)
        elif without_text := files.without_text(file):
            found.skipped.append(Skipped(file.source, without_text.reason))
        else:
            kinds["changed" if file.path in known else "new"].append(file.source)
    new, changed, unchanged = (tuple(each) for each in kinds.values())
    is_empty = not (new or changed or unchanged)  # a disk that is not mounted looks like this: `ingest` then removes nothing
    removed = () if is_empty else tuple(sorted(sources.get(path, path) for path in files.vanished()))
    return Plan(new, changed, unchanged, removed, tuple(found.skipped))
