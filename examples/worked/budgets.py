"""Budgets that can be checked by hand: the worked examples of docs/explanation/budget.md, computed by `negotiate`.

Run it to print the tables:  python examples/worked/budgets.py
With --write, the tables of all worked examples are put into docs/explanation/budget.md instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from localrag.budget import CUTS, SECTIONS, Budget, Flex, Length, Percent, Profile, Section, negotiate
from localrag.errors import ConfigError

# --- the defaults


def allowed_cuts(name: str) -> list[str]:
    """What a section can have as its `cut`, found by trying."""
    found: list[str] = []
    for cut in CUTS:
        try:
            Profile(sections={name: replace(SECTIONS[name], cut=cut)})
        except ConfigError:
            continue
        found.append(cut)
    return found


def defaults() -> list[list[str]]:
    rows = []
    for name, flex in SECTIONS.items():
        lengths = [_length(flex.basis), _length(flex.min), "" if flex.max is None else _length(flex.max)]
        others = ", ".join(cut for cut in allowed_cuts(name) if cut != flex.cut)
        rows.append([f"`{name}`", *lengths, f"{flex.grow:g}", f"{flex.shrink:g}", f"{flex.spare or 0:g}", flex.cut, others])
    return rows


def _length(length: Length | None) -> str:
    return "content" if length is None else f"{length.value:g} %" if isinstance(length, Percent) else f"{length:,}"


# --- a window of 100 tokens


def hundred(history: int) -> Budget:
    """A question, evidence, an answer, and a history of so many tokens, in a window of 100."""
    return negotiate(
        100,
        [
            Section.fixed("question", 20),
            Section(name="evidence", basis=Percent(50), max=Percent(50)),
            Section(name="history", basis=None, content=history),
            Section(name="answer", basis=20, min=18, max=25, grow=1),
        ],
    )


def hundred_rows() -> list[list[str]]:
    long, short = hundred(40), hundred(10)
    start = {"question": "20, fixed", "evidence": "50 % of 80 = 40", "history": "content: 40 or 10", "answer": "20, min 18, max 25"}
    rows = [[f"`{name}`", text, str(long.allocations[name]), str(short.allocations[name])] for name, text in start.items()]
    return [*rows, ["spare", "", str(long.spare), str(short.spare)]]


def grown(most: int | None) -> Budget:
    """Three sections that grow in the ratio 1 : 3 : 1 beside a question of 20, in a window of 100; evidence up to `most`."""
    return negotiate(
        100,
        [
            Section.fixed("question", 20),
            Section(name="notes", basis=10, grow=1),
            Section(name="evidence", basis=10, grow=3, max=most),
            Section(name="answer", basis=20, grow=1),
        ],
    )


def grown_rows() -> list[list[str]]:
    free, bound = grown(None), grown(25)
    start = {"question": "20, fixed", "notes": "10, grow 1", "evidence": "10, grow 3", "answer": "20, grow 1"}
    rows = [[f"`{name}`", text, str(free.allocations[name]), str(bound.allocations[name])] for name, text in start.items()]
    return [*rows, ["spare", "", str(free.spare), str(bound.spare)]]


# --- examples 1 to 3: the answer takes what the input leaves

NEGOTIATION = Profile(
    name="negotiation",
    gap=100,
    sections={
        "history": replace(SECTIONS["history"], basis=None, cut="oldest"),
        "answer": replace(SECTIONS["answer"], basis=500, min=500),
    },
)
"""The answer starts at its floor and grows into what is left; history starts at all that there is, and only it can shrink."""

SYSTEM_TOKENS = 500


@dataclass(frozen=True, slots=True)
class Negotiation:
    """One example: messages of 250 tokens each, the answer that is asked for, and the one that the document computes."""

    window: int
    history: int
    max_tokens: int
    document: int
    why: str

    def share(self, profile: Profile) -> Budget:
        return negotiate(
            self.window,
            [
                Section.fixed("system", SYSTEM_TOKENS),
                Section.fixed("gap", profile.gap if isinstance(profile.gap, int) else 0),
                profile.sections["history"].section("history", self.history),
                profile.sections["answer"].section("answer", self.max_tokens),
            ],
        )

    @property
    def document_total(self) -> int:
        """Input, margin and answer as the document adds them up."""
        return SYSTEM_TOKENS + self.history + 100 + self.document


NEGOTIATIONS = (
    Negotiation(128_000, 5 * 250, 3_000, 3_000, "There is room for all that is asked for."),
    Negotiation(16_385, 50 * 250, 5_000, 3_285, "The answer grows from its floor of 500 into what the input leaves."),
    Negotiation(16_000, 60 * 250, 3_000, 500, "400 are left, 100 below the floor: history gives up 100, so the whole fits."),
)


def negotiation_rows() -> list[list[str]]:
    rows = []
    for number, example in enumerate(NEGOTIATIONS, 1):
        budget = example.share(NEGOTIATION)
        over = ", **over the window**" if example.document_total > example.window else ""
        theirs = f"{example.document:,}, in all {example.document_total:,}{over}"
        ours = f"{budget.allocations['answer']:,}, in all {example.window - budget.spare:,}"
        asked = _numbers(example.window, example.history, example.max_tokens)
        rows.append([str(number), *asked, theirs, ours, f"{budget.allocations['history']:,}", example.why])
    return rows


def negotiation_default_rows() -> list[list[str]]:
    rows = []
    for number, example in enumerate(NEGOTIATIONS, 1):
        given = example.share(Profile()).allocations
        rows.append([str(number), *_numbers(given["history"], example.history, given["answer"], example.max_tokens)])
    return rows


# --- the chat example: what max_tokens and a ratio of 0.6 leave for documents

WINDOW, CONVERSATION, FORMATTING, RATIO, OFFERED = 8192, 500, 150, 0.6, 100 * 200


def chat_document(max_tokens: int) -> dict[str, int]:
    """Two boxes, one in the other: the space that max_tokens allows, and in it evidence and answer."""
    fixed = [Section.fixed("conversation", CONVERSATION), Section.fixed("formatting", FORMATTING)]
    outer = negotiate(WINDOW, [*fixed, Section(name="available", grow=1, max=max_tokens)])
    shares = [Section(name="evidence", basis=Percent(100 * RATIO)), Section(name="answer", basis=Percent(100 - 100 * RATIO))]
    inner = negotiate(outer.allocations["available"], shares)
    return {**outer.allocations, **inner.allocations, "spare": outer.spare + inner.spare}


def chat_default(max_tokens: int) -> dict[str, int]:
    """The same in one box, as localrag does it: evidence has its share of the window, and the answer a share of its own."""
    profile = Profile().with_context_ratio(RATIO)
    wanted = {"history": CONVERSATION, "evidence": OFFERED, "answer": max_tokens}
    sections = [Section.fixed("formatting", FORMATTING), *(profile.sections[name].section(name, tokens) for name, tokens in wanted.items())]
    budget = negotiate(WINDOW, sections)
    return {**budget.allocations, "conversation": budget.allocations["history"], "spare": budget.spare}


def chat_rows() -> list[list[str]]:
    columns = ("conversation", "formatting", "evidence", "answer", "spare")
    return [
        [who, f"{max_tokens:,}", *_numbers(*(share(max_tokens)[column] for column in columns))]
        for max_tokens in (1000, 200)
        for who, share in (("the document", chat_document), ("localrag", chat_default))
    ]


# --- the allocation in tiers: 100,000 tokens, 8,000 and 2,000 of them reserved

RESERVED = {"output": 8000, "system": 2000}
SHARES = {"primary": 50, "supporting": 30, "reference": 15, "history": 5}
PLENTY = dict.fromkeys(SHARES, 90_000)
CASES = {
    "more than fits everywhere": PLENTY,
    "8,700 of primary, more than fits elsewhere": {**PLENTY, "primary": 8_700},
    "the files of the document": {"primary": 8_700, "supporting": 3_500, "reference": 900, "history": 0},
}


def allocation(wanted: Mapping[str, int]) -> Budget:
    """Each tier starts at its share and has no more than there is of it; what is left over goes to the others in the ratio of the shares."""
    tiers = [Section(name=name, basis=Percent(share), grow=share, content=wanted[name]) for name, share in SHARES.items()]
    return negotiate(100_000, [*(Section.fixed(name, tokens) for name, tokens in RESERVED.items()), *tiers])


def allocation_rows() -> list[list[str]]:
    rows = []
    for case, wanted in CASES.items():
        budget = allocation(wanted)
        rows.append([case, *_numbers(*(budget.allocations[name] for name in SHARES), budget.spare), f"{1 - budget.spare / 90_000:.1%}"])
    return rows


TIERED = Profile(
    name="tiered",
    sections={
        "history": replace(SECTIONS["history"], basis=Percent(5)),
        "evidence": Flex(basis=Percent(95), max=Percent(95), spare=0),
        "answer": replace(SECTIONS["answer"], basis=8000, min=8000),
    },
)
"""The same as a budget of localrag, whose tiers share one section of evidence."""


def tiered() -> Budget:
    wanted = {"history": 90_000, "evidence": 90_000, "answer": 8_000}
    sections = [TIERED.sections[name].section(name, tokens) for name, tokens in wanted.items()]
    return negotiate(100_000, [Section.fixed("system", 2000), *sections])


# --- Markdown


def tables() -> dict[str, str]:
    """Every table of this module, by the name of its place in docs/explanation/budget.md."""
    rows = {
        "sections": defaults(),
        "hundred": hundred_rows(),
        "hundred-grow": grown_rows(),
        "negotiation": negotiation_rows(),
        "negotiation-default": negotiation_default_rows(),
        "chat": chat_rows(),
        "allocation": allocation_rows(),
    }
    return {name: _table(HEADS[name], rows[name]) for name in rows}


HEADS = {
    "sections": "section | basis > | min > | max > | grow > | shrink > | spare > | cut | can also be",
    "hundred": "section | starts at | long conversation > | short one >",
    "hundred-grow": "section | starts at | no limit > | evidence at most 25 >",
    "negotiation": "example | window > | history > | asked for > | the document's answer | the answer here | history kept > | why",
    "negotiation-default": "example | history kept > | of > | answer > | of >",
    "chat": "who | max_tokens > | conversation > | formatting > | evidence > | answer > | spare >",
    "allocation": "what there is to place | primary > | supporting > | reference > | history > | spare > | used >",
}
"""The columns; one whose name ends with `>` holds numbers."""


def _numbers(*values: int) -> list[str]:
    return [f"{value:,}" for value in values]


def _table(head: str, rows: Sequence[Sequence[str]]) -> str:
    columns = head.split(" | ")
    lines = [[column.removesuffix(" >") for column in columns], ["---:" if column.endswith(" >") else "---" for column in columns], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str]) -> None:
    if list(arguments) == ["--write"]:
        import page  # noqa: PLC0415  # beside this file, when it runs as a program

        print("\n".join(page.write()))
    elif arguments:
        sys.exit("usage: python examples/worked/budgets.py [--write]")
    else:
        for name, text in tables().items():
            print(f"\n{name}\n\n{text}")


if __name__ == "__main__":
    main(sys.argv[1:])
