"""Print results: data to stdout, messages to stderr. Text from models and documents cannot control the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any, Literal, Self

import click

from localrag.budget import Entry, Ledger
from localrag.budget.sections import RESERVED, colour_of
from localrag.cli.terminal import console, emit, note
from localrag.session import Answer, Prepared, evidence, supplied
from localrag.settings import Settings
from localrag.text.sanitize import safe
from localrag.types import Hit

if TYPE_CHECKING:
    from rich.table import Table

    from localrag.session.answerability import Answerability
    from localrag.text.markup import EncodedPart
    from localrag.text.tokens import Tokenizer


_WIDE_CELLS = 72
"""Minimum terminal width for a ledger with a column for omissions."""
BREAK = "\u200b"
SHOWN_BREAK = "‹zwsp›"


def place(hit: Hit) -> str:
    """Return a hit's tag, file, heading, and its page or lines, or otherwise its character range."""
    chunk = hit.chunk
    where = safe(" > ".join(filter(None, (chunk.source, chunk.heading))).replace("\n", " "))
    position = safe(chunk.place) or f"characters {chunk.start} to {chunk.end}"
    return f"[{hit.label}] {where}  ({position})"


def ledger(accounts: Ledger, *, err: bool = False) -> None:
    """Print the tokens of each section, as a table and as a bar of the window."""
    out = console(err=err)
    is_wide = out.width >= _WIDE_CELLS
    table = _table("Section", "Wanted", "Allotted", "Used", *(["Left out or shortened"] if is_wide else []), numbers=3)
    for entry in accounts.entries:
        numbers = (str(entry.wanted), str(entry.allotted), str(entry.used))
        table.add_row(entry.name, *numbers, *([_changes(entry)] if is_wide else []), style=colour_of(entry.name))
    table.add_row("spare", "", str(accounts.spare))
    table.add_row("window", "", str(accounts.window), style="bold")
    out.print()
    out.print(table)
    changes = [] if is_wide else [(entry.name, text) for entry in accounts.entries if (text := _changes(entry))]
    for name, text in changes:
        out.print(f"{name}, left out or shortened: {text}")
    out.print(_bar(accounts, min(out.width, 100) - 2))
    if accounts.time is not None:
        limit = accounts.time
        bound = "which limited the budget" if limit.is_bound else "which did not limit the budget"
        speeds = f"prefill {limit.prefill_tokens_per_s:g} tokens/s, decode {limit.decode_tokens_per_s:g} tokens/s"
        skipped = f"; skipped for lack of time: {', '.join(limit.skipped)}" if limit.skipped else ""
        out.print(f"time: at most {limit.max_seconds:g} s, {bound}; planned {limit.planned_s:.1f} s at {speeds}{skipped}")


def _table(first: str, *columns: str, numbers: int | None = None) -> Table:
    """Make a table. After the first column come `numbers` right-aligned columns (default: all but the last), then text columns."""
    from rich.table import Table  # noqa: PLC0415  # weight

    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column(first, overflow="fold")
    num = len(columns) - 1 if numbers is None else numbers
    for column in columns[:num]:
        grid.add_column(column, justify="right")
    for column in columns[num:]:
        grid.add_column(column, overflow="fold")
    return grid


def _changes(entry: Entry) -> str:
    """List the items left out, shortened, and replaced by a summary. Long lists are abbreviated in the middle."""
    shorter = [f"{each.id} {each.form} {each.tokens}/{each.of}" for each in entry.shortened]
    omitted = [_named(names) + (f" ({reason})" if reason else "") for reason, names in _reasons(entry)]
    changes = (*omitted, _named(shorter), f"summarizes {_named(entry.covered)}" if entry.covered else "")
    return safe("; ".join(filter(None, changes)))


def _reasons(entry: Entry, most: int = 6) -> list[tuple[str, Sequence[str]]]:
    """Return (reason, names) of the omitted items. Beyond `most` reasons, the rest are merged into one."""
    reasons = list(entry.omitted_by_reason.items())
    if len(reasons) <= most:
        return list(reasons)
    rest = [f"{name}, {reason}" for reason, names in reasons[most - 1 :] for name in names]
    return [*reasons[: most - 1], ("", rest)]


def _named(names: Sequence[str], most: int = 8) -> str:
    if not names:
        return ""
    labels = list(names) if len(names) <= most else [*names[: most - 2], "…", names[-1]]
    return f"{len(names)}: {', '.join(labels)}"


