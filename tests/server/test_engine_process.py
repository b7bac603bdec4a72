"""The process that holds the engine, as the server has it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from localrag.server.engine_process import EngineProcess, Wanted
from localrag.server.engine_worker import settings_of
from localrag.server.problems import Problem
from localrag.settings import Settings


@pytest.mark.parametrize(
    "settings",
    [Settings(home=Path("/home")), Settings(home=Path("/home"), models_file=Path("models.toml"), prefix_bytes=0, learn="off")],
    ids=["as they are", "all others"],
)
def test_the_engine_has_the_settings_of_its_server(settings):
    assert settings_of(json.loads(json.dumps(Wanted(settings=settings).to_dict()))) == settings


def test_nobody_waits_for_a_model_longer_than_a_request_may_take():
    async def wait() -> None:
        await EngineProcess(Wanted(settings=Settings(home=Path("/home"))), max_seconds=0.05).opened()  # it was not started

    with pytest.raises(Problem, match="no time") as raised:
        asyncio.run(wait())
    assert (raised.value.status, raised.value.headers) == (503, {"Retry-After": "5"})
