"""Conversations as text: on a terminal, in Markdown, in JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.cli import views
from localrag.cli.markdown import inline, prose
from localrag.cli.text import note, safe
from localrag.errors import UsageError
from localrag.session import Answer
from localrag.session.chat import Forgotten, Turn

if TYPE_CHECKING:
    from localrag.passages import Hit

_SHORT_CHARS = 70
_STATES = {
    "interrupted": "  (its program ended before the answer did)",
    "stopped": "  (stopped)",
    "failed": "  (no answer)",
    "running": "  (being answered elsewhere)",
}


def short(text: str) -> str:
    """The beginning of a text as one line."""
    line = " ".join(safe(text).split())
    return line if len(line) <= _SHORT_CHARS else line[: _SHORT_CHARS - 1] + "…"


def when(seconds: float) -> str:
    """A time in seconds since the epoch, as a person reads it."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def state_of(turn: Turn) -> str:
    """What became of an answer that is not whole; nothing for one that is."""
    return _STATES.get(turn.state, "")


def usage(answer: Answer) -> str:
    """What a turn took, in tokens."""
    evaluated = answer.prompt_tokens - answer.cached_tokens
    return (
        f"{answer.prompt_tokens:,} tokens in, of which {answer.cached_tokens:,} were there already and {evaluated:,} were evaluated; "
        f"{answer.completion_tokens:,} out; first after {answer.timings.first_token_s:.2f} s; window {answer.slot.n_ctx:,}."
    )


def warning_of(forgotten: Forgotten) -> str:
    """What the next question leaves out, and the way out."""
    said = []
    if forgotten.summarised:
        said.append(f"{_turns(forgotten.summarised)} in a summary")
    if forgotten.left_out:
        said.append(f"{_turns(forgotten.left_out)} not at all")
    return f"From the next question on, the model sees {' and '.join(said)}. /pin N keeps a turn whole."


def _turns(numbers: Sequence[int]) -> str:
    """`turn 3`, `turns 1–4`, `turns 1, 2, 7`."""
    if len(numbers) == 1:
        return f"turn {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"turns {numbers[0]}–{numbers[-1]}"
    return f"turns {', '.join(map(str, numbers))}"


def sources(turn: Turn, turns: Sequence[Turn]) -> str:
    """What a turn cites, and what else came with it, each with its place and its text."""
    cited = set(turn.about.get("citations", ()))
    before = [each for each in turns if each.id <= turn.id]  # a tag can mean another passage in a later turn
    known: dict[str, Hit] = {hit.label: hit for each in before for hit in each.hits}
    shown = [known[label] for label in known if label in cited or any(hit.label == label for hit in turn.hits)]
    if not shown:
        return "No sources came with it."
    lines = []
    for hit in shown:
        lines.append(f"{'*' if hit.label in cited else ' '} {views.place(hit)}")
        lines += [f"    {line}" for line in safe(hit.chunk.text.strip()).splitlines()]
    return "\n".join([*lines, "  * cited in the answer"] if cited else lines)


def transcript(turns: Sequence[Turn], *, last: int) -> None:
    """The last turns, so that a person sees where the conversation stands."""
    if len(turns) > last:
        note(f"({len(turns) - last} turns before; /history lists them)")
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
        places = [f"- {inline(views.place(hit))}" for hit in turn.hits if hit.label in cited]
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
    """Writes a conversation, whole or not at all; a file that is there is not replaced (UsageError)."""
    text = (
        json.dumps(as_object(name, turns), ensure_ascii=False, indent=2) + "\n" if path.suffix.lower() == ".json" else markdown(name, turns)
    )
    if path.exists():
        raise UsageError(f"{safe(str(path))} is there already.", hint="Name another file.")
    try:
        handle, made = tempfile.mkstemp(dir=path.parent, prefix=".localrag-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            os.link(made, path)  # fails where somebody made it meanwhile
        finally:
            with suppress(OSError):
                Path(made).unlink()
    except OSError as error:
        raise UsageError(f"{safe(str(path))} cannot be written: {error.strerror or error}.", hint="Name another file.") from None
