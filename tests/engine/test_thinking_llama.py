"""Thoughts in llama.cpp, in vocabularies whose marks are tokens."""

import pytest

from localrag.engine.loading import open_model
from localrag.question import Question, ToolCalls
from localrag.session import Session
from localrag.types import Chunk, Hit, SamplingParams, ToolSpec
from tests import identities
from tests.reciting import BRACKETS, BRACKETS_TEMPLATE, CHANNELS, CHANNELS_TEMPLATE, HM_YES, write_reciting

SAMPLING = SamplingParams(max_tokens=3, think_tokens=40)


@pytest.fixture
def session(tmp_path):
    """Opens a session with such a model."""
    opened = []

    def make(chain, **model):
        opened.append(open_model(write_reciting(tmp_path / "model.gguf", chain, **model), name="reciting"))
        return Session(opened[0], n_ctx=512)

    yield make
    for engine in opened:
        engine.close()


def pieces(session, ids):
    return "".join(session.engine.tokenizer.piece(token).decode() for token in ids)


def test_marks_that_are_control_tokens_are_seen_and_not_shown(session):
    opened = session(HM_YES, controls=BRACKETS, template=BRACKETS_TEMPLATE)
    answer = opened.ask(Question.of("Why?", sampling=SAMPLING))
    identities.check(answer.to_dict(), [])
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Yes", "Hm", "stop")
    assert (answer.reasoning_tokens, answer.completion_tokens) == (3, 5)
    vocabulary = dict(opened.engine.tokenizer.special_texts)
    assert answer.prompt.thinking.mark_ids == {vocabulary["[THINK]"], vocabulary["[/THINK]"]}
    assert answer.prompt.thinking.max_tokens == 40


HITS = [Hit(Chunk(1, 1, 0, "Nylon dries at 80 °C.", 0, 21, "nylon.md"), 1.0)]
CITING = SamplingParams(max_tokens=40, think_tokens=40)


def test_an_answer_after_thoughts_cites_and_the_thoughts_are_free(session):
    opened = session(HM_YES | {"]": "Yes"}, controls=BRACKETS, template=BRACKETS_TEMPLATE)
    answer = opened.ask(Question.of("Why?", sampling=CITING, hits=HITS))
    identities.check(answer.to_dict(), ["KB#1"])
    assert (answer.reasoning, answer.reasoning_tokens) == ("Hm", 3)
    assert answer.text == "[KB#1]Yes"
    free = opened.ask(Question.of("Why?", sampling=CITING, hits=HITS, cite="free"))
    assert (free.reasoning, free.text) == ("Hm", "Yes")


PING = ToolSpec("ping", "Answers.", {"type": "object", "properties": {}})


@pytest.mark.parametrize("or_text", [False, True])
def test_calls_come_after_thoughts(session, or_text):
    opened = session(HM_YES, controls=BRACKETS, template=BRACKETS_TEMPLATE)
    calls = ToolCalls(choices=("ping",), or_text=or_text)
    answer = opened.ask(Question.of("Why?", sampling=CITING, tools=[PING], calls=calls))
    identities.check(answer.to_dict(), [])
    assert (answer.reasoning, answer.reasoning_tokens) == ("Hm", 3)
    made = [(call.name, call.parsed) for call in answer.tool_calls]
    assert (answer.text, made) == (("Yes", []) if or_text else ("", [("ping", {})]))


def test_thoughts_that_used_up_their_tokens_are_followed_by_an_answer_that_cites(session):
    chain = {"t": "<|channel|>", "<|channel|>": "analysis", "analysis": "<|message|>", "<|message|>": "Hm", "Hm": "Ġso", "Ġso": "Ġso"}
    opened = session(chain | {"]": "Yes", "Yes": "<|return|>"}, controls=CHANNELS, template=CHANNELS_TEMPLATE)
    answer = opened.ask(Question.of("Why?", sampling=CITING, hits=HITS))
    identities.check(answer.to_dict(), ["KB#1"])
    assert answer.reasoning.startswith("Hm so so")
    assert answer.reasoning_tokens == 40
    assert answer.text == "[KB#1]Yes"


@pytest.mark.parametrize(
    ("chain", "controls", "template"),
    [
        ({"Ċ": "Yes", "]": "Yes", "Yes": "<|im_end|>"}, BRACKETS, BRACKETS_TEMPLATE),
        ({"t": "Yes", "]": "Yes", "Yes": "<|return|>"}, CHANNELS, CHANNELS_TEMPLATE),
    ],
    ids=["brackets", "channels"],
)
def test_an_answer_without_thoughts_cites_too(session, chain, controls, template):
    opened = session(chain, controls=controls, template=template)
    answer = opened.ask(Question.of("Why?", sampling=CITING, hits=HITS))
    identities.check(answer.to_dict(), ["KB#1"])
    assert (answer.reasoning, answer.text) == ("", "[KB#1]Yes")


