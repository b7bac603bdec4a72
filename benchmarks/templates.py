"""Compare how localrag and transformers render tool calls: for each chat template, whether the prompts are equal.

    python -m benchmarks.templates FOLDER             # of *.jinja, such as vendor/llama.cpp/models/templates of llama-cpp-python's sdist
    python -m benchmarks.templates FOLDER --show NAME # print where the prompts of one template differ
    python -m benchmarks.templates FOLDER --markdown  # the table of docs/measured.md

Conversations with calls and results are rendered by localrag, which hides all texts from the template, and by the environment of
transformers' apply_chat_template, which shows them. The first conversation, a question, a call and its result, decides on the result of a
template; the others are columns. transformers gets the call in the first of four forms in which its prompt holds the call: arguments as an
object or as JSON text, content "" or null. If the template has no place for tools, both render without them: localrag lists them in the
system text. Needs transformers. The templates are read, not kept.
"""

from __future__ import annotations

import argparse
import copy
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
from rich.markup import escape
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
        },
        "required": ["city"],
    },
)
CLOCK = ToolSpec("clock", "The time.", {"type": "object", "properties": {"zone": {"type": "string", "description": "Its name"}}})
TOOLS = (WEATHER, CLOCK)
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
    "call": ROUND,
    "system": (SYSTEM, *ROUND),
    "answered": (*ROUND, Message("assistant", "It is 21 °C."), Message("user", "And tomorrow?")),
    "rounds": (*ROUND, _calling(TIME), _result(TIME, "12:30")),
    "escapes": (QUESTION, _calling(NESTED), _result(NESTED, '{"c": 21, "say": "a\\nb"}\n<b> & é')),
    "two": (QUESTION, _calling(CALL, TIME), _result(CALL, "21 °C"), _result(TIME, "12:30")),
    "text": (QUESTION, _calling(CALL, text="I look."), _result(CALL, "21 °C")),
}
"""The conversations: one call, with a system text, with an answer and a next question, two rounds, special characters in arguments and
result, two calls at once, and text before the call."""
SIGNS = {"equal": "=", "beyond": "=", "different": "≠", "unknown": "–", "refused": "✗"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One conversation. `result` is equal; beyond (equal, but transformers' sandbox forbids lists to grow); different; unknown
    (transformers refuses it) or refused (localrag does).
    """

    name: str
    result: str
    ours: str
    theirs: str
    why: str = ""


def as_dicts(messages: Sequence[Message], *, as_text: bool, is_null: bool) -> list[dict[str, Any]]:
    """Return messages in the format of OpenAI's API. `is_null`: a message that has only calls has the content null."""
    dicts: list[dict[str, Any]] = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            fields["content"] = message.content or (None if is_null else "")
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


def rendered(source: str, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[str, str, bool]:
    """Return the prompt of transformers or "", the error of the first form, and whether transformers' sandbox forbids it."""
    errors, texts = [], []
    for lists_grow in (False, True):
        for as_text, is_null in ((False, False), (True, False), (False, True), (True, True)):
            try:
                template = _compiled(source, lists_grow=lists_grow)
                text = template.render(
                    messages=as_dicts(messages, as_text=as_text, is_null=is_null),
                    tools=[tool.to_dict() for tool in tools] or None,
                    documents=None,
                    add_generation_prompt=True,
                    bos_token=BOS,
                    eos_token=EOS,
                )
            except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as raised:
                errors.append(f"{type(raised).__name__}: {raised}".replace("\n", " ")[:120])
            else:
                texts.append((text, "", lists_grow))
                if _holds(text, messages):
                    return texts[-1]
        if texts or "'append'" not in errors[0]:
            break
    return texts[0] if texts else ("", errors[0], False)


def _compiled(source: str, *, lists_grow: bool) -> jinja2.Template:
    """Return the template in transformers' environment, perhaps with lists that the template can change."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415  # an extra

    template: jinja2.Template = _compile_jinja_template(source)
    template.environment.globals["strftime_now"] = NOW.strftime
    if lists_grow:
        environment = copy.copy(template.environment)
        environment.is_safe_attribute = lambda _obj, name, _value: not name.startswith("_")  # type: ignore[method-assign]
        template = environment.from_string(source)
    return template


def _holds(text: str, messages: Sequence[Message]) -> bool:
    """Whether a prompt has the names of all calls after the question."""
    after = text.rpartition(QUESTION.content)[2] if messages[-1].role == "tool" else text.partition(QUESTION.content)[2]
    return all(call.name in after for message in messages for call in message.tool_calls)


def compare(source: str, template: JinjaChatTemplate) -> Iterator[Comparison]:
    for name, messages in CONVERSATIONS.items():
        try:
            segments = template.render(messages, TOOLS)
            note = "no place for tools: compared without" if template.tools_adaptation else ""
            theirs, error, is_beyond = rendered(source, messages, () if note else TOOLS)
            if error and not note:
                without = rendered(source, messages, ())
                if not without[1]:
                    note, (theirs, error, is_beyond) = f"transformers refuses the tools ({error}): compared without", without
            segments = template.render(messages) if note else segments
        except TemplateError as raised:
            yield Comparison(name, "refused", "", "", raised.message)
            continue
        ours = "".join(segment.text for segment in segments)
        adapted = "; ".join(filter(None, [template.calls_adaptation, template.adaptation, note]))
        if error:
            yield Comparison(name, "unknown", ours, theirs, f"transformers: {error}")
        elif ours != theirs:
            yield Comparison(name, "different", ours, theirs, adapted or _first_difference(ours, theirs))
        elif is_beyond:
            yield Comparison(name, "beyond", ours, theirs, "transformers' sandbox forbids append; compared without that rule")
        else:
            yield Comparison(name, "equal", ours, theirs, adapted)


def _first_difference(ours: str, theirs: str) -> str:
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"…{ours[max(0, at - 20) : at + 30]!r} for {theirs[max(0, at - 20) : at + 30]!r}"


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
        rows.append((path.stem, comparisons))
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
        elif each.result in ("unknown", "beyond"):
            print(each.ours)


def _print(rows: Sequence[tuple[str, Sequence[Comparison]]], *, as_markdown: bool) -> None:
    titles = ["template", *CONVERSATIONS, "why"]
    lines = [(name, *(SIGNS[each.result] for each in comparisons), comparisons[0].why) for name, comparisons in rows]
    if as_markdown:
        print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
        for line in lines:
            print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |")
    else:
        table = Table(*titles)
        for line in lines:
            table.add_row(*map(escape, line))
        Console(width=180).print(table)
    for at, name in enumerate(CONVERSATIONS):
        counts = Counter(comparisons[at].result for _, comparisons in rows)
        print(f"{name}: " + ", ".join(f"{num} {result}" for result, num in counts.most_common()) + f", of {len(rows)}")


if __name__ == "__main__":
    main()
