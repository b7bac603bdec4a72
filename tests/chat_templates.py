"""Chat templates for the tests: twelve real ones where this machine has them, some made up, and plain jinja2 as the oracle."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import jinja2

from localrag.engine.template import JinjaChatTemplate
from localrag.text.tokens import Segment
from localrag.types import Message, ToolSpec

FOLDER = Path(__file__).parents[2] / "shared" / "data" / "templates"
PATHS = sorted(FOLDER.glob("*.jinja"))
NOW = datetime(2026, 9, 3, 12, 30)  # noqa: DTZ001  # local time, as templates print it
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\n{% endif", "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif")
THINKING_OPEN = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
"""Of models that think: one that can be told not to, and one that opens the thoughts itself."""
ECHO = "{% for m in messages %}{{ m.content }}{% endfor %}"
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
HEAVY = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that doubles": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a constant folded at compile time": "{{ '%5000000000d' % 1 }}",
    "a number folded at compile time": "{{ 9 ** (9 ** 9) % 7 }}",
    "a giant string": "{{ 'a' * 10 ** 10 }}",
    "a growing string": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "lipsum": "{{ lipsum(10 ** 9) }}",
    "a range too long": "{% for i in range(10 ** 12) %}{% endfor %}",
    "nested lists": "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = n.l * 9 %}{% endfor %}",
    "deep parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
}
WEATHER = ToolSpec(
    "get_weather",
    "The weather of a city, today and later: 日本語 too.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name", "minLength": 1},
            "Unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "days": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}}},
            "at": {"type": "string", "format": "date-time", "examples": []},
            "where": {
                "oneOf": [{"type": "string", "description": "a place"}, {"type": "number", "default": 4.5}],
                "x-order": {"a b": None},
            },
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
PING = ToolSpec("ping", "Answers.", {"type": "object", "properties": {}})
TOOLS = [WEATHER, PING]


def talk(letters: str, contents: list[str] | None = None) -> list[Message]:
    said = contents or [f"{ROLES[letter]} text {i}:\n- häß, 日本語 🙂" for i, letter in enumerate(letters)]
    return [Message(ROLES[letter], content) for letter, content in zip(letters, said, strict=True)]


def joined(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


@lru_cache
def plain(source: str) -> jinja2.Template:
    """A plain jinja2, set up as chat templates expect it, as the oracle."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals.update(raise_exception=refuse, strftime_now=NOW.strftime)
    return environment.from_string(source)


def directly(source: str, messages: list[dict[str, str]]) -> str:
    """What the template makes of the very contents."""
    return plain(source).render(messages=messages, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")


def as_dicts(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def hurried(source: str, **options: object) -> JinjaChatTemplate:
    """With limits that keep a hostile template's test short."""
    return JinjaChatTemplate(source, **{"time_limit_s": 0.5, "memory_limit_bytes": 64 << 20, **options})


def with_tools(source: str, messages: list[Message], tools: list[ToolSpec]) -> str:
    """What a plain jinja2 makes of the very contents and tools."""
    return plain(source).render(
        messages=as_dicts(messages),
        tools=[tool.to_dict() for tool in tools],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
