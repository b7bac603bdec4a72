"""Measure the time per decoding step outside llama_decode, with one and eight sequences: greedy, with a chat's default sampling, and greedy
under the grammar of citations.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import shared
from localrag.engine import gguf
from localrag.engine.context import BATCH_TOKENS
from localrag.engine.engine import Engine
from localrag.engine.llama import LlamaContext, LlamaModel, LlamaTokenizer
from localrag.engine.loading import LlamaBackend
from localrag.engine.threads import ThreadGovernor, num_cores
from localrag.types import SamplingParams

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "greedy, citations": SamplingParams(citations=("KB#1", "KB#2", "KB#3", "KB#4"), cites_first=True),
}
LIMIT = 0.05
PARTS = {
    "schedule": (("scheduler.py", "schedule"),),
    "batch fill": (("context.py", "decode"),),
    "sampling": (("llama.py", "sample"),),
    "text": (("sequence.py", "append"), ("vocab.py", "piece"), ("vocab.py", "is_end")),
}
"""Functions of the engine whose time, with all that they call, is that of a part. llama_decode is taken off the batch fill."""


class TimedLibrary:
    """llama.cpp's functions; how long `llama_decode` took is added up in `decode_s`."""

    def __init__(self, lib: Any) -> None:  # noqa: ANN401  # a module of C functions
        self._lib = lib
        self.decode_s = 0.0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the module has
        found = getattr(self._lib, name)
        setattr(self, name, found)  # looked up once, as in the module itself
        return found

    def llama_decode(self, context: object, batch: object) -> int:
        started = time.perf_counter()
        code: int = self._lib.llama_decode(context, batch)
        self.decode_s += time.perf_counter() - started
        return code


class TimedContext(LlamaContext):
    """A context that knows how long llama_decode took."""

    def __init__(self, model: LlamaModel, **options: Any) -> None:  # noqa: ANN401  # those of LlamaContext
        super().__init__(model, **options)
        self.lib = self.timed = TimedLibrary(self.lib)


class TimedBackend(LlamaBackend):
    """A model whose contexts tell how long they decode."""

    made: TimedContext | None = None

    def make_runner(self, num_cells: int, num_sequences: int, /, *, repeatable: bool = False) -> TimedContext:
        self.made = TimedContext(
            self.model,
            num_cells=num_cells,
            num_sequences=num_sequences,
            batch_tokens=BATCH_TOKENS,
            num_threads=num_cores(),
            flash_attention=not repeatable and shared.chosen_attention(),
        )
        return self.made


class Bench:
    """An engine over a TimedContext, which is made anew for each number of sequences."""

    def __init__(self, path: Path) -> None:
        model = LlamaModel(path)
        self.backend = TimedBackend(
            name="default",
            info=gguf.read_header(path),
            sha256=None,
            load_s=0.0,
            tokenizer=LlamaTokenizer(model),
            model=model,
            template=None,
            home=None,
            n_ctx=None,
            governor=ThreadGovernor(),
            gpu_layers=0,
        )
        self.ids = self.backend.tokenizer.encode(shared.handbook())
        self.engine = Engine(self.backend)

    @property
    def context(self) -> TimedContext | None:
        return self.backend.made

    def begin(self, num_sequences: int, sampling: SamplingParams, num_prompt: int, num_steps: int) -> None:
        """Every sequence behind its prompt, which begins otherwise in each, so that nothing is shared."""
        self.engine.reserve(2 * num_sequences * (num_prompt + num_steps + 16), num_sequences=num_sequences)
        self.end()
        for index in range(num_sequences):
            prompt = self.ids[index * num_prompt : (index + 1) * num_prompt]
            self.engine.add(prompt, sampling.with_max_tokens(num_steps + 16))
        num_begun = 0
        while num_begun < num_sequences:
            num_begun += sum(piece.token_id is not None for piece in self.engine.step())
            if self.engine.is_idle:
                raise SystemExit("An answer ended within its first tokens.")

    def end(self) -> None:
        self.engine.cancel_all()
        while not self.engine.is_idle:
            self.engine.step()

    def step(self) -> tuple[int, float, float]:
        """(tokens sampled, seconds, seconds of them in llama_decode)."""
        assert self.context is not None
        before, started = self.context.timed.decode_s, time.perf_counter()
        num_tokens = len(self.engine.step())
        return num_tokens, time.perf_counter() - started, self.context.timed.decode_s - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed (default 100)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens before each answer (default 256)")
    parser.add_argument("--profile", action="store_true", help="print the profile also where the share is small")
    given = parser.parse_args()
    bench, rows = Bench(shared.default_model()), list[dict[str, object]]()
    with bench.engine:
        for num_sequences in (1, 8):
            for name, sampling in SAMPLINGS.items():
                timed = measure(bench, num_sequences, sampling, given.prompt_tokens, given.steps)
                outside = statistics.median((total - decode) / total for total, decode in timed)
                rows.append(
                    {
                        "sequences": num_sequences,
                        "sampling": name,
                        "steps": len(timed),
                        "step_ms": 1000 * statistics.median(total for total, _ in timed),
                        "outside llama_decode_ms": 1000 * statistics.median(total - decode for total, decode in timed),
                        "median share_%": 100 * outside,
                        "share of all_%": 100 * (1 - sum(decode for _, decode in timed) / sum(total for total, _ in timed)),
                    }
                )
                if given.profile or outside > LIMIT:
                    rows[-1] |= profile(bench, num_sequences, sampling, given.prompt_tokens, given.steps)
    shared.report_table("overhead", rows, prompt_tokens=given.prompt_tokens, profile="shares of the time outside, in a run under cProfile")


def measure(bench: Bench, num_sequences: int, sampling: SamplingParams, num_prompt: int, num_steps: int) -> list[tuple[float, float]]:
    """(seconds, those in llama_decode) of the steps in which all sequences had a token; the first ones warm it up."""
    bench.begin(num_sequences, sampling, num_prompt, num_steps)
    timed = []
    for number in range(num_steps):
        if bench.engine.is_idle:
            break
        num_tokens, total, decode = bench.step()
        if num_tokens == num_sequences and number >= num_steps // 10:
            timed.append((total, decode))
    bench.end()
    if not timed:
        raise SystemExit("All answers ended too early; ask for fewer steps with --steps.")
    return timed


def profile(bench: Bench, num_sequences: int, sampling: SamplingParams, num_prompt: int, num_steps: int) -> dict[str, float]:
    """What share of the time outside llama_decode each part takes, in %."""
    bench.begin(num_sequences, sampling, num_prompt, num_steps)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        if not bench.engine.is_idle:
            bench.step()
    profiler.disable()
    bench.end()
    entries = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # (file, line, function) to counts and seconds

    def of(file: str, function: str) -> float:
        # one of that name calls the other where there are two: the context's sample that of its sampler
        return max((entry[3] for (path, _, name), entry in entries.items() if name == function and Path(path).name == file), default=0.0)

    decode, step = of("overhead.py", "llama_decode"), of("engine.py", "step")
    parts = {part: sum(of(*each) for each in functions) for part, functions in PARTS.items()}
    parts["batch fill"] -= decode
    parts["the rest"] = step - decode - sum(parts.values())
    return {f"{part}_%": 100 * spent / max(1e-9, step - decode) for part, spent in parts.items()}


if __name__ == "__main__":
    main()
