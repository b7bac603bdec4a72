"""The routes of indexes, each with what it answers and what it refuses."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.kb import KnowledgeBase
from localrag.kb.database import taken
from localrag.kb.filters import MAX_METADATA_BYTES, MAX_METADATA_DEPTH
from localrag.server.app import make_app
from localrag.server.routing import Embedders, ServerState
from localrag.settings import Settings
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.support import write_notes
from tests.kb.test_texts import JSON, METADATA, TEXTS

DOCUMENTS = [
    {"text": "This is a test document", "metadata": {"filename": "test.txt", "branch": "main"}},
    {"text": "Another text that is tested", "metadata": {"filename": "main.py", "branch": "main", "n": 1}},
]
HOST = "http://127.0.0.1"


@pytest.fixture
def shared(tmp_path):
    return ServerState(settings=Settings(home=tmp_path / "home"), embedder=HashEmbedder())


@pytest.fixture
def client(shared):
    """Whatever it is answered names no path of this machine."""

    def check(response):
        assert str(shared.settings.home) not in response.read().decode()

    client = TestClient(make_app(shared), base_url=HOST, raise_server_exceptions=False)
    client.event_hooks["response"] = [check]
    return client


@pytest.fixture
def ids(client):
    """Two documents in the index "book"."""
    response = client.post("/index", json={"index_name": "book", "documents": DOCUMENTS})
    assert response.status_code == 200
    return [each["doc_id"] for each in response.json()]


def _listed(client, **params):
    return client.get("/indexes/book/documents", params=params).json()


def _detail(response, status):
    assert (response.status_code, list(response.json())) == (status, ["detail", "error"])
    return response.json()["detail"]


def test_an_index_is_made_of_texts(client):
    response = client.post("/index", json={"index_name": "book", "documents": [*DOCUMENTS, {"text": "é"}, {"text": "x", "metadata": None}]})
    assert response.status_code == 200
    first, _, third, fourth = response.json()
    assert first == {
        "doc_id": hashlib.sha256(b"This is a test document").hexdigest(),
        "text": "This is a test document",
        "metadata": {"filename": "test.txt", "branch": "main"},
        "hash_value": first["hash_value"],
        "is_truncated": False,
    }
    assert (third["doc_id"], third["metadata"], fourth["metadata"]) == (hashlib.sha256("é".encode()).hexdigest(), {}, {})
    assert response.headers["content-type"] == "application/json"
    assert b'":' in response.content
    assert b'": ' not in response.content
    assert client.get("/indexes").json() == ["book"]
    assert _listed(client)["total_items"] == 4


def test_an_id_can_be_given(client):
    document = {"doc_id": "mine", "text": "One."}
    assert client.post("/index", json={"index_name": "book", "documents": [document]}).json()[0]["doc_id"] == "mine"
    client.post("/index", json={"index_name": "book", "documents": [{**document, "text": "Two."}]})
    assert [(each["doc_id"], each["text"]) for each in _listed(client)["documents"]] == [("mine", "Two.")]


def test_no_documents_make_no_index(client):
    assert client.post("/index", json={"index_name": "book", "documents": []}).json() == []
    assert client.get("/indexes").json() == []


def test_looking_makes_nothing(client, shared):
    for path in ("/indexes", "/indexes/book/documents", "/health", "/openapi.json"):
        client.get(path)
    client.post("/retrieve", json={"index_name": "book", "query": "x"})
    assert not shared.settings.home.exists()


def test_pages_of_documents(client, ids):
    long = "word " * 400
    client.post("/index", json={"index_name": "book", "documents": [{"text": long}]})
    whole = _listed(client, max_text_length=10_000)
    assert (whole["count"], whole["total_items"], [each["is_truncated"] for each in whole["documents"]]) == (3, 3, [False] * 3)
    assert whole["documents"][2]["text"] == long
    cut = _listed(client)
    assert (cut["documents"][2]["text"], cut["documents"][2]["is_truncated"]) == (long[:1000], True)
    assert cut["documents"][2]["hash_value"] == whole["documents"][2]["hash_value"]
    page = _listed(client, limit=1, offset=1, max_text_length=7)
    assert (page["count"], page["total_items"]) == (1, 3)
    assert (page["documents"][0]["doc_id"], page["documents"][0]["text"], page["documents"][0]["is_truncated"]) == (ids[1], "Another", True)
    assert _listed(client, offset=2**53) == {"documents": [], "count": 0, "total_items": 3}
    assert _listed(client, max_text_length=10**30)["documents"][2]["text"] == long


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({"filename": "test.txt"}, [0]),
        ({"branch": "main"}, [0, 1]),
        ({"branch": "main", "n": 1.0}, [1]),
        ({"n": True}, []),
        ({"branch": "mai*"}, []),
        ({}, [0, 1]),
    ],
)
def test_a_filter_of_metadata(client, ids, wanted, numbers):
    found = _listed(client, metadata_filter=json.dumps(wanted))
    assert [each["doc_id"] for each in found["documents"]] == [ids[at] for at in numbers]
    assert found["total_items"] == len(numbers)
    body = {"index_name": "book", "query": "test document tested", "metadata_filter": wanted}
    assert {each["doc_id"] for each in client.post("/retrieve", json=body).json()["results"]} == {ids[at] for at in numbers}


@pytest.mark.parametrize("text", ["invalidjsonstring", "[1]", "1", "null", "{", '{"a":NaN}', '{"a":' * 40 + "1" + "}" * 40, "[" * 9000])
def test_a_filter_that_is_none(client, ids, text):
    assert _detail(client.get("/indexes/book/documents", params={"metadata_filter": text}), 400)


def test_documents_are_updated(client, ids):
    first, second = _listed(client)["documents"]
    changed = {**second, "text": "A new text"}
    body = {"documents": [changed, {"doc_id": "nonexistingdoc", "text": "x"}, first, {"text": first["text"]}]}
    found = client.post("/indexes/book/documents", json=body).json()
    assert [each["text"] for each in found["updated_documents"]] == ["A new text"]
    assert found["unchanged_documents"] == [first]
    assert [each["doc_id"] for each in found["not_found_documents"]] == ["nonexistingdoc", ""]
    assert [each["text"] for each in _listed(client)["documents"]] == [first["text"], "A new text"]
    again = client.post("/indexes/book/documents", json={"documents": [{**changed, "metadata": {"n": 2}}]}).json()
    assert [each["metadata"] for each in again["updated_documents"]] == [{"n": 2}]
    assert _listed(client, metadata_filter='{"n":2}')["total_items"] == 1
    assert client.post("/indexes/book/documents", json={"documents": []}).json() == {key: [] for key in found}


def test_documents_are_deleted(client, ids):
    body = json.dumps({"doc_ids": [ids[1], "nonexistingdoc", "a\0", "\ud800"]})
    response = client.post("/indexes/book/documents/delete", content=body, headers={"Content-Type": "application/json"})
    assert response.json() == {"deleted_doc_ids": [ids[1]], "not_found_doc_ids": ["nonexistingdoc", "a\0", "?"]}
    assert [each["doc_id"] for each in _listed(client)["documents"]] == [ids[0]]
    assert client.post("/retrieve", json={"index_name": "book", "query": "tested"}).json()["results"] != []


def test_an_index_is_deleted(client, ids, shared):
    assert client.delete("/indexes/book").json() == {"message": "Successfully deleted index book."}
    assert _detail(client.get("/indexes/book/documents"), 404) == "No such index: 'book' exists."
    assert client.get("/indexes").json() == []
    assert list(shared.settings.kb_dir.iterdir()) == []


def test_a_damaged_index_can_be_deleted_or_loaded_over(client, ids, shared):
    client.post("/persist/book")
    (shared.settings.kb_dir / "book" / "kb.sqlite").write_bytes(b"no database" * 100)
    assert _detail(client.get("/indexes/book/documents"), 409) == "The index cannot be used."
    assert client.post("/load/book", params={"overwrite": True}).status_code == 200
    assert _listed(client)["total_items"] == 2
    (shared.settings.kb_dir / "book" / "kb.sqlite").write_bytes(b"no database" * 100)
    assert client.delete("/indexes/book").status_code == 200


@pytest.mark.parametrize(
    ("path", "shown", "file"),
    [
        (None, "storage/book", "storage/book.kb"),
        ("storage", "storage/book", "storage/book.kb"),
        ("./custom_test_path", "./custom_test_path", "custom_test_path.kb"),
        ("a/b-2/C_3/d", "a/b-2/C_3/d", "a/b-2/C_3/d.kb"),
        ("a/", "a/", "a.kb"),
    ],
)
def test_an_index_is_kept_and_loaded(client, ids, shared, path, shown, file):
    params = {} if path is None else {"path": path}
    before = _listed(client)
    assert client.post("/persist/book", params=params).json() == {"message": f"Successfully persisted index book to {shown}."}
    kept = shared.settings.home / "exports" / file
    assert kept.is_file()
    assert [each.stat().st_mode & 0o077 for each in (kept, kept.parent, shared.settings.home / "exports")] == [0, 0, 0]
    exists = "Index 'book' already exists. Use a different name or delete the existing index first."
    assert _detail(client.post("/load/book", params=params), 409) == exists
    client.delete("/indexes/book")
    assert client.post("/load/book", params=params).json() == {"message": f"Successfully loaded index book from {shown}."}
    assert _listed(client) == before
    client.post("/indexes/book/documents/delete", json={"doc_ids": ids})
    assert client.post("/load/book", params={**params, "overwrite": True}).status_code == 200
    assert _listed(client) == before
    assert client.post("/load/other", params={"path": shown}).status_code == 200
    assert client.get("/indexes").json() == ["book", "other"]


HOSTILE = [
    "../x",
    "/etc/passwd",
    "a/../../b",
    "..",
    ".",
    "",
    "a//b",
    "./../x",
    "a\\b",
    "C:\\x",
    "a\0b",
    "a/b/c/d/e",
    "é",
    "x" * 65,
    "a.kb",
    "~",
]


@pytest.mark.parametrize("path", HOSTILE)
def test_nothing_outside_its_folder_is_written_or_read(client, ids, shared, path):
    before = {file for file in shared.settings.home.parent.rglob("*") if "book" not in file.parts}
    for route in ("/persist/book", "/load/new"):
        assert "each of letters" in _detail(client.post(route, params={"path": path}), 400)
    assert {file for file in shared.settings.home.parent.rglob("*") if "book" not in file.parts} == before


def test_what_was_not_kept_cannot_be_loaded(client, shared):
    assert _detail(client.post("/load/book"), 404) == "Path does not exist: storage/book"
    (shared.settings.home / "exports").mkdir(parents=True)
    (shared.settings.home / "exports" / "bad.kb").write_bytes(b"PK no zip")
    assert _detail(client.post("/load/book", params={"path": "bad"}), 409) == "The index cannot be used."
    assert client.get("/indexes").json() == []


def test_passages_are_found(client, ids):
    rare = "numbat " + " ".join(f"w{at}" for at in range(50))
    client.post("/index", json={"index_name": "book", "documents": [{"text": rare}, {"text": "what is the", "metadata": {"a": [1]}}]})

    def found(query, **more):
        response = client.post("/retrieve", json={"index_name": "book", "query": query, **more}).json()
        assert (response["query"], response["count"]) == (query, len(response["results"]))
        return response["results"]

    (both,) = found("This is a test document", max_node_count=1)
    assert both == {
        "doc_id": ids[0],
        "node_id": "KB#1",
        "text": DOCUMENTS[0]["text"],
        "score": pytest.approx(1),
        "dense_score": pytest.approx(1),
        "sparse_score": both["sparse_score"],
        "source": "both",
        "metadata": DOCUMENTS[0]["metadata"],
    }
    assert both["sparse_score"] > 0
    (sparse,) = found("numbat")
    assert (sparse["source"], sparse["dense_score"], sparse["sparse_score"] > 0) == ("sparse_only", None, True)
    (dense, *_) = found("what is the")
    assert (dense["source"], dense["sparse_score"], dense["metadata"]) == ("dense_only", None, {"a": [1]})
    assert dense["dense_score"] == pytest.approx(1)
    assert found("unheard-of") == []


def test_files_of_an_index_are_found_too(client, ids, shared, tmp_path):
    write_notes(tmp_path / "notes", 2)
    with KnowledgeBase.open(shared.settings.kb_dir, "book") as kb:
        kb.ingest([tmp_path / "notes"], HashEmbedder())
    (hit, *_) = client.post("/retrieve", json={"index_name": "book", "query": "zebra1x1"}).json()["results"]
    assert (hit["doc_id"], hit["metadata"]) == ("notes/note-001.md", {"source": "notes/note-001.md"})
    assert client.get("/indexes/book/documents", params={"metadata_filter": '{"branch": "main"}'}).json()["total_items"] == 2


@pytest.fixture
def files(shared, tmp_path):
    """Three files in the index "book", made by `localrag index`."""
    write_notes(tmp_path / "notes", 3)
    with KnowledgeBase.open(shared.settings.kb_dir, "book", create=True) as kb:
        kb.ingest([tmp_path / "notes"], HashEmbedder())
    return [f"notes/note-00{number}.md" for number in range(3)]


def test_the_files_of_an_index_are_listed(client, files):
    found = _listed(client)
    assert (found["count"], found["total_items"]) == (3, 3)
    assert [each["doc_id"] for each in found["documents"]] == files
    first = found["documents"][0]
    assert first["metadata"] == {"source": files[0]}
    assert "zebra0x0" in first["text"]
    assert (len(first["hash_value"]), first["is_truncated"]) == (64, False)
    cut = _listed(client, max_text_length=5, offset=1, limit=1)
    assert (cut["count"], cut["total_items"], cut["documents"][0]["doc_id"]) == (1, 3, files[1])
    assert (cut["documents"][0]["text"], cut["documents"][0]["is_truncated"]) == (_listed(client)["documents"][1]["text"][:5], True)


def test_files_and_texts_are_listed_together(client, ids, files):
    found = _listed(client)
    assert [each["doc_id"] for each in found["documents"]] == [*ids, *files]
    assert found["total_items"] == 5
    pages = [_listed(client, offset=offset, limit=2)["documents"] for offset in (0, 2, 4, 6)]
    assert [each["doc_id"] for page in pages for each in page] == [*ids, *files]
    assert client.get("/indexes/book/documents", params={"metadata_filter": '{"branch": "main"}'}).json()["total_items"] == 2


@pytest.mark.parametrize("source", ["notes/note-001.md", "notes/*", "", 1, "\0"])
def test_a_filter_knows_the_metadata_that_a_file_is_listed_with(client, ids, files, source):
    wanted = {"source": source}
    passing = ["notes/note-001.md"] if wanted == {"source": files[1]} else []
    assert [each["doc_id"] for each in _listed(client, metadata_filter=json.dumps(wanted))["documents"]] == passing
    body = {"index_name": "book", "query": "zebra1x1", "metadata_filter": wanted}
    assert {hit["doc_id"] for hit in client.post("/retrieve", json=body).json()["results"]} == set(passing)
    assert _listed(client, metadata_filter=json.dumps({**wanted, "branch": "main"}))["documents"] == []


def test_a_file_is_deleted_by_its_source_and_comes_back_when_it_is_indexed(client, files, shared, tmp_path):
    found = client.post("/indexes/book/documents/delete", json={"doc_ids": [files[1], "notes/none.md"]}).json()
    assert found == {"deleted_doc_ids": [files[1]], "not_found_doc_ids": ["notes/none.md"]}
    assert [each["doc_id"] for each in _listed(client)["documents"]] == [files[0], files[2]]
    assert client.post("/retrieve", json={"index_name": "book", "query": "zebra1x1"}).json()["results"] == []
    with KnowledgeBase.open(shared.settings.kb_dir, "book") as kb:
        assert kb.ingest([tmp_path / "notes"], HashEmbedder()).added == 1
    assert _listed(client)["total_items"] == 3


def test_a_file_is_not_updated_by_a_text(client, ids, files):
    documents = [{"doc_id": ids[0], "text": "new"}, {"doc_id": files[1], "text": "new"}]
    response = client.post("/indexes/book/documents", json={"documents": documents})
    assert _detail(response, 400) == f"{files[1]!r} is a file. To update it, change the file and run localrag index again."
    assert [each["text"] for each in _listed(client)["documents"]].count("new") == 0


@pytest.mark.parametrize("query", ["", " ", "\n\t"])
def test_an_empty_query(client, ids, query):
    assert _detail(client.post("/retrieve", json={"index_name": "book", "query": query}), 400) == "Query string cannot be empty."


UNKNOWN = [
    ("GET", "/indexes/{}/documents", None),
    ("POST", "/indexes/{}/documents", {"documents": [{"doc_id": "a", "text": "x"}]}),
    ("POST", "/indexes/{}/documents/delete", {"doc_ids": ["a"]}),
    ("DELETE", "/indexes/{}", None),
    ("POST", "/persist/{}", None),
    ("POST", "/retrieve", {"query": ""}),
]
NAMES = ["nowhere", "Book", "book ", "b.k", ".removed-1", "x" * 65, "postgresql:", "postgresql://127.0.0.1:1/x", "../book", "ü", "<script>"]


@pytest.mark.parametrize(("method", "route", "body"), UNKNOWN)
@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_index(client, ids, method, route, body, name):
    if route == "/retrieve":
        response = client.request(method, route, json={**body, "index_name": name})
    else:
        response = client.request(method, route.format(quote(name, safe="")), json=body)
    detail = _detail(response, 404)
    assert detail == ("Not Found" if "/" in name and route != "/retrieve" else f"No such index: '{name[:64]}' exists.")


@pytest.mark.parametrize("name", ["", *NAMES[1:]])
def test_a_name_that_cannot_be_is_not_made(client, shared, name):
    detail = _detail(client.post("/index", json={"index_name": name, "documents": DOCUMENTS}), 422)
    assert [each["loc"] for each in detail] == [["body", "index_name"]]
    assert client.post(f"/load/{quote(name, safe='')}").status_code in (404, 422)
    assert not shared.settings.home.exists()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/indexes/book/documents?limit=0", None),
        ("GET", "/indexes/book/documents?limit=101", None),
        ("GET", "/indexes/book/documents?limit=x", None),
        ("GET", "/indexes/book/documents?offset=-1", None),
        ("GET", f"/indexes/book/documents?offset={2**63}", None),
        ("GET", "/indexes/book/documents?max_text_length=0", None),
        ("POST", "/index", {}),
        ("POST", "/index", {"index_name": "book"}),
        ("POST", "/index", {"index_name": "book", "documents": [{}]}),
        ("POST", "/index", {"index_name": "book", "documents": [{"text": 1}]}),
        ("POST", "/index", {"index_name": "book", "documents": [{"text": "x", "metadata": []}]}),
        ("POST", "/indexes/book/documents", {"documents": "x"}),
        ("POST", "/indexes/book/documents/delete", {"doc_ids": [1]}),
        ("POST", "/retrieve", {"index_name": "book"}),
        ("POST", "/retrieve", {"index_name": "book", "query": "x", "max_node_count": 0}),
        ("POST", "/retrieve", {"index_name": "book", "query": "x", "max_node_count": 301}),
        ("POST", "/retrieve", {"index_name": "book", "query": "x", "metadata_filter": "{}"}),
        ("POST", "/load/book?overwrite=perhaps", None),
    ],
)
def test_a_request_of_another_form(client, ids, method, path, body):
    for each in _detail(client.request(method, path, json=body), 422):
        assert set(each) == {"type", "loc", "msg"}


def _nested(levels):
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"text", rb'"a\u0000b"'),
        (b"text", rb'"a\ud800"'),
        (b"text", b'""'),
        (b"text", rb'" \n\u200b"'),
        (b"doc_id", rb'"a\nb"'),
        (b"doc_id", rb'"\udc00"'),
        (b"doc_id", b'"' + b"a" * 257 + b'"'),
        (b"metadata", rb'{"a":"\ud800"}'),
        (b"metadata", rb'{"\udfff":1}'),
        (b"metadata", b'{"a":NaN}'),
        (b"metadata", b'{"a":1e999}'),
        (b"metadata", b'{"a":-Infinity}'),
        (b"metadata", b'{"a":"' + b"x" * MAX_METADATA_BYTES + b'"}'),
        (b"metadata", b'{"a":' + b"1" * 5000 + b"}"),
        (b"metadata", _nested(MAX_METADATA_DEPTH + 1)),
        (b"metadata", _nested(60)),
        (b"metadata", _nested(10_000)),
    ],
)
@pytest.mark.parametrize("route", ["/index", "/indexes/book/documents"])
def test_what_cannot_be_kept_is_refused_and_nothing_of_the_request_is_stored(client, ids, route, field, value):
    before = _listed(client)
    document = b'{"doc_id":"x",%s"%s":%s}' % (b"" if field == b"text" else b'"text":"x",', field, value)
    body = b'{"index_name":"book","documents":[{"doc_id":"y","text":"Good."},%s]}' % document
    detail = _detail(client.post(route, content=body, headers={"Content-Type": "application/json"}), 400)
    assert detail.startswith(("documents[1]: ", "The body is nested", "There was an error parsing"))
    assert _listed(client) == before


@pytest.mark.parametrize(
    ("body", "status"), [(b"", 422), (b"{", 422), (b"\xff", 400), (b"[]", 422), (b"NaN", 422), (b'{"documents":NaN}', 422)]
)
def test_a_body_that_is_no_json(client, body, status):
    assert _detail(client.post("/index", content=body, headers={"Content-Type": "application/json"}), status)


@pytest.mark.parametrize("wanted", [b'{"a":NaN}', _nested(40), b"{%s}" % b",".join(b'"%d":1' % at for at in range(65))])
def test_a_filter_that_cannot_be(client, ids, wanted):
    body = b'{"index_name":"book","query":"x","metadata_filter":%s}' % wanted
    assert _detail(client.post("/retrieve", content=body, headers={"Content-Type": "application/json"}), 400)


@given(text=TEXTS, metadata=METADATA)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_and_metadata_come_back(client, text, metadata):
    body = {"index_name": "book", "documents": [{"text": text, "metadata": metadata}]}
    (stored,) = client.post("/index", json=body).json()
    assert (stored["text"], stored["metadata"]) == (text, metadata)
    found = _listed(client, limit=100, metadata_filter=json.dumps(metadata))["documents"]
    assert stored in found or len(found) == 100


@given(text=st.text(max_size=20), metadata=st.dictionaries(st.text(max_size=5), JSON, max_size=3), query=st.text(max_size=30))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_that_is_sent_is_a_fault_of_the_server(client, text, metadata, query):
    body = {"index_name": "book", "documents": [{"text": text or "x", "metadata": metadata, "doc_id": query}]}
    for route in ("/index", "/indexes/book/documents"):
        assert client.post(route, json=body).status_code < 500
    body = {"index_name": "book", "query": query, "metadata_filter": metadata}
    assert client.post("/retrieve", json=body).status_code < 500
    assert client.post("/indexes/book/documents/delete", json={"doc_ids": [query]}).status_code < 500
    for params in ({"metadata_filter": query}, {"metadata_filter": json.dumps(metadata)}):
        assert client.get("/indexes/book/documents", params=params).status_code < 500


def test_another_program_that_indexes(client, ids, shared):
    with taken(shared.settings.kb_dir / "book", wait_s=0):
        detail = _detail(client.delete("/indexes/book"), 503)
    assert detail == "Another localrag is indexing into knowledge base 'book'."
    assert client.delete("/indexes/book").status_code == 200


def test_an_index_of_another_embedder(client, ids, shared):
    other = TestClient(make_app(ServerState(settings=shared.settings, embedder=HashEmbedder(fingerprint="other"))), base_url=HOST)
    for route, body in (("/index", {"documents": [{"text": "x"}]}), ("/retrieve", {"query": "x"})):
        assert _detail(other.post(route, json={"index_name": "book", **body}), 409) == "The index cannot be used."
    assert other.get("/indexes/book/documents").json()["total_items"] == 2


def test_an_embedder_that_is_not_there(tmp_path):
    (tmp_path / "models.toml").write_text(f'default_embedder = "x"\n[embedders.x]\npath = "{tmp_path / "none"}"\n')
    shared = ServerState(settings=Settings(home=tmp_path / "home", models_file=tmp_path / "models.toml"))
    client = TestClient(make_app(shared), base_url=HOST)
    response = client.post("/index", json={"index_name": "book", "documents": DOCUMENTS})
    assert _detail(response, 503) == "The model cannot be used."
    assert client.get("/indexes").json() == []


def test_requests_are_counted_by_route_and_outcome(client, ids):
    client.post("/retrieve", json={"index_name": "nowhere", "query": "x"})
    counted = {line for line in client.get("/metrics").text.splitlines() if line.startswith("rag_") and "_total{" in line}
    assert counted == {'rag_index_requests_total{status="success"} 1.0', 'rag_indexes_retrieve_requests_total{status="failure"} 1.0'}


def test_many_write_and_search_at_once(client, shared):
    def ask(at):
        document = {"doc_id": f"d{at % 5}", "text": f"This is text {at}.", "metadata": {"at": at}}
        stored = client.post("/index", json={"index_name": "book", "documents": [document]}).status_code
        found = client.post("/retrieve", json={"index_name": "book", "query": f"text {at}"}).status_code
        return stored, found, client.get("/indexes/book/documents").status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(24))) == {(200, 200, 200)}
    assert sorted(each["doc_id"] for each in _listed(client)["documents"]) == [f"d{at}" for at in range(5)]
    with KnowledgeBase.open(shared.settings.kb_dir, "book") as kb:
        assert kb.verify().is_sound


def test_one_embedder_stands_for_both_where_there_is_no_other(tmp_path):
    given_one = Embedders(Settings(home=tmp_path), HashEmbedder())
    assert given_one.for_texts() is given_one.for_queries()
    texts = [f"text {at}" for at in range(70)]
    assert (given_one.for_texts().embed(texts) == HashEmbedder().embed(texts)).all()
    assert given_one.for_texts().embed([]).shape == (0, 256)


def test_every_route_is_described(client):
    paths = client.get("/openapi.json").json()["paths"]
    named = {method["operationId"] for path in paths.values() for method in path.values()}
    assert named >= {
        "create_index",
        "list_indexes",
        "list_documents_in_index",
        "update_documents_in_index",
        "delete_documents_in_index",
        "delete_index",
        "persist_index",
        "load_index",
        "retrieve_index",
    }
