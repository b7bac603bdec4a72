"""What gives way in a conversation does so in large steps: between them a prompt goes on from the one before it."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.budget import Profile
from localrag.journal import Journal
from localrag.question import Question
from localrag.session.history_window import LEAST_SHARE, MOST_SHARE, STEP_SHARE, HistoryWindow, Turn
from localrag.types import Attachment
from tests.session.test_chat import SHORT, chat_in, check, passage, prompt_text

N_CTX = 2048


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path) as opened:
        yield opened


def asked(number):
    return f"Question {number}: what becomes of part {number * 7919 % 997} in the heat?"


def evaluated(answer):
    """The share of its prompt that a turn evaluated."""
    return (answer.prompt_tokens - answer.cached_tokens) / answer.prompt_tokens


def talk(chat, num_turns, *, looks_ahead=True, hits=lambda _: (), first=1):
    """Answers to questions, with the pauses of a person between them."""
    for number in range(first, first + num_turns):
        answer = chat.say(Question.of(asked(number), sampling=SHORT, hits=hits(number)))
        check(answer, chat.session.slot.n_ctx)
        if looks_ahead:
            chat.forgets(write=True)
        yield answer


def is_full(answer):
    return any(entry.name == "history" and entry.omitted for entry in answer.ledger.entries)


@pytest.mark.parametrize(("looks_ahead", "most"), [(False, 1 / 6), (True, 1 / 3)])  # so small a window does not hold a summary's text too
def test_once_the_window_is_full_few_turns_evaluate_more_than_what_is_new(journal, looks_ahead, most):
    chat = chat_in(journal, n_ctx=N_CTX)
    shares = [evaluated(answer) for answer in talk(chat, 60, looks_ahead=looks_ahead) if is_full(answer)]
    assert len(shares) > 40
    assert statistics.median(shares) < 0.1
    assert sum(share > 1 / 3 for share in shares) <= len(shares) * most


def test_sources_and_turns_give_way_together(journal):
    chat = chat_in(journal, n_ctx=2 * N_CTX)
    found = [answer for answer in talk(chat, 100, hits=lambda number: [passage(number), passage(number + 1)]) if is_full(answer)]
    assert len(found) > 60
    assert statistics.median(map(evaluated, found)) < 1 / 3
    assert sum(evaluated(answer) > 1 / 2 for answer in found) <= len(found) / 6


def test_the_next_step_is_known_long_before_and_is_what_is_told(journal):
    chat = chat_in(journal, n_ctx=N_CTX)
    known: list[tuple[int, ...]] = [()]
    told_for, summarised, num_steps = 0, (), 0
    for answer in talk(chat, 60):
        now, coming = chat.forgotten(answer.ledger).summarised, chat.forgets()
        if now != summarised:
            assert told_for > 2
            assert now == known[-1]
            told_for, summarised, num_steps = 0, now, num_steps + 1
        if coming.coming or coming.summarised != summarised:
            known.append(coming.summarised if coming.summarised != summarised else (*summarised, *coming.coming))
            assert not told_for or known[-1] == known[-2]  # once known, it stays
            told_for += 1
    assert num_steps > 3


def test_a_step_leaves_room_and_not_too_little_of_what_was_said(journal):
    chat = chat_in(journal, n_ctx=N_CTX)
    before = 0
    for answer in talk(chat, 60, looks_ahead=False):
        settled = HistoryWindow.of(chat.turns).settled
        if settled != before:
            taken = sum(len(turn.question) + len(turn.answer) for turn in chat.turns[before:settled])
            assert 0.8 * STEP_SHARE < taken / N_CTX < 1.2 * STEP_SHARE
            history = answer.ledger.entry("history")
            assert LEAST_SHARE < history.used / (history.used + answer.ledger.spare) < MOST_SHARE + 0.1
        before = settled


def test_a_summary_that_is_written_in_a_pause_is_the_one_that_the_step_sends(journal):
    chat = chat_in(journal, n_ctx=N_CTX)
    for answer in talk(chat, 60):
        if is_full(answer):
            break
    sent = prompt_text(chat, chat.prepare(Question.of("Then?", sampling=SHORT)))
    chat.forgets(write=True)
    assert prompt_text(chat, chat.prepare(Question.of("Then?", sampling=SHORT))) == sent


def test_what_is_written_in_pauses_costs_the_conversation_no_cells(journal):
    chat = chat_in(journal, n_ctx=2 * N_CTX)
    steps = [0]
    for answer in talk(chat, 80):
        standing = HistoryWindow.of(chat.turns)
        if standing.settled == steps[-1] and len(chat.turns) > 1:
            assert evaluated(answer) < 0.5
        else:
            steps.append(standing.settled)
    assert len(steps) > 3


def test_a_conversation_goes_on_in_another_process_where_it_stood(journal):
    chat = chat_in(journal, n_ctx=N_CTX)
    list(talk(chat, 40, hits=lambda number: [passage(number)]))
    assert HistoryWindow.of(chat.turns).settled
    assert HistoryWindow.of(chat.turns).bare
    back = chat_in(journal, n_ctx=N_CTX)
    both = [each.prepare(Question.of("Then?", sampling=SHORT)).prompt.token_ids for each in (chat, back)]
    assert both[0] == both[1]


def test_turns_come_back_where_there_is_much_more_room(journal):
    chat = chat_in(journal, n_ctx=N_CTX)
    list(talk(chat, 60, looks_ahead=False))
    settled = HistoryWindow.of(chat.turns).settled
    large = chat_in(journal, n_ctx=16 * N_CTX)
    assert asked(1) in prompt_text(large, large.prepare(Question.of("Then?", sampling=SHORT)))
    twice = chat_in(journal, n_ctx=N_CTX + N_CTX // 2)  # not for a little more: that would be evaluated anew
    assert asked(settled) not in prompt_text(twice, twice.prepare(Question.of("Then?", sampling=SHORT)))


def test_a_large_file_takes_the_place_of_turns_only_while_it_is_there(journal):
    chat = chat_in(journal, n_ctx=N_CTX)
    list(talk(chat, 8, looks_ahead=False))
    file = Attachment(label="notes.txt", text="The oven is hot. " * 200)
    answer = chat.say(Question.of("What of this?", sampling=SHORT, attachments=[file], overflow=[("truncate", "attachments")]))
    check(answer, N_CTX)
    assert is_full(answer)
    *_, last = talk(chat, 3, looks_ahead=False, first=9)
    assert not is_full(last)


def test_what_was_taken_back_takes_its_step_with_it(journal):
    chat = chat_in(journal, n_ctx=N_CTX)
    for answer in talk(chat, 60, looks_ahead=False):
        if is_full(answer):
            break
    chat.undo()
    assert HistoryWindow.of(chat.turns) == HistoryWindow()
    assert asked(1) in prompt_text(chat, chat.prepare(Question.of("?", sampling=SHORT)))


def test_a_limit_of_messages_gives_way_in_steps_too(journal):
    chat = chat_in(journal, n_ctx=2 * N_CTX)
    chat.session.profile = replace(Profile(), max_messages=12)
    found = [answer for answer in talk(chat, 40, looks_ahead=False) if is_full(answer)]
    assert len(found) > 30
    assert statistics.median(map(evaluated, found)) < 0.1
    for answer in found:
        assert sum(part.part.section == "history" and part.part.item is not None for part in answer.prompt.parts) <= 12


@pytest.mark.parametrize("strategy", ["prioritize", "truncate"])
def test_every_strategy_gives_way_in_steps(journal, strategy):
    chat = chat_in(journal, n_ctx=N_CTX)
    shares = []
    for number in range(1, 61):
        answer = chat.say(Question.of(asked(number), sampling=SHORT, overflow=[(strategy, "history")]))
        check(answer, N_CTX)
        shares += [evaluated(answer)] if is_full(answer) else []
    assert statistics.median(shares) < 0.1
    assert sum(share > 1 / 3 for share in shares) <= len(shares) / 6


@pytest.mark.parametrize("kept", [None, "much", [1, 0], [-1, 0, 9], [0, 3, 9], [1.5, 0, 9], [1, 0, -1], {"settled": 1}])
def test_what_was_kept_and_cannot_be_true_is_as_if_nothing_had_given_way(kept):
    turns = [Turn(id=1, question="Why?", about={"standing": [1, 1, 9]}), Turn(id=2, question="And?", about={"standing": kept})]
    assert HistoryWindow.of(turns) == HistoryWindow()
    assert HistoryWindow.of(turns[:1]) == HistoryWindow(1, 1, 9)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_whatever_is_said_a_prompt_fits_and_says_what_is_not_in_it(tmp_path_factory, data):
    with Journal.open(tmp_path_factory.mktemp("any")) as opened:
        n_ctx = data.draw(st.sampled_from([768, 1500, 3000]))
        chat = chat_in(opened, n_ctx=n_ctx)
        for number in range(1, data.draw(st.integers(2, 25))):
            words = data.draw(st.sampled_from([1, 3, 12, 40]))
            hits = [passage(each) for each in data.draw(st.lists(st.integers(1, 12), max_size=3, unique=True))]
            answer = chat.say(Question.of(f"Question {number}?" + " and then" * words, sampling=SHORT, hits=hits))
            check(answer, n_ctx)
            sent = {part.part.item for part in answer.prompt.parts if part.part.section == "history"}
            entries = {entry.name: entry for entry in answer.ledger.entries}
            omitted = set(entries["history"].omitted) if "history" in entries else set()
            assert sent.isdisjoint(omitted)
            assert {f"message {at}" for at in range(2, 2 * number)} == (sent | omitted) - {None}
            shown = {hit.label for hit in (*answer.prompt.hits, *answer.prompt.earlier)}
            named = shown | set(entries["evidence"].omitted if "evidence" in entries else ())
            assert {hit.label for hit in hits} <= named
            text = prompt_text(chat, answer)
            assert all(f"[{label}]" in text for label in shown)
            if data.draw(st.booleans()):
                chat.forgets(write=data.draw(st.booleans()))
