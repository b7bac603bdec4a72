"""One ask beside a council of three: questions with known answers about examples/handbook, the default model, greedy.

    python -m benchmarks.council_quality --questions 50

What is right stands in localrag/grading; of a council it is its verdict's text and its decision together. Longer texts say more, so the
tokens stand beside. Both open the model anew for each question, and its loading is left out of the seconds. Ctrl-C ends it with the
questions that both have answered by then. `localrag eval --qa` asks with any model, at several ratios, and goes on after an interruption.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import shared
from benchmarks.council_run import KB, handbook_home
from localrag.errors import InterruptedRunError
from localrag.grading import Grade, Outcome, Question, grade, read_questions, sign_test
from localrag.session import DEFAULT_TOP_K
from localrag.session.quality import AskWay, CouncilWay, Means, Way

QUESTIONS = Path(__file__).with_name("handbook_questions.jsonl")
PLAIN, COUNCIL = "one ask", "council"
NUM_QUESTIONS = 50
"""Those whose answer stands in one passage: the first of the file."""

Pair = Mapping[str, tuple[Outcome, Grade]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=NUM_QUESTIONS, help=f"the first so many of the {NUM_QUESTIONS} (default: all)")
    given = parser.parse_args()
    shared.RESULTS.mkdir(exist_ok=True)
    file = shared.RESULTS / f"council_quality-{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%SZ}.jsonl"
    with handbook_home() as settings:
        means = Means(settings=settings, kbs=(KB,))
        asked = CouncilWay.of("default", means)
        pairs = answer_all(load_questions()[: given.questions], {PLAIN: AskWay(means), COUNCIL: asked}, file)
    if not pairs:
        raise SystemExit("No question was answered by both.")
    rows = [row(name, [pair[name] for pair in pairs]) for name in (PLAIN, COUNCIL)]
    council = asked.council
    about = {"council": council.name, "members": len(council.members), "top_k": {PLAIN: DEFAULT_TOP_K, COUNCIL: council.top_k}}
    shared.report_table("council_quality", rows, **about, **compare(pairs), answers=str(file.relative_to(shared.ROOT)))


def load_questions() -> list[Question]:
    return list(read_questions(QUESTIONS).questions[:NUM_QUESTIONS])


def answer_all(questions: Sequence[Question], ways: Mapping[str, Way], file: Path) -> list[Pair]:
    """All ways answer each question, which is written to `file` at once; those that all answered until Ctrl-C."""
    pairs: list[Pair] = []
    try:
        for question in questions:
            pair = {name: answer(question, way) for name, way in ways.items()}
            pairs.append(pair)
            with file.open("a", encoding="utf-8") as out:
                told = {name: outcome.to_dict() | {"grade": graded.to_dict()} for name, (outcome, graded) in pair.items()}
                out.write(json.dumps({"id": question.id, "question": question.question} | told, ensure_ascii=False) + "\n")
            said = (f"{name} {'right' if graded.is_right else 'wrong'} in {each.seconds:.1f} s" for name, (each, graded) in pair.items())
            print(f"{len(pairs)}/{len(questions)} {question.question}: {', '.join(said)}", file=sys.stderr, flush=True)
    except (KeyboardInterrupt, InterruptedRunError):
        print("Interrupted.", file=sys.stderr)
    return pairs


def answer(question: Question, way: Way) -> tuple[Outcome, Grade]:
    with way.opened() as answering:
        outcome = answering(question.question)
    return outcome, grade(question, outcome)


def row(program: str, answers: Sequence[tuple[Outcome, Grade]]) -> dict[str, object]:
    """Seconds and tokens are means: their sum is what all questions take."""
    outcomes, grades = [outcome for outcome, _ in answers], [graded for _, graded in answers]
    return {
        "program": program,
        "questions": len(answers),
        "right": sum(each.is_right for each in grades),
        "cite a source": sum(any(citation.supplied for citation in each.citations) for each in outcomes),
        "cite one that holds the answer": sum(each.cites_holder for each in grades),
        "unsupported citations": sum(each.num_invented for each in grades),
        "errors": sum(bool(each.error) for each in outcomes),
        "s": statistics.mean(each.seconds for each in outcomes),
        "prompt tokens": round(statistics.mean(each.prompt_tokens for each in outcomes)),
        "evaluated tokens": round(statistics.mean(each.evaluated_tokens for each in outcomes)),
        "answer tokens": round(statistics.mean(each.completion_tokens for each in outcomes)),
    }


def compare(pairs: Sequence[Pair]) -> dict[str, object]:
    """How often only one of them is right, and how likely so uneven a split is if neither is better (sign test, two-sided)."""
    right = [(pair[PLAIN][1].is_right, pair[COUNCIL][1].is_right) for pair in pairs]
    only = {PLAIN: sum(one and not two for one, two in right), COUNCIL: sum(two and not one for one, two in right)}
    return {"only this one right": only, "p of the sign test": round(sign_test(*only.values()), 3)}


if __name__ == "__main__":
    main()
