"""Compare how localrag and transformers render tool calls: for each chat template, whether the prompts are equal.

    python -m benchmarks.templates FOLDER             # of *.jinja, such as vendor/llama.cpp/models/templates of llama-cpp-python's sdist
    python -m benchmarks.templates FOLDER --show NAME # print both prompts of one template
    python -m benchmarks.templates FOLDER --markdown  # the table of docs/measured.md

Several conversations with calls and results are rendered by localrag, which hides all texts from the template, and by the environment of
transformers' apply_chat_template, which shows them. A template is "equal" if all prompts are that transformers renders, at least one of
them. Where transformers refuses a conversation as it is, it gets the arguments as JSON text, which some templates expect. Needs
transformers. The templates are read, not kept.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.table import Table

from localrag.engine.template import JinjaChatTemplate
from localrag.errors import TemplateError
from localrag.types import Message, ToolCall, ToolSpec

NOW = datetime(2026, 9, 3, 12, 30)  # noqa: DTZ001  # local time, as templates print it
BOS, EOS = "<s>", "</s>"
WEATHER = ToolSpec(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name"},
            "days": {"type": "integer", "description": "How many"},
            "hours": {"type": "array", "items": {"type": "integer"}, "description": "Which"},
            "where": {"type": "object", "description": "More", "properties": {"country": {"type": "string", "description": "Its name"}}},
        },
        "required": ["city"],
    },
)
CLOCK = ToolSpec("clock", "The time.", {"type": "object", "properties": {"zone": {"type": "string", "description": "Its name"}}})
SYSTEM, QUESTION = Message("system", "Be brief."), Message("user", "Is it warm in Wien?")
CALL = ToolCall("get_weather", {"city": "Wien", "days": 2}, "call00001")
NESTED = ToolCall(
    "get_weather", {"city": 'Saint "X" \\ <b> & é\n日本', "days": 1.5, "hours": [1, 2], "where": {"country": "F", "on": True}}, "call00002"
)
TIME = ToolCall("clock", {"zone": "Europe/Vienna"}, "call00003")


def _result(call: ToolCall, text: str) -> Message:
    return Message("tool", text, tool_call_id=call.id)


def _calling(*calls: ToolCall, text: str = "") -> Message:
    return Message("assistant", text, tool_calls=calls)


ROUND = (QUESTION, _calling(CALL), _result(CALL, "21 °C, sunny"))
CONVERSATIONS: Mapping[str, Sequence[Message]] = {
    "one call": (SYSTEM, *ROUND),
    "no system text": ROUND,
    "answered": (SYSTEM, *ROUND, Message("assistant", "It is 21 °C."), Message("user", "And tomorrow?")),
    "two rounds": (SYSTEM, *ROUND, _calling(TIME), _result(TIME, "12:30")),
    "JSON": (SYSTEM, QUESTION, _calling(NESTED), _result(NESTED, '{"c": 21, "say": "a\\nb"}\n<b> & é')),
    "two calls": (SYSTEM, QUESTION, _calling(CALL, TIME), _result(CALL, "21 °C"), _result(TIME, "12:30")),
    "call after text": (SYSTEM, QUESTION, _calling(CALL, text="I look."), _result(CALL, "21 °C")),
}
MAIN = ("one call", "no system text", "answered", "two rounds", "JSON")
"""The conversations that decide on the result. Not every template knows several calls, or text before a call."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One conversation: `result` is equal, different, unknown (transformers refuses it) or refused (localrag does)."""

    name: str
    result: str
    ours: str
    theirs: str
    why: str = ""


def as_dicts(messages: Sequence[Message], *, as_text: bool) -> list[dict[str, Any]]:
    """Return messages in the format of OpenAI's API, as transformers takes them."""
    dicts: list[dict[str, Any]] = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.parsed, ensure_ascii=False) if as_text else call.parsed},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
        dicts.append(fields)
    return dicts


