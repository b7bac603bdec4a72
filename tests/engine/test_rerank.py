"""Cross-encoders in llama.cpp: the scores of the arithmetic, the test that every file must pass, and copies of folders."""

import shutil
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localrag.engine import gguf
from localrag.engine.convert import convert
from localrag.engine.optimize import quantize
from localrag.engine.rerank import LlamaReranker, open_copy, scoring_path
from localrag.errors import EngineError, ModelFileError
from localrag.kb.embedder import CrossEncoderReranker
from localrag.session.opening import open_reranker
from localrag.settings import Settings
from tests.bert_folders import BROKEN, SOUND, NumpyEmbedder, write_cross_encoder, write_folder
from tests.gguf_files import bpe_keys, tiny_tensors, write_gguf, write_model

PASSAGES = ["hot bedding a", "a 12", "漢 한 bed", "", "a " * 30, "a b c " * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_cross_encoder(tmp_path_factory.mktemp("reranker") / "tiny", seed=SOUND)


@pytest.fixture(scope="module")
def file(folder):
    convert(folder, folder.with_suffix(".gguf"), ranks=True)
    return folder.with_suffix(".gguf")


@pytest.fixture
def reranker(file, folder):
    reranker = LlamaReranker(file, is_trusted=True, encode=CrossEncoderReranker(folder).encode)
    yield reranker
    reranker.close()


def converted(folder, **head):
    """The file of a folder whose head has these tensors."""
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: np.full_like(weights[name], value) for name, value in head.items()}, folder / "model.safetensors")
    convert(folder, folder.with_suffix(".gguf"), ranks=True)
    return folder.with_suffix(".gguf")


def test_the_scores_are_those_of_the_arithmetic(reranker, folder):
    original = NumpyEmbedder(folder)
    for question in ("hot bed", "bed 12 (a)"):
        expected = [original.score(question, passage) for passage in PASSAGES]
        assert reranker.scores(question, PASSAGES) == pytest.approx(expected, abs=0.02)
    assert reranker.num_cut == 2  # the longest passage, for each question
    assert reranker.scores("hot bed", []) == []


def test_scores_do_not_depend_on_their_batch(reranker):
    passages = [f"bed {'a ' * (index % 40)}{index}" for index in range(70)]
    together = reranker.scores("hot bed", passages)
    assert together == pytest.approx([reranker.scores("hot bed", [passage])[0] for passage in passages], abs=0.02)


def test_the_file_s_own_tokenizer_gives_the_same_pairs(file, reranker):
    alone = LlamaReranker(file, is_trusted=True)
    passages = [passage for passage in PASSAGES if passage.isascii()]  # llama.cpp splits Hangul otherwise
    assert alone.scores("hot bed", passages) == pytest.approx(reranker.scores("hot bed", passages), abs=1e-5)
    alone.close()


def test_a_quantized_file_gives_nearly_the_same_scores(file, reranker, tmp_path):
    quantize(file, tmp_path / "q8.gguf", "Q8_0", expected=32 << 20, num_threads=1)
    assert gguf.read_header_and_tensors(tmp_path / "q8.gguf")[1]["token_embd.weight"].type == 8
    small = LlamaReranker(tmp_path / "q8.gguf", is_trusted=True, encode=reranker._encode)
    scores = small.scores("hot bed", PASSAGES), reranker.scores("hot bed", PASSAGES)
    assert np.corrcoef(scores)[0, 1] > 0.99
    small.close()


def test_it_keeps_a_deadline_and_ends(reranker):
    assert reranker.scores_until("hot bed", PASSAGES, time.perf_counter() - 1) is None
    assert len(reranker.scores_until("hot bed", PASSAGES, time.perf_counter() + 60)) == len(PASSAGES)
    reranker.close()
    with pytest.raises(EngineError, match="closed"):
        reranker.scores("hot bed", ["a"])


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ({}, "an unrelated one"),
        ({"classifier.weight": 0.0}, "get the same score"),
        ({"classifier.weight": 3e38}, "the scores of two passages are .*(inf|nan)"),
    ],
)
def test_a_file_that_does_not_rank_is_refused_with_one_line(tmp_path, head, why):
    with pytest.raises(ModelFileError, match=f'tiny.gguf cannot rerank: for "[^"]+", .*{why}') as caught:
        LlamaReranker(converted(write_cross_encoder(tmp_path / "tiny", seed=BROKEN), **head), is_trusted=True)
    assert "\n" not in caught.value.message
    assert "Use another one" in caught.value.hint


def test_what_is_not_a_cross_encoder_is_refused(tmp_path):
    convert(write_folder(tmp_path / "embedder"), tmp_path / "embedder.gguf")
    for path in (tmp_path / "embedder.gguf", write_model(tmp_path / "model.gguf")):
        with pytest.raises(ModelFileError, match="is not a reranker: it has no classification head"):
            LlamaReranker(path, home=tmp_path)
    path = write_gguf(tmp_path / "two.gguf", bpe_keys(), tiny_tensors(266) | {"cls.output.weight": np.ones((2, 32), np.float32)})
    with pytest.raises(ModelFileError, match="it returns 2 numbers per pair"):
        LlamaReranker(path, home=tmp_path)
    for changes, why in (({"id2label": {"0": "a", "1": "b"}}, "one number per pair"), ({"architectures": ["BertModel"]}, "BertModel")):
        with pytest.raises(ModelFileError, match=why):
            convert(write_cross_encoder(tmp_path / "tiny", **changes), tmp_path / "tiny.gguf", ranks=True)


def test_a_folder_is_scored_by_a_copy_that_is_made_once_without_torch(folder, tmp_path):
    settings, original = Settings(home=tmp_path), CrossEncoderReranker(folder)
    assert "the first question makes the copy" in scoring_path(original, settings)
    reranker = open_reranker(settings, str(folder))
    assert isinstance(reranker, LlamaReranker)
    assert reranker.scores("hot bed", ["a 12"]) == pytest.approx([NumpyEmbedder(folder).score("hot bed", "a 12")], abs=0.02)
    assert scoring_path(original, settings).startswith("llama.cpp, from a copy")
    made = reranker.path.stat().st_mtime_ns
    assert open_copy(original, settings).path.stat().st_mtime_ns == made
    assert (tmp_path / "trials.json").read_text().count('"ranks-') == 1  # it was tried in a child, once


def test_a_folder_that_llama_cpp_cannot_replace_stays_with_sentence_transformers(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "electra")
    config = (tmp_path / "electra" / "config.json").read_text()
    (tmp_path / "electra" / "config.json").write_text(config.replace('"bert"', '"electra"'))
    settings = Settings(home=tmp_path / "home")
    assert isinstance(open_reranker(settings, str(tmp_path / "electra")), CrossEncoderReranker)
    assert "only BERT" in scoring_path(CrossEncoderReranker(tmp_path / "electra"), settings)
    assert list((tmp_path / "home").rglob("*.gguf")) == []