def _bar(accounts: Ledger, width: int) -> Any:  # noqa: ANN401  # rich's Text, imported late
    from rich.text import Text  # noqa: PLC0415  # weight

    bar, legend, position = Text("["), Text(" "), 0.0
    parts = [(entry.name, entry.allotted) for entry in accounts.entries] + [("spare", accounts.spare)]
    for name, tokens in parts:
        end = position + tokens * width / max(1, accounts.window)
        cells = max(round(end) - round(position), 0)
        mark = "." if name == "spare" else name[0].upper()
        bar.append(mark * cells, style=f"reverse {colour_of(name)}" if name != "spare" else "bright_black")
        if tokens:
            legend.append(
                f"{mark} {name} {100 * tokens / max(1, accounts.window):.0f}%  ", style=colour_of(name) if name != "spare" else ""
            )
        position = end
    return bar.append("]\n").append(legend)


def allocation(ready: Prepared, task: str, model: str) -> None:
    """Print the budget of a task: reserved tokens, then each tier and section with its items and subtotal, and the total."""
    accounts, out = ready.prompt.ledger, console()
    reserved = [entry for entry in accounts.entries if entry.name in RESERVED]
    available = accounts.window - sum(entry.allotted for entry in reserved)
    text = " ".join(safe(task).split())
    out.print(f"Task    {text if len(text) <= 100 else text[:99] + '…'}")
    out.print(f"Model   {model}, window {accounts.window:,} tokens, limited by {ready.slot.bound}")
    out.print(f"Reserved  {', '.join(f'{entry.name} {entry.allotted:,}' for entry in reserved)}; available {available:,}\n")
    table = _table("", "Level", "Tokens", "Relevance", "")
    for name, row in _allocation(ready):
        table.add_row(*row, style=name)
    if table.row_count:
        out.print(table)
    used = accounts.prompt_tokens
    left_out = sum(len(entry.omitted) for entry in accounts.entries)
    shorter = sum(len(entry.shortened) for entry in accounts.entries)
    status = f"{left_out} left out, {shorter} shortened" if left_out or shorter else "nothing left out"
    share = 100 * used / max(1, accounts.window)
    out.print(f"\nUsed {used:,} of {accounts.window:,} tokens (utilization {share:.1f}%), {accounts.spare:,} spare; {status}")


