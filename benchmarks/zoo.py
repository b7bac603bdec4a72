"""Check every architecture of the zoo, and print the table of docs/measured.md. With --mutants, search for files that crash only in use.

    python -m benchmarks.zoo
    python -m benchmarks.zoo --mutants 1000

A mutant is a tiny model with one or two absurd numbers in its metadata, and tensors that fit them where llama.cpp can say which. One that
passes its trial in a child process is then used in another one in every way that localrag uses a model; none may crash there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.shared import report_table
from localrag.engine import sandbox
from localrag.engine.gguf import read_header
from localrag.engine.loading import open_model
from localrag.errors import LocalragError
from tests import zoo_checks
from tests.zoo import KINDS, write_kind

USE_LIMIT_S = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=0, help="number of mutants to try instead of the table")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, zoo_checks.one_core():
        if arguments.mutants:
            try_mutants(Path(folder), arguments.mutants, arguments.seed)
        else:
            rows = [row(arch, Path(folder)) for arch in KINDS]
            report_table("zoo", [*rows, {"architecture": "bert"} | zoo_checks.embedder(Path(folder), Path(folder))])


def row(arch: str, folder: Path) -> dict[str, object]:
    path = write_kind(folder, arch)
    with open_model(path, name=arch) as engine:
        return {
            "architecture": arch,
            "loads": zoo_checks.loads(path, folder),
            "exact": zoo_checks.is_exact(engine),
            "prefix in memory": zoo_checks.prefix_in_memory(engine),
            "prefix on disk": zoo_checks.prefix_on_disk(engine, folder / f"{arch}-prefixes"),
            "batch": zoo_checks.batches(engine),
            "memory predicted": zoo_checks.memory_is_predicted(path),
        }


def try_mutants(folder: Path, count: int, seed: int) -> None:
    """Print how many mutants each step refuses, and every one that crashes only in use."""
    outcomes: Counter[str] = Counter()
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        arch = rng.choice(list(KINDS))
        changes = mutation(arch, rng)
        path = folder / f"{arch}.gguf"
        if in_child(partial(write_kind, folder, arch, changes=changes)) != "fine":
            write_kind(folder, arch, changes=changes, tensors_follow=False)
        outcome = outcome_of(path)
        outcomes[outcome.partition(":")[0]] += 1
        if outcome.startswith("in use"):
            print(number, arch, json.dumps(changes), outcome, flush=True)
        if number % 50 == 49 or number == count - 1:
            print(number + 1, dict(outcomes), flush=True)


def mutation(arch: str, rng: random.Random) -> dict[str, object]:
    """One or two numbers of the metadata, replaced by absurd ones."""
    common = {"block_count": 3, "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16, "embedding_length": 64}
    keys = common | {key: value for key, value in KINDS[arch].items() if value is not None}
    changes: dict[str, object] = {}
    for key in rng.sample(sorted(keys), rng.choice((1, 1, 2))):
        value = keys[key]
        if isinstance(value, list):
            changes[key] = [_absurd(each, rng) if rng.random() < 0.5 else each for each in value][: rng.choice((len(value), len(value), 1))]
        else:
            changes[key] = _absurd(value, rng)
    return changes


def _absurd(value: object, rng: random.Random) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(0, rng.choice((0, 1, value - 1, value + 1, 2 * value, value // 2, 3 * value, 1000)))
    return rng.choice((0.0, -1.0, 1e30, float("nan"), 1.0))


def outcome_of(path: Path) -> str:
    """What refuses a file, or how its use ends."""
    try:
        read_header(path)
    except LocalragError:
        return "refused by the header"
    try:
        sandbox.ensure_safe(path, home=None)
    except LocalragError as error:
        return "crashes in the trial" if error.numbers.get("signal") else "refused by llama.cpp in the trial"
    used = in_child(lambda: use(path))
    known = {"fine": "used", "error": "an error in use", "SIGALRM": "slow in use"}
    return known.get(used.partition(" ")[0], f"in use: {used}")


def use(path: Path) -> None:
    """Use a model in every way: one sequence and several, both attention kernels, cached prefixes, states in memory and restored."""
    with open_model(path, name=path.stem) as engine:
        zoo_checks.is_exact(engine)
        zoo_checks.prefix_in_memory(engine, num_cuts=1)
        zoo_checks.cancellation(engine)
        zoo_checks.growth(engine)


def in_child(work: Callable[[], object]) -> str:
    """Do something in a child process: "fine", the error that it raised, or the signal that ended it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(USE_LIMIT_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            work()
            said = "fine"
        except AssertionError:
            said = "fine"  # a damaged model may be wrong; it may not crash
        except LocalragError as error:
            said = f"error {error.message}"
        except BaseException as error:  # noqa: BLE001  # anything else is told
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:300])
        os._exit(0)
    os.close(write)
    said = os.read(read, 400).decode(errors="replace")
    os.close(read)
    _, status = os.waitpid(pid, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else said


if __name__ == "__main__":
    main()
