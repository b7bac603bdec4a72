"""Asks, conversations, batches and councils of models that think: the ledger counts thoughts, and nothing else sees them."""

import json
import os
import random

import pytest

from localrag.budget import Flex, Percent, Profile
from localrag.deliberation import Council, Judge, Member
from localrag.engine.echo import open_echo
from localrag.engine.template import JinjaChatTemplate
from localrag.errors import BudgetExceededError, UsageError
from localrag.journal import Journal
from localrag.question import Question
from localrag.session import Session
from localrag.session.chat import Chat
from localrag.session.council_run import run_council
from localrag.settings import Settings
from localrag.types import MIN_THINK_TOKENS, Message, SamplingParams
from tests import identities, material
from tests.chat_templates import NOW, PATHS, THINKING, THINKING_OPEN
from tests.deliberation import driving
from tests.homes import know_attention
from tests.reciting import BRACKETS, BRACKETS_TEMPLATE, HM_YES, write_reciting
from tests.running import batch

NUM_ASKS = int(os.environ.get("LOCALRAG_TEST_ASKS", "30"))  # 1,000 were exact too
SAYS, ANSWER = "I shall say this. You asked: Why?", "You asked: Why?"
NO_THOUGHT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3 = [path for path in PATHS if path.stem == "Qwen-Qwen3-0.6B"]
SOURCES = {"closed": THINKING, "open": THINKING_OPEN} | {path.stem: path.read_text("utf-8") for path in QWEN3}


@pytest.fixture(scope="module", params=SOURCES)
def template(request):
    with JinjaChatTemplate(SOURCES[request.param], eos_text="<|im_end|>", time_limit_s=10, clock=lambda: NOW) as made:
        yield made


@pytest.fixture
def engine(template):
    with open_echo(template=template) as opened:
        yield opened


def text_of(prompt):
    return "".join(part.part.text for part in prompt.parts)


def thoughts_profile(rng):
    """A budget in which thoughts have a basis, a floor and a limit of some kind, the ones that are built in among them."""
    kinds = [
        Flex(basis=1024, min=32, grow=1.0, cut="never"),
        Flex(basis=0, min=0, grow=0.0, cut="never"),
        Flex(basis=Percent(5), min=Percent(1), max=Percent(2), cut="never"),
        Flex(basis=100_000, min=0, shrink=9.0, cut="never"),
        Flex(basis=None, min=60, max=90, cut="never"),
    ]
    return Profile(sections={"thinking": rng.choice(kinds)}, gap=rng.choice([0, 0, 9]))


def test_random_asks_with_thoughts_keep_every_promise(engine):
    rng, refused, ended, limited = random.Random(815), 0, 0, 0
    for _ in range(NUM_ASKS):
        profile = thoughts_profile(rng)
        session = Session(engine, n_ctx=rng.randint(256, 4096), profile=profile)
        question = material.text(rng, rng.randint(1, 20)).replace("<think>", "<thought>") + " heat?"
        options = {
            "system": rng.choice([None, material.text(rng, rng.randint(1, 20))]),
            "piped": rng.choice(["", "", material.text(rng, rng.randint(1, 400))]),
        }
        think_tokens = rng.choice([0, 32, 33, 50, 100, 300, 1024, 100_000])
        sampling = SamplingParams(max_tokens=rng.choice([1, 20, 200, 100_000]), think_tokens=think_tokens)
        runner = None if engine.context is None else engine.context.runner
        before = 0 if runner is None else runner.num_evaluated_tokens
        try:
            answer = session.ask(Question.of(question, sampling=sampling, **options))
        except BudgetExceededError as error:
            refused += 1
            assert error.numbers["needed"] > session.slot.n_ctx
            continue
        told = answer.to_dict()
        identities.check(told, [hit.label for hit in answer.offered])
        entries = {entry["name"]: entry for entry in told["ledger"]["entries"]}
        assert ("thinking" in entries) == (think_tokens > 0) == (answer.prompt.thinking is not None)
        evaluated = engine.context.runner.num_evaluated_tokens - (before if engine.context.runner is runner else 0)
        assert evaluated == answer.prompt_tokens - answer.cached_tokens + answer.completion_tokens - 1
        if think_tokens:
            assert (entries["thinking"]["wanted"], entries["thinking"]["used"]) == (think_tokens, answer.reasoning_tokens)
            assert MIN_THINK_TOKENS <= entries["thinking"]["allotted"] == answer.prompt.thinking.max_tokens <= think_tokens
            assert "I shall say this."[: MIN_THINK_TOKENS - 21] in answer.reasoning
            most = profile.sections["thinking"].max
            assert not isinstance(most, int) or entries["thinking"]["allotted"] <= most
            limited += entries["thinking"]["allotted"] < think_tokens
            ended += answer.reasoning_tokens == entries["thinking"]["allotted"]
        else:
            assert (answer.reasoning, answer.reasoning_tokens) == ("", 0)
            assert text_of(answer.prompt).endswith("<think>\n\n</think>\n\n")
        assert "You asked: ".startswith(answer.text[:11])
    assert refused < NUM_ASKS / 2
    assert ended > NUM_ASKS / 10
    assert limited > NUM_ASKS / 10


