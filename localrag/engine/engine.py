"""The engine: a model, and the driver that runs prompts for every caller."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

from localrag.engine.core import EngineCore
from localrag.engine.driver import Driver, run_out
from localrag.engine.policy import SINGLE, Job, JobEvent, Policy
from localrag.text.thinking import Thinking
from localrag.types import Completion, SamplingParams

_MEASURED_PROMPTS, _MEASURED_ANSWER = (32, 96, 96, 96), 9
_MEASURED_TEXT = "The quick brown fox jumps over the lazy dog, and the dog goes on sleeping in the warm sun. " * 8


class Engine(EngineCore):
    """A model that runs prompts. `run` drives them under a policy, `generate` runs a single one to its end."""

    def run(self, jobs: Iterable[Job | None], policy: Policy = SINGLE, *, window: int | None = None) -> Generator[JobEvent]:
        """Run prompts under a policy: admit them, step, and tell what happens to each, until all have ended.

        The last event of a job has a completion or an error. In a stream, `jobs` gives None for "none now" and blocks while the engine is
        idle. A context for one prompt is rounded up to at most `window`
        cells. Closing the iterator cancels what runs. Ctrl-C ends interactive jobs as "cancelled"; otherwise their events follow and
        KeyboardInterrupt is raised.
        """
        return Driver(self, policy, window=window).events(jobs)

    def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        on_text: Callable[[str], None] | None = None,
        *,
        deadline: float | None = None,
        breakpoints: tuple[int, ...] = (),
        thinking: Thinking | None = None,
        on_thought: Callable[[str], None] | None = None,
    ) -> Completion:
        """Run one prompt to its end in the context that is reserved. Ctrl-C ends it with what was written, as "cancelled".

        `on_text` is called with each piece of the answer and `on_thought` with what was thought before it; `deadline`, `breakpoints` and
        `thinking` are as in `add`.
        """
        job = Job(prompt_ids=prompt_ids, sampling=sampling, deadline=deadline, breakpoints=breakpoints, thinking=thinking)
        events = Driver(self, SINGLE, reserves=False).events([job])
        return run_out(events, self.cancel_all, on_text=on_text, on_thought=on_thought)

    def measure_speed(self) -> None:
        """Have a speed to plan with: a short prompt and answer are timed, in about a second, if it is not known yet.

        Nothing is done while answers run: they tell it. EngineError for a file without weights.
        """
        ids = self.tokenizer.encode(_MEASURED_TEXT)
        for num_tokens in _MEASURED_PROMPTS:  # the first one warms it up
            if self.speed.is_known or not self.is_idle:
                return
            self.reserve(max(_MEASURED_PROMPTS) + _MEASURED_ANSWER)
            if self.generate(ids[:num_tokens], SamplingParams(max_tokens=_MEASURED_ANSWER)).finish_reason == "cancelled":
                raise KeyboardInterrupt
