"""Run xllamacpp in a separate process: read a line with a list of requests, write a line with the time of each."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def main(path: str, n_ctx: int, num_slots: int, num_threads: int, flash_attention: int) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints is no answer
    server = make_server(path, n_ctx, num_slots, num_threads, flash_attention=bool(flash_attention))
    print("ready", file=out, flush=True)
    with ThreadPoolExecutor(num_slots) as pool:
        for line in sys.stdin:
            answers = list(pool.map(lambda request: ask(server, request), json.loads(line)))
            print(json.dumps(answers), file=out, flush=True)


def make_server(path: str, n_ctx: int, num_slots: int, num_threads: int, *, flash_attention: bool, port: int = 0) -> Any:  # noqa: ANN401  # without types
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.kv_unified = n_ctx, num_slots, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_ram_mib = 0  # nothing here comes back to a slot that has lost it, and saving it takes time
    params.verbosity = -1
    if port:
        params.hostnames, params.port, params.n_threads_http = ["127.0.0.1"], port, 32
    return xllamacpp.Server(params)


def ask(server: Any, request: dict[str, Any]) -> tuple[float, float, int]:  # noqa: ANN401  # without types
    """Seconds to the first token and to the end, and the tokens of the answer."""
    started = time.perf_counter()
    first, last = [0.0], dict[str, Any]()

    def take(chunk: dict[str, Any]) -> None:
        first[0] = first[0] or time.perf_counter() - started
        last.update(chunk)

    server.handle_completions(request, take)
    if "usage" not in last:
        raise RuntimeError(f"xllamacpp gave no answer: {last}")
    return first[0], time.perf_counter() - started, last["usage"]["completion_tokens"]


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
