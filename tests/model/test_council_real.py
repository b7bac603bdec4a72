"""A council with the real model: verdicts at several windows, what is shared, tools under a grammar, and being stopped."""

import gc
import os
import shutil
from dataclasses import replace

import pytest

from localrag.catalog import Catalog
from localrag.deliberation import Council, Judge, Member
from localrag.engine.llama import LlamaModel
from localrag.errors import InterruptedRunError
from localrag.journal import Journal
from localrag.session.council_run import run_council
from localrag.settings import Settings
from localrag.types import SamplingParams

pytestmark = pytest.mark.model

WINDOWS = [int(each) for each in os.environ.get("LOCALRAG_TEST_WINDOWS", "2048").split(",")]  # 4096 and 8192 held too
TASK = "What is best for parts at 80 °C: PETG or ABS?"


@pytest.fixture(scope="module")
def settings(furnish, catalogue, tmp_path_factory):
    return Settings(home=furnish(tmp_path_factory.mktemp("home")), models_file=catalogue)


def run(council, settings, **options):
    events = []
    result = run_council(council, TASK, settings=settings, kbs=["handbook"], on_event=events.append, **options)
    return result, events


def named(events, name):
    return [event for event in events if event["event"] == name]


@pytest.mark.parametrize("n_ctx", WINDOWS)
def test_the_default_council_at_any_window_and_what_its_members_share_is_read_from_disk_the_next_time(settings, n_ctx):
    shutil.rmtree(settings.home / "prefixes", ignore_errors=True)  # of other tests with this home
    council = replace(Catalog.load(settings).council("default"), top_k=4).changed(n_ctx=n_ctx, max_tokens=96)
    result, events = run(council, settings)
    for role, answer in result.answers:
        assert answer.prompt_tokens == answer.ledger.prompt_tokens == len(answer.prompt.token_ids), role
        assert answer.prompt_tokens + answer.completion_tokens <= answer.slot.n_ctx == n_ctx
    assert result.verdict.text
    assert result.verdict.decision
    assert all(each.supplied for each in result.verdict.citations), result.verdict
    members = {member.name for member in council.members}
    assert all(answer.prompt.hits for role, answer in result.answers if role in members)  # which of them it cites is up to the model
    assert named(events, "end")[0]["state"] == "decided"
    again, _ = run(council, settings)
    first, second = (
        sorted(answer.prompt_tokens - answer.cached_tokens for role, answer in each.answers if role in members) for each in (result, again)
    )
    assert first[-2] < 100
    assert first[-1] > 500  # all but one evaluate their own suffix alone
    assert second[-1] < 100
    assert (result.warnings, again.warnings) == ((), ())


def test_a_judge_with_tools_calls_them_in_their_form(settings):
    judge = Judge(tools=("calculate", "kb_search"), rounds=1, sampling=SamplingParams(max_tokens=96))
    member = Member(name="reader", persona="You say what the sources state.", sampling=SamplingParams(max_tokens=16))
    _, events = run(Council(name="test", members=(member,), judge=judge, top_k=2), settings, keep=False)
    calls = [event for event in named(events, "said") if event["kind"] == "call"]
    assert calls
    assert all(event["tool"] in judge.tools and event["text"] for event in named(events, "tool"))
    assert named(events, "verdict")


def test_plan_and_reviews_keep_to_their_forms(settings):
    sampling = SamplingParams(max_tokens=16)
    members = tuple(Member(name=name, persona="You answer.", sampling=sampling) for name in ("first", "second", "third"))
    judge = Judge(sampling=SamplingParams(max_tokens=96))
    council = Council(name="test", members=members, judge=judge, plan=True, review=True, top_k=2)
    _, events = run(council, settings, keep=False)
    assert named(events, "planned")[0]["strategy"]
    if len([event for event in named(events, "checked") if event["text"]]) == len(members):
        rankings = named(events, "ranking")[0]["rankings"]
        assert all(set(ranking) <= {"first", "second", "third"} - {name} for name, ranking in rankings.items())


def test_one_that_repeats_itself_for_ever_is_stopped_by_its_budget(settings):
    persona = "You write the sentence: The part is too hot. You write it again and again, without end."
    member = Member(name="parrot", persona=persona, sampling=SamplingParams(max_tokens=100))
    council = Council(name="test", members=(member,), judge=Judge(sampling=SamplingParams(max_tokens=96)), top_k=2)
    result, events = run(council, settings, keep=False)
    (_, answer), *_ = result.answers
    assert answer.completion_tokens <= 100
    assert len(named(events, "checked")[0]["text"]) <= len(answer.text)
    assert result.verdict.text


def test_it_is_stopped_in_the_middle_of_three_members(settings):
    written = []

    def stop(role, text):
        written.append(role)
        if len(set(written)) == 3 and len(written) > 12:
            raise KeyboardInterrupt

    council, events = Catalog.load(settings).council("default"), []
    with pytest.raises(InterruptedRunError):
        run_council(council, TASK, settings=settings, kbs=["handbook"], on_event=events.append, on_text=stop)
    with Journal.open(settings.home) as journal:
        kept = journal.councils.get(events[0]["id"])
    assert kept.state == "cancelled"
    assert list(kept.events) == events
    said = {event["role"]: event["finish_reason"] for event in named(events, "said")}
    assert set(said) == {member.name for member in council.members}
    assert "cancelled" in said.values()


def test_roles_of_different_models(settings):
    member = Member(name="echo", persona="You repeat the question.", model="echo", sampling=SamplingParams(max_tokens=64))
    council = Council(name="test", members=(member,), judge=Judge(sampling=SamplingParams(max_tokens=96)), top_k=2)
    result, events = run(council, settings, keep=False)
    assert [(role, answer.model) for role, answer in result.answers][:2] == [("echo", "echo"), ("judge", "smollm2-135m")]
    assert {each["model"] for each in named(events, "end")[0]["loads"]} == {"echo", "smollm2-135m"}


def test_a_council_that_is_over_holds_no_model(settings):
    """Neither its models, which llguidance could keep alive, nor the embedder that it searched with."""

    def num_models():
        gc.collect()
        return sum(type(each) is LlamaModel for each in gc.get_objects())

    before = num_models()
    member = Member(name="reader", persona="You answer.", sampling=SamplingParams(max_tokens=8))
    council = Council(name="test", members=(member,), judge=Judge(sampling=SamplingParams(max_tokens=96)), top_k=1)
    run_council(council, TASK, settings=settings, kbs=["handbook"], keep=False)
    assert num_models() <= before  # the collector can find models of other tests meanwhile
