"""Show a chat: streamed answers, sources and turns; and export a conversation as Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from localrag.cli import render
from localrag.cli.files import write_whole
from localrag.cli.terminal import Area, console, dim, inline, note, prose, silence_keys
from localrag.errors import UsageError, counted
from localrag.files import file_error
from localrag.session import Answer
from localrag.session.history_window import Forgotten, Turn
from localrag.text.sanitize import one_line, safe
from localrag.types import Hit

if TYPE_CHECKING:
    from rich.console import Console

    from localrag.session.query_rewrite import QueryRewrite


_SHORT_CHARS = 70
_STATES = {
    "interrupted": "  (interrupted: the program ended)",
    "stopped": "  (stopped)",
    "failed": "  (no answer)",
    "running": "  (being answered elsewhere)",
}


def short(text: str) -> str:
    """Return the start of a text on one line."""
    return one_line(text, _SHORT_CHARS)


def state_of(turn: Turn) -> str:
    """Return the reason why an answer is incomplete, or "" for a complete one."""
    return _STATES.get(turn.state, "")


def searched(rewriting: QueryRewrite) -> str:
    """Return a note with the rewritten query of a follow-up question."""
    return f"Searched for: {one_line(rewriting.text)}"


def usage(answer: Answer) -> str:
    """Return the tokens and times of a turn."""
    evaluated = answer.prompt_tokens - answer.cached_tokens
    rewriting = answer.rewriting
    more = "" if rewriting is None else f" Query rewrite: {rewriting.prompt_tokens:,} in, {rewriting.completion_tokens:,} out."
    return (
        f"{answer.prompt_tokens:,} tokens in ({answer.cached_tokens:,} cached, {evaluated:,} evaluated), {answer.completion_tokens:,} out; "
        f"first token after {answer.timings.first_token_s:.2f} s; window {answer.slot.n_ctx:,}.{more}"
    )


def warning_of(forgotten: Forgotten) -> str:
    """Return a warning about the turns that the next prompt summarizes or leaves out."""
    changes = []
    if forgotten.summarised:
        changes.append(f"{_turn_numbers(forgotten.summarised)} only as a summary")
    if forgotten.left_out:
        changes.append(f"{_turn_numbers(forgotten.left_out)} not at all")
    return f"From the next question on, the model sees {' and '.join(changes)}. Use /pin N to keep a turn in full."


def _turn_numbers(numbers: Sequence[int]) -> str:
    """Format turn numbers: `turn 3`, `turns 1–4` or `turns 1, 2, 7`."""
    if len(numbers) == 1:
        return f"turn {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"turns {numbers[0]}–{numbers[-1]}"
    return f"turns {', '.join(map(str, numbers))}"


def transcript(turns: Sequence[Turn], *, last: int) -> None:
    """Print the last turns of a resumed conversation."""
    if len(turns) > last:
        note(f"({counted(len(turns) - last, 'earlier turn')}; /history lists them)")
    first = max(0, len(turns) - last) + 1
    for number, turn in enumerate(turns[-last:], first):
        note(f"{number}> {safe(turn.question)}")
        if turn.answer.strip():
            note(safe(turn.answer.strip()))
        if state_of(turn):
            note(state_of(turn).strip())
        note("")


def markdown(name: str, turns: Sequence[Turn]) -> str:
    """Return a conversation as Markdown. Its texts cannot add links, images or HTML."""
    lines = [f"# {inline(name)}", ""]
    for turn in turns:
        lines += [f"**You**{' (pinned)' if turn.is_pinned else ''}: {prose(turn.question.strip())}", ""]
        lines += [prose(turn.answer.strip()) or "(no answer)", ""]
        if state_of(turn) and turn.answer.strip():
            lines += [f"*{state_of(turn).strip()}*", ""]
        cited = set(turn.about.get("citations", ()))
        places = [f"- {inline(render.place(hit))}" for hit in given_to(turn, turns) if hit.label in cited]
        lines += [*places, ""] if places else []
    return "\n".join(lines)


def as_object(name: str, turns: Sequence[Turn]) -> dict[str, object]:
    """Return a conversation as an object for JSON."""
    return {"name": name, "turns": [_turn(turn) for turn in turns]}


def _turn(turn: Turn) -> dict[str, object]:
    about = turn.about
    sources_of = [{"id": hit.label, "source": hit.chunk.source, "place": hit.chunk.place, "text": hit.chunk.text} for hit in turn.hits]
    return {
        "question": turn.question,
        "answer": turn.answer,
        "state": turn.state,
        "pinned": turn.is_pinned,
        "asked_at": datetime.fromtimestamp(turn.began_at, UTC).isoformat(timespec="seconds"),
        "model": about.get("model"),
        "seed": about.get("seed"),
        "citations": list(about.get("citations", ())),
        "unsupported_citations": list(about.get("unsupported_citations", ())),
        "sources": sources_of,
    }


def save(path: Path, name: str, turns: Sequence[Turn]) -> None:
    """Write a conversation to a file, atomically. UsageError if the file exists."""
    text = (
        json.dumps(as_object(name, turns), ensure_ascii=False, indent=2) + "\n" if path.suffix.lower() == ".json" else markdown(name, turns)
    )
    if path.exists():
        raise UsageError(f"{safe(str(path))} already exists.", hint="Name another file.")
    try:
        write_whole(path, text, replace=False)
    except OSError as error:
        cause = file_error(error, path, hint="Name another file.")
        raise UsageError(f"{safe(str(path))} cannot be written: {cause.reason}.", hint=cause.hint, **cause.numbers) from None


def given_to(turn: Turn, turns: Sequence[Turn]) -> list[Hit]:
    """Return the hits that a turn cites or was given, in the order in which the conversation first had them."""
    cited = cited_labels(turn)
    before = [each for each in turns if each.id <= turn.id]  # in a later turn, a tag can mean another passage
    hits = {hit.label: hit for each in before for hit in each.hits}
    return [hit for label, hit in hits.items() if label in cited or any(each.label == label for each in turn.hits)]


def sources_text(turn: Turn, hits: Sequence[Hit]) -> str:
    """Return the numbered sources of a turn, each with its place and text."""
    if not hits:
        return "This answer has no sources."
    cited = cited_labels(turn)
    lines = []
    for number, hit in enumerate(hits, 1):
        lines.append(f"{number:3} {'*' if hit.label in cited else ' '} {render.place(hit)}")
        lines += [f"      {line}" for line in safe(hit.chunk.text.strip()).splitlines()]
    if any(hit.label in cited for hit in hits):
        lines.append("    * cited in the answer")
    return "\n".join(lines)


def passage_text(hit: Hit, path: Path | None, *, is_cited: bool) -> str:
    """Return one passage in full, with its file, heading and place."""
    chunk = hit.chunk
    place = f"{safe(chunk.place)}, " if chunk.place else ""
    about = {
        "File": chunk.source if path is None else f"{chunk.source}  ({path})",
        "Heading": chunk.heading,
        "Place": f"{place}characters {chunk.start} to {chunk.end}",
        "From": f"knowledge base {chunk.kb}" if chunk.kb else "",
    }
    lines = [f"[{hit.label}]{', cited in the answer' if is_cited else ''}"]
    lines += [f"  {name:8} {one_line(text)}" for name, text in about.items() if text]
    return "\n".join([*lines, "", *(f"  {line}" for line in safe(chunk.text.strip()).splitlines())])


def cited_labels(turn: Turn) -> set[str]:
    return set(turn.about.get("citations", ()))


_MARGIN_LINES = 2


class View(Protocol):
    """Shows the progress, remarks and reasoning of one answer. Call it with each piece of text, then `close` it."""

    def wait(self, text: str, /) -> None: ...
    def remark(self, text: str, /) -> None: ...
    def think(self, piece: str, /) -> None: ...
    def __call__(self, piece: str, /) -> None: ...
    def close(self) -> None: ...


def make_view(*, draws: bool) -> View:
    """Return a view that renders Markdown on a terminal with cursor control (`draws`), or a plain one."""
    return MarkdownView(console()) if draws else _PlainView()


class _PlainView(render.AnswerStream):
    """Prints the plain text of an answer, without progress."""

    def wait(self, text: str) -> None:
        """Show nothing: progress is only for terminals."""

    def remark(self, text: str) -> None:
        """Print a remark on stderr."""
        dim(text)

    def think(self, piece: str) -> None:
        """Show nothing: reasoning is only for terminals."""


class MarkdownView:
    """Renders an answer as Markdown. Finished blocks (paragraphs, lists, code) are printed; the last block is redrawn as it grows."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._text = ""
        self._waiting = ""
        self._has_thought = False
        self._area = Area(out, self._tail)
        self._restore: Callable[[], None] | None = None

    def wait(self, text: str) -> None:
        """Show a progress text until the first piece arrives."""
        self._waiting = text
        self._restore = self._restore or silence_keys()  # until `close`: the area itself closes between blocks
        self._area.open()

    def remark(self, text: str) -> None:
        """Print a remark above the answer."""
        self._area.close()
        dim(text)

    def think(self, piece: str) -> None:
        """Print a piece of reasoning, dimmed, above the answer."""
        self._area.close()
        self._has_thought = True
        self._out.print(safe(piece), style="dim", end="", markup=False, highlight=False, soft_wrap=True)

    def _begin(self) -> None:
        """Separate the answer from the reasoning by a blank line."""
        if self._has_thought:
            self._has_thought = False
            self._out.print("\n")

    def __call__(self, piece: str) -> None:
        self._begin()
        self._text = (self._text + safe(piece)).lstrip("\n") if not self._text else self._text + safe(piece)
        num_chars = _complete(self._text)
        if num_chars:
            finished, self._text = self._text[:num_chars], self._text[num_chars:].lstrip("\n")
            self._area.close()
            self._print(finished)
        if self._text.strip():
            self._area.open()

    def close(self) -> None:
        self._area.close()
        self._begin()
        if self._text.strip():
            self._print(self._text)
        self._text = ""
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _tail(self) -> Any:  # noqa: ANN401  # rich's
        """Return the last block, or as many of its last lines as fit on the terminal: scrolled lines cannot be redrawn."""
        if not self._text.strip():
            return f"{self._waiting} …" if self._waiting else ""
        lines = self._text.split("\n")
        room = max(1, self._out.height - _MARGIN_LINES)
        fits: list[str] = []
        for line in reversed(lines):
            room -= 1 + len(line) // max(1, self._out.width)
            if room < 0:
                break
            fits.insert(0, line)
        return _markdown(self._text) if len(fits) == len(lines) else "\n".join(fits)

    def _print(self, text: str) -> None:
        self._out.print(_markdown(text.strip("\n")))
        self._out.print()


def _markdown(text: str) -> Any:  # noqa: ANN401  # rich's Markdown, imported late
    from rich.markdown import Markdown  # noqa: PLC0415  # weight

    return Markdown(text, hyperlinks=False)


def _complete(text: str) -> int:
    """Return the number of characters in the finished blocks of a Markdown text, i.e. in all but the last block."""
    if "\n" not in text:
        return 0
    from markdown_it import MarkdownIt  # noqa: PLC0415  # weight

    starts = [token.map[0] for token in MarkdownIt().parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    if len(starts) < 2:
        return 0
    return sum(len(line) + 1 for line in text.split("\n")[: starts[-1]])
