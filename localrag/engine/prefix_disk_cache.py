"""What took long to evaluate is kept on disk, for the next process whose prompt begins with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localrag.engine import attention, threads
from localrag.engine.backend import State
from localrag.engine.context import BATCH_TOKENS
from localrag.engine.kv_cache import ExclusiveCells, SharedCells
from localrag.engine.llama_lib import library
from localrag.model import ModelInfo

if TYPE_CHECKING:
    from localrag.engine.prefix_store import PrefixStore

FOLDER = "prefixes"
"""In the home."""
Kind = Literal["single", "repeatable", "shared"]
"""What contexts a store is of."""
MIN_TOKENS = 256
MIN_PREFILL_S = 0.5
READ_BYTES_PER_S = 250_000_000
"""How fast a state comes back at least: read from a disk that has not cached it, checked, and set. Measured: about 350 MB/s."""


def worth_keeping(num_tokens: int, *, prefill_s: float, payload_bytes: int) -> bool:
    """Whether a prefix whose evaluation took `prefill_s` should be kept: from MIN_TOKENS and MIN_PREFILL_S on.

    Nor is it worth it where reading it back, at READ_BYTES_PER_S, takes more than half as long: large states on a fast GPU.
    """
    return num_tokens >= MIN_TOKENS and prefill_s >= MIN_PREFILL_S and payload_bytes / READ_BYTES_PER_S <= prefill_s / 2


class PrefixDiskCache:
    """Moves states between the cells of a context and a store, which is opened when it is first needed."""

    def __init__(self, make_store: Callable[[Kind], PrefixStore], *, bytes_per_token: int) -> None:
        self._make_store = make_store
        self._bytes_per_token = bytes_per_token

    @cached_property
    def store(self) -> PrefixStore:
        """Of contexts for one sequence, which go on from borders."""
        return self._make_store("single")

    @cached_property
    def repeatable(self) -> PrefixStore:
        """Of contexts whose sums are the same on any number of threads (see SamplingParams.repeatable)."""
        return self._make_store("repeatable")

    @cached_property
    def shared(self) -> PrefixStore:
        """Of contexts for several, whose sums depend on what was evaluated beside: no context for one may go on from them."""
        return self._make_store("shared")

    def _store_of(self, cells: ExclusiveCells) -> PrefixStore:
        return self.repeatable if cells.repeatable else self.store

    @property
    def warning(self) -> str | None:
        """One line about what went wrong, if anything did."""
        opened = [getattr(self, name) for name in ("store", "repeatable", "shared") if name in self.__dict__]
        return next((each.warning for each in opened if each.warning), None)

    def recall(self, cells: ExclusiveCells, prompt_ids: list[int], breakpoints: tuple[int, ...]) -> None:
        """Have the cells hold the longest kept beginning of a prompt, if it is much longer than what they hold of it."""
        if not breakpoints or breakpoints[-1] < MIN_TOKENS:
            return
        store = self._store_of(cells)
        found = store.longest(prompt_ids[:-1], breakpoints, last_only=cells.last_only)
        if found is None or found.num_tokens < MIN_TOKENS + cells.common(prompt_ids, breakpoints):
            return
        loaded = store.load(found)
        if loaded is not None and not cells.restore(State(*loaded)):
            store.discard(found, "llama.cpp refused its state")

    def remember(self, cells: ExclusiveCells, *, prefill_s: float) -> None:
        """Keep what the cells hold up to its last border, if it took long enough to evaluate. Nothing may run."""
        num_tokens = cells.breakpoints[-1] if cells.breakpoints else 0
        if worth_keeping(num_tokens, prefill_s=prefill_s, payload_bytes=num_tokens * self._bytes_per_token):
            state = cells.latest()
            if state is not None:
                self._store_of(cells).save(state.token_ids, state.breakpoints, state.data)

    def recall_shared(self, cells: SharedCells, prefix: list[int]) -> None:
        """Have the cells hold the longest kept beginning of what several prompts share, if it is much longer than what they hold of it."""
        found = self.shared.longest(prefix) if len(prefix) >= MIN_TOKENS else None
        if found is None or found.num_tokens < MIN_TOKENS + cells.num_held(prefix):
            return
        loaded = self.shared.load(found)
        if loaded is not None and not cells.restore(State(*loaded)):
            self.shared.discard(found, "llama.cpp refused its state")

    def remember_shared(self, cells: SharedCells, prefix: list[int], *, prefill_s: float) -> None:
        """Keep what several prompts shared, if it took long enough to evaluate. Nothing may run."""
        if worth_keeping(len(prefix), prefill_s=prefill_s, payload_bytes=len(prefix) * self._bytes_per_token):
            data = cells.state(prefix)
            if data is not None:
                self.shared.save(prefix, (), data)


def make_prefix_cache(home: Path, info: ModelInfo, *, sha256: str | None, max_bytes: int) -> PrefixDiskCache:
    """Keeps prefixes of this model file, evaluated by this build of llama.cpp with the kind of attention that is the faster one here.

    `sha256` is the file's, where it was compared; else its size, its time of change and its first bytes tell it from others.
    """

    def make_store(kind: Kind) -> PrefixStore:
        from importlib.metadata import version  # noqa: PLC0415  # weight: most prompts are too short to be kept

        from localrag.engine.prefix_file import Identity, model_fingerprint  # noqa: PLC0415
        from localrag.engine.prefix_store import PrefixStore  # noqa: PLC0415

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

    return PrefixDiskCache(make_store, bytes_per_token=info.kv_bytes_per_token)
