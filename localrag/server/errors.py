"""Map errors to HTTP statuses and bodies. `failure` makes the body of every error response.

Responses never contain paths of this machine. If an error message may contain one, the response has a generic message, and the log has
the full one.
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
    UnanswerableError,
    UsageError,
)

LOG = logging.getLogger("localrag.server")

_STATUSES: tuple[tuple[type[LocalragError], int, str, str | None], ...] = (
    (KnowledgeBaseNotFoundError, 404, "", "index_not_found"),
    (BudgetExceededError, 400, "", "context_length_exceeded"),
    (TimeLimitError, 400, "", None),
    (UsageError, 400, "", None),
    (KnowledgeBaseBusyError, 503, "", "index_busy"),
    (UnanswerableError, 422, "", "unanswerable"),
    (KnowledgeBaseError, 409, "The index cannot be used.", "index_unusable"),
    (ModelError, 503, "The model cannot be used.", "model_unavailable"),
    (EngineError, 503, "The model could not answer.", "model_unavailable"),
    (LocalragError, 500, "The server's configuration is invalid.", None),
)
"""(error class, status, generic message if the error's own may contain a path, `code` unless the status implies it)"""

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's error `type` by status. Other statuses below 500 are `invalid_request_error`, the rest `server_error`."""
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
"""The start of an error message that names the invalid field of the body."""


class Problem(Exception):  # noqa: N818  # what HTTP calls it (RFC 9457)
    """An error response. `code` is for programs and defaults to one for the status; `param` names the invalid field of the body."""

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
        """The response body; see `failure`."""
        return failure(self.status, self.detail, self.code, self.param)

    @property
    def event(self) -> dict[str, Any]:
        """The data of the server-sent event that ends a failed stream: the error, with the status of an unstreamed response."""
        body = self.body
        return {"error": {**body["error"], "status": self.status}}

    @property
    def parts(self) -> list[Any]:
        """The positional arguments that recreate this problem, as JSON values."""
        return [self.status, self.detail, self.code, self.param]


def failure(status: int, detail: str | Sequence[Mapping[str, Any]], code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error response. `detail` is a message or FastAPI's list of validation errors, as in the KAITO RAG engine;
    `error` has the same in OpenAI's format: `message`, `type`, `param` and `code`.
    """
    if isinstance(detail, str):
        message = detail
    else:
        message = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in detail)
        param = param or next((each["loc"][1] for each in detail if len(each["loc"]) > 1 and isinstance(each["loc"][1], str)), None)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    error_code = code or _CODES.get(status, "internal_error" if status >= 500 else "invalid_request")
    return {"detail": detail, "error": {"message": message, "type": kind, "param": param, "code": error_code}}


def problem_of(error: LocalragError) -> Problem:
    """Convert an error to an error response. If its message may contain a path, the message is logged and replaced."""
    status, generic, code = next((status, generic, code) for kind, status, generic, code in _STATUSES if isinstance(error, kind))
    if generic:
        LOG.warning("%s: %s", type(error).__name__, error.message)
    field = _SAMPLED.match(error.message) if isinstance(error, UsageError) else None
    return Problem(status, generic or error.message, code, field[1] if field else None)
