"""Choose what embeds questions: a llama.cpp copy of the embedder if its vectors match on several hundred texts, else the original."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from localrag.engine.embed import LlamaEmbedder
from localrag.errors import LocalragError
from localrag.files import locked, make_private_folder, replace_text
from localrag.settings import Settings
from localrag.text.tokens import Embedder

if TYPE_CHECKING:
    import numpy as np


MIN_COSINE = 0.999
"""Least cosine similarity of copy and original. Below it, nearest-neighbor rankings differ. f16 weights reach 0.99999."""
NUM_LONGEST = 8
"""Number of test texts with the embedder's maximum length."""
_SENTENCES = (
    "Hot compost needs air, water and twice as much brown matter as green.",
    "Who signed the contract, and when does it end?",
    "The invoice of 3 March 2024 was paid twice: 1,299.00 EUR and €1.299,00.",
    "I can't, won't and shouldn't've said that…",
    "Die Straße nach Köln führt über die Brücke; Öl und Übel, GROẞ und groß.",
    "L'été dernier, où étiez-vous ? Ça coûte très cher, à l'hôtel.",
    "¿Dónde está el niño que comió la piña? ¡Mañana, mañana!",
    "Țara și oraşul, İstanbul ve ışık, Žluťoučký kůň, Łódź, smørrebrød.",
    "Съешь же ещё этих мягких французских булок да выпей чаю.",
    "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία.",
    "東京特許許可局の許可は、いつ下りますか。カタカナとひらがな。",
    "堆肥需要空气和水，绿色和棕色材料要分层。",
    "모든 사람은 태어날 때부터 자유롭고 동등한 존엄성을 가진다.",
    "كل الناس يولدون أحراراً متساوين في الكرامة والحقوق.",
    "כל בני האדם נולדו בני חורין ושווים בערכם.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng.",
    "def mean(xs: list[float]) -> float:\n    return sum(xs) / len(xs) if xs else 0.0",
    "SELECT id, name FROM users WHERE age >= 18 AND name LIKE 'a%' ORDER BY 2;",
    '{"id": 7, "tags": ["a", "b"], "ok": true, "size": 1.5e-3}',
    "https://example.org/a/b.html?q=1&r=%20#top or mail ann@example.org",
    "/usr/local/lib/python3.11/site-packages/x.py:120: TypeError: 'NoneType' object is not iterable",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "x² + y² = z², ∑ᵢ aᵢ ≤ ∞, ½ · ⅔, ﬁne ﬂow, ① Ⅷ ™ № 10⁻³ °C",
    "🙂 👩‍👩‍👧 🇩🇪 ❤️ and 👍🏽",
    "[CLS] [SEP] [MASK] [UNK] [PAD] <s> </s> <|im_end|> ##ing",
    "zero\u200bwidth, soft\u00adhyphen, no\u00a0break, \ufeffmark, \u202eturned\u202c, nul\u0000, bell\u0007, lost \ufffd",
    "cafe\u0301 = caf\u00e9, a\u0308\u0323, \u1e9b\u0323",
)
_EDGES = (
    "",
    " ",
    "\n\t ",
    ".",
    "a",
    "7",
    "é",
    "漢",
    "🙂",
    "##",
    "[SEP]",
    "\u200b",
    "a" * 99,
    "a" * 100,
    "a" * 101,
    "ab" * 400,
    "-" * 300,
    "漢" * 60,
)


class IdEmbedder(Embedder, Protocol):
    """An embedder that also exposes its token ids."""

    def input_ids(self, text: str) -> list[int]:
        """Return the token ids that are evaluated for a text, special ones included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The similarity of a copy's vectors to the original's over `num_texts` texts. `num_other_ids` texts got different token ids.

    `original_s` and `converted_s` are the seconds to embed all texts.
    """

    num_texts: int
    worst_cosine: float
    median_cosine: float
    num_other_ids: int
    original_s: float
    converted_s: float

    @property
    def is_accepted(self) -> bool:
        return self.num_texts > 0 and self.num_other_ids == 0 and self.worst_cosine >= MIN_COSINE

    @property
    def reason(self) -> str:
        """The reason for the verdict, as a clause."""
        if self.num_other_ids:
            return f"{self.num_other_ids} of {self.num_texts} texts have different tokens"
        return f"the lowest cosine of {self.num_texts} texts is {self.worst_cosine:.6f}; at least {MIN_COSINE} is required"


def accept(converted: IdEmbedder, original: IdEmbedder, texts: Sequence[str]) -> Acceptance:
    """Embed all texts with both embedders and compare. Each text must be within both length limits."""
    import numpy as np  # noqa: PLC0415  # heavy

    originals, original_s = _timed(original, texts)
    others, converted_s = _timed(converted, texts)
    # different dimensions count as a cosine of 0
    cosines = (originals * others).sum(axis=1) if originals.shape == others.shape else np.zeros(len(texts))
    cosines = np.nan_to_num(cosines.astype(np.float64), nan=-1.0)
    return Acceptance(
        num_texts=len(texts),
        worst_cosine=float(cosines.min()) if len(texts) else -1.0,
        median_cosine=float(np.median(cosines)) if len(texts) else -1.0,
        num_other_ids=sum(converted.input_ids(text) != original.input_ids(text) for text in texts),
        original_s=original_s,
        converted_s=converted_s,
    )


