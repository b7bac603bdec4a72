"""States outside of a context, and conversations that take turns in one of llama.cpp."""

from localrag.engine.context import Context
from localrag.engine.kv_cache import MIN_BYTES, SHARE_OF_FREE, HostSwap
from localrag.engine.loading import open_model
from localrag.types import SamplingParams
from tests.gguf_files import write_model


def test_the_longest_beginning_is_found_in_the_smallest_state():
    swap = HostSwap()
    assert swap.longest([1, 2, 3]) is None
    swap.put([1, 2, 3, 4, 5, 6], b"long")
    swap.put([1, 2, 3, 9], b"short")
    swap.put([7, 8], b"other")
    state, length = swap.longest([1, 2, 3, 4])
    assert (state.data, length) == (b"long", 4)
    state, length = swap.longest([1, 2, 3])
    assert (state.data, length) == (b"short", 3)
    assert swap.longest([5]) is None


def test_a_state_that_another_goes_on_from_is_not_kept_twice():
    swap = HostSwap()
    swap.put([1, 2], b"beginning")
    swap.put([1, 2, 3], b"whole")
    assert swap.num_bytes == len(b"whole")


def test_what_was_used_longest_ago_goes_first_and_no_state_is_larger_than_the_shelf():
    swap = HostSwap(max_bytes=10)
    for token in range(3):
        swap.put([token], b"1234")
    assert [swap.longest([token]) is not None for token in range(3)] == [False, True, True]
    state, length = swap.longest([1])
    swap.use(state, 0)  # a beginning of it: it stays, and was used just now
    swap.put([3], b"1234")
    assert [swap.longest([token]) is not None for token in (1, 2, 3)] == [True, False, True]
    swap.put([4], b"12345678901")
    assert swap.longest([4]) is None
    swap.use(*swap.longest([3]))
    assert (swap.longest([3]), length) == (None, 1)


def test_a_state_that_cannot_be_truncated_is_found_by_its_checkpoints():
    swap = HostSwap()
    swap.put([1, 2, 3, 4, 5, 6], b"state", {2: b"two", 4: b"four"})
    assert swap.num_bytes == len(b"statetwofour")
    assert [match and match[1] for match in (swap.longest([1, 2, 3, 4, 5, 6, 7][:length]) for length in range(1, 8))] == [
        *(None, 2, 2, 4, 4, 6, 6)
    ]
    assert swap.longest([1, 9]) is None


def test_a_shelf_has_room_for_a_context_within_the_memory_that_is_free():
    swap = HostSwap()
    assert swap.fit(10 << 30, 50 << 30)
    assert swap.max_bytes == 10 << 30
    assert swap.fit(10 << 20, 50 << 30)
    assert swap.max_bytes == MIN_BYTES
    assert not swap.fit(10 << 30, 30 << 30)
    assert swap.max_bytes == (30 << 30) // SHARE_OF_FREE


def test_conversations_of_llama_cpp_take_turns_and_say_what_they_say_alone(tmp_path):
    path = write_model(tmp_path / "tiny.gguf", changes={"llama.context_length": 4096})
    rounds, sampling = 3, SamplingParams(max_tokens=6)

    def talk(engine, ids, turn):
        done = engine.generate(ids, sampling)
        ids += [*done.completion_ids, *range(40 + turn, 60 + turn)]
        return done

    said = {name: [name + (3 * step) % 90 for step in range(150)] for name in (1, 2, 3)}
    alone = {}
    for name, ids in said.items():
        with open_model(path, name="tiny") as engine:
            engine.reserve(1000, num_sequences=2)
            own = list(ids)
            alone[name] = [talk(engine, own, turn).completion_ids for turn in range(rounds)]
    with open_model(path, name="tiny") as engine:
        engine.reserve(2000, num_sequences=2)
        runner, swap = engine.context.runner, HostSwap()
        engine.context = Context.make(
            lambda _cells, _ids: runner, 2000, 2, host_swap=swap, bytes_per_token=0, prompt_room=lambda _: 512, most_kept=lambda: 10
        )
        for turn in range(rounds):
            for name, ids in said.items():
                before = len(ids)
                done = talk(engine, ids, turn)
                assert done.completion_ids == alone[name][turn]
                assert done.cached_tokens == (0 if turn == 0 else before - 21)
        assert swap.num_bytes > 0
