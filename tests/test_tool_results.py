"""Tool results: the text that is sent is the text that was counted, and the room of a turn is shared by its calls."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.worked import json_overhead
from localrag.citation import TAG
from localrag.engine.echo import EchoTokenizer
from localrag.errors import UsageError
from localrag.prompt.tool_results import MAX_NAMED, ToolAccount, article_fields, compact
from localrag.types import Chunk, Hit
from tests import material

count = EchoTokenizer().count


def words(text):
    """A tokenizer of another kind: joins change counts, and spaces cost nothing."""
    return len(text.replace(",", " , ").replace('"', ' " ').replace("#", " # ").split())


def hit(number, text, heading="Heat"):
    return Hit(Chunk(id=number, document_id=1, ordinal=0, text=text, start=0, end=len(text), source="pets.md", heading=heading), 0.5)


def test_json_is_compact_and_keeps_its_order_and_letters():
    assert compact({"b": [1, None, True], "a": "温度 “60 °C”\n"}) == '{"b":[1,null,true],"a":"温度 “60 °C”\\n"}'


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), {"a": object()}])
def test_what_is_no_json_is_refused(value):
    with pytest.raises(UsageError, match="cannot be sent as JSON"):
        compact(value)


def test_a_value_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(UsageError, match="cannot be sent as JSON"):
        compact(value)


def test_a_passage_has_the_fields_of_a_citation_and_no_others():
    assert article_fields(hit(12, " It is hot. ")) == {"id": "KB#12", "source": "pets.md", "heading": "Heat", "text": "It is hot."}
    assert list(article_fields(hit(12, "Hot.", heading=""))) == ["id", "source", "text"]


def test_a_tag_in_a_document_cannot_pose_as_a_passage():
    fields = article_fields(hit(12, "See [KB#99].", heading="KB#7"))
    assert TAG.findall(compact(fields)) == ["KB#12"]
    assert not TAG.search(ToolAccount(500, count).charge_text("page", "as KB#99 says").text)


def test_a_result_that_a_reader_can_check():
    account = ToolAccount(150, count)
    result = account.charge_hits("search", [hit(1, "PLA softens at 60 °C."), hit(2, "Nylon. " * 20), hit(3, "x")])
    assert result.text == (
        '{"results":[{"id":"KB#1","source":"pets.md","heading":"Heat","text":"PLA softens at 60 °C."}],'
        '"omitted":["KB#2","KB#3"],"tokens_left":12}'
    )
    assert (result.num_tokens, result.room_left, account.room_left) == (138, 12, 12)
    assert (result.used, result.omitted, result.exhausted) == (("KB#1",), ("KB#2", "KB#3"), False)


def test_a_later_call_sees_what_was_used_and_repeats_nothing():
    account = ToolAccount(1000, count)
    first = account.charge_hits("search", [hit(1, "One."), hit(2, "Two.")])
    second = account.charge_hits("search", [hit(2, "Two."), hit(3, "Three."), hit(3, "Three.")])
    assert (second.used, second.above, second.omitted) == (("KB#3",), ("KB#2",), ())
    assert json.loads(second.text)["above"] == ["KB#2"]
    assert "Two." not in second.text
    assert second.room_left == 1000 - first.num_tokens - second.num_tokens


def test_many_that_are_left_out_are_told_by_number_and_accounted_by_name():
    hits = [hit(number, "A long passage. " * 40) for number in range(200)]
    result = ToolAccount(1500, count).charge_hits("search", hits)
    told = json.loads(result.text)
    assert told["num_omitted"] == len(result.omitted) == 200 - len(result.used)
    assert told["omitted"] == list(result.omitted[:MAX_NAMED])
    assert result.used


def test_when_the_room_is_used_up_the_model_is_told_as_long_as_that_fits():
    hits = [hit(number, "A passage.") for number in range(3)]
    result = ToolAccount(50, count).charge_hits("search", hits)
    assert result.text == '{"note":"no room left","num_omitted":3}'
    assert (result.num_tokens, result.exhausted, result.omitted) == (39, True, ("KB#0", "KB#1", "KB#2"))
    silent = ToolAccount(20, count).charge_hits("search", hits)
    assert (silent.text, silent.num_tokens, silent.room_left, silent.exhausted) == ("", 0, 20, True)


def test_nothing_found_is_a_result_too():
    assert ToolAccount(100, count).charge_hits("search", []).text == '{"results":[],"tokens_left":69}'


def test_another_tools_text_is_cut_with_a_mark():
    account = ToolAccount(300, count)
    whole = account.charge_text("clock", "It is noon.")
    assert (whole.text, whole.num_tokens, whole.truncated) == ("It is noon.", 11, False)
    long = "The nozzle is hot. " * 100
    cut = account.charge_text("page", long)
    assert cut.truncated
    assert cut.num_tokens == count(cut.text) <= 289
    assert not long.startswith(cut.text), "the mark says that it is cut"
    assert cut.text.startswith("The nozzle is hot.")


def test_a_greedy_call_leaves_the_next_one_its_share():
    account = ToolAccount(1000, count, max_share=0.5)
    hits = [hit(number, "A long passage. " * 5) for number in range(20)]
    first, second = account.charge_hits("search", hits[:10]), account.charge_text("page", "The nozzle is hot. " * 100)
    assert first.num_tokens <= 500
    assert json.loads(first.text)["tokens_left"] == first.room_left == 1000 - first.num_tokens
    assert second.num_tokens <= first.room_left // 2 < second.num_tokens + 20


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_a_share_is_a_part_of_the_whole(share):
    with pytest.raises(UsageError, match="share"):
        ToolAccount(100, count, max_share=share)


@pytest.mark.parametrize("room", [-3, 0, 1])
def test_a_text_without_room_is_not_sent(room):
    result = ToolAccount(room, count).charge_text("page", "The nozzle is hot. " * 100)
    assert (result.text, result.num_tokens, result.exhausted) == ("", 0, True)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 2**32),
    st.integers(-10, 6000),
    st.sampled_from([count, words]),
    st.sampled_from([3, 30, 200]),
    st.sampled_from([1.0, 0.5]),
)
def test_what_is_sent_is_what_is_counted_and_fits(seed, room, counter, most_words, share):
    rng = random.Random(seed)
    account = ToolAccount(room, counter, max_share=share)
    sent = set()
    for _ in range(4):
        before, most = account.room_left, account.room
        found = rng.sample(material.hits(rng, 30, most_words=most_words), rng.randint(0, 30))
        if rng.random() < 0.2:
            result = account.charge_text("page", material.text(rng, rng.randint(0, 300)))
        else:
            result = account.charge_hits("search", found)
            labels = [each.label for each in found]
            assert sorted([*result.used, *result.above, *result.omitted]) == sorted(labels)
            assert set(result.above) == sent.intersection(labels)
            sent.update(result.used)
            if result.text and not result.exhausted:
                told = json.loads(result.text)
                assert [each["id"] for each in told["results"]] == list(result.used)
                assert told["tokens_left"] <= result.room_left <= told["tokens_left"] + 2
        assert result.num_tokens == (counter(result.text) if result.text else 0) <= most <= before
        assert account.room_left == result.room_left == before - result.num_tokens


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(200, 4000), st.sampled_from([count, words]))
def test_nothing_that_would_have_fitted_is_left_out(seed, room, counter):
    hits = material.hits(random.Random(seed), 12, most_words=60)
    result = ToolAccount(room, counter).charge_hits("search", hits)
    for label in result.omitted:
        articles = [article_fields(each) for each in hits if each.label in {*result.used, label}]
        others = [each for each in result.omitted if each != label]
        told = {"results": articles} | ({"omitted": others[:MAX_NAMED]} if others else {}) | {"tokens_left": room}
        if len(others) > MAX_NAMED:
            told["num_omitted"] = len(others)
        assert counter(compact(told)) > room


# the case of json-overhead.md


def test_the_window_is_passed_by_whole_articles_in_json_and_never_by_ours():
    rows = json_overhead.rows(count)
    for window in json_overhead.WINDOWS:
        raw, pretty, small, first, second = (row for row in rows if row.window == window)
        assert raw.tokens == pytest.approx(2 * 7 * 5_800, rel=0.05)
        assert raw.tokens + 2 * 7 * 1_000 < small.tokens < pretty.tokens < raw.tokens + 2 * 7 * 4_000
        assert pretty.over > 0
        assert small.over > 0
        assert first.over <= 0
        assert second.over <= 0
        assert second.total - first.total == second.tokens
        assert first.num_sent > 0
        assert second.num_sent > 0
    first, second = rows[3:5]
    assert rows[0].over <= 0, "by what the retriever counts, the largest window has room"
    assert first.num_sent == first.num_found
    assert second.num_above > 0


def test_the_table_has_a_line_for_every_row():
    rows = json_overhead.rows(count, [32_768])
    table = json_overhead.markdown(rows)
    assert len(table.splitlines()) == 2 + len(rows)
    assert all(f"| {row.what} | {row.tokens:,} |" in table for row in rows)
