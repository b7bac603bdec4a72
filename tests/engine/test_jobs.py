"""Streaming text: whole characters, stop strings held back and left out."""

from hypothesis import given
from hypothesis import strategies as st

from localrag.engine.jobs import Sequence
from localrag.types import SamplingParams


def feed(pieces, **sampling):
    """The texts that a sequence releases for these pieces; stops when it is finished."""
    sequence = Sequence(0, [1], SamplingParams(**{"max_tokens": 1000, **sampling}))
    released = []
    for piece in pieces:
        released.append(sequence.append(7, piece, is_end=False))
        if sequence.is_finished:
            break
    return sequence, released


def test_a_character_is_released_when_its_last_byte_is_there():
    sequence, released = feed([b"a", b"\xf0\x9f", b"\x94\xa5", "é".encode()[:1], "é".encode()[1:]])
    assert released == ["a", "", "🔥", "", "é"]
    assert sequence.text == "a🔥é"


def test_a_stop_string_over_several_pieces_is_never_shown():
    sequence, released = feed([b"one ", b"<e", b"nd", b"> two"], stop=("<end>",))
    assert "".join(released) == sequence.text == "one "
    assert sequence.finish_reason == "stop"


def test_what_only_began_like_a_stop_string_is_shown_later():
    _, released = feed([b"a<", b"e", b"x", b"b"], stop=("<end>",))
    assert released == ["a", "", "<ex", "b"]


def test_the_earliest_stop_string_counts():
    sequence, _ = feed([b"abcdef"], stop=("ef", "cd"))
    assert sequence.text == "ab"


def test_what_was_held_back_is_released_at_the_end():
    sequence = Sequence(0, [1], SamplingParams(max_tokens=9, stop=("###",)))
    assert sequence.append(7, b"a##", is_end=False) == "a"
    assert sequence.append(2, b"", is_end=True) == "##"
    assert (sequence.text, sequence.finish_reason, sequence.completion_ids) == ("a##", "stop", [7, 2])


def test_the_last_token_ends_it_by_length():
    sequence, _ = feed([b"a", b"b", b"c"], max_tokens=2)
    assert (sequence.text, sequence.finish_reason) == ("ab", "length")


def test_of_a_character_that_was_cut_off_nothing_is_shown():
    sequence = Sequence(0, [1], SamplingParams(max_tokens=1))
    assert sequence.append(7, b"a\xf0\x9f", is_end=False) == "a"


def test_a_character_that_the_model_left_broken_is_marked_as_such():
    sequence = Sequence(0, [1], SamplingParams())
    assert sequence.append(7, b"a\xf0\x9f", is_end=False) + sequence.append(2, b"", is_end=True) == "a\ufffd"


@given(st.text(), st.lists(st.integers(1, 5)), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_released_text_is_the_text_up_to_the_first_stop_string(text, sizes, stops):
    raw, pieces = text.encode("utf-8", "replace"), []
    for size in [*sizes, len(raw)]:
        pieces.append(raw[:size])
        raw = raw[size:]
    whole = text.encode("utf-8", "replace").decode()
    sequence, released = feed([*pieces, b""], stop=tuple(stops))
    if not sequence.is_finished:
        released.append(sequence.finish("length"))
    at = min((found for stop in stops if (found := whole.find(stop)) >= 0), default=len(whole))
    assert "".join(released) == sequence.text
    assert sequence.text == whole[:at]


def test_what_was_held_back_is_released_when_time_is_up():
    sequence = Sequence(0, [1], SamplingParams(max_tokens=9, stop=("###",)), deadline=0.0)
    assert sequence.append(7, b"a##", is_end=False) == "a"
    assert sequence.finish("time") == "##"
    assert (sequence.completion().text, sequence.completion().finish_reason) == ("a##", "time")


def test_an_answer_ends_at_its_deadline_and_a_prompt_may_take_as_long_again():
    sequence = Sequence(0, [1], SamplingParams(), added_at=100.0, deadline=104.0)
    assert sequence.latest_end == 108.0
    sequence.append(7, b"a", is_end=False)
    assert sequence.latest_end == 104.0
    assert Sequence(0, [1], SamplingParams(), added_at=100.0, deadline=99.0).latest_end == 99.0
    assert Sequence(0, [1], SamplingParams()).latest_end is None


def test_copied_text_is_final_at_once_and_no_stop_string_cuts_it():
    sequence = Sequence(0, [1], SamplingParams(max_tokens=9, stop=('."',)))
    assert sequence.append(7, b"It [1]", is_end=False) == "It [1]"
    assert sequence.copy((8, 9, 9), b' "lasts."') == ' "lasts."'
    assert sequence.append(7, b"\n", is_end=False) == "\n"
    done = sequence.completion()
    assert (done.text, done.copied, done.copied_tokens, done.completion_tokens) == ('It [1] "lasts."\n', ((6, 15),), 3, 5)
    assert sequence.pending(512) == [1]


def test_a_quote_can_fill_the_answer():
    sequence = Sequence(0, [1], SamplingParams(max_tokens=3))
    sequence.append(7, b"[1]", is_end=False)
    sequence.copy((8, 9), b' "x"')
    assert (sequence.text, sequence.finish_reason) == ('[1] "x"', "length")
