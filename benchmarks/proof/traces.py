"""What was traced of llama.cpp (peers/tracing.py) as prompts: token ids, and the text that they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_TEXT_MODELS = ("bert", "nomic-bert", "")
"""Architectures of models that embed: what they evaluate is no prompt."""


def prompts(calls: Sequence[dict[str, Any]], *, has_limit: bool) -> list[list[int]]:
    """The prompts among what was evaluated, in order; each begins where a position is not behind the one before it.

    Where an answer was held to one token (`has_limit`), that token is never evaluated, and all that was traced is prompt. Else a single
    token is one of an answer, unless it follows a batch that was full: then it is the rest of a prompt.
    """
    found: list[list[int]] = []
    end, was_full = -1, False
    for call in calls:
        tokens, positions = call["tokens"], call["positions"]
        if call["model"] in _TEXT_MODELS or not tokens:
            continue
        if not found or positions[0] != end:
            found.append([])
        elif len(tokens) == 1 and not has_limit and not was_full:
            end += 1
            continue
        found[-1] += tokens
        end, was_full = positions[-1] + 1, len(tokens) == call["n_batch"]
    return found


@cache
def _vocabulary(model: Path) -> Any:  # noqa: ANN401  # llama-cpp-python's class has no types
    from llama_cpp import Llama  # noqa: PLC0415  # weight

    return Llama(str(model), vocab_only=True, verbose=False)


def text_of(token_ids: Sequence[int], model: Path) -> str:
    """The text that these tokens are, control tokens written out."""
    return _vocabulary(model).detokenize(list(token_ids), special=True).decode("utf-8", "replace")


def tokens_of(text: str, model: Path, *, special: bool) -> list[int]:
    """A text's tokens; with `special`, strings that look like control tokens become them."""
    return list(_vocabulary(model).tokenize(text.encode(), add_bos=False, special=special))
