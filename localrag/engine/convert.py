"""Convert a sentence-transformers folder of the BERT family to a GGUF file, so that llama.cpp computes the same vectors or scores.

The folder's configuration is checked first: a model that llama.cpp would compute differently is refused, with the reason.
query_embedder.py compares the vectors of an embedder's copy with the original's; rerank.py tests a cross-encoder's copy on two questions.
Weights are read with numpy; torch is not imported.

Source: src/models/bert.cpp and src/llama-vocab.cpp of llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrag.errors import ModelFileError
from localrag.files import create_private, make_private_folder

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

_MAX_JSON_BYTES = 64 << 20
_POOLINGS = {"mean": 1, "cls": 2}
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED = 1, 2, 3, 5  # token types
_MOSTLY_F16 = 1  # a value of general.file_type
_FLOATS = ("F32", "F16", "F64")
# Name of a tensor in the folder, without its prefix -> its name in a GGUF file.
_OUTER = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
_LAYER = re.compile(r"(?:encoder|transformer)\.layer\.(\d{1,3})\.(.+)")
_INNER = {  # BERT's names, then DistilBERT's
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
_LEFT_OUT = re.compile(r"pooler\.|cls\.|vocab_|embeddings\.position_ids$")  # tensors that an embedder does not need
_HEAD = {"pooler.dense": "cls", "classifier": "cls.output"}  # of a cross-encoder
_RANK = 4  # llama.cpp's number for the pooling that scores texts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The sizes from a config.json, under the same names for BERT and DistilBERT."""

    num_layers: int
    num_heads: int
    hidden: int
    feed_forward: int
    positions: int
    num_token_types: int
    vocab_size: int
    epsilon: float


def convert(folder: Path, target: Path, *, ranks: bool = False) -> None:
    """Write the model in `folder` to `target`: matrices as f16; norms, biases, positions and a cross-encoder's head as f32.

    The folder holds an embedder or, with `ranks`, a cross-encoder. The file appears under its name only when it is complete.
    ModelFileError, with the reason, for a damaged folder or a model that llama.cpp computes differently.
    """
    config = _read_json(folder / "config.json")
    shape = _shape(folder, config)
    if ranks:
        _check_head(folder, config)
    pooling = _RANK if ranks else _pooling(folder)
    tokenizer = _read_json(folder / "tokenizer.json")
    from gguf import GGUFWriter  # noqa: PLC0415  # heavy

    part = target.with_name(f".{target.name}.{os.getpid()}")
    make_private_folder(target.parent)
    try:
        create_private(part)
        writer = GGUFWriter(part, "bert")
        _write_keys(writer, folder, shape, pooling)
        _write_vocabulary(writer, folder, tokenizer, shape)
        for name, tensor in _tensors(folder, shape, ranks=ranks):
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _shape(folder: Path, config: Mapping[str, Any]) -> _Shape:
    family = config.get("model_type")
    if family == "bert":
        names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "hidden_act")
    elif family == "distilbert":
        names = ("n_layers", "n_heads", "dim", "hidden_dim", "activation")
    else:
        raise _refused(folder, f"its family is {family!r}; only BERT and DistilBERT are supported")
    layers, heads, hidden, feed_forward = (_count(folder, config, name) for name in names[:4])
    if config.get(names[4], "gelu") not in ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_python"):
        raise _refused(folder, f"its activation is {config[names[4]]!r}; llama.cpp uses gelu")
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise _refused(folder, "it is not an encoder with absolute positions")
    return _Shape(
        num_layers=layers,
        num_heads=heads,
        hidden=hidden,
        feed_forward=feed_forward,
        positions=_count(folder, config, "max_position_embeddings"),
        num_token_types=_count(folder, config, "type_vocab_size") if family == "bert" else 1,
        vocab_size=_count(folder, config, "vocab_size"),
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
    )


def _count(folder: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, int) and 0 < value < 2**31:
        return value
    raise _refused(folder, f"its config.json has {value!r} under {key}")


def _pooling(folder: Path) -> int:
    """Return llama.cpp's number for the pooling. ModelFileError if the modules do more than embed, pool and normalize."""
    modules = _read_json(folder / "modules.json", kind=list)
    entries = [module if isinstance(module, dict) else {} for module in modules]
    kinds = [str(module.get("type")).rpartition(".")[2] for module in entries]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or entries[0].get("path") != "":
        raise _refused(folder, f"its modules are {', '.join(kinds)}; only Transformer, Pooling and Normalize are supported")
    config = _read_json(folder / str(entries[1].get("path")) / "config.json")
    modes = {name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for name, on in config.items() if on is True}
    modes -= {"include_prompt"}
    if isinstance(mode := config.get("pooling_mode"), str):
        modes = {mode}
    if len(modes) != 1 or not modes <= _POOLINGS.keys():
        raise _refused(folder, f"its pooling is {' and '.join(sorted(modes)) or 'unknown'}; only mean and cls are supported")
    return _POOLINGS[modes.pop()]


