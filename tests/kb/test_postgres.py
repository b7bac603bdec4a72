"""What is only so of a knowledge base on a server; what it has in common with one in a folder is tested together with that."""

import signal
import subprocess
import sys
import traceback
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.errors import KnowledgeBaseError, KnowledgeBaseNotFoundError
from localrag.kb import KnowledgeBase
from localrag.kb.chunking import Passage
from localrag.kb.names import MAX_NAME_CHARS, parse_address, shown
from localrag.kb.protocols import DocumentRow
from localrag.kb.query import Term
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.servers import PASSWORD, USER, ServerHome, chunk_ids, contents, faults, open_kb, opened_store
from tests.kb.support import write_notes
from tests.pages import Step, check, environment, pages, run_in_one_process, workplace

DIM = 16
WAIT_S = 30.0


@pytest.fixture
def kb_dir(server):
    return ServerHome(server)


@pytest.fixture
def store(kb_dir):
    with closing(opened_store(kb_dir.address("store"), create=True)) as store:
        yield store


@contextmanager
def admin(server, database="postgres"):
    import psycopg  # noqa: PLC0415  # there is none where there is no server

    with closing(psycopg.connect(server.url(database=database), autocommit=True)) as db:
        yield db


def assert_hushed(error, password=PASSWORD):
    said = "".join(traceback.format_exception(error)) + repr(error.to_dict()) + str(error) + repr(error)
    assert password not in said
    assert quote(password, safe="") not in said
    assert "\n" not in error.message
    assert error.exit_code == 6
    assert error.hint


# Addresses.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ann@host:5433/db#notes", "postgresql://ann@host:5433/db#notes"),
        ("postgres://ann:secret@host/db?kb=notes", "postgresql://ann@host/db#notes"),
        ("postgresql://host/db", "postgresql://host/db#default"),
        ("postgresql:///db?host=/run/pg&password=secret&sslmode=require", "postgresql:///db?host=/run/pg&sslmode=require#default"),
        ("postgresql://ann:se%40cret@[::1]:5432,b:5433/db#a-b", "postgresql://ann@[::1]:5432,b:5433/db#a-b"),
    ],
)
def test_an_address_is_shown_without_its_password(text, shown):
    address = parse_address(text)
    assert address.shown == shown
    assert parse_address(shown).shown == shown
    assert "secret" not in repr(address)


def test_text_that_repeats_an_address_is_hushed():
    address = parse_address("postgresql://ann:se%40cret@host/db?sslpassword=other")
    assert address.redact("no se%40cret, no se@cret, no other") == "no …, no …, no …"


def test_what_a_person_gave_is_shown_without_its_password():
    assert shown("notes") == "notes"
    assert shown("postgresql://ann:secret@host/db") == "postgresql://ann@host/db#default"
    assert shown("postgresql://ann:sec#ret@host/db") == "a PostgreSQL server"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://ann:sec/ret@host/db",
        "postgresql://ann:sec?ret@host/db",
        "postgresql://ann:sec#ret@host/db",
        "postgresql://ann@host:port/db",
        "postgresql://[::1/db",
        "postgresql://ann:secret@host/db#Not-a-name",
        f"postgresql://ann:secret@host/db#{'a' * (MAX_NAME_CHARS + 1)}",
        "postgresql://ann:secret@host/db?kb=one#two",
        "postgresql://ann:secret@host/db?ret=1",
        "postgresql://ann:secret%@host/db",
        "postgresql://ann:secret\udce9@host/db",
    ],
)
def test_what_is_no_address_is_refused_without_repeating_it(text):
    with pytest.raises(KnowledgeBaseError) as caught:
        KnowledgeBase.open(Path(), text)
    assert_hushed(caught.value, "sec")
    assert "ret@" not in str(caught.value)


@given(st.text(min_size=4, max_size=20).filter(lambda text: text.strip() and text not in "postgresql://ann@host/db#default"))
def test_no_password_is_shown(password):
    raw = quote(password.encode("utf-8", "replace"), safe="")
    address = parse_address(f"postgresql://ann:{raw}@host/db")
    assert address.shown == "postgresql://ann@host/db#default"
    assert raw not in repr(address).replace(address.shown, "")


# Errors.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"password": "wrong"}, "refuses the password"),
        ({"password": None}, "refuses the password"),
        ({"database": "nowhere"}, "does not exist"),
    ],
)
def test_a_server_that_does_not_let_us_in(server, change, reason, monkeypatch, tmp_path):
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    with pytest.raises(KnowledgeBaseError, match=reason) as caught:
        KnowledgeBase.open(Path(), server.url(**change))
    assert_hushed(caught.value)


