import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.errors import KnowledgeBaseError
from localrag.kb.protocols import Feedback
from localrag.kb.retrieve import MAX_SHARE, diversify, feedback_boost, fuse, rank
from localrag.types import Chunk, Hit

RANKINGS = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 30), unique=True, max_size=20), max_size=4)


def test_an_example_by_hand():
    fused = fuse({"semantic": [7, 3], "keyword": [3, 9]}, k=60)
    assert fused == [
        (3, 1 / 62 + 1 / 61, {"semantic": 1 / 62, "keyword": 1 / 61}),
        (7, 1 / 61, {"semantic": 1 / 61}),
        (9, 1 / 62, {"keyword": 1 / 62}),
    ]


def test_a_ranking_with_twice_the_weight():
    fused = fuse({"semantic": [7, 3], "rerank": [3]}, k=60, weights={"rerank": 2.0})
    assert fused == [(3, 1 / 62 + 2 / 61, {"semantic": 1 / 62, "rerank": 2 / 61}), (7, 1 / 61, {"semantic": 1 / 61})]


def test_equal_scores_go_by_id():
    assert [one for one, _, _ in fuse({"a": [9, 1], "b": [1, 9]})] == [1, 9]


@given(RANKINGS, st.integers(1, 100))
def test_scores_are_the_sum_of_their_contributions_and_nothing_is_lost(given_rankings, k):
    fused = fuse(given_rankings, k=k)
    assert all(score == sum(parts.values()) for _, score, parts in fused)
    assert [one for one, _, _ in fused] == [one for one, _, _ in sorted(fused, key=lambda entry: (-entry[1], entry[0]))]
    assert {(one, name) for one, _, parts in fused for name in parts} == {
        (one, name) for name, ids in given_rankings.items() for one in ids
    }
    for one, _, parts in fused:
        assert all(parts[name] == 1 / (k + 1 + given_rankings[name].index(one)) for name in parts)


WORDS = [f"{first}{second}" for first in "bcdfghjklmnprst" for second in ("ale", "one", "ust", "ing", "ear", "out", "ist", "ore")]


def prose(num, seed=1):
    return random.Random(seed).choices(WORDS, k=num)


def hit(one, text, score):
    return Hit(Chunk(one, 1, one, text, 0, len(text), "a.md"), score, {"semantic": score / 2, "keyword": score / 2})


def test_what_repeats_a_better_hit_loses():
    hits = [hit(1, "dry nylon oven", 1.0), hit(2, "nylon dry oven", 0.9), hit(3, "acetone smooths abs", 0.6)]
    chosen = diversify(hits, 3, 0.5)
    assert [each.chunk.id for each in chosen] == [1, 3, 2]
    assert chosen[2].contributions == {"semantic": 0.45, "keyword": 0.45, "diversity": -0.5}
    assert diversify(hits, 2, 0.5) == chosen[:2]
    assert diversify(hits, 2, 0.0) == hits[:2]
    assert diversify([], 3, 0.5) == []


@given(
    st.lists(st.tuples(st.lists(st.sampled_from(WORDS[:6]), max_size=5).map(" ".join), st.floats(0.01, 50)), max_size=12), st.floats(0, 1)
)
def test_scores_stay_sums_and_fall(texts, diversity):
    hits = sorted((hit(one, *each) for one, each in enumerate(texts)), key=lambda each: -each.score)
    chosen = diversify(hits, len(hits), diversity)
    assert sorted(each.chunk.id for each in chosen) == sorted(each.chunk.id for each in hits)
    for before, after in pairwise(chosen):
        assert before.score >= after.score - 1e-9 * max(1.0, hits[0].score)
    assert all(each.score == sum(each.contributions.values()) for each in chosen)


counts = st.integers(0, 10**6)
feedbacks = st.builds(Feedback, counts, counts, counts, counts, counts)


@given(feedbacks)
def test_what_was_learned_is_bounded_and_moves_the_right_way(feedback):
    learned = feedback_boost(feedback, "all")
    assert -MAX_SHARE <= learned <= MAX_SHARE
    assert feedback_boost(feedback._replace(useful=feedback.useful + 1), "all") >= learned
    assert feedback_boost(feedback._replace(useless=feedback.useless + 1), "all") <= learned
    assert feedback_boost(feedback._replace(supplied=feedback.supplied + 1), "all") <= learned + 1e-9 or feedback.cited > feedback.supplied
    assert feedback_boost(feedback._replace(retrieved=0), "all") == learned


def test_what_was_learned_by_hand():
    assert feedback_boost(Feedback(), "all") == 0
    assert feedback_boost(Feedback(useful=1), "all") == pytest.approx(0.1 * 1 / 5)
    assert feedback_boost(Feedback(useful=12, useless=4), "all") == pytest.approx(0.1 * 8 / 20)
    assert feedback_boost(Feedback(supplied=20, cited=20), "all") == pytest.approx(0.1 * (15 / 40) / 2)
    assert feedback_boost(Feedback(supplied=20), "all") == pytest.approx(-0.1 * (5 / 40) / 2)


class Lengths:
    """A reranker that prefers long texts."""

    def scores(self, _query, texts):
        return [float(len(text)) for text in texts]


class Broken:
    def scores(self, _query, texts):
        return [float("nan") for _ in texts]


def test_a_reranker_gives_an_order():
    assert rank(Lengths(), "q", ["aa", "b", "cccc", "dd"]) == [2, 0, 3, 1]
    assert rank(Lengths(), "q", []) == []
    with pytest.raises(KnowledgeBaseError, match="not numbers"):
        rank(Broken(), "q", ["a"])
