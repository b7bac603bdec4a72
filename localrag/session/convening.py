"""A council called by its name, and called again as the journal keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from localrag.council import Council
from localrag.errors import UsageError
from localrag.journal import FILE_NAME, Journal
from localrag.session.minutes import Event
from localrag.session.opening import open_council
from localrag.session.sitting import Sat, Sitting
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
    seed: int = 0
    piped: str = ""

    def open(self, settings: Settings) -> Council:
        """The council, with what this call changes of it. ConfigError for one that is not there."""
        council = open_council(self.council, settings=settings)
        return council.changed(model=self.model, n_ctx=self.n_ctx, seed=self.seed, max_tokens=self.max_tokens)

    @property
    def about(self) -> dict[str, Any]:
        """What the journal keeps of it, so that it can be made again."""
        given = asdict(self) | {"kbs": list(self.kbs)}
        return given if self.piped else {name: value for name, value in given.items() if name != "piped"}

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
    kbs: Sequence[str] = (),
    model: str | None = None,
    n_ctx: int | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
    keep: bool = True,
    on_event: Callable[[Event], None] | None = None,
    settings: Settings | None = None,
) -> Sat:
    """Have a council of models.toml decide a task, from these knowledge bases; this is `localrag.council`.

    `model`, `n_ctx` (tokens) and `max_tokens` are those of all its roles where given, and `seed` is added to theirs. `on_event` hears
    what happens (docs/how-to/council.md), and `keep` leaves it in the journal too. Raises ConfigError for a council that is not there, and
    what `sit` does.
    """
    call = Call(task=task, council=council, kbs=tuple(kbs), model=model, n_ctx=n_ctx, max_tokens=max_tokens, seed=seed)
    found = settings or Settings.from_env()
    with seated(call, call.open(found), settings=found, keep=keep, on_event=on_event or (lambda _: None)) as sitting:
        return sitting.hold()


def seated(
    call: Call,
    council: Council,
    *,
    settings: Settings,
    keep: bool = True,
    on_event: Callable[[Event], None],
    on_text: Callable[[str, str], None] = lambda _role, _text: None,
) -> Sitting:
    """The sitting that a call asks for, before it is held, to be used in a `with` block; `council` is what the call opens."""
    return Sitting(
        council,
        call.task,
        settings=settings,
        kbs=call.kbs,
        piped=call.piped,
        kept=call.about if keep else None,
        on_event=on_event,
        on_text=on_text,
    )
