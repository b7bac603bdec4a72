"""Thoughts told from the answer, whatever pieces a text comes in; and how twelve real templates say that their models think."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.engine.template import JinjaChatTemplate
from localrag.text.thinking import ThinkingForm, form_of, mark_ids, may_begin
from tests.chat_templates import CHATML, NOW, PATHS, THINKING, THINKING_OPEN, joined, talk

THINK = ThinkingForm("<think>", "</think>")
BRACKETS = ThinkingForm("[THINK]", "[/THINK]")
CHANNELS = ThinkingForm("", "")
FORMS = st.sampled_from([THINK, BRACKETS, ThinkingForm("<think>", "</think>", writes_marks=False)])
CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")


def run(splitter, pieces):
    """(thought, answer) of all pieces, and what was told of both before the end."""
    thought = answer = ""
    for piece in pieces:
        more = splitter.feed(piece)
        thought, answer = thought + more[0], answer + more[1]
    rest = splitter.finish()
    return (thought + rest[0], answer + rest[1]), (thought, answer)


def cut(text, sizes):
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def texts(*marks):
    """Texts in which marks, their halves, white space and words come in any order."""
    halves = [mark[:length] for mark in marks for length in range(1, len(mark))]
    pieces = st.one_of(
        st.sampled_from(marks), st.sampled_from(halves), st.sampled_from([" ", "\n", "\n\n", "a", "so 🔥", "<", "é"]), st.text()
    )
    return st.lists(pieces, max_size=9).map("".join)


PAIR_TEXTS = texts("<think>", "</think>", "[THINK]", "[/THINK]")
CHANNEL_TEXTS = texts(*CHANNEL_MARKS, "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
SIZES = st.lists(st.integers(0, 12), max_size=30)


def told(text, form, *, is_open):
    """(thought, answer), the plain way: with all of the text in hand."""
    said = text.lstrip()
    if said.startswith(form.opens):
        said = said[len(form.opens) :]
    elif not is_open:
        return "", text
    thought, closed, answer = said.partition(form.closes)
    return thought.strip(), answer.lstrip() if closed else ""


# --- thoughts between marks


@given(PAIR_TEXTS, FORMS, st.booleans())
def test_thoughts_are_what_stands_between_the_marks(text, form, is_open):
    (thought, answer), _ = run(form.splitter(is_open=is_open), [text])
    assert (thought.strip(), answer) == told(text, form, is_open=is_open)
    if form.closes in text:
        assert thought == thought.strip()


@given(PAIR_TEXTS, FORMS, st.booleans(), SIZES)
def test_any_pieces_give_what_the_whole_gives(text, form, is_open, sizes):
    assert run(form.splitter(is_open=is_open), cut(text, sizes))[0] == run(form.splitter(is_open=is_open), [text])[0]


@given(PAIR_TEXTS, FORMS, st.booleans(), SIZES)
def test_what_was_told_stays_true_however_the_text_goes_on(text, form, is_open, sizes):
    """So no half of a mark is ever told: the text could go on with its other half."""
    splitter, before = form.splitter(is_open=is_open), ("", "")
    for piece in cut(text, sizes):
        more = splitter.feed(piece)
        before = (before[0] + more[0], before[1] + more[1])
    for end in ("", *(form.closes[length:] for length in range(len(form.closes))), *(form.opens[length:] for length in range(1, 6))):
        (thought, answer), _ = run(form.splitter(is_open=is_open), [text + end + "x"])
        assert thought.startswith(before[0])
        assert answer.startswith(before[1])


@given(st.text(), FORMS, SIZES)
def test_the_answer_of_a_model_that_does_not_think_is_its_own(text, form, sizes):
    text = text if not text.lstrip().startswith(form.opens) else "x" + text
    assert run(form.splitter(is_open=False), cut(text, sizes))[0] == ("", text)


@given(st.one_of(PAIR_TEXTS, CHANNEL_TEXTS), st.one_of(FORMS, st.just(CHANNELS)), st.booleans(), SIZES)
def test_what_a_piece_would_belong_to_is_told_before_it_is_read(text, form, is_open, sizes):
    splitter = form.splitter(is_open=is_open)
    for piece in cut(text, sizes):
        part, was_thinking = splitter.part_of(piece), splitter.is_thinking
        if splitter.is_answering:
            return
        _, answer = splitter.feed(piece)
        if part == "thoughts":  # also the mark after which the answer begins
            assert not answer
        if part == "both":
            assert answer
            assert was_thinking


def test_a_mark_within_the_answer_is_part_of_it():
    text = "<think>\nHm.\n</think>\n\nWrite <think> first and </think> last.\n"
    assert run(THINK.splitter(is_open=False), text)[0] == ("Hm.", "Write <think> first and </think> last.\n")
    assert run(THINK.splitter(is_open=False), "Write <think>x</think>.")[0] == ("", "Write <think>x</think>.")


def test_thoughts_that_never_end_are_thoughts():
    splitter = THINK.splitter(is_open=False)
    (thought, answer), _ = run(splitter, "<think>And then, and then </thin")
    assert (thought, answer) == ("And then, and then </thin", "")
    assert (splitter.is_thinking, splitter.is_answering) == (True, False)


@pytest.mark.parametrize("text", ["<think></think>Yes.", "<think>\n\n</think>\n\nYes.", "\n<think> </think> Yes."])
def test_thoughts_can_be_empty(text):
    assert run(THINK.splitter(is_open=False), text)[0] == ("", "Yes.")


def test_a_model_may_open_what_its_prompt_opened():
    for text in ("Hm.\n</think>\n\nYes.", "<think>\nHm.\n</think>\n\nYes.", "\n<think>Hm.</think>Yes."):
        assert run(THINK.splitter(is_open=True), text)[0] == ("Hm.", "Yes.")
    assert run(THINK.splitter(is_open=True), "</think>\n\nYes.")[0] == ("", "Yes.")


@given(PAIR_TEXTS, FORMS, st.booleans(), SIZES)
def test_thoughts_that_are_ended_from_outside_are_followed_by_the_answer(text, form, is_open, sizes):
    splitter, thought = form.splitter(is_open=is_open), ""
    for piece in cut(text, sizes):
        thought += splitter.feed(piece)[0]
        if splitter.is_thinking:
            splitter.end()
            break
    else:
        return
    assert (splitter.is_thinking, splitter.is_answering) == (False, False)
    assert thought == thought.rstrip()
    rest = run(splitter, ["\n", "So ", f"{form.closes}it is."])[0]
    assert rest == ("", f"So {form.closes}it is.")


# --- channels


@given(CHANNEL_TEXTS, SIZES)
def test_any_pieces_of_channels_give_what_the_whole_gives(text, sizes):
    assert run(CHANNELS.splitter(is_open=False), cut(text, sizes))[0] == run(CHANNELS.splitter(is_open=False), [text])[0]


SAID = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(st.tuples(st.sampled_from(["analysis", "commentary", "analysis to=x"]), SAID), max_size=4), SAID, st.text(), SIZES)
def test_messages_of_all_channels_but_the_last_are_thoughts(messages, final, behind, sizes):
    text = "<|start|>assistant".join(f"<|channel|>{channel}<|message|>{said}<|end|>" for channel, said in messages)
    text += "<|start|>assistant" * bool(messages) + f"<|channel|>final<|message|>{final}"
    splitter = CHANNELS.splitter(is_open=False)
    assert run(splitter, cut(text, sizes))[0] == ("\n\n".join(said for _, said in messages), final)
    assert splitter.is_answering
    assert not splitter.is_over
    ended = CHANNELS.splitter(is_open=False)
    assert run(ended, cut(f"{text}<|end|>{behind}", sizes))[0] == ("\n\n".join(said for _, said in messages), final)
    assert ended.is_over


@given(SAID, SIZES)
def test_plain_text_where_channels_were_expected_is_the_answer(text, sizes):
    text = text if text.strip() else "x"
    assert run(CHANNELS.splitter(is_open=False), cut(text, sizes))[0] == ("", text)


def test_no_mark_of_a_channel_is_told():
    told = [CHANNELS.splitter(is_open=False)]
    text = "<|channel|>analysis<|message|>a <| b <|en c<|end|><|start|>assistant<|channel|>final<|message|>d <|e<|start|>x"
    parts = [told[0].feed(letter) for letter in text]
    assert "".join(thought for thought, _ in parts) == "a <| b <|en c"
    assert "".join(answer for _, answer in parts) == "d <|e"


@given(CHANNEL_TEXTS, SIZES)
def test_channels_that_are_ended_from_outside_are_followed_by_the_answer(text, sizes):
    splitter, thought = CHANNELS.splitter(is_open=False), ""
    for piece in cut(text, sizes):
        thought += splitter.feed(piece)[0]
    if splitter.is_answering:
        return
    splitter.end()
    assert not any(mark in thought for mark in CHANNEL_MARKS if mark != "<|message|>")
    assert run(splitter, "So it is.<|end|>x")[0] == ("", "So it is.")


def test_of_a_mark_that_was_half_there_when_thoughts_are_ended_nothing_is_told():
    splitter = CHANNELS.splitter(is_open=False)
    assert splitter.feed("<|channel|>analysis<|message|>Hm <|e") == ("Hm ", "")
    splitter.end()
    assert run(splitter, ["Yes."])[0] == ("", "Yes.")
    splitter = THINK.splitter(is_open=True)
    assert splitter.feed("Hm </th") == ("Hm", "")
    splitter.end()
    assert run(splitter, ["Yes."])[0] == ("", "Yes.")


# --- forms


def test_what_ends_thoughts_by_force_is_what_ends_them():
    for form in (THINK, BRACKETS):
        splitter = form.splitter(is_open=True)
        assert run(splitter, f"Hm{form.end}Yes.")[0] == ("Hm", "Yes.")
    text = f"<|channel|>analysis<|message|>Hm{CHANNELS.end}Yes."
    assert run(CHANNELS.splitter(is_open=False), text)[0] == ("Hm", "Yes.")


def test_a_template_shows_its_form():
    assert form_of(CHATML) is None
    assert form_of(THINKING) == form_of(THINKING_OPEN) == THINK
    assert form_of("{{ content.split('</think>')[-1] }}") == ThinkingForm("<think>", "</think>", writes_marks=False)
    assert form_of("[THINK]{{ thinking }}[/THINK]") == BRACKETS
    assert form_of("<|channel|>analysis<|message|>") == CHANNELS
    assert form_of("<|channel|>") is None


def test_only_control_tokens_of_marks_are_shown():
    texts = [("<think>", 1), ("</think>", 2), ("<|message|>", 3), ("<s>", 4)]
    assert mark_ids(THINK, texts) == {1, 2}
    assert mark_ids(CHANNELS, texts) == {3}


@given(texts("</think>"), st.sampled_from(["</think>", "a", "aab"]))
def test_may_begin_is_the_longest_end_that_begins_a_mark(text, mark):
    ends = [length for length in range(1, len(mark)) if length <= len(text) and text[len(text) - length :] == mark[:length]]
    assert may_begin(text, mark) == max(ends, default=0)


# --- real templates


needs_twelve = pytest.mark.skipif(len(PATHS) != 12, reason="needs the twelve templates of ../shared/data/templates, which are not here")
THINKERS = {
    "HuggingFaceTB-SmolLM3-3B": THINK,
    "LFM2.5-Instruct": ThinkingForm("<think>", "</think>", writes_marks=False),
    "Qwen-Qwen3-0.6B": THINK,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": THINK,
    "ibm-granite-granite-3.3-2B-Instruct": THINK,
    "openai-gpt-oss-120b": CHANNELS,
}
NO_THOUGHT = {
    "HuggingFaceTB-SmolLM3-3B": "<|im_start|>assistant\n<think>\n\n</think>\n",
    "Qwen-Qwen3-0.6B": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "<｜Assistant｜><think>\n\n</think>\n\n",
    "openai-gpt-oss-120b": "<|start|>assistant<|channel|>final<|message|>",
}


@pytest.fixture(scope="module", params=PATHS, ids=lambda path: path.stem)
def real(request):
    source = request.param.read_text("utf-8")
    with JinjaChatTemplate(source, bos_text="<s>", eos_text="</s>", time_limit_s=10, clock=lambda: NOW) as template:
        yield request.param.stem, template


@needs_twelve
def test_which_real_templates_think(real):
    name, template = real
    assert template.thinking == THINKERS.get(name)


@needs_twelve
@pytest.mark.parametrize("letters", ["u", "su", "suau"])
def test_a_prompt_without_thoughts_ends_where_the_answer_begins(real, letters):
    """And one with them is what it is without that choice, in whichever order they are asked for."""
    name, template = real
    form, messages = template.thinking, talk(letters)
    plain = template.render(messages)
    silent, again = template.render(messages, thinks=False), template.render(messages, thinks=True)
    assert again == plain
    said = {segment.message for segment in plain if segment.is_content}
    assert {segment.message for segment in silent if segment.is_content} == said
    if form is None or not form.writes_marks:
        assert silent == plain
        return
    assert form.has_ended(joined(silent))
    assert not form.is_open(joined(silent))
    assert not form.has_ended(joined(plain))
    assert joined(silent).endswith(NO_THOUGHT.get(name, joined(plain)[-20:] + "<think>\n\n</think>\n\n"))
    assert form.is_open(plain[-1].text) == (name == "deepseek-ai-DeepSeek-R1-Distill-Llama-8B")


def test_a_template_that_opens_thoughts_has_them_closed():
    for source in (THINKING, THINKING_OPEN):
        with JinjaChatTemplate(source, time_limit_s=10) as template:
            silent, plain = template.render(talk("su"), thinks=False), template.render(talk("su"))
        assert joined(silent).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert template.thinking.is_open(plain[-1].text) == (source == THINKING_OPEN)
