"""When a question is answered without a search, case by case of chat-completion-algorithm.md, and what ask and chat make of it."""

from types import SimpleNamespace

import pytest

from localrag.cli import render
from localrag.conversation import search_query
from localrag.engine.echo import open_echo
from localrag.errors import UsageError
from localrag.journal import Journal
from localrag.kb import KnowledgeBase
from localrag.question import Question
from localrag.session import Session
from localrag.session.answer import Bypass, bypass, outcome
from localrag.session.chat import Chat
from localrag.types import Chunk, Hit, Message, SamplingParams, ToolSpec
from tests.kb.hash_embedder import HashEmbedder

SHORT = SamplingParams(max_tokens=40)
TOOL = ToolSpec("get_weather")
KAITO = [("user", "What is KAITO?"), ("assistant", "KAITO is a Kubernetes operator.")]
IMAGE = [{"type": "text", "text": "What's in this image?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}]


def said(*messages):
    return [SimpleNamespace(role=role, content=content) for role, content in messages]


@pytest.mark.parametrize(
    ("messages", "given", "reason"),
    [  # the document's cases, in its order
        ([("user", "Hello, how are you?")], {"has_kb": False}, Bypass.NO_KNOWLEDGE_BASE),
        ([("user", "What's the weather?")], {"has_tools": True}, Bypass.TOOLS),
        ([("function", "Weather data: 75°F"), ("user", "Thanks!")], {}, Bypass.ROLE),
        ([("user", "a"), ("assistant", None), ("tool", "75°F"), ("user", "b")], {}, Bypass.ROLE),
        ([("developer", "Be brief."), ("user", "b")], {}, None),
        ([("user", IMAGE)], {}, Bypass.CONTENT),
        ([("user", IMAGE), ("assistant", "A cat."), ("user", "Which?")], {}, Bypass.CONTENT),
        ([("user", None)], {}, Bypass.CONTENT),
        ([("user", [])], {}, Bypass.CONTENT),
        ([("user", IMAGE)], {"has_kb": False, "has_tools": True}, Bypass.NO_KNOWLEDGE_BASE),  # the first reason is the one that is told
        ([("function", "x"), ("user", IMAGE)], {"has_tools": True}, Bypass.TOOLS),
        # its four worked examples are searched for
        ([("system", "You are a helpful assistant."), ("user", "What is KAITO?")], {}, None),
        ([("system", "You are helpful."), *KAITO, ("user", "How do I install it?")], {}, None),
        ([*KAITO, ("user", "Tell me more about it."), ("user", "Specifically about GPU support.")], {}, None),
        (KAITO, {}, None),  # an error of its own: see below
        ([("user", IMAGE[:1])], {}, None),
        ([("user", "a"), ("assistant", None), ("user", "b")], {}, None),  # an assistant's content need not be text
    ],
)
def test_what_is_not_searched_for(messages, given, reason):
    assert bypass(said(*messages), **{"has_kb": True, **given}) is reason


def test_there_must_be_a_question_since_the_last_answer():
    with pytest.raises(UsageError, match="since the last answer"):
        search_query([Message(role, content) for role, content in KAITO])


def hit(number=1):
    return Hit(Chunk(number, 1, 0, "text", 0, 4, "a.md", kb="book"), 1.0)


def test_what_became_of_the_search():
    assert outcome(None, [hit()], [hit()]) is None
    assert outcome(None, [], []) is Bypass.NOTHING_FOUND
    assert outcome(None, [hit()], []) is Bypass.NO_ROOM
    assert outcome(Bypass.TOOLS, [], []) is Bypass.TOOLS
    assert outcome(Bypass.TOOLS, [hit()], [hit()]) is None  # what was piped in


def test_every_reason_is_one_line_and_none_where_nobody_expects_sources():
    for reason in Bypass:
        assert reason.told([]) == ""
        told = reason.told(["pets", "cars"])
        assert "pets, cars" in told
        assert told.endswith(": answered without sources.")
        assert "\n" not in told


# --- asked for real ---


@pytest.fixture
def session(tmp_path):
    (tmp_path / "pets.md").write_text("# Pets\n\nHamsters sleep by day and run in wheels by night.\n")
    with (
        Journal.open(tmp_path / "home") as journal,
        KnowledgeBase.open(tmp_path / "kb", "pets", create=True) as kb,
        open_echo() as engine,
    ):
        kb.ingest([tmp_path / "pets.md"], HashEmbedder())
        yield Session(engine, knowledge_bases=[kb], embedder=HashEmbedder(), journal=journal)


FOUND, NOT_FOUND = "When do hamsters sleep?", "xyzzy plugh"


@pytest.mark.parametrize(
    ("question", "options", "reason"),
    [
        (FOUND, {}, None),
        (NOT_FOUND, {}, Bypass.NOTHING_FOUND),
        (FOUND, {"tools": [TOOL]}, Bypass.TOOLS),
        (FOUND, {"tools": [TOOL], "piped": "Piped text."}, None),
        ([Message("user", "a"), Message("assistant", "b"), Message("tool", "c"), Message("user", FOUND)], {}, Bypass.ROLE),
        (FOUND, {"context_ratio": 0.0}, Bypass.NO_ROOM),
    ],
)
def test_an_answer_says_why_it_has_no_sources(session, question, options, reason, capsys):
    answer = session.ask(Question.of(question, sampling=SHORT, **options))
    assert answer.bypass is reason
    assert answer.to_dict().get("bypass") == (reason and reason.value)
    assert bool(answer.hits) == (reason is None)
    render.remarks(answer, ["pets"])
    shown = capsys.readouterr().err
    assert ("Sources\n" in shown) == (reason is None)
    assert (reason is None) or reason.told(["pets"]) in shown
    prompt = b"".join(map(session.engine.tokenizer.piece, answer.prompt.token_ids)).decode()
    assert ("Sources:" in prompt) == (reason is None)


def test_without_a_knowledge_base_nobody_is_told_of_sources(capsys):
    with open_echo() as engine:
        answer = Session(engine).ask(Question.of("Hello, how are you?", sampling=SHORT))
    assert answer.bypass is Bypass.NO_KNOWLEDGE_BASE
    assert "bypass" not in answer.to_dict()
    render.remarks(answer, [])
    assert capsys.readouterr().err == ""


def test_a_chat_tells_nothing_found_from_found_above(session):
    session.engine.share_contexts()
    chat = Chat.of(session, "talk")
    first = chat.say(Question.of(FOUND, sampling=SHORT))
    again = chat.say(Question.of(FOUND, sampling=SHORT))
    assert (first.bypass, again.bypass) == (None, None)
    assert [bool(each.hits) for each in (first, again)] == [True, False]  # it stands above
    strange = chat.say(Question.of("xyzzy plugh frobnicate quux zork", sampling=SHORT))
    assert strange.bypass is Bypass.NOTHING_FOUND
    assert chat.say(Question.of(FOUND, sampling=SHORT, tools=[TOOL])).bypass is Bypass.TOOLS
