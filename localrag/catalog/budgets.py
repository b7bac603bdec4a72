"""[budgets.NAME] and [relevance] of a models.toml: the tables as pydantic sees them, then as Profile and plain values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from localrag.budget import SECTIONS, Cut, Flex, Length, Overflow, Percent, Profile, Tier
from localrag.catalog.faults import Place
from localrag.errors import ConfigError

LENGTH_FAULT = "length"
"""The type of fault whose message is what a length must be."""
_LENGTH = 'a whole number of tokens, 0 or more, or a percentage from "0%" to "100%"'
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")
_MAX_COUNT = 2**31 - 1
_MAX_DEPTH = 100
_CONTENT = "content"


def _length(value: object) -> Length:
    """A number of tokens, or a text such as "30%"."""
    if type(value) is int and 0 <= value <= _MAX_COUNT:
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
Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Factor = Annotated[float, Field(ge=0)]
UpToOne = Annotated[float, Field(ge=0, le=1)]


class Table(BaseModel):
    """A table. The defaults below stand for what is not set, and are not looked at: see `given`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @property
    def given(self) -> Mapping[str, object]:
        """The keys that the file sets, with their values."""
        return {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}


class FlexTable(Table):
    """One [budgets.NAME.SECTION]."""

    basis: Annotated[Length | None, PlainValidator(_basis, json_schema_input_type=int | str)] = None
    """Where it starts: tokens, a percentage such as "30%", or "content", which is what there is to place."""
    min: Tokens = 0
    """The least that it is given: tokens, or a percentage."""
    max: Tokens = 0
    """The most that it is given: tokens, or a percentage."""
    grow: Factor = 0
    """Its part of the room that is left over; 0 takes none."""
    shrink: Factor = 0
    """How much it gives where there is too little, in the ratio of shrink × basis; 0 gives nothing."""
    spare: Factor = 0
    """Its part of tokens that would otherwise stay spare, taken beyond its max. A table that sets max and not spare gets 0."""
    cut: Cut = "drop"
    """What becomes of content that does not fit; which of these a section can have stands in the explanation of the budget."""


class HistoryTable(FlexTable):
    """[budgets.NAME.history]."""

    max_messages: Count | None = None
    """The most messages; the newest stay. The same as `max_messages` of the budget."""


class TierTable(Table):
    """One [budgets.NAME.tiers.TIER]; the share is in percent."""

    share: float = Field(default=0, ge=0, le=100)
    """Its part of the evidence, in percent of what all tiers have together."""
    threshold: UpToOne = 0
    """The relevance from which a hit belongs to it."""


class TiersTable(Table):
    """[budgets.NAME.tiers]."""

    primary: TierTable = TierTable()
    """The most relevant."""
    supporting: TierTable = TierTable()
    """The next."""
    reference: TierTable = TierTable()
    """The rest."""


class LimitsTable(Table):
    """[budgets.NAME.limits]: the most tokens of a text that is sent whole or not at all."""

    system: Count = 0
    """Of the system text, in tokens."""
    question: Count = 0
    """Of the question, in tokens."""
    instructions: Count = 0
    """Of a council role's instructions, in tokens."""


class BudgetTable(Table):
    """One [budgets.NAME]."""

    gap: Tokens = 0
    """A margin that nobody gets: tokens, or a percentage."""
    overflow: Overflow | None = None
    """What becomes of what is too much, for all sections that can."""
    max_messages: Count | None = None
    """The most messages of history; the newest stay."""
    context_ratio: UpToOne | None = None
    """Basis and max of the evidence, as a share (0 to 1) of the window less what is fixed."""
    tiers: TiersTable = TiersTable()
    """How the evidence is shared by relevance."""
    limits: LimitsTable = LimitsTable()
    """The most tokens of texts that are always sent whole."""
    tools: FlexTable = FlexTable()
    """Descriptions of tools."""
    memories: FlexTable = FlexTable()
    """Facts that are kept across conversations."""
    summary: FlexTable = FlexTable()
    """What stands for messages that were too long ago."""
    history: HistoryTable = HistoryTable()
    """Earlier messages of the conversation."""
    attachments: FlexTable = FlexTable()
    """Files that come with the question."""
    cited: FlexTable = FlexTable()
    """In a council: passages that proposals cite."""
    evidence: FlexTable = FlexTable()
    """Passages that were found."""
    proposals: FlexTable = FlexTable()
    """In a council: what the specialists propose."""
    plan: FlexTable = FlexTable()
    """In a council: the strategy, the searches and the rankings."""
    thinking: FlexTable = FlexTable()
    """What a reasoning model thinks before it answers."""
    answer: FlexTable = FlexTable()
    """What the model answers."""


