"""A seed, with the real model at temperature 1: the same text whatever was asked before, beside it, or by which door."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest

from localrag.cli import main
from localrag.engine.loading import open_model
from localrag.errors import EngineError
from localrag.question import Question
from localrag.session import Session
from localrag.session.council_run import council
from localrag.settings import Settings
from localrag.types import SamplingParams
from tests.running import batch
from tests.server.live import served

pytestmark = pytest.mark.model

SEEDS = range(1, 1 + int(os.environ.get("LOCALRAG_TEST_SEEDS", "2")))  # 12 repeated too
QUESTION = "Tell me a short story about a baker who finds a map in a loaf of bread."
OTHERS = (
    "Name five animals that live in the sea, and say what each of them eats.",
    "Tell me a short story about a baker who finds a letter.",
    "Why is the sky blue? Explain it to a child in a few sentences.",
)
MAX_TOKENS = 24
STORY = "A baker breaks a loaf and finds a map of the town. It is drawn in flour, and shows a street that nobody knows. " * 3


@pytest.fixture(scope="module")
def live(catalogue, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with served(home, "--models", str(catalogue), "--ctx", "2048", "--no-keep", model="smollm2-135m") as running:
        yield running


def asked(live, seed, *, stream=False, question=QUESTION, max_tokens=MAX_TOKENS):
    named = {} if seed is None else {"seed": seed}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=600) as client:
        answer = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": question}], max_tokens=max_tokens, temperature=1, stream=stream, **named
        )
        if not stream:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def test_a_seed_gives_the_same_text_alone_after_others_beside_them_and_streamed(live):
    alone = {seed: asked(live, seed) for seed in SEEDS}
    assert len(set(alone.values())) > len(SEEDS) // 2
    for other in OTHERS:
        asked(live, None, question=other, max_tokens=8)
        asked(live, 99, question=other, max_tokens=8)
    assert {seed: asked(live, seed, stream=True) for seed in reversed(SEEDS)} == alone
    stopped = threading.Event()

    def keep_asking(other):
        while not stopped.is_set():
            asked(live, None, question=other, max_tokens=40)

    with ThreadPoolExecutor(6) as pool:
        beside = [pool.submit(keep_asking, other) for other in OTHERS]
        try:
            found = dict(zip(SEEDS, pool.map(lambda seed: asked(live, seed, stream=seed % 2 == 0), SEEDS), strict=True))
        finally:
            stopped.set()
        assert [each.exception() for each in beside] == [None] * 3
    assert found == alone


def test_every_door_gives_the_text_of_the_server(live, model_path):
    seeds = [1, 2]
    there = {seed: asked(live, seed) for seed in seeds}
    # what a client that names no top_p gets is OpenAI's 1; what a session gets where none is named is 0.95
    sampling = {seed: SamplingParams(temperature=1.0, seed=seed, repeatable=True, max_tokens=MAX_TOKENS) for seed in seeds}
    with open_model(model_path, name="smollm2-135m") as engine:
        session = Session(engine, n_ctx=2048)
        assert {seed: session.ask(Question.of(QUESTION, sampling=sampling[seed])).text for seed in seeds} == there
        seeded = [Question.of(QUESTION, id=seed, sampling=sampling[seed]) for seed in seeds]
        mixed = [Question.of(other, id=f"other {number}", max_tokens=30) for number, other in enumerate(OTHERS)]
        found = dict(batch(session, [mixed[0], *seeded, *mixed[1:]]))
        assert {seed: found[seed].text for seed in seeds} == there


def test_the_command_line_does_too(live, catalogue, capsys, home, monkeypatch):
    there = asked(live, 5)
    monkeypatch.setenv("LOCALRAG_MODELS", str(catalogue))
    asking = ["ask", QUESTION, "--seed", "5", "--temperature", "1", "--max-tokens", str(MAX_TOKENS), "--ctx", "2048", "--no-keep"]
    for _ in range(2):
        assert main(asking) == 0
        assert capsys.readouterr().out.strip() == there.strip()


def test_a_seed_repeats_over_the_other_routes(live):
    def texts(path, body):
        answer = httpx.post(f"{live.url}{path}", json={**body, "seed": 3, "temperature": 1}, timeout=600).json()
        return [choice["text"] for choice in answer["choices"]] if "choices" in answer else answer["output"][0]["content"]

    for path, body in (
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 24}),
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 24}),
    ):
        first = texts(path, body)
        asked(live, None, question=OTHERS[0], max_tokens=8)
        assert texts(path, body) == first


def test_a_conversation_with_a_seed_repeats(catalogue, home):
    """Each turn goes on from the one before, which other doors evaluate anew."""
    said = []
    for name in ("a", "b"):
        done = subprocess.run(
            [sys.executable, "-m", "localrag", "chat", "--session", name, "--seed", "4", "--temperature", "1", "--max-tokens", "24",
             "--ctx", "2048", "--json"],
            input="Tell me of a fox.\nAnd then?\nHow does it end?\n", text=True, capture_output=True, timeout=600, check=True,
            env={**os.environ, "LOCALRAG_MODELS": str(catalogue)},
        )  # fmt: skip
        said.append([json.loads(line)["answer"] for line in done.stdout.splitlines()])
    assert said[0] == said[1]
    assert len(said[0]) == 3


def test_a_council_with_a_seed_repeats(catalogue, home, monkeypatch):
    """In a process that has read nothing from disk, and in one that could."""
    monkeypatch.setenv("LOCALRAG_MODELS", str(catalogue))
    members = [{"name": name, "persona": f"You are {name}.", "temperature": 1.0} for name in ("Ada", "Bob")]
    file = home.parent / "models.toml"
    judge = "[councils.two.judge]\ntemperature = 1.0\nmax_tokens = 48\n"
    table = "".join(
        f'[[councils.two.specialists]]\nname = "{each["name"]}"\npersona = "{each["persona"]}"\ntemperature = 1.0\n' for each in members
    )
    file.write_text(f"{catalogue.read_text()}\n[councils.two]\nmax_tokens = 24\n{table}{judge}", encoding="utf-8")
    settings = Settings.from_env({"LOCALRAG_HOME": str(home), "LOCALRAG_MODELS": str(file)})
    said = []
    for _ in range(2):
        events = []
        with suppress(EngineError):  # this model may give no verdict
            council(
                f"Is a map in a loaf of bread a good beginning of a story? Such as this one: {STORY}",
                "two",
                seed=3,
                n_ctx=2048,
                on_event=events.append,
                settings=settings,
            )
        answers = [each for each in events if each["event"] == "said"]
        said.append([each["answer"] for each in answers])
        ada, bob = (each["usage"] for each in answers[:2])
        assert bob["cached_tokens"] > ada["prompt_tokens"] // 2  # what all share is read once
    assert said[0] == said[1]
    assert len(said[0]) >= 3
