"""[budgets.NAME] and [relevance] of models.toml: pydantic tables, converted to Profile and plain values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from localrag.budget import SECTIONS, Cut, Flex, Length, Overflow, Percent, Profile, Tier
from localrag.catalog.entries import LENGTH_FAULT, MAX_COUNT, Count, Factor, Table, TableRef, UpToOne
from localrag.errors import ConfigError

_LENGTH = 'a whole number of tokens, 0 or more, or a percentage from "0%" to "100%"'
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")
_MAX_DEPTH = 100
_CONTENT = "content"


def _length(value: object) -> Length:
    """Validate a number of tokens, or a text such as "30%"."""
    if type(value) is int and 0 <= value <= MAX_COUNT:
        return value
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)) and float(match[1]) <= 100:
        return Percent(float(match[1]))
    raise PydanticCustomError(LENGTH_FAULT, _LENGTH)


def _basis(value: object) -> Length | None:
    if value == _CONTENT:
        return None
    try:
        return _length(value)
    except PydanticCustomError:
        raise PydanticCustomError(LENGTH_FAULT, f'{_LENGTH}, or "{_CONTENT}"') from None


Tokens = Annotated[Length, PlainValidator(_length, json_schema_input_type=int | str)]


class FlexTable(Table):
    """One [budgets.NAME.SECTION]."""

    basis: Annotated[Length | None, PlainValidator(_basis, json_schema_input_type=int | str)] = None
    """Initial size: tokens, a percentage such as "30%", or "content", the size of the content."""
    min: Tokens = 0
    """Minimum: tokens, or a percentage."""
    max: Tokens = 0
    """Maximum: tokens, or a percentage."""
    grow: Factor = 0
    """Share of the free tokens that it takes; 0 takes none."""
    shrink: Factor = 0
    """Share of the missing tokens that it gives up, weighted by basis; 0 gives up none."""
    spare: Factor = 0
    """Share of leftover tokens that it takes, beyond its max. In a table that sets max, the default is 0."""
    cut: Cut = "drop"
    """What to do with content that does not fit. [Budgets](../explanation/budget.md) lists the values for each section."""


class HistoryTable(FlexTable):
    """[budgets.NAME.history]."""

    max_messages: Count | None = None
    """Maximum number of messages; the newest are kept. Same as `max_messages` of the budget."""


class TierTable(Table):
    """One [budgets.NAME.tiers.TIER]; the share is in percent."""

    share: float = Field(default=0, ge=0, le=100)
    """Share of the evidence, in percent of all tiers together."""
    threshold: UpToOne = 0
    """Minimum relevance of its hits."""


class TiersTable(Table):
    """[budgets.NAME.tiers]."""

    primary: TierTable = TierTable()
    """The most relevant."""
    supporting: TierTable = TierTable()
    """The next."""
    reference: TierTable = TierTable()
    """The rest."""


class LimitsTable(Table):
    """[budgets.NAME.limits]: maximum tokens of texts that are sent whole or not at all."""

    system: Count = 0
    """Limit of the system text, in tokens."""
    question: Count = 0
    """Limit of the question, in tokens."""
    instructions: Count = 0
    """Limit of a council role's instructions, in tokens."""


class BudgetTable(Table):
    """One [budgets.NAME]."""

    gap: Tokens = 0
    """A margin that no section uses: tokens, or a percentage."""
    overflow: Overflow | None = None
    """What to do with content that does not fit, for all sections that support it."""
    max_messages: Count | None = None
    """Maximum number of history messages; the newest are kept."""
    context_ratio: UpToOne | None = None
    """Basis and max of the evidence, as a share (0 to 1) of the window less the fixed sections."""
    tiers: TiersTable = TiersTable()
    """How the evidence is shared by relevance."""
    limits: LimitsTable = LimitsTable()
    """Maximum tokens of texts that are always sent whole."""
    tools: FlexTable = FlexTable()
    """Descriptions of tools."""
    memories: FlexTable = FlexTable()
    """Facts kept across conversations."""
    summary: FlexTable = FlexTable()
    """Summary of messages that history leaves out."""
    history: HistoryTable = HistoryTable()
    """Earlier messages of the conversation."""
    attachments: FlexTable = FlexTable()
    """Files that come with the question."""
    cited: FlexTable = FlexTable()
    """In a council: passages that the proposals cite."""
    evidence: FlexTable = FlexTable()
    """Passages found for the question."""
    proposals: FlexTable = FlexTable()
    """In a council: the proposals of the specialists."""
    plan: FlexTable = FlexTable()
    """In a council: the plan, the search queries and the ranking."""
    thinking: FlexTable = FlexTable()
    """A reasoning model's thoughts before the answer."""
    answer: FlexTable = FlexTable()
    """The model's answer."""


