"""Short questions in six languages with the real default embedder, which knows English best."""

from pathlib import Path

import pytest

from localrag.kb import KnowledgeBase
from localrag.kb.evaluate import evaluate, open_index, read_collection
from tests.kb.test_languages import INFLECTED, TEXTS

pytestmark = pytest.mark.model

COLLECTIONS = Path(__file__).parents[1] / "kb" / "languages"


@pytest.mark.parametrize(("name", "num"), [("house", 22), ("town", 22), ("short", 26)])
def test_hybrid_search_is_as_good_as_words_alone(embedder, tmp_path, name, num):
    collection = read_collection(COLLECTIONS / name)
    assert len(collection.queries) == num
    store = open_index(collection, embedder, tmp_path)
    try:
        hybrid, keyword = (result.measures["nDCG@10"] for result in evaluate(collection, store, embedder, modes=("hybrid", "keyword")))
    finally:
        store.close()
    assert keyword > 0.96  # without stems, 0.76 for the short ones
    assert hybrid >= keyword


def test_other_forms_of_words_lead_to_the_document(embedder, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    with KnowledgeBase.open(tmp_path / "kb", "texts", create=True) as kb:
        kb.ingest([folder], embedder)
        first = {word: [hit.chunk.source for hit in kb.retrieve(word, embedder, k=1)] for word in INFLECTED}
    found = [word for word, name in INFLECTED.items() if first[word] == [f"texts/{name}.txt"]]
    assert len(found) >= 0.8 * len(INFLECTED), first
