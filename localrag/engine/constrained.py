"""Sampling under a grammar. Imported when the first answer asks for it: it takes numpy.

What the model would say anyway is tried first and nearly always fits, which costs microseconds; a pass over the whole vocabulary
costs as much as evaluating a token. llama.cpp ends the process when it is told to accept a token that its grammar forbids, so
nothing is accepted here that the same grammar did not let through in the state that it is in.
"""

from __future__ import annotations

import codecs
import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localrag.errors import EngineError

WINDOW = 256
"""How many of the likeliest tokens are looked at before the whole vocabulary is."""

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data
_Logits = NDArray[np.float32]
_Ids = NDArray[np.intp]


class ConstrainedSampler:
    """One sequence's sampler under a grammar of engine/grammar.py.

    `choose` is a chain that ends in a choice, None for the likeliest token (the first of several); `penalties` a chain that only
    changes logits, or None. Greedy, the tokens are those of a pass over the whole vocabulary. With a temperature, the first choice
    is the unconstrained one, and where the grammar forbids it, a second is made among what it allows of the likeliest.
    """

    def __init__(self, lib: Any, vocab: Any, *, num_vocab_tokens: int, grammar: str, choose: Any = None, penalties: Any = None) -> None:  # noqa: ANN401  # C pointers
        self.lib = lib
        self.vocab = vocab
        self.num_vocab_tokens = num_vocab_tokens
        self._choose_chain, self._penalties = choose, penalties
        self._one = np.zeros(1, _CANDIDATE)
        self._pieces = ctypes.create_string_buffer(256), ctypes.create_string_buffer(256)
        self._pending = b""  # the beginning of a character whose end is in a later token
        self.handle = grammar and lib.llama_sampler_init_grammar(vocab, grammar.encode("ascii"), b"root")
        if not self.handle:  # NULL would end the process when it is used, and an empty grammar allows everything
            raise EngineError("llama.cpp refused the grammar of a JSON schema.", num_bytes=len(grammar))

    def sample(self, logits: Any) -> int:  # noqa: ANN401  # a pointer to floats
        """The next token from the vocabulary's logits; it is accepted. EngineError if no token of the vocabulary goes on."""
        if not self.handle or not logits:
            raise EngineError("There is nothing to sample from.")
        scores = np.ctypeslib.as_array(logits, (self.num_vocab_tokens,))
        if self._penalties:
            scores = self._apply(self._penalties, _candidates(np.arange(len(scores)), scores))[0]["logit"].copy()
        token = self._choose(None, scores)
        if token is not None and self._allows(token):
            return self._accept(token)
        for ids in (_likeliest(scores), np.arange(len(scores))):
            token = self._choose_allowed(ids, scores)
            if token is not None:
                return self._accept(token)
        raise EngineError("No token of this model goes on with the JSON that was asked for.", hint="Use another schema or another model.")

    def _choose_allowed(self, ids: _Ids, scores: _Logits) -> int | None:
        kept, _ = self._apply(self.handle, _candidates(ids, scores[ids]))
        ids = ids[kept["logit"] > -np.inf]
        while len(ids):
            token = self._choose(ids, scores[ids])
            if token is None or self._allows(token):
                return token
            ids = ids[ids != token]  # the grammar lets it through, but it is no text (see _text)
        return None

    def _choose(self, ids: _Ids | None, scores: _Logits) -> int | None:
        """One of `ids` (None: of the whole vocabulary) by their scores."""
        if self._choose_chain is None:
            at = int(scores.argmax())
        else:
            chosen, at = self._apply(self._choose_chain, _candidates(np.arange(len(scores)), scores))
            at = int(chosen[at]["id"]) if 0 <= at < len(chosen) else -1
        if not 0 <= at < len(scores):
            return None
        return at if ids is None else int(ids[at])

    def _apply(self, sampler: Any, candidates: NDArray[Any]) -> tuple[NDArray[Any], int]:  # noqa: ANN401  # C pointers
        """The candidates after a sampler, which can reorder and shorten them, and which of them it selected (-1: none)."""
        lib = self.lib
        data = ctypes.cast(candidates.ctypes.data, lib.llama_token_data_p)
        array = lib.llama_token_data_array(data=data, size=len(candidates), selected=-1, sorted=False)
        lib.llama_sampler_apply(sampler, ctypes.byref(array))
        return candidates[: array.size], int(array.selected)

    def _allows(self, token: int) -> bool:
        self._one[0] = (token, 0.0, 0.0)
        kept, _ = self._apply(self.handle, self._one)
        return bool(kept["logit"][0] == 0.0) and (self._is_end(token) or self._text(token) is not None)

    def _is_end(self, token: int) -> bool:
        return bool(self.lib.llama_vocab_is_eog(self.vocab, token))

    def _text(self, token: int) -> bytes | None:
        """What is left over of a character after the token; None if its bytes are not UTF-8 here or not what the grammar saw.

        The grammar reads the name of a control token as text, of which nothing would come out.
        """
        piece, name = (self._piece(token, special=special) for special in (False, True))
        if not piece or piece != name:
            return None
        raw = self._pending + piece
        try:
            return raw[codecs.utf_8_decode(raw, "strict", False)[1] :]
        except UnicodeDecodeError:
            return None

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = self._pieces[special]
        length = int(self.lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special))
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = int(self.lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special))
        return buffer.raw[:length]

    def _accept(self, token: int) -> int:
        """Go on by a token that `_allows` let through in this very state."""
        if not self._is_end(token):
            self._pending = self._text(token) or b""
        self.lib.llama_sampler_accept(self.handle, token)
        for chain in (self._penalties, self._choose_chain):
            if chain:
                self.lib.llama_sampler_accept(chain, token)
        return token

    def close(self) -> None:
        """Free the grammar; the chains are their owner's."""
        if self.handle:
            self.lib.llama_sampler_free(self.handle)
            self.handle = None


def _candidates(ids: _Ids, scores: _Logits) -> NDArray[Any]:
    made = np.zeros(len(ids), _CANDIDATE)
    made["id"], made["logit"] = ids, scores
    return made


def _likeliest(scores: _Logits) -> _Ids:
    """The ids of the WINDOW highest scores, in their order in the vocabulary, with all that are level with the last."""
    if len(scores) <= WINDOW:
        return np.arange(len(scores))
    return np.flatnonzero(scores >= np.partition(scores, -WINDOW)[-WINDOW])
