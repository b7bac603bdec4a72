"""Several models in one run: open at once where they fit, else in turn, and the plan says before what happens then."""

import json
import random
from dataclasses import replace

import psutil
import pytest

from localrag.engine.gguf import read_header
from localrag.engine.memory import RESERVE_BYTES, Situation, plan
from localrag.errors import EngineError, ModelNotFoundError
from localrag.session.model_pool import ModelPool, Need
from localrag.settings import Settings
from localrag.types import SamplingParams
from tests.gguf_files import write_model
from tests.homes import know_attention

MIB = 1024 * 1024
CELLS = 256
WORDS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A home where attention is known, so that it is not measured, and three models that no template's process slows down."""
    home = tmp_path_factory.mktemp("home")
    for seed, name in enumerate(("a", "b", "c")):
        write_model(home / f"{name}.gguf", seed=seed, changes={"tokenizer.chat_template": None})
    tables = "".join(f'[models.{name}]\npath = "{home}/{name}.gguf"\n' for name in ("a", "b", "c"))
    (home / "models.toml").write_text(f'default_model = "a"\n{tables}')
    know_attention(home)
    return Settings(home=home, models_file=home / "models.toml")


def needs(*names, num_cells=CELLS):
    return {name: Need(model=name, num_cells=num_cells) for name in names}


