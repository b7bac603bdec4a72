"""What goes wrong, as HTTP says it: one table from errors to statuses. Every answer that is not a success is `{"detail": …}`.

No answer names a path of this machine: of errors that may, only the kind is told, and the rest goes to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

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


def problem_of(error: LocalragError) -> Problem:
    """The answer to a request that ended in this error."""
    status, said = next((status, said) for kind, status, said in _STATUSES if isinstance(error, kind))
    if said:
        LOG.warning("%s: %s", type(error).__name__, error.message)
    return Problem(status, said or error.message)
