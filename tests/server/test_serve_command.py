"""What `localrag serve` says when it cannot serve: one line, with a way out, and the exit code of its kind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.server.live import served


def serve(home, *args):
    env = {**os.environ, "LOCALRAG_HOME": str(home)}
    command = [sys.executable, "-m", "localrag", "serve", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = serve(tmp_path, "--model", "echo", "--port", str(port))
    assert code == 2
    assert said.startswith(f"Error: Cannot listen on 127.0.0.1, port {port}: Address already in use.")
    assert "--port" in said
    assert "Serving" not in said


def test_an_address_that_is_not_of_this_machine(tmp_path):
    code, said = serve(tmp_path, "--model", "echo", "--host", "192.0.2.1", "--api-key", "s3cret")
    assert (code, said.count("Error: ")) == (2, 1)


def test_an_empty_token_is_none_and_one_is_made(tmp_path):
    code, said = serve(tmp_path, "--model", "echo", "--host", "192.0.2.1", "--api-key", "")
    assert (code, said.startswith("Requests need this token: ")) == (2, True)


def test_a_model_that_is_not_there(tmp_path):
    code, said = serve(tmp_path, "--model", "nope")
    assert code == 4
    assert "nope" in said
    assert "Serving" not in said


@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups")
def test_a_signal_to_the_whole_group_ends_it_without_a_word_of_starting_again(tmp_path):
    """As `timeout`, a container and systemd send it. The engine has a session of its own, and the server ends it."""
    with served(tmp_path, "--no-keep", start_new_session=True) as live:
        engine = live.engine
        assert os.getpgid(engine.pid) != os.getpgid(live.process.pid)
        os.killpg(live.process.pid, signal.SIGTERM)
        said, _ = live.process.communicate(timeout=60)
        assert not engine.is_running()
    assert "Restarting it" not in said
    assert "Traceback" not in said
