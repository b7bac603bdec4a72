"""Two real models in one run: the default one under two paths, together and in turn."""

import os
import shutil
from dataclasses import replace

import psutil
import pytest

from localrag.engine.memory import RESERVE_BYTES, Situation
from localrag.session.model_pool import ModelPool, Need
from localrag.settings import Settings
from localrag.types import SamplingParams

pytestmark = pytest.mark.model

ORDER = ("members", "judge", "members", "judge")
CELLS = 4096


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A home of its own: attention is measured once."""
    return replace(Settings.from_env({}), home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def needs(model_path, tmp_path_factory):
    """The same weights in two files, as two models."""
    paths = [tmp_path_factory.mktemp("models") / f"{name}.gguf" for name in ("members", "judge")]
    for path in paths:
        try:
            os.link(model_path, path)
        except OSError:  # another file system
            shutil.copyfile(model_path, path)
    members, judge = map(str, paths)
    return {"members": Need(model=members, num_cells=CELLS, num_sequences=3), "judge": Need(model=judge, num_cells=CELLS)}


def answers(models):
    """What each use in ORDER answers, and the most memory that the process held after one (bytes)."""
    said, most = [], 0
    for role in ORDER:
        with models.use(role) as engine:
            ids = engine.tokenizer.encode("Glass for an oven door is")
            said.append(engine.generate(ids, SamplingParams(max_tokens=8)).text)
            most = max(most, psutil.Process().memory_info().rss)
    return said, most


def test_together_if_they_fit_and_else_in_turn(settings, needs):
    with ModelPool(needs, settings=settings) as models:
        planned = models.plan(ORDER)
        assert planned.together
        assert planned.num_reloads == 0
        before = psutil.Process().memory_info().rss
        said, most_together = answers(models)
        assert len(models.loads) == 2
        assert len(set(said)) == 1  # the same weights
        kv_bytes = models.plan().models[0].plan.kv_bytes
        needed = models.plan().needed_bytes
    assert psutil.Process().memory_info().rss < most_together - 2 * kv_bytes

    situation = Situation(available_bytes=RESERVE_BYTES + needed - 1)
    with ModelPool(needs, settings=settings, situation=situation) as models:
        planned = models.plan(ORDER)
        assert not planned.together
        assert (len(planned.loads), planned.num_reloads) == (4, 2)
        assert 0 < planned.load_s < 60
        in_turn, most_in_turn = answers(models)
        assert tuple(load.model for load in models.loads) == planned.loads
        assert [len(load.closed) for load in models.loads] == [0, 1, 1, 1]
    assert in_turn == said
    assert most_in_turn < most_together - kv_bytes
    assert before < most_in_turn
