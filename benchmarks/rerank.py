"""Compare a cross-encoder's copy in llama.cpp with sentence-transformers: the same order, seconds for 20 pairs, seconds in a new process.

python -m benchmarks.rerank FOLDER    the folder of a CrossEncoder that llama.cpp can replace
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import shared
from benchmarks.kb_index import embedded_texts
from localrag.catalog import Catalog
from localrag.engine.rerank import LlamaReranker, open_copy
from localrag.kb.embedder import CrossEncoderReranker, SentenceTransformerEmbedder
from localrag.kb.protocols import Reranker
from localrag.settings import Settings

NUM_PAIRS = 20
OURS, OTHER = "llama.cpp", "sentence-transformers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of a CrossEncoder")
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (default 5)")
    given = parser.parse_args()
    original = CrossEncoderReranker(given.folder.absolute())
    questions = [json.loads(line)["question"] for line in (Path(__file__).parent / "handbook_questions.jsonl").read_text().splitlines()]
    passages = embedded_texts(shared.ROOT / "examples" / "handbook", SentenceTransformerEmbedder(_embedder_folder()))
    with shared.fresh_home() as settings:
        copy = open_copy(original, settings)
        if copy is None:
            sys.exit("llama.cpp cannot replace this folder, or it does not order plain passages.")
        _warm(copy, original, questions, passages, given.runs)
        copy.close()
        _cold(given.folder.absolute(), settings, questions[0], passages[:NUM_PAIRS], given.runs)


def _warm(copy: LlamaReranker, original: CrossEncoderReranker, questions: list[str], passages: list[str], num_runs: int) -> None:
    def scoring(reranker: Reranker) -> dict[str, float]:
        started = time.perf_counter()
        reranker.scores(questions[0], passages[:NUM_PAIRS])
        return {f"{NUM_PAIRS} pairs_s": time.perf_counter() - started}

    runs = shared.in_turn({OURS: lambda: scoring(copy), OTHER: lambda: scoring(original)}, num_runs)
    orders = [[_order(each.scores(question, passages[:NUM_PAIRS])) for each in (copy, original)] for question in questions[:10]]
    same_first = sum(ours[0] == theirs[0] for ours, theirs in orders)
    same_order = sum(ours == theirs for ours, theirs in orders)
    table = shared.compare(runs, OURS)
    shared.report("rerank", table, runs=num_runs, orders=len(orders), same_first=same_first, same_order=same_order)


def _cold(folder: Path, settings: Settings, question: str, passages: list[str], num_runs: int) -> None:
    def asking(code: str) -> dict[str, float]:
        given = json.dumps({"folder": str(folder), "home": str(settings.home), "question": question, "passages": passages})
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], input=given, text=True, check=True, cwd=shared.ROOT, capture_output=True)
        return {"process_s": time.perf_counter() - started}

    runs = shared.in_turn({OURS: lambda: asking(_START + _OURS), OTHER: lambda: asking(_START + _OTHER)}, num_runs)
    shared.report("rerank-cold", shared.compare(runs, OURS), runs=num_runs)


_START = """
import json, sys
from pathlib import Path
given = json.load(sys.stdin)
"""
_OURS = """
from localrag.session.opening import open_reranker
from localrag.settings import Settings
open_reranker(Settings(home=Path(given["home"])), given["folder"]).scores(given["question"], given["passages"])
"""
_OTHER = """
from localrag.kb.embedder import CrossEncoderReranker
CrossEncoderReranker(Path(given["folder"])).scores(given["question"], given["passages"])
"""


def _embedder_folder() -> Path:
    catalog = Catalog.load(Settings.from_env())
    return catalog.open(catalog.embedder())


def _order(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])


if __name__ == "__main__":
    main()
