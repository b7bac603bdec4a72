"""The loop, on the echo and on a tiny model that llama.cpp runs."""

import random
import threading
import time

import numpy as np
import pytest

from localrag.engine.context import BATCH_TOKENS
from localrag.engine.core import MAX_STALL_S
from localrag.engine.echo import EchoRunner, open_echo
from localrag.engine.loading import open_model
from localrag.errors import EngineError, UsageError
from localrag.types import SamplingParams
from tests.gguf_files import write_model
from tests.homes import know_attention


def kept(engine, prompts, finished):
    """Which of these finished sequences still hold something that one of the prompts begins with."""
    engine._held = []
    engine.hold(finished)
    return engine.keep_for(prompts)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def tiny(tiny_path):
    with open_model(tiny_path, name="tiny") as engine:
        yield engine


@pytest.fixture
def echo():
    with open_echo() as engine:
        yield engine


def said(engine, text):
    return [256, *engine.tokenizer.encode(f"user\n{text}"), 257, 256, *engine.tokenizer.encode("assistant\n")]


def run(engine):
    while not engine.is_idle:
        engine.step()


def test_the_echo_answers_with_the_question(echo):
    echo.reserve(700)
    pieces = []
    completion = echo.generate(said(echo, "Sources:\n\n[KB#4] x\n\nQuestion: Why? 🔥\n\nAnswer."), SamplingParams(), pieces.append)
    assert completion.text == "".join(pieces) == "You asked: Why? 🔥 [KB#4]"
    assert completion.finish_reason == "stop"
    assert completion.completion_tokens == len(completion.text.encode()) + 1  # and the token that ends it


def test_many_sequences_in_one_context_give_what_each_gives_alone(echo):
    prompts = [said(echo, f"question {n} " + "x" * 37 * n) for n in range(12)]
    echo.reserve(3000, num_sequences=4)
    sequences = [echo.add(prompt, SamplingParams(max_tokens=300)) for prompt in prompts]
    run(echo)
    alone = [echo.generate(prompt, SamplingParams(max_tokens=300)).text for prompt in prompts]
    assert [sequence.completion().text for sequence in sequences] == alone


def test_every_token_is_evaluated_once_and_only_once(echo):
    echo.reserve(3000, num_sequences=3)
    sequences = [echo.add(said(echo, "y" * n), SamplingParams(max_tokens=n % 40 + 1)) for n in range(1, 700, 70)]
    run(echo)
    runner = echo.context.runner
    assert isinstance(runner, EchoRunner)
    assert runner.num_evaluated_tokens == sum(len(s.prompt_ids) - s.num_cached_tokens + len(s.completion_ids) - 1 for s in sequences)


def test_a_long_prompt_does_not_stall_a_running_answer(echo):
    echo.reserve(6000, num_sequences=2)
    first = echo.add(said(echo, "short"), SamplingParams(max_tokens=100))
    echo.step()
    echo.add(said(echo, "z" * 4000), SamplingParams(max_tokens=100))
    before = len(first.completion_ids)
    for _ in range(5):
        echo.step()
    assert len(first.completion_ids) == before + 5


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(echo):
    echo.reserve(100)
    with pytest.raises(EngineError) as raised:
        echo.add([1] * 90, SamplingParams(max_tokens=20))
    assert raised.value.numbers == {"needed": 109, "num_cells": 100}


def test_sequences_wait_in_order_when_cells_run_out(echo):
    echo.reserve(400, num_sequences=8)
    sequences = [echo.add(said(echo, "w" * 100), SamplingParams(max_tokens=150)) for _ in range(4)]
    echo.step()
    assert [sequence.started_at is not None for sequence in sequences] == [True, False, False, False]
    run(echo)
    assert all(sequence.finish_reason == "stop" for sequence in sequences)


def test_a_cancelled_sequence_keeps_what_it_wrote_and_frees_its_cells(echo):
    echo.reserve(1000, num_sequences=2)
    kept, dropped = (echo.add(said(echo, text), SamplingParams(max_tokens=100)) for text in ("hello", "jello"))
    for _ in range(5):
        echo.step()
    echo.cancel(dropped)
    run(echo)
    assert (dropped.finish_reason, dropped.text) == ("cancelled", "You a")
    assert kept.text == "You asked: hello"
    assert echo.context.cells.num_free + echo.context.cells.cache.num_cells == 1000


