"""What goes wrong, as HTTP says it: one table from errors to statuses. Every answer that is not a success is what `failure` makes.

No answer names a path of this machine: of errors that may, only the kind is told, and the rest goes to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from localrag.errors import (
    BudgetExceededError,
    EngineError,
    KnowledgeBaseBusyError,
    KnowledgeBaseError,
    KnowledgeBaseNotFoundError,
    LocalragError,
    ModelError,
    TimeLimitError,
    UsageError,
)

LOG = logging.getLogger("localrag.server")

_STATUSES: tuple[tuple[type[LocalragError], int, str], ...] = (
    (KnowledgeBaseNotFoundError, 404, ""),
    (BudgetExceededError, 400, ""),
    (TimeLimitError, 400, ""),
    (UsageError, 400, ""),
    (KnowledgeBaseBusyError, 503, ""),
    (KnowledgeBaseError, 409, "The index cannot be used."),
    (ModelError, 503, "The model cannot be used."),
    (EngineError, 503, "The model could not answer."),
    (LocalragError, 500, "The server is not set up rightly."),
)
"""(error, status, what is said in place of its message, which may name a path)"""


class Problem(Exception):  # noqa: N818  # what HTTP calls it (RFC 9457)
    """An answer that is not a success."""

    def __init__(self, status: int, detail: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})


def failure(status: int, detail: str | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of an answer that is not a success: `detail`, a text or the faults of a form, as FastAPI and the KAITO RAG engine have it,
    and the same as an `error` with a message, which OpenAI's clients show.
    """
    message = detail if isinstance(detail, str) else "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in detail)
    return {"detail": detail, **stream_failure(status, message)}


def stream_failure(status: int, message: str) -> dict[str, Any]:
    """The data of the event that ends a stream which went wrong: the status that it would have had, too."""
    return {"error": {"message": message, "code": status}}


def problem_of(error: LocalragError) -> Problem:
    """The answer to a request that ended in this error."""
    status, said = next((status, said) for kind, status, said in _STATUSES if isinstance(error, kind))
    if said:
        LOG.warning("%s: %s", type(error).__name__, error.message)
    return Problem(status, said or error.message)
