"""Print a council's events as text, and draw a live view of its members."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import click

from localrag.budget.ledger import WRITTEN
from localrag.cli.terminal import Area, console, inline, note, prose
from localrag.deliberation.roles import RESERVED_ROLES
from localrag.errors import counted
from localrag.text.sanitize import one_line, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text


Event = Mapping[str, Any]
"""An event, or a part of one. Missing fields are not shown."""

_MARKS = {"✓": "+", "–": "-", "…": "...", "→": "->"}
_MAX_NAMED = 8
_MAX_NAME_CHARS = 60
_MAX_RESULT_LINES = 6
_MAX_RESULT_CHARS = 200


def printable(text: str, encoding: str | None = None) -> str:
    """Make text encodable (by default for stdout): replace our own marks by ASCII, and other characters by question marks."""
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        for mark, plain in _MARKS.items():
            text = text.replace(mark, plain)
        return text.encode(encoding, "replace").decode(encoding)
    except LookupError:
        return text.encode("ascii", "replace").decode()
    return text


def paragraphs(text: object) -> list[str]:
    """Split a text into lines that are safe to print on a terminal."""
    return visible(str(text).strip()).expandtabs(4).split("\n")


def start_lines(event: Event) -> list[str]:
    """Return a line with each role's model and window."""
    lines = []
    for each in _parts(event, "roles"):
        slot = _part(each, "slot")
        bound = f", limited by {one_line(slot['bound'])}" if slot.get("bound") else ""
        role, model = one_line(each.get("role", "?")), one_line(each.get("model", "?"))
        lines.append(f"  {role}: {model}, window {_count(slot, 'n_ctx')} tokens{bound}")
    return _written(lines)


def planned_lines(event: Event) -> list[str]:
    lines = ["=== plan ===", *_indented(event.get("strategy") or "no strategy")]
    return _written([*lines, *(f"  search: {one_line(each)}" for each in _texts(event, "searches"))])


def search_lines(event: Event) -> list[str]:
    counts = ", ".join(f"{one_line(role)} {_count({'num': num}, 'num')}" for role, num in _part(event, "roles").items())
    lines = [f"=== search: {counted(_num(event, 'found'), 'passage')}{f' ({counts})' if counts else ''} ==="]
    return _written([*lines, *(f"  {one_line(each, 200)}" for each in _texts(event, "queries"))])


def budget_lines(event: Event, width: int = 100) -> list[str]:
    """Return a prompt's budget: for each section the tokens used and allotted, and the items cut; then the total."""
    ledger = _part(event, "ledger")
    entries = _parts(ledger, "entries")
    used = sum(_num(each, "used") for each in entries if each.get("name") not in WRITTEN)
    lines = [f"=== {_who(event)}, {used:,} of {_count(ledger, 'window')} tokens ==="]
    allowances = _part(event, "allowances")
    lines += [_section(each, max(_num(each, "allotted"), _num(allowances, str(each.get("name")))), width) for each in entries]
    rooms = {name: sum(_num(each, "allotted") for each in entries if each.get("name") == name) for name in WRITTEN}
    thoughts = f"{rooms['thinking']:,} to think, " if rooms["thinking"] else ""
    return _written([*lines, f"  Total: {used:,} tokens in, {thoughts}{rooms['answer']:,} for the answer, {_count(ledger, 'spare')} spare"])


def budget_again(event: Event, before: Event | None) -> list[str]:
    """Return one line that replaces a table identical to the previous one, or no line if the budgets differ."""
    keys = ("role", "kind", "ledger", "allowances")
    is_same = before is not None and all(event.get(key) == before.get(key) for key in keys)
    return _written([f"=== {_who(event)} again, with the same budget ==="]) if is_same else []


