"""Random councils, whole ones: real engine loop, real flow; the model is the echo. Everything is counted again from what was sent."""

import json
import os
import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import hypothesis
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from localrag.budget import Ledger, Profile
from localrag.deliberation import Council, Judge, Member, turns
from localrag.deliberation.replies import tool_specs
from localrag.deliberation.roles import TOOLS
from localrag.errors import BudgetExceededError
from localrag.prompt import PromptInputs
from localrag.session.council_run import run_council
from localrag.settings import Settings
from localrag.types import Message, Proposal, SamplingParams
from tests import material
from tests.prompt.checking import check

NUM_COUNCILS = int(os.environ.get("LOCALRAG_TEST_COUNCILS", "5"))
TASK = "Which material is for parts at 80 degrees: PETG or ABS?"
MOST = int(os.environ.get("LOCALRAG_TEST_MOST", "20"))  # 50 held too
"""Windows of evidence, or of proposals."""
MOST_OF_LARGEST = int(os.environ.get("LOCALRAG_TEST_LARGEST_WINDOWS", "8"))  # 50 held too
"""Windows of evidence where they are the largest of all, and there are eight of them."""
MOST_PROPOSED = 150_000
MOST_READ = int(os.environ.get("LOCALRAG_TEST_COUNCIL_BYTES", "6_000_000"))  # 25 million held too
"""Bytes of all proposals, and of the evidence before all prompts, so that a random run takes seconds: 50 windows of a judge of 3k, and
of a member of 20k or of eight of 6k. Larger ones are in test_many_windows_of_evidence_and_of_proposals.
"""
MOST_SUMMARIZED = 200_000
"""Bytes of evidence of which sentences are picked: that takes long, for each prompt anew."""
SPECIAL = re.compile(r"<\|im_(?:start|end)\|>")
LAST_TAG = 40


