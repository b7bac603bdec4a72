"""Tiny models whose weights are such that they say what they are to say, in vocabularies that have the marks of thoughts as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.chat_templates import CHATML
from tests.gguf_files import CONTROL, EMBEDDING_LENGTH, NORMAL, bpe_keys, tiny_tensors, write_gguf

WORDS = ["Hm", "Ġso", "Yes", "analysis"]
BRACKETS = ["[THINK]", "[/THINK]"]
CHANNELS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"]
BRACKETS_TEMPLATE = CHATML + "{# [THINK] [/THINK] #}"
CHANNELS_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant{# <|channel|>analysis #}"
)
HM_YES = {"Ċ": "[THINK]", "[THINK]": "Hm", "Hm": "[/THINK]", "[/THINK]": "Yes", "Yes": "<|im_end|>"}
"""Thinks "Hm" behind a prompt of BRACKETS_TEMPLATE, and answers "Yes"."""


def write_reciting(
    path: Path, chain: Mapping[str, str], *, controls: Sequence[str], template: str, changes: Mapping[str, object] | None = None
) -> Path:
    """A model that says, behind each token of `chain`, the next one: nothing but its embeddings and its head is not zero.

    `controls` and WORDS are added to the vocabulary; `changes` set other keys.
    """
    keys = bpe_keys() | dict(changes or {})
    tokens = [*keys["tokenizer.ggml.tokens"], *controls, *WORDS]
    types = [*keys["tokenizer.ggml.token_type"], *[CONTROL] * len(controls), *[NORMAL] * len(WORDS)]
    tensors = {name: tensor if "norm" in name else np.zeros_like(tensor) for name, tensor in tiny_tensors(len(tokens)).items()}
    tensors["output.weight"] = np.zeros((len(tokens), EMBEDDING_LENGTH), np.float32)
    for place, (before, after) in enumerate(chain.items()):
        tensors["token_embd.weight"][tokens.index(before), place] = 1.0
        tensors["output.weight"][tokens.index(after), place] = 1.0
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.chat_template": template}
    return write_gguf(path, keys, tensors)
