"""A machine with a model, an embedder and a knowledge base whose files hold next to nothing, and a bundle of them."""

import base64
import hashlib
import zipfile
from contextlib import nullcontext

import pytest

from localrag.bundle.pack import bundle
from localrag.bundle.requirements import Wheels
from localrag.bundle.select import select
from localrag.kb import KnowledgeBase
from localrag.settings import Settings
from tests.bert_folders import write_folder
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.support import write_notes

MODELS = """# what Ann uses
default_model = "tiny"
default_embedder = "words"

[models.tiny]
path = "files/tiny.gguf"   # small enough
n_ctx = 64
chat_template = "files/own.jinja"

[models.elsewhere]
repo = "someone/elsewhere-GGUF"
file = "elsewhere.gguf"

[embedders.words]
path = "files/words"

[tags]
"prices/*" = ["price"]
"""


def no_progress(*_):
    """Nobody watches."""


@pytest.fixture
def machine(tmp_path):
    """Settings of a home with everything that a bundle can take, and the models.toml that names it."""
    files = tmp_path / "ann" / "files"
    write_folder(files / "words")
    (files / "tiny.gguf").write_bytes(b"GGUF" + bytes(range(256)) * 40)
    (files / "own.jinja").write_text("{{ messages[0].content }}")
    (files / "words" / ".cache").mkdir()
    (files / "words" / ".cache" / "junk").write_text("left out")
    models = tmp_path / "ann" / "models.toml"
    models.write_text(MODELS)
    write_notes(tmp_path / "notes", 4)
    settings = Settings(home=tmp_path / "ann" / "home", models_file=models)
    with KnowledgeBase.open(settings.kb_dir, "notes", create=True) as kb:
        kb.ingest([tmp_path / "notes"], HashEmbedder())
    return settings


@pytest.fixture
def pack(machine, tmp_path):
    """Writes a bundle of the machine, without wheels if none are given; gives what was written."""

    def run(name="out.zip", *, wheels=None, settings=machine, **chosen):
        return bundle(tmp_path / name, select(settings, **chosen), nullcontext(wheels or Wheels()), settings, no_progress)

    return run


@pytest.fixture
def bundled(pack):
    return pack()


@pytest.fixture
def other(tmp_path):
    """Settings of a fresh home."""
    return Settings(home=tmp_path / "bob")


def tree(folder):
    """Every file below a folder, with its bytes; locks are left out, and so are the files that SQLite makes while it reads."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith((".lock", "-wal", "-shm"))
    }


def metadata_text(name, version, *lines):
    return "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""])


def make_wheel(folder, name, version, files, *lines):
    """Write a wheel with these text files and lines of METADATA; returns its path."""
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": metadata_text(name, version, *lines),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}"
        for path, text in files.items()
    ]
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,", ""])}).items():
            archive.writestr(path, text)
    return wheel