def _section(entry: Event, allotted: int, width: int) -> str:
    """Return a section's line. `allotted` is the most tokens that it may use in this window."""
    name, used, wanted = one_line(entry.get("name", "?")), _num(entry, "used"), _num(entry, "wanted")
    if name == "gap":
        return f"    gap: {allotted:,} kept free"
    if name in WRITTEN:
        return f"  ✓ {name}: room for {allotted:,}" if allotted >= wanted else f"  – {name}: room for {allotted:,} of {wanted:,} wanted"
    reasons = _part(entry, "omitted_reasons")
    merged = [f"{name} {reasons[name]}" for name in _texts(entry, "omitted") if name in reasons]
    omitted = [name for name in _texts(entry, "omitted") if name not in reasons]
    shortened, covered = _parts(entry, "shortened"), _texts(entry, "covered")
    is_whole = not omitted and not shortened and used >= wanted
    percent = f" ({100 * used / allotted:.1f} %)" if allotted else ""
    line = f"  {'✓' if is_whole else '–'} {name}: {used:,}/{allotted:,}{percent}" + ("" if is_whole else f" of {wanted:,} wanted")
    cut = [f"{each.get('id', '?')} {each.get('level', '')} {_num(each, 'tokens'):,}/{_num(each, 'of'):,}" for each in shortened]
    for names, word in ((omitted, "left out"), (cut, "shortened"), (covered, "in a summary"), (merged, "merged")):
        if names:
            line += f"; {len(names):,} {word}: {_names(names, width - len(line) - 24)}"
    return line


def _names(names: Sequence[str], room: int) -> str:
    """Join as many names as fit in `room` characters, but at least one."""
    text = ""
    for number, name in enumerate(names):
        more = f"{', ' if number else ''}{one_line(name, _MAX_NAME_CHARS)}"
        if number and (number >= _MAX_NAMED or len(text) + len(more) > room):
            return f"{text}, … {len(names) - number:,} more"
        text += more
    return text


def proposal_lines(checked: Event, answer: Event | None) -> list[str]:
    """Return a member's proposal, its sources with their places (from the answer object `answer`, if any), and the removed parts."""
    answer = answer or {}
    text = str(checked.get("text") or "")
    lines = [f"=== {one_line(checked.get('member', '?'))} proposes ===", *_indented(text or "Said nothing.")]
    if answer.get("error"):
        lines.append(f"  The model failed: {_message(answer['error'])}")
    if answer.get("finish_reason") == "length":
        lines.append("  Stopped at its token limit (max_tokens).")
    places = {each.get("id"): _place(each) for each in _parts(answer, "evidence")}
    lines += [f"  [{one_line(label)}] {places.get(label) or ''}".rstrip() for label in _texts(checked, "cited")]
    if invented := _texts(checked, "invented"):
        lines.append(f"  Invented sources removed: {_names(invented, 1000)}")
    if repeated := _num(checked, "num_repeated"):
        lines.append(f"  Repetitions removed: {repeated:,} {'sentence' if repeated == 1 else 'sentences'}")
    return _written(lines)


def said_lines(event: Event) -> list[str]:
    """Return an answer that was never processed, because the model failed or the run ended."""
    text = f"The model failed: {_message(event['error'])}" if event.get("error") else event.get("answer") or "Nothing."
    return _written([f"=== {_who(event)}, unfinished ===", *_indented(text)])


def ranking_lines(event: Event) -> list[str]:
    """Return how the members rank each other: points, best first, then each member's ranking."""
    lines = ["=== ranking ==="]
    points = sorted(_part(event, "points").items(), key=lambda each: -_real(each[1]))
    lines += [f"  {place}. {one_line(name)}: {_real(value):.2f}" for place, (name, value) in enumerate(points, 1)]
    for name, ranking in _part(event, "rankings").items():
        names = ranking if isinstance(ranking, list | tuple) else [ranking]
        lines.append(f"  {one_line(name)} ranks: {', '.join(map(one_line, names))}")
    return _written(lines if len(lines) > 1 else [*lines, "  No ranking could be read."])