def test_of_a_finished_sequence_only_what_others_begin_with_is_kept(tiny):
    tiny.reserve(600, num_sequences=3)
    shared = [*range(1, 41)]
    first, second, other = (tiny.add(ids, SamplingParams(max_tokens=3)) for ids in ([*shared, 50, 51], [*shared, 60], [*range(70, 100)]))
    run(tiny)
    assert kept(tiny, [[*shared, 80]], [first, second, other]) == [first, second]
    assert tiny.context.cells.cache.num_cells == len(shared)
    last = tiny.add([*shared, 90], SamplingParams(max_tokens=3))
    run(tiny)
    assert last.num_cached_tokens == len(shared)
    assert kept(tiny, [], [last, first]) == []
    assert tiny.context.cells.cache.num_cells == len(shared)  # the second holds it still
    assert kept(tiny, [], [first, second]) == []
    assert tiny.context.cells.cache.num_cells == 0


def test_what_took_the_place_of_a_finished_sequence_is_not_forgotten_with_it(echo):
    echo.reserve(400, num_sequences=2)
    first = echo.add(said(echo, "a" * 200), SamplingParams(max_tokens=100))
    run(echo)
    second = echo.add(said(echo, "b" * 200), SamplingParams(max_tokens=100))
    run(echo)
    assert second.slot == first.slot
    held = echo.context.cells.cache.num_cells
    assert kept(echo, [], [first]) == []
    assert echo.context.cells.cache.num_cells == held > 0


def test_an_error_in_the_reader_of_the_stream_leaves_the_engine_usable(echo):
    echo.reserve(700)

    def gone(_text):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        echo.generate(said(echo, "a"), SamplingParams(), gone)
    assert echo.generate(said(echo, "b"), SamplingParams()).text == "You asked: b"


def test_ctrl_c_ends_an_answer_with_what_was_written(echo):
    echo.reserve(700)
    written = []

    def interrupt(text):
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    completion = echo.generate(said(echo, "a"), SamplingParams(), interrupt)
    assert (completion.text, completion.finish_reason) == ("You", "cancelled")


# --- deadlines: the echo counts on 1 ms a prompt token and 10 ms an answer token, and takes next to nothing


def test_with_time_enough_a_deadline_changes_nothing(echo):
    echo.reserve(700)
    completion = echo.generate(said(echo, "a"), SamplingParams(), deadline=time.perf_counter() + 1000)
    assert (completion.text, completion.finish_reason) == ("You asked: a", "stop")


def test_a_deadline_that_has_passed_evaluates_nothing_and_leaves_the_engine_usable(echo):
    echo.reserve(700)
    completion = echo.generate(said(echo, "a"), SamplingParams(), deadline=time.perf_counter() - 1)
    assert (completion.text, completion.finish_reason, completion.completion_tokens) == ("", "time", 0)
    assert echo.context.runner.num_evaluated_tokens == 0
    assert echo.generate(said(echo, "b"), SamplingParams()).text == "You asked: b"


def test_a_prompt_that_would_take_twice_its_time_is_not_begun(echo):
    echo.reserve(2000)
    completion = echo.generate([1] * 500, SamplingParams(), deadline=time.perf_counter() + 0.2)
    assert (completion.finish_reason, echo.context.runner.num_evaluated_tokens) == ("time", 0)


def test_a_deadline_that_passes_while_the_prompt_is_evaluated_leaves_one_token(echo):
    echo.reserve(1000)
    sequence = echo.add(said(echo, "x" * 700), SamplingParams(max_tokens=20))
    echo.step()
    assert not sequence.completion_ids
    now = time.perf_counter()
    sequence.added_at, sequence.deadline = now - 100, now - 1
    run(echo)
    assert (sequence.text, sequence.finish_reason, len(sequence.completion_ids)) == ("Y", "time", 1)


def test_a_prompt_that_has_waited_past_its_deadline_is_not_begun(echo):
    echo.reserve(400, num_sequences=8)
    running, waiting = (echo.add(said(echo, "w" * 100), SamplingParams(max_tokens=150)) for _ in range(2))
    echo.step()
    now = time.perf_counter()
    waiting.added_at, waiting.deadline = now - 100, now - 1
    echo.step()
    assert (waiting.finish_reason, waiting.started_at) == ("time", None)
    run(echo)
    assert running.finish_reason == "stop"


