"""What goes wrong, as HTTP says it: one table from errors to statuses. Every answer that is not a success is what `failure` makes.

No answer names a path of this machine: of errors that may, only the kind is told, and the rest goes to the log.
"""

from __future__ import annotations

import logging
import re
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

_STATUSES: tuple[tuple[type[LocalragError], int, str, str | None], ...] = (
    (KnowledgeBaseNotFoundError, 404, "", "index_not_found"),
    (BudgetExceededError, 400, "", "context_length_exceeded"),
    (TimeLimitError, 400, "", None),
    (UsageError, 400, "", None),
    (KnowledgeBaseBusyError, 503, "", "index_busy"),
    (KnowledgeBaseError, 409, "The index cannot be used.", "index_unusable"),
    (ModelError, 503, "The model cannot be used.", "model_unavailable"),
    (EngineError, 503, "The model could not answer.", "model_unavailable"),
    (LocalragError, 500, "The server is not set up rightly.", None),
)
"""(error, status, what is said in place of its message, which may name a path, `code` if the status does not say it)"""

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's `type` of an error, by status; of others below 500 it is `invalid_request_error`, of the rest `server_error`."""
_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    413: "request_too_large",
    415: "unsupported_media_type",
    421: "misdirected_request",
    422: "invalid_request",
    429: "rate_limit_exceeded",
    499: "client_closed_request",
    503: "service_unavailable",
}
_SAMPLED = re.compile(r"(temperature|top_p|presence_penalty|frequency_penalty|seed|max_tokens|logprobs|stop) is ")
"""How a message begins that blames one field of a body."""


class Problem(Exception):  # noqa: N818  # what HTTP calls it (RFC 9457)
    """An answer that is not a success.

    `code` tells programs what went wrong, by default what the status says, and `param` names the field of the body that is to blame.
    """

    def __init__(
        self, status: int, detail: str, code: str | None = None, param: str | None = None, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """As `failure`."""
        return failure(self.status, self.detail, self.code, self.param)

    @property
    def event(self) -> dict[str, Any]:
        """The data of the event that ends a stream which went wrong: the error, with the status that the answer would have had."""
        body = self.body
        return {"error": {**body["error"], "status": self.status}}

    @property
    def parts(self) -> list[Any]:
        """What makes it again, fit for JSON."""
        return [self.status, self.detail, self.code, self.param]


def failure(status: int, detail: str | Sequence[Mapping[str, Any]], code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The body of an answer that is not a success: `detail`, a text or the faults of a form, as FastAPI and the KAITO RAG engine have it,
    and the same as an `error`, as OpenAI has it: `message`, `type`, `param` and `code`.
    """
    if isinstance(detail, str):
        message = detail
    else:
        message = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in detail)
        param = param or next((each["loc"][1] for each in detail if len(each["loc"]) > 1 and isinstance(each["loc"][1], str)), None)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")  # HTTP's
    found = code or _CODES.get(status, "internal_error" if status >= 500 else "invalid_request")
    return {"detail": detail, "error": {"message": message, "type": kind, "param": param, "code": found}}


def problem_of(error: LocalragError) -> Problem:
    """The answer to a request that ended in this error."""
    status, said, code = next((status, said, code) for kind, status, said, code in _STATUSES if isinstance(error, kind))
    if said:
        LOG.warning("%s: %s", type(error).__name__, error.message)
    blamed = _SAMPLED.match(error.message) if isinstance(error, UsageError) else None
    return Problem(status, said or error.message, code, blamed[1] if blamed else None)
