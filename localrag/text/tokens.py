"""Protocols for tokenizers, chat templates and embedders, a counter that caches token counts, and common prefixes of token ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from localrag.errors import ConfigError, KnowledgeBaseError

if TYPE_CHECKING:
    import numpy as np

    from localrag.text.thinking import ThinkingForm
    from localrag.text.tool_calls import CallMarkup
    from localrag.types import Message, ToolSpec


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered prompt: the content of the message with index `message`, or text of the template.

    `tools` marks text that is there because of the tools: template text, or with `is_content` the tools' own descriptions. `call` is the
    index of the message whose tool calls the text belongs to: a name, a part of the arguments, or template text around them. Content,
    which includes every message, must never be read as markup. The content of a tool's result is escaped where the template escapes it.
    """

    text: str
    message: int | None = None
    tools: bool = False
    is_content: bool = False
    call: int | None = None

    def __post_init__(self) -> None:
        if self.message is not None:
            object.__setattr__(self, "is_content", True)


class Tokenizer(Protocol):
    """A model's own tokenizer. Ids are those that the model evaluates."""

    @property
    def name(self) -> str:
        """A unique name of this vocabulary, for caching counts."""
        ...

    @property
    def bos_text(self) -> str: ...
    @property
    def eos_text(self) -> str: ...
    @property
    def adds_bos(self) -> bool:
        """Whether the model wants a BOS token at the start even if its template does not write one."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def special_texts(self) -> Sequence[tuple[str, int]]:
        """(text, id) of every control token. They are parsed in a template and must never come from content."""
        ...

    @property
    def tag_texts(self) -> Sequence[tuple[str, int]]:
        """(text, id) of the user-defined tokens that look like tags and match even in plain text."""
        ...

    def strips(self, token_id: int) -> tuple[bool, bool]:
        """Tell whether this special token swallows white space to its (left, right) when parsed."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokenise plain text: special strings in it are text. No BOS."""
        ...

    def count(self, text: str) -> int:
        """Return `len(encode(text))` without building the list."""
        ...

    def piece(self, token_id: int, *, special: bool = True) -> bytes:
        """Return the bytes of a token. A control token gives its text, or nothing without `special`."""
        ...

    def is_end(self, token_id: int) -> bool:
        """Tell whether this token ends an answer."""
        ...


class ChatTemplate(Protocol):
    """A model's chat template. It sees message roles and the structure of tools, but never their contents."""

    @property
    def thinking(self) -> ThinkingForm | None:
        """How models of this template mark thoughts; None if they do not think."""
        ...

    @property
    def call_markup(self) -> CallMarkup:
        """How models of this template write tool calls."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the last prompt with tools or calls does otherwise than the template, as sentences."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, thinks: bool = True) -> list[Segment]:
        """Render the prompt up to the start of the answer: template text and contents in order, each content once.

        With `tools`, every tool is named; the rest is up to the template. Raises UsageError for tools that are too many, too
        long, nested too deeply or not JSON. Without `thinks`, a reasoning model begins with its answer.
        """
        ...


class Embedder(Protocol):
    """Turns text into unit vectors. `fingerprint` changes whenever the vectors of the same text would."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def max_tokens(self) -> int:
        """The longest text that is embedded whole, in this embedder's own tokens without special ones."""
        ...

    def count(self, text: str) -> int:
        """Count the tokens of `text` with the embedder's own tokenizer, without special ones and without truncation."""
        ...

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return a float32 array of shape (len(texts), dim) with rows of length 1. A text that is too long is an error (`check_length`)."""
        ...


class PrefixedEmbedder:
    """An embedder that was trained with instructions: it reads passages after one text and questions after another.

    `embed` is for passages. Both prefixes are part of the fingerprint, and the longer one is taken off `max_tokens`. `original` embeds
    texts as they are.
    """

    def __init__(self, original: Embedder, *, query_prefix: str, passage_prefix: str) -> None:
        self.original = original
        self._query_prefix = query_prefix
        self._passage_prefix = passage_prefix

    @property
    def fingerprint(self) -> str:
        return prefixed_fingerprint(self.original.fingerprint, self._query_prefix, self._passage_prefix)

    @property
    def dim(self) -> int:
        return self.original.dim

    @property
    def max_tokens(self) -> int:
        """The longest text in tokens, beside a prefix. One token is spare, since a word can be split otherwise after a prefix."""
        longest = max(map(self.original.count, (self._query_prefix, self._passage_prefix)))
        left = self.original.max_tokens - longest - 1
        if left < 1:
            raise ConfigError(f"A prefix of {longest} tokens leaves the embedder no room.", hint="Shorten query_prefix or passage_prefix.")
        return left

    def count(self, text: str) -> int:
        return self.original.count(text)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return self._embed(self._passage_prefix, texts)

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Like `embed`, for questions."""
        return self._embed(self._query_prefix, texts)

    def _embed(self, prefix: str, texts: Sequence[str]) -> np.ndarray:
        check_length(max(map(self.count, texts), default=0), self.max_tokens)
        return self.original.embed([f"{prefix}{text}" for text in texts])


def prefixed_fingerprint(fingerprint: str, query_prefix: str, passage_prefix: str) -> str:
    """Return the fingerprint of an embedder with these prefixes: its own if there are none."""
    if not query_prefix and not passage_prefix:
        return fingerprint
    return sha256(repr((fingerprint, query_prefix, passage_prefix)).encode()).hexdigest()


@runtime_checkable
class QueryEmbedder(Protocol):
    """An embedder that embeds questions in another way than passages."""

    def embed_queries(self, texts: Sequence[str], /) -> np.ndarray: ...


def embed_queries(embedder: Embedder, texts: Sequence[str]) -> np.ndarray:
    """Embed questions, after the embedder's prefix for them if it has one. The result is that of `Embedder.embed`."""
    return embedder.embed_queries(texts) if isinstance(embedder, QueryEmbedder) else embedder.embed(texts)


def check_length(num_tokens: int, max_tokens: int) -> None:
    """Raise KnowledgeBaseError for a text longer than the embedder's `max_tokens`, which it would truncate."""
    if num_tokens > max_tokens:
        raise KnowledgeBaseError(
            f"A text of {num_tokens} tokens is longer than the {max_tokens} that the embedder takes.",
            hint="Cut it into chunks first.",
            num_tokens=num_tokens,
            limit_tokens=max_tokens,
        )


class TokenCounter:
    """Counts tokens and caches the counts by a hash of the text (LRU). The texts themselves are not stored.

    `hits` and `misses` count cache accesses.
    """

    def __init__(self, tokenizer: Tokenizer, *, capacity: int = 65_536) -> None:
        self.tokenizer = tokenizer
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def __call__(self, text: str) -> int:
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        cached_count = self._counts.get(key)
        if cached_count is not None:
            self.hits += 1
            self._counts.move_to_end(key)
            return cached_count
        self.misses += 1
        count = self.tokenizer.count(text)
        self._counts[key] = count
        if len(self._counts) > self.capacity:
            self._counts.popitem(last=False)
        return count


def common_length(tokens: Sequence[int], ids: Sequence[int], start: int = 0) -> int:
    """Number of tokens that `tokens` and `ids[start:]` have in common at their beginning. Bisects list slices, which compare fast."""
    low, high = 0, min(len(tokens), len(ids) - start)
    if tokens[:high] == ids[start : start + high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        low, high = (middle, high) if tokens[low:middle] == ids[start + low : start + middle] else (low, middle)
    return low