def rendered(source: str, messages: Sequence[Message]) -> tuple[str, str]:
    """Return what transformers renders, or "" and its error."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415  # an extra

    error = ""
    for as_text in (False, True):
        try:
            template = _compile_jinja_template(source)
            template.environment.globals["strftime_now"] = NOW.strftime
            text = template.render(
                messages=as_dicts(messages, as_text=as_text),
                tools=[WEATHER.to_dict(), CLOCK.to_dict()],
                documents=None,
                add_generation_prompt=True,
                bos_token=BOS,
                eos_token=EOS,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as raised:
            error = error or f"{type(raised).__name__}: {raised}".replace("\n", " ")[:120]
        else:
            return text, ""
    return "", error


def compare(source: str, template: JinjaChatTemplate) -> Iterator[Comparison]:
    for name, messages in CONVERSATIONS.items():
        theirs, error = rendered(source, messages)
        try:
            segments = template.render(messages, [WEATHER, CLOCK])
        except TemplateError as raised:
            yield Comparison(name, "refused", "", theirs, raised.message)
            continue
        ours = "".join(segment.text for segment in segments)
        adapted = "; ".join(filter(None, (template.calls_adaptation, template.tools_adaptation, template.adaptation)))
        if error:
            yield Comparison(name, "unknown", ours, theirs, f"transformers: {error}")
        elif ours == theirs:
            yield Comparison(name, "equal", ours, theirs)
        else:
            yield Comparison(name, "different", ours, theirs, adapted or _first_difference(ours, theirs))


def _first_difference(ours: str, theirs: str) -> str:
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"…{ours[max(0, at - 20) : at + 30]!r} for {theirs[max(0, at - 20) : at + 30]!r}"


def verdict(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the worst comparison of the main conversations; "unknown" only if transformers renders none."""
    main = [each for each in comparisons if each.name in MAIN]
    for result in ("refused", "different"):
        if found := next((each for each in main if each.result == result), None):
            return found
    return next((each for each in main if each.result == "equal"), main[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of *.jinja files")
    parser.add_argument("--show", metavar="NAME", help="print both prompts of one template where they differ")
    parser.add_argument("--only", metavar="TEXT", default="", help="only templates whose name contains this")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args()
    paths = [path for path in sorted(options.folder.glob("*.jinja")) if (options.show or options.only) in path.stem]
    if not paths:
        sys.exit(f"There are no templates in {options.folder}.")
    rows = []
    for path in paths:
        source = path.read_text("utf-8")
        with JinjaChatTemplate(source, bos_text=BOS, eos_text=EOS, origin=path.stem, clock=lambda: NOW, time_limit_s=10) as template:
            comparisons = list(compare(source, template))
        rows.append((path.stem, verdict(comparisons), comparisons))
        if options.show:
            _show(comparisons)
    if not options.show:
        _print(rows, as_markdown=options.markdown)


def _show(comparisons: Sequence[Comparison]) -> None:
    for each in comparisons:
        print(f"== {each.name}: {each.result} {each.why}")
        if each.result == "different":
            diff = difflib.unified_diff(each.theirs.splitlines(), each.ours.splitlines(), "transformers", "localrag", lineterm="", n=1)
            print("\n".join(diff))
        elif each.result == "unknown":
            print(each.ours)


def _print(rows: Sequence[tuple[str, Comparison, Sequence[Comparison]]], *, as_markdown: bool) -> None:
    counts = Counter(each.result for _, each, _ in rows)
    if as_markdown:
        print("| template | result | why | also equal |\n| --- | --- | --- | --- |")
        for name, each, comparisons in rows:
            print(f"| {name} | {each.result} | {each.why.replace('|', chr(92) + '|')} | {_others(comparisons)} |")
    else:
        table = Table("template", "result", "why", "also equal")
        for name, each, comparisons in rows:
            table.add_row(name, each.result, each.why, _others(comparisons))
        Console(width=180).print(table)
    print(", ".join(f"{num} {result}" for result, num in counts.most_common()), f"of {len(rows)}")


def _others(comparisons: Sequence[Comparison]) -> str:
    others = [each for each in comparisons if each.name not in MAIN]
    return ", ".join(each.name if each.result == "equal" else f"not {each.name}" for each in others)


if __name__ == "__main__":
    main()
