"""A text as it stands, for what is asked without a chat template."""

from __future__ import annotations

from collections.abc import Sequence

from localrag.messages import Message, ToolSpec
from localrag.tokens import Segment


class PlainTemplate:
    """Implements `localrag.tokens.ChatTemplate` with no text of its own: the contents one behind the other."""

    thinking = None

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, thinks: bool = True) -> list[Segment]:  # noqa: ARG002
        return [Segment(message.content, index) for index, message in enumerate(messages)]


PLAIN = PlainTemplate()
