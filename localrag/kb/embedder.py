"""Load an embedder or a reranker from a sentence-transformers folder. The only module that imports sentence_transformers.

Counting tokens needs only the tokenizer file (16 ms). Torch and the weights (5 s) are loaded when the first text is embedded or scored.
Everything is read from the folder: no network, no remote code, safetensors only.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from localrag.errors import ModelFileError, ModelNotFoundError
from localrag.text.tokens import check_length

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

BATCH_SIZE = 16
"""Texts per batch, padded to the longest. With mixed lengths, 8 and 32 were both a sixth slower."""
_NUM_COUNTED = 1024
_LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError)
"""Errors that sentence-transformers raises for a folder that it cannot load."""
_WEIGHTS = "model.safetensors"
_TOKENIZER = "tokenizer.json"
_CONFIGS = ("config.json", "modules.json", "sentence_bert_config.json")
_MAX_JSON_BYTES = 1024 * 1024
_PAIRS_AT_ONCE = 32
_FEW_PAIRS = 4
"""Pairs to score between checks of the deadline."""
_IMPORT_S, _LOAD_S = 8.0, 1.0
"""Seconds to allow on a slow machine for importing torch, and for loading a model after that."""
_Json = TypeVar("_Json", dict[str, Any], list[Any])


class SentenceTransformerEmbedder:
    """Implements `localrag.text.tokens.Embedder` with the model in `folder`.

    `sha256` is the digest of model.safetensors, computed if it is not given. Raises ModelNotFoundError for a missing file and
    ModelFileError for an invalid one.
    """

    def __init__(self, folder: Path, *, sha256: str | None = None) -> None:
        self.folder = folder
        self._sha256 = sha256
        for name in (_WEIGHTS, _TOKENIZER, "modules.json"):
            if not (folder / name).is_file():
                raise ModelNotFoundError(
                    f"The embedder folder {folder} has no {name}.",
                    hint="Fetch it again with: localrag models pull; or name a sentence-transformers folder with safetensors weights.",
                )

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of everything that shapes a vector: weights, tokenizer and settings."""
        configs = (self.folder / _TOKENIZER, *self._module_configs, *(self.folder / name for name in _CONFIGS))
        return _fingerprint(configs, self._sha256 or _sha256(self.folder / _WEIGHTS))

    @cached_property
    def dim(self) -> int:
        for config in reversed(self._module_configs):
            fields = _json(config, dict)
            for key in ("out_features", "word_embedding_dimension", "embedding_dimension"):
                if isinstance(fields.get(key), int):
                    return int(fields[key])
        return self._positive(_json(self.folder / "config.json", dict).get("hidden_size"), "hidden_size")

    @cached_property
    def max_tokens(self) -> int:
        own = _json(self.folder / "sentence_bert_config.json", dict).get("max_seq_length")
        position = _json(self.folder / "config.json", dict).get("max_position_embeddings")
        longest = self._positive(own if own is not None else position, "max_seq_length")
        return self._positive(longest - self._tokenizer.num_special_tokens_to_add(is_pair=False), "max_seq_length")

    def count(self, text: str) -> int:
        return self._counted(text)

    @cached_property
    def _counted(self) -> Callable[[str], int]:
        """Count tokens, with an LRU cache: each passage is counted several times while it is cut and embedded."""
        return lru_cache(maxsize=_NUM_COUNTED)(lambda text: len(self._tokenizer.encode(text, add_special_tokens=False)))

    def input_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens included, never truncated."""
        return self._tokenizer.encode(text).ids

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts to a float32 array of shape (len(texts), dim), rows of length 1. Raises KnowledgeBaseError if one is too long."""
        import numpy as np  # noqa: PLC0415  # heavy

        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        check_length(max(self.count(text) for text in texts), self.max_tokens)
        vectors = self._model.encode(
            list(texts),
            prompt="",  # the folder may define a prompt, which would not be counted
            batch_size=BATCH_SIZE,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        if vectors.shape[1] != self.dim:
            raise self._broken("config", f"its vectors have {vectors.shape[1]} dimensions, not {self.dim}")
        return np.asarray(vectors, dtype=np.float32)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            return _open_tokenizer(self.folder)
        except Exception as error:  # the only class that tokenizers raises
            raise self._broken(_TOKENIZER, error) from error

    @cached_property
    def _model(self) -> Any:  # noqa: ANN401  # SentenceTransformer, of a package without types
        try:
            model = _load("SentenceTransformer", self.folder)
        except _LOADING_ERRORS as error:
            raise self._broken(_WEIGHTS, error) from error
        if model.max_seq_length is None or model.max_seq_length < self.max_tokens:
            raise self._broken("sentence_bert_config.json", f"it takes {model.max_seq_length} tokens, not {self.max_tokens}")
        return model

    @cached_property
    def _module_configs(self) -> list[Path]:
        modules = _json(self.folder / "modules.json", list)
        paths = [str(module.get("path", "")) for module in modules if isinstance(module, dict)]
        return [file for path in paths if path and (file := self.folder / path / "config.json").is_file()]

    def _positive(self, value: object, key: str) -> int:
        if isinstance(value, int) and value > 0:
            return value
        raise self._broken("config", f"{key} is {value!r}")

    def _broken(self, file: str, why: object) -> ModelFileError:
        return ModelFileError(
            f"The embedder in {self.folder} cannot be used ({file}): {str(why).splitlines()[0] if str(why) else why!r}",
            hint="Fetch it again with: localrag models pull",
        )


class CrossEncoderReranker:
    """Implements `localrag.kb.protocols.Reranker` with the cross-encoder in `folder`, which reads question and passage together."""

    def __init__(self, folder: Path, *, sha256: str | None = None) -> None:
        self.folder = folder
        self._sha256 = sha256
        for name in ("config.json", _WEIGHTS, _TOKENIZER):
            if not (folder / name).is_file():
                raise ModelNotFoundError(
                    f"The reranker folder {folder} has no {name}.", hint="Name a CrossEncoder folder with safetensors weights."
                )

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of everything that shapes a score: weights, tokenizer and settings."""
        return _fingerprint((self.folder / _TOKENIZER, self.folder / "config.json"), self._sha256 or _sha256(self.folder / _WEIGHTS))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special ones and without truncation."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            return _open_tokenizer(self.folder)
        except Exception as error:  # the only class that tokenizers raises
            raise self._broken(error) from error

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Score each text with the model; higher is better. A pair that is too long is truncated."""
        return self._scores(query, texts, _PAIRS_AT_ONCE) if texts else []

    def scores_until(self, query: str, texts: Sequence[str], ends_at: float) -> list[float] | None:
        """Score each text, or return None if that cannot finish by `ends_at`, a time of time.perf_counter().

        Loading cannot be interrupted, so it starts only if there is enough time. The first few pairs then show how long the rest takes.
        """
        if not texts:
            return []
        if "_model" not in self.__dict__ and time.perf_counter() + (_LOAD_S if "torch" in sys.modules else _IMPORT_S) > ends_at:
            return None
        scores: list[float] = []
        _ = self._model
        while len(scores) < len(texts):
            started = time.perf_counter()
            scores += self._scores(query, texts[len(scores) : len(scores) + _FEW_PAIRS], _FEW_PAIRS)
            now = time.perf_counter()
            num_more = -(-(len(texts) - len(scores)) // _FEW_PAIRS)
            if num_more and now + num_more * (now - started) > ends_at:
                return None
        return scores

    def _scores(self, query: str, texts: Sequence[str], batch_size: int) -> list[float]:
        scores = self._model.predict([(query, text) for text in texts], batch_size=batch_size, show_progress_bar=False)
        if getattr(scores, "ndim", 0) != 1:
            raise self._broken("it returns several numbers per pair instead of one")
        return [float(score) for score in scores]

    @cached_property
    def _model(self) -> Any:  # noqa: ANN401  # CrossEncoder, of a package without types
        try:
            return _load("CrossEncoder", self.folder)
        except _LOADING_ERRORS as error:
            raise self._broken(error) from error

    def _broken(self, why: object) -> ModelFileError:
        return ModelFileError(
            f"The reranker in {self.folder} cannot be used: {(str(why).splitlines() or [repr(why)])[0]}", hint="Fetch its folder again."
        )


def _open_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer  # noqa: PLC0415  # an extension module

    tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    tokenizer.no_truncation()  # the file may enable both, which would falsify counts
    tokenizer.no_padding()
    return tokenizer


def _fingerprint(configs: Iterable[Path], weights_sha256: str) -> str:
    digest = hashlib.sha256()
    for file in configs:
        if file.is_file():
            digest.update(f"{file.name}\0{_sha256(file)}\0".encode())
    digest.update(weights_sha256.encode())
    return digest.hexdigest()


def _load(name: str, folder: Path) -> Any:  # noqa: ANN401  # of a package without types
    """Load `folder` with the class `name` of sentence-transformers. Raises one of _LOADING_ERRORS."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import sentence_transformers  # noqa: PLC0415  # 5 s
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()  # type: ignore[no-untyped-call]  # the weights load in a moment
    model_class = getattr(sentence_transformers, name)
    return model_class(
        str(folder),
        device="cpu",
        local_files_only=True,
        trust_remote_code=False,
        model_kwargs={"use_safetensors": True},
    )


def _json(file: Path, kind: type[_Json]) -> _Json:
    """Read a JSON file; empty if it does not exist. Raises ModelFileError if it is damaged."""
    if not file.is_file():
        return kind()
    try:
        value = json.loads(file.read_bytes()[:_MAX_JSON_BYTES])
    except ValueError as error:
        value = error
    if isinstance(value, kind):
        return value
    raise ModelFileError(f"The embedder file {file} is damaged.", hint="Fetch it again with: localrag models pull")


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
