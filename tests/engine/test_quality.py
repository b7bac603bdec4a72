"""engine/quality.py: closeness by numbers that can be checked by hand, and that what is scored is what the model says."""

import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.engine import quality
from localrag.engine.quality import Evaluation, Window, cut, log_softmax, score
from localrag.errors import EngineError
from tests.gguf_files import write_model

TEXT = "In the spring the old mill at the bend lost its last miller, and then the river rose. " * 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("quality") / "tiny.gguf")


def opened(path, **changes):
    return Evaluation(path, **({"num_cells": 256, "num_threads": 1, "flash_attention": True} | changes))


class Said:
    """What a model that says the same everywhere would give."""

    def __init__(self, probabilities):
        self.probabilities = probabilities

    def log_probabilities(self, ids):
        for start in range(0, len(ids), 3):
            rows = len(ids[start : start + 3])
            yield start, np.log(np.tile(np.array(self.probabilities, np.float32), (rows, 1)))


def test_by_hand():
    windows = [Window([0, 1, 0, 0, 1], 1)]  # 0, 0 and 1 are scored
    kept = io.BytesIO()
    alone = score(Said([0.5, 0.5]), windows, kept, is_reference=True)
    assert (alone.num_tokens, alone.mean_kl, alone.top1_agreement) == (3, 0.0, 1.0)
    assert alone.perplexity == pytest.approx(2.0)
    other = score(Said([0.25, 0.75]), windows, kept)
    assert other.mean_kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert other.p99_kl == pytest.approx(other.mean_kl)
    assert other.perplexity == pytest.approx((4 * 4 * 4 / 3) ** (1 / 3), rel=1e-5)
    assert other.top1_agreement == 0.0  # of two that are equal the first counts


def test_numbers_that_are_none_are_an_error():
    with pytest.raises(EngineError, match="not numbers"):
        score(Said([0.5, math.nan]), [Window([0, 1, 0], 0)], io.BytesIO(), is_reference=True)


def test_a_text_that_is_too_short():
    with pytest.raises(EngineError, match="too short"):
        score(Said([0.5, 0.5]), [], io.BytesIO())


@given(
    st.lists(st.integers(0, 9), max_size=300),
    st.integers(4, 64),
    st.integers(0, 2),
    st.integers(0, 200),
)
def test_windows_are_the_text_in_order_and_within_what_is_scored(ids, window_tokens, num_start, most):
    start = [99] * num_start
    windows = cut(ids, window_tokens, start=start, most=most)
    assert all(window.ids[:num_start] == start and len(window.ids) <= window_tokens for window in windows)
    assert all(window.num_scored >= 1 for window in windows)
    assert sum(window.num_scored for window in windows) <= most
    joined = [token for window in windows for token in window.ids[num_start:]]
    assert joined == ids[: len(joined)]


def test_the_softmax_of_large_logits():
    rows = log_softmax(np.array([[1000.0, 1000.0], [0.0, -1000.0]], np.float32))
    assert rows[0] == pytest.approx([math.log(0.5)] * 2)
    assert rows[1] == pytest.approx([0.0, -1000.0])


def test_a_model_is_the_same_as_itself_and_another_is_not(tiny, tmp_path):
    other = write_model(tmp_path / "other.gguf", seed=1)
    kept = io.BytesIO()
    with opened(tiny) as evaluation:
        windows = evaluation.windows(TEXT)
        assert len(windows) >= 2
        alone = score(evaluation, windows, kept, is_reference=True)
        again = score(evaluation, windows, kept)
        assert again.mean_kl < 1e-6
        assert again.top1_agreement == 1.0
        assert again.perplexity == pytest.approx(alone.perplexity)
    with opened(other) as evaluation:
        found = score(evaluation, windows, kept)
    assert found.mean_kl > 0.01
    assert found.num_tokens == alone.num_tokens


def test_a_piece_of_a_window_is_told_as_the_whole_of_it_would_be(tiny, monkeypatch):
    with opened(tiny, flash_attention=False) as evaluation:
        ids = evaluation.windows(TEXT)[0].ids
        whole = np.concatenate([rows for _, rows in evaluation.log_probabilities(ids)])
        monkeypatch.setattr(quality, "OUTPUT_TOKENS", 7)
        pieces = list(evaluation.log_probabilities(ids))
        assert [start for start, _ in pieces] == list(range(0, len(ids), 7))
        assert np.concatenate([rows for _, rows in pieces]) == pytest.approx(whole, abs=1e-3)
        assert np.exp(whole).sum(axis=-1) == pytest.approx(np.ones(len(ids)), abs=1e-4)


def test_a_run_takes_its_tokens_and_leaves_the_context_usable(tiny):
    with opened(tiny) as evaluation:
        ids = evaluation.windows(TEXT)[0].ids
        run = evaluation.time(ids)
        assert (run.prompt_tokens, run.answer_tokens) == (len(ids) - quality.ANSWER_TOKENS, quality.ANSWER_TOKENS)
        assert run.prompt_s > 0 < run.answer_s
        assert evaluation.time(ids[:8]).prompt_tokens == 6
        with pytest.raises(EngineError, match="could not evaluate"):
            evaluation._decode(ids, len(ids), outputs=False)
    evaluation.close()  # once more does no harm


def test_the_text_that_ships_is_long_enough():
    assert 1300 < len(quality.shipped_text().split()) < 2000
    assert quality.shipped_text().isprintable() is False
    assert all(char.isprintable() or char == "\n" for char in quality.shipped_text())
