"""Compare cold start, prefill and decoding with create_chat_completion and xllamacpp: same file, same token ids, greedy."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from benchmarks import peers, shared
from localrag.engine.threads import num_cores as num_threads
from localrag.question import Question
from localrag.session import Session
from localrag.types import SamplingParams

N_CTX = 4096
USUAL = (1600, 365)  # characters and tokens of the mean ask about the handbook: 493 prompt tokens, 365 written
PEER = """
import sys
from llama_cpp import Llama
llama = Llama(sys.argv[1], n_ctx=4096, verbose=False{options})
stream = llama.create_chat_completion([{{"role": "user", "content": sys.argv[2]}}], max_tokens=1, temperature=0.0, stream=True)
for chunk in stream:
    text = chunk["choices"][0]["delta"].get("content")
    if text:
        print(text, flush=True)
        break
"""


def ours(session: Session, question: str, max_tokens: int) -> dict[str, float]:
    started = time.perf_counter()
    answer = session.ask(Question.of(question, sampling=SamplingParams(max_tokens=max_tokens)))
    elapsed = time.perf_counter() - started
    timings = answer.timings
    return {
        "prompt evaluation, tokens/s": answer.prompt_tokens / timings.prefill_s,
        "decoding, tokens/s": (answer.completion_tokens - 1) / timings.decode_s,
        "whole answer_s": elapsed,
    }


def peer(llama: Any, question: str, max_tokens: int, num_prompt_tokens: int) -> dict[str, float]:  # noqa: ANN401  # llama_cpp.Llama, without types
    llama.reset()  # it would otherwise take the prompt from its cache
    started = time.perf_counter()
    messages = [{"role": "user", "content": question}]
    first, num_tokens = None, 0
    for chunk in llama.create_chat_completion(messages, max_tokens=max_tokens, temperature=0.0, top_k=1, repeat_penalty=1.0, stream=True):
        if chunk["choices"][0]["delta"].get("content") or chunk["choices"][0]["finish_reason"]:
            first = first or time.perf_counter()
            num_tokens = llama.n_tokens - num_prompt_tokens + 1
    end = time.perf_counter()
    assert first is not None
    return {
        "prompt evaluation, tokens/s": num_prompt_tokens / (first - started),
        "decoding, tokens/s": (num_tokens - 1) / (end - first),
        "whole answer_s": end - started,
    }


def slots(server: peers.Slots, token_ids: Sequence[int], max_tokens: int) -> dict[str, float]:
    answer = server.ask(token_ids, max_tokens, reuse=False, may_end=True)
    return {
        "prompt evaluation, tokens/s": len(token_ids) / answer.first_s,
        "decoding, tokens/s": (answer.num_tokens - 1) / (answer.total_s - answer.first_s),
        "whole answer_s": answer.total_s,
    }


def warm(num_runs: int, num_chars: int, max_tokens: int) -> list[dict[str, object]]:
    from llama_cpp import Llama  # noqa: PLC0415  # the peer, after our own import of its C functions

    path, question, flash = shared.default_model(), shared.long_question(num_chars), shared.chosen_attention()
    defaults = Llama(str(path), n_ctx=N_CTX, verbose=False)
    tuned = Llama(str(path), n_ctx=N_CTX, verbose=False, flash_attn=flash, n_threads=num_threads(), n_threads_batch=num_threads())
    with Session.open(str(path), n_ctx=N_CTX, keep=False) as session, ExitStack() as stack:
        prompt_ids = session.prepare(Question.of(question, max_tokens=max_tokens)).prompt.token_ids
        text = tuned.create_chat_completion(
            [{"role": "user", "content": question}], max_tokens=max_tokens, temperature=0.0, top_k=1, repeat_penalty=1.0
        )
        assert text["usage"]["prompt_tokens"] == len(prompt_ids), "the prompts differ"
        session.engine.draft_tokens = 0  # guessed tokens are evaluated in batches, which round differently
        answer = session.ask(Question.of(question, sampling=SamplingParams(max_tokens=max_tokens)))
        session.engine.draft_tokens = None
        same = text["choices"][0]["message"]["content"] == answer.text
        measures: dict[str, Callable[[], dict[str, float]]] = {
            "localrag": lambda: ours(session, question, max_tokens),
            peers.CHAT: lambda: peer(defaults, question, max_tokens, len(prompt_ids)),
            "the same with our attention and threads": lambda: peer(tuned, question, max_tokens, len(prompt_ids)),
        }
        if peers.HAS_SLOTS:
            server = peers.Slots(path, n_ctx=N_CTX, num_slots=1, num_threads=num_threads(), flash_attention=flash)
            stack.enter_context(closing(server))
            measures[peers.SLOTS] = lambda: slots(server, prompt_ids, max_tokens)
        runs = shared.in_turn(measures, num_runs)
    rows = shared.compare(runs, "localrag", missing=[] if peers.HAS_SLOTS else [peers.SLOTS])
    shared.report(
        "engine",
        rows,
        prompt_tokens=len(prompt_ids),
        max_tokens=max_tokens,
        runs=num_runs,
        same_text_as_tuned_peer=same,
        flash_attention=flash,
        note=peers.SLOTS_NOTE,
    )
    return rows


def first_byte(command: list[str]) -> dict[str, float]:
    started = time.perf_counter()
    env = shared.compiled_environment()
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), command
        elapsed = time.perf_counter() - started
        process.stdout.read()
    return {"process start to first token_s": elapsed}


def cold(num_runs: int) -> None:
    path, question = str(shared.default_model()), shared.long_question(600)
    tuned = f", flash_attn={shared.chosen_attention()}, n_threads={num_threads()}"
    commands = {
        "localrag": [sys.executable, "-m", "localrag", "ask", question, "--model", path, "--ctx", "4096", "--max-tokens", "1"],
        peers.CHAT: [sys.executable, "-c", PEER.format(options=""), path, question],
        "the same with our attention and threads": [sys.executable, "-c", PEER.format(options=tuned), path, question],
    }
    runs = shared.in_turn({name: lambda command=command: first_byte(command) for name, command in commands.items()}, num_runs)
    shared.report("cold-start", shared.compare(runs, "localrag"), question_chars=len(question), runs=num_runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (default 5)")
    parser.add_argument("--chars", type=int, default=4500, help="characters of the prompt that is evaluated (default 4500)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of the answer (default 64)")
    parser.add_argument("--no-cold", action="store_true", help="leave out the cold starts")
    given = parser.parse_args()
    if not given.no_cold:
        cold(given.runs)
    for num_chars, max_tokens in ((given.chars, given.max_tokens), USUAL):
        warm(given.runs, num_chars, max_tokens)


if __name__ == "__main__":
    main()
