"""Embedders with a text before each question and each passage: it is counted, and an index knows it."""

import json

import numpy as np
import pytest

from localrag.errors import ConfigError, KnowledgeBaseError
from localrag.session import open_embedder
from localrag.settings import Settings
from localrag.text.tokens import PrefixedEmbedder, embed_queries


@pytest.fixture
def catalogue_with(tiny_catalogue, tmp_path):
    """Writes a models.toml whose embedder has these keys."""
    top, table, keys, *_ = tiny_catalogue.read_text().partition("[embedders.tiny]\n")

    def write(**prefixes):
        file = tmp_path / "models.toml"
        file.write_text(f"{top}{table}" + "".join(f"{key} = {json.dumps(text)}\n" for key, text in prefixes.items()) + keys)
        return file

    return write


def test_questions_and_passages_get_their_prefix_and_tokens_are_counted(catalogue_with, tmp_path):
    plain = open_embedder(Settings(home=tmp_path, models_file=catalogue_with()))
    embedder = open_embedder(Settings(home=tmp_path, models_file=catalogue_with(query_prefix="bed ", passage_prefix="hot bed ")))
    np.testing.assert_allclose(embedder.embed(["a 12"]), plain.embed(["hot bed a 12"]), atol=1e-6)
    np.testing.assert_allclose(embed_queries(embedder, ["a 12"]), plain.embed(["bed a 12"]), atol=1e-6)
    np.testing.assert_allclose(embed_queries(plain, ["a 12"]), plain.embed(["a 12"]), atol=1e-6)
    assert (embedder.max_tokens, embedder.count("a 12")) == (plain.max_tokens - 3, 3)
    embedder.embed(["a " * embedder.max_tokens])
    with pytest.raises(KnowledgeBaseError, match="longer than"):
        embed_queries(embedder, ["a " * (embedder.max_tokens + 1)])
    others = [PrefixedEmbedder(plain, query_prefix=q, passage_prefix=p) for q, p in (("bed ", ""), ("", "bed "), ("bed", " "))]
    assert len({each.fingerprint for each in (plain, embedder, *others)}) == 5
    with pytest.raises(ConfigError, match="leaves the embedder no room"):
        _ = PrefixedEmbedder(plain, query_prefix="a " * 80, passage_prefix="").max_tokens


def test_an_index_made_with_other_prefixes_is_refused_with_a_way_out(localrag, refused, catalogue_with, tmp_path):
    (tmp_path / "a.md").write_text("# Hot bed\n\nThe bed is hot.\n")
    file = catalogue_with(query_prefix="bed ")
    assert localrag("index", tmp_path / "a.md", "--kb", "k", "--models", file)[0] == 0
    assert localrag("search", "hot bed", "--kb", "k", "--mode", "semantic", "--models", file)[0] == 0
    error = refused(6, "search", "hot bed", "--kb", "k", "--mode", "semantic", "--models", catalogue_with(query_prefix="query: "))
    assert "was indexed with another embedder" in error
    assert "with the same prefixes, or embed it again with the other one: localrag kb reembed k" in error
    assert localrag("search", "hot bed", "--kb", "k", "--mode", "keyword", "--models", file)[0] == 0
