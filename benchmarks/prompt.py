"""What the budget costs: negotiating and composing for 200 chunks and 100 messages, beside the time to the first evaluated token."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from benchmarks import shared
from localrag import prompt
from localrag.budget import Profile
from localrag.decoding import SamplingParams
from localrag.engine.engine import Engine
from localrag.engine.loading import open_model
from localrag.messages import Message
from localrag.passages import Chunk, Hit
from localrag.prompt import Offer
from localrag.session.shortening import Shortener
from localrag.tokens import TokenCounter

NUM_CHUNKS, NUM_MESSAGES = 200, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=25, help="questions asked of the same material (default 25)")
    given = parser.parse_args()
    home = Path.home() / ".cache" / "localrag-bench"
    with open_model(shared.default_model(), name="default", home=home) as engine:
        hits, history = material()
        cold_s, _ = compose(engine, hits, history, "The first question, with nothing counted yet?")
        hits_before, misses_before = engine.counter.hits, engine.counter.misses
        runs = [compose(engine, shuffled(hits, n), history, f"What of the {n}th question?") for n in range(given.runs)]
        hit_rate = (engine.counter.hits - hits_before) / max(1, engine.counter.hits - hits_before + engine.counter.misses - misses_before)
        ids = list(runs[-1][1].token_ids)
        engine.reserve(len(ids) + 1)
        completion = engine.generate(ids, SamplingParams(max_tokens=1))
        rows = [row("first time, nothing counted", [cold_s]), row("later questions, counts kept", [seconds for seconds, _ in runs])]
        rows.append(row("the same without kept counts", [compose_uncounted(engine, hits, history, n) for n in range(5)]))
        rows.append(row("evaluating that prompt, to the first token", [completion.timings.first_token_s]))
        facts = {"prompt_tokens": len(ids), "chunks": NUM_CHUNKS, "messages": NUM_MESSAGES, "hit_rate_of_counts": round(hit_rate, 4)}
        shared.report_table("prompt", rows, **facts)


def row(what: str, seconds: list[float]) -> dict[str, object]:
    return {"what": what, "median_ms": 1000 * statistics.median(seconds), "min_ms": 1000 * min(seconds), "max_ms": 1000 * max(seconds)}


def material() -> tuple[list[Hit], list[Message]]:
    """Chunks and messages of the handbook's words, as long as chunks and messages are."""
    pages = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((shared.ROOT / "examples" / "handbook").rglob("*.md")))
    words, rng = pages.split(" "), random.Random(0)

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


def compose(engine: Engine, hits: list[Hit], history: list[Message], question: str) -> tuple[float, prompt.Prompt]:
    """Seconds of measuring, negotiating and composing, and the prompt."""
    shortening = Shortener(engine, None, window=8192, write=False).for_prompt()
    started = time.perf_counter()
    offer = Offer(messages=[*history, Message("user", question)], hits=hits, profile=Profile())
    wants = prompt.measure(offer, counter=engine.counter, template=engine.template)
    composed = prompt.compose(wants, wants.share(8192), shortening)
    return time.perf_counter() - started, composed


def compose_uncounted(engine: Engine, hits: list[Hit], history: list[Message], seed: int) -> float:
    engine.counter = TokenCounter(engine.tokenizer)
    return compose(engine, shuffled(hits, 1000 + seed), history, f"What of question {seed}?")[0]


if __name__ == "__main__":
    main()
