"""engine/gguf.py: whatever the bytes are, an answer or a ModelFileError, at once and in little memory."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrag.engine.gguf import read_header
from localrag.errors import ModelFileError
from tests.gguf_files import (
    ARRAY,
    INT32,
    STRING,
    UINT32,
    UINT64,
    array,
    assert_well_said,
    pair,
    raw_file,
    raw_pairs,
    refusal,
    shape_keys,
    tensor,
    text,
    write_gguf,
    write_model,
)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "part.gguf"
    header_bytes = whole.index(b"blk.1.ffn_down.weight")
    for size in [*range(1, header_bytes, 7), *range(header_bytes, len(whole), 1009), len(whole) - 1]:
        path.write_bytes(whole[:size])
        refusal(path)
    error = refusal(path)
    assert f"is truncated: the header claims {len(whole)} bytes, the file has {len(whole) - 1}; 1 byte missing" in error.message
    assert error.numbers["missing_bytes"] == 1
    assert error.numbers["file_bytes"] == len(whole) - 1
    assert "again" in str(error.hint)


def test_a_longer_file_is_whole(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes() + b"more")
    assert read_header(path).num_tensors == 20


HUGE = [2**21 + 1, 2**31, 2**32, 2**61, 2**63, 2**64 - 1]


@pytest.mark.parametrize("huge", HUGE)
@pytest.mark.parametrize("place", ["tensors", "keys", "key", "string", "strings", "integers", "one of the strings", "tensor name", "size"])
def test_huge_counts_cost_nothing(tmp_path: Path, place: str, huge: int) -> None:
    count = struct.pack("<Q", huge)
    head, pairs = b"GGUF" + struct.pack("<I", 3), b"".join(raw_pairs())
    one_tensor = head + struct.pack("<QQ", 1, 7) + pairs
    content = {
        "tensors": head + count + struct.pack("<Q", 7) + pairs,
        "keys": head + bytes(8) + count + pairs,
        "key": head + struct.pack("<QQ", 0, 1) + count + b"general.architecture",
        "string": raw_file(text("general.architecture") + struct.pack("<I", STRING) + count + b"llama"),
        "strings": raw_file(pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<I", STRING) + count + text("a"))),
        "integers": raw_file(pair("tokenizer.ggml.token_type", ARRAY, struct.pack("<I", INT32) + count + bytes(8))),
        "one of the strings": raw_file(pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 2, text("a") + count + b"b"))),
        "tensor name": one_tensor + count + b"token_embd.weight",
        "size": one_tensor + tensor("token_embd.weight", [32, huge], 0, 0),
    }[place]
    path = tmp_path / "m.gguf"
    path.write_bytes(content + bytes(64))
    tracemalloc.start()
    try:
        refusal(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def bad_tensors(*tensors: bytes, num_bytes: int = 1 << 16) -> bytes:
    return raw_file(*raw_pairs(), tensors=tensors, num_bytes=num_bytes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bad_tensors(tensor("a", [32], 0, 0), tensor("a", [32], 0, 128)), "the tensor a twice"),
        (bad_tensors(tensor("a", [32], 0, 32)), "offset 32; expected 0"),
        (bad_tensors(tensor("a", [3], 0, 0), tensor("b", [32], 0, 12)), "expected 32"),
        (bad_tensors(tensor("a", [32], 0, 2**63)), "offset"),
        (bad_tensors(tensor("a", [], 0, 0)), "0 dimensions"),
        (bad_tensors(tensor("a", [1] * 5, 0, 0)), "5 dimensions"),
        (bad_tensors(tensor("a", [32, 0], 0, 0)), "impossible shape 32 x 0"),
        (bad_tensors(tensor("a", [2**40, 2**40], 0, 0)), "impossible shape"),
        (bad_tensors(tensor("a", [33], 2, 0)), "impossible shape"),
        (bad_tensors(tensor("a", [2**40], 0, 0)), "truncated"),
        (bad_tensors(tensor("a", [32], 4, 0)), "the unknown type 4"),
        (bad_tensors(tensor("a", [32], 43, 0)), "type 43"),
        (bad_tensors(tensor("x" * 64, [32], 0, 0)), "64 bytes"),
        (bad_tensors(tensor("", [32], 0, 0)), "the name of tensor 1 of 1"),
        (bad_tensors(tensor("a\0b", [32], 0, 0)), "the name of tensor 1 of 1"),
        (bad_tensors(tensor(b"\xff", [32], 0, 0)), "the name of tensor 1 of 1"),
        (raw_file(*raw_pairs(), pair("llama.block_count", UINT32, bytes(4))), "the key llama.block_count twice"),
        (raw_file(pair("", UINT32, bytes(4))), "the name of key 1"),
        (raw_file(pair(b"\xff\xfe", UINT32, bytes(4))), "the name of key 1"),
        (raw_file(pair("a\nb", UINT32, bytes(4))), "the name of key 1"),
        (raw_file(pair("k" * 70_000, UINT32, bytes(4))), "70000 bytes"),
        (raw_file(pair("key", 13, bytes(8))), "unknown type 13"),
        (raw_file(pair("key", ARRAY, array(ARRAY, 1, array(UINT32, 1, bytes(4))))), "unknown type 9"),
        (raw_file(pair("key", STRING, text(b"x" * ((1 << 20) + 1)))), "limit is 1048576"),
    ],
)
def test_damaged_structure(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert said in refusal(path).message


def test_a_header_larger_than_the_cap(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    payload = array(UINT64, 2 << 20, b"")
    with path.open("wb") as file:  # 17 arrays of 16 MiB, all holes
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 17))
        for index in range(17):
            file.write(pair(f"key{index}", ARRAY, payload))
            file.seek(16 << 20, os.SEEK_CUR)
        file.truncate()
    assert "a header of more than 268435456 bytes" in refusal(path).message


@pytest.fixture(scope="module")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model, and one of a few hundred bytes, so that a mutation is likely to meet what matters."""
    folder = tmp_path_factory.mktemp("small")
    short = shape_keys() | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "c"]}
    return [write_model(folder / "m.gguf"), write_gguf(folder / "s.gguf", short)]


EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.floats(0, 1), st.integers(0, 7)),
        st.tuples(st.just("byte"), st.floats(0, 1), st.integers(0, 255)),
        st.tuples(st.just("count"), st.floats(0, 1), st.sampled_from([0, 1, 2**16, *HUGE])),
        st.tuples(st.just("insert"), st.floats(0, 1), st.integers(0, 2**64 - 1)),
        st.tuples(st.just("cut"), st.floats(0, 1), st.just(0)),
    ),
    min_size=1,
    max_size=6,
)


def edited(content: bytes, edits: list[tuple[str, float, int]], reach: int) -> bytes:
    data = bytearray(content)
    for kind, place, value in edits:
        at = int(place * max(0, min(len(data), reach) - 1))
        if kind == "flip" and data:
            data[at] ^= 1 << value
        elif kind == "byte" and data:
            data[at] = value
        elif kind == "count":
            data[at : at + 8] = struct.pack("<Q", value)
        elif kind == "insert":
            data[at:at] = struct.pack("<Q", value)
        elif kind == "cut":
            del data[at:]
    return bytes(data)


def assert_answers_at_once(path: Path) -> bool:
    """Whether the file is accepted; refused is fine too, and nothing else."""
    info = error = None
    started = time.process_time()
    try:
        info = read_header(path)
    except ModelFileError as caught:
        error = caught
    assert time.process_time() - started < 3
    if info is not None:
        assert 0 < info.vocab_size <= info.file_size
        assert len(info.num_kv_heads) == info.num_layers
    else:
        assert_well_said(error, path)
    return info is not None


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS, which=st.integers(0, 1))
def test_mutated_files(tmp_path: Path, small_files: list[Path], edits: list[tuple[str, float, int]], which: int) -> None:
    path = tmp_path / "mutant.gguf"
    path.write_bytes(edited(small_files[which].read_bytes(), edits, reach=7000))
    assert_answers_at_once(path)


def test_single_bit_flips_over_the_whole_header(tmp_path: Path, small_files: list[Path]) -> None:
    content = small_files[1].read_bytes()
    path = tmp_path / "mutant.gguf"
    generator = random.Random(0)
    answers = []
    for at in range(len(content)):
        path.write_bytes(edited(content, [("flip", at / (len(content) - 1), generator.randrange(8))], reach=len(content)))
        answers.append(assert_answers_at_once(path))
    assert 0 < sum(answers) < len(answers)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=400))
def test_random_bytes_behind_the_magic(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "random.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + content)
    assert_answers_at_once(path)
