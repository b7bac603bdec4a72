"""Compare how much of each document format localrag and kreuzberg read: one row per format.

python -m benchmarks.readers FOLDER       all documents below FOLDER, grouped by file extension

The reference comes from other programs, if installed. Words come from LibreOffice (Office formats, RTF, OpenDocument), pdftotext (PDF) and
pandoc (the rest). Headings and table rows come from pandoc, after a conversion by LibreOffice if pandoc cannot read the format. Pages and
slides come from pdftotext, after LibreOffice; sheet rows come from LibreOffice. A file NAME.hidden next to a document may list phrases that
are invisible in it, one per line. Columns are pairs, localrag / kreuzberg:

unread    files without any extracted text
words     reference words that the text contains, in percent, counting repetitions
extra     words of the text that are not in the reference, in percent of the text
headings  reference headings that appear in section paths
rows      table rows of two or more cells that appear whole on one line
places    words of a page, slide or row that are found under its number
hidden    invisible phrases that the text contains
seconds   time for all files of the format, without imports; MB is the peak memory of the reading process
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import shared
from localrag.kb.readers import Reading, read
from localrag.kb.readers.base import Composer

READERS = ("localrag", "kreuzberg")
LIMIT_S = 300.0  # for the files of a format together
WRITER, CALC, IMPRESS = ("odt", "doc", "docx", "rtf"), ("ods", "xls", "xlsx"), ("odp", "ppt", "pptx")
PANDOC = {"odt": "odt", "docx": "docx", "html": "html", "htm": "html", "epub": "epub", "rst": "rst", "ipynb": "ipynb", "fb2": "fb2",
          "org": "org", "tex": "latex", "csv": "csv", "md": "gfm"}  # fmt: skip
ALL_SHEETS = "csv:Text - txt - csv (StarCalc):44,34,76,1,,0,false,true,false,false,false,-1"
_LABEL = re.compile(r"(?m)^\s*(?:[0-9]{1,3}|[A-Za-z]|[ivxIVX]{1,5})[.)]\s")  # of an item of a list, which readers may write as "- "
Words = Counter[str]


@dataclass
class Truth:
    """What other programs say of a document; None where none says it."""

    words: Words | None = None
    headings: Words | None = None
    rows: list[list[str]] | None = None
    places: dict[int, Words] | None = None
    hidden: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="documents, in any folders below it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _child(given.child, [Path(line) for line in sys.stdin.read().splitlines()])
        return
    by_format: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sorted(given.folder.rglob("*")):
        if path.is_file() and path.suffix != ".hidden":
            by_format[path.suffix[1:].lower()].append(path)
    rows = {}
    for kind, paths in sorted(by_format.items()):
        with tempfile.TemporaryDirectory() as work:
            truths = [truth_of(path, kind, Path(work)) for path in paths]
        rows[kind] = {reader: _scores(_read_all(reader, given.folder, paths), truths) for reader in READERS}
        _print(kind, rows[kind], first=len(rows) == 1)
    shared.RESULTS.mkdir(exist_ok=True)
    (shared.RESULTS / "readers.json").write_text(json.dumps(rows, indent=1))


# What the readers say, each in a process of its own


def _child(reader: str, paths: list[Path]) -> None:
    functions: Mapping[str, Callable[[Path, bytes], Reading]] = {
        "localrag": lambda path, data: read(path.name, data),
        "kreuzberg": _kreuzberg,
    }
    for nth, path in enumerate([paths[0], *paths]):  # the first once more: what is imported for it is not counted
        data = path.read_bytes()
        started = time.perf_counter()
        try:
            reading, error = functions[reader](path, data), ""
        except Exception as failure:  # noqa: BLE001  # whatever a library raises: the next file is read
            reading, error = Reading("", ()), str(failure) or type(failure).__name__
        seconds = time.perf_counter() - started
        if not reading.text.strip():
            error = error or "it holds no text"
        if nth:
            print(json.dumps({"s": seconds, "mb": _peak_mb(), "error": error, **asdict(reading)}), flush=True)


def _kreuzberg(path: Path, data: bytes) -> Reading:
    """All that the library says of a document, with the places that it knows."""
    from kreuzberg import ConcurrencyConfig, ExtractionConfig, PageConfig, detect_mime_type_from_path, extract_bytes_sync  # noqa: PLC0415

    config = ExtractionConfig(  # type: ignore[call-arg]  # disable_ocr is not among the types
        use_cache=False,
        enable_quality_processing=False,
        include_document_structure=True,
        output_format="markdown",  # or it tells no pages
        disable_ocr=True,
        pages=PageConfig(extract_pages=True),
        concurrency=ConcurrencyConfig(max_threads=1),
    )
    result = extract_bytes_sync(data, detect_mime_type_from_path(path), config)
    composer, page = Composer(), 0
    for node in (result.document or {}).get("nodes", []):
        content = node["content"]
        if content["node_type"] == "slide":
            composer.place("slide", content["number"])
        elif (number := node.get("page") or page) != page:
            page = number
            composer.place("page", page)
        if content["node_type"] in ("heading", "slide"):
            composer.heading(content.get("level", 2), content.get("text") or content.get("title") or "")
        elif content["node_type"] == "table":
            rows: defaultdict[int, list[str]] = defaultdict(list)
            for cell in content["grid"]["cells"]:
                rows[cell["row"]].append(" ".join(cell["content"].split()))
            for row in rows.values():
                composer.line(" | ".join(row))
        elif content["node_type"] == "metadata_block":
            for key, value in content["entries"]:
                composer.line(f"{key}: {value}")
        else:
            composer.paragraph(content.get("text") or "")
    return composer.reading()


def _peak_mb() -> float:
    """Of this process; what the system says of it elsewhere can be its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def _read_all(reader: str, folder: Path, paths: list[Path]) -> list[dict[str, Any]]:
    """What a reader says of each file; a file that ends its process has only an error, and the others are read without it."""
    answers: list[dict[str, Any]] = []
    while len(answers) < len(paths):
        rest = paths[len(answers) :]
        command = [sys.executable, "-m", "benchmarks.readers", str(folder), "--child", reader]
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, input="\n".join(map(str, rest)), capture_output=True, text=True, timeout=LIMIT_S, check=False)
            answers += map(json.loads, done.stdout.splitlines())
        if len(answers) < len(paths):
            answers.append({"s": 0.0, "mb": 0.0, "error": "its process ended", "text": "", "sections": [], "places": []})
    return answers


