"""Who sits on a council, and what each of them may take."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from localrag.budget import Profile
from localrag.deliberation.wording import SYSTEM
from localrag.errors import ConfigError
from localrag.types import SamplingParams

JUDGE = "judge"
PLANNER = "planner"
RESERVED_ROLES = (JUDGE, PLANNER)
"""Names that no member can have."""
TOOLS = ("kb_search", "kb_read", "calculate", "read_ledger")
"""What a judge may be given to use."""
MAX_MEMBERS = 8
MAX_ROUNDS = 8
MAX_NAME_CHARS = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A specialist. `persona` is all that sets it apart: its prompt is that of the others up to it, where `tags` are the same.

    `model` and `n_ctx` are as for `Session.open` (None: the default model, its own window). `tags` are those of which a document has to
    have one for its passages to be shown; without any, all are.
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
    """Reads all proposals and all evidence. It may use `tools` for up to `rounds` calls before it has to conclude."""

    persona: str = ""
    model: str | None = None
    n_ctx: int | None = None
    tools: tuple[str, ...] = ()
    rounds: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    profile: Profile = field(default_factory=Profile)

    @property
    def max_calls(self) -> int:
        """How many calls of tools it may make."""
        return self.rounds if self.tools else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Council:
    """Members who propose, and a judge who decides.

    With `plan`, a strategy and what to search for are written first, by the judge; with `review`, each member ranks what the others
    propose, without their names. `system` is what all of them are told first. ConfigError for what no council can be.
    """

    name: str
    members: tuple[Member, ...]
    judge: Judge = field(default_factory=Judge)
    system: str = SYSTEM
    plan: bool = False
    review: bool = False
    top_k: int | Literal["fit"] = 6
    """Passages that are searched for, by each question; "fit" is as many as the largest window may hold."""

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if not _is_name(self.name):
            raise self._error(f"a council's name is 1 to {MAX_NAME_CHARS} printable characters")
        if not 1 <= len(names) <= MAX_MEMBERS:
            raise self._error(f"it has 1 to {MAX_MEMBERS} members, not {len(names)}")
        for name in names:
            if not _is_name(name):
                raise self._error(f"a member's name is 1 to {MAX_NAME_CHARS} printable characters, not {str(name)[:80]!r}")
            if name.casefold() in RESERVED_ROLES:
                raise self._error(f"no member can have the name {name!r}", hint=f"{' and '.join(RESERVED_ROLES)} are names of their own.")
        twice = [name for name, times in Counter(map(str.casefold, names)).items() if times > 1]
        if twice:
            raise self._error(f"two members have the name {twice[0]!r}", hint="Give each a name of its own.")
        self._check_judge()
        self._check_numbers()

    def _check_judge(self) -> None:
        tools, rounds = self.judge.tools, self.judge.rounds
        if unknown := [tool for tool in tools if tool not in TOOLS]:
            raise self._error(f"there is no tool {str(unknown[0])[:80]!r}", hint=f"Tools: {', '.join(TOOLS)}.")
        if len(set(tools)) < len(tools):
            raise self._error("the judge has a tool twice")
        if not _is_count(rounds) or rounds > MAX_ROUNDS:
            raise self._error(f"rounds is a whole number from 0 to {MAX_ROUNDS}, not {rounds!r}")

    def _check_numbers(self) -> None:
        if self.top_k != "fit" and not (_is_count(self.top_k) and self.top_k):
            raise self._error(f'top_k is a whole number above 0, or "fit", not {self.top_k!r}')
        windows = {member.name: member.n_ctx for member in self.members} | {JUDGE: self.judge.n_ctx}
        for role, n_ctx in windows.items():
            if n_ctx is not None and not (_is_count(n_ctx) and n_ctx):
                raise self._error(f"n_ctx of {role} is a whole number of tokens above 0, not {n_ctx!r}")

    def _error(self, what: str, *, hint: str | None = None) -> ConfigError:
        name = str(self.name)[:MAX_NAME_CHARS]
        return ConfigError(f"Council {name!r}: {what}.", hint=hint or "Correct the council in models.toml.", council=name)

    def role(self, name: str) -> Member | Judge:
        """Who has that name; the planner is the judge. KeyError for nobody."""
        return {member.name: member for member in self.members}[name] if name not in RESERVED_ROLES else self.judge

    def changed(
        self, *, model: str | None = None, n_ctx: int | None = None, seed: int | None = None, max_tokens: int | None = None
    ) -> Council:
        """The same with one model, window or length of an answer for all roles, where given.

        `seed` is added to those of all, whose answers are repeatable then.
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
        """Of all that it is: another council has another one."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 1 <= len(name) <= MAX_NAME_CHARS and name.isprintable() and name == name.strip()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
