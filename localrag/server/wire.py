"""What the server and the process that holds the engine say to each other: one JSON object a line.

To the engine, after a first line with what to open:

    {"op": "ask" | "budget", "id", "messages": [{"role", "content"}], "kbs", "tools", "is_plain", "sampling", "options",
     "max_seconds"}
    {"op": "tokenize", "id", "text"}
    {"op": "cancel", "id"}

From it: `{"ready": {…}}` once, or `{"failed": {…}}` where it cannot open. Then for an id `{"id", "begun": {…}}`, the prompt of what is
asked, any number of `{"id", "text", "thought", "num_tokens", "logprobs"}`, and one of `{"id", "done": {…}}` and
`{"id", "problem": [status, detail]}`. A line of stderr is talk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_LINE_BYTES = 256 << 20


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as it goes over the pipe."""
    return json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"
