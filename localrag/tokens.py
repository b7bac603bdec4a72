"""What counting needs of a tokenizer, a chat template and an embedder, and a counter that never counts a text twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from localrag.messages import Message


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered prompt: text of the template (`message` None), or the content of one message, by index."""

    text: str
    message: int | None = None


class Tokenizer(Protocol):
    """A model's own tokenizer. Ids are what the model evaluates."""

    @property
    def name(self) -> str:
        """Unique for this vocabulary, so that counts can be kept by it."""
        ...

    @property
    def bos_text(self) -> str: ...
    @property
    def eos_text(self) -> str: ...
    @property
    def adds_bos(self) -> bool:
        """Whether the model wants a BOS token before everything, also where its template writes none."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def special_texts(self) -> Sequence[tuple[str, int]]:
        """(text, id) of every control token, which is parsed in a template and must never come from content."""
        ...

    @property
    def tag_texts(self) -> Sequence[tuple[str, int]]:
        """(text, id) of the user-defined tokens that look like tags and match even in plain text."""
        ...

    def strips(self, token_id: int) -> tuple[bool, bool]:
        """Whether this special token swallows white space to its (left, right) when parsed."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: special strings in it are text. No BOS."""
        ...

    def count(self, text: str) -> int:
        """`len(encode(text))`, without building the list."""
        ...

    def piece(self, token_id: int, *, special: bool = True) -> bytes:
        """The bytes that a token stands for; a control token shows its text, or nothing without `special`."""
        ...

    def is_end(self, token_id: int) -> bool:
        """Whether this token ends an answer."""
        ...


class ChatTemplate(Protocol):
    """A model's chat template, which sees message roles but never message contents."""

    def render(self, messages: Sequence[Message]) -> list[Segment]:
        """The rendered prompt up to where the answer begins: template text and contents in order, each content once."""
        ...


class Embedder(Protocol):
    """Text to unit vectors. `fingerprint` changes when the vectors of the same text would."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def max_tokens(self) -> int:
        """The longest text, in this embedder's own tokens without its special ones, that is embedded whole."""
        ...

    def count(self, text: str) -> int:
        """Tokens of `text` by the embedder's own tokenizer, special ones left out, never cut off."""
        ...

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 array of shape (len(texts), dim), each row of length 1. A text that is too long is an error."""
        ...


class TokenCounter:
    """`Tokenizer.count`, remembered for the texts used last (`hits` and `misses` say how often it helped)."""

    def __init__(self, tokenizer: Tokenizer, *, capacity: int = 65_536) -> None:
        self.tokenizer = tokenizer
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._counts: OrderedDict[str, int] = OrderedDict()

    def __call__(self, text: str) -> int:
        known = self._counts.get(text)
        if known is not None:
            self.hits += 1
            self._counts.move_to_end(text)
            return known
        self.misses += 1
        count = self.tokenizer.count(text)
        self._counts[text] = count
        if len(self._counts) > self.capacity:
            self._counts.popitem(last=False)
        return count
