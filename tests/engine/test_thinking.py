"""Thoughts in the engine: they have tokens of their own, are ended when those are used up, and are no part of the answer."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.echo import open_echo
from localrag.engine.jobs import Sequence
from localrag.engine.template import JinjaChatTemplate
from localrag.text.thinking import Thinking, ThinkingForm
from localrag.types import MIN_THINK_TOKENS, SamplingParams
from tests.chat_templates import THINKING

THINK = ThinkingForm("<think>", "</think>")
CHANNELS = ThinkingForm("", "")
END = THINK.end.encode()
SAYS = "I shall say this. You asked: Why?"
ANSWER = "You asked: Why?"
FIRE = "Why? " + "🔥" * 30


@pytest.fixture(scope="module")
def template():
    with JinjaChatTemplate(THINKING, eos_text="<|im_end|>", time_limit_s=10) as made:
        yield made


@pytest.fixture
def echo(template):
    with open_echo(template=template) as engine:
        yield engine


def asked(engine, text, *, is_open=False):
    """The prompt for a question, which may open the thoughts."""
    ends = "assistant\n" + "<think>\n" * is_open
    return [256, *engine.tokenizer.encode(f"user\n{text}"), 257, 256, *engine.tokenizer.encode(ends)]


def thinking(max_tokens=1000, *, is_open=False, form=THINK):
    return Thinking(form=form, is_open=is_open, max_tokens=max_tokens, end_ids=tuple(form.end.encode()), mark_ids=frozenset())


def run(engine):
    while not engine.is_idle:
        engine.step()


@pytest.mark.parametrize("is_open", [False, True])
def test_thoughts_are_told_apart_and_counted_for_themselves(echo, is_open):
    echo.reserve(2000)
    prompt, thoughts, pieces = asked(echo, "Why?", is_open=is_open), [], []
    written = len(ANSWER) + 1  # with the token that ends it
    completion = echo.generate(
        prompt, SamplingParams(max_tokens=written), pieces.append, thinking=thinking(is_open=is_open), on_thought=thoughts.append
    )
    assert (completion.text, completion.reasoning, completion.finish_reason) == (ANSWER, SAYS, "stop")
    assert ("".join(pieces), "".join(thoughts)) == (ANSWER, SAYS)
    marks = "\n\n</think>\n\n" if is_open else "<think>\n\n</think>\n\n"
    assert completion.reasoning_tokens == len(SAYS) + len(marks)
    assert completion.completion_tokens == completion.reasoning_tokens + written


def test_an_answer_is_cut_at_its_own_length(echo):
    echo.reserve(2000)
    completion = echo.generate(asked(echo, "Why?"), SamplingParams(max_tokens=5), thinking=thinking())
    assert (completion.text, completion.reasoning, completion.finish_reason) == ("You a", SAYS, "length")
    assert completion.completion_tokens - completion.reasoning_tokens == 5


def test_without_room_for_thoughts_all_is_the_answer(echo):
    echo.reserve(2000)
    completion = echo.generate(asked(echo, "Why?"), SamplingParams())
    assert (completion.reasoning, completion.reasoning_tokens) == ("", 0)
    assert completion.text == f"<think>\n{SAYS}\n</think>\n\n{ANSWER}"


@pytest.mark.parametrize("is_open", [False, True])
def test_thoughts_that_take_too_long_are_ended_and_the_answer_follows(echo, is_open):
    """What ends them is evaluated behind them, so the cells hold what the next prompt may begin with."""
    echo.share_contexts()
    echo.reserve(2000)
    prompt = asked(echo, "Why?", is_open=is_open)
    completion = echo.generate(prompt, SamplingParams(), thinking=thinking(40, is_open=is_open))
    written = list(completion.completion_ids)
    assert (completion.text, completion.finish_reason, completion.reasoning_tokens) == (ANSWER, "stop", 40)
    assert bytes(written[40 - len(END) : 40]) == END
    assert bytes(written[: 40 - len(END)]).decode().removeprefix("<think>").lstrip() == completion.reasoning
    assert SAYS.startswith(completion.reasoning)
    evaluated = len(prompt) + len(written) - 1
    assert echo.context.runner.num_evaluated_tokens == evaluated
    again = echo.generate([*prompt, *written, *asked(echo, "And?")], SamplingParams(), thinking=thinking(40))
    assert again.cached_tokens == evaluated
    assert again.text == "You asked: And?"
    assert echo.context.runner.num_evaluated_tokens == again.prompt_tokens + again.completion_tokens - 1


def test_the_cells_hold_prompt_thoughts_end_and_answer_in_order(echo):
    echo.reserve(2000)
    prompt = asked(echo, "Why?")
    completion = echo.generate(prompt, SamplingParams(max_tokens=7), thinking=thinking(32))
    assert json.loads(echo.context.runner.save(0)) == [*prompt, *completion.completion_ids[:-1]]


def test_a_character_that_the_end_of_thoughts_cuts_is_not_shown(echo):
    echo.reserve(2000)
    whole = f"I shall say this. You asked: {FIRE}"
    for most in range(70, 90):
        told = []
        completion = echo.generate(
            asked(echo, FIRE, is_open=True), SamplingParams(), thinking=thinking(most, is_open=True), on_thought=told.append
        )
        assert whole.startswith(completion.reasoning)
        assert len(completion.reasoning.encode()) > most - len(END) - 5
        assert "".join(told) == completion.reasoning
        assert (completion.text, completion.reasoning_tokens) == (f"You asked: {FIRE}", most)


def test_only_the_answer_ends_at_a_stop_string(echo):
    echo.reserve(2000)
    completion = echo.generate(asked(echo, "Why?"), SamplingParams(stop=("shall", "asked")), thinking=thinking())
    assert (completion.reasoning, completion.text, completion.finish_reason) == (SAYS, "You ", "stop")


@settings(deadline=None)
@given(
    question=st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=40),
    max_tokens=st.integers(1, 80),
    most=st.integers(MIN_THINK_TOKENS, 160),
    form=st.sampled_from(["closed", "open", "none"]),
)
def test_no_cell_more_than_was_reserved_is_needed(template, question, max_tokens, most, form):
    """The echo's cells are as many as the sequence says it can come to need: one more, and it would be an error."""
    has_thoughts, is_open = form != "none", form == "open"
    with open_echo(template=template if has_thoughts else None) as engine, open_echo() as plain:
        prompt, sampling = asked(engine, question, is_open=is_open), SamplingParams(max_tokens=max_tokens)
        about = thinking(most, is_open=is_open)
        engine.reserve(Sequence(0, prompt, sampling, thinking=about).num_reserved)
        sequence = engine.add(prompt, sampling, thinking=about)
        pieces = []
        while not engine.is_idle:
            pieces += engine.step()
        plain.reserve(2000)
        answer = plain.generate(prompt, SamplingParams()).text
    completion = sequence.completion()
    assert completion.reasoning_tokens <= most
    assert completion.completion_tokens - completion.reasoning_tokens <= max_tokens
    assert "".join(piece.text for piece in pieces) == completion.text
    assert "".join(piece.thought for piece in pieces) == completion.reasoning
    assert answer.startswith(completion.text)
    assert completion.finish_reason == "length" or completion.text == answer
    thought = f"I shall say this. {answer}" if has_thoughts else ""
    assert thought.startswith(completion.reasoning)
    needed = len(f"{'' if is_open else '<think>'}\n{thought}{THINK.end}".encode()) if has_thoughts else 0
    if needed <= most - len(END):
        assert (completion.reasoning, completion.reasoning_tokens) == (thought.rstrip(), needed)
    else:
        assert completion.reasoning_tokens >= most - len(END)


