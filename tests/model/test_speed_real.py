"""Seconds on the real model. Other programs disturb timings, so each promise is to be kept by one of a few tries."""

import time

import pytest

from localrag.engine.loading import open_model
from localrag.engine.speed import Speed
from localrag.types import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.alone]

TRIES = 5
TEXT = "PLA softens at 60 °C, PETG at 80 °C and ABS at 100 °C. A part that is to stay outside in the sun is best printed in ASA. " * 60
ANSWER_TOKENS = 32


@pytest.fixture(scope="module")
def engine(model_path):
    with open_model(model_path, name="smollm2-135m") as opened:
        opened.reserve(2048)
        opened.measure_speed()
        yield opened


def kept_once(tries):
    """The tries until one is within 15 %, or all of them."""
    seen = []
    for off in tries:
        seen.append(off)
        if abs(off) <= 0.15:
            return
    pytest.fail(f"off by {[f'{off:+.0%}' for off in seen]}")


def test_what_a_prompt_and_an_answer_take_is_predicted(engine):
    def off(num_tokens):
        before = Speed()
        before.restore(engine.speed.to_dict())
        completion = engine.generate(engine.tokenizer.encode(TEXT)[:num_tokens], SamplingParams(max_tokens=ANSWER_TOKENS))
        expected = before.prefill_s(num_tokens) + before.decode_s(completion.completion_tokens - 1, num_tokens)
        return expected / completion.timings.total_s - 1

    kept_once(off(num_tokens) for num_tokens in (200, 240, 280, 320, 360)[:TRIES])


def test_an_ask_lands_on_its_seconds(engine):
    def off(seconds):
        started = time.perf_counter()
        num_prompt = max((n for n in range(32, 1500, 8) if engine.speed.plan_s(n, ANSWER_TOKENS) <= seconds), default=32)
        prompt_ids = engine.tokenizer.encode(TEXT)[:num_prompt]
        completion = engine.generate(prompt_ids, SamplingParams(max_tokens=2048 - num_prompt), deadline=started + seconds)
        assert completion.finish_reason == "time"
        return (time.perf_counter() - started) / seconds - 1

    kept_once(off(3.0) for _ in range(TRIES))


def test_the_slopes_that_are_expected_are_near_those_that_are_learned(model_path):
    with open_model(model_path, name="smollm2-135m") as engine:
        assert engine.speed._prefill.prior_slope == pytest.approx(5e-4, rel=0.1)
        assert engine.speed._decode.prior_slope == pytest.approx(3.5e-4, rel=0.1)
