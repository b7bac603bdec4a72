"""[councils.NAME] of a models.toml: the tables as pydantic sees them, then as Council."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from localrag.budget import Profile
from localrag.catalog.budgets import LENGTH_FAULT, Table
from localrag.catalog.faults import Place, nearest, quoted, shown
from localrag.deliberation.roles import MAX_MEMBERS, MAX_ROUNDS, RESERVED_ROLES, SYSTEM, TOOLS, Council, Judge, Member
from localrag.errors import UsageError
from localrag.types import ModelSpec, SamplingParams

ECHO = "echo"
"""The engine that needs no model, and so no entry of the file."""
DEFAULT_ROUNDS = 3
"""Of a judge with tools whose table does not say how many."""
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
    """What a specialist and a judge have in common. The fields of SamplingParams are checked by it."""

    persona: str = ""
    """Who it is, in your words; a specialist needs one."""
    model: str | None = None
    """A table `[models.NAME]`, or `echo`; otherwise the default model."""
    n_ctx: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Its window, in tokens."""
    budget: str | None = None
    """A table `[budgets.NAME]`."""
    max_tokens: int = 0
    """The most that it writes, in tokens."""
    think_tokens: int = 0
    """The most that a reasoning model thinks before, in tokens; 0: nothing."""
    temperature: float = 0
    """0 takes the likeliest token."""
    seed: int = 0
    """Makes sampling repeatable."""
    top_p: float = 0
    """Samples from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Samples from so many of the likeliest tokens; 0: from all."""
    min_p: float = 0
    """Samples from tokens that are at least this part as likely as the likeliest."""
    repeat_penalty: float = 0
    """Above 1: makes what was said less likely."""
    presence_penalty: float = 0
    """Takes this from the logit of a token that was said."""
    frequency_penalty: float = 0
    """Takes this from it for each time that it was said."""


class SpecialistTable(RoleTable):
    """One [[councils.NAME.specialists]]."""

    name: str = ""
    """What it is called; needed, and each has its own."""
    tags: list[str] = Field(default_factory=list)
    """It is shown only documents with one of these tags; `*` and `?` stand for any characters, for any one."""


class JudgeTable(RoleTable):
    """[councils.NAME.judge]."""

    tools: list[str] = Field(default_factory=list)
    """What it may use: `kb_search`, `kb_read`, `calculate`, `read_ledger`."""
    rounds: int = Field(default=0, ge=0, le=MAX_ROUNDS)
    """How many calls of a tool it may make."""


