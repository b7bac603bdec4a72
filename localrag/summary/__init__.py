"""A text in fewer tokens, by count: its beginning, its own best sentences, its outline, or what a model writes of it."""

from localrag.summary.extractive import extract
from localrag.summary.fitting import Count, cut_middle, split, truncate
from localrag.summary.levels import ANSWER_TOKENS, LEVELS, LIMITS, Level, Method, Source, Summary, SummaryCache, Write, summarize, usable

__all__ = [
    "ANSWER_TOKENS",
    "LEVELS",
    "LIMITS",
    "Count",
    "Level",
    "Method",
    "Source",
    "Summary",
    "SummaryCache",
    "Write",
    "cut_middle",
    "extract",
    "split",
    "summarize",
    "truncate",
    "usable",
]
