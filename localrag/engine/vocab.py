"""A model's own tokenizer, through llama.cpp."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from itertools import repeat

from localrag.engine.llama import LlamaModel
from localrag.errors import EngineError, UsageError

_MAX_TEXT_BYTES = 256 * 1024 * 1024  # llama.cpp takes a 32-bit length
_TAG = re.compile(r"</?[^\s<>]{1,60}>|\[/?[A-Z][A-Z_ ]{0,60}\]|<[|｜][^<>]{1,60}[|｜]>")


class LlamaTokenizer:
    """Tokenizer (tokens.py) over a loaded vocabulary. Ids equal those of llama.cpp's own `llama_tokenize`."""

    def __init__(self, model: LlamaModel) -> None:
        self.lib = model.lib
        self.vocab = model.vocab
        self._model = model  # keeps the vocabulary alive
        self._buffer = (model.lib.llama_token * 4096)()
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.num_tokens = model.num_vocab_tokens

    @functools.cached_property
    def name(self) -> str:
        """Identifies the vocabulary by its size, its ends and its special tokens."""
        sample = (0, self.num_tokens // 3, self.num_tokens // 2, self.num_tokens - 1)
        digest = hashlib.sha256(repr((self.num_tokens, [self.text(i) for i in sample], self.special_texts)).encode())
        return f"llama-{digest.hexdigest()[:16]}"

    def text(self, token_id: int) -> str:
        """The vocabulary's own text for a token."""
        raw = self.lib.llama_vocab_get_text(self.vocab, self._checked(token_id))
        return raw.decode("utf-8", "replace") if raw else ""

    @property
    def bos_id(self) -> int | None:
        token = int(self.lib.llama_vocab_bos(self.vocab))
        return token if token >= 0 else None

    @property
    def eos_id(self) -> int | None:
        token = int(self.lib.llama_vocab_eos(self.vocab))
        return token if token >= 0 else None

    @property
    def bos_text(self) -> str:
        return "" if self.bos_id is None else self.text(self.bos_id)

    @property
    def eos_text(self) -> str:
        return "" if self.eos_id is None else self.text(self.eos_id)

    @property
    def adds_bos(self) -> bool:
        return bool(self.lib.llama_vocab_get_add_bos(self.vocab)) and self.bos_id is not None

    @functools.cached_property
    def _attributes(self) -> dict[int, int]:
        """Attributes of the tokens that are special in some way (llama.cpp corrects the file's, so the file is not asked)."""
        get, vocab, lib = self.lib.llama_vocab_get_attr, self.vocab, self.lib
        special = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        found = enumerate(map(get, repeat(vocab), range(self.num_tokens)))  # nothing but the calls: there can be 262,144 of them
        return {i: attributes for i, attributes in found if attributes & special}

    @functools.cached_property
    def special_texts(self) -> tuple[tuple[str, int], ...]:
        mask = self.lib.LLAMA_TOKEN_ATTR_CONTROL | self.lib.LLAMA_TOKEN_ATTR_UNKNOWN
        pairs = ((self.text(i), i) for i, attributes in self._attributes.items() if attributes & mask)
        return tuple((text, i) for text, i in pairs if text)

    @functools.cached_property
    def tag_texts(self) -> tuple[tuple[str, int], ...]:
        mask = self.lib.LLAMA_TOKEN_ATTR_USER_DEFINED
        pairs = ((self.text(i), i) for i, attributes in self._attributes.items() if attributes & mask)
        return tuple((text, i) for text, i in pairs if _TAG.fullmatch(text))

    def strips(self, token_id: int) -> tuple[bool, bool]:
        attributes = self._attributes.get(token_id, 0)
        return bool(attributes & self.lib.LLAMA_TOKEN_ATTR_LSTRIP), bool(attributes & self.lib.LLAMA_TOKEN_ATTR_RSTRIP)

    def encode(self, text: str) -> list[int]:
        raw = _utf8(text)
        count = self._tokenize(raw, len(self._buffer))
        if count < 0:
            self._buffer = (self.lib.llama_token * -count)()
            count = self._tokenize(raw, -count)
        return self._buffer[:count]  # type: ignore[no-any-return]  # a slice of a ctypes array is a list of int

    def count(self, text: str) -> int:
        return abs(self._tokenize(_utf8(text), 0))

    def _tokenize(self, raw: bytes, room: int) -> int:
        count = int(self.lib.llama_tokenize(self.vocab, raw, len(raw), self._buffer, room, False, False))
        if count == -(2**31):
            raise EngineError("The text has more tokens than llama.cpp can count.")
        return count

    def piece(self, token_id: int, *, special: bool = True) -> bytes:
        known = self._pieces.get((token_id, special))
        if known is None:
            known = self._pieces[token_id, special] = self._piece(self._checked(token_id), special=special)
        return known

    def _piece(self, token_id: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(128)
        length = int(self.lib.llama_token_to_piece(self.vocab, token_id, buffer, len(buffer), 0, special))
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = int(self.lib.llama_token_to_piece(self.vocab, token_id, buffer, len(buffer), 0, special))
        return buffer.raw[:length]

    def is_end(self, token_id: int) -> bool:
        return bool(self.lib.llama_vocab_is_eog(self.vocab, self._checked(token_id)))

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.num_tokens:
            raise EngineError(f"Token id {token_id} is not in the vocabulary of {self.num_tokens}.")
        return token_id


def _utf8(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")  # lone surrogates, as in file names, have no UTF-8
    if len(raw) > _MAX_TEXT_BYTES:
        raise UsageError(f"A text of {len(raw)} bytes is too long to tokenise; the limit is {_MAX_TEXT_BYTES}.")
    return raw