def _allocation(ready: Prepared) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (style, cells) of each row."""
    composed = ready.prompt
    for entry in composed.ledger.entries:
        for reason, names in entry.omitted_by_reason.items():
            if reason:
                yield "", (f"  {safe(_named(names))}", "-", "-", "", safe(f"left out: {reason}"))
        for part in entry.parts or ((entry,) if entry.name in ("tools", "memories", "summary", "history", "attachments") else ()):
            style = colour_of(entry.name)
            yield f"bold {style}", (part.name.upper(), "", "", "", f"{part.allotted:,} tokens allotted")
            yield from (("", row) for row in _items(ready, entry.name, part))
            percent = 100 * part.used / part.allotted if part.allotted else 0.0
            yield "", ("  subtotal", "", f"{part.used:,}", "", f"{percent:.0f}% of its allotment")


def _items(ready: Prepared, section: str, part: Entry) -> Iterator[tuple[str, ...]]:
    tokens, composed = ready.prompt.item_tokens, ready.prompt
    hits = {hit.label: hit for hit in ready.offered}
    tier = part.name if section == "evidence" else None
    labels = [each.part.item for each in composed.parts if each.part.section == section and each.part.item is not None]
    for label in dict.fromkeys(labels):
        if tier is not None and (composed.tiers.get(label) or "other") != tier:
            continue
        yield f"  {_name(label, hits)}", composed.levels.get(label, "full"), f"{tokens[label]:,}", _relevance(label, hits), ""
    for label in part.omitted:
        would = composed.omitted_costs.get(label)
        note = f"left out ({would:,} tokens)" if would else "left out"
        yield f"  {_name(label, hits)}", "-", "-", _relevance(label, hits), note


def _name(label: str, hits: dict[str, Hit]) -> str:
    hit = hits.get(label)
    return safe(label) if hit is None else place(hit).partition("  (")[0]


def _relevance(label: str, hits: dict[str, Hit]) -> str:
    hit = hits.get(label)
    return "" if hit is None or hit.relevance is None else f"{hit.relevance:.2f}"


def prompt(parts: Sequence[EncodedPart], tokenizer: Tokenizer, *, err: bool = False) -> None:
    """Print the exact prompt by section, with token counts. Control tokens are shown as ⟦…⟧, zero-width spaces as ‹zwsp›."""
    from rich.text import Text  # noqa: PLC0415  # weight

    out = console(err=err)
    controls = {token_id for _, token_id in tokenizer.special_texts}
    for section, group in groupby(parts, key=lambda each: each.part.section):
        token_ids = [token_id for each in group for token_id in each.token_ids]
        if not token_ids:
            continue
        colour = colour_of(section)
        out.print(Text(f"── {section}, {len(token_ids)} tokens " + "─" * 20, style=f"bold {colour}"))
        text = Text(style=colour)
        for is_control, run in groupby(token_ids, key=controls.__contains__):
            pieces = [tokenizer.piece(token_id) for token_id in run]
            if is_control:
                for piece in pieces:
                    text.append(f"⟦{safe(piece.decode('utf-8', 'replace'))}⟧", style="reverse")
            else:
                text.append(safe(b"".join(pieces).decode("utf-8", "replace")).replace(BREAK, SHOWN_BREAK))
        out.print(text, soft_wrap=True)


def passages(results: Sequence[Hit]) -> None:
    """Print search results with their places and score breakdowns."""
    for hit in results:
        parts = " + ".join(f"{name} {value:.4f}" for name, value in hit.contributions.items())
        click.echo(f"{place(hit)}\n    score {hit.score:.4f} = {parts}")
        for chunk in hit.copies:
            click.echo(f"    identical: {place(replace(hit, chunk=chunk))}")
        click.echo("".join(f"    {line}\n" for line in safe(hit.chunk.text.strip()).splitlines()))


Explain = Literal["", "ledger", "full"]
"""How much to explain: nothing, the ledger, or the ledger and the exact prompt."""


class AnswerStream:
    """Prints an answer as it is generated. On a terminal, control characters are removed; a pipe gets the raw text.

    Reasoning is printed dimmed on stderr if both streams are terminals, and otherwise left out.
    """

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._safe = self._out.isatty()
        self._shows_thoughts = self._safe and sys.stderr.isatty()
        self._has_thought = False
        self._started = False
        self._at_line_start = True

    def think(self, text: str) -> None:
        if self._shows_thoughts:
            click.secho(safe(text), dim=True, nl=False, err=True)
            self._has_thought = True

    def _end_thoughts(self) -> None:
        """Separate the answer from the reasoning by a blank line."""
        if self._has_thought:
            click.echo("\n", err=True)
            self._has_thought = False

    def __call__(self, text: str) -> None:
        self._end_thoughts()
        if not self._started:
            text = text.lstrip()
        if not text:
            return
        self._started = True
        self._at_line_start = text.endswith("\n")
        self._out.write(safe(text) if self._safe else text)
        self._out.flush()

    def close(self) -> None:
        self._end_thoughts()
        if not self._at_line_start or not self._started:
            self._out.write("\n")
            self._out.flush()


def answer(
    result: Answer,
    *,
    tokenizer: Tokenizer,
    as_json: bool,
    explain: Explain,
    settings: Settings,
    stdin_bytes: int = 0,
    asked_kbs: Sequence[str] = (),
) -> None:
    """Print the notes about a streamed answer, or the complete answer object with `as_json`."""
    if as_json:
        emit({**result.to_dict(), "stdin_bytes": stdin_bytes, "models_files": _models_files(settings)})
    else:
        remarks(result, asked_kbs)
    if explain == "full":
        prompt(result.prompt.parts, tokenizer, err=True)
    if explain:
        answerability(result.answerability, err=True)
        ledger(result.ledger, err=True)
        support(result)
        _usage(result)
        models_files(settings)


def remarks(result: Answer, asked_kbs: Sequence[str], *, tells_history: bool = True, known_warnings: Sequence[str] = ()) -> None:
    """Print the notes about an answer: sources, warnings, omissions. `tells_history` includes turns left out of the history.

    `known_warnings` were shown before and are not repeated.
    """
    if result.abstained:
        _nearest(result)
    elif result.hits:
        _sources(result)
        if result.answerability is not None and not result.answerability.is_likely:
            note(f"The sources probably do not answer this: the probability is {result.answerability.probability:.2f}.")
    if result.unsupported_citations and (result.hits or asked_kbs):
        note(f"Cited but not among the sources: {', '.join(map(safe, result.unsupported_citations))}")
    if result.bypass is not None and not result.abstained and (reason := result.bypass.told(asked_kbs)):
        note(f"\n{reason}")
    if result.ending:
        note(result.ending)
    for warning in result.warnings:
        if warning not in known_warnings:
            note(f"Warning: {warning}")
    _left_out(result.ledger, ("tools", "memories", *(["history"] if tells_history else []), "attachments"))


def _left_out(accounts: Ledger, sections: Sequence[str]) -> None:
    """Print the user's items that the prompt omits or shortens. Omitted search results are shown only in the ledger."""
    for entry in accounts.entries:
        if entry.name in sections:
            if entry.omitted:
                names = [*map(safe, entry.omitted[:10]), *(["…"] if len(entry.omitted) > 10 else [])]
                note(f"Left out of {entry.name} because it does not fit: {', '.join(names)}")
            for each in entry.shortened:
                note(f"{safe(each.id)} was shortened ({each.level}): {each.tokens} of {each.of} tokens.")


