"""/sources: what an answer was given, one passage whole, and the file that it is from."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from localrag.cli import views
from localrag.cli.chat_desk import Desk, whole
from localrag.cli.opening import open_file
from localrag.cli.text import note, one_line, safe
from localrag.errors import UsageError
from localrag.passages import Hit
from localrag.session.turns import Turn

_LINE = re.compile(r"lines? (\d{1,9})\b")
_USAGE = "/sources [turn N] [NUMBER|TAG] [open]"


def sources(desk: Desk, rest: str) -> None:
    """`/sources [turn N] [NUMBER|TAG] [open]`: all that the answer was given, or one passage of it, or its file."""
    words, chat = rest.split(), desk.room.chat
    turn = chat.turn(-1)
    if words[:1] == ["turn"]:
        turn = chat.turn(whole(words[1] if len(words) > 1 else "", "/sources turn", least=1))
        words = words[2:]
    opens = words[-1:] == ["open"]
    words = words[:-1] if opens else words
    given = given_to(turn, chat.turns)
    if len(words) > 1 or (opens and not words and len(given) != 1):
        raise UsageError(f"{_USAGE} shows what an answer was given, or one passage of it, or opens its file.")
    if not words and not opens:
        note(listing(turn, given))
        return
    hit = _chosen(words[0] if words else "1", given, chat.turns)
    path = _path(desk, hit)
    if opens:
        _open(hit, path)
    else:
        note(passage(hit, path, is_cited=hit.label in _cited(turn)))


def given_to(turn: Turn, turns: Sequence[Turn]) -> list[Hit]:
    """What a turn cites, and what else came with it, in the order in which the conversation was given it."""
    cited = _cited(turn)
    before = [each for each in turns if each.id <= turn.id]  # a tag can mean another passage in a later turn
    known = {hit.label: hit for each in before for hit in each.hits}
    return [hit for label, hit in known.items() if label in cited or any(each.label == label for each in turn.hits)]


def listing(turn: Turn, given: Sequence[Hit]) -> str:
    """All of it, numbered, each with its place and its text."""
    if not given:
        return "No sources came with it."
    cited = _cited(turn)
    lines = []
    for number, hit in enumerate(given, 1):
        lines.append(f"{number:3} {'*' if hit.label in cited else ' '} {views.place(hit)}")
        lines += [f"      {line}" for line in safe(hit.chunk.text.strip()).splitlines()]
    if any(hit.label in cited for hit in given):
        lines.append("    * cited in the answer")
    return "\n".join(lines)


def passage(hit: Hit, path: Path | None, *, is_cited: bool) -> str:
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


def _chosen(wanted: str, given: Sequence[Hit], turns: Sequence[Turn]) -> Hit:
    """A passage by its number among those that were given, or by its tag, by which the last one of the conversation is meant."""
    if wanted.isdecimal():
        if not 1 <= whole(wanted, "/sources") <= len(given):
            raise UsageError(f"There is no source {wanted[:20]}: the answer was given {len(given)}.", hint="/sources lists them.")
        return given[int(wanted) - 1]
    tag = wanted.strip("[]").lower()
    others = [hit for turn in reversed(turns) for hit in turn.hits]
    for hit in (*given, *others):
        if hit.label.lower() == tag:
            return hit
    raise UsageError(
        f"Nothing in this conversation has the tag {one_line(wanted, 40)}.", hint="/sources lists what the last answer was given."
    )


def _open(hit: Hit, path: Path | None) -> None:
    """UsageError where no file is known, or nobody could see an editor."""
    if path is None:
        raise UsageError(f"It is not known here which file {hit.label} is from.", hint="/kb add NAME uses its knowledge base again.")
    if not sys.stdin.isatty():
        raise UsageError("A file is opened on a terminal only.", hint=f"It is {safe(str(path))}")
    line = _LINE.match(hit.chunk.place)
    open_file(path, int(line[1]) if line else None)
    note(f"Opened {safe(str(path))}{f', {safe(hit.chunk.place)}' if hit.chunk.place else ''}.")


def _path(desk: Desk, hit: Hit) -> Path | None:
    for kb in desk.room.session.knowledge_bases:
        if kb.name == hit.chunk.kb:
            return kb.paths().get(hit.chunk.source)
    return None


def _cited(turn: Turn) -> set[str]:
    return set(turn.about.get("citations", ()))
