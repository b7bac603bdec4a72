"""What models.toml says of a model, what its file says of itself, and the slot that follows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

SourceKind = Literal["wheel", "repo", "path"]
Bound = Literal["requested", "training", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One table of models.toml: where the file comes from, and what is asked of it.

    `kind` says which source it is; `source` is that source's text (a pinned requirement, a hub repository, a path), `file` the
    file inside it (empty for a path). `sha256` is of the GGUF file, or of an embedder folder's model.safetensors.
    `n_ctx` in tokens is a request; `revision` is a branch, tag or commit of a hub repository.
    """

    name: str
    kind: SourceKind
    source: str
    file: str = ""
    revision: str | None = None
    sha256: str | None = None
    n_ctx: int | None = None
    chat_template: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a GGUF header says, checked and bounded before any weight is read.

    Lengths are in tokens, sizes in bytes; `head_size_k` and `head_size_v` are elements per head, of the layer where they are
    largest. `num_kv_heads` has one entry a layer, 0 where a layer keeps no keys and values. `sliding_window` is None where the
    file names none. `name` is made fit for a terminal. What a file does not say is None, or 0 for the shape of a
    vocabulary-only file; what it says wrongly is a ModelFileError.
    """

    path: Path
    file_size: int
    gguf_version: int
    architecture: str
    name: str | None
    n_ctx_train: int
    num_layers: int
    num_heads: int
    num_kv_heads: tuple[int, ...]
    embedding_length: int
    head_size_k: int
    head_size_v: int
    rope_scaling: str | None
    rope_freq_base: float | None
    sliding_window: int | None
    vocab_size: int
    tokenizer_model: str
    tokenizer_pre: str | None
    chat_template: str | None
    num_tensors: int
    quantization: str | None

    @property
    def is_vocab_only(self) -> bool:
        """Whether the file holds a tokenizer and no weights."""
        return self.num_tensors == 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in an f16 KV cache with every layer kept in full (an upper bound where layers slide)."""
        return sum(self.num_kv_heads) * (self.head_size_k + self.head_size_v) * 2

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "path": str(self.path), "kv_bytes_per_token": self.kv_bytes_per_token}


@dataclass(frozen=True, slots=True)
class Slot:
    """A sequence's share of the KV cache: `n_ctx` tokens, and which of the three limits bound it."""

    id: int
    n_ctx: int
    n_ctx_train: int
    requested: int | None
    bound: Bound

    def to_dict(self) -> dict[str, object]:
        return {"n_ctx": self.n_ctx, "n_ctx_train": self.n_ctx_train, "requested": self.requested, "bound": self.bound}