def room_for(settings, num_models):
    """A machine whose free memory holds so many of the models, and half of another."""
    with ModelPool(needs("a"), settings=settings) as models, models.use("a"):
        needed = models.plan().needed_bytes
    return Situation(available_bytes=RESERVE_BYTES + needed * num_models + needed // 2)


def answer(engine):
    return engine.generate(engine.tokenizer.encode("the thin"), WORDS).completion_ids


def test_the_echo_takes_nothing_and_is_one_for_all_roles(settings):
    with ModelPool({"members": Need(model="echo", num_sequences=3), "judge": Need(model="echo")}, settings=settings) as models:
        planned = models.plan(["members", "judge", "members"])
        assert (planned.together, planned.loads, planned.load_s, planned.needed_bytes) == (True, ("echo",), 0.0, 0)
        with models.use("members") as members, models.use("judge") as judge:
            assert members is judge
            assert members.generate(members.tokenizer.encode("hello"), SamplingParams(max_tokens=50)).text == "You asked: hello"
        assert models.plan().loads == ()
    assert [load.model for load in models.loads] == ["echo"]


def test_one_file_under_two_names_is_one_engine_with_the_context_of_both(settings, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(settings.home / "a.gguf")
    roles = {
        "default": Need(num_cells=300, num_sequences=2),
        "named": Need(model="a", num_cells=500),
        "linked": Need(model=str(link), num_sequences=4),
    }
    with ModelPool(roles, settings=settings) as models:
        (only,) = models.plan().models
        assert (only.name, only.roles, only.num_cells, only.num_sequences) == ("a", ("default", "named", "linked"), 512, 4)
        with models.use("linked") as linked, models.use("default") as default, models.use("named") as named:
            assert linked is default is named
            load_s = named.load_s
            named.reserve(512, num_sequences=4)
            assert named.load_s == load_s  # it is there
            assert len([named.add([1, 2, 3], WORDS) for _ in range(4)]) == 4
            while not named.is_idle:
                named.step()
    assert len(models.loads) == 1


def test_a_window_is_no_larger_than_what_the_model_was_trained_for(settings):
    roles = {"members": Need(num_cells=1 << 40, num_sequences=3), "judge": Need(model="b", num_cells=1 << 40)}
    with ModelPool(roles, settings=settings) as models:
        assert [each.num_cells for each in models.plan().models] == [3 * 512, 512]


def test_models_that_fit_stay_open(settings):
    with ModelPool(needs("a", "b", "c"), settings=settings) as models:
        planned = models.plan(["a", "b", "c", "a", "b", "c"])
        assert planned.together
        assert (planned.loads, planned.num_reloads) == (("a", "b", "c"), 0)
        assert planned.load_bytes == sum((settings.home / f"{name}.gguf").stat().st_size for name in "abc")
        engines = []
        for role in "abcabc":
            with models.use(role) as engine:
                engines.append(engine)
        assert engines[:3] == engines[3:]
        assert models.open_models == ["a", "b", "c"]
        assert len(models.loads) == 3
    assert models.open_models == []


@pytest.mark.parametrize("num_fitting", [1, 2])
def test_what_the_plan_says_is_what_happens(settings, num_fitting):
    """In any order of use the same models are loaded, and never more of them are open than fit; each answers as it did before."""
    rng, expected = random.Random(num_fitting), {}
    order = [rng.choice("abc") for _ in range(14)]
    with ModelPool(needs("a", "b", "c"), settings=settings, situation=room_for(settings, num_fitting)) as models:
        planned = models.plan(order)
        assert not planned.together
        assert 0 < planned.num_reloads == len(planned.loads) - 3
        for role in order:
            with models.use(role) as engine:
                assert expected.setdefault(role, ids := answer(engine)) == ids
            assert models.open_models[-1] == role
            assert len(models.open_models) <= num_fitting
        assert tuple(load.model for load in models.loads) == planned.loads
        closed = [name for load in models.loads for name in load.closed]
        assert len(closed) == len(planned.loads) - len(models.open_models)
    assert len({tuple(ids) for ids in expected.values()}) == 3


def test_the_one_used_longest_ago_goes_first(settings):
    with ModelPool(needs("a", "b", "c"), settings=settings, situation=room_for(settings, 2)) as models:
        for role in "abac":
            with models.use(role):
                pass
        assert models.open_models == ["a", "c"]
        assert models.loads[-1].closed == ("b",)


def test_a_model_in_use_is_never_closed(settings):
    with ModelPool(needs("a", "b", "c"), settings=settings, situation=room_for(settings, 2)) as models:
        with models.use("a") as first, models.use("b"):
            with pytest.raises(EngineError, match=r"c.gguf .* does not fit") as refused, models.use("c"):
                pass
            assert refused.value.numbers["free_bytes"] < refused.value.numbers["needed_bytes"]
            assert models.open_models == ["a", "b"]
            assert len(answer(first)) == 4
        running = first.add([1, 2, 3], WORDS)
        first.step()
        with models.use("c"):
            assert models.open_models == ["a", "c"]
            with pytest.raises(EngineError), models.use("b"):
                pass
        while not first.is_idle:
            first.step()
        assert len(running.completion().completion_ids) == 4
        with models.use("b"), models.use("c"):
            assert models.open_models == ["b", "c"]


def test_a_model_that_does_not_fit_alone_is_refused_before_anything_is_loaded(settings, tmp_path):
    wide = write_model(tmp_path / "wide.gguf", changes={"llama.context_length": 1 << 20, "tokenizer.chat_template": None})
    roles = needs("a") | {"wide": Need(model=str(wide))}
    with ModelPool(roles, settings=settings, situation=Situation(available_bytes=RESERVE_BYTES + 64 * MIB)) as models:
        with pytest.raises(EngineError, match=r"wide.gguf with a window of 1048576 tokens does not fit") as refused:
            models.plan()
        near = refused.value.numbers["nearest_n_ctx"]
        assert 256 <= near < 1 << 20
        with models.use("a"):
            pass
        with pytest.raises(EngineError), models.use("wide"):
            pass
        assert models.open_models == ["a"]
        assert len(models.loads) == 1
    with ModelPool({"wide": Need(model=str(wide), num_cells=near)}, settings=settings, situation=models._situation) as models:
        assert models.plan().together


def test_a_context_that_the_machine_refuses_leaves_nothing_open(settings, tmp_path):
    wide = write_model(tmp_path / "wide.gguf", changes={"llama.context_length": 1 << 27, "tokenizer.chat_template": None})
    roles = needs("a") | {"wide": Need(model=str(wide))}
    with ModelPool(roles, settings=settings, situation=Situation(available_bytes=1 << 60)) as models:
        with pytest.raises(EngineError, match="does not fit"), models.use("wide"):
            pass
        assert (models.open_models, models.loads) == ([], [])
        with models.use("a") as engine:
            assert len(answer(engine)) == 4


def test_closing_gives_the_memory_back(settings, tmp_path):
    large = {"llama.context_length": 1 << 19, "tokenizer.chat_template": None}
    roles = {name: Need(model=str(write_model(tmp_path / f"{name}.gguf", seed=seed, changes=large))) for seed, name in enumerate("xy")}
    process = psutil.Process()
    kv_bytes = plan(read_header(tmp_path / "x.gguf"), 1 << 19, situation=Situation(available_bytes=1 << 50)).kv_bytes
    assert kv_bytes == 64 * MIB  # smaller ones may stay on the heap, for the next
    held = []
    for _ in range(2):
        with ModelPool(roles, settings=settings) as models, models.use("x"), models.use("y"):
            held.append(process.memory_info().rss)
        before = process.memory_info().rss
        assert held[-1] - before > 1.5 * kv_bytes
    assert held[-1] - held[0] < 0.25 * kv_bytes  # again and again
    most = max(models.plan().models, key=lambda each: each.plan.needed).plan.needed
    with ModelPool(roles, settings=settings, situation=Situation(available_bytes=RESERVE_BYTES + most)) as models:
        for role in "xyxyx":
            with models.use(role):
                assert process.memory_info().rss < held[-1] - 0.9 * kv_bytes


def test_open_models_do_not_count_twice(settings):
    """Free memory that is measured while models are open is what would be free without them, and never more than before they were.

    Other processes take and free memory meanwhile, so it is tried until one try was undisturbed.
    """

    def fits_before() -> bool:
        with ModelPool(needs("a", "b"), settings=settings) as models:
            before = models.plan().available_bytes
            with models.use("a"), models.use("b"):
                during = models.plan().available_bytes
            assert during == pytest.approx(before, rel=0.3)
            assert models.plan(["a", "b"]).loads == ()
        return during <= before

    assert any(fits_before() for _ in range(20))


def test_how_long_a_load_takes_is_kept(settings, tmp_path):
    fresh = replace(settings, home=tmp_path)
    (tmp_path / "attention.json").write_text((settings.home / "attention.json").read_text())
    with ModelPool(needs("a", "b"), settings=fresh) as models:
        assert models.plan().load_s is None
        with models.use("a"):
            pass
        assert models.plan(["a"]).load_s == 0.0
        assert models.plan(["b"]).load_s is None
    with ModelPool(needs("a"), settings=fresh) as models:
        planned = models.plan()
        assert 0.0 < planned.load_s == planned.models[0].load_s < 60.0
        assert json.loads(json.dumps(planned.to_dict()))["models"][0]["load_s"] == planned.load_s
    (key,) = json.loads((tmp_path / "loads.json").read_text())
    assert key.startswith("a.gguf")
    for damaged in ("[", "[]", "{}", '{"%s": true}', '{"%s": -1}', '{"%s": "x"}'):
        (tmp_path / "loads.json").write_text(damaged.replace("%s", key))
        with ModelPool(needs("a"), settings=fresh) as models:
            assert models.plan().load_s is None


@pytest.mark.parametrize("name", ["nobody", "/nowhere/model.gguf"])
def test_a_model_that_is_not_here_is_said_at_once(settings, name):
    with pytest.raises(ModelNotFoundError):
        ModelPool(needs("a", name), settings=settings)


def test_the_room_of_an_embedder_is_left(settings):
    situation = room_for(settings, 2)
    with ModelPool(needs("a", "b"), settings=settings, situation=situation) as models:
        assert models.plan().together
    situation = replace(situation, embedder_bytes=models.plan().needed_bytes // 2)
    with ModelPool(needs("a", "b"), settings=settings, situation=situation) as models:
        assert not models.plan().together
