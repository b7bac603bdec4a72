"""Measure how well the support score tells sentences from the passages that carry them, and what the listed claims are worth.

    python -m benchmarks.support answers OUT.jsonl       # written by `localrag eval --qa … --out OUT.jsonl`
    python -m benchmarks.support references FOLDER       # conversations.jsonl and corpus.jsonl of MTRAG

`answers` compares the scores of right and wrong answers, and prints the claims, to be checked by hand. `references` takes answers that
people wrote. Each is compared with its own passages and with those of another question of the same collection. Then a number in it is
changed, a "not" inserted, or one removed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import shared
from localrag.citation import cite
from localrag.session import open_embedder
from localrag.settings import Settings
from localrag.support import Support, assess
from localrag.text.tokens import Embedder
from localrag.types import Chunk, Citation, Hit

_SENT = re.compile(r"\[[^\]]*\] (?P<text>.*) \((?P<place>[^()]*(?:\([^()]*\)[^()]*)*)\)", re.DOTALL)
"""A passage as a prompt shows it."""
_NUMBER = re.compile(r"(?<![\w.,])\d{1,6}(?![\w,]|\.\d)")
_NOT = re.compile(r"\b(?:not|never) |n['’]t\b")
_VERB = re.compile(r"\b(?:is|are|can|was|were|will|does|do|has|have|should|must)\b(?! not)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answers", "references"))
    parser.add_argument("path", type=Path, help="OUT.jsonl, or the folder of MTRAG")
    parser.add_argument("--words", action="store_true", help="by words alone, without the embedder")
    parser.add_argument("--every", type=int, default=1, help="take every Nth answer (default 1)")
    given = parser.parse_args()
    embedder = None if given.words else open_embedder(Settings.from_env(), for_queries=True)
    (answers if given.what == "answers" else references)(given.path, embedder, given.every)


def answers(path: Path, embedder: Embedder | None, every: int) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][::every]
    scores: dict[str, dict[bool, list[float]]] = {}
    num_cited = num_clean = 0
    for row in rows:
        hits, text = list(_hits_of(row)), row["text"]
        is_cut = row["finish_reason"] != "stop"
        support = assess(text, hits, cite(text, hits, is_cut=is_cut), is_cut=is_cut, embedder=embedder)
        if support.mean_score is None:
            continue
        num_cited += 1
        num_clean += not support.unsupported_claims
        groups = ["all that cite"] + (["of those, citing the page that holds the answer"] if row["grade"]["cites_holder"] else [])
        for group in groups:
            scores.setdefault(group, {True: [], False: []})[row["grade"]["is_right"]].append(support.mean_score)
        for claim in support.unsupported_claims:
            around = text[max(0, claim.start - 60) : claim.end + 30].replace("\n", " ")
            print(f"{row['id']} {claim.kind} {claim.text!r}: {around}")
    table = [
        {"answers": name, "right": len(each[True]), "wrong": len(each[False]), "auc": auc(each[True], each[False])}
        for name, each in scores.items()
    ]
    shared.report_table("support_answers", table, cited=num_cited, without_claims=num_clean, words_alone=embedder is None)


def _hits_of(row: dict[str, Any]) -> Iterator[Hit]:
    for passage in row["passages"]:
        sent = _SENT.fullmatch(passage["text"])
        assert sent is not None, passage["text"]
        text, number = sent["text"], int(passage["label"].rpartition("#")[2].rpartition("/")[2])
        yield Hit(Chunk(number, 1, 0, text, 0, len(text), passage["source"], sent["place"]), 1.0)


def references(folder: Path, embedder: Embedder | None, every: int) -> None:
    chance = random.Random(0)
    corpus = {row["_id"]: row for row in map(json.loads, (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines())}
    tasks = [json.loads(line) for line in (folder / "conversations.jsonl").read_text(encoding="utf-8").splitlines()]
    tasks = [task for task in tasks if task["relevant"] and task["reference"] and task["answerability"] == "answerable"]
    own: list[Support] = []
    others: list[Support] = []
    counts: Counter[str] = Counter()
    for task in tasks[::every]:
        alike = [each for each in tasks if each["collection"] == task["collection"] and not {*each["relevant"]} & {*task["relevant"]}]
        text, passages = task["reference"], [corpus[each] for each in task["relevant"]]
        support = _assessed(text, passages, embedder)
        own.append(support)
        others.append(_assessed(text, [corpus[each] for each in chance.choice(alike)["relevant"]], embedder))
        changes = {"number changed": _with_another_number(text, chance), "not inserted": _negated(text), "not removed": _affirmed(text)}
        for name, changed in changes.items():
            if changed is not None:
                counts[name] += 1
                now = _assessed(changed, passages, embedder)
                counts[f"{name}, listed"] += len(now.unsupported_claims) > len(support.unsupported_claims)
    row = {
        "answers": len(own),
        "auc per sentence": auc(_scores(own), _scores(others)),
        "mean own": _mean(_scores(own)),
        "mean other": _mean(_scores(others)),
        "no claims, own": sum(not each.unsupported_claims for each in own),
        "no claims, other": sum(not each.unsupported_claims for each in others),
        **counts,
    }
    shared.report_table("support_references", [row], words_alone=embedder is None)


def _assessed(text: str, passages: Sequence[dict[str, Any]], embedder: Embedder | None) -> Support:
    """The support of a text of which each sentence cites all passages."""
    hits = [
        Hit(Chunk(number, 1, 0, each["text"], 0, len(each["text"]), each["_id"], each["title"] or ""), 1.0)
        for number, each in enumerate(passages, 1)
    ]
    cited, spans = "", []
    for sentence in re.split(r"(?<=[^\d\s][.!?])\s+", text.strip()):
        spans.append((len(cited) + len(sentence) + 1, len(cited) + len(sentence) + 4))
        cited += f"{sentence} [*] "
    return assess(cited, hits, [Citation(hit.label, True, tuple(spans)) for hit in hits], embedder=embedder)


def _with_another_number(text: str, chance: random.Random) -> str | None:
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    chosen = chance.choice(numbers)
    return f"{text[: chosen.start()]}{int(chosen[0]) + chance.choice((1, 2, 3, 5, 7, 10))}{text[chosen.end() :]}"


def _negated(text: str) -> str | None:
    verb = _VERB.search(text)
    return None if verb is None else f"{text[: verb.end()]} not{text[verb.end() :]}"


def _affirmed(text: str) -> str | None:
    affirmed = _NOT.sub("", text, count=1)
    return None if affirmed == text else affirmed


def _scores(supports: Iterable[Support]) -> list[float]:
    return [each.score for support in supports for each in support.sentences if each.score is not None]


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 3) if values else 0.0


def auc(ones: Sequence[float], others: Sequence[float]) -> float:
    """The probability that one of the first is greater than one of the others; ties count half."""
    greater = sum((one > other) + 0.5 * (one == other) for one in ones for other in others)
    return round(greater / max(1, len(ones) * len(others)), 3)


if __name__ == "__main__":
    main()
