"""Measure how well a search finds relevant documents, on a test collection in the BEIR layout.

A collection is a folder with corpus.jsonl (`_id`, `title`, `text`), queries.jsonl (`_id`, `text`) and qrels.tsv or qrels/test.tsv (query
id, document id, grade). In place of the last two it may hold conversations.jsonl (see grading.read_questions): each line is a conversation
that ends with a question, and the documents relevant to that question. A corpus is chunked, embedded and indexed like other documents,
once, in a folder of its own under `home`.

A repeated `_id`, or two grades for one document and question, is an error, as in trec_eval: the result would depend on which one counts.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from localrag.conversation import search_query
from localrag.errors import UsageError
from localrag.grading import read_questions
from localrag.kb.chunking import Passage, cut
from localrag.kb.ingest import min_similarity, vectors_for
from localrag.kb.names import FILE
from localrag.kb.protocols import DocumentRow, Reranker
from localrag.kb.readers.base import Reading, Section
from localrag.kb.retrieve import DEPTH, MODES, Mode, retrieve
from localrag.kb.store import Store
from localrag.text.tokens import Embedder
from localrag.types import Hit, Message

MEASURES = {"nDCG@10": "nDCG@10", "R@10": "Recall@10", "R@100": "Recall@100", "RR": "MRR"}
"""Name in ir-measures → name shown."""
CONVERSATION_MEASURES = {"nDCG@10": "nDCG@10", "R@5": "Recall@5"}
"""The measures of a collection of conversations, as in MEASURES."""
NUM_DOCUMENTS = 100
"""Documents to rank for each question: the depth of the deepest measure."""

FOLDER = "eval"
"""Folder of the home that holds the indexes of collections, each a knowledge base."""
CONVERSATIONS = "conversations.jsonl"

_DOCUMENTS_AT_ONCE = 128
_MAX_CHUNKS = 1000
_LINK = b"../corpus.jsonl"
"""Content of a corpus.jsonl that was a symbolic link before it was copied or checked out as a text."""

Search = Callable[[str], list[Hit]]
"""Searches for the question with this id."""


@dataclass(frozen=True)
class Collection:
    """A test collection: its corpus.jsonl, questions, and the graded documents for each question, by question id.

    A collection of conversations also has the messages up to and including each question, and the name of the subcollection that a question
    belongs to, if any.
    """

    corpus: Path
    queries: Mapping[str, str]
    qrels: Mapping[str, Mapping[str, int]]
    conversations: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    subcollections: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """The sha256 of the corpus."""
        with self.corpus.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def documents(self) -> Iterator[tuple[str, str, str]]:
        """Yield (id, title, text) of every document."""
        for row in _rows(self.corpus):
            yield row["_id"], " ".join(str(row.get("title") or "").split()), str(row.get("text") or "")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one search method: the mean of each measure over the questions, and the median time per question in ms.

    `scores` holds the measures of each question by its id.
    """

    name: str
    measures: Mapping[str, float]
    p50_ms: float
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def over(self, ids: Sequence[str]) -> dict[str, float]:
        """Return the mean of each measure over some of the questions."""
        return {name: fmean(self.scores[one][name] for one in ids) for name in self.measures}

    def to_dict(self) -> dict[str, object]:
        return {"mode": self.name, **self.measures, "p50_ms": round(self.p50_ms, 2)}


def read_collection(folder: Path, *, max_queries: int | None = None) -> Collection:
    """Read a collection, with at most `max_queries` evenly spaced questions. Raises UsageError if it is invalid."""
    if not (folder / "queries.jsonl").exists() and (folder / CONVERSATIONS).is_file():
        return _conversations(folder, max_queries)
    queries = {row["_id"]: str(row.get("text") or "") for row in _rows(folder / "queries.jsonl")}
    file = next((file for file in (folder / "qrels.tsv", folder / "qrels" / "test.tsv") if file.is_file()), folder / "qrels.tsv")
    qrels: dict[str, dict[str, int]] = {}
    for number, line in _lines(file):
        fields = line.split("\t")
        if number == 1 and not fields[-1].strip().lstrip("-").isdigit():
            continue  # the header line
        try:
            query, document, grade = fields[0], fields[-2], int(fields[-1])
        except (IndexError, ValueError):
            raise _broken(file, number, "it is not query id, document id and grade, separated by tabs") from None
        if query in queries and qrels.setdefault(query, {}).setdefault(document, grade) != grade:
            raise _broken(file, number, f"it gives {document!r} another grade for {query!r} than an earlier line")
    if not any(grade > 0 for grades in qrels.values() for grade in grades.values()):
        raise UsageError(f"{file} names no relevant document for any question of queries.jsonl.", hint="Check that both belong together.")
    judged = [query for query in queries if query in qrels]
    sample = _sample(judged, max_queries)
    return Collection(corpus_of(folder), {query: queries[query] for query in sample}, {query: qrels[query] for query in sample})


