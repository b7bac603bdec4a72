"""A chat as a person sees it: answers as they come, sources, turns, and the conversation as Markdown or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from localrag.cli import render
from localrag.cli.files import write_whole
from localrag.cli.live_area import Area, silence_keys
from localrag.cli.text import console, dim, inline, note, prose
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
    "interrupted": "  (its program ended before the answer did)",
    "stopped": "  (stopped)",
    "failed": "  (no answer)",
    "running": "  (being answered elsewhere)",
}


def short(text: str) -> str:
    """The beginning of a text as one line."""
    return one_line(text, _SHORT_CHARS)


def state_of(turn: Turn) -> str:
    """What became of an answer that is not whole; nothing for one that is."""
    return _STATES.get(turn.state, "")


def searched(rewriting: QueryRewrite) -> str:
    """What was searched for in place of a follow-up."""
    return f"Searched for: {one_line(rewriting.text)}"


def usage(answer: Answer) -> str:
    """What a turn took, in tokens."""
    evaluated = answer.prompt_tokens - answer.cached_tokens
    rewriting = answer.rewriting
    more = "" if rewriting is None else f" Rewriting: {rewriting.prompt_tokens:,} in, {rewriting.completion_tokens:,} out."
    return (
        f"{answer.prompt_tokens:,} tokens in, of which {answer.cached_tokens:,} were there already and {evaluated:,} were evaluated; "
        f"{answer.completion_tokens:,} out; first after {answer.timings.first_token_s:.2f} s; window {answer.slot.n_ctx:,}.{more}"
    )


def warning_of(forgotten: Forgotten) -> str:
    """What the next question leaves out, and the way out."""
    said = []
    if forgotten.summarised:
        said.append(f"{_turn_numbers(forgotten.summarised)} in a summary")
    if forgotten.left_out:
        said.append(f"{_turn_numbers(forgotten.left_out)} not at all")
    return f"From the next question on, the model sees {' and '.join(said)}. /pin N keeps a turn whole."


def _turn_numbers(numbers: Sequence[int]) -> str:
    """`turn 3`, `turns 1–4`, `turns 1, 2, 7`."""
    if len(numbers) == 1:
        return f"turn {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"turns {numbers[0]}–{numbers[-1]}"
    return f"turns {', '.join(map(str, numbers))}"


def transcript(turns: Sequence[Turn], *, last: int) -> None:
    """The last turns, so that a person sees where the conversation stands."""
    if len(turns) > last:
        note(f"({counted(len(turns) - last, 'turn')} before; /history lists them)")
    first = max(0, len(turns) - last) + 1
    for number, turn in enumerate(turns[-last:], first):
        note(f"{number}> {safe(turn.question)}")
        if turn.answer.strip():
            note(safe(turn.answer.strip()))
        if state_of(turn):
            note(state_of(turn).strip())
        note("")


def markdown(name: str, turns: Sequence[Turn]) -> str:
    """A conversation as Markdown: nothing in it becomes a link, an image or HTML."""
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
    """A conversation as JSON has it."""
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
    """Write a conversation, whole or not at all. UsageError if the file exists."""
    text = (
        json.dumps(as_object(name, turns), ensure_ascii=False, indent=2) + "\n" if path.suffix.lower() == ".json" else markdown(name, turns)
    )
    if path.exists():
        raise UsageError(f"{safe(str(path))} is there already.", hint="Name another file.")
    try:
        write_whole(path, text, replace=False)
    except OSError as error:
        known = file_error(error, path, hint="Name another file.")
        raise UsageError(f"{safe(str(path))} cannot be written: {known.reason}.", hint=known.hint, **known.numbers) from None


def given_to(turn: Turn, turns: Sequence[Turn]) -> list[Hit]:
    """What a turn cites, and what else came with it, in the order in which the conversation was given it."""
    cited = cited_labels(turn)
    before = [each for each in turns if each.id <= turn.id]  # a tag can mean another passage in a later turn
    known = {hit.label: hit for each in before for hit in each.hits}
    return [hit for label, hit in known.items() if label in cited or any(each.label == label for each in turn.hits)]


def sources_text(turn: Turn, given: Sequence[Hit]) -> str:
    """All of it, numbered, each with its place and its text."""
    if not given:
        return "No sources came with it."
    cited = cited_labels(turn)
    lines = []
    for number, hit in enumerate(given, 1):
        lines.append(f"{number:3} {'*' if hit.label in cited else ' '} {render.place(hit)}")
        lines += [f"      {line}" for line in safe(hit.chunk.text.strip()).splitlines()]
    if any(hit.label in cited for hit in given):
        lines.append("    * cited in the answer")
    return "\n".join(lines)


def passage_text(hit: Hit, path: Path | None, *, is_cited: bool) -> str:
    """One passage, whole, with all that is known of where it stands."""
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
    """Is told what is waited for, remarked and thought, called with each piece of an answer, and closed in the end."""

    def wait(self, text: str, /) -> None: ...
    def remark(self, text: str, /) -> None: ...
    def think(self, piece: str, /) -> None: ...
    def __call__(self, piece: str, /) -> None: ...
    def close(self) -> None: ...


def make_view(*, draws: bool) -> View:
    """For a terminal that can move its cursor (`draws`), or for any other output."""
    return MarkdownView(console()) if draws else _PlainView()


class _PlainView(render.AnswerStream):
    """Text as it comes, and nothing before it."""

    def wait(self, text: str) -> None:
        """A pipe is not told what is waited for."""

    def remark(self, text: str) -> None:
        """It goes where talk goes."""
        dim(text)

    def think(self, piece: str) -> None:
        """Nor what is thought."""


class MarkdownView:
    """Blocks of Markdown (paragraphs, lists, code) are printed for good once the next one has begun; the last is drawn anew until then."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._text = ""
        self._waiting = ""
        self._has_thought = False
        self._area = Area(out, self._tail)
        self._restore: Callable[[], None] | None = None

    def wait(self, text: str) -> None:
        """Say what is being done until the first piece comes."""
        self._waiting = text
        self._restore = self._restore or silence_keys()  # for as long as it draws: the area itself closes between blocks
        self._area.open()

    def remark(self, text: str) -> None:
        """A line that stays, above the answer."""
        self._area.close()
        dim(text)

    def think(self, piece: str) -> None:
        """Thoughts are printed as they come, dimmed, above the answer."""
        self._area.close()
        self._has_thought = True
        self._out.print(safe(piece), style="dim", end="", markup=False, highlight=False, soft_wrap=True)

    def _begin(self) -> None:
        """The answer stands apart from the thoughts."""
        if self._has_thought:
            self._has_thought = False
            self._out.print("\n")

    def __call__(self, piece: str) -> None:
        self._begin()
        self._text = (self._text + safe(piece)).lstrip("\n") if not self._text else self._text + safe(piece)
        done = _complete(self._text)
        if done:
            finished, self._text = self._text[:done], self._text[done:].lstrip("\n")
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
        """The last block, or as many of its last lines as the terminal shows: what scrolled away cannot be drawn anew."""
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
    """How many characters of a Markdown text stand in blocks behind which another one has begun."""
    if "\n" not in text:
        return 0
    from markdown_it import MarkdownIt  # noqa: PLC0415  # weight

    starts = [token.map[0] for token in MarkdownIt().parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    if len(starts) < 2:
        return 0
    return sum(len(line) + 1 for line in text.split("\n")[: starts[-1]])