def _timed(embedder: Embedder, texts: Sequence[str]) -> tuple[np.ndarray, float]:
    """Embed the texts. Return the vectors and the seconds, without the time to load the embedder."""
    embedder.embed(texts[:1])  # loads what is loaded lazily
    started = time.perf_counter()
    vectors = embedder.embed(texts)
    return vectors, time.perf_counter() - started


def acceptance_texts(count: Callable[[str], int], max_tokens: int) -> list[str]:
    """Return several hundred texts of at most `max_tokens`, always the same: many scripts, code, numbers, edge cases, all lengths."""
    chance = random.Random(5)  # noqa: S311  # not for secrets
    texts = [*_EDGES, *_SENTENCES, *_mixed(chance), *_numbers(chance), *_code()]
    words = " ".join(texts).split(" ")
    texts += [" ".join(chance.choices(words, k=max_tokens)) for _ in range(NUM_LONGEST)]
    return list(dict.fromkeys(_cut(text, count, max_tokens) for text in texts))


def _mixed(chance: random.Random) -> Iterator[str]:
    """Yield groups of one to four sentences, some in capitals, some without spaces between them."""
    for part in range(120):
        joined = (" ", "\n\n", "")[part % 3].join(chance.choices(_SENTENCES, k=1 + part % 4))
        yield joined.upper() if part % 10 == 9 else joined


def _numbers(chance: random.Random) -> Iterator[str]:
    """Yield numbers, and random runs of letters and digits such as keys and encoded files."""
    letters = string.ascii_letters + string.digits + "+/="
    for part in range(50):
        yield " ".join(str(chance.randrange(10 ** (1 + part % 12))) for _ in range(1 + part % 7))
        yield "".join(chance.choices(letters, k=3 + 3 * part))


def _code() -> Iterator[str]:
    """Yield pieces of this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for start in range(0, len(lines) - 4, 4):
        yield "\n".join(lines[start : start + 1 + start % 5])


def _cut(text: str, count: Callable[[str], int], max_tokens: int) -> str:
    """Truncate `text` to at most `max_tokens` by binary search."""
    if count(text) <= max_tokens:
        return text
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(text[:middle]) <= max_tokens else (low, middle)
    return text[:low]


CONVERTER = 1
"""Version of the conversion and its test. Increase it to invalidate saved verdicts."""
_KEY_LENGTH = 32
OF_GGUF = "llama.cpp, since the embedder is a GGUF file."


@runtime_checkable
class FolderEmbedder(IdEmbedder, Protocol):
    """An embedder with its weights, tokenizer and settings in a folder."""

    @property
    def folder(self) -> Path: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision whether to use the copy, and the reason as a clause. The numbers are 0 if no comparison was possible.

    `maker` names the converter and llama.cpp versions. `sha256`, `file_bytes` and `mtime_ns` identify the compared copy. `original_s` and
    `converted_s` are the seconds to embed all `num_texts` texts.
    """

    is_accepted: bool
    reason: str
    maker: str
    worst_cosine: float = 0.0
    median_cosine: float = 0.0
    num_texts: int = 0
    original_s: float = 0.0
    converted_s: float = 0.0
    sha256: str = ""
    file_bytes: int = 0
    mtime_ns: int = 0


def query_embedder(original: Embedder, settings: Settings) -> Embedder:
    """Load and return the accepted copy, with the fingerprint, length limit and token counts of the original; else the original.

    Never converts, and does not import torch. A copy that was changed or no longer loads is ignored.
    """
    if isinstance(original, FolderEmbedder):
        place = CopyPlace(original.fingerprint, settings)
        verdict = place.verdict()
        if verdict is not None and verdict.is_accepted and place.is_whole(verdict):
            with suppress(LocalragError):
                return place.open(original, sha256=verdict.sha256)
    return original


def convert_for_queries(original: Embedder, settings: Settings, *, on_start: Callable[[], None] | None = None) -> Verdict | None:
    """Convert the embedder and compare the copy, unless that was done. Takes up to a minute: `original` embeds several hundred texts.

    `on_start` is called before that work. Returns None if the embedder is a GGUF file already, if another process is converting it, or if
    the home cannot be written; in the last two cases the next call tries again.
    """
    if not isinstance(original, FolderEmbedder):
        return None
    place = CopyPlace(original.fingerprint, settings)
    if (cached_verdict := place.settled()) is not None:
        return cached_verdict
    with suppress(OSError):
        make_private_folder(place.gguf.parent)
        with locked(place.lock):
            if (cached_verdict := place.settled()) is not None:  # by another process meanwhile
                return cached_verdict
            if on_start is not None:
                on_start()
            verdict = _judge(place, original)
            if not verdict.is_accepted:
                place.gguf.unlink(missing_ok=True)
            place.keep(verdict)
            return verdict
    return None


