"""Another embedder for a knowledge base: its vectors are built beside those in use, and switched to in one transaction."""

import json
import os
import shutil
import signal
import threading
from itertools import count
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from localrag.cli import main
from localrag.engine.convert import convert
from localrag.errors import KnowledgeBaseBusyError, KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb import KnowledgeBase
from localrag.question import Question
from localrag.server.app import make_app
from localrag.server.routing import ServerState
from localrag.session import Session
from localrag.settings import Settings
from tests.bert_folders import write_folder
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.servers import chunk_ids, contents, faults, open_kb
from tests.kb.support import write_notes

OLD, NEW = (HashEmbedder(dim=dim, fingerprint=name) for dim, name in ((64, "old"), (48, "new")))
NUM_NOTES, QUERY = 6, "zebra1x2"
SENTENCE = f"Part 2. The word of note 1 part 2 is {QUERY}. It stands among others."


@pytest.fixture
def folder(tmp_path):
    write_notes(tmp_path / "notes", NUM_NOTES)
    return tmp_path / "notes"


@pytest.fixture
def base(any_home, folder):
    """The notes, indexed with the old embedder."""
    with open_kb(any_home, "notes", create=True) as kb:
        kb.ingest([folder], OLD)
        kb.retrieve(QUERY, OLD)  # writes the file of vectors
        yield kb


def found(kb, embedder):
    return [(hit.chunk.id, round(hit.score, 6)) for hit in kb.retrieve(QUERY, embedder)]


def is_whole(kb, embedder, other):
    """What it holds is what one embedder made, wholly, and the other one is refused."""
    assert kb.embedder == (embedder.fingerprint, embedder.dim)
    assert faults(kb) == []
    assert QUERY in kb.retrieve(SENTENCE, embedder, mode="semantic")[0].chunk.text
    with pytest.raises(KnowledgeBaseError, match="indexed with another embedder") as caught:
        kb.retrieve(QUERY, other)
    assert "localrag kb reembed" in caught.value.hint


def test_the_new_vectors_are_those_of_a_fresh_build_and_passages_stay_what_they_are(any_home, base, folder):
    ids, generation = chunk_ids(base), base._store.generation
    one = base.retrieve(QUERY, OLD)[0].chunk.id
    base.mark([one], useful=True)
    told = []
    result = base.reembed(NEW, lambda done, total: told.append((done, total)))
    assert result.to_dict() == {"num_chunks": base.num_chunks, "num_embedded": base.num_chunks, "dim": 48}
    assert told == [(base.num_chunks, base.num_chunks)]
    is_whole(base, NEW, OLD)
    assert base._store.generation == generation + 1
    assert chunk_ids(base) == ids
    assert [(chunk.id, feedback.useful) for chunk, feedback in base.feedback()] == [(one, 1)]
    assert base.verify().is_sound
    with open_kb(any_home, "fresh", create=True) as fresh:
        fresh.ingest([folder], NEW)
        assert contents(base) == contents(fresh)
        assert base._store.min_similarity == fresh._store.min_similarity


def test_the_same_embedder_changes_nothing_and_back_again_is_as_before(base):
    before, generation = found(base, OLD), base._store.generation
    assert base.reembed(OLD).num_embedded == 0
    assert base._store.generation == generation
    base.reembed(NEW)
    base.reembed(OLD)
    is_whole(base, OLD, NEW)
    assert found(base, OLD) == before
    assert base.verify().is_sound


def test_documents_are_indexed_with_the_new_embedder_afterwards(base, folder):
    base.reembed(NEW)
    with pytest.raises(KnowledgeBaseError, match="another embedder"):
        base.ingest([folder], OLD)
    write_notes(folder, NUM_NOTES + 1)
    assert base.ingest([folder], NEW).added == 1
    is_whole(base, NEW, OLD)


def test_others_read_the_old_state_until_the_new_one_is_there(any_home, base):
    with open_kb(any_home, "notes") as reader:
        seen = []
        base.reembed(NEW, lambda *_: seen.append(found(reader, OLD)))
        assert seen == [seen[0]]
        assert seen[0]
        is_whole(reader, NEW, OLD)


