"""Kill indexing processes in many ways and check the knowledge base afterwards. The long form of tests/kb/test_crash.py.

Each run is killed at a random moment or in a system call (write, pwrite64, fsync, fdatasync, ftruncate, rename or unlink, where strace
injects the signal), or it meets a full disk or a concurrent indexer. `kb verify` and an uninterrupted run follow. Faults are: a missing
committed document, a partial document, a chunk that was embedded again after its commit, an unchanged chunk with a new id, any repair by
verify, and a result that differs from a clean build.

With --postgres the knowledge base is on a private PostgreSQL server, which is stopped too: by an immediate shutdown, and by killing its
main process. The server is restarted, and recovers, before the next run.

    python -m benchmarks.kb_crash --kills 100
    python -m benchmarks.kb_crash --kills 100 --postgres
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals

from benchmarks import shared
from tests.kb import crashes, servers
from tests.kb.crashes import CannotMountError, CannotTraceError, FaultError, History, Indexer, Log, Scene, Stop
from tests.kb.postgres_crashes import IMMEDIATE, KILL, DurableServer, ServerHistory, make_scene, server_dies

_MOST_KILLS = 4  # of one knowledge base before it is brought to its end
_DISK_BYTES = 6 << 20


@dataclass
class Row:
    """What one kind of stop came to."""

    name: str
    num_runs: int = 0
    num_stopped: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""

    def to_dict(self) -> dict[str, object]:
        return {
            "stopped by": self.name,
            "runs": self.num_runs,
            "stopped": self.num_stopped,
            "faults": len(self.faults),
            "s": self.seconds,
            "note": self.note or "; ".join(self.faults[:3]),
        }

    @contextmanager
    def looking(self, what: object) -> Iterator[None]:
        """A fault inside is counted, and what led to it is printed."""
        try:
            yield
        except FaultError as fault:
            self.faults.append(str(fault)[:300])
            print(f"{self.name}, {what}: {fault}", flush=True)


@dataclass
class Runs:
    """What runs are made of: each begins with nothing, or with an earlier state of the folder."""

    scene: Scene
    indexer: Indexer
    base: Path
    from_earlier: bool
    server: DurableServer | None = None

    @contextmanager
    def history(self) -> Iterator[History]:
        """A knowledge base that is removed afterwards."""
        made = None
        try:
            if self.server is None:
                yield History(self.scene, self.base, from_earlier=self.from_earlier)
            else:
                made = ServerHistory(self.scene, self.base, self.server, from_earlier=self.from_earlier)
                yield made
        finally:
            shutil.rmtree(self.base, ignore_errors=True)
            if made is not None:
                made.drop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="at random moments")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th of the calls that can be killed at")
    parser.add_argument("--pairs", type=int, default=20, help="runs with another indexer beside them, for each start")
    parser.add_argument("--start", choices=("nothing", "earlier", "both"), default="both", help="what each run begins with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be written to; a temporary folder if not given")
    parser.add_argument("--postgres", action="store_true", help="a knowledge base on a server, which is stopped as well")
    given = parser.parse_args()
    rng, num = random.Random(given.seed), given.kills if given.start != "both" else given.kills // 2
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        indexer, other = stack.enter_context(Indexer()), stack.enter_context(Indexer())
        server = started(stack) if given.postgres else None
        scene = Scene.make(base / "scene") if server is None else make_scene(base / "scene", server)
        steps: dict[str, Callable[[Row, Runs], None]] = {"kill -9 at random": lambda row, runs: kills(row, runs, rng, num, crashes.after)}
        if server is None:
            steps["kill -9 at a call"] = lambda row, runs: calls(row, runs, given.every)
            steps["full disk"] = full_disks
        else:
            for what, how in (("kill -9 of the server", KILL), ("immediate shutdown of the server", IMMEDIATE)):
                steps[what] = partial(kills, rng=rng, num=num, stop=partial(stopped_server, server, how))
        steps["two at once, one killed"] = lambda row, runs: pairs(row, runs, other, rng, given.pairs)
        starts = (False, True) if given.start == "both" else (given.start == "earlier",)
        rows = [
            carried_out(
                f"{what}, {'update' if from_earlier else 'first build'}", step, Runs(scene, indexer, base / "runs", from_earlier, server)
            )
            for from_earlier in starts
            for what, step in steps.items()
        ]
    shared.report_table("kb_crash_postgres" if given.postgres else "kb_crash", [row.to_dict() for row in rows], seed=given.seed)
    raise SystemExit(any(row.faults for row in rows))


def started(stack: ExitStack) -> DurableServer:
    server: DurableServer = servers.start(DurableServer)
    stack.callback(server.stop)
    return server


def carried_out(name: str, step: Callable[[Row, Runs], None], runs: Runs) -> Row:
    row = Row(name)
    started_at = time.perf_counter()
    step(row, runs)
    row.seconds = time.perf_counter() - started_at
    print(row.to_dict(), flush=True)
    return row


def stopped_server(server: DurableServer, how: Signals, seconds: float) -> Stop:
    return server_dies(server, seconds, how)


def kills(row: Row, runs: Runs, rng: random.Random, num: int, stop: Callable[[float], Stop]) -> None:
    """`num` stops at random moments of a run, some knowledge bases several times in a row."""
    with runs.history() as history:
        length_s = crashes.length_of(history, runs.indexer)
    while row.num_stopped < num:
        with row.looking(row.num_runs), runs.history() as history:
            for _ in range(rng.randint(1, min(_MOST_KILLS, num - row.num_stopped))):
                row.num_runs += 1
                row.num_stopped += history.run(runs.indexer, stop(rng.uniform(0, length_s))).status != 0
            history.finish(runs.indexer)


def calls(row: Row, runs: Runs, every: int) -> None:
    """A kill at each of the calls that a run makes."""
    runs.base.mkdir()
    try:
        counts = crashes.count_syscalls(runs.scene, runs.indexer, runs.base / "counted", from_earlier=runs.from_earlier)
    except CannotTraceError as error:
        row.note = f"not done: {error}"
        return
    shutil.rmtree(runs.base)
    row.note = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    points = [(name, number) for name, count in sorted(counts.items()) for number in range(1, count + 1)]
    for name, number in points[::every]:
        with row.looking((name, number)), runs.history() as history:
            row.num_runs += 1
            row.num_stopped += history.run(runs.indexer, crashes.at_syscall(name, number)).was_killed
            history.finish(runs.indexer)
        if row.num_runs % 50 == 0:
            print(f"{row.num_runs} of {len(points[::every])} calls, {len(row.faults)} faults", flush=True)


def full_disks(row: Row, runs: Runs) -> None:
    """A run for each amount of space, in steps of 50 kB, until one comes to its end."""
    disk = runs.base / "disk"
    try:
        with crashes.small_disk(disk, _DISK_BYTES):
            for num_free_bytes in range(0, _DISK_BYTES, 50_000):
                base, outcome = runs.base / str(num_free_bytes), None
                with row.looking(num_free_bytes):
                    row.num_runs += 1
                    outcome = crashes.stop_by_full_disk(
                        runs.scene, runs.indexer, base, disk, num_free_bytes, from_earlier=runs.from_earlier
                    )
                    row.num_stopped += outcome.status != 0
                if outcome is not None and outcome.status == 0:
                    break
    except CannotMountError as error:
        row.note = f"not done: {error}"
    shutil.rmtree(runs.base)


def pairs(row: Row, runs: Runs, other: Indexer, rng: random.Random, num: int) -> None:
    """Two indexers that begin together, one of which is killed at a random moment; the other comes to its end."""
    indexers = (runs.indexer, other)
    for _ in range(num):
        with row.looking(row.num_runs), runs.history() as history:
            row.num_runs += 1
            orders = [history.order(), history.order()]
            for indexer, order in zip(indexers, orders, strict=True):
                indexer.start(order)
            for indexer in indexers:
                indexer.go()
            time.sleep(rng.uniform(0, 0.5))
            killed = rng.randrange(2)
            indexers[killed].kill()
            outcomes = [indexer.end() for indexer in indexers]
            row.num_stopped += outcomes[killed].was_killed
            if outcomes[1 - killed].status:
                raise FaultError(f"the other one ended with {outcomes[1 - killed]}")
            logs = [Log.read(Path(order["log"])) for order in orders]
            if logs[1 - killed].waited and runs.scene.sha256s(logs[killed].num_done).intersection(logs[1 - killed].embedded):
                raise FaultError("the other one embedded again what was committed")
            history.look(logs[1 - killed])
            history.compare()


if __name__ == "__main__":
    main()
