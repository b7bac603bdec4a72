"""doctor: whatever is broken becomes a line, and the rest is told."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from localrag.cli.doctor import all_facts, attention_facts, collect, doctor_command, gpu_hints, home_facts, show, speed_facts
from localrag.engine.speed import Speed, SpeedFile
from localrag.settings import Settings
from tests.gguf_files import write_model

ROOT = Path(__file__).parents[2]
RUN = "from localrag.cli.doctor import doctor_command; doctor_command()"


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def doctor(home, tmp_path, monkeypatch, capsys):
    """Runs doctor where no models.toml lies."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def _doctor(*args):
        code = doctor_command.main([str(arg) for arg in args], standalone_mode=False)
        return Done(code or 0, *capsys.readouterr())

    return _doctor


@pytest.fixture
def apart(home, tmp_path):
    """Runs doctor in a process of its own; `first` is a folder that Python imports from first."""

    def _apart(*args, first=None):
        env = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in (first, ROOT) if path is not None)}
        done = subprocess.run(
            [sys.executable, "-c", RUN, *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return _apart


def facts(done, code=0):
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def models_toml(tmp_path):
    def _write(**paths):
        file = tmp_path / "doctor.toml"
        tables = (f'[models.{name}]\npath = "{path}"\n' for name, path in paths.items())
        file.write_text(f'default_model = "{next(iter(paths))}"\n' + "".join(tables))
        return file

    return _write


def test_a_sound_machine(doctor, home, tmp_path, models_toml):
    home.mkdir()
    (home / "attention.json").write_text('{"for": "here", "flash_attention": false, "flash_s": 0.4, "plain_s": 0.2}')
    (home / "models").mkdir()
    (home / "models" / "file").write_bytes(bytes(1000))
    (home / "embedders").mkdir()
    (home / "embedders" / "copy.gguf").write_bytes(bytes(500))
    file = models_toml(tiny=write_model(tmp_path / "tiny.gguf"))
    found = facts(doctor("--models", file, "--json"))
    assert set(found) == {"machine", "llama_cpp", "gpus", "attention", "speeds", "home", "catalogue"}
    assert all("error" not in part for part in found.values())
    machine = found["machine"]
    assert 1 <= machine["num_threads"] <= machine["usable_cores"] <= machine["allowed_cpus"]
    assert 0 < machine["available_bytes"] <= machine["memory_bytes"]
    assert found["attention"]["kernel"] == "plain"
    assert found["home"]["parts"]["models"] == {"bytes": 1000}
    assert found["home"]["parts"]["kb"] == {"bytes": 0}
    assert found["home"]["parts"]["embedders"] == {"bytes": 500}
    tiny = found["catalogue"]["models"]["tiny"]
    assert (tiny["n_ctx_train"], tiny["n_ctx"], tiny["nearest_n_ctx"], tiny["plan"]["fits"]) == (512, 512, 512, True)
    shown = doctor("--models", file)
    assert shown.returncode == 0
    assert all(word in shown.stdout for word in ("tiny", "fits", "llama-cpp-python", "plain (flash 0.4 s", "memory", str(home)))


def test_a_window_that_does_not_fit_names_the_nearest(doctor, tmp_path, models_toml):
    file = models_toml(wide=write_model(tmp_path / "wide.gguf", changes={"llama.context_length": 1 << 27}))
    wide = facts(doctor("--models", file, "--json"))["catalogue"]["models"]["wide"]
    assert wide["plan"]["fits"] is False
    assert 0 < wide["nearest_n_ctx"] < 1 << 27
    assert "does not fit; a window of" in doctor("--models", file).stdout


def test_two_models_are_told_to_fit_at_once_or_to_take_turns(doctor, tmp_path, models_toml):
    tiny, other = (write_model(tmp_path / f"{name}.gguf") for name in ("tiny", "other"))
    assert facts(doctor("--models", models_toml(tiny=tiny), "--json"))["catalogue"]["two_models"] == {}
    more = write_model(tmp_path / "more.gguf", changes={"general.description": "x" * 10_000})
    file = models_toml(tiny=tiny, other=other, more=more, absent=tmp_path / "absent.gguf")
    catalogue = facts(doctor("--models", file, "--json"))["catalogue"]
    found = catalogue["two_models"]
    assert (found["models"], found["together"]) == (["tiny", "more"], True)
    assert found["needed_bytes"] == sum(catalogue["models"][name]["plan"]["needed"] for name in ("tiny", "more"))
    assert "tiny and more fit at once (" in doctor("--models", file).stdout
    wide = write_model(tmp_path / "wide.gguf", changes={"llama.context_length": 1 << 27})
    file = models_toml(wide=wide, tiny=tiny)
    assert facts(doctor("--models", file, "--json"))["catalogue"]["two_models"]["together"] is False
    assert "wide and tiny do not fit at once" in doctor("--models", file).stdout


def test_each_broken_model_is_a_line_and_the_others_are_told(doctor, tmp_path, models_toml):
    sound = write_model(tmp_path / "sound.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(sound.read_bytes()[:200])
    file = models_toml(sound=sound, broken=broken, absent=tmp_path / "absent.gguf")
    models = facts(doctor("--models", file, "--json"))["catalogue"]["models"]
    assert models["sound"]["plan"]["fits"]
    assert "broken.gguf" in models["broken"]["error"]
    assert "There is no file" in models["absent"]["error"]
    shown = doctor("--models", file).stdout
    assert all(name in shown for name in ("sound", "broken.gguf", "There is no file"))


def test_rerankers_are_there_or_named_with_what_they_lack(doctor, tmp_path):
    for name in ("whole", "half"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / "whole" / name).write_bytes(bytes(1000))
    file = tmp_path / "doctor.toml"
    file.write_text("".join(f'[rerankers.{name}]\npath = "{tmp_path / name}"\n' for name in ("whole", "half", "absent")))
    found = facts(doctor("--models", file, "--json"))["catalogue"]["rerankers"]
    assert (found["whole"]["path"], found["whole"]["size_bytes"]) == (str(tmp_path / "whole"), 2002)
    assert found["whole"]["scores"].startswith("llama.cpp if its copy passes the test")
    assert "has no model.safetensors" in found["half"]["error"]
    assert "There is no file" in found["absent"]["error"]
    lines = doctor("--models", file).stdout.splitlines()
    assert any(line.startswith("whole scores passages with llama.cpp") for line in lines)
    rows = {line.split()[0]: line for line in reversed(lines) if line.strip()}
    assert "reranker, present" in rows["whole"]
    assert "has no model.safetensors" in rows["half"]
    assert "There is no file" in rows["absent"]


@pytest.mark.parametrize("text", ["[models", "unknown = 1", "\0", ""])
def test_a_damaged_models_toml_is_a_line(doctor, tmp_path, text):
    file = tmp_path / "damaged.toml"
    file.write_text(text)
    found = facts(doctor("--models", file, "--json"))
    assert ("error" in found["catalogue"]) is bool(text)
    assert "error" not in found["machine"]
    assert doctor("--models", file).returncode == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', "\0", "nonsense"])
def test_damaged_files_in_the_home_are_lines(doctor, home, text):
    home.mkdir()
    for name in ("attention.json", "speeds.json"):
        (home / name).write_text(text)
    found = facts(doctor("--json"))
    assert "error" in found["attention"]
    assert "error" in found["speeds"]
    assert "error" not in found["home"]
    assert doctor().returncode == 0


def test_a_home_that_cannot_be_read_is_a_line(doctor, home):
    home.write_text("a file")
    found = facts(doctor("--json"))
    assert "error" in found["home"]
    assert "error" not in found["machine"]
    assert doctor().returncode == 0
    home.unlink()
    home.symlink_to(home)
    assert doctor("--json").returncode == 0
    assert doctor().returncode == 0


@pytest.mark.parametrize("fault", ['raise RuntimeError("Shared library with base name llama not found")', "", None])
def test_llama_cpp_that_cannot_be_loaded_is_a_line_and_exit_7(apart, tmp_path, fault):
    package = tmp_path / "first" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if fault is not None:
        (package / "llama_cpp.py").write_text(fault)
    found = facts(apart("--json", first=package.parent), code=7)
    assert "error" in found["llama_cpp"]
    assert "error" not in found["machine"]
    shown = apart(first=package.parent)
    assert shown.returncode == 7
    assert "cannot be loaded" in shown.stderr
    assert "processor" in shown.stdout


def test_gpus_are_found_by_their_files(tmp_path):
    assert gpu_hints(tmp_path) == {}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").write_text("")
    for card, vendor in (("card0", "0x1002"), ("card1", "0x9999")):
        (tmp_path / "sys/class/drm" / card / "device").mkdir(parents=True)
        (tmp_path / "sys/class/drm" / card / "device" / "vendor").write_text(f"{vendor}\n")
    hints = gpu_hints(tmp_path)
    assert list(hints) == ["NVIDIA", "AMD"]
    assert 'CMAKE_ARGS="-DGGML_CUDA=on" pip install' in hints["NVIDIA"]


GPUS = [
    {"name": "CUDA0", "description": "a large GPU", "free_bytes": 20 << 30, "total_bytes": 24 << 30},
    {"name": "CUDA1", "description": "a small GPU", "free_bytes": 1 << 20, "total_bytes": 2 << 30},
]


@pytest.mark.parametrize(
    ("devices", "fits", "told"),
    [
        (GPUS, True, "fits; on the GPU "),
        (GPUS[1:], False, "does not fit; on the GPU "),
        ([], True, "fits"),
    ],
    ids=["large and small", "small", "none"],
)
def test_models_are_planned_for_the_memory_of_the_gpus(tmp_path, models_toml, devices, fits, told, capsys):
    file = models_toml(tiny=write_model(tmp_path / "tiny.gguf"))
    settings = Settings(home=tmp_path / "home", models_file=file)
    llama = {"version": "1", "features": [], "supports_gpu": True, "gpu_devices": devices}
    found = all_facts(settings, lambda: llama)
    plan = found["catalogue"]["models"]["tiny"]["plan"]
    assert plan["fits"] is fits
    assert plan["gpu_available"] == sum(device["free_bytes"] for device in devices)
    assert bool(plan["gpu_layers"]) is bool(devices)
    show(found)
    shown = " ".join(capsys.readouterr().out.split())
    assert told in shown
    assert ("a small GPU: 1.0 MB free of 2.1 GB" in shown) is bool(devices)


def test_learned_speeds_are_told_by_file_name(tmp_path):
    speed = Speed()
    speed.observe_prefill(100, 0, 1.0)
    speed.observe_decode(100, 0.02)
    SpeedFile(tmp_path, "a file.gguf 123 llama Q4_0; node x86_64 CPU 2").save(speed)
    learned = speed_facts(tmp_path)["a file.gguf"]
    assert learned["prefill_tokens_per_s"] == pytest.approx(100, rel=0.1)
    assert learned["decode_tokens_per_s"] == pytest.approx(50, rel=0.1)


def test_nothing_fails_as_a_whole_with_an_empty_home(tmp_path):
    assert collect(home_facts, Settings(home=tmp_path / "none"))["exists"] is False
    assert attention_facts(tmp_path) == speed_facts(tmp_path) == {}


def test_it_takes_little_time(apart):
    before = os.times()
    assert apart("--json").returncode == 0
    after = os.times()
    assert (
        after.children_user + after.children_system - before.children_user - before.children_system < 4
    )  # about 1; PyTorch alone takes more
