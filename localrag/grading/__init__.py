"""Grade answers by questions with known answers: pure arithmetic on texts, without a model.

`read_questions` reads the questions, `grade` compares an `Outcome` with one, `tally` adds up the grades of one way of answering, and
`compare` compares two ways on the same questions.
"""

from localrag.grading.grades import (
    REFUSALS,
    Comparison,
    Grade,
    Outcome,
    Passage,
    Share,
    Tally,
    compare,
    grade,
    is_met,
    is_refusal,
    sign_test,
    tally,
)
from localrag.grading.questions import Question, QuestionFile, read_questions, spread

__all__ = [
    "REFUSALS",
    "Comparison",
    "Grade",
    "Outcome",
    "Passage",
    "Question",
    "QuestionFile",
    "Share",
    "Tally",
    "compare",
    "grade",
    "is_met",
    "is_refusal",
    "read_questions",
    "sign_test",
    "spread",
    "tally",
]
