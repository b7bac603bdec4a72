"""Text is not markup: every special string, planted in content, stays content."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.echo import EchoTokenizer
from localrag.engine.llama import LlamaModel, LlamaTokenizer
from localrag.text.markup import Part, encode
from tests.gguf_files import write_vocab


def ids(parts, tokenizer):
    return [token for part in encode(parts, tokenizer) for token in part.token_ids]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A vocabulary with control tokens and with user-defined ones that look like tags."""
    return LlamaTokenizer(LlamaModel(write_vocab(tmp_path_factory.mktemp("vocab") / "tiny.gguf"), vocab_only=True))


def test_markup_is_parsed_and_content_is_not():
    tokenizer = EchoTokenizer()
    encoded = encode([Part("template", "<|im_start|>", is_markup=True), Part("question", "a<|im_end|>")], tokenizer)
    assert encoded[0].token_ids == (256,)
    assert bytes(encoded[1].token_ids) == b"a<|im_end|>"


def test_a_token_belongs_to_the_part_in_which_its_first_character_stands(tokenizer):
    # "the" is one token here: it begins in the template, so the question has only what follows
    whole = encode([Part("template", "<|im_start|>t", is_markup=True), Part("question", "he in")], tokenizer)
    assert [tokenizer.piece(token) for part in whole for token in part.token_ids] == [b"<|im_start|>", b"the", b" ", b"in"]
    assert [len(part.token_ids) for part in whole] == [2, 2]


def test_text_beside_template_text_gets_the_ids_of_the_whole(tokenizer):
    parts = [
        Part("template", "<|im_start|>user\nth", is_markup=True),
        Part("q", "e the"),
        Part("template", " thin<|im_end|>\n", is_markup=True),
    ]
    controls = dict(tokenizer.special_texts)
    expected = [controls["<|im_start|>"], *tokenizer.encode("user\nthe the thin"), controls["<|im_end|>"], *tokenizer.encode("\n")]
    assert ids(parts, tokenizer) == expected


def test_every_special_string_in_content_yields_no_control_token(tokenizer):
    forbidden = {token for _, token in (*tokenizer.special_texts, *tokenizer.tag_texts)}
    assert len(forbidden) == 5
    for string, _ in (*tokenizer.special_texts, *tokenizer.tag_texts):
        for content in (string, f"a {string} b", string * 3, f"{string[:3]}{string}{string[3:]}"):
            template = Part("template", "<|im_start|>user\n", is_markup=True)
            encoded = encode([template, Part("question", content), Part("template", "<|im_end|>", is_markup=True)], tokenizer)
            assert not forbidden & set(encoded[1].token_ids), content
            assert b"".join(tokenizer.piece(t) for t in encoded[1].token_ids).decode().replace("\u200b", "") == content


def test_a_tag_of_the_template_itself_is_kept(tokenizer):
    tags = dict(tokenizer.tag_texts)
    encoded = encode([Part("template", "<think>\n</think>", is_markup=True), Part("question", "<think>")], tokenizer)
    assert encoded[0].token_ids[0] == tags["<think>"]
    assert not set(tags.values()) & set(encoded[1].token_ids)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.text(max_size=30), st.sampled_from(["<|im_end|>", "<think>", "<|im_", "start|>", "the ", "\u200b"])), max_size=12)
)
def test_parts_lose_no_text_and_no_content_forges_a_token(tokenizer, pieces):
    parts = [Part("template", "<|im_start|>x", is_markup=True), *(Part("q", piece, item=str(i)) for i, piece in enumerate(pieces))]
    encoded = encode(parts, tokenizer)
    control_ids = {token for _, token in (*tokenizer.special_texts, *tokenizer.tag_texts)}
    assert not control_ids & {token for part in encoded[1:] for token in part.token_ids}
    shown = b"".join(tokenizer.piece(token) for part in encoded for token in part.token_ids)
    assert shown.decode("utf-8", "replace") == "".join(part.part.text for part in encoded).encode("utf-8", "replace").decode()
