"""What counts as near is measured for each embedder, before its first vectors are stored."""

import zlib

import numpy as np
import pytest

from localrag.kb.ingest import PAIRS, SHARE, min_similarity
from localrag.kb.retrieve import MIN_SIMILARITY
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.servers import open_kb


class MarkedEmbedder(HashEmbedder):
    """One that has learned the pairs: their similarity is `answers`, of all else `unrelated` and a little."""

    def __init__(self, *, answers, unrelated, **options):
        super().__init__(dim=256, fingerprint=f"marked {answers} {unrelated}", **options)
        self._answers, self._unrelated = answers, unrelated

    def embed(self, texts):
        known = {text: number for number, pair in enumerate(PAIRS) for text in pair}
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, text, hashed in zip(vectors, texts, super().embed(texts), strict=True):
            row[0] = self._unrelated**0.5
            if text in known:
                row[1 + known[text]] = (self._answers - self._unrelated) ** 0.5
            else:
                row[100:] = hashed[100:] * (1 - self._unrelated) ** 0.5 / max(1e-6, np.linalg.norm(hashed[100:]))
            row[50 + zlib.crc32(text.encode()) % 40] += (max(0.0, 1 - float(row @ row))) ** 0.5
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(("answers", "unrelated"), [(0.6, 0.1), (0.9, 0.7), (0.5, 0.0)])
def test_the_threshold_stands_between_what_answers_and_what_does_not(answers, unrelated):
    found = min_similarity(MarkedEmbedder(answers=answers, unrelated=unrelated))
    assert found == pytest.approx(unrelated + SHARE * (answers - unrelated), abs=0.03)


def test_who_does_not_tell_them_apart_has_none():
    assert min_similarity(MarkedEmbedder(answers=0.72, unrelated=0.7)) is None
    assert min_similarity(MarkedEmbedder(answers=0.9, unrelated=0.1, max_tokens=10)) is None  # they are too long for it


def test_where_all_is_similar_a_question_about_something_else_finds_nothing(any_home, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "pla.md").write_text("PLA is annealed in an oven.\n")
    embedder = MarkedEmbedder(answers=0.9, unrelated=0.6)
    with open_kb(any_home, "notes", create=True) as kb:
        kb.ingest([tmp_path / "notes"], embedder)
        query, text = embedder.embed(["Quo vadis, domine?", "PLA is annealed in an oven."])
        assert float(query @ text) > 2 * MIN_SIMILARITY * 0.9
        assert kb.retrieve("Quo vadis, domine?", embedder, mode="semantic") == []
        assert kb.retrieve("PLA is annealed in an oven.", embedder, mode="semantic")
