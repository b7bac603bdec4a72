"""A conversation on the handbook with the real model, on a terminal: some turns, Ctrl-C, and kill -9 in the middle of an answer."""

import signal

import pytest

from localrag.journal import Journal
from localrag.question import Question
from localrag.session import Session
from localrag.session.chat import Chat
from localrag.session.query_rewrite import ANSWER_TOKENS, SAID_TOKENS
from localrag.settings import Settings
from localrag.text.tokens import common_length
from localrag.types import SamplingParams
from tests.terminal import Terminal

pytestmark = pytest.mark.model

QUESTIONS = (
    "At what temperature is PLA annealed?",
    "And for how long?",
    "Does it shrink when that is done?",
    "So which for a car in summer?",
)


@pytest.fixture
def settings(home_with_handbook, catalogue):
    return Settings(home=home_with_handbook, models_file=catalogue)


def chat(settings, *args):
    env = {"LOCALRAG_MODELS": str(settings.models_file)}
    return Terminal("chat", "--kb", "handbook", "--top-k", "2", *args, home=settings.home, env=env, columns=140)


def turns(settings):
    with Journal.open(settings.home) as journal:
        return journal.conversations.turns(journal.conversations.latest().id)


@pytest.mark.long
def test_a_conversation_on_the_handbook(settings):
    with chat(settings, "--max-tokens", "16", "--ctx", "4096") as terminal:
        terminal.wait_for("smollm2-135m · ")
        for number, question in enumerate(QUESTIONS, 1):
            terminal.enter(question)
            terminal.wait_until(lambda _, number=number: len(turns(settings)) == number and turns(settings)[-1].state != "running")
        terminal.enter("/sources turn 1")
        terminal.wait_for("handbook/guides/annealing.md")
        terminal.enter("/exit")
        assert terminal.end() == 0
    said = turns(settings)
    evaluated = [turn.about["prompt_tokens"] - turn.about["cached_tokens"] for turn in said]
    assert all(turn.answer.strip() for turn in said)
    assert any(turn.about["citations"] for turn in said)
    assert sum(evaluated) < 0.5 * sum(turn.about["prompt_tokens"] for turn in said)

    with chat(settings, "--continue", "--max-tokens", "400") as terminal:
        terminal.wait_for("So which for a car in summer?", "smollm2-135m · ")
        terminal.enter("Tell me all about PLA in many words, please.")
        terminal.wait_until(lambda _: len(turns(settings)) == len(QUESTIONS) + 1 and turns(settings)[-1].answer)
        terminal.send("\x03")
        terminal.wait_for("Interrupted.")
        terminal.enter("And all about nylon?")
        terminal.wait_until(lambda _: len(turns(settings)) == len(QUESTIONS) + 2 and turns(settings)[-1].answer)
        terminal.child.kill(signal.SIGKILL)
        terminal.child.wait()
    stopped, killed = turns(settings)[-2:]
    assert (stopped.state, killed.state) == ("stopped", "interrupted")
    with chat(settings, "--continue") as terminal:
        terminal.wait_for("(interrupted: the program ended)", "(stopped)")


def test_a_follow_up_is_rewritten_beside_the_conversation(settings):
    """What was evaluated of the conversation is not evaluated again for it."""
    short = SamplingParams(max_tokens=24)
    with Session.open(kbs=["handbook"], n_ctx=4096, name="talk", settings=settings) as session:
        chat = Chat.of(session, "talk")
        chat.rewrites = True
        before = chat.say(Question.of("At which temperature is PETG dried?", sampling=short, top_k=2))
        answer = chat.say(Question.of("And for how many hours?", sampling=short, top_k=2))
    rewriting = answer.rewriting
    assert 0 < rewriting.completion_tokens <= ANSWER_TOKENS < rewriting.prompt_tokens <= 300 + SAID_TOKENS
    assert "\n" not in rewriting.text
    assert answer.cached_tokens >= common_length(list(before.prompt.token_ids), list(answer.prompt.token_ids))
