"""The state of a chat: its model, knowledge bases, conversation and settings; and the dispatch of its lines and commands."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrag.cli import options
from localrag.errors import InterruptedRunError, UsageError
from localrag.journal import ConversationRow, Journal
from localrag.question import Question
from localrag.session import Answer, Prepared, Session
from localrag.session.chat import Chat
from localrag.session.history_window import Forgotten
from localrag.session.memory import Recall, RecallRule
from localrag.session.opening import fits, open_embedder, open_knowledge_bases
from localrag.types import SamplingParams

if TYPE_CHECKING:
    from localrag.session.history_window import Turn


HISTORY_FILE = "chat-history"
RETRY_TEMPERATURE = 0.7
"""Temperature of /retry if none is set. At temperature 0, every answer would be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationChoice:
    """The conversation to open: by `name`, created if missing; with `resumes` the last one; otherwise a new one.

    A conversation goes on with its own model and knowledge bases rather than with an option in `weak`, whose value is a default.
    """

    name: str | None = None
    resumes: bool = False
    keeps: bool = True
    weak: frozenset[str] = frozenset()


@dataclass(slots=True)
class Status:
    """Values for the toolbar. Written by the worker thread, read by the thread that draws."""

    model: str = ""
    n_ctx: int = 0
    bound: str = ""
    used: int = 0
    cached: int = 0
    evaluated: int = 0
    tokens_per_s: float = 0.0
    kbs: tuple[str, ...] = ()
    name: str = ""
    activity: str = "loading"
    forgotten: Forgotten = field(default_factory=Forgotten)


