"""How relevant a file is for a task: five factors, each 0 to 1, weighted and added; the parts are the explanation."""

from localrag.relevance.kinds import kind_of
from localrag.relevance.profile import File
from localrag.relevance.scoring import MAX_TASK_CHARS, Score, score
from localrag.relevance.weighing import weigh
from localrag.relevance.weights import DEFAULT_FILE_TYPES, FACTORS, METHODS, Method, Weights

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