class ThresholdsTable(Table):
    """[relevance.thresholds]: minimum relevance of each tier, for budgets that do not set it."""

    primary: UpToOne = 0
    """Threshold of the tier `primary`."""
    supporting: UpToOne = 0
    """Threshold of the tier `supporting`."""
    reference: UpToOne = 0
    """Threshold of the tier `reference`."""


class FileTypesTable(Table):
    """[relevance.file_types]: the value of the factor file_type for each kind of file."""

    source_code: UpToOne = 0
    """Source code."""
    test_code: UpToOne = 0
    """Tests."""
    requirements: UpToOne = 0
    """Requirements, specifications, user stories."""
    documentation: UpToOne = 0
    """Documentation."""
    config: UpToOne = 0
    """Settings and build files."""
    other: UpToOne = 0
    """All other files."""


class RelevanceTable(Table):
    """[relevance]. Only the proportion of the weights matters."""

    task_alignment: Factor = 0
    """Weight of the fit to the task, by words, meaning, or both."""
    recency: Factor = 0
    """Weight of the last modification."""
    mention_density: Factor = 0
    """Weight of references from other files and the task."""
    dependency_depth: Factor = 0
    """Weight of the distance, import by import, from files that the task is about."""
    file_type: Factor = 0
    """Weight of the kind of file."""
    half_life_days: float = Field(default=1, gt=0)
    """Age in days at which recency is one half."""
    max_depth: int = Field(default=0, ge=0, le=_MAX_DEPTH)
    """Number of imports to follow."""
    method: Literal["keyword", "semantic", "hybrid"] = "hybrid"
    """How to measure the fit to the task."""
    file_types: FileTypesTable = FileTypesTable()
    """Value of each kind of file."""
    thresholds: ThresholdsTable = ThresholdsTable()
    """Minimum relevance of each tier."""


_WEIGHTS = ("task_alignment", "recency", "mention_density", "dependency_depth", "file_type")


def profile_of(place: TableRef, name: str, table: BudgetTable, tiers: tuple[Tier, ...]) -> Profile:
    """Convert a table to a Profile. Keys that it does not set keep their defaults; `tiers` are the default tiers."""
    profile = Profile(
        name=name,
        gap=table.gap,
        max_messages=_max_messages(place, table),
        tiers=_tiers(place.inside("tiers"), table, tiers),
        limits=table.limits.given,  # type: ignore[arg-type]  # counts
    )
    if table.context_ratio is not None:
        profile = profile.with_context_ratio(table.context_ratio)
        if twice := sorted(table.evidence.given.keys() & {"basis", "max"}):
            raise place.inside("evidence").error(twice[0], "is already set by context_ratio; remove one of the two")
    if table.overflow is not None:
        profile = profile.with_overflow(table.overflow)
    tables: dict[str, FlexTable] = {section: getattr(table, section) for section in SECTIONS}
    profile = replace(profile, sections={section: _flex(place, profile, section, tables[section]) for section in SECTIONS})
    _check_written_bases(place, profile, tables, has_ratio=table.context_ratio is not None)
    return profile


