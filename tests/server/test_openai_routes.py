"""OpenAI's other routes, and what a chat completion tells of its tokens, asked by OpenAI's own client.

Embeddings are asked for in tests/model/test_server_real.py.
"""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from localrag.server.openai_responses import chat_body
from tests.server.live import served

QUESTION = [{"role": "user", "content": "What is PLA?"}]
ANSWER = "You asked: What is PLA?"


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with served(tmp_path_factory.mktemp("home"), "--no-keep", "--ctx", "4096") as running:
        yield running


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def refused(live, route, body):
    answer = httpx.post(f"{live.url}{route}", json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["detail"]


@pytest.mark.parametrize("streamed", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_a_citation_that_max_tokens_cuts_off_is_neither_cited_nor_invented(live, streamed):
    """A token of the echo is a byte."""
    question = [{"role": "user", "content": "Is [KB#1007] right?"}]
    for wanted, cited in (("[KB#100", []), ("[KB#1007", []), ("[KB#1007]", ["KB#1007"])):
        body = {"messages": question, "max_tokens": len(f"You asked: Is {wanted}"), **streamed}
        lines = httpx.post(f"{live.url}/v1/chat/completions", json=body).text.splitlines()
        [account] = [json.loads(line.removeprefix("data: ")) for line in lines if "unsupported_citations" in line]
        assert account["localrag"]["unsupported_citations"] == cited


# --- what a chat completion tells of its tokens ---


def test_logprobs(client):
    choice = client.chat.completions.create(model="echo", messages=QUESTION, logprobs=True, top_logprobs=2).choices[0]
    found = choice.logprobs.content
    assert "".join(each.token for each in found) == ANSWER == bytes(byte for each in found for byte in each.bytes).decode()
    assert all(each.top_logprobs[0].token == each.token and each.top_logprobs[0].logprob == each.logprob for each in found)
    assert all(len(each.top_logprobs) == 2 and -1 < each.logprob < 0 for each in found)
    assert client.chat.completions.create(model="echo", messages=QUESTION).choices[0].logprobs is None


def test_logprobs_of_a_stream_are_those_of_its_text(client):
    chunks = list(client.chat.completions.create(model="echo", messages=QUESTION, logprobs=True, stop=["PLA"], stream=True))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    told = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert said == "You asked: What is " == "".join(each.token for each in told)
    assert all(each.top_logprobs == [] for each in told)


@pytest.mark.parametrize(
    "given", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 1}, {"logprobs": True, "top_logprobs": -1}]
)
def test_logprobs_out_of_range(live, given):
    assert "logprobs" in refused(live, "/v1/chat/completions", {"messages": QUESTION, **given})


def test_any_json_object(client):
    answer = client.chat.completions.create(model="echo", messages=QUESTION, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


# --- /v1/completions ---


def test_a_text_is_gone_on_with(client):
    answer = client.completions.create(model="echo", prompt="Once upon a time", max_tokens=40)
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        "You asked: Once upon a time",
        "stop",
    )
    assert answer.usage.prompt_tokens == len("Once upon a time")  # nothing of a template
    entries = {each["name"]: each["used"] for each in answer.model_extra["localrag"]["ledger"]["entries"] if each["used"]}
    assert entries == {"question": 16, "answer": answer.usage.completion_tokens}


def test_without_a_limit_a_text_has_sixteen_tokens(client):
    answer = client.completions.create(model="echo", prompt=["Once upon a time"])
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_a_text_is_streamed(client):
    chunks = list(
        client.completions.create(model="echo", prompt="Once", max_tokens=40, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "You asked: Once"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.total_tokens == 4 + 16


def test_logprobs_of_a_text(client):
    found = client.completions.create(model="echo", prompt="Once", max_tokens=3, logprobs=1).choices[0].logprobs
    assert (found.tokens, found.text_offset) == (["Y", "o", "u"], [4, 5, 6])
    assert [list(each) for each in found.top_logprobs] == [["Y"], ["o"], ["u"]]
    assert all(-1 < value < 0 for value in found.token_logprobs)


@pytest.mark.parametrize(
    "given",
    [{"prompt": ""}, {"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {}, {"prompt": "a", "suffix": "b"}, {"prompt": "a", "echo": True},
     {"prompt": "a", "best_of": 2}, {"prompt": "a", "n": 2}, {"prompt": "a", "logprobs": 6}, {"prompt": "a", "index_name": "x"},
     {"prompt": "a", "messages": QUESTION}, {"prompt": "a", "nonsense": 1}, {"prompt": "x" * 5000}],
)  # fmt: skip
def test_what_a_text_completion_refuses(live, given):
    assert refused(live, "/v1/completions", given)


def test_special_strings_in_a_prompt_are_text(client):
    answer = client.completions.create(model="echo", prompt="<|im_end|>hello", max_tokens=60)
    assert answer.usage.prompt_tokens > len("<|im_end|>hello") - 1


# --- /v1/responses ---


def test_a_response(client):
    answer = client.responses.create(model="echo", input="What is PLA?", instructions="Be brief.")
    assert (answer.status, answer.output_text, answer.instructions, answer.store) == ("completed", ANSWER, "Be brief.", False)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.model_extra["localrag"]["ledger"]["window"] == 4096


def test_a_response_to_a_conversation(client):
    said = [
        {"role": "user", "content": "Hello"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
    ]
    answer = client.responses.create(model="echo", input=[*said, {"role": "user", "content": [{"type": "input_text", "text": "And PLA?"}]}])
    assert answer.output_text == "You asked: And PLA?"


def test_an_item_without_a_type_is_a_message():
    for item in ({}, {"type": None}, {"type": "message"}):
        assert chat_body({"input": [{**item, "role": "user", "content": "Hi"}]})["messages"] == [{"role": "user", "content": "Hi"}]


def test_a_response_that_is_cut_off(client):
    answer = client.responses.create(model="echo", input="What is PLA?", max_output_tokens=5)
    assert (answer.status, answer.incomplete_details.reason, answer.output_text) == ("incomplete", "max_output_tokens", "You a")


def test_a_response_under_a_schema(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    answer = client.responses.create(model="echo", input="Hi", text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    assert json.loads(answer.output_text) == {"n": 0}


@pytest.mark.parametrize("fields", [{"description": False}, {"name": 7}, {"strict": "yes"}])
def test_a_format_that_the_response_could_not_repeat_is_refused(client, fields):
    with pytest.raises(openai.BadRequestError, match=r"text\.format must be text, json_object, or json_schema"):
        client.responses.create(model="echo", input="Hi", text={"format": {"type": "json_schema", "schema": {}, **fields}})


def test_the_events_of_a_response(client):
    events = list(client.responses.create(model="echo", input="What is PLA?", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER == events[-1].response.output_text
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    "given",
    [{}, {"input": 3}, {"input": []}, {"input": [{"type": "function_call_output", "output": "x"}]}, {"input": "a", "include": ["x"]},
     {"input": "a", "previous_response_id": "x"}, {"input": "a", "tools": [{"type": "web_search"}]}, {"input": "a", "background": True},
     {"input": "a", "truncation": "auto"},
     {"input": "a", "instructions": 3}, {"input": "a", "text": 3}, {"input": "a", "reasoning": {"effort": "extreme"}},
     {"input": "a", "reasoning": {"effort": []}}, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     {"input": "x" * 5000}],
)  # fmt: skip
def test_what_a_response_refuses(live, given):
    assert refused(live, "/v1/responses", given)
