"""Prefixes on the real model: shared where many sequences run, and never where one runs alone."""

from pathlib import Path

import pytest

from localrag.decoding import SamplingParams
from localrag.engine.loading import open_model

pytestmark = pytest.mark.model

PAGE = (Path(__file__).parents[2] / "examples" / "handbook" / "guides" / "annealing.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def engine(model_path, tmp_path_factory):
    with open_model(model_path, name="smollm2-135m", home=tmp_path_factory.mktemp("home")) as opened:
        yield opened


def test_what_begins_alike_is_evaluated_once(engine):
    ids = engine.tokenizer.encode(PAGE)[:200]
    members = [ids + engine.tokenizer.encode(f" You are member number {n}.") for n in range(3)]
    engine.shares_prefixes = True
    engine.reserve(1024, num_sequences=3)
    running = [engine.add(member, SamplingParams(max_tokens=4)) for member in members]
    while not engine.is_idle:
        engine.step()
    cached = sorted(sequence.completion().cached_tokens for sequence in running)
    assert cached[0] == 0
    assert min(cached[1:]) >= 200
    again = engine.generate(members[0], SamplingParams(max_tokens=4))
    assert again.cached_tokens == len(members[0]) - 1


def test_a_fixed_seed_gives_the_same_text_again(model_path):
    """Alone, nothing is taken over: the order of summation could decide a near tie otherwise."""
    with open_model(model_path, name="smollm2-135m") as alone:
        alone.reserve(512)
        ids = alone.tokenizer.encode(PAGE)[:120]
        runs = [alone.generate(ids, SamplingParams(max_tokens=12, temperature=0.9, seed=3)) for _ in range(2)]
    assert runs[0].completion_ids == runs[1].completion_ids
    assert [run.cached_tokens for run in runs] == [0, 0]
