"""Score the relevance of files for a task: five factors of 0 to 1, weighted and added; the contributions explain the score."""

from localrag.relevance.profile import File, kind_of
from localrag.relevance.scoring import DEFAULT_FILE_TYPES, FACTORS, MAX_TASK_CHARS, METHODS, Method, Score, Weights, score, weigh

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