def _scores(answers: list[dict[str, Any]], truths: list[Truth]) -> dict[str, Any]:
    """The numbers of a row, over all files of a format; None where there is no truth."""
    counts: Counter[str] = Counter()
    for answer, truth in zip(answers, truths, strict=True):
        words = words_of(answer["text"])
        if truth.words is not None:
            counts.update({"words": (words & truth.words).total(), "of words": truth.words.total()})
            counts.update({"extra": (words - truth.words).total(), "of extra": words.total()})
        if truth.headings is not None:
            paths = Counter(_plain(section["heading"].rpartition(" > ")[2]) for section in answer["sections"])
            inner = {_plain(step) for section in answer["sections"] for step in section["heading"].split(" > ")}
            found = sum(
                number if name in inner and name not in paths else min(number, paths[name]) for name, number in truth.headings.items()
            )
            counts.update({"headings": found, "of headings": truth.headings.total()})
        if truth.rows is not None:
            lines = [_plain(line) for line in answer["text"].splitlines()]
            counts.update({"rows": sum(any(all(cell in line for cell in row) for line in lines) for row in truth.rows)})
            counts.update({"of rows": len(truth.rows)})
        if truth.places is not None:
            placed = _placed(answer)
            counts.update({"places": sum((words & placed.get(number, Counter())).total() for number, words in truth.places.items())})
            counts.update({"of places": sum(words.total() for words in truth.places.values())})
        counts.update({"hidden": sum(_plain(line) in _plain(answer["text"]) for line in truth.hidden), "of hidden": len(truth.hidden)})
    shares = {
        name: counts[name] / counts[f"of {name}"] if counts[f"of {name}"] else None
        for name in ("words", "extra", "headings", "rows", "places")
    }
    return {
        **shares,
        "hidden": counts["hidden"] if counts["of hidden"] else None,
        "of": {name.removeprefix("of "): number for name, number in counts.items() if name.startswith("of ")},
        "files": len(answers),
        "unread": {str(nth): answer["error"] for nth, answer in enumerate(answers) if answer["error"]},
        "s": sum(answer["s"] for answer in answers),
        "mb": max(answer["mb"] for answer in answers),
    }


def _placed(answer: dict[str, Any]) -> dict[int, Words]:
    """The words at each number of a page, slide or row."""
    found: defaultdict[int, Words] = defaultdict(Counter)
    ends = [start for start, _, _ in answer["places"][1:]] + [len(answer["text"])]
    for (start, kind, number), end in zip(answer["places"], ends, strict=False):
        if kind in ("page", "slide", "row", "line"):
            found[number] += words_of(answer["text"][start:end])
    return found