def _conversations(folder: Path, max_queries: int | None) -> Collection:
    """Read the conversations whose last question has relevant documents."""
    file = folder / CONVERSATIONS
    judged = {each.id: each for each in read_questions(file).questions if each.messages and each.sources}
    if not judged:
        raise UsageError(f"{file} names no relevant document for any question.", hint='Give the ids of documents as "relevant".')
    sample = [judged[one] for one in _sample(list(judged), max_queries)]
    return Collection(
        corpus_of(folder),
        {each.id: search_query(each.messages) for each in sample},
        {each.id: dict.fromkeys(each.pages, 1) for each in sample},
        {each.id: each.messages for each in sample},
        {each.id: each.collection for each in sample if each.collection},
    )


def corpus_of(folder: Path) -> Path:
    """Return the corpus.jsonl of a folder, or of its parent if the file is a link to that which became a text.

    Raises UsageError if it is missing.
    """
    file, linked = folder / "corpus.jsonl", folder.parent / "corpus.jsonl"
    if not file.is_file():
        raise _missing(file)
    with file.open("rb") as lines:
        is_link = lines.read(len(_LINK) + 2).strip() == _LINK
    if is_link and not linked.is_file():
        raise UsageError(f"{file} only names {_LINK.decode()}, which does not exist.", hint=f"Copy the corpus to {file}.")
    return linked if is_link else file


