"""One ask beside a council of three: 50 questions with known answers about examples/handbook, the default model, greedy.

    python -m benchmarks.council_quality --questions 50

An answer is right if each group of what it has to say is met by one of the group's spellings; labels of sources do not count. The same
holds for a council's verdict: its text and its decision together. Longer texts say more, so the tokens stand beside. Both open the model
anew for each question, and its loading is left out of the seconds. Ctrl-C ends it with the questions that both have answered by then.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import shared
from benchmarks.council_run import KB, handbook_home
from localrag.catalog import Catalog
from localrag.council import Council
from localrag.errors import InterruptedRunError, LocalragError
from localrag.passages import CITATION
from localrag.session import Session
from localrag.session.sitting import sit
from localrag.settings import Settings

QUESTIONS = Path(__file__).with_name("handbook_questions.jsonl")
PLAIN, COUNCIL = "one ask", "council"
TOP_K = 4
_FOLDER = "handbook/"
"""What the sources of chunks begin with, and those of the questions do not."""


@dataclass(frozen=True, slots=True)
class Question:
    """`answers` are groups of spellings, of which an answer has to have one each; every one of `sources` holds them all."""

    id: str
    question: str
    answers: Sequence[Sequence[str]]
    sources: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a question. `cited` are the sources of the citations that were supplied; without an answer, `error` says why."""

    text: str
    is_right: bool
    cited: Sequence[str]
    cites_holder: bool
    num_unsupported: int
    seconds: float
    prompt_tokens: int
    evaluated_tokens: int
    completion_tokens: int
    error: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=50, help="the first so many of the 50 (default: all)")
    given = parser.parse_args()
    shared.RESULTS.mkdir(exist_ok=True)
    file = shared.RESULTS / f"council_quality-{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}.jsonl"
    with handbook_home() as settings:
        council = Catalog.load(settings).council("default")
        pairs = answer_all(load_questions()[: given.questions], council, settings, file)
    if not pairs:
        raise SystemExit("No question was answered by both.")
    rows = [row(name, [pair[name] for pair in pairs]) for name in (PLAIN, COUNCIL)]
    about = {"council": council.name, "members": len(council.members), "top_k": {PLAIN: TOP_K, COUNCIL: council.top_k}}
    shared.report_table("council_quality", rows, **about, **compare(pairs), answers=str(file.relative_to(shared.ROOT)))


def load_questions() -> list[Question]:
    return [Question(**json.loads(line)) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]


def is_met(answers: Sequence[Sequence[str]], text: str) -> bool:
    """Whether a text has one spelling of each group, in whatever case, as words and numbers of their own."""
    text = _plain(CITATION.sub(" ", text))
    return all(any(_pattern(each).search(text) for each in group) for group in answers)


def _pattern(spelling: str) -> re.Pattern[str]:
    """A number is no part of a longer one, such as 75 of 0.75; a unit may stick to it."""
    spelling = _plain(spelling)
    end = r"(?![.,]?\d)" if spelling[-1].isdigit() else r"(?!\w)"
    return re.compile(rf"(?<!\w)(?<!\d[.,]){re.escape(spelling)}{end}", re.IGNORECASE)


def _plain(text: str) -> str:
    """With one kind of minus and of space."""
    return re.sub(r"\s+", " ", re.sub("[−–‑]", "-", text))


def answer_all(questions: Sequence[Question], council: Council, settings: Settings, file: Path) -> list[dict[str, Outcome]]:
    """Both answer each question, which is written to `file` at once; those that both answered until Ctrl-C."""
    pairs: list[dict[str, Outcome]] = []
    try:
        for question in questions:
            pairs.append({PLAIN: ask(question, settings), COUNCIL: convene(question, council, settings)})
            with file.open("a", encoding="utf-8") as out:
                outcomes = {name: asdict(outcome) for name, outcome in pairs[-1].items()}
                out.write(json.dumps(asdict(question) | outcomes, ensure_ascii=False) + "\n")
            said = (f"{name} {'right' if each.is_right else 'wrong'} in {each.seconds:.1f} s" for name, each in pairs[-1].items())
            print(f"{len(pairs)}/{len(questions)} {question.question}: {', '.join(said)}", file=sys.stderr, flush=True)
    except (KeyboardInterrupt, InterruptedRunError):
        print("Interrupted.", file=sys.stderr)
    return pairs


