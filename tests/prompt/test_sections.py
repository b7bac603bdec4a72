"""Every kind of input, every strategy: what is sent fits, is counted, and what is not sent is named."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag import prompt
from localrag.budget import Flex, Percent, Profile, container, negotiate
from localrag.budget.sections import PROTECTED
from localrag.engine.echo import EchoTemplate, EchoTokenizer
from localrag.engine.template import JinjaChatTemplate
from localrag.errors import BudgetExceededError
from localrag.prompt import PromptInputs
from localrag.text.tokens import Segment, TokenCounter
from localrag.types import Attachment, Chunk, Hit, Memory, Message, ToolCall, ToolSpec
from tests.engine.call_templates import FAMILIES
from tests.prompt.building import build, build_offer, random_offer, shown
from tests.prompt.checking import asked, check

LONG = "Parts cool on the glass plate. The oven heats slowly, at 60 degrees. Nozzles clog when dust gets in. " * 12


def exchanges(count, words="A short thing"):
    for n in range(1, count + 1):
        yield Message("user", f"{words}, asked {n}?")
        yield Message("assistant", f"{words}, answered {n}.")


def hit(number, text, relevance=None):
    chunk = Chunk(id=number, document_id=number, ordinal=0, text=text, start=0, end=len(text), source=f"{number}.md")
    return Hit(chunk, 1.0 / number, relevance=relevance)


def used(composed):
    return {entry.name: entry.used for entry in composed.ledger.entries}


def test_everything_stands_in_the_order_of_what_changes_least():
    composed = build(
        "Why?",
        [hit(1, "Because.")],
        system="Be brief.",
        history=list(exchanges(1)),
        tools=[ToolSpec("search", "Find things.")],
        memories=[Memory(label="memory 1", text="Likes PETG.")],
        attachments=[Attachment(label="notes.txt", text="Dry it first.")],
    )
    text = shown(composed)
    order = ["search", "Be brief.", "Likes PETG.", "asked 1", "answered 1", "Dry it first.", "[KB#1] Because.", "Question: Why?"]
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert [entry.name for entry in composed.ledger.entries] == [
        "template", "system", "tools", "memories", "history", "attachments", "evidence", "question", "answer",
    ]  # fmt: skip
    assert not any(entry.omitted for entry in composed.ledger.entries)


def test_braces_in_what_is_said_about_citing_are_text():
    assert shown(build("Why?", [hit(1, "Because.")], cite=' As JSON: {"id": "{label}"}.')).count('Why? As JSON: {"id": "KB#1"}.') == 1


def test_history_that_fits_is_sent_whole_and_without_a_summary():
    composed = build("Why?", history=list(exchanges(5)))
    assert "summary" not in used(composed)
    assert all(f"asked {n}" in shown(composed) for n in range(1, 6))


def test_what_history_has_no_room_for_becomes_a_summary_that_names_what_it_covers():
    composed = build("Why?", history=list(exchanges(40, LONG[:100])), window=3000)
    history, summary = composed.ledger.entry("history"), composed.ledger.entry("summary")
    assert history.omitted
    assert history.omitted[0] == "message 1"
    assert summary.covered == history.omitted
    assert "The conversation so far" in shown(composed)
    assert "answered 40" in shown(composed)  # the newest stays as it is


def test_what_is_settled_stays_in_the_summary_where_there_is_room_for_it():
    history = list(exchanges(6, LONG[:100]))
    composed = build("Why?", history=history, settled=4, pinned=frozenset({1}))
    assert composed.ledger.entry("history").omitted == composed.ledger.entry("summary").covered == ("message 3", "message 4")
    assert composed.ledger.entry("pinned").used
    whole = build("Why?", history=history, settled=4, overflow=[("error", "history")])
    assert not whole.ledger.entry("history").omitted
    assert "summary" not in used(whole)


def test_the_strategy_prioritize_drops_the_oldest_exchanges_whole():
    composed = build("Why?", history=list(exchanges(40, LONG[:100])), window=3000, overflow=[("prioritize", None)])
    names = composed.ledger.entry("history").omitted
    assert names == tuple(f"message {n}" for n in range(1, len(names) + 1))
    assert len(names) % 2 == 0  # a question is never separated from its answer
    assert "summary" not in used(composed)


def test_a_call_is_never_separated_from_its_result():
    turn = [Message("user", "u" * 50), Message("assistant", "call"), Message("tool", "r" * 50), Message("assistant", "done")]
    for window in range(300, 1200, 37):
        composed = build("Why?", history=turn * 4, window=window, overflow=[("prioritize", None)])
        text = shown(composed)
        assert text.count("call") == text.count("r" * 50) == text.count("done") == text.count("u" * 50)


def test_max_messages_bounds_the_other_dimension():
    composed = build("Why?", history=list(exchanges(10)), profile=Profile(max_messages=4), overflow=[("prioritize", None)])
    assert "asked 8" not in shown(composed)
    assert "asked 9" in shown(composed)
    assert len(composed.ledger.entry("history").omitted) == 16


def test_truncation_ends_at_a_sentence_and_is_marked():
    composed = build("Why?", attachments=[Attachment(label="a.txt", text=LONG)], window=900, overflow=[("truncate", None)])
    entry = composed.ledger.entry("attachments")
    assert entry.omitted == ()
    [shortened] = entry.shortened
    assert (shortened.id, shortened.level) == ("a.txt", "truncated")
    assert shortened.tokens < shortened.of
    assert ". […]" in shown(composed)


def test_summarize_steps_down_the_least_relevant_first():
    files = [Attachment(label=f"{name}.txt", text=LONG, relevance=relevance) for name, relevance in (("good", 0.9), ("poor", 0.1))]
    composed = build("Why?", attachments=files, window=2400, overflow=[("summarize", "attachments")])
    levels = {each.id: each.level for each in composed.ledger.entry("attachments").shortened}
    assert set(levels) == {"poor.txt"}
    tight = build("Why?", attachments=files, window=700, overflow=[("summarize", "attachments")])
    levels = {each.id: each.level for each in tight.ledger.entry("attachments").shortened}
    steps = ["full", "detailed", "summary", "stub"]
    assert steps.index(levels.get("poor.txt", "stub")) >= steps.index(levels.get("good.txt", "full")) > 0


def test_the_strategy_error_refuses_with_what_is_too_much():
    with pytest.raises(BudgetExceededError) as raised:
        build("Why?", attachments=[Attachment(label="a.txt", text=LONG)], window=900, overflow=[("error", "attachments")])
    assert raised.value.numbers["sections"]["attachments"] > 900
    assert raised.value.exit_code == 5


def test_the_tiers_share_evidence_and_what_one_does_not_use_others_get():
    strong = [hit(n, "s" * 80, 0.9) for n in range(1, 30)]
    weak = [hit(n, "w" * 80, 0.35) for n in range(101, 130)]
    both = build("Why?", strong + weak, window=4000)
    parts = {part.name: part for part in both.ledger.entry("evidence").parts}
    assert set(parts) == {"primary", "reference"}
    ratio = parts["primary"].used / (parts["primary"].used + parts["reference"].used)
    assert ratio == pytest.approx(50 / 65, abs=0.08)  # 50 and 15: supporting has nothing, and they share its part in that ratio
    alone = build("Why?", weak, window=4000)
    assert alone.ledger.entry("evidence").used > 3 * parts["reference"].used


def test_tools_are_left_out_from_the_last_one_on():
    tools = [ToolSpec(f"tool_{n}", "It does one thing well. " * 10) for n in range(12)]
    composed = build("Why?", tools=tools, window=3000)
    omitted = composed.ledger.entry("tools").omitted
    assert omitted == tuple(f"tool_{n}" for n in range(12 - len(omitted), 12))
    assert 0 < len(omitted) < 12


def test_tools_use_spare_tokens_before_any_is_left_out():
    tools = [ToolSpec(f"tool_{n}", "It does one thing well. " * 10) for n in range(12)]
    composed = build("Why?", tools=tools, window=8000)
    entry = composed.ledger.entry("tools")
    assert entry.used > 0.3 * 8000
    assert entry.omitted == ()
    bound = build("Why?", tools=tools, window=8000, profile=Profile(sections={"tools": Flex(max=Percent(30), spare=0)}))
    assert bound.ledger.entry("tools").used <= 0.3 * 8000  # a table can have it otherwise
    history = list(exchanges(60, "Some words that were said"))
    room = int(sum(used(build("Why?", window=50_000, history=history)).values()) / 0.66)
    beside = build("Why?", tools=tools, window=room, history=history)  # history, which may grow, goes first
    assert beside.ledger.entry("history").omitted == ()
    assert beside.ledger.entry("tools").omitted
    assert beside.ledger.spare < 400


@pytest.mark.parametrize("names", [["tool_11"], ["tool_3", "tool_11"], [f"tool_{n}" for n in range(12)]])
def test_a_tool_that_must_be_called_is_sent_whatever_else_is_left_out(names):
    tools = [ToolSpec(f"tool_{n}", "It does one thing well. " * (40 - n)) for n in range(12)]
    history = list(exchanges(40, LONG[:200]))
    composed = build("Why?", tools=tools, must_call=names, window=2000, history=history, profile=Profile(sections={"tools": Flex(max=20)}))
    assert composed.ledger.entry("tools").omitted == tuple(f"tool_{n}" for n in range(11))
    assert '"tool_11"' in shown(composed)


def test_a_tool_that_must_be_called_and_does_not_fit_is_refused_with_the_numbers():
    tools = [ToolSpec("small", "Find."), ToolSpec("large", LONG * 3)]
    with pytest.raises(BudgetExceededError) as raised:
        build("Why?", tools=tools, must_call=["large"], window=1500)
    numbers = raised.value.numbers
    assert numbers["sections"]["tools"] > 3 * len(LONG)
    assert numbers["needed"] > numbers["window"] == 1500
    assert build("Why?", tools=tools, must_call=["large"], window=numbers["needed"]).ledger.entry("tools").omitted == ("small",)


def test_a_tool_that_must_be_called_is_shown_however_many_stand_before_it():
    tools = [ToolSpec(f"tool_{n}", "") for n in range(300)]
    composed = build("Why?", tools=tools, must_call=["tool_299"], window=100_000)
    assert '"tool_299"' in shown(composed)
    assert "tool_299" not in composed.ledger.entry("tools").omitted


def test_results_of_calls_give_way_to_the_tool_that_must_be_called():
    rounds = [Message("assistant", '{"name":"search"}'), Message("tool", LONG * 20)]
    tool = ToolSpec("search", "Find things. " * 20)
    offer = PromptInputs(messages=[Message("user", "Why?"), *rounds], tools=[tool], must_call=["search"], max_tokens=64)
    tools = check(offer, build_offer(offer, 2000), 2000)["tools"]
    assert [each.id for each in tools.shortened] == ["message 3"]
    assert tools.omitted == ()


@pytest.mark.parametrize("name", ["hermes", "xml", "array"])
def test_calls_in_a_models_own_form_are_counted_and_never_cut(name):
    calls = [ToolCall("search", {"query": f"{LONG[:60]} {number}", "most": number}, f"call0000{number}") for number in range(3)]
    rounds = [
        each for call in calls for each in (Message("assistant", "", tool_calls=(call,)), Message("tool", LONG, tool_call_id=call.id))
    ]
    tools = [ToolSpec("search", "Finds things.", {"type": "object", "properties": {"query": {"type": "string"}}})]
    messages = [*exchanges(3, LONG[:200]), Message("user", "Why?"), *rounds]
    with JinjaChatTemplate(FAMILIES[name], time_limit_s=10) as template:
        for window in (2000, 2600, 9000):
            offer = PromptInputs(messages=messages, tools=tools, max_tokens=64)
            composed = build_offer(offer, window, template=template)
            entries = {entry.name: entry for entry in composed.ledger.entries}
            assert sum(entry.used for entry in entries.values()) == len(composed.token_ids)
            assert len(composed.token_ids) + entries["answer"].allotted <= window
            assert entries["tools"].used > 3 * len(LONG) or entries["tools"].shortened
            assert all(f"{LONG[:60]} {number}" in shown(composed) for number in range(3))
            assert not composed.ledger.entry("history").omitted or window < 9000


# --- an answer without a limit, and evidence that takes what is spare


def test_an_answer_without_a_limit_has_what_is_left():
    history = list(exchanges(50, LONG[:100]))
    hits = [hit(n, LONG[:300]) for n in range(1, 10)]
    needed = len(build("Why?", hits, history=history, window=100_000).token_ids)
    for window in (needed + 500, needed + 250, 20_000):
        composed = build("Why?", hits, history=history, window=window, max_tokens=None, ratio=1.0)
        assert composed.ledger.entry("history").omitted == ()
        assert composed.max_tokens == window - len(composed.token_ids) >= 32
        answer = composed.ledger.entry("answer")
        assert (answer.wanted, composed.ledger.spare) == (answer.allotted, 0)


def test_an_answer_without_a_limit_is_no_shorter_than_it_need_be_where_history_gives_way():
    history = list(exchanges(400, LONG[:100]))
    for window, least in ((131_072, 512), (1500, 100)):
        composed = build("Why?", history=history * 3, window=window, max_tokens=None)
        assert composed.ledger.entry("history").omitted
        assert composed.ledger.entry("history").used > window // 2
        assert composed.max_tokens >= least


def test_a_small_window_keeps_history_beside_evidence_and_an_answer_without_a_limit():
    hits = [hit(n, LONG[:300]) for n in range(1, 40)]
    composed = build("Why?", hits, history=list(exchanges(8)), window=1500, max_tokens=None)
    assert composed.ledger.entry("history").omitted == ()
    assert composed.ledger.entry("evidence").used > 400


def test_evidence_that_was_asked_for_takes_what_is_spare_and_nothing_else():
    hits = [hit(n, LONG[:300]) for n in range(1, 38)]
    asked_for = Profile().with_spare_for_evidence()
    before, after = (build("Why?", hits, window=16_000, ratio=None, profile=each) for each in (Profile(), asked_for))
    assert len(before.hits) < 25
    assert before.ledger.spare > 6000
    assert len(after.hits) == 37
    history = list(exchanges(30, LONG[:100]))
    for window in range(2000, 16_000, 700):
        before, after = (build("Why?", hits, window=window, ratio=None, profile=each, history=history) for each in (Profile(), asked_for))
        assert len(after.hits) >= len(before.hits)
        for section in ("history", "answer"):
            old, new = before.ledger.entry(section), after.ledger.entry(section)
            assert (new.omitted, new.allotted) == (old.omitted, old.allotted)
        assert len(after.hits) == 37 or after.ledger.spare < 400  # less than a passage


def test_a_ratio_that_was_asked_for_still_bounds_evidence():
    hits = [hit(n, LONG[:300]) for n in range(1, 38)]
    composed = build("Why?", hits, window=16_000, ratio=None, profile=Profile().with_context_ratio(0.3).with_spare_for_evidence())
    assert composed.ledger.entry("evidence").used <= 0.3 * 16_000


def test_a_result_of_a_call_that_is_too_long_is_cut_and_named_but_never_dropped():
    call = [Message("assistant", '{"name":"search"}'), Message("tool", LONG * 20)]
    offer = random_offer(random.Random(1))
    offer = type(offer)(messages=[Message("user", "Why?"), *call], max_tokens=64)
    composed = build_offer(offer, 2000)
    [shortened] = composed.ledger.entry("tools").shortened
    assert shortened.id == "message 3"
    assert '{"name":"search"}' in shown(composed)
    assert len(composed.token_ids) + composed.max_tokens <= 2000


def test_a_round_of_tools_is_kept_whatever_a_table_says_is_the_most():
    rounds = [Message("assistant", '{"name":"search"}'), Message("tool", "Nothing was found.")] * 4
    profile = Profile(sections={"tools": Flex(max=20)})
    offer = PromptInputs(messages=[Message("user", "Why?"), *rounds], max_tokens=64, profile=profile)
    composed = build_offer(offer, 2000)
    assert len(check(offer, composed, 2000)["tools"].shortened) == len(rounds)


def test_what_was_thought_before_a_call_is_counted_as_it_is_sent():
    call = Message("assistant", f"<think>{LONG[:300]}</think>" + '{"name":"search"}')
    offer = PromptInputs(messages=[Message("user", "Why?"), call, Message("tool", "Because.")], max_tokens=64)
    tools = check(offer, build_offer(offer, 2000), 2000)["tools"]
    assert (tools.used > 300, tools.shortened) == (True, ())


def test_the_gap_is_a_margin_that_nobody_gets():
    plain, with_gap = (build("Why?", max_tokens=100_000, window=1000, profile=Profile(gap=gap)) for gap in (0, 100))
    assert with_gap.max_tokens == plain.max_tokens - 100
    assert with_gap.ledger.entry("gap").used == 0
    assert with_gap.ledger.spare == 0


def test_fifty_windows_of_input_are_answered_within_one():
    window = 2048
    composed = build(
        "Why?",
        [hit(n, LONG[:900]) for n in range(1, 50)],
        window=window,
        history=list(exchanges(60, LONG[:500])),
        tools=[ToolSpec(f"tool_{n}", LONG[:300]) for n in range(60)],
        attachments=[Attachment(label="big.txt", text=LONG * 10)],
        memories=[Memory(label=f"memory {n}", text=LONG[:90]) for n in range(50)],
    )
    wanted = sum(entry.wanted for entry in composed.ledger.entries if entry.name != "answer")
    assert wanted > 50 * window
    assert len(composed.token_ids) + composed.max_tokens <= window
    assert "Question: Why?" in shown(composed) or "\nWhy?" in shown(composed)


@settings(max_examples=250, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.integers(64, 12_000))
def test_whatever_is_offered_the_ledger_is_exact_and_nothing_is_lost(seed, window):
    offer = random_offer(random.Random(seed))
    system = "\n\n".join(m.content for m in offer.messages if m.role == "system").strip()
    question = offer.messages[asked(offer)].content.strip()
    try:
        composed = build_offer(offer, window)
    except BudgetExceededError as error:
        assert error.numbers["needed"] > error.numbers["window"] == offer.profile.limits.get(next(iter(error.numbers["sections"])), window)
        return
    entries = check(offer, composed, window)
    contents = {part.part.section: part for part in composed.parts if part.part.section in ("system", "question")}
    assert contents["question"].part.text == question  # protected sections are never cut
    assert not system or contents["system"].part.text == system
    assert entries["answer"].allotted >= min(offer.max_tokens or 32, 32)
    if offer.max_tokens is None:
        assert composed.ledger.spare == 0  # the answer has all that is left
    evidence = entries.get("evidence")
    if evidence is not None and not offer.profile.sections["evidence"].spare:
        fixed = sum(item.max for item in composed.budget.items if item.name in PROTECTED)  # memories can bring a system message with them
        share = offer.profile.sections["evidence"].max.value
        assert evidence.used <= share * (window - fixed) / 100


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.integers(200, 4000))
def test_a_larger_window_never_loses_the_question(seed, window):
    offer = random_offer(random.Random(seed), size=4)
    try:
        build_offer(offer, window)
    except BudgetExceededError:
        return
    larger = build_offer(offer, window + 1)
    assert "QUESTION" in shown(larger)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.integers(400, 6000))
def test_the_order_of_sections_does_not_matter(seed, window):
    rng = random.Random(seed)
    demand = prompt.measure(random_offer(rng, size=4), counter=TokenCounter(EchoTokenizer()), template=EchoTemplate())
    sections = demand.sections
    try:
        budget = negotiate(window, sections)
    except BudgetExceededError:
        return
    rng.shuffle(sections)
    assert dict(negotiate(window, sections).allocations) == dict(budget.allocations)
    assert container(window, sections) == window - sum(s.basis for s in sections if s.is_fixed)


class _WithUsualSystemText(EchoTemplate):
    """A template that introduces tools in place of its usual system text, as SmolLM's does."""

    def render(self, messages, tools=(), *, thinks=True):
        usual = Segment("<|im_start|>system\nYou are a helpful assistant, as everybody knows.<|im_end|>\n")
        intro = Segment("You may call functions. Each is described below in a line of JSON of its own.\n", tools=True)
        return [intro if tools else usual, *super().render(messages, tools, thinks=thinks)]


def test_a_tool_has_room_also_where_its_template_drops_its_usual_system_text_for_it():
    offer = PromptInputs(messages=[Message("user", "Hi")], tools=[ToolSpec("look", "Looks.", {"type": "object"})], must_call=["look"])
    composed = build_offer(offer, 1000, template=_WithUsualSystemText())
    assert composed.ledger.entry("tools").used > 0
    assert composed.ledger.entry("tools").omitted == ()
