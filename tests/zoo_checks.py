"""What localrag promises of every architecture, checked on models of the zoo. A check returns a cell of the table in docs/measured.md."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from localrag.engine import sandbox
from localrag.engine.backend import State
from localrag.engine.context import Context
from localrag.engine.convert import convert
from localrag.engine.embed import LlamaEmbedder
from localrag.engine.engine import Engine
from localrag.engine.gguf import read_header
from localrag.engine.jobs import BATCH, CHAT, COUNCIL, Job
from localrag.engine.kv_cache import HostSwap
from localrag.engine.llama import LlamaContext, LlamaModel
from localrag.engine.llama_lib import keep_log, library
from localrag.engine.memory import Situation, plan
from localrag.engine.prefix_disk_cache import PrefixDiskCache, PrefixStore
from localrag.engine.prefix_file import Identity
from localrag.errors import counted
from localrag.prompt.compose import MIN_APART_TOKENS
from localrag.question import Question
from localrag.session import Session
from localrag.text.tokens import common_length
from localrag.types import Completion, Message, SamplingParams
from tests.bert_folders import NumpyEmbedder, write_folder

NUM_CUTS = 50
NEAR_TIE = 0.05
"""Nats between two tokens. Keys and values of 16 bits, summed in another order, move the logits of these models by up to that."""
GREEDY = SamplingParams(max_tokens=5, logprobs=2)
FEW = SamplingParams(max_tokens=8)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, repeatable=True)
TEXT = "The library opens at nine and closes at five. Children read for free, and everyone else pays two pounds a year. " * 4
IDENTITY = Identity(model="m", llama_build="b", architecture="zoo", type_k="f16", type_v="f16", flash_attention=True, n_ctx_train=2048)


@contextmanager
def one_core() -> Iterator[None]:
    """Run on one core. Such small models gain nothing from a second thread, and lose much if both wait for a busy core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def ids(seed: object, count: int) -> list[int]:
    """Random tokens, without control tokens."""
    rng = random.Random(str(seed))
    return [rng.randrange(5, 250) for _ in range(count)]