def _sources(result: Answer) -> None:
    cited = {each.label for each in result.citations if each.supplied}
    note("\nSources")
    for hit in result.hits:
        note(f"  {'*' if hit.label in cited else ' '} {place(hit)}")
    if cited:
        note("  * cited in the answer")
    else:
        note("  The answer cites none of them.")


def _nearest(result: Answer) -> None:
    """List the passages that come nearest to a question that the sources do not answer."""
    if result.hits:
        note("\nNearest passages")
        for hit in result.hits:
            note(f"    {place(hit)}")
    note("The model was not asked. To let it answer: --unanswerable answer")


def answerability(assessed: Answerability | None, *, err: bool) -> None:
    """Print the probability that the sources answer the question, and what it is made of. None prints nothing."""
    if assessed is not None:
        parts = ", ".join(f"{name} {value:+.2f}" for name, value in assessed.contributions.items())
        verdict = "not below" if assessed.is_likely else "below"
        text = f"Answerable: {assessed.probability:.2f}, {verdict} the threshold of {assessed.threshold:.2f} (log odds: {parts})"
        click.echo(text, err=err)


_MAX_QUOTED = 160
"""Most characters of a sentence or span that are printed."""


def support(result: Answer) -> None:
    """Print each sentence of an answer with its score and its best supporting span, and the claims that the cited passages lack."""
    checked = result.support
    cited = [each for each in checked.sentences if each.score is not None]
    if not checked.sentences:
        return
    has_cosines = any("cosine" in each.contributions for each in cited)
    how = " by words and cosine similarity" if has_cosines else " by words alone, because no embedder is loaded" if cited else ""
    note(f"Support of each sentence by the passages that it cites, 0 to 1{how}:")
    for each in checked.sentences:
        note(f"  {'none' if each.score is None else f'{each.score:.2f}'}  {_quoted(result.text[each.start : each.end])}")
        if (span := each.span) is not None:
            position = safe(span.place) or f"characters {span.start} to {span.end}"
            note(f"        [{span.label}] {_quoted(span.text)}  ({position})")
    if checked.unsupported_claims:
        claims = [f"{_quoted(each.text)} ({each.kind})" for each in checked.unsupported_claims]
        note(f"Not in the cited passages: {', '.join(claims)}")


def _quoted(text: str) -> str:
    line = " ".join(safe(text).split())
    return line if len(line) <= _MAX_QUOTED else f"{line[: _MAX_QUOTED - 1]}…"


def _usage(result: Answer) -> None:
    timings, slot = result.timings, result.slot
    speed = timings.tokens_per_s(result.completion_tokens) or 0.0
    copied = f", {result.copied_tokens} of them copied" if result.copied_tokens else ""
    prefill = (result.prompt_tokens - result.cached_tokens) / timings.prefill_s if timings.prefill_s > 0 else 0.0
    note(
        f"{result.model}: window {slot.n_ctx} of {slot.n_ctx_train} trained, limited by {slot.bound}; "
        f"{result.prompt_tokens} tokens in ({prefill:.0f}/s), {result.completion_tokens} out ({speed:.0f}/s){copied}, "
        f"first token after {timings.first_token_s:.2f} s, {timings.total_s:.2f} s in total"
    )


