"""The state that all routes of one server share, and the dependency by which a route asks for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from fastapi import Depends, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse

from localrag.kb import list_kbs
from localrag.server.chat_request import Asked
from localrag.server.engine_process import STOP_S, EngineProcess
from localrag.server.errors import Problem
from localrag.server.metrics import Metrics
from localrag.server.security import Guard
from localrag.session.opening import open_embedder
from localrag.settings import Settings
from localrag.text.tokens import Embedder

if TYPE_CHECKING:
    import numpy as np


_EMBED_BATCH = 32
"""Texts that one thread embeds before another has its turn: a question waits for no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a server answers with."""

    settings: Settings
    engine: EngineProcess | None = None
    """None for a server of indexes alone."""
    guard: Guard = field(default_factory=Guard)
    rejects_tools: bool = False
    """Whether tools beside an index are refused, rather than answered without the index."""
    metrics: Metrics = field(default_factory=Metrics)
    embedder: InitVar[Embedder | None] = None
    """In place of the one of models.toml."""
    embedders: Embedders = field(init=False)

    def __post_init__(self, embedder: Embedder | None) -> None:
        object.__setattr__(self, "embedders", Embedders(self.settings, embedder))

    def has_index(self, name: str) -> bool:
        return name in list_kbs(self.settings.kb_dir)


async def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(_state)]
"""The type of a route's parameter that takes the state of its server."""


class Embedders:
    """The embedders of a server, opened when they are first needed, and shared by all its threads.

    One embeds what is stored, and one what is asked: the same where llama.cpp has no copy for questions. `embedder` stands for both.
    """

    def __init__(self, settings: Settings, embedder: Embedder | None = None) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        shared = None if embedder is None else _SerialEmbedder(embedder)
        self._name = None if embedder is None else embedder.fingerprint
        self._opened: dict[bool, _SerialEmbedder | None] = {False: shared, True: shared}

    @property
    def name(self) -> str:
        """Errors as of Catalog.load."""
        if self._name is None:
            from localrag.catalog import Catalog  # noqa: PLC0415  # weight

            self._name = Catalog.load(self._settings).embedder().name
        return self._name

    def for_texts(self) -> Embedder:
        """The one that vectors are stored of. Errors as of open_embedder."""
        return self._get(for_queries=False)

    def for_queries(self) -> Embedder:
        """Errors as of open_embedder."""
        return self._get(for_queries=True)

    def _get(self, *, for_queries: bool) -> Embedder:
        with self._lock:
            found, other = self._opened[for_queries], self._opened[not for_queries]
            if found is None:
                opened = open_embedder(self._settings, for_queries=for_queries)
                found = other if other is not None and other.is_like(opened) else _SerialEmbedder(opened)
                self._opened[for_queries] = found
            return found


class _SerialEmbedder:
    """Implements `localrag.text.tokens.Embedder` for threads: one at a time embeds."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        return self._embedder.fingerprint

    @property
    def dim(self) -> int:
        return self._embedder.dim

    @property
    def max_tokens(self) -> int:
        return self._embedder.max_tokens

    def count(self, text: str) -> int:
        return self._embedder.count(text)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        import numpy as np  # noqa: PLC0415  # heavy

        parts = []
        for at in range(0, max(1, len(texts)), _EMBED_BATCH):
            with self._lock:
                parts.append(self._embedder.embed(texts[at : at + _EMBED_BATCH]))
        return np.concatenate(parts)

    def is_like(self, other: Embedder) -> bool:
        """Whether that one would do the same work in the same way, so that it need not be loaded too."""
        return type(self._embedder) is type(other) and self.fingerprint == other.fingerprint


FINISHES = {"stop": "stop", "length": "length", "time": "length", "cancelled": "stop"}
"""Ours to OpenAI's."""
_PROMPTS = {"/v1/completions": "prompt", "/v1/responses": "input"}
"""What a body calls its prompt; of other routes, messages."""
_THIS_MACHINE = ("127.0.0.1", "::1")
_LOOK_S = 0.2
"""How often it is looked whether a client is still there."""
_KEPT = (
    "finish_reason",
    "slot",
    "ledger",
    "evidence",
    "citations",
    "unsupported_citations",
    "coverage",
    "timings",
    "tokens_per_s",
    "warnings",
    "bypass",
)