def _max_messages(place: TableRef, table: BudgetTable) -> int | None:
    if table.max_messages is not None and table.history.max_messages is not None:
        raise place.inside("history").error("max_messages", f"is already set in [{'.'.join(place.table)}]; remove one of the two")
    return table.history.max_messages if table.max_messages is None else table.max_messages


def _tiers(place: TableRef, table: BudgetTable, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    changed = tuple(replace(tier, **getattr(table.tiers, tier.name).given) for tier in tiers)
    with _faults_at(place):
        return Profile(tiers=changed).tiers


def _flex(place: TableRef, profile: Profile, section: str, table: FlexTable) -> Flex:
    """Apply a section's table to its defaults. Raises ConfigError naming the key of a contradiction."""
    place, settings = place.inside(section), {key: value for key, value in table.given.items() if key != "max_messages"}
    if "cut" in settings:
        with _faults_at(place, "cut", f"section {section!r}: cut "):
            replace(profile, sections={section: Flex(cut=table.cut)})
    if "max" in settings:
        settings.setdefault("spare", 0.0)  # a max in the file is a hard limit
    flex = replace(profile.sections[section], **settings)  # type: ignore[arg-type]  # each as its field is declared
    for key in ("min", "basis"):
        if (key == "min" or key in settings) and _is_over(getattr(flex, key), flex.max):
            both = [f"{each} {_toml(getattr(flex, each))}{'' if each in settings else ' (not set in this table)'}" for each in (key, "max")]
            raise place.error(key if key in settings else "max", " is greater than ".join(both))
    return flex


def _is_over(length: Length | None, most: Length | None) -> bool:
    if isinstance(length, Percent) and isinstance(most, Percent):
        return length.value > most.value
    return isinstance(length, int) and isinstance(most, int) and length > most


def _check_written_bases(place: TableRef, profile: Profile, tables: Mapping[str, FlexTable], *, has_ratio: bool) -> None:
    """Require that the percentages in the file add up to at most 100; default ones may shrink."""
    explicit_sections = {section for section, table in tables.items() if "basis" in table.given} | ({"evidence"} if has_ratio else set())
    sections = {name: flex if name in explicit_sections else replace(flex, basis=0) for name, flex in profile.sections.items()}
    bases = {name: flex.basis for name, flex in sections.items() if isinstance(flex.basis, Percent)}
    with _faults_at(place, hint=f"Set here: {', '.join(f'{name} {_toml(basis)}' for name, basis in bases.items())}."):
        replace(profile, sections=sections).check_bases()


def weights_of(place: TableRef, table: RelevanceTable) -> dict[str, object]:
    """Return the settings of the file by field name of Weights; thresholds belong to the tiers."""
    settings = {key: value for key, value in table.given.items() if key != "thresholds"}
    if all(settings.get(weight) == 0 for weight in _WEIGHTS):
        raise place.error(None, "all weights are 0, so no score can be computed")
    if "file_types" in settings:
        settings["file_types"] = MappingProxyType(dict(table.file_types.given))
    return settings


def with_thresholds(place: TableRef, tiers: tuple[Tier, ...], table: RelevanceTable) -> tuple[Tier, ...]:
    """Return the tiers with the thresholds of [relevance.thresholds]."""
    values = table.thresholds.given
    changed = tuple(replace(tier, threshold=values.get(tier.name, tier.threshold)) for tier in tiers)  # type: ignore[arg-type]  # floats
    with _faults_at(place):
        return Profile(tiers=changed).tiers


@contextmanager
def _faults_at(place: TableRef, key: str | None = None, prefix: str = "", *, hint: str | None = None) -> Iterator[None]:
    """Add the place in the file to a ConfigError of Profile. `prefix` is removed from the start of its message."""
    try:
        yield
    except ConfigError as error:
        what = re.sub(r"^Budget '[^']*': ", "", error.message).removeprefix(prefix).removesuffix(".")
        raise place.error(key, what, hint=hint) from None


def _toml(length: Length | None) -> str:
    """Format a length as in the file."""
    return f'"{length.value:g}%"' if isinstance(length, Percent) else f'"{_CONTENT}"' if length is None else str(length)