def prepared(
    ready: Prepared,
    model: str,
    *,
    task: str,
    tokenizer: Tokenizer,
    as_json: bool,
    settings: Settings,
    stdin_bytes: int = 0,
    explain: Explain = "",
    with_allocation: bool = False,
) -> None:
    """Print the ledger of a prompt that was not sent and, if requested, the exact prompt or the allocation of each item."""
    composed = ready.prompt
    if as_json:
        data: dict[str, object] = {
            "model": model,
            "slot": ready.slot.to_dict(),
            "usage": {"prompt_tokens": len(composed.token_ids)},
            "ledger": composed.ledger.to_dict(),
            "evidence": supplied(composed),
            "coverage": {"chunks_read": len(composed.hits), "chunks_in_kb": ready.num_chunks},
            "answerable": None if ready.answerability is None else round(ready.answerability.probability, 4),
            **({"answerability": ready.answerability.to_dict()} if ready.answerability is not None else {}),
            "abstained": ready.abstains,
            **({"warnings": ready.warnings} if ready.warnings else {}),
            "stdin_bytes": stdin_bytes,
            "models_files": _models_files(settings),
        }
        if explain:
            segments = [{"name": p.part.section, "text": p.part.text, "token_ids": list(p.token_ids)} for p in composed.parts]
            data["prompt"] = {"token_ids": list(composed.token_ids), "segments": segments}
        emit(data)
        return
    for warning in ready.warnings:
        note(f"Warning: {warning}")
    if explain == "full":
        prompt(composed.parts, tokenizer)
    if with_allocation:
        allocation(ready, task, model)
        return
    answerability(ready.answerability, err=False)
    ledger(composed.ledger)
    click.echo(f"{model}: window {ready.slot.n_ctx} of {ready.slot.n_ctx_train} trained, limited by {ready.slot.bound}")
    if explain:
        models_files(settings)


def models_files(settings: Settings) -> None:
    """Name the models.toml files in use on stderr, highest priority first."""
    note(f"models.toml: {', over '.join(map(safe, _models_files(settings)))}")


def _models_files(settings: Settings) -> list[str]:
    return [str(file.absolute()) for file in settings.layered_models_files()]


def tokens(token_ids: Sequence[int], pieces: Sequence[bytes], *, as_json: bool, show: bool) -> None:
    if as_json:
        data: dict[str, object] = {"num_tokens": len(token_ids), "token_ids": list(token_ids)}
        if show:
            data["pieces"] = [piece.decode("utf-8", "replace") for piece in pieces]
        emit(data)
        return
    click.echo(len(token_ids))
    for token_id, piece in zip(token_ids, pieces, strict=False):
        click.echo(f"{token_id:8}  {piece.decode('utf-8', 'backslashreplace')!r}")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a plain table on stdout. `right` names the right-aligned columns."""
    from rich.table import Table  # noqa: PLC0415  # weight

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*("" if cell is None else safe(str(cell)) for cell in row))
    console().print(grid)


def size(num_bytes: int | None) -> str:
    """Format a number of bytes in decimal units, e.g. "1.5 GB"; "" for None."""
    if num_bytes is None:
        return ""
    scale, unit = next(((scale, unit) for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if num_bytes >= scale), (1.0, "B"))
    return f"{num_bytes / scale:.{0 if scale == 1.0 else 1}f} {unit}"


class Progress:
    """Progress on stderr: a bar on a terminal, otherwise one line per stage."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._stage = ""
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415  # weight

            text = TextColumn("{task.description}", markup=False)
            self._bar = Progress(text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), console=console(err=True), transient=True)
            self._task = self._bar.add_task(self._title, total=None)
            self._bar.start()
        return self

    def __call__(self, stage: str, done: int, total: int | None, detail: str = "") -> None:
        """Show that `done` of `total` units of a stage are done (None: unknown). `detail` names the current item."""
        if self._bar is not None:
            label = " ".join(filter(None, (stage, detail)))
            self._bar.update(self._task, description=f"{self._title}: {safe(label)}", completed=done, total=total)
        elif stage != self._stage:
            note(f"{self._title}: {safe(stage)}")
        self._stage = stage

    def stop(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def __exit__(self, *_: object) -> None:
        self.stop()


def hits(results: Sequence[Hit], *, as_json: bool) -> None:
    """Print search results with their places and score breakdowns, or one object with `as_json`."""
    if as_json:
        emit({"hits": [{**evidence(hit), "text": hit.chunk.text, **_copies(hit)} for hit in results]})
        return
    if not results:
        note("Nothing relevant was found.")
    passages(results)


def _copies(hit: Hit) -> dict[str, object]:
    """Return the passages with the same text as a hit, each with its place, under "identical"; {} if there are none."""
    copies = [
        {"id": each.label, "source": each.source, "heading": each.heading, "start": each.start, "end": each.end} for each in hit.copies
    ]
    return {"identical": copies} if copies else {}
