"""A server in a process of its own, as a person starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

START_S = 120.0


class Live:
    """A running server; `url` is its address, and `token` what it asks for."""

    def __init__(self, process: subprocess.Popen[str], port: int, token: str | None = None) -> None:
        self.process = process
        self.token = token
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def read_token(self) -> None:
        """The one that the server made and shows."""
        assert self.process.stdout is not None
        while "token: " not in (line := self.process.stdout.readline()):
            assert line
        self.token = line.split()[-1]

    @property
    def engine(self) -> psutil.Process:
        """The process that holds the engine."""
        return next(each for each in psutil.Process(self.process.pid).children() if "localrag.server.engine_worker" in each.cmdline())

    def wait(self) -> None:
        """Until the model is open."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            with suppress(httpx.TransportError):
                headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
                if httpx.get(f"{self.url}/v1/models", timeout=START_S, headers=headers).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(
            f"The server does not answer: {self.process.communicate(timeout=5) if self.process.poll() is not None else ''}"
        )


@contextmanager
def served(
    home: Path,
    *args: str,
    model: str = "echo",
    env: dict[str, str] | None = None,
    api_key: str | None = None,
    start_new_session: bool = False,
) -> Iterator[Live]:
    """A server with these options; one that is to make its own `api_key` is given an empty one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "localrag", "serve", "--model", model, "--port", str(port), *args],
        env={**os.environ, "LOCALRAG_HOME": str(home), **({} if api_key is None else {"LOCALRAG_API_KEY": api_key}), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=start_new_session,
    )
    live = Live(process, port, api_key)
    try:
        if api_key == "":
            live.read_token()
        live.wait()
        yield live
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
