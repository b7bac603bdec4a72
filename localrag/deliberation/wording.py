"""What the roles of a council are told: in short sentences, for models of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SYSTEM = "You sit on a council. It answers questions from sources. Each source begins with its tag."
CITE = " Answer from the sources above, and begin with the tag of the source that you use, like [{label}]."
"""Stands last where there are sources; `{label}` becomes the tag of one of them: a small model copies what it reads."""
PROPOSE = "Answer the question as {name}, in a few sentences. {persona}"
PLAN = (
    "Do not answer the question yet. Plan how to answer it. Write JSON with:\n"
    "strategy: one or two sentences.\n"
    "searches: up to 3 short texts to search the documents for, or none."
)
REVIEW = (
    "You are {name}. {persona}\n\n"
    "Do not answer the question. Rank the proposals above by how well the sources support them. Write JSON with:\n"
    "ranking: the letter of each proposal, once, the best first."
)
JUDGE = (
    "You are the judge. {persona} Answer the question from the sources and the proposals. Write JSON with:\n"
    "citations: the tags of the sources that answer it.\n"
    "text: your answer from them in a few sentences.\n"
    "decision: the answer in one sentence.\n"
    "confidence: low, medium or high.\n"
    "dissent: who proposes something else, and what."
)
USE_TOOLS = "\n\nBefore you decide you may call tools, one at a time. Call conclude when you know enough."
NO_PERSONA = "You trust the sources more than the proposals."


def propose(name: str, persona: str) -> str:
    return PROPOSE.format(name=name, persona=persona.strip())


def review(name: str, persona: str) -> str:
    return REVIEW.format(name=name, persona=persona.strip())


def judge(persona: str, *, with_tools: bool) -> str:
    return JUDGE.format(persona=persona.strip() or NO_PERSONA) + (USE_TOOLS if with_tools else "")


def planning(
    strategy: str = "", searches: Sequence[str] = (), *, silent: Sequence[str] = (), points: Mapping[str, float] | None = None
) -> str:
    """The planning context: who said nothing, how the members rank each other, what was planned and what was searched for.

    What is not known otherwise stands first, for the end goes where there is too little room.
    """
    lists = (
        ("Said nothing", silent),
        ("Ranked by the specialists, the best first", [f"{name} ({each:.2f})" for name, each in (points or {}).items()]),
        ("Plan", [strategy] if strategy else []),
        ("Searched for", searches),
    )
    return "\n".join(f"{what}: {'; '.join(texts)}" for what, texts in lists if texts)
