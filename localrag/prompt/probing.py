"""What a template's own text costs, found by rendering with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localrag.conversation import Exchange, Split
from localrag.markup import EncodedPart
from localrag.messages import ToolSpec
from localrag.prompt.layout import Choice, encode_prompt
from localrag.tokens import ChatTemplate, TokenCounter
from localrag.tool_results import compact

JOIN_TOKENS = 2
"""What joining a text to its neighbours can cost beyond its own tokens (measured: at most 2)."""
MAX_TOOLS_CHARS = 200_000
"""Schemas beyond this are not even shown to the template."""

_PROBE_MESSAGES = 8


def tool_costs(
    offered: Sequence[ToolSpec],
    bare: Split,
    choice: Choice,
    without: Sequence[EncodedPart],
    *,
    counter: TokenCounter,
    template: ChatTemplate,
) -> tuple[tuple[ToolSpec, ...], dict[str, int]]:
    """The tools that a template is shown, and what each costs. The wording around them is spread over them, the first one first.

    `without` is the prompt of `bare` and `choice`, which has none.
    """

    def added(tools: Sequence[ToolSpec]) -> int:
        encoded = encode_prompt(bare, replace(choice, tools=tools), tokenizer=counter.tokenizer, template=template)
        return sum(len(part.token_ids) for part in encoded) - sum(len(part.token_ids) for part in without)

    if not offered:
        return (), {}
    costs = {tool.name: counter(compact(tool.to_dict())) + JOIN_TOKENS for tool in offered}
    shown, num_chars = [], 0
    for tool in offered[:128]:
        num_chars += len(compact(tool.to_dict()))
        if num_chars > MAX_TOOLS_CHARS:
            break
        shown.append(tool)
    if shown:
        real = added(shown[:1])
        costs[shown[0].name] = max(costs[shown[0].name], real)  # the wording that introduces tools comes with the first
        if len(shown) > 1:
            excess = added(shown) - sum(costs[tool.name] for tool in shown)
            each = max(0, -(-excess // len(shown)))
            costs |= {tool.name: costs[tool.name] + each for tool in shown}
    return tuple(shown), costs


def markup_costs(parts: Split, counter: TokenCounter, template: ChatTemplate) -> dict[str, int]:
    """Tokens of the template's text that follows a message, by its role, found by rendering some of the conversation without contents."""
    spoken = [pair for exchange in parts.history for pair in exchange.messages][-_PROBE_MESSAGES:]
    while len(spoken) > 1 and spoken[0][1].role != "user":
        spoken.pop(0)
    probe = [Exchange(tuple(spoken))] if spoken else []
    empty = dict.fromkeys((number for number, _ in (*spoken, *parts.current)), "")
    roles = [message.role for _, message in spoken] + [message.role for _, message in parts.current if message.role != "user"]
    encoded = encode_prompt(
        Split("", (), parts.current), Choice(history=probe, texts=empty), tokenizer=counter.tokenizer, template=template
    )
    costs: dict[str, int] = {}
    behind = [part for part in encoded if part.part.section in ("history", "tools")]
    left = iter(roles)
    role = ""
    for part in behind:
        if part.part.is_markup:
            costs[role] = max(costs.get(role, 0), len(part.token_ids))
        else:
            role = next(left)
    return costs
