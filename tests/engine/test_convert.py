import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from localrag.engine.convert import convert
from localrag.engine.embed import LlamaEmbedder
from localrag.engine.gguf import read_header
from localrag.engine.query_embedder import MIN_COSINE, accept, acceptance_texts, convert_for_queries, query_embedder, query_path
from localrag.errors import ModelFileError
from localrag.settings import Settings
from tests.bert_folders import HIDDEN, NumpyEmbedder, write_folder, write_json

TEXTS = ["", "hot bed", "Hot, bedding: 12 (a)", "漢漢 hot", "한 [SEP] bed", "a " * 38]


@pytest.mark.parametrize(("family", "pooling"), [("bert", "mean"), ("bert", "cls"), ("distilbert", "mean")])
def test_a_copy_gives_the_vectors_that_the_arithmetic_gives(tmp_path, family, pooling):
    folder = write_folder(tmp_path / "tiny", family=family, pooling=pooling)
    convert(folder, tmp_path / "tiny.gguf")
    assert read_header(tmp_path / "tiny.gguf").architecture == "bert"
    assert list(tmp_path.glob(".*")) == []
    original = NumpyEmbedder(folder, pooling=pooling)
    copy = LlamaEmbedder(tmp_path / "tiny.gguf", is_trusted=True, max_tokens=38, input_ids=original.input_ids)
    found = accept(copy, original, TEXTS)
    copy.close()
    assert found.worst_cosine > 0.9999
    assert found.is_accepted


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "xlm-roberta"}, "xlm-roberta"),
        ({"hidden_act": "relu"}, "relu"),
        ({"position_embedding_type": "relative_key"}, "absolute"),
        ({"num_hidden_layers": 3}, "lacks 8 tensors"),
        ({"num_hidden_layers": 1}, "does not have"),
        ({"num_hidden_layers": "many"}, "many"),
        ({"vocab_size": 7}, "7 tokens"),
    ],
)
def test_what_is_not_converted_says_why_and_leaves_nothing(tmp_path, changes, why):
    folder = write_folder(tmp_path / "tiny", **changes)
    with pytest.raises(ModelFileError, match=why):
        convert(folder, tmp_path / "tiny.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_tensor_under_two_names_is_not_converted(tmp_path):
    folder = write_folder(tmp_path / "tiny")
    weights = load((folder / "model.safetensors").read_bytes())
    save_file(weights | {"bert.embeddings.LayerNorm.gamma": weights["embeddings.LayerNorm.weight"]}, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"'embeddings\.LayerNorm\.weight' twice"):
        convert(folder, tmp_path / "tiny.gguf")


def test_modules_and_pooling_that_are_not_converted(tmp_path):
    folder = write_folder(tmp_path / "tiny", pooling="max")
    with pytest.raises(ModelFileError, match="pooling is max"):
        convert(folder, tmp_path / "tiny.gguf")
    write_json(
        folder / "modules.json", [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}, {"type": "x.Dense"}]
    )
    with pytest.raises(ModelFileError, match="Dense"):
        convert(folder, tmp_path / "tiny.gguf")
    (folder / "modules.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"modules\.json"):
        convert(folder, tmp_path / "tiny.gguf")


def test_a_copy_that_is_not_as_good_is_not_accepted(tmp_path):
    folder, other = write_folder(tmp_path / "one"), write_folder(tmp_path / "two", seed=1)
    found = accept(NumpyEmbedder(other), NumpyEmbedder(folder), TEXTS)
    assert not found.is_accepted
    assert found.worst_cosine < MIN_COSINE
    same = NumpyEmbedder(folder)
    same.input_ids = lambda _text: [2, 3]
    assert accept(same, NumpyEmbedder(folder), TEXTS).num_other_ids == len(TEXTS) - 1


def test_texts_to_compare_are_many_fit_and_are_the_same_each_time(tmp_path):
    original = NumpyEmbedder(write_folder(tmp_path / "tiny"))
    texts = acceptance_texts(original.count, original.max_tokens)
    assert texts == acceptance_texts(original.count, original.max_tokens)
    assert len(texts) >= 240
    assert len(set(texts)) == len(texts)
    assert max(map(original.count, texts)) == original.max_tokens
    assert "" in texts


def test_the_copy_is_made_once_and_taken_by_queries(tmp_path):
    settings, folder = Settings(home=tmp_path / "home"), write_folder(tmp_path / "tiny")
    original = NumpyEmbedder(folder)
    assert query_embedder(original, settings) is original
    assert "no copy" in query_path(original, settings)
    started = []
    verdict = convert_for_queries(original, settings, on_start=lambda: started.append(1))
    assert verdict.is_accepted, verdict.reason
    assert verdict.num_texts >= 240
    assert convert_for_queries(original, settings, on_start=lambda: started.append(1)) == verdict
    assert started == [1]
    assert query_path(original, settings).startswith("llama.cpp")
    copy = query_embedder(original, settings)
    assert isinstance(copy, LlamaEmbedder)
    assert (copy.fingerprint, copy.max_tokens, copy.dim) == (original.fingerprint, original.max_tokens, HIDDEN)
    assert float(np.sum(copy.embed(["한 hot"]) * original.embed(["한 hot"]))) > MIN_COSINE
    copy.close()
    [gguf] = settings.embedders_dir.glob("*.gguf")
    gguf.write_bytes(gguf.read_bytes()[:-1] + b"\x01")  # weights that were changed
    os.utime(gguf, ns=(0, 0))
    assert query_embedder(original, settings) is original
    assert "changed" in query_path(original, settings)


def test_a_refusal_is_kept_with_its_reason(tmp_path):
    settings, original = Settings(home=tmp_path / "home"), NumpyEmbedder(write_folder(tmp_path / "tiny", model_type="mpnet"))
    verdict = convert_for_queries(original, settings)
    assert not verdict.is_accepted
    assert "mpnet" in query_path(original, settings)
    assert query_embedder(original, settings) is original
    assert convert_for_queries(original, settings) == verdict
    [record] = settings.embedders_dir.glob("*.json")
    for damaged in ("{", "[]", json.dumps({"is_accepted": True}), json.dumps(json.loads(record.read_text()) | {"is_accepted": "yes"})):
        record.write_text(damaged)
        assert "no copy" in query_path(original, settings)


def test_a_query_imports_no_torch(tmp_path):
    settings, folder = Settings(home=tmp_path / "home"), write_folder(tmp_path / "tiny")
    assert convert_for_queries(NumpyEmbedder(folder), settings).is_accepted
    code = (
        "import sys; from pathlib import Path; from localrag.settings import Settings\n"
        "from localrag.kb.embedder import SentenceTransformerEmbedder as E; from localrag.engine.query_embedder import query_embedder\n"
        "original, settings = E(Path(sys.argv[1])), Settings(home=Path(sys.argv[2]))\n"
        "name = original.fingerprint[:32]\n"
        "for file in list(settings.embedders_dir.iterdir()): file.rename(file.with_name(name + file.suffix))\n"
        "embedder = query_embedder(original, settings); embedder.embed(['hot bed'])\n"
        "heavy = ('torch', 'transformers', 'sentence_transformers', 'gguf')\n"
        "print(type(embedder).__name__, [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder), str(settings.home)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "LlamaEmbedder []"
