"""Token ids are llama.cpp's own, on six real vocabularies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.llama import LlamaModel, LlamaTokenizer
from localrag.errors import EngineError
from localrag.text.tokens import TokenCounter
from tests.gguf_files import write_vocab

VOCABULARIES = ("bert-bge", "deepseek-coder", "llama-bpe", "llama-spm", "phi-3", "qwen2")
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return LlamaTokenizer(LlamaModel(write_vocab(tmp_path_factory.mktemp("vocab") / "tiny.gguf"), vocab_only=True))


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_those_of_the_vectors(shared_data, name):
    path = shared_data / "vocab" / f"ggml-vocab-{name}.gguf"
    tokenizer = LlamaTokenizer(LlamaModel(path, vocab_only=True))
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split(SEPARATOR)
    lines = path.with_name(f"{path.name}.out").read_text().split("\n")
    expected = [[int(token) for token in line.split()] for line in lines[: len(texts)]]
    assert len(texts) > 40
    assert [tokenizer.encode(text) for text in texts] == expected
    assert [tokenizer.count(text) for text in texts] == list(map(len, expected))


@settings(deadline=None)
@given(st.text())
def test_pieces_make_up_the_text(tiny, text):
    raw = text.encode("utf-8", "replace")
    assert b"".join(tiny.piece(token) for token in tiny.encode(text)) == raw
    assert tiny.count(text) == len(tiny.encode(text))


def test_a_text_longer_than_the_buffer_is_whole(tiny):
    text = "zq" * 20_000
    assert len(tiny.encode(text)) == tiny.count(text) == 40_000


def test_special_tokens_are_told_from_tags_and_words(tiny):
    assert [text for text, _ in tiny.special_texts] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [text for text, _ in tiny.tag_texts] == ["<think>", "</think>"]
    end = dict(tiny.special_texts)["<|im_end|>"]
    assert tiny.is_end(end)
    assert (tiny.piece(end), tiny.piece(end, special=False)) == (b"<|im_end|>", b"")


def test_a_token_id_that_is_none_is_an_error(tiny):
    for wrong in (-1, tiny.num_tokens, 2**31):
        with pytest.raises(EngineError):
            tiny.piece(wrong)


def test_counts_are_remembered_up_to_a_capacity(tiny):
    counter = TokenCounter(tiny, capacity=2)
    assert [counter(text) for text in ("a", "bb", "a", "ccc", "bb")] == [1, 2, 1, 3, 2]
    assert (counter.hits, counter.misses) == (1, 4)
