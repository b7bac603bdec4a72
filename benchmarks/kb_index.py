"""Compare indexing with the embedder's own encode() on the same texts, and time a cold question with and without PyTorch.

python -m benchmarks.kb_index                 both, on examples/handbook
python -m benchmarks.kb_index --folder DIR    on other documents; set a --question about them
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import shared
from localrag.kb import KnowledgeBase
from localrag.kb.embedder import SentenceTransformerEmbedder
from localrag.session import open_embedder, prepare_queries
from localrag.settings import Settings

QUESTION = "At what temperature is PLA annealed?"
OURS = "localrag"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["index", "cold"], help="index, cold (default: both)")
    parser.add_argument("--folder", type=Path, default=shared.ROOT / "examples" / "handbook", help="documents to index")
    parser.add_argument("--question", default=QUESTION, help="what is asked cold (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (default 3)")
    given = parser.parse_args()
    if strange := set(given.what) - {"index", "cold"}:
        parser.error(f"there is no {min(strange)!r}; there are index and cold")
    if "index" in given.what:
        index(given.folder, given.runs)
    if "cold" in given.what:
        cold(given.folder, given.question, given.runs)


def index(folder: Path, num_runs: int) -> None:
    """Chunks a second, from an open embedder to the last commit: walking, reading, cutting, counting, writing included."""
    embedder = open_embedder(Settings.from_env())
    assert isinstance(embedder, SentenceTransformerEmbedder)
    texts = embedded_texts(folder, embedder)

    def ours() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as home, KnowledgeBase.open(Path(home), "bench", create=True) as kb:
            started = time.perf_counter()
            result = kb.ingest([folder], embedder)
            return {"chunks/s": result.num_embedded / (time.perf_counter() - started)}

    def bare() -> dict[str, float]:
        started = time.perf_counter()
        embedder._model.encode(texts, normalize_embeddings=True, show_progress_bar=False)  # noqa: SLF001
        return {"chunks/s": len(texts) / (time.perf_counter() - started)}

    runs = shared.in_turn({OURS: ours, "encode() on the same texts": bare}, num_runs)
    shared.report("kb-index", shared.compare(runs, OURS), chunks=len(texts), runs=num_runs)


def cold(folder: Path, question: str, num_runs: int) -> None:
    """Seconds from process start to the first token of an answer from a knowledge base."""
    with shared.fresh_home() as settings:
        home = str(settings.home)
        embedder = open_embedder(settings)
        with KnowledgeBase.open(settings.kb_dir, "bench", create=True) as kb:
            kb.ingest([folder], embedder)
        prepare_queries(embedder, settings, on_start=lambda: None)
        copies = settings.embedders_dir

        def without_torch() -> dict[str, float]:
            return _cold_ask(home, question)

        def with_torch() -> dict[str, float]:
            aside = copies.rename(copies.with_name("aside"))
            try:
                return _cold_ask(home, question)
            finally:
                aside.rename(copies)

        without_torch()  # compiles our modules, as installing them does
        runs = shared.in_turn({"without PyTorch": without_torch, "with PyTorch": with_torch}, num_runs)
        shared.report("kb-cold", shared.compare(runs, "without PyTorch"), runs=num_runs)


_ASK = """
import json, sys, time
from localrag import Question, Session
first = []
with Session.open(kbs=["bench"], keep=False) as session:
    session.retrieve(sys.argv[1])
    found = time.time()
    session.ask(Question.of(sys.argv[1], max_tokens=1), on_text=lambda _: first.append(time.time()))
print(json.dumps({"to the hits_s": found, "to the first token_s": first[0]}))
"""


def _cold_ask(home: str, question: str) -> dict[str, float]:
    env = shared.compiled_environment(LOCALRAG_HOME=home)
    started = time.time()  # the start that the system tells of a process can be a second off
    done = subprocess.run([sys.executable, "-c", _ASK, question], env=env, cwd=shared.ROOT, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {name: at - started for name, at in found.items()}


def embedded_texts(folder: Path, embedder: SentenceTransformerEmbedder) -> list[str]:
    """What indexing embeds of the folder."""
    from localrag.kb.chunking import cut  # noqa: PLC0415
    from localrag.kb.readers import read  # noqa: PLC0415
    from localrag.kb.walk import read_file, walk  # noqa: PLC0415

    files = walk([folder]).files
    passages = [passage for file in files for passage in cut(read(file.path, read_file(file.path).data), embedder)]
    print(f"{len(files)} files, {len(passages)} chunks of {statistics.mean(embedder.count(each.embedded) for each in passages):.0f} tokens")
    return [passage.embedded for passage in passages]


if __name__ == "__main__":
    main()