def test_each_sequence_has_its_own_deadline(echo):
    echo.reserve(1000, num_sequences=3)
    far = time.perf_counter() + 1000
    first, second, third = (
        echo.add(said(echo, text), SamplingParams(max_tokens=100), deadline=at)
        for text, at in (("one", far), ("two", None), ("three", far))
    )
    waiting = echo.add(said(echo, "four"), SamplingParams(max_tokens=100), deadline=far)
    for _ in range(3):
        echo.step()
    first.deadline = waiting.deadline = time.perf_counter() - 1
    waiting.added_at = waiting.deadline
    pieces = echo.step()
    assert [(piece.seq_id, piece.token_id, piece.finish_reason) for piece in pieces if piece.finish_reason] == [
        (first.seq_id, None, "time"),
        (waiting.seq_id, None, "time"),
    ]
    run(echo)
    assert [each.text for each in (first, second, third, waiting)] == ["You", "You asked: two", "You asked: three", ""]
    assert [each.finish_reason for each in (first, second, third, waiting)] == ["time", "stop", "stop", "time"]
    assert echo.context.cells.num_free + echo.context.cells.cache.num_cells == 1000


def test_the_echo_says_the_same_speed_always(echo):
    echo.measure_speed()  # known from the beginning: no context is made
    assert echo.context is None
    before = echo.speed.plan_s(500, 50)
    echo.reserve(700)
    echo.generate(said(echo, "a"), SamplingParams())
    assert before == echo.speed.plan_s(500, 50) == pytest.approx(1.0)


@pytest.mark.parametrize("reason", ["time", "cancelled"])
def test_what_an_answer_taught_is_kept_also_where_it_was_ended(echo, reason):
    kept = []
    echo._backend.save_speed = lambda: kept.append(echo.speed)
    echo.reserve(700)
    running = echo.add(said(echo, "a"), SamplingParams())
    echo.step()
    assert kept == []
    if reason == "time":
        running.deadline = time.perf_counter() - 1
    else:
        echo.cancel(running)
    echo.step()
    assert (running.finish_reason, kept) == (reason, [echo.speed])


# --- on llama.cpp


def test_an_unknown_speed_is_measured_once_and_refreshed_by_each_run(tiny_path, tmp_path):
    know_attention(tmp_path)
    with open_model(tiny_path, name="tiny", home=tmp_path) as engine:
        assert not engine.speed.is_known
        engine.measure_speed()
        assert engine.speed.is_known
        assert min(engine.speed.prefill_s(100), engine.speed.decode_s(1, 100), engine.speed.overhead_s(1000)) > 0
        measured = engine.speed.to_dict()
    with open_model(tiny_path, name="tiny", home=tmp_path) as engine:
        assert engine.speed.to_dict() == measured
        engine.measure_speed()  # nothing to do
        assert engine.context is None
        engine.reserve(1024)
        engine.generate(engine.tokenizer.encode("the oven is hot ") * 50, SamplingParams(max_tokens=9))
        refreshed = engine.speed.to_dict()
    with open_model(tiny_path, name="tiny", home=tmp_path) as engine:
        assert engine.speed.to_dict() == refreshed != measured


def test_steps_that_several_sequences_share_teach_nothing(tiny):
    tiny.reserve(512, num_sequences=2)
    for token in (5, 6):
        tiny.add([token] * 40, SamplingParams(max_tokens=9))
    before = tiny.speed.to_dict()
    run(tiny)
    assert tiny.speed.to_dict() == before


def test_a_deadline_ends_an_answer_of_llama_cpp(tiny_path):
    with open_model(tiny_path, name="tiny") as engine:
        engine.reserve(60_000)
        engine.measure_speed()
        completion = engine.generate([5] * 20, SamplingParams(max_tokens=59_000), deadline=time.perf_counter() + 0.3)
        assert completion.finish_reason == "time"
        assert completion.completion_tokens < 59_000


