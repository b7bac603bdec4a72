"""Shorten texts in a session: the model writes summaries if it may, otherwise sentences are extracted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

from localrag.conversation import Covered, Exchange, Rolling
from localrag.errors import LocalragError
from localrag.prompt import Shortening
from localrag.prompt.layout import Item
from localrag.summary import Level, Source, Summary, summarize
from localrag.summary.writer import Writer
from localrag.text.markup import count_content

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.journal import Journal

MAX_WRITES = 2
"""Maximum number of texts that the model writes before one answer, for files and for the conversation each. On a CPU, each takes about ten
seconds. The rest is shortened by extracting sentences; for a conversation, a later turn continues the writing."""
PART_TOKENS = 1024
"""Size in tokens of a part of the conversation to summarise at once: long enough to have a topic, short enough to wait for."""
MIN_PART_TOKENS = 128


class Shortener:
    """Makes a Shortening for each prompt, and caches the shortened texts.

    With `write`, the model writes summaries. Without it, a conversation uses the summaries written earlier, and extracted sentences for
    the rest.
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
        """A Shortening for one prompt, which may write MAX_WRITES texts."""
        limited = cache(lambda: _Limited(self._writer, MAX_WRITES))

        @cache
        def to_level(item: Item, level: Level, limit: int) -> str:
            source = Source(label=item.label, text=item.body, modified=item.modified)
            if not self._writes or item.section != "attachments":  # passages are short: extract sentences
                return self._summary(source, level, limit, None).text
            try:
                return self._summary(source, level, limit, limited().for_parts(item.cost)).text
            except _SpentError:
                return self._summary(source, level, limit, None).text

        return Shortening(to_level=to_level, to_summary=self._covered)

    def _covered(self, exchanges: Sequence[Exchange], limit: int) -> Covered:
        """The rolling summary. Without a writer, it stays unchanged until the model has written all of it, since each change makes the
        prompt be evaluated again."""
        key = self._rolling.sizes(limit), tuple(message for exchange in exchanges for message in exchange.messages)
        is_new = self._last[0] != key
        if is_new or self._last[1].method != "model":  # it may have been written since
            covered = self._rolling.cover(exchanges, limit)
            if is_new or covered.method == "model" or self._writes:
                self._last = key, covered
        return self._last[1]

    def _write_beside(self, text: str, limit: int) -> str:
        """Write a summary, then drop its prompt from the KV cache, to leave the cells to the conversation."""
        with self._engine.forgetting():
            return self._writer(text, limit)

    def _count(self, text: str) -> int:
        """Number of tokens as sent."""
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
    """The limit of texts for this prompt is reached."""


class _Limited:
    """A writer that writes a limited number of texts, then raises."""

    def __init__(self, writer: Writer, most: int) -> None:
        self._writer = writer
        self._left = most
        self._may_begin = True
        self.max_text_tokens = writer.max_text_tokens

    def for_parts(self, num_tokens: int) -> _Limited:
        """Prepare for a text of this many tokens. If its parts exceed the remaining limit, only cached summaries are used."""
        num_parts = -(-num_tokens // max(1, self.max_text_tokens))
        self._may_begin = num_parts + (num_parts > 1) <= self._left
        return self

    def __call__(self, text: str, max_tokens: int) -> str:
        if not self._may_begin or self._left < 1:
            raise _SpentError("No more texts may be written for this prompt.")
        self._left -= 1
        return self._writer(text, max_tokens)
