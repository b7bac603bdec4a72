from hypothesis import given
from hypothesis import strategies as st

from localrag.fusion import fuse

rankings = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 30), unique=True, max_size=20), max_size=4)


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


@given(rankings, st.integers(1, 100))
def test_scores_are_the_sum_of_their_contributions_and_nothing_is_lost(given_rankings, k):
    fused = fuse(given_rankings, k=k)
    assert all(score == sum(parts.values()) for _, score, parts in fused)
    assert [one for one, _, _ in fused] == [one for one, _, _ in sorted(fused, key=lambda entry: (-entry[1], entry[0]))]
    assert {(one, name) for one, _, parts in fused for name in parts} == {
        (one, name) for name, ids in given_rankings.items() for one in ids
    }
    for one, _, parts in fused:
        assert all(parts[name] == 1 / (k + 1 + given_rankings[name].index(one)) for name in parts)
