"""A folder of evaluated prefixes on disk. It finds the most useful one for a prompt and stays within its size limit.

It is a cache, so failures raise no exceptions: files that cannot be read, written or trusted are skipped, and `warning` reports that once.
Files are renamed into place when complete and named by hashes of their content. Any number of processes may therefore share a folder, and
a killed process leaves no file that looks valid. A store object belongs to one thread.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from localrag.engine import attention, threads
from localrag.engine.backend import State
from localrag.engine.context import BATCH_TOKENS
from localrag.engine.kv_cache import ExclusiveCells, SharedCells
from localrag.engine.llama_lib import library
from localrag.engine.prefix_file import (
    MAX_FILE_BYTES,
    PART_SUFFIX,
    VERSION,
    Identity,
    PrefixFileError,
    file_bytes,
    pack,
    read,
    read_head,
    write,
)
from localrag.files import file_error, make_private_folder
from localrag.settings import PREFIX_BYTES
from localrag.types import ModelInfo

_MAX_INDEXED = 4096
_MAX_INDEX_BYTES = 64 << 20
_ABANDONED_S = 600
"""Age in seconds at which a partly written file counts as abandoned."""
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.v[0-9]{1,4}\.prefix")
_PART = re.compile(rf"\.{_NAME.pattern}-\w+{re.escape(PART_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A stored prefix of `num_tokens` tokens."""

    path: Path
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _File:
    """A prefix file in the folder. Its modification time is that of its last use."""

    name: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file whose head was read. `token_bytes` is empty for an unusable file, which is read again only after it changes."""

    file: _File
    token_bytes: bytes
    breakpoint_bytes: bytes = b""


class PrefixStore:
    """The prefixes of one identity in a folder that others may share. All files together stay within `max_bytes`.

    While a file is written, the folder exceeds the limit by its size. No file is larger than `max_file_bytes` (default: half of
    `max_bytes`). Methods raise only ValueError, for invalid token ids.
    """

    def __init__(self, folder: Path, identity: Identity, *, max_bytes: int = PREFIX_BYTES, max_file_bytes: int | None = None) -> None:
        self.folder = folder
        self.identity = identity
        self.max_bytes = max_bytes
        self.max_file_bytes = min(max_bytes // 2 if max_file_bytes is None else max_file_bytes, max_bytes, MAX_FILE_BYTES)
        self._prefix = f"{identity.digest[:16]}-"
        self._suffix = f".v{VERSION}.prefix"
        self._index: dict[str, _Entry] = {}
        self._first_fault: str | None = None
        self._num_faults = 0

    @property
    def warning(self) -> str | None:
        """One line about the first fault since the store was opened, with the number of later ones; None without faults."""
        if self._first_fault is None or self._num_faults == 1:
            return self._first_fault
        return f"{self._first_fault} ({self._num_faults - 1} more like it)"

    def longest(self, token_ids: Sequence[int], breakpoints: Sequence[int] = (), *, last_only: bool = False) -> StoredPrefix | None:
        """The longest stored prefix of `token_ids` whose breakpoints match those in `breakpoints` up to its end.

        With `last_only`, it must have all of `breakpoints`. A list equal to `token_ids` counts; a caller that needs the last token's logits
        must leave that token out.
        """
        prompt_bytes, prompt_ends = pack(token_ids), pack(breakpoints)
        best: StoredPrefix | None = None
        for name, entry in sorted(self._refresh().items()):
            stored, ends = entry.token_bytes, entry.breakpoint_bytes
            if not stored or not prompt_bytes.startswith(stored) or not prompt_ends.startswith(ends) or (last_only and ends != prompt_ends):
                continue
            num_tokens = len(stored) // 4
            is_next_beyond = len(ends) == len(prompt_ends) or breakpoints[len(ends) // 4] > num_tokens
            if is_next_beyond and (best is None or num_tokens > best.num_tokens):
                best = StoredPrefix(self.folder / name, num_tokens)
        return best

    def load(self, prefix: StoredPrefix) -> tuple[tuple[int, ...], tuple[int, ...], bytearray] | None:
        """Read a prefix, verify it completely and mark it as just used. Returns token ids, breakpoints and payload, or None if the file is
        gone or invalid."""
        try:
            token_ids, breakpoints, payload = read(prefix.path, self.identity, max_bytes=self.max_file_bytes)
            self._check_name(prefix.path, pack(token_ids), pack(breakpoints))
        except PrefixFileError as error:
            self._ignore(prefix.path, error)
            return None
        _touch(prefix.path)
        return token_ids, breakpoints, payload

    def discard(self, prefix: StoredPrefix, reason: str) -> None:
        """Remove a file whose payload was intact but refused by llama.cpp, so that it is not tried again."""
        self._ignore(prefix.path, PrefixFileError("damaged", reason))

    def save(self, token_ids: Sequence[int], breakpoints: Sequence[int], payload: bytes | bytearray | memoryview) -> bool:
        """Store a state, or mark it as used if it is already there. Returns False if it is too large or cannot be written."""
        tokens, ends = pack(token_ids), pack(breakpoints)
        path = self.folder / self._name(tokens, ends)
        if file_bytes(self.identity, len(token_ids), len(breakpoints), len(memoryview(payload).cast("B"))) > self.max_file_bytes:
            return False
        entry = self._refresh().get(path.name)
        if entry is not None and entry.token_bytes:
            _touch(path)
            return True
        try:
            make_private_folder(self.folder)
            write(path, self.identity, token_ids, breakpoints, payload)
        except OSError as error:
            self._warn(f"Prefixes cannot be stored in {self.folder}: {file_error(error, self.folder, hint='').reason}.")
            return False
        self._evict(keep=path.name)
        return True

    def _name(self, tokens: bytes, breakpoints: bytes) -> str:
        content = len(tokens).to_bytes(8, "little") + tokens + breakpoints
        return f"{self._prefix}{hashlib.sha256(content).hexdigest()[:32]}{self._suffix}"

    def _check_name(self, path: Path, tokens: bytes, breakpoints: bytes) -> None:
        if path.name != self._name(tokens, breakpoints):
            raise PrefixFileError("damaged", "its name does not match its tokens")

    def _is_own(self, name: str) -> bool:
        return name.startswith(self._prefix) and name.endswith(self._suffix)

    def _files(self) -> list[_File]:
        """Every prefix file in the folder, of any identity, least recently used first."""
        files = []
        try:
            with os.scandir(self.folder) as listed:
                for item in listed:
                    if _NAME.fullmatch(item.name) or _PART.fullmatch(item.name):
                        with suppress(OSError):  # deleted since it was listed
                            status = item.stat(follow_symlinks=False)
                            files.append(_File(item.name, status.st_size, status.st_mtime_ns, status.st_ino))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(f"The prefixes in {self.folder} cannot be read: {error.strerror or error}.")
        return sorted(files, key=lambda file: (file.mtime_ns, file.name))

    def _refresh(self) -> dict[str, _Entry]:
        """Update the index: read the heads of new and changed files, newest first, up to the index limits."""
        fresh: dict[str, _Entry] = {}
        room = _MAX_INDEX_BYTES
        own = [file for file in reversed(self._files()) if self._is_own(file.name)]
        for file in own[:_MAX_INDEXED]:
            entry = self._index.get(file.name)
            if entry is None or entry.file != file:
                entry = self._examine(file)
            room -= len(entry.token_bytes) + len(entry.breakpoint_bytes)
            if room < 0:
                break
            fresh[file.name] = entry
        self._index = fresh
        return fresh

    def _examine(self, file: _File) -> _Entry:
        path = self.folder / file.name
        try:
            head = read_head(path, self.identity, max_bytes=self.max_file_bytes)
            self._check_name(path, head.token_bytes, head.breakpoint_bytes)
        except PrefixFileError as error:
            self._ignore(path, error)
            return _Entry(file, b"")
        return _Entry(file, head.token_bytes, head.breakpoint_bytes)

    def _evict(self, *, keep: str) -> None:
        """Remove abandoned partial files, then prefixes in LRU order, until the rest is within `max_bytes`."""
        now_ns = time.time_ns()
        total, evictable = 0, []
        for file in self._files():
            is_part = _PART.fullmatch(file.name) is not None
            if is_part and abs(now_ns - file.mtime_ns) > _ABANDONED_S * 1_000_000_000 and self._remove(file.name):
                continue
            total += file.size
            if not is_part and file.name != keep:
                evictable.append(file)
        evictable.sort(key=lambda file: file.size <= self.max_bytes)  # evict files above the limit first, lest all others go before them
        for file in evictable:
            if total <= self.max_bytes:
                break
            if self._remove(file.name):
                total -= file.size

    def _ignore(self, path: Path, error: PrefixFileError) -> None:
        """Skip a file, and remove it if it is damaged. If it has just been replaced by a valid one, that prefix is evaluated again."""
        if error.fault == "damaged":
            removed = self._remove(path.name)
            self._warn(f"A stored prefix is damaged and was {'removed' if removed else 'ignored'}: {path.name}: {error.reason}.")
        elif error.fault == "unreadable":
            self._warn(f"A stored prefix was ignored: {path.name}: {error.reason}.")

    def _remove(self, name: str) -> bool:
        self._index.pop(name, None)
        with suppress(OSError):
            (self.folder / name).unlink()
            return True
        return False

    def _warn(self, line: str) -> None:
        self._first_fault = self._first_fault or line
        self._num_faults += 1


def _touch(path: Path) -> None:
    """Mark a file as just used. Without permission, it is evicted earlier."""
    with suppress(OSError):
        os.utime(path)


FOLDER = "prefixes"
"""Name of the folder in the home."""
Kind = Literal["single", "repeatable", "shared"]
"""The kind of context that the states belong to."""
MIN_TOKENS = 256
MIN_PREFILL_S = 0.5
READ_BYTES_PER_S = 250_000_000
"""Minimum restore speed: reading from a disk without a warm cache, verifying and loading. Measured: about 350 MB/s."""


def worth_keeping(num_tokens: int, *, prefill_s: float, payload_bytes: int) -> bool:
    """Whether to store a prefix whose evaluation took `prefill_s`. It needs at least MIN_TOKENS and MIN_PREFILL_S.

    Nor is it stored if reading it back, at READ_BYTES_PER_S, takes more than half that time, as for large states on a fast GPU.
    """
    return num_tokens >= MIN_TOKENS and prefill_s >= MIN_PREFILL_S and payload_bytes / READ_BYTES_PER_S <= prefill_s / 2


class PrefixDiskCache:
    """Moves states between a context's cells and a store on disk. Stores are opened on first use."""

    def __init__(self, make_store: Callable[[Kind], PrefixStore], *, bytes_per_token: int, state_bytes: int = 0) -> None:
        self._make_store = make_store
        self._bytes_per_token = bytes_per_token
        self._state_bytes = state_bytes

    @cached_property
    def store(self) -> PrefixStore:
        """Store for contexts of one sequence, which resume at breakpoints."""
        return self._make_store("single")

    @cached_property
    def repeatable(self) -> PrefixStore:
        """Store for contexts whose results do not depend on the number of threads (see SamplingParams.repeatable)."""
        return self._make_store("repeatable")

    @cached_property
    def shared(self) -> PrefixStore:
        """Store for contexts of several sequences. Their results depend on each other, so contexts for one cannot use them."""
        return self._make_store("shared")

    def _store_of(self, cells: ExclusiveCells) -> PrefixStore:
        return self.repeatable if cells.repeatable else self.store

    @property
    def warning(self) -> str | None:
        """One line about the first fault; None without faults."""
        stores = [getattr(self, name) for name in ("store", "repeatable", "shared") if name in self.__dict__]
        return next((each.warning for each in stores if each.warning), None)

    def _payload_bytes(self, num_tokens: int) -> int:
        return num_tokens * self._bytes_per_token + self._state_bytes

    def recall(self, cells: ExclusiveCells, prompt_ids: list[int], breakpoints: tuple[int, ...]) -> None:
        """Restore the longest stored prefix of a prompt, if it is much longer than the cached one."""
        if not breakpoints or breakpoints[-1] < MIN_TOKENS:
            return
        store = self._store_of(cells)
        prefix = store.longest(prompt_ids[:-1], breakpoints, last_only=cells.last_only)
        if prefix is None or prefix.num_tokens < MIN_TOKENS + cells.common(prompt_ids, breakpoints):
            return
        loaded = store.load(prefix)
        if loaded is not None and not cells.restore(State(*loaded)):
            store.discard(prefix, "llama.cpp refused its state")

    def remember(self, cells: ExclusiveCells, *, prefill_s: float) -> None:
        """Store the cells up to their last breakpoint, if evaluating them took long enough. No sequence may be running."""
        num_tokens = cells.breakpoints[-1] if cells.breakpoints else 0
        if worth_keeping(num_tokens, prefill_s=prefill_s, payload_bytes=self._payload_bytes(num_tokens)):
            state = cells.latest()
            if state is not None:
                self._store_of(cells).save(state.token_ids, state.breakpoints, state.data)

    def recall_shared(self, cells: SharedCells, prefix: list[int]) -> None:
        """Restore the longest stored part of a prefix shared by several prompts, if it is much longer than the cached one."""
        stored = self.shared.longest(prefix) if len(prefix) >= MIN_TOKENS else None
        if stored is None or stored.num_tokens < MIN_TOKENS + cells.num_held(prefix):
            return
        loaded = self.shared.load(stored)
        if loaded is not None and not cells.restore(State(*loaded)):
            self.shared.discard(stored, "llama.cpp refused its state")

    def remember_shared(self, cells: SharedCells, prefix: list[int], *, prefill_s: float) -> None:
        """Store a prefix shared by several prompts, if evaluating it took long enough. No sequence may be running.

        Of a model with recurrent layers, the part up to the last checkpoint is stored.
        """
        if self._state_bytes:
            prefix = prefix[: cells.num_held(prefix)]
        if worth_keeping(len(prefix), prefill_s=prefill_s, payload_bytes=self._payload_bytes(len(prefix))):
            data = cells.state(prefix)
            if data is not None:
                self.shared.save(prefix, (), data)