class ThresholdsTable(Table):
    """[relevance.thresholds]: from which relevance a hit belongs to a tier, for every budget that does not say."""

    primary: UpToOne = 0
    """Of the tier `primary`."""
    supporting: UpToOne = 0
    """Of the tier `supporting`."""
    reference: UpToOne = 0
    """Of the tier `reference`."""


class FileTypesTable(Table):
    """[relevance.file_types]: what the factor file_type is for each kind of file."""

    source_code: UpToOne = 0
    """Programs."""
    test_code: UpToOne = 0
    """Their tests."""
    requirements: UpToOne = 0
    """Requirements, specifications, user stories."""
    documentation: UpToOne = 0
    """Text for readers."""
    config: UpToOne = 0
    """Settings and build files."""
    other: UpToOne = 0
    """All others."""


class RelevanceTable(Table):
    """[relevance]. Only the proportion of the weights matters."""

    task_alignment: Factor = 0
    """The weight of: how directly it is about the task, by its words, its meaning, or both."""
    recency: Factor = 0
    """The weight of: how lately it was changed."""
    mention_density: Factor = 0
    """The weight of: how often other files and the task refer to it."""
    dependency_depth: Factor = 0
    """The weight of: how near it is, import by import, to the files that the task is about."""
    file_type: Factor = 0
    """The weight of: what kind of file it is."""
    half_life_days: float = Field(default=1, gt=0)
    """The age at which recency is one half."""
    max_depth: int = Field(default=0, ge=0, le=_MAX_DEPTH)
    """The imports that are followed."""
    method: Literal["keyword", "semantic", "hybrid"] = "hybrid"
    """How the fit to the task is found."""
    file_types: FileTypesTable = FileTypesTable()
    """What each kind of file is worth."""
    thresholds: ThresholdsTable = ThresholdsTable()
    """From which relevance on a hit belongs to a tier."""


_WEIGHTS = ("task_alignment", "recency", "mention_density", "dependency_depth", "file_type")


def profile_of(place: Place, name: str, table: BudgetTable, tiers: tuple[Tier, ...]) -> Profile:
    """One table as a Profile. What it does not set is as in the default, and `tiers` are the tiers that it starts from."""
    made = Profile(
        name=name,
        gap=table.gap,
        max_messages=_max_messages(place, table),
        tiers=_tiers(place.inside("tiers"), table, tiers),
        limits=table.limits.given,  # type: ignore[arg-type]  # counts
    )
    if table.context_ratio is not None:
        made = made.with_context_ratio(table.context_ratio)
        if twice := sorted(table.evidence.given.keys() & {"basis", "max"}):
            raise place.inside("evidence").error(twice[0], "is set by context_ratio already; give one of the two")
    if table.overflow is not None:
        made = made.with_overflow(table.overflow)
    tables: dict[str, FlexTable] = {section: getattr(table, section) for section in SECTIONS}
    made = replace(made, sections={section: _flex(place, made, section, tables[section]) for section in SECTIONS})
    _check_written_bases(place, made, tables, has_ratio=table.context_ratio is not None)
    return made


