"""Sampling with numpy: token masks of a grammar, and log probabilities. Imported only when one of them is asked for."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localrag.engine.backend import Logprobs
from localrag.errors import EngineError

if TYPE_CHECKING:
    from localrag.engine.grammar import Matcher


def logprobs_of(row: Any, num_vocab_tokens: int, num_top: int) -> Logprobs:  # noqa: ANN401  # a pointer to floats
    """The log-softmax of a row of logits, which may change afterwards; of tokens that are level, the lower id is first."""
    scores = np.ctypeslib.as_array(row, (num_vocab_tokens,)).astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    least = np.partition(scores, -num_top)[-num_top] if 0 < num_top < len(scores) else -np.inf
    found = np.flatnonzero(scores >= least) if num_top else np.empty(0, np.intp)
    order = found[np.argsort(-scores[found], kind="stable")][:num_top]
    return Logprobs(lambda token: float(scores[token]), tuple(map(int, order)))


_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data
_Logits = NDArray[np.float32]
_Ids = NDArray[np.intp]


class ConstrainedSampler:
    """One sequence's sampler under a grammar.

    `choose` is a chain of llama.cpp's samplers that ends in a choice, None for the likeliest token (the first of several); `penalties`
    a chain that only changes logits, or None. The first choice is the unconstrained one. Where the grammar forbids it, a
    second is made among the tokens that it allows; where it forces the text, that is the next token of its usual tokenisation.
    """

    def __init__(self, lib: Any, matcher: Matcher, *, num_vocab_tokens: int, choose: Any = None, penalties: Any = None) -> None:  # noqa: ANN401  # C pointers
        self.lib = lib
        self.matcher = matcher
        self.num_vocab_tokens = num_vocab_tokens
        self._choose_chain, self._penalties = choose, penalties

    def sample(self, logits: Any) -> int:  # noqa: ANN401  # a pointer to floats
        """The next token from the vocabulary's logits; it is accepted. EngineError if the grammar allows none."""
        if not logits:
            raise EngineError("There is nothing to sample from.")
        scores = np.ctypeslib.as_array(logits, (self.num_vocab_tokens,))
        if self._penalties:
            scores = self._apply(self._penalties, np.arange(len(scores)), scores)[0]["logit"].copy()
        token = self._choose(np.arange(len(scores)), scores)
        if token is None or not self.matcher.allows(token):
            allowed = np.flatnonzero(self.matcher.allowed() & (scores > -np.inf))
            token = self._choose(allowed, scores)
        if token is None:
            raise EngineError("No token of this model continues the answer in its grammar.", hint="Use another schema or another model.")
        self.matcher.accept(token)
        for chain in (self._penalties, self._choose_chain):
            if chain:
                self.lib.llama_sampler_accept(chain, token)
        return token

    def _choose(self, ids: _Ids, scores: _Logits) -> int | None:
        """One of these ids by their scores; None if there is none to choose."""
        if not len(ids):
            return None
        if self._choose_chain is None:
            token = int(ids[scores[ids].argmax()])
            return token if scores[token] > -np.inf else None  # NaN compares false, too
        chosen, at = self._apply(self._choose_chain, ids, scores[ids])
        return int(chosen[at]["id"]) if 0 <= at < len(chosen) and np.isfinite(scores[chosen[at]["id"]]) else None

    def _apply(self, sampler: Any, ids: _Ids, scores: _Logits) -> tuple[NDArray[Any], int]:  # noqa: ANN401  # C pointers
        """The candidates after a sampler, which can reorder and shorten them, and which of them it selected (-1: none)."""
        candidates = np.zeros(len(ids), _CANDIDATE)
        candidates["id"], candidates["logit"] = ids, scores
        lib = self.lib
        data = ctypes.cast(candidates.ctypes.data, lib.llama_token_data_p)
        array = lib.llama_token_data_array(data=data, size=len(candidates), selected=-1, sorted=False)
        lib.llama_sampler_apply(sampler, ctypes.byref(array))
        return candidates[: array.size], int(array.selected)