def test_several_at_once_think_as_each_does_alone(echo):
    wanted = [(f"question {n} " + "x" * 11 * n, 20 + 17 * n, 10 + n, n % 2 == 0) for n in range(9)]
    echo.reserve(4000, num_sequences=4)

    def add(text, most, max_tokens, is_open):
        about = thinking(most, is_open=is_open)
        return echo.add(asked(echo, text, is_open=is_open), SamplingParams(max_tokens=max_tokens), thinking=about)

    together = [add(*each) for each in wanted]
    run(echo)
    found = [(each.text, each.reasoning, each.completion_ids, each.num_thought) for each in together]
    for each, (text, reasoning, ids, num_thought) in zip(wanted, found, strict=True):
        alone = add(*each)
        run(echo)
        assert (alone.text, alone.reasoning, alone.completion_ids, alone.num_thought) == (text, reasoning, ids, num_thought)
    assert {len(text) for text, *_ in found} == {10 + n for n in range(9)}
    assert sum(num_thought == most for (*_, num_thought), (_, most, *_) in zip(found, wanted, strict=True)) > 3  # were ended
    assert echo.context.cells.num_free + echo.context.cells.cache.num_cells == 4000


def test_what_thinks_beside_an_answer_does_not_disturb_it(echo):
    echo.reserve(2000, num_sequences=2)
    thinks = echo.add(asked(echo, "Why?"), SamplingParams(), thinking=thinking(32))
    plain = echo.add(asked(echo, "Why?"), SamplingParams())
    run(echo)
    assert (thinks.text, plain.text) == (ANSWER, f"<think>\n{SAYS}\n</think>\n\n{ANSWER}")


def test_a_sequence_that_is_cancelled_while_it_thinks_keeps_its_thoughts(echo):
    echo.reserve(2000, num_sequences=2)
    kept, dropped = (echo.add(asked(echo, "Why?"), SamplingParams(), thinking=thinking()) for _ in range(2))
    pieces = []
    while len(dropped.completion_ids) < len("<think>\nI shall "):
        pieces += echo.step()
    echo.cancel(dropped)
    pieces += echo.step()
    run(echo)
    completion = dropped.completion()
    assert (completion.finish_reason, completion.text, completion.reasoning) == ("cancelled", "", "I shall ")
    assert "".join(piece.thought for piece in pieces if piece.seq_id == dropped.seq_id) == "I shall "
    assert completion.reasoning_tokens == completion.completion_tokens == len("<think>\nI shall ")
    assert (kept.text, kept.reasoning) == (ANSWER, SAYS)


