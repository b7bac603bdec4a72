"""Fixtures for every test: a home of its own, and the real model where it is on this machine."""

import gc
import hashlib
import os
import shutil
import signal
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from localrag.catalog import Catalog
from localrag.settings import Settings

# a shell's background jobs ignore Ctrl-C, and some tests send it to themselves and to programs that they start
signal.signal(signal.SIGINT, signal.default_int_handler)


SHARE_OF_EXAMPLES = float(os.environ.get("LOCALRAG_TEST_EXAMPLES", "0.2"))  # 1 held too
LEAST_EXAMPLES = 20
SHARED = Path(__file__).parents[2] / "shared" / "data"


def pytest_configure(config):
    """A worker that runs the real model keeps to its share of the cores: threads of two models on the same cores wait for each other."""
    if _is_of_the_model(config) and hasattr(config, "workerinput") and hasattr(os, "sched_setaffinity"):
        number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
        share = sorted(os.sched_getaffinity(0))[number::count]
        os.sched_setaffinity(0, share or os.sched_getaffinity(0))


def pytest_ignore_collect(collection_path, config):
    """A file without a test of the model is not imported where only such tests are run."""
    is_left_out = _is_of_the_model(config) and collection_path.suffix == ".py" and "mark.model" not in collection_path.read_text("utf-8")
    return is_left_out or None


def _is_of_the_model(config):
    return config.option.markexpr.startswith("model")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Long tests come first: the last one would be run by one worker while the other has nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    short = [item for item in items if item.get_closest_marker("long") is None]  # a long one has a variable of its own
    for test in {item.obj for item in short if getattr(item.obj, "is_hypothesis_test", False)}:
        _draw_fewer(test)


def pytest_collection_finish():
    """What was imported and collected stays to the end, so the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def _draw_fewer(test):
    """LOCALRAG_TEST_EXAMPLES times the examples that a property asks for, and not fewer than 20 if it asks for so many.

    Not of a property whose examples are always the same.
    """
    known = test._hypothesis_internal_use_settings or settings.default
    if known.derandomize:
        return
    num = known.max_examples
    test._hypothesis_internal_use_settings = settings(known, max_examples=max(min(num, LEAST_EXAMPLES), int(num * SHARE_OF_EXAMPLES)))


def pytest_terminal_summary(terminalreporter):
    """Append the reason of each skipped test to the file that SKIPPED_TESTS names; scripts/test sums up its runs from that."""
    file = os.environ.get("SKIPPED_TESTS")
    if file and not hasattr(terminalreporter.config, "workerinput"):  # the workers of -n report to their controller
        reasons = (report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ()))
        with Path(file).open("a", encoding="utf-8") as out:
            out.writelines(" ".join(reason.split()) + "\n" for reason in reasons)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A fresh home that nothing else uses, for this process and those it starts."""
    folder = tmp_path / "home"
    monkeypatch.setenv("LOCALRAG_HOME", str(folder))
    monkeypatch.delenv("LOCALRAG_MODELS", raising=False)
    return folder


def _located(thing: str) -> Path:
    """Where this machine has the default model or embedder; scripts/setup fetches both."""
    catalog = Catalog.load(Settings.from_env())
    return catalog.locate(getattr(catalog, thing)())


@pytest.fixture(scope="session")
def model_path():
    return _located("model")


@pytest.fixture(scope="session")
def embedder_path():
    return _located("embedder")


@pytest.fixture(scope="session")
def catalogue(model_path, embedder_path, tmp_path_factory):
    """A models.toml that names the default model and embedder where this machine has them: a fresh home holds neither."""
    shipped = Catalog.load(Settings.from_env())
    model, embedder = shipped.model(), shipped.embedder()
    file = tmp_path_factory.mktemp("catalogue") / "models.toml"
    file.write_text(
        f'default_model = "{model.name}"\ndefault_embedder = "{embedder.name}"\n'
        f'[models.{model.name}]\npath = "{model_path}"\nsha256 = "{model.sha256}"\n'
        f'[embedders.{embedder.name}]\npath = "{embedder_path}"\nsha256 = "{embedder.sha256}"\n'
    )
    return file


@pytest.fixture(scope="session")
def tiny_catalogue(tmp_path_factory):
    """A models.toml with nothing but an embedder that loads in milliseconds, a tiny BERT of random weights that runs in llama.cpp, and a
    rule that tags what lies in a folder "prices".
    """
    from localrag.engine.convert import convert  # noqa: PLC0415  # heavy
    from tests.bert_folders import write_folder  # noqa: PLC0415  # heavy

    folder = tmp_path_factory.mktemp("tiny")
    convert(write_folder(folder / "tiny"), folder / "tiny.gguf")
    sha256 = hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest()
    file = folder / "models.toml"
    file.write_text(
        f'default_embedder = "tiny"\n[embedders.tiny]\npath = "{folder}/tiny.gguf"\nsha256 = "{sha256}"\n[tags]\n"*/prices" = ["price"]\n'
    )
    return file


@pytest.fixture(scope="session")
def quick_catalogue(model_path, tiny_catalogue):
    """The same, and the default model."""
    model = Catalog.load(Settings.from_env()).model()
    file = tiny_catalogue.with_name("quick.toml")
    table = f'[models.{model.name}]\npath = "{model_path}"\nsha256 = "{model.sha256}"\n'
    file.write_text(f'default_model = "{model.name}"\n{tiny_catalogue.read_text()}{table}')
    return file


@pytest.fixture(scope="session")
def embedder(embedder_path):
    """The default embedder in sentence-transformers."""
    from localrag.kb.embedder import SentenceTransformerEmbedder  # noqa: PLC0415  # heavy

    return SentenceTransformerEmbedder(embedder_path)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder of all workers of this run. What one makes there under a lock, the others find made."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def handbook(embedder, shared_folder):
    """A knowledge base of examples/handbook, to be read."""
    from localrag.kb import KnowledgeBase  # noqa: PLC0415  # heavy

    with FileLock(shared_folder / "handbook.lock"), KnowledgeBase.open(shared_folder / "handbooks", "handbook", create=True) as kb:
        if not kb.num_chunks:
            kb.ingest([Path(__file__).parents[1] / "examples" / "handbook"], embedder)
    with KnowledgeBase.open(shared_folder / "handbooks", "handbook") as kb:
        yield kb


@pytest.fixture(scope="session")
def converted(embedder, shared_folder):
    """Settings of a home in which the default embedder was converted for queries, and what was found.

    Which attention kernel is the faster one was measured there, too: a home that is copied from it need not do either.
    """
    from localrag.engine.attention import flash_attention  # noqa: PLC0415  # heavy
    from localrag.engine.query_embedder import convert_for_queries  # noqa: PLC0415  # heavy
    from localrag.engine.threads import ThreadGovernor  # noqa: PLC0415  # heavy

    settings = Settings(home=shared_folder / "converted")
    with FileLock(shared_folder / "converted.lock"):
        flash_attention(settings.home, ThreadGovernor())
        return settings, convert_for_queries(embedder, settings)


@pytest.fixture
def home_after_indexing(home, converted):
    """A fresh home in which the default embedder's copy for queries is there already: to make it takes long."""
    shutil.copytree(converted[0].home, home)
    return home


@pytest.fixture(scope="session")
def shared_data():
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not there: this test reads data that the project does not hold")
    return SHARED
