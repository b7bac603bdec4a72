"""Plan which models of a run fit in memory together, and open, share and close them as they are used."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from localrag.catalog import Catalog
from localrag.engine import attention, memory, threads
from localrag.engine.context import num_sequence_ids
from localrag.engine.echo import N_CTX_TRAIN as ECHO_CELLS
from localrag.engine.engine import Engine
from localrag.engine.gguf import read_header
from localrag.engine.loading import attention_kept
from localrag.engine.memory import MemoryPlan, Situation, gpu_bytes_free, gpu_devices
from localrag.files import JsonCache
from localrag.session.opening import open_engine
from localrag.settings import Settings
from localrag.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Free:
    """Memory available to models, in bytes: main memory and GPU memory."""

    available: int
    gpu_available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a role needs: a model by name or path (None for the default, "echo" for no file), and a context.

    `num_cells` is the size of the KV cache in tokens, shared by all `num_sequences`. With None, it is the model's window in models.toml or,
    failing that, its training context. No sequence gets more than the training context. Roles with the same model share one context, as
    large as the largest of them needs.
    """

    model: str | None = None
    num_cells: int | None = None
    num_sequences: int = 1
    repeatable: bool = False
    """Whether all of the role's answers are repeatable (see SamplingParams). Its context then runs one sequence at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledModel:
    """A model file used in a run, with its roles and its needs. `load_s` is the duration of its last load in seconds, if known."""

    name: str
    roles: tuple[str, ...]
    num_cells: int
    num_sequences: int
    repeatable: bool
    load_s: float | None
    info: ModelInfo | None
    plan: MemoryPlan | None
    """None, like `info`, for the echo, which uses no memory."""

    @property
    def plans(self) -> list[MemoryPlan]:
        return [] if self.plan is None else [self.plan]

    def require(self, free: Free) -> None:
        """Raise EngineError, with the numbers and the nearest window that fits, if the model does not fit even alone."""
        if self.plan is not None and self.info is not None:
            plan = replace(self.plan, available=max(0, free.available), gpu_available=max(0, free.gpu_available))
            memory.require(plan, self.info)

    @property
    def size_bytes(self) -> int:
        return 0 if self.info is None else self.info.file_size

    def to_dict(self) -> dict[str, object]:
        return {
            "model": self.name,
            "roles": list(self.roles),
            "num_cells": self.num_cells,
            "num_sequences": self.num_sequences,
            "needed_bytes": sum(plan.needed for plan in self.plans),
            "gpu_bytes": sum(plan.gpu_bytes for plan in self.plans),
            "load_s": self.load_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Which models are open at the same time, and the cost of using them in a given order.

    `loads` lists the models in loading order. A name that appears twice was evicted in between. `needed_bytes` is for all models together,
    `available_bytes` is the limit that they share; the `gpu_…` fields are the same for the GPU.
    """

    models: tuple[PooledModel, ...]
    together: bool
    loads: tuple[str, ...]
    load_bytes: int
    load_s: float | None
    """Total load time in seconds; None if it is unknown for any of the models."""
    needed_bytes: int
    available_bytes: int
    gpu_bytes: int
    gpu_available_bytes: int

    @property
    def num_reloads(self) -> int:
        """Number of loads of a model that was open before."""
        return len(self.loads) - len(set(self.loads))

    def to_dict(self) -> dict[str, object]:
        return {
            "models": [each.to_dict() for each in self.models],
            "together": self.together,
            "loads": list(self.loads),
            "num_reloads": self.num_reloads,
            "load_bytes": self.load_bytes,
            "load_s": self.load_s,
            "needed_bytes": self.needed_bytes,
            "available_bytes": self.available_bytes,
            "gpu_bytes": self.gpu_bytes,
            "gpu_available_bytes": self.gpu_available_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A finished load: the model, its duration in seconds, and the models closed to make room."""

    model: str
    load_s: float
    closed: tuple[str, ...]


MAX_KEPT = 200
"""Maximum number of models whose load times are stored."""


class ModelPool:
    """Opens the models of a run's roles on first use, and keeps open as many as fit together.

        with ModelPool({"members": Need(num_cells=8192, num_sequences=3), "judge": Need(model="qwen3-4b")}) as models:
            print(models.plan(["members", "judge"]).to_dict())
            with models.use("members") as engine: ...

    If a model does not fit next to the open ones, the least recently used are closed, and reopened when needed. A model in use is never
    closed. Two names of the same file share one engine, which has the first name. `keep` is as in open_engine: a reopened model then finds
    its evaluated prefixes on disk. `situation` overrides the free memory, as it is with none of these models open; its `embedder_bytes` are
    reserved for an embedder that is opened later. Use a pool from one thread.

    Raises ModelNotFoundError, ModelFileError or ConfigError for an unavailable model. No weights are loaded before `use`.
    """

    def __init__(
        self, needs: Mapping[str, Need], *, settings: Settings | None = None, keep: bool = False, situation: Situation | None = None
    ) -> None:
        self._settings = settings or Settings.from_env()
        self._keep = keep
        self._situation = situation or Situation()
        self._kept = JsonCache(self._settings.home / "loads.json", most=MAX_KEPT)
        self._has_gpu = any(need.model != "echo" for need in needs.values()) and bool(gpu_devices())
        self._roles: dict[str, str] = {}
        self._names: dict[str, str | None] = {}
        self._models: dict[str, PooledModel] = {}
        self._open: dict[str, _Opened] = {}
        self._flash_attention = attention_kept(self._settings.home)
        self._knows_attention = False
        self._most_free: int | None = None
        self.loads: list[Load] = []
        """All loads so far."""
        for role, need in needs.items():
            self._add(role, need)

    def plan(self, order: Sequence[str] | None = None) -> PoolPlan:
        """Plan which models will be open, and what it costs to use the roles in this order (default: each once), from the current state on.

        Raises EngineError, with the numbers and the nearest window that fits, if a model does not fit even alone.
        """
        free = self._free()
        for model in self._models.values():
            model.require(free)
        names = list(self._open)
        loads: list[PooledModel] = []
        for role in self._roles if order is None else order:
            name = self._roles[role]
            if name in names:
                names.remove(name)
            else:
                loads.append(self._models[name])
                while not self._fits([*names, name], free):
                    names.pop(0)
            names.append(name)
        seconds = [self._load_s(model) for model in loads]
        known_seconds = [each for each in seconds if each is not None]
        return PoolPlan(
            models=tuple(replace(model, load_s=self._load_s(model)) for model in self._models.values()),
            together=self._fits(list(self._models), free),
            loads=tuple(model.name for model in loads),
            load_bytes=sum(model.size_bytes for model in loads),
            load_s=round(sum(known_seconds), 3) if len(known_seconds) == len(seconds) else None,
            needed_bytes=sum(plan.needed for plan in self._plans(self._models)),
            available_bytes=free.available,
            gpu_bytes=sum(plan.gpu_bytes for plan in self._plans(self._models)),
            gpu_available_bytes=free.gpu_available,
        )

    @contextmanager
    def use(self, role: str) -> Iterator[Engine]:
        """Open the model of a role for the duration of the block. The engine's context is reserved as planned.

        Raises EngineError if the model does not fit, alone or next to the models in use. In that case, nothing is closed or loaded.
        """
        entry = self._opened(self._roles[role])
        entry.num_users += 1
        try:
            yield entry.engine
        finally:
            entry.num_users -= 1

    @property
    def open_models(self) -> list[str]:
        """Names of the open models, least recently used first."""
        return [self._models[key].name for key in self._open]

    def close(self) -> None:
        while self._open:
            self._close(next(iter(self._open)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, role: str, need: Need) -> None:
        """Add the model of a role, sized for the largest need of its roles."""
        info: ModelInfo | None = None
        if need.model == "echo":
            key, name, window, trained = "echo", "echo", ECHO_CELLS, ECHO_CELLS
        else:
            catalog = Catalog.load(self._settings)
            spec = catalog.model(need.model)
            path = catalog.locate(spec)
            info = read_header(path)
            key = "\n".join((str(path.resolve()), str(spec.chat_template or "")))  # a different template needs a separate engine
            name = spec.name
            window, trained = min(spec.n_ctx or info.n_ctx_train, info.n_ctx_train), info.n_ctx_train or memory.MAX_UNSAID_TOKENS
        earlier = self._models.get(key)
        num_cells, num_sequences = min(need.num_cells or window, trained * need.num_sequences), need.num_sequences
        model = PooledModel(
            name=earlier.name if earlier else name,
            roles=(*(earlier.roles if earlier else ()), role),
            num_cells=max(num_cells, earlier.num_cells) if earlier else num_cells,
            num_sequences=max(num_sequences, earlier.num_sequences) if earlier else num_sequences,
            repeatable=need.repeatable and (earlier is None or earlier.repeatable),
            load_s=None,
            info=info,
            plan=None,
        )
        self._roles[role] = key
        self._names.setdefault(key, need.model)
        self._models[key] = replace(model, plan=self._planned(model))

    def _planned(self, model: PooledModel) -> MemoryPlan | None:
        """The memory that a model needs when no part of it is loaded."""
        if model.info is None:
            return None
        return memory.plan(
            model.info,
            model.num_cells,
            num_sequence_ids(model.num_sequences, model.info.state_bytes),
            flash_attention=self._flash_attention and not model.repeatable,
            gpu_layers=model.info.num_layers + 1 if self._has_gpu else 0,
            situation=Situation(available_bytes=0, gpu_available_bytes=0, python_bytes=0),
        )

    def _plans(self, keys: Mapping[str, object] | Sequence[str]) -> list[MemoryPlan]:
        return [plan for key in keys for plan in self._models[key].plans]

    def _free(self) -> Free:
        """The memory that would be free if none of these models were open."""
        situation, plans = self._situation, self._plans(self._open)
        free, on_gpu = situation.available_bytes, situation.gpu_available_bytes
        if free is None:
            free = memory.available_memory() + sum(plan.committed for plan in plans)
            # compute buffers occupy no memory until written, so never exceed what was free with no model open
            free = self._most_free = free if self._most_free is None or not plans else min(free, self._most_free)
        if on_gpu is None:
            on_gpu = gpu_bytes_free() + sum(plan.gpu_bytes for plan in plans) if self._has_gpu else 0
        return Free(max(0, free - situation.embedder_bytes), on_gpu)

    def _fits(self, keys: Sequence[str], free: Free) -> bool:
        plans = self._plans(keys)
        return not plans or memory.fit_together(plans, available_bytes=free.available, gpu_available_bytes=free.gpu_available)

    def _opened(self, key: str) -> _Opened:
        """The open model, marked as the most recently used."""
        if key in self._open:
            entry = self._open.pop(key)
        else:
            self._choose_attention(key)
            entry = self._load(key, self._make_room(key))
        self._open[key] = entry
        return entry

    def _choose_attention(self, key: str) -> None:
        """Choose the attention kernel before planning, since it affects memory and load times. It is measured once per machine."""
        if self._models[key].info is not None and not self._knows_attention:
            self._flash_attention = attention.flash_attention(self._settings.home, threads.ThreadGovernor())
            self._knows_attention = True
            self._models = {each: replace(model, plan=self._planned(model)) for each, model in self._models.items()}

    def _make_room(self, key: str) -> tuple[str, ...]:
        """Close idle models, least recently used first, until this one fits. Returns their names."""
        free = self._free()
        busy = self._plans([each for each, entry in self._open.items() if entry.is_busy])
        room = Free(free.available - sum(plan.needed for plan in busy), free.gpu_available - sum(plan.gpu_bytes for plan in busy))
        self._models[key].require(room)
        closed = []
        for idle in [each for each, entry in self._open.items() if not entry.is_busy]:
            if self._fits([*self._open, key], free):
                break
            closed.append(self._models[idle].name)
            self._close(idle)
        return tuple(closed)

    def _load(self, key: str, closed: tuple[str, ...]) -> _Opened:
        model = self._models[key]
        started = time.perf_counter()
        engine = open_engine(self._names[key], settings=self._settings, keep=self._keep)
        try:
            engine.reserve(model.num_cells, num_sequences=model.num_sequences, repeatable=model.repeatable)
        except BaseException:
            engine.close()
            raise
        if model.info is not None:
            self._kept.put(_load_key(model.info), round(engine.load_s, 3))  # without the catalogue's one-time checks
        self.loads.append(Load(model=model.name, load_s=round(time.perf_counter() - started, 3), closed=closed))
        return _Opened(engine)

    def _close(self, key: str) -> None:
        self._open.pop(key).engine.close()

    def _load_s(self, model: PooledModel) -> float | None:
        """Duration of the model's last load in seconds; None if unknown, 0 for the echo."""
        if model.info is None:
            return 0.0
        seconds = self._kept.read().get(_load_key(model.info))
        return float(seconds) if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0.0 <= seconds < 1e6 else None


@dataclass(slots=True, eq=False)
class _Opened:
    engine: Engine
    num_users: int = 0

    @property
    def is_busy(self) -> bool:
        return self.num_users > 0 or not self.engine.is_idle


def _load_key(info: ModelInfo) -> str:
    """Key of a model file on this machine, independent of its folder."""
    return f"{info.path.name} {info.file_size}; {platform.node()}"