class CompactResponse(JSONResponse):
    """JSON without white space."""

    def render(self, content: Any) -> bytes:  # noqa: ANN401  # starlette's signature
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


class Form(Protocol):
    """How one route writes an answer: whole, or as server-sent events, `first` being the prompt before it is evaluated."""

    def whole(self, done: Mapping[str, Any]) -> dict[str, Any]: ...
    def chunks(self, first: dict[str, Any], replies: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]: ...


async def answered(request: Request, engine: EngineProcess, asked: Asked, form: Form) -> Response:
    """What is asked, answered in this form: streamed if it asks for that. Problem as of EngineProcess.run."""
    replies = engine.run(client_of(request), asked.to_message())
    try:
        if not asked.streams:
            return CompactResponse(form.whole(await heard_out(request, replies)))
        first = await _attended(request, anext(replies))  # what cannot be answered is no stream
    except Problem as problem:
        if problem.code == "context_length_exceeded":
            problem.param = _PROMPTS.get(request.url.path, "messages")
        raise
    return EventSourceResponse(form.chunks(first, replies), sep="\n", ping=15, shutdown_grace_period=STOP_S)


async def opened(state: State) -> EngineProcess:
    """The engine, once its model is open. Problem 503 if there is none."""
    if state.engine is None:
        raise Problem(503, "There is no model.")
    await state.engine.opened()
    if state.engine.failure is not None:
        raise Problem(503, "There is no model.")
    return state.engine


Engine = Annotated[EngineProcess, Depends(opened)]
"""The type of a route's parameter that takes the engine, once its model is open."""


async def body_of(request: Request) -> Any:  # noqa: ANN401  # JSON
    """Problem 400 for what is not JSON."""
    try:
        return json.loads(await request.body(), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Problem(400, "The body is not JSON.") from None


def _no_number(text: str) -> float:
    raise ValueError(text)


def client_of(request: Request) -> str:
    """Whose share of the engine a request takes: an address, or of this machine, which is one address for all programs, a connection."""
    client = request.client
    if client is None:
        return ""
    return f"{client.host}:{client.port}" if client.host in _THIS_MACHINE else client.host


async def heard_out(request: Request, replies: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    """What was done in the end. A client that goes away ends it at once."""
    return await _attended(request, _last(replies))


async def _attended(request: Request, reply: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """What is waited for. Problem 499 as soon as the client went away, which ends it."""
    task = asyncio.ensure_future(reply)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S)
            if not task.done() and await request.is_disconnected():
                raise Problem(499, "The client went away.")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _last(replies: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    logprobs: list[Any] = []
    async with aclosing(replies):
        async for reply in replies:
            logprobs += reply.get("logprobs", ())
            if "done" in reply:
                return {**reply["done"], **({"logprobs": logprobs} if "answer" in reply["done"] else {})}
    raise Problem(503, "The model could not answer.")


def accounts(asked: Asked, done: Mapping[str, Any]) -> dict[str, Any]:
    """Of an answer object: its sources, null where nothing was searched, and under `localrag` all that OpenAI's form has no place for."""
    local = {name: done[name] for name in _KEPT if name in done}
    if asked.index is not None and asked.bypass is not None:
        local["bypass"] = asked.bypass.value
    return {"source_nodes": done["nodes"] if asked.searches else None, "localrag": local}


def warned(done: Mapping[str, Any]) -> dict[str, Any]:
    """Of an answer object, what a client must be told that did not ask for its account: where it has less room than was asked for."""
    return {"localrag": {"warnings": done["warnings"]}} if done.get("warnings") else {}


def usage(done: Mapping[str, Any]) -> dict[str, Any]:
    """In the form of completions."""
    counted = done["usage"]
    return {
        "prompt_tokens": counted["prompt_tokens"],
        "completion_tokens": counted["completion_tokens"],
        "total_tokens": counted["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": counted["cached_tokens"]},
        "completion_tokens_details": {"reasoning_tokens": counted.get("reasoning_tokens", 0)},
    }


def data_of(event: Mapping[str, Any]) -> str:
    """JSON as it goes into a server-sent event. Half of a surrogate pair, which UTF-8 does not have, becomes a question mark."""
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()