class Interrupted(HashEmbedder):
    """Fails when it is asked for the vectors of passages for the nth time; the pairs that calibrate it are no passages."""

    def __init__(self, fails_at):
        super().__init__(dim=NEW.dim, fingerprint=NEW.fingerprint)
        self.fails_at, self.passages = fails_at, 0

    def embed(self, texts):
        if any("zebra" in text for text in texts):
            self.passages += 1
            if self.passages == self.fails_at:
                raise KeyboardInterrupt
        return super().embed(texts)


def test_an_interrupted_run_changes_nothing_and_the_next_goes_on(base, folder):
    write_notes(folder, 100)
    base.ingest([folder], OLD)
    with pytest.raises(KeyboardInterrupt):
        base.reembed(Interrupted(3))
    is_whole(base, OLD, NEW)
    base.ingest([folder], OLD)  # goes on with the old one, whatever is beside it
    other = HashEmbedder(dim=32, fingerprint="third")
    result = base.reembed(NEW)
    assert result.num_embedded == base.num_chunks - 256
    is_whole(base, NEW, OLD)
    with pytest.raises(KeyboardInterrupt):
        base.reembed(Interrupted2(2))
    assert base.reembed(other).num_embedded == base.num_chunks  # what was begun with another embedder is of no use
    is_whole(base, other, NEW)


class Interrupted2(Interrupted):
    """The same of a fourth embedder."""

    fingerprint = "fourth"

    def __init__(self, fails_at):
        super().__init__(fails_at)
        self.fingerprint = "fourth"


def test_a_passage_that_is_too_long_is_an_error_and_changes_nothing(base):
    short = HashEmbedder(dim=48, max_tokens=8, fingerprint="short")
    with pytest.raises(KnowledgeBaseError, match="the embedder takes at most 8") as caught:
        base.reembed(short)
    assert "unchanged" in caught.value.hint
    is_whole(base, OLD, NEW)


def test_one_that_is_not_there_or_being_indexed_is_said(any_home, base):
    with open_kb(any_home, "none", create=True) as kb, pytest.raises(KnowledgeBaseNotFoundError):
        kb.reembed(NEW)
    with open_kb(any_home, "notes") as other, base._location.taken(wait_s=0), pytest.raises(KnowledgeBaseBusyError):
        other.reembed(NEW, wait_s=0)


# --- kills


