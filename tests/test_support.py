"""The support of an answer: each sentence's best span in what it cites, and the claims that no cited passage has."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.citation import cite
from localrag.support import _NEGATIONS, MAX_EMBEDDED, assess
from localrag.text.languages import LANGUAGES
from localrag.types import Chunk, Hit
from tests.growth import check_linear

PLA = (
    "PLA may be annealed at 80 to 100 °C for an hour, in salt. It shrinks by 2% then.\n"
    "Do not anneal it above 110 °C.\n\n| Material | Bed (°C) | Time |\n| --- | --- | --- |\n| PA6-CF | 90 | 6 h |\n| PETG | 70 | 30 min |\n"
)


def hit(number, text, **about):
    about = {"start": 100, "source": "heat.md", "heading": "Annealing", **about}
    return Hit(Chunk(number, 1, 0, text, end=about["start"] + len(text), **about), 1.0)


def assessed(text, *hits, **options):
    hits = hits or (hit(1, PLA, place="lines 10-16"),)
    return assess(text, hits, cite(text, hits), **options)


def claims(text, source, **about):
    """What a sentence that cites a source says and the source does not, as "kind: text"."""
    return [f"{each.kind}: {each.text}" for each in assessed(f"{text} [KB#1]", hit(1, source, **about)).unsupported_claims]


def sentences(text, *hits):
    return [(text[each.start : each.end], list(each.labels)) for each in assessed(text, *hits).sentences]


# --- sentences and what they cite ---


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("It shrinks [KB#1]. It grows.", [("It shrinks [KB#1].", ["KB#1"]), ("It grows.", [])]),
        ("It shrinks. [KB#1] It grows. [KB#2]", [("It shrinks.", ["KB#1"]), ("It grows.", ["KB#2"])]),
        ("[KB#1] It shrinks. [KB#2] It grows.", [("It shrinks.", ["KB#1"]), ("It grows.", ["KB#2"])]),
        ("It shrinks.\n[KB#1]\n[KB#2] It grows.", [("It shrinks.", ["KB#1"]), ("It grows.", ["KB#2"])]),
        ("1. It shrinks [1].\n2. It grows [1, 2].", [("It shrinks [1].", ["KB#1"]), ("It grows [1, 2].", ["KB#1", "KB#2"])]),
        ("- [KB#1] It shrinks.\n- It grows.", [("It shrinks.", ["KB#1"]), ("It grows.", [])]),
        ("It is 80. [KB#1]", [("It is 80.", ["KB#1"])]),
        ("It shrinks [none].", [("It shrinks [none].", [])]),
        ("收缩百分之二[KB#1]。它不会变长。", [("收缩百分之二[KB#1]。", ["KB#1"]), ("它不会变长。", [])]),
    ],
)
def test_a_citation_belongs_to_its_sentence(text, told):
    assert sentences(text, hit(1, "It shrinks."), hit(2, "It grows.")) == told


def test_the_best_span_is_named_where_it_stands_in_the_document():
    text = "In salt, PLA is annealed at 80 °C [KB#1]. Bed for PETG: 70 °C [KB#1]. So be it."
    annealed, bed, uncited = assessed(text).sentences
    assert annealed.span.text == PLA[: PLA.index(" It shrinks")]
    assert (annealed.span.start, annealed.span.end, annealed.span.place) == (100, 100 + len(annealed.span.text), "line 10")
    assert bed.span.text == "| PETG | 70 | 30 min |"
    assert bed.span.place == "line 16"
    assert 0.8 < annealed.score <= 1
    assert dict(annealed.contributions) == {"words": annealed.score}
    assert bed.score > 0.6, "the head of the table counts"
    assert (uncited.score, uncited.span, uncited.labels) == (None, None, ())


def test_an_invented_source_supports_nothing_and_no_evidence_means_no_support():
    answer = assessed("PLA shrinks by 2% [KB#9].")
    assert [(each.score, each.span) for each in answer.sentences] == [(0.0, None)]
    assert [each.text for each in answer.unsupported_claims] == ["PLA", "2%"]
    assert assess("PLA shrinks.", [], []).sentences == ()
    assert assess("PLA shrinks.", [], []).mean_score is None


def test_a_passage_that_is_no_part_of_its_document_is_named_as_a_whole():
    fact = Hit(Chunk(1, 1, 0, "PLA shrinks.", 40, 900, "heat.md", place="page 3"), 1.0)
    (sentence,) = assessed("PLA shrinks [KB#1].", fact).sentences
    assert (sentence.span.start, sentence.span.end, sentence.span.text, sentence.span.place) == (40, 900, "PLA shrinks.", "page 3")


# --- claims ---


@pytest.mark.parametrize(
    ("said", "source", "told"),
    [
        ("Pay 1,000 for it.", "It costs 1000.", []),
        ("Pay 1.000,50 €.", "It costs €1,000.50.", []),
        ("Es sind 1 000.", "It is 1'000.", []),
        ("Use 0,4 mm.", "The nozzle has 0.4mm.", []),
        ("Use 0.4 cm.", "The nozzle has 4 mm.", []),
        ("Wait 1 hour.", "Wait for 60 minutes.", []),
        ("Wait 3 hours.", "Wait for three hours.", []),
        ("Wait 24 h.", "A 24-hour wait.", []),
        ("Heat to 80 degrees.", "Heat to 80 °C.", []),
        ("Heat to 80°C.", "Heat to 70–80 degrees Celsius.", []),
        ("Heat to 70 °C.", "Heat to 70 or 80 °C.", []),
        ("Heat to 80 °C.", "Heat to 70 –80 °C.", []),
        ("Heat to 80 °C.", "| Bed, °C |\n|---|\n| 80 |", []),
        ("烘烤到80度。", "Heat to 80 °C.", []),
        ("Heat to 85 °C.", "Heat to 80 °C.", ["number: 85 °C"]),
        ("Heat to 80 °F.", "Heat to 80 °C.", ["unit: 80 °F"]),
        ("Wait 80 minutes.", "Heat to 80 °C.", ["unit: 80 minutes"]),
        ("Store at -18 °C.", "Store at 18 °C.", ["number: -18 °C"]),
        ("Take version 1.2.3 of it.", "Take version 1.2.4.", ["name: 1.2.3"]),
        ("Print PA6-CF in 3D.", "PA6-CF is made for 3D printers.", []),
        ("Print PA6-CF.", "PA6 is plain.", ["name: PA6-CF"]),
        ("Ask the Prusa dealers.", "Ask a dealer.", ["name: Prusa"]),
        ("Ask Prusa's dealers.", "PRUSA has dealers.", []),
        ("Call `read_file` or max_tokens.", "There is read_file().", ["name: max_tokens"]),
        ("Frag den Händler nach dem Drucker und der Platte von PETG.", "Das ist der Drucker und die Platte.", ["name: PETG"]),
        ("It does not shrink.", "It shrinks.", ["negation: It does not shrink"]),
        ("It shrinks by a lot.", "It does not shrink.", ["negation: It shrinks by a lot."]),
        ("It doesn’t shrink.", "It never shrinks.", []),
        ("Use no more than half.", "Use at most half.", []),
        ("Do not dry nylon in sunlight.", "Avoid drying nylon in sunlight.", []),
        ("Dry it at 60 °C.", "Dry it at 60 °C, but do not print wet.", []),
        ("Das Material schrumpft nicht beim Trocknen.", "Das Material schrumpft beim Trocknen und wird mit der Zeit weich.",
         ["negation: Das Material schrumpft nicht beim Trocknen"]),
        ("Le fil ne fond pas dans le four.", "Le fil fond dans le four et il est mou.", ["negation: Le fil ne fond pas dans le four"]),
        ("Нить не плавится в печи.", "Нить плавится в печи.", ["negation: Нить не плавится в печи"]),
        ("部品は乾いていない。", "部品は乾いている。", ["negation: 部品は乾いていない"]),
        ("La parte non si scioglie nel forno.", "La parte si scioglie nel forno.", ["negation: La parte non si scioglie nel forno"]),
        ("材料不会收缩。", "材料会收缩。", ["negation: 材料不会收缩"]),
    ],
)  # fmt: skip
def test_a_claim_that_the_source_lacks_is_listed(said, source, told):
    assert [each.rstrip(".。") for each in claims(said, source)] == [each.rstrip(".") for each in told]


def test_a_claim_is_listed_once_and_only_from_cited_sentences():
    text = "PETG melts at 300 °C [KB#1]. At 300 °C it melts [KB#1]. ASA melts at 400 °C."
    found = assessed(text).unsupported_claims
    assert [text[each.start : each.end] for each in found] == [each.text for each in found] == ["300 °C"]


def test_what_a_limit_cut_off_is_no_claim():
    assert [each.text for each in assessed("[KB#1] Heat PLA to 8").unsupported_claims] == ["8"]
    assert assessed("[KB#1] Heat PLA to 8", is_cut=True).unsupported_claims == ()
    assert assessed("[KB#1] Heat PLA to 8.", is_cut=True).unsupported_claims == ()
    assert assessed("[KB#1] Can ASA take 500 °C?").unsupported_claims == ()


def test_a_heading_counts_as_part_of_its_passage():
    assert claims("Print ASA in Prague.", "Print it.", heading="Prague > ASA") == []


def test_every_language_that_is_told_has_its_negations():
    assert LANGUAGES | {"en", "ja", "ko", "zh"} == set(_NEGATIONS)


# --- cosine similarity ---


class LetterEmbedder:
    """Embeds the letters of a text, which no word needs to share. Counts what it is asked for."""

    dim, max_tokens, fingerprint = 26, 40, "letters"

    def __init__(self):
        self.num_texts = 0

    def count(self, text):
        return len(text)

    def embed(self, texts):
        self.num_texts += len(texts)
        assert all(len(text) <= self.max_tokens for text in texts)
        rows = np.array([[text.lower().count(chr(97 + at)) + 1e-6 for at in range(26)] for text in texts], dtype=np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_a_loaded_embedder_adds_the_similarity():
    embedder = LetterEmbedder()
    near, far = hit(1, "Odd zzz words here."), hit(2, "Plain text shrinks here.")
    (sentence,) = assessed("A text that shrank [KB#1, 2].", near, far, embedder=embedder).sentences
    assert sentence.span.label == "KB#2"
    assert set(sentence.contributions) == {"words", "cosine"}
    assert sentence.score == pytest.approx(sum(sentence.contributions.values()))
    many = " ".join(f"PLA shrinks by {number}% then [KB#1]." for number in range(99))
    checked = assessed(many, embedder=embedder)
    assert embedder.num_texts <= 4 + MAX_EMBEDDED
    assert {len(each.contributions) for each in checked.sentences} == {1, 2}, "the first ones have it, the others tell that they do not"


# --- text from anywhere ---

PIECES = st.sampled_from(
    ["[KB#1]", "KB#2-9", "[none]", ". ", "! ", "\n", "\n- ", "1. ", "| a | b |\n|---|\n", "80", " 1,000", "-5 °C", "½", "٣٫٥", "9" * 50,
     "1.2.3", " not ", "n't ", "PETG", "Prusa ", "it", "不", "80度", "烘烤", "`x`", "°", "(", "]", "\0", "\u200b", "\ud800", "İ",
     "ﬁ", " ", "_", "e\u0301"]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=14).map("".join)


@settings(max_examples=150)
@given(TEXTS, TEXTS, TEXTS, st.booleans())
def test_any_text_is_checked_and_every_place_is_one_of_the_text(text, one, other, is_cut):
    hits = (hit(1, one), hit(2, other, heading=text[:9]))
    checked = assess(text, hits, cite(text, hits), is_cut=is_cut)
    assert checked == assess(text, hits, cite(text, hits), is_cut=is_cut)
    ends = [0, *(place for each in checked.sentences for place in (each.start, each.end)), len(text)]
    assert ends == sorted(ends)
    for each in checked.sentences:
        assert text[each.start : each.end].strip() == text[each.start : each.end] != ""
        assert (each.score is None) == (each.labels == ())
        assert each.score is None or 0 <= each.score <= 1 + 1e-9
        if each.span is not None:
            chunk = next(hit.chunk for hit in hits if hit.label == each.span.label)
            assert chunk.text[each.span.start - chunk.start : each.span.end - chunk.start] == each.span.text != ""
    for claim in checked.unsupported_claims:
        assert text[claim.start : claim.end] == claim.text != ""
        assert any(each.start <= claim.start and claim.end <= each.end and each.labels for each in checked.sentences)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["PLA", "80 °C", "1,000 mm", "not", "Prusa", "shrinks", "in salt", "never", "0.5"]), min_size=1, max_size=9)
)
def test_a_copied_sentence_is_fully_supported(words):
    sentence = f"It {' '.join(words)}."
    checked = assess(f"{sentence} [KB#1]", hits := (hit(1, f"Before. {sentence} After."),), cite(f"{sentence} [KB#1]", hits))
    assert checked.mean_score == pytest.approx(1.0)
    assert checked.unsupported_claims == ()


@pytest.mark.parametrize(
    "piece", ["PLA is 80 °C [KB#1]. ", "[KB#1-64] ", "1,", "PLA ", "( ", "not a,", "| a |\n", "A.b-", "80 or ", "烘烤80度 "]
)
def test_time_is_linear_in_the_answer_and_in_the_passages(piece):
    rng = random.Random(1)
    texts = [" ".join(rng.choices(["PLA", "80", "°C", "salt.", "heat", "not", "dry;", "hour"], k=200)) for _ in range(9)]
    hits = tuple(hit(number, text) for number, text in enumerate(texts, 1))

    def work(size):
        text = piece * (size // len(piece))
        assess(text, hits, cite(text, hits))

    check_linear(work, 20_000)
    check_linear(lambda size: assess("PLA [KB#1]", long := (hit(1, piece * (size // len(piece))),), cite("PLA [KB#1]", long)), 20_000)
