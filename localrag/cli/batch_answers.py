"""The answers of a batch: an answer object a line, each with the id of its question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from localrag.cli.batch_questions import Asked, Id, Questions
from localrag.cli.result_file import ResultFile
from localrag.errors import LocalragError, UsageError
from localrag.session import Answer


class Answers(ResultFile):
    """OUT of a batch. `done` are the ids whose answers it holds; lines that say what went wrong make way for another try."""

    run: ClassVar[str] = "batch"

    def __init__(self, path: Path, questions: Questions, *, force: bool) -> None:
        """UsageError where another batch writes to it, where it holds anything but answers, or answers to other questions.

        With `force`, answers to questions that IN has no more stay, and questions that were changed are asked again.
        """
        self.done: set[Id] = set()
        self._questions = questions
        self._force = force
        super().__init__(path)

    def write(self, asked: Asked, outcome: Answer | LocalragError) -> None:
        said = outcome.to_dict() if isinstance(outcome, Answer) else {"line": asked.line, "error": outcome.to_dict()}
        self.append({"id": asked.id, **({"request": asked.mark} if isinstance(outcome, Answer) else {}), **said})

    def is_line(self, row: object) -> bool:
        return _kind(row) != "other"

    def is_kept(self, number: int, row: dict[str, Any]) -> bool:
        if _kind(row) == "error":
            return False
        mark = self._questions.marks.get(row["id"])
        if mark == row["request"]:
            self.done.add(row["id"])
        elif not self._force:
            said = "is not asked" if mark is None else "asks something else"
            raise UsageError(
                f"Line {number} of {self.path} answers {json.dumps(row['id'])[:80]}, which {said} in this batch.",
                hint="Give another --out, or --force to keep answers to other questions and to ask changed ones again.",
                line=number,
            )
        return mark is None or mark == row["request"]


def _kind(row: object) -> str:
    """Of a line of OUT: answer, error, or other for what no batch wrote."""
    if not isinstance(row, dict) or "id" not in row or isinstance(row["id"], bool):
        return "other"
    if isinstance(row.get("error"), dict) and isinstance(row.get("line"), int) and isinstance(row["id"], str | int | None):
        return "error"
    return "answer" if isinstance(row["id"], str | int) and isinstance(row.get("request"), str) and "answer" in row else "other"
