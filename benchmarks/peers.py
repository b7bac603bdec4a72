"""Adapters for the programs that localrag is compared with: same model file, greedy, no penalties."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrag.types import Message

CHAT = "create_chat_completion, its defaults"
SLOTS = "xllamacpp"
HAS_SLOTS = importlib.util.find_spec("xllamacpp") is not None
SLOTS_NOTE = "xllamacpp is its wheel from PyPI, built for AVX2, with the threads and the attention of localrag"


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
    """llama.cpp's server through xllamacpp, in a process of its own: its threads wait by spinning, and so do ours.

    `n_ctx` is shared by all slots, each of which keeps its last prompt. Answers do not end before their limit unless `may_end`.
    """

    def __init__(self, path: Path, *, n_ctx: int, num_slots: int, num_threads: int, flash_attention: bool) -> None:
        options = [str(path), str(n_ctx), str(num_slots), str(num_threads), str(int(flash_attention))]
        command = [sys.executable, "-m", "benchmarks.slots", *options]
        root = Path(__file__).parents[1]
        self._child = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def ask(self, token_ids: Sequence[int], max_tokens: int, *, reuse: bool = True, may_end: bool = False) -> Answered:
        """One answer as it comes. Without `reuse` the whole prompt is evaluated."""
        (answered,) = self._ask([token_ids], [max_tokens], reuse=reuse, may_end=may_end)
        return answered

    def ask_all(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], *, may_end: bool = False) -> list[Answered]:
        """As many at once as there are slots, in order, each with a limit of its own."""
        return self._ask(prompts, max_tokens, reuse=True, may_end=may_end)

    def _ask(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], *, reuse: bool, may_end: bool) -> list[Answered]:
        requests = [
            {"prompt": list(ids), "n_predict": most, "temperature": 0.0, "ignore_eos": not may_end, "cache_prompt": reuse, "stream": True}
            for ids, most in zip(prompts, limits, strict=True)
        ]
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(requests) + "\n")
        self._child.stdin.flush()
        return [Answered(*each) for each in json.loads(self._read())]

    def _read(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("xllamacpp ended before it had answered.")
        return line

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()
