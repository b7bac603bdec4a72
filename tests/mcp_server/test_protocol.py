"""One call at a time, cancellation, and a standard output that holds nothing but the protocol."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from localrag.journal import Journal
from tests.mcp_server.live import COMMAND, environment

LONG = {"question": "What does a cat eat?\nSay it 100000 times", "max_tokens": 120_000}


@pytest.fixture
def opened(live):
    """With its model open, so that a call is at work soon."""
    live.given("ask", question="What is a cat?", kbs=["pets"])
    return live


def test_a_client_that_cancels_ends_the_answer(opened, filled):
    opened.abandoned("ask", 0.3, **LONG, kbs=["pets"])
    assert opened.given("ask", question="What does a cat eat?", kbs=["pets"])["finish_reason"] == "stop"
    with Journal.open(filled) as journal:
        cancelled = [each for each in journal.asks("mcp") if each.finish_reason == "cancelled"]
    assert cancelled
    assert all(each.completion_tokens < LONG["max_tokens"] / 2 for each in cancelled)


def test_what_waits_and_is_cancelled_is_not_begun(opened, filled):
    with Journal.open(filled) as journal:
        before = len(journal.asks("mcp"))
    opened.both_abandoned(("ask", {**LONG, "kbs": ["pets"]}), ("ask", {"question": "Never.", "kbs": ["pets"]}), 0.3)
    opened.given("search", query="cat", kb="pets")
    with Journal.open(filled) as journal:
        questions = [each.question for each in journal.asks("mcp")]
    assert len(questions) == before + 1
    assert "Never." not in questions


def test_nothing_is_kept_if_it_is_not_to_be(server, tmp_path, filled, tiny_catalogue):
    home = tmp_path / "home"
    (home / "kb").mkdir(parents=True)
    (home / "kb" / "pets").symlink_to(filled / "kb" / "pets")
    with server("--model", "echo", "--no-keep", home=home) as connection:
        connection.given("ask", question="What is a cat?")
    assert {each.name for each in home.iterdir()} == {"kb", "verified.json"}  # that of files, which a checksum was taken of


def _messages(*asked):
    start = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    said = [
        {"id": 1, "method": "initialize", "params": start},
        {"method": "notifications/initialized"},
        *({"id": at, "method": "tools/call", "params": {"name": name, "arguments": given}} for at, (name, given) in enumerate(asked, 2)),
    ]
    return "".join(json.dumps({"jsonrpc": "2.0", **each}) + "\n" for each in said)


@pytest.fixture
def raw(filled, tiny_catalogue):
    """A server with its pipes in our hands."""
    started = []

    def start(*args):
        process = subprocess.Popen(
            [*COMMAND, "--models", str(tiny_catalogue), "--model", "echo", *args],
            env={**os.environ, **environment(filled)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with suppress(BrokenPipeError):
                pipe.close()


def test_standard_output_holds_the_protocol_and_nothing_else(raw):
    process = raw()
    process.stdin.write(_messages(("ask", {"question": "What is a cat?"}), ("search", {"query": "cat", "kb": "pets"}), ("ask", {})))
    process.stdin.write("no JSON\n[]\n{}\n")
    process.stdin.flush()
    lines = [json.loads(process.stdout.readline()) for _ in range(4)]
    process.stdin.close()
    lines += [json.loads(line) for line in process.stdout]
    assert all(each["jsonrpc"] == "2.0" for each in lines)
    assert {each["id"] for each in lines if "result" in each} == {1, 2, 3, 4}
    assert process.wait(120) == 0
    assert "Traceback" not in process.stderr.read()


def test_the_end_of_standard_input_ends_it_also_while_it_answers(raw):
    process = raw("--no-keep")
    process.stdin.write(_messages(("ask", LONG)))
    process.stdin.flush()
    process.stdout.readline()
    time.sleep(0.5)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    replies = [json.loads(line) for line in out.splitlines()]
    assert all(each["jsonrpc"] == "2.0" for each in replies)
    assert not any("result" in each for each in replies), "the answer was not waited for"


def test_a_client_that_goes_away_leaves_no_traceback(raw):
    process = raw("--no-keep")
    process.stdout.close()
    process.stdin.write(_messages(("search", {"query": "cat", "kb": "pets"})))
    process.stdin.close()
    assert process.wait(120) == 0
    assert "Traceback" not in process.stderr.read()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_it_at_once(raw):
    process = raw()
    process.stdin.write(_messages())
    process.stdin.flush()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == -signal.SIGINT
    assert process.stderr.read() == ""
