"""What the server tells the process that holds the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrag.server.engine_process import Wanted
from localrag.server.engine_worker import settings_of
from localrag.settings import Settings


@pytest.mark.parametrize(
    "settings",
    [Settings(home=Path("/home")), Settings(home=Path("/home"), models_file=Path("models.toml"), prefix_bytes=0, learn="off")],
    ids=["as they are", "all others"],
)
def test_the_engine_has_the_settings_of_its_server(settings):
    assert settings_of(json.loads(json.dumps(Wanted(settings=settings).to_dict()))) == settings