class Room:
    """A chat with its model, which `open` loads. Use it from one thread, except for `cancel`."""

    def __init__(self, asking: options.Asking, sampling: SamplingParams, choice: ConversationChoice, *, rewrites: bool = False) -> None:
        self.asking = asking.copy()
        self.sampling = sampling
        self._rewrites = rewrites
        self._system = asking["system"]
        self.settings = asking["settings"]
        self.status = Status()
        self.attached = [options.attachment(path) for path in dict.fromkeys(asking["attached"])]
        self.asking["attached"] = ()
        self.last: Answer | None = None
        self.proposed: list[str] = []
        self._choice = choice
        self._is_stopped = False
        self._opened = ExitStack()
        self._session: Session | None = None
        self._chat: Chat | None = None
        self._journal: Journal | None = None

    @property
    def keeps(self) -> bool:
        """Whether the chat is saved (no --no-keep)."""
        return self._choice.keeps

    # --- opening and closing ---

    def model(self) -> str | None:
        """Return the model that `open` will load: of the command line, else of the conversation or the settings; None for the default."""
        is_weak = self.asking["model"] is None or "model" in self._choice.weak
        if is_weak and self._choice.keeps and (self._choice.name is not None or self._choice.resumes):
            with Journal.open(self.settings.home) as self._journal:
                row = self._row()
            self._journal = None
            model = None if row is None else row.about.get("model")
            return model if isinstance(model, str) else self.asking["model"]
        return self.asking["model"]

    def open(self) -> None:
        """Find or create the conversation, and load its model and knowledge bases."""
        home = self.settings.home if self._choice.keeps else Path(self._opened.enter_context(tempfile.TemporaryDirectory()))
        self._journal = self._opened.enter_context(Journal.open(home))
        row = self._row()
        if row is not None:
            self._take_over(row)
        self._open_session()
        name = row.name if row is not None else self._choice.name or self._new_name()
        chat_id = row.id if row is not None else self.journal.conversations.create(name, self._about())
        self.enter(name, chat_id)

    def enter(self, name: str, chat_id: int) -> None:
        """Switch to a conversation."""
        self._begin_chat(chat_id)
        self.session.name = self.status.name = name
        self._recall = Recall(RecallRule(**self._recalling()))
        self.last = None
        self.status.forgotten = Forgotten()
        self.chat.recall(self.question(""))
        self.status.activity = ""

    def begin(self, name: str | None) -> None:
        """Start a new conversation with the same model and knowledge bases."""
        name = name or self._new_name()
        self.enter(name, self.journal.conversations.create(name, self._about()))

    def resume(self, name: str) -> None:
        """Switch to a conversation by name. UsageError if it does not exist."""
        row = self.journal.conversations.named(name)
        if row is None:
            raise UsageError(f"There is no conversation {name!r}.", hint="To list conversations: /list")
        self._take_over(row, is_open=True)
        self.enter(row.name, row.id)

    def use_kbs(self, names: tuple[str, ...]) -> None:
        """Replace the knowledge bases. If one cannot be opened, nothing changes."""
        session = self.session
        with ExitStack() as stack:
            knowledge_bases = open_knowledge_bases(names, settings=self.settings, opened=stack)
            if knowledge_bases and not fits(session.embedder, knowledge_bases):
                session.embedder = open_embedder(self.settings, for_queries=True, kbs=knowledge_bases)
            stack.pop_all()
        for kb in session.knowledge_bases:
            kb.close()
        session.knowledge_bases = tuple(knowledge_bases)
        self.asking["kbs"] = names
        self.status.kbs = tuple(kb.address for kb in knowledge_bases)
        self.journal.conversations.set_about(self.chat.id, self._about())

    def use_model(self, name: str) -> None:
        """Replace the model. If it cannot be loaded, nothing changes."""
        before, old = self.asking, self._session
        self.asking = before.copy()
        self.asking["model"] = name
        try:
            self._open_session()
        except BaseException:
            self.asking = before
            raise
        if old is not None:
            old.close()
        self.journal.conversations.set_about(self.chat.id, self._about())
        turns = self.chat.turns
        self._begin_chat(self.chat.id)
        self.chat.turns = turns
        self.session.name = self.status.name

    def _open_session(self) -> None:
        self.status.activity = "loading"
        self._session = options.opener(self.asking, vocab_only=False, keep=self._choice.keeps, name=self.status.name or "chat")()
        slot = self.session.slot
        self.status.model, self.status.n_ctx, self.status.bound = self.session.engine.name, slot.n_ctx, slot.bound
        self.status.kbs = tuple(kb.address for kb in self.session.knowledge_bases)
        self.status.activity = ""

    def close(self) -> None:
        if self._chat is not None:
            self._chat.remember()
        if self._session is not None:
            self._session.close()
        self._opened.close()

    def cancel(self) -> None:
        """Stop the current answer or search. May be called from any thread."""
        self._is_stopped = True
        if self._session is not None:
            self._session.engine.cancel_all()

    @property
    def history_file(self) -> Path | None:
        """The file of past inputs, or None with --no-keep."""
        return self.settings.home / HISTORY_FILE if self._choice.keeps else None

    @property
    def session(self) -> Session:
        assert self._session is not None, "the room is not open"
        return self._session

    @property
    def chat(self) -> Chat:
        assert self._chat is not None, "the room is not open"
        return self._chat

    @property
    def journal(self) -> Journal:
        assert self._journal is not None, "the room is not open"
        return self._journal

    def _begin_chat(self, chat_id: int) -> None:
        self._chat = Chat(self.session, self.journal, chat_id, system=self.asking["system"] or "")
        self._chat.rewrites = self._rewrites

    @property
    def rewrites(self) -> bool:
        return self._rewrites

    def set_rewrites(self, *, rewrites: bool) -> None:
        """Turn query rewriting on or off, for this conversation and later ones."""
        self._rewrites = self.chat.rewrites = rewrites

    def set_system(self, system: str) -> None:
        """Set the system prompt of the conversation; "" removes it."""
        self.asking["system"] = system or None
        self.chat.system = system
        self.journal.conversations.set_about(self.chat.id, self._about())

    # --- asking ---

    def question(self, text: str) -> Question:
        """Build a question with the command line's options, the attached files and the relevant memories."""
        question = options.question({**self.asking, "system": None}, text, self.sampling)
        return question.but(memories=self._recall.memories(self.journal.memories.all(), text), attachments=self.attached)

    def say(
        self,
        question: str,
        *,
        on_text: Callable[[str], None] = lambda _: None,
        on_thought: Callable[[str], None] = lambda _: None,
        on_prepared: Callable[[Prepared], None] = lambda _: None,
    ) -> Answer:
        """Ask a question with the attached files. If there is no answer, the files stay attached for the next question.

        InterruptedRunError if it is stopped before any text is generated.
        """
        self._is_stopped = False

        def on_prepared_unless_stopped(ready: Prepared) -> None:
            on_prepared(ready)
            if self._is_stopped:
                raise InterruptedRunError("Interrupted.")

        answer = self.chat.say(
            self.question(question),
            on_text=on_text,
            on_thought=on_thought,
            on_prepared=on_prepared_unless_stopped,
        )
        if answer.text.strip():
            self.attached.clear()
        self.last = answer
        status, timings = self.status, answer.timings
        status.used, status.cached = answer.prompt_tokens + answer.completion_tokens, answer.cached_tokens
        status.evaluated = answer.prompt_tokens - answer.cached_tokens
        status.tokens_per_s = timings.tokens_per_s(answer.completion_tokens) or 0.0
        return answer

    def look_ahead(self, *, write: bool) -> Forgotten:
        """Return the turns that the next prompt summarizes or leaves out. With `write`, also write the summaries."""
        forgotten = self.chat.forgets(self.question(""), write=write)
        self.status.forgotten = forgotten
        return forgotten

    def retried(self) -> Turn:
        """Remove and return the last turn, and set another seed and temperature for the next answer."""
        turn = self.chat.undo()[0]
        temperature = self.sampling.temperature or RETRY_TEMPERATURE
        self.sampling = replace(self.sampling, seed=(self.sampling.seed + 1) % 2**32, temperature=temperature)
        return turn

    # --- inside ---

    def _row(self) -> ConversationRow | None:
        conversations = self.journal.conversations
        if self._choice.name is not None:
            return conversations.named(self._choice.name)
        return conversations.latest() if self._choice.resumes else None

    def _take_over(self, row: ConversationRow, *, is_open: bool = False) -> None:
        """Restore a conversation's system prompt, model and knowledge bases, unless the command line sets them."""
        about = row.about
        system = about.get("system")
        self.asking["system"] = self._system or (system if isinstance(system, str) else None)
        if not is_open:
            model, kbs, weak = about.get("model"), about.get("kbs"), self._choice.weak
            if isinstance(model, str) and (self.asking["model"] is None or "model" in weak):
                self.asking["model"] = model
            if kbs is not None and (not self.asking["kbs"] or "kbs" in weak):
                self.asking["kbs"] = tuple(str(each) for each in kbs)

    def _about(self) -> dict[str, Any]:
        return {"model": self.asking["model"], "kbs": list(self.asking["kbs"]), "system": self.asking["system"]}

    def _new_name(self) -> str:
        """Return the date and time as a name, with a number if that name exists."""
        now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
        return next(name for name in _numbered(now) if self.journal.conversations.named(name) is None)

    def _recalling(self) -> dict[str, float]:
        if not self.settings.models_files():
            return {}
        from localrag.catalog import Catalog  # noqa: PLC0415  # weight

        return dict(Catalog.load(self.settings).memories)


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name} ({number})"
        number += 1


