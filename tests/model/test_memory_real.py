"""The memory plan of the default model beside the peak of a process that runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(("window", "kernel"), [(2048, "plain"), (4096, "flash")])
def test_the_predicted_peak_is_the_one_that_is_measured(model_path, window, kernel):
    command = [sys.executable, "-m", "benchmarks.memory", str(model_path), "--one", str(window), kernel]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.10)
