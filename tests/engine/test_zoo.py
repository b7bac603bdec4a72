"""What localrag promises holds for every architecture of the zoo."""

import json

import pytest
from click.testing import CliRunner

from localrag.cli import cli
from localrag.engine.gguf import read_header
from localrag.engine.loading import open_model
from localrag.engine.sandbox import ensure_safe
from localrag.errors import ModelFileError
from tests import zoo_checks
from tests.zoo import KINDS, write_kind


@pytest.fixture(scope="module", autouse=True)
def one_core():
    with zoo_checks.one_core():
        yield


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    return write_kind(tmp_path_factory.mktemp("zoo"), request.param)


@pytest.fixture(scope="module")
def zoo_home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def engine(path):
    with open_model(path, name=path.stem) as opened:
        yield opened


def test_it_loads(path, zoo_home):
    zoo_checks.loads(path, zoo_home)


def test_its_memory_is_predicted(path):
    zoo_checks.memory_is_predicted(path)


def test_what_is_planned_is_evaluated_and_the_same_seed_gives_the_same_text(engine):
    zoo_checks.is_exact(engine)


def test_prefixes_in_memory(engine):
    zoo_checks.prefix_in_memory(engine)


def test_prefixes_on_disk(engine, tmp_path):
    zoo_checks.prefix_on_disk(engine, tmp_path)


def test_batches_and_councils(engine):
    zoo_checks.batches(engine)


def test_cancellation(engine):
    zoo_checks.cancellation(engine)


def test_a_context_that_grows(engine):
    zoo_checks.growth(engine)


def test_prompts_that_take_turns(engine):
    zoo_checks.swapping(engine)


def test_follow_ups(engine):
    zoo_checks.follow_ups(engine)


def test_a_bert_like_embedder(tmp_path, zoo_home):
    zoo_checks.embedder(tmp_path, zoo_home)


@pytest.mark.parametrize(
    ("arch", "changes", "tensors_follow"),
    [
        ("gemma4", {"attention.sliding_window_pattern": [True, True, False, True, True, False]}, True),  # aborts when a context is made
        ("gpt-oss", {"expert_used_count": 9}, False),
        ("qwen3moe", {"expert_count": 0}, False),
    ],
)
def test_what_aborts_llama_cpp_is_found_by_the_trial(tmp_path, arch, changes, tensors_follow):
    path = write_kind(tmp_path, arch, changes=changes, tensors_follow=tensors_follow)
    read_header(path)
    with pytest.raises(ModelFileError, match="not safe to load") as caught:
        ensure_safe(path, home=None)
    assert caught.value.numbers["signal"] == "SIGABRT"


@pytest.mark.parametrize(("arch", "reason"), [("lfm2", "recurrent layers"), ("gemma3", "sliding window"), ("llama", "at any token")])
def test_where_a_prompt_can_resume_is_told(tmp_path, home, arch, reason):
    done = CliRunner().invoke(cli, ["models", "show", str(write_kind(tmp_path, arch)), "--json"])
    assert reason in json.loads(done.stdout)["prefix_reuse"]
