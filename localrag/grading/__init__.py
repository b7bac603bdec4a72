"""How good answers are, by questions whose answers are known: pure arithmetic on texts, without a model.

`read_questions` reads what is asked, `grade` compares an `Outcome` with it, `tally` adds the grades of one way of answering up, and
`compare` sets two ways side by side that were asked the same.
"""

from localrag.grading.grades import REFUSALS, Grade, grade, is_met, is_refusal
from localrag.grading.outcomes import Outcome, Passage
from localrag.grading.questions import Question, QuestionFile, read_questions, spread
from localrag.grading.tallies import Comparison, Share, Tally, compare, sign_test, tally

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
