"""How texts are made shorter in a session: by its model where it may write, else by picking sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localrag.conversation import Rolling
from localrag.markup import as_content
from localrag.prompt import Shortening
from localrag.prompt.offer import Item
from localrag.summary import Level, Source, summarize
from localrag.writer import Writer

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.journal import Journal

MAX_WRITES = 2
"""Summaries of a conversation that a model writes before one answer; further ones are picked sentences until a later turn."""
PART_TOKENS = 1024
"""What is summarised at once: long enough to be about something, short enough to be waited for on a CPU."""
MIN_PART_TOKENS = 128


def make_shortening(engine: Engine, journal: Journal | None, *, window: int, write: bool) -> Shortening:
    """With `write`, the model writes summaries of the conversation and of files; hits are short, and sentences are picked of them."""
    counter = engine.counter
    writer = Writer(engine) if write and engine.can_generate else None
    cache = journal.summaries if journal is not None else None

    def count(text: str) -> int:
        return counter(as_content(text, counter.tokenizer))

    def to_level(item: Item, level: Level, limit: int) -> str:
        made = summarize(
            Source(label=item.label, text=item.body, modified=item.modified),
            level,
            count=count,
            limit=limit,
            write=writer if item.section == "attachments" else None,
            write_tokens=writer.max_text_tokens if writer is not None else PART_TOKENS,
            cache=cache,
            cache_model=engine.name,
        )
        return made.text

    part_tokens = min(PART_TOKENS, max(MIN_PART_TOKENS, window // 2))
    rolling = Rolling(writer, cache, count, engine.name, part_tokens, max_writes=MAX_WRITES)
    return Shortening(to_level=to_level, to_summary=rolling.cover)
