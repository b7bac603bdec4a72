"""All the printing. Data goes to stdout, talk to stderr; what comes from a model or a document never controls a terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Self

import click

from localrag.budget import Ledger
from localrag.passages import Hit
from localrag.session import Answer, Prepared, evidence

if TYPE_CHECKING:
    from rich.console import Console

    from localrag.kb import IngestResult

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_COLOURS = {"scaffold": "bright_black", "system": "magenta", "evidence": "green", "question": "cyan", "answer": "yellow"}


def emit(data: object) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(data, ensure_ascii=False, default=str))


def note(text: str) -> None:
    """A line of talk."""
    click.echo(text, err=True)


def safe(text: str) -> str:
    """Text without what moves a cursor, colours a terminal or turns the direction of writing."""
    return _CONTROL.sub("", text)


def console(*, err: bool = False) -> Console:
    """A rich console that marks up nothing on its own."""
    from rich.console import Console  # noqa: PLC0415  # weight

    width = None if (sys.stderr if err else sys.stdout).isatty() else 1000  # a table in a pipe is not folded
    return Console(stderr=err, markup=False, highlight=False, emoji=False, width=width)


class AnswerStream:
    """Prints an answer as it comes: on a terminal without control characters, into a pipe as it is."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._safe = self._out.isatty()
        self._started = False
        self._at_line_start = True

    def __call__(self, text: str) -> None:
        if not self._started:
            text = text.lstrip()
        if not text:
            return
        self._started = True
        self._at_line_start = text.endswith("\n")
        self._out.write(safe(text) if self._safe else text)
        self._out.flush()

    def close(self) -> None:
        if not self._at_line_start or not self._started:
            self._out.write("\n")
            self._out.flush()


def answer(done: Answer, *, as_json: bool, explain: bool, asked_kbs: Sequence[str] = ()) -> None:
    """What goes with an answer that was streamed, or the whole answer object."""
    if as_json:
        emit(done.to_dict())
        if not explain:
            return
    elif done.hits:
        _sources(done)
    elif asked_kbs:
        note(f"\nNo passage of {', '.join(asked_kbs)} is relevant to this: the model answered without sources.")
    wanted, allotted = done.ledger.entry("answer").wanted, done.ledger.entry("answer").allotted
    if allotted < wanted:
        note(f"The answer could have {allotted} tokens of the {wanted} asked for: the window holds {done.ledger.window}.")
    if done.finish_reason == "length":
        note("The answer was cut at its last token; --max-tokens makes it longer.")
    if done.finish_reason == "cancelled":
        note("Interrupted.")
    if explain:
        ledger(done.ledger, err=True)
        _usage(done)


def _sources(done: Answer) -> None:
    cited = {each.label for each in done.citations if each.supplied}
    note("\nSources")
    for hit in done.hits:
        note(f"  {'*' if hit.label in cited else ' '} {_place(hit)}")
    if cited:
        note("  * cited in the answer")
    else:
        note("  The answer cites none of them.")
    if done.unsupported_citations:
        note(f"Not among its sources, so unsupported: {', '.join(done.unsupported_citations)}")


def _place(hit: Hit) -> str:
    chunk = hit.chunk
    where = safe(" > ".join(filter(None, (chunk.source, chunk.heading))).replace("\n", " "))
    return f"[{hit.label}] {where}  (characters {chunk.start} to {chunk.end})"


def _usage(done: Answer) -> None:
    timings, slot = done.timings, done.slot
    speed = (done.completion_tokens - 1) / timings.decode_s if timings.decode_s > 0 and done.completion_tokens > 1 else 0.0
    prefill = done.prompt_tokens / timings.prefill_s if timings.prefill_s > 0 else 0.0
    note(
        f"{done.model}: window {slot.n_ctx} of {slot.n_ctx_train} trained, bound by {slot.bound}; "
        f"{done.prompt_tokens} tokens in ({prefill:.0f}/s), {done.completion_tokens} out ({speed:.0f}/s), "
        f"first after {timings.first_token_s:.2f} s, {timings.total_s:.2f} s in all"
    )


def ledger(accounts: Ledger, *, err: bool = False) -> None:
    """Who got what, as a table and as a bar of the window."""
    from rich.table import Table  # noqa: PLC0415  # weight

    out = console(err=err)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("Section")
    for column in ("Wanted", "Allotted", "Used"):
        table.add_column(column, justify="right")
    table.add_column("Left out", overflow="fold")
    for entry in accounts.entries:
        omitted = f"{len(entry.omitted)}: {', '.join(entry.omitted)}" if entry.omitted else ""
        table.add_row(entry.name, str(entry.wanted), str(entry.allotted), str(entry.used), omitted, style=_COLOURS.get(entry.name))
    table.add_row("spare", "", str(accounts.spare), "", "")
    table.add_row("window", "", str(accounts.window), "", "", style="bold")
    out.print()
    out.print(table)
    out.print(_bar(accounts, min(out.width, 100) - 2))


