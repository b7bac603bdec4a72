"""Threads: a core each, and none on a core that others keep busy."""

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrag.engine import threads
from localrag.engine.threads import Reading, ThreadGovernor, choose


@pytest.mark.parametrize(
    ("cores", "busy", "expected"),
    [(2, 0.0, 2), (2, 0.4, 2), (2, 0.6, 1), (2, 1.0, 1), (2, 2.0, 1), (8, 1.2, 7), (8, 3.0, 5), (8, 50.0, 1), (1, 1.0, 1), (4, -1.0, 4)],
)
def test_one_less_for_each_busy_core_and_never_none(cores, busy, expected):
    assert choose(cores, busy) == expected


@given(st.integers(1, 256), st.floats(0, 1000), st.floats(0, 1000))
def test_more_work_of_others_never_gives_more_threads(cores, busy, more):
    assert cores >= choose(cores, busy) >= choose(cores, busy + more) >= 1


def test_the_time_of_this_process_is_not_that_of_others():
    before = Reading(at_s=10.0, all_s=100.0, own_s=5.0)
    assert before.busy_cores_until(Reading(at_s=12.0, all_s=104.0, own_s=9.0)) == pytest.approx(0.0)
    assert before.busy_cores_until(Reading(at_s=12.0, all_s=104.0, own_s=6.0)) == pytest.approx(1.5)
    assert before.busy_cores_until(Reading(at_s=12.0, all_s=100.0, own_s=6.0)) == 0.0  # ticks are coarse: never less than none


def test_too_short_a_time_tells_nothing():
    before = Reading(at_s=10.0, all_s=100.0, own_s=5.0)
    assert before.busy_cores_until(Reading(at_s=10.049, all_s=101.0, own_s=5.0)) is None


def test_the_governor_follows_and_recovers():
    governor = ThreadGovernor(4)
    start = governor._before
    assert governor.num_threads == 4  # before anything was measured
    later = Reading(start.at_s + 1.0, start.all_s + 2.0, start.own_s)
    assert governor.measure(later) == governor.num_threads == 2
    assert governor.measure(Reading(later.at_s + 0.01, later.all_s + 4.0, later.own_s)) == 2  # too short
    assert governor.measure(Reading(later.at_s + 1.0, later.all_s, later.own_s)) == 4


BUSY = "import time; end = time.perf_counter() + {}\nwhile time.perf_counter() < end: pass"


def measured_beside(code):
    governor = ThreadGovernor(64)
    started = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
    assert started.returncode == 0
    governor.measure()
    time.sleep(0.4)
    governor.measure()
    return governor


def test_a_busy_neighbour_is_seen_on_this_machine():
    leave_one = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BUSY.format(1.0)!r}])"
    governor = measured_beside(leave_one)  # its parent has ended, so it is nobody's child here
    assert governor.busy_cores > 0.2  # whatever else runs here
    assert governor.num_threads < 65 - governor.busy_cores


SPEND = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"


def test_what_this_process_started_is_its_own():
    before = Reading.now()
    with subprocess.Popen([sys.executable, "-c", SPEND], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()  # however busy the machine is, by now it has had its 0.3 s
        running = Reading.now()
        child.communicate(b"\n")
    ended = Reading.now()
    assert running.own_s - before.own_s > 0.2
    assert ended.own_s >= running.own_s - 0.03  # ticks are rounded


def test_a_reading_waits_for_nothing():
    took = []
    for _ in range(20):
        started = time.perf_counter()
        Reading.now()
        took.append(time.perf_counter() - started)
    assert min(took) < 0.001


def test_cores_are_those_that_may_be_used():
    assert 1 <= threads.num_cores() <= len(threads.allowed_cpus())


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("", None), ("1 0", None), ("a b", None)],
)
def test_a_containers_share_of_processor_time(tmp_path, text, cores):
    (tmp_path / "cpu.max").write_text(text)
    assert threads._quota_cores(tmp_path / "cpu.max") == cores
    assert threads._quota_cores(tmp_path / "missing") is None
