"""Token ids in place of a text, as LangChain's OpenAIEmbeddings sends them unless it is told not to."""

import base64
import hashlib
import os

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from localrag.server.app import make_app
from localrag.server.embeddings import FILE_NAME, SHA256, TokenIds, token_ids
from localrag.server.errors import Problem
from localrag.server.routing import ServerState
from localrag.settings import Settings
from tests.kb.hash_embedder import HashEmbedder

PIECES = [*(bytes([byte]) for byte in range(256)), b"PLA", b" is", b" annealed", "é".encode(), b"\xf0\x9f"]
FILE = b"".join(base64.b64encode(piece) + f" {number}\n".encode() for number, piece in enumerate(PIECES))
"""A vocabulary as tiktoken writes it, smaller than cl100k_base."""
DIGEST = hashlib.sha256(FILE).hexdigest()
SENTENCE = [256, 257, 258, 33]


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def reader(home, tmp_path, sha256=DIGEST, **env):
    """With no cache of a person's own."""
    return TokenIds(home, env={"XDG_CACHE_HOME": str(tmp_path / "nowhere"), **env}, sha256=sha256)


@given(st.text())
def test_ids_are_the_text_that_they_were_made_of(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("home")
    (folder / FILE_NAME).write_bytes(FILE)
    assert reader(folder, folder).text(list(text.encode())) == text


@pytest.mark.parametrize("place", ["home", "TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR", "XDG_CACHE_HOME"])
def test_the_vocabulary_is_found_where_tiktoken_keeps_it_or_in_the_home(home, tmp_path, place):
    folder = {"home": home, "XDG_CACHE_HOME": tmp_path / "tiktoken"}.get(place, tmp_path)
    folder.mkdir(exist_ok=True)
    (folder / (FILE_NAME if place == "home" else hashlib.sha1(
        b"https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken", usedforsecurity=False
    ).hexdigest())).write_bytes(FILE)  # fmt: skip
    env = {} if place == "home" else {place: str(tmp_path)}
    assert reader(home, tmp_path, **env).text(SENTENCE) == "PLA is annealed!"


def test_a_vocabulary_that_came_later_is_found_too(home, tmp_path):
    ids = reader(home, tmp_path)
    with pytest.raises(Problem, match="which this machine does not have"):
        ids.text(SENTENCE)
    (home / FILE_NAME).write_bytes(FILE)
    assert ids.text(SENTENCE) == "PLA is annealed!"


@pytest.mark.parametrize("content", [FILE + b"\n", b"", FILE[:-4], b"x" * (5 << 20)])
def test_another_file_is_not_believed(home, tmp_path, content):
    (home / FILE_NAME).write_bytes(content)
    with pytest.raises(Problem, match="which this machine does not have") as raised:
        reader(home, tmp_path).text(SENTENCE)
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, "token_ids_unreadable", "input")
    assert "check_embedding_ctx_length=False" in raised.value.detail


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_its_place_is_not_waited_for(home, tmp_path):
    os.mkfifo(home / FILE_NAME)
    with pytest.raises(Problem, match="which this machine does not have"):
        reader(home, tmp_path).text(SENTENCE)


@pytest.mark.parametrize(
    ("ids", "said"), [([999_999], "999999 is not in"), ([260], "within a character"), ([0xE2, 0x82], "within a character")]
)
def test_ids_of_no_text(home, tmp_path, ids, said):
    (home / FILE_NAME).write_bytes(FILE)
    with pytest.raises(Problem, match=said):
        reader(home, tmp_path).text(ids)


@pytest.fixture
def client(home, tmp_path):
    app = make_app(ServerState(settings=Settings(home=home), embedder=HashEmbedder()))
    ids = reader(home, tmp_path)
    app.dependency_overrides[token_ids] = lambda: ids
    return TestClient(app, base_url="http://127.0.0.1")


def test_the_vectors_of_ids_are_those_of_their_texts(client, home):
    (home / FILE_NAME).write_bytes(FILE)
    of_texts = client.post("/v1/embeddings", json={"input": ["PLA is annealed!", "é"]}).json()
    of_ids = client.post("/v1/embeddings", json={"input": [SENTENCE, [259]]}).json()
    assert of_ids == of_texts
    one = client.post("/v1/embeddings", json={"input": SENTENCE}).json()
    assert one["data"] == of_texts["data"][:1]


def test_without_the_vocabulary_they_are_refused_and_never_guessed(client):
    for given_ids in (SENTENCE, [SENTENCE, SENTENCE]):
        answer = client.post("/v1/embeddings", json={"input": given_ids})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"], error["param"]) == (
            400, "invalid_request_error", "token_ids_unreadable", "input",
        )  # fmt: skip
        assert "check_embedding_ctx_length=False" in error["message"]


@pytest.mark.parametrize("bad", [[-1], [2**31], [True], [1.5], [[]], [["a"]], [1, "a"], [[1], "a"], [[1], 2], [[1.0]], [[[1]]], [None]])
def test_what_is_neither_texts_nor_ids(client, bad):
    answer = client.post("/v1/embeddings", json={"input": bad})
    assert (answer.status_code, answer.json()["error"]["param"], answer.json()["error"]["code"]) == (422, "input", "invalid_request")


def test_the_digest_is_that_of_openais_file():
    assert TokenIds.__init__.__kwdefaults__["sha256"] == SHA256 == "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
