import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from localrag.errors import KnowledgeBaseError, ModelFileError, ModelNotFoundError
from localrag.kb.embedder import SentenceTransformerEmbedder


@pytest.fixture
def folder(tmp_path):
    """What an embedder's folder holds, with a tokenizer of five words that cuts off and pads, and weights that are none."""
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "hot": 3, "bed": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "1_Pooling").mkdir()
    _json(tmp_path, "1_Pooling/config.json", {"word_embedding_dimension": 12})
    _json(tmp_path, "modules.json", [{"path": "", "type": "T"}, {"path": "1_Pooling", "type": "P"}, {"path": "2_Normalize", "type": "N"}])
    _json(tmp_path, "sentence_bert_config.json", {"max_seq_length": 10})
    _json(tmp_path, "config.json", {"hidden_size": 99, "max_position_embeddings": 512})
    return tmp_path


def _json(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_it_counts_whole_texts_without_special_tokens(folder):
    embedder = SentenceTransformerEmbedder(folder)
    assert [embedder.count(text) for text in ("", "hot", "hot bed", "hot " * 100)] == [0, 1, 2, 100]
    assert (embedder.max_tokens, embedder.dim) == (8, 12)  # 10 less [CLS] and [SEP]
    assert embedder.input_ids("hot bed " * 10) == [1, *[3, 4] * 10, 2]


def test_a_text_over_the_limit_is_an_error_with_its_numbers(folder):
    with pytest.raises(KnowledgeBaseError, match="A text of 9 tokens is longer than the 8 ") as caught:
        SentenceTransformerEmbedder(folder).embed(["bed", "hot " * 9])
    assert caught.value.numbers == {"num_tokens": 9, "limit_tokens": 8}


def test_dimensions_and_length_where_other_files_say_them(folder):
    (folder / "sentence_bert_config.json").unlink()
    (folder / "1_Pooling" / "config.json").unlink()
    embedder = SentenceTransformerEmbedder(folder)
    assert (embedder.max_tokens, embedder.dim) == (510, 99)
    (folder / "2_Dense").mkdir()
    _json(folder, "2_Dense/config.json", {"in_features": 99, "out_features": 7})
    _json(folder, "modules.json", [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}])
    assert SentenceTransformerEmbedder(folder).dim == 7


def test_the_fingerprint_changes_with_all_that_shapes_a_vector(folder):
    seen = {SentenceTransformerEmbedder(folder).fingerprint}
    assert SentenceTransformerEmbedder(folder).fingerprint in seen
    assert len(next(iter(seen))) == 64
    for name in (
        "model.safetensors",
        "tokenizer.json",
        "1_Pooling/config.json",
        "config.json",
        "sentence_bert_config.json",
        "modules.json",
    ):
        with (folder / name).open("a") as file:
            file.write(" ")
        seen.add(SentenceTransformerEmbedder(folder).fingerprint)
    assert len(seen) == 7
    (folder / "README.md").write_text("no part of it")
    assert SentenceTransformerEmbedder(folder).fingerprint in seen


def test_a_known_sha256_is_taken_for_the_weights(folder):
    import hashlib  # noqa: PLC0415

    sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert SentenceTransformerEmbedder(folder, sha256=sha256).fingerprint == SentenceTransformerEmbedder(folder).fingerprint
    assert SentenceTransformerEmbedder(folder, sha256="0" * 64).fingerprint != SentenceTransformerEmbedder(folder).fingerprint


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "modules.json"])
def test_a_file_that_is_missing(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelNotFoundError, match=name) as caught:
        SentenceTransformerEmbedder(folder)
    assert "models pull" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("sentence_bert_config.json", "not json"),
        ("sentence_bert_config.json", '{"max_seq_length": "ten"}'),
        ("sentence_bert_config.json", '{"max_seq_length": 2}'),
        ("sentence_bert_config.json", "[1]"),
    ],
)
def test_a_file_that_is_damaged_is_one_clear_error(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(ModelFileError) as caught:
        _ = SentenceTransformerEmbedder(folder).max_tokens
    assert "\n" not in str(caught.value)


def test_counting_loads_no_torch(folder):
    code = (
        "import sys; from pathlib import Path; from localrag.kb.embedder import SentenceTransformerEmbedder as E\n"
        "e = E(Path(sys.argv[1])); e.count('hot'), e.max_tokens, e.dim, e.fingerprint\n"
        "print([name for name in ('numpy', 'torch', 'transformers', 'sentence_transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
