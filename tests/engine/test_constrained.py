"""Sampling under a grammar: what comes out is JSON under the schema, and nothing that a grammar forbids is ever accepted.

The logits are random, which is harder on the grammar than a model that has read JSON.
"""

import ctypes
import itertools
import json
import random

import numpy as np
import pytest

from localrag.engine.llama import LlamaContext, LlamaModel, LlamaSampler, LlamaTokenizer
from localrag.engine.llama_lib import library
from localrag.errors import EngineError, UsageError
from localrag.types import SamplingParams
from tests.gguf_files import write_model, write_vocab
from tests.json_schemas import is_valid, random_schema


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    model = LlamaModel(write_vocab(tmp_path_factory.mktemp("vocab") / "vocab.gguf"), vocab_only=True)
    yield model
    model.close()


def piece_of(model, token):
    """The bytes that a token writes."""
    return LlamaTokenizer(model).piece(token, special=False)


def ends_of(model):
    return [token for token in range(model.num_vocab_tokens) if library().llama_vocab_is_eog(model.vocab, token)]


def written(model, schema, *, seed=0, max_tokens=4000, bonus=None, temperature=0.0):
    """Text and number of tokens of an answer from random logits; `bonus` is added to them."""
    rng = np.random.default_rng(seed)
    sampler = LlamaSampler(SamplingParams(json_schema=schema, temperature=temperature, seed=seed), model)
    constrained, text, ends = sampler._constrained, b"", ends_of(model)
    for count in range(1, max_tokens + 1):
        logits = rng.normal(0, 5, model.num_vocab_tokens).astype(np.float32)
        if bonus is not None:
            logits += bonus
        token = constrained.sample(logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
        if token in ends:
            sampler.close()
            return text.decode(), count
        text += piece_of(model, token)
    raise AssertionError((schema, text))


def says(model, text, schema, *, or_text=False):
    """Whether the model may say exactly this, and then end."""
    sampler = LlamaSampler(SamplingParams(json_schema=schema, or_text=or_text), model)
    constrained = sampler._constrained
    try:
        for token in [*LlamaTokenizer(model).encode(text), None]:
            logits = np.zeros(model.num_vocab_tokens, np.float32)
            wanted = ends_of(model) if token is None else [token]
            logits[wanted] = 100.0
            if constrained.sample(logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))) not in wanted:
                return False
        return True
    finally:
        sampler.close()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"a":1}',
        '{"a": {"b":[1,"x",null,{"c":[]}]},"":true}',
        '{"a":1,"a":2}',
        '{"a":{"b":{"c":{"d":1}}}}',
        "[1]",
        '{"a":}',
        "{",
        "{} x",
    ],
)
def test_any_object_is_json(vocabulary, text):
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    assert says(vocabulary, text, {"type": "object"}) == is_object


CALL = {"type": "object", "properties": {"name": {"const": "look"}, "arguments": {"type": "object"}}, "required": ["name", "arguments"]}
LOOK = '{"name":"look","arguments":{"at":"it"}}'


@pytest.mark.parametrize(
    ("text", "may"),
    [
        (LOOK, True),
        (f"<tool_call>\n{LOOK}\n</tool_call>", True),
        (f"<tool_call>{LOOK}</tool_call>", True),
        ("Plain words, {braces} and <b>tags</b>.\nMore.", True),
        ("", True),
        ("<", True),
        ("<tool", True),
        ("<tool box>", True),
        ("температура 🔥", True),
        ("{", False),
        ('{"name":"other","arguments":{}}', False),
        ("<tool_call>", False),
        ("<tool_call> words", False),
        (f"{LOOK} and words", False),
    ],
)
def test_a_call_or_a_text(vocabulary, text, may):
    assert says(vocabulary, text, CALL, or_text=True) == may


def text_is_valid(text, schema):
    return is_valid(json.loads(text), schema)


def test_random_logits_under_random_schemas_give_valid_json(vocabulary):
    num_texts = 0
    for seed in range(150):
        schema = random_schema(random.Random(seed))
        text, _ = written(vocabulary, schema, seed=seed, temperature=seed % 2 * 1.0)
        assert text_is_valid(text, schema), (seed, schema, text)
        assert "\n" not in text
        num_texts += 1
    assert num_texts == 150


def test_lengths_are_those_that_were_asked_for(vocabulary):
    for low, high in itertools.combinations_with_replacement([0, 3, 1001, 2003], 2):
        schema = {"type": "string", "minLength": low, "maxLength": high}
        shortest = bonus_for(vocabulary, lambda piece: 60.0 if piece == b'"' else 0.0)
        longest = bonus_for(vocabulary, lambda piece: 60.0 if piece.isalpha() and len(piece) == 1 else 0.0)
        assert len(json.loads(written(vocabulary, schema, bonus=shortest)[0])) == low
        assert len(json.loads(written(vocabulary, schema, bonus=longest)[0])) == high


