"""ExclusiveCells: one sequence after another, each going on from a breakpoint that it has in common with the last."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.engine.echo import open_echo
from localrag.engine.kv_cache import common_breakpoint
from localrag.engine.loading import open_model
from localrag.errors import EngineError
from localrag.types import SamplingParams
from tests.gguf_files import write_model

FEW = SamplingParams(max_tokens=6)


@pytest.fixture
def echo():
    with open_echo() as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with open_model(write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), name="tiny") as engine:
        yield engine


def ids(engine, text):
    return engine.tokenizer.encode(text)


tokens = st.lists(st.integers(0, 1), max_size=8)


def borders_of(draw, length):
    return tuple(sorted(draw(st.sets(st.integers(1, length - 1), max_size=3)))) if length > 1 else ()


@given(st.data(), tokens, tokens.filter(bool), st.booleans())
def test_what_is_taken_over_has_the_same_tokens_and_the_same_borders(data, held, prompt, last_only):
    """Whoever evaluates the prompt from its start cuts it at the very same places up to there."""
    ours, theirs = borders_of(data.draw, len(held) + 1), borders_of(data.draw, len(prompt))
    found = common_breakpoint(held, ours, prompt, theirs, last_only=last_only)
    if found:
        assert held[:found] == prompt[:found]
        assert found < len(prompt)
        assert [each for each in ours if each <= found] == [each for each in theirs if each <= found]
        assert found in ours
        if last_only:
            assert found == ours[-1] == theirs[-1]
    longer = [each for each in set(ours) & set(theirs) if each > found and held[:each] == prompt[:each]]
    for each in longer:
        same_before = [b for b in ours if b <= each] == [b for b in theirs if b <= each]
        assert not same_before or last_only


def test_a_prompt_goes_on_from_the_last_common_border(echo):
    system = "You answer from these sources. " * 8
    echo.reserve(2000)
    first = echo.generate(ids(echo, system + "One?"), FEW, breakpoints=(100, len(system)))
    second = echo.generate(ids(echo, system + "Two?"), FEW, breakpoints=(100, len(system)))
    third = echo.generate(ids(echo, system[:150] + "Three?"), FEW, breakpoints=(100, 150))
    fourth = echo.generate(ids(echo, system + "Four?"), FEW, breakpoints=(99, len(system)))
    assert [done.cached_tokens for done in (first, second, third, fourth)] == [0, len(system), 100, 0]


def test_what_is_evaluated_is_what_was_not_taken_over(echo):
    system = "You answer from these sources. " * 30
    echo.reserve(2000)
    for question in ("One?", "Two?", "Three?"):
        before = echo.context.runner.num_evaluated_tokens
        done = echo.generate(ids(echo, system + question), FEW, breakpoints=(len(system),))
        assert echo.context.runner.num_evaluated_tokens - before == done.prompt_tokens - done.cached_tokens + done.completion_tokens - 1


@pytest.mark.parametrize("model", ["echo", "tiny"])
def test_in_a_conversation_a_prompt_goes_on_from_the_last_answer_also_where_the_context_grew(model, request):
    engine = request.getfixturevalue(model)
    engine.share_contexts()
    try:
        first = ids(engine, "the quick brown fox jumps over the lazy dog and sleeps. " * 4)
        engine.reserve(len(first) + 8)
        answer = engine.generate(first, FEW)
        whole = [*first, *answer.completion_ids[:-1]]  # the last token that was sampled was not evaluated
        longer = [*whole, *ids(engine, "and what did the cat do then, in the house?")]
        small = engine.context.runner.num_cells
        engine.reserve(4 * small)
        assert engine.context.runner.num_cells > small
        assert engine.generate(longer, FEW).cached_tokens == len(whole)
        engine.reserve(100)  # for whom one sequence would do
        assert engine.generate(longer, FEW).cached_tokens == len(longer) - 1
    finally:
        engine._min_sequences = 1


def test_a_context_that_grows_takes_along_what_it_holds(echo):
    system = "You answer from these sources. " * 8
    echo.reserve(len(system) + 20)
    echo.generate(ids(echo, system + "One?"), FEW, breakpoints=(len(system),))
    echo.reserve(3 * len(system))
    done = echo.generate(ids(echo, system + "And a longer question?"), FEW, breakpoints=(len(system),))
    assert done.cached_tokens == len(system)


def test_what_is_forgotten_is_evaluated_again(echo):
    echo.reserve(500)
    runs = [echo.generate(ids(echo, "x" * 100 + "?"), FEW, breakpoints=(100,)).cached_tokens for _ in range(2)]
    echo.forget()
    assert [*runs, echo.generate(ids(echo, "x" * 100 + "?"), FEW, breakpoints=(100,)).cached_tokens] == [0, 100, 0]


def test_a_single_answer_after_many_at_once_is_alone_again(echo):
    """A context that several sequences share is no place for an answer that is to be the same again."""
    echo.reserve(500)
    echo.reserve(900, num_sequences=3)
    echo.add(ids(echo, "x" * 100), FEW)
    while not echo.is_idle:
        echo.step()
    echo.reserve(500)
    assert echo.generate(ids(echo, "x" * 100 + "?"), FEW, breakpoints=(100,)).cached_tokens == 0


@pytest.mark.parametrize("breakpoints", [(0,), (4,), (2, 2), (3, 1), (-1,)])
def test_borders_are_positions_in_order(echo, breakpoints):
    echo.reserve(500)
    with pytest.raises(EngineError, match="ascending positions within it"):
        echo.add([1, 2, 3, 4], FEW, breakpoints=breakpoints)
    assert echo.is_idle


def test_llama_cpp_gives_the_same_again_whatever_was_asked_before(tiny):
    """To the bit: the logits of the first token of an answer, alone and after others."""
    rng = random.Random(4)
    tiny.reserve(1024)
    stem = [rng.randrange(5, 260) for _ in range(700)]
    for _ in range(8):
        cut = rng.randint(1, 690)
        breakpoints = (cut // 2, cut) if cut > 1 else (cut,)
        prompt = stem[:cut] + [rng.randrange(5, 260) for _ in range(rng.randint(1, 40))]
        tiny.forget()
        alone = tiny.generate(prompt, FEW, breakpoints=breakpoints)
        tiny.generate(stem[:cut] + [7] * 30, SamplingParams(max_tokens=20), breakpoints=breakpoints)
        after = tiny.generate(prompt, FEW, breakpoints=breakpoints)
        assert (alone.cached_tokens, after.cached_tokens) == (0, cut)
        assert after.completion_ids == alone.completion_ids


def test_a_cancelled_prompt_is_gone_on_from_where_it_stood(tiny):
    tiny.forget()
    tiny.reserve(1024)
    ids_ = [5 + n % 200 for n in range(900)]
    sequence = tiny.add(ids_, FEW, breakpoints=(300, 600))
    for _ in range(2):
        tiny.step()
    tiny.cancel(sequence)
    tiny.step()
    assert sequence.finish_reason == "cancelled"
    assert tiny.generate(ids_, FEW, breakpoints=(300, 600)).cached_tokens == 600
