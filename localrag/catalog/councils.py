"""[councils.NAME] of models.toml: pydantic tables, converted to Council."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from localrag.budget import Profile
from localrag.catalog.entries import LENGTH_FAULT, Table, TableRef, nearest, quoted, shown
from localrag.deliberation.roles import MAX_MEMBERS, MAX_ROUNDS, RESERVED_ROLES, SYSTEM, TOOLS, Council, Judge, Member
from localrag.errors import UsageError
from localrag.types import ModelSpec, SamplingParams

ECHO = "echo"
"""The built-in engine, which needs no model and no entry."""
DEFAULT_ROUNDS = 3
"""Rounds of a judge with tools whose table does not set them."""
_MAX_TOP_K = 1000
_MAX_NAME_CHARS = 64
_MAX_TAG_CHARS = 255
_MAX_WILDCARDS = 6
_SAMPLING = (
    "max_tokens",
    "think_tokens",
    "temperature",
    "seed",
    "top_p",
    "top_k",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _top_k(value: object) -> int | Literal["fit"]:
    if value == "fit":
        return "fit"
    if type(value) is int and 1 <= value <= _MAX_TOP_K:
        return value
    raise PydanticCustomError(LENGTH_FAULT, f'a whole number from 1 to {_MAX_TOP_K}, or "fit"')


class RoleTable(Table):
    """Keys that specialists and judges share. SamplingParams checks its own fields."""

    persona: str = ""
    """Who the role is, in your words; required for a specialist."""
    model: str | None = None
    """A table `[models.NAME]`, or `echo`; defaults to the default model."""
    n_ctx: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Window in tokens."""
    budget: str | None = None
    """A table `[budgets.NAME]`."""
    max_tokens: int = 0
    """Maximum tokens of its text."""
    think_tokens: int = 0
    """Maximum tokens of a reasoning model's thoughts; 0 turns thinking off."""
    temperature: float = 0
    """0 always takes the most likely token."""
    seed: int = 0
    """Makes sampling repeatable."""
    top_p: float = 0
    """Samples from the most likely tokens that together have this probability."""
    top_k: int = 0
    """Samples from this many of the most likely tokens; 0: from all."""
    min_p: float = 0
    """Samples from tokens with at least this fraction of the highest probability."""
    repeat_penalty: float = 0
    """Above 1: makes repeated tokens less likely."""
    presence_penalty: float = 0
    """Subtracted from the logit of a token that has occurred."""
    frequency_penalty: float = 0
    """Subtracted from the logit of a token for each time that it has occurred."""


class SpecialistTable(RoleTable):
    """One [[councils.NAME.specialists]]."""

    name: str = ""
    """Unique name; required."""
    tags: list[str] = Field(default_factory=list)
    """Searches only documents with one of these tags; `*` matches any characters, `?` any one."""


class JudgeTable(RoleTable):
    """[councils.NAME.judge]."""

    tools: list[str] = Field(default_factory=list)
    """Its tools: `kb_search`, `kb_read`, `calculate`, `read_ledger`."""
    rounds: int = Field(default=0, ge=0, le=MAX_ROUNDS)
    """Maximum number of tool calls."""


