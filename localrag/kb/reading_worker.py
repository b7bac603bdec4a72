"""The program of the child process that reads files. reading.py starts it as

    python -I -S reading_worker.py MEMORY_LIMIT_BYTES MAX_TEXT_CHARS THREADS PATH...      (PATH: the module search path)

If THREADS is 1, the library that needs threads starts them before the limits forbid new ones.

A message consists of two lengths, a JSON object and bytes. The child sends `{"ready": true}` once. A request on standard input is
`{"name": file name, "cpu_s": seconds}` with the bytes of a file. The answer is `{"error": reason, "lasts": boolean}`, or the parts of a
Reading with its text as UTF-8. The child exits when standard input ends, when it exceeds a limit, and, after an answer with
`"ends": true`, when its memory has grown too much. The parent enforces the wall-clock limit; the limits set here hold even if the parent
is gone.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from localrag.kb.readers import Reading

LENGTHS = struct.Struct("!IQ")
MEMORY_EXIT = 77  # the exit code for exhausted memory, since sending an answer would need some
MAX_HEADER_BYTES = 64 << 20
GROWN_BYTES = 300 << 20
MAX_REASON_CHARS = 300
_SURROGATE = re.compile("[\ud800-\udfff]")


def receive(pipe: IO[bytes]) -> tuple[dict[str, object], bytes] | None:
    """Read the next message; None at the end of the input."""
    lengths = pipe.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    num_header, num_data = LENGTHS.unpack(lengths)
    header = json.loads(pipe.read(num_header))
    return header, pipe.read(num_data)


def send(pipe: IO[bytes], header: Mapping[str, object], data: bytes = b"") -> None:
    encoded = json.dumps(header, separators=(",", ":")).encode()
    if len(encoded) > MAX_HEADER_BYTES:
        encoded, data = json.dumps({"error": f"its headings and parts take more than {MAX_HEADER_BYTES >> 20} MB"}).encode(), b""
    pipe.write(LENGTHS.pack(len(encoded), len(data)))
    pipe.write(encoded)
    pipe.write(data)
    pipe.flush()


def answer(name: str, data: bytes, max_chars: int) -> tuple[dict[str, object], bytes]:
    """Answer a request. Any error of a reader is an answer too, except MemoryError, which propagates."""
    from localrag.kb.readers import UnreadableError, read  # noqa: PLC0415  # main sets the module search path

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


def own_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Reserve standard input and output for messages. Libraries that print or read get the null device."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return pipes


def main() -> None:
    requests, answers = own_pipes()
    memory_bytes, max_chars = int(sys.argv[1]), int(sys.argv[2])
    sys.path.extend(sys.argv[4:])
    try:
        from localrag import process  # noqa: PLC0415

        if sys.argv[3] == "1":
            from localrag.kb.readers import kreuzberg_reader  # noqa: PLC0415

            kreuzberg_reader.prepare()
    except Exception as error:  # noqa: BLE001  # the parent reports it
        send(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    send(answers, {"ready": True})
    process.confine(memory_bytes)
    most_bytes = process.size_bytes() + min(GROWN_BYTES, memory_bytes // 3)
    try:
        while message := receive(requests):
            request, data = message
            process.limit_computing(float(str(request["cpu_s"])))
            header, text = answer(str(request["name"]), data, max_chars)
            ends = process.size_bytes() > most_bytes
            send(answers, {**header, "ends": ends}, text)
            if ends:
                return
            message = data = text = header = None  # type: ignore[assignment]  # free memory for the next file
    except MemoryError:
        os._exit(MEMORY_EXIT)


if __name__ == "__main__":
    main()
