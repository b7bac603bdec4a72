"""Child process that compiles and renders a chat template, which is untrusted code. template.py starts it.

The job is {"memory_limit_bytes": how much the process may grow}. A request is

    {"source": template, "time_limit_s": seconds, "messages": [{"role", "content"}], "bos_token": …, "eos_token": …, "now": ISO time}

with optional "tools" in the form of OpenAI's API and "enable_thinking". Messages can have "tool_calls" and "tool_call_id". The reply is
`{"text": …}` or `{"error": kind, "message": …}`; the kind is syntax, security, memory, size or refused. A request without messages
compiles the template ahead of time and gets no reply.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.debug  # jinja2 needs it when a template fails, when memory may be exhausted
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localrag import process

MAX_TEXT_CHARS = 1 << 20
MAX_MESSAGE_CHARS = 500


class RefusalError(Exception):
    """The template called `raise_exception`."""


class OversizeError(Exception):
    """The rendered text is longer than MAX_TEXT_CHARS."""


class Generation(Extension):
    """Renders the body of `{% generation %}…{% endgeneration %}`, which marks an assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Given(list[Any]):
    """A list of the request. A template can change only its own lists."""


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, but accessing an unsafe attribute fails at once instead of when its value is used, and templates can append to the
    lists that they make.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401  # any object of the template's
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:  # noqa: ANN401  # any object of the template's
        raise SecurityError(f"templates may not access the attribute {attribute!r} of a {type(obj).__name__}")


def to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002  # as templates call it
) -> str:
    """The `tojson` filter that chat templates expect: plain JSON, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed)


def _listed(value: object) -> list[object]:
    """Return what filters such as `map` yield. TypeError for anything else."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"an object of type {type(value).__name__} is not JSON")


def _given(value: Any) -> Any:  # noqa: ANN401  # JSON
    """Return a value of the request with its lists protected."""
    if isinstance(value, list):
        return _Given(map(_given, value))
    return {key: _given(each) for key, each in value.items()} if isinstance(value, dict) else value


def raise_exception(message: object) -> NoReturn:
    raise RefusalError(str(message)[:MAX_MESSAGE_CHARS])


@lru_cache(maxsize=1)
def compile_template(source: str) -> jinja2.Template:
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = raise_exception
    return sandbox.from_string(source)


def render(template: jinja2.Template, request: Mapping[str, Any]) -> str:
    now = datetime.fromisoformat(request["now"])
    pieces: list[str] = []
    num_chars = 0
    # Absent `tools` and `enable_thinking` stay undefined: templates test `is defined`, and None would break those that loop.
    optional = {name: _given(request[name]) for name in ("tools", "enable_thinking") if name in request}
    for piece in template.generate(
        messages=_given(request["messages"]),
        bos_token=request["bos_token"],
        eos_token=request["eos_token"],
        add_generation_prompt=True,
        strftime_now=now.strftime,
        **optional,
    ):
        num_chars += len(piece)
        if num_chars > MAX_TEXT_CHARS:
            raise OversizeError
        pieces.append(piece)
    return "".join(pieces)


def describe(error: Exception) -> str:
    text = str(error)[:MAX_MESSAGE_CHARS]
    return text if isinstance(error, (jinja2.TemplateError, RefusalError)) and text else f"{type(error).__name__}: {text}"


def answer(request: Mapping[str, Any]) -> dict[str, str]:
    kind = "syntax"
    try:
        template = compile_template(request["source"])
        kind = "refused"
        return {"text": render(template, request)}
    except MemoryError:
        return {"error": "memory", "message": ""}
    except OversizeError:
        return {"error": "size", "message": ""}
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"{error.message} (line {error.lineno})"}
    except SecurityError as error:
        return {"error": "security", "message": describe(error)}
    except Exception as error:  # noqa: BLE001  # report any error of a template
        return {"error": kind, "message": describe(error)}


def main(job: Mapping[str, Any], parent: process.Parent) -> None:
    process.confine(job["memory_limit_bytes"])
    parent.send({"ready": True})
    while (received := parent.receive()) is not None:
        request: Mapping[str, Any] = received[0]
        process.limit_computing(request["time_limit_s"] + 1)  # in case the parent dies and no longer enforces the limit
        if "messages" in request:
            parent.send(answer(request))
        else:
            with contextlib.suppress(Exception):  # the first request to render reports the error
                compile_template(request["source"])
