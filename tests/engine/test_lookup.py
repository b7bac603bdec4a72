"""Drafts: tokens guessed from the prompt, which change how fast an answer comes, and nothing else."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.echo import EchoBackend, EchoRunner, EchoTemplate, open_echo
from localrag.engine.engine import Engine
from localrag.engine.jobs import NGRAM, Lookup
from localrag.engine.loading import open_model
from localrag.engine.memory import Situation, num_outputs, plan
from localrag.engine.speed import DRAFT_SIZES, Speed
from localrag.types import SamplingParams
from tests.reciting import write_reciting

# --- the lookup


def guesses(ids):
    """The place of the guess for the token after each prefix of `ids`, found by scanning; None without a guess."""
    at, places = None, []
    for end in range(1, len(ids) + 1):
        is_right = at is not None and ids[at] == ids[end - 1]
        ngram = ids[max(0, end - NGRAM) : end]
        ends = [each for each in range(1, end) if ids[max(0, each - NGRAM) : each] == ngram]
        at = at + 1 if at is not None and is_right else max(ends, default=None)
        places.append(at)
    return places


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40))
def test_the_lookup_guesses_what_followed_the_last_occurrence(ids, num_prompt):
    lookup = Lookup(ids[:num_prompt])
    for end, place in list(enumerate(guesses(ids), start=1))[num_prompt:]:
        outcomes = lookup.add([ids[end - 1]])
        before = guesses(ids[: end - 1])[-1:] or [None]
        assert [is_right for _, is_right in outcomes] == ([] if before == [None] else [ids[before[0]] == ids[end - 1]])
        assert lookup.has_guess == (place is not None)
        following = ids[:end]
        for token in lookup.draft(8):
            assert token == following[place + len(following) - end]
            following.append(token)
        assert len(following) == end + 8 * lookup.has_guess


def test_right_guesses_are_counted_until_one_is_wrong():
    lookup = Lookup([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    assert lookup.add([4, 5, 6, 9, 9]) == [(0, True), (1, True), (2, True), (3, False)]
    assert not lookup.has_guess
    assert len(lookup) == 15


# --- the same answer, token for token


class Erratic(EchoRunner):
    """An echo that is cancelled in the middle of the first batches with a draft."""

    num_cancelled = 0

    def decode(self, entries):
        if self.num_cancelled < 3 and len(entries) > 1 and all(wanted for *_, wanted in entries):
            self.num_cancelled += 1
            super().decode(entries[: len(entries) // 2])
            return False
        return super().decode(entries)


class Custom(EchoBackend):
    """The echo with another runner, or with a speed that is learned."""

    def __init__(self, runner=EchoRunner, speed=None, **changes):
        super().__init__(4096, EchoTemplate(), counts_are_exact=True, speedup=1.0)
        self._runner, self._changes = runner, changes
        self.speed = speed or self.speed

    def make_runner(self, num_cells, num_sequences, /, *, repeatable=False):
        runner = self._runner(num_cells, num_sequences, repeatable=repeatable)
        for name, value in self._changes.items():
            setattr(runner, name, value)
        return runner


def said(engine, text):
    return [256, *engine.tokenizer.encode(f"user\n{text}"), 257, 256, *engine.tokenizer.encode("assistant\n")]


def answer(engine, draft_tokens, text, *, num_sequences=1, **sampling):
    """(completion, its text as it was streamed, tokens evaluated) of an echo."""
    engine.draft_tokens = draft_tokens
    engine.reserve(2500, num_sequences=num_sequences)
    runner, heard = engine.context.runner, []
    before = runner.num_evaluated_tokens
    done = engine.generate(said(engine, text), SamplingParams(**sampling), heard.append)
    assert engine.is_idle
    assert runner.num_tokens(0) == done.prompt_tokens + done.completion_tokens - 1, "a rejected draft is in the cells"
    return done, "".join(heard), runner.num_evaluated_tokens - before


def same(first, second):
    return all(getattr(first, name) == getattr(second, name) for name in ("text", "completion_ids", "finish_reason", "prompt_tokens"))


TEXTS = st.one_of(
    st.text("ab ", min_size=1, max_size=30),
    st.sampled_from(["You asked: why?", "You asked!\nQuestion: You asked what?", "x\nQuestion: é🔥 é🔥 é🔥", "Why?\nSay it 4 times"]),
)


@given(
    TEXTS, st.sampled_from([1, 2, 3, 8]), st.integers(1, 90), st.lists(st.text("ab?k", min_size=1, max_size=4), max_size=2), st.booleans()
)
@settings(max_examples=150)
def test_any_answer_is_the_same_with_drafts_and_only_drafts_are_evaluated_besides(text, most, max_tokens, stop, is_shared):
    with open_echo() as plain, open_echo() as drafting:
        sampling = {"max_tokens": max_tokens, "stop": tuple(stop), "num_sequences": 1 + is_shared}
        expected, heard, num_evaluated = answer(plain, 0, text, **sampling)
        done, drafted_heard, num_drafted = answer(drafting, most, text, **sampling)
    assert same(done, expected)
    assert drafted_heard == heard == done.text
    assert (expected.drafted_tokens, expected.accepted_tokens) == (0, 0)
    assert num_evaluated == expected.prompt_tokens + expected.completion_tokens - 1
    assert num_drafted == num_evaluated + done.drafted_tokens - done.accepted_tokens


@pytest.mark.parametrize(
    ("text", "sampling", "accepted"),
    [
        ("aa\nQuestion: You asked: why not", {}, "wholly"),
        ("Yes!\nYou asked: me\nQuestion: why not", {}, "partly"),
        ("(You! You.)\nQuestion: why not", {"max_tokens": 5}, "not at all"),
        ("You asked: why not", {"max_tokens": 14}, "to the last token"),
        ("You asked: why not", {"stop": ("y n",)}, "to the stop string"),
        ("You asked: why not", {}, "to the end token"),
    ],
)
def test_a_draft_is_accepted_as_far_as_it_is_right(text, sampling, accepted):
    with open_echo() as engine:
        done, _, _ = answer(engine, 8, text, **sampling)
    share = done.accepted_tokens / done.drafted_tokens
    match accepted:
        case "wholly":
            assert share > 0.7
        case "partly" | "to the end token" | "to the stop string":
            assert 0.0 < share < 1.0
        case "not at all":
            assert share == 0.0
        case _:
            assert (done.finish_reason, done.completion_tokens) == ("length", 14)
            assert done.drafted_tokens <= 13
    assert done.text.startswith("You ")
    assert "y n" not in done.text or "stop" not in sampling


def test_a_batch_with_a_draft_that_is_cancelled_leaves_no_trace():
    with Engine(Custom(Erratic)) as engine, open_echo() as plain:
        done, _, _ = answer(engine, 8, "You asked: why not")
        assert engine.context.runner.num_cancelled == 3
        assert same(done, answer(plain, 0, "You asked: why not")[0])


def test_an_answer_that_is_cancelled_while_it_is_read_keeps_whole_steps():
    with open_echo() as engine:
        engine.draft_tokens = 8
        engine.reserve(600, num_sequences=2)
        sequence = engine.add(said(engine, "You asked: why not"), SamplingParams())
        while sequence.num_accepted < 8:
            pieces = engine.step()
        assert len(pieces) > 1
        assert [piece.finish_reason for piece in pieces] == [None] * len(pieces)
        engine.cancel(sequence)
        assert [piece.finish_reason for piece in engine.step()] == ["cancelled"]
        assert "You asked: why not".startswith(sequence.text)
        assert len(sequence.text) == len(sequence.completion_ids)
        assert engine.context.cells.cache.num_cells == engine.context.runner.num_tokens(0) == sequence.num_tokens - 1


def test_the_next_prompt_resumes_after_an_answer_with_drafts():
    with open_echo() as engine:
        done, _, _ = answer(engine, 8, "You asked: why not", num_sequences=2)
        assert done.drafted_tokens > done.accepted_tokens
        ids = [*said(engine, "You asked: why not"), *done.completion_ids, *said(engine, "And then?")]
        assert engine.generate(ids, SamplingParams()).cached_tokens == done.prompt_tokens + done.completion_tokens - 1


@pytest.mark.parametrize(
    ("sampling", "changes"),
    [
        ({"logprobs": 1}, {}),
        ({"quotes": (("KB#1.1", (65, 66)),)}, {}),
        ({"repeatable": True}, {}),
        ({}, {"is_recurrent": True}),
        ({}, {"moves_cells": True}),
        ({}, {"num_outputs": 1}),
        ({"max_tokens": 1}, {}),
    ],
)
def test_nothing_is_drafted_where_it_could_not_be_undone_or_would_change_what_was_promised(sampling, changes):
    with Engine(Custom(**changes)) as engine:
        engine.draft_tokens = 8
        engine.reserve(600)
        assert engine.generate(said(engine, "You asked: why not"), SamplingParams(**sampling)).drafted_tokens == 0


def test_nothing_is_drafted_for_answers_side_by_side():
    with open_echo() as engine:
        engine.draft_tokens = 8
        engine.reserve(2500, num_sequences=2)
        sequences = [engine.add(said(engine, f"You asked: {word}"), SamplingParams()) for word in ("why", "however and whenever")]
        while not sequences[0].is_finished:
            engine.step()
        assert [sequence.num_drafted for sequence in sequences] == [0, 0]
        while not engine.is_idle:
            engine.step()
        assert sequences[1].num_accepted > 0
        assert [sequence.text for sequence in sequences] == ["You asked: You asked: why", "You asked: You asked: however and whenever"]


# --- llama.cpp

CYCLE = {"a": "b", "b": "c", "c": "d", "d": "e", "e": "f", "f": "Yes", "Yes": "a"}
SAMPLINGS = [
    {},
    {"repeat_penalty": 1.2},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "citations": ("KB#1",)},
    {"citations": ("KB#1", "KB#12")},
    {"citations": ("KB#1",), "cites_first": True},
    {"json_schema": {"type": "string", "maxLength": 30}},
    {"stop": ("fYesab",)},
    {"max_tokens": 13},
]


@pytest.fixture(scope="module")
def reciting(tmp_path_factory):
    path = tmp_path_factory.mktemp("reciting") / "model.gguf"
    with open_model(write_reciting(path, CYCLE, controls=[], template="{{ messages }}"), name="reciting") as engine:
        yield engine


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_llama_cpp_writes_the_same_with_drafts(reciting, sampling, num_sequences):
    prompt = reciting.tokenizer.encode('The letters: abcdef, [KB#1] abcdef and [KB#12] "abcd." a')
    reciting.reserve(512, num_sequences=num_sequences)
    done = {}
    for most in (0, 3, 8, 0):
        reciting.draft_tokens = most
        done[most] = reciting.generate(prompt, SamplingParams(**{"max_tokens": 60, **sampling}))
        cells, runner = reciting.context.cells, reciting.context.runner
        held = {0: cells.token_ids} if num_sequences == 1 else {each: cells.cache.tokens(each) for each in cells.kept}
        assert {each: len(ids) for each, ids in held.items()} == {each: runner.num_tokens(each) for each in held}
        assert [*prompt, *done[most].completion_ids[:-1]] in held.values()
    assert same(done[3], done[0])
    assert same(done[8], done[0])
    assert done[8].drafted_tokens > 0


def test_a_context_has_room_for_the_logits_of_a_draft_and_the_plan_counts_them(reciting):
    assert num_outputs(1) == 1 + max(DRAFT_SIZES)
    assert num_outputs(12) == 12
    reciting.reserve(512)
    assert reciting.context.runner.num_outputs >= num_outputs(1)
    one, twelve = (plan(reciting.info, 512, number, situation=Situation(available_bytes=0, python_bytes=0)) for number in (1, 12))
    assert twelve.compute_bytes - one.compute_bytes == 4 * (12 - num_outputs(1)) * reciting.info.vocab_size


# --- whether a draft pays


def taught(*, costs, share):
    """A speed that knows what drafts cost, in plain steps, and what share of guesses is right."""
    speed = Speed()
    for _ in range(20):
        speed.observe_decode(100, 0.01)
    for _ in range(40):
        for size, cost in costs.items():
            speed.observe_draft(size, 100, 0.01 * cost)
    for number in range(400):
        speed.observe_guess(number % 20, is_right=number % 100 < 100 * share)
    return speed


def test_drafts_are_tried_a_few_times_to_learn_what_they_cost():
    speed = Speed()
    assert speed.draft_size(0, 8) == 0, "it is not known what a single token takes"
    for _ in range(5):
        speed.observe_decode(100, 0.01)
    assert speed.draft_s(8, 100) == pytest.approx(0.09, rel=0.01)
    tried = []
    for _ in range(6):
        tried.append(speed.draft_size(0, 8))
        speed.observe_draft(tried[-1], 100, 1.0)
    assert tried == [size for size in DRAFT_SIZES for _ in range(3)]
    assert speed.draft_size(0, 8) == 0


@pytest.mark.parametrize(
    ("costs", "share", "expected"),
    [
        ({3: 1.01, 8: 1.02}, 0.9, 8),  # a GPU
        ({3: 2.3, 8: 4.3}, 0.95, 8),
        ({3: 2.3, 8: 4.3}, 0.8, 3),
        ({3: 2.3, 8: 4.3}, 0.4, 0),
        ({3: 3.9, 8: 8.9}, 0.99, 0),
        ({3: 1.3, 8: 1.5}, 0.0, 0),
    ],
)
def test_the_size_that_is_expected_to_be_fastest_is_drafted(costs, share, expected):
    speed = taught(costs=costs, share=share)
    assert speed.draft_size(2, 8) == expected
    assert speed.draft_size(2, 2) == 0, "there is no room for it"
    again = Speed()
    again.restore(json.loads(json.dumps(speed.to_dict())))
    assert again.draft_size(2, 8) == expected


def test_what_drafts_cost_stays_known_when_other_programs_come_and_go():
    speed = taught(costs={3: 2.3, 8: 4.3}, share=0.9)
    expected = speed.draft_s(3, 100) / speed.decode_s(1, 100)
    for slowdown in (3.0, 1.0, 2.0, 1.0):
        for _ in range(40):
            speed.observe_decode(100, 0.01 * slowdown)
        for _ in range(10):
            speed.observe_draft(3, 100, 0.023 * slowdown)
        assert speed.draft_s(3, 100) / speed.decode_s(1, 100) == pytest.approx(expected, rel=0.15)
        assert speed.draft_size(2, 8) > 0


def test_guesses_that_follow_many_right_ones_are_surer():
    speed = taught(costs={3: 2.3, 8: 4.3}, share=0.5)
    for _ in range(1000):
        speed.observe_guess(20, is_right=True)
    assert (speed.draft_size(0, 8), speed.draft_size(20, 8)) == (0, 8)


def test_what_did_not_pay_is_tried_again_at_times():
    speed = taught(costs={3: 3.9, 8: 8.9}, share=0.9)
    sizes = [speed.draft_size(2, 8) for _ in range(1024)]
    assert sum(map(bool, sizes)) == 8


def test_a_constant_speed_drafts_nothing():
    speed = Speed.fixed(prefill_tokens_per_s=100, decode_tokens_per_s=10)
    speed.observe_draft(3, 100, 0.001)
    assert not speed.learns
    assert speed.draft_size(5, 8) == 0


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60), st.integers(0, 40), st.integers(0, 8))
def test_expected_gains_are_sane_and_stored(outcomes, num_right, most):
    speed = taught(costs={3: 1.5, 8: 2.0}, share=0.5)
    for before, is_right in outcomes:
        speed.observe_guess(before, is_right=is_right)
    assert speed.draft_size(num_right, most) in {0, *(size for size in DRAFT_SIZES if size <= most)}
    again = Speed()
    again.restore(json.loads(json.dumps(speed.to_dict())))
    assert again.to_dict() == speed.to_dict()


def test_a_speed_stored_before_there_were_drafts_is_still_read():
    speed = taught(costs={3: 1.5, 8: 2.0}, share=0.9)
    record = {name: numbers for name, numbers in speed.to_dict().items() if name in ("prefill", "decode", "context")}
    again = Speed()
    again.restore(record)
    assert again.decode_s(1, 100) == speed.decode_s(1, 100) > 0
    assert again.draft_size(0, 8) == DRAFT_SIZES[0], "nothing is known of drafts"


@pytest.mark.parametrize(
    "guesses", [None, [], [1.0] * 11, [1.0] * 6 + [2.0] * 6, [-1.0] * 12, [True] * 12, [float("nan")] * 12, ["1"] * 12]
)
def test_damaged_shares_are_refused(guesses):
    speed = Speed()
    with pytest.raises(ValueError, match=r"needed|bounds"):
        speed.restore(Speed().to_dict() | {"guesses": guesses})
    assert speed.to_dict() == Speed().to_dict()


class Settled(Speed):
    """A speed that pays no attention to what steps take."""

    def observe_decode(self, depth, seconds):
        pass

    def observe_draft(self, num_tokens, depth, seconds):
        pass


def test_an_engine_learns_from_its_answers_when_to_draft():
    before = taught(costs={3: 1.1, 8: 1.2}, share=0.9).to_dict()
    speed = Settled()
    speed.restore(before)
    with Engine(Custom(speed=speed)) as engine, open_echo() as plain:
        done, _, _ = answer(engine, None, "You asked: why not, and what else could it be?")
        assert done.accepted_tokens > 0
        assert same(done, answer(plain, 0, "You asked: why not, and what else could it be?")[0])
        assert speed.to_dict()["guesses"] != before["guesses"]


@pytest.mark.parametrize(("limit_s", "drafts"), [(1.5, False), (90.0, True)])
def test_no_draft_is_begun_that_would_end_after_the_deadline(limit_s, drafts):
    known = taught(costs={3: 1.5, 8: 2.0}, share=0.9).to_dict()
    known["decode"] = [each * 100 if place in (4, 5, 9, 10) else each for place, each in enumerate(known["decode"])]
    speed = Settled()
    speed.restore(known)
    assert (speed.decode_s(1, 100), speed.draft_s(3, 100), speed.draft_s(8, 100)) == pytest.approx((1.0, 1.5, 2.0), rel=0.01)
    with Engine(Custom(speed=speed)) as engine:
        engine.reserve(600)
        started = time.perf_counter()
        done = engine.generate(said(engine, "You asked: why not"), SamplingParams(), deadline=started + limit_s)
    assert (done.drafted_tokens > 0) == drafts
    assert done.completion_tokens > 1
    assert drafts == (done.finish_reason == "stop") or time.perf_counter() - started < limit_s
