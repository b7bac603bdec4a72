"""Soak-test a session with random asks: cancelled, timed out, in batches, and with every kind of prompt content. Check invariants.

    python -m benchmarks.soak --minutes 30

The run is divided into epochs, each of which opens a session, sends random asks and closes it. The ledger, the engine and its KV cells are
checked after each ask; the memory, threads and open files of this process after each epoch. The output ends with one line per invariant;
the exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psutil

from benchmarks import shared
from localrag.engine.engine import Engine
from localrag.engine.jobs import BATCH
from localrag.engine.kv_cache import ExclusiveCells, SharedCells
from localrag.engine.threads import num_cores
from localrag.errors import LocalragError
from localrag.question import Question
from localrag.session import Answer, Session
from localrag.settings import Settings
from localrag.types import Attachment, Memory, Message, SamplingParams
from tests import identities

NUM_EPOCHS = 12
"""The first one warms up."""
MAX_GROWTH, MAX_GROWTH_BYTES = 0.03, 8 << 20
"""By how much the least memory of the last third may be above that of the first: whichever is more."""
MIB = 1 << 20
WINDOW = 4096
SCHEMAS: tuple[dict[str, object], ...] = (
    {
        "type": "object",
        "properties": {"material": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
        "required": ["material", "ok"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["PLA", "PETG", "ABS"]}, "maxItems": 3},
    {"type": "integer", "minimum": 0, "maximum": 300},
)
INVARIANTS = (
    "nothing was raised but errors that say why",
    "every ledger is exact",
    "every JSON answer that ended is JSON",
    "the engine is idle after each ask",
    "no cell is held that nobody accounts for",
    "the memory is flat",
    "open files do not grow",
    "threads do not grow",
)


class Faults:
    """What did not hold: how often, and the first case of each."""

    def __init__(self) -> None:
        self.num: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, invariant: str, what: str) -> None:
        assert invariant in INVARIANTS
        self.num[invariant] += 1
        self.first.setdefault(invariant, what)


class Asker:
    """Asks one session at random, and looks at it after each ask."""

    def __init__(self, session: Session, rng: random.Random, faults: Faults, done: Counter[str]) -> None:
        self._session, self._rng, self._faults, self._done = session, rng, faults, done
        self._words = shared.handbook().split()

    def ask(self) -> None:
        """One random thing."""
        kind = self._rng.choices(("ask", "stopped", "interrupted", "batch", "left"), weights=(8, 3, 2, 3, 1))[0]
        try:
            if kind in ("batch", "left"):
                self._ask_batch(is_left=kind == "left")
            else:
                self._ask_one(kind)
        except LocalragError as error:
            self._done[f"refused: {type(error).__name__}"] += 1
        except Exception:  # noqa: BLE001  # whatever comes is what this looks for
            self._faults.add(INVARIANTS[0], traceback.format_exc(limit=-6))
        self._done[kind] += 1
        self._look()

    def _ask_one(self, kind: str) -> None:
        sampling, options = self._sampling(), self._options()
        asked = [*self._history(), Message("user", self._text(3, 30) + "?")]
        left = self._rng.randint(1, 12)

        def heard(_text: str) -> None:
            nonlocal left
            left -= 1
            if kind == "interrupted" and left == 0:
                raise KeyboardInterrupt

        with self._stopper(enabled=kind == "stopped"):
            answer = self._session.ask(Question.of(asked, sampling=sampling, **options), on_text=heard)
        self._check(answer, sampling)

    def _ask_batch(self, *, is_left: bool) -> None:
        questions = []
        attachments = self._attachments()  # some share what they begin with
        for number in range(self._rng.randint(1, 10)):
            asked = Question.of(self._text(3, 20) + "?", id=number, sampling=self._sampling())
            given = {"attachments": attachments} if self._rng.random() < 0.6 else {"piped": self._text(0, 150)}
            questions.append(asked.but(**given))
        samplings = {question.id: question.sampling for question in questions}
        num_wanted = self._rng.randint(1, len(questions)) if is_left else len(questions)
        with self._stopper(enabled=self._rng.random() < 0.3):
            policy = replace(BATCH, num_sequences=self._rng.randint(1, 8))
            with closing(self._session.run(questions, policy=policy)) as events:
                for event in events:
                    if event.answer is not None and event.question is not None:
                        self._check(event.answer, samplings[event.question.id])
                    elif event.error is not None:
                        self._done[f"refused: {type(event.error).__name__}"] += 1
                    else:
                        continue
                    num_wanted -= 1
                    if num_wanted == 0:
                        break

    @contextmanager
    def _stopper(self, *, enabled: bool) -> Iterator[None]:
        """Cancels whatever runs at a random time, from another thread."""
        if not enabled:
            yield
            return
        thread = threading.Timer(self._rng.choice((0.01, 0.1, 0.5, 2.0)) * self._rng.random(), self._session.engine.cancel_all)
        thread.start()
        try:
            yield
        finally:
            thread.cancel()
            thread.join()

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        schema = rng.choice(SCHEMAS) if rng.random() < 0.15 else None
        return SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.7, 1.2)),
            top_k=rng.choice((0, 1, 40)),
            repeat_penalty=rng.choice((1.0, 1.0, 1.1)),
            seed=rng.randrange(2**32),
            max_tokens=64 if schema else rng.choice((1, 2, 8, 24)),
            stop=(". ",) if rng.random() < 0.2 and schema is None else (),
            json_schema=schema,
        )

    def _options(self) -> dict[str, Any]:
        rng = self._rng
        options: dict[str, Any] = {}
        if rng.random() < 0.5:
            options["system"] = self._text(1, 40)
        if rng.random() < 0.4:
            options["piped"] = self._text(1, 500)
        if rng.random() < 0.3:
            options["attachments"] = self._attachments()
        if rng.random() < 0.2:
            options["memories"] = [Memory(label=f"m{n}", text=self._text(3, 20), importance=rng.random()) for n in range(rng.randint(1, 4))]
        if rng.random() < 0.15:
            options["max_seconds"] = rng.choice((0.05, 0.5, 2.0, 8.0))
        return options

    def _attachments(self) -> list[Attachment]:
        rng = self._rng
        return [Attachment(label=f"notes-{n}.md", text=self._text(5, 300), relevance=rng.random()) for n in range(rng.randint(1, 3))]

    def _history(self) -> list[Message]:
        num_rounds = self._rng.choice((0, 0, 1, 2, 5))
        roles = ("user", "assistant") * num_rounds
        return [Message("user" if role == "user" else "assistant", self._text(2, 60)) for role in roles]

    def _text(self, least: int, most: int) -> str:
        """Words of the handbook from one of a few places: what is asked again is found again."""
        start = 100 * self._rng.randrange(8)
        return " ".join(self._words[start : start + self._rng.randint(least, most)])

    def _check(self, answer: Answer, sampling: SamplingParams) -> None:
        self._done[f"answered: {answer.finish_reason}"] += 1
        self._done["tokens"] += answer.completion_tokens
        self._done["prompt tokens"] += answer.prompt_tokens
        self._done["cached tokens"] += answer.cached_tokens
        try:
            identities.check(answer.to_dict(), [hit.label for hit in answer.offered])
            assert 0 <= answer.cached_tokens < answer.prompt_tokens, "cached tokens"
        except AssertionError:
            self._faults.add(INVARIANTS[1], traceback.format_exc(limit=-2))
        if sampling.json_schema is not None and answer.finish_reason == "stop" and self._session.engine.name != "echo":
            try:
                json.loads(answer.text)
            except ValueError:
                self._faults.add(INVARIANTS[2], answer.text)

    def _look(self) -> None:
        engine = self._session.engine
        if not engine.is_idle:
            self._faults.add(INVARIANTS[3], "a sequence runs or waits after its ask")
        for fault in cell_faults(engine):
            self._faults.add(INVARIANTS[4], fault)


def cell_faults(engine: Engine) -> list[str]:
    """Where the account of the cells of an idle engine differs from what llama.cpp says that they hold."""
    context = engine.context  # a leak shows nowhere else
    if context is None:
        return []
    runner, cells = context.runner, context.cells
    if isinstance(cells, ExclusiveCells):
        accounted = {0: len(cells.token_ids)}
    else:
        accounted = {seq_id: len(cells.cache.tokens(seq_id)) for seq_id in cells.kept}
    num_ids = getattr(runner, "num_sequences", 1 + max(accounted, default=0))  # the echo does not tell how many there are
    faults = []
    for seq_id in range(num_ids):
        known, held = accounted.get(seq_id, 0), runner.num_tokens(seq_id)
        if known != held:
            faults.append(f"sequence {seq_id} holds {held} tokens, of which {known} are accounted for")
    if isinstance(cells, SharedCells):
        num_cells = cells.cache.num_cells
        if not max(accounted.values(), default=0) <= num_cells <= min(sum(accounted.values()), runner.num_cells):
            faults.append(f"{num_cells} cells are accounted for, of {runner.num_cells}; the sequences hold {accounted}")
        if cells.num_free != runner.num_cells - num_cells:
            faults.append(f"{cells.num_free} cells are said to be free, {runner.num_cells - num_cells} are")
    return faults


def num_threads(process: psutil.Process, known: int) -> int:
    """Threads of this process. One that has just ended is still counted for a moment."""
    for _ in range(10):
        if process.num_threads() <= known:
            break
        time.sleep(0.005)
    return process.num_threads()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (default 1)")
    parser.add_argument("--model", default=None, help="a name, a path, or echo (default: the default model)")
    given = parser.parse_args()
    faults, done, epochs = Faults(), Counter[str](), []
    model, rng = given.model or str(shared.default_model()), random.Random(given.seed)
    with shared.fresh_home() as settings:
        for number in range(NUM_EPOCHS):
            until = time.monotonic() + 60 * given.minutes / NUM_EPOCHS
            epochs.append(epoch(model, settings, rng, faults, done, until))
            print(f"{number + 1}/{NUM_EPOCHS}: {epochs[-1]}", flush=True)
    compare(epochs[1:], faults)
    shared.report_table("soak", epochs, minutes=given.minutes, seed=given.seed, done=dict(sorted(done.items())), faults=faults.first)
    for invariant in INVARIANTS:
        held = f"does NOT hold, {faults.num[invariant]} times" if faults.num[invariant] else "holds"
        print(f"{invariant}: {held}")
        if invariant in faults.first:
            print(f"  the first: {faults.first[invariant]}")
    raise SystemExit(1 if faults.num else 0)


def epoch(model: str, settings: Settings, rng: random.Random, faults: Faults, done: Counter[str], until: float) -> dict[str, object]:
    """A session from its opening to its end. Memory is in MiB; where the KV cache stands its bytes are taken off, and the host swap's."""
    process, open_bytes, num_asks, most = psutil.Process(), [], 0, Counter[str]()
    with Session.open(model, n_ctx=WINDOW, settings=settings) as session:
        asker = Asker(session, rng, faults, done)
        while time.monotonic() < until or not num_asks:
            asker.ask()
            num_asks += 1
            context = session.engine.context  # its size
            num_cells = 0 if context is None else context.runner.num_cells
            known = num_cells * session.engine.info.kv_bytes_per_token + session.engine.num_swapped_bytes
            open_bytes.append(process.memory_info().rss - known)
            most["files"], most["threads"] = (
                max(most["files"], process.num_fds()),
                max(most["threads"], num_threads(process, most["threads"])),
            )
    return {
        "asks": num_asks,
        "open_MiB": round(statistics.median(open_bytes) / MIB, 1),
        "closed_MiB": round(process.memory_info().rss / MIB, 1),
        "most files": most["files"],
        "files": process.num_fds(),
        "most threads": most["threads"],
        "threads": process.num_threads(),
    }


def compare(epochs: list[dict[str, object]], faults: Faults) -> None:
    """The first third beside the last one."""
    third = max(1, len(epochs) // 3)

    def thirds(column: str, take: Callable[[list[float]], float]) -> tuple[float, float]:
        values = [float(str(each[column])) for each in epochs]
        return take(values[:third]), take(values[-third:])

    for column in ("open_MiB", "closed_MiB"):
        before, after = thirds(column, min)  # what the allocator keeps for later comes and goes; what leaks is there always
        print(f"memory, {column}: {before:.1f} in the first third, {after:.1f} in the last")
        if after - before > max(MAX_GROWTH * before, MAX_GROWTH_BYTES / MIB):
            faults.add(INVARIANTS[5], f"{column} went from {before:.1f} to {after:.1f}")
    # a context uses one thread less for each core that another process keeps busy, and more again later
    for column, invariant, most in (("files", INVARIANTS[6], 0), ("threads", INVARIANTS[7], num_cores() - 1)):
        for name in (column, f"most {column}"):
            before, after = thirds(name, statistics.median)
            if after - before > most:
                faults.add(invariant, f"{name}: {before:.0f} in the first third, {after:.0f} in the last")


if __name__ == "__main__":
    main()