def _print(kind: str, row: Mapping[str, Mapping[str, Any]], *, first: bool) -> None:
    ours, theirs = (row[reader] for reader in READERS)
    if first:
        columns = "".join(f"{name:15}" for name in ("words %", "extra %", "headings %", "rows %", "places %"))
        print(f"{'format':8}{'files':7}{'unread':9}{columns}{'hidden':9}{'seconds':17}MB")
    pairs = "  ".join(
        f"{_percent(ours[name]):>5} / {_percent(theirs[name]):<5}" for name in ("words", "extra", "headings", "rows", "places")
    )
    hidden = f"{_dash(ours['hidden'])} / {_dash(theirs['hidden'])}"
    print(
        f"{kind:6}  {ours['files']:5}  {len(ours['unread']):2} / {len(theirs['unread']):<2}  {pairs}  {hidden:7}  "
        f"{ours['s']:6.2f} / {theirs['s']:<6.2f}  {ours['mb']:4.0f} / {theirs['mb']:<4.0f}",
        flush=True,
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _dash(number: int | None) -> str:
    return "-" if number is None else str(number)


# What other programs say


def truth_of(path: Path, kind: str, work: Path) -> Truth:
    """What other programs say of a document. `work` is an empty folder."""
    truth = Truth()
    hidden = path.with_name(path.name + ".hidden")
    if hidden.exists():
        truth.hidden = hidden.read_text().split("\n")[:-1]
    data = path.read_bytes()
    if kind == "pdf":
        _take_pages(truth, path)
    elif kind in IMPRESS and (pdf := _converted(path, "pdf", work)):
        _take_pages(truth, pdf[0])
    elif kind in CALC:
        _take_sheets(truth, _converted(path, ALL_SHEETS, work))
    elif kind in WRITER and (text := _converted(path, "txt:Text (encoded):UTF8", work)):
        truth.words = words_of(_LABEL.sub("", text[0].read_text(encoding="utf-8-sig", errors="replace")))
    if kind in ("doc", "rtf") and (converted := _converted(path, "odt", work)):
        data, kind = converted[0].read_bytes(), "odt"
    if kind in PANDOC and (tree := _run(["pandoc", "-f", PANDOC[kind], "-t", "json"], data)):
        _take_tree(truth, json.loads(tree)["blocks"])
        if truth.words is None and (text_of := _run(["pandoc", "-f", PANDOC[kind], "-t", "plain", "--wrap=none"], data)):
            truth.words = words_of(text_of.decode())
    if truth.words is not None:
        truth.words -= words_of(" ".join(truth.hidden))  # LibreOffice writes them
    return truth


def _take_pages(truth: Truth, pdf: Path) -> None:
    if text := _run(["pdftotext", "-enc", "UTF-8", str(pdf), "-"]):
        pages = [words_of(page) for page in text.decode(errors="replace").split("\f")]
        truth.words = sum(pages, Counter())
        truth.places = dict(enumerate(pages, start=1))


def _take_sheets(truth: Truth, files: list[Path]) -> None:
    if not files:
        return
    truth.rows, places = [], defaultdict(Words)
    for file in files:
        for number, row in enumerate(csv.reader(io.StringIO(file.read_text(errors="replace"))), start=1):
            places[number] += words_of(" ".join(row))
            cells = [_plain(cell) for cell in row if _plain(cell)]
            truth.rows += [cells] if len(cells) > 1 else []
    truth.words, truth.places = sum(places.values(), Counter()), dict(places)


def _take_tree(truth: Truth, blocks: list[Any]) -> None:
    """The headings of a document of pandoc, and the rows of its tables."""
    truth.headings, truth.rows = Counter(), []
    for block in _blocks(blocks):
        if block["t"] == "Header":
            truth.headings[_plain(_inline(block["c"][2]))] += 1
        elif block["t"] == "Table":
            for row in _rows(block["c"]):
                cells = [text for text in row if text]
                truth.rows += [cells] if len(cells) > 1 else []
    del truth.headings[""]


def _blocks(value: object) -> Iterable[dict[str, Any]]:
    if isinstance(value, dict) and value.get("t") in ("Header", "Table"):
        yield value
    elif isinstance(value, dict):
        yield from _blocks(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _blocks(item)


def _rows(table: list[Any]) -> Iterable[list[str]]:
    _, _, _, head, bodies, foot = table
    rows = [*head[1], *(row for body in bodies for part in body[2:4] for row in part), *foot[1]]
    for _, cells in rows:
        yield [_plain(_inline(cell[4])) for cell in cells]


def _inline(value: object) -> str:
    if isinstance(value, dict):
        kind, content = value.get("t"), value.get("c")
        if kind == "Str":
            return str(content)
        if kind in ("Space", "SoftBreak", "LineBreak"):
            return " "
        if kind in ("Code", "Math"):
            return str(content[-1])
        return "" if kind == "Note" else _inline(content) + (" " if kind in ("Para", "Plain") else "")
    return "".join(map(_inline, value)) if isinstance(value, list) else ""


def _converted(path: Path, to: str, work: Path) -> list[Path]:
    """The files that LibreOffice makes of a document; none if it is not installed or does not read it."""
    program = shutil.which("soffice")
    if not program:
        return []
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        _run(
            [program, f"-env:UserInstallation={(work / 'profile').as_uri()}", "--headless", "--convert-to", to, "--outdir", name, str(path)]
        )
        kept = work / path.name / to.partition(":")[0]
        kept.parent.mkdir(exist_ok=True)
        shutil.copytree(folder, kept, dirs_exist_ok=True)
    return sorted(file for file in kept.iterdir() if file.is_file())


def _run(command: list[str], data: bytes | None = None) -> bytes:
    """What a program writes; nothing where it is not installed, fails or takes over a minute."""
    try:
        return subprocess.run(command, input=data, capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def words_of(text: str) -> Words:
    return Counter(re.findall(r"\w+", text.casefold()))


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


if __name__ == "__main__":
    main()