def query_path(original: Embedder, settings: Settings) -> str:
    """Return a sentence that says what embeds questions, and why. No heavy imports."""
    if not isinstance(original, FolderEmbedder):
        return OF_GGUF
    place = CopyPlace(original.fingerprint, settings)
    verdict = place.verdict()
    if verdict is None:
        return "sentence-transformers, since no copy for llama.cpp exists yet: the next `localrag index` makes one."
    if not verdict.is_accepted:
        return f"sentence-transformers, since llama.cpp cannot replace it: {verdict.reason}."
    if not place.is_whole(verdict):
        return "sentence-transformers, since the copy for llama.cpp is missing or was changed: the next `localrag index` makes a new one."
    return f"llama.cpp, from a copy of the embedder: {verdict.reason}."


def accepted_copy(original: Embedder, settings: Settings) -> tuple[Path, Path] | None:
    """Return the paths of the accepted copy and its verdict; None if there is none."""
    if not isinstance(original, FolderEmbedder):
        return None
    place = CopyPlace(original.fingerprint, settings)
    verdict = place.verdict()
    return (place.gguf, place.record) if verdict is not None and verdict.is_accepted and place.is_whole(verdict) else None


class CopyPlace:
    """The paths of the copy of an embedder or a reranker, its verdict and its lock."""

    def __init__(self, fingerprint: str, settings: Settings) -> None:
        stem = settings.embedders_dir / fingerprint[:_KEY_LENGTH]
        self.home = settings.home
        self.gguf, self.record, self.lock = (stem.with_suffix(suffix) for suffix in (".gguf", ".json", ".lock"))

    def verdict(self) -> Verdict | None:
        """Return the saved verdict; None if there is none, it is damaged, or it is from another converter or llama.cpp version."""
        with suppress(OSError, ValueError, TypeError, RecursionError):
            fields = json.loads(self.record.read_text(encoding="utf-8"))
            verdict = Verdict(**fields)
            types = {field.name: type(field.default) for field in dataclasses.fields(Verdict) if field.default is not dataclasses.MISSING}
            types |= {"is_accepted": bool, "reason": str, "maker": str}
            if verdict.maker == maker() and all(isinstance(getattr(verdict, name), kind) for name, kind in types.items()):
                return verdict
        return None

    def settled(self) -> Verdict | None:
        """Return the verdict; None if there is none or its accepted copy is missing or changed."""
        verdict = self.verdict()
        return verdict if verdict is not None and (not verdict.is_accepted or self.is_whole(verdict)) else None

    def keep(self, verdict: Verdict) -> None:
        replace_text(self.record, json.dumps(dataclasses.asdict(verdict), indent=1))

    def is_whole(self, verdict: Verdict) -> bool:
        """Whether the copy is the one that was compared, by size and modification time, or else by sha256."""
        with suppress(OSError):
            status = self.gguf.stat()
            if status.st_size == verdict.file_bytes:
                return status.st_mtime_ns == verdict.mtime_ns or sha256_of(self.gguf) == verdict.sha256
        return False

    def open(self, original: FolderEmbedder, *, sha256: str | None = None) -> LlamaEmbedder:
        """Load the copy in llama.cpp. It uses the original's tokenizer, since llama.cpp's differs in some scripts."""
        return LlamaEmbedder(
            self.gguf,
            home=self.home,
            sha256=sha256,
            fingerprint=original.fingerprint,
            max_tokens=original.max_tokens,
            input_ids=original.input_ids,
        )


def _judge(place: CopyPlace, original: FolderEmbedder) -> Verdict:
    """Convert the embedder and compare the copy. OSError if the copy cannot be written, which is not a verdict on the embedder."""
    from localrag.engine.convert import convert  # noqa: PLC0415  # not needed by queries

    try:
        convert(original.folder, place.gguf)
        sha256 = sha256_of(place.gguf)
        copy = place.open(original, sha256=sha256)
    except LocalragError as error:
        return Verdict(is_accepted=False, reason=error.message.rstrip("."), maker=maker())
    try:
        acceptance = accept(copy, original, acceptance_texts(original.count, original.max_tokens))
    except LocalragError as error:
        return Verdict(is_accepted=False, reason=error.message.rstrip("."), maker=maker())
    finally:
        copy.close()
    status = place.gguf.stat()
    return Verdict(
        is_accepted=acceptance.is_accepted,
        reason=acceptance.reason,
        maker=maker(),
        worst_cosine=acceptance.worst_cosine,
        median_cosine=acceptance.median_cosine,
        num_texts=acceptance.num_texts,
        original_s=acceptance.original_s,
        converted_s=acceptance.converted_s,
        sha256=sha256,
        file_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def maker() -> str:
    """Return the versions of this converter and llama.cpp. The next `localrag index` repeats the test if either has changed."""
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return f"{CONVERTER}, llama-cpp-python {version}"


def sha256_of(path: Path) -> str:
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
