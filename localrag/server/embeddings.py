"""/v1/embeddings: embed texts with the embedder that indexes use.

Some OpenAI clients send token ids instead of text. All of OpenAI's embedding models use the vocabulary cl100k_base, so the ids are decoded
with it. localrag neither ships nor downloads this vocabulary. It uses the file that tiktoken has cached on this machine, or a copy in
localrag's home. Decoding with another vocabulary would silently embed another text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from localrag.server.errors import Problem
from localrag.server.openapi import failures
from localrag.server.routing import State
from localrag.server.schemas import example

router = APIRouter(tags=["completions"])

FILE_NAME = "cl100k_base.tiktoken"
"""The file's name in localrag's home."""
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
_CACHED = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""The file's name in tiktoken's cache."""
_MAX_BYTES = 4 << 20


# --- token ids ---


class TokenIds:
    """Decodes token ids of cl100k_base. The file must match `sha256`, because other users may be able to write to tiktoken's cache."""

    def __init__(self, home: Path, *, env: Mapping[str, str] | None = None, sha256: str = SHA256) -> None:
        self._paths = list(_places(home, os.environ if env is None else env))
        self._sha256 = sha256
        self._lock = threading.Lock()
        self._pieces: dict[int, bytes] | None = None

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode ids to text. Problem 400 without the vocabulary, for unknown ids, and for ids that are not valid UTF-8."""
        pieces = self._vocabulary()
        unknown = next((each for each in token_ids if each not in pieces), None)
        if unknown is not None:
            raise Problem(400, f"The token id {unknown} is not in cl100k_base. Send text instead.", "invalid_token_ids", "input")
        try:
            return b"".join(pieces[each] for each in token_ids).decode()
        except UnicodeDecodeError:
            raise Problem(400, "The token ids end within a character. Send text instead.", "invalid_token_ids", "input") from None

    def _vocabulary(self) -> dict[int, bytes]:
        with self._lock:
            for path in self._paths if self._pieces is None else ():
                data = _read(path)
                if data is not None and hashlib.sha256(data).hexdigest() == self._sha256:
                    self._pieces = _parsed(data)
                    break
            if self._pieces is None:
                raise Problem(
                    400,
                    "Decoding token ids needs the vocabulary cl100k_base, which this machine does not have. Send text instead "
                    f"(in LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)), or put {FILE_NAME} into localrag's home.",
                    "token_ids_unreadable",
                    "input",
                )
            return self._pieces


def _places(home: Path, env: Mapping[str, str]) -> Iterator[Path]:
    """Yield the possible paths of the file: localrag's home, and the caches of old and new versions of tiktoken."""
    yield Path(home) / FILE_NAME
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if env.get(name):
            yield Path(env[name]) / _CACHED
    with suppress(RuntimeError):  # the user's home directory is unknown
        yield (Path(env["XDG_CACHE_HOME"]) if env.get("XDG_CACHE_HOME") else Path.home() / ".cache") / "tiktoken" / _CACHED
    yield Path(tempfile.gettempdir()) / "data-gym-cache" / _CACHED


def _read(path: Path) -> bytes | None:
    """Read a regular file of at most _MAX_BYTES. Returns None for anything else; does not block on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        return file.read() if stat.S_ISREG(about.st_mode) and about.st_size <= _MAX_BYTES else None


def _parsed(data: bytes) -> dict[int, bytes]:
    """Parse lines of a token's bytes in base64 and its id."""
    pieces = {}
    for line in data.splitlines():
        piece, _, number = line.partition(b" ")
        with suppress(binascii.Error, ValueError):
            pieces[int(number)] = base64.b64decode(piece, validate=True)
    return pieces


async def token_ids(state: State) -> TokenIds:
    """FastAPI dependency: the decoder of token ids."""
    return _token_ids_of(state.settings.home)


@cache
def _token_ids_of(home: Path) -> TokenIds:
    return TokenIds(home)


# --- request and response ---


InputText = Annotated[str, Field(min_length=1, max_length=1_000_000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenIdList = Annotated[list[TokenId], Field(min_length=1, max_length=8192)]


class EmbeddingRequest(BaseModel):
    """Texts to embed."""

    model_config = example({"model": "minilm", "input": ["What is PLA?", "A plastic."], "encoding_format": "float"}, extra="forbid")

    input: InputText | Annotated[list[InputText] | TokenIdList | list[TokenIdList], Field(min_length=1, max_length=2048)] = Field(
        description="One or more texts, or their token ids in OpenAI's cl100k_base."
    )
    model: str | None = Field(default=None, description="Ignored: this server has one embedder.")
    encoding_format: Literal["float", "base64"] | None = Field(default=None, description="base64 encodes little-endian float32.")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(default=None, description="If set, must be the embedder's dimension.")
    user: str | None = Field(default=None, description="Ignored.")


class EmbeddingVector(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The vectors, in the order of the texts."""

    model_config = example(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}],
            "model": "minilm",
            "usage": {"prompt_tokens": 5, "total_tokens": 5},
        }
    )

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


# --- the route ---


@router.post("/v1/embeddings", operation_id="create_embeddings", responses=failures(400, 422, 503))
def create_embeddings(body: EmbeddingRequest, state: State, token_ids: Annotated[TokenIds, Depends(token_ids)]) -> EmbeddingList:
    """Embed one or more texts, without the prefixes of models.toml. A text that exceeds the embedder's limit is refused, never truncated.

    Token ids must be those of OpenAI's embedding models (cl100k_base). They are refused if this machine does not have that vocabulary.
    """
    embedder = state.embedders.for_queries()
    texts = _texts(body.input, token_ids)
    if body.dimensions not in (None, embedder.dim):
        raise Problem(400, f"The embedder's vectors have {embedder.dim} dimensions. No other number is supported.", param="dimensions")
    counts = [embedder.count(text) for text in texts]
    for number, count in enumerate(counts, 1):
        if count > embedder.max_tokens:
            message = f"Text {number} has {count} tokens. The embedder's limit is {embedder.max_tokens}."
            raise Problem(400, message, "context_length_exceeded", "input")
    vectors = embedder.embed_plain(texts).astype("<f4")
    data = [
        EmbeddingVector(object="embedding", index=at, embedding=_encoded(vector, body.encoding_format)) for at, vector in enumerate(vectors)
    ]
    used = EmbeddingUsage(prompt_tokens=sum(counts), total_tokens=sum(counts))
    return EmbeddingList(object="list", model=state.embedders.name, data=data, usage=used)


def _texts(inputs: str | Sequence[str | int | Sequence[int]], token_ids: TokenIds) -> list[str]:
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs[0], int):
        inputs = [inputs]  # type: ignore[list-item]  # all of them are
    return [each if isinstance(each, str) else token_ids.text(each) for each in inputs]  # type: ignore[arg-type]  # the form says so


def _encoded(vector: Any, form: str | None) -> list[float] | str:  # noqa: ANN401  # an array of numpy
    return base64.b64encode(vector.tobytes()).decode("ascii") if form == "base64" else [float(each) for each in vector]