class CouncilTable(Table):
    """One [councils.NAME]. `budget` and `max_tokens` are defaults for its specialists."""

    system: str = SYSTEM
    """System text of all roles."""
    plan: bool = False
    """The judge first writes a strategy and up to three more search queries."""
    review: bool = False
    """Each specialist ranks the proposals of the others, without their names."""
    top_k: Annotated[int | Literal["fit"], PlainValidator(_top_k, json_schema_input_type=int | Literal["fit"])] = 6
    """Passages per search query; "fit" means as many as the largest window may hold."""
    size: int | None = Field(default=None, ge=1, le=MAX_MEMBERS)
    """Number of specialists; defaults to all that are listed. A larger number repeats them from the first, each with a different seed."""
    budget: str | None = None
    """Default for specialists: a table `[budgets.NAME]`."""
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Default maximum tokens of a proposal."""
    specialists: list[SpecialistTable] = Field(default_factory=list)
    """The members who propose."""
    judge: JudgeTable = JudgeTable()
    """The role that decides."""


def council_of(
    place: TableRef, name: str, table: CouncilTable, *, models: Mapping[str, ModelSpec], budgets: Mapping[str, Profile]
) -> Council:
    """Convert a table to a Council. It may name any of `models` and `budgets`; "default" is the default budget."""

    def common(at: TableRef, role: RoleTable, budget: Profile, defaults: Mapping[str, Any]) -> dict[str, Any]:
        if role.model is not None and role.model != ECHO and role.model not in models:
            raise at.error("model", f"no model is named {shown(role.model)}{nearest(role.model, [*models, ECHO])}")
        return {
            "persona": role.persona.strip(),
            "model": role.model,
            "n_ctx": role.n_ctx,
            "sampling": _sampling(at, role, defaults),
            "profile": _budget(at, role.budget, budgets) or budget,
        }

    default = budgets["default"]
    shared = _budget(place, table.budget, budgets) or default
    length = {} if table.max_tokens is None else {"max_tokens": table.max_tokens}
    members = []
    for number, each in enumerate(table.specialists, 1):
        at = place.inside("specialists", str(number))
        _check_specialist(at, each)
        members.append(Member(name=each.name.strip(), tags=_tags(at, each.tags), **common(at, each, shared, length)))
    judge = place.inside("judge")
    return Council(
        name=name,
        members=_seated(place, table, members),
        judge=Judge(**_tools(judge, table.judge), **common(judge, table.judge, default, {})),
        system=table.system,
        plan=table.plan,
        review=table.review,
        top_k=table.top_k,
    )


def _sampling(place: TableRef, role: RoleTable, defaults: Mapping[str, Any]) -> SamplingParams:
    try:
        overrides = {key: value for key, value in role.given.items() if key in _SAMPLING}
        return SamplingParams(**{**defaults, **overrides}, repeatable="seed" in overrides)
    except UsageError as error:
        key, _, what = error.message.partition(" ")
        raise place.error(key, what.removesuffix(".")) from None


def _budget(place: TableRef, name: str | None, budgets: Mapping[str, Profile]) -> Profile | None:
    if name is None:
        return None
    if name not in budgets:
        raise place.error("budget", f"no budget is named {shown(name)}{nearest(name, budgets)}")
    return budgets[name]


def _check_specialist(place: TableRef, table: SpecialistTable) -> None:
    name = table.name.strip()
    if not name:
        raise place.error("name", "is missing: each specialist needs one")
    if not name.isprintable() or len(name) > _MAX_NAME_CHARS:
        raise place.error("name", f"must be one line of at most {_MAX_NAME_CHARS} characters")
    if name.casefold() in RESERVED_ROLES:
        raise place.error("name", f"{shown(name)} is reserved: {' and '.join(RESERVED_ROLES)} name other roles")
    if not table.persona.strip():
        raise place.error("persona", "is missing: each specialist needs its own")


def _tags(place: TableRef, tags: Iterable[str]) -> tuple[str, ...]:
    """Validate tags. Each is a pattern that fits one search condition, such as "price" or "guide*"."""
    for tag in tags:
        if not tag.strip() or not tag.isprintable() or "," in tag or len(tag) > _MAX_TAG_CHARS:
            raise place.error("tags", f"a tag must be one line of 1 to {_MAX_TAG_CHARS} characters without a comma, not {quoted(tag)}")
        if sum(map(tag.count, "*?")) > _MAX_WILDCARDS:
            raise place.error("tags", f"a tag may have at most {_MAX_WILDCARDS} wildcards, unlike {quoted(tag)}")
    return tuple(dict.fromkeys(tag.strip() for tag in tags))


def _tools(place: TableRef, table: JudgeTable) -> dict[str, Any]:
    """Return the judge's tools without duplicates, and its rounds."""
    for tool in table.tools:
        if tool not in TOOLS:
            raise place.error("tools", f"{shown(tool)} is not a tool{nearest(tool, TOOLS)}", hint=f"Tools: {', '.join(TOOLS)}.")
    if table.rounds and not table.tools:
        raise place.error("rounds", "limits tool calls, but no tools are set", hint=f"Tools: {', '.join(TOOLS)}.")
    rounds = table.rounds if "rounds" in table.given or not table.tools else DEFAULT_ROUNDS
    return {"tools": tuple(dict.fromkeys(table.tools)), "rounds": rounds}


def _seated(place: TableRef, table: CouncilTable, members: list[Member]) -> tuple[Member, ...]:
    """Return `size` specialists, starting with the first; past the last they repeat, each with a different seed."""
    if not members:
        raise place.error(None, f"has no specialists; add at least one [[{'.'.join(place.table)}.specialists]]")
    size = len(members) if table.size is None else table.size
    if size > MAX_MEMBERS:
        raise place.error("specialists", f"are {size}, but a council has at most {MAX_MEMBERS}; set size to use fewer")
    seated, names = [], set[str]()
    for number in range(size):
        again, index = divmod(number, len(members))
        member, at = members[index], place.inside("specialists", str(index + 1))
        if again:
            if not member.sampling.temperature:
                raise at.error("temperature", f"is 0, so {shown(member.name)} would repeat itself in a council of size {size}")
            sampling = replace(member.sampling, seed=(member.sampling.seed + again) % 2**32)
            member = replace(member, name=f"{member.name} {again + 1}", sampling=sampling)
        if member.name.casefold() in names:
            raise at.error("name", f"{shown(member.name)} is already the name of another specialist")
        names.add(member.name.casefold())
        seated.append(member)
    return tuple(seated)