def tool_lines(event: Event) -> list[str]:
    """Return a tool call, its result, and the tokens left for further results."""
    arguments = ", ".join(f"{one_line(name)}: {one_line(value, _MAX_RESULT_CHARS)}" for name, value in _part(event, "arguments").items())
    lines = [f"=== judge uses {one_line(event.get('tool', '?'))} ({arguments}) ==="]
    if event.get("is_error"):
        lines.append("  It failed:")
    result = [line for line in paragraphs(event.get("text") or "") if line.strip()]
    lines += [f"  {one_line(line, _MAX_RESULT_CHARS)}" for line in result[:_MAX_RESULT_LINES]]
    if len(result) > _MAX_RESULT_LINES:
        lines.append(f"  … {counted(len(result) - _MAX_RESULT_LINES, 'line')} more")
    room = "none left" if event.get("is_exhausted") else f"{_count(event, 'room_left')} left"
    return _written([*lines, f"  {_count(event, 'num_tokens')} tokens, {room}"])


def verdict_markdown(event: Event) -> str:
    """Return the verdict as Markdown: the decision, confidence, text, dissent, and the sources with file and place.

    Text from the model, documents or file names cannot add links, images, HTML or headings.
    """
    decision = one_line(event.get("decision") or "")
    blocks = [f"**{inline(decision)}**"] if decision else []
    if event.get("confidence"):
        blocks.append(f"Confidence: {inline(one_line(event['confidence']))}")
    if event.get("text"):
        blocks.append(prose("\n".join(paragraphs(event["text"]))))
    if event.get("is_whole") is False:
        blocks.append("The verdict was cut off at the judge's token limit.")
    if dissent := [_item(f"**{_inline(each, 'member')}**", _inline(each, "view")) for each in _parts(event, "dissent")]:
        blocks += ["## Dissent", "\n".join(dissent)]
    if sources := [_item(_inline(each, "id"), inline(_place(each))) for each in _parts(event, "sources")]:
        blocks += ["## Sources", "\n".join(sources)]
    unsupported = [one_line(each.get("id", "?")) for each in _parts(event, "citations") if not each.get("supplied")]
    if unsupported:
        blocks.append(f"Cited but not among the sources: {inline(', '.join(unsupported))}")
    return "\n\n".join(blocks) + "\n"


def _item(name: str, text: str) -> str:
    return f"- {name}: {text}" if text else f"- {name}"


def _inline(part: Event, key: str) -> str:
    return inline(one_line(part.get(key, "?")))


def verdict_lines(event: Event) -> list[str]:
    """Return the verdict's Markdown under a title."""
    return _written(["=== verdict ===", "", *verdict_markdown(event).splitlines()])


def error_lines(event: Event) -> list[str]:
    lines = [f"Error: {_message(event)}"]
    return _written([*lines, f"  {one_line(event['hint'])}"] if event.get("hint") else lines)


def end_lines(event: Event) -> list[str]:
    """Return how the run ended, its tokens (evaluated, shared, written) and its time in seconds."""
    usage = _part(event, "usage")
    prompt, cached_tokens = _num(usage, "prompt_tokens"), _num(usage, "cached_tokens")
    saved = f" ({100 * cached_tokens / prompt:.1f} % saved)" if prompt else ""
    evaluated, completion_tokens = _count(usage, "evaluated_tokens"), _count(usage, "completion_tokens")
    lines = [
        f"=== {one_line(event.get('state', 'ended'))} after {_real(event.get('total_s')):.1f} s ===",
        f"  {evaluated} tokens evaluated, {cached_tokens:,} of {prompt:,} shared{saved}, {completion_tokens} written",
    ]
    for each in _parts(event, "loads"):
        closed = _texts(each, "closed")
        replacement = f", replacing {', '.join(map(one_line, closed))}" if closed else ""
        lines.append(f"  {one_line(each.get('model', '?'))} loaded in {_real(each.get('load_s')):.1f} s{replacement}")
    return _written([*lines, *(f"  Warning: {one_line(each)}" for each in _texts(event, "warnings"))])


def _place(source: Event) -> str:
    """Return the file, heading and place of a piece of evidence."""
    where = " > ".join(one_line(source[key]) for key in ("source", "heading") if source.get(key))
    position = source.get("place") or (f"characters {source['start']} to {source['end']}" if "start" in source and "end" in source else "")
    return f"{where} ({one_line(position)})" if position else where


