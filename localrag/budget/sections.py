"""The sections of a prompt, each declared once: budgets, terminal, page, report and docs read this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from localrag.budget.section import Cut, Flex, Percent


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSpec:
    """One section of a prompt, and its defaults.

    `help` is one line about its content. `flex` is its default share of the window, and `cuts` are the ways in which it can be cut; a
    section without them is sent whole or not at all, and a budget cannot change it. One that `is_protected` has content that is never
    cut; one that `has_limit` is written by people, so a budget may refuse a longer text.

    `colour` is `#rrggbb`. It stands behind white letters and on light and dark pages and terminals: its contrast is at least 4.5 to 1
    with white, 3.5 to 1 with black and 3 to 1 with the page at night.
    """

    name: str
    colour: str
    help: str
    flex: Flex | None = None
    cuts: tuple[Cut, ...] = ()
    is_protected: bool = False
    has_limit: bool = False


_IN_ORDER = (
    SectionSpec(name="scaffold", colour="#6b7280", help="The text that the model's template adds.", is_protected=True),
    SectionSpec(name="system", colour="#8b5cd6", help="The system text.", is_protected=True, has_limit=True),
    SectionSpec(
        name="tools",
        colour="#c2570c",
        help="Descriptions of tools, and the calls and results of this round.",
        flex=Flex(max=Percent(30), spare=1.0, cut="drop"),
        cuts=("drop", "error"),
    ),
    SectionSpec(
        name="memories",
        colour="#c43b7a",
        help="Facts from earlier conversations.",
        flex=Flex(max=Percent(10), cut="drop"),
        cuts=("drop", "truncate", "error"),
    ),
    SectionSpec(
        name="summary",
        colour="#0f7f78",
        help="A summary of the messages that history leaves out.",
        flex=Flex(max=Percent(10), cut="truncate"),
        cuts=("truncate",),
    ),
    SectionSpec(name="pinned", colour="#a8606c", help="Earlier messages that are always sent.", is_protected=True),
    SectionSpec(
        name="history",
        colour="#3b6fd4",
        help="Earlier messages of the conversation.",
        flex=Flex(basis=Percent(5), grow=1.0, cut="summarize"),
        cuts=("oldest", "truncate", "summarize", "error"),
    ),
    SectionSpec(
        name="attachments",
        colour="#8a6a12",
        help="Files that came with the question.",
        flex=Flex(basis=Percent(30), grow=1.0, cut="truncate"),
        cuts=("drop", "truncate", "summarize", "error"),
    ),
    SectionSpec(
        name="cited",
        colour="#667600",
        help="In a council: passages that the proposals cite.",
        flex=Flex(max=Percent(60), grow=1.0, shrink=0.25, cut="drop"),
        cuts=("drop", "truncate", "error"),
    ),
    SectionSpec(
        name="evidence",
        colour="#25803f",
        help="Passages that were found for the question.",
        flex=Flex(basis=Percent(50), max=Percent(50), cut="drop"),
        cuts=("drop", "truncate", "summarize", "error"),
    ),
    SectionSpec(name="pointers", colour="#b22fd6", help="References to passages in earlier messages.", is_protected=True),
    SectionSpec(name="question", colour="#0b7aa6", help="The question.", is_protected=True, has_limit=True),
    SectionSpec(
        name="proposals",
        colour="#5f50f0",
        help="In a council: the other members' proposals.",
        flex=Flex(basis=Percent(40), grow=1.0, shrink=0.5, cut="middle"),
        cuts=("middle", "error"),
    ),
    SectionSpec(
        name="plan",
        colour="#8a5896",
        help="In a council: the planner's plan.",
        flex=Flex(max=Percent(10), cut="truncate"),
        cuts=("truncate", "drop", "error"),
    ),
    SectionSpec(
        name="instructions", colour="#ae34ae", help="In a council: the instructions for this role.", is_protected=True, has_limit=True
    ),
    SectionSpec(name="gap", colour="#7a6a58", help="A margin that no section may use."),
    SectionSpec(
        name="thinking",
        colour="#e0115f",
        help="Room for the model's thoughts before its answer.",
        flex=Flex(basis=1024, min=32, grow=1.0, cut="never"),
        cuts=("never",),
    ),
    SectionSpec(
        name="answer",
        colour="#cc3030",
        help="Room for the answer.",
        flex=Flex(basis=512, min=32, grow=1.0, cut="never"),
        cuts=("never",),
    ),
)
SPECS: Mapping[str, SectionSpec] = MappingProxyType({spec.name: spec for spec in _IN_ORDER})
"""By name, in the order of the prompt and of its ledger."""
ORDER = tuple(SPECS)
PROTECTED = tuple(spec.name for spec in _IN_ORDER if spec.is_protected)
LIMITED = tuple(spec.name for spec in _IN_ORDER if spec.has_limit)
RESERVED = tuple(spec.name for spec in _IN_ORDER if spec.flex is None or spec.flex.cut == "never")
"""Sections that take their tokens before the others share what is left of the window."""
SECTIONS: Mapping[str, Flex] = MappingProxyType({spec.name: spec.flex for spec in _IN_ORDER if spec.flex is not None})
"""The sections that bend. Percentages are of the window less what is fixed; content is served first, and the answer takes what is left."""


def colour_of(name: str) -> str:
    """The colour of a section; a grey for one of another version's ledger."""
    return SPECS[name].colour if name in SPECS else "#707070"
