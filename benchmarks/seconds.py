"""Measure how well the learned speed predicts the default model's times, and how close an ask limited to S seconds comes to S."""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks import shared
from localrag.engine.engine import Engine
from localrag.engine.loading import open_model
from localrag.engine.speed import Speed
from localrag.types import SamplingParams

PROMPT_TOKENS = (100, 300, 1000, 2000, 3000)
ANSWER_TOKENS = (16, 64, 256)
SECONDS = (4.0, 8.0, 15.0)
N_CTX = 4096
PLANNED_ANSWER = 64
"""Tokens that a timed ask keeps for its answer; it gets more where the deadline leaves room."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each number of seconds (default 3)")
    parser.add_argument("--seconds", type=float, nargs="*", default=SECONDS, help="seconds to land on (default 4 8 15)")
    parser.add_argument("--most-tokens", type=int, default=max(PROMPT_TOKENS), help="the longest prompt that is predicted (default 3000)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, open_model(shared.default_model(), name="default", home=Path(home)) as engine:
        token_ids = engine.tokenizer.encode(shared.long_question(40_000))
        engine.reserve(16)  # the attention kernel is chosen
        started = time.perf_counter()
        engine.measure_speed()
        measure_s = time.perf_counter() - started
        predicted = [predict(engine, token_ids, *size) for size in sizes(given.most_tokens)]
        landed = [land(engine, token_ids, seconds) for _ in range(given.runs) for seconds in given.seconds]
        report(predicted, landed, measure_s=round(measure_s, 3), **speeds(engine.speed))


def sizes(most_tokens: int) -> list[tuple[int, int]]:
    """Every length of prompt with every length of answer, in an order that does not favour what was learned just before."""
    drawn = [(prompt, answer) for prompt in PROMPT_TOKENS if prompt <= most_tokens for answer in ANSWER_TOKENS]
    random.Random(1).shuffle(drawn)
    return drawn


def predict(engine: Engine, token_ids: Sequence[int], num_prompt: int, num_answer: int) -> dict[str, object]:
    """One run beside what was expected of it before."""
    before = Speed()
    before.restore(engine.speed.to_dict())
    engine.reserve(N_CTX)
    completion = engine.generate(list(token_ids[:num_prompt]), SamplingParams(max_tokens=num_answer))
    num_decoded = completion.completion_tokens - 1  # the first comes with the prompt
    prefill_s, decode_s = before.prefill_s(num_prompt), before.decode_s(num_decoded, num_prompt)
    real = completion.timings
    return {
        "prompt_tokens": num_prompt,
        "answer_tokens": completion.completion_tokens,
        "prefill_s": real.prefill_s,
        "prefill_error": prefill_s / real.prefill_s - 1,
        "decode_s": real.decode_s,
        "decode_error": decode_s / real.decode_s - 1 if num_decoded else 0.0,
        "total_s": real.total_s,
        "total_error": (prefill_s + decode_s) / real.total_s - 1,
        "margin": before.margin,
    }


def land(engine: Engine, token_ids: Sequence[int], seconds: float) -> dict[str, object]:
    """An ask of so many seconds, planned as engine/speed.py says: the longest prompt that leaves an answer its time."""
    started = time.perf_counter()
    num_prompt = max(
        (n for n in range(32, N_CTX - PLANNED_ANSWER, 8) if engine.speed.plan_s(n, PLANNED_ANSWER) <= seconds),
        default=32,
    )
    engine.reserve(N_CTX)
    prompt_ids = list(token_ids[:num_prompt])
    completion = engine.generate(prompt_ids, SamplingParams(max_tokens=N_CTX - num_prompt), deadline=started + seconds)
    total_s = time.perf_counter() - started
    return {
        "seconds": seconds,
        "prompt_tokens": num_prompt,
        "answer_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
        "prefill_s": completion.timings.prefill_s,
        "total_s": total_s,
        "off": total_s / seconds - 1,
    }


def speeds(speed: Speed) -> dict[str, float]:
    return {
        "prefill_tokens_per_s": round(speed.prefill_tokens_per_s, 1),
        "prefill_tokens_per_s_at_3000": round(1000 / speed.prefill_s(1000, 2500), 1),
        "decode_tokens_per_s": round(speed.decode_tokens_per_s, 1),
        "decode_tokens_per_s_at_3000": round(100 / speed.decode_s(100, 2950), 1),
        "overhead_s": round(speed.overhead_s(N_CTX), 3),
    }


def report(predicted: list[dict[str, object]], landed: list[dict[str, object]], **facts: object) -> None:
    """Prints both tables and writes results/time-TIME.json."""
    errors = {name: summary([float(str(row[name])) for row in predicted]) for name in ("prefill_error", "decode_error", "total_error")}
    ended = [float(str(row["off"])) for row in landed if row["finish_reason"] == "time"]
    facts |= {"errors": errors, "landing": summary(ended), "landed_within_15_percent": sum(abs(off) <= 0.15 for off in ended)}
    facts |= {"ended_by_time": len(ended), "asks": len(landed)}
    tables = []
    for title, rows in (("predicted and real", sorted(predicted, key=lambda row: str(row["prompt_tokens"]).zfill(5))), ("landing", landed)):
        if rows:
            table = Table(*rows[0], title=f"time: {title}")
            for row in rows:
                table.add_row(*(shown(name, value) for name, value in row.items()))
            tables.append(table)
    shared.keep("time", tables, facts, predicted=predicted, landed=landed)


def shown(name: str, value: object) -> str:
    if name in {"off", "margin"} or name.endswith("_error"):
        return f"{value:+.1%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def summary(errors: list[float]) -> dict[str, float]:
    """Median and worst of the sizes of these errors."""
    sizes_of = sorted(map(abs, errors)) or [0.0]
    return {"median": round(statistics.median(sizes_of), 4), "worst": round(sizes_of[-1], 4)}


if __name__ == "__main__":
    main()
