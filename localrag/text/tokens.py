"""What counting needs of a tokenizer, a chat template and an embedder, and a counter that never counts a text twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from localrag.errors import KnowledgeBaseError

if TYPE_CHECKING:
    import numpy as np

    from localrag.text.thinking import ThinkingForm
    from localrag.types import Message, ToolSpec


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered prompt: the content of one message, by index, or else text of the template.

    `tools` marks what is there because of the tools: text of the template, or with `is_content` what the tools themselves say.
    Content, which every message's is, must never be read as markup.
    """

    text: str
    message: int | None = None
    tools: bool = False
    is_content: bool = False

    def __post_init__(self) -> None:
        if self.message is not None:
            object.__setattr__(self, "is_content", True)


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
    """A model's chat template, which sees message roles and the structure of tools, but never contents or what tools say."""

    @property
    def thinking(self) -> ThinkingForm | None:
        """How models of this template mark what they think; None for those that do not think."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, thinks: bool = True) -> list[Segment]:
        """The rendered prompt up to where the answer begins: template text and contents in order, each content once.

        With `tools` every tool is named in it; what else is said of them is up to the template. UsageError for tools that are
        too many, too long, nested too deep or not JSON. Without `thinks` a model that can think begins with its answer.
        """
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
        """float32 array of shape (len(texts), dim), each row of length 1. A text that is too long is an error (`check_length`)."""
        ...


def check_length(num_tokens: int, max_tokens: int) -> None:
    """KnowledgeBaseError for a text of more tokens than the `max_tokens` of its embedder, which would cut it off."""
    if num_tokens > max_tokens:
        raise KnowledgeBaseError(
            f"A text of {num_tokens} tokens is longer than the {max_tokens} that the embedder takes.",
            hint="Cut it into chunks first.",
            num_tokens=num_tokens,
            limit_tokens=max_tokens,
        )


class TokenCounter:
    """`Tokenizer.count`, remembered by the hash of the text for the texts used last.

    `hits` and `misses` say how often that helped. The texts themselves are not kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, capacity: int = 65_536) -> None:
        self.tokenizer = tokenizer
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def __call__(self, text: str) -> int:
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._counts.get(key)
        if known is not None:
            self.hits += 1
            self._counts.move_to_end(key)
            return known
        self.misses += 1
        count = self.tokenizer.count(text)
        self._counts[key] = count
        if len(self._counts) > self.capacity:
            self._counts.popitem(last=False)
        return count
