"""Cold start, prompt evaluation and decoding beside llama-cpp-python's own create_chat_completion: same file, same token ids, greedy."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

from benchmarks import shared
from localrag.decoding import SamplingParams
from localrag.engine.memory import num_threads
from localrag.session import Session

N_CTX = 4096
MAX_TOKENS = 64
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


def ours(session: Session, question: str) -> dict[str, float]:
    answer = session.ask(question, sampling=SamplingParams(max_tokens=MAX_TOKENS))
    timings = answer.timings
    return {
        "prompt evaluation, tokens/s": answer.prompt_tokens / timings.prefill_s,
        "decoding, tokens/s": (answer.completion_tokens - 1) / timings.decode_s,
    }


def peer(llama: Any, question: str, num_prompt_tokens: int) -> dict[str, float]:  # noqa: ANN401  # llama_cpp.Llama, without types
    llama.reset()  # it would otherwise take the prompt from its cache
    started = time.perf_counter()
    messages = [{"role": "user", "content": question}]
    first, num_tokens = None, 0
    for chunk in llama.create_chat_completion(messages, max_tokens=MAX_TOKENS, temperature=0.0, top_k=1, repeat_penalty=1.0, stream=True):
        if chunk["choices"][0]["delta"].get("content") or chunk["choices"][0]["finish_reason"]:
            first = first or time.perf_counter()
            num_tokens = llama.n_tokens - num_prompt_tokens + 1
    end = time.perf_counter()
    assert first is not None
    return {
        "prompt evaluation, tokens/s": num_prompt_tokens / (first - started),
        "decoding, tokens/s": (num_tokens - 1) / (end - first),
    }


def warm(num_runs: int) -> list[dict[str, object]]:
    from llama_cpp import Llama  # noqa: PLC0415  # the peer, after our own import of its C functions

    path, question = shared.default_model(), shared.long_question(4500)
    with Session.open(str(path), n_ctx=N_CTX) as session:
        prompt_ids = session.prepare(question, max_tokens=MAX_TOKENS).prompt.token_ids
        defaults = Llama(str(path), n_ctx=N_CTX, verbose=False)
        tuned = Llama(str(path), n_ctx=N_CTX, verbose=False, flash_attn=True, n_threads=num_threads(), n_threads_batch=num_threads())
        text = tuned.create_chat_completion(
            [{"role": "user", "content": question}], max_tokens=MAX_TOKENS, temperature=0.0, top_k=1, repeat_penalty=1.0
        )
        assert text["usage"]["prompt_tokens"] == len(prompt_ids), "the prompts differ"
        answer = session.ask(question, sampling=SamplingParams(max_tokens=MAX_TOKENS))
        same = text["choices"][0]["message"]["content"] == answer.text
        runs = shared.in_turn(
            {
                "localrag": lambda: ours(session, question),
                "create_chat_completion, its defaults": lambda: peer(defaults, question, len(prompt_ids)),
                "the same, flash attention and our threads": lambda: peer(tuned, question, len(prompt_ids)),
            },
            num_runs,
        )
    rows = shared.compare(runs, "localrag")
    shared.report("engine", rows, prompt_tokens=len(prompt_ids), max_tokens=MAX_TOKENS, runs=num_runs, same_text_as_tuned_peer=same)
    return rows


def first_byte(command: list[str]) -> dict[str, float]:
    started = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), command
        elapsed = time.perf_counter() - started
        process.stdout.read()
    return {"process start to first token, seconds_s": elapsed}


def cold(num_runs: int) -> None:
    path, question = str(shared.default_model()), shared.long_question(600)
    tuned = f", flash_attn=True, n_threads={num_threads()}"
    commands = {
        "localrag": [sys.executable, "-m", "localrag", "ask", question, "--model", path, "--ctx", "4096", "--max-tokens", "1"],
        "create_chat_completion, its defaults": [sys.executable, "-c", PEER.format(options=""), path, question],
        "the same, flash attention and our threads": [sys.executable, "-c", PEER.format(options=tuned), path, question],
    }
    runs = shared.in_turn({name: lambda command=command: first_byte(command) for name, command in commands.items()}, num_runs)
    shared.report("cold-start", shared.compare(runs, "localrag"), question_chars=len(question), runs=num_runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (default 5)")
    num_runs = parser.parse_args().runs
    cold(num_runs)
    warm(num_runs)


if __name__ == "__main__":
    main()
