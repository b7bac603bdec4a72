"""localrag/process.py: a child that is asked, that dies, hangs or speaks nonsense; and what it cannot do any more."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from localrag import process
from localrag.process import Child, ChildExitError, ChildStartError

ROOT = Path(__file__).parents[1]
CHILD = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from localrag import process

def does(work):
    try:
        work()
    except BaseException as error:
        return type(error).__name__
    return "done"

def write():
    with open(sys.argv[2], "wb", buffering=0) as file:
        file.write(b"x")

work = (lambda: bytearray(8 << 20), lambda: bytearray(300 << 20), write)
before = [does(each) for each in work]
process.confine(100 << 20)
print(json.dumps([before, [does(each) for each in work], resource.getrlimit(resource.RLIMIT_NPROC)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is to be had cheaply on Linux only")
def test_what_is_confined_computes_and_does_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CHILD, str(ROOT), str(tmp_path / "file")], capture_output=True, text=True, timeout=60, check=True
    )
    before, after, processes = json.loads(done.stdout)
    assert before == ["done", "done", "done"]
    assert after == ["done", "MemoryError", "OSError"]
    assert processes == [0, 0]  # forking itself would tell nothing here: nobody keeps the superuser from it


# What `ask` has the child do is the "do" of the message.
WORKER = """
import os, sys, time
def main(job, parent):
    print("for nobody", flush=True)
    os.system("echo for nobody")
    parent.send({"ready": True})
    while (received := parent.receive()) is not None:
        message, data = received
        exec(message["do"])
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    return "a_worker"


@pytest.fixture
def child(worker):
    one = Child(worker, {"n": 7})
    yield one
    one.stop()


def has_ended(pid):
    return not psutil.pid_exists(pid)  # a child that was not waited for is still there


def test_a_question_and_its_answer(child):
    data = bytes(range(256)) * 4096
    reply = child.ask({"do": "parent.send({'n': job['n'], 'text': 'ü\\n'}, data[::-1])"}, data, limit_s=60, max_bytes=len(data))
    assert reply == ({"n": 7, "text": "ü\n"}, data[::-1])
    assert child.ask({"do": "parent.send({'m': message['m']})", "m": [1, None]}, limit_s=60) == ({"m": [1, None]}, b"")


def test_it_inherits_nothing(worker, monkeypatch):
    monkeypatch.setenv("LOCALRAG_SECRET", "x")
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    child = Child(worker, {}, variables={"GIVEN": "1"})
    child.ask({"do": "parent.send({})"}, limit_s=60)
    seen = psutil.Process(child.pid)
    environment, num_fds = seen.environ(), seen.num_fds()
    reply, _ = child.ask({"do": "parent.send({'session': os.getsid(0), 'site': 'site' in sys.modules})"}, limit_s=60)
    child.stop()
    os.close(read_end)
    os.close(write_end)
    assert "LOCALRAG_SECRET" not in environment
    assert environment["GIVEN"] == "1"
    assert num_fds == 5  # the standard ones, and the pipes that messages take
    assert reply == {"session": child.pid, "site": False}


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals there")
@pytest.mark.parametrize(
    ("do", "code", "name"), [("os._exit(3)", 3, ""), ("os.abort()", -6, "SIGABRT"), ("os.kill(os.getpid(), 40)", -40, "SIG40")]
)
def test_its_end_is_an_error(child, do, code, name):
    with pytest.raises(ChildExitError) as caught:
        child.ask({"do": do}, limit_s=60)
    assert (caught.value.code, caught.value.expired, process.signal_name(code)) == (code, False, name)
    assert not child.is_running
    with pytest.raises(ChildExitError):
        child.ask({"do": "pass"}, limit_s=60)


def test_what_takes_too_long_is_killed(child):
    child.ask({"do": "parent.send({})"}, limit_s=60)  # a later deadline that is set before
    with pytest.raises(ChildExitError) as caught:
        child.ask({"do": "time.sleep(60)"}, limit_s=0.3)
    assert caught.value.expired
    assert has_ended(child.pid)


def test_time_between_questions_does_not_count(child):
    for _ in range(3):
        child.ask({"do": "parent.send({})"}, limit_s=0.5)
        threading.Event().wait(0.6)
    assert child.is_running


@pytest.mark.parametrize(
    "raw",
    ["no json", "[1]", "3", "[" * 100_000, "9" * 10_000, '{"num_bytes": 6}', '{"num_bytes": -1}', '{"num_bytes": "1"}', "\\xff"],
)
def test_nonsense_is_a_value_error(child, raw):
    with pytest.raises(ValueError):
        child.ask({"do": f"parent.replies.write(b'{raw}' + b'\\n123456'); parent.replies.flush()"}, limit_s=60, max_bytes=5)
    assert has_ended(child.pid)


def test_an_interruption_ends_it(child, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    child.ask({"do": "parent.send({})"}, limit_s=60)
    monkeypatch.setattr(process, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        child.ask({"do": "parent.send({})"}, limit_s=60)
    assert has_ended(child.pid)


def test_one_that_does_not_start(worker, monkeypatch):
    with pytest.raises(ChildStartError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        Child("no_such_module", {}).ask({}, limit_s=60)
    monkeypatch.setattr(process, "START", "import sys; sys.exit(1)")
    with pytest.raises(ChildStartError, match="it ended"):
        Child(worker, {}).ask({}, limit_s=60)
    monkeypatch.setattr(process, "START", "import time; time.sleep(60)")
    monkeypatch.setattr(process, "START_LIMIT_S", 0.2)
    with pytest.raises(ChildStartError, match=r"it did not respond within 0\.2 s"):
        Child(worker, {}).ask({}, limit_s=60)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ChildStartError, match="No such file"):
        Child(worker, {})


def test_it_ends_with_its_object_and_leaks_nothing(worker):
    here = psutil.Process()
    before = here.num_fds(), here.num_threads()
    pids = []
    for _ in range(3):
        child = Child(worker, {})
        child.ask({"do": "parent.send({})"}, limit_s=60)
        pids.append(child.pid)
        del child
    gc.collect()
    assert all(map(has_ended, pids))
    for _ in range(100):
        if (here.num_fds(), here.num_threads()) == before:
            return
        threading.Event().wait(0.05)
    pytest.fail(f"{here.num_fds()} descriptors and {here.num_threads()} threads, where {before} were")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals there")
def test_it_ends_with_its_parent(worker):
    script = (
        "import os, sys\nfrom localrag.process import Child\n"
        f"c = Child('{worker}', {{}})\nc.ask({{'do': 'parent.send({{}})'}}, limit_s=60)\n"
        "print(c.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, env=env)
    assert done.returncode == -signal.SIGKILL
    for _ in range(200):
        if has_ended(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == psutil.STATUS_ZOMBIE:
            return
        threading.Event().wait(0.05)
    pytest.fail("the child lives on")


def test_all_output_of_one_that_is_listened_to(worker):
    child = Child(worker, {}, with_output=True)
    with child.within(60):
        child.tell({"do": "print('on its own', flush=True); os._exit(0)"})
        lines = [line.strip() for line in child.lines(1000)]
        assert child.exit_code() == 0
    assert lines == [b"for nobody", b"for nobody", b'{"ready":true}', b"on its own"]
    child.stop()
