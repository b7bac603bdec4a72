"""Tokenise a prompt so that content is never read as markup, and each token has an owner.

Special strings are parsed in the template's own text and nowhere else. The plain text between two of them can hold both
template text and contents. It is tokenised in one piece with special strings off, exactly as llama.cpp tokenises it within the
whole rendered prompt. So a prompt without special strings in its contents has the same ids as in training, and any other prompt
has no control token that the template did not write.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from weakref import WeakKeyDictionary, ref

from localrag.errors import TemplateError
from localrag.text.tokens import TokenCounter, Tokenizer

_BREAK = "\u200b"
"""The zero-width space that breaks up a special string in content."""
_LOWER_BAR = "▁".encode()
"""SentencePiece's form of a space: U+2581 in a document comes back as a space."""
_MAX_RUN_TOKENS = 1 << 20
"""Capacity of the cache of runs, in tokens of 12 bytes each: enough for several conversations."""
_SPACE = b" \t\n\v\f\r"
"""Characters that C's isspace() strips next to a token that swallows white space."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the prompt that belongs to one section. Only `is_markup`, the template's own text, can contain control tokens."""

    section: str
    text: str
    is_markup: bool = False
    item: str | None = None


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part and its tokens: those whose first character is in it."""

    part: Part
    token_ids: tuple[int, ...]


def as_content(text: str, tokenizer: Tokenizer) -> str:
    """Return the text as it is sent: strings that would match as tokens even in plain text are broken up by a zero-width space."""
    return _as_content(text, tokenizer, _vocabulary(tokenizer))


def count_content(text: str, counter: TokenCounter) -> int:
    """Count the tokens of a content as it is sent."""
    return counter(as_content(text, counter.tokenizer))


def _as_content(text: str, tokenizer: Tokenizer, vocabulary: _Vocabulary) -> str:
    text = _break(vocabulary.tag_pattern, text)
    pattern = vocabulary.control_pattern
    if pattern is not None and pattern.search(text) and not vocabulary.control_ids.isdisjoint(tokenizer.encode(text)):
        text = _break(pattern, text)  # some tokenizers merge plain text into a control token
    return text


def encode(parts: Sequence[Part], tokenizer: Tokenizer) -> list[EncodedPart]:
    """Tokenise a whole prompt, part by part, in order. BOS is prepended if the model wants one and the template did not write it.

    Contents are sent as `as_content` returns them. Raises TemplateError if content would still yield a control token.
    """
    vocabulary = _vocabulary(tokenizer)
    parts = [part if part.is_markup else _sent(part, _as_content(part.text, tokenizer, vocabulary)) for part in parts]
    owners = _encode(parts, tokenizer, vocabulary)
    if owners is None:
        raise TemplateError(
            "The text would put a control token of the model into the prompt.",
            hint="Remove special strings such as <|im_end|> from it, or use another model.",
        )
    if tokenizer.adds_bos and owners and tokenizer.bos_id is not None:
        first = next((ids[0] for ids in owners if ids), None)
        if first != tokenizer.bos_id:
            owners[0].insert(0, tokenizer.bos_id)
    return [EncodedPart(part, tuple(ids)) for part, ids in zip(parts, owners, strict=True)]


def _sent(part: Part, text: str) -> Part:
    return part if text == part.text else replace(part, text=text)


class _Pieces(dict[int, bytes]):
    """Caches the bytes of each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._piece = ref(tokenizer)

    def __missing__(self, token_id: int) -> bytes:
        tokenizer = self._piece()
        assert tokenizer is not None  # it is the caller
        piece = self[token_id] = tokenizer.piece(token_id)
        return piece


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokenised plain text. `starts` are the byte offsets at which the tokens start."""

    token_ids: array[int]
    starts: array[int]
    has_control: bool
    has_tag: bool


class _Vocabulary:
    """Data about a tokenizer for splitting and checking, prepared once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.controls = {text: token_id for text, token_id in tokenizer.special_texts if text}
        self.control_ids = frozenset(self.controls.values())
        self.tag_ids = frozenset(token_id for _, token_id in tokenizer.tag_texts)
        self.control_pattern = _alternation(self.controls)
        self.tag_pattern = _alternation(text for text, _ in tokenizer.tag_texts)
        self._pieces = _Pieces(tokenizer)
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()
        self._num_run_tokens = 0

    def tokenised(self, run: bytes, tokenizer: Tokenizer) -> _Run:
        """Tokenise a run of plain text. Results are cached, because a conversation repeats most of its text."""
        key = blake2b(run, digest_size=16).digest()
        tokens = self._runs.get(key)
        if tokens is None:
            token_ids = tokenizer.encode(run.decode("utf-8"))
            has_control, has_tag = (not ids.isdisjoint(token_ids) for ids in (self.control_ids, self.tag_ids))
            starts = array("Q", _starts(run, token_ids, self._pieces))
            tokens = self._runs[key] = _Run(array("i", token_ids), starts, has_control, has_tag)
            self._num_run_tokens += len(token_ids)
            while self._num_run_tokens > _MAX_RUN_TOKENS:
                self._num_run_tokens -= len(self._runs.popitem(last=False)[1].token_ids)
        else:
            self._runs.move_to_end(key)
        return tokens


