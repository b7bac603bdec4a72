"""Choose a model for this machine: what fits into its memory and is fast enough, by the speed of llama.cpp here and of models that ran.

Sizes come from a file's header, or from the card in models.toml as long as the file is not here. A speed is the one that was measured with
the model itself, if it ran here; otherwise it is estimated from a generated model (see engine/speed.py).
"""

from __future__ import annotations

import math
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.catalog import Catalog
from localrag.engine import memory
from localrag.engine.attention import machine_speed
from localrag.engine.gguf import read_header
from localrag.engine.loading import attention_kept, speed_key
from localrag.engine.optimize import BITS_PER_WEIGHT as BITS
from localrag.engine.speed import MachineSpeed, Speed, SpeedFile
from localrag.engine.threads import ThreadGovernor
from localrag.errors import LocalragError, ModelFileError
from localrag.kb.chunking import TARGET_TOKENS
from localrag.session.retrieval import DEFAULT_TOP_K
from localrag.settings import Settings
from localrag.types import ModelCard, ModelInfo, ModelSpec

if TYPE_CHECKING:
    from localrag.catalog.hub import HubFile, Listing

MAX_FIRST_TOKEN_S = 30.0
MIN_TOKENS_PER_S = 5.0
"""About the speed at which people read."""
ANSWER_TOKENS = 256
_OTHER_TOKENS = 150
"""Tokens of a prompt beside its evidence: template, system prompt and question."""
_MIN_ASKS, _LAST_ASKS = 5, 200
_MIN_WINDOW, _STEP = 2048, 256
_UNKNOWN_WINDOW = 8192
_BYTES_PER_WEIGHT = 0.6
"""Of files whose number of weights nobody states: about that of Q4_K_M."""
_VOCABULARY_BYTES, _ACTIVATION_BYTES, _CELL_BYTES = 60 << 20, 110 << 20, 2048
"""Memory beside weights and KV cache of a file that is not here: vocabulary, buffers of a batch, and its mask for each cell."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A typical question: the tokens of its evidence, and where that number comes from."""

    evidence_tokens: int
    origin: str

    @property
    def prompt_tokens(self) -> int:
        return self.evidence_tokens + _OTHER_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is fast enough: seconds to the first token, and tokens per second of the answer."""

    first_token_s: float = MAX_FIRST_TOKEN_S
    tokens_per_s: float = MIN_TOKENS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model of the catalogue on this machine. `problem` is the reason against it; None if there is none.

    `window` is the one that fits, up to the requested one; 0 if none does. The times are None if the file does not fit at all, and
    `is_measured` says whether they come from the model itself. `unverified` names what its card could not confirm.
    """

    name: str
    file: str
    is_here: bool
    size_bytes: int
    license: str | None
    n_ctx_train: int
    window: int
    needed_bytes: int
    first_token_s: float | None
    tokens_per_s: float | None
    is_measured: bool
    problem: str | None
    unverified: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """All candidates, smallest first, the recommended one, and why."""

    available_bytes: int
    is_planned: bool
    """Whether the memory was given, not measured."""
    on_gpu: bool
    machine: MachineSpeed
    busy_cores: float
    """Cores that other programs kept busy while the machine was measured; 0 if its saved speed is used."""
    workload: Workload
    limits: Limits
    candidates: tuple[Candidate, ...]
    best: Candidate | None
    why: str

    @property
    def command(self) -> str | None:
        """The command that fetches the recommended model; None if there is none."""
        return None if self.best is None else f"localrag models pull {self.best.name}"

    def to_dict(self) -> dict[str, object]:
        return {
            "recommended": None if self.best is None else self.best.name,
            "why": self.why,
            "command": self.command,
            "available_bytes": self.available_bytes,
            "on_gpu": self.on_gpu,
            "busy_cores": round(self.busy_cores, 1),
            "machine": {name: float(f"{value:.4g}") for name, value in asdict(self.machine).items()},
            "prompt": {**asdict(self.workload), "prompt_tokens": self.workload.prompt_tokens},
            "limits": asdict(self.limits),
            "models": [each.to_dict() for each in self.candidates],
        }


def recommend(
    settings: Settings,
    *,
    memory_bytes: int | None = None,
    kb: str | None = None,
    limits: Limits | None = None,
    again: bool = False,
    on_measure: Callable[[], None] = lambda: None,
) -> Recommendation:
    """Compare the models of the catalogue and choose the largest that fits and is within the limits.

    `memory_bytes` is the memory of another machine to plan for; a part is left to its other programs. `kb` names the knowledge base whose
    questions are typical. `on_measure` is called before the machine is measured, which takes two to five seconds: once, or `again`.
    """
    catalog, limits = Catalog.load(settings), limits or Limits()
    governor = ThreadGovernor()
    speed = machine_speed(settings.home, governor, on_measure, again=again)
    gpu_bytes = 0 if memory_bytes is not None else memory.gpu_bytes_free()
    free_bytes = memory.available_memory() if memory_bytes is None else usable(memory_bytes)
    workload = typical_workload(settings, kb)
    judge = _Judge(catalog, settings, speed, workload, limits, free_bytes, gpu_bytes)
    candidates = sorted(filter(None, map(judge.candidate, catalog.models.values())), key=lambda each: each.size_bytes)
    best, why = choose(candidates)
    return Recommendation(
        available_bytes=gpu_bytes or free_bytes,
        is_planned=memory_bytes is not None,
        on_gpu=gpu_bytes > 0,
        machine=speed,
        busy_cores=governor.busy_cores,
        workload=workload,
        limits=limits,
        candidates=tuple(candidates),
        best=best,
        why=why,
    )


