"""What a person is shown of a budget: the ledger and its bar, the allocation tier by tier, and the very prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from localrag.budget import Entry, Ledger
from localrag.cli.text import COLOURS, console, safe
from localrag.passages import Hit
from localrag.session import Prepared

if TYPE_CHECKING:
    from rich.table import Table

    from localrag.markup import EncodedPart
    from localrag.tokens import Tokenizer

BREAK = "\u200b"
SHOWN_BREAK = "‹zwsp›"


def place(hit: Hit) -> str:
    """Where a hit stands: its tag, file and headings, and its page or lines, or else its characters."""
    chunk = hit.chunk
    where = safe(" > ".join(filter(None, (chunk.source, chunk.heading))).replace("\n", " "))
    found = safe(chunk.place) or f"characters {chunk.start} to {chunk.end}"
    return f"[{hit.label}] {where}  ({found})"


def ledger(accounts: Ledger, *, err: bool = False) -> None:
    """Who got what, as a table and as a bar of the window."""
    out = console(err=err)
    table = _table("Section", "Wanted", "Allotted", "Used", "Left out or shortened")
    for entry in accounts.entries:
        table.add_row(entry.name, str(entry.wanted), str(entry.allotted), str(entry.used), _changes(entry), style=COLOURS.get(entry.name))
    table.add_row("spare", "", str(accounts.spare), "", "")
    table.add_row("window", "", str(accounts.window), "", "", style="bold")
    out.print()
    out.print(table)
    out.print(_bar(accounts, min(out.width, 100) - 2))
    if accounts.time is not None:
        limit = accounts.time
        bound = "which bound the budget" if limit.is_bound else "which did not bind"
        speeds = f"{limit.prefill_tokens_per_s:g} tokens/s in, {limit.decode_tokens_per_s:g} out"
        out.print(f"time: at most {limit.max_seconds:g} s, {bound}; planned {limit.planned_s:.1f} s at {speeds}")


def _table(first: str, *columns: str) -> Table:
    """Numbers to the right, words to the left, the last column folded."""
    from rich.table import Table  # noqa: PLC0415  # weight

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    drawn.add_column(first, overflow="fold")
    for column in columns[:-1]:
        drawn.add_column(column, justify="right")
    drawn.add_column(columns[-1], overflow="fold")
    return drawn


def _changes(entry: Entry) -> str:
    """What was left out, what is shorter, and which messages a summary stands for; long lists by their ends."""
    shorter = [f"{each.id} {each.level} {each.tokens}/{each.of}" for each in entry.shortened]
    said = (_names(entry.omitted), _names(shorter), f"stands for {_names(entry.covered)}" if entry.covered else "")
    return safe("; ".join(filter(None, said)))


def _names(names: Sequence[str], most: int = 8) -> str:
    if not names:
        return ""
    shown = list(names) if len(names) <= most else [*names[: most - 2], "…", names[-1]]
    return f"{len(names)}: {', '.join(shown)}"


def _bar(accounts: Ledger, width: int) -> Any:  # noqa: ANN401  # rich's Text, imported late
    from rich.text import Text  # noqa: PLC0415  # weight

    bar, legend, position = Text("["), Text(" "), 0.0
    parts = [(entry.name, entry.allotted) for entry in accounts.entries] + [("spare", accounts.spare)]
    for name, tokens in parts:
        end = position + tokens * width / max(1, accounts.window)
        cells = max(round(end) - round(position), 0)
        mark = "." if name == "spare" else name[0].upper()
        bar.append(mark * cells, style=f"reverse {COLOURS.get(name, '')}" if name != "spare" else "bright_black")
        if tokens:
            legend.append(
                f"{mark} {name} {100 * tokens / max(1, accounts.window):.0f}%  ", style=COLOURS.get(name, "") if name != "spare" else ""
            )
        position = end
    return bar.append("]\n").append(legend)


def allocation(ready: Prepared, task: str, model: str) -> None:
    """The budget of a task as a table: what is reserved, then each tier and section with its items, subtotals, and the whole."""
    accounts, out = ready.prompt.ledger, console()
    reserved = [entry for entry in accounts.entries if entry.name in ("scaffold", "system", "question", "gap", "thinking", "answer")]
    available = accounts.window - sum(entry.allotted for entry in reserved)
    shown = " ".join(safe(task).split())
    out.print(f"Task    {shown if len(shown) <= 100 else shown[:99] + '…'}")
    out.print(f"Model   {model}, window {accounts.window:,} tokens, bound by {ready.slot.bound}")
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
    """(style, cells) of each row."""
    composed = ready.prompt
    for entry in composed.ledger.entries:
        for part in entry.parts or ((entry,) if entry.name in ("tools", "memories", "summary", "history", "attachments") else ()):
            style = COLOURS.get(entry.name, "")
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
    """The exact prompt, section by section with its tokens; control tokens stand in ⟦ ⟧, a break inside a special string as ‹zwsp›."""
    from rich.text import Text  # noqa: PLC0415  # weight

    out = console(err=err)
    controls = {token_id for _, token_id in tokenizer.special_texts}
    for section, group in groupby(parts, key=lambda each: each.part.section):
        token_ids = [token_id for each in group for token_id in each.token_ids]
        if not token_ids:
            continue
        colour = COLOURS.get(section, "")
        out.print(Text(f"── {section}, {len(token_ids)} tokens " + "─" * 20, style=f"bold {colour}"))
        shown = Text(style=colour)
        for is_control, run in groupby(token_ids, key=controls.__contains__):
            pieces = [tokenizer.piece(token_id) for token_id in run]
            if is_control:
                for piece in pieces:
                    shown.append(f"⟦{safe(piece.decode('utf-8', 'replace'))}⟧", style="reverse")
            else:
                shown.append(safe(b"".join(pieces).decode("utf-8", "replace")).replace(BREAK, SHOWN_BREAK))
        out.print(shown, soft_wrap=True)


def passages(found: Sequence[Hit]) -> None:
    """Search results: what was found where, and why."""
    for hit in found:
        parts = " + ".join(f"{name} {value:.4f}" for name, value in hit.contributions.items())
        click.echo(f"{place(hit)}\n    score {hit.score:.4f} = {parts}")
        click.echo("".join(f"    {line}\n" for line in safe(hit.chunk.text.strip()).splitlines()))