def _max_messages(place: Place, table: BudgetTable) -> int | None:
    if table.max_messages is not None and table.history.max_messages is not None:
        raise place.inside("history").error("max_messages", f"is set in [{'.'.join(place.table)}] already; give one of the two")
    return table.history.max_messages if table.max_messages is None else table.max_messages


def _tiers(place: Place, table: BudgetTable, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    changed = tuple(replace(tier, **getattr(table.tiers, tier.name).given) for tier in tiers)
    with _faults_at(place):
        return Profile(tiers=changed).tiers


def _flex(place: Place, made: Profile, section: str, table: FlexTable) -> Flex:
    """The section as it is, with what the table sets; a contradiction is an error that names the key."""
    place, given = place.inside(section), {key: value for key, value in table.given.items() if key != "max_messages"}
    if "cut" in given:
        with _faults_at(place, "cut", f"section {section!r}: cut "):
            replace(made, sections={section: Flex(cut=table.cut)})
    if "max" in given:
        given.setdefault("spare", 0.0)  # a limit that a person wrote is one
    flex = replace(made.sections[section], **given)  # type: ignore[arg-type]  # each as its field is declared
    for key in ("min", "basis"):
        if (key == "min" or key in given) and _is_over(getattr(flex, key), flex.max):
            both = [f"{each} {_toml(getattr(flex, each))}{'' if each in given else ' (not set in this table)'}" for each in (key, "max")]
            raise place.error(key if key in given else "max", " is over ".join(both))
    return flex


def _is_over(length: Length | None, most: Length | None) -> bool:
    if isinstance(length, Percent) and isinstance(most, Percent):
        return length.value > most.value
    return isinstance(length, int) and isinstance(most, int) and length > most


def _check_written_bases(place: Place, made: Profile, tables: Mapping[str, FlexTable], *, has_ratio: bool) -> None:
    """The percentages that a person wrote may not add up to more than 100; beside them, the defaults shrink."""
    written = {section for section, table in tables.items() if "basis" in table.given} | ({"evidence"} if has_ratio else set())
    sections = {name: flex if name in written else replace(flex, basis=0) for name, flex in made.sections.items()}
    bases = {name: flex.basis for name, flex in sections.items() if isinstance(flex.basis, Percent)}
    with _faults_at(place, hint=f"Set here: {', '.join(f'{name} {_toml(basis)}' for name, basis in bases.items())}."):
        replace(made, sections=sections).check_bases()


def weights_of(place: Place, table: RelevanceTable) -> dict[str, object]:
    """What the file sets, as plain values by the names of the weights' fields; the thresholds belong to the tiers."""
    given = {key: value for key, value in table.given.items() if key != "thresholds"}
    if all(given.get(weight) == 0 for weight in _WEIGHTS):
        raise place.error(None, "all weights are 0, so nothing is left to score by")
    if "file_types" in given:
        given["file_types"] = MappingProxyType(dict(table.file_types.given))
    return given


def with_thresholds(place: Place, tiers: tuple[Tier, ...], table: RelevanceTable) -> tuple[Tier, ...]:
    """The tiers with the thresholds of [relevance.thresholds]."""
    given = table.thresholds.given
    changed = tuple(replace(tier, threshold=given.get(tier.name, tier.threshold)) for tier in tiers)  # type: ignore[arg-type]  # floats
    with _faults_at(place):
        return Profile(tiers=changed).tiers


@contextmanager
def _faults_at(place: Place, key: str | None = None, prefix: str = "", *, hint: str | None = None) -> Iterator[None]:
    """Say of an error of Profile where in the file it is; `prefix` is how its text begins beside that."""
    try:
        yield
    except ConfigError as error:
        what = re.sub(r"^Budget '[^']*': ", "", error.message).removeprefix(prefix).removesuffix(".")
        raise place.error(key, what, hint=hint) from None


def _toml(length: Length | None) -> str:
    """A length as the file spells it."""
    return f'"{length.value:g}%"' if isinstance(length, Percent) else f'"{_CONTENT}"' if length is None else str(length)
