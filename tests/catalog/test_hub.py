"""Pulling from the hub: a local hub that speaks its HTTP API, and the hub's own library in a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gguf import GGUFWriter

from tests.gguf_files import bpe_keys, tiny_tensors, write_gguf, write_model
from tests.homes import know_attention, know_machine
from tests.hub import COMMIT, LocalHub, sha256

ROOT = Path(__file__).parents[2]
REPO = "owner/tiny-GGUF"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The bytes of a model that llama.cpp runs."""
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf").read_bytes()


@pytest.fixture
def hub(tiny):
    files = {"tiny-Q4_K_M.gguf": tiny, "tiny-Q8_0.gguf": tiny + bytes(4096), "mmproj-F16.gguf": b"x", "README.md": b"A model."}
    with LocalHub({REPO: files}) as hub:
        yield hub


@pytest.fixture
def localrag(hub, tmp_path):
    """Runs a command line in a process that asks the local hub; returns exit code, stdout and stderr."""

    def run(*args, **env):
        variables = {**os.environ, **hub.environment(tmp_path / "hf"), "LOCALRAG_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "localrag", *args]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables | env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def snapshot(tmp_path, name):
    return tmp_path / "hf/hub/models--owner--tiny-GGUF/snapshots" / COMMIT / name


def test_a_quantization_of_any_repository_is_pulled_and_has_a_name_from_then_on(localrag, hub, tmp_path, tiny):
    code, out, err = localrag("models", "pull", f"{REPO}:q4_k_m")
    assert (code, out) == (0, f"tiny-q4_k_m: {snapshot(tmp_path, 'tiny-Q4_K_M.gguf')}\n"), err
    assert (tmp_path / "home/models.toml").read_text() == f'[models.tiny-q4_k_m]\nrepo = "{REPO}"\nfile = "tiny-Q4_K_M.gguf"\n'
    assert snapshot(tmp_path, "tiny-Q4_K_M.gguf").read_bytes() == tiny
    code, out, _ = localrag("tokens", "Hello.", "--model", "tiny-q4_k_m")
    assert (code, out.strip()) == (0, "6")

    # Again: the same entry, and no second download.
    assert localrag("models", "pull", f"{REPO}:Q4_K_M", "--json")[1].strip() == json.dumps(
        {"pulled": [{"name": "tiny-q4_k_m", "path": str(snapshot(tmp_path, "tiny-Q4_K_M.gguf"))}]}
    )
    assert hub.downloads("tiny-Q4_K_M.gguf") == [None]


def test_the_sha256_that_the_hub_stated_is_kept_and_verified_ever_after(localrag, hub, tmp_path, tiny):
    localrag("models", "pull", f"{REPO}:Q4_K_M")
    rows = json.loads(localrag("models", "verify", "--json")[1])["results"]
    assert [(row["name"], row["ok"], row["expected"]) for row in rows] == [("tiny-q4_k_m", True, sha256(tiny))]

    file = snapshot(tmp_path, "tiny-Q4_K_M.gguf").resolve()
    file.write_bytes(tiny[:-1] + bytes([tiny[-1] ^ 1]))
    code, _, err = localrag("tokens", "Hello.", "--model", "tiny-q4_k_m")
    assert code == 4
    assert "is not the one that was pulled" in err
    assert "localrag models pull tiny-q4_k_m" in err
    assert localrag("models", "verify")[0] == 4

    hub.repositories[REPO]["tiny-Q4_K_M.gguf"] = tiny  # pulled again, it is as it was
    assert localrag("models", "pull", "tiny-q4_k_m")[0] == 0
    assert file.read_bytes() == tiny
    assert localrag("models", "verify")[0] == 0


def test_a_file_that_is_not_what_the_hub_states_is_refused(localrag, hub):
    hub.stated["tiny-Q4_K_M.gguf"] = "0" * 64
    code, out, err = localrag("models", "pull", f"{REPO}:Q4_K_M")
    assert (code, out) == (4, "")
    assert "its sha256 is" in err
    assert "0" * 64 in err


def test_a_file_that_models_toml_describes_otherwise_is_not_even_fetched(localrag, hub, tmp_path):
    (tmp_path / "models.toml").write_text(f'[models.m]\nrepo = "{REPO}"\nfile = "tiny-Q4_K_M.gguf"\nsha256 = "{"1" * 64}"\n')
    code, _, err = localrag("models", "pull", "m")
    assert code == 4
    assert "It was not fetched" in err
    assert hub.downloads("tiny-Q4_K_M.gguf") == []


def test_a_pull_that_was_killed_is_resumed(localrag, hub, tmp_path, tiny):
    large = tiny + bytes(6 << 20)
    hub.repositories[REPO]["tiny-Q4_K_M.gguf"] = large
    hub.cuts["tiny-Q4_K_M.gguf"] = 3 << 20
    environment = {**os.environ, **hub.environment(tmp_path / "hf"), "LOCALRAG_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "localrag", "models", "pull", f"{REPO}:Q4_K_M"], cwd=tmp_path, env=environment) as pull:
        end = time.monotonic() + 60
        while not any(part.stat().st_size >= 2 << 20 for part in (tmp_path / "hf").rglob("*.localrag")):
            assert time.monotonic() < end
            time.sleep(0.02)
        pull.kill()
    hub.goes_on.set()
    assert "is not on this machine" in localrag("tokens", "x", "--model", "tiny-q4_k_m")[2]
    assert localrag("models", "pull", f"{REPO}:Q4_K_M")[0] == 0
    first, second = hub.downloads("tiny-Q4_K_M.gguf")
    assert first is None
    assert 2 << 20 <= int(second.removeprefix("bytes=").removesuffix("-")) <= 3 << 20
    assert snapshot(tmp_path, "tiny-Q4_K_M.gguf").read_bytes() == large
    assert not list((tmp_path / "hf").rglob("*.localrag"))


def test_a_connection_that_breaks_is_taken_up_again(localrag, hub, tmp_path, tiny):
    hub.cuts["tiny-Q4_K_M.gguf"] = 40_000
    hub.goes_on.set()
    assert localrag("models", "pull", f"{REPO}:Q4_K_M")[0] == 0
    assert hub.downloads("tiny-Q4_K_M.gguf") == [None, "bytes=40000-"]
    assert snapshot(tmp_path, "tiny-Q4_K_M.gguf").read_bytes() == tiny


def test_a_file_of_another_program_is_verified_once_and_used_offline(localrag, hub, tmp_path, tiny):
    localrag("models", "pull", f"{REPO}:Q4_K_M")
    (tmp_path / "home/pulled.json").unlink()
    code, _, err = localrag("models", "pull", "tiny-q4_k_m", HF_HUB_OFFLINE="1")
    assert code == 0
    assert "not verified" in err
    assert localrag("models", "pull", "tiny-q4_k_m")[0] == 0
    assert json.loads((tmp_path / "home/pulled.json").read_text()) == {f"{REPO}/tiny-Q4_K_M.gguf": sha256(tiny)}
    assert hub.downloads("tiny-Q4_K_M.gguf") == [None]


def test_a_repository_lists_its_quantizations_with_sizes_and_fits(localrag, hub, tmp_path, tiny):
    know_machine(tmp_path / "home")
    code, out, err = localrag("models", "pull", REPO)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["Q4_K_M", "Q8_0"]
    assert f"localrag models pull {REPO}:Q4_K_M" in err
    facts = json.loads(localrag("models", "pull", REPO, "--json")[1])
    assert (facts["repo"], facts["license"]) == (REPO, "apache-2.0")
    small, large = facts["files"]
    assert (small["quantization"], small["parts"], small["size_bytes"]) == ("Q4_K_M", ["tiny-Q4_K_M.gguf"], len(tiny))
    assert large["size_bytes"] == len(tiny) + 4096
    assert small["n_ctx_train"] == 512  # of the header, of which only the start was fetched
    assert [asked for _, path, asked in hub.requests if path.endswith("Q4_K_M.gguf")] == ["bytes=0-1048575"] * 2
    assert not (tmp_path / "home/models.toml").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{REPO}:Q2_K", "has no GGUF file with Q2_K"),
        ("owner/none", "There is no repository owner/none"),
        ("owner/empty", "holds no GGUF model"),
        ("nothing", "is named 'nothing'"),
        ("../x/y", "is named '../x/y'"),
    ],
)
def test_what_cannot_be_pulled_is_said_in_one_line(localrag, hub, name, words):
    hub.repositories["owner/empty"] = {"README.md": b"", "mmproj-F16.gguf": b"x", "a/../b.gguf": b"x", "x-00001-of-00002.gguf": b"x"}
    code, out, err = localrag("models", "pull", name)
    assert (code, out) == (4, "")
    assert words in err


