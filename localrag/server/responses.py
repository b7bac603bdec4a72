"""How answers are written."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse


class CompactResponse(JSONResponse):
    """JSON without white space."""

    def render(self, content: Any) -> bytes:  # noqa: ANN401  # starlette's signature
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