def test_a_server_that_is_not_there():
    with pytest.raises(KnowledgeBaseError, match="cannot be reached") as caught:
        KnowledgeBase.open(Path(), f"postgresql://ann:{quote(PASSWORD, safe='')}@127.0.0.1:1/db")
    assert_hushed(caught.value)


def test_the_password_may_come_from_elsewhere(server, kb_dir, monkeypatch, tmp_path):
    address = parse_address(kb_dir.address("x")).shown
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    KnowledgeBase.open(Path(), address, create=True).close()
    monkeypatch.delenv("PGPASSWORD")
    file = tmp_path / "pgpass"
    file.write_text(f"127.0.0.1:{server.port}:*:{USER}:{PASSWORD}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    KnowledgeBase.open(Path(), address, create=True).close()


def test_a_database_without_pgvector(server):
    with admin(server) as db:
        db.execute(f"CREATE ROLE poor LOGIN PASSWORD '{PASSWORD}'")
        db.execute("CREATE DATABASE plain OWNER poor")
    with pytest.raises(KnowledgeBaseError, match="lacks pgvector") as caught:
        opened_store(server.url(user="poor", database="plain"), create=True)
    assert "CREATE EXTENSION vector" in caught.value.hint
    assert_hushed(caught.value)
    with admin(server, "plain") as db:
        assert db.execute("SELECT count(*) FROM pg_namespace WHERE starts_with(nspname, 'localrag_')").fetchone() == (0,)


def test_without_the_extra_the_way_out_is_said():
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from pathlib import Path; from localrag.errors import KnowledgeBaseError; from localrag.kb import KnowledgeBase\n"
        "try: KnowledgeBase.open(Path(), 'postgresql://ann:secret@host/db')\n"
        "except KnowledgeBaseError as error: print(error.exit_code, error, error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("6 ")
    assert 'pip install "localrag[postgres]"' in done.stdout
    assert "secret" not in done.stdout + done.stderr


def test_a_knowledge_base_from_a_newer_localrag_is_left_as_it_is(kb, kb_dir):
    kb._store._db.rows("UPDATE state SET version = 99")
    with pytest.raises(KnowledgeBaseError, match="newer localrag"):
        open_kb(kb_dir, "notes")


# Knowledge bases.


def test_a_name_is_the_plain_one_and_the_address_holds_no_password(kb, kb_dir, embedder):
    (hit,) = kb.retrieve("zebra1x1", embedder, k=1, mode="keyword")
    assert hit.chunk.kb == kb.name == parse_address(kb_dir.address("notes")).name
    assert kb.address.endswith(f"#{kb.name}")
    assert quote(PASSWORD, safe="") not in kb.address


def test_an_unknown_name_shows_the_nearest_and_the_way_out(kb, kb_dir):
    with pytest.raises(KnowledgeBaseNotFoundError, match=f"Did you mean .*{kb.name}") as caught:
        open_kb(kb_dir, "note")
    assert "localrag index PATH --kb postgresql://" in caught.value.hint
    assert_hushed(caught.value)


def test_another_embedder_is_named_by_the_address(kb, notes):
    with pytest.raises(KnowledgeBaseError, match="another embedder") as caught:
        kb.ingest([notes], HashEmbedder(fingerprint="other"))
    assert_hushed(caught.value)


def test_remove(kb, kb_dir):
    assert kb_dir.exists()
    kb.remove()
    assert not kb_dir.exists()
    assert kb.num_documents == 0
    with pytest.raises(KnowledgeBaseNotFoundError):
        open_kb(kb_dir, "notes")


def test_export_is_refused_with_a_way_out(kb, tmp_path):
    with pytest.raises(KnowledgeBaseError, match="on a server") as caught:
        kb.export(tmp_path / "notes.zip")
    assert "pg_dump" in caught.value.hint
    assert_hushed(caught.value)


def test_a_whole_one_is_sound(kb, embedder):
    kb.retrieve("zebra", embedder)
    found = kb.verify()
    assert (found.problems, found.repaired, found.changed, found.missing) == ((), (), (), ())
    assert (found.num_documents, found.num_chunks) == (4, 12)


def test_what_is_wrong_is_made_again(kb, notes, embedder):
    before = contents(kb)
    kb._store._db.rows("UPDATE chunks SET words = '' WHERE id = 3")
    assert not kb.retrieve("zebra0x2", None, mode="keyword")
    assert kb.verify().repaired == ("words was rebuilt",)
    assert kb.retrieve("zebra0x2", None, mode="keyword")
    for statement in (
        "DELETE FROM vectors WHERE chunk_id = 1",
        "UPDATE vectors SET embedding = embedding * embedding WHERE chunk_id = 5",
        "UPDATE chunks SET text = 'other' WHERE id = 9",
    ):
        kb._store._db.rows(statement)
    found = kb.verify()
    assert (found.is_sound, found.num_chunks) == (True, 9)
    result = kb.ingest([notes], embedder)
    assert (result.updated, result.unchanged, result.num_embedded) == (3, 1, 3)
    assert contents(kb) == before
    assert faults(kb) == []


def test_a_copy_elsewhere_of_a_file_of_another_machine_is_a_document_of_its_own(kb, tmp_path, embedder):
    """The other machine's file is not there, and that does not mean that it was renamed."""
    there = dict(kb._store.source_paths())
    with kb._store.writing():
        kb._store.move_document(1, "/on/another/machine.md", "machine.md")
    write_notes(tmp_path / "copy", 1)
    result = kb.ingest([tmp_path / "copy"], embedder)
    assert (result.added, result.renamed, result.num_embedded) == (1, 0, 0)
    assert len(kb.sources()) == len(there) + 1


# Several at once.

CHILD = """
import sys, time
from pathlib import Path
from localrag.kb import KnowledgeBase
from localrag.kb.protocols import DocumentRow
from localrag.kb.names import shown
from tests.kb.hash_embedder import HashEmbedder
what, address, folder = sys.argv[1:]
with KnowledgeBase.open(Path(), address, create=True) as kb:
    if what == "index":
        kb.ingest([Path(folder)], HashEmbedder())
    elif what == "hold":
        with kb._location.taken(wait_s=0):
            print("held", flush=True)
            time.sleep(60)
    else:
        with kb._store.writing():
            kb._store.remove_documents(list(kb._store.documents()))
            print("held", flush=True)
            time.sleep(60)
"""


@contextmanager
def child(what, kb_dir, folder=""):
    command = [sys.executable, "-c", CHILD, what, kb_dir.address("notes"), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_second_indexer_waits_until_the_first_is_killed(kb, kb_dir, notes, embedder):
    with child("hold", kb_dir) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(KnowledgeBaseError, match="Another localrag") as caught:
            kb.ingest([notes], embedder, wait_s=0.1)
        assert_hushed(caught.value)
        waited = []
        result = kb.ingest([notes], embedder, wait_s=WAIT_S, on_wait=lambda: (waited.append(1), process.send_signal(signal.SIGKILL)))
    assert (waited, result.unchanged) == ([1], 4)


def test_a_transaction_whose_writer_is_killed_leaves_nothing(kb, kb_dir, notes, embedder):
    before, generation = contents(kb), kb._store.generation
    with child("write", kb_dir) as process:
        assert process.stdout.readline() == "held\n"
        assert contents(kb) == before
        process.kill()
        process.wait()
    write_notes(notes, 5)
    assert kb.ingest([notes], embedder, wait_s=WAIT_S).added == 1
    assert {path: rows for path, rows in contents(kb).items() if path in before} == before
    assert kb._store.generation == generation + 1
    assert faults(kb) == []


def test_two_indexers_at_once_make_what_one_makes(kb_dir, tmp_path, embedder):
    write_notes(tmp_path / "notes", 12)
    with child("index", kb_dir, tmp_path / "notes") as one, child("index", kb_dir, tmp_path / "notes") as other:
        assert (one.wait(), other.wait()) == (0, 0)
    with open_kb(kb_dir, "notes") as kb, open_kb(kb_dir, "alone", create=True) as alone:
        alone.ingest([tmp_path / "notes"], embedder)
        assert contents(kb) == contents(alone)
        assert sorted(one for ids in chunk_ids(kb).values() for one in ids) == list(range(1, 37))
        assert faults(kb) == []


def test_a_connection_that_ends_is_one_clear_error(kb, server, embedder):
    with admin(server) as db:
        db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'localrag'")
    with pytest.raises(KnowledgeBaseError, match="cannot be used") as caught:
        kb.retrieve("zebra", embedder)
    assert_hushed(caught.value)


# Text and vectors.


def put(store, texts, vectors=None):
    with store.writing():
        store.claim_embedder("f" * 64, DIM)
        for at, text in enumerate(texts):
            passage = Passage(0, len(text), text)
            vector = np.eye(DIM, dtype="<f4")[at % DIM] if vectors is None else vectors[at]
            store.put_document(DocumentRow(f"/{at}", f"{at}", "", 1), [passage], {passage.sha256: vector.tobytes()})


@pytest.mark.parametrize(
    "text",
    [
        "x" * 5000,
        "a-b/c.d:e@f.org http://x.y/z?q=1#r 1e5 -3.14 0x1f",
        "\u0301\u0302",
        "½ x² ﬁ",
        "İSTANBUL Ⅷ",
        "'quoted' \\ back",
        "&|!<->:*()",
    ],
)
def test_any_text_is_found_by_its_words(store, text):
    put(store, [text, "other"])
    from localrag.kb.query import parse as asked  # noqa: PLC0415  # a name of its own here

    wanted = [term for term in asked(text).keyword if any(char.isascii() and char.isalnum() for char in term.text)]
    for (num, found), term in zip(store.keyword_holders(wanted, [1, 2]), wanted, strict=True):
        assert (num, found) == (1, [1]), term
    assert store.full_text_is_sound("words")


def test_accents_do_not_matter_and_rare_words_weigh_more(store):
    put(store, ["Café oven", "oven oven", "oven", "crème brûlée"])
    assert [one for one, _ in store.keyword_ids([Term("cafe")], 9)] == [1]
    assert store.keyword_ids([Term("brûlée"), Term("oven")], 9)[0][0] == 4
    assert store.keyword_ids([Term("cafe"), Term("oven")], 9)[0][0] == 1


def clustered(num, seed=1):
    random = np.random.default_rng(seed)
    centres = random.standard_normal((40, DIM))
    vectors = centres[random.integers(0, 40, num)] + 0.4 * random.standard_normal((num, DIM))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("<f4")


def test_many_vectors_are_searched_by_a_graph_whose_recall_was_measured(store):
    from localrag.kb.postgres.search import MIN_RECALL, PostgresIndex, index_problems, maintain_index  # noqa: PLC0415  # its library is an extra

    vectors = clustered(1500)
    put(store, [f"text {at}" for at in range(len(vectors))], vectors)
    queries = clustered(20, seed=2)
    with store.reading():
        index = PostgresIndex(store._db)
        exact = [index.search(query, 10) for query in queries]
    for query, found in zip(queries, exact, strict=True):
        scores = vectors @ query
        assert [one for one, _ in found] == (np.lexsort((np.arange(len(scores)), -scores))[:10] + 1).tolist()
    maintain_index(store._db, store._schema, min_chunks=1000)
    ef_search, recall = store._db.rows("SELECT ef_search, recall FROM state")[0]
    assert ef_search is not None
    assert recall >= MIN_RECALL
    with store.reading():
        index = PostgresIndex(store._db)
        found = [index.search(query, 10) for query in queries]
        assert [one for one, _ in index.search(queries[0], 3, among=[7, 5, 9999, 5])] == sorted(
            (5, 7), key=lambda one: -float(vectors[one - 1] @ queries[0])
        )
        assert index.similarities(queries[0], [5, 9999]) == {5: pytest.approx(float(vectors[4] @ queries[0]), abs=1e-6)}
    shared = sum(len({one for one, _ in a} & {one for one, _ in b}) for a, b in zip(exact, found, strict=True))
    assert shared >= MIN_RECALL * 10 * len(queries)
    assert index_problems(store._db, store._schema) == []
    store._db.rows("SET enable_seqscan = off")
    nearest = f"embedding::vector({DIM}) <#> (SELECT embedding::vector({DIM}) FROM vectors WHERE chunk_id = 1)"
    plan = "\n".join(line for (line,) in store._db.rows(f"EXPLAIN SELECT chunk_id FROM vectors ORDER BY {nearest} LIMIT 10"))
    assert "vectors_nearest" in plan
    with store.writing():
        store.remove_documents([f"/{at}" for at in range(1495)])
    with store.reading():
        assert len(PostgresIndex(store._db).search(queries[0], 10)) == 5


def test_a_graph_that_finds_too_little_is_removed(store):
    from localrag.kb.postgres.search import index_problems, maintain_index  # noqa: PLC0415  # its library is an extra

    put(store, [f"text {at}" for at in range(300)], clustered(300))
    maintain_index(store._db, store._schema, min_chunks=100)
    store._db.rows("UPDATE state SET ef_search = 1")
    (problem,) = index_problems(store._db, store._schema)
    assert "vectors_nearest" in problem
    assert store._db.rows("SELECT ef_search FROM state") == [(None,)]
    assert store._db.rows("SELECT 1 FROM pg_indexes WHERE indexname = 'vectors_nearest' AND schemaname = %s", (store._schema,)) == []


# The page that tells people of it.


def test_the_commands_of_its_page_run(server, tiny_catalogue, notes, tmp_path):
    """With this server in the place of the one that the page names, and with the echo."""
    shown = [line for text in pages()["docs/how-to/postgresql.md"].code("sh") for line in text.splitlines() if line.startswith("localrag ")]
    here = server.url().removeprefix("postgresql://")
    commands = [line.replace("ann@db.example/notes", here).replace("/data/notes", str(notes)) for line in shown]
    assert all(here in command for command in commands)
    assert {command.split()[1] for command in commands} == {"index", "search", "ask"}
    steps = [Step(f"{command} --model echo" if " ask " in command else command) for command in commands]
    check(steps, run_in_one_process(steps, workplace(tmp_path), environment(tmp_path / "home", tiny_catalogue)))
