"""Compare localrag serve with other servers under the load of 1, 4 and 16 concurrent clients with different questions.

    python -m benchmarks.serve_load --rounds 3

Servers run one at a time, since llama.cpp's threads keep spinning for a while and localrag yields to busy processes. Each client sends one
question after another, streamed and greedy. All questions differ; they follow the same system message and a passage of the handbook.
Tokens per second are totals over all answers.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from benchmarks import servers, shared
from benchmarks.servers import Served
from localrag.engine.threads import num_cores

CLIENTS = (1, 4, 16)
SEEDED = "localrag serve, each request with a seed"
WINDOW = 4096
CELLS = WINDOW + 7 * 2048
"""What localrag serve gives its context: a window, and 2,048 tokens for each of the others at once."""
MAX_TOKENS = 48
PASSAGE_CHARS = 700
SYSTEM = "You answer questions about printing in one or two sentences."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=2, help="questions of each client")
    parser.add_argument("--seeded", action="store_true", help="localrag alone, with requests that name a seed and requests that name none")
    wanted = parser.parse_args()
    with shared.fresh_home() as settings:
        commands, missing = commands_of()
        if wanted.seeded:
            commands, missing = dict.fromkeys(("localrag serve", SEEDED), commands["localrag serve"]), []
        rows = measure(commands, {"LOCALRAG_HOME": str(settings.home)}, wanted.rounds, wanted.each)
    shared.report_table("serve_load", rows, rounds=wanted.rounds, questions_of_each=wanted.each, window=WINDOW, max_tokens=MAX_TOKENS,
                        missing=missing)  # fmt: skip


def commands_of() -> tuple[dict[str, list[str]], list[str]]:
    """What starts the servers that are installed, and the names of those that are not."""
    model, attention = shared.default_model(), shared.chosen_attention()
    found = {"localrag serve": servers.localrag("--ctx", str(WINDOW), model=model)}
    missing = []
    if importlib.util.find_spec("starlette_context") is None:
        missing.append("llama-cpp-python's server (pip install 'llama-cpp-python[server]')")
    else:
        found["llama-cpp-python's server"] = servers.llama_cpp_python(model, n_ctx=WINDOW)
    if importlib.util.find_spec("xllamacpp") is None:
        missing.append("xllamacpp")
    else:
        found["xllamacpp's server, 8 slots"] = servers.xllamacpp(
            model, n_ctx=CELLS, num_slots=8, num_threads=num_cores(), flash_attention=attention
        )
    return found, missing


def measure(commands: dict[str, list[str]], env: dict[str, str], rounds: int, each: int) -> list[dict[str, object]]:
    seen: dict[tuple[int, str], list[tuple[float, list[Served]]]] = {(clients, name): [] for clients in CLIENTS for name in commands}
    for turn in range(rounds):
        for name in shared.order_of_round(list(commands), turn):
            with servers.started(commands[name], env=env) as (url, _), httpx.Client() as client:
                more = {"seed": 1} if name == SEEDED else {}
                servers.ask(client, url, question(0), 8, **more)  # warms up
                for at, clients in enumerate(CLIENTS):
                    print(f"round {turn + 1}: {name}, {clients} clients", file=sys.stderr, flush=True)
                    seen[clients, name].append(load(url, clients, each, 1000 * (1 + at + turn * len(CLIENTS)), **more))
    return [row(clients, name, runs) for (clients, name), runs in seen.items()]


def load(url: str, clients: int, each: int, first: int, **more: object) -> tuple[float, list[Served]]:
    """Seconds until all clients had all answers, and what each of these took. All servers are asked the same."""

    def client(number: int) -> list[Served]:
        found = []
        for turn in range(each):
            with httpx.Client() as http:  # a connection each: some servers close one that was used before
                found.append(servers.ask(http, url, question(first + number * each + turn), MAX_TOKENS, **more))
        return found

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(itertools.chain.from_iterable(pool.map(client, range(clients))))
    return time.perf_counter() - started, answers


def question(number: int) -> list[dict[str, str]]:
    """Another passage of the handbook for each number, and a number that no other question has."""
    text = shared.handbook()
    at = number * 397 % (len(text) - PASSAGE_CHARS)
    asked = f"{text[at : at + PASSAGE_CHARS].strip()}\n\nQuestion {number}: what does this passage say about materials?"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]


def row(clients: int, name: str, runs: list[tuple[float, list[Served]]]) -> dict[str, object]:
    rates = [sum(each.num_tokens for each in answers) / seconds for seconds, answers in runs]
    firsts = sorted(each.first_s for _, answers in runs for each in answers)
    return {
        "clients": clients,
        "server": name,
        "tokens/s": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
        "first p50 s": statistics.median(firsts),
        "first p95 s": firsts[min(len(firsts) - 1, int(len(firsts) * 0.95))],
        "answers": len(firsts),
        "tokens": sum(each.num_tokens for _, answers in runs for each in answers),
    }


if __name__ == "__main__":
    main()
