"""What the models of one run need, whether they fit at once, and what it costs to have them in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

from localrag.engine import memory
from localrag.engine.memory import MemoryPlan
from localrag.model import ModelInfo


@dataclass(frozen=True, slots=True)
class Free:
    """Bytes that models may take of the machine's memory and of the GPU's."""

    available: int
    gpu_available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a role needs: a model by name or path (None is the default, `echo` needs no file), and a context.

    `num_cells` tokens of KV cache are for all of `num_sequences` together; None is the window that models.toml asks for, or else the
    training context, which is also the most that each sequence gets. Roles that use one model share its context, which is as large as
    the largest of them needs.
    """

    model: str | None = None
    num_cells: int | None = None
    num_sequences: int = 1
    repeatable: bool = False
    """Whether all that it writes is (see SamplingParams): then its context is for one sequence at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledModel:
    """One model file of a run, the roles that use it, and what it takes; `load_s` is what its last load took, if that is known."""

    name: str
    roles: tuple[str, ...]
    num_cells: int
    num_sequences: int
    repeatable: bool
    load_s: float | None
    info: ModelInfo | None
    plan: MemoryPlan | None
    """None, like `info`, for the echo, which takes nothing."""

    @property
    def plans(self) -> list[MemoryPlan]:
        return [] if self.plan is None else [self.plan]

    def require(self, free: Free) -> None:
        """EngineError with the numbers and the nearest window that fits, unless the model fits alone."""
        if self.plan is not None and self.info is not None:
            made = replace(self.plan, available=max(0, free.available), gpu_available=max(0, free.gpu_available))
            memory.require(made, self.info)

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
    """Which models of a run are open at once, and what an order of use costs.

    `loads` are the models in the order in which they are loaded; one that is there twice was closed for another in between.
    `needed_bytes` is of all models together, `available_bytes` what they may share; `gpu_…` is that of the GPU.
    """

    models: tuple[PooledModel, ...]
    together: bool
    loads: tuple[str, ...]
    load_bytes: int
    load_s: float | None
    """Seconds of all loads; None where that of a model is not known yet."""
    needed_bytes: int
    available_bytes: int
    gpu_bytes: int
    gpu_available_bytes: int

    @property
    def num_reloads(self) -> int:
        """Loads of a model that was open before."""
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
    """A load as it was: the model, its seconds, and which models were closed to make room."""

    model: str
    load_s: float
    closed: tuple[str, ...]
