"""What the engine learns of its speed: exact on clean samples, steady under stalls, kept safely between runs."""

import json
import math
import random
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.engine.attention import machine_key, machine_speed
from localrag.engine.speed import MAX_KEPT, MachineSpeed, Speed, SpeedFile
from localrag.engine.threads import ThreadGovernor, num_cores
from tests.homes import know_machine

A, B = 8e-3, 4e-6  # seconds a prompt token, and seconds more for each token before it
DA, DB = 20e-3, 6e-6


def prompt_s(num_tokens, depth=0):
    return num_tokens * (A + B * (depth + num_tokens / 2))


def taught(*lengths, noise=0.0, stalls=0.0, factor=1.0, seed=1):
    """A speed that has seen prompts of these lengths in pieces of 512, and 20 tokens of an answer behind each."""
    speed, rng = Speed(), random.Random(seed)
    for length in lengths:
        for depth in range(0, length, 512):
            taken = min(512, length - depth)
            seconds = factor * prompt_s(taken, depth) * (1 + rng.uniform(-noise, noise))
            speed.observe_prefill(taken, depth, seconds * (20 if rng.random() < stalls else 1))
        for depth in range(length, length + 20):
            speed.observe_decode(depth, factor * (DA + DB * depth) * (1 + rng.uniform(-noise, noise)))
    return speed


def test_clean_samples_give_the_line_back():
    speed = taught(3000, 700, 1500, 100, 2500, 3000, 512, 1200)
    for length in (100, 1000, 3000):
        assert speed.prefill_s(length) == pytest.approx(prompt_s(length), rel=0.02)
        assert speed.prefill_s(length, 2000) == pytest.approx(prompt_s(length, 2000), rel=0.02)
        assert speed.decode_s(100, length) == pytest.approx(100 * (DA + DB * (length + 50)), rel=0.02)
    assert speed.prefill_tokens_per_s == pytest.approx(1 / A, rel=0.02)
    assert speed.decode_tokens_per_s == pytest.approx(1 / DA, rel=0.02)


def test_prompts_of_one_length_say_nothing_of_depth_and_the_shape_decides():
    speed = Speed(prefill_slope=B / A)
    for _ in range(5):
        speed.observe_prefill(96, 0, prompt_s(96))
    assert speed.prefill_s(3000) == pytest.approx(prompt_s(3000), rel=0.02)


def test_noise_and_stalls_hardly_move_it():
    speed = taught(*[900, 2100, 300, 3000] * 6, noise=0.2, stalls=0.05)
    for length in (100, 1000, 3000):
        assert speed.prefill_s(length) == pytest.approx(prompt_s(length), rel=0.2)
    assert 0.05 < speed.margin <= 0.5


def test_a_stall_in_the_first_sample_is_forgotten_with_the_next():
    speed = Speed()
    speed.observe_prefill(64, 0, 20 * prompt_s(64))
    for _ in range(2):
        speed.observe_prefill(64, 0, prompt_s(64))
    assert speed.prefill_s(64) == pytest.approx(prompt_s(64), rel=0.01)


@pytest.mark.parametrize("factor", [0.3, 0.7, 3.0])
def test_a_machine_of_another_speed_is_followed_within_a_few_prompts(factor):
    speed = taught(3000, 700, 1500, 100, 2500)
    for depth in [0, 512, 1024, 1536] * 3:
        speed.observe_prefill(512, depth, factor * prompt_s(512, depth))
    assert speed.prefill_s(2000) == pytest.approx(factor * prompt_s(2000), rel=0.2)


def test_nothing_is_known_of_a_new_one():
    speed = Speed()
    assert not speed.is_known
    assert (speed.prefill_s(100), speed.decode_s(100, 0), speed.overhead_s(100), speed.plan_s(100, 10)) == (0, 0, 0, 0)
    assert (speed.prefill_tokens_per_s, speed.decode_tokens_per_s) == (0, 0)
    speed.observe_prefill(15, 0, 1.0)  # too short to tell
    assert speed.prefill_s(100) == 0


def test_a_plan_is_overhead_prompt_with_margin_and_answer():
    speed = taught(3000, 700)
    speed.observe_context(1000, 0.03)
    expected = 0.03 + speed.prefill_s(900) * (1 + speed.margin) + speed.decode_s(100, 900)
    assert speed.plan_s(900, 100) == pytest.approx(expected)
    assert speed.plan_s(200, 100, depth=700) < speed.plan_s(900, 100)


def test_a_fixed_speed_stays_as_it_is():
    speed = Speed.fixed(prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0)
    speed.observe_prefill(500, 0, 90.0)
    speed.observe_decode(500, 90.0)
    speed.observe_context(500, 90.0)
    assert speed.is_known
    assert speed.plan_s(500, 50, depth=4000) == pytest.approx(0.5 + 0.5)
    assert speed.margin == 0


def test_the_depth_at_which_a_token_is_so_many_times_as_slow():
    speed = Speed(decode_slope=1e-3)
    assert speed.depth_of(1.5) == pytest.approx(500)
    for depth in range(0, 4000, 10):
        speed.observe_decode(depth, 0.01 * (1 + 5e-4 * depth))
    deep = speed.depth_of(2.0)
    assert speed.decode_s(1, round(deep)) == pytest.approx(2 * speed.decode_s(1, 0), rel=0.01)
    assert Speed.fixed(prefill_tokens_per_s=100, decode_tokens_per_s=10).depth_of(1.5) == math.inf


