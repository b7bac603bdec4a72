"""GET /: the page of page.html, which asks this server and nobody else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@router.get("/")
async def page() -> HTMLResponse:
    """It holds no secrets, so it is given without a token, which it then asks for."""
    text, policy = _page()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


@cache
def _page() -> tuple[str, str]:
    text = files("localrag.server").joinpath("page.html").read_text(encoding="utf-8")
    return text, policy_of(text)


def policy_of(text: str) -> str:
    """A Content-Security-Policy by which nothing but the scripts and styles of this very text work, and only this server is asked."""
    hashes = {kind: hash_of(content) for kind, content in _INLINE.findall(text)}
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


def hash_of(content: str) -> str:
    """A script or a style as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
