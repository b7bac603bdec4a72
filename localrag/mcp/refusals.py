"""Errors as the one line that a client is told: what is wrong and the way out, and no path of this machine."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from localrag.errors import LocalragError
from localrag.session.hush import Hush

MAX_CHARS = 1200
_MAX_FAULTS, _MAX_NAME_CHARS = 4, 40


def told(error: Exception, hush: Hush) -> str:
    """The line; of what is no error of localrag or of the arguments, only its kind."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_input=False)
        text = f"{'; '.join(_fault(each['loc'], each['msg']) for each in faults[:_MAX_FAULTS])}."
    elif isinstance(error, LocalragError):
        text = f"{error.message} {error.hint or ''}"
    elif isinstance(error, OSError):
        text = f"{error.strerror or type(error).__name__}. Check the disk and the permissions of the home of localrag."
    else:
        text = f"localrag failed ({type(error).__name__}). Its log has more."
    line = " ".join("".join(char if char.isprintable() else " " for char in hush(text)).split())
    return line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…"


def _fault(where: Iterable[int | str], what: str) -> str:
    return f"{'.'.join(str(each)[:_MAX_NAME_CHARS] for each in where)}: {what}"