def finish(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def loads(path: Path, home: Path) -> str:
    """The header is accepted, and the file passes its trial in a child process."""
    info = read_header(path)
    sandbox.ensure_safe(path, home=home)
    return f"yes ({info.file_size // 1024} KiB)"


_SIZES = re.compile(r"(?:llama_kv_cache|llama_memory_recurrent): size = +([\d.]+) MiB")


def memory_is_predicted(path: Path) -> str:
    """The plan's bytes of the KV cache, recurrent states included, are those that llama.cpp allocates, for both attention kernels."""
    info, model, errors = read_header(path), LlamaModel(path), []
    num_cells, num_sequences = 16_384, 64
    for flash in (True, False):
        with log_lines() as lines:
            context = LlamaContext(model, num_cells=num_cells, num_sequences=num_sequences, num_threads=1, flash_attention=flash)
        context.close()
        allocated = sum(float(size) for size in _SIZES.findall("\n".join(lines)))
        situation = Situation(available_bytes=1 << 40, gpu_available_bytes=0, python_bytes=0)
        predicted = plan(info, num_cells, num_sequences, flash_attention=flash, situation=situation).kv_bytes / (1 << 20)
        errors.append(abs(predicted / allocated - 1))
    model.close()
    assert max(errors) <= 0.05, errors
    return f"{max(errors):.1%} off"


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What llama.cpp logs meanwhile."""
    lib, lines = library(), []

    @lib.llama_log_callback
    def note(level: int, text: bytes, user_data: object) -> None:
        lines.append(text.decode("utf-8", "replace"))
        keep_log(level, text, user_data)

    quiet = lib.llama_log_callback(keep_log)
    lib.llama_log_set(note, None)
    try:
        yield lines
    finally:
        lib.llama_log_set(quiet, None)
        _kept_alive.append(quiet)


_kept_alive: list[object] = []  # C holds a pointer to it


def is_exact(engine: Engine) -> str:
    """As many tokens are evaluated as were planned, and the same seed gives the same text whatever came before."""
    session = Session(engine, n_ctx=1024)
    texts = {}
    for text in ("When does it open?", "Who pays?", "When does it open?"):
        question = Question.of(text, piped=TEXT, sampling=DRAWN)
        prepared = session.prepare(question)
        answer = session.ask(question)
        planned = len(prepared.prompt.token_ids)
        assert planned == answer.prompt_tokens == answer.ledger.prompt_tokens
        assert engine.repeatable.runner.num_tokens(0) == planned + answer.completion_tokens - 1
        assert answer.text == texts.setdefault(text, answer.text)
    engine.reserve(2048, num_sequences=4)
    alone = drawn(engine)
    assert drawn(engine) == alone
    assert drawn(engine, beside=[ids("a", 90), ids("b", 40)]) == alone
    assert drawn(engine, sampling=replace(DRAWN, seed=8))[0] != alone[0]
    return "yes"


def drawn(engine: Engine, *, sampling: SamplingParams = DRAWN, beside: Sequence[list[int]] = ()) -> tuple[list[int], list[float]]:
    """The tokens of a repeatable answer and their logprobs, to the bit."""
    others = [engine.add(each, SamplingParams(max_tokens=20, temperature=1.0)) for each in beside]
    sequence = engine.add(ids("prompt", 200), replace(sampling, logprobs=1), breakpoints=(60, 150))
    finish(engine)
    assert sequence.error is None
    assert all(each.finish_reason == "length" for each in others)
    return sequence.completion_ids, [each.logprob for each in sequence.logprobs]


def is_alike(one: Completion, other: Completion) -> bool:
    """Whether two answers have the same tokens, or part at a near tie: sums in another order may decide it differently."""
    if one.completion_ids == other.completion_ids:
        return True
    at = next(i for i, (a, b) in enumerate(zip(one.completion_ids, other.completion_ids, strict=True)) if a != b)
    (_, best), (piece, second) = one.logprobs[at].top[:2]
    return piece == other.logprobs[at].piece and best - second < NEAR_TIE


def cuts(seed: str, num_cuts: int) -> Iterator[tuple[list[int], list[int], tuple[int, ...]]]:
    """A prompt, another one that begins like it up to a random cut, and breakpoints, the last of them at the cut."""
    rng = random.Random(seed)
    for number in range(num_cuts):
        cut = rng.randint(17, rng.choice([40, 100, 200]))
        stem = ids((seed, number), cut)
        breakpoints = tuple(sorted({rng.randint(1, cut), cut}))
        yield stem + ids((seed, number, "a"), rng.randint(1, 30)), stem + ids((seed, number, "b"), rng.randint(1, 30)), breakpoints


def prefix_in_memory(engine: Engine, *, num_cuts: int = NUM_CUTS) -> str:
    """At random cuts, the tokens are those of a fresh context: of one sequence at a breakpoint, of several at any token."""
    num_ties = 0
    for num_sequences in (1, 3):
        engine.reserve(1024, num_sequences=num_sequences)
        for first, second, breakpoints in cuts("memory", num_cuts):
            engine.forget()
            fresh = engine.generate(second, GREEDY, breakpoints=breakpoints)
            engine.forget()
            engine.generate(first, GREEDY, breakpoints=breakpoints)
            taken = engine.generate(second, GREEDY, breakpoints=breakpoints)
            assert fresh.cached_tokens == 0
            assert taken.cached_tokens >= breakpoints[-1], (num_sequences, taken.cached_tokens, breakpoints)
            assert is_alike(fresh, taken), (num_sequences, breakpoints)
            is_same = taken.completion_ids == fresh.completion_ids
            assert is_same or num_sequences > 1, breakpoints
            num_ties += not is_same
    ties = f", {counted(num_ties, 'near tie')}" if num_ties else ""
    return f"{2 * num_cuts - num_ties} of {2 * num_cuts}{ties}" + (", at breakpoints" if engine.context.runner.is_recurrent else "")


def prefix_on_disk(engine: Engine, folder: Path, *, num_cuts: int = NUM_CUTS) -> str:
    """At random cuts, a state that was written to a file, verified and restored gives the tokens of a fresh context."""
    store = PrefixStore(folder, IDENTITY)
    engine.reserve(1024)
    for first, second, breakpoints in cuts("disk", num_cuts):
        engine.forget()
        fresh = engine.generate(second, GREEDY, breakpoints=breakpoints)
        engine.forget()
        engine.generate(first, GREEDY, breakpoints=breakpoints)
        state = engine.context.single.latest()
        assert store.save(state.token_ids, state.breakpoints, state.data)
        engine.forget()
        found = store.longest(second[:-1], breakpoints, last_only=engine.context.single.last_only)
        assert found.num_tokens == breakpoints[-1]
        assert engine.context.single.restore(State(*store.load(found)))
        restored = engine.generate(second, GREEDY, breakpoints=breakpoints)
        assert restored.cached_tokens == breakpoints[-1]
        assert restored.completion_ids == fresh.completion_ids
        found.path.unlink()
    _from_another_process(engine, folder)
    return f"{num_cuts} of {num_cuts} cuts"


def _from_another_process(engine: Engine, folder: Path) -> None:
    """What several prompts share is read from disk by an engine that has nothing in memory."""
    prefix = ids("shared", 600)
    prompts = [prefix + ids(("own", number), 20) for number in range(3)]
    cache = PrefixDiskCache(
        lambda _: PrefixStore(folder, IDENTITY), bytes_per_token=engine.info.kv_bytes_per_token, state_bytes=engine.info.state_bytes
    )
    engine.forget()
    engine.reserve(1500, num_sequences=3)
    before = [engine.generate(each, GREEDY, breakpoints=(300, 598)) for each in prompts]
    cache.remember_shared(engine.context.shared, prefix, prefill_s=9.0)
    engine.forget()
    cache.recall_shared(engine.context.shared, prefix)
    assert cache.warning is None
    for prompt, once in zip(prompts, before, strict=True):
        done = engine.generate(prompt, GREEDY, breakpoints=(300, 598))
        assert done.cached_tokens >= 598
        assert is_alike(once, done)


def batches(engine: Engine) -> str:
    """Prompts of a batch and members of a council share what they begin with, and say what they say alone."""
    evidence = ids("evidence", 300)
    prompts = [evidence + ids(("question", number), 25) for number in range(6)]
    engine.reserve(1024)
    alone = [engine.generate(each, GREEDY) for each in prompts]
    engine.forget()
    for policy in (replace(BATCH, num_sequences=3), COUNCIL):
        for begins_with in (0, len(evidence)):
            jobs = [Job(prompt_ids=list(each), sampling=GREEDY, breakpoints=(150, 299), tag=n) for n, each in enumerate(prompts)]
            done = {event.job.tag: event.completion for event in engine.run(jobs, policy) if event.completion is not None}
            assert all(is_alike(once, done[number]) for number, once in enumerate(alone))
            cached = sorted(each.cached_tokens for each in done.values())
            assert cached[1] >= 299, cached
            if policy is COUNCIL and begins_with:
                assert cached[0] >= 299, cached
        cells = engine.context.shared
        assert 0 <= cells.num_free <= engine.context.runner.num_cells
        engine.forget()
        assert cells.num_free == engine.context.runner.num_cells
    return "6 of 6 alike"


def cancellation(engine: Engine) -> str:
    """Whoever is cancelled in a prompt or an answer disturbs nobody, and what it left is right to go on from."""
    prompts = [ids(("cancel", number), 150 + 40 * number) for number in range(3)]
    engine.reserve(1500, num_sequences=3)
    alone = []
    for prompt in prompts:
        engine.forget()
        alone.append(engine.generate(prompt, GREEDY, breakpoints=(100,)))
    for num_steps in range(4):
        engine.forget()
        sequences = [engine.add(each, GREEDY, breakpoints=(100,)) for each in prompts]
        for _ in range(num_steps):
            engine.step()
        engine.cancel(sequences[1])
        with aborted_batches(engine):
            finish(engine)
        assert [each.finish_reason for each in sequences] == ["length", "cancelled", "length"]
        assert all(is_alike(alone[number], sequences[number].completion()) for number in (0, 2))
        assert is_alike(alone[1], engine.generate(prompts[1], GREEDY, breakpoints=(100,)))
    engine.reserve(1500)
    for prompt, once in zip(prompts, alone, strict=True):
        engine.forget()
        with aborted_batches(engine):
            done = engine.generate(prompt, GREEDY, breakpoints=(100,))
        assert is_alike(once, done)
    return "yes"


@contextmanager
def aborted_batches(engine: Engine, most: int = 20) -> Iterator[None]:
    """Abort batches from another thread, in the midst of them, up to a number. The engine evaluates what they held again."""
    is_over = threading.Event()

    def abort() -> None:
        for number in range(most):
            if is_over.wait(0.0003 * (1 + number % 5)):
                return
            engine.context.runner.cancel()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def growth(engine: Engine) -> str:
    """A context that grows takes along what it holds, up to the breakpoints where nothing else is possible."""
    for num_sequences in (1, 3):
        stem = ids("growth", 200)
        engine.forget()
        engine.reserve(256, num_sequences=num_sequences)
        engine.generate(stem + ids("g1", 10), GREEDY, breakpoints=(100, 180))
        before = engine.context.runner.num_cells
        engine.reserve(4 * before, num_sequences=num_sequences)
        assert engine.context.runner.num_cells > before
        second = stem + ids("g2", 10)
        grown = engine.generate(second, GREEDY, breakpoints=(100, 180))
        runner = engine.context.runner
        assert grown.cached_tokens >= (180 if num_sequences == 1 or runner.is_recurrent or runner.moves_cells else len(stem))
        engine.forget()
        assert is_alike(grown, engine.generate(second, GREEDY, breakpoints=(100, 180)))
    return "yes"


def swapping(engine: Engine) -> str:
    """Prompts that take turns leave the cells for main memory, and come back to where a follow-up diverges from them."""
    stems = [ids(("swap", number), 200) for number in range(3)]
    prompts = [[*stem, *ids(("ask", turn, number), 20)] for turn in range(2) for number, stem in enumerate(stems)]
    engine.reserve(1024, num_sequences=2)
    alone = []
    for prompt in prompts:
        engine.forget()
        alone.append(engine.generate(prompt, GREEDY, breakpoints=(100, 180)))
    engine.forget()
    runner, swap = engine.context.runner, HostSwap()
    engine.context = Context.make(
        lambda _cells, _ids: runner, 1024, 2, host_swap=swap, bytes_per_token=0, prompt_room=lambda _: 512, most_kept=lambda: 10
    )
    done = [engine.generate(prompt, GREEDY, breakpoints=(100, 180)) for prompt in prompts]
    assert swap.num_bytes > 0
    assert all(is_alike(once, now) for once, now in zip(alone, done, strict=True))
    assert [each.cached_tokens for each in done[:3]] == [0, 0, 0]
    assert min(each.cached_tokens for each in done[3:]) >= (180 if runner.is_recurrent or runner.moves_cells else 200)
    return "yes"


def follow_ups(engine: Engine) -> str:
    """Another question on the same text, and the next turn of a conversation, evaluate what is new and at most up to a breakpoint."""
    session = Session(engine, n_ctx=2048)
    questions = ("When does it open?", "Who pays, and how much?", "And children?")
    again = [session.ask(Question.of(text, piped=TEXT * 2, sampling=FEW)) for text in questions]
    turns, messages = [], []
    engine.reserve(2048, num_sequences=CHAT.num_sequences)
    for text in ("When does it open? " + TEXT, "Who pays, and how much? " + TEXT, "And children?"):
        messages.append(Message("user", text))
        (answer,) = (event.answer for event in session.run([Question(messages=tuple(messages), sampling=FEW)], policy=CHAT) if event.answer)
        messages.append(Message("assistant", answer.text))
        turns.append(answer)
    for answers in (again, turns):
        for before, answer in pairwise(answers):
            num_new = answer.prompt_tokens - common_length(before.prompt.token_ids, answer.prompt.token_ids)
            assert answer.prompt_tokens - answer.cached_tokens <= num_new + MIN_APART_TOKENS
    return " / ".join(f"{answer.prompt_tokens - answer.cached_tokens} of {answer.prompt_tokens}" for answer in (again[-1], turns[-1]))


def embedder(folder: Path, home: Path) -> dict[str, str]:
    """The row of a bert-like embedder, which has no KV cache: what it computes is what numpy computes, alone and in a batch."""
    original = NumpyEmbedder(write_folder(folder / "bert"))
    path = folder / "bert.gguf"
    convert(original.folder, path)
    info = read_header(path)
    texts = ["hot", "a hot bed", "the library opens at nine", "9-5, (a)", "hotbeds"]
    with log_lines() as lines, closing(LlamaEmbedder(path, home=home, input_ids=original.input_ids)) as opened:
        together = opened.embed(texts)
        alone = np.concatenate([opened.embed([text]) for text in texts])
        assert [opened.count(text) for text in texts] == [original.count(text) for text in texts]
    assert np.allclose(together, alone, atol=1e-3)
    assert np.allclose(alone, original.embed(texts), atol=2e-2)
    assert info.kv_bytes_per_token == info.state_bytes == 0
    assert not _SIZES.findall("\n".join(lines))
    return {
        "loads": f"yes ({info.file_size // 1024} KiB)",
        "exact": "yes",
        "prefix in memory": "none: every token attends to later ones",
        "prefix on disk": "none, for the same reason",
        "batch": f"{len(texts)} of {len(texts)} alike",
        "memory predicted": "no KV cache, as predicted",
    }