def many_words(rng, num_bytes):
    """Text of all kinds, cheap at any length."""
    text = material.text(rng, 1 + min(3000, num_bytes // 8))
    raw = (text * (num_bytes // len(text.encode()) + 1)).encode()
    return raw[:num_bytes].decode("utf-8", "ignore")


def drawn_windows(rng, num_members):
    """Of the members and of the judge: one for all, large ones before a small judge, or each its own. 1k to 128k."""
    kind = rng.choice(["alike", "own", "lopsided", "lopsided"])
    if kind == "lopsided":
        return [int(2 ** rng.uniform(14, 17))] * num_members, int(2 ** rng.uniform(10, 11.6))
    drawn = [int(2 ** rng.uniform(10, 17)) for _ in range(num_members + 1)]
    return (drawn[1:], drawn[0]) if kind == "own" else (drawn[:1] * num_members, drawn[0])


def drawn_task(rng):
    """One sentence, which members can say for ever; or several, of which all but the first go as said before."""
    more = material.text(rng, 10)
    return rng.choice([TASK, f"{' '.join(re.sub('[.…]', '', more).split())} {TASK}", f"{TASK} {more}"])


def drawn_profile(rng, num_bytes):
    profile = Profile(gap=rng.choice([0, 0, 17])).with_context_ratio(rng.choice([0.2, 0.5, 0.5, 0.8]))
    overflow = rng.choice([None, None, "truncate", "summarize" if num_bytes <= MOST_SUMMARIZED else "truncate"])
    return profile if overflow is None else profile.with_overflow(overflow)


def made_council(windows, judge_window, *, proposed, profile=Profile, persona=lambda: "You look at heat and load.", **more):
    """A council whose members write so many bytes together, as far as their windows allow."""
    judge, num_tokens = {key: more.pop(key) for key in ("tools", "rounds")}, min(proposed // len(windows), 131_072)
    asked, most = (" Say it 99999 times.", num_tokens) if num_tokens > 400 else ("", max(16, num_tokens))
    sampling = SamplingParams(max_tokens=most)
    members = tuple(
        Member(name=f"m{number}", persona=persona() + asked, model="echo", n_ctx=n_ctx, sampling=sampling, profile=profile())
        for number, n_ctx in enumerate(windows)
    )
    judge = Judge(model="echo", n_ctx=judge_window, sampling=SamplingParams(max_tokens=500), profile=profile(), **judge)
    return Council(name="test", members=members, judge=judge, top_k="fit", **more)


def drawn(rng):
    """A council, its task, and text that is piped in."""
    windows, judge_window = drawn_windows(rng, rng.randint(1, 8))
    num_bytes = int(rng.choice([0, 0.3, 5, MOST, MOST]) * rng.choice([*windows, judge_window]))
    piped = many_words(rng, min(num_bytes, MOST_READ // (2 * len(windows) + 4)))
    council = made_council(
        windows,
        judge_window,
        proposed=min(int(rng.choice([0, 1, 5, MOST + 2, MOST + 2, MOST + 2]) * judge_window), MOST_PROPOSED),
        profile=partial(drawn_profile, rng, len(piped.encode())),
        persona=lambda: material.text(rng, rng.randint(1, 30)),
        tools=tuple(rng.sample(TOOLS, rng.randint(0, 4))),
        rounds=rng.randint(0, 4),
        plan=rng.random() < 0.5,
        review=rng.random() < 0.5,
    )
    return council, drawn_task(rng), piped


@dataclass
class Offered:
    """How much there was for a prompt, in windows of its own."""

    kind: str
    window: int
    evidence: float
    proposals: float


def held(council, task, piped, events):
    """A council's run, every prompt of it checked; what there was for each of them."""
    with tempfile.TemporaryDirectory() as home:
        result = run_council(council, task, settings=Settings(home=Path(home)), piped=piped, keep=False, on_event=events.append)
    check_search(piped, events, result)
    run, offered = Run(council, task), []
    answers = iter(result.answers)
    for event in events:
        if event["event"] != "said":
            run.note(event)
            continue
        role, answer = next(answers)
        assert role == event["role"]
        offer, window = run.offer(event, answer), council.role(role).n_ctx
        check_answer(offer, window, answer, run.budgets.pop(role), event)
        run.said(event, answer)
        evidence, proposals = ([hit.chunk.text for hit in offer.hits], [each.text for each in offer.proposals])
        offered.append(Offered(event["kind"], window, *(len("".join(texts).encode()) / window for texts in (evidence, proposals))))
    assert not run.budgets
    assert next(answers, None) is None
    return offered


def check_search(piped, events, result):
    """All of the piped text is among the passages that each role is offered, once; it is planned before they are searched."""
    whole = {hit.label: hit.chunk for hit in result.answers[-1][1].offered}
    for role, answer in result.answers:
        assert {hit.label for hit in answer.offered} == (set() if role == "planner" else whole.keys())
    end = 0
    for chunk in sorted(whole.values(), key=lambda chunk: chunk.start):
        assert not piped[end : chunk.start].strip()
        assert piped[chunk.start : chunk.end] == chunk.text
        end = chunk.end
    assert not piped[end:].strip()
    [search] = [event for event in events if event["event"] == "search"]
    assert {search["found"], *search["roles"].values()} == {len(whole)}


@dataclass
class Run:
    """What was said so far, and so what the next answer was offered: told by the events alone."""

    council: Council
    task: str
    budgets: dict[str, dict] = field(default_factory=dict)
    checked: dict[str, Proposal] = field(default_factory=dict)
    context: dict = field(default_factory=dict)
    cited: set[str] = field(default_factory=set)
    texts: dict[str, tuple[str, str]] = field(default_factory=dict)
    rounds: list[Message] = field(default_factory=list)

    @property
    def spoken(self):
        return [each for each in self.checked.values() if any(map(str.isalnum, each.text))]

    def note(self, event):
        if event["event"] == "budget":
            self.budgets[event["role"]] = event
        elif event["event"] == "planned":
            self.context |= {"strategy": event["strategy"], "searches": event["searches"]}
        elif event["event"] == "checked":
            self.propose(event)
        elif event["event"] == "ranking":
            self.context |= {"points": event["points"]}
        elif event["event"] == "tool" and event["text"]:
            self.rounds += [Message("assistant", self.texts["judge"][0]), Message("tool", event["text"])]

    def propose(self, event):
        """What the others read is what a member said, up to what is named."""
        self.checked[event["member"]] = Proposal(label=event["member"], text=event["text"])
        self.cited |= set(event["cited"]) if any(map(str.isalnum, event["text"])) else set()
        said, finish_reason = self.texts[event["member"]]
        if not event["invented"] and not event["num_repeated"]:
            assert said.strip().startswith(event["text"])
            assert len(said.strip()) - len(event["text"]) < (LAST_TAG if finish_reason == "length" else 1)

    def said(self, event, answer):
        self.texts[event["role"]] = answer.text, answer.finish_reason

    def offer(self, event, answer):
        """What was there for an answer before anything was left out. The `hits` are what check_search looks at."""
        kind, role, who = event["kind"], event["role"], self.council.role(event["role"])
        messages = [Message("system", self.council.system), Message("user", self.task)]
        given = PromptInputs(messages=messages, profile=who.profile, cite="", tells_omitted=True, hits=answer.offered)
        if kind == "plan":
            return replace(given, instructions=turns.PLAN)
        plan = turns.planning_text(**self.context)
        if kind == "proposal":
            return replace(given, plan=plan, cite=turns.CITE, instructions=turns.propose_text(role, who.persona))
        if kind == "review":
            others = [each for each in self.spoken if each.label != role]
            shown = [Proposal(label=f"Proposal {letter}", text=each.text) for letter, each in zip("ABCDEFGH", others, strict=False)]
            return replace(given, plan=plan, proposals=shown, instructions=turns.review_text(role, who.persona))
        silent = [name for name, each in self.checked.items() if each not in self.spoken]
        return replace(
            given,
            messages=[*messages, *self.rounds],
            cited=frozenset(self.cited),
            plan=turns.planning_text(**self.context, silent=silent),
            proposals=self.spoken,
            tools=tool_specs(who.tools) if who.max_calls else (),
            instructions=turns.judge_text(who.persona, with_tools=who.max_calls > 0),
        )


def check_answer(offer, window, answer, budget, event):
    """It fits, its ledger is exact by a count of its own, and names what is not there; the events say the same."""
    composed = answer.prompt
    used = Counter()
    for part in composed.parts:
        text = SPECIAL.sub("*", part.part.text) if part.part.is_markup else part.part.text
        used[part.part.section] += len(text.encode())
    assert used.total() == len(composed.token_ids) == event["usage"]["prompt_tokens"] == answer.ledger.prompt_tokens
    assert used.total() + event["usage"]["completion_tokens"] <= window == answer.slot.n_ctx
    assert {entry.name: entry.used for entry in composed.ledger.entries if entry.used} == +used
    entries = check(offer, composed, window)
    named = {label for name in ("cited", "evidence") if name in entries for label in entries[name].omitted}
    assert named <= composed.omitted_costs.keys()
    sources = {hit.label: len(hit.chunk.text.strip().encode()) for hit in offer.hits}
    assert all(composed.omitted_costs[label] > sources[label] for label in named)
    if named:
        assert sum(entries[name].wanted for name in ("cited", "evidence") if name in entries) > sum(sources.values())
    check_rounds(offer, composed, entries)
    assert (budget["kind"], budget["role"]) == (event["kind"], event["role"])
    assert Ledger.from_dict(json.loads(json.dumps(budget["ledger"]))) == composed.ledger
    assert Ledger.from_dict(json.loads(json.dumps(event["ledger"]))) == answer.ledger


def check_rounds(offer, composed, entries):
    """Calls and what tools gave are there whole, or named."""
    parts = {part.part.item: part.part.text for part in composed.parts if part.part.section == "tools" and part.part.item}
    rounds = {
        f"message {number}": each.content.strip() for number, each in enumerate(offer.messages, 1) if each.role in ("assistant", "tool")
    }
    assert parts.keys() == rounds.keys()
    shortened = {each.id for each in entries["tools"].shortened} if "tools" in entries else set()
    assert {name for name, text in rounds.items() if parts[name] != text} == shortened


@given(seed=st.integers(0, 2**32))
@hypothesis.settings(max_examples=NUM_COUNCILS, deadline=None, phases=(Phase.reuse, Phase.generate))  # no seed is simpler than another
@pytest.mark.timeout(60 * NUM_COUNCILS)
@pytest.mark.long
def test_random_councils(seed):
    """1 to 8 members, windows of 1k to 128k, evidence and proposals of up to 50 of them, with and without tools, plan and reviews."""
    council, task, piped = drawn(random.Random(seed))
    events = []
    try:
        offered = held(council, task, piped, events)
    except BudgetExceededError as error:
        assert error.numbers["needed"] > error.numbers["window"]
        assert error.numbers["role"] in {"judge", "planner", *(member.name for member in council.members)}
        assert [event["event"] for event in events] == ["error", "end"]  # before anything is evaluated
        hypothesis.event("refused")
        return
    for what in ("evidence", "proposals"):
        most = max(getattr(each, what) for each in offered)
        hypothesis.event(f"{max(least for least in (0, 1, 10, 45) if least <= most)} windows of {what} or more")


@pytest.mark.parametrize(
    ("num_members", "window", "num_windows", "judge_window", "num_proposed", "called", "more"),
    [
        (8, 131_072, MOST_OF_LARGEST, 2600, MOST, [], {}),
        (4, 32_768, MOST, 1024, MOST, [], {"plan": True, "review": True}),
        (8, 4096, MOST, 5000, 3, ["kb_search"], {}),
    ],
    ids=["128k before 2.6k", "32k before 1k", "4k before 5k, which is room for a call"],
)
@pytest.mark.long
def test_many_windows_of_evidence_and_of_proposals(num_members, window, num_windows, judge_window, num_proposed, called, more):
    """Evidence of so many windows of a member, and proposals of so many of the judge's, which has all tools."""
    council = made_council([window] * num_members, judge_window, proposed=(num_proposed + 2) * judge_window, tools=TOOLS, rounds=4, **more)
    piped = many_words(random.Random(0), num_windows * window)
    events = []
    offered = held(council, TASK, piped, events)
    proposing = [each for each in offered if each.kind == "proposal"]
    assert [each.window for each in proposing] == [window] * num_members
    assert min(each.evidence for each in proposing) > num_windows - 1  # without white space between passages
    judging = [each for each in offered if each.kind in ("call", "verdict")]
    assert {each.window for each in judging} == {judge_window}
    assert min(each.proposals for each in judging) >= num_proposed
    assert [event["tool"] for event in events if event["event"] == "tool"] == called


def test_what_a_tool_gave_is_cut_and_named():
    """Much else wants the judge's window, so that a ledger that it reads gets less room than when it was given."""
    council = made_council([4096] * 8, 5000, proposed=30_000, tools=("read_ledger",), rounds=1)
    events = []
    held(council, TASK, many_words(random.Random(0), 100_000), events)
    [read] = [event for event in events if event["event"] == "tool"]
    tools = next(entry for entry in events[-3]["ledger"]["entries"] if entry["name"] == "tools")
    assert [(each["id"], each["level"], each["of"] >= read["num_tokens"] > each["tokens"]) for each in tools["shortened"]] == [
        ("message 4", "truncated", True)
    ]


@pytest.mark.parametrize("top_k", [6, "fit"])
def test_evidence_takes_what_would_stay_spare_however_many_passages_a_council_names(top_k):
    council = replace(made_council([4000] * 2, 8000, proposed=60, tools=(), rounds=0), top_k=top_k)
    piped = "".join(
        f"Part {number} softens at {number} degrees. {'It is not bent by hand, and it is cooled slowly. ' * 5}\n\n" for number in range(30)
    )
    with tempfile.TemporaryDirectory() as home:
        result = run_council(council, TASK, settings=Settings(home=Path(home)), piped=piped, keep=False)
    for _, answer in result.answers:
        assert answer.ledger.entry("evidence").omitted
        assert answer.ledger.spare < 600  # less than a passage, and what is set aside for the longest persona
