"""Fuzz model files: count the mutants that the header check refuses, that a trial load refuses, and that load, with the time of each.

    python -m benchmarks.headers --files 10000

Six small files that llama.cpp loads are mutated with a seeded generator. A child process runs `read_header` on each mutant and, if that
accepts it, loads it with llama.cpp as in a trial; the child is restarted when it dies. A mutant that crashed or hung the child is then
passed to `read_header` and `ensure_safe` in this process, which must raise a clean error.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from localrag.engine import gguf, sandbox
from localrag.engine.gguf import read_header
from localrag.engine.load_worker import shrink_stacks, try_file
from localrag.engine.sandbox import VARIABLES
from localrag.errors import LocalragError, ModelFileError
from localrag.process import limit_self

LIMIT_S = 5.0
MAX_BYTES = 10**9
HUGE = [0, 1, 2, 3, 255, 2**16, 2**21 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
TENSOR_TYPES = [*gguf.TENSOR_TYPES, 4, 5, 31, 43, 255, 2**31]


@dataclass(frozen=True, slots=True)
class Sample:
    """A file that loads: its bytes, where its weights begin, where each key's value lies and each tensor's number of dimensions."""

    name: str
    content: bytes
    header_bytes: int
    values: Mapping[str, gguf.Value]
    tensors: Mapping[str, int]


def samples(folder: Path) -> list[Sample]:
    """Llamas with byte-level BPE, with SentencePiece in F16 and with experts, a qwen3, a gemma3, and a vocabulary alone."""
    from tests.gguf_files import bpe_keys, spm_keys, tiny_tensors, write_gguf  # noqa: PLC0415  # the child does not need them

    def of(arch: str, keys: Mapping[str, object]) -> dict[str, object]:
        return {key.replace("llama.", f"{arch}."): value for key, value in keys.items()} | {"general.architecture": arch}

    plain = tiny_tensors(266)
    half = {name: tensor.astype(np.float16) if tensor.ndim > 1 else tensor for name, tensor in plain.items()}
    ones = {f"blk.{layer}.attn_{part}_norm.weight": np.ones(8, np.float32) for layer in range(2) for part in "qk"}
    posts = {f"blk.{layer}.post_{part}_norm.weight": np.ones(32, np.float32) for layer in range(2) for part in ("attention", "ffw")}
    mixture = {name: tensor for name, tensor in plain.items() if not re.search("ffn_(gate|up|down)", name)}
    for layer in range(2):
        mixture[f"blk.{layer}.ffn_gate_inp.weight"] = np.ones((4, 32), np.float32)
        for part in ("gate", "up", "down"):
            mixture[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack([plain[f"blk.{layer}.ffn_{part}.weight"]] * 4)
    window = {"gemma3.attention.sliding_window": 64, "gemma3.attention.key_length": 8, "gemma3.rope.dimension_count": 8}
    made = {
        "llama": (bpe_keys() | {"llama.rope.dimension_count": 8, "llama.nextn_predict_layers": 0}, plain),
        "llama, SPM": (spm_keys() | {"llama.attention.head_count_kv": [2, 2], "llama.rope.scaling.type": "linear"}, half),
        "llama, experts": (bpe_keys() | {"llama.expert_count": 4, "llama.expert_used_count": 2}, mixture),
        "qwen3": (of("qwen3", bpe_keys()), plain | ones),
        "gemma3": (of("gemma3", spm_keys()) | window, plain | ones | posts),
        "vocabulary": (bpe_keys(), {}),
    }
    return [_sample(name, write_gguf(folder / "sample.gguf", keys, tensors)) for name, (keys, tensors) in made.items()]


def _sample(name: str, path: Path) -> Sample:
    content = path.read_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        header = gguf.parse(path, buffer, len(content))
        names = {tensor: struct.pack("<Q", len(tensor)) + tensor.encode() for tensor in header.tensors}
        tensors = {tensor: content.index(raw) + len(raw) for tensor, raw in names.items()}
        return Sample(name, content, max(tensors.values(), default=len(content) - 40) + 40, dict(header.values), tensors)


def mutant(sample: Sample, rng: random.Random) -> tuple[str, bytes]:
    """The kind of the mutation, and the file after it."""
    kind = rng.choice([kind for kind in KINDS if sample.tensors or not kind.startswith("tensor")])
    data = bytearray(sample.content)
    KINDS[kind](sample, data, rng)
    return kind, bytes(data)


def _truncate(sample: Sample, data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(sample.header_bytes if rng.random() < 0.7 else len(data)) :]


def _flip(sample: Sample, data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(sample.header_bytes)] ^= 1 << rng.randrange(8)


def _scramble(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """Bytes from elsewhere in the header, put in, put over or taken out."""
    at, start, length = rng.randrange(sample.header_bytes), rng.randrange(sample.header_bytes), rng.choice((1, 2, 4, 8, 24, 100))
    data[at : at + rng.choice((0, length))] = data[start : start + rng.choice((0, length, length))]


def _count(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """An absurd number of tensors, of keys, of an array's elements, or of a text's bytes."""
    arrays = [value.start - 8 for value in sample.values.values() if value.count is not None]
    texts = [value.start for value in sample.values.values() if value.type == gguf.STRING]
    at = rng.choice([8, 16, *arrays, *texts])
    data[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))


def _number(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """An absurd value under a key, of the key's own type."""
    singles = [value for value in sample.values.values() if value.count is None and value.type != gguf.STRING]
    for value in rng.sample(singles, rng.choice((1, 1, 2))):
        size = gguf.VALUE_TYPES[value.type][1].size
        floats = [struct.pack("<f", number) for number in (float("nan"), float("inf"), -1.0, 0.0, 1e30, 1e-30)]
        wanted = floats if value.type == gguf.FLOAT32 and rng.random() < 0.8 else [struct.pack("<Q", huge)[:size] for huge in HUGE]
        near = struct.pack("<Q", max(0, int.from_bytes(data[value.start : value.start + size], "little") + rng.choice((-1, 1))))[:size]
        data[value.start : value.start + size] = rng.choice([*wanted, near, near])