def test_batched_and_alone_are_the_same_on_llama_cpp(tiny):
    rng = random.Random(1)
    prompts = [[rng.randrange(5, 260) for _ in range(rng.randint(1, 90))] for _ in range(9)]
    sampling = SamplingParams(max_tokens=12)
    tiny.reserve(512, num_sequences=3)
    sequences = [tiny.add(prompt, sampling) for prompt in prompts]
    run(tiny)
    alone = [tiny.generate(prompt, sampling).completion_ids for prompt in prompts]
    same = sum(tuple(sequence.completion_ids) == ids for sequence, ids in zip(sequences, alone, strict=True))
    assert same >= 8  # the order of summation differs in a batch, which can decide a near tie


def test_the_logprobs_of_a_token_are_those_of_all_logits(tiny):
    tiny.reserve(64)
    vocabulary = tuple(range(tiny.info.vocab_size))
    sampling = SamplingParams(max_tokens=6, logprobs=5, temperature=1.5, seed=3)
    running = tiny.add(list(b"hello"), sampling, watched=vocabulary)
    while not running.is_finished:
        tiny.step()
    found = running.completion().logprobs
    logits = np.array(running.watched_logits, np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    assert found[0].logprob == pytest.approx(expected[running.completion_ids[0]], abs=1e-6)
    assert [value for _, value in found[0].top] == pytest.approx(sorted(expected, reverse=True)[:5], abs=1e-6)
    assert b"".join(each.piece for each in found).decode(errors="replace") == running.text
    assert len(found) == len(running.completion_ids) - (running.finish_reason == "stop")


def test_without_top_there_is_the_token_alone_and_the_echo_is_sure(echo):
    echo.reserve(64)
    found = echo.generate([256, *b"user\nHi", 257], SamplingParams(max_tokens=8, logprobs=0)).logprobs
    assert b"".join(each.piece for each in found) == b"You aske"
    assert all(each.top == () and -0.1 < each.logprob < 0 for each in found)
    best = echo.generate([256, *b"user\nHi", 257], SamplingParams(max_tokens=2, logprobs=2)).logprobs[0]
    assert [best.top[0][0], best.top[0][1]] == [b"Y", best.logprob]
    assert len(best.top) == 2


def test_a_fixed_seed_gives_the_same_again_and_another_seed_does_not(tiny):
    tiny.reserve(256)
    prompt = tiny.tokenizer.encode("the thing in the oven")
    texts = [tiny.generate(prompt, SamplingParams(temperature=1.5, seed=seed, max_tokens=30)).completion_ids for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_greatest_seed_is_a_seed_like_others(tiny):
    tiny.reserve(256)
    prompt, sampling = tiny.tokenizer.encode("the thing in the oven"), SamplingParams(temperature=1.5, seed=2**32 - 1, max_tokens=30)
    assert tiny.generate(prompt, sampling).completion_ids == tiny.generate(prompt, sampling).completion_ids


def test_a_repeat_penalty_reaches_the_sampler(tiny):
    tiny.reserve(256)
    prompt = tiny.tokenizer.encode("in in in in")
    plain = tiny.generate(prompt, SamplingParams(max_tokens=40)).completion_ids
    punished = tiny.generate(prompt, SamplingParams(max_tokens=40, repeat_penalty=2.0)).completion_ids
    assert len(set(punished)) > len(set(plain))


def test_a_prompt_longer_than_a_batch_is_evaluated_in_pieces(tiny_path):
    with open_model(tiny_path, name="tiny") as engine:
        engine.reserve(2048)
        ids = (engine.tokenizer.encode("the oven is hot ") * 200)[:1800]
        completion = engine.generate(ids, SamplingParams(max_tokens=4))
        assert (completion.prompt_tokens, completion.completion_tokens) == (1800, 4)
        assert engine.context.runner.num_tokens(0) == 1803  # the last token of an answer is never evaluated


def test_a_context_evaluates_in_one_batch_whatever_its_cells_hold(tiny_path):
    with open_model(tiny_path, name="tiny") as engine:
        engine.reserve(150)
        num_cells = engine.context.runner.num_cells
        assert engine.generate([5] * (num_cells - 4), SamplingParams(max_tokens=4)).prompt_tokens == num_cells - 4


def test_cancelling_from_another_thread_stops_the_batch_and_the_engine_goes_on(tiny_path):
    with open_model(tiny_path, name="tiny") as engine:
        engine.reserve(60_000, num_sequences=2)
        ids = engine.tokenizer.encode("the oven is hot ") * 5000
        long = engine.add(ids[:50_000], SamplingParams())
        timer = threading.Timer(0.1, engine.cancel, [long])
        timer.start()
        while not long.is_finished:
            engine.step()
        timer.join()
        assert long.finish_reason == "cancelled"
        assert long.num_evaluated < 50_000
        again = engine.generate(ids[:50], SamplingParams(max_tokens=5))
        assert again.completion_ids == engine.generate(ids[:50], SamplingParams(max_tokens=5)).completion_ids


def test_an_answer_that_was_cancelled_between_steps_costs_the_others_no_batch(tiny):
    tiny.reserve(2048, num_sequences=2)
    dropped, kept = (tiny.add([token] * 9, SamplingParams(max_tokens=6)) for token in (5, 6))
    tiny.step()
    tiny.cancel(dropped)
    tiny.step()
    assert (dropped.finish_reason, len(kept.completion_ids)) == ("cancelled", 2)


def test_the_context_cannot_grow_under_a_running_answer(tiny):
    tiny.reserve(256)
    tiny.add([5, 6, 7], SamplingParams(max_tokens=50))
    tiny.step()
    with pytest.raises(EngineError, match="cannot grow"):
        tiny.reserve(4096)
    run(tiny)
    tiny.reserve(4096)
    assert tiny.generate([5, 6, 7], SamplingParams(max_tokens=3)).completion_tokens <= 3


def test_a_schema_that_is_not_supported_is_refused_before_a_step_is_shared(echo):
    echo.reserve(2000, num_sequences=2)
    beside = echo.add(said(echo, "hello"), SamplingParams(max_tokens=100))
    with pytest.raises(UsageError, match="cannot be used"):
        echo.add(said(echo, "hello"), SamplingParams(json_schema={"not": {"type": "string"}}))
    run(echo)
    assert beside.text == "You asked: hello"


def test_a_long_prompt_stalls_no_answer_for_longer_than_a_moment(echo):
    """Every step gives the running answer a token; the pieces of the prompt beside it are short ones, and whole ones when it is alone."""
    echo.reserve(9000, num_sequences=2)
    answer = echo.add(said(echo, "hello"), SamplingParams(max_tokens=8))
    echo.step()
    long = echo.add([5] * 3000, SamplingParams(max_tokens=2))
    pieces = []
    while not long.completion_ids:
        before, num_tokens = long.num_evaluated, len(answer.completion_ids)
        echo.step()
        pieces.append((answer.is_finished, long.num_evaluated - before))
        assert len(answer.completion_ids) == num_tokens + 1 or num_tokens == 8
    beside = [size for is_finished, size in pieces if not is_finished]
    assert len(beside) > 4
    assert all(echo.speed.prefill_s(size) <= MAX_STALL_S for size in beside)
    assert max(size for is_finished, size in pieces if is_finished) == BATCH_TOKENS
    run(echo)


def test_where_nobody_reads_along_prompts_are_evaluated_whole_beside_answers(echo):
    echo.reserve(9000, num_sequences=2)
    answer = echo.add(said(echo, "hello"), SamplingParams(max_tokens=8))
    echo.step()
    long = echo.add([5] * 3000, SamplingParams(max_tokens=2))
    with echo.whole_prompts():
        echo.step()
    assert long.num_evaluated == BATCH_TOKENS - 1  # and the token of the answer
    assert not answer.is_finished
    echo.step()
    assert echo.speed.prefill_s(long.num_evaluated - BATCH_TOKENS + 1) <= MAX_STALL_S
    run(echo)


def test_an_answer_that_cannot_go_on_ends_alone(tiny):
    """A sampler that fails is its own sequence's error."""
    tiny.reserve(2048, num_sequences=2)
    lost, kept = (tiny.add([token] * 9, SamplingParams(max_tokens=6)) for token in (5, 6))
    tiny.step()
    tiny.context.runner._samplers[lost.slot] = Failing(tiny.context.runner._samplers[lost.slot])
    run(tiny)
    assert (lost.finish_reason, str(lost.error)) == ("error", "The sampler failed.")
    assert kept.completion().completion_tokens > 1
    assert tiny.is_idle


class Failing:
    """A sampler that was made, and then fails."""

    def __init__(self, sampler):
        self.close = sampler.close

    def sample(self, _context, _index, _part_of):
        raise EngineError("The sampler failed.")