# --- split files


def write_split(folder, *, parts):
    """A model in several parts, as llama.cpp's program for that writes them."""
    keys, tensors = bpe_keys(), tiny_tensors(266)
    whole = write_gguf(folder / "whole.gguf", keys, tensors)
    writer = GGUFWriter(folder / "big-Q4_K_M.gguf", "llama", split_max_tensors=-(-len(tensors) // parts))
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return whole, sorted(folder.glob("big-*.gguf"))


def test_a_split_file_is_pulled_with_all_its_parts_and_runs_like_a_whole_one(localrag, hub, tmp_path):
    whole, parts = write_split(tmp_path, parts=3)
    assert [part.name for part in parts] == [f"big-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    hub.repositories["owner/big"] = {f"Q4_K_M/{part.name}": part.read_bytes() for part in parts}
    know_attention(tmp_path / "home")
    code, out, err = localrag("models", "pull", "owner/big")
    assert code == 0, err
    assert out.startswith("big-q4_k_m: ")
    assert [len(hub.downloads(part.name)) for part in parts] == [1, 1, 1]
    asked = ("ask", "Why?", "--seed", "1", "--max-tokens", "4", "--json")
    split, joined = (json.loads(localrag(*asked, "--model", model)[1]) for model in ("big-q4_k_m", str(whole)))
    assert split["answer"] == joined["answer"]
    facts = json.loads(localrag("models", "show", "big-q4_k_m", "--json")[1])
    assert facts["num_tensors"] == len(tiny_tensors(266))
    assert facts["file_size"] == sum(part.stat().st_size for part in parts)
    assert json.loads(localrag("models", "verify", "--json")[1])["results"][0]["ok"] is True

    # Each part is verified, and none may be missing.
    last = Path(facts["path"]).with_name(parts[2].name)
    good = last.resolve().read_bytes()
    last.resolve().write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    code, _, err = localrag("tokens", "x", "--model", "big-q4_k_m")
    assert code == 4
    assert parts[2].name in err
    last.unlink()
    assert "big-q4_k_m is not on this machine" in localrag("tokens", "x", "--model", "big-q4_k_m")[2]
    assert localrag("models", "pull", "big-q4_k_m")[0] == 0
    assert localrag("tokens", "x", "--model", "big-q4_k_m")[0] == 0
