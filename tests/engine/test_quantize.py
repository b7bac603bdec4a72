"""engine/optimize.py: a file is made whole or not at all, in a process that costs nothing but an error."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from localrag.engine.gguf import read_header
from localrag.engine.optimize import check_type, default_types, expected_bytes, quantize, require_disk, workshop
from localrag.errors import ConfigError, EngineError, UsageError
from tests.gguf_files import bpe_keys, tiny_tensors, write_gguf, write_model

ROOT = Path(__file__).parents[2]
EXPECTED = 32 << 20


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_wide(path, num_rows=200_000):
    """A model whose vocabulary matrix takes IQ4_NL a while."""
    tensors = tiny_tensors(266) | {"blk.0.unused.weight": np.zeros((num_rows, 32), np.float32)}
    return write_gguf(path, bpe_keys(), tensors)


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0", "IQ4_NL", "BF16"])
def test_a_file_is_made_and_the_source_is_as_it_was(tmp_path, file_type):
    source, target = write_model(tmp_path / "m.gguf"), tmp_path / "new.gguf"
    before, steps = sha256(source), []
    quantize(source, target, file_type, expected=EXPECTED, num_threads=1, on_step=lambda done, of: steps.append((done, of)))
    assert read_header(target).quantization == file_type
    assert target.stat().st_size < source.stat().st_size
    assert sha256(source) == before
    num_tensors = read_header(source).num_tensors
    assert steps == [(done, num_tensors) for done in range(1, num_tensors + 1)]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no modes")
def test_the_file_that_is_made_is_private_whatever_the_umask(tmp_path):
    source = write_model(tmp_path / "m.gguf")
    before = os.umask(0)
    try:
        quantize(source, tmp_path / "new.gguf", "Q8_0", expected=EXPECTED, num_threads=1)
    finally:
        os.umask(before)
    assert (tmp_path / "new.gguf").stat().st_mode & 0o777 == 0o600


def test_made_twice_it_is_the_same_and_a_quantised_source_is_taken(tmp_path):
    source = write_model(tmp_path / "m.gguf")
    for name in ("a", "b"):
        quantize(source, tmp_path / name, "Q8_0", expected=EXPECTED, num_threads=2)
    assert sha256(tmp_path / "a") == sha256(tmp_path / "b")
    quantize(tmp_path / "a", tmp_path / "c", "Q4_0", expected=EXPECTED, num_threads=1)
    assert read_header(tmp_path / "c").quantization == "Q4_0"


def refused(source, target, **changes):
    with pytest.raises(EngineError) as caught:
        quantize(source, target, "Q8_0", **({"expected": EXPECTED, "num_threads": 1} | changes))
    assert not target.exists()
    assert caught.value.message.count("\n") == 0
    return caught.value


def test_what_llama_cpp_refuses_is_an_error_and_leaves_nothing(tmp_path):
    damaged = write_model(tmp_path / "m.gguf")
    damaged.write_bytes(damaged.read_bytes()[:3000])
    assert "llama.cpp could not convert the model to Q8_0: " in refused(damaged, tmp_path / "new.gguf").message
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    refused(text, tmp_path / "new.gguf")


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    tensors = tiny_tensors(266)
    tensors["blk.0.ffn_up.weight"][0, 0] = np.nan
    refused(write_gguf(tmp_path / "m.gguf", bpe_keys(), tensors), tmp_path / "new.gguf")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_a_file_that_grows_too_large_is_given_up(tmp_path):
    refused(write_model(tmp_path / "m.gguf"), tmp_path / "new.gguf", expected=4096)


def test_a_full_disk_is_found_before_it_is_written(tmp_path):
    require_disk(tmp_path, 1)
    with pytest.raises(EngineError) as caught:
        require_disk(tmp_path, 1 << 60)
    assert caught.value.numbers["free_bytes"] < 1 << 60


def test_the_size_that_is_expected_is_enough(tmp_path):
    source = write_model(tmp_path / "m.gguf")
    info, num_weights = read_header(source), sum(tensor.size for tensor in tiny_tensors(266).values())
    for file_type in ("Q3_K_M", "Q4_0", "Q6_K", "Q8_0", "BF16"):  # those that fall back to wider types among them
        quantize(source, tmp_path / "new", file_type, expected=EXPECTED, num_threads=1)
        assert (tmp_path / "new").stat().st_size < expected_bytes(info, num_weights, file_type)
        (tmp_path / "new").unlink()


def test_types_by_name():
    assert check_type("q4_0") == "Q4_0"
    with pytest.raises(UsageError, match="IQ1_S"):
        check_type("IQ1_S")


def test_which_types_are_tried(tmp_path):
    floats = read_header(write_model(tmp_path / "m.gguf"))
    assert default_types(floats, "") == ("Q4_0", "IQ4_NL", "Q8_0")
    quantize(floats.path, tmp_path / "q", "Q4_1", expected=EXPECTED, num_threads=1)
    few_bits = read_header(tmp_path / "q")
    assert default_types(few_bits, "AVX512_BF16 = 1") == ("Q4_0", "Q8_0", "BF16")
    assert default_types(few_bits, "AVX2 = 1") == ("Q4_0", "Q8_0")
    quantize(floats.path, tmp_path / "8", "Q8_0", expected=EXPECTED, num_threads=1)
    assert default_types(read_header(tmp_path / "8"), "AVX2 = 1") == ("Q4_0", "IQ4_NL")


def test_a_workshop_is_for_one_and_leaves_nothing(tmp_path):
    folder = tmp_path / "models" / "optimized"
    with workshop(folder) as stage:
        (stage / "file").write_text("x")
        with pytest.raises(UsageError, match="Another `models optimize`"), workshop(folder):
            pass
        assert (stage / "file").exists()
        stage.rename(folder / ".making-left")  # as by a run that was killed
    with workshop(folder):
        assert not (folder / ".making-left").exists()
    assert [path.name for path in folder.iterdir()] == [".making.lock"]


def test_a_workshop_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), workshop(tmp_path / "file" / "optimized"):
        pass


def workers_of(target):
    """The processes that write `target`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(target).encode() in (folder / "cmdline").read_bytes() and b"quantize_worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def until(condition, seconds=20.0):
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        if found := condition():
            return found
        time.sleep(0.01)
    return pytest.fail("it did not come to that")


LONG = """
import sys; from pathlib import Path
from localrag.engine.optimize import quantize
print("begun", flush=True)
quantize(Path(sys.argv[1]), Path(sys.argv[2]), "IQ4_NL", expected=1 << 30, num_threads=1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_the_worker_ends_with_who_started_it(tmp_path, blow):
    source, target = write_wide(tmp_path / "m.gguf", 2_000_000), tmp_path / "new.gguf"
    command = [sys.executable, "-c", LONG, str(source), str(target)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as run:
        workers = until(lambda: target.exists() and workers_of(target))
        run.send_signal(blow)
        run.wait(120)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert target.exists() is (blow == signal.SIGKILL)  # its folder is removed by the next run


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
def test_a_worker_that_is_killed_is_an_error(tmp_path):
    source, target = write_wide(tmp_path / "m.gguf", 2_000_000), tmp_path / "new.gguf"

    def kill():
        for pid in until(lambda: target.exists() and workers_of(target)):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineError, match="SIGKILL"):
        quantize(source, target, "IQ4_NL", expected=1 << 30, num_threads=1)
    killer.join()
    assert not target.exists()