def test_an_answer_tells_its_thoughts_beside_it(engine):
    thoughts, pieces = [], []
    answer = Session(engine).ask("Why?", on_text=pieces.append, on_thought=thoughts.append)
    assert (answer.text, answer.reasoning) == ("".join(pieces), "".join(thoughts)) == (ANSWER, SAYS)
    told = answer.to_dict()
    assert (told["answer"], told["reasoning"]) == (ANSWER, SAYS)
    assert told["usage"]["reasoning_tokens"] == told["usage"]["completion_tokens"] - len(ANSWER) - 1
    kept = Session(engine).ask(Question.of("Why?", sampling=SamplingParams(think_tokens=0))).to_dict()
    assert kept["answer"] == ANSWER
    assert "reasoning" not in kept
    assert "reasoning_tokens" not in kept["usage"]
    assert [entry["name"] for entry in kept["ledger"]["entries"]] == ["template", "question", "answer"]


def test_thoughts_that_a_window_has_no_room_for_take_from_the_answer(engine):
    """Both grow alike from their bases, and each has its floor."""
    window = Session(engine, n_ctx=500)
    wants = SamplingParams(max_tokens=100_000, think_tokens=100_000)
    entries = {entry.name: entry for entry in window.ask(Question.of("Why?", sampling=wants)).ledger.entries}
    assert entries["thinking"].allotted + entries["answer"].allotted + window.ask("Why?").prompt_tokens == 500
    assert entries["thinking"].allotted > entries["answer"].allotted > 100  # 1,024 : 512
    smallest = window.ask(Question.of("Why?", sampling=SamplingParams(max_tokens=100))).prompt_tokens + 64
    assert Session(engine, n_ctx=smallest).ask(Question.of("Why?", sampling=wants)).ledger.entry("thinking").allotted == MIN_THINK_TOKENS
    with pytest.raises(BudgetExceededError) as raised:
        Session(engine, n_ctx=smallest - 1).ask(Question.of("Why?", sampling=wants))
    assert raised.value.numbers["sections"]["thinking"] == MIN_THINK_TOKENS


def test_what_must_keep_to_a_form_is_not_thought_about(engine):
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"], "additionalProperties": False}
    answer = Session(engine).ask(Question.of("Why?", sampling=SamplingParams(json_schema=schema)))
    assert json.loads(answer.text).keys() == {"text"}
    assert (answer.reasoning, answer.prompt.thinking) == ("", None)
    assert text_of(answer.prompt).endswith(NO_THOUGHT)


def test_in_limited_time_it_is_kept_from_thinking(engine):
    answer = Session(engine).ask(Question.of("Why?", max_seconds=1000.0))
    assert (answer.text, answer.reasoning, answer.prompt.thinking) == (ANSWER, "", None)
    assert text_of(answer.prompt).endswith(NO_THOUGHT)
    assert "thinking" not in {entry.name for entry in answer.ledger.entries}


@pytest.mark.parametrize("think_tokens", [-1, 1, 31, 2**31])
def test_a_number_of_tokens_for_thoughts_is_checked(think_tokens):
    with pytest.raises(UsageError, match="think_tokens"):
        SamplingParams(think_tokens=think_tokens)


def test_answers_of_a_batch_have_their_thoughts(engine):
    asked = {f"Why {number}?": SamplingParams(think_tokens=think) for number, think in enumerate((0, 32, 40, 1000, 1000))}
    found = dict(batch(Session(engine), [Question.of(text, id=text, sampling=sampling) for text, sampling in asked.items()]))
    assert found.keys() == asked.keys()
    for text, answer in found.items():
        identities.check(answer.to_dict(), [])
        alone = Session(engine).ask(Question.of(text, sampling=asked[text]))
        assert (answer.text, answer.reasoning, answer.reasoning_tokens) == (alone.text, alone.reasoning, alone.reasoning_tokens)
        assert answer.text == f"You asked: {text}"
    assert [bool(found[text].reasoning) for text in asked] == [False, True, True, True, True]


