"""llama.cpp's library as Python sees it, and what it says while it works."""

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

_WARNING, _ERROR = 3, 4  # of ggml's log levels
_said: dict[int, str] = {}  # the first error and the last warning, by level
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
    """Hands memory that was freed back to the system. glibc keeps what it may need again: 30 to 110 MiB after a context was freed."""
    with suppress(OSError, AttributeError, TypeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def package_folder() -> Path:
    """The folder `llama_cpp`, with its libraries in `lib`. EngineError where it is not installed."""
    return Path(str(_package().origin)).parent


def _package() -> ModuleSpec:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise EngineError("llama-cpp-python is not installed.", hint="Install it with: pip install llama-cpp-python")
    return spec


def keep_log(level: int, text: bytes, _user_data: object) -> None:
    """What llama.cpp calls with each line of its log, unless another function is set that calls this one."""
    line = text.decode("utf-8", "replace").strip()
    if line and level == _WARNING:
        _said[level] = line
    elif line and level == _ERROR:
        _said.setdefault(level, line)


def begin_log() -> None:
    """What llama.cpp said so far is of no interest any more."""
    _said.clear()


def first_error() -> str:
    """The first error since `begin_log`, for later ones follow from it; empty if there was none."""
    return _said.get(_ERROR, "")


def complaint() -> str:
    """The first error since `begin_log`, or else the last warning; empty if there was none."""
    return first_error() or _said.get(_WARNING, "")