def test_ctrl_c_while_it_thinks_ends_it_with_what_was_thought(echo):
    echo.reserve(2000)
    told = []

    def interrupt(text):
        told.append(text)
        if "".join(told) == "I shall":
            raise KeyboardInterrupt

    completion = echo.generate(asked(echo, "Why?"), SamplingParams(), thinking=thinking(), on_thought=interrupt)
    assert (completion.finish_reason, completion.text, completion.reasoning) == ("cancelled", "", "I shall")
    assert echo.generate(asked(echo, "Why?"), SamplingParams(), thinking=thinking()).text == ANSWER


def test_a_deadline_that_passes_while_it_thinks_leaves_thoughts_alone(echo):
    echo.reserve(2000)
    sequence = echo.add(asked(echo, "Why?"), SamplingParams(), thinking=thinking(), deadline=time.perf_counter() + 1000)
    for _ in range(len("<think>\nI shall")):
        echo.step()
    sequence.deadline = time.perf_counter() - 1
    run(echo)
    assert (sequence.finish_reason, sequence.text, sequence.reasoning) == ("time", "", "I shall")


# --- a sequence alone, whatever its tokens are


MARKS = ("<think>", "</think>", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>")
PIECES = st.one_of(
    st.sampled_from([*MARKS, " ", "\n", "a", "STOP", "ST", "OP", "<thi", "</thi", "nk>"]).map(str.encode), st.binary(max_size=4)
)


@given(
    pieces=st.lists(PIECES, min_size=1, max_size=60),
    form=st.sampled_from([THINK, CHANNELS]),
    is_open=st.booleans(),
    more=st.integers(1, 20),
    max_tokens=st.integers(1, 20),
    stop=st.sampled_from([(), ("STOP",)]),
)
def test_whatever_is_sampled_both_limits_hold(pieces, form, is_open, more, max_tokens, stop):
    """Pieces are repeated until it ends by itself: it always does, within its limits."""
    about = thinking(len(form.end) + more, is_open=is_open, form=form)
    sequence = Sequence(0, [1], SamplingParams(max_tokens=max_tokens, stop=stop), thinking=about)
    text = thought = ""
    for number in range(about.max_tokens + max_tokens):
        text += sequence.append(7, pieces[number % len(pieces)], is_end=False)
        thought += sequence.take_thought()
        assert sequence.num_thought <= about.max_tokens
        assert len(sequence.completion_ids) - sequence.num_thought <= max_tokens
        assert sequence.num_tokens <= sequence.num_reserved + 1  # the last token is never evaluated
        if sequence.is_finished:
            break
    assert sequence.is_finished
    assert (sequence.text, sequence.reasoning) == (text, thought)
    assert not stop or stop[0] not in text


def test_nothing_behind_a_stop_string_is_shown_that_might_have_begun_a_mark():
    sequence = Sequence(0, [1], SamplingParams(stop=("STOP",)), thinking=thinking(100, form=CHANNELS))
    sequence.append(7, b"<|channel|>final<|message|>", is_end=False)
    assert sequence.append(7, b"It is. STOP <|e", is_end=False) == "It is. "
    assert (sequence.text, sequence.finish_reason) == ("It is. ", "stop")


def test_an_answer_that_ends_its_message_ends_there():
    sequence = Sequence(0, [1], SamplingParams(), thinking=thinking(100, form=CHANNELS))
    for piece in ("<|channel|>", "final", "<|message|>", "It", " is."):
        sequence.append(7, piece.encode(), is_end=False)
    assert sequence.finish_reason is None
    sequence.append(7, b"<|end|>", is_end=False)
    assert (sequence.text, sequence.finish_reason, sequence.num_thought) == ("It is.", "stop", 2)


def test_thoughts_that_begin_only_when_their_tokens_are_used_up_are_ended_at_once():
    about = thinking(len(END) + 3)
    sequence = Sequence(0, [1], SamplingParams(max_tokens=20), thinking=about)
    for piece in (b" ", b" ", b" ", b" ", b"<think>"):
        assert sequence.append(7, piece, is_end=False) == ""
    assert sequence.num_thought == about.max_tokens
    assert sequence.append(7, b"Yes.", is_end=False) == "Yes."


def test_a_model_that_ends_within_its_thoughts_is_led_to_an_answer():
    given = thinking(100)
    sequence = Sequence(0, [1], SamplingParams(), thinking=given)
    sequence.append(7, b"<think>Hm", is_end=False)
    sequence.append(2, b"", is_end=True)
    assert (sequence.completion_ids, sequence.finish_reason) == ([7, *given.end_ids], None)
    sequence.append(8, b"Yes.", is_end=False)
    sequence.append(2, b"", is_end=True)
    assert (sequence.text, sequence.reasoning, sequence.finish_reason) == ("Yes.", "Hm", "stop")
    assert sequence.num_thought == 1 + len(given.end_ids)
