"""Fixtures for the tests of the engine."""

from collections.abc import Iterator

import pytest

from localrag.engine.template import JinjaChatTemplate
from tests.chat_templates import FOLDER, NOW, PATHS


@pytest.fixture(scope="module")
def twelve() -> Iterator[dict[str, JinjaChatTemplate]]:
    if len(PATHS) != 12:
        pytest.skip(f"needs the twelve templates of {FOLDER}, which are not here")
    templates = {
        path.stem: JinjaChatTemplate(path.read_text("utf-8"), bos_text="<s>", eos_text="</s>", time_limit_s=10, clock=lambda: NOW)
        for path in PATHS
    }
    yield templates
    for template in templates.values():
        template.close()
