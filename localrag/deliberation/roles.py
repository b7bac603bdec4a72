"""The roles of a council, and their settings."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from localrag.budget import Profile
from localrag.errors import ConfigError
from localrag.types import SamplingParams

SYSTEM = "You sit on a council. It answers questions from sources. Each source begins with its tag."
"""The default system text."""
JUDGE = "judge"
PLANNER = "planner"
RESERVED_ROLES = (JUDGE, PLANNER)
"""Names that no member may have."""
TOOLS = ("kb_search", "kb_read", "calculate", "read_ledger")
"""Tools that a judge may have."""
MAX_MEMBERS = 8
MAX_ROUNDS = 8
MAX_NAME_CHARS = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A specialist. Only its `persona` differs from other members, so prompts of members with the same `tags` share everything up
    to it.

    `model` and `n_ctx` are as for `Session.open` (None: the default model, its own window). Only documents with at least one of
    the `tags` are searched; without tags, all are.
    """

    name: str
    persona: str
    model: str | None = None
    n_ctx: int | None = None
    tags: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    profile: Profile = field(default_factory=Profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Reads all proposals and all evidence. It may make up to `rounds` calls of its `tools` before it must decide."""

    persona: str = ""
    model: str | None = None
    n_ctx: int | None = None
    tools: tuple[str, ...] = ()
    rounds: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    profile: Profile = field(default_factory=Profile)

    @property
    def max_calls(self) -> int:
        """Maximum number of tool calls."""
        return self.rounds if self.tools else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Council:
    """Members who propose, and a judge who decides.

    With `plan`, the judge first writes a strategy and search queries. With `review`, each member ranks the proposals of the
    others, without their names. `system` is the system text of all roles. Raises ConfigError for invalid values.
    """

    name: str
    members: tuple[Member, ...]
    judge: Judge = field(default_factory=Judge)
    system: str = SYSTEM
    plan: bool = False
    review: bool = False
    top_k: int | Literal["fit"] = 6
    """Passages per search query; "fit" means as many as the largest window may hold."""

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if not _is_name(self.name):
            raise self._error(f"a council's name must be 1 to {MAX_NAME_CHARS} printable characters")
        if not 1 <= len(names) <= MAX_MEMBERS:
            raise self._error(f"it must have 1 to {MAX_MEMBERS} members, not {len(names)}")
        for name in names:
            if not _is_name(name):
                raise self._error(f"a member's name must be 1 to {MAX_NAME_CHARS} printable characters, not {str(name)[:80]!r}")
            if name.casefold() in RESERVED_ROLES:
                raise self._error(f"no member can have the name {name!r}", hint=f"{' and '.join(RESERVED_ROLES)} are reserved.")
        twice = [name for name, times in Counter(map(str.casefold, names)).items() if times > 1]
        if twice:
            raise self._error(f"two members have the name {twice[0]!r}", hint="Give each member a different name.")
        self._check_judge()
        self._check_numbers()

    def _check_judge(self) -> None:
        tools, rounds = self.judge.tools, self.judge.rounds
        if unknown := [tool for tool in tools if tool not in TOOLS]:
            raise self._error(f"there is no tool {str(unknown[0])[:80]!r}", hint=f"Tools: {', '.join(TOOLS)}.")
        if len(set(tools)) < len(tools):
            raise self._error("the judge has a tool twice")
        if not _is_count(rounds) or rounds > MAX_ROUNDS:
            raise self._error(f"rounds must be a whole number from 0 to {MAX_ROUNDS}, not {rounds!r}")

    def _check_numbers(self) -> None:
        if self.top_k != "fit" and not (_is_count(self.top_k) and self.top_k):
            raise self._error(f'top_k must be a whole number above 0, or "fit", not {self.top_k!r}')
        windows = {member.name: member.n_ctx for member in self.members} | {JUDGE: self.judge.n_ctx}
        for role, n_ctx in windows.items():
            if n_ctx is not None and not (_is_count(n_ctx) and n_ctx):
                raise self._error(f"n_ctx of {role} must be a whole number of tokens above 0, not {n_ctx!r}")

    def _error(self, what: str, *, hint: str | None = None) -> ConfigError:
        name = str(self.name)[:MAX_NAME_CHARS]
        return ConfigError(f"Council {name!r}: {what}.", hint=hint or "Correct the council in models.toml.", council=name)

    def role(self, name: str) -> Member | Judge:
        """Return the role with that name; the planner is the judge. Raises KeyError."""
        return {member.name: member for member in self.members}[name] if name not in RESERVED_ROLES else self.judge

    def changed(
        self, *, model: str | None = None, n_ctx: int | None = None, seed: int | None = None, max_tokens: int | None = None
    ) -> Council:
        """Return the same council with one model, window or answer length for all roles, where given.

        `seed` is added to the seeds of all roles, and makes their answers repeatable.
        """

        def given(role: Member | Judge) -> dict[str, Any]:
            sampling = replace(role.sampling, max_tokens=max_tokens or role.sampling.max_tokens)
            if seed is not None:
                sampling = replace(sampling, seed=(sampling.seed + seed) % 2**32, repeatable=True)
            return {"model": model or role.model, "n_ctx": n_ctx or role.n_ctx, "sampling": sampling}

        members = tuple(replace(member, **given(member)) for member in self.members)
        return replace(self, members=members, judge=replace(self.judge, **given(self.judge)))

    @property
    def digest(self) -> str:
        """A hash of all settings: different councils have different digests."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 1 <= len(name) <= MAX_NAME_CHARS and name.isprintable() and name == name.strip()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