def judge_listing(
    listing: Listing, settings: Settings, *, on_measure: Callable[[], None] = lambda: None
) -> list[tuple[HubFile, Candidate]]:
    """Judge each file of a repository as `recommend` does. The shape of the model comes from the header of the smallest file, if the hub
    gives it; otherwise only sizes are compared.
    """
    speed = machine_speed(settings.home, ThreadGovernor(), on_measure)
    judge = _Judge(
        Catalog.load(settings), settings, speed, typical_workload(settings), Limits(), memory.available_memory(), memory.gpu_bytes_free()
    )
    header = _remote_header(listing.repo, listing.files[0])
    choices = []
    for file in listing.files:
        bytes_per_weight = BITS.get(re.sub(r"^UD-", "", file.quantization), _BYTES_PER_WEIGHT * 8) / 8
        weights = max(1, round(file.size_bytes / bytes_per_weight))
        card = ModelCard(
            size_bytes=max(1, file.size_bytes),
            license=listing.license or "",
            n_ctx_train=_UNKNOWN_WINDOW if header is None else header.n_ctx_train or _UNKNOWN_WINDOW,
            weights=weights,
            active=weights,
            kv_bytes=0 if header is None else header.kv_bytes_per_token,
        )
        choices.append((file, judge.judged(listing.repo, file.file, card, None, card.n_ctx_train)))
    return choices


def _remote_header(repo: str, file: HubFile) -> ModelInfo | None:
    """Read the header of a file of the hub without the file: its start, in a sparse file of its size. None if that fails."""
    from localrag.catalog.hub import starts  # noqa: PLC0415  # only for a repository

    if len(file.parts) > 1:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "start.gguf"
        for start in starts(repo, file.file):
            path.write_bytes(start)
            os.truncate(path, file.size_bytes)
            with suppress(LocalragError):
                return read_header(path)
    return None


