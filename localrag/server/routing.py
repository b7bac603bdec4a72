"""The state that all routes share, FastAPI dependencies to access it, and helpers to run requests and send responses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from fastapi import Depends, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse

from localrag.kb import list_kbs
from localrag.server.chat_request import ChatQuestion
from localrag.server.engine_process import STOP_S, EngineProcess
from localrag.server.errors import Problem
from localrag.server.metrics import Metrics
from localrag.server.security import Guard
from localrag.session.opening import open_embedder
from localrag.settings import Settings
from localrag.text.tokens import Embedder, PrefixedEmbedder, embed_queries

if TYPE_CHECKING:
    import numpy as np

    from localrag.kb import KnowledgeBase


_EMBED_BATCH = 32
"""Number of texts that a thread embeds before another thread gets its turn, so that questions do not wait long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The settings, engine, guard, metrics and embedders of a server."""

    settings: Settings
    engine: EngineProcess | None = None
    """None for a server with indexes only."""
    guard: Guard = field(default_factory=Guard)
    rejects_tools: bool = False
    """Whether to refuse requests with both tools and an index. Otherwise they are answered without the index."""
    metrics: Metrics = field(default_factory=Metrics)
    embedder: InitVar[Embedder | None] = None
    """Replaces the embedder of models.toml."""
    embedders: Embedders = field(init=False)

    def __post_init__(self, embedder: Embedder | None) -> None:
        object.__setattr__(self, "embedders", Embedders(self.settings, embedder))

    def has_index(self, name: str) -> bool:
        return name in list_kbs(self.settings.kb_dir)


async def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(_state)]
"""The type of a route parameter for the server's state."""


class Embedders:
    """The embedders of a server, opened on first use and shared by all threads.

    For each embedder of its knowledge bases, one embeds stored texts, the other questions. They are the same object if llama.cpp has no
    converted copy for questions. A given `embedder` is used for everything.
    """

    def __init__(self, settings: Settings, embedder: Embedder | None = None) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._given = None if embedder is None else SerialEmbedder(embedder)
        self._name = None if embedder is None else embedder.fingerprint
        self._opened: dict[tuple[str | None, bool], SerialEmbedder] = {}
        """Embedders by the fingerprint of the knowledge base (None: it has no vectors yet) and by whether they are for questions."""

    @property
    def name(self) -> str:
        """The embedder's name. Raises errors of Catalog.load."""
        if self._name is None:
            from localrag.catalog import Catalog  # noqa: PLC0415  # weight

            self._name = Catalog.load(self._settings).embedder().name
        return self._name

    def for_texts(self, kb: KnowledgeBase | None = None) -> SerialEmbedder:
        """Return the embedder for texts stored in `kb`, by default that for new knowledge bases. Raises errors of open_embedder."""
        return self._get(kb, for_queries=False)

    def for_queries(self, kb: KnowledgeBase | None = None) -> SerialEmbedder:
        """Return the embedder for questions to `kb`, by default that for new knowledge bases. Raises errors of open_embedder."""
        return self._get(kb, for_queries=True)

    def _get(self, kb: KnowledgeBase | None, *, for_queries: bool) -> SerialEmbedder:
        if self._given is not None:
            return self._given
        fingerprint = None if kb is None or kb.embedder is None else kb.embedder[0]
        with self._lock:
            embedder = self._opened.get((fingerprint, for_queries))
            if embedder is None:
                candidate = open_embedder(self._settings, for_queries=for_queries, kbs=[] if kb is None else [kb])
                like = (each for each in self._opened.values() if each.is_like(candidate))
                embedder = self._opened[fingerprint, for_queries] = next(like, None) or SerialEmbedder(candidate)
            return embedder