class CouncilTable(Table):
    """One [councils.NAME]. `budget` and `max_tokens` are those of specialists that name none."""

    system: str = SYSTEM
    """What all are told first."""
    plan: bool = False
    """The judge first writes a strategy and up to three more searches."""
    review: bool = False
    """Each specialist ranks what the others propose, without their names."""
    top_k: Annotated[int | Literal["fit"], PlainValidator(_top_k, json_schema_input_type=int | Literal["fit"])] = 6
    """Passages that each search may find; "fit": as many as the largest window may hold."""
    size: int | None = Field(default=None, ge=1, le=MAX_MEMBERS)
    """How many specialists sit; otherwise all that are listed. Past the last of them they come again, each with another seed."""
    budget: str | None = None
    """Of specialists that name none: a table `[budgets.NAME]`."""
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Of each proposal, for specialists that do not say."""
    specialists: list[SpecialistTable] = Field(default_factory=list)
    """Who proposes."""
    judge: JudgeTable = JudgeTable()
    """Who decides."""


def council_of(place: Place, name: str, table: CouncilTable, *, models: Mapping[str, ModelSpec], budgets: Mapping[str, Profile]) -> Council:
    """One table as a Council. `models` and `budgets` are what it may name; of those, "default" is the budget where none is named."""

    def common(at: Place, role: RoleTable, budget: Profile, given: Mapping[str, Any]) -> dict[str, Any]:
        if role.model is not None and role.model != ECHO and role.model not in models:
            raise at.error("model", f"no model is named {shown(role.model)}{nearest(role.model, [*models, ECHO])}")
        return {
            "persona": role.persona.strip(),
            "model": role.model,
            "n_ctx": role.n_ctx,
            "sampling": _sampling(at, role, given),
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


def _sampling(place: Place, role: RoleTable, given: Mapping[str, Any]) -> SamplingParams:
    try:
        named = {key: value for key, value in role.given.items() if key in _SAMPLING}
        return SamplingParams(**{**given, **named}, repeatable="seed" in named)
    except UsageError as error:
        key, _, what = error.message.partition(" ")
        raise place.error(key, what.removesuffix(".")) from None


def _budget(place: Place, name: str | None, budgets: Mapping[str, Profile]) -> Profile | None:
    if name is None:
        return None
    if name not in budgets:
        raise place.error("budget", f"no budget is named {shown(name)}{nearest(name, budgets)}")
    return budgets[name]


def _check_specialist(place: Place, table: SpecialistTable) -> None:
    name = table.name.strip()
    if not name:
        raise place.error("name", "is missing: each specialist has one")
    if not name.isprintable() or len(name) > _MAX_NAME_CHARS:
        raise place.error("name", f"is one line of {_MAX_NAME_CHARS} characters at most")
    if name.casefold() in RESERVED_ROLES:
        raise place.error("name", f"{shown(name)} is another role's name: {' and '.join(RESERVED_ROLES)} are taken")
    if not table.persona.strip():
        raise place.error("persona", "is missing: it is what sets a specialist apart")


def _tags(place: Place, tags: Iterable[str]) -> tuple[str, ...]:
    """Each a pattern that one condition of a search holds, such as "price" or "guide*"."""
    for tag in tags:
        if not tag.strip() or not tag.isprintable() or "," in tag or len(tag) > _MAX_TAG_CHARS:
            raise place.error("tags", f"a tag is one line of 1 to {_MAX_TAG_CHARS} characters without a comma, not {quoted(tag)}")
        if sum(map(tag.count, "*?")) > _MAX_WILDCARDS:
            raise place.error("tags", f"a tag has {_MAX_WILDCARDS} wildcards at most, unlike {quoted(tag)}")
    return tuple(dict.fromkeys(tag.strip() for tag in tags))


def _tools(place: Place, table: JudgeTable) -> dict[str, Any]:
    """The judge's tools, each once, and how often it may use one."""
    for tool in table.tools:
        if tool not in TOOLS:
            raise place.error("tools", f"{shown(tool)} is no tool{nearest(tool, TOOLS)}", hint=f"There are: {', '.join(TOOLS)}.")
    if table.rounds and not table.tools:
        raise place.error("rounds", "are of tools, and none is named", hint=f"There are: {', '.join(TOOLS)}.")
    rounds = table.rounds if "rounds" in table.given or not table.tools else DEFAULT_ROUNDS
    return {"tools": tuple(dict.fromkeys(table.tools)), "rounds": rounds}


def _seated(place: Place, table: CouncilTable, members: list[Member]) -> tuple[Member, ...]:
    """So many of the specialists as `size` says, from the first on; past the last they come again, each with another seed."""
    if not members:
        raise place.error(None, f"has no specialists; one [[{'.'.join(place.table)}.specialists]] at least is needed")
    size = len(members) if table.size is None else table.size
    if size > MAX_MEMBERS:
        raise place.error("specialists", f"are {size}, and {MAX_MEMBERS} can sit; size says how many of them do")
    seated, taken = [], set[str]()
    for number in range(size):
        again, index = divmod(number, len(members))
        member, at = members[index], place.inside("specialists", str(index + 1))
        if again:
            if not member.sampling.temperature:
                raise at.error("temperature", f"is 0, so {shown(member.name)} would say the same when it comes again for a size of {size}")
            sampling = replace(member.sampling, seed=(member.sampling.seed + again) % 2**32)
            member = replace(member, name=f"{member.name} {again + 1}", sampling=sampling)
        if member.name.casefold() in taken:
            raise at.error("name", f"{shown(member.name)} has another specialist already")
        taken.add(member.name.casefold())
        seated.append(member)
    return tuple(seated)
