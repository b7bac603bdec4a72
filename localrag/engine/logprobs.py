"""How likely a model held each token, from its logits. Imported when the first answer asks for it: it takes numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from localrag.engine.backend import Logprobs


def logprobs_of(row: Any, num_vocab_tokens: int, num_top: int) -> Logprobs:  # noqa: ANN401  # a pointer to floats
    """The log-softmax of a row of logits, which may change afterwards; of tokens that are level, the lower id is first."""
    scores = np.ctypeslib.as_array(row, (num_vocab_tokens,)).astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    least = np.partition(scores, -num_top)[-num_top] if 0 < num_top < len(scores) else -np.inf
    found = np.flatnonzero(scores >= least) if num_top else np.empty(0, np.intp)
    order = found[np.argsort(-scores[found], kind="stable")][:num_top]
    return Logprobs(lambda token: float(scores[token]), tuple(map(int, order)))
