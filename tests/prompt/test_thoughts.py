"""Room for thoughts beside all that a prompt can hold."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.echo import EchoTemplate
from localrag.errors import BudgetExceededError
from localrag.prompt import PromptInputs
from localrag.text.thinking import ThinkingForm
from localrag.types import MIN_THINK_TOKENS, Message
from tests.prompt.building import build, build_offer, random_offer, shown
from tests.prompt.checking import check


class Thinker(EchoTemplate):
    """The echo's template, of a model that thinks."""

    thinking = ThinkingForm("<think>", "</think>")

    def render(self, messages, tools=(), *, thinks=True):
        segments = super().render(messages, tools)
        return segments if thinks else [*segments[:-1], replace(segments[-1], text=segments[-1].text + "<think>\n\n</think>\n\n")]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.integers(200, 8000), think_tokens=st.sampled_from([0, 32, 100, 1024, 100_000]))
def test_whatever_is_offered_there_is_room_for_thoughts_and_the_ledger_is_exact(seed, window, think_tokens):
    offer = replace(random_offer(random.Random(seed), size=4), think_tokens=think_tokens)
    try:
        composed = build_offer(offer, window, template=Thinker())
    except BudgetExceededError as error:
        assert error.numbers["needed"] > error.numbers["window"]
        return
    entries = check(offer, composed, window)
    assert shown(composed).endswith("</think>\n\n") == (think_tokens == 0)
    if not think_tokens:
        assert composed.thinking is None
        assert "thinking" not in entries
        return
    assert MIN_THINK_TOKENS <= entries["thinking"].allotted == composed.thinking.max_tokens <= think_tokens
    assert composed.thinking.max_tokens > len(composed.thinking.end_ids)
    assert composed.num_cells <= window
    if entries["thinking"].allotted < think_tokens:
        assert composed.ledger.spare == 0 or entries["answer"].allotted < (offer.max_tokens or window)


def test_where_what_ends_thoughts_has_no_room_nothing_is_thought():
    """Its marks are 52 bytes here, which are as many tokens."""

    class Channels(Thinker):
        thinking = ThinkingForm("", "")

    def built(think_tokens):
        return build_offer(PromptInputs(messages=[Message("user", "Why?")], think_tokens=think_tokens), 1000, template=Channels())

    num_end = len(Channels.thinking.end)
    assert num_end > MIN_THINK_TOKENS
    assert built(num_end).thinking is None
    assert shown(built(num_end)).endswith("</think>\n\n")
    assert built(num_end + 1).thinking.max_tokens == num_end + 1


def test_of_earlier_answers_alone_the_thoughts_are_left_out():
    said = "<think>\nhm </think>, no\n</think>\n\nAn answer."
    prompt = shown(build(said, history=[Message("user", said), Message("assistant", said)]))
    assert (prompt.count("hm"), prompt.count("An answer.")) == (2, 3)
