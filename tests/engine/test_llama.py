"""What would abort the process in C is an error here."""

import subprocess
import sys

import pytest

from localrag.engine.llama import LlamaContext, LlamaModel
from localrag.errors import EngineError, ModelFileError, UsageError
from localrag.types import SamplingParams
from tests.gguf_files import write_model, write_vocab


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return LlamaModel(write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture
def context(model):
    made = LlamaContext(model, num_cells=256, num_sequences=2, batch_tokens=64, num_threads=1)
    yield made
    made.close()


def test_bad_numbers_never_reach_c(model):
    for wrong in ({"num_cells": 0}, {"num_cells": 2**31}, {"num_sequences": 257}, {"num_sequences": 0}, {"num_threads": 0}):
        with pytest.raises(EngineError):
            LlamaContext(model, **{"num_cells": 256, "num_threads": 1, **wrong})


def test_bad_batches_never_reach_c(context):
    fine = (5, 0, 0, True)
    for wrong in ([], [fine] * 65, [(5, 0, 2, False)], [(5, 0, -1, False)], [(5, i, 0, True) for i in range(3)]):
        with pytest.raises(EngineError):
            context.decode(wrong)


def test_what_c_itself_refuses_is_an_error(context):
    for wrong in ([(-1, 0, 0, True)], [(10**6, 0, 0, True)]):
        with pytest.raises(EngineError, match="could not evaluate"):
            context.decode(wrong)


def test_sampling_needs_logits_of_the_last_batch(context):
    context.begin(0, [5], SamplingParams())
    with pytest.raises(EngineError, match="no logits"):
        context.sample(0, 0)
    assert context.decode([(5, 0, 0, False), (6, 1, 0, True)])
    with pytest.raises(EngineError, match="no logits"):
        context.sample(0, 0)
    assert context.sample(0, 1) >= 0


def test_positions_are_those_of_the_cache(context):
    context.begin(1, [5], SamplingParams())
    context.decode([(5, i, 1, False) for i in range(10)])
    assert (context.num_tokens(0), context.num_tokens(1)) == (0, 10)
    assert context.cut(1, 4)
    assert context.num_tokens(1) == 4
    for wrong in (-1, 2, 256):
        with pytest.raises(EngineError):
            context.num_tokens(wrong)


def test_a_vocabulary_alone_makes_no_context(tmp_path):
    vocabulary = LlamaModel(write_vocab(tmp_path / "vocab.gguf"), vocab_only=True)
    with pytest.raises(EngineError, match="vocabulary and no weights"):
        LlamaContext(vocabulary, num_cells=256, num_threads=1)


def test_what_llama_cpp_cannot_load_is_an_error_with_its_reason(tmp_path):
    path = write_model(tmp_path / "odd.gguf", changes={"llama.feed_forward_length": 65})
    with pytest.raises(ModelFileError, match=r"odd\.gguf"):
        LlamaModel(path)


def test_sampling_parameters_are_bounded():
    for wrong in (
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.5},
        {"seed": 2**32},
        {"seed": -1},
        {"max_tokens": 0},
        {"repeat_penalty": float("inf")},
        {"stop": ("",)},
    ):
        with pytest.raises(UsageError):
            SamplingParams(**wrong)


def test_a_script_that_imports_llama_cpp_afterwards_gets_the_whole_package():
    code = (
        "from localrag.engine.llama_lib import library; import sys; lib = library(); assert 'llama_cpp' not in sys.modules; "
        "import llama_cpp; assert llama_cpp.llama_cpp is lib; assert llama_cpp.Llama"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
