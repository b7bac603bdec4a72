"""Shorten texts to a number of tokens: truncation, the text's own best sentences, its outline, or a summary by a model."""

from localrag.summary.levels import ANSWER_TOKENS, LEVELS, LIMITS, Level, Method, Source, Summary, SummaryCache, Write, summarize, usable
from localrag.summary.shorten import Count, cut_middle, extract, split, truncate

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