def _bar(accounts: Ledger, width: int) -> Any:  # noqa: ANN401  # rich's Text, imported late
    from rich.text import Text  # noqa: PLC0415  # weight

    bar, legend, position = Text("["), Text(" "), 0.0
    parts = [(entry.name, entry.allotted) for entry in accounts.entries] + [("spare", accounts.spare)]
    for name, tokens in parts:
        end = position + tokens * width / max(1, accounts.window)
        cells = max(round(end) - round(position), 0)
        mark = "." if name == "spare" else name[0].upper()
        bar.append(mark * cells, style=f"reverse {_COLOURS.get(name, '')}" if name != "spare" else "bright_black")
        if tokens:
            legend.append(
                f"{mark} {name} {100 * tokens / max(1, accounts.window):.0f}%  ", style=_COLOURS.get(name, "") if name != "spare" else ""
            )
        position = end
    return bar.append("]\n").append(legend)


def prepared(ready: Prepared, model: str, *, as_json: bool, with_prompt: bool = False, with_passages: bool = False) -> None:
    """A prompt that was not sent: its ledger, and its tokens or passages if wanted."""
    composed = ready.prompt
    tokens = composed.hit_tokens
    if as_json:
        data: dict[str, object] = {
            "model": model,
            "slot": ready.slot.to_dict(),
            "usage": {"prompt_tokens": len(composed.token_ids)},
            "ledger": composed.ledger.to_dict(),
            "evidence": [evidence(hit, tokens[hit.label]) for hit in composed.hits],
            "coverage": {"chunks_read": len(composed.hits), "chunks_in_kb": ready.num_chunks},
        }
        if with_prompt:
            segments = [{"name": p.part.section, "text": p.part.text, "token_ids": list(p.token_ids)} for p in composed.parts]
            data["prompt"] = {"token_ids": list(composed.token_ids), "segments": segments}
        emit(data)
        return
    ledger(composed.ledger)
    click.echo(f"{model}: window {ready.slot.n_ctx} of {ready.slot.n_ctx_train} trained, bound by {ready.slot.bound}")
    if with_passages:
        for hit in composed.hits:
            click.echo(f"{tokens[hit.label]:6}  {_place(hit)}  score {hit.score:.4f}")
        for label in (label for entry in composed.ledger.entries for label in entry.omitted):
            click.echo(f"     -  [{label}] left out")


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
    """A plain table on stdout."""
    from rich.table import Table  # noqa: PLC0415  # weight

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*("" if cell is None else safe(str(cell)) for cell in row))
    console().print(drawn)


def size(num_bytes: int | None) -> str:
    """Bytes as a person reads them, in decimal units."""
    if num_bytes is None:
        return ""
    scale, unit = next(((scale, unit) for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if num_bytes >= scale), (1.0, "B"))
    return f"{num_bytes / scale:.{0 if scale == 1.0 else 1}f} {unit}"


class Progress:
    """How far something is, on stderr: a bar on a terminal, a line at each new stage elsewhere."""

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
        """`done` of `total` units of `stage`, None where the end is not known; `detail` is what is at hand just now."""
        if self._bar is not None:
            shown = " ".join(filter(None, (stage, detail)))
            self._bar.update(self._task, description=f"{self._title}: {safe(shown)}", completed=done, total=total)
        elif stage != self._stage:
            note(f"{self._title}: {safe(stage)}")
        self._stage = stage

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def hits(found: Sequence[Hit], *, as_json: bool) -> None:
    """Search results: what was found where, and why."""
    if as_json:
        emit({"hits": [{**evidence(hit), "text": hit.chunk.text} for hit in found]})
        return
    if not found:
        note("Nothing relevant was found.")
    for hit in found:
        parts = " + ".join(f"{name} {value:.4f}" for name, value in hit.contributions.items())
        click.echo(f"{_place(hit)}\n    score {hit.score:.4f} = {parts}")
        click.echo("".join(f"    {line}\n" for line in safe(hit.chunk.text.strip()).splitlines()))


def indexed(name: str, result: IngestResult, *, as_json: bool) -> None:
    """What indexing did, every skipped file with its reason."""
    if as_json:
        emit({"kb": name, **result.to_dict()})
        return
    for source, reason in result.skipped:
        note(f"skipped {safe(source)}: {reason}")
    changes = ", ".join(f"{getattr(result, word)} {word}" for word in ("added", "updated", "unchanged", "removed"))
    click.echo(f"{name}: {changes}, {len(result.skipped)} skipped; {result.num_chunks} chunks, {result.num_embedded} of them new")
