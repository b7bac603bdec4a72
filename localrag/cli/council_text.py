"""What a run of a council is as text for a terminal: each event as lines, live and afterwards.

Texts of models, documents and tasks control nothing: no cursor, no direction of writing, and no Markdown but a little of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localrag.budget.ledger import WRITTEN
from localrag.cli.markdown import inline, prose
from localrag.cli.text import HIDDEN, one_line, safe

Told = Mapping[str, Any]
"""An event, or a part of one. What an event lacks is not shown."""

_MARKS = {"✓": "+", "–": "-", "…": "...", "→": "->"}
_MAX_NAMED = 8
_MAX_NAME_CHARS = 60
_MAX_RESULT_LINES = 6
_MAX_RESULT_CHARS = 200


def printable(text: str, encoding: str | None = None) -> str:
    """Text as an encoding (by default that of stdout) can write it; our own marks become ASCII, the rest a question mark."""
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
    """The lines of a text, each safe for a terminal."""
    return HIDDEN.sub("", safe(str(text).strip())).expandtabs(4).split("\n")


def start_lines(event: Told) -> list[str]:
    """Each role's model and window."""
    lines = []
    for each in _parts(event, "roles"):
        slot = _part(each, "slot")
        bound = f", bound by {one_line(slot['bound'])}" if slot.get("bound") else ""
        role, model = one_line(each.get("role", "?")), one_line(each.get("model", "?"))
        lines.append(f"  {role}: {model}, window {_count(slot, 'n_ctx')} tokens{bound}")
    return _written(lines)


def planned_lines(event: Told) -> list[str]:
    lines = ["=== plan ===", *_indented(event.get("strategy") or "no strategy")]
    return _written([*lines, *(f"  search: {one_line(each)}" for each in _texts(event, "searches"))])


def search_lines(event: Told) -> list[str]:
    shown = ", ".join(f"{one_line(role)} {_count({'num': num}, 'num')}" for role, num in _part(event, "roles").items())
    lines = [f"=== search: {_count(event, 'found')} passages{f' ({shown})' if shown else ''} ==="]
    return _written([*lines, *(f"  {one_line(each, 200)}" for each in _texts(event, "queries"))])


def budget_lines(event: Told, width: int = 100) -> list[str]:
    """A prompt's budget: for each section the tokens used of those it may have, and what is not there whole; then the total."""
    ledger = _part(event, "ledger")
    entries = _parts(ledger, "entries")
    used = sum(_num(each, "used") for each in entries if each.get("name") not in WRITTEN)
    lines = [f"=== {_who(event)}, {used:,} of {_count(ledger, 'window')} tokens ==="]
    allowances = _part(event, "allowances")
    lines += [_section(each, max(_num(each, "allotted"), _num(allowances, str(each.get("name")))), width) for each in entries]
    rooms = {name: sum(_num(each, "allotted") for each in entries if each.get("name") == name) for name in WRITTEN}
    thoughts = f"{rooms['thinking']:,} to think, " if rooms["thinking"] else ""
    return _written([*lines, f"  Total: {used:,} tokens in, {thoughts}{rooms['answer']:,} for the answer, {_count(ledger, 'spare')} spare"])


def _section(entry: Told, allotted: int, width: int) -> str:
    """A section's line; `allotted` is what it may have in this window."""
    name, used, wanted = one_line(entry.get("name", "?")), _num(entry, "used"), _num(entry, "wanted")
    if name == "gap":
        return f"    gap: {allotted:,} kept free"
    if name in WRITTEN:
        return f"  ✓ {name}: room for {allotted:,}" if allotted >= wanted else f"  – {name}: room for {allotted:,} of {wanted:,} wanted"
    omitted, shortened, covered = _texts(entry, "omitted"), _parts(entry, "shortened"), _texts(entry, "covered")
    is_whole = not omitted and not shortened and used >= wanted
    percent = f" ({100 * used / allotted:.1f} %)" if allotted else ""
    line = f"  {'✓' if is_whole else '–'} {name}: {used:,}/{allotted:,}{percent}" + ("" if is_whole else f" of {wanted:,} wanted")
    cut = [f"{each.get('id', '?')} {each.get('level', '')} {_num(each, 'tokens'):,}/{_num(each, 'of'):,}" for each in shortened]
    for names, word in ((omitted, "left out"), (cut, "shortened"), (covered, "in a summary")):
        if names:
            line += f"; {len(names):,} {word}: {_names(names, width - len(line) - 24)}"
    return line


