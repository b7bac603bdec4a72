"""Measure the answer quality of any model, in four ways: 100 questions about examples/handbook with known answers, and 20 without one.

    python -m benchmarks.quality --model NAME

It runs `localrag eval --qa` (docs/how-to/quality.md) in a separate home that contains only the handbook. Answers are saved to
results/quality-MODEL.jsonl, and running the same command again resumes from there. Other options are passed to `localrag eval`. With twelve
passages and a window of 2,048 tokens, the budget's ratios take effect. With the default model on 2 cores, a run takes an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from benchmarks import shared
from benchmarks.council_run import KB, handbook_home
from localrag.catalog import Catalog
from localrag.cli import main as localrag
from localrag.cli.evaluate import COLUMNS
from localrag.grading import Question, read_questions
from localrag.settings import Settings

QUESTIONS = Path(__file__).with_name("handbook_questions.jsonl")
NUM_WITH_ONE_SOURCE = 50
"""Questions whose answer stands in one passage: the first of the file."""
RATIOS = ("0.2", "0.5", "0.8")
WINDOW, TOP_K = "2048", "12"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of models.toml or a .gguf file (default: the default model)")
    parser.add_argument("--no-council", action="store_true", help="single asks only")
    given, others = parser.parse_known_args()
    model = given.model or Catalog.load(Settings.from_env()).default_model or ""
    kept = shared.RESULTS / f"quality-{re.sub(r'[^A-Za-z0-9._-]+', '-', model).strip('-')}.jsonl"
    shared.RESULTS.mkdir(exist_ok=True)
    args = ["--qa", QUESTIONS, "--kb", KB, "--model", model, "--out", kept, "--ctx", WINDOW, "--top-k", TOP_K, "--json"]
    args += [part for ratio in RATIOS for part in ("--context-ratio", ratio)]
    args += [] if given.no_council else ["--council", "default"]
    with handbook_home() as settings:
        os.environ["LOCALRAG_HOME"] = str(settings.home)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = localrag(["eval", *map(str, args), *others])
    if code:
        raise SystemExit(printed.getvalue().strip() or code)
    found = json.loads(printed.getvalue())
    rows = [row(way) for way in found.pop("ways")]
    shared.report_table("quality", rows, **found, window=WINDOW, top_k=TOP_K, answers=str(kept.relative_to(shared.ROOT)))


def load_questions() -> list[Question]:
    """Those whose answer stands in one passage."""
    return list(read_questions(QUESTIONS).questions[:NUM_WITH_ONE_SOURCE])


def row(way: dict[str, Any]) -> dict[str, object]:
    """A way as the table shows it, by the short names of docs/how-to/quality.md."""
    shares = {name: f"{way[key]['num']} of {way[key]['of']}" for key, name in COLUMNS.items()}
    sure = f"{way['is_right']['low']:.2f} to {way['is_right']['high']:.2f}"
    means = {"s": way["mean_s"], "evaluated": round(way["mean_evaluated_tokens"]), "written": round(way["mean_completion_tokens"])}
    return {"way": way["way"], **shares, "right, 95 %": sure, "Invented": way["num_invented"], **means, "errors": way["errors"]}


if __name__ == "__main__":
    main()
