"""A council called by its name, and called again as the journal keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from localrag.council import Council
from localrag.errors import UsageError
from localrag.journal import FILE_NAME, Journal
from localrag.session.council_run import CouncilResult, CouncilRun
from localrag.session.minutes import Event
from localrag.session.opening import names_of, open_council
from localrag.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a council is called with; docs/how-to/council.md says what each means. None leaves it to the council."""

    task: str
    council: str = "default"
    kbs: tuple[str, ...] = ()
    model: str | None = None
    n_ctx: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    piped: str = ""
    max_seconds: float | None = None

    def open(self, settings: Settings) -> Council:
        """The council, with what this call changes of it. ConfigError for one that is not there."""
        council = open_council(self.council, settings=settings)
        return council.changed(model=self.model, n_ctx=self.n_ctx, seed=self.seed, max_tokens=self.max_tokens)

    @property
    def about(self) -> dict[str, Any]:
        """What the journal keeps of it, so that it can be made again."""
        given = asdict(self) | {"kbs": list(self.kbs)}
        unset = {name for name in ("piped", "max_seconds") if not given[name]}
        return {name: value for name, value in given.items() if name not in unset}

    @classmethod
    def kept(cls, run_id: int, *, settings: Settings) -> tuple[Self, str]:
        """The call of a run in the journal, and the digest that its council had. UsageError for a run that cannot be made again."""
        run = None
        if (settings.home / FILE_NAME).exists():
            with Journal.open(settings.home) as journal:
                run = journal.councils.get(run_id)
        if run is None:
            raise UsageError(f"There is no council run {run_id} in the journal.", hint="See localrag report --councils.")
        if not {"task", "council"} <= run.about.keys():
            raise UsageError(f"Run {run_id} was not made from a council of models.toml.", hint="Give its task again.")
        given = {field.name: run.about[field.name] for field in fields(cls) if field.name in run.about}
        return cls(**given | {"kbs": tuple(given.get("kbs", ()))}), str(run.about.get("digest", ""))


def convene(
    task: str,
    council: str = "default",
    *,
    kbs: str | Sequence[str] = (),
    model: str | None = None,
    n_ctx: int | None = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    max_seconds: float | None = None,
    keep: bool = True,
    on_event: Callable[[Event], None] | None = None,
    settings: Settings | None = None,
) -> CouncilResult:
    """Have a council of models.toml decide a task, from these knowledge bases; this is `localrag.council`.

    `model`, `n_ctx` (tokens) and `max_tokens` are those of all its roles where given. A `seed` is added to theirs, and all that they write
    is repeatable then (see SamplingParams). `max_seconds` bounds the whole run. `on_event` hears what happens (docs/how-to/council.md),
    and `keep` leaves it in the journal too. Raises ConfigError for a council that is not there, and what `sit` does.
    """
    names = tuple(names_of(kbs))
    call = Call(task=task, council=council, kbs=names, model=model, n_ctx=n_ctx, max_tokens=max_tokens, seed=seed, max_seconds=max_seconds)
    found = settings or Settings.from_env()
    with seated(call, call.open(found), settings=found, keep=keep, on_event=on_event or (lambda _: None)) as sitting:
        return sitting.hold()


def seated(
    call: Call,
    council: Council,
    *,
    settings: Settings,
    keep: bool = True,
    started_at: float | None = None,
    on_event: Callable[[Event], None],
    on_text: Callable[[str, str], None] = lambda _role, _text: None,
) -> CouncilRun:
    """The sitting that a call asks for, before it is held, to be used in a `with` block; `council` is what the call opens."""
    return CouncilRun(
        council,
        call.task,
        settings=settings,
        kbs=call.kbs,
        piped=call.piped,
        kept=call.about if keep else None,
        max_seconds=call.max_seconds,
        started_at=started_at,
        on_event=on_event,
        on_text=on_text,
    )
