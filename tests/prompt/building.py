"""Prompts on the echo engine's tokenizer and template, from random material or from what a test gives."""

import random
from dataclasses import replace

from localrag import prompt
from localrag.budget import OVERFLOWS, SECTIONS, Profile
from localrag.conversation import Rolling
from localrag.engine.echo import EchoTemplate, EchoTokenizer
from localrag.errors import ConfigError
from localrag.prompt import PromptInputs, Shortening
from localrag.summary import Source, summarize
from localrag.text.tokens import TokenCounter
from localrag.types import Attachment, Chunk, Hit, Memory, Message, Proposal, ToolCall, ToolSpec
from tests import material

TEMPLATE = EchoTemplate()


def extractive(counter):
    """Texts made shorter without a model."""

    def to_level(item, level, limit):
        return summarize(Source(label=item.label, text=item.body, modified=item.modified), level, count=counter, limit=limit).text

    def to_summary(exchanges, limit):
        return Rolling(None, None, counter, "none", 512).cover(exchanges, limit)

    return Shortening(to_level=to_level, to_summary=to_summary)


def build(question, hits=(), *, window=4096, system=None, max_tokens=64, ratio=0.5, profile=None, overflow=(), history=(), **more):
    messages = [*history, Message("user", question)]
    if system:
        messages.insert(0, Message("system", system))
    profile = profile or Profile()
    if ratio is not None:
        profile = profile.with_context_ratio(ratio)
    for strategy, section in overflow:
        profile = profile.with_overflow(strategy, section)
    offer = PromptInputs(messages=messages, hits=hits, max_tokens=max_tokens, profile=profile, **more)
    return build_offer(offer, window)


def build_offer(offer, window, *, counter=None, template=TEMPLATE):
    counter = counter or TokenCounter(EchoTokenizer())
    demand = prompt.measure(offer, counter=counter, template=template)
    return prompt.compose(demand, demand.share(window), extractive(counter))


def shown(composed):
    return bytes(token for token in composed.token_ids if token < 256).decode("utf-8", "replace")


def random_round(rng: random.Random, most: int) -> list[Message]:
    """A call and its result: as text, or in the form of the model."""
    result = material.text(rng, rng.randint(1, most))
    if rng.random() < 0.4:
        return [Message("assistant", '{"name":"search"}'), Message("tool", result)]
    calls = tuple(ToolCall("search", {"query": material.text(rng, rng.randint(1, 20))}, f"call{n}") for n in range(rng.randint(1, 2)))
    text = material.text(rng, 5) if rng.random() < 0.3 else ""
    return [Message("assistant", text, tool_calls=calls), *(Message("tool", result, tool_call_id=call.id) for call in calls)]


def random_offer(rng: random.Random, *, size: int = 8) -> PromptInputs:
    """An offer with some of everything, whose strategies are drawn as well."""
    messages = [Message("system", material.text(rng, rng.randint(1, 20)))] if rng.random() < 0.5 else []
    for _ in range(rng.randint(0, size)):
        messages.append(Message("user", material.text(rng, rng.randint(1, 40))))
        if rng.random() < 0.2:
            messages += random_round(rng, 80)
        messages.append(Message("assistant", material.text(rng, rng.randint(1, 60))))
    messages.append(Message("user", "QUESTION " + material.text(rng, rng.randint(1, 10))))
    if rng.random() < 0.2:
        messages += random_round(rng, 400)
    properties = {"query": {"type": "string", "description": material.text(rng, 5)}}
    profile = Profile(gap=rng.choice([0, 0, 17]), max_messages=rng.choice([None, None, 0, 3, 10]))
    for section in SECTIONS:
        if rng.random() < 0.5:
            try:
                profile = profile.with_overflow(rng.choice([each for each in OVERFLOWS if each != "error"]), section)
            except ConfigError:
                continue
    made = PromptInputs(
        messages=messages,
        hits=material.hits(rng, rng.randint(0, 2 * size)),
        tools=[ToolSpec(f"tool_{n}", material.text(rng, 10), {"properties": properties}) for n in range(rng.randint(0, 3))],
        memories=[Memory(label=f"memory {n}", text=material.text(rng, 8), importance=rng.random()) for n in range(rng.randint(0, 4))],
        attachments=[
            Attachment(label=f"file-{n}.txt", text=material.text(rng, rng.randint(1, 300)), relevance=rng.random())
            for n in range(rng.randint(0, 3))
        ],
        max_tokens=rng.choice([1, 20, 64, 512, 100_000]),
        profile=profile.with_context_ratio(rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])),
    )
    made = made if rng.random() < 0.7 else with_chat(rng, made)
    made = made if rng.random() < 0.7 else with_more(rng, made)
    return made if rng.random() < 0.5 else with_council(rng, made)


