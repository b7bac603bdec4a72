import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.errors import KnowledgeBaseError
from localrag.kb.filters import Where
from localrag.kb.protocols import Feedback
from localrag.kb.query import Term, parse
from localrag.kb.retrieve import MAX_SHARE, MIN_SIMILARITY, MODES, RERANK_WEIGHT, retrieve
from localrag.text.terms import MAX_TERMS, terms
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.servers import home_of, open_kb

PAGES = {
    "pla.md": "# PLA\n\nPLA prints at 200 degrees.\n\n## Annealing\n\nAnneal PLA in an oven for one hour.\n",
    "abs.md": "# ABS\n\nABS smells of styrene while printing. Acetone smooths ABS.\n",
    "nylon.md": "# Nylon\n\nNylon takes up water. Dry nylon in an oven.\n",
    "codes.txt": "Error E4711 means that the thermistor of the hotend is open.\n",
    "quotes.txt": 'AND OR NOT NEAR "quoted" text:column * ^ ( ) { } - + select\n',
}


@pytest.fixture
def kb_dir(any_home):
    return any_home


@pytest.fixture(scope="module", params=["folder", "server"])
def pages_home(request, tmp_path_factory):
    return home_of(request, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def pages(pages_home, tmp_path_factory):
    """These pages, indexed, for tests that change nothing."""
    folder = tmp_path_factory.mktemp("folder") / "pages"
    folder.mkdir()
    for name, text in PAGES.items():
        (folder / name).write_text(text)
    with open_kb(pages_home, "pages", create=True) as kb:
        kb.ingest([folder], HashEmbedder())
        yield kb


def _sources(hits):
    return [hit.chunk.source.removeprefix("pages/") for hit in hits]


@pytest.mark.parametrize("mode", MODES)
def test_a_hit_says_where_it_is_from_and_what_its_score_is_made_of(pages, embedder, mode):
    hits = pages.retrieve("anneal PLA in an oven", embedder, mode=mode)
    best = hits[0]
    assert (best.chunk.source, best.chunk.heading, best.chunk.kb) == ("pages/pla.md", "PLA > Annealing", pages.name)
    assert PAGES["pla.md"][best.chunk.start : best.chunk.end] == best.chunk.text
    assert all(hit.score == sum(hit.contributions.values()) for hit in hits)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert set(best.contributions) == ({"semantic", "keyword"} if mode == "hybrid" else {mode})
    assert pages.retrieve("anneal PLA in an oven", embedder, k=1, mode=mode) == hits[:1]


def test_semantic_scores_are_similarities_over_the_floor(pages, embedder):
    hits = pages.retrieve("ABS smells of styrene", embedder, mode="semantic")
    assert hits
    for hit in hits:
        heading = f"{hit.chunk.heading}\n" if hit.chunk.heading else ""
        query, text = embedder.embed(["ABS smells of styrene", heading + hit.chunk.text])
        assert hit.score == pytest.approx(float(query @ text), abs=1e-6)
        assert hit.score >= MIN_SIMILARITY


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("query", ["Quo vadis, domine?", "", "   ", "???", "🍕🍕🍕"])
def test_a_question_about_something_else_finds_nothing(pages, embedder, query, mode):
    assert pages.retrieve(query, embedder, mode=mode) == []


def test_in_hybrid_mode_words_alone_must_carry_half_of_the_question(pages, embedder):
    assert _sources(pages.retrieve("E4711", embedder)) == ["codes.txt"]
    weak = "hotend moon orchestra velvet violin submarine volcano glacier comet harp lagoon piano"  # one word of many
    assert _sources(pages.retrieve(weak, embedder, mode="keyword")) == ["codes.txt"]
    assert pages.retrieve(weak, embedder) == []


def test_keyword_mode_needs_no_embedder_and_knows_word_forms(pages):
    assert _sources(pages.retrieve("annealed smelling", None, mode="keyword")) == ["pla.md", "abs.md"]
    assert pages.retrieve("what is the of and", None, mode="keyword") == []


def test_another_embedder_is_refused(pages):
    with pytest.raises(KnowledgeBaseError, match="another embedder"):
        pages.retrieve("oven", HashEmbedder(dim=32))
    assert pages.retrieve("oven", HashEmbedder(dim=32), mode="keyword")


def test_a_question_longer_than_the_embedder_takes(pages, embedder):
    assert "pla.md" in _sources(pages.retrieve("anneal PLA in an oven " * 100, embedder))
    assert _sources(pages.retrieve("anneal PLA oven " * 20_000, embedder, mode="semantic", k=1)) == ["pla.md"]


SYNTAX = ('"', "'", '"""', "AND", "oven AND", "NOT oven", "NEAR(a b)", "text:oven", "heading : x", "*", "ov*", "^oven", "(", ")(")
MORE_SYNTAX = ("{a b}: c", "a + b", "-oven", '"oven" OR "', '"; DROP TABLE chunks; --', "oven\0", "\ud800 oven", "\udcff", "é\u0301")
INJECTIONS = (*SYNTAX, *MORE_SYNTAX, "x" * 100_000, "a " * 50_000)


@pytest.mark.parametrize("query", INJECTIONS)
def test_nothing_in_a_query_is_read_as_syntax(pages, embedder, query):
    for mode in MODES:
        pages.retrieve(query, embedder, mode=mode)
    assert pages.num_documents == len(PAGES)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(), max_size=30) | st.lists(st.sampled_from([*SYNTAX, *MORE_SYNTAX, "oven", "ABS"]), max_size=6).map(" ".join))
