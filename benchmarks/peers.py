"""The programs that localrag is measured beside: the same file, greedy, no penalties."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrag.messages import Message

CHAT = "create_chat_completion, its defaults"
SLOTS = "xllamacpp"
HAS_SLOTS = importlib.util.find_spec("xllamacpp") is not None
SLOTS_NOTE = "xllamacpp is its wheel from PyPI, built for AVX2, with the threads and the attention of localrag"
SLOTS_MISSING = "xllamacpp is not installed (pip install xllamacpp)"


@dataclass(frozen=True, slots=True)
class Answered:
    """`first_s` and `total_s` count from the call; `num_tokens` are those of the answer."""

    first_s: float
    total_s: float
    num_tokens: int


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as OpenAI's API has them."""
    return [{"role": each.role, "content": each.content} for each in messages]


class ChatCompletion:
    """llama-cpp-python's high-level class. It keeps its last prompt, and a new one goes on from what both have in common."""

    def __init__(self, path: Path, *, n_ctx: int) -> None:
        from llama_cpp import Llama  # noqa: PLC0415  # the peer, after our own import of its C functions

        self.llama: Any = Llama(str(path), n_ctx=n_ctx, verbose=False)

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Answered:
        """One answer as a whole; when its first token came is not known."""
        started = time.perf_counter()
        answer = self.llama.create_chat_completion(as_dicts(messages), max_tokens=max_tokens, temperature=0.0, top_k=1)
        return Answered(0.0, time.perf_counter() - started, answer["usage"]["completion_tokens"])

    def stream(self, messages: Sequence[Message], max_tokens: int, num_prompt_tokens: int) -> Answered:
        """One answer as it comes. `num_prompt_tokens` tells its tokens from those of the prompt."""
        started, first = time.perf_counter(), 0.0
        for chunk in self.llama.create_chat_completion(as_dicts(messages), max_tokens=max_tokens, temperature=0.0, top_k=1, stream=True):
            choice = chunk["choices"][0]
            if not first and (choice["delta"].get("content") or choice["finish_reason"]):
                first = time.perf_counter() - started
        return Answered(first, time.perf_counter() - started, self.llama.n_tokens - num_prompt_tokens + 1)

    def close(self) -> None:
        self.llama.close()


class Slots:
    """llama.cpp's server within this process, through xllamacpp. Each of its slots keeps its last prompt.

    `n_ctx` is shared by all slots. Answers do not end before `max_tokens` unless `may_end`.
    """

    def __init__(self, path: Path, *, n_ctx: int, num_slots: int, num_threads: int, flash_attention: bool) -> None:
        xllamacpp: Any = importlib.import_module("xllamacpp")  # optional, and without types
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.kv_unified = n_ctx, num_slots, True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_ram_mib = 0  # nothing here comes back to a slot that has lost it, and saving it takes time
        params.verbosity = -1
        self.num_slots = num_slots
        self._server: Any = xllamacpp.Server(params)

    def ask(self, token_ids: Sequence[int], max_tokens: int, *, reuse: bool = True, may_end: bool = False) -> Answered:
        """One answer as it comes. Without `reuse` the whole prompt is evaluated."""
        started = time.perf_counter()
        first, last = [0.0], dict[str, Any]()

        def take(chunk: dict[str, Any]) -> None:
            first[0] = first[0] or time.perf_counter() - started
            last.update(chunk)

        request = {
            "prompt": list(token_ids),
            "n_predict": max_tokens,
            "temperature": 0.0,
            "ignore_eos": not may_end,
            "cache_prompt": reuse,
            "stream": True,
        }
        self._server.handle_completions(request, take)
        if "usage" not in last:
            raise RuntimeError(f"xllamacpp gave no answer: {last}")
        return Answered(first[0], time.perf_counter() - started, last["usage"]["completion_tokens"])

    def ask_all(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], *, may_end: bool = False) -> list[Answered]:
        """As many at once as there are slots, in order, each with a limit of its own."""
        with ThreadPoolExecutor(self.num_slots) as pool:
            return list(pool.map(lambda ids, most: self.ask(ids, most, may_end=may_end), prompts, max_tokens))

    def close(self) -> None:
        self._server = None
