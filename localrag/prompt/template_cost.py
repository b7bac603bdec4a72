"""What a template's own text costs, found by rendering with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from localrag.conversation import Exchange, Split
from localrag.markup import EncodedPart
from localrag.messages import ToolSpec
from localrag.prompt.layout import Choice, encode_prompt
from localrag.tokens import ChatTemplate, TokenCounter
from localrag.tool_results import compact

JOIN_TOKENS = 2
"""What joining a text to its neighbours can cost beyond its own tokens (measured: at most 2)."""
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 200_000
"""Tools and schemas beyond these are not shown to the template, save one that must be called."""

_PROBE_MESSAGES = 8


def tool_costs(
    offered: Sequence[ToolSpec],
    bare: Split,
    choice: Choice,
    without: Sequence[EncodedPart],
    *,
    must_call: Collection[str] = (),
    counter: TokenCounter,
    template: ChatTemplate,
) -> tuple[tuple[ToolSpec, ...], dict[str, int], str | None]:
    """The tools that a template is shown, the tokens of each, and of those named by `must_call` the one that is always sent, if any.

    The wording around the tools is spread over them; the first one, or the one that is always sent, has what a single tool brings.
    `without` is the prompt of `bare` and `choice`, which has none.
    """

    def added(tools: Sequence[ToolSpec]) -> int:
        encoded = encode_prompt(bare, replace(choice, tools=tools), tokenizer=counter.tokenizer, template=template)
        in_all = sum(len(part.token_ids) for part in encoded) - sum(len(part.token_ids) for part in without)
        # a template that leaves out its usual system text beside tools grows by less than they take
        return max(in_all, sum(len(part.token_ids) for part in encoded if part.part.section == "tools"))

    if not offered:
        return (), {}, None
    costs = {tool.name: counter(compact(tool.to_dict())) + JOIN_TOKENS for tool in offered}
    forced = min((tool for tool in offered if tool.name in must_call), key=lambda tool: costs[tool.name], default=None)
    shown = _shown(offered, forced)
    if shown:
        first = forced or shown[0]
        costs[first.name] = max(costs[first.name], added([first]))  # the wording that introduces tools comes with the first
        if len(shown) > 1:
            excess = added(shown) - sum(costs[tool.name] for tool in shown)
            each = max(0, -(-excess // len(shown)))
            costs |= {tool.name: costs[tool.name] + each for tool in shown}
    return tuple(shown), costs, None if forced is None else forced.name


def _shown(offered: Sequence[ToolSpec], forced: ToolSpec | None) -> list[ToolSpec]:
    """As many tools from the first one on as a template is shown, and the one that is always sent."""
    room, num_chars = MAX_TOOLS, MAX_TOOLS_CHARS
    if forced is not None:
        room, num_chars = room - 1, num_chars - len(compact(forced.to_dict()))
    shown = []
    for tool in offered:
        if tool is forced:
            shown.append(tool)
            continue
        room, num_chars = room - 1, num_chars - len(compact(tool.to_dict()))
        if room >= 0 and num_chars >= 0:
            shown.append(tool)
    return shown


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
