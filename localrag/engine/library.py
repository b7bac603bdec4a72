"""llama.cpp's library as Python sees it, and what it says while it works."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from typing import Any

from localrag.errors import EngineError

_WARNING, _ERROR = 3, 4  # of ggml's log levels; 5 continues the line before
_MAX_LINES = 40
_log: list[tuple[int, str]] = []
_kept_alive: list[object] = []  # what C holds a pointer to for as long as the process lives


@functools.cache
def library() -> Any:  # noqa: ANN401  # a module, whose types mypy does not see through importlib
    """llama-cpp-python's module of C functions, with the backend initialised and its log kept off the terminal.

    The package's own __init__ imports numpy and the high-level class, which takes 100 ms and is not used: the module is
    imported without running it. A script that imports llama_cpp itself gets the whole package as ever.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion would otherwise fork a debugger
    if "llama_cpp" in sys.modules:
        lib: Any = importlib.import_module("llama_cpp.llama_cpp")
    else:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None:
            raise EngineError("llama-cpp-python is not installed.", hint="Install it with: pip install llama-cpp-python")
        sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
        try:
            lib = importlib.import_module("llama_cpp.llama_cpp")
        finally:
            del sys.modules["llama_cpp"]
    callback = lib.llama_log_callback(_keep_log)
    lib.llama_log_set(callback, None)
    _kept_alive.append(callback)
    lib.llama_backend_init()
    return lib


def _keep_log(level: int, text: bytes, _user_data: object) -> None:
    if level >= _WARNING and len(_log) < _MAX_LINES:
        _log.append((level, text.decode("utf-8", "replace").strip()))


def begin_log() -> None:
    """What llama.cpp said so far is of no interest any more."""
    _log.clear()


def complaint() -> str:
    """The first error since `begin_log`, for later ones follow from it, or else the last warning; empty if there was none."""
    lines = [(level, line) for level, line in _log if line]
    first = next((line for level, line in lines if level == _ERROR), None)
    return first or next((line for _, line in reversed(lines)), "")
