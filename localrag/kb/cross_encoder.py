"""A reranker from a sentence-transformers CrossEncoder folder: question and passage are read together. Imports torch when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from localrag.errors import ModelFileError, ModelNotFoundError
from localrag.kb.embedder import LOADING_ERRORS, load

_BATCH_SIZE = 32


class CrossEncoderReranker:
    """Implements `localrag.kb.rerank.Reranker` with the model in `folder`: no network, no code from it, safetensors only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            if not (folder / name).is_file():
                raise ModelNotFoundError(
                    f"The reranker folder {folder} has no {name}.", hint="Name a CrossEncoder folder with safetensors weights."
                )

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """The model's own scores, higher for better; of a pair that is too long, the end is not read."""
        if not texts:
            return []
        found = self._model.predict([(query, text) for text in texts], batch_size=_BATCH_SIZE, show_progress_bar=False)
        if getattr(found, "ndim", 0) != 1:
            raise self._broken("it gives several numbers for a pair, not one")
        return [float(score) for score in found]

    @cached_property
    def _model(self) -> Any:  # noqa: ANN401  # CrossEncoder, of a package without types
        try:
            return load("CrossEncoder", self.folder)
        except LOADING_ERRORS as error:
            raise self._broken(error) from error

    def _broken(self, why: object) -> ModelFileError:
        return ModelFileError(
            f"The reranker in {self.folder} cannot be used: {(str(why).splitlines() or [repr(why)])[0]}", hint="Fetch its folder again."
        )
