"""localrag/process.py, by what a child process cannot do any more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
