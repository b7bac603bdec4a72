"""Conversations as text: on a terminal, in Markdown, in JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.cli import views
from localrag.cli.chat_sources import given_to
from localrag.cli.files import write_whole
from localrag.cli.markdown import inline, prose
from localrag.cli.text import note, one_line, safe
from localrag.errors import UsageError
from localrag.session import Answer
from localrag.session.turns import Forgotten, Turn

if TYPE_CHECKING:
    from localrag.session.rewriting import Rewriting

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


def searched(rewriting: Rewriting) -> str:
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
        places = [f"- {inline(views.place(hit))}" for hit in given_to(turn, turns) if hit.label in cited]
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
        write_whole(path, text, replace=False)
    except OSError as error:
        raise UsageError(f"{safe(str(path))} cannot be written: {error.strerror or error}.", hint="Name another file.") from None
