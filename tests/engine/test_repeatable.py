"""Answers that name a seed: the same to the bit, whatever runs beside them and on however many threads."""

import os
import random
from dataclasses import replace

import pytest

from localrag.catalog import Catalog
from localrag.cli.batch import read_questions
from localrag.engine.echo import open_echo
from localrag.engine.loading import open_model
from localrag.engine.prefix_disk_cache import PrefixDiskCache, PrefixStore
from localrag.errors import EngineError, UsageError
from localrag.question import Question
from localrag.session import Session
from localrag.session.member_turns import needs
from localrag.settings import Settings
from localrag.types import SamplingParams
from tests.engine.test_prefix_store import IDENTITY
from tests.gguf_files import write_model
from tests.running import batch

CONTEXT = 4096
SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, repeatable=True, max_tokens=24)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", changes={"llama.context_length": CONTEXT})


@pytest.fixture
def tiny(tiny_path):
    with open_model(tiny_path, name="tiny") as engine:
        yield engine


def run(engine, *sequences):
    while not engine.is_idle:
        engine.step()
    return [tuple(each.completion_ids) for each in sequences]


def ids(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(5, 250) for _ in range(length)]


def logits(engine, sampling, *, beside=(), steps_before=0):
    """All logprobs of an answer that begins beside others: bits, where a near tie would hide what differs."""
    others = [engine.add(each, SamplingParams(max_tokens=60, temperature=1.0)) for each in beside]
    for _ in range(steps_before):
        engine.step()
    sequence = engine.add(ids(0, 700), replace(sampling, logprobs=5), breakpoints=(200, 600))
    run(engine)
    assert sequence.error is None
    assert all(each.text for each in others)
    return sequence.completion_ids, [(each.logprob, each.top) for each in sequence.logprobs]


def test_an_answer_is_the_same_to_the_bit_alone_after_others_and_beside_them(tiny):
    tiny.reserve(3 * CONTEXT, num_sequences=8)
    alone = logits(tiny, SAMPLING)
    assert logits(tiny, SAMPLING) == alone  # it goes on from a border
    others = [ids(number, 40 * number) for number in range(1, 5)]
    for steps in (0, 1, 5):
        assert logits(tiny, SAMPLING, beside=others, steps_before=steps) == alone
    assert logits(tiny, SAMPLING, beside=[ids(0, 700)]) == alone  # one that holds what it begins with
    with_borders = tiny.add(ids(0, 650) + ids(9, 300), SAMPLING, breakpoints=(200, 600))  # a repeatable one that shares a part of it
    run(tiny)
    assert with_borders.num_cached_tokens == 600
    assert logits(tiny, SAMPLING) == alone
    assert logits(tiny, replace(SAMPLING, seed=8))[0] != alone[0]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that says on which processors a process may run")
def test_it_is_the_same_on_one_thread_and_on_two_and_in_every_kind_of_context(tiny_path):
    allowed, found = os.sched_getaffinity(0), []
    try:
        for cores in (sorted(allowed)[:1], allowed):
            os.sched_setaffinity(0, cores)
            with open_model(tiny_path, name="tiny") as engine:
                engine.reserve(2 * CONTEXT, num_sequences=4)
                found.append(logits(engine, SAMPLING))
            with open_model(tiny_path, name="tiny") as engine:
                engine.reserve(CONTEXT, repeatable=True)
                found.append(logits(engine, SAMPLING))
    finally:
        os.sched_setaffinity(0, allowed)
    assert all(each == found[0] for each in found)


def test_several_are_answered_one_after_another_beside_those_that_are_not(tiny):
    tiny.reserve(CONTEXT, num_sequences=4)
    other = tiny.add(ids(1, 30), SamplingParams(max_tokens=200))
    several = [tiny.add(ids(2, 30), replace(SAMPLING, seed=seed)) for seed in (1, 2, 3)]
    finished = []
    while not tiny.is_idle:
        finished += [piece.seq_id for piece in tiny.step() if piece.finish_reason is not None]
    assert finished == [*(each.seq_id for each in several), other.seq_id]
    assert len({tuple(each.completion_ids) for each in several}) == 3


def test_one_that_waits_can_be_cancelled_and_the_next_one_goes_on(tiny):
    tiny.reserve(CONTEXT, num_sequences=4)
    first, second, third = (tiny.add(ids(2, 30), SAMPLING) for _ in range(3))
    tiny.step()
    tiny.cancel(second)
    tiny.cancel(first)
    run(tiny)
    assert [each.finish_reason for each in (first, second, third)] == ["cancelled", "cancelled", "length"]