def _who(event: Event) -> str:
    return f"{one_line(event.get('role', '?'))}: {one_line(event.get('kind', '?'))}"


def _message(error: object) -> str:
    return one_line((error.get("message") or error.get("error") or "?") if isinstance(error, Mapping) else error)


def _indented(text: object) -> Iterator[str]:
    return (f"  {line}".rstrip() for line in paragraphs(text))


def _written(lines: Sequence[str]) -> list[str]:
    return [printable(line) for line in lines]


def _num(event: Event, key: str) -> int:
    return int(_real(event.get(key)))


def _real(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else 0.0  # so is NaN


def _count(event: Event, key: str) -> str:
    return f"{_num(event, key):,}"


def _part(event: Event, key: str) -> Event:
    value = event.get(key)
    return value if isinstance(value, Mapping) else {}


def _parts(event: Event, key: str) -> list[Event]:
    value = event.get(key)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list | tuple) else []


def _texts(event: Event, key: str) -> list[str]:
    value = event.get(key)
    return [str(each) for each in value] if isinstance(value, list | tuple) else []


_MIN_COLUMN_CELLS = 28
_MAX_LINES = 8
_BLOCK_CHARS = 1024
"""A shown text starts at a multiple of this many characters, so that its line breaks stay stable as it grows."""
_BY_ALL = ("proposal", "review")
"""The steps in which all members write; in other steps a single role writes."""
_TEXT_IN_JSON = re.compile(r'"\w+"\s*:\s*"((?:[^"\\]|\\.)*)')


