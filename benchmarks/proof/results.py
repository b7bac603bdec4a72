"""What was measured, kept as JSON: one file a question in results/proof, a row for each program, so that one can be measured again alone.

A row of seconds holds its runs and those of localrag that were taken in turn with them: a ratio is always of one sitting.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.proof.bench import Row
from benchmarks.shared import RESULTS

FOLDER = RESULTS / "proof"


def load(question: str, folder: Path = FOLDER) -> Row:
    """What is kept of a question: {"machine", "facts", "rows": {program: row}}; empty if nothing is."""
    file = folder / f"{question}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"machine": {}, "facts": {}, "rows": {}}


def keep(question: str, rows: Mapping[str, Row], *, machine: Row, facts: Row, folder: Path = FOLDER) -> None:
    """Writes the rows over those of the same programs; the others stay. `machine` is of the last sitting; each row tells when it was."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    kept = load(question, folder)
    kept["rows"] |= {name: {**row, "measured": now} for name, row in rows.items()}
    programs = kept["machine"].get("programs", {}) | machine.get("programs", {})
    kept["machine"], kept["facts"] = {**machine, "programs": programs}, facts
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{question}.json.new"
    new.write_text(json.dumps(kept, indent=1, ensure_ascii=False), encoding="utf-8")
    new.replace(folder / f"{question}.json")
