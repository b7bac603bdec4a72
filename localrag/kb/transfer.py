"""Export and import a knowledge base as one file: a ZIP of the database and a manifest with its sha256.

An import is validated before it gets a name in the home. Nothing in the file is trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from localrag.errors import KnowledgeBaseError
from localrag.files import FILE_MODE, FOLDER_MODE, open_private, sync_folder, use_write_ahead_log
from localrag.kb.database import MIGRATIONS, explained, make_folder, migrate, unwritable
from localrag.kb.store import Store
from localrag.kb.verify import bad_chunks, bad_names, bad_texts

_MANIFEST, _DATABASE = "manifest.json", "kb.sqlite"
_FORMAT, _VERSION = "localrag knowledge base", 1
_MAX_MANIFEST_BYTES = 64 * 1024
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_MAX_RATIO = 100  # a higher compression ratio means a zip bomb: text and its index shrink to a third, vectors hardly at all
_PIECE_BYTES = 1 << 20
_IMPORTING = ".importing-"
_STALE_S = 24 * 3600.0
_CONTENT = (
    "SELECT embedder, dim FROM state",
    "SELECT id, path, source, sha256, title FROM documents ORDER BY id",
    "SELECT document_id, key, value, origin FROM fields ORDER BY document_id, key, value, origin",
    'SELECT id, document_id, ordinal, start, "end", heading, text, place FROM chunks ORDER BY id',
    "SELECT chunk_id, vector FROM vectors ORDER BY chunk_id",
    "SELECT document_id, id, metadata, text FROM texts ORDER BY document_id",
)
"""The rows that `content_sha256` covers."""
_STATE = "SELECT 1 FROM state WHERE (embedder IS NULL) = (dim IS NULL) AND coalesce(dim, 1) > 0 AND coalesce(min_similarity, 0) < 1"


def export_to(store: Store, name: str, file: Path) -> dict[str, object]:
    """Write a snapshot of a knowledge base to `file`, replacing it, and return the manifest. Others may write to the store meanwhile."""
    temporary, copy = (file.with_name(f".{file.name}.{secrets.token_hex(8)}.{kind}") for kind in ("tmp", "sqlite"))
    try:
        with _disk_errors(file):
            copy.touch(mode=FILE_MODE, exist_ok=False)  # report a read-only folder as an error of `file`, not of `store`
            store.copy_to(copy)
            with closing(sqlite3.connect(copy, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode = DELETE")  # everything in one file
            member: dict[str, object] = {"sha256": _sha256(copy), "num_bytes": copy.stat().st_size}
            manifest: dict[str, object] = {"format": _FORMAT, "version": _VERSION, "name": name, "members": {_DATABASE: member}}
            with temporary.open("xb") as out:
                with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
                    packed.writestr(_MANIFEST, json.dumps(manifest, indent=1))
                    packed.write(copy, _DATABASE)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(file)
    finally:
        copy.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
    return manifest


def read_name(file: Path) -> str:
    """Return the name that a knowledge base had when it was exported."""
    with _disk_errors(file), _opened(file) as packed:
        return str(_manifest(file, packed).get("name", ""))


def content_sha256(database: Path) -> str:
    """Return the sha256 over the content of a knowledge base file with the current schema.

    It covers embedder, documents, fields, chunks, vectors and texts, but not feedback, so that using a copy does not change it.
    """
    digest = hashlib.sha256()
    with explained(database), closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as db:
        db.execute("BEGIN")  # one snapshot
        for statement in _CONTENT:
            for row in db.execute(statement):
                digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def import_from(file: Path, kb_dir: Path, name: str, *, make_room: Callable[[], None] | None = None) -> None:
    """Unpack a file into `kb_dir/name`, all or nothing. Raises KnowledgeBaseError for an invalid file.

    If that name exists, `make_room` is called once the file has been verified. It removes the old knowledge base, or raises.
    """
    make_folder(kb_dir)
    _remove_stale(kb_dir)
    folder = kb_dir / f"{_IMPORTING}{secrets.token_hex(8)}"
    try:
        with _disk_errors(kb_dir):
            folder.mkdir(mode=FOLDER_MODE)
            _unpack(file, folder / _DATABASE)
            _check_database(file, folder / _DATABASE)
            sync_folder(folder)
            if make_room is not None and (kb_dir / name).exists():
                make_room()
            folder.rename(kb_dir / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unpack(file: Path, target: Path) -> None:
    with _opened(file) as packed:
        members = _manifest(file, packed).get("members")
        member = members.get(_DATABASE) if isinstance(members, dict) else None
        if not isinstance(member, dict) or not isinstance(num_bytes := member.get("num_bytes"), int):
            raise _refused(file, "its manifest is not valid")
        info = packed.getinfo(_DATABASE)
        if info.file_size != num_bytes or num_bytes > _MAX_RATIO * max(1, info.compress_size):
            raise _refused(file, "its size differs from the manifest, or it looks like a zip bomb")
        if num_bytes > shutil.disk_usage(target.parent).free:
            raise KnowledgeBaseError(
                f"The import needs {num_bytes / 1e6:.0f} MB of free disk space.", hint="Free some space.", num_bytes=num_bytes
            )
        digest, num_left = hashlib.sha256(), num_bytes
        with packed.open(info) as source, open_private(target, "xb") as out:
            while piece := source.read(_PIECE_BYTES):
                num_left -= len(piece)
                if num_left < 0:
                    raise _refused(file, "it is longer than its manifest says")
                digest.update(piece)
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        if num_left or digest.hexdigest() != member.get("sha256"):
            raise _refused(file, "its contents differ from what was exported")


def _check_database(file: Path, database: Path) -> None:
    """Check that localrag could have written the database, and rebuild its full text.

    Guards against forged schemas, such as triggers that run SQL, and against forged values.
    """
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as db:
            db.execute("PRAGMA trusted_schema = OFF")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if not 1 <= version <= len(MIGRATIONS) or _schema(db) != _expected_schema(version):
                raise _refused(file, f"its tables do not match localrag's schema {version}")
        with closing(Store(database)) as store:
            problems = store.problems() or _foreign_values(database)
            if not problems:
                with store.writing(moves_on=False):
                    for name in store.full_texts:
                        store.rebuild_full_text(name)
                problems = [*(reason for _, reason in bad_chunks(store)), *bad_names(store), *bad_texts(store)]
            if problems:
                raise _refused(file, problems[0])
        with closing(sqlite3.connect(database, isolation_level=None)) as db:
            use_write_ahead_log(db, wait_s=0.0)  # an export has none; with one, readers and writers do not block each other
    except sqlite3.Error as error:
        raise _refused(file, str(error)) from error


def _foreign_values(database: Path) -> list[str]:
    """Return problems with values: those of another type than their column, which SQLite accepts, and an impossible row of state."""
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as db:
        tables = sorted(name for kind, name, _ in _schema(db) if kind == "table" and name not in Store.full_texts)
        problems = []
        for table in tables:
            columns = db.execute(f"PRAGMA table_info({table})").fetchall()
            is_foreign = " OR ".join(f"typeof(\"{name}\") NOT IN ('null', '{kind.lower()}')" for _, name, kind, *_ in columns)
            if db.execute(f"SELECT 1 FROM {table} WHERE {is_foreign} LIMIT 1").fetchone():  # noqa: S608  # the names are those of localrag
                problems.append(f"a value in its table {table!r} does not have its column's type")
        if not db.execute(_STATE).fetchone():
            problems.append("its record of the embedder is not valid")
    return problems


def _schema(db: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Return every table, index, view and trigger, except those that FTS5 and SQLite create themselves."""
    rows = db.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_master").fetchall()
    own = tuple(f"{name}_" for name in Store.full_texts)
    return {
        (kind, name, " ".join(sql.split()))
        for kind, name, sql in rows
        if not name.startswith(("sqlite_", *own)) or kind not in {"table", "index"}
    }


