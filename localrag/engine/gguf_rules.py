"""What the parts of a GGUF header must be to one another: tensors to the shape, experts, rotations, the vocabulary to itself.

Source: src/llama-model.cpp (load_hparams), src/llama-vocab.cpp and src/models of llama.cpp, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localrag.engine.gguf_layout import FLOAT32, INT32, STRING, TAKE_A_LANGUAGE_MODEL, TOKENS_KEY, Header, clip
from localrag.errors import ModelFileError

MAX_EXPERTS = 1024
# Under the architecture's name. A NaN or a negative one of these aborts llama.cpp or makes every answer NaN.
_FLOATS = (
    "rope.freq_base_swa",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.group_norm_epsilon",
)
# Where llama.cpp asserts that a head is rotated as a whole.
_ROTATES_WHOLE_HEADS = frozenset(
    """
    apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 dream ernie4_5 ernie4_5-moe
    exaone exaone4 exaone-moe falcon granite granitemoe grok grovemoe hunyuan-moe internlm2 jais2 llada llada-moe llama llama4
    llama-embed maincoder mellum mistral3 olmo olmo2 olmoe orion paddleocr plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl
    qwen3vlmoe rnd1 seed_oss smallthinker smollm3 starcoder2 talkie xverse
    """.split()  # noqa: SIM905  # sixty quoted words would be hard to read
)
_DRAFTERS = ("dflash", "eagle3", "wavtokenizer-dec")  # whose first tensor is of another vocabulary or width
_FLOAT_TYPES = (0, 1, 30)  # F32, F16, BF16
_NO_WEIGHTS = (9, 15, 24, 25, 26, 27, 28)  # Q8_1 and Q8_K, which hold activations, integers, F64: nothing multiplies by them
_MATRICES = re.compile(r"(token_embd|output|blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down|gate_inp)(_exps|_shexp)?))\.weight")
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")


def check_numbers(header: Header, arch: str, *, num_layers: int, head_size_k: int) -> None:
    """What llama.cpp asserts of single numbers, rotations and experts."""
    for key in _FLOATS:
        header.number(f"{arch}.{key}")
    header.integer(f"{arch}.nextn_predict_layers", 0, num_layers - 1)
    _check_rotation(header, arch, head_size_k)
    num_experts = header.integer(f"{arch}.expert_count", 0, MAX_EXPERTS) or 0
    num_used = max(header.integers(f"{arch}.expert_used_count", num_layers, 0, MAX_EXPERTS) or (0,))
    num_groups = header.integer(f"{arch}.expert_group_count", 0, MAX_EXPERTS) or 0
    num_groups_used = header.integer(f"{arch}.expert_group_used_count", 0, MAX_EXPERTS) or 0
    fits = num_used <= num_experts and bool(num_used) == bool(num_experts) and (not num_groups or num_groups < num_experts)
    if num_groups > 1:
        fits = fits and num_experts % num_groups == 0 and 0 < num_groups_used < num_groups
    if not fits:
        counts = f"{num_used} of {num_experts} experts, {num_groups_used} of {num_groups} groups"
        raise header.error(f"has numbers of experts that contradict each other ({counts}).")


def _check_rotation(header: Header, arch: str, head_size_k: int) -> None:
    """Positions are rotations of pairs: of an even number of a head's elements, in most architectures of all of them."""
    key = f"{arch}.rope.dimension_count"
    num_rotated = header.integer(key, 0, head_size_k)
    if num_rotated is None:
        num_rotated = head_size_k if arch in _ROTATES_WHOLE_HEADS else 0
    elif arch in _ROTATES_WHOLE_HEADS and num_rotated != head_size_k and f"{arch}.attention.key_length_swa" not in header.values:
        problem = f"has {num_rotated} under {key}, but its heads have {head_size_k} elements, which {arch} rotates all."
        raise header.error(problem, key=key, value=num_rotated, expected=head_size_k)
    if num_rotated % 2:
        raise header.error(f"rotates {num_rotated} elements of a head ({key}), where an even number belongs.", key=key, value=num_rotated)