def usable(memory_bytes: int) -> int:
    """Return what of a machine's memory a model may use: all but a quarter, at most 4 GB, for the system and other programs."""
    return memory_bytes - min(memory_bytes // 4, 4_000_000_000)


def choose(candidates: Sequence[Candidate]) -> tuple[Candidate | None, str]:
    """Return the recommended candidate and the reason: the largest without a problem, else the fastest that fits."""
    good = [each for each in candidates if each.problem is None]
    if good:
        return max(good, key=lambda each: each.size_bytes), "the largest that fits into memory and is fast enough"
    fitting = [each for each in candidates if each.first_token_s is not None]
    if fitting:
        best = min(fitting, key=lambda each: (each.first_token_s or 0.0, each.size_bytes))
        return best, f"no model is fast enough here; this one is the fastest: {best.problem}"
    return None, "no model of the catalogue fits into the memory"


def typical_workload(settings: Settings, kb: str | None = None) -> Workload:
    """Return the median evidence of the last questions that used `kb`, or any knowledge base; a full set of passages before that."""
    from localrag.journal import Journal  # noqa: PLC0415  # weight

    sizes: list[int] = []
    if settings.home.exists():
        with Journal.open(settings.home) as journal:
            for ask in journal.asks(last=_LAST_ASKS):
                tokens = [each.tokens for each in ask.evidence if each.state != "omitted" and kb in {None, each.kb}]
                sizes += [sum(tokens)] if tokens else []
    if len(sizes) >= _MIN_ASKS:
        about = "" if kb is None else f" to {kb}"
        return Workload(round(statistics.median(sizes)), f"the median of the last {len(sizes)} questions{about}")
    return Workload(DEFAULT_TOP_K * TARGET_TOKENS, f"{DEFAULT_TOP_K} full passages, until {_MIN_ASKS} questions are recorded")


@dataclass(frozen=True, slots=True)
class _Judge:
    """Turns entries of the catalogue into candidates."""

    catalog: Catalog
    settings: Settings
    speed: MachineSpeed
    workload: Workload
    limits: Limits
    free_bytes: int
    gpu_bytes: int

    def candidate(self, spec: ModelSpec) -> Candidate | None:
        """Judge one entry. None for a file that is not here and has no card."""
        try:
            info = read_header(self.catalog.locate(spec))
        except ModelFileError as error:
            return _unusable(spec, error)
        except LocalragError:
            info = None
        if (info is None and spec.card is None) or (info is not None and info.is_vocab_only):
            return None
        card = _card(spec.card, info)
        return self.judged(spec.name, spec.file or spec.source, card, info, min(spec.n_ctx or card.n_ctx_train, card.n_ctx_train))

    def judged(self, name: str, file: str, card: ModelCard, info: ModelInfo | None, requested: int) -> Candidate:
        """Judge a file by its card, and by its header if it is here. `requested` is the window in tokens."""
        least = self._least_window(card.n_ctx_train)
        window = self._window(card, info, requested)
        needed = self._needed(card, info, window or least)
        found = Candidate(
            name=name,
            file=file,
            is_here=info is not None,
            size_bytes=card.size_bytes,
            license=card.license or None,
            n_ctx_train=card.n_ctx_train,
            window=window,
            needed_bytes=needed,
            first_token_s=None,
            tokens_per_s=None,
            is_measured=False,
            problem=None,
            unverified=() if info is not None else card.unverified,
        )
        if window < least:
            room = self.gpu_bytes or max(0, self.free_bytes - memory.RESERVE_BYTES)
            needed = self._needed(card, info, least)
            return replace(found, window=0, problem=f"needs {_size(needed)} for a window of {least:,} tokens; {_size(room)} are free")
        first_token_s, tokens_per_s, is_measured = self._speeds(card, info)
        slow = []
        if first_token_s > self.limits.first_token_s:
            slow.append(f"{math.ceil(first_token_s)} s to the first token, more than {self.limits.first_token_s:g} s")
        if tokens_per_s < self.limits.tokens_per_s:
            slow.append(f"{math.floor(tokens_per_s * 10) / 10:.1f} tokens/s, fewer than {self.limits.tokens_per_s:g}")
        return replace(
            found,
            first_token_s=round(first_token_s, 2),
            tokens_per_s=round(tokens_per_s, 2),
            is_measured=is_measured,
            problem="; ".join(slow) or None,
        )

    def _least_window(self, n_ctx_train: int) -> int:
        """The smallest window that holds a typical prompt and its answer."""
        needed = -(-(self.workload.prompt_tokens + 2 * ANSWER_TOKENS) // _STEP) * _STEP
        return min(max(_MIN_WINDOW, needed), n_ctx_train)

    def _window(self, card: ModelCard, info: ModelInfo | None, requested: int) -> int:
        """The largest window that fits, up to the requested one; 0 if none does."""
        if self._fits(card, info, requested):
            return requested
        low, high = 0, requested // _STEP
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(card, info, middle * _STEP) else (low, middle - 1)
        return low * _STEP

    def _fits(self, card: ModelCard, info: ModelInfo | None, n_ctx: int) -> bool:
        if self.gpu_bytes:
            return self._needed(card, info, n_ctx) <= self.gpu_bytes
        return self._needed(card, info, n_ctx) + memory.RESERVE_BYTES <= self.free_bytes

    def _needed(self, card: ModelCard, info: ModelInfo | None, n_ctx: int) -> int:
        """Bytes that must be free for a window: of the memory plan, or for a file that is not here about the same sum."""
        if info is None:
            return card.size_bytes + card.kv_bytes * n_ctx + _CELL_BYTES * n_ctx + _VOCABULARY_BYTES + _ACTIVATION_BYTES
        situation = memory.Situation(available_bytes=self.free_bytes, gpu_available_bytes=self.gpu_bytes, python_bytes=0)
        layers = info.num_layers + 1 if self.gpu_bytes else 0
        flash = attention_kept(self.settings.home)
        planned = memory.plan(info, n_ctx, flash_attention=flash, gpu_layers=layers, situation=situation)
        return planned.gpu_bytes if self.gpu_bytes else planned.needed

    def _speeds(self, card: ModelCard, info: ModelInfo | None) -> tuple[float, float, bool]:
        """Seconds to the first token, tokens per second of the answer, and whether both were measured with this file."""
        prompt = self.workload.prompt_tokens
        if info is not None:
            measured = Speed()
            SpeedFile(self.settings.home, speed_key(info)).load_into(measured)
            if measured.is_known:
                return measured.prefill_s(prompt), ANSWER_TOKENS / measured.decode_s(ANSWER_TOKENS, prompt), True
        read_bytes = card.size_bytes * card.active / card.weights + card.kv_bytes * prompt
        return self.speed.prefill_s(prompt, card.active), self.speed.decode_tokens_per_s(read_bytes), False


def _card(card: ModelCard | None, info: ModelInfo | None) -> ModelCard:
    """Return the numbers of a file: its header's as far as it has them."""
    if info is None:
        assert card is not None
        return card
    guess = round(info.file_size / _BYTES_PER_WEIGHT)
    return ModelCard(
        size_bytes=info.file_size,
        license="" if card is None else card.license,
        n_ctx_train=info.n_ctx_train or memory.MAX_UNSAID_TOKENS,
        weights=guess if card is None else card.weights,
        active=guess if card is None else card.active,
        kv_bytes=info.kv_bytes_per_token,
    )


def _unusable(spec: ModelSpec, error: ModelFileError) -> Candidate:
    return Candidate(
        name=spec.name,
        file=spec.file or spec.source,
        is_here=True,
        size_bytes=0,
        license=None if spec.card is None else spec.card.license,
        n_ctx_train=0,
        window=0,
        needed_bytes=0,
        first_token_s=None,
        tokens_per_s=None,
        is_measured=False,
        problem=error.message,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