_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    if tokenizer not in _vocabularies:
        _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return _vocabularies[tokenizer]


def _alternation(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Match any of the texts, longest first, as llama.cpp does."""
    ordered = sorted(texts, key=lambda text: (-len(text.encode()), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _break(pattern: re.Pattern[str] | None, text: str) -> str:
    return text if pattern is None else pattern.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)


def _encode(parts: Sequence[Part], tokenizer: Tokenizer, vocabulary: _Vocabulary) -> list[list[int]] | None:
    """Return token ids for each part, or None if content yielded a control token or a tag."""
    owners: list[list[int]] = [[] for _ in parts]
    run: list[tuple[int, str]] = []  # the plain text since the last special token, as (part, text)
    strip_left = False
    for index, part in enumerate(parts):
        position = 0
        matches = vocabulary.control_pattern.finditer(part.text) if part.is_markup and vocabulary.control_pattern else ()
        for match in matches:
            token_id = vocabulary.controls[match[0]]
            left, right = tokenizer.strips(token_id)
            run.append((index, part.text[position : match.start()]))
            if not _encode_run(run, parts, owners, tokenizer, vocabulary, strip_left=strip_left, strip_right=left):
                return None
            owners[index].append(token_id)
            run, strip_left, position = [], right, match.end()
        run.append((index, part.text[position:]))
    return owners if _encode_run(run, parts, owners, tokenizer, vocabulary, strip_left=strip_left, strip_right=False) else None


def _encode_run(
    run: Sequence[tuple[int, str]],
    parts: Sequence[Part],
    owners: list[list[int]],
    tokenizer: Tokenizer,
    vocabulary: _Vocabulary,
    *,
    strip_left: bool,
    strip_right: bool,
) -> bool:
    """Tokenise one run and assign each token to the part that holds its first character. Return False if content forged a token."""
    raw = [text.encode("utf-8", "replace") for _, text in run]
    whole = b"".join(raw)
    run_bytes = whole.lstrip(_SPACE) if strip_left else whole
    skipped = len(whole) - len(run_bytes)
    if strip_right:
        run_bytes = run_bytes.rstrip(_SPACE)
    if not run_bytes:
        return True
    tokens = vocabulary.tokenised(run_bytes, tokenizer)
    if tokens.has_control:
        return False
    token_ids, starts = tokens.token_ids, tokens.starts
    first = end = 0
    for place, (index, _) in enumerate(run):
        end += len(raw[place])
        last = len(token_ids) if place == len(run) - 1 else bisect_left(starts, end - skipped, lo=first)
        owners[index] += token_ids[first:last]
        if tokens.has_tag and not parts[index].is_markup and not vocabulary.tag_ids.isdisjoint(token_ids[first:last]):
            return False
        first = last
    return True


def _starts(raw: bytes, token_ids: Sequence[int], known_pieces: _Pieces) -> list[int]:
    """Return the byte offset at which each token of a run starts.

    Most tokenizers are lossless, so the pieces add up to the text. Others prepend a space, swallow white space or change
    letters: then each piece is searched for close after the last one, and a piece that is not found starts where the last one
    ended.
    """
    pieces = list(map(known_pieces.__getitem__, token_ids))
    if b"".join(pieces) == raw:
        return list(accumulate(map(len, pieces[:-1]), initial=0))
    starts, position = [], 0
    for piece in pieces:
        start, end = (position, position + len(piece)) if raw.startswith(piece, position) else _near(raw, position, piece)
        starts.append(start)
        position = end
    return starts


def _near(raw: bytes, position: int, piece: bytes) -> tuple[int, int]:
    """Find a piece that does not match exactly at `position`. Return its start and end."""
    lower_bars = piece.replace(b" ", _LOWER_BAR)
    without_prefix = piece[1:] if piece.startswith(b" ") else b""  # tokenizers prepend a space to text, also after each special token
    for form in (lower_bars, without_prefix):
        if form and raw.startswith(form, position):
            return position, position + len(form)
    start = raw.find(piece, position, position + len(piece) + 64)
    if start >= 0 and piece.strip(_SPACE) and not raw[position:start].strip(_SPACE):
        return start, start + len(piece)
    return position, position