def _check_head(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelFileError unless the model scores a pair with one number, by the head that BERT has."""
    names = config.get("architectures")
    if names != ["BertForSequenceClassification"]:
        raise _refused(folder, f"its architecture is {names!r}; only BertForSequenceClassification is supported")
    labels = config.get("id2label")
    if not isinstance(labels, dict) or len(labels) != 1:
        raise _refused(folder, "it does not return one number per pair")


def _write_keys(writer: GGUFWriter, folder: Path, shape: _Shape, pooling: int) -> None:
    writer.add_name(folder.name)
    writer.add_file_type(_MOSTLY_F16)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.num_heads)
    writer.add_layer_norm_eps(shape.epsilon)
    writer.add_causal_attention(False)
    writer.add_uint32("bert.pooling_type", pooling)


def _write_vocabulary(writer: GGUFWriter, folder: Path, tokenizer: Mapping[str, Any], shape: _Shape) -> None:
    """Write the WordPiece vocabulary the way llama.cpp spells it: tokens that begin a word are marked, not those that continue one."""
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "WordPiece" or not isinstance(model.get("vocab"), dict):
        raise _refused(folder, "its tokenizer is not WordPiece")
    added = {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens", ()) if token.get("special")}
    special = added | {name: index for name, index in model["vocab"].items() if name in ("[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]")}
    tokens = [f"[unused-{index}]" for index in range(shape.vocab_size)]
    types = [_UNUSED] * shape.vocab_size
    for text, index in {**model["vocab"], **special}.items():
        if not (isinstance(index, int) and 0 <= index < shape.vocab_size):
            raise _refused(folder, f"its tokenizer has the id {index!r}, but its weights have {shape.vocab_size} tokens")
        if text in special:
            tokens[index], types[index] = text, _UNKNOWN if text == model.get("unk_token") else _CONTROL
        else:
            tokens[index], types[index] = (text[2:] if text.startswith("##") else "\u2581" + text), _NORMAL
    writer.add_token_type_count(shape.num_token_types)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    normalizer = tokenizer.get("normalizer") or {}
    lowercase = bool(normalizer.get("lowercase", True))
    writer.add_bool("tokenizer.ggml.normalizer.lowercase", lowercase)
    strips = normalizer.get("strip_accents")
    writer.add_bool("tokenizer.ggml.normalizer.strip_accents", lowercase if strips is None else bool(strips))
    for name, add in (
        ("[CLS]", writer.add_bos_token_id),
        ("[SEP]", writer.add_eos_token_id),
        ("[SEP]", writer.add_sep_token_id),
        ("[UNK]", writer.add_unk_token_id),
        ("[PAD]", writer.add_pad_token_id),
        ("[MASK]", writer.add_mask_token_id),
    ):
        if name in special:
            add(special[name])
        elif name in ("[CLS]", "[SEP]", "[UNK]"):
            raise _refused(folder, f"its tokenizer has no {name}")


def _tensors(folder: Path, shape: _Shape, *, ranks: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor with its GGUF name. ModelFileError if a tensor is missing, repeated or unknown, or the file is unreadable."""
    import numpy as np  # noqa: PLC0415  # heavy
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  # an extension module

    required_names = {*_OUTER.values()} - ({"token_types"} if shape.num_token_types == 1 else set())
    required_names |= {f"blk.{layer}.{name}" for layer in range(shape.num_layers) for name in _INNER.values()}
    required_names |= {*_HEAD.values()} if ranks else set()
    names: set[str] = set()
    try:
        with safe_open(folder / "model.safetensors", framework="numpy") as weights:
            for key in weights.keys():  # noqa: SIM118  # not a mapping
                bare = key.removeprefix("bert.").removeprefix("distilbert.").replace(".gamma", ".weight").replace(".beta", ".bias")
                head = _HEAD.get(bare.rpartition(".")[0]) if ranks else None
                if head is None and _LEFT_OUT.match(bare):
                    continue
                name = _name(folder, bare, shape) if head is None else f"{head}.{bare.rpartition('.')[2]}"
                if name in names:  # with and without a prefix, or under its old and its new name
                    raise _refused(folder, f"it has the tensor {bare!r} twice")
                names.add(name)
                if (kind := weights.get_slice(key).get_dtype()) not in _FLOATS:
                    raise _refused(folder, f"its weights are {kind}; only {', '.join(_FLOATS)} are supported")
                tensor = weights.get_tensor(key)
                is_matrix = tensor.ndim == 2 and not name.startswith(("position_embd", "token_types", "cls"))
                yield name, np.ascontiguousarray(tensor, dtype=np.float16 if is_matrix else np.float32)
    except (SafetensorError, OSError) as error:
        raise _refused(folder, f"its weights cannot be read: {error}") from error
    if missing := {f"{name}.weight" for name in required_names} - names:
        raise _refused(folder, f"it lacks {len(missing)} tensors, including {min(missing)}")


def _name(folder: Path, key: str, shape: _Shape) -> str:
    stem, _, kind = key.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    name = _OUTER.get(stem) if layer is None else _INNER.get(layer[2])
    if name is None or kind not in ("weight", "bias") or (layer is not None and int(layer[1]) >= shape.num_layers):
        raise _refused(folder, f"it has the tensor {key!r}, which BERT does not have")
    return f"{name}.{kind}" if layer is None else f"blk.{int(layer[1])}.{name}.{kind}"


def _read_json(file: Path, kind: type = dict) -> Any:  # noqa: ANN401  # JSON
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise _refused(file.parent, f"its {file.name} is too long")
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(file.parent, f"its {file.name} cannot be read ({type(error).__name__})") from error
    if not isinstance(value, kind):
        raise _refused(file.parent, f"its {file.name} is damaged")
    return value


def _refused(folder: Path, why: str) -> ModelFileError:
    return ModelFileError(
        f"The model in {folder.name} cannot be converted: {' '.join(why.split())[:300]}.", hint="It runs in sentence-transformers."
    )
