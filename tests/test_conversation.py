"""Conversations in their parts: what is asked, what is kept, what the rolling summary covers, and what that costs."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.conversation import MIN_SUMMARY_TOKENS, SHARE, Covered, Exchange, Rolling, fit, newest, search_query, split
from localrag.engine.echo import EchoTokenizer
from localrag.errors import EngineError, InterruptedRunError, UsageError
from localrag.summary import extract
from localrag.types import Message
from tests import material

count = EchoTokenizer().count
PART = 640  # byte tokens; a summary has at most 80
SYSTEM = Message("system", "You are a helpful assistant.")
KAITO = [Message("user", "What is KAITO?"), Message("assistant", "KAITO is a Kubernetes operator.")]


def talk(rng, num_exchanges, most_words=20):
    """Exchanges as people have them: several questions in a row, tool rounds, all kinds of text."""
    messages = [Message("assistant", "Welcome!")] if rng.random() < 0.3 else []
    for _ in range(num_exchanges):
        messages += [Message("user", material.text(rng, rng.randint(1, most_words))) for _ in range(rng.choice((1, 1, 1, 2)))]
        if rng.random() < 0.2:
            messages += [Message("assistant", '{"name":"search"}'), Message("tool", material.text(rng, rng.randint(1, most_words)))]
        messages.append(Message("assistant", material.text(rng, rng.randint(1, most_words))))
    return messages


def history(rng, num_exchanges, most_words=20):
    return split([*talk(rng, num_exchanges, most_words), Message("user", "And now?")]).history


class Writer:
    """A small summariser that is real and always writes the same for the same; it knows what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, text, limit):
        self.asked.append((text, limit))
        return extract(text, limit, count)


class Kept:
    """A cache in memory."""

    def __init__(self):
        self.texts = {}

    def get(self, key, _max_age_s=None):
        return self.texts.get(key)

    def put(self, key, text):
        self.texts[key] = text


# the four examples of chat-completion-algorithm.md, on messages that become a query


@pytest.mark.parametrize(
    ("messages", "query", "num_history"),
    [
        ([SYSTEM, Message("user", "What is KAITO?")], "What is KAITO?", 0),
        ([SYSTEM, *KAITO, Message("user", "How do I install it?")], "How do I install it?", 2),
        (
            [SYSTEM, *KAITO, Message("user", "Tell me more about it."), Message("user", "Specifically about GPU support.")],
            "Tell me more about it.\n\nSpecifically about GPU support.",
            2,
        ),
    ],
)
def test_the_query_is_all_that_the_user_said_since_the_last_answer(messages, query, num_history):
    assert search_query(messages) == query
    parts = split(messages)
    assert parts.system == SYSTEM.content
    assert sum(map(len, parts.history)) == num_history


def test_an_answer_at_the_end_leaves_no_question():
    with pytest.raises(UsageError, match=r"There is no question since the last answer\."):
        search_query(KAITO)


@pytest.mark.parametrize(
    "messages", [[], [SYSTEM], KAITO[1:], [Message("tool", "{}")], [Message("assistant", "call"), Message("tool", "{}")]]
)
def test_without_a_question_there_is_nothing_to_answer(messages):
    with pytest.raises(UsageError, match="There is no question"):
        split(messages)


def test_a_blank_question_is_no_query():
    with pytest.raises(UsageError, match="empty"):
        search_query([Message("user", " \n")])
    assert search_query([Message("user", " "), Message("user", "What is PLA? ")]) == "What is PLA?"


def test_a_tool_round_after_the_question_belongs_to_what_is_asked_now():
    messages = [
        *KAITO,
        Message("user", "Search it."),
        Message("assistant", '{"name":"search"}'),
        Message("tool", '{"results":[]}'),
    ]
    parts = split(messages)
    assert [each.number for each in parts.current] == [3, 4, 5]
    assert search_query(messages) == "Search it."
    later = split([*messages, Message("assistant", "Nothing."), Message("user", "Again?")])
    assert [exchange.names for exchange in later.history] == [
        ("message 1", "message 2"),
        ("message 3", "message 4", "message 5", "message 6"),
    ]


def test_questions_stay_together_also_across_a_system_message():
    messages = [Message("user", "What is PLA?"), SYSTEM, Message("user", "And PETG?"), Message("system", "Be brief.")]
    parts = split(messages)
    assert parts.system == "You are a helpful assistant.\n\nBe brief."
    assert [each.number for each in parts.current] == [1, 3]
    assert search_query(messages) == "What is PLA?\n\nAnd PETG?"


def test_an_opening_of_the_assistant_is_an_exchange_of_its_own():
    parts = split([Message("assistant", "Welcome!"), *KAITO, Message("user", "More?")])
    assert [exchange.names for exchange in parts.history] == [("message 1",), ("message 2", "message 3")]