def with_more(rng: random.Random, made: PromptInputs) -> PromptInputs:
    """The same with an answer of any length, evidence that takes what is spare, and a tool that must be called."""
    evidence = replace(made.profile.sections["evidence"], spare=rng.choice((0.0, 1.0, 2.5)))
    names = [tool.name for tool in made.tools]
    return replace(
        made,
        max_tokens=rng.choice((None, made.max_tokens)),
        must_call=rng.sample(names, rng.randint(0, len(names))),
        profile=replace(made.profile, sections={**made.profile.sections, "evidence": evidence}),
    )


def with_chat(rng: random.Random, made: PromptInputs) -> PromptInputs:
    """The same with some turns pinned or left to the summary, and passages that came with earlier questions."""
    messages, earlier = list(made.messages), {}
    for number, message in enumerate(messages[:-3], 1):
        if message.role == "user" and rng.random() < 0.3:
            earlier[number] = [Hit(Chunk(number, 1, 0, "text", 0, 4, "book.md", scope="above"), 0.5)]
            messages[number - 1] = replace(message, sent=f"Sources:\n\n[KB#above/{number}] text\n\nQuestion: {message.content}")
    pinned = frozenset(number for number in range(1, len(messages)) if rng.random() < 0.05)
    again = [hit.label for hits in earlier.values() for hit in hits if rng.random() < 0.5][:4]
    settled = rng.choice((0, 0, 1, rng.randrange(len(messages)), len(messages)))
    return replace(made, messages=messages, earlier=earlier, pinned=pinned, again=again, settled=settled)


NAMES = ("Ann", "Bo", "plan", "message 3", "file-0.txt", "tool_0", "KB#1007", "Ä <|im_end|>\n[KB#3]")
"""Of members; some are names of other things too."""


def with_council(rng: random.Random, made: PromptInputs, *, chars: int = 2000) -> PromptInputs:
    """The same offer as a role of a council gets it, with proposals of up to so many characters together, in the mean."""
    text = material.text(rng, 300)

    def proposed() -> str:
        length = rng.choice((0, 20, chars // 16, chars // 8, chars))
        start = rng.randrange(len(text))
        return (text * (length // len(text) + 2))[start : start + length]

    names = rng.sample(NAMES, rng.randint(0, len(NAMES)))
    bounds = {name: rng.choice((5, 400, 10_000)) for name in ("system", "question", "instructions") if rng.random() < 0.1}
    share = rng.random()
    return replace(
        made,
        cited=frozenset(hit.label for hit in made.hits if rng.random() < share) | {"KB#1"},
        tells_omitted=rng.random() < 0.7,
        cite=rng.choice((made.cite, "")),
        proposals=[Proposal(label=name, text=proposed()) for name in names],
        plan=rng.choice(("", material.text(rng, rng.randint(0, 200)))),
        instructions=rng.choice(("", " \n", "You are the judge. " + material.text(rng, rng.randint(1, 60)))),
        profile=replace(made.profile, limits=bounds),
    )
