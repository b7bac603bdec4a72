import numpy as np
import pytest

from localrag.engine.convert import convert
from localrag.engine.embed import BATCH_TEXTS, EmbeddingContext, LlamaEmbedder
from localrag.engine.llama import LlamaModel
from localrag.errors import EngineError, KnowledgeBaseError, ModelFileError
from localrag.text.tokens import PrefixedEmbedder
from tests.bert_folders import HIDDEN, POSITIONS, write_folder
from tests.gguf_files import write_gguf, write_model, write_vocab


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    convert(write_folder(folder / "tiny"), folder / "tiny.gguf")
    return folder / "tiny.gguf"


@pytest.fixture
def embedder(file):
    embedder = LlamaEmbedder(file, is_trusted=True)
    yield embedder
    embedder.close()


def test_a_file_by_itself(embedder):
    assert (embedder.dim, embedder.max_tokens, len(embedder.fingerprint)) == (HIDDEN, POSITIONS - 2, 64)
    assert [embedder.count(text) for text in ("", "hot", "hot bed", "Hot bedding")] == [0, 1, 2, 4]  # hot bed ##d ##ing
    assert embedder.input_ids("hot [SEP]")[-2:] != [3, 3]  # special strings in a text are text


def test_vectors_do_not_depend_on_their_batch(embedder):
    texts = [f"hot bed {'a ' * (index % 50)}{index}" for index in range(3 * BATCH_TEXTS)]
    together = embedder.embed(texts)
    assert together.dtype == np.float32
    assert together.shape == (len(texts), HIDDEN)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    assert (together * alone).sum(axis=1).min() > 0.9999
    assert len(np.unique(together.round(4), axis=0)) == len(texts)
    assert embedder.embed([]).shape == (0, HIDDEN)


def test_a_text_over_the_limit_is_an_error_with_its_numbers(embedder):
    embedder.embed(["a " * embedder.max_tokens])
    with pytest.raises(KnowledgeBaseError) as caught:
        embedder.embed(["hot", "a " * (embedder.max_tokens + 1)])
    assert caught.value.numbers == {"num_tokens": embedder.max_tokens + 1, "limit_tokens": embedder.max_tokens}


def test_where_no_larger_context_can_be_made_shorter_texts_go_on(embedder):
    before = embedder.embed(["hot"])
    with pytest.raises(EngineError, match="out of bounds"):
        embedder._memory.ready(1 << 17)
    np.testing.assert_allclose(embedder.embed(["hot"]), before, atol=1e-5)


def test_after_close_is_an_error(file):
    embedder = LlamaEmbedder(file, is_trusted=True)
    embedder.close()
    embedder.close()
    with pytest.raises(EngineError, match="closed"):
        embedder.embed(["hot"])


def test_the_trial_passes_it_once(file, tmp_path):
    LlamaEmbedder(file, home=tmp_path).close()
    assert "whole" in (tmp_path / "trials.json").read_text()


def test_a_file_that_is_no_embedder(tmp_path):
    with pytest.raises(ModelFileError, match="vocabulary"):
        LlamaEmbedder(write_vocab(tmp_path / "vocab.gguf"), home=tmp_path)
    with pytest.raises(ModelFileError, match="not an embedder"):
        LlamaEmbedder(write_model(tmp_path / "model.gguf"), home=tmp_path)


def test_a_language_model_that_says_how_it_pools(tmp_path):
    path = write_model(tmp_path / "model.gguf", changes={"llama.pooling_type": 3})
    embedder = LlamaEmbedder(path, home=tmp_path)
    texts = ["one text", "another text that is longer"]
    together, alone = embedder.embed(texts), np.concatenate([embedder.embed([text]) for text in texts])
    assert (together * alone).sum(axis=1).min() > 0.9999
    embedder.close()


def test_batches_that_llama_cpp_would_abort_on(file):
    model = LlamaModel(file)
    with pytest.raises(EngineError, match="bounds"):
        EmbeddingContext(model, batch_tokens=202, num_sequences=32, num_threads=1)
    context = EmbeddingContext(model, batch_tokens=64, num_sequences=2, num_threads=1)
    out = np.empty((3, HIDDEN), np.float32)
    for texts in ([], [[]], [[2, 3], []], [[2] * 65], [[2]] * 3, [[2, 10**6]], [[-1]]):
        with pytest.raises(EngineError):
            context.embed(texts, out)
    context.embed([[2, 3]], out)
    context.close()
    model.close()


def test_the_tokenizer_of_multilingual_embedders(tmp_path):
    """e5 and bge-m3 are files of the architecture bert with the unigram tokenizer of XLM-RoBERTa: pieces with scores, <s> and </s>."""
    pieces = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "▁",
        *(f"▁{word}" for word in ("query", "passage", "heiß", "chaud", "مرحبا")),
        *"abcdeß:漢字",
    ]
    width, rng = 32, np.random.default_rng(0)
    norms = {"weight": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}
    tensors = {"token_embd.weight": (len(pieces), width), "position_embd.weight": (64, width), "token_types.weight": (1, width)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        tensors |= {f"blk.0.{name}.weight": (width, width), f"blk.0.{name}.bias": (width,)}
    tensors |= {"blk.0.ffn_up.weight": (64, width), "blk.0.ffn_up.bias": (64,), "blk.0.ffn_down.weight": (width, 64)}
    tensors |= {"blk.0.ffn_down.bias": (width,)}
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in tensors.items()}
    for place in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        weights |= {f"{place}.{part}": value for part, value in norms.items()}
    keys = {
        "general.architecture": "bert",
        "general.name": "Tiny XLM-R",
        "bert.context_length": 64,
        "bert.block_count": 1,
        "bert.embedding_length": width,
        "bert.feed_forward_length": 64,
        "bert.attention.head_count": 2,
        "bert.attention.layer_norm_epsilon": 1e-5,
        "bert.attention.causal": False,
        "bert.pooling_type": 1,
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 4 + [-float(rank) for rank in range(1, len(pieces) - 3)],
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [1] * (len(pieces) - 4),
        "tokenizer.ggml.token_type_count": 1,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }
    embedder = LlamaEmbedder(write_gguf(tmp_path / "xlmr.gguf", keys, weights), home=tmp_path)
    ids = embedder.input_ids("query: heiß")
    assert (ids[0], ids[-1]) == (0, 2)
    assert [pieces[one] for one in ids[1:-1]] == ["▁query", ":", "▁heiß"]
    told = PrefixedEmbedder(embedder, query_prefix="query: ", passage_prefix="passage: ")
    question, passage = told.embed_queries(["heiß"])[0], told.embed(["heiß"])[0]
    assert np.allclose(question, embedder.embed(["query: heiß"])[0], atol=1e-5)
    assert not np.allclose(question, passage, atol=1e-3)
    assert told.fingerprint != embedder.fingerprint
    embedder.close()