def _names(names: Sequence[str], room: int) -> str:
    """The first names, as many as fit `room` characters, one at least."""
    shown = ""
    for number, name in enumerate(names):
        more = f"{', ' if number else ''}{one_line(name, _MAX_NAME_CHARS)}"
        if number and (number >= _MAX_NAMED or len(shown) + len(more) > room):
            return f"{shown}, … {len(names) - number:,} more"
        shown += more
    return shown


def proposal_lines(checked: Told, said: Told | None) -> list[str]:
    """What a member proposes, with where its sources stand (from the answer object `said`, if it is there), and what was struck out."""
    said = said or {}
    text = str(checked.get("text") or "")
    lines = [f"=== {one_line(checked.get('member', '?'))} proposes ===", *_indented(text or "Said nothing.")]
    if said.get("error"):
        lines.append(f"  The model broke: {_message(said['error'])}")
    if said.get("finish_reason") == "length":
        lines.append("  Cut at its last token.")
    places = {each.get("id"): _place(each) for each in _parts(said, "evidence")}
    lines += [f"  [{one_line(label)}] {places.get(label) or ''}".rstrip() for label in _texts(checked, "cited")]
    if invented := _texts(checked, "invented"):
        lines.append(f"  Invented, struck out: {_names(invented, 1000)}")
    if repeated := _num(checked, "num_repeated"):
        lines.append(f"  Said before, struck out: {repeated:,} {'sentence' if repeated == 1 else 'sentences'}")
    return _written(lines)


def said_lines(event: Told) -> list[str]:
    """An answer as it was written, for where nothing was made of it: the model broke, or the run was ended."""
    text = f"The model broke: {_message(event['error'])}" if event.get("error") else event.get("answer") or "Nothing."
    return _written([f"=== {_who(event)}, as far as it came ===", *_indented(text)])


def ranking_lines(event: Told) -> list[str]:
    """How the members rank each other: the points of each, the best first, then who said what."""
    lines = ["=== ranking ==="]
    points = sorted(_part(event, "points").items(), key=lambda each: -_real(each[1]))
    lines += [f"  {place}. {one_line(name)}: {_real(value):.2f}" for place, (name, value) in enumerate(points, 1)]
    for name, ranking in _part(event, "rankings").items():
        names = ranking if isinstance(ranking, list | tuple) else [ranking]
        lines.append(f"  {one_line(name)} ranks: {', '.join(map(one_line, names))}")
    return _written(lines if len(lines) > 1 else [*lines, "  No ranking could be read."])


def tool_lines(event: Told) -> list[str]:
    """A call of a tool, what it gave, and what room is left for more."""
    arguments = ", ".join(f"{one_line(name)}: {one_line(value, _MAX_RESULT_CHARS)}" for name, value in _part(event, "arguments").items())
    lines = [f"=== judge uses {one_line(event.get('tool', '?'))} ({arguments}) ==="]
    if event.get("is_error"):
        lines.append("  It failed:")
    result = [line for line in paragraphs(event.get("text") or "") if line.strip()]
    lines += [f"  {one_line(line, _MAX_RESULT_CHARS)}" for line in result[:_MAX_RESULT_LINES]]
    if len(result) > _MAX_RESULT_LINES:
        lines.append(f"  … {len(result) - _MAX_RESULT_LINES:,} lines more")
    left = "no room for more" if event.get("is_exhausted") else f"room for {_count(event, 'room_left')} more"
    return _written([*lines, f"  {_count(event, 'num_tokens')} tokens, {left}"])


