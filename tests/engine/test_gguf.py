"""engine/gguf.py: what it reads agrees with llama.cpp and with the gguf package; what it refuses, it refuses in one clear line."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter

from localrag.engine.gguf import read_header
from localrag.engine.llama_lib import library
from localrag.errors import ModelFileError
from localrag.types import ModelInfo
from tests.gguf_files import (
    ARRAY,
    CHATML,
    INT32,
    STRING,
    UINT64,
    array,
    bpe_keys,
    pair,
    raw_file,
    raw_pairs,
    refusal,
    spm_keys,
    text,
    tiny_tensors,
    write_gguf,
    write_model,
    write_vocab,
)

VOCAB_DIR = Path(__file__).parents[3] / "shared" / "data" / "vocab"
VOCAB_NAMES = ["bert-bge", "deepseek-coder", "llama-bpe", "llama-spm", "phi-3", "qwen2"]


def vocab_file(name: str) -> Path:
    path = VOCAB_DIR / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"needs the shared vocabularies: {path.name} is not there")
    return path


@contextmanager
def llama_model(path: Path, *, vocab_only: bool) -> Iterator[tuple[object, object]]:
    lib = library()
    params = lib.llama_model_default_params()
    params.vocab_only = vocab_only
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    assert model
    try:
        yield lib, model
    finally:
        lib.llama_model_free(model)


def assert_llama_cpp_agrees(path: Path) -> ModelInfo:
    info = read_header(path)
    with llama_model(path, vocab_only=True) as (lib, model):

        def said(key: str) -> str | None:
            buffer = ctypes.create_string_buffer(1 << 18)
            length = lib.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
            return buffer.value.decode() if length >= 0 else None

        arch = said("general.architecture")
        heads = int(said(f"{arch}.attention.head_count") or 0)
        assert info.architecture == arch
        assert info.name == said("general.name")
        assert info.n_ctx_train == int(said(f"{arch}.context_length") or 0)
        assert info.num_layers == int(said(f"{arch}.block_count") or 0)
        assert info.embedding_length == int(said(f"{arch}.embedding_length") or 0)
        assert info.num_heads == heads
        assert info.num_kv_heads == (int(said(f"{arch}.attention.head_count_kv") or heads),) * info.num_layers
        assert info.rope_scaling == said(f"{arch}.rope.scaling.type")
        assert info.rope_freq_base == (float(base) if (base := said(f"{arch}.rope.freq_base")) else None)
        assert info.tokenizer_model == said("tokenizer.ggml.model")
        assert info.tokenizer_pre == said("tokenizer.ggml.pre")
        assert info.chat_template == said("tokenizer.chat_template")
        assert info.vocab_size == lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    assert info.file_size == path.stat().st_size
    return info


@pytest.mark.parametrize("name", VOCAB_NAMES)
def test_real_vocabularies(name: str) -> None:
    info = assert_llama_cpp_agrees(vocab_file(name))
    assert info.is_vocab_only
    assert info.quantization is None


@pytest.mark.model
def test_default_model(model_path) -> None:
    info = assert_llama_cpp_agrees(model_path)
    assert (info.n_ctx_train, info.num_layers, info.num_heads, set(info.num_kv_heads)) == (8192, 30, 9, {3})
    assert (info.head_size_k, info.head_size_v, info.vocab_size, info.num_tensors) == (64, 64, 49_152, 272)
    assert info.quantization == "Q4_1"
    assert info.kv_bytes_per_token == 23_040  # as llama.cpp allocates it


def test_tiny_model_against_the_gguf_package_and_the_loaded_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", changes={"general.file_type": 7, "llama.rope.scaling.type": "yarn"})
    info = read_header(path)
    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert info == ModelInfo(
        path=path,
        file_size=path.stat().st_size,
        gguf_version=fields["GGUF.version"],
        architecture=fields["general.architecture"],
        name=fields["general.name"],
        n_ctx_train=fields["llama.context_length"],
        num_layers=fields["llama.block_count"],
        num_heads=fields["llama.attention.head_count"],
        num_kv_heads=(fields["llama.attention.head_count_kv"],) * 2,
        embedding_length=fields["llama.embedding_length"],
        head_size_k=8,
        head_size_v=8,
        rope_scaling="yarn",
        rope_freq_base=fields["llama.rope.freq_base"],
        sliding_window=None,
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        tokenizer_model=fields["tokenizer.ggml.model"],
        tokenizer_pre=fields["tokenizer.ggml.pre"],
        chat_template=CHATML,
        num_tensors=len(reader.tensors),
        quantization="Q8_0",
        layer_kv=((16, 16),) * 2,
    )
    with llama_model(path, vocab_only=False) as (lib, model):
        assert lib.llama_model_n_ctx_train(model) == info.n_ctx_train
        assert lib.llama_model_n_layer(model) == info.num_layers
        assert lib.llama_model_n_head(model) == info.num_heads
        assert lib.llama_model_n_head_kv(model) == info.num_kv_heads[0]
        assert lib.llama_model_n_embd(model) == info.embedding_length


def test_a_value_for_each_layer(tmp_path: Path) -> None:
    changes = {"llama.attention.head_count_kv": [4, 0], "llama.attention.key_length": 16, "llama.attention.value_length": 24}
    info = read_header(write_model(tmp_path / "m.gguf", changes=changes))
    assert info.num_kv_heads == (4, 0)
    assert info.kv_bytes_per_token == 4 * (16 + 24) * 2


def test_what_is_left_unsaid(tmp_path: Path) -> None:
    unsaid = ["llama.attention.head_count_kv", "general.name", "general.file_type", "llama.rope.freq_base", "tokenizer.ggml.pre"]
    info = read_header(write_model(tmp_path / "m.gguf", changes=dict.fromkeys([*unsaid, "tokenizer.chat_template"])))
    assert info.num_kv_heads == (4, 4)
    assert (info.name, info.quantization, info.rope_freq_base, info.tokenizer_pre, info.chat_template) == (None,) * 5
    assert read_header(write_model(tmp_path / "m.gguf", changes={"tokenizer.chat_template": ""})).chat_template is None


def test_a_vocabulary_without_a_shape_has_zeros(tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "v.gguf", changes={key: None for key in bpe_keys() if key.startswith("llama.")})
    info = read_header(path)
    assert (info.n_ctx_train, info.num_layers, info.num_heads, info.embedding_length) == (0, 0, 0, 0)
    assert (info.num_kv_heads, info.head_size_k, info.head_size_v, info.kv_bytes_per_token) == ((), 0, 0, 0)
    assert info.is_vocab_only
    assert info.vocab_size == 266


def test_sliding_window(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert read_header(write_model(path, changes={"llama.attention.sliding_window": 128})).sliding_window == 128
    assert read_header(write_model(path, changes={"llama.attention.sliding_window": 0})).sliding_window is None
    info = read_header(write_model(path, changes={"llama.attention.key_length_swa": 32}))
    assert (info.head_size_k, info.head_size_v) == (32, 8)  # the larger kind of layer bounds the cache


@pytest.mark.parametrize(
    ("changes", "layer_kv"),
    [
        ({"attention.key_length_mla": 24, "attention.value_length_mla": 16}, ((16, 0), (16, 0))),  # latent: values come from the keys
        ({"attention.shared_kv_layers": 1}, ((16, 16),)),
        ({"nextn_predict_layers": 1}, ((16, 16),)),
        ({"nextn_predict_layers": 9}, ()),
        ({"attention.key_length_swa": 32, "attention.sliding_window_pattern": [True, False]}, ((64, 16), (16, 16))),
        ({"attention.key_length_swa": 32, "attention.sliding_window_pattern": 2}, ((64, 16), (64, 16))),
        ({"attention.causal": False}, ()),
        ({"attention.causal": True}, ((16, 16), (16, 16))),
    ],
)
def test_what_each_layer_keeps(tmp_path: Path, changes: dict[str, object], layer_kv: tuple[tuple[int, int], ...]) -> None:
    info = read_header(write_model(tmp_path / "m.gguf", changes={f"llama.{key}": value for key, value in changes.items()}))
    assert info.layer_kv == layer_kv
    assert info.kv_bytes_per_token == 2 * sum(map(sum, layer_kv))
    assert info.prefix_reuse == "at any token"


def test_recurrent_layers(tmp_path: Path) -> None:
    state = {"llama.ssm.conv_kernel": 4, "llama.ssm.inner_size": 64, "llama.ssm.state_size": 16, "llama.ssm.group_count": 1}
    info = read_header(write_model(tmp_path / "m.gguf", changes=state | {"llama.attention.head_count_kv": [2, 0]}))
    assert info.layer_kv == ((16, 16),)
    assert info.state_bytes == 4 * (3 * (64 + 2 * 16) + 64 * 16)
    assert "recurrent" in info.prefix_reuse
    alone = read_header(
        write_model(tmp_path / "m.gguf", changes=state | {"llama.attention.head_count": 0, "llama.attention.head_count_kv": None})
    )
    assert (alone.layer_kv, alone.state_bytes) == ((), 2 * info.state_bytes)


def test_version_2(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(raw_file(*raw_pairs(), version=2))
    assert read_header(path).gguf_version == 2


def test_a_name_is_shown_on_a_terminal(tmp_path: Path) -> None:
    assert read_header(write_vocab(tmp_path / "v.gguf", changes={"general.name": "a\x1b[31mb\nc"})).name == "a[31mbc"


def test_empty_tokens_are_no_duplicates(tmp_path: Path) -> None:
    tokens = pair("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, text("a") + text("") + text("")))
    path = tmp_path / "v.gguf"
    path.write_bytes(raw_file(*raw_pairs(tokenizer__ggml__tokens=tokens)))
    assert read_header(path).vocab_size == 3


def test_it_needs_the_standard_library_alone() -> None:
    program = "import sys, localrag.engine.gguf; print({'numpy', 'gguf', 'llama_cpp', 'jinja2', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.gguf").message
    assert "is a folder" in refusal(tmp_path).message
    (tmp_path / "file").write_bytes(b"x")
    assert "cannot be read: Not a directory" in refusal(tmp_path / "file" / "model.gguf").message
    assert "cannot be read" in refusal(tmp_path / ("x" * 5000)).message
    assert "cannot be read" in refusal(tmp_path / "nul\0byte").message
    assert "does not exist" in refusal(tmp_path / "two\nlines").message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    assert "is a special file" in refusal(tmp_path / "fifo.gguf").message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not bind root: run the tests as another user")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "v.gguf")
    path.chmod(0)
    assert "Permission denied" in refusal(path).message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"# Notes\nabout printing\nand more", "is not a GGUF file: it starts with b'# Notes\\nabout printing\\na'"),
        (b"\0" * 4096, "is not a GGUF file"),
        (b"GGU", "is not a GGUF file"),
        (b"GGUF", "truncated"),
        (b"GGUF\3\0\0\0\1", "truncated"),
        (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
        (b"GGUF\1\0\0\0" + bytes(16), "version 1"),
        (b"GGUF\0\0\0\0" + bytes(16), "version 0"),
        (b"GGUF\4\0\0\0" + bytes(16), "version 4"),
        (raw_file(), "no tokenizer"),
    ],
)
def test_foreign_content(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert said in refusal(path).message


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "ll ama\n", "not a name"),
        ("llama.context_length", None, "lacks llama.context_length"),
        ("llama.context_length", 0, "has 0 under llama.context_length, where 1 to 134217728 belongs"),
        ("llama.context_length", 2**30, "has 1073741824 under"),
        ("llama.context_length", "512", "has a string under llama.context_length, where a uint32 belongs"),
        ("llama.context_length", [512], "has a int32 array"),
        ("llama.block_count", None, "lacks llama.block_count"),
        ("llama.block_count", 513, "1 to 512"),
        ("llama.embedding_length", None, "lacks llama.embedding_length"),
        ("llama.embedding_length", 3, "heads of 0 elements"),
        ("llama.attention.sliding_window_pattern", [True, False, True], "where 2 of type bool belong"),
        ("llama.attention.causal", 1, "where a bool belongs"),
        ("llama.attention.head_count", None, "no attention heads"),
        ("llama.attention.head_count", 0, "no attention heads"),
        ("llama.attention.head_count", 1025, "0 to 1024"),
        ("llama.attention.head_count_kv", 3, "not a multiple of its 3 KV heads"),
        ("llama.attention.head_count_kv", [2, 2, 2], "has 3 values of type int32"),
        ("llama.attention.head_count_kv", [2, -1], "has -1 under"),
        ("llama.attention.key_length", 1 << 20, "1 to 4096"),
        ("llama.attention.value_length", 0, "1 to 4096"),
        ("llama.attention.sliding_window", 1 << 31, "sliding_window"),
        ("llama.rope.scaling.type", "spiral", "unknown rope scaling 'spiral'"),
        ("llama.rope.freq_base", float("nan"), "has nan under"),
        ("llama.rope.freq_base", float("inf"), "has inf under"),
        ("llama.context_length", 2**32 - 1, "has 4294967295 under llama.context_length"),
        ("general.alignment", 8, "32 to 65536"),
        ("general.alignment", 48, "power of two"),
        ("general.type", "mmproj", "a part of a model (mmproj)"),
        ("tokenizer.ggml.model", None, "no tokenizer"),
        ("tokenizer.ggml.model", "none", "no tokenizer"),
        ("tokenizer.ggml.tokens", None, "no vocabulary"),
        ("tokenizer.ggml.tokens", [1, 2], "no vocabulary"),
        ("tokenizer.chat_template", "x" * ((128 << 10) + 1), "limit is 131072"),
        ("tokenizer.chat_template", 5, "where a string belongs"),
    ],
)
def test_impossible_values(tmp_path: Path, key: str, value: object, said: str) -> None:
    keys = bpe_keys() | {key: value}
    assert said in refusal(write_gguf(tmp_path / "m.gguf", keys, tiny_tensors(266))).message


def test_context_lengths_of_other_types(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for type_, layout, value in ((UINT64, "<Q", 2**63), (11, "<q", -1), (INT32, "<i", -1), (UINT64, "<Q", 512)):
        path.write_bytes(raw_file(*raw_pairs(llama__context_length=pair("llama.context_length", type_, struct.pack(layout, value)))))
        assert "where a uint32 belongs" in refusal(path).message


def tokens_pair(*tokens: str | bytes) -> bytes:
    return pair("tokenizer.ggml.tokens", ARRAY, array(STRING, len(tokens), b"".join(map(text, tokens))))


@pytest.mark.parametrize("tokens", [("a", b"\xff", "c"), ("a", b"\xc3", b"\xa9")])
def test_tokens_that_llama_cpp_would_not_survive(tmp_path: Path, tokens: tuple[str | bytes, ...]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_file(*raw_pairs(tokenizer__ggml__tokens=tokens_pair(*tokens))))
    assert "not UTF-8" in refusal(path).message


def test_sentencepiece_needs_its_bytes(tmp_path: Path) -> None:
    keys = spm_keys()
    assert read_header(write_gguf(tmp_path / "m.gguf", keys)).vocab_size == 266
    keys["tokenizer.ggml.tokens"] = [f"x{token}" if token.startswith("<0x8") else token for token in keys["tokenizer.ggml.tokens"]]
    assert "lacks 16 of the 256 byte tokens" in refusal(write_gguf(tmp_path / "m.gguf", keys)).message


def test_parts_of_a_split_model(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(raw_file(*raw_pairs(), pair("split.count", 2, struct.pack("<H", 3))))
    assert "m-00002-of-00003.gguf does not exist" in refusal_of_another(path).message
    keys = [*raw_pairs(), pair("split.count", 2, struct.pack("<H", 3))]
    for number, words in ((2, "is not part 2 of 3"), (1, "m-00003-of-00003.gguf does not exist")):
        (tmp_path / "m-00002-of-00003.gguf").write_bytes(raw_file(*keys, pair("split.no", 2, struct.pack("<H", number))))
        assert words in refusal_of_another(path).message
    assert "is one of 3 parts" in refusal(tmp_path / "m-00002-of-00003.gguf").message
    path.rename(tmp_path / "m.gguf")
    error = refusal(tmp_path / "m.gguf")
    assert "is one of 3 parts" in error.message
    assert "NAME-00001-of-00003.gguf" in str(error.hint)


def refusal_of_another(path: Path) -> ModelFileError:
    """The error of a file that names one of its other parts."""
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    return caught.value


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=10)
    for key, value in bpe_keys().items():
        if key != "general.architecture":
            add = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for name, tensor_ in tiny_tensors(266).items():
        writer.add_tensor(name, tensor_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = sorted(tmp_path.glob("m-*.gguf"))
    info = read_header(first)
    assert (info.num_tensors, info.file_size) == (20, first.stat().st_size + second.stat().st_size)
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    assert "is truncated" in refusal_of_another(first).message
    second.write_bytes(first.read_bytes())
    assert "is not part 2 of 2" in refusal_of_another(first).message


def test_architecture_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_file(*raw_pairs()[1:]))
    assert "lacks general.architecture" in refusal(path).message
