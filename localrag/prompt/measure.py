"""Count the inputs of a prompt: what each section wants and needs at least, in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

from localrag.budget import Budget, Percent, Section, container, negotiate, tokens_of
from localrag.budget.sections import PROTECTED
from localrag.conversation import Exchange, Split, newest, split
from localrag.errors import BudgetExceededError, UsageError
from localrag.prompt.layout import (
    MEMORIES_INTRO,
    PARTIAL_SOURCES_INTRO,
    PLAN_INTRO,
    PROPOSALS_INTRO,
    QUESTION_INTRO,
    SOURCES_INTRO,
    Choice,
    Item,
    PromptInputs,
    as_sent,
    encode_prompt,
    file_text,
    memory_text,
    plan_text,
    proposal_text,
    source_text,
)
from localrag.prompt.tool_results import compact
from localrag.text.markup import EncodedPart, Part, count_content, encode
from localrag.text.sentences import excerpt, units
from localrag.text.thinking import Thinking, ThinkingForm, mark_ids
from localrag.text.tokens import ChatTemplate, TokenCounter, Tokenizer
from localrag.types import MIN_THINK_TOKENS, Hit, Message, ToolSpec


def end_ids(think_tokens: int, template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end thoughts; () if the model does not think or `think_tokens` is too small."""
    if not think_tokens or template.thinking is None:
        return ()
    parts = encode([Part("thinking", template.thinking.end, is_markup=True)], tokenizer)
    ids = tuple(token for part in parts for token in part.token_ids if token != tokenizer.bos_id)  # BOS only begins prompts
    return ids if len(ids) < think_tokens else ()


def thinking_of(
    parts: Sequence[EncodedPart], max_tokens: int, ends: tuple[int, ...], *, template: ChatTemplate, tokenizer: Tokenizer
) -> Thinking | None:
    """Describe the thoughts after a prompt of these parts to the engine; None if there are none."""
    form = template.thinking
    if form is None or not ends:
        return None
    last = list(takewhile(lambda each: each.part.is_markup, reversed(parts)))
    is_open = form.is_open("".join(each.part.text for each in reversed(last)))
    return Thinking(
        form=form,
        is_open=is_open,
        max_tokens=max_tokens,
        end_ids=ends,
        mark_ids=mark_ids(form, tokenizer.special_texts),
        shows_beginning=is_open or begins_with_token(form, tokenizer),
    )


def begins_with_token(form: ThinkingForm, tokenizer: Tokenizer) -> bool:
    """Tell whether the mark that begins thoughts is a token of its own."""
    return any(text == form.marks[0] for text, _ in (*tokenizer.special_texts, *tokenizer.tag_texts))


JOIN_TOKENS = 2
"""The most tokens that joining a text to its neighbours adds (measured)."""
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 200_000
"""Tools beyond MAX_TOOLS and MAX_TOOLS_CHARS are not shown to the template, except one that must be called."""

_PROBE_MESSAGES = 8


