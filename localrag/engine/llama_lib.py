"""Load llama.cpp's library, and collect its log messages."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from localrag.errors import EngineError

_WARNING, _ERROR = 3, 4  # ggml log levels
_said: dict[int, str] = {}  # the first error and the last warning, by level
_kept_alive: list[object] = []  # callbacks to which C holds pointers until the process ends


@functools.cache
def library() -> Any:  # noqa: ANN401  # a module that mypy cannot type through importlib
    """Return llama-cpp-python's module of C functions, with the backend initialized and its log kept off the terminal.

    The module is imported without the package's __init__, which would spend 100 ms on numpy and the high-level class. A script that
    imports llama_cpp itself still gets the whole package.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # otherwise a failed assertion forks a debugger
    if "llama_cpp" in sys.modules:
        lib: Any = importlib.import_module("llama_cpp.llama_cpp")
    else:
        sys.modules["llama_cpp"] = importlib.util.module_from_spec(_package())
        try:
            lib = importlib.import_module("llama_cpp.llama_cpp")
        finally:
            del sys.modules["llama_cpp"]
    callback = lib.llama_log_callback(keep_log)
    lib.llama_log_set(callback, None)
    _kept_alive.append(callback)
    lib.llama_backend_init()
    return lib


def give_back() -> None:
    """Return freed memory to the system. glibc otherwise retains 30 to 110 MiB after a context is freed."""
    with suppress(OSError, AttributeError, TypeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def package_folder() -> Path:
    """Return the folder `llama_cpp`, whose libraries are in `lib`. EngineError if it is not installed."""
    return Path(str(_package().origin)).parent


def _package() -> ModuleSpec:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise EngineError("llama-cpp-python is not installed.", hint="Install it with: pip install llama-cpp-python")
    return spec


def keep_log(level: int, text: bytes, _user_data: object) -> None:
    """Log callback of llama.cpp: keep the first error and the last warning. A custom callback should call it."""
    line = text.decode("utf-8", "replace").strip()
    if line and level == _WARNING:
        _said[level] = line
    elif line and level == _ERROR:
        _said.setdefault(level, line)


def begin_log() -> None:
    """Forget the log messages so far."""
    _said.clear()


def first_error() -> str:
    """Return the first error since `begin_log`, which usually causes the later ones; empty if there was none."""
    return _said.get(_ERROR, "")


def complaint() -> str:
    """Return the first error since `begin_log`, or else the last warning; empty if there was neither."""
    return first_error() or _said.get(_WARNING, "")
