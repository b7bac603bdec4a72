"""models optimize: made, measured, judged, and kept only if that was said."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from localrag.catalog import Catalog
from localrag.cli import main
from localrag.cli.models import optimize_command, toml_lines
from localrag.engine.gguf import read_header
from localrag.engine.optimize import Candidate, Kept, Limits, Measured, keep, trained_for, verdict
from localrag.engine.quality import Quality, Run
from localrag.settings import Settings
from localrag.types import ModelSpec
from tests.gguf_files import write_model, write_vocab

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A home, and a models.toml with a tiny model: its attention kernel is measured once."""
    folder = tmp_path_factory.mktemp("optimize")
    path = write_model(folder / "tiny.f32.gguf")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "models.toml").write_text(f'default_model = "tiny"\n[models.tiny]\npath = "{path}"\nsha256 = "{sha256}"\nn_ctx = 300\n')
    return folder


@pytest.fixture(autouse=True)
def one_core():
    """One thread here and in every child: two that wait for each other take long beside other tests."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.fixture
def optimize(place, monkeypatch, capsys):
    """Runs the command in this process, which has no terminal."""
    monkeypatch.setenv("LOCALRAG_HOME", str(place / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def _optimize(*args):
        code = main(["models", "optimize", *map(str, args), "--models", str(place / "models.toml")])
        return code, *capsys.readouterr()

    yield _optimize
    for path in kept_files(place):
        path.unlink()


def kept_files(place):
    """What lies in the folder of kept files, once the lock is left aside: nothing else may."""
    return [path for path in (place / "home" / "models" / "optimized").glob("*") if path.name != ".making.lock"]


ALL_PASS = ("--max-kl", 100, "--min-speedup", 0)


def test_without_a_terminal_nothing_is_kept_unless_yes(optimize, place):
    original = (place / "tiny.f32.gguf").read_bytes()
    code, out, err = optimize("--type", "q8_0", *ALL_PASS)
    assert (code, kept_files(place)) == (0, [])
    assert "Nothing was kept. Use --yes" in err
    assert "F32 (original)" in out
    assert "the fastest within the limits" in out
    code, out, err = optimize("--type", "Q8_0", "--type", "Q4_0", *ALL_PASS, "--yes")
    (path,) = kept_files(place)
    assert code == 0
    assert out.splitlines()[-1] == str(path)
    lines = err[err.index("[models.") :]
    table = tomllib.loads(lines)["models"]
    (name,) = table
    assert name in {"tiny-q8_0", "tiny-q4_0"}
    assert table[name] == {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "n_ctx": 300}
    (place / "other.toml").write_text(f'default_model = "{name}"\n' + lines)
    catalog = Catalog.load(Settings(home=place / "home", models_file=place / "other.toml"))
    assert catalog.open(catalog.model()) == path
    assert (place / "tiny.f32.gguf").read_bytes() == original


def test_json_says_all(optimize, place):
    code, out, _ = optimize("--type", "Q8_0", "--type", "Q4_0", *ALL_PASS, "--json", "--yes")
    found = json.loads(out)
    assert code == 0
    assert found["limits"] == {"max_kl": 100.0, "min_speedup": 0.0}
    assert found["original"]["type"] == "F32"
    assert found["original"]["quality"]["mean_kl"] == 0.0
    assert [each["type"] for each in found["candidates"]] == ["Q8_0", "Q4_0"]
    eight, four = found["candidates"]
    assert 0.0 < eight["quality"]["mean_kl"] < four["quality"]["mean_kl"]
    assert eight["quality"]["top1_agreement"] > four["quality"]["top1_agreement"]
    assert four["size_bytes"] < eight["size_bytes"] < found["original"]["size_bytes"]
    assert all(len(each["runs"]) == 3 and each["problem"] is None and each["decode_tokens_per_s"] > 0 for each in found["candidates"])
    assert found["best"] == max(found["candidates"], key=lambda each: each["speedup"])["type"]
    assert found["kept"]["path"] == str(kept_files(place)[0])
    assert tomllib.loads(found["kept"]["models_toml"])


def test_nothing_better_is_no_failure(optimize, place):
    code, out, err = optimize("--type", "Q8_0", "--min-speedup", 1000, "--max-kl", 0, "--yes")
    assert (code, kept_files(place)) == (0, [])
    assert "too far from the original" in out
    assert "not fast enough" in out
    assert "No candidate is better within these limits" in err


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("--type", "IQ1_S"), 2, "not a supported type"),
        (("--max-kl", "-1"), 2, "--max-kl"),
        (("nothing",), 4, "No model is named"),
        (("vocab.gguf",), 4, "no weights"),
    ],
)
def test_what_cannot_be_made_is_said(optimize, place, monkeypatch, args, code, word):
    write_vocab(place / "vocab.gguf")
    monkeypatch.chdir(place)
    found, out, err = optimize(*args)
    assert (found, out) == (code, "")
    assert word in err
    assert kept_files(place) == []


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of another kind")
@pytest.mark.parametrize(("reply", "num_kept"), [(b"y\n", 1), (b"\n", 0)])
def test_at_a_terminal_it_asks(optimize, place, reply, num_kept):
    near, far = os.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
    command = [sys.executable, "-m", "localrag", "models", "optimize", str(place / "tiny.f32.gguf"), "--type", "Q8_0", *map(str, ALL_PASS)]
    os.write(near, reply)
    with subprocess.Popen(command, cwd=place, env=env, stdin=far, stdout=subprocess.PIPE, stderr=far) as run:
        os.close(far)
        out, _ = run.communicate(timeout=60)
        os.close(near)
    assert run.returncode == 0
    assert b"F32 (original)" in out
    assert len(kept_files(place)) == num_kept


def measured(kind="Q8_0", *, prompt_s=1.0, answer_s=1.0, mean_kl=0.0, path=Path("m.gguf")):
    found = Quality(num_tokens=10, perplexity=9.0, mean_kl=mean_kl, p99_kl=mean_kl, top1_agreement=1.0)
    return Measured(file_type=kind, path=path, size_bytes=10, quality=found, runs=[Run(1024, prompt_s, 128, answer_s)])


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("gemma-3-4b-it-qat-q4_0.gguf", {}, "its name says so: gemma-3-4b-it-qat-q4_0.gguf"),
        ("m.gguf", {"general.name": "Gemma 3 It Qat"}, "its name says so: Gemma 3 It Qat"),
        ("LFM2.5-QAD-Q4_0.gguf", {}, "its name says so: LFM2.5-QAD-Q4_0.gguf"),
        ("m.gguf", {"general.file_type": 38}, "its experts are MXFP4, as it was trained"),
        ("qatar-7b.gguf", {"general.name": "Squat"}, None),
        ("tiny.gguf", {}, None),
    ],
)
def test_a_file_trained_for_its_quantization_is_known_by_its_name_or_type(tmp_path, file, changes, reason):
    assert trained_for(read_header(write_model(tmp_path / file, changes=changes))) == reason


def test_such_a_file_is_warned_about_before_anything_is_made(optimize, place):
    qat = write_model(place / "tiny-qat.gguf")
    code, _, err = optimize(qat, "--type", "Q8_0")
    assert code == 0
    assert err.index("Warning: ") < err.index("optimize ")
    assert json.loads(optimize(qat, "--type", "Q8_0", "--json")[1])["trained_for_quantization"] == "its name says so: tiny-qat.gguf"


def test_verdicts_by_hand():
    original = measured("F16")
    assert original.ask_s == pytest.approx(2.0)
    fast = verdict(original, "Q8_0", measured(prompt_s=0.5, answer_s=0.5), Limits())
    assert (fast.speedup, fast.problem) == (pytest.approx(2.0), None)
    slow = verdict(original, "Q8_0", measured(prompt_s=0.5, answer_s=1.4), Limits())
    assert slow.problem == "not fast enough: speedup 1.05, at least 1.1"
    far = verdict(original, "Q8_0", measured(prompt_s=0.5, answer_s=0.5, mean_kl=0.3), Limits(max_kl=0.2))
    assert far.problem == "too far from the original: KL 0.300, at most 0.2"
    assert verdict(original, "Q8_0", "it failed", Limits()) == Candidate(file_type="Q8_0", measured=None, speedup=None, problem="it failed")


def test_the_limits_in_the_help_are_the_limits():
    defaults = {option.name: option.default for option in optimize_command.params}
    assert Limits() == Limits(max_kl=defaults["max_kl"], min_speedup=defaults["min_speedup"])


def test_a_median_is_not_moved_by_one_run_that_was_disturbed():
    disturbed = measured()
    disturbed.runs += [Run(1024, 1.0, 128, 1.0), Run(1024, 50.0, 128, 50.0)]
    assert disturbed.ask_s == pytest.approx(2.0)


def test_a_kept_file_is_named_for_what_it_was_made_of(tmp_path):
    (tmp_path / "stage").mkdir()
    made = measured("Q4_0", path=tmp_path / "stage" / "x.gguf")
    made.path.write_bytes(b"weights")
    kept = keep(made, tmp_path, source=Path("a.Q4_1.gguf"), source_sha256="0123456789")
    assert kept == Kept(tmp_path / "a.Q4_1-01234567-Q4_0.gguf", hashlib.sha256(b"weights").hexdigest())
    assert kept.path.read_bytes() == b"weights"
    assert not made.path.exists()


def test_the_lines_for_models_toml_are_read_back(tmp_path):
    spec = ModelSpec(name="~/my models/Ünï 7B.gguf", kind="path", source="/x/Ünï 7B.gguf", chat_template=tmp_path / 'a "b".jinja')
    candidate = Candidate(file_type="Q8_0", measured=None, speedup=None, problem=None)
    lines = toml_lines(spec, candidate, Kept(tmp_path / "é\\.gguf", "ab" * 32))
    (table,) = tomllib.loads(lines)["models"].values()
    assert table == {"path": str(tmp_path / "é\\.gguf"), "sha256": "ab" * 32, "chat_template": str(tmp_path / 'a "b".jinja')}