def test_a_token_that_ends_thoughts_and_begins_the_answer_is_not_taken(session):
    chain = {"Ċ": "[THINK]", "[THINK]": "Hm", "Hm": "[/THINK]Yes", "[/THINK]Yes": "Ġso", "]": "Ġso"}
    opened = session(chain, controls=[*BRACKETS, "[/THINK]Yes"], template=BRACKETS_TEMPLATE)
    answer = opened.ask(Question.of("Why?", sampling=CITING, hits=HITS))
    identities.check(answer.to_dict(), ["KB#1"])
    assert answer.text.startswith("[KB#1] so")
    assert "Yes" not in answer.text


def test_thoughts_without_end_are_ended_and_the_next_prompt_goes_on_from_there(session):
    opened = session({"Ċ": "[THINK]", "[THINK]": "Hm", "Hm": "Ġso", "Ġso": "Hm"}, controls=BRACKETS, template=BRACKETS_TEMPLATE)
    engine, told = opened.engine, []
    engine.share_contexts()
    answer = opened.ask(Question.of("Why?", sampling=SAMPLING), on_thought=told.append)
    identities.check(answer.to_dict(), [])
    assert (answer.reasoning_tokens, answer.finish_reason) == (40, "length")
    assert "".join(told) == answer.reasoning == ("Hm so" * 40)[: len(answer.reasoning)]
    ids, thinking = list(answer.prompt.token_ids), answer.prompt.thinking
    written = list(engine.generate(ids, SAMPLING, thinking=thinking).completion_ids)
    assert tuple(written[40 - len(thinking.end_ids) : 40]) == thinking.end_ids
    again = engine.generate([*ids, *written, *ids], SAMPLING, thinking=thinking)
    assert again.cached_tokens == len(ids) + len(written) - 1
    assert (list(again.completion_ids), again.reasoning) == (written, answer.reasoning)


def test_the_end_of_thoughts_is_the_templates_own_tokens(session):
    chain = {"t": "<|channel|>", "<|channel|>": "analysis", "analysis": "<|message|>", "<|message|>": "Hm", "Hm": "Ġso", "Ġso": "Ġso"}
    opened = session(chain, controls=CHANNELS, template=CHANNELS_TEMPLATE, changes={"tokenizer.ggml.add_bos_token": True})
    answer = opened.ask(Question.of("Why?", sampling=SAMPLING))
    identities.check(answer.to_dict(), [])
    thinking = answer.prompt.thinking
    assert answer.prompt.token_ids[0] == opened.engine.tokenizer.bos_id
    assert pieces(opened, thinking.end_ids) == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert not thinking.mark_ids  # llama.cpp makes them tokens whose text is shown in any case
    num_said = 40 - len(thinking.end_ids) - 4
    assert (answer.reasoning, answer.text) == ("Hm" + " so" * num_said, "Hm so so")
    assert (answer.reasoning_tokens, answer.completion_tokens, answer.finish_reason) == (40, 43, "length")


def test_a_message_that_ends_is_the_end(session):
    chain = {"t": "<|message|>", "<|message|>": "Yes", "Yes": "<|end|>", "<|end|>": "Hm"}
    opened = session(chain, controls=CHANNELS, template=CHANNELS_TEMPLATE)
    assert not opened.engine.tokenizer.is_end(dict(opened.engine.tokenizer.tag_texts)["<|end|>"])
    answer = opened.ask(Question.of("Why?", sampling=SAMPLING))
    identities.check(answer.to_dict(), [])
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Yes", "", "stop")


def test_kept_from_thinking_it_answers_at_once(session):
    chain = {"<|message|>": "Yes", "Yes": "<|return|>", "t": "<|channel|>"}
    opened = session(chain, controls=CHANNELS, template=CHANNELS_TEMPLATE)
    for options in ({"sampling": SamplingParams(max_tokens=3, think_tokens=0)}, {"sampling": SAMPLING, "max_seconds": 1000.0}):
        answer = opened.ask(Question.of("Why?", **options))
        identities.check(answer.to_dict(), [])
        assert (answer.text, answer.reasoning_tokens, answer.finish_reason) == ("Yes", 0, "stop")
        assert pieces(opened, answer.prompt.token_ids).endswith("<|start|>assistant<|channel|>final<|message|>")