def test_its_deadline_counts_while_it_waits():
    with open_echo() as engine:
        first = engine.add([256, *b"user\n", *b"a " * 50, 257], replace(SAMPLING, max_tokens=50))
        late = engine.add([256, *b"user\nb", 257], SAMPLING, deadline=0.0)
        run(engine)
        assert (first.finish_reason, late.finish_reason, late.completion_ids) == ("length", "time", [])


def test_its_context_grows_with_what_is_asked_and_keeps_what_it_holds(tiny):
    prompt = ids(3, 300)
    alone = tiny.add(prompt, SAMPLING, breakpoints=(256,))
    run(tiny)
    small = tiny.repeatable.runner.num_cells
    again = tiny.add(prompt, replace(SAMPLING, max_tokens=1200), breakpoints=(256,))
    run(tiny)
    assert tiny.repeatable.runner.num_cells > small
    assert again.num_cached_tokens == 256
    assert again.completion_ids[:24] == alone.completion_ids


def test_where_memory_has_no_room_for_it_that_is_said_and_the_others_go_on(tiny):
    tiny.reserve(CONTEXT, num_sequences=4)
    other = tiny.add(ids(1, 30), SamplingParams(max_tokens=20))
    huge = tiny.add(ids(2, 30), replace(SAMPLING, max_tokens=2**30))
    after = tiny.add(ids(2, 30), SAMPLING)
    run(tiny)
    assert [each.finish_reason for each in (other, huge, after)] == ["length", "error", "length"]
    assert isinstance(huge.error, UsageError)
    assert "KV cells of its own" in huge.error.message
    assert "seed" in str(huge.error.hint)
    assert huge.error.numbers["needed_bytes"] > huge.error.numbers["free_bytes"]


def test_a_vocabulary_alone_says_so(tiny_path, tmp_path):
    with open_model(tiny_path, name="tiny", vocab_only=True) as engine, pytest.raises(EngineError, match="no weights"):
        engine.reserve(10, repeatable=True)


def test_what_is_repeatable_and_what_is_not_are_answered_in_one_batch():
    with open_echo() as engine:
        session = Session(engine, n_ctx=512)
        questions = [Question.of(f"Question {at}?", id=at, sampling=replace(SAMPLING, repeatable=at % 2 == 0)) for at in range(8)]
        found = dict(batch(session, questions))
        assert {at: answer.text for at, answer in found.items()} == {at: f"You asked: Question {at}?" for at in range(8)}
        assert engine.is_idle


def test_a_batch_of_repeatable_ones_alone_needs_no_other_context():
    with open_echo() as engine:
        found = dict(batch(Session(engine, n_ctx=512), [Question.of("Why?", id=at, sampling=SAMPLING) for at in range(3)]))
        assert len(found) == 3
        assert engine.context is None


def test_the_disk_keeps_prefixes_of_repeatable_contexts_apart(tmp_path):
    """Flash attention lays the same keys and values out in another way."""
    kinds = []

    def make_store(kind):
        kinds.append(kind)
        return PrefixStore(tmp_path / kind, IDENTITY, max_bytes=10**7)

    prompt = [256, *b"user\n" + b"evidence " * 100, *b"Why?", 257]
    for _ in range(2):
        with open_echo() as engine:
            engine.prefix_cache = PrefixDiskCache(make_store, bytes_per_token=1)
            for repeatable in (True, False):
                engine.reserve(2000, repeatable=repeatable)
                sampling = replace(SAMPLING, repeatable=repeatable)
                cached = engine.generate(prompt, sampling, breakpoints=(600,)).cached_tokens
                assert cached in (0, 600)
    assert set(kinds) == {"repeatable", "single"}


def test_a_line_of_a_batch_that_names_a_seed_is_repeatable(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": 1, "question": "Why?", "seed": 0}\n{"id": 2, "question": "How?"}\n')
    plain, named = Question.of(""), Question.of("", seed=3, repeatable=True)
    assert [each.question.sampling.repeatable for each in read_questions(file, plain)] == [True, False]
    assert [each.question.sampling.repeatable for each in read_questions(file, named)] == [True, True]


def test_a_council_is_repeatable_where_its_table_or_its_caller_names_a_seed(tmp_path):
    file = tmp_path / "models.toml"
    file.write_text(
        '[[councils.c.specialists]]\nname = "a"\npersona = "You are a."\nseed = 0\n'
        '[[councils.c.specialists]]\nname = "b"\npersona = "You are b."\n'
    )
    council = Catalog.load(Settings(home=tmp_path, models_file=file)).council("c")
    assert [role.sampling.repeatable for role in (*council.members, council.judge)] == [True, False, False]
    assert all(role.sampling.repeatable for role in (*council.changed(seed=0).members, council.changed(seed=0).judge))
    assert council.changed() == council
    assert needs(council.changed(seed=1))["judge"].repeatable
    assert not needs(council)["a"].repeatable
