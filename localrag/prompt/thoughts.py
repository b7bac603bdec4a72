"""What a model may think before it answers, and the tokens that end its thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from localrag.markup import EncodedPart, Part, encode
from localrag.thinking import Thinking, mark_ids
from localrag.tokens import ChatTemplate, Tokenizer


def end_ids(think_tokens: int, template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end thoughts; none if there are no thoughts: the model has none, or in so many tokens there is no room for them."""
    if not think_tokens or template.thinking is None:
        return ()
    parts = encode([Part("thinking", template.thinking.end, is_markup=True)], tokenizer)
    ids = tuple(token for part in parts for token in part.token_ids if token != tokenizer.bos_id)  # that begins prompts, nothing else
    return ids if len(ids) < think_tokens else ()


def thinking_of(
    parts: Sequence[EncodedPart], max_tokens: int, ends: tuple[int, ...], *, template: ChatTemplate, tokenizer: Tokenizer
) -> Thinking | None:
    """What an engine needs to know of the thoughts behind a prompt of these parts; None if there are none."""
    form = template.thinking
    if form is None or not ends:
        return None
    last = list(takewhile(lambda each: each.part.is_markup, reversed(parts)))
    tail = "".join(each.part.text for each in reversed(last))
    return Thinking(
        form=form, is_open=form.is_open(tail), max_tokens=max_tokens, end_ids=ends, mark_ids=mark_ids(form, tokenizer.special_texts)
    )