def make_prefix_cache(home: Path, info: ModelInfo, *, sha256: str | None, max_bytes: int) -> PrefixDiskCache:
    """Create the disk cache for a model file, this build of llama.cpp, and the attention kernel that is faster on this machine.

    `sha256` is the verified hash of the file, if known; otherwise its size, modification time and first bytes identify it.
    """

    def make_store(kind: Kind) -> PrefixStore:
        from importlib.metadata import version  # noqa: PLC0415  # weight: most prompts are too short to be kept

        from localrag.engine.prefix_file import Identity, model_fingerprint  # noqa: PLC0415

        flash_attention = kind != "repeatable" and attention.flash_attention(home, threads.ThreadGovernor())
        identity = Identity(
            model=sha256 or model_fingerprint(info.path),
            llama_build=f"{version('llama-cpp-python')} {library().llama_print_system_info().decode()} "
            f"{'shared' if kind == 'shared' else f'batches of {BATCH_TOKENS}'}",
            architecture=info.architecture,
            type_k="f16",
            type_v="f16",
            flash_attention=flash_attention,
            n_ctx_train=info.n_ctx_train,
            n_swa=info.sliding_window or 0,
            rope_scaling=info.rope_scaling,
            rope_freq_base=info.rope_freq_base,
        )
        return PrefixStore(home / FOLDER, identity, max_bytes=max_bytes)

    return PrefixDiskCache(make_store, bytes_per_token=info.kv_bytes_per_token, state_bytes=info.state_bytes)
