"""The process that holds the engine, as the server has it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from localrag.server.engine_process import EngineOptions, EngineProcess
from localrag.server.engine_worker import settings_of
from localrag.server.errors import Problem
from localrag.settings import Settings


@pytest.mark.parametrize(
    "settings",
    [Settings(home=Path("/home")), Settings(home=Path("/home"), models_file=Path("models.toml"), prefix_bytes=0, learn="off")],
    ids=["as they are", "all others"],
)
def test_the_engine_has_the_settings_of_its_server(settings):
    assert settings_of(json.loads(json.dumps(EngineOptions(settings=settings).to_dict()))) == settings


def test_nobody_waits_for_a_model_longer_than_a_request_may_take():
    async def wait() -> None:
        await EngineProcess(EngineOptions(settings=Settings(home=Path("/home"))), max_seconds=0.05).opened()  # it was not started

    with pytest.raises(Problem, match="timed out while waiting") as raised:
        asyncio.run(wait())
    assert (raised.value.status, raised.value.headers) == (503, {"Retry-After": "5"})


SHORT_OF_FILES = """
import asyncio, os, resource, sys
from pathlib import Path
from localrag.server.engine_process import EngineOptions, EngineProcess
from localrag.settings import Settings

async def main():
    engine = EngineProcess(EngineOptions(settings=Settings(home=Path(sys.argv[1])), model="echo", n_ctx=1024, keep=False))
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), most))
    engine.start()
    await asyncio.sleep(0.1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))
    await engine.opened()
    print(engine.about["model"], engine.num_starts)
    await engine.close()

asyncio.run(main())
"""


def test_an_engine_that_cannot_be_started_for_now_is_started_later(tmp_path):
    done = subprocess.run([sys.executable, "-c", SHORT_OF_FILES, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("echo 1\n", 0), done.stderr
    assert "cannot be started (Too many open files)" in done.stderr