def _wide(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """A context length, or another number, as a 64-bit integer: 0, -1, 2^63 and the like."""
    keys = [key for key, value in sample.values.items() if value.count is None and value.type == gguf.UINT32]
    key = next(key for key in keys if key.endswith("context_length")) if rng.random() < 0.5 else rng.choice(keys)
    at = sample.values[key].start
    data[at - 4 : at + 4] = struct.pack("<IQ", rng.choice((10, 11)), rng.choice(HUGE))


def _type(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """Another type of value, of array, or of an array's elements."""
    value = rng.choice(list(sample.values.values()))
    at = value.start - (4 if value.count is None else rng.choice((12, 16)))
    data[at : at + 4] = struct.pack("<I", rng.randrange(15))


def _text(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """Other letters in a text or in one of many: tokens that are twice there, unknown architectures, broken UTF-8."""
    value = rng.choice([value for value in sample.values.values() if value.type == gguf.STRING])
    at = value.start
    for _ in range(rng.randrange(value.count or 1)):
        at += 8 + int.from_bytes(data[at : at + 8], "little")
    start, length = at + 8, int.from_bytes(data[at : at + 8], "little")
    data[start : start + length] = bytes(rng.choice(b"ab<|>0x \xc4\xa0\xff\0\n{%") for _ in range(length))


def _tensor_place(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """A tensor at another offset: over another one, or outside of the file."""
    at = _dims_end(data, rng.choice(list(sample.tensors.values()))) + 4
    other = _dims_end(data, rng.choice(list(sample.tensors.values()))) + 4
    shifted = int.from_bytes(data[at : at + 8], "little") + rng.choice((-32, -1, 1, 32, 4096))
    data[at : at + 8] = rng.choice((data[other : other + 8], struct.pack("<Q", shifted % 2**64), struct.pack("<Q", rng.choice(HUGE))))


def _tensor_shape(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """Another number of dimensions, or another size of one; half of the time two sizes change places, which keeps the bytes."""
    at = rng.choice(list(sample.tensors.values()))
    num_dims = int.from_bytes(data[at : at + 4], "little")
    if num_dims > 1 and rng.random() < 0.5:
        data[at + 4 : at + 20] = data[at + 12 : at + 20] + data[at + 4 : at + 12]
    elif rng.random() < 0.3:
        data[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2, 3, 4, 5, 2**31)))
    else:
        place = at + 4 + 8 * rng.randrange(num_dims)
        data[place : place + 8] = struct.pack("<Q", rng.choice(HUGE))


def _tensor_type(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """Another type, half of the time one of as many bytes."""
    at = _dims_end(data, rng.choice(list(sample.tensors.values())))
    data[at : at + 4] = struct.pack("<I", rng.choice((26, 26, 0, 1, 25, 30, *rng.sample(TENSOR_TYPES, 5))))


def _tensor_name(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """Two tensors of the same length of name change names, or one gets a letter changed."""
    name = rng.choice(list(sample.tensors))
    end = sample.tensors[name]
    other = rng.choice([each for each in sample.tensors if len(each) == len(name)])
    if other != name and rng.random() < 0.7:
        data[end - len(name) : end], data[sample.tensors[other] - len(name) : sample.tensors[other]] = other.encode(), name.encode()
    else:
        data[end - rng.randrange(1, len(name))] = rng.choice(b"0123456789.abkv\0\xff")


def _weights(sample: Sample, data: bytearray, rng: random.Random) -> None:
    """Random, empty or endless numbers in the weights, which no header shows."""
    at = rng.randrange(min(sample.header_bytes, len(data) - 64), len(data) - 63)
    data[at : at + 64] = rng.choice((rng.randbytes(64), bytes(64), b"\xff" * 64, struct.pack("<f", float("inf")) * 16))


def _dims_end(data: bytearray, at: int) -> int:
    """Where a tensor's type stands, which its offset follows."""
    return at + 4 + 8 * int.from_bytes(data[at : at + 4], "little")


Mutation = Callable[[Sample, bytearray, random.Random], None]
KINDS: dict[str, Mutation] = {
    "truncated": _truncate,
    "bits flipped": _flip,
    "pieces moved": _scramble,
    "absurd counts": _count,
    "absurd numbers": _number,
    "64-bit numbers": _wide,
    "wrong types": _type,
    "other texts": _text,
    "tensor elsewhere": _tensor_place,
    "tensor of other shape": _tensor_shape,
    "tensor of other type": _tensor_type,
    "tensor of other name": _tensor_name,
    "weights": _weights,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a file: `outcome` is loaded, header, trial, died or hung; `peak_bytes` is what the child grew by meanwhile."""

    outcome: str
    message: str
    seconds: float
    peak_bytes: int


class Judge:
    """A child that takes one file after the other, as `read_header` and the trial would; one that dies or hangs is replaced."""

    def __init__(self) -> None:
        self.num_children = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def judge(self, path: Path) -> Verdict:
        process = self._child()
        assert process.stdin
        assert process.stdout
        hung = threading.Event()
        timer = threading.Timer(2 * LIMIT_S, lambda: (hung.set(), process.kill()))
        timer.start()
        started = time.perf_counter()
        process.stdin.write(f"{path}\n".encode())
        process.stdin.flush()
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
        timer.cancel()
        if line:
            reply = json.loads(line)
            return Verdict(reply["outcome"], reply["message"], seconds, reply["peak_bytes"])
        code = process.wait()
        self.close()
        return Verdict("hung" if hung.is_set() else "died", f"ended with {code}", seconds, 0)

    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self.num_children += 1
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.headers", "--child"],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | VARIABLES | {"PYTHONPATH": str(Path(__file__).parents[1])},
            )
            assert self._process.stdout
            self._process.stdout.readline()  # it is ready
        return self._process


def child() -> None:
    """Judges the files whose paths come in, within the limits of a trial."""
    from localrag.engine.llama_lib import library  # noqa: PLC0415  # only here

    library()
    shrink_stacks()
    limit_self(spare_bytes=sandbox.SPARE_BYTES, cpu_s=3600.0)
    print("ready", flush=True)
    for line in sys.stdin:
        before = _peak_bytes(reset=True)
        outcome, message = _judge_here(Path(line.rstrip("\n")))
        print(json.dumps({"outcome": outcome, "message": message, "peak_bytes": _peak_bytes() - before}), flush=True)


def _judge_here(path: Path) -> tuple[str, str]:
    outcome = "header"
    try:
        vocab_only = read_header(path).is_vocab_only
        outcome = "trial"
        try_file(path, vocab_only=vocab_only)
    except LocalragError as error:
        return outcome, error.message
    except Exception as error:  # noqa: BLE001  # the trial answers so too; of the header's check it would be a defect
        return outcome if outcome == "trial" else "died", f"{type(error).__name__}: {error}"
    return "loaded", ""


def _peak_bytes(*, reset: bool = False) -> int:
    """The most memory that this process has held since the last reset; 0 where Linux does not say."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def run(num_files: int, seed: int, folder: Path) -> tuple[list[dict[str, object]], dict[str, object]]:
    """A row for each kind of mutation, and what is to be said of the whole."""
    originals = samples(folder)
    verdicts: dict[str, list[Verdict]] = {kind: [] for kind in KINDS}
    unclean: list[str] = []
    path = folder / "mutant.gguf"
    with Judge() as judge:
        for original in originals:  # the files are worth mutating only if they load
            path.write_bytes(original.content)
            assert judge.judge(path).outcome == "loaded", original.name
        started = time.perf_counter()
        for index in range(num_files):
            rng = random.Random(f"{seed} {index}")
            original = originals[index % len(originals)]
            kind, content = mutant(original, rng)
            path.write_bytes(content)
            verdict = judge.judge(path)
            verdicts[kind].append(verdict)
            if verdict.outcome in ("died", "hung") and (problem := unclean_refusal(path)):
                unclean.append(f"{index}: {original.name}, {kind}: {problem}")
            if verdict.outcome in ("died", "hung"):
                print(f"{index}: {original.name}, {kind}: {verdict}")
        wall_s = time.perf_counter() - started
        num_children = judge.num_children
    every = [verdict for of_kind in verdicts.values() for verdict in of_kind]
    rows = [_row(kind, of_kind) for kind, of_kind in verdicts.items() if of_kind] + [_row("all", every)]
    return rows, {"seed": seed, "wall_s": round(wall_s, 1), "children": num_children, "not_clean": unclean}


def unclean_refusal(path: Path) -> str | None:
    """What is wrong with how `read_header` and `ensure_safe` refuse a file that llama.cpp does not survive; None if nothing is."""
    started = time.perf_counter()
    try:
        sandbox.ensure_safe(path, home=None, vocab_only=read_header(path).is_vocab_only)
    except ModelFileError as error:
        seconds = time.perf_counter() - started
        print(f"  {error.message} ({seconds:.1f} s)")
        return None if error.message.isprintable() and seconds < LIMIT_S + 1 else f"{error.message!r} after {seconds:.1f} s"
    return "it was accepted here"


def _row(kind: str, verdicts: Sequence[Verdict]) -> dict[str, object]:
    count = {outcome: sum(verdict.outcome == outcome for verdict in verdicts) for outcome in ("header", "trial", "died", "hung", "loaded")}
    return {
        "mutation": kind,
        "files": len(verdicts),
        "refused by header": count["header"],
        "by llama.cpp": count["trial"],
        "child died": count["died"],
        "child hung": count["hung"],
        "loaded": count["loaded"],
        "worst s": max(verdict.seconds for verdict in verdicts),
        "worst MB": max(verdict.peak_bytes for verdict in verdicts) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return
    from benchmarks import shared  # noqa: PLC0415  # the child does not need it

    with tempfile.TemporaryDirectory() as folder:
        rows, facts = run(args.files, args.seed, Path(folder))
    shared.report_table("headers", rows, **facts)
    worst = rows[-1]
    if facts["not_clean"] or worst["worst s"] > LIMIT_S or worst["worst MB"] > MAX_BYTES / 1e6:
        raise SystemExit("Some files were not refused cleanly, in time or in little memory.")


if __name__ == "__main__":
    main()
