"""The knowledge base with the real default embedder, on the handbook."""

import subprocess
import sys

import numpy as np
import pytest

from localrag.engine.loading import open_model
from localrag.errors import KnowledgeBaseError
from localrag.kb import KnowledgeBase
from localrag.kb.chunking import cut
from localrag.kb.ingest import min_similarity
from localrag.kb.readers import read
from localrag.kb.retrieve import MIN_SIMILARITY, MODES
from localrag.question import Question
from localrag.session import Session
from localrag.session.exhaustive import ask_all
from localrag.types import SamplingParams

pytestmark = pytest.mark.model

NOTES = (
    "Nylon PA6 is dried at 80 °C for twelve hours before it is printed.",
    "Nylon PA12 is dried at 70 °C for eight hours; a vacuum shortens it to four.",
    "Dried nylon is kept in a box with silica gel, since it takes up water within a day.",
)
HARD = {
    "cjk.md": "# 材料\n\n" + "退火可以提高耐热性。打印温度是多少？" * 60,
    "code.py": "def f(x):\n    return {'a': [x ** 2, None]}\n\n" * 80,
    "base64.txt": "aGVsbG8gd29ybGQhIQ" * 2000,
    "line.txt": "heat bed nozzle layer " * 1500,
    "emoji.txt": "👩‍🔬🔥🇩🇪 é à ñ Ω ≈ — " * 300,
}


def test_vectors_are_unit_float32(embedder):
    assert (embedder.dim, embedder.max_tokens) == (384, 254)
    vectors = embedder.embed(["heat", "the bed is hot", "heat"])
    assert (vectors.dtype, vectors.shape) == (np.float32, (3, 384))
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    assert vectors[0] @ vectors[2] == pytest.approx(1, abs=1e-5)
    assert embedder.embed([]).shape == (0, 384)


def test_the_longest_text_is_embedded_to_its_last_token_and_a_longer_one_refused(embedder):
    assert embedder.count("heat " * 300) == 300
    one, other = embedder.embed(["heat " * 253 + "bed", "heat " * 254])
    assert abs(float(one @ other)) < 0.99999  # the last token counts
    with pytest.raises(KnowledgeBaseError, match="255 tokens"):
        embedder.embed(["heat " * 255])


def test_no_passage_of_any_script_is_too_long(embedder):
    for name, text in HARD.items():
        reading = read(name, text.encode())
        passages = cut(reading, embedder)
        assert max(embedder.count(passage.embedded) for passage in passages) <= embedder.max_tokens
        assert all(reading.text[passage.start : passage.end] == passage.text for passage in passages)
    embedder.embed([passage.embedded for passage in cut(read("cjk.md", HARD["cjk.md"].encode()), embedder)])


@pytest.mark.parametrize(
    ("question", "source", "words"),
    [
        ("Can I wash a printed PLA cup in the dishwasher?", "guides/food-contact.md", "dishwasher"),
        ("What dissolves HIPS supports, and how long does it take?", "materials/hips.md", "imonene"),
        ("Why does PETG tear pieces out of a glass bed?", "materials/petg.md", "glass"),
        ("Can I print carbon-fibre nylon with a brass nozzle?", "materials/carbon-fibre-filaments.md", "brass"),
        ("Which filament should I use for a bracket that stays in the sun for years?", "guides/outdoor-use.md", "ASA"),
    ],
)
def test_the_page_that_answers_is_among_the_first(handbook, embedder, question, source, words):
    hits = handbook.retrieve(question, embedder, k=4)
    assert any(hit.chunk.source == f"handbook/{source}" and words in hit.chunk.text for hit in hits)
    assert all(hit.score == sum(hit.contributions.values()) for hit in hits)


@pytest.mark.parametrize(
    "question", ["What is the capital of France?", "Who wrote Hamlet?", "How do I bake sourdough bread?", "asdf qwer zxcv"]
)
def test_a_question_about_something_else_finds_nothing(handbook, embedder, question):
    assert all(handbook.retrieve(question, embedder, mode=mode) == [] for mode in MODES)


def test_the_threshold_is_the_one_that_was_measured_on_other_questions(embedder):
    assert min_similarity(embedder) == pytest.approx(MIN_SIMILARITY, abs=0.01)


def test_it_needs_no_network_and_shows_no_progress(embedder):
    code = (
        "import socket, sys; from pathlib import Path; from localrag.kb.embedder import SentenceTransformerEmbedder as E\n"
        "sys.addaudithook(lambda event, args: sys.exit(f'{event} {args}') if event in ('socket.connect', 'socket.getaddrinfo') else None)\n"
        "print(E(Path(sys.argv[1])).embed(['heat']).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(embedder.folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 384)\n", "")


def test_all_that_matches_is_read_in_passes_of_real_notes(embedder, model_path, tmp_path):
    """In a small window: each pass keeps within it, each fact is of a passage of its pass, and what is cited was supplied."""
    for number, note in enumerate(NOTES):
        (tmp_path / f"note{number}.md").write_text(note, encoding="utf-8")
    with KnowledgeBase.open(tmp_path / "kb", "notes", create=True) as kb, open_model(model_path, name="default") as engine:
        kb.ingest([tmp_path], embedder)
        session = Session(engine, knowledge_bases=[kb], embedder=embedder, n_ctx=340)
        answer = ask_all(session, Question.of("How is nylon dried?", sampling=SamplingParams(max_tokens=16)))
        matching = {hit.label for hit in session.retrieve("How is nylon dried?", top_k=100)}
    coverage = answer.to_dict()["coverage"]
    assert coverage["chunks_read"] == len(matching) > 1
    assert len(coverage["passes"]) >= 2
    assert all(each["prompt_tokens"] + each["completion_tokens"] <= 340 for each in coverage["passes"])
    assert {hit.label for hit in answer.hits} <= matching
    assert sum(entry.used for entry in answer.ledger.entries if entry.name != "answer") == answer.prompt_tokens