# --- conversations


def test_thoughts_are_kept_with_a_turn_and_are_no_part_of_the_conversation(engine, tmp_path):
    with Journal.open(tmp_path) as journal:
        row = journal.conversations.create("talk", {})
        chat = Chat(Session(engine, journal=journal, name="talk"), journal, row)
        thoughts = []
        for question in ("Why?", "And how?"):
            answer = chat.say(Question.of(question, sampling=SamplingParams()), on_thought=thoughts.append)
            identities.check(answer.to_dict(), [])
        assert "".join(thoughts) == "I shall say this. You asked: Why?I shall say this. You asked: And how?"
        prompt = text_of(chat.prepare(Question.of("Then?", sampling=SamplingParams())).prompt)
        assert prompt.count("You asked: Why?") == prompt.count("You asked: And how?") == 1
        assert "I shall" not in prompt
        kept = journal.conversations.turns(row)
        assert [turn.answer for turn in kept] == ["You asked: Why?", "You asked: And how?"]
        assert [turn.about["reasoning"] for turn in kept] == [SAYS, "I shall say this. You asked: And how?"]
        silent = chat.say(Question.of("Then?", sampling=SamplingParams(think_tokens=0)))
        assert (silent.text, silent.reasoning) == ("You asked: Then?", "")
        assert "reasoning" not in journal.conversations.turns(row)[-1].about


def test_a_conversation_goes_on_behind_what_its_answers_have_in_common(engine, tmp_path):
    """What was thought is not sent again, so a prompt parts from the last one where the thoughts began."""
    with Journal.open(tmp_path) as journal:
        chat = Chat(Session(engine, journal=journal, name="talk"), journal, journal.conversations.create("talk", {}))
        first = chat.say(Question.of("Why?", sampling=SamplingParams(think_tokens=40)))
        second = chat.say(Question.of("And how?", sampling=SamplingParams(think_tokens=40)))
    assert first.prompt_tokens - 12 <= second.cached_tokens <= first.prompt_tokens
    assert (second.text, second.reasoning_tokens) == ("You asked: And how?", 40)


def test_an_answer_in_history_that_holds_thoughts_is_sent_without_them(engine):
    history = [Message("user", "Why?"), Message("assistant", f"<think>\n{SAYS}\n</think>\n\n{ANSWER}"), Message("user", "And how?")]
    answer = Session(engine).ask(history)
    assert "I shall" not in text_of(answer.prompt)
    assert ANSWER in text_of(answer.prompt)


# --- councils


def test_a_council_sees_proposals_and_no_thoughts(tmp_path):
    """Of specialists that think."""
    write_reciting(tmp_path / "thinker.gguf", HM_YES, controls=BRACKETS, template=BRACKETS_TEMPLATE)
    models = tmp_path / "models.toml"
    models.write_text(f'default_model = "thinker"\n[models.thinker]\npath = "{tmp_path}/thinker.gguf"\n')
    settings = Settings(home=tmp_path / "home", models_file=models)
    know_attention(settings.home)
    members = [Member(name=name, persona=f"You are {name}.", sampling=SamplingParams(think_tokens=32)) for name in ("Ann", "Bo")]
    council = Council(name="test", members=tuple(members), judge=Judge(model="echo", sampling=SamplingParams(max_tokens=600)))
    events = []
    result = run_council(council, "Why?", settings=settings, on_event=events.append)
    *proposed, (judge, judged) = result.answers
    assert (sorted(role for role, _ in proposed), judge) == (["Ann", "Bo"], "judge")
    for _, answer in proposed:
        assert (answer.text, answer.reasoning, answer.reasoning_tokens) == ("Yes", "Hm", 3)
        identities.check(answer.to_dict(), [])
    assert text_of(judged.prompt).count(": Yes") == 2
    assert "Hm" not in text_of(judged.prompt)
    assert [event["text"] for event in events if event["event"] == "checked"] == ["Yes", "Yes"]
    assert [event["reasoning"] for event in events if event["event"] == "said" and event["kind"] == "proposal"] == ["Hm", "Hm"]


def test_only_proposals_are_thought_about_for_all_else_is_a_form():
    run = driving.sit(driving.council(plan=True, review=True, judge=driving.with_tools()))
    found = {(turn.kind, turn.sampling.room_to_think > 0) for turn in run.turns}
    assert found == {("plan", False), ("proposal", True), ("review", False), ("call", False), ("verdict", False)}
