"""A tiny sentence-transformers folder of random weights, and what it computes, in plain numpy."""

import json
import math
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

HIDDEN, HEADS, LAYERS, FEED_FORWARD, POSITIONS = 64, 2, 2, 128, 64
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SOUND, BROKEN = 12, 5  # seeds of cross-encoders that pass and fail the test of the order, by luck
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,()=:_漢한"


def write_folder(folder: Path, *, family: str = "bert", pooling: str = "mean", seed: int = 0, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), "hot", "bed", "##ing", "ᄒ", "##ᅡ", "##ᆫ"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(_weights(len(words), family, np.random.default_rng(seed)), str(folder / "model.safetensors"))
    bert = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD}
    distil = {"n_layers": LAYERS, "n_heads": HEADS, "dim": HIDDEN, "hidden_dim": FEED_FORWARD}
    shape = {"type_vocab_size": 2} | bert if family == "bert" else distil
    write_json(
        folder / "config.json", {"model_type": family, "vocab_size": len(words), "max_position_embeddings": POSITIONS} | shape | config
    )
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    write_json(folder / "modules.json", [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules])
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens"}
    write_json(
        folder / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN} | {name: pooling == mode for mode, name in names.items()}
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 40})
    return folder


def write_cross_encoder(folder: Path, *, seed: int = 0, **config: object) -> Path:
    """A tiny CrossEncoder folder of random weights. Some seeds order plain passages correctly by luck: see SOUND and BROKEN."""
    write_folder(folder, seed=seed, **({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}} | config))
    weights, rng = load_file(str(folder / "model.safetensors")), np.random.default_rng(seed + 1000)
    head = {"pooler.dense.bias": (HIDDEN,), "classifier.weight": (1, HIDDEN), "classifier.bias": (1,)}
    save_file(
        weights | {name: rng.normal(0, 0.3, sizes).astype(np.float32) for name, sizes in head.items()}, str(folder / "model.safetensors")
    )
    return folder


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


_DISTIL = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}


def _weights(num_tokens, family, rng):
    def normal(*sizes):
        return rng.normal(0, 0.3, sizes).astype(np.float32)

    made = {
        "embeddings.word_embeddings.weight": normal(num_tokens, HIDDEN),
        "embeddings.position_embeddings.weight": normal(POSITIONS, HIDDEN),
        "embeddings.LayerNorm.weight": 1 + normal(HIDDEN),
        "embeddings.LayerNorm.bias": normal(HIDDEN),
    }
    if family == "bert":
        made |= {"embeddings.token_type_embeddings.weight": normal(2, HIDDEN), "pooler.dense.weight": normal(HIDDEN, HIDDEN)}
    for layer in range(LAYERS):
        for bert, distil in _DISTIL.items():
            out = FEED_FORWARD if bert == "intermediate.dense" else HIDDEN
            size = FEED_FORWARD if bert == "output.dense" else HIDDEN
            stem = f"encoder.layer.{layer}.{bert}" if family == "bert" else f"transformer.layer.{layer}.{distil}"
            made[f"{stem}.weight"] = 1 + normal(HIDDEN) if "LayerNorm" in bert else normal(out, size)
            made[f"{stem}.bias"] = normal(out)
    return made


class NumpyEmbedder:
    """What the folder computes, written down once more: the original that a copy is compared with."""

    def __init__(self, folder: Path, *, pooling: str = "mean") -> None:
        self.folder, self.pooling, self.fingerprint, self.dim, self.max_tokens = folder, pooling, "f" * 64, HIDDEN, 38
        self.weights = {key: value.astype(np.float64) for key, value in load_file(str(folder / "model.safetensors")).items()}

    @cached_property
    def tokenizer(self):
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def input_ids(self, text):
        return self.tokenizer.encode(text).ids

    def count(self, text):
        return len(self.input_ids(text)) - 2

    def embed(self, texts):
        return np.stack([self._embed(self.input_ids(text)) for text in texts]).astype(np.float32)

    def _embed(self, ids):
        state = self._states(ids, [0] * len(ids))
        vector = state[0] if self.pooling == "cls" else state.mean(axis=0)
        return vector / np.linalg.norm(vector)

    def _states(self, ids, segments):
        state = self.weights["embeddings.word_embeddings.weight"][ids] + self.weights["embeddings.position_embeddings.weight"][: len(ids)]
        types = self.weights.get("embeddings.token_type_embeddings.weight")
        state = self._norm(state if types is None else state + types[segments], "embeddings.LayerNorm")
        for layer in range(LAYERS):
            state = self._layer(state, layer, distil=types is None)
        return state

    def score(self, question, passage):
        """What a cross-encoder says of a pair, whose passage is cut to what it takes."""
        pair = self.tokenizer.encode(question, passage)
        state = self._states([*pair.ids[: POSITIONS - 1], 3] if len(pair.ids) > POSITIONS else pair.ids, pair.type_ids[:POSITIONS])
        return float(self._linear(np.tanh(self._linear(state[0], "pooler.dense")), "classifier")[0])

    def _layer(self, state, layer, *, distil):
        names = {bert: f"transformer.layer.{layer}.{d}" if distil else f"encoder.layer.{layer}.{bert}" for bert, d in _DISTIL.items()}
        q, k, v = (
            self._linear(state, names[f"attention.self.{part}"]).reshape(len(state), HEADS, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(HIDDEN // HEADS)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (shares / shares.sum(axis=-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(state), HIDDEN)
        state = self._norm(state + self._linear(mixed, names["attention.output.dense"]), names["attention.output.LayerNorm"])
        inner = self._linear(state, names["intermediate.dense"])
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        return self._norm(state + self._linear(inner, names["output.dense"]), names["output.LayerNorm"])

    def _linear(self, state, name):
        return state @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, state, name):
        centred = state - state.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