Ask = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """A chat command. `run(desk, rest)` executes it; `rest` is the text after its name."""

    run: Callable[[Desk, str], None]
    usage: str
    help: str

    @property
    def name(self) -> str:
        return self.usage[1:].partition(" ")[0]


class Desk:
    """Runs the lines of a chat. `ask` asks a question, `commands` maps names to commands, `prefilled` is the next line's initial text."""

    def __init__(self, room: Room, ask: Ask, commands: Mapping[str, Command]) -> None:
        self.room = room
        self.ask = ask
        self.commands = commands
        self.prefilled = ""
        self.is_open = True

    def handle(self, text: str) -> bool:
        """Run a line and return False if the chat should end. A line that starts with // is a question that starts with /."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            self._command(name.strip()).run(self, rest.strip())
        else:
            self.ask(text[1:] if text.startswith("//") else text)
        return self.is_open

    def _command(self, name: str) -> Command:
        command = self.commands.get(name)
        if command is None:
            near = difflib.get_close_matches(name, self.commands, n=2)
            hint = (
                f"Did you mean {' or '.join('/' + each for each in near)}?"
                if near
                else "See /help. To start a question with a slash, type //."
            )
            raise UsageError(f"There is no command /{name[:40]}.", hint=hint)
        return command


def number(text: str, name: str, least: float, most: float) -> float:
    """Parse a number for the command `name`. UsageError unless it is from `least` to `most`."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UsageError(f"{name} takes a number from {least:g} to {most:g}, not {text[:40]!r}.")
    return value


def whole(text: str, name: str, *, least: int = 0, most: int = 10**9) -> int:
    """Parse a whole number for the command `name`. UsageError unless it is from `least` to `most`."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise UsageError(f"{name} takes a whole number from {least} to {most}, not {text[:40]!r}.")
    return int(text)
