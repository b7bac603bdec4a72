"""Start servers with an OpenAI-compatible API in separate processes, and request streamed chat completions from them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_S = 180.0
REQUEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Served:
    """What one request took, in seconds from its call, and the tokens of its answer."""

    first_s: float
    total_s: float
    num_tokens: int


@contextmanager
def started(command: Sequence[str], *, env: dict[str, str] | None = None, path: str = "/v1/models") -> Iterator[tuple[str, int]]:
    """A server as (address, process id); `{port}` in its command is a free port. It is ended, and killed if it does not end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    filled = [part.replace("{port}", str(port)) for part in command]
    process = subprocess.Popen(filled, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url + path)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=START_S).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"The server at {url} did not come up.")


def localrag(*args: str, model: Path | str) -> list[str]:
    return [sys.executable, "-m", "localrag", "serve", "--model", str(model), "--port", "{port}", "--no-keep", *args]


def llama_cpp_python(model: Path, *, n_ctx: int) -> list[str]:
    """Its own server, told not to break off an answer when the next request comes, which it does for itself."""
    options = ["--n_ctx", str(n_ctx), "--interrupt_requests", "false", "--verbose", "false"]
    return [sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--port", "{port}", *options]


def xllamacpp(model: Path, *, n_ctx: int, num_slots: int, num_threads: int, flash_attention: bool) -> list[str]:
    options = [str(model), str(n_ctx), str(num_slots), str(num_threads), str(int(flash_attention))]
    return [sys.executable, "-m", "benchmarks.slots_server", "{port}", *options]


def ask(client: httpx.Client, url: str, messages: Sequence[dict[str, str]], max_tokens: int, **more: object) -> Served:
    """A streamed chat completion, greedy; `more` are other fields of the body. RuntimeError for one that is refused."""
    body = {**more, "model": "any", "messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    started_at, first, num_chunks, used = time.perf_counter(), 0.0, 0, None
    with client.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=REQUEST_S) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code} {response.read()[:200]!r}")
        for chunk in chunks(response):
            choices = chunk.get("choices") or [{}]
            if (choices[0].get("delta") or {}).get("content"):
                num_chunks += 1
                first = first or time.perf_counter() - started_at
            used = chunk.get("usage") or used
    total = time.perf_counter() - started_at
    return Served(first or total, total, used["completion_tokens"] if used else num_chunks)


def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of a stream's events."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
