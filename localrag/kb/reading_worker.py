"""Read files in a child process. Its parent is reading.py.

The job is {"memory_limit_bytes", "max_text_chars", "threads": whether to start the threads of a library before the limits forbid new ones}.
A request is `{"name": file name, "cpu_s": seconds}` with the file's bytes. The reply is either `{"error": reason, "lasts": boolean}` or the
parts of a Reading, with its text as UTF-8. The process says `"ends": true` and ends when files have left it large.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from localrag import process
from localrag.kb.readers import Reading, UnreadableError, read

MEMORY_EXIT = 77  # the exit code that says that memory was short: an answer would need some
GROWN_BYTES = 300 << 20
MAX_REASON_CHARS = 300
_SURROGATE = re.compile("[\ud800-\udfff]")


def answer(name: str, data: bytes, max_chars: int) -> tuple[dict[str, object], bytes]:
    """Answer a request. Any error of a reader is an answer too, except MemoryError, which propagates."""
    lasts = True
    try:
        reading = read(name, data)
        if len(reading.text) > max_chars:
            raise UnreadableError(f"its text is longer than {max_chars / (1 << 20):.3g} MB")  # noqa: TRY301  # handled below, as other reasons
        return describe(reading), _SURROGATE.sub("\ufffd", reading.text).encode()
    except UnreadableError as error:
        reason, lasts = str(error), error.lasts
    except RecursionError:
        reason = "it is nested too deeply"
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever a library raises for a damaged file
        reason = f"its reader failed: {type(error).__name__}: {error}"
        lasts = not isinstance(error, ImportError)
    return {"error": reason[:MAX_REASON_CHARS], "lasts": lasts}, b""


def describe(reading: Reading) -> dict[str, object]:
    """Serialise a Reading without its text. Headings and kinds of places repeat, so they are sent as indices into lists."""
    headings: dict[str, int] = {}
    kinds: dict[str, int] = {}
    sections: list[int] = []
    for section in reading.sections:
        sections += (section.start, section.end, headings.setdefault(section.heading, len(headings)), section.body)
    places: list[int] = []
    for place in reading.places:
        places += (place.start, kinds.setdefault(place.kind, len(kinds)), place.number)
    return {
        "headings": [_SURROGATE.sub("\ufffd", heading) for heading in headings],
        "sections": sections,
        "kinds": list(kinds),
        "places": places,
        "title": _SURROGATE.sub("\ufffd", reading.title),
        "tags": [_SURROGATE.sub("\ufffd", tag) for tag in reading.tags],
        "markdown": reading.markdown,
        "language": reading.language,
        "own_lines": reading.own_lines,
        "missing": [_SURROGATE.sub("\ufffd", line) for line in reading.missing],
        "fields": [[_SURROGATE.sub("\ufffd", part) for part in field] for field in reading.fields],
    }


def main(job: Mapping[str, Any], parent: process.Parent) -> None:
    try:
        if job["threads"]:
            from localrag.kb.readers import kreuzberg_reader  # noqa: PLC0415  # 98 MB, for few formats

            kreuzberg_reader.prepare()
    except Exception as error:  # noqa: BLE001  # the parent says it
        parent.send({"error": f"{type(error).__name__}: {error}"})
        return
    parent.send({"ready": True})
    process.confine(job["memory_limit_bytes"])
    max_bytes = process.size_bytes() + min(GROWN_BYTES, job["memory_limit_bytes"] // 3)
    try:
        while (received := parent.receive()) is not None:
            request, data = received
            process.limit_computing(float(str(request["cpu_s"])))
            header, text = answer(str(request["name"]), data, job["max_text_chars"])
            ends = process.size_bytes() > max_bytes
            try:
                parent.send({**header, "ends": ends}, text)
            except ValueError:
                problem = f"its headings and parts take more than {process.MAX_LINE_BYTES >> 20} MB"
                parent.send({"error": problem, "lasts": True, "ends": ends})
            if ends:
                return
            received = data = text = header = None  # type: ignore[assignment]  # the next file has all the room
    except MemoryError:
        os._exit(MEMORY_EXIT)
