"""What is said to the model, and by whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. `content` is plain text: nothing in it is ever read as markup."""

    role: Role
    content: str
