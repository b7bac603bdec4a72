"""Sentences of the evidence that an answer may quote: their numbers in the prompt, their places in the source, and their tokens.

The model writes only the tag of a sentence, `[KB#12.3]`. The engine copies the text, so a quote is exact by construction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from localrag.citation import untagged
from localrag.prompt.layout import source_text
from localrag.text.markup import as_content
from localrag.text.sentences import Span, sentences
from localrag.text.tokens import Tokenizer
from localrag.types import Hit, Quote

QUOTE = "\n\nAnswer in one or two sentences from the sources above. Begin with the tag of the sentence that you use, like [{label}.1]."

OPENS, CLOSES = ' "', '"'
"""What the engine writes around a quote, after its tag."""

_ITEM_MARK = re.compile(r"\s*+(?:[-*+•]\s++(?=\S))?+")


def numbered_text(hit: Hit, body: str | None = None) -> str:
    """Format a chunk for the prompt, as `source_text` does, with the tag of each sentence that may be quoted before it."""
    return source_text(hit, body, safe=partial(_numbered, hit))


def quotable(hit: Hit, body: str) -> tuple[Span, ...]:
    """Return the spans in the chunk's text of the sentences that may be quoted from a passage shown as `body`, in order.

    Sentence s is number s - 1. Only whole sentences of the source count, without the mark of a list item. Headings and lines without a
    letter are left out, and so are sentences that contain the tag of a source, which would become a citation.
    """
    return tuple(span for _, span, _ in _pieces(hit, body.strip()) if span is not None)


def _numbered(hit: Hit, text: str) -> str:
    pieces, number = [], 0
    for piece, span, start in _pieces(hit, text):
        if span is None:
            pieces.append(piece)
        else:
            number += 1
            pieces.append(f"{piece[:start]}[{hit.label}.{number}] {piece[start:]}")
    return "".join(pieces)


def _pieces(hit: Hit, text: str) -> Iterator[tuple[str, Span | None, int]]:
    """Yield the sentences of a text without tags, each with its span in the chunk's text if it may be quoted, and where it starts."""
    safe = untagged(text)
    pieces, safe_pieces = list(sentences(text)), list(sentences(safe))
    if len(pieces) != len(safe_pieces):
        yield safe, None, 0
        return
    source, at = list(_spans(hit.chunk.text)), 0
    for piece, shown in zip(pieces, safe_pieces, strict=True):
        (start, end), place = _trimmed(piece), None
        sentence = piece[start:end]
        if piece == shown and not sentence.startswith("#") and any(map(str.isalpha, sentence)):
            place = next((i for i in range(at, len(source)) if hit.chunk.text[slice(*source[i])] == sentence), None)
        at = at if place is None else place + 1
        yield shown, None if place is None else source[place], start


def _spans(text: str) -> Iterator[Span]:
    """Yield the span of each sentence of a text."""
    position = 0
    for each in sentences(text):
        start, end = _trimmed(each)
        yield position + start, position + end
        position += len(each)


def _trimmed(sentence: str) -> Span:
    """Return the start and end of a sentence without the white space around it and the mark of a list item."""
    mark = _ITEM_MARK.match(sentence)
    return mark.end() if mark else 0, len(sentence.rstrip())


@dataclass(frozen=True, slots=True)
class Quotable:
    """The sentences that an answer may quote, as spans in the texts of their chunks, by label."""

    hits: Mapping[str, Hit]
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)

    @classmethod
    def of(cls, shown: Iterable[tuple[Hit, str]]) -> Quotable:
        """Return the sentences of passages, each given with the body that the prompt shows."""
        shown = list(shown)
        return cls({hit.label: hit for hit, _ in shown}, {hit.label: quotable(hit, body) for hit, body in shown})

    def copies(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the label of each sentence, such as `KB#12.3`, with the tokens that copy it.

        A sentence is left out if these tokens would not give exactly its text, if there is a control token among them, or if it contains
        a `stop` string.
        """
        copies = []
        for label, spans in self.spans.items():
            for number, (start, end) in enumerate(spans, 1):
                text = f"{OPENS}{self.hits[label].chunk.text[start:end]}{CLOSES}"
                token_ids = None if any(each in text for each in stop) else _exact_ids(text, tokenizer)
                if token_ids is not None:
                    copies.append((f"{label}.{number}", token_ids))
        return tuple(copies)

    def quotes(self, text: str, copied: Iterable[Span]) -> tuple[Quote, ...]:
        """Return the quotes of an answer. `copied` are the spans of `text` that the engine copied, quotation marks included."""
        quotes = []
        for start, end in copied:
            label, _, number = text[:start].rpartition("[")[2].removesuffix("]").rpartition(".")
            chunk, span = self.hits[label].chunk, self.spans[label][int(number) - 1]
            quotes.append(
                Quote(
                    label=label,
                    sentence=int(number),
                    source=chunk.source,
                    start=chunk.start + span[0],
                    end=chunk.start + span[1],
                    span=(start + len(OPENS), end - len(CLOSES)),
                )
            )
        return tuple(quotes)


def _exact_ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """Return plain tokens that give exactly this text; None if there are none. Some tokenizers prepend a space of their own."""
    if as_content(text, tokenizer) != text:
        return None
    raw = text.encode("utf-8", "surrogatepass")
    for form in (text, text.lstrip()):
        token_ids = tuple(tokenizer.encode(form))
        if b"".join(tokenizer.piece(token, special=False) for token in token_ids) == raw:
            return token_ids
    return None
