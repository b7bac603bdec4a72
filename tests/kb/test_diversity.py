import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.errors import KnowledgeBaseError
from localrag.kb.coverage import needs_all
from localrag.kb.diversity import Distinct, diversify
from localrag.kb.prior import MAX_SHARE, prior
from localrag.kb.rerank import rank
from localrag.kb.store import Feedback
from localrag.passages import Chunk, Hit

WORDS = [f"{first}{second}" for first in "bcdfghjklmnprst" for second in ("ale", "one", "ust", "ing", "ear", "out", "ist", "ore")]


def prose(num, seed=1):
    return random.Random(seed).choices(WORDS, k=num)


def hit(one, text, score):
    return Hit(Chunk(one, 1, one, text, 0, len(text), "a.md"), score, {"semantic": score / 2, "keyword": score / 2})


def test_the_same_words_are_seen_once():
    distinct = Distinct()
    text = " ".join(prose(120))
    assert distinct.is_new(text)
    assert not distinct.is_new(text)
    assert not distinct.is_new(f"**{text.upper()}**\n")
    assert not distinct.is_new(text + " and")
    assert distinct.is_new(" ".join(prose(120, seed=2)))
    assert distinct.is_new("short")
    assert not distinct.is_new("Short!")
    assert distinct.is_new("🍕")
    assert distinct.is_new("🧪")
    assert distinct.is_new("dog bites man")
    assert distinct.is_new("man bites dog")


def test_a_number_makes_the_difference():
    distinct = Distinct()
    sheet = [*prose(60), "{}", *prose(60, seed=2)]
    assert distinct.is_new(" ".join(sheet).format(200))
    assert distinct.is_new(" ".join(sheet).format(240))
    assert not distinct.is_new(" ".join(sheet).format(200))


@pytest.mark.parametrize(("num_changed", "is_new"), [(0, False), (1, False), (6, True), (12, True)])
def test_words_that_differ(num_changed, is_new):
    text = prose(200)
    distinct = Distinct()
    assert distinct.is_new(" ".join(text))
    for at in range(num_changed):
        text[16 * at + 3] = "xyz"[at % 3] * (at + 1)
    assert distinct.is_new(" ".join(text)) is is_new


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
    learned = prior(feedback, "all")
    assert -MAX_SHARE <= learned <= MAX_SHARE
    assert prior(feedback._replace(useful=feedback.useful + 1), "all") >= learned
    assert prior(feedback._replace(useless=feedback.useless + 1), "all") <= learned
    assert prior(feedback._replace(supplied=feedback.supplied + 1), "all") <= learned + 1e-9 or feedback.cited > feedback.supplied
    assert prior(feedback._replace(retrieved=0), "all") == learned


def test_what_was_learned_by_hand():
    assert prior(Feedback(), "all") == 0
    assert prior(Feedback(useful=1), "all") == pytest.approx(0.1 * 1 / 5)
    assert prior(Feedback(useful=12, useless=4), "all") == pytest.approx(0.1 * 8 / 20)
    assert prior(Feedback(supplied=20, cited=20), "all") == pytest.approx(0.1 * (15 / 40) / 2)
    assert prior(Feedback(supplied=20), "all") == pytest.approx(-0.1 * (5 / 40) / 2)


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
    with pytest.raises(KnowledgeBaseError, match="no numbers"):
        rank(Broken(), "q", ["a"])


ALL = """How many notes mention Berlin?
List all suppliers.
Give me every invoice of May
what is the total number of printers
Count the entries in the log
Wie viele Verträge gibt es?
Liste alle Lieferanten auf
Nenne mir alle Kunden in Wien
Zähle die Fehler im Protokoll auf
Wie hoch ist die Anzahl der Verträge
Combien de contrats avons-nous ?
Énumère toutes les factures
Donne-moi tous les fournisseurs
Combien d’erreurs y a-t-il ?
¿Cuántos contratos hay?
Enumera todos los proveedores
Dame todas las facturas
¿Cuáles son todas las reglas?""".splitlines()
SOME = """How many degrees does PLA need?
What is the serial number of the pump?
How do I list files?
Wie viele Stunden dauert das Trocknen?
Wie viel kostet ein Nozzle?
Combien de temps faut-il ?
Combien coûte une buse ?
¿Cuántos grados necesita el PLA?
¿Cuánto cuesta?
Is that all?
What are the steps to dry nylon?
""".splitlines()


@pytest.mark.parametrize("question", ALL)
def test_questions_that_need_every_row(question):
    assert needs_all(question)
    assert needs_all(question.upper())


@pytest.mark.parametrize("question", [*SOME, "", "x" * 10_000, "list " * 10_000])
def test_questions_that_a_passage_answers(question):
    assert not needs_all(question)