def tool_costs(
    specs: Sequence[ToolSpec],
    bare: Split,
    choice: Choice,
    without: Sequence[EncodedPart],
    *,
    must_call: Collection[str] = (),
    counter: TokenCounter,
    template: ChatTemplate,
) -> tuple[tuple[ToolSpec, ...], dict[str, int], str | None]:
    """Return the tools to show the template, the tokens of each, and the name of the one from `must_call` that is always sent, if
    any.

    The wording around the tools is spread over them; the first one, or the one that is always sent, pays for what a single tool
    adds. `without` is the encoded prompt of `bare` and `choice`, without tools.
    """

    def added(tools: Sequence[ToolSpec]) -> int:
        encoded = encode_prompt(bare, replace(choice, tools=tools), tokenizer=counter.tokenizer, template=template)
        in_all = sum(len(part.token_ids) for part in encoded) - sum(len(part.token_ids) for part in without)
        # a template that drops its usual system text when there are tools grows by less than they take
        return max(in_all, sum(len(part.token_ids) for part in encoded if part.part.section == "tools"))

    if not specs:
        return (), {}, None
    costs = {tool.name: counter(compact(tool.to_dict())) + JOIN_TOKENS for tool in specs}
    forced = min((tool for tool in specs if tool.name in must_call), key=lambda tool: costs[tool.name], default=None)
    template_tools = _shown(specs, forced)
    if template_tools:
        first = forced or template_tools[0]
        costs[first.name] = max(costs[first.name], added([first]))  # the first tool pays for the wording that introduces tools
        if len(template_tools) > 1:
            excess = added(template_tools) - sum(costs[tool.name] for tool in template_tools)
            each = max(0, -(-excess // len(template_tools)))
            costs |= {tool.name: costs[tool.name] + each for tool in template_tools}
    return tuple(template_tools), costs, None if forced is None else forced.name


def _shown(specs: Sequence[ToolSpec], forced: ToolSpec | None) -> list[ToolSpec]:
    """Return as many of the first tools as the template may be shown, and the one that is always sent."""
    room, num_chars = MAX_TOOLS, MAX_TOOLS_CHARS
    if forced is not None:
        room, num_chars = room - 1, num_chars - len(compact(forced.to_dict()))
    tools = []
    for tool in specs:
        if tool is forced:
            tools.append(tool)
            continue
        room, num_chars = room - 1, num_chars - len(compact(tool.to_dict()))
        if room >= 0 and num_chars >= 0:
            tools.append(tool)
    return tools


def markup_costs(parts: Split, counter: TokenCounter, template: ChatTemplate) -> dict[str, int]:
    """Return the tokens of the template's text after a message, and around its calls, by the kind of message.

    Part of the conversation is rendered without contents.
    """
    spoken = [pair for exchange in parts.history for pair in exchange.messages][-_PROBE_MESSAGES:]
    while len(spoken) > 1 and spoken[0][1].role != "user":
        spoken.pop(0)
    probe = [Exchange(tuple(spoken))] if spoken else []
    empty = dict.fromkeys((number for number, _ in (*spoken, *parts.current)), "")
    encoded = encode_prompt(
        Split("", (), parts.current), Choice(history=probe, texts=empty), tokenizer=counter.tokenizer, template=template
    )
    own: dict[int, int] = {}
    number = 0
    for part in encoded:
        if part.part.section not in ("history", "tools"):
            continue
        if not part.part.is_markup and part.part.item is not None:
            number = int(part.part.item.rpartition(" ")[2])
        own[number] = own.get(number, 0) + len(part.token_ids)
    costs: dict[str, int] = {}
    for number, message in (*spoken, *parts.current):
        if number in own:
            name = _kind(message)
            costs[name] = max(costs.get(name, 0), own[number] - sum(counter(call.text) for call in message.tool_calls))
    return costs


def _kind(message: Message) -> str:
    """Return the kind of a message, by which the template's text around it is counted."""
    return f"{message.role} with calls" if message.tool_calls else message.role


SUMMARY_TOKENS = 400
"""Maximum length of the summary of dropped messages."""
OPEN_ANSWER = Percent(10)
"""Maximum share in the negotiation of an answer without a limit; it also gets leftover tokens."""
MIN_PROPOSAL_TOKENS = 32
"""Minimum tokens of each proposal. If they do not fit, the prompt is refused: no proposal is left out."""

_INTROS = {
    "attachments": QUESTION_INTRO,
    "memories": "\n\n" + MEMORIES_INTRO,
    "proposals": PROPOSALS_INTRO,
    "plan": PLAN_INTRO,
}
_LARGEST = "9,999,999"
"""A number of tokens that takes as much room as any."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """The inputs, counted. `history` are all past exchanges; `recent` are those that are not settled and within the message limit.

    Costs are upper bounds by section and label or message number. `fixed` are exact counts of what is always sent.
    """

    inputs: PromptInputs
    split: Split
    counter: TokenCounter
    template: ChatTemplate
    fixed: Counter[str]
    items: dict[str, list[Item]]
    tool_costs: dict[str, int]
    tools: tuple[ToolSpec, ...]
    forced_tool: str | None
    """The tool that is always sent, if the answer must be a call."""
    message_costs: dict[int, int]
    recent: tuple[Exchange, ...]
    end_ids: tuple[int, ...] = ()
    """Tokens that end thoughts; empty if the model does not think before it answers."""
    reserved: Counter[str] = field(default_factory=Counter)
    """Minimum tokens reserved for sections that are always sent whole."""
    _wanted: dict[str, int] = field(default_factory=dict)

    def sent(self, text: str) -> int:
        """Count the tokens of a content as it is sent."""
        return count_content(text, self.counter)

    def content(self, number: int) -> str:
        """Return the full text that is sent for the message of that number."""
        message = self.inputs.messages[number - 1]
        is_over = not self.split.current or number < self.split.current[0].number
        return _said(message) if is_over else _calling(message)

    def cost(self, exchange: Exchange) -> int:
        return sum(self.message_costs[number] for number, _ in exchange.messages)

    @property
    def num_history_tokens(self) -> int:
        return self.wanted("history")

    @property
    def num_round_tokens(self) -> int:
        """Tokens of the tool calls and results that belong to the current question."""
        return sum(self.message_costs[number] for number, message in self.split.current if message.role != "user")

    @property
    def num_rigid_tokens(self) -> int:
        """Of `num_round_tokens`, the template's text, which remains even if every call and result is cut to nothing."""
        rounds = [number for number, message in self.split.current if message.role != "user"]
        return sum(self.message_costs[number] - self.sent(self.content(number)) for number in rounds)

    @property
    def num_forced_tokens(self) -> int:
        """Tokens of the tool that is always sent; 0 if there is none."""
        return 0 if self.forced_tool is None else self.tool_costs[self.forced_tool]

    def with_fixed(self, section: str, tokens: int) -> Demand:
        """Return the same demand with at least `tokens` tokens, plus joins, reserved for a section that is always sent whole."""
        return replace(self, reserved=self.reserved | Counter({section: tokens + JOIN_TOKENS}))

    @property
    def thinks(self) -> bool:
        """Whether the model thinks before it answers."""
        return bool(self.end_ids)

    @property
    def num_thinking_tokens(self) -> int:
        """Fewest tokens for thoughts, including those that end them; 0 if there are none."""
        least = self.inputs.profile.sections["thinking"].min
        least = max(MIN_THINK_TOKENS, len(self.end_ids) + 1, least if isinstance(least, int) else 0)
        return min(self.inputs.think_tokens, least) if self.thinks else 0

    @property
    def set_aside(self) -> Counter[str]:
        """Tokens of the sections that are always sent whole, as the negotiation sees them."""
        return self.fixed | self.reserved

    def frame(self, section: str) -> int:
        """Count the tokens of a section's own wording."""
        items = self.items.get(section)
        if not items:
            return 0
        if section in _INTROS:
            return self.counter(_INTROS[section])
        num_hits = len(self.inputs.hits)  # cited or evidence: one of them owns the wording around both
        most = PARTIAL_SOURCES_INTRO.format(shown=num_hits, found=num_hits, tokens=_LARGEST, room=_LARGEST)
        intro = most if self.inputs.tells_omitted else SOURCES_INTRO
        return sum(map(self.counter, (intro, QUESTION_INTRO, self.cite(items[0].label))))

    def cite(self, label: str) -> str:
        """Return the text about citing, with `label` as an example."""
        return self.inputs.cite.replace("{label}", label)

    @property
    def num_proposal_tokens(self) -> int:
        """Fewest tokens for all proposals, each with its beginning and its end."""
        return self.frame("proposals") + sum(least_of(item, self.sent) for item in self.items.get("proposals", ()))

    def wanted(self, section: str) -> int:
        """Return the most tokens that a section could use."""
        if section not in self._wanted:
            self._wanted[section] = self._sum(section)
        return self._wanted[section]

    def _sum(self, section: str) -> int:
        if section == "history":
            return sum(map(self.cost, self.split.history))
        if section == "tools":
            return self.num_round_tokens + sum(self.tool_costs.values())
        return self.frame(section) + sum(item.cost for item in self.items.get(section, ()))

    @property
    def sections(self) -> list[Section]:
        """The sections for the negotiation."""
        profile = self.inputs.profile
        fixed = self.set_aside
        sections = [Section.fixed(name, fixed[name]) for name in PROTECTED if fixed[name]]
        if profile.gap:
            sections.append(Section(name="gap", basis=profile.gap, min=profile.gap, max=profile.gap, shrink=0.0))
        for name in ("tools", "memories", "history", "attachments", "cited", "evidence", "proposals", "plan"):
            is_limited = name == "history" and len(self.recent) < len(self.split.history)
            num_wanted = sum(map(self.cost, self.recent)) if is_limited else self.wanted(name)
            if num_wanted:
                sections.append(profile.sections[name].section(name, num_wanted))
        if self.thinks:
            thinking = profile.sections["thinking"]
            basis = min(thinking.basis, self.inputs.think_tokens) if isinstance(thinking.basis, int) else thinking.basis
            sections.append(replace(thinking, basis=basis).section("thinking", self.inputs.think_tokens))
        if self.inputs.max_tokens is not None:  # otherwise `share` adds the answer
            answer = profile.sections["answer"]
            basis = min(answer.basis, self.inputs.max_tokens) if isinstance(answer.basis, int) else answer.basis
            sections.append(replace(answer, basis=basis).section("answer", self.inputs.max_tokens))
        return sections

    def share(self, window: int) -> Budget:
        """Negotiate a window. If history does not fit, its summary gets a section too.

        Raises BudgetExceededError if the floors do not fit, or if a text exceeds the profile's limit for it.
        """
        for name, most in self.inputs.profile.limits.items():
            if self.fixed[name] > most:
                raise BudgetExceededError(
                    most, {name: self.fixed[name]}, hint=f"The budget {self.inputs.profile.name!r} limits {name} to {most} tokens."
                )
        sections = self._with_floor(self.sections, window)
        if self.inputs.max_tokens is None:
            sections = [*sections, self._open_answer(sections, window)]
        budget = negotiate(window, sections)
        if self.inputs.profile.sections["history"].cut != "summarize" or self._holds_history(budget):
            return budget
        tokens = min(SUMMARY_TOKENS, max(1, self.num_history_tokens // 2))
        return negotiate(window, [*sections, self.inputs.profile.sections["summary"].section("summary", tokens)])

    def _open_answer(self, sections: Sequence[Section], window: int) -> Section:
        """Return the section of an answer without a limit. It takes its minimum if that leaves room for all of the history.

        If history has to be cut in any case, the answer starts from its basis, or from a tenth of the flexible tokens if that
        is less. Otherwise every answer of a long conversation would be as short as possible.
        """
        answer = replace(self.inputs.profile.sections["answer"], max=None, grow=0.0)
        least = replace(replace(answer, basis=answer.min).section("answer", 0), content=None)
        if self._holds_history(negotiate(window, [*sections, least])):
            return least
        most = container(window, sections)
        basis = [tokens_of(length, most) for length in (answer.basis or 0, OPEN_ANSWER)]
        return replace(least, basis=max(tokens_of(answer.min, most), min(basis)))

    def _with_floor(self, sections: Sequence[Section], window: int) -> list[Section]:
        """Raise the floors of tools, proposals and thinking: calls, proposals, a tool that must be called, and the end of thoughts
        must fit.
        """
        whole = container(window, sections)
        least = {
            "tools": self.num_rigid_tokens + self.num_forced_tokens,
            "proposals": self.num_proposal_tokens,
            "thinking": self.num_thinking_tokens,
        }
        return [_at_least(each, least[each.name], whole) if each.name in least else each for each in sections]

    def _holds_history(self, budget: Budget) -> bool:
        return budget.allocations.get("history", 0) >= self.num_history_tokens


def measure(inputs: PromptInputs, *, counter: TokenCounter, template: ChatTemplate) -> Demand:
    """Count all inputs, with their wording and markup.

    Raises UsageError for an empty question and for two items with the same name, TemplateError if the template cannot render
    the conversation.
    """
    _check_names(inputs)
    parts = split(inputs.messages, inputs.pinned, needs_question=inputs.needs_question)
    if not parts.current:
        _check_bare(inputs)
    tokenizer = counter.tokenizer
    bare = replace(parts, history=(), current=tuple(pair for pair in parts.current if pair[1].role == "user"))
    cite = inputs.cite.replace("{label}", inputs.again[0]) if inputs.again else ""
    ends = end_ids(inputs.think_tokens, template, tokenizer)
    choice = Choice(again=inputs.again, cite=cite, instructions=inputs.instructions, thinks=bool(ends))
    encoded = encode_prompt(bare, choice, tokenizer=tokenizer, template=template)
    tools, costs, forced = tool_costs(inputs.tools, bare, choice, encoded, must_call=inputs.must_call, counter=counter, template=template)
    spoken = [(number, message, _said(message)) for exchange in parts.history for number, message in exchange.messages]
    rounds = [(number, message, _calling(message)) for number, message in parts.current if message.role != "user"]
    markup = markup_costs(parts, counter, template) if spoken or rounds else {}
    dearest = max(markup.values(), default=0)
    message_costs = {
        number: count_content(text, counter)
        + sum(count_content(call.text, counter) for call in message.tool_calls)
        + max(0, markup.get(_kind(message), dearest))
        + 1
        for number, message, text in (*spoken, *rounds)
    }
    most = inputs.profile.max_messages
    recent = parts.history if most is None else newest(parts.history, most)[0]
    settled = 0 if inputs.profile.sections["history"].cut == "error" else inputs.settled
    return Demand(
        inputs=inputs,
        split=parts,
        counter=counter,
        template=template,
        fixed=used_by(encoded),
        items=_items(inputs, counter),
        tool_costs=costs,
        tools=tools,
        forced_tool=forced,
        message_costs=message_costs,
        recent=tuple(each for each in recent if each.messages[0].number > settled),
        end_ids=ends,
    )


def alike(measured: Sequence[Demand]) -> list[Demand]:
    """Return the demands with the same tokens reserved for the sections that are always sent whole: the maximum of all.

    Inputs that differ only in their instructions then get the same room, so their prompts are identical up to the instructions.
    """
    demands = list(measured)
    for name in PROTECTED:
        tokens = {demand.fixed[name] for demand in measured}
        if len(tokens) > 1:
            demands = [demand.with_fixed(name, max(tokens)) for demand in demands]
    return demands


def _check_bare(inputs: PromptInputs) -> None:
    """Refuse sources and other extras without a question: they are part of its message."""
    extras = (inputs.hits, inputs.again, inputs.attachments, inputs.proposals, inputs.plan.strip(), inputs.instructions.strip())
    if any(extras) or not any(message.content.strip() for message in inputs.messages):
        raise UsageError("There is no question since the last answer.", hint="End the conversation with a user message.")


def _check_names(inputs: PromptInputs) -> None:
    """Refuse duplicate labels: ledgers identify items by them."""
    for kind, labels in (
        ("passages", [chunk.label for hit in inputs.hits for chunk in (hit.chunk, *hit.copies)]),
        ("attachments", [each.label for each in inputs.attachments]),
        ("memories", [each.label for each in inputs.memories]),
        ("tools", [tool.name for tool in inputs.tools]),
        ("proposals", [each.label for each in inputs.proposals]),
    ):
        twice = [label for label, times in Counter(labels).items() if times > 1]
        if twice:
            raise UsageError(f"Two {kind} have the name {twice[0][:200]!r}.", hint="Give each one only once, under a different name.")


def _said(message: Message) -> str:
    """Return the text that is sent for a message of a past exchange."""
    return as_sent(message).strip()


def _calling(message: Message) -> str:
    """Return the text that is sent for a message of the current tool round: all of it, including thoughts before a call."""
    return message.content.strip()


def used_by(parts: Iterable[EncodedPart]) -> Counter[str]:
    """Count tokens by section."""
    used: Counter[str] = Counter()
    for encoded in parts:
        used[encoded.part.section] += len(encoded.token_ids)
    return used


def _items(inputs: PromptInputs, counter: TokenCounter) -> dict[str, list[Item]]:
    """Turn everything that can be left out or shortened into items, in the order in which each kind is kept."""

    def item(section: str, label: str, score: float, body: str, dress: Callable[[str], str], **more: object) -> Item:
        cost = count_content(dress(body), counter) + JOIN_TOKENS
        return Item(section, label, score, body, dress, cost, **more)  # type: ignore[arg-type]  # tier and modified

    formatted: Callable[[Hit, str | None], str] = source_text
    if inputs.quotes:
        from localrag.prompt.quotes import numbered_text  # noqa: PLC0415  # weight: few answers quote

        formatted = numbered_text

    def source(section: str, hit: Hit) -> Item:
        whole = item(section, hit.label, hit.score, hit.chunk.text, partial(formatted, hit), tier=inputs.profile.tier(hit.relevance))
        if not hit.spans:
            return whole
        body, chosen = excerpt(hit.chunk.text, hit.spans), set(hit.spans)
        spans = [unit.span for unit in units(hit.chunk.text)]
        cost = count_content(whole.dress(body), counter) + JOIN_TOKENS
        return replace(whole, body=body, cost=cost, whole_cost=whole.cost, sentences=(len(chosen.intersection(spans)), len(spans)))

    items = {
        "memories": [item("memories", m.label, m.importance, m.text, partial(memory_text, m)) for m in inputs.memories],
        "attachments": [
            item("attachments", a.label, a.relevance, a.text, partial(file_text, a), modified=a.modified) for a in inputs.attachments
        ],
        "cited": [source("cited", hit) for hit in inputs.hits if hit.label in inputs.cited],
        "evidence": [source("evidence", hit) for hit in inputs.hits if hit.label not in inputs.cited],
        "proposals": [item("proposals", p.label, 0.0, p.text, partial(proposal_text, p)) for p in inputs.proposals],
        "plan": [item("plan", "plan", 0.0, inputs.plan, plan_text)] if inputs.plan.strip() else [],
    }
    for name in ("memories", "attachments"):
        items[name].sort(key=lambda each: -each.score)  # stable: equals keep their order
    return {name: section_items for name, section_items in items.items() if section_items}


def frame_of(item: Item, count: Callable[[str], int]) -> int:
    """Count the tokens of an item's wording without its body, and of joining the two."""
    return count(item.dress("")) + 2 * JOIN_TOKENS


def least_of(item: Item, count: Callable[[str], int]) -> int:
    """Return the fewest tokens of a proposal that keeps its beginning and its end."""
    return min(item.cost, frame_of(item, count) + MIN_PROPOSAL_TOKENS)


def _at_least(section: Section, tokens: int, whole: int) -> Section:
    """Raise the floor of a section to `tokens`, even above a maximum from models.toml. Percentages refer to `whole`."""
    least, most = max(tokens_of(section.min, whole), tokens), section.max
    return replace(section, min=least, max=max(most, least) if isinstance(most, int) else most)