def killed(work):
    """Run this in a fork, which may kill itself; whether it did."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_any_statement_the_old_or_the_new_state_is_whole(tmp_path, folder):
    with KnowledgeBase.open(tmp_path / "first", "notes", create=True) as kb:
        kb.ingest([folder], OLD)
        expected = {OLD.fingerprint: contents(kb)}
        kb.retrieve(QUERY, OLD)
    shutil.copytree(tmp_path / "first", tmp_path / "done")
    with KnowledgeBase.open(tmp_path / "done", "notes") as kb:
        kb.reembed(NEW)
        expected[NEW.fingerprint] = contents(kb)
    states = []
    for last in count(1):
        home = tmp_path / str(last)
        shutil.copytree(tmp_path / "first", home)

        def work(home=home, last=last):
            with KnowledgeBase.open(home, "notes") as kb:
                numbers = count(1)
                kb._store._db.set_trace_callback(lambda _: next(numbers) == last and kill())
                kb.reembed(NEW)

        was_killed = killed(work)
        with KnowledgeBase.open(home, "notes") as kb:
            states.append(kb.embedder[0])
            assert contents(kb) == expected[states[-1]]
            is_whole(kb, *((OLD, NEW) if states[-1] == "old" else (NEW, OLD)))
            kb.reembed(NEW)
            assert contents(kb) == expected[NEW.fingerprint]
            assert kb.verify().is_sound
        shutil.rmtree(home)
        if not was_killed:
            break
    assert len(states) > 20
    assert states == sorted(states, reverse=True)  # old until some statement, new from then on
    assert set(states) == {"old", "new"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_while_it_switches_the_old_or_the_new_state_is_whole(any_home, base):
    for at, delay_s in enumerate((0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03)):
        embedder, other = (NEW, OLD) if at % 2 == 0 else (OLD, NEW)

        def work(embedder=embedder, delay_s=delay_s):
            with open_kb(any_home, "notes") as kb:
                kb.reembed(embedder, lambda *_: threading.Timer(delay_s, kill).start())

        killed(work)
        with open_kb(any_home, "notes") as kb:
            is_now = kb.embedder[0]
            is_whole(kb, *((embedder, other) if is_now == embedder.fingerprint else (other, embedder)))
            kb.reembed(embedder)
            is_whole(kb, embedder, other)


# --- the command line


def test_the_command_switches_and_later_searches_use_the_embedder_of_the_knowledge_base(home, tmp_path, folder, capsys, monkeypatch):
    file = tmp_path / "tiny.gguf"
    convert(write_folder(tmp_path / "tiny"), file)
    monkeypatch.chdir(tmp_path)
    Path("models.toml").write_text(
        f'default_embedder = "told"\n[embedders.plain]\npath = "{file}"\n'
        f'[embedders.told]\npath = "{file}"\nquery_prefix = "query: "\npassage_prefix = "passage: "\n'
    )
    assert main(["index", str(folder), "--kb", "notes"]) == 0
    capsys.readouterr()
    assert main(["kb", "reembed", "notes", "--embedder", "plain", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {
        "kb": "notes",
        "embedder": "plain",
        "num_chunks": result["num_chunks"],
        "num_embedded": result["num_embedded"],
        "dim": 64,
    }
    assert result["num_embedded"] >= 18
    assert main(["kb", "reembed", "notes", "--embedder", "plain"]) == 0
    assert "notes already uses plain" in capsys.readouterr().err
    assert main(["search", "zebra1x2", "--kb", "notes"]) == 0
    assert main(["ask", "What is zebra1x2?", "--kb", "notes", "--model", "echo", "--unanswerable", "answer"]) == 0
    write_notes(folder, NUM_NOTES + 1)
    assert main(["index", str(folder), "--kb", "notes"]) == 0
    assert main(["kb", "verify", "notes"]) == 0
    assert main(["kb", "reembed", "none", "--embedder", "plain"]) == 6
    assert main(["kb", "reembed", "notes", "--embedder", "no-such"]) == 4


def test_knowledge_bases_of_two_embedders_are_used_in_one_process(home, tmp_path, folder, monkeypatch):
    for name in ("first", "second"):
        convert(write_folder(tmp_path / name), tmp_path / f"{name}.gguf")
    monkeypatch.chdir(tmp_path)
    Path("models.toml").write_text(
        'default_embedder = "first"\n[embedders.second]\npath = "second.gguf"\n'
        '[embedders.first]\npath = "first.gguf"\nquery_prefix = "query: "\npassage_prefix = "passage: "\n'
    )
    assert main(["index", str(folder), "--kb", "notes"]) == 0
    assert main(["index", str(folder), "--kb", "others"]) == 0
    assert main(["kb", "reembed", "others", "--embedder", "second"]) == 0

    with Session.open("echo", kbs="notes", settings=Settings(home=home)) as session:
        for kb in ("others", "notes", "others"):
            answer = session.ask(Question.of(SENTENCE, kbs=kb, unanswerable="answer"))
            assert {hit.chunk.kb for hit in answer.hits} == {kb}

    client = TestClient(make_app(ServerState(settings=Settings(home=home))), base_url="http://127.0.0.1")
    for index in ("others", "notes"):
        stored = client.post("/index", json={"index_name": index, "documents": [{"doc_id": "owl", "text": "An owl sleeps by day."}]})
        assert stored.status_code == 200, stored.text
        results = client.post("/retrieve", json={"index_name": index, "query": SENTENCE}).json()["results"]
        assert any(QUERY in each["text"] for each in results)
