"""prompt/compose.py: where evaluation is cut so that another prompt can go on from there."""

import random

from localrag import prompt
from localrag.engine.echo import open_echo
from localrag.prompt import PromptInputs
from localrag.prompt.compose import MIN_APART_TOKENS
from localrag.session.shortening import Shortener
from localrag.types import Message
from tests import material

WINDOW = 100_000


def composed(engine, messages, **offered):
    shortening = Shortener(engine, None, window=WINDOW, write=False).for_prompt()
    demand = prompt.measure(PromptInputs(messages=messages, **offered), counter=engine.counter, template=engine.template)
    return prompt.compose(demand, demand.share(WINDOW), shortening)


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b), len(one.token_ids))


def told(text):
    return Message("user", text)


def test_another_question_on_the_same_text_goes_on_right_before_it():
    page = Message("system", material.text(random.Random(1), 200))
    with open_echo() as engine:
        first, second = (composed(engine, [page, told(question)]) for question in ("What is hot?", "Is it hot?"))
    assert first.breakpoints[-1] == second.breakpoints[-1]
    assert first.breakpoints[-1] == common(first, second) - 1


def test_borders_are_in_order_within_the_prompt_and_far_enough_apart():
    rng = random.Random(2)
    with open_echo() as engine:
        for _ in range(40):
            messages = [told(material.text(rng, rng.randint(1, 60))) for _ in range(rng.randint(1, 30))]
            talk = [Message("assistant" if n % 2 else "user", message.content) for n, message in enumerate(messages)]
            if talk[-1].role == "assistant":
                talk.append(told("And?"))
            made = composed(engine, talk)
            assert list(made.breakpoints) == sorted(set(made.breakpoints))
            assert all(0 < border < len(made.token_ids) for border in made.breakpoints)
            apart = [b - a for a, b in zip((-1, *made.breakpoints[:-1]), made.breakpoints[:-1], strict=False)]
            assert all(each >= MIN_APART_TOKENS for each in apart)


def test_a_conversation_that_goes_on_keeps_its_borders():
    """But for the last one, which is where the newest question began."""
    rng, talk, before = random.Random(3), [], None
    with open_echo() as engine:
        for _ in range(20):
            talk.append(told(material.text(rng, 20)))
            now = composed(engine, list(talk))
            if before is not None:
                assert before.breakpoints[:-1] == now.breakpoints[: len(before.breakpoints) - 1]
                assert all(border <= common(before, now) for border in before.breakpoints[:-1])
            before = now
            talk.append(Message("assistant", material.text(rng, 30)))
    assert before is not None
    assert len(before.breakpoints) > 5


def test_a_short_prompt_has_none():
    with open_echo() as engine:
        assert composed(engine, [told("Hi?")]).breakpoints == ()