@dataclass(slots=True)
class _Column:
    """One role in the live view. `num_pieces` counts the pieces of its text: usually one token each, more for some characters."""

    role: str
    state: str = "waiting"
    since: float = field(default_factory=time.monotonic)
    text: str = ""
    num_pieces: int = 0

    def read(self) -> None:
        """Start reading a new prompt."""
        self.state, self.since, self.text, self.num_pieces = "reading", time.monotonic(), "", 0

    def write(self, text: str) -> None:
        self.state = "writing"
        self.text += text
        self.num_pieces += 1

    @property
    def heading(self) -> str:
        labels = {"reading": f"reading, {time.monotonic() - self.since:.0f} s", "writing": f"writing, {self.num_pieces} tokens"}
        return one_line(f"{self.role}: {labels.get(self.state, self.state)}")

    @property
    def tail(self) -> str:
        """The end of the text, safe for a terminal. For JSON, the end of its string values."""
        text = self.text
        if text.lstrip().startswith("{"):
            strings = _TEXT_IN_JSON.findall(text)
            text = "\n".join(each.replace("\\n", "\n").replace('\\"', '"') for each in strings)
        end = text[max(0, len(text) // _BLOCK_CHARS - 1) * _BLOCK_CHARS :]
        return "\n".join(paragraphs(end))


class _Board:
    """Draws the roles at work, each with the end of its text."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._area = Area(out, self._draw)
        self._columns: dict[str, _Column] = {}

    def open(self, roles: Sequence[str]) -> None:
        """Start drawing these roles, all waiting."""
        self.close()
        self._columns = {role: _Column(role) for role in roles}
        self._area.open()

    def column(self, role: str) -> _Column:
        """Return a role's column, or an undrawn one for a role that is not shown."""
        return self._columns.get(role) or _Column(role)

    def close(self) -> None:
        self._area.close()

    def _draw(self) -> RenderableType:
        """Draw the columns side by side if the terminal is wide enough, otherwise one below the other."""
        from rich.table import Table  # noqa: PLC0415  # weight

        columns = list(self._columns.values())
        width, height = self._out.width, self._out.height - 2
        is_wide = len(columns) * _MIN_COLUMN_CELLS <= width
        grid = Table.grid(padding=(0, 2, 0, 0) if is_wide else 0)
        if is_wide:
            each = max(1, width // max(1, len(columns)) - 2)
            for _ in columns:
                grid.add_column(width=each)
            grid.add_row(*(self._cell(column, each, min(_MAX_LINES, height - 1)) for column in columns))
        else:
            for column in columns:
                grid.add_row(self._cell(column, width, min(2, height // len(columns) - 1)))
        return grid

    def _cell(self, column: _Column, width: int, num_lines: int) -> Text:
        """Draw a role's heading and the last lines of its text."""
        from rich.text import Text  # noqa: PLC0415  # weight

        cell = Text(column.heading, style="bold", no_wrap=True)
        cell.truncate(width, overflow="ellipsis")
        content = Text().append_text(cell)
        if num_lines > 0:
            for line in list(Text(column.tail).wrap(self._out, width))[-num_lines:]:
                line.rstrip()
                content.append("\n").append_text(line)
        return content


class CouncilView:
    """Shows a council run live: progress on stderr, the verdict on stdout. On a terminal, also draws the roles at work."""

    def __init__(self, council: str) -> None:
        out = console(err=True)
        self._board = _Board(out) if sys.stderr.isatty() and not out.is_dumb_terminal else None
        self._council = council
        self._members: list[str] = []
        self._kind = ""
        self._budgets: dict[str, Event] = {}
        """Budgets still to be printed, by role. They wait while the board is drawn."""
        self._last_budget: Event | None = None
        self._said: dict[str, Event] = {}
        """Answers not processed yet, by role."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()

    def on_text(self, role: str, text: str) -> None:
        if self._board is not None:
            self._board.column(role).write(text)

    def on_event(self, event: Event) -> None:
        name = event["event"]
        if name == "budget":
            self._begin(event)
        elif name == "said":
            self._end_writing(event)
        else:
            if self._board is not None:
                self._board.close()
            self._kind = ""
            self._show(name, event)

    def _begin(self, event: Event) -> None:
        role, kind = event["role"], event["kind"]
        if self._kind != kind:
            self._kind = kind
            self._said.clear()
            if self._board is not None:
                self._board.open(self._members if kind in _BY_ALL else [role])
        if self._board is None:
            _note(budget_again(event, self._last_budget) or budget_lines(event))
            self._last_budget = event
        else:
            self._budgets[role] = event
            self._board.column(role).read()

    def _end_writing(self, event: Event) -> None:
        role = event["role"]
        self._said[role] = event
        if self._board is not None:
            num_tokens = event.get("usage", {}).get("completion_tokens", 0)
            self._board.column(role).state = "failed" if "error" in event else f"done, {num_tokens} tokens"

    def _show(self, name: str, event: Event) -> None:
        """Print the lasting lines of an event."""
        if name == "checked":
            self._show_budgets(event["member"])
            _note(proposal_lines(event, self._said.pop(event["member"], None)))
            return
        self._show_budgets()
        match name:
            case "start":
                self._members = [each["role"] for each in event["roles"] if each["role"] not in RESERVED_ROLES]
                note(f"Council {one_line(self._council)}")
                _note(start_lines(event))
            case "planned":
                _note(planned_lines(event))
            case "search":
                _note(search_lines(event))
            case "ranking":
                _note(ranking_lines(event))
            case "tool":
                _note(tool_lines(event))
            case "verdict":
                _verdict(event)
            case "end":
                for each in self._said.values():
                    _note(said_lines(each))
                _note(end_lines(event))
        self._said.clear()

    def _show_budgets(self, *roles: str) -> None:
        """Print the waiting budgets of these roles, or of all."""
        for role in roles or tuple(self._budgets):
            if role in self._budgets:
                _note(budget_lines(self._budgets.pop(role), console(err=True).width))


def _note(lines: Sequence[str]) -> None:
    for line in lines:
        note(line)


def _verdict(event: Event) -> None:
    """Print the verdict on stdout: rendered on a terminal, otherwise as Markdown."""
    text = verdict_markdown(event)
    out = console()
    if not sys.stdout.isatty() or out.is_dumb_terminal:
        click.echo(text, nl=False)
        return
    from rich.markdown import Markdown  # noqa: PLC0415  # weight

    out.print(Markdown(text, hyperlinks=False))
