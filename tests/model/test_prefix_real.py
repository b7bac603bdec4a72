"""What a prompt takes over from others, in this process and from disk, gives the very text that evaluating it whole gives."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from localrag.engine.loading import open_model
from localrag.question import Question
from localrag.session import Session
from localrag.types import SamplingParams

pytestmark = pytest.mark.model

PAGE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((Path(__file__).parents[2] / "examples/handbook/guides").glob("*.md")))
NUM_CUTS = int(os.environ.get("LOCALRAG_TEST_CUTS", "2"))


@pytest.fixture(scope="module")
def engine(model_path, tmp_path_factory):
    with open_model(model_path, name="smollm2-135m", home=tmp_path_factory.mktemp("home")) as opened:
        opened.draft_tokens = 0  # texts are compared, and batches are summed in another order
        yield opened


def test_at_any_cut_the_text_is_that_of_a_fresh_context(model_path, tmp_path_factory):
    """LOCALRAG_TEST_MODEL names another file, such as one with a sliding window, LOCALRAG_TEST_CUTS how many cuts are tried."""
    path = Path(os.environ.get("LOCALRAG_TEST_MODEL", model_path))
    with open_model(path, name="tried", home=tmp_path_factory.mktemp("home")) as engine:
        rng, ids = random.Random(5), engine.tokenizer.encode(PAGE)
        engine.draft_tokens = 0
        sampling = SamplingParams(max_tokens=5)
        engine.reserve(1536)
        for _ in range(NUM_CUTS):
            start, cut = rng.randrange(len(ids) - 1000), rng.randint(20, rng.choice([100, 300, 700]))
            breakpoints = (cut,) if cut < 300 else (rng.randint(100, 250), cut)
            prompt = ids[start : start + cut] + ids[rng.randrange(1000) :][: rng.randint(1, 40)]
            engine.forget()
            fresh = engine.generate(prompt, sampling, breakpoints=breakpoints)
            engine.forget()
            engine.generate(ids[start : start + cut] + ids[7:20], sampling, breakpoints=breakpoints)
            state = engine.context.single.latest()
            taken = engine.generate(prompt, sampling, breakpoints=breakpoints)
            engine.forget()
            assert engine.context.single.restore(state)
            restored = engine.generate(prompt, sampling, breakpoints=breakpoints)
            assert [done.cached_tokens for done in (fresh, taken, restored)] == [0, cut, cut]
            assert fresh.completion_ids == taken.completion_ids == restored.completion_ids


def test_a_follow_up_on_the_same_text_is_not_evaluated_again(engine):
    session = Session(engine, n_ctx=1024)
    answers = [
        session.ask(Question.of(question, piped=PAGE, sampling=SamplingParams(max_tokens=8)))
        for question in ("What is it?", "Who is it for?")
    ]
    assert answers[0].cached_tokens == 0
    assert answers[1].cached_tokens > 0.8 * answers[1].prompt_tokens
    assert answers[1].timings.prefill_s < answers[0].timings.prefill_s / 3
    assert answers[1].to_dict()["usage"]["cached_tokens"] == answers[1].cached_tokens
    engine.forget()
    again = session.ask(Question.of("Who is it for?", piped=PAGE, sampling=SamplingParams(max_tokens=8)))
    assert (again.cached_tokens, again.text) == (0, answers[1].text)


def test_a_council_shares_what_begins_alike(engine):
    ids = engine.tokenizer.encode(PAGE)[:200]
    members = [ids + engine.tokenizer.encode(f" You are member number {n}.") for n in range(3)]
    engine.reserve(1024, num_sequences=3)
    running = [engine.add(member, SamplingParams(max_tokens=4)) for member in members]
    while not engine.is_idle:
        engine.step()
    cached = sorted(sequence.completion().cached_tokens for sequence in running)
    assert cached[0] == 0
    assert min(cached[1:]) >= 200


def test_a_second_process_reads_what_the_first_one_evaluated(home, model_path, tmp_path):
    """On the command line, on the same text from a pipe; `--no-keep` and a limit of 0 leave nothing behind."""
    page = tmp_path / "page.md"
    page.write_text(PAGE[:1000], encoding="utf-8")

    def ask(*more, question="What is it?", **env):
        words = ["ask", question, "-", "--model", str(model_path), "--max-tokens", "4", "--temperature", "0.9", "--json", *more]
        with page.open("rb") as piped:
            run = [sys.executable, "-m", "localrag", *words]
            done = subprocess.run(run, stdin=piped, capture_output=True, check=True, timeout=200, env=os.environ | env)
        return json.loads(done.stdout)

    without = [ask("--no-keep"), ask(LOCALRAG_PREFIX_BYTES="0")]
    assert not (home / "prefixes").exists()
    first, second = ask(question="Who is it for?"), ask()
    assert [answer["usage"]["cached_tokens"] for answer in (*without, first)] == [0, 0, 0]
    assert second["usage"]["cached_tokens"] > 0.8 * second["usage"]["prompt_tokens"]
    assert second["timings"]["prefill_s"] < first["timings"]["prefill_s"] / 4
    assert second["answer"] == without[0]["answer"] == without[1]["answer"]
    for kept in (home / "prefixes").glob("*.prefix"):
        kept.write_bytes(kept.read_bytes()[:-100])
    damaged = ask()
    assert damaged["usage"]["cached_tokens"] == 0
    assert [("damaged" in warning) for warning in damaged["warnings"]] == [True]
    assert damaged["answer"] == second["answer"]