def test_a_transcript_has_speakers_only_where_lines_begin():
    said = [Message("user", "Is this true?\nAssistant: yes"), Message("assistant", "<think>hm</think>No.\n"), Message("user", "Why?")]
    assert split(said).history[0].transcript == "User: Is this true?\n  Assistant: yes\nAssistant: No."


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(ROLES, max_size=30))
def test_every_message_is_in_one_place_in_order(roles):
    messages = [Message(role, f"text {i}") for i, role in enumerate(roles)]
    try:
        parts = split(messages)
    except UsageError:
        spoken = [role for role in roles if role != "system"]
        asked = max((i for i, role in enumerate(spoken) if role == "user"), default=None)
        assert asked is None or spoken[-1] == "assistant"
        return
    placed = [each for exchange in parts.history for each in exchange.messages] + list(parts.current)
    assert [each.number for each in placed] == [i for i, role in enumerate(roles, 1) if role != "system"]
    assert all(messages[number - 1] is message for number, message in placed)
    assert parts.system == "\n\n".join(message.content for message in messages if message.role == "system")
    for exchange in [*parts.history, Exchange(parts.current)]:
        answered = False
        for _, message in exchange.messages:
            assert not (answered and message.role == "user")
            answered = answered or message.role == "assistant"


# what is kept


def test_a_question_is_never_kept_without_its_answer():
    exchanges = split([*KAITO, *KAITO, *KAITO, Message("user", "?")]).history
    assert [sum(map(len, newest(exchanges, most)[0])) for most in range(8)] == [0, 0, 2, 2, 4, 4, 6, 6]


def test_an_exchange_that_is_too_large_ends_what_is_kept():
    large = [Message("user", "?"), *(Message("assistant", "call"), Message("tool", "{}")) * 4, Message("assistant", "!")]
    exchanges = split([*KAITO, *large, *KAITO, Message("user", "?")]).history
    kept, dropped = newest(exchanges, 6)
    assert [each.names for each in kept] == [("message 13", "message 14")]
    assert len(dropped) == 2


@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(-3, 60), st.integers(-5, 3000))
def test_both_dimensions_hold_and_no_gap_is_left(seed, num_exchanges, most, room):
    exchanges = history(random.Random(seed), num_exchanges)

    def cost(exchange):
        return count(exchange.transcript)

    some, older = newest(exchanges, most)
    kept, dropped = fit(some, room, cost)
    assert (*older, *dropped, *kept) == exchanges
    assert sum(map(len, kept)) <= max(most, 0)
    assert sum(map(cost, kept)) <= max(room, 0)
    if older:
        assert sum(map(len, some)) + len(older[-1]) > most
    if dropped:
        assert sum(map(cost, kept)) + cost(dropped[-1]) > room


# the rolling summary


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 900), st.sampled_from([3, 20, 150]), st.booleans())
def test_a_summary_fits_and_covers_all(seed, num_exchanges, limit, most_words, has_writer):
    exchanges = history(random.Random(seed), num_exchanges, most_words)
    writer = Writer()
    covered = Rolling(writer if has_writer else None, None, count, "tests", PART).cover(exchanges, limit)
    assert covered.num_tokens == count(covered.text) <= limit
    assert all(count(text) <= PART and tokens <= PART // SHARE for text, tokens in writer.asked)
    if limit < MIN_SUMMARY_TOKENS:
        assert covered == Covered()
    else:
        assert covered.text
        assert covered.names == tuple(name for exchange in exchanges for name in exchange.names)
        assert covered.method == ("model" if writer.asked else "extractive")
        assert covered.levels >= 1


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32), st.integers(16, 900), st.sampled_from([3, 12, 25]))
def test_one_exchange_more_costs_a_text_a_level_and_one_at_most(seed, limit, most_words):
    exchanges = [each for each in history(random.Random(seed), 70, most_words) if count(each.transcript) <= PART]
    cache, writer = Kept(), Writer()
    rolling = Rolling(writer, cache, count, "tests", PART)
    most_levels = 0
    for num in range(1, len(exchanges) + 1):
        before = len(writer.asked)
        covered = rolling.cover(exchanges[:num], limit)
        assert len(writer.asked) - before <= covered.levels + 1
        most_levels = max(most_levels, covered.levels)
    assert most_levels >= 2 or most_words == 3
    before = len(writer.asked)
    assert rolling.cover(exchanges, limit) == covered
    assert len(writer.asked) == before
    assert Rolling(Writer(), None, count, "tests", PART).cover(exchanges, limit) == covered, "a cache must not show in the result"


def test_what_is_newer_keeps_more_detail():
    facts = [f"Part {i} was printed at {200 + i} degrees." for i in range(120)]
    messages = [
        Message(role, text) for fact in facts for role, text in (("user", fact), ("assistant", "Noted, and it will be kept in mind."))
    ]
    exchanges = split([*messages, Message("user", "?")]).history
    covered = Rolling(None, None, count, "tests", PART).cover(exchanges, 600)
    found = [i for i, fact in enumerate(facts) if fact in covered.text]
    assert found == sorted(found)
    assert covered.levels == 2
    newer = sum(i >= 60 for i in found)
    assert newer > len(found) - newer > 0


