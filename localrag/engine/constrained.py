"""Sample with numpy: grammar token masks and log probabilities. Imported only when a request needs either."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localrag.engine.backend import Logprobs, PartOf
from localrag.errors import EngineError

if TYPE_CHECKING:
    from localrag.engine.grammar import Matcher


def logprobs_of(row: Any, num_vocab_tokens: int, num_top: int) -> Logprobs:  # noqa: ANN401  # a pointer to floats
    """Return the log-softmax of a row of logits and its `num_top` best tokens. Ties are broken by the lower id. The row is copied."""
    scores = np.ctypeslib.as_array(row, (num_vocab_tokens,)).astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    least = np.partition(scores, -num_top)[-num_top] if 0 < num_top < len(scores) else -np.inf
    top = np.flatnonzero(scores >= least) if num_top else np.empty(0, np.intp)
    order = top[np.argsort(-scores[top], kind="stable")][:num_top]
    return Logprobs(lambda token: float(scores[token]), tuple(map(int, order)))


_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data
_Logits = NDArray[np.float32]
_Ids = NDArray[np.intp]


class ConstrainedSampler:
    """Samples the tokens of one sequence under a grammar.

    `choose` is a sampler chain that selects a token; None selects the most likely token, or the lowest id on a tie. `penalties` is a chain
    that only changes logits, or None. Each step first samples without the grammar. If the grammar rejects that token, the step samples
    again from the allowed tokens. If the grammar forces the text, the result is the next token of its usual tokenization.
    """

    def __init__(self, lib: Any, matcher: Matcher, *, num_vocab_tokens: int, choose: Any = None, penalties: Any = None) -> None:  # noqa: ANN401  # C pointers
        self.lib = lib
        self.matcher = matcher
        self.num_vocab_tokens = num_vocab_tokens
        self._choose_chain, self._penalties = choose, penalties

    def sample(self, logits: Any, part_of: PartOf | None = None) -> int:  # noqa: ANN401  # a pointer to floats
        """Sample and accept the next token, given the logits of the whole vocabulary. EngineError if the grammar allows no token.

        Tokens of thoughts, as `part_of` tells, are outside the grammar. None of them may also begin the answer, which would escape it.
        """
        if not logits:
            raise EngineError("There are no logits to sample from.")
        scores = np.ctypeslib.as_array(logits, (self.num_vocab_tokens,))
        if self._penalties:
            scores = self._apply(self._penalties, np.arange(len(scores)), scores)[0]["logit"].copy()
        token = self._choose(np.arange(len(scores)), scores)
        if part_of is not None:
            part = None
            while token is not None and (part := part_of(token)) == "both":
                scores = scores.copy()
                scores[token] = -np.inf
                token = self._choose(np.flatnonzero(scores > -np.inf), scores)
            if token is not None and part == "thoughts":
                self._accept(token)
                return token
        if token is None or not self.matcher.allows(token):
            allowed = np.flatnonzero(self.matcher.allowed() & (scores > -np.inf))
            token = self._choose(allowed, scores)
        if token is None:
            raise EngineError("No token of this model continues the answer in its grammar.", hint="Use another schema or another model.")
        self.matcher.accept(token)
        self._accept(token)
        return token

    def _accept(self, token: int) -> None:
        """Tell the samplers of a token, for penalties."""
        for chain in (self._penalties, self._choose_chain):
            if chain:
                self.lib.llama_sampler_accept(chain, token)

    def take_copied(self) -> tuple[int, ...]:
        """Return the tokens of the quote that follows the last sampled token, once. Penalties count them."""
        copied = self.matcher.take_copied()
        for token in copied:
            self._accept(token)
        return copied

    def _choose(self, ids: _Ids, scores: _Logits) -> int | None:
        """Select one of `ids` by its score; None if no id has a finite score."""
        if not len(ids):
            return None
        if self._choose_chain is None:
            token = int(ids[scores[ids].argmax()])
            return token if scores[token] > -np.inf else None  # NaN compares false, too
        candidates, at = self._apply(self._choose_chain, ids, scores[ids])
        return int(candidates[at]["id"]) if 0 <= at < len(candidates) and np.isfinite(scores[candidates[at]["id"]]) else None

    def _apply(self, sampler: Any, ids: _Ids, scores: _Logits) -> tuple[NDArray[Any], int]:  # noqa: ANN401  # C pointers
        """Apply a sampler chain. Return the candidates, perhaps reordered and filtered, and the index of the selected one or -1."""
        candidates = np.zeros(len(ids), _CANDIDATE)
        candidates["id"], candidates["logit"] = ids, scores
        lib = self.lib
        data = ctypes.cast(candidates.ctypes.data, lib.llama_token_data_p)
        array = lib.llama_token_data_array(data=data, size=len(candidates), selected=-1, sorted=False)
        lib.llama_sampler_apply(sampler, ctypes.byref(array))
        return candidates[: array.size], int(array.selected)
