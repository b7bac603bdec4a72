"""How texts are made shorter in a session: by its model where it may write, else by picking sentences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

from localrag.conversation import Covered, Exchange, Rolling
from localrag.errors import LocalragError
from localrag.prompt import Shortening
from localrag.prompt.inputs import Item
from localrag.summary import Level, Source, Summary, summarize
from localrag.summary.writer import Writer
from localrag.text.markup import count_content

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.journal import Journal

MAX_WRITES = 2
"""Texts that a model writes before one answer, of files and of the conversation each: on a CPU each takes some ten seconds. For the
rest sentences are picked; of a conversation, a later turn goes on."""
PART_TOKENS = 1024
"""What of a conversation is summarised at once: long enough to be about something, short enough to be waited for."""
MIN_PART_TOKENS = 128


class Shortener:
    """Makes a Shortening for each prompt, and remembers what it has shortened.

    With `write`, the model writes; without, a conversation has the summaries that it wrote before, and sentences of its own for the rest.
    """

    def __init__(self, engine: Engine, journal: Journal | None, *, window: int, write: bool) -> None:
        self._engine = engine
        self._counter = engine.counter
        self._model = f"{engine.name} {engine.tokenizer.name}"
        self._window = window
        self._writes = write and engine.can_generate
        self._cache = journal.summaries if journal is not None else None
        part_tokens = min(PART_TOKENS, max(MIN_PART_TOKENS, window // 2))
        self._last: tuple[object, Covered] = (None, Covered())
        write_beside = self._write_beside if self._writes else None
        self._rolling = Rolling(write_beside, self._cache, self._count, engine.name, part_tokens, max_writes=MAX_WRITES)

    @cached_property
    def _writer(self) -> Writer:
        """Made when the first text is written: most prompts need none."""
        return Writer(self._engine, n_ctx=self._window)

    def for_prompt(self) -> Shortening:
        """For one prompt: it may have MAX_WRITES texts written."""
        limited = cache(lambda: _Limited(self._writer, MAX_WRITES))

        @cache
        def to_level(item: Item, level: Level, limit: int) -> str:
            source = Source(label=item.label, text=item.body, modified=item.modified)
            if not self._writes or item.section != "attachments":  # passages are short: sentences are picked of them
                return self._summary(source, level, limit, None).text
            try:
                return self._summary(source, level, limit, limited().for_parts(item.cost)).text
            except _SpentError:
                return self._summary(source, level, limit, None).text

        return Shortening(to_level=to_level, to_summary=self._covered)

    def _covered(self, exchanges: Sequence[Exchange], limit: int) -> Covered:
        """The rolling summary. Without a writer it stays as it is until the model has written all of it: each change of it is a prompt
        that is evaluated anew."""
        key = self._rolling.sizes(limit), tuple(message for exchange in exchanges for message in exchange.messages)
        is_new = self._last[0] != key
        if is_new or self._last[1].method != "model":  # somebody may have written it since
            covered = self._rolling.cover(exchanges, limit)
            if is_new or covered.method == "model" or self._writes:
                self._last = key, covered
        return self._last[1]

    def _write_beside(self, text: str, limit: int) -> str:
        """Write a summary, and drop what the model read for it from the KV cache: its cells are wanted for the conversation."""
        with self._engine.forgetting():
            return self._writer(text, limit)

    def _count(self, text: str) -> int:
        """Tokens as they are sent."""
        return count_content(text, self._counter)

    def _summary(self, source: Source, level: Level, limit: int, write: _Limited | None) -> Summary:
        return summarize(
            source,
            level,
            count=self._count,
            limit=limit,
            write=write,
            write_tokens=PART_TOKENS if write is None else write.max_text_tokens,
            cache=self._cache,
            cache_model=self._model,
        )


class _SpentError(LocalragError):
    """No more texts may be written for this prompt."""


class _Limited:
    """A writer that writes so many texts, and then raises."""

    def __init__(self, writer: Writer, most: int) -> None:
        self._writer = writer
        self._left = most
        self._may_begin = True
        self.max_text_tokens = writer.max_text_tokens

    def for_parts(self, num_tokens: int) -> _Limited:
        """Itself, if a text of so many tokens can be written about to its end; else it only lets through what was written before."""
        num_parts = -(-num_tokens // max(1, self.max_text_tokens))
        self._may_begin = num_parts + (num_parts > 1) <= self._left
        return self

    def __call__(self, text: str, max_tokens: int) -> str:
        if not self._may_begin or self._left < 1:
            raise _SpentError("No more texts may be written for this prompt.")
        self._left -= 1
        return self._writer(text, max_tokens)