def _sample(ids: Sequence[str], num: int | None) -> Sequence[str]:
    """Return at most `num` of the ids at even distances."""
    step = 1 if num is None else max(1, len(ids) // num)
    return ids[::step][:num]


def index_name(collection: Collection, embedder: Embedder) -> str:
    """Return the name of the collection's knowledge base in the folder `home/eval`."""
    return f"{collection.sha256[:16]}-{embedder.fingerprint[:16]}"


def open_index(
    collection: Collection, embedder: Embedder, home: Path, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Store:
    """Index a collection below `home`, continuing an earlier run if there was one. `progress(done, total)` counts documents.

    Raises UsageError for an invalid corpus before anything is embedded.
    """
    total = sum(1 for _ in collection.documents())
    store = Store(home / FOLDER / index_name(collection, embedder) / FILE, create=True)
    try:
        stored_ids = set(store.documents())
        num_done = 0
        documents = collection.documents()
        while group := list(islice(documents, _DOCUMENTS_AT_ONCE)):
            _add(store, [document for document in group if document[0] not in stored_ids], embedder)
            num_done += len(group)
            progress(num_done, total)
    except BaseException:
        store.close()
        raise
    return store


def evaluate(
    collection: Collection,
    store: Store,
    embedder: Embedder,
    *,
    modes: Sequence[Mode] = MODES,
    reranker: Reranker | None = None,
    progress: Callable[[str, int, int], None] = lambda _name, _done, _total: None,
) -> list[Result]:
    """Measure each mode and, with a `reranker`, "hybrid + rerank". A document is ranked by the best of its chunks.

    Chunks below the relevance threshold count as not found. Questions are timed one by one, embedding included, after a warm-up question.
    """
    from localrag.kb.vectors import load_index  # noqa: PLC0415  # imports numpy

    index = load_index(store)
    num_chunks = min(_MAX_CHUNKS, DEPTH * max(1, -(-3 * store.num_chunks // max(1, 2 * store.num_documents))))

    def searching(mode: Mode, reranker: Reranker | None = None) -> Search:
        return lambda one: retrieve(store, lambda: index, collection.queries[one], embedder, k=num_chunks, mode=mode, reranker=reranker)

    searches = {str(mode): searching(mode) for mode in modes}
    if reranker is not None:
        searches["hybrid + rerank"] = searching("hybrid", reranker)
    return measured(collection, searches, MEASURES, progress)


def measured(
    collection: Collection,
    searches: Mapping[str, Search],
    names: Iterable[str],
    progress: Callable[[str, int, int], None] = lambda _name, _done, _total: None,
) -> list[Result]:
    """Measure each search. `names` are measures of ir-measures. Questions are timed as in `evaluate`."""
    results = []
    for name, search in searches.items():
        search(next(iter(collection.queries)))
        run: dict[str, dict[str, float]] = {}
        seconds = []
        for number, query_id in enumerate(collection.queries, start=1):
            started = time.perf_counter()
            hits = search(query_id)
            seconds.append(time.perf_counter() - started)
            run[query_id] = ranked_documents(hits)
            progress(name, number, len(collection.queries))
        scores = scored(collection.qrels, run, names)
        means = {measure: fmean(each[measure] for each in scores.values()) for measure in names}
        results.append(Result(name, means, 1000 * median(seconds), scores))
    return results


def ranked_documents(hits: Sequence[Hit]) -> dict[str, float]:
    """Return document → 1 / rank for the documents of ranked hits and their copies, at most NUM_DOCUMENTS."""
    sources = list(dict.fromkeys(chunk.source for hit in hits for chunk in (hit.chunk, *hit.copies)))[:NUM_DOCUMENTS]
    return {source: 1.0 / rank for rank, source in enumerate(sources, start=1)}


def measures(qrels: Mapping[str, Mapping[str, int]], run: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each of MEASURES over the questions of `qrels`. A question without results counts as 0."""
    scores = scored(qrels, run, MEASURES).values()
    return {name: fmean(each[name] for each in scores) for name in MEASURES}


def scored(
    qrels: Mapping[str, Mapping[str, int]], run: Mapping[str, Mapping[str, float]], names: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Return question → measure → value for every question of `qrels`. A question without results counts as 0."""
    import ir_measures  # noqa: PLC0415  # heavy

    parsed = [ir_measures.parse_measure(name) for name in names]
    scores = {query: dict.fromkeys(names, 0.0) for query in qrels}
    for metric in ir_measures.iter_calc(parsed, qrels, run):
        scores[metric.query_id][str(metric.measure)] = float(metric.value)
    return scores


def gain(results: Sequence[Result]) -> float | None:
    """Return the nDCG@10 of hybrid search divided by the better of keyword and semantic search; None if unknown."""
    ndcg = {result.name: result.measures["nDCG@10"] for result in results}
    best_single = max(ndcg.get("keyword", 0.0), ndcg.get("semantic", 0.0))
    return ndcg["hybrid"] / best_single if "hybrid" in ndcg and best_single else None


def _add(store: Store, documents: Sequence[tuple[str, str, str]], embedder: Embedder) -> None:
    """Add a group of documents in one transaction."""
    prepared = [(one, title, text, _passages(title, text, embedder)) for one, title, text in documents]
    vectors = vectors_for(store, [passage for *_, passages in prepared for passage in passages], embedder)
    if not vectors:
        return
    threshold = min_similarity(embedder) if store.embedder is None else None
    with store.writing():
        store.claim_embedder(embedder.fingerprint, embedder.dim, threshold)
        for one, title, text, passages in prepared:
            if passages:
                raw = f"{title}\n{text}".encode()
                row = DocumentRow(one, one, hashlib.sha256(raw).hexdigest(), len(raw), title)
                store.put_document(row, passages, vectors)


def _passages(title: str, text: str, embedder: Embedder) -> list[Passage]:
    """Cut a document into passages. A document without text is represented by its title."""
    text = text if text.strip() else title
    return cut(Reading(text, (Section(0, len(text), title),)), embedder)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of every line that is not blank."""
    try:
        with file.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except FileNotFoundError:
        raise _missing(file) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error.reason}.", hint="Save it as UTF-8.") from None


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file, each with a unique string as its `_id`."""
    first_lines: dict[str, int] = {}
    for number, line in _lines(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _broken(file, number, f"it is not JSON ({str(error)[:100]})") from None
        if not isinstance(row, dict) or not isinstance(row.get("_id"), str):
            raise _broken(file, number, 'it is not an object with a string as "_id"')
        # JSON may hold lone surrogates, which can be neither counted nor stored.
        row = {key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for key, value in row.items()}
        if (first := first_lines.setdefault(row["_id"], number)) != number:
            raise _broken(file, number, f"its _id {row['_id']!r} repeats that of line {first}")
        yield row


def _missing(file: Path) -> UsageError:
    return UsageError(
        f"There is no {file}.",
        hint="Name a folder with corpus.jsonl, and either queries.jsonl with qrels.tsv (or qrels/test.tsv), or conversations.jsonl.",
    )


def _broken(file: Path, number: int, why: str) -> UsageError:
    return UsageError(f"Line {number} of {file.name} cannot be used: {why}.", hint=f"See {file}.", line=number)
