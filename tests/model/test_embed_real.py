"""The default embedder in llama.cpp against itself in sentence-transformers."""

import pytest

from localrag.engine.embed import LlamaEmbedder
from localrag.engine.query_embedder import query_embedder, query_path

pytestmark = pytest.mark.model


def test_the_default_embedder_is_converted_and_accepted(converted, embedder):
    (settings, verdict), original = converted, embedder
    assert verdict.is_accepted, verdict.reason
    assert verdict.num_texts >= 250
    assert verdict.worst_cosine > 0.9999
    copy = query_embedder(original, settings)
    assert isinstance(copy, LlamaEmbedder)
    texts = ["모든 사람은 자유롭다", "a" * 300, "[SEP] and [MASK]", "who feeds the hens?"]
    assert [copy.count(text) for text in texts] == [original.count(text) for text in texts]
    assert (copy.fingerprint, copy.dim, copy.max_tokens) == (original.fingerprint, original.dim, original.max_tokens)
    assert (copy.embed(texts) * original.embed(texts)).sum(axis=1).min() > 0.9999
    assert query_path(original, settings).startswith("llama.cpp")
    copy.close()
