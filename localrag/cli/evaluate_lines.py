"""What came of the questions of `eval --qa`, a line a question and way; an evaluation that was killed goes on from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from localrag.cli.result_file import ResultFile
from localrag.errors import UsageError
from localrag.grading import Grade, Outcome, Question
from localrag.session.quality import Way

Key = tuple[str, str]
"""The id of a question, and the name of a way."""


def mark(question: Question, way: Way) -> str:
    """What tells whether an answer is one to this question, asked in this way. The known answers are no part of it: they may be mended."""
    said = json.dumps([question.question, dict(way.about)], sort_keys=True)
    return blake2b(said.encode(), digest_size=8).hexdigest()


class Lines(ResultFile):
    """OUT of an evaluation. `outcomes` are those that it holds; questions that failed are asked again."""

    run: ClassVar[str] = "evaluation"

    def __init__(self, path: Path, questions: Iterable[Question], ways: Iterable[Way]) -> None:
        """UsageError where it holds answers to anything else than these questions, asked in these ways."""
        ways = list(ways)
        self._marks: dict[Key, str] = {(question.id, way.name): mark(question, way) for question in questions for way in ways}
        self.outcomes: dict[Key, Outcome] = {}
        super().__init__(path)

    def write(self, question: Question, way: Way, outcome: Outcome, grade: Grade) -> None:
        """The grade is for who reads the file; it is made anew from the rest when the evaluation goes on."""
        key = question.id, way.name
        known = {"id": question.id, "way": way.name, "request": self._marks[key], "question": question.question}
        self.append(known | outcome.to_dict() | {"grade": grade.to_dict()})

    def is_line(self, row: object) -> bool:
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("id", "way", "request", "text")):
            return False
        try:
            Outcome.from_dict(row)
        except (KeyError, TypeError):
            return False
        return True

    def is_kept(self, number: int, row: dict[str, Any]) -> bool:
        key = row["id"], row["way"]
        known = self._marks.get(key)
        if known != row["request"]:
            said = "is not asked" if known is None else "asks something else, or is asked by other means"
            raise UsageError(
                f"Line {number} of {self.path} is of {json.dumps(row['id'])[:80]} by {json.dumps(row['way'])[:80]}, which {said} now.",
                hint="Give another --out.",
                line=number,
            )
        outcome = Outcome.from_dict(row)
        if outcome.error or key in self.outcomes:
            return False
        self.outcomes[key] = outcome
        return True
