"""An embedder that the command line loads in milliseconds: a tiny BERT of random weights that runs in llama.cpp."""

import hashlib

import pytest

from localrag.cli import main
from localrag.engine.convert import convert
from tests.bert_folders import write_folder


@pytest.fixture(scope="session")
def tiny_catalogue(tmp_path_factory):
    """A models.toml with nothing but that embedder, and a rule that tags what lies in a folder "prices"."""
    folder = tmp_path_factory.mktemp("tiny")
    convert(write_folder(folder / "tiny"), folder / "tiny.gguf")
    sha256 = hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest()
    file = folder / "models.toml"
    file.write_text(
        f'default_embedder = "tiny"\n[embedders.tiny]\npath = "{folder}/tiny.gguf"\nsha256 = "{sha256}"\n[tags]\n"*/prices" = ["price"]\n'
    )
    return file


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