@given(
    st.lists(
        st.tuples(st.integers(-1, 600), st.integers(-1, 200_000), st.floats(allow_nan=True, allow_infinity=True), st.booleans()),
        max_size=60,
    ),
    st.integers(0, 200_000),
)
def test_whatever_is_observed_costs_are_finite_never_negative_and_grow_with_length(samples, depth):
    speed = Speed()
    for num_tokens, at, seconds, is_prompt in samples:
        if is_prompt:
            speed.observe_prefill(num_tokens, at, seconds)
        else:
            speed.observe_decode(at, seconds)
    for cost in (speed.prefill_s, speed.decode_s):
        costs = [cost(n, depth) for n in (0, 1, 10, 1000)]
        assert costs == sorted(costs)
        assert 0 <= costs[0] <= costs[-1] < float("inf")
    again = Speed()
    again.restore(json.loads(json.dumps(speed.to_dict())))
    assert again.to_dict() == speed.to_dict()


# --- kept in the home


def test_what_was_learned_is_kept_by_key(tmp_path):
    speed = taught(3000, 700)
    SpeedFile(tmp_path / "home", "this").save(speed)
    again, other = Speed(), Speed()
    SpeedFile(tmp_path / "home", "this").load_into(again)
    SpeedFile(tmp_path / "home", "that").load_into(other)
    assert again.to_dict() == speed.to_dict()
    assert again.is_known
    assert not other.is_known
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["speeds.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"this": 3}',
        b'{"this": {"prefill": [1, 2]}}',
        b'{"this": {"prefill": [0,1,1,1,1,1,1,1,1,1,NaN], "decode": [0,1,1,1,1,1,1,1,1,1,1], "context": [0,1,1,1,1,1,1,1,1,1,1]}}',
        b'{"this": {"prefill": [0,1,1,1,1,1,1,1,1,1,1], "decode": [0,1,1,1,1,1,1,1,1,1,-1], "context": [0,1,1,1,1,1,1,1,1,1,1]}}',
        b'{"this": {"prefill": [0,1,1,1,1,1,1,1,1,1,true], "decode": [], "context": []}}',
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_replaced(tmp_path, content):
    file = SpeedFile(tmp_path, "this")
    (tmp_path / "speeds.json").write_bytes(content)
    speed = Speed()
    file.load_into(speed)
    assert speed.to_dict() == Speed().to_dict()
    file.save(taught(700))
    file.load_into(speed)
    assert speed.to_dict() == taught(700).to_dict()


def test_a_home_that_cannot_be_written_or_read_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file" / "home", tmp_path / "folder"):
        (tmp_path / "folder" / "speeds.json").mkdir(parents=True, exist_ok=True)
        file, speed = SpeedFile(home, "this"), Speed()
        file.save(taught(700))
        file.load_into(speed)
        assert not speed.is_known
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["speeds.json"]


def test_the_file_is_bounded_and_forgets_what_was_used_first(tmp_path):
    for number in range(MAX_KEPT + 3):
        SpeedFile(tmp_path, f"model {number}").save(Speed())
        SpeedFile(tmp_path, "model 0").save(Speed())
    kept = list(json.loads((tmp_path / "speeds.json").read_text()))
    assert len(kept) == MAX_KEPT
    assert kept[-1] == "model 0"
    assert kept[0] == f"model {MAX_KEPT + 3 - (MAX_KEPT - 1)}"


def test_processes_and_threads_that_save_at_once_never_leave_a_damaged_file(tmp_path):
    code = (
        "import sys, pathlib\nfrom localrag.engine.speed import Speed, SpeedFile\n"
        "for _ in range(150): SpeedFile(pathlib.Path(sys.argv[1]), sys.argv[2]).save(Speed())\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"process {n}"]) for n in range(2)]
    threads = [
        threading.Thread(target=lambda n=n: [SpeedFile(tmp_path, f"thread {n}").save(Speed()) for _ in range(150)]) for n in range(2)
    ]
    for thread in threads:
        thread.start()
    num_read = 0
    while any(thread.is_alive() for thread in threads) or any(writer.poll() is None for writer in writers):
        if (tmp_path / "speeds.json").exists():
            for kept in json.loads((tmp_path / "speeds.json").read_text()).values():
                Speed().restore(kept)
            num_read += 1
    assert num_read > 0
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["speeds.json"]


def test_the_speed_of_a_machine_is_measured_once_and_kept(tmp_path):
    told, governor = [], ThreadGovernor()
    speed = machine_speed(tmp_path, governor, lambda: told.append(1))
    assert told == [1]
    assert speed.prefill_weights_per_s > 0
    assert 0 <= speed.prefill_slope <= 2e-3
    assert speed.decode_bytes_per_s > 0
    know_machine(tmp_path, prefill_weights_per_s=2e9, decode_bytes_per_s=3e9)
    kept = machine_speed(tmp_path, governor, lambda: told.append(2))
    assert (kept.prefill_s(100, 10**9), kept.decode_tokens_per_s(1e9)) == (50.0, 3.0)
    assert MachineSpeed(2e9, 1e-3, 3e9).prefill_s(1000, 10**9) == 750.0
    (tmp_path / "machine.json").write_text(json.dumps({machine_key(num_cores()): [0.0, 0.0, 3e9]}))  # damaged
    assert machine_speed(tmp_path, governor, lambda: told.append(3)).decode_bytes_per_s != 3e9
    assert told == [1, 3]
