"""How much of the evidence is sent: whole passages or their best sentences, and what the ledger and the answer say of the rest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.engine.echo import open_echo
from localrag.errors import UsageError
from localrag.prompt.layout import source_text
from localrag.question import Question, Search
from localrag.session.retrieval import LESS_RELEVANT, EvidenceRule, rule_for, select
from localrag.text.sentences import excerpt, units
from localrag.types import Chunk, Hit

ECHO = open_echo().info
SMALL = replace(ECHO, num_layers=30, embedding_length=576)  # SmolLM2-135M
LARGE = replace(ECHO, num_layers=36, embedding_length=2560)  # Qwen3-4B
TABLE = "| Material | Glue |\n| --- | --- |\n| PLA | epoxy |\n| HIPS | model cement |\n| TPU | flexible glue |"


def hit(number, text, score=1.0, heading=""):
    return Hit(Chunk(number, number, 0, text, 10, 10 + len(text), "page.md", heading=heading, kb="handbook"), score, {"semantic": score})


def count(text):
    return len(text.split())


def sent(selection):
    return [excerpt(each.chunk.text, each.spans) if each.spans else each.chunk.text for each in selection.hits]


SENTENCES = EvidenceRule(kind="sentences", top_k=8, min_share=0.6, max_tokens=60)


def test_the_rule_follows_the_size_of_the_model_and_the_options():
    assert (rule_for(Search(), SMALL).kind, rule_for(Search(), LARGE).kind, rule_for(Search(), ECHO).kind) == (
        "sentences",
        "passages",
        "passages",
    )
    assert rule_for(Search(top_k=3), SMALL) == EvidenceRule(kind="passages", top_k=3)
    assert rule_for(Search(top_k="fit"), SMALL).kind == "passages"
    assert rule_for(Search(top_k=3, evidence="sentences"), LARGE).top_k == 3
    assert rule_for(Search(evidence_tokens=50), LARGE).max_tokens == 50
    for wrong in ({"evidence": "words"}, {"evidence_tokens": 0}, {"evidence_tokens": 1.5}):
        with pytest.raises(UsageError):
            Question.of("Why?", **wrong)


def test_a_row_is_sent_with_the_head_of_its_table():
    chosen = select([hit(1, f"Parts are glued.\n\n{TABLE}")], "Which glue is right for HIPS?", SENTENCES, count)
    assert sent(chosen) == ["| Material | Glue |\n| --- | --- |\n| HIPS | model cement |"]
    assert ", excerpt)" in source_text(chosen.hits[0], sent(chosen)[0])


def test_sentences_of_several_passages_and_what_is_left_out():
    hits = [
        hit(1, "PETG is tough. Print PETG at 240 °C. It dries at 65 °C.", 0.9),
        hit(2, "PVA dissolves in water. Print PVA at 200 °C.", 0.8),
        hit(3, "ABS smells.", 0.7),
        hit(4, "Print anything at 240 °C.", 0.2),
    ]
    chosen = select(hits, "Print PETG or PVA at what temperature?", SENTENCES, count)
    assert sent(chosen) == ["Print PETG at 240 °C.", "Print PVA at 200 °C."]
    assert chosen.left_out == {f"KB#{number}": LESS_RELEVANT for number in (3, 4)}


def test_passages_end_where_relevance_drops_or_the_limit_is_reached():
    hits = [hit(number, f"Passage number {number}.", score) for number, score in ((1, 1.0), (2, 0.8), (3, 0.6))]
    chosen = select(hits, "passage?", rule_for(Search(), LARGE), count)
    assert [each.label for each in chosen.hits] == ["KB#1", "KB#2"]
    assert [each.label for each in select(hits, "passage?", rule_for(Search(evidence_tokens=6), LARGE), count).hits] == ["KB#1"]
    assert select(hits, "passage?", rule_for(Search(evidence_tokens=1), LARGE), count).hits == []
    assert select([], "passage?", rule_for(Search(), LARGE), count).hits == []


@given(st.lists(st.text(alphabet="ab .!\n|-#`"), min_size=1, max_size=4), st.text(alphabet="ab ", max_size=8), st.integers(1, 40))
def test_whatever_is_retrieved_is_sent_or_named(texts, question, limit):
    hits = [hit(number, text, 1 / number) for number, text in enumerate(texts, 1)]
    rule = replace(SENTENCES, max_tokens=limit, is_strict=True)
    chosen = select(hits, question, rule, count)
    assert {each.label for each in chosen.hits} | chosen.left_out.keys() == {each.label for each in hits}
    assert sum(count(source_text(each, text)) for each, text in zip(chosen.hits, sent(chosen), strict=True)) <= limit
    for each in chosen.hits:
        whole = {unit.span for unit in units(each.chunk.text)} | {unit.header for unit in units(each.chunk.text)}
        assert set(each.spans) <= whole
        assert list(each.spans) == sorted(each.spans)
        assert all(end <= start for (_, end), (start, _) in zip(each.spans, each.spans[1:], strict=False))