def test_any_text_is_a_query(pages, embedder, query):
    for mode in MODES:
        hits = pages.retrieve(query, embedder, mode=mode)
        assert len({hit.chunk.id for hit in hits}) == len(hits)
    if Term("oven") in parse(query).keyword:
        assert {"pla.md", "nylon.md"} <= set(_sources(pages.retrieve(query, None, mode="keyword")))


def test_the_words_of_a_query():
    query = "What's the E-4711 doing at 200°C? e-4711! Ofen, ÖFEN, öfen 温度"
    assert terms(query) == ["e", "4711", "200", "c", "ofen", "öfen", "温度"]
    assert terms('AND "x" NEAR(y)*') == ["x", "near", "y"]
    assert len(terms(" ".join(map(str, range(1000))))) == MAX_TERMS


def test_more_hits_than_the_usual_depth_can_be_had(kb_dir, tmp_path):
    (tmp_path / "long.txt").write_text("\n\n".join(f"Line {at} about ovens " + "and ovens " * 14 for at in range(150)))
    embedder = HashEmbedder()
    with open_kb(kb_dir, "long", create=True) as kb:
        kb.ingest([tmp_path / "long.txt"], embedder)
        assert kb.num_chunks == 150
        for mode in MODES:
            assert len(kb.retrieve("ovens", embedder, k=1000, mode=mode)) == 150
            assert [hit.chunk.id for hit in kb.retrieve("ovens", embedder, k=3, mode="keyword")] == [1, 2, 3]


def test_equal_questions_have_equal_answers(pages, embedder):
    first = pages.retrieve("dry nylon oven", embedder)
    assert all(pages.retrieve("dry nylon oven", embedder) == first for _ in range(3))
    assert np.isfinite([hit.score for hit in first]).all()


@pytest.fixture
def search(pages, pages_home, embedder):
    """`retrieve` itself, and the store it reads from."""
    with open_kb(pages_home, "pages") as kb:

        def searched(query, *, k=8, mode="hybrid", **options):
            return retrieve(kb._store, kb._location.index, query, embedder, k=k, mode=mode, **options)

        searched.store = kb._store
        yield searched


class Likes:
    """A reranker that likes one word and notes what it was asked."""

    def __init__(self, word):
        self.word = word
        self.asked = []

    def scores(self, query, texts):
        self.asked.append((query, list(texts)))
        return [float(text.count(self.word)) for text in texts]


@pytest.mark.parametrize("mode", ["hybrid", "keyword"])
def test_only_what_passes_the_filter_is_found(search, mode):
    assert set(_sources(search("oven", mode=mode))) >= {"pla.md", "nylon.md"}
    assert set(_sources(search("oven", mode=mode, where=Where.parse(["source=pages/ny*"])))) == {"nylon.md"}
    assert search("oven", mode=mode, where=Where.parse(["tag=none"])) == []
    assert search("anneal PLA in an oven", mode="semantic")[0].chunk.source == "pages/pla.md"
    assert "pla.md" not in _sources(search("anneal PLA in an oven", mode="semantic", where=Where.parse(["source=pages/ny*"])))


@pytest.mark.parametrize("mode", ["hybrid", "keyword"])
def test_a_reranker_leads_and_its_part_is_told(search, mode):
    before = search("oven", mode=mode)
    last = before[-1]
    word = max(last.chunk.text.split(), key=lambda each: sum(each not in hit.chunk.text for hit in before))
    reranker = Likes(word)
    after = search("oven", mode=mode, reranker=reranker)
    assert {hit.chunk.id for hit in after} == {hit.chunk.id for hit in before}
    assert after[0].chunk == last.chunk
    assert after[0].contributions["rerank"] == RERANK_WEIGHT / 61
    assert all(hit.score == sum(hit.contributions.values()) for hit in after)
    assert [hit.score for hit in after] == sorted((hit.score for hit in after), reverse=True)
    assert [hit.relevance for hit in after if hit.chunk == last.chunk] == [last.relevance]
    ((query, texts),) = reranker.asked
    assert query == "oven"
    assert len(texts) == len(before)
    assert search("glockenspiel", mode=mode, reranker=reranker) == []


