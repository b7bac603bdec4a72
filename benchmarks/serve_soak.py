"""Soak-test the server: clients disconnect at random, and the engine is killed under load. Nothing may leak or hang.

    python -m benchmarks.serve_soak --requests 1000 --kills 200

Both parts use the real model (--model echo for a quick run). The output ends with one line per invariant; the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from benchmarks import servers, shared

WINDOW = 2048
CLIENTS = 6
MIB = 1 << 20
MAX_GROWTH, MAX_GROWTH_BYTES = 0.03, 8 << 20
"""By how much the least memory of the last third may be above that of the first: whichever is more."""
BACK_S = 2.0
"""How long after its model is loaded an engine may take to answer again."""
TEXTS = ("PLA is annealed at 80 to 100 °C for one hour.", "PETG keeps its shape up to 70 °C.", "ABS is dried at 80 °C for four hours.")
WORDS = ("annealing", "humidity", "nozzles", "brass", "layers", "warping", "storage", "drying", "strength", "bridges")


@dataclass
class Seen:
    """What the clients met, under one lock."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, fault: str | None = None) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            if fault is not None:
                self.faults.append(fault)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default=str(shared.default_model()))
    wanted = parser.parse_args()
    held = []
    with shared.fresh_home() as settings:
        command = servers.localrag("--ctx", str(WINDOW), model=wanted.model)
        with servers.started(command, env={"LOCALRAG_HOME": str(settings.home)}) as (url, pid):
            if wanted.requests:
                held += cancellations(url, pid, wanted.requests, wanted.seed)
            if wanted.kills:
                held += kills(url, pid, wanted.kills)
    for invariant, fault in held:
        print(f"{'held  ' if fault is None else 'BROKEN'} {invariant}{'' if fault is None else f': {fault}'}")
    sys.exit(any(fault is not None for _, fault in held))


# --- clients that go away ---


def cancellations(url: str, pid: int, num_requests: int, seed: int) -> list[tuple[str, str | None]]:
    seen, memory = Seen(), []
    documents = [{"text": text} for text in TEXTS]
    is_indexed = httpx.post(f"{url}/index", json={"index_name": "facts", "documents": documents}, timeout=300).status_code == 200
    numbers = iter(range(num_requests))
    lock = threading.Lock()

    def client() -> None:
        with httpx.Client(timeout=servers.REQUEST_S) as http:
            while True:
                with lock:
                    number = next(numbers, None)
                    if number is not None and number % 50 == 0:
                        memory.append(memory_of(pid))
                        print(f"{number} requests, {memory[-1] / MIB:.0f} MiB, {dict(seen.outcomes)}", file=sys.stderr, flush=True)
                if number is None:
                    return
                request(http, url, number, random.Random(f"{seed} {number}"), is_indexed, seen)

    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for task in [pool.submit(client) for _ in range(CLIENTS)]:
            task.result()
    seconds = time.perf_counter() - started
    idle = settled(url)
    print(f"{num_requests} requests in {seconds:.0f} s: {dict(seen.outcomes)}")
    third = max(1, len(memory) // 3)
    before, after = min(memory[1 : third + 1] or memory), min(memory[-third:])
    print(f"memory of server and engine: {before / MIB:.0f} MiB in the first third, {after / MIB:.0f} MiB in the last")
    grew = after - before > max(before * MAX_GROWTH, MAX_GROWTH_BYTES)
    return [
        ("every ledger is exact, and nothing but 200 and 429 was answered", "; ".join(seen.faults[:3]) or None),
        ("nothing runs or waits in the end", None if idle else "something does"),
        ("prompts of a whole window fit, asked four at once", whole_window(url)),
        ("memory is flat", f"{(after - before) / MIB:.1f} MiB more" if grew else None),
    ]


def request(http: httpx.Client, url: str, number: int, rng: random.Random, is_indexed: bool, seen: Seen) -> None:  # noqa: FBT001
    """One chat completion, of which a client may not wait for the end."""
    words = " ".join(rng.choices(WORDS, k=rng.randint(3, 200)))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"{number}: {words}?"}],
        "max_tokens": rng.randint(1, 32),
        "stream": rng.random() < 0.7,
        "stream_options": {"include_usage": True},
        **({"index_name": "facts"} if is_indexed and rng.random() < 0.3 else {}),
    }
    leaves_after = rng.choice((None, None, 0, 1, 3, 10)) if body["stream"] else None
    timeout = rng.choice((None, 0.05, 0.5)) if not body["stream"] else None
    try:
        if not body["stream"]:
            answer = http.post(f"{url}/v1/chat/completions", json=body, timeout=timeout or servers.REQUEST_S)
            seen.add(str(answer.status_code), check(answer.status_code, answer.json()))
            return
        with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            last: dict[str, Any] = {}
            for count, chunk in enumerate(servers.chunks(response) if response.status_code == 200 else ()):
                last = chunk
                if count == leaves_after:
                    seen.add("left")
                    return
            seen.add(str(response.status_code), check(response.status_code, last))
    except httpx.TimeoutException:
        seen.add("timed out")


