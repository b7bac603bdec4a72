"""A cross-encoder of the default embedder's size in llama.cpp and in sentence-transformers. Its head is random: its order means nothing."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localrag.engine.convert import convert
from localrag.engine.rerank import PLAIN, LlamaReranker, open_copy, scoring_path
from localrag.kb.embedder import CrossEncoderReranker
from localrag.settings import Settings

pytestmark = pytest.mark.model
OTHERS = ("", "[SEP] and [MASK]", "Die Straße nach Köln führt über die Brücke.", "東京特許許可局", "모든 사람은 자유롭다", "nylon " * 600)


@pytest.fixture(scope="module")
def folder(embedder_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker") / "minilm"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedder_path / name, folder)
    config = json.loads((embedder_path / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(json.dumps(config))
    weights, rng = load_file(embedder_path / "model.safetensors"), np.random.default_rng(0)
    weights = {name if name.startswith("bert.") else f"bert.{name}": tensor for name, tensor in weights.items()}
    head = {"classifier.weight": rng.normal(0, 0.3, (1, config["hidden_size"])), "classifier.bias": rng.normal(0, 0.3, (1,))}
    save_file(weights | {name: tensor.astype(np.float32) for name, tensor in head.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_its_scores_are_those_of_sentence_transformers(folder, tmp_path):
    convert(folder, tmp_path / "copy.gguf", ranks=True)
    original = CrossEncoderReranker(folder)
    copy = LlamaReranker(tmp_path / "copy.gguf", is_trusted=True, is_tested=True, encode=original.encode)
    passages = [*(passage for _, passage in PLAIN), *OTHERS]
    for question, _ in PLAIN:
        logits = np.array(copy.scores(question, passages))
        probabilities = np.array(original.scores(question, passages))  # sentence-transformers applies a sigmoid
        np.testing.assert_allclose(1 / (1 + np.exp(-logits)), probabilities, atol=2e-3)
        assert probabilities.std() > 0.01
    assert copy.num_cut == 2
    copy.close()


def test_a_folder_whose_order_is_wrong_is_not_replaced(folder, tmp_path):
    settings, original = Settings(home=tmp_path), CrossEncoderReranker(folder)
    assert open_copy(original, settings) is None
    assert "cannot rerank" in scoring_path(original, settings)
