"""An installed distribution packed again as the wheel that it came from, by its RECORD.

Every file is compared with the hash that was noted when it was installed, so that one that was damaged or edited since is told and not
carried on. What an installer makes anew is left out: byte code, the scripts of entry points, its own notes. Times are fixed: what is
installed the same way packs to the same bytes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from packaging.tags import Tag, parse_tag

from localrag.bundle.requirements import ROOT, is_editable
from localrag.errors import BundleError
from localrag.settings import shipped_file

_INSTALLERS_OWN = frozenset({"INSTALLER", "RECORD", "RECORD.jws", "RECORD.p7s", "REQUESTED", "direct_url.json", "provenance_url.json"})
_SCRIPTS = frozenset({"bin", "Scripts"})
_SHEBANG = re.compile(rb"#![^\n]*python[^\n]*")
_PIECE_BYTES = 1 << 20
_LEVEL = 1
"""Of compression: 6 makes a wheelhouse a tenth smaller, and takes three times as long."""
_PACKAGE = Path(__file__).parents[1]
_TIME = (1980, 1, 1, 0, 0, 0)  # the first that a zip can say
_WAY_OUT = "Install it again (pip install --force-reinstall --no-deps {}), or give ready wheels (--wheelhouse DIR)."


class Sink(Protocol):
    """Where a zip can be written to, without going back in it."""

    def write(self, data: bytes, /) -> int: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a wheel: its name there, the file that it is read from, and the hash that it must have (None: nobody noted one)."""

    name: str
    file: Path
    noted: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that can be written: the name of its file, its members, and `dist_info`, the folder that its RECORD lies in."""

    filename: str
    requirement: str
    dist_info: str
    members: tuple[Member, ...]
    num_bytes: int

    @classmethod
    def of(cls, distribution: metadata.Distribution) -> Wheel:
        """What is installed, as a wheel. BundleError with the way out for what was not installed from one, or lacks a file."""
        requirement = f"{distribution.name}=={distribution.version}"
        rows = _record(distribution, requirement)
        dist_info = next((path.parts[0] for path, _ in rows if len(path.parts) == 2 and path.name == "METADATA"), "")
        if not dist_info.endswith(".dist-info"):
            raise BundleError(f"{requirement} was not installed from a wheel.", hint=_WAY_OUT.format(requirement))
        if distribution.name == ROOT and not _is_the_running_one(distribution, rows):
            rows = [row for row in rows if row[0].parts[0] == dist_info]
            members = [*_of_package(), *_members(distribution, rows, dist_info)]
        elif is_editable(distribution):
            raise BundleError(f"{requirement} is an editable installation.", hint=_WAY_OUT.format(requirement))
        else:
            members = list(_members(distribution, rows, dist_info))
        try:
            num_bytes = sum(member.file.stat().st_size for member in members)
        except OSError as error:
            raise BundleError(f"{requirement} lacks {error.filename}.", hint=_WAY_OUT.format(requirement)) from None
        name = "-".join((re.sub(r"[-_.]+", "_", distribution.name).lower(), distribution.version.replace("-", "_"), _tag(distribution)))
        return cls(f"{name}.whl", requirement, dist_info, tuple(members), num_bytes)

    def write(self, out: Sink, on_bytes: Callable[[int], None]) -> None:
        """Writes the wheel; `on_bytes` is told how many more bytes of what is installed were read. BundleError for one that was changed."""
        lines = io.StringIO()
        record = csv.writer(lines, lineterminator="\n")
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as wheel:
            for member in self.members:
                digest, num_bytes = self._add(wheel, member, on_bytes)
                record.writerow((member.name, f"sha256={digest}", num_bytes))
            record.writerow((f"{self.dist_info}/RECORD", "", ""))
            wheel.writestr(_entry(f"{self.dist_info}/RECORD"), lines.getvalue())

    def _add(self, wheel: zipfile.ZipFile, member: Member, on_bytes: Callable[[int], None]) -> tuple[str, int]:
        """Copies one file, compared with what was noted; gives the sha256 and the size of what is in the wheel."""
        noted = hashlib.new(member.noted[0]) if member.noted else None
        written, num_bytes = hashlib.sha256(), 0
        with member.file.open("rb") as source, wheel.open(_entry(member.name, source), "w", force_zip64=True) as target:
            first = True
            while piece := source.read(_PIECE_BYTES):
                if noted:
                    noted.update(piece)
                on_bytes(len(piece))
                if first and _is_script(member.name):
                    piece = _SHEBANG.sub(b"#!python", piece, count=1) if _SHEBANG.match(piece) else piece
                first = False
                written.update(piece)
                num_bytes += len(piece)
                target.write(piece)
        if noted and member.noted and _base64(noted.digest()) != member.noted[1]:
            raise BundleError(
                f"{member.file} is not as {self.requirement} was installed.", hint=_WAY_OUT.format(self.requirement), path=str(member.file)
            )
        return _base64(written.digest()), num_bytes


def _record(distribution: metadata.Distribution, requirement: str) -> list[tuple[PurePosixPath, tuple[str, str] | None]]:
    """The rows of a RECORD: a path from the folder of packages, and the hash that was noted. metadata's own list hides missing files."""
    rows: list[tuple[PurePosixPath, tuple[str, str] | None]] = []
    for path, noted, *_ in filter(None, csv.reader((distribution.read_text("RECORD") or "").splitlines())):
        algorithm, _, digest = noted.partition("=")
        if algorithm and algorithm not in hashlib.algorithms_guaranteed:
            raise BundleError(f"The RECORD of {requirement} has hashes by {algorithm!r}.", hint=_WAY_OUT.format(requirement))
        rows.append((PurePosixPath(path.replace("\\", "/")), (algorithm, digest) if digest else None))
    return rows