def ask(question: Question, settings: Settings) -> Outcome:
    with Session.open(kbs=[KB], keep=False, settings=settings) as session:
        started, loaded_s = time.perf_counter(), session.engine.load_s
        answer = session.ask(question.question, top_k=TOP_K)
        seconds = time.perf_counter() - started - (session.engine.load_s - loaded_s)  # a context is made by then
    if answer.finish_reason == "cancelled":
        raise KeyboardInterrupt
    places = {hit.label: hit.chunk.source for hit in answer.hits}
    usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    usage["evaluated_tokens"] = answer.prompt_tokens - answer.cached_tokens
    return outcome(question, answer.text, answer.to_dict()["citations"], places, usage, seconds)


def convene(question: Question, council: Council, settings: Settings) -> Outcome:
    """The same of a council; one that comes to no verdict has answered nothing."""
    told: dict[str, dict[str, Any]] = {}
    error = ""

    def hear(event: dict[str, Any]) -> None:
        told[event["event"]] = event

    try:
        sit(council, question.question, settings=settings, kbs=[KB], keep=False, on_event=hear)
    except InterruptedRunError:
        raise
    except LocalragError as failed:
        error = str(failed)
    end, verdict = told.get("end", {}), told.get("verdict", {"text": "", "decision": "", "citations": [], "sources": []})
    places = {each["id"]: each["source"] for each in verdict["sources"]}
    seconds = end.get("total_s", 0.0) - sum(each["load_s"] for each in end.get("loads", []))
    usage = end.get("usage", {})
    return outcome(question, f"{verdict['text']} {verdict['decision']}", verdict["citations"], places, usage, seconds, error=error)


def outcome(
    question: Question,
    text: str,
    citations: Any,  # noqa: ANN401  # as an answer's JSON has them
    places: Mapping[str, str],
    usage: Mapping[str, int],
    seconds: float,
    *,
    error: str = "",
) -> Outcome:
    """`places` are the sources of the labels that were supplied."""
    cited = [places[each["id"]].removeprefix(_FOLDER) for each in citations if each["supplied"]]
    return Outcome(
        text=text.strip(),
        is_right=is_met(question.answers, text),
        cited=cited,
        cites_holder=not set(cited).isdisjoint(question.sources),
        num_unsupported=sum(not each["supplied"] for each in citations),
        seconds=seconds,
        error=error,
        **{name: usage.get(name, 0) for name in ("prompt_tokens", "evaluated_tokens", "completion_tokens")},
    )


def row(program: str, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Seconds and tokens are means: their sum is what all questions take."""
    return {
        "program": program,
        "questions": len(outcomes),
        "right": sum(each.is_right for each in outcomes),
        "cite a source": sum(bool(each.cited) for each in outcomes),
        "cite one that holds the answer": sum(each.cites_holder for each in outcomes),
        "unsupported citations": sum(each.num_unsupported for each in outcomes),
        "errors": sum(bool(each.error) for each in outcomes),
        "s": statistics.mean(each.seconds for each in outcomes),
        "prompt tokens": round(statistics.mean(each.prompt_tokens for each in outcomes)),
        "evaluated tokens": round(statistics.mean(each.evaluated_tokens for each in outcomes)),
        "answer tokens": round(statistics.mean(each.completion_tokens for each in outcomes)),
    }


def compare(pairs: Sequence[Mapping[str, Outcome]]) -> dict[str, object]:
    """How often only one of them is right, and how likely so uneven a split is if neither is better (sign test, two-sided)."""
    only = {name: sum(pair[name].is_right and not pair[other].is_right for pair in pairs) for name, other in _BOTH_WAYS}
    num, fewer = sum(only.values()), min(only.values())
    p = min(1.0, 2 * sum(math.comb(num, k) for k in range(fewer + 1)) / 2**num)
    return {"only this one right": only, "p of the sign test": round(p, 3)}


_BOTH_WAYS = ((PLAIN, COUNCIL), (COUNCIL, PLAIN))

if __name__ == "__main__":
    main()
