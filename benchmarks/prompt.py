"""Time the token budget (negotiating and composing 200 chunks and 100 messages) and compare it with the time to the first token."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import pairwise

from benchmarks import shared
from localrag import prompt
from localrag.budget import Profile
from localrag.engine.engine import Engine
from localrag.engine.loading import open_model
from localrag.prompt import PromptInputs
from localrag.session.shortening import Shortener
from localrag.text.tokens import TokenCounter
from localrag.types import Chunk, Hit, Message, SamplingParams

NUM_CHUNKS, NUM_MESSAGES = 200, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=25, help="questions asked of the same material (default 25)")
    given = parser.parse_args()
    with shared.fresh_home() as settings, open_model(shared.default_model(), name="default", home=settings.home) as engine:
        hits, history = material()
        shortener = Shortener(engine, None, window=8192, write=False)  # as a session has it: what it has summarised, it knows
        cold, _ = compose(engine, shortener, hits, history, "The first question, with nothing counted yet?")
        hits_before, misses_before = engine.counter.hits, engine.counter.misses
        runs = [compose(engine, shortener, shuffled(hits, n), history, f"What of the {n}th question?") for n in range(given.runs)]
        found, missed = engine.counter.hits - hits_before, engine.counter.misses - misses_before
        uncounted = [compose_uncounted(engine, shortener, hits, history, n) for n in range(5)]
        ids = list(runs[-1][1].token_ids)
        engine.reserve(len(ids) + 1)
        completion = engine.generate(ids, SamplingParams(max_tokens=1))
        later = [seconds for seconds, _ in runs]
        rows = [
            row("later questions: measure", [each["measure"] for each in later]),
            row("later questions: negotiate and compose", [each["negotiate"] + each["compose"] for each in later]),
            row("later questions: all", [sum(each.values()) for each in later]),
            row("the same, with counts not kept: all", [sum(each.values()) for each in uncounted]),
            row("the very first one: all", [sum(cold.values())]),
            row("evaluating that prompt, to its first token", [completion.timings.first_token_s]),
        ]
        hit_rate = found / max(1, found + missed)
        facts = {"prompt_tokens": len(ids), "chunks": NUM_CHUNKS, "messages": NUM_MESSAGES, "hit_rate_of_counts": round(hit_rate, 4)}
        shared.report_table("prompt", rows, **facts)


def row(what: str, seconds: list[float]) -> dict[str, object]:
    return {"what": what, "median_ms": 1000 * statistics.median(seconds), "min_ms": 1000 * min(seconds), "max_ms": 1000 * max(seconds)}


def material() -> tuple[list[Hit], list[Message]]:
    """Chunks and messages of the handbook's words, as long as chunks and messages are."""
    words, rng = shared.handbook().split(" "), random.Random(0)

    def text(num_words: int) -> str:
        at = rng.randrange(len(words) - num_words)
        return " ".join(words[at : at + num_words])

    hits = [
        Hit(
            Chunk(id=n, document_id=n % 20, ordinal=n, text=text(130), start=0, end=1, source=f"page-{n % 20}.md", heading="Heat"),
            1 / (60 + n),
            relevance=0.3 + 0.6 * rng.random(),
        )
        for n in range(NUM_CHUNKS)
    ]
    return hits, [Message("assistant" if n % 2 else "user", text(40)) for n in range(NUM_MESSAGES)]


def shuffled(hits: list[Hit], seed: int) -> list[Hit]:
    """The same chunks in another order, as another question would rank them."""
    order = random.Random(seed).sample(hits, len(hits))
    return [Hit(hit.chunk, 1 / (60 + rank), relevance=hit.relevance) for rank, hit in enumerate(order)]


def compose(
    engine: Engine, shortener: Shortener, hits: list[Hit], history: list[Message], question: str
) -> tuple[dict[str, float], prompt.Prompt]:
    """Seconds of each step, and the prompt."""
    offer = PromptInputs(messages=[*history, Message("user", question)], hits=hits, profile=Profile())
    times = [time.perf_counter()]
    wants = prompt.measure(offer, counter=engine.counter, template=engine.template)
    times.append(time.perf_counter())
    budget = wants.share(8192)
    times.append(time.perf_counter())
    composed = prompt.compose(wants, budget, shortener.for_prompt())
    times.append(time.perf_counter())
    seconds = [after - before for before, after in pairwise(times)]
    return dict(zip(("measure", "negotiate", "compose"), seconds, strict=True)), composed


def compose_uncounted(engine: Engine, shortener: Shortener, hits: list[Hit], history: list[Message], seed: int) -> dict[str, float]:
    engine.counter = TokenCounter(engine.tokenizer)
    return compose(engine, shortener, shuffled(hits, 1000 + seed), history, f"What of question {seed}?")[0]


if __name__ == "__main__":
    main()
