"""What was kept of each question as Markdown. A program that cannot do it has a line that says so, and so has one that was not run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.proof.bench import Row
from benchmarks.proof.programs import OURS, PROGRAMS, Program

Rows = Mapping[str, Row]
_LONGEST = 200
_LABELS = {program.name: program.label for program in PROGRAMS}
_BY_HAND = "evidence by hand"


def cell(text: object, *, longest: int = _LONGEST) -> str:
    """Text that somebody else wrote, as one cell: no markup, one line, at most so many characters."""
    line = " ".join(str(text).split())
    line = line if len(line) <= longest else line[: longest - 1] + "…"
    for char, shown in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("`", "\\`"), ("*", "\\*"), ("_", "\\_")):
        line = line.replace(char, shown)
    return line


def table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Cells that are strings are taken as they are."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows) + "\n"


def absence(row: Row) -> str | None:
    """What stands in place of numbers; None for a row that has them."""
    if "not_run" in row:
        return f"not run: {cell(row['not_run'])}"
    if "cannot" in row:
        return f"cannot: {cell(row['cannot'])}"
    return None


def ratio(row: Row, quantity: str) -> float | None:
    """How much of the program's seconds localrag takes: the median of the rounds, in each of which both were measured."""
    if not row.get("runs") or not row.get("beside"):
        return None
    pairs = zip(row["beside"], row["runs"], strict=False)
    return statistics.median(ours[quantity] / theirs[quantity] for ours, theirs in pairs if theirs[quantity])


def spread(row: Row, quantity: str) -> str:
    """The median of the runs, and the least and the most where there are several."""
    values = sorted(run[quantity] for run in row["runs"])
    middle = number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({number(values[0])} to {number(values[-1])})"


def number(value: float) -> str:
    """Three digits, or all of a larger one before its point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def label(program: Program, *, by_hand: bool = False) -> str:
    return f"{program.label} ({_BY_HAND})" if by_hand and not program.retrieves else program.label


def timed(rows: Rows, columns: Mapping[str, str], *, by_hand: bool, compared: str) -> str:
    """A table of runs: each quantity by its heading, and what localrag takes of the one that is `compared`."""
    lines: list[list[str]] = []
    for program in [each for each in PROGRAMS if each.name in rows]:
        row = rows[program.name]
        if why := absence(row):
            lines.append([program.label, why, *[""] * len(columns)])
            continue
        share = ratio(row, compared)
        shown = "" if program is OURS or share is None else f"{share:.2f}"
        lines.append([label(program, by_hand=by_hand) + _empty(row), *_spreads(row, columns), shown])
        if again := [run["again"] for run in row["runs"] if "again" in run]:
            lines.append([f"{program.label}, the same question again", *_spreads({"runs": again}, columns), ""])
    return table(["program", *columns.values(), "localrag takes, of this"], lines)


def _spreads(row: Row, columns: Mapping[str, str]) -> list[str]:
    return [spread(row, quantity) if quantity in row["runs"][0] else "" for quantity in columns]


def _empty(row: Row) -> str:
    empty = sum(bool(run.get("is_empty")) for run in row["runs"])
    return f"; {empty} of {len(row['runs'])} answers were empty" if empty else ""


def cold(rows: Rows) -> str:
    text = timed(rows, {"first_s": "first token, s", "total_s": "end, s", "peak_mib": "MiB"}, by_hand=True, compared="first_s")
    if best := best_peer(rows):
        name, share = best
        text += (
            f"\nThe fastest other program that searches and answers in one command is {_LABELS[name]}: localrag takes {share:.2f} of it.\n"
        )
    return text


def best_peer(rows: Rows) -> tuple[str, float] | None:
    """The program that searches and answers by itself with the earliest first token, and what localrag takes of it."""
    able = [program for program in PROGRAMS if program.retrieves and program is not OURS and rows.get(program.name, {}).get("runs")]
    times = {program.name: statistics.median(run["first_s"] for run in rows[program.name]["runs"]) for program in able}
    if not times:
        return None
    name = min(times, key=lambda one: times[one])
    share = ratio(rows[name], "first_s")
    return None if share is None else (name, share)


def even(rows: Rows) -> str:
    """Each program beside localrag with as many tokens of prompt."""
    columns = ["program", "prompt, tokens", "first token, s", "localrag: prompt, tokens", "first token, s", "localrag takes, of this"]
    lines = []
    for program in [each for each in PROGRAMS if each.name in rows]:
        row = rows[program.name]
        if why := absence(row):
            lines.append([program.label, why, "", "", "", ""])
            continue
        sides = [spread({"runs": row[side]}, quantity) for side in ("runs", "beside") for quantity in ("prompt_tokens", "first_s")]
        lines.append([program.label, *sides, f"{ratio(row, 'first_s') or 0.0:.2f}"])
    return table(columns, lines)


def warm(rows: Rows) -> str:
    return timed(rows, {"first_s": "first token, s", "total_s": "end, s"}, by_hand=True, compared="first_s")


def index(rows: Rows) -> str:
    return timed(rows, {"total_s": "s", "peak_mib": "MiB in memory", "disk_mib": "MiB on disk"}, by_hand=False, compared="total_s")


def council(rows: Rows) -> str:
    return timed(rows, {"total_s": "s"}, by_hand=False, compared="total_s")


def batch(rows: Rows) -> str:
    return timed(rows, {"total_s": "s", "peak_mib": "MiB"}, by_hand=True, compared="total_s")


def counting(rows: Rows) -> str:
    """Each counter's error: tokens counted less tokens evaluated, and in percent of these."""
    prompts = next((list(row["prompts"]) for row in rows.values() if "prompts" in row), [])
    lines = []
    for name, row in rows.items():
        why = absence(row)
        if why:
            lines.append([_LABELS.get(name, name), why, *[""] * len(prompts)])
            continue
        errors = [_error(row["prompts"][prompt]) for prompt in prompts]
        lines.append([_LABELS.get(name, name), cell(row["way"]), *errors])
    return table(["program", "how it counts", *prompts], lines)


