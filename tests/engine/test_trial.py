"""engine/sandbox.py: what kills or blocks llama.cpp costs an error, and only the first time a file is seen costs anything."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from benchmarks import headers
from localrag.engine import sandbox
from localrag.engine.gguf import read_header
from localrag.engine.sandbox import ensure_safe
from localrag.errors import EngineError, ModelFileError
from tests.gguf_files import assert_well_said, bpe_keys, spm_keys, tiny_tensors, write_gguf, write_model, write_vocab

SHA256 = "0" * 64


def refusal(path: Path, home: Path | None = None, **options: object) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        ensure_safe(path, home=home, **options)
    error = caught.value
    assert_well_said(error, path)
    return error


def record(home: Path) -> dict[str, str]:
    return json.loads((home / "trials.json").read_text())


def write_killer(path: Path) -> Path:
    """A sound model, but for a norm in half precision, which llama.cpp cannot multiply by."""
    half = {"blk.1.attn_norm.weight": np.ones(32, np.float16)}
    write_gguf(path, bpe_keys(), tiny_tensors(266) | half)
    read_header(path)  # its header is right
    return path


def test_a_file_that_passed_is_not_tried_again(tmp_path: Path) -> None:
    path, home = write_model(tmp_path / "m.gguf"), tmp_path / "home"
    ensure_safe(path, home=home, sha256=SHA256)
    assert list(record(home).values()) == ["whole"]
    write_killer(path)  # with the sha256 that the other one had, it is taken for the other one
    ensure_safe(path, home=home, sha256=SHA256)
    ensure_safe(path, home=home, sha256=SHA256, vocab_only=True)
    assert len(record(home)) == 1
    assert "SIGABRT" in refusal(path, home).message  # by its status and first bytes it is another one
    assert len(record(home)) == 1  # what failed is not kept


def test_without_a_sha256_a_file_is_known_by_its_status_and_its_first_bytes(tmp_path: Path) -> None:
    path, home = write_vocab(tmp_path / "v.gguf"), tmp_path / "home"
    for _ in range(2):
        ensure_safe(path, home=home, vocab_only=True)
    assert list(record(home).values()) == ["vocabulary"]
    status = path.stat()
    write_vocab(path, changes={"general.name": "Tino"})
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    ensure_safe(path, home=home, vocab_only=True)
    assert len(record(home)) == 2


def test_a_sentencepiece_model_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf", spm_keys(), tiny_tensors(266))
    monkeypatch.chdir(tmp_path)
    ensure_safe(Path("m.gguf"), home=None)


def test_a_vocabulary_that_passed_says_nothing_of_the_weights(tmp_path: Path) -> None:
    path, home = write_killer(tmp_path / "m.gguf"), tmp_path / "home"
    ensure_safe(path, home=home, vocab_only=True)
    error = refusal(path, home)
    assert "is not safe to load: llama.cpp crashes on it (SIGABRT)" in error.message
    assert "unsupported types" in error.message
    assert (error.numbers["signal"], error.numbers["exit_code"]) == ("SIGABRT", -signal.SIGABRT)
    assert list(record(home).values()) == ["vocabulary"]


@pytest.mark.parametrize(
    ("changes", "factor", "said"),
    [
        ({"tokenizer.ggml.pre": "no-such-thing"}, 1.0, "unknown pre-tokenizer type: 'no-such-thing'"),
        ({"llama.feed_forward_length": 63}, 1.0, "has wrong shape"),
        ({}, float("nan"), "has invalid data"),
        ({}, 1e30, "its logits are NaN"),
    ],
)
def test_what_llama_cpp_refuses(tmp_path: Path, changes: dict[str, object], factor: float, said: str) -> None:
    tensors = {name: tensor * np.float32(factor if tensor.ndim == 1 else 1.0) for name, tensor in tiny_tensors(266).items()}
    path = write_gguf(tmp_path / "m.gguf", bpe_keys() | changes, tensors)
    read_header(path)
    error = refusal(path)
    assert "is refused by llama.cpp: " in error.message
    assert said in error.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama.rope.dimension_count": 4}, "invalid n_rot: 4, expected 8"),
        ({"llama.attention.key_length": 7}, "has wrong shape"),
        ({"llama.attention.layer_norm_rms_epsilon": -1e-5}, "crashes on it"),
        ({"llama.rope.scaling.attn_factor": float("nan")}, "its logits are NaN"),
        ({"llama.nextn_predict_layers": 9}, "crashes on it"),
        ({"llama.block_count": 1}, "wrong number of tensors"),
        ({"llama.embedding_length": 64}, "has wrong shape"),
        ({"llama.expert_count": 4}, "crashes on it"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_group_count": 4}, "crashes on it"),
        ({"tokenizer.ggml.token_type": [1, 1, 1]}, "out of array bounds"),
        ({"tokenizer.ggml.scores": [0.0]}, "out of array bounds"),
        ({"tokenizer.ggml.tokens": [*bpe_keys()["tokenizer.ggml.tokens"][:-1], "the"]}, "crashes on it"),  # one is there twice
    ],
)
def test_contradictions_in_the_header(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", bpe_keys() | changes, tiny_tensors(266))
    read_header(path)
    assert said in refusal(path).message


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("blk.0.attn_norm.weight", np.ones(32, np.int32), "crashes on it"),
        ("blk.0.ffn_down.weight", np.ones((32, 64), np.int32), "crashes on it"),
        ("token_embd.weight", np.ones((265, 32), np.float32), "has wrong shape"),
        ("blk.2.ffn_up.weight", np.ones(32, np.float32), "wrong number of tensors"),
    ],
)
def test_tensors_that_do_not_fit_the_shape(tmp_path: Path, name: str, tensor: np.ndarray, said: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", bpe_keys(), tiny_tensors(266) | {name: tensor})
    read_header(path)
    assert said in refusal(path).message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    assert "cannot be read" in refusal(path).message
    assert "cannot be read" in refusal(path, sha256=SHA256).message


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a":', "\ud800", "[" * 100_000])
def test_a_damaged_record_is_empty(tmp_path: Path, content: str) -> None:
    (tmp_path / "trials.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    passed = sandbox.Passed(tmp_path)
    assert not passed.holds("key", vocab_only=True)
    passed.add("key", vocab_only=False)
    assert passed.holds("key", vocab_only=True)


def test_the_record_is_bounded_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    passed = sandbox.Passed(tmp_path)
    (tmp_path / "trials.json").write_text(json.dumps({str(number): "whole" for number in range(1000)}))
    passed.add("5", vocab_only=False)
    assert list(record(tmp_path)) == [*map(str, range(1000 - sandbox.MAX_KEPT + 1, 1000)), "5"]
    assert [path.name for path in tmp_path.iterdir()] == ["trials.json"]


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "v.gguf")
    ensure_safe(path, home=path, vocab_only=True)  # a file where a folder belongs
    assert path.is_file()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_what_does_not_come_to_an_end_is_ended(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    job = {"path": str(tmp_path / "fifo.gguf"), "vocab_only": True, "spare_bytes": sandbox.SPARE_BYTES, "cpu_s": 4.0}
    ended = sandbox.run("load_worker", job, 2.0)
    assert ended.expired
    assert ended.code == -signal.SIGKILL
    error = sandbox.refused(tmp_path / "fifo.gguf", ended, 2.0)
    assert "did not finish within 2 s" in error.message


def test_the_child_keeps_its_limits(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    job = {"path": str(path), "vocab_only": False, "spare_bytes": 1 << 20, "cpu_s": 4.0}
    ended = sandbox.run("load_worker", job, 20.0)
    assert not ended.expired
    assert not ended.succeeded


def test_a_child_that_does_not_start_is_no_fault_of_a_file() -> None:
    with pytest.raises(EngineError, match="did not start: ModuleNotFoundError"):
        sandbox.run("no_such_worker", {}, 20.0)


def test_mutants(tmp_path: Path) -> None:
    rows, facts = headers.run(300, 1, tmp_path)
    total = rows[-1]
    assert facts["not_clean"] == []
    assert total["worst s"] < headers.LIMIT_S
    assert total["worst MB"] < headers.MAX_BYTES / 1e6
    assert total["child hung"] == 0
    assert min(total["refused by header"], total["by llama.cpp"], total["loaded"]) > 20