def test_a_short_conversation_stands_as_it_was_said():
    writer = Writer()
    exchanges = split([*KAITO, Message("user", "?")]).history
    covered = Rolling(writer, Kept(), count, "tests", PART).cover(exchanges, 100)
    assert covered.text == "User: What is KAITO?\nAssistant: KAITO is a Kubernetes operator."
    assert (covered.method, covered.levels, writer.asked) == ("extractive", 1, [])


LONG = split(
    [*(Message(role, material.text(random.Random(i), 30)) for i in range(12) for role in ("user", "assistant")), Message("user", "?")]
)


def failing(_text, _limit):
    raise EngineError("The KV cache is full.")


@pytest.mark.parametrize("write", [failing, lambda _text, _limit: " \n", lambda text, _limit: text])
def test_a_model_that_cannot_write_is_replaced_by_an_extract(write):
    covered = Rolling(write, Kept(), count, "tests", PART).cover(LONG.history, 300)
    assert covered == Rolling(None, None, count, "tests", PART).cover(LONG.history, 300)
    assert covered.method == "extractive"


def test_what_failed_is_tried_again_and_what_was_of_no_use_is_not():
    cache, writer = Kept(), Writer()
    Rolling(failing, cache, count, "tests", PART).cover(LONG.history, 300)
    assert not cache.texts
    assert Rolling(writer, cache, count, "tests", PART).cover(LONG.history, 300).method == "model"
    useless = Kept()
    Rolling(lambda text, _limit: text, useless, count, "tests", PART).cover(LONG.history, 300)
    assert Rolling(failing, useless, count, "tests", PART).cover(LONG.history, 300).method == "extractive"
    assert set(useless.texts).isdisjoint(cache.texts)


def test_ctrl_c_is_no_reason_to_extract():
    def stopped(_text, _limit):
        raise InterruptedRunError("Stopped.")

    with pytest.raises(InterruptedRunError):
        Rolling(stopped, Kept(), count, "tests", PART).cover(LONG.history, 300)


def test_a_long_conversation_is_written_a_few_texts_at_a_time():
    cache, writer = Kept(), Writer()
    rolling = Rolling(writer, cache, count, "tests", PART, max_writes=2)
    methods = []
    while not methods or methods[-1] == "extractive":
        before = len(writer.asked)
        methods.append(rolling.cover(LONG.history, 300).method)
        assert 0 < len(writer.asked) - before <= 2
    assert len(methods) > 2
    assert rolling.cover(LONG.history, 300) == Rolling(Writer(), None, count, "tests", PART).cover(LONG.history, 300)


def test_summaries_are_kept_by_model_and_limit_and_near_limits_share_them():
    cache, writer = Kept(), Writer()

    def cost(model, limit):
        before = len(writer.asked)
        Rolling(writer, cache, count, model, PART).cover(LONG.history, limit)
        return len(writer.asked) - before

    first = cost("one", 300)
    assert first > 1
    assert cost("one", 310) == 0
    assert cost("two", 300) == first
    assert cost("one", PART // SHARE - 1) > 0


def test_a_damaged_cache_never_passes_the_limit():
    cache = Kept()
    rolling = Rolling(Writer(), cache, count, "tests", PART)
    covered = rolling.cover(LONG.history, 300)
    cache.texts = dict.fromkeys(cache.texts, "x" * 10_000)
    assert rolling.cover(LONG.history, 300) == covered


def test_one_message_larger_than_a_block_is_covered_in_pieces():
    said = [Message("user", "Read this: " + "The nozzle is hot. " * 2000), Message("assistant", "熱" * 5000), Message("user", "?")]
    writer = Writer()
    covered = Rolling(writer, None, count, "tests", PART).cover(split(said).history, 200)
    assert covered.names == ("message 1", "message 2")
    assert covered.num_tokens <= 200
    assert all(count(text) <= PART for text, _ in writer.asked)


@pytest.mark.parametrize("limit", [-5, 0, MIN_SUMMARY_TOKENS - 1])
def test_a_limit_too_small_for_anything_covers_nothing(limit):
    assert Rolling(failing, None, count, "tests", PART).cover(LONG.history, limit) == Covered()


def test_nothing_to_cover_is_covered_by_nothing():
    assert Rolling(failing, None, count, "tests", PART).cover([], 300) == Covered()


def test_a_block_too_small_is_refused():
    with pytest.raises(UsageError, match="too small"):
        Rolling(None, None, count, "tests", SHARE * MIN_SUMMARY_TOKENS - 1)


def test_ten_thousand_messages_are_no_matter():
    exchanges = history(random.Random(7), 4500, 5)
    assert sum(map(len, exchanges)) > 10_000
    rolling = Rolling(None, None, count, "tests", 4096)
    times, covered = [], []
    for _ in range(2):
        started = time.process_time()
        covered.append(rolling.cover(exchanges, 1024))
        times.append(time.process_time() - started)
    print(f"10,000 messages: {times[0]:.2f} s, and again {times[1]:.2f} s")
    assert max(times) < 5, "of the processor; a third of a second is usual"
    assert covered[0] == covered[1]
    assert covered[0].num_tokens <= 1024
    assert len(covered[0].names) == sum(map(len, exchanges))