def verdict_markdown(event: Told) -> str:
    """The verdict as Markdown: the decision first, then how sure, the text, who disagrees, and the sources with file and place.

    Whatever the model, a document or a file's name says, there is no link, image, HTML or heading but those written here.
    """
    decision = one_line(event.get("decision") or "")
    blocks = [f"**{inline(decision)}**"] if decision else []
    if event.get("confidence"):
        blocks.append(f"Confidence: {inline(one_line(event['confidence']))}")
    if event.get("text"):
        blocks.append(prose("\n".join(paragraphs(event["text"]))))
    if event.get("is_whole") is False:
        blocks.append("The judge's room ended before its verdict did.")
    if dissent := [_item(f"**{_inline(each, 'member')}**", _inline(each, "view")) for each in _parts(event, "dissent")]:
        blocks += ["## Dissent", "\n".join(dissent)]
    if sources := [_item(_inline(each, "id"), inline(_place(each))) for each in _parts(event, "sources")]:
        blocks += ["## Sources", "\n".join(sources)]
    unsupported = [one_line(each.get("id", "?")) for each in _parts(event, "citations") if not each.get("supplied")]
    if unsupported:
        blocks.append(f"Not among its sources, so unsupported: {inline(', '.join(unsupported))}")
    return "\n\n".join(blocks) + "\n"


def _item(name: str, text: str) -> str:
    return f"- {name}: {text}" if text else f"- {name}"


def _inline(part: Told, key: str) -> str:
    return inline(one_line(part.get(key, "?")))


def verdict_lines(event: Told) -> list[str]:
    """The verdict's Markdown under a title."""
    return _written(["=== verdict ===", "", *verdict_markdown(event).splitlines()])


def error_lines(event: Told) -> list[str]:
    lines = [f"Error: {_message(event)}"]
    return _written([*lines, f"  {one_line(event['hint'])}"] if event.get("hint") else lines)


def end_lines(event: Told) -> list[str]:
    """How it ended, and what it took: tokens evaluated, shared and written, and seconds."""
    usage = _part(event, "usage")
    prompt, cached = _num(usage, "prompt_tokens"), _num(usage, "cached_tokens")
    saved = f" ({100 * cached / prompt:.1f} % saved)" if prompt else ""
    evaluated, written = _count(usage, "evaluated_tokens"), _count(usage, "completion_tokens")
    lines = [
        f"=== {one_line(event.get('state', 'ended'))} after {_real(event.get('total_s')):.1f} s ===",
        f"  {evaluated} tokens evaluated, {cached:,} of {prompt:,} shared{saved}, {written} written",
    ]
    for each in _parts(event, "loads"):
        closed = _texts(each, "closed")
        gone = f", in place of {', '.join(map(one_line, closed))}" if closed else ""
        lines.append(f"  {one_line(each.get('model', '?'))} loaded in {_real(each.get('load_s')):.1f} s{gone}")
    return _written([*lines, *(f"  Warning: {one_line(each)}" for each in _texts(event, "warnings"))])


def _place(source: Told) -> str:
    """File, headings and place of a piece of evidence."""
    where = " > ".join(one_line(source[key]) for key in ("source", "heading") if source.get(key))
    found = source.get("place") or (f"characters {source['start']} to {source['end']}" if "start" in source and "end" in source else "")
    return f"{where} ({one_line(found)})" if found else where


def _who(event: Told) -> str:
    return f"{one_line(event.get('role', '?'))}: {one_line(event.get('kind', '?'))}"


def _message(error: object) -> str:
    return one_line((error.get("message") or error.get("error") or "?") if isinstance(error, Mapping) else error)


def _indented(text: object) -> Iterator[str]:
    return (f"  {line}".rstrip() for line in paragraphs(text))


def _written(lines: Sequence[str]) -> list[str]:
    return [printable(line) for line in lines]


def _num(event: Told, key: str) -> int:
    return int(_real(event.get(key)))


def _real(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else 0.0  # so is NaN


def _count(event: Told, key: str) -> str:
    return f"{_num(event, key):,}"


def _part(event: Told, key: str) -> Told:
    value = event.get(key)
    return value if isinstance(value, Mapping) else {}


def _parts(event: Told, key: str) -> list[Told]:
    value = event.get(key)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list | tuple) else []


def _texts(event: Told, key: str) -> list[str]:
    value = event.get(key)
    return [str(each) for each in value] if isinstance(value, list | tuple) else []