@pytest.mark.parametrize("mode", ["hybrid", "keyword"])
def test_what_was_learned_weighs_a_tenth_at_most(search, mode):
    before = search("oven", mode=mode, learning="all")
    assert before == search("oven", mode=mode)
    with search.store.writing():
        search.store.add_feedback({before[0].chunk.id: Feedback(useless=10_000), before[-1].chunk.id: Feedback(useful=10_000)})
    after = {hit.chunk.id: hit for hit in search("oven", mode=mode, learning="all")}
    worst, best = after[before[0].chunk.id], after[before[-1].chunk.id]
    assert worst.contributions["feedback"] == pytest.approx(-MAX_SHARE * before[0].score, rel=0.01)
    assert best.contributions["feedback"] == pytest.approx(MAX_SHARE * before[-1].score, rel=0.01)
    assert all(hit.score == sum(hit.contributions.values()) for hit in after.values())
    assert search("oven", mode=mode) == before  # switched off
    reranked = search("oven", mode=mode, learning="all", reranker=Likes("oven"))
    assert all(hit.score == sum(hit.contributions.values()) for hit in reranked)
    assert {hit.chunk.id for hit in reranked if "feedback" in hit.contributions} == {before[0].chunk.id, before[-1].chunk.id}
    with search.store.writing():
        search.store.reset_feedback()


def index_texts(kb, folder, texts, embedder):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    kb.ingest([folder], embedder)


def test_identical_texts_take_one_place_and_are_all_named(kb_dir, tmp_path, embedder):
    sheet = " ".join(f"word{chr(97 + at % 26)}{chr(97 + at // 26)} of the oven" for at in range(9))
    texts = {"a": sheet, "b": sheet.upper(), "c": sheet.replace(" ", "\n\n\t ")}
    texts |= {"d": sheet + ".", "e": sheet + " 240", "f": "Another oven."}
    with open_kb(kb_dir, "copies", create=True) as kb:
        index_texts(kb, tmp_path / "copies", texts, embedder)
        for mode in MODES:
            hits = kb.retrieve("oven", embedder, mode=mode, k=4)
            found = {hit.chunk.source[-5]: {each.source[-5] for each in hit.copies} for hit in hits}
            [same] = set("abc") & set(found)
            assert found.pop(same) == set("abc") - {same}
            assert found == {"d": set(), "e": set(), "f": set()}


def test_one_word_makes_another_text(kb_dir, tmp_path, embedder):
    """Two editions of terms that say the opposite."""
    terms = f"The customer is liable for every defect of the oven {' and '.join(f'clause {at}' for at in range(20))}."
    with open_kb(kb_dir, "terms", create=True) as kb:
        index_texts(kb, tmp_path / "terms", {"2023": terms, "2024": terms.replace("is liable", "is not liable")}, embedder)
        for mode in MODES:
            hits = kb.retrieve("Is the customer liable for a defect of the oven?", embedder, mode=mode, k=4)
            assert {hit.chunk.source for hit in hits} == {"terms/2023.txt", "terms/2024.txt"}
            assert not any(hit.copies for hit in hits)


def test_copies_of_one_text_do_not_hide_others(kb_dir, tmp_path, embedder):
    """More copies than a ranking is deep."""
    texts = {f"copy{at}": "The oven is hot." for at in range(150)}
    texts |= {f"other{at}": f"The oven number {at} is not so hot." for at in range(3)}
    with open_kb(kb_dir, "many", create=True) as kb:
        index_texts(kb, tmp_path / "many", texts, embedder)
        for mode in MODES:
            hits = kb.retrieve("The oven is hot", embedder, mode=mode, k=4)
            assert len(hits) == 4
            assert sorted(len(hit.copies) for hit in hits) == [0, 0, 0, 149]


def test_diversity_is_a_loss_that_is_told(search):
    hits = search("oven", diversity=0.9)
    assert {hit.chunk.id for hit in hits} == {hit.chunk.id for hit in search("oven")}
    assert any("diversity" in hit.contributions for hit in hits)
    assert all(hit.score == sum(hit.contributions.values()) for hit in hits)


def test_chinese_japanese_and_korean_are_found_within_clauses(kb_dir, tmp_path, embedder):
    folder = tmp_path / "cjk"
    folder.mkdir()
    for name, text in {
        "zh": "请先看打印温度是多少再开始。",
        "ja": "ノズルの温度を下げる。",
        "ko": "노즐온도를낮추세요",
        "en": "Set the temperature.",
    }.items():
        (folder / f"{name}.txt").write_text(text)
    with open_kb(kb_dir, "cjk", create=True) as kb:
        kb.ingest([folder], embedder)
        for query, name in {"打印温度": "zh", "ノズルの温度": "ja", "노즐온도": "ko", "什么打印温度?": "zh"}.items():
            for mode in ("keyword", "hybrid"):
                assert [hit.chunk.source for hit in kb.retrieve(query, embedder, mode=mode)][:1] == [f"cjk/{name}.txt"]
        assert kb.retrieve("天气预报怎么样", embedder) == []