def check_tensors(header: Header, arch: str, *, num_layers: int, embedding_length: int) -> None:
    """Tensors belong to a layer that there is, norms and biases are floats, and what every model has is as wide as it says."""
    for name, (sizes, type_) in header.tensors.items():
        block = _BLOCK.match(name)
        if block is not None and int(block[1]) >= num_layers:
            raise header.error(f"has the tensor {name}, but only {num_layers} layers.", tensor=name, num_layers=num_layers)
        if name.endswith(("norm.weight", ".bias")) and type_ not in _FLOAT_TYPES:
            raise header.error(f"stores the tensor {name} as type {type_}, where floats belong.", tensor=name, type_number=type_)
        if type_ in _NO_WEIGHTS and _MATRICES.fullmatch(name):
            raise header.error(f"stores the tensor {name} as type {type_}, which is none for weights.", tensor=name, type_number=type_)
        expected: tuple[int, ...] | None = None
        if name == "token_embd.weight" and arch not in _DRAFTERS:
            expected = (embedding_length, len(header.tokens))
        elif name == "output_norm.weight" or (block is not None and name.endswith(".attn_norm.weight")):
            expected = (embedding_length,)
        if expected is not None and (sizes[: len(expected)] != expected or any(size != 1 for size in sizes[len(expected) :])):
            shape, wanted = (" x ".join(map(str, each)) for each in (sizes, expected))
            raise header.error(f"has the tensor {name} of {shape} elements, where {wanted} belong.", tensor=name, expected=list(expected))


def check_vocabulary(header: Header, tokenizer_model: str) -> None:
    """Every token once, as llama.cpp reads them: it aborts if two are alike."""
    vocabulary = header.values.get(TOKENS_KEY)
    if vocabulary is None or vocabulary.type != STRING or not vocabulary.count:
        raise header.error(f"holds no vocabulary ({TOKENS_KEY}).", hint=TAKE_A_LANGUAGE_MODEL)
    for key, types in (("tokenizer.ggml.scores", (FLOAT32, INT32)), ("tokenizer.ggml.token_type", (INT32,))):
        parallel = header.values.get(key)
        if parallel is not None and (parallel.type not in types or parallel.count != vocabulary.count):
            problem = f"has {parallel.count} values under {key} for {vocabulary.count} tokens, or of the wrong type."
            raise header.error(problem, key=key, num_tokens=vocabulary.count)
    joined = b"\n".join(header.tokens)
    try:
        joined.decode()
    except UnicodeDecodeError:
        raise header.error("has a token in its vocabulary that is not UTF-8.") from None
    tokens: Sequence[bytes] = header.tokens
    if b"\0" in joined:  # a C string ends there
        tokens = [token.partition(b"\0")[0] for token in tokens]
    distinct = set(tokens)
    if b"" in distinct:  # the names that llama.cpp gives them
        tokens = [token or b"[EMPTY_%d]" % index for index, token in enumerate(tokens)]
        distinct = set(tokens)
    if len(distinct) < len(tokens):
        raise _twice(header, tokens)
    # A SentencePiece tokenizer spells what it does not know in bytes, and throws through the C interface if one is missing.
    if tokenizer_model == "llama":
        missing = sum(b"<0x%02X>" % byte not in distinct and bytes([byte]) not in distinct for byte in range(256))
        if missing:
            raise header.error(f"lacks the tokens of {missing} of the 256 bytes, which its kind of tokenizer needs.", num_missing=missing)


def _twice(header: Header, tokens: Sequence[bytes]) -> ModelFileError:
    first_at: dict[bytes, int] = {}
    for index, token in enumerate(tokens):
        first = first_at.setdefault(token, index)
        if first != index:
            break
    return header.error(f"is damaged: its tokens {first} and {index} are the same, {clip(ascii(token.decode()))}.", tokens=[first, index])
