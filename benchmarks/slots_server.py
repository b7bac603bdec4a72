"""Run xllamacpp's HTTP server until the process is terminated."""

from __future__ import annotations

import signal
import sys

from benchmarks.slots import make_server


def main(port: int, path: str, n_ctx: int, num_slots: int, num_threads: int, flash_attention: int) -> None:
    server = make_server(path, n_ctx, num_slots, num_threads, flash_attention=bool(flash_attention), port=port)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
