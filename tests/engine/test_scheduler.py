"""Who goes into the next batch, and which of its tokens give a new one."""

from localrag.engine.context import Scheduler
from localrag.engine.jobs import Sequence
from localrag.types import SamplingParams


def scheduler(*, batch_tokens=8, prompt_room=100):
    return Scheduler(num_cells=1000, num_slots=8, batch_tokens=batch_tokens, place=lambda _: True, prompt_room=lambda _: prompt_room)


def sequence(seq_id, *, num_prompt=4, num_completion=0, num_evaluated=0, breakpoints=()):
    made = Sequence(seq_id, [1] * num_prompt, SamplingParams(max_tokens=100), breakpoints=breakpoints)
    made.completion_ids = list(range(100, 100 + num_completion))
    made.num_evaluated = num_evaluated
    return made


def shares(made, *sequences):
    for each in sequences:
        made.add(each)
    return [(share.sequence.seq_id, len(share.token_ids), share.samples) for share in made.schedule()]


def test_answers_come_before_prompts_which_take_what_is_left():
    prompt, answer = sequence(0, num_prompt=20), sequence(1, num_completion=1, num_evaluated=4)
    assert shares(scheduler(), prompt, answer) == [(1, 1, True), (0, 7, False)]


def test_beside_answers_prompts_have_the_room_that_they_are_given():
    prompts = [sequence(0, num_prompt=20), sequence(2, num_prompt=20)]
    answer = sequence(1, num_completion=1, num_evaluated=4)
    assert shares(scheduler(prompt_room=3), *prompts, answer) == [(1, 1, True), (0, 3, False)]
    assert shares(scheduler(prompt_room=3), *prompts) == [(0, 8, False)]


def test_a_prompt_gives_a_token_when_it_is_whole():
    assert shares(scheduler(), sequence(0, num_prompt=8)) == [(0, 8, True)]
    assert shares(scheduler(), sequence(0, num_prompt=9)) == [(0, 8, False)]
    assert shares(scheduler(), sequence(0, num_prompt=8, breakpoints=(5, 8))) == [(0, 5, False)]


def test_what_was_lost_is_evaluated_again_before_anything_new_is_sampled():
    """A cancelled batch can cost a sequence its cells: then its answer so far is evaluated again, and only its end samples."""
    assert shares(scheduler(), sequence(0, num_completion=3, num_evaluated=4)) == [(0, 3, True)]
    assert shares(scheduler(batch_tokens=2), sequence(0, num_completion=3, num_evaluated=4)) == [(0, 2, False)]
    assert shares(scheduler(), sequence(0, num_completion=3)) == [(0, 4, False)]


def test_one_that_has_to_wait_is_asked_about_again_where_something_may_have_changed():
    """To ask takes as long as its prompt: beside answers that only go on, it is not asked at every step."""
    asked = []
    first, second = sequence(0, num_prompt=20), sequence(1)
    made = Scheduler(
        num_cells=1000,
        num_slots=8,
        batch_tokens=8,
        place=lambda each: asked.append(each.seq_id) or each is first,
        prompt_room=lambda _: 100,
    )
    shares(made, first, second)
    made.schedule()
    assert asked == [0, 1, 1]  # a prompt that is evaluated may come to hold what the other begins with
    first.num_evaluated, first.completion_ids = 20, [100]
    for _ in range(3):
        made.schedule()
    assert asked == [0, 1, 1, 1]
    made.release(first)
    made.schedule()
    assert asked == [0, 1, 1, 1, 1]