def _expected_schema(version: int) -> set[tuple[str, str, str]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate(db, MIGRATIONS[:version])
        return _schema(db)


@contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    """Open a ZIP file with exactly the two members. Raises KnowledgeBaseError for anything wrong with it."""
    try:
        with zipfile.ZipFile(file) as packed:
            if sorted(packed.namelist()) != sorted((_MANIFEST, _DATABASE)):
                raise _refused(file, "it is not an export of localrag")
            if any(info.compress_type not in _METHODS for info in packed.infolist()):  # LZMA has errors and memory needs of its own
                raise _refused(file, "it was packed by another program")
            yield packed
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError) as error:
        raise _refused(file, f"it is not an export of localrag ({error})") from error


def _manifest(file: Path, packed: zipfile.ZipFile) -> dict[str, object]:
    with packed.open(_MANIFEST) as source:
        data = source.read(_MAX_MANIFEST_BYTES + 1)
    if len(data) > _MAX_MANIFEST_BYTES:
        raise _refused(file, "its manifest is too long")
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refused(file, "its manifest is not JSON") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise _refused(file, "it is not an export of localrag")
    if manifest.get("version") != _VERSION:
        raise _refused(file, f"it has format version {manifest.get('version')!r}, and this localrag supports version {_VERSION}")
    return manifest


def _refused(file: Path, reason: str) -> KnowledgeBaseError:
    return KnowledgeBaseError(
        f"{file} cannot be imported: {reason}.", hint="Export it again (localrag kb export), and copy the complete file."
    )


@contextmanager
def _disk_errors(place: Path) -> Iterator[None]:
    try:
        with explained(place):
            yield
    except OSError as error:
        raise unwritable(f"{error.filename or place}", error, Path(error.filename or place)) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _remove_stale(kb_dir: Path) -> None:
    """Remove leftovers of killed imports."""
    for leftover in kb_dir.glob(f"{_IMPORTING}*"):
        with suppress(OSError):
            if leftover.stat().st_mtime < time.time() - _STALE_S:
                shutil.rmtree(leftover, ignore_errors=True)
