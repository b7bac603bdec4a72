"""GET /: the page of page.html, which asks this server and nobody else.

What the page knows of sections is filled in from budget/sections.py: a CSS rule with the colour of each, and what each holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from localrag.budget.sections import SPECS, colour_of

router = APIRouter(include_in_schema=False)

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@router.get("/")
async def page() -> HTMLResponse:
    """It holds no secrets, so it is given without a token, which it then asks for."""
    text = page_text()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy_of(text), "Referrer-Policy": "no-referrer"})


@cache
def page_text() -> str:
    """The page with its sections filled in."""
    text = files("localrag.server").joinpath("page.html").read_text(encoding="utf-8")
    rules = [
        f"[data-section] {{ --c: {colour_of('')}; }}",
        *(f'[data-section="{name}"] {{ --c: {spec.colour}; }}' for name, spec in SPECS.items()),
    ]
    text = text.replace("/* sections */", "\n".join(rules), 1)
    text = text.replace("const HELP = {};", f"const HELP = {json.dumps({name: spec.help for name, spec in SPECS.items()})};", 1)
    for name, spec in SPECS.items():  # in the icon
        text = text.replace(f"%23{{{name}}}", f"%23{spec.colour[1:]}")
    return text


@cache
def policy_of(text: str) -> str:
    """A Content-Security-Policy by which nothing but the scripts and styles of this very text work, and only this server is asked."""
    digests = {kind: hashlib.sha256(content.encode()).digest() for kind, content in _INLINE.findall(text)}
    hashes = {kind: f"'sha256-{base64.b64encode(digest).decode()}'" for kind, digest in digests.items()}
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes['script']}",
            f"style-src {hashes['style']}",
            "connect-src 'self'",
            "img-src data:",  # its icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",  # no text can be made markup or code, not even by the page itself
            "trusted-types 'none'",
        )
    )
