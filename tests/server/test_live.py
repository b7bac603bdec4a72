"""The server as programs meet it: OpenAI's own client, raw sockets, and a process that dies."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import openai
import pytest

from localrag.engine.jobs import SERVE
from tests.server.live import Live, served

QUESTION = [{"role": "user", "content": "What is PLA?"}]
LONG = [{"role": "system", "content": "Say it 100000 times"}, {"role": "user", "content": "What is PLA? Say it 90000 times"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with served(tmp_path_factory.mktemp("home"), "--no-keep", "--ctx", "8192") as running:
        yield running


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """One whose window has room for answers that take long."""
    with served(tmp_path_factory.mktemp("home"), "--no-keep", "--ctx", "131072") as running:
        yield running


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def test_a_completion(client):
    answer = client.chat.completions.create(model="echo", messages=QUESTION)
    assert answer.choices[0].message.content == "You asked: What is PLA?"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model_extra["source_nodes"] is None
    ledger = answer.model_extra["localrag"]["ledger"]
    assert sum(each["used"] for each in ledger["entries"] if each["name"] != "answer") == answer.usage.prompt_tokens
    assert answer.model_extra["localrag"]["slot"]["n_ctx"] == 8192


def test_max_tokens_end_an_answer_and_are_told_so(client):
    answer = client.chat.completions.create(model="echo", messages=QUESTION, max_tokens=5)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("You a", "length")


def test_a_stream(client):
    chunks = list(client.chat.completions.create(model="echo", messages=QUESTION, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "You asked: What is PLA?"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].model_extra["localrag"]["ledger"]["window"] == 8192


def test_a_stream_begins_with_the_ledger_of_its_prompt(client):
    chunks = list(client.chat.completions.create(model="echo", messages=QUESTION, stream=True, stream_options={"include_usage": True}))
    begun, done = (chunks[at].model_extra["localrag"] for at in (0, -1))
    used = {each["name"]: each["used"] for each in done["ledger"]["entries"]}
    assert {each["name"]: each["used"] for each in begun["ledger"]["entries"]} == {**used, "answer": 0}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (begun["slot"], begun["evidence"], chunks[0].model_extra["source_nodes"]) == (done["slot"], [], None)
    answer = next(each for each in begun["sections"] if each["name"] == "answer")
    assert answer["css"].startswith(f"flex:{answer['grow']:g} {answer['shrink']:g} {answer['basis']}px;")
    assert sum(each["allotted"] for each in begun["sections"]) <= begun["ledger"]["window"]


def test_a_stream_counts_its_tokens_as_they_come(client):
    chunks = list(client.chat.completions.create(model="echo", messages=QUESTION, stream=True, stream_options={"include_usage": True}))
    counted = [chunk.model_extra["localrag"]["completion_tokens"] for chunk in chunks[1:-2]]
    assert counted == list(range(1, 24))  # the 24th token is the end


def test_a_stream_that_asks_for_no_usage_has_no_ledger(client):
    chunks = list(client.chat.completions.create(model="echo", messages=QUESTION, stream=True))
    assert not any(chunk.model_extra.get("localrag") for chunk in chunks)


def test_a_form_of_its_own(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = client.chat.completions.create(model="echo", messages=QUESTION, response_format=form)
    assert list(json.loads(answer.choices[0].message.content)) == ["n"]


def test_a_prompt_that_is_longer_than_the_slot(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "x" * 9000}])
    assert "but the window holds 8192" in raised.value.response.json()["detail"]
    assert "but the window holds 8192" in str(raised.value)


def test_a_form_that_is_wrong_is_told_by_the_clients_error(client):
    with pytest.raises(openai.BadRequestError, match="messages must be a list"):
        client.chat.completions.create(model="echo", messages="what?")


def test_an_address_that_is_none(live):
    answer = httpx.get(f"{live.url}/v1/nowhere")
    error = {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": "not_found"}
    assert answer.json() == {"detail": "Not Found", "error": error}


def test_max_tokens_are_made_smaller_where_the_window_has_less_room(live):
    """The third example of the algorithm: 8,192 - 500 leave 7,692 of 8,000."""
    asked = {"messages": [{"role": "user", "content": "x" * 481}], "max_tokens": 8000}
    for path in ("/budget", "/v1/chat/completions"):
        answer = httpx.post(f"{live.url}{path}", json=asked).json()
        entries = {each["name"]: each for each in answer.get("localrag", answer)["ledger"]["entries"]}
        assert sum(each["used"] for name, each in entries.items() if name != "answer") == 500
        assert (entries["answer"]["wanted"], entries["answer"]["allotted"]) == (8000, 7692)
        [warning] = answer.get("localrag", answer)["warnings"]
        assert "7,692 of the 8,000 tokens asked for" in warning
    assert answer["choices"][0]["finish_reason"] == "stop"


STREAMS = {"/v1/chat/completions": {"messages": QUESTION}, "/v1/completions": {"prompt": "What is PLA?"}}


def events_of(live, path, body):
    answer = httpx.post(f"{live.url}{path}", json={**body, "stream": True}).raise_for_status()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def warnings_of_stream(live, path, body):
    """Of the chunk with the finish_reason, which is the only one that tells them."""
    chunks = events_of(live, path, body)
    assert [chunk for chunk in chunks if "localrag" in chunk] in ([], chunks[-1:])
    assert chunks[-1]["choices"][0]["finish_reason"]
    return chunks[-1].get("localrag", {}).get("warnings")


@pytest.mark.parametrize("path", STREAMS)
def test_a_lowered_max_tokens_is_told_in_every_stream(live, path):
    """Also in one that asks for no usage."""
    body = {**STREAMS[path], "max_tokens": 9000}
    [warning] = warnings_of_stream(live, path, body)
    assert "of the 9,000 tokens asked for (max_tokens): the window of 8,192 tokens has no room for more." in warning
    *_, finish, account = events_of(live, path, {**body, "stream_options": {"include_usage": True}})
    assert finish["localrag"]["warnings"] == account["localrag"]["warnings"] == [warning]
    assert warnings_of_stream(live, path, {**STREAMS[path], "max_tokens": 20}) is None


def test_a_lowered_max_tokens_is_told_by_the_last_event_of_a_response(live):
    events = events_of(live, "/v1/responses", {"input": "What is PLA?", "max_output_tokens": 9000})
    assert events[-1]["type"] == "response.completed"
    [warning] = events[-1]["response"]["localrag"]["warnings"]
    assert "of the 9,000 tokens asked for" in warning


def test_a_lowered_max_tokens_is_told_in_a_stream_that_ends_with_a_call(live):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": QUESTION, "tools": [tool], "tool_choice": "required", "max_tokens": 9000}
    [warning] = warnings_of_stream(live, "/v1/chat/completions", body)
    assert "of the 9,000 tokens asked for" in warning


@pytest.mark.parametrize(
    ("messages", "text", "sections"),
    [
        ([{"role": "system", "content": "Name one plastic."}], "system\nName one plastic.", {"template", "system", "answer"}),
        (
            [*QUESTION, {"role": "assistant", "content": "A plastic."}],
            "assistant\nA plastic.",
            {"template", "pinned", "answer"},
        ),
        (
            [*QUESTION, {"role": "assistant", "content": "A."}, *QUESTION, {"role": "assistant", "content": "A plastic."}],
            "assistant\nA plastic.",
            {"template", "pinned", "history", "answer"},
        ),
    ],
)
def test_a_conversation_without_a_question_is_passed_on_where_nothing_is_searched(client, live, messages, text, sections):
    """As the RAG engine does; the echo engine repeats the first line of the last message, its role."""
    answer = client.chat.completions.create(model="echo", messages=messages)
    assert answer.choices[0].message.content.startswith(f"You asked: {text.partition(chr(10))[0]}")
    ledger, entries = entries_of(answer)
    assert entries.keys() == sections
    assert answer.usage.prompt_tokens == sum(each["used"] for name, each in entries.items() if name != "answer")
    assert ledger["spare"] == 0
    budget = httpx.post(f"{live.url}/budget", json={"messages": messages}).json()
    assert budget["prompt_tokens"] == answer.usage.prompt_tokens


def entries_of(answer):
    ledger = answer.model_extra["localrag"]["ledger"]
    return ledger, {each["name"]: each for each in ledger["entries"]}


def conversation(count, length):
    """`count` messages of `length` characters that end with a question."""
    said = [{"role": ("user", "assistant")[at % 2], "content": f"{at} ".ljust(length, "x")} for at in range(count)]
    return [*said, {"role": "user", "content": "What was said first?"}]


def test_without_max_tokens_messages_that_fit_are_all_sent_and_the_answer_has_the_rest(tmp_path):
    with served(tmp_path, "--no-keep", "--ctx", "131072") as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused") as client:
        answer = client.chat.completions.create(model="echo", messages=conversation(100, 1000))
    ledger, entries = entries_of(answer)
    assert entries["history"]["omitted"] == []
    assert "summary" not in entries
    assert entries["history"]["used"] > 100 * 1000
    assert entries["answer"]["allotted"] == 131_072 - answer.usage.prompt_tokens
    assert ledger["spare"] == 0


def test_without_max_tokens_a_small_window_keeps_what_was_said_last(tmp_path):
    with served(tmp_path, "--no-keep", "--ctx", "1500") as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused") as client:
        answer = client.chat.completions.create(model="echo", messages=conversation(10, 100))
        _, entries = entries_of(answer)
        assert entries["history"]["omitted"] == []
        answer = client.chat.completions.create(model="echo", messages=conversation(40, 100))
        _, entries = entries_of(answer)
        assert "message 40" not in entries["history"]["omitted"]
        assert entries["history"]["used"] > 800
        assert entries["answer"]["allotted"] >= 100
        assert answer.usage.prompt_tokens + entries["answer"]["allotted"] <= 1500


def test_a_window_that_is_capped_is_told_by_the_server_and_with_each_answer(tmp_path):
    told = "The window has 131,072 of the 1,000,000 tokens asked for (--ctx): the model was trained for no more."
    with served(tmp_path, "--no-keep", "--ctx", "1000000") as live:
        for path in ("/budget", "/v1/chat/completions"):
            answer = httpx.post(f"{live.url}{path}", json={"messages": QUESTION, "max_tokens": 20}).json()
            assert answer.get("localrag", answer)["warnings"] == [told]
        for path, body in STREAMS.items():
            assert warnings_of_stream(live, path, {**body, "max_tokens": 20}) == [told]
        live.process.send_signal(signal.SIGINT)
        assert live.process.communicate(timeout=60)[0].count(told) == 1


def test_an_unknown_index(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="echo", messages=QUESTION, extra_body={"index_name": "nowhere"})


def test_an_answer_ends_when_its_time_is_over(tmp_path):
    with served(tmp_path, "--no-keep", "--ctx", "131072", "--max-seconds", "1") as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
            answer = client.chat.completions.create(model="echo", messages=LONG)
        assert answer.choices[0].finish_reason == "length"
        assert answer.model_extra["localrag"]["finish_reason"] == "time"
        assert answer.choices[0].message.content.startswith("You asked: What is PLA?")


def test_ctrl_c_lets_a_stream_come_to_its_end(tmp_path):
    with served(tmp_path, "--no-keep", "--ctx", "131072", "--max-seconds", "2") as live:
        with httpx.stream("POST", f"{live.url}/v1/chat/completions", json={"messages": LONG, "stream": True}, timeout=60) as answer:
            lines = filter(None, answer.iter_lines())
            next(lines)
            live.process.send_signal(signal.SIGINT)
            assert list(lines)[-1] == "data: [DONE]"
        live.process.wait(120)


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["echo"]


def test_tokens_and_budget_without_an_answer(live):
    counted = httpx.post(f"{live.url}/tokenize", json={"text": "PLA"}).json()
    assert counted == {"num_tokens": 3, "token_ids": [80, 76, 65]}
    body = httpx.post(f"{live.url}/budget", json={"messages": QUESTION}).json()
    answered = httpx.post(f"{live.url}/v1/chat/completions", json={"messages": QUESTION}).json()
    assert body["prompt_tokens"] == answered["usage"]["prompt_tokens"]
    assert body["ledger"]["window"] == 8192


def test_a_section_has_one_number_of_tokens_wherever_it_is_told(live):
    said = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"{n}: " + "PLA is annealed. " * 40} for n in range(31)]
    for max_tokens in (100, 5000, 1_000_000):
        body = httpx.post(f"{live.url}/budget", json={"messages": said, "max_tokens": max_tokens}).json()
        entries = body["ledger"]["entries"]
        assert {each["name"]: each["allotted"] for each in body["sections"]} == {each["name"]: each["allotted"] for each in entries}
        assert sum(each["allotted"] for each in body["sections"]) + body["ledger"]["spare"] == body["ledger"]["window"]
        assert body["prompt_tokens"] == sum(each["used"] for each in entries)


def test_many_at_once(client):
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        said = [{"role": "user", "content": f"Question {number}?"}]
        answers[number] = client.chat.completions.create(model="echo", messages=said).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"You asked: Question {number}?" for number in range(4)}


def test_a_client_that_goes_away_frees_its_place(live):
    with _asked(live, messages=LONG, stream=True) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    _until(live, requests_running=0)


def test_a_client_that_goes_away_ends_an_answer_that_it_wanted_whole(patient):
    with _asked(patient, messages=LONG):
        _until(patient, requests_running=1)
    _until(patient, requests_running=0, tokens_decoded_total=0)  # which are counted when an answer is complete


def test_a_client_that_goes_away_while_it_waits_frees_its_place(patient):
    with ExitStack() as running:
        for _ in range(SERVE.num_sequences):
            running.enter_context(_asked(patient, messages=LONG, stream=True))
        _until(patient, requests_running=SERVE.num_sequences)
        with _asked(patient, messages=LONG, stream=True):
            _until(patient, requests_waiting=1)
        _until(patient, requests_running=SERVE.num_sequences, requests_waiting=0, tokens_decoded_total=0)  # none of them made room for it
    _until(patient, requests_running=0)


def _asked(live: Live, **body: object) -> socket.socket:
    """A connection over which a completion was asked for."""
    connection = socket.create_connection(("127.0.0.1", live.port))
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def _until(live: Live, **wanted: float) -> None:
    """Waits for these numbers of the server."""
    end = time.monotonic() + 120
    while not wanted.items() <= (found := _numbers(live)).items():
        assert time.monotonic() < end, found
        time.sleep(0.05)


def _numbers(live: Live) -> dict[str, float]:
    lines = [line for line in httpx.get(f"{live.url}/metrics").text.splitlines() if line.startswith("localrag_")]
    return {name.removeprefix("localrag_"): float(number) for name, number in (line.rsplit(" ", 1) for line in lines)}


def test_an_engine_that_dies_is_back_and_the_request_is_told(live, client):
    stream = client.chat.completions.create(model="echo", messages=LONG, stream=True)
    next(iter(stream))
    live.engine.kill()
    said = "".join(str(chunk) for chunk in _rest(stream))
    assert "is being restarted" in said
    assert client.chat.completions.create(model="echo", messages=QUESTION).choices[0].message.content == "You asked: What is PLA?"


def _rest(stream):
    try:
        yield from stream
    except openai.APIError as error:
        yield error