class SerialEmbedder:
    """A thread-safe `localrag.text.tokens.Embedder`: one thread embeds at a time."""

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
        return self._batched(self._embedder.embed, texts)

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._batched(partial(embed_queries, self._embedder), texts)

    def embed_plain(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts as they are, without the embedder's prefixes."""
        return self._batched(_without_prefixes(self._embedder).embed, texts)

    def _batched(self, embed: Callable[[Sequence[str]], np.ndarray], texts: Sequence[str]) -> np.ndarray:
        import numpy as np  # noqa: PLC0415  # heavy

        parts = []
        for at in range(0, max(1, len(texts)), _EMBED_BATCH):
            with self._lock:
                parts.append(embed(texts[at : at + _EMBED_BATCH]))
        return np.concatenate(parts)

    def is_like(self, other: Embedder) -> bool:
        """Return whether the other embedder is equivalent, so that it need not be loaded as well."""
        kinds = {type(_without_prefixes(each)) for each in (self._embedder, other)}
        return len(kinds) == 1 and self.fingerprint == other.fingerprint


def _without_prefixes(embedder: Embedder) -> Embedder:
    return embedder.original if isinstance(embedder, PrefixedEmbedder) else embedder


FINISHES = {"stop": "stop", "length": "length", "time": "length", "cancelled": "stop"}
"""Maps localrag's finish reasons to OpenAI's."""
_PROMPTS = {"/v1/completions": "prompt", "/v1/responses": "input"}
"""The field of the body with the prompt, by route. For other routes it is "messages"."""
_THIS_MACHINE = ("127.0.0.1", "::1")
_LOOK_S = 0.2
"""Seconds between checks for a client disconnect."""
_KEPT = (
    "finish_reason",
    "slot",
    "ledger",
    "evidence",
    "citations",
    "unsupported_citations",
    "answerable",
    "abstained",
    "support",
    "unsupported_claims",
    "quotes",
    "coverage",
    "timings",
    "tokens_per_s",
    "warnings",
    "bypass",
)


class CompactResponse(JSONResponse):
    """A JSON response without white space."""

    def render(self, content: Any) -> bytes:  # noqa: ANN401  # starlette's signature
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


class Form(Protocol):
    """The response format of a route: one object, or server-sent events. `first` is the reply about the prompt before prefill."""

    def whole(self, result: Mapping[str, Any]) -> dict[str, Any]: ...
    def chunks(self, first: dict[str, Any], replies: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[dict[str, str]]: ...


async def send_answer(request: Request, engine: EngineProcess, question: ChatQuestion, form: Form) -> Response:
    """Run a question and return the response in this format, streamed if requested. Raises Problem as in EngineProcess.run."""
    replies = engine.run(client_of(request), question.to_message())
    try:
        if not question.streams:
            return CompactResponse(form.whole(await last_reply(request, replies)))
        first = await _wait_for(request, anext(replies))  # a refused request gets an error status, not a stream
    except Problem as problem:
        if problem.code == "context_length_exceeded":
            problem.param = _PROMPTS.get(request.url.path, "messages")
        raise
    return EventSourceResponse(form.chunks(first, replies), sep="\n", ping=15, shutdown_grace_period=STOP_S)


async def opened(state: State) -> EngineProcess:
    """Return the engine once its model is loaded. Problem 503 if there is no model."""
    if state.engine is None:
        raise Problem(503, "There is no model.")
    await state.engine.opened()
    if state.engine.failure is not None:
        raise Problem(503, "There is no model.")
    return state.engine


Engine = Annotated[EngineProcess, Depends(opened)]
"""The type of a route parameter for the engine, once its model is loaded."""


async def body_of(request: Request) -> Any:  # noqa: ANN401  # JSON
    """Parse a request's JSON body. Problem 400 if it is not JSON."""
    try:
        return json.loads(await request.body(), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise Problem(400, "The body is not JSON.") from None


def _no_number(text: str) -> float:
    raise ValueError(text)


def client_of(request: Request) -> str:
    """Return the client for fair scheduling: the address or, on this machine, where all programs share an address, the connection."""
    client = request.client
    if client is None:
        return ""
    return f"{client.host}:{client.port}" if client.host in _THIS_MACHINE else client.host


async def last_reply(request: Request, replies: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    """Wait for the "done" reply of the engine and return its content. Cancels the request if the client disconnects."""
    return await _wait_for(request, _last(replies))


async def _wait_for(request: Request, reply: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Wait for a reply. If the client disconnects, cancel it and raise Problem 499."""
    task = asyncio.ensure_future(reply)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S)
            if not task.done() and await request.is_disconnected():
                raise Problem(499, "The client disconnected.")
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


def answer_details(question: ChatQuestion, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer's sources (null without a search) and, under `localrag`, the fields that OpenAI's format lacks."""
    local = {name: result[name] for name in _KEPT if name in result}
    if question.index is not None and question.bypass is not None:
        local["bypass"] = question.bypass.value
    return {"source_nodes": result["nodes"] if question.searches else None, "localrag": local}


def warnings_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer's warnings, which streams carry even if the client did not request the details."""
    return {"localrag": {"warnings": result["warnings"]}} if result.get("warnings") else {}


def usage(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer's token counts in the format of chat completions."""
    counted = result["usage"]
    return {
        "prompt_tokens": counted["prompt_tokens"],
        "completion_tokens": counted["completion_tokens"],
        "total_tokens": counted["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": counted["cached_tokens"]},
        "completion_tokens_details": {"reasoning_tokens": counted.get("reasoning_tokens", 0)},
    }


def data_of(event: Mapping[str, Any]) -> str:
    """Encode the data of a server-sent event as JSON. Lone surrogates, which UTF-8 cannot encode, become question marks."""
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()
