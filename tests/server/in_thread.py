"""A server in a thread of this process, for tests that give it an app of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from localrag.server.security import make_server

START_S = 30.0


@contextmanager
def served_in_thread(app: FastAPI) -> Iterator[str]:
    """Its address."""
    server = make_server(app, host="127.0.0.1", port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + START_S
        while not server.started and thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
