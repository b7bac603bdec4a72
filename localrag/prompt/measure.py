"""What a model may think before it answers, and the tokens that end its thoughts."""

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
from localrag.prompt import inputs
from localrag.prompt.inputs import Item, PromptInputs
from localrag.prompt.layout import Choice, as_sent, encode_prompt
from localrag.prompt.tool_results import compact
from localrag.text.markup import EncodedPart, Part, count_content, encode
from localrag.text.thinking import Thinking, mark_ids
from localrag.text.tokens import ChatTemplate, TokenCounter, Tokenizer
from localrag.types import MIN_THINK_TOKENS, Hit, Message, ToolSpec


def end_ids(think_tokens: int, template: ChatTemplate, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end thoughts; none if there are no thoughts: the model has none, or in so many tokens there is no room for them."""
    if not think_tokens or template.thinking is None:
        return ()
    parts = encode([Part("thinking", template.thinking.end, is_markup=True)], tokenizer)
    ids = tuple(token for part in parts for token in part.token_ids if token != tokenizer.bos_id)  # that begins prompts, nothing else
    return ids if len(ids) < think_tokens else ()


def thinking_of(
    parts: Sequence[EncodedPart], max_tokens: int, ends: tuple[int, ...], *, template: ChatTemplate, tokenizer: Tokenizer
) -> Thinking | None:
    """What an engine needs to know of the thoughts behind a prompt of these parts; None if there are none."""
    form = template.thinking
    if form is None or not ends:
        return None
    last = list(takewhile(lambda each: each.part.is_markup, reversed(parts)))
    tail = "".join(each.part.text for each in reversed(last))
    return Thinking(
        form=form, is_open=form.is_open(tail), max_tokens=max_tokens, end_ids=ends, mark_ids=mark_ids(form, tokenizer.special_texts)
    )


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


SUMMARY_TOKENS = 400
"""The longest summary of what was said long ago."""
OPEN_ANSWER = Percent(10)
"""What an answer without a limit of its own has at most in the negotiation, of what is not fixed; the rest it has of what is left."""
MIN_PROPOSAL_TOKENS = 32
"""Of each proposal so much is there at least, or the whole is refused: none is left out."""

_INTROS = {
    "attachments": inputs.QUESTION_INTRO,
    "memories": "\n\n" + inputs.MEMORIES_INTRO,
    "proposals": inputs.PROPOSALS_INTRO,
    "plan": inputs.PLAN_INTRO,
}
_LARGEST = "9,999,999"
"""A number of tokens that takes as much room as any."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """An offer, counted. `history` is all that was said before; of it, `recent` is what is not settled and the limit of messages lets in.

    Costs are upper bounds of what each thing takes in the prompt, by section and label or number; `fixed` and `rounds`, the
    messages of a round of tools, are what they take now.
    """

    offer: PromptInputs
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
    """The tokens that end thoughts; none if the model does not think before it answers."""
    reserved: Counter[str] = field(default_factory=Counter)
    """What is set aside at least for sections that are always sent whole."""
    _wanted: dict[str, int] = field(default_factory=dict)

    def sent(self, text: str) -> int:
        """Tokens of a content as it is sent."""
        return count_content(text, self.counter)

    def content(self, number: int) -> str:
        """What is sent of the message of that number, if it is sent whole."""
        message = self.offer.messages[number - 1]
        is_over = not self.split.current or number < self.split.current[0].number
        return _said(message) if is_over else _calling(message)

    def cost(self, exchange: Exchange) -> int:
        return sum(self.message_costs[number] for number, _ in exchange.messages)

    @property
    def num_history_tokens(self) -> int:
        return self.wanted("history")

    @property
    def num_round_tokens(self) -> int:
        """Tokens of the calls and results of tools that belong to what is asked now."""
        return sum(self.message_costs[number] for number, message in self.split.current if message.role != "user")

    @property
    def num_rigid_tokens(self) -> int:
        """Of those, what is left when every call and result is cut to nothing: the template's text around them."""
        rounds = [number for number, message in self.split.current if message.role != "user"]
        return sum(self.message_costs[number] - self.sent(self.content(number)) for number in rounds)

    @property
    def num_forced_tokens(self) -> int:
        """Tokens of the tool that is always sent; 0 if there is none."""
        return 0 if self.forced_tool is None else self.tool_costs[self.forced_tool]

    def with_fixed(self, section: str, tokens: int) -> Demand:
        """The same with at least so many tokens, and what joining can cost, set aside for a section that is always sent whole."""
        return replace(self, reserved=self.reserved | Counter({section: tokens + JOIN_TOKENS}))

    @property
    def thinks(self) -> bool:
        """Whether the model thinks before it answers."""
        return bool(self.end_ids)

    @property
    def num_thinking_tokens(self) -> int:
        """The fewest tokens for thoughts, those that end them included; 0 if there are none."""
        least = self.offer.profile.sections["thinking"].min
        least = max(MIN_THINK_TOKENS, len(self.end_ids) + 1, least if isinstance(least, int) else 0)
        return min(self.offer.think_tokens, least) if self.thinks else 0

    @property
    def set_aside(self) -> Counter[str]:
        """Tokens of what is always sent whole, by section, as the negotiation sees them."""
        return self.fixed | self.reserved

    def frame(self, section: str) -> int:
        """Tokens of the wording that a section brings with it."""
        items = self.items.get(section)
        if not items:
            return 0
        if section in _INTROS:
            return self.counter(_INTROS[section])
        found = len(self.offer.hits)  # cited or evidence: one of the two has the wording around both
        most = inputs.PARTIAL_SOURCES_INTRO.format(shown=found, found=found, tokens=_LARGEST, room=_LARGEST)
        intro = most if self.offer.tells_omitted else inputs.SOURCES_INTRO
        return sum(map(self.counter, (intro, inputs.QUESTION_INTRO, self.cite(items[0].label))))

    def cite(self, label: str) -> str:
        """What is said about citing, with a label for an example."""
        return self.offer.cite.replace("{label}", label)

    @property
    def num_proposal_tokens(self) -> int:
        """The fewest tokens in which all proposals are there, each with its beginning and its end."""
        return self.frame("proposals") + sum(least_of(item, self.sent) for item in self.items.get("proposals", ()))

    def wanted(self, section: str) -> int:
        """The most that a section could use."""
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
        """What goes into the negotiation."""
        profile = self.offer.profile
        fixed = self.set_aside
        sections = [Section.fixed(name, fixed[name]) for name in PROTECTED if fixed[name]]
        if profile.gap:
            sections.append(Section(name="gap", basis=profile.gap, min=profile.gap, max=profile.gap, shrink=0.0))
        for name in ("tools", "memories", "history", "attachments", "cited", "evidence", "proposals", "plan"):
            is_limited = name == "history" and len(self.recent) < len(self.split.history)
            wanted = sum(map(self.cost, self.recent)) if is_limited else self.wanted(name)
            if wanted:
                sections.append(profile.sections[name].section(name, wanted))
        if self.thinks:
            thinking = profile.sections["thinking"]
            basis = min(thinking.basis, self.offer.think_tokens) if isinstance(thinking.basis, int) else thinking.basis
            sections.append(replace(thinking, basis=basis).section("thinking", self.offer.think_tokens))
        if self.offer.max_tokens is not None:  # else `share` knows
            answer = profile.sections["answer"]
            basis = min(answer.basis, self.offer.max_tokens) if isinstance(answer.basis, int) else answer.basis
            sections.append(replace(answer, basis=basis).section("answer", self.offer.max_tokens))
        return sections

    def share(self, window: int) -> Budget:
        """Negotiate a window; where history has to give way to its summary, with a section for that too.

        BudgetExceededError also for a text over the profile's limit for it.
        """
        for name, most in self.offer.profile.limits.items():
            if self.fixed[name] > most:
                raise BudgetExceededError(
                    most, {name: self.fixed[name]}, hint=f"The budget {self.offer.profile.name!r} gives {name} {most} tokens."
                )
        sections = self._with_floor(self.sections, window)
        if self.offer.max_tokens is None:
            sections = [*sections, self._open_answer(sections, window)]
        budget = negotiate(window, sections)
        if self.offer.profile.sections["history"].cut != "summarize" or self._holds_history(budget):
            return budget
        tokens = min(SUMMARY_TOKENS, max(1, self.num_history_tokens // 2))
        return negotiate(window, [*sections, self.offer.profile.sections["summary"].section("summary", tokens)])

    def _open_answer(self, sections: Sequence[Section], window: int) -> Section:
        """An answer without a limit. It takes its least size where that leaves room for all of the history.

        Where something of the history gives way in any case, the answer starts from its basis, or a tenth of what is not fixed if that
        is less: else each answer of a long conversation would be as short as can be.
        """
        answer = replace(self.offer.profile.sections["answer"], max=None, grow=0.0)
        least = replace(replace(answer, basis=answer.min).section("answer", 0), content=None)
        if self._holds_history(negotiate(window, [*sections, least])):
            return least
        most = container(window, sections)
        basis = [tokens_of(length, most) for length in (answer.basis or 0, OPEN_ANSWER)]
        return replace(least, basis=max(tokens_of(answer.min, most), min(basis)))

    def _with_floor(self, sections: Sequence[Section], window: int) -> list[Section]:
        """The same with room for all calls and proposals, for a tool that must be called, and for the end of thoughts."""
        whole = container(window, sections)
        least = {
            "tools": self.num_rigid_tokens + self.num_forced_tokens,
            "proposals": self.num_proposal_tokens,
            "thinking": self.num_thinking_tokens,
        }
        return [_at_least(each, least[each.name], whole) if each.name in least else each for each in sections]

    def _holds_history(self, budget: Budget) -> bool:
        return budget.allocations.get("history", 0) >= self.num_history_tokens


def measure(given: PromptInputs, *, counter: TokenCounter, template: ChatTemplate) -> Demand:
    """Count everything that is offered, with the wording and the markup that it brings with it.

    UsageError for an empty question and for two things of one name, TemplateError for a template that cannot render the conversation.
    """
    _check_names(given)
    parts = split(given.messages, given.pinned, needs_question=given.needs_question)
    if not parts.current:
        _check_bare(given)
    tokenizer = counter.tokenizer
    bare = replace(parts, history=(), current=tuple(pair for pair in parts.current if pair[1].role == "user"))
    cite = given.cite.replace("{label}", given.again[0]) if given.again else ""
    ends = end_ids(given.think_tokens, template, tokenizer)
    choice = Choice(again=given.again, cite=cite, instructions=given.instructions, thinks=bool(ends))
    encoded = encode_prompt(bare, choice, tokenizer=tokenizer, template=template)
    tools, costs, forced = tool_costs(given.tools, bare, choice, encoded, must_call=given.must_call, counter=counter, template=template)
    spoken = [(number, message.role, _said(message)) for exchange in parts.history for number, message in exchange.messages]
    rounds = [(number, message.role, _calling(message)) for number, message in parts.current if message.role != "user"]
    markup = markup_costs(parts, counter, template) if spoken or rounds else {}
    dearest = max(markup.values(), default=0)
    message_costs = {number: count_content(text, counter) + markup.get(role, dearest) + 1 for number, role, text in (*spoken, *rounds)}
    most = given.profile.max_messages
    recent = parts.history if most is None else newest(parts.history, most)[0]
    settled = 0 if given.profile.sections["history"].cut == "error" else given.settled
    return Demand(
        offer=given,
        split=parts,
        counter=counter,
        template=template,
        fixed=used_by(encoded),
        items=_items(given, counter),
        tool_costs=costs,
        tools=tools,
        forced_tool=forced,
        message_costs=message_costs,
        recent=tuple(each for each in recent if each.messages[0].number > settled),
        end_ids=ends,
    )


def alike(measured: Sequence[Demand]) -> list[Demand]:
    """The same with as much set aside in all for what is always sent whole as the one needs that needs most.

    Offers that differ in their instructions alone thus have room for the same, and their prompts are the same up to those.
    """
    found = list(measured)
    for name in PROTECTED:
        tokens = {wants.fixed[name] for wants in measured}
        if len(tokens) > 1:
            found = [wants.with_fixed(name, max(tokens)) for wants in found]
    return found


def _check_bare(given: PromptInputs) -> None:
    """Sources and their like stand in the message of the question, so without one there is no place for them."""
    beside = (given.hits, given.again, given.attachments, given.proposals, given.plan.strip(), given.instructions.strip())
    if any(beside) or not any(message.content.strip() for message in given.messages):
        raise UsageError("There must be a question since the last answer.", hint="End the conversation with a user message.")


def _check_names(given: PromptInputs) -> None:
    """Ledgers name things by their labels, so these must tell them apart."""
    for kind, labels in (
        ("passages", [chunk.label for hit in given.hits for chunk in (hit.chunk, *hit.copies)]),
        ("attachments", [each.label for each in given.attachments]),
        ("memories", [each.label for each in given.memories]),
        ("tools", [tool.name for tool in given.tools]),
        ("proposals", [each.label for each in given.proposals]),
    ):
        twice = [label for label, times in Counter(labels).items() if times > 1]
        if twice:
            raise UsageError(f"Two {kind} have the name {twice[0][:200]!r}.", hint="Give each of them once, under a name of its own.")


def _said(message: Message) -> str:
    """What is sent of a message of an exchange that is over."""
    return as_sent(message).strip()


def _calling(message: Message) -> str:
    """What is sent of a call or a result of the round that goes on: all of it, also what was thought before a call."""
    return message.content.strip()


def used_by(parts: Iterable[EncodedPart]) -> Counter[str]:
    """Tokens by section."""
    used: Counter[str] = Counter()
    for encoded in parts:
        used[encoded.part.section] += len(encoded.token_ids)
    return used


def _items(given: PromptInputs, counter: TokenCounter) -> dict[str, list[Item]]:
    """What can be left out or shortened as items, each kind in the order in which they are kept."""

    def item(section: str, label: str, score: float, body: str, dress: Callable[[str], str], **more: object) -> Item:
        cost = count_content(dress(body), counter) + JOIN_TOKENS
        return Item(section, label, score, body, dress, cost, **more)  # type: ignore[arg-type]  # tier and modified

    def source(section: str, hit: Hit) -> Item:
        return item(section, hit.label, hit.score, hit.chunk.text, partial(inputs.source, hit), tier=given.profile.tier(hit.relevance))

    items = {
        "memories": [item("memories", m.label, m.importance, m.text, partial(inputs.fact, m)) for m in given.memories],
        "attachments": [
            item("attachments", a.label, a.relevance, a.text, partial(inputs.file, a), modified=a.modified) for a in given.attachments
        ],
        "cited": [source("cited", hit) for hit in given.hits if hit.label in given.cited],
        "evidence": [source("evidence", hit) for hit in given.hits if hit.label not in given.cited],
        "proposals": [item("proposals", p.label, 0.0, p.text, partial(inputs.proposal, p)) for p in given.proposals],
        "plan": [item("plan", "plan", 0.0, given.plan, inputs.planned)] if given.plan.strip() else [],
    }
    for name in ("memories", "attachments"):
        items[name].sort(key=lambda each: -each.score)  # stable: equals stay as they were given
    return {name: found for name, found in items.items() if found}


def frame_of(item: Item, count: Callable[[str], int]) -> int:
    """Tokens of an item without its body, and of what joins the two."""
    return count(item.dress("")) + 2 * JOIN_TOKENS


def least_of(item: Item, count: Callable[[str], int]) -> int:
    """The fewest tokens in which a proposal is still there with its beginning and its end."""
    return min(item.cost, frame_of(item, count) + MIN_PROPOSAL_TOKENS)


def _at_least(section: Section, tokens: int, whole: int) -> Section:
    """The same with a floor, even where the table that a person wrote has a lower maximum. Percentages are of `whole`."""
    least, most = max(tokens_of(section.min, whole), tokens), section.max
    return replace(section, min=least, max=max(most, least) if isinstance(most, int) else most)
