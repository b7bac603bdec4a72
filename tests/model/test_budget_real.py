"""The budget with the real model: far more than a window of everything, and a limit of time."""

import random
from contextlib import suppress

import pytest

from localrag.engine.loading import open_model
from localrag.errors import TimeLimitError
from localrag.journal import Journal
from localrag.question import Question
from localrag.session import Session
from localrag.types import Attachment, Memory, Message, SamplingParams, ToolSpec
from tests import identities, material

pytestmark = pytest.mark.model

WINDOW = 512


@pytest.fixture(scope="module")
def engine(model_path, tmp_path_factory):
    with open_model(model_path, name="smollm2-135m", home=tmp_path_factory.mktemp("home")) as opened:
        yield opened


def flood(rng):
    """History, evidence, tools and files of about fifty windows, and the options that go with them."""
    history = []
    for _ in range(40):
        history += [Message("user", material.text(rng, 50)), Message("assistant", material.text(rng, 70))]
    schema = {"type": "object", "properties": {"query": {"type": "string", "description": material.text(rng, 30)}}}
    options = {
        "system": "Answer briefly.",
        "piped": material.text(rng, 2000),
        "tools": [ToolSpec(f"tool_{n}", material.text(rng, 80), schema) for n in range(25)],
        "memories": [Memory(label=f"memory {n}", text=material.text(rng, 20), importance=rng.random()) for n in range(30)],
        "attachments": [Attachment(label=f"file-{n}.txt", text=material.text(rng, 500), relevance=rng.random()) for n in range(5)],
    }
    return [*history, Message("user", "Which temperature is right?")], options


@pytest.mark.parametrize("strategy", ["prioritize", "truncate", "summarize"])
def test_fifty_windows_of_input_are_answered_within_one_and_nothing_is_lost_unnamed(engine, strategy):
    messages, options = flood(random.Random(7))
    session = Session(engine, n_ctx=WINDOW)
    answer = session.ask(Question.of(messages, sampling=SamplingParams(max_tokens=8), overflow=[(strategy, None)], **options))
    data = answer.to_dict()
    entries = {entry["name"]: entry for entry in data["ledger"]["entries"]}
    assert sum(entry["wanted"] for entry in entries.values()) > 50 * WINDOW
    identities.check(data, [hit.label for hit in answer.offered])
    sent = {part.part.item for part in answer.prompt.parts if part.part.item}
    for name, given in (
        ("memories", [each.label for each in options["memories"]]),
        ("attachments", [each.label for each in options["attachments"]]),
        ("history", [f"message {n}" for n in range(2, len(messages) + 1)]),
    ):
        assert sorted({*entries[name]["omitted"]} | (sent & {*given})) == sorted(given)
        assert not {*entries[name]["omitted"]} & sent
    assert entries["tools"]["omitted"]
    assert answer.completion_tokens > 0


def in_little_time(session, messages, options):
    """An answer in the fewest seconds, doubled again and again, that this machine can do with now."""
    for max_seconds in (2.5 * 2**n for n in range(10)):
        with suppress(TimeLimitError):
            return session.ask(Question.of(messages, max_tokens=3000, max_seconds=max_seconds, **options))
    raise AssertionError("it is not done in 20 minutes")


def test_a_limit_of_time_is_kept_and_named(engine, tmp_path):
    """How near the clock it ends is measured by scripts/bench. Here it is seen that time binds, and that the plan keeps to it."""
    messages, options = flood(random.Random(8))
    options |= {"tools": (), "attachments": ()}
    with Journal.open(tmp_path) as journal:
        session = Session(engine, n_ctx=4096, journal=journal)
        session.ask(Question.of("Why?", max_tokens=8))  # the speed is known from here on
        answer = in_little_time(session, messages, options)
        limit = answer.ledger.time
        assert limit is not None
        assert limit.is_bound
        unlimited = session.prepare(Question.of(messages, max_tokens=3000, **options)).prompt.ledger
        assert answer.ledger.prompt_tokens < unlimited.prompt_tokens
        assert limit.planned_s <= limit.max_seconds
        assert answer.completion_tokens < 3000
        assert answer.finish_reason in {"time", "stop", "length"}
        assert journal.asks()[-1].bound == "time"
        with pytest.raises(TimeLimitError):
            session.ask(Question.of("why " * 3000, max_seconds=1.0))


def test_a_long_conversation_is_summarised_by_the_model_and_kept(engine, tmp_path, monkeypatch):
    history = []
    for n in range(1, 16):
        history += [
            Message("user", f"What about nozzle number {n}? It prints PLA at {190 + n} degrees and clogs at night."),
            Message("assistant", f"Nozzle {n} is worn. Replace it, and dry the PLA for four hours before you print at {190 + n} degrees."),
        ]
    with Journal.open(tmp_path) as journal:
        session = Session(engine, n_ctx=768, journal=journal)
        first = session.ask(Question.of([*history, Message("user", "Which one first?")], sampling=SamplingParams(max_tokens=8)))
        summary = next(entry for entry in first.ledger.entries if entry.name == "summary")
        assert summary.covered == first.ledger.entry("history").omitted
        written = session.journal.summaries
        monkeypatch.setattr(engine, "generate", lambda *_, **__: pytest.fail("the summary is written again"))
        second = session.prepare(Question.of([*history, Message("user", "Which one first?")], max_tokens=8), write=True)
        assert written is not None
        assert second.prompt.ledger.entry("summary").covered == summary.covered
