"""Command lines run in this process, with an embedder that loads in milliseconds."""

import pytest

from localrag.cli import main


@pytest.fixture
def localrag(home, tiny_catalogue, monkeypatch, capsys):
    """Runs a command line in this process, with the tiny embedder; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("LOCALRAG_MODELS", str(tiny_catalogue))

    def run(*args):
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(localrag):
    """Runs a command line that has to be refused with a code, by one line and a way out; returns both."""

    def run(code, *args):
        got, out, err = localrag(*args)
        assert (got, out) == (code, ""), err
        lines = err.strip().splitlines()
        assert "Traceback" not in err
        assert lines[-2].startswith("Error: ")
        assert lines[-1].startswith("  ")
        return "\n".join(lines[-2:])

    return run
