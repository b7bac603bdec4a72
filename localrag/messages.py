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


def strip_reasoning(text: str) -> str:
    """What a reasoning model said after it had thought: all after the last `</think>`, without leading white space.

    A text without that mark is returned as it is. Earlier answers go back to a model in this form.
    """
    _, mark, answer = text.rpartition("</think>")
    return answer.lstrip() if mark else text
