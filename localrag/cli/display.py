"""What commands print. Data goes to stdout, talk to stderr; what comes from a model or a document never controls a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal, Self

import click

from localrag.budget import Ledger
from localrag.cli import views
from localrag.cli.text import console, emit, note, safe
from localrag.passages import Hit
from localrag.session import Answer, Prepared, evidence, supplied

if TYPE_CHECKING:
    from localrag.tokens import Tokenizer

Explain = Literal["", "ledger", "full"]
"""How much is explained of an answer."""

_ENDINGS = {
    "length": "The answer was cut at its last token; --max-tokens makes it longer.",
    "cancelled": "Interrupted.",
    "time": "The answer was ended at the limit of time; --max-seconds makes it longer.",
}


class AnswerStream:
    """Prints an answer as it comes: on a terminal without control characters, into a pipe as it is.

    What is thought before it goes to stderr, dimmed, where a person watches both; else it is left out.
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
        """What comes now stands apart from them."""
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


def answer(done: Answer, *, tokenizer: Tokenizer, as_json: bool, explain: Explain, asked_kbs: Sequence[str] = ()) -> None:
    """What goes with an answer that was streamed, or the whole answer object."""
    if as_json:
        emit(done.to_dict())
    else:
        remarks(done, asked_kbs)
    if explain == "full":
        views.prompt(done.prompt.parts, tokenizer, err=True)
    if explain:
        views.ledger(done.ledger, err=True)
        _usage(done)


def remarks(done: Answer, asked_kbs: Sequence[str], *, tells_history: bool = True) -> None:
    """What a person should know of an answer without asking for it; `tells_history` where nobody else tells what was left out of it."""
    if done.hits:
        _sources(done)
    if done.bypass is not None and (told := done.bypass.told(asked_kbs)):
        note(f"\n{told}")
    wanted, allotted = done.ledger.entry("answer").wanted, done.ledger.entry("answer").allotted
    if allotted < wanted and (done.ledger.time is None or not done.ledger.time.is_bound):
        note(f"The answer could have {allotted} tokens of the {wanted} asked for: the window holds {done.ledger.window}.")
    if done.finish_reason in _ENDINGS:
        note(_ENDINGS[done.finish_reason])
    for warning in done.warnings:
        note(f"Warning: {warning}")
    _left_out(done.ledger, ("tools", "memories", *(["history"] if tells_history else []), "attachments"))


def _left_out(accounts: Ledger, sections: Sequence[str]) -> None:
    """What a person gave and the model did not get whole. What a search found in too large numbers is in the ledger."""
    for entry in accounts.entries:
        if entry.name in sections:
            if entry.omitted:
                named = [*map(safe, entry.omitted[:10]), *(["…"] if len(entry.omitted) > 10 else [])]
                note(f"Left out of {entry.name} for lack of room: {', '.join(named)}")
            for each in entry.shortened:
                note(f"{safe(each.id)} is there {each.level}: {each.tokens} of {each.of} tokens.")


def _sources(done: Answer) -> None:
    cited = {each.label for each in done.citations if each.supplied}
    note("\nSources")
    for hit in done.hits:
        note(f"  {'*' if hit.label in cited else ' '} {views.place(hit)}")
    if cited:
        note("  * cited in the answer")
    else:
        note("  The answer cites none of them.")
    if done.unsupported_citations:
        note(f"Not among its sources, so unsupported: {', '.join(done.unsupported_citations)}")


def _usage(done: Answer) -> None:
    timings, slot = done.timings, done.slot
    speed = (done.completion_tokens - 1) / timings.decode_s if timings.decode_s > 0 and done.completion_tokens > 1 else 0.0
    prefill = (done.prompt_tokens - done.cached_tokens) / timings.prefill_s if timings.prefill_s > 0 else 0.0
    note(
        f"{done.model}: window {slot.n_ctx} of {slot.n_ctx_train} trained, bound by {slot.bound}; "
        f"{done.prompt_tokens} tokens in ({prefill:.0f}/s), {done.completion_tokens} out ({speed:.0f}/s), "
        f"first after {timings.first_token_s:.2f} s, {timings.total_s:.2f} s in all"
    )


def prepared(
    ready: Prepared, model: str, *, task: str, tokenizer: Tokenizer, as_json: bool, explain: Explain = "", with_allocation: bool = False
) -> None:
    """A prompt that was not sent: its ledger, and if wanted the prompt itself or the allocation item by item."""
    composed = ready.prompt
    if as_json:
        data: dict[str, object] = {
            "model": model,
            "slot": ready.slot.to_dict(),
            "usage": {"prompt_tokens": len(composed.token_ids)},
            "ledger": composed.ledger.to_dict(),
            "evidence": supplied(composed),
            "coverage": {"chunks_read": len(composed.hits), "chunks_in_kb": ready.num_chunks},
        }
        if explain:
            segments = [{"name": p.part.section, "text": p.part.text, "token_ids": list(p.token_ids)} for p in composed.parts]
            data["prompt"] = {"token_ids": list(composed.token_ids), "segments": segments}
        emit(data)
        return
    if explain == "full":
        views.prompt(composed.parts, tokenizer)
    if with_allocation:
        views.allocation(ready, task, model)
        return
    views.ledger(composed.ledger)
    click.echo(f"{model}: window {ready.slot.n_ctx} of {ready.slot.n_ctx_train} trained, bound by {ready.slot.bound}")


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

    def stop(self) -> None:
        """Away with the bar."""
        if self._bar is not None:
            self._bar.stop()

    def __exit__(self, *_: object) -> None:
        self.stop()


def hits(found: Sequence[Hit], *, as_json: bool) -> None:
    """Search results: what was found where, and why."""
    if as_json:
        emit({"hits": [{**evidence(hit), "text": hit.chunk.text} for hit in found]})
        return
    if not found:
        note("Nothing relevant was found.")
    views.passages(found)