def _members(
    distribution: metadata.Distribution, rows: Iterable[tuple[PurePosixPath, tuple[str, str] | None]], dist_info: str
) -> Iterator[Member]:
    made = {entry.name for entry in distribution.entry_points if entry.group in {"console_scripts", "gui_scripts"}}
    made |= {f"{name}{end}" for name in made for end in (".exe", "-script.py", "-script.pyw", ".exe.manifest")}
    data = dist_info.removesuffix(".dist-info") + ".data"
    for path, noted in rows:
        if path.suffix in {".pyc", ".pyo"} or (path.parts[0] == dist_info and path.name in _INSTALLERS_OWN and len(path.parts) == 2):
            continue
        file = Path(os.path.normpath(str(distribution.locate_file(path))))
        inside = [part for part in path.parts if part != ".."]
        if path.is_absolute():
            raise BundleError(
                f"{distribution.name} has a file outside of its environment: {path}.", hint="Give ready wheels (--wheelhouse)."
            )
        if path.parts[0] != "..":
            yield Member(str(path), file, noted)
        elif inside[0] in _SCRIPTS and len(inside) == 2:
            if inside[1] not in made:
                yield Member(f"{data}/scripts/{inside[1]}", file, noted)
        else:
            yield Member("/".join((data, "data", *inside)), file, noted)


def _is_the_running_one(distribution: metadata.Distribution, rows: Iterable[tuple[PurePosixPath, object]]) -> bool:
    """Whether the files that are installed are those that run; they are not where it is editable, or runs from a checkout."""
    start = next((path for path, _ in rows if str(path) == f"{ROOT}/__init__.py"), None)
    return start is not None and Path(str(distribution.locate_file(start))).resolve() == (_PACKAGE / "__init__.py").resolve()


def _of_package() -> Iterator[Member]:
    """This very package, where it is not installed as a wheel would be: what the build puts into one."""
    for file in sorted(_PACKAGE.rglob("*")):
        path = file.relative_to(_PACKAGE)
        if file.is_file() and file.suffix != ".pyc" and not any(part.startswith((".", "__pycache__")) for part in path.parts):
            yield Member(f"{ROOT}/{path.as_posix()}", file)
    if not (_PACKAGE / "models.toml").is_file():
        yield Member(f"{ROOT}/models.toml", shipped_file())


def _tag(distribution: metadata.Distribution) -> str:
    """The tags that the wheel had, as the name of a file says them."""
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    tags: set[Tag] = set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() == "tag":
            tags |= parse_tag(value.strip())
    if not tags:
        requirement = f"{distribution.name}=={distribution.version}"
        raise BundleError(f"{requirement} does not say which Python it is for.", hint=_WAY_OUT.format(requirement))
    parts = ({tag.interpreter for tag in tags}, {tag.abi for tag in tags}, {tag.platform for tag in tags})
    return "-".join(".".join(sorted(part)) for part in parts)


def _entry(name: str, source: IO[bytes] | None = None) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode) if source is not None else 0o644
    entry.external_attr = (stat.S_IFREG | (0o755 if mode & 0o111 else 0o644)) << 16
    return entry


def _is_script(name: str) -> bool:
    parts = name.split("/")
    return len(parts) > 2 and parts[0].endswith(".data") and parts[1] == "scripts"


def _base64(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