def _error(numbers: Row) -> str:
    off = numbers["counted"] - numbers["evaluated"]
    return "0" if not off else f"{off:+} of {numbers['evaluated']} ({off / numbers['evaluated']:+.0%})"


def overflow(rows: Rows) -> str:
    columns = ["program", "evidence, tokens", "windows", "what happens", "what it says of that"]
    lines = []
    for program in PROGRAMS:
        row = rows.get(program.name)
        if row is None:
            continue
        if "outcome" not in row:
            lines.append([program.label, absence(row) or "", "", "", ""])
            continue
        offered, windows = row.get("offered_tokens", ""), row.get("offered_windows", "")
        said = "each passage that is left out, in the answer object" if row["outcome"] == "ledger" else "; ".join(row["said"])
        lines.append([label(program, by_hand=True), offered, windows, _outcome(row), cell(said or "nothing")])
    return table(columns, lines)


def _outcome(row: Row) -> str:
    if row["outcome"] == "error":
        return f"error: {cell(row['error'])}"
    held = row.get("passages_in_prompts")
    of = f", {held} of {row['offered_passages']} passages in them" if "offered_passages" in row and held is not None else ""
    if row["outcome"] == "ledger":
        exact = "exact" if row["is_exact"] else "NOT exact"
        return f"answered; {held} passages in the prompt, {len(row['omitted'])} named as left out; the ledger is {exact}"
    if row["outcome"] == "several calls":
        return f"answered by {row['calls']} prompts, {sum(row['evaluated'])} tokens{of}"
    return f"answered; prompts of {', '.join(map(str, row['evaluated']))} tokens{of}"


def markup(rows: Rows) -> str:
    lines = []
    for program in PROGRAMS:
        row = rows.get(program.name)
        if row is not None:
            lines.append([label(program, by_hand=True), absence(row) or row["out_of_text"]])
    return table(["program", "control tokens that came out of the document's text"], lines)


def retrieval(rows: Rows) -> str:
    names = ["nDCG@10", "Recall@10", "Recall@100", "MRR"]
    lines: list[list[object]] = []
    for program in PROGRAMS:
        row = rows.get(program.name)
        if row is None:
            continue
        if why := absence(row):
            lines.append([program.label, why, *[""] * len(names)])
            continue
        lines += [[program.label, cell(way), *(f"{reached[name]:.3f}" for name in names)] for way, reached in row["ways"].items()]
    return table(["program", "search", *names], lines)


TABLES: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "cold": ("A question in a new process, from its start", cold),
    "even": ("The same, with as much evidence", even),
    "warm": ("Another question in the same process", warm),
    "index": ("Indexing a folder", index),
    "council": ("A council of three and its judge", council),
    "batch": ("32 questions", batch),
    "counting": ("Tokens counted beside tokens evaluated", counting),
    "overflow": ("Evidence of twenty windows", overflow),
    "markup": ("Special strings in a document", markup),
    "retrieval": ("Finding what people judged relevant", retrieval),
}