def bonus_for(model, value):
    return np.array([value(piece_of(model, token)) for token in range(model.num_vocab_tokens)], np.float32)


def test_control_tokens_are_never_text(vocabulary):
    lib = library()
    control = bonus_for(vocabulary, lambda piece: 40.0 if not piece else 0.0)
    assert control.any()
    schema = {"type": "string", "minLength": 20, "maxLength": 40}
    text, _ = written(vocabulary, schema, bonus=control)
    assert 20 <= len(json.loads(text)) <= 40
    name = next(
        text
        for i in range(vocabulary.num_vocab_tokens)
        if control[i]
        and not lib.llama_vocab_is_eog(vocabulary.vocab, i)
        and (text := lib.llama_vocab_get_text(vocabulary.vocab, i).decode())
    )
    assert json.loads(written(vocabulary, {"const": name}, bonus=control)[0]) == name


def test_bytes_that_are_no_utf8_are_never_written(vocabulary):
    broken = bonus_for(vocabulary, lambda piece: 40.0 if piece and not piece.isascii() else 0.0)
    schema = {"type": "string", "minLength": 200, "maxLength": 300}
    for seed in range(10):
        text, _ = written(vocabulary, schema, seed=seed, bonus=broken)  # decodes it strictly
        assert text_is_valid(text, schema)


def test_nothing_but_the_end_follows_a_whole_answer(vocabulary):
    sampler = LlamaSampler(SamplingParams(json_schema={"const": True}), vocabulary)
    low = np.zeros(vocabulary.num_vocab_tokens, np.float32)
    ends = ends_of(vocabulary)
    low[ends] = 30
    pointer = low.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    tokens = [sampler._constrained.sample(pointer)]
    while tokens[-1] not in ends:
        tokens.append(sampler._constrained.sample(pointer))
    assert b"".join(piece_of(vocabulary, token) for token in tokens[:-1]) == b"true"
    for _ in range(3):
        assert sampler._constrained.sample(pointer) in ends  # asked again, it stays ended
    sampler.close()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_logits_that_choose_nothing_are_an_error(vocabulary, value):
    for temperature in (0.0, 1.0):
        sampler = LlamaSampler(SamplingParams(json_schema={"const": True}, temperature=temperature), vocabulary)
        logits = np.full(vocabulary.num_vocab_tokens, value, np.float32)
        with pytest.raises(EngineError, match="No token of this model"):
            sampler._constrained.sample(logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
        sampler.close()


def test_a_schema_that_is_not_supported_makes_no_sampler(vocabulary):
    with pytest.raises(UsageError, match="uniqueItems is not supported"):
        LlamaSampler(SamplingParams(json_schema={"type": "array", "uniqueItems": True}), vocabulary)


def test_a_greedy_token_is_the_likeliest_that_the_grammar_allows(vocabulary):
    """The likeliest of all, or else of those in the mask, which has one where the text is forced."""
    ends = ends_of(vocabulary)
    for seed in range(20):
        rng, schema = np.random.default_rng(seed), random_schema(random.Random(1000 + seed))
        sampler = LlamaSampler(SamplingParams(json_schema=schema), vocabulary)._constrained
        for _ in range(40):
            scores = np.round(rng.normal(0, 3, vocabulary.num_vocab_tokens)).astype(np.float32)  # with many that are level
            allowed = np.flatnonzero(sampler.matcher.allowed())
            assert all(map(sampler.matcher.allows, allowed.tolist()))
            best = int(scores.argmax())
            expected = best if sampler.matcher.allows(best) else allowed[scores[allowed].argmax()]
            token = sampler.sample(scores.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
            assert token == expected
            if token in ends:
                break


def test_a_sequence_of_the_engine_is_constrained_and_its_neighbour_is_not(tmp_path):
    model = LlamaModel(write_model(tmp_path / "tiny.gguf"))
    context = LlamaContext(model, num_cells=512, num_sequences=2, batch_tokens=64, num_threads=1)
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 5}
    context.begin(0, [5], SamplingParams(json_schema=schema, temperature=2.0, repeat_penalty=1.3, seed=4))
    context.begin(1, [5], SamplingParams())
    tokens = [5, 5]
    texts = [b"", b""]
    ends = ends_of(model)
    for position in range(40):
        assert context.decode([(tokens[i], position, i, True) for i in range(2)])
        tokens = [context.sample(i, i) for i in range(2)]
        if tokens[0] in ends:
            break
        texts = [text + piece_of(model, token) for text, token in zip(texts, tokens, strict=True)]
    assert is_valid(json.loads(texts[0]), schema)
    assert len(texts[1]) > 0
    context.close()
    model.close()
