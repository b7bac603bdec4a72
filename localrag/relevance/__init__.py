"""Score the relevance of files for a task: five factors of 0 to 1, weighted and added; the parts explain the score."""

from localrag.relevance.alignment import METHODS, Method
from localrag.relevance.profile import File, kind_of
from localrag.relevance.scoring import DEFAULT_FILE_TYPES, FACTORS, MAX_TASK_CHARS, Score, Weights, score, weigh

__all__ = [
    "DEFAULT_FILE_TYPES",
    "FACTORS",
    "MAX_TASK_CHARS",
    "METHODS",
    "File",
    "Method",
    "Score",
    "Weights",
    "kind_of",
    "score",
    "weigh",
]