def check(status: int, answer: dict[str, Any]) -> str | None:
    """What is wrong with an answer."""
    if status == 429:
        return None
    if status != 200 or "usage" not in answer:
        return f"{status}: {str(answer)[:200]}"
    ledger, usage = answer["localrag"]["ledger"], answer["usage"]
    used = {entry["name"]: entry["used"] for entry in ledger["entries"]}
    is_exact = sum(used.values()) == usage["total_tokens"] and used["answer"] == usage["completion_tokens"]
    fits = sum(entry["allotted"] for entry in ledger["entries"]) <= ledger["window"] == WINDOW
    return None if is_exact and fits else f"the ledger says {used}, the usage {usage}"


def settled(url: str) -> bool:
    """Whether nothing runs or waits any more, within some seconds."""
    for _ in range(50):
        gauges = metrics(url)
        if gauges["localrag_requests_running"] == gauges["localrag_requests_waiting"] == 0:
            return True
        time.sleep(0.2)
    return False


def metrics(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(localrag_[a-z_]+) ([0-9.e+]+)$", text, re.MULTILINE)}


def whole_window(url: str) -> str | None:
    """Cells that leaked would be missing here."""
    count = httpx.post(f"{url}/tokenize", json={"text": "word " * 400}).json()["num_tokens"] / 400
    words = int((WINDOW - 120) / count)

    def ask(number: int) -> int:
        body = {"messages": [{"role": "user", "content": f"{number} " + "word " * words}], "max_tokens": 4}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=servers.REQUEST_S).status_code

    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(ask, range(4)))
    return None if set(statuses) == {200} else str(statuses)


def memory_of(pid: int) -> int:
    """Of the server and its engine, in bytes that nobody else has."""
    server = psutil.Process(pid)
    found = 0
    for process in [server, *server.children()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.memory_full_info().uss
    return found


# --- an engine that dies ---


def kills(url: str, pid: int, num_kills: int) -> list[tuple[str, str | None]]:
    seen, ends = Seen(), threading.Event()
    back: list[float] = []

    def client(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(timeout=servers.REQUEST_S) as http:
            while not ends.is_set():
                stream_until_killed(http, url, rng, seen)

    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(client, number) for number in range(3)]
        for number in range(num_kills):
            time.sleep(random.Random(number).uniform(0.0, 1.0))
            back.append(killed(url, pid))
            if number % 20 == 19:
                print(f"{number + 1} kills, {dict(seen.outcomes)}", file=sys.stderr, flush=True)
        ends.set()
        for task in tasks:
            task.result()
    load_s = loading()
    late = max(back) - load_s
    print(f"{num_kills} kills, met by clients: {dict(seen.outcomes)}")
    print(
        f"asked and answered again {statistics.median(back):.2f} s after a kill (most {max(back):.2f}); to load alone takes {load_s:.2f} s"
    )
    return [
        (
            "a request that a kill met got a 503 or the end of its stream with an error, and all others an answer",
            "; ".join(seen.faults[:3]) or None,
        ),
        ("the server lived", None if psutil.pid_exists(pid) else "it did not"),
        (f"the engine answered again within {BACK_S:.0f} s of loading", f"{late:.2f} s at most" if late > BACK_S else None),
        ("nothing runs or waits in the end", None if settled(url) else "something does"),
    ]


def stream_until_killed(http: httpx.Client, url: str, rng: random.Random, seen: Seen) -> None:
    body = {"messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=40))}], "max_tokens": 64, "stream": True}
    with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            detail = response.read().decode()
            seen.add(str(response.status_code), None if response.status_code == 503 and "detail" in detail else detail[:200])
            return
        last: dict[str, Any] = {}
        for chunk in servers.chunks(response):
            last = chunk
    if "error" in last:
        seen.add("broken off", None if last["error"]["code"] == 503 else str(last))
    else:
        seen.add("answered", None if last["choices"][0]["finish_reason"] else f"a stream ended with {last}")


def killed(url: str, pid: int) -> float:
    """Kill the engine; the seconds until it has answered a question again."""
    (engine,) = (each for each in psutil.Process(pid).children() if "localrag.server.engine_worker" in each.cmdline())
    os.kill(engine.pid, signal.SIGKILL)
    started = time.perf_counter()
    while True:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        if httpx.post(f"{url}/v1/chat/completions", json=body, timeout=servers.REQUEST_S).status_code == 200:
            return time.perf_counter() - started
        time.sleep(0.02)


def loading() -> float:
    """Seconds to import what the engine needs, load the model and make its context, in a process that nothing else is asked of."""
    code = (
        "from localrag.session import Session; from localrag.engine.jobs import SERVE;"
        f"Session.open({str(shared.default_model())!r}, n_ctx={WINDOW}, keep=False).engine.reserve_window({WINDOW}, SERVE)"
    )
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
