"""docs/reference/models-toml.md: every table and key of models.toml, from the pydantic schema that checks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from docgen.sources import GENERATED, attribute_docs
from localrag.budget import SECTIONS, TIERS
from localrag.catalog import budgets, councils, entries, schema
from localrag.relevance.scoring import DEFAULT_FILE_TYPES, DEFAULT_WEIGHTS
from localrag.session.memory import RecallRule
from localrag.types import SamplingParams

_INTRODUCTION = f"""\
# models.toml

{GENERATED}

models.toml names models and embedders, and holds budgets, councils and weights. The files are layered. From the top:

1. `--models FILE`, or the file that the environment variable `LOCALRAG_MODELS` names
2. `models.toml` in the current folder
3. `models.toml` in the home
4. the one that ships with localrag

A file adds to those below it, so two lines suffice for a model of your own. An entry (`[models.NAME]`, `[budgets.NAME]`,
`[councils.NAME]`, a pattern of `[tags]`) replaces the whole entry of the same name below: its sha256 and its window go with it.
`default_model`, `default_embedder` and the keys of `[relevance]`, `[memories]` and `[server]` are replaced one by one. A relative path
starts at the folder of the file in which it stands. `localrag models list`, `localrag doctor` and `ask --explain` name the files in force.

A models.toml in the current folder chooses which model answers, so look at it before you work in a folder from someone else. If it
belongs to another user of this machine, localrag refuses it (exit code 3) until you name it with `--models`.

An unknown key, a wrong type and a contradiction are errors of one line that names file, table and key (exit code 3).

A source is one of `wheel`, `repo` and `path`. [Larger models](../how-to/big-models.md) shows some, and
[the budget](../explanation/budget.md) says what the numbers of a budget mean.
"""
_SECTION = "as [built in](../explanation/budget.md#sections)"
_TABLES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("Top level", schema.CatalogTable),
    ("[models.NAME]", entries.ModelTable),
    ("[embedders.NAME]", entries.EmbedderTable),
    ("[rerankers.NAME]", entries.RerankerTable),
    ("[budgets.NAME]", budgets.BudgetTable),
    ("[budgets.NAME.SECTION]", budgets.FlexTable),
    ("[budgets.NAME.history]", budgets.HistoryTable),
    ("[budgets.NAME.limits]", budgets.LimitsTable),
    ("[budgets.NAME.tiers.TIER]", budgets.TierTable),
    ("[relevance]", budgets.RelevanceTable),
    ("[relevance.file_types]", budgets.FileTypesTable),
    ("[relevance.thresholds]", budgets.ThresholdsTable),
    ("[memories]", schema.MemoriesTable),
    ("[server]", schema.ServerTable),
    ("[councils.NAME]", councils.CouncilTable),
    ("[[councils.NAME.specialists]]", councils.SpecialistTable),
    ("[councils.NAME.judge]", councils.JudgeTable),
)
_NOTES = {
    "[budgets.NAME.SECTION]": f"SECTION is one of {', '.join(f'`{name}`' for name in SECTIONS)}. "
    "A section that is not there, and a key that is left out, are as built in.",
    "[budgets.NAME.tiers.TIER]": "TIER is `primary`, `supporting` or `reference`.",
    "[budgets.NAME.history]": "The keys of any section, and one more:",
    "[embedders.NAME]": "An index remembers the prefixes of its embedder. With others it is refused, since its vectors would not be "
    "comparable: restore them, or index the documents into a new knowledge base.",
    "Top level": "Besides these two keys, the file is made of tables.",
}
_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}


def _defaults() -> dict[type[BaseModel], Mapping[str, object]]:
    """What holds where a key is not set, of tables whose schema leaves that to the code that they are for."""
    sampling = asdict(SamplingParams())
    return {
        budgets.FlexTable: dict.fromkeys(budgets.FlexTable.model_fields, _SECTION),
        budgets.HistoryTable: dict.fromkeys(budgets.HistoryTable.model_fields, _SECTION) | {"max_messages": None},
        budgets.LimitsTable: dict.fromkeys(budgets.LimitsTable.model_fields),
        budgets.TierTable: {
            "share": ", ".join(f"{tier.name} {tier.share:g}" for tier in TIERS),
            "threshold": ", ".join(f"{tier.name} {tier.threshold:g}" for tier in TIERS),
        },
        budgets.ThresholdsTable: {tier.name: tier.threshold for tier in TIERS},
        budgets.RelevanceTable: {name: getattr(DEFAULT_WEIGHTS, name, None) for name in budgets.RelevanceTable.model_fields},
        budgets.FileTypesTable: DEFAULT_FILE_TYPES,
        schema.MemoriesTable: asdict(RecallRule()),
        councils.SpecialistTable: {**sampling, "persona": None, "name": None, "max_tokens": "the council's, else 512"},
        councils.JudgeTable: {**sampling, "rounds": f"{councils.DEFAULT_ROUNDS} where there are tools"},
        councils.CouncilTable: {"system": "a text of its own"},
    }


def page() -> str:
    parts = [_INTRODUCTION.strip()]
    for title, table in _TABLES:
        parts.append(f"## {title.replace('[', '').replace(']', '')}")
        if title.startswith("["):
            parts.append(f"`{title}`".replace(" and ", "` and `"))
        if title in _NOTES:
            parts.append(_NOTES[title])
        rows = list(_rows(table, only_new=title == "[budgets.NAME.history]"))
        parts.append("\n".join(["| key | type | default | |", "| --- | --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _rows(table: type[BaseModel], *, only_new: bool) -> Iterator[str]:
    """A line for each key; a table in a table has its own place."""
    docs, defaults = attribute_docs(table), _defaults().get(table, {})
    whole = table.model_json_schema()
    for key, form in whole["properties"].items():
        if only_new and key in budgets.FlexTable.model_fields:
            continue
        default = defaults[key] if key in defaults else form.get("default")
        yield f"| `{key}` | {_type(form, whole.get('$defs', {}))} | {_default(default)} | {' '.join(docs[key].split())} |"


def _type(form: Mapping[str, Any], tables: Mapping[str, Any]) -> str:
    """A JSON schema in the words of a person."""
    if "anyOf" in form:
        return " or ".join(dict.fromkeys(_type(each, tables) for each in form["anyOf"] if each.get("type") != "null"))
    if "$ref" in form:
        return "table"
    if "const" in form or "enum" in form:
        return ", ".join(f'`"{each}"`' for each in form.get("enum", [form.get("const")]))
    if form["type"] == "object":
        inner = form.get("additionalProperties", {})
        return "tables by name" if "$ref" in inner else "lists of texts by pattern" if inner else "table"
    if form["type"] == "array":
        return "list of tables" if "$ref" in form["items"] else "list of texts"
    return _TYPES[form["type"]] + _bounds(form)


def _bounds(form: Mapping[str, Any]) -> str:
    low, high = form.get("minimum"), form.get("maximum")
    if "exclusiveMinimum" in form:
        return f" above {form['exclusiveMinimum']:g}"
    if low is None or (high is not None and high >= 2**31 - 1):
        return "" if low is None else f", {low:g} or more"
    return f", {low:g} or more" if high is None else f", {low:g} to {high:g}"


def _default(value: object) -> str:
    if value is None or value in ("", [], {}) or isinstance(value, Mapping):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"`{value:g}`"
    text = str(value)
    return text if " " in text or "(" in text else f'`"{text}"`'
