"""/v1/embeddings: vectors of texts, of the embedder that indexes are made with.

Some of OpenAI's clients send token ids in place of a text. Its embedding models all have the vocabulary cl100k_base, so that is what such
ids mean. localrag does not come with it and fetches nothing: the file is there where tiktoken has used it on this machine, or where a
person has put it into the home. Ids read with any other vocabulary would make a vector of another text, and nobody would notice.
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
"""In the home."""
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
_CACHED = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""What tiktoken calls the file in its cache."""
_MAX_BYTES = 4 << 20


# --- token ids ---


class TokenIds:
    """Reads token ids of cl100k_base. `sha256` is that of its file: others may write to where tiktoken keeps it."""

    def __init__(self, home: Path, *, env: Mapping[str, str] | None = None, sha256: str = SHA256) -> None:
        self._paths = list(_places(home, os.environ if env is None else env))
        self._sha256 = sha256
        self._lock = threading.Lock()
        self._pieces: dict[int, bytes] | None = None

    def text(self, token_ids: Sequence[int]) -> str:
        """The text that the ids are of. Problem 400 without the vocabulary, for ids that it lacks, and for ids of no text."""
        pieces = self._vocabulary()
        unknown = next((each for each in token_ids if each not in pieces), None)
        if unknown is not None:
            raise Problem(400, f"The token id {unknown} is not in cl100k_base; send the text itself.", "invalid_token_ids", "input")
        try:
            return b"".join(pieces[each] for each in token_ids).decode()
        except UnicodeDecodeError:
            raise Problem(400, "The token ids end within a character; send the text itself.", "invalid_token_ids", "input") from None

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
                    "Token ids can be read only with the vocabulary cl100k_base, and this machine has none. Send the text itself "
                    f"(in LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)), or put {FILE_NAME} into the home of localrag.",
                    "token_ids_unreadable",
                    "input",
                )
            return self._pieces


def _places(home: Path, env: Mapping[str, str]) -> Iterator[Path]:
    """Where the file may be: the home, and the caches of old and new versions of tiktoken."""
    yield Path(home) / FILE_NAME
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if env.get(name):
            yield Path(env[name]) / _CACHED
    with suppress(RuntimeError):  # nobody's home is known
        yield (Path(env["XDG_CACHE_HOME"]) if env.get("XDG_CACHE_HOME") else Path.home() / ".cache") / "tiktoken" / _CACHED
    yield Path(tempfile.gettempdir()) / "data-gym-cache" / _CACHED


def _read(path: Path) -> bytes | None:
    """A regular file that is not too large; None for anything else. A pipe that someone put there is not waited for."""
    try:
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError:
        return None
    with os.fdopen(opened, "rb") as file:
        about = os.fstat(opened)
        return file.read() if stat.S_ISREG(about.st_mode) and about.st_size <= _MAX_BYTES else None


def _parsed(data: bytes) -> dict[int, bytes]:
    """Lines of a token's bytes in base64 and its id."""
    found = {}
    for line in data.splitlines():
        piece, _, number = line.partition(b" ")
        with suppress(binascii.Error, ValueError):
            found[int(number)] = base64.b64decode(piece, validate=True)
    return found


async def token_ids(state: State) -> TokenIds:
    """The dependency of a route that reads token ids."""
    return _token_ids_of(state.settings.home)


@cache
def _token_ids_of(home: Path) -> TokenIds:
    return TokenIds(home)


# --- the forms ---


InputText = Annotated[str, Field(min_length=1, max_length=1_000_000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenIdList = Annotated[list[TokenId], Field(min_length=1, max_length=8192)]


class EmbeddingRequest(BaseModel):
    """Texts whose vectors are wanted."""

    model_config = example({"model": "minilm", "input": ["What is PLA?", "A plastic."], "encoding_format": "float"}, extra="forbid")

    input: InputText | Annotated[list[InputText] | TokenIdList | list[TokenIdList], Field(min_length=1, max_length=2048)] = Field(
        description="A text or several, or the token ids of one or several in OpenAI's cl100k_base."
    )
    model: str | None = Field(default=None, description="Taken as it is: this server has one embedder.")
    encoding_format: Literal["float", "base64"] | None = Field(default=None, description="base64 is of little-endian float32.")
    dimensions: Annotated[int, Field(ge=1)] | None = Field(default=None, description="As many as the embedder gives, or left out.")
    user: str | None = Field(default=None, description="Without effect.")


class EmbeddingVector(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Vectors in the order of the texts."""

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
    """The vectors of one text or several. A text that is longer than the embedder reads is refused with the numbers, never cut.

    Token ids are those of OpenAI's embedding models (cl100k_base), and are refused where this machine does not have that vocabulary.
    """
    embedder = state.embedders.for_queries()
    texts = _texts(body.input, token_ids)
    if body.dimensions not in (None, embedder.dim):
        raise Problem(400, f"The embedder gives vectors of {embedder.dim} dimensions, and no others.", param="dimensions")
    counts = [embedder.count(text) for text in texts]
    for number, count in enumerate(counts, 1):
        if count > embedder.max_tokens:
            said = f"Text {number} has {count} tokens, but the embedder reads {embedder.max_tokens} at most."
            raise Problem(400, said, "context_length_exceeded", "input")
    vectors = embedder.embed(texts).astype("<f4")
    data = [
        EmbeddingVector(object="embedding", index=at, embedding=_encoded(vector, body.encoding_format)) for at, vector in enumerate(vectors)
    ]
    used = EmbeddingUsage(prompt_tokens=sum(counts), total_tokens=sum(counts))
    return EmbeddingList(object="list", model=state.embedders.name, data=data, usage=used)


def _texts(given: str | Sequence[str | int | Sequence[int]], token_ids: TokenIds) -> list[str]:
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        given = [given]  # type: ignore[list-item]  # all of them are
    return [each if isinstance(each, str) else token_ids.text(each) for each in given]  # type: ignore[arg-type]  # the form says so


def _encoded(vector: Any, form: str | None) -> list[float] | str:  # noqa: ANN401  # an array of numpy
    return base64.b64encode(vector.tobytes()).decode("ascii") if form == "base64" else [float(each) for each in vector]
