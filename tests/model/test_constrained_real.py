"""Constrained output with the real model: valid JSON, the tokens of a full pass, and a cost that is small beside evaluation."""

import ctypes
import json
import os
import random
import statistics
import time
from contextlib import contextmanager

import numpy as np
import pytest

from localrag.engine.engine import Engine
from localrag.engine.llama import LlamaSampler
from localrag.engine.loading import open_model
from localrag.types import SamplingParams
from tests.json_schemas import is_valid, random_schema

pytestmark = pytest.mark.model

NUM_ANSWERS = int(os.environ.get("LOCALRAG_TEST_ANSWERS", "32"))  # 200 were valid too
NUM_AT_ONCE = 16
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "city": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["young", "old", "kind", "rich"]}, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["name", "city", "age", "tags", "married"],
}


@pytest.fixture(scope="module")
def engine(model_path, tmp_path_factory):
    with open_model(model_path, name="smollm2-135m", home=tmp_path_factory.mktemp("home")) as opened:
        opened.reserve(4096, num_sequences=NUM_AT_ONCE)
        yield opened


def small_schema(seed):
    """A random schema whose longest text is short enough to be closed within the tokens of an answer."""
    rng = random.Random(seed)
    while True:
        schema = random_schema(rng, rng.randint(1, 3))
        if len(json.dumps(schema)) <= 250:
            return schema


def test_answers_under_random_schemas_are_valid(engine: Engine):
    prompt = engine.tokenizer.encode("Some JSON: ")
    schemas = [small_schema(seed) for seed in range(NUM_ANSWERS)]
    sampling = [
        SamplingParams(json_schema=schema, max_tokens=192, temperature=i % 2 * 0.8, seed=i, repeat_penalty=1.0 + i % 3 * 0.1)
        for i, schema in enumerate(schemas)
    ]
    sequences = [engine.add(prompt, each) for each in sampling]
    while not engine.is_idle:
        engine.step()
    for schema, sequence in zip(schemas, sequences, strict=True):
        assert sequence.finish_reason == "stop", (schema, sequence.text)
        assert is_valid(json.loads(sequence.text), schema), (schema, sequence.text)


def test_an_answer_that_is_cut_off_says_so(engine: Engine):
    prompt = engine.tokenizer.encode("Ann is 34 and lives in Rome. As JSON: ")
    answer = engine.generate(prompt, SamplingParams(json_schema=PERSON, max_tokens=4))
    assert answer.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.text)


def test_tokens_are_the_likeliest_that_the_grammar_allows(engine: Engine):
    """The logits of one answer are replayed. What each way to choose takes is printed, beside what a token takes to evaluate."""
    runner = engine.context.runner
    model = runner.model
    ids = engine.tokenizer.encode("Ann is 34 and lives in Rome. As JSON: ")
    sampler, plain = LlamaSampler(SamplingParams(json_schema=PERSON), model), LlamaSampler(SamplingParams(), model)
    constrained = sampler._constrained
    seconds, tokens = {"plain": [], "constrained": [], "mask": [], "evaluation": []}, []
    runner.cut(0, 0)
    runner.decode([(token, i, 0, i == len(ids) - 1) for i, token in enumerate(ids)])
    index = len(ids) - 1
    for position in range(len(ids), len(ids) + 120):
        scores = np.ctypeslib.as_array(runner.lib.llama_get_logits_ith(runner.handle, index), (model.num_vocab_tokens,)).copy()
        with timed(seconds["mask"]):
            allowed = np.flatnonzero(constrained.matcher.allowed())
        best = int(scores.argmax())
        expected = best if constrained.matcher.allows(best) else allowed[scores[allowed].argmax()]
        with timed(seconds["plain"]):
            plain.sample(runner.handle, index)
        with timed(seconds["constrained"]):
            token = sampler.sample(runner.handle, index)
        assert token == expected
        if engine.tokenizer.is_end(token):
            break
        tokens.append(token)
        with timed(seconds["evaluation"]):
            runner.decode([(token, position, 0, True)])
        index = 0
    runner.cut(0, 0)
    text = b"".join(engine.tokenizer.piece(token) for token in tokens).decode()
    assert is_valid(json.loads(text), PERSON)
    for name, each in seconds.items():
        print(f"{name}: median {1e6 * statistics.median(each):.0f} us, mean {1e6 * statistics.mean(each):.0f} us, {len(each)} tokens")
    print(text)
    sampler.close()
    plain.close()


@contextmanager
def timed(seconds):
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)


def test_the_tokens_of_the_real_vocabulary_under_random_logits(engine: Engine):
    """Whatever the logits are: what is accepted stays valid, byte by byte, in a vocabulary with pieces of characters."""
    model = engine.context.runner.model
    rng = np.random.default_rng(5)
    for seed in range(8):
        schema = small_schema(seed)
        sampler = LlamaSampler(SamplingParams(json_schema=schema), model)
        text = b""
        for _ in range(500):
            logits = rng.normal(0, 4, model.num_vocab_tokens).astype(np.float32)
            token = sampler._constrained.sample(logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
            if engine.tokenizer.is_end(token):
                break
            text += engine.tokenizer.piece(token, special=False)
        assert is_valid(json.loads(text.decode()), schema), (schema, text)
        sampler.close()
