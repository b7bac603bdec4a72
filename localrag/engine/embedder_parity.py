"""Whether a copy of an embedder gives the original's vectors: tried on every one of several hundred texts, not argued."""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from localrag.tokens import Embedder

if TYPE_CHECKING:
    import numpy as np

MIN_COSINE = 0.999
"""Rankings of neighbours differ below this; f16 weights reach 0.99999."""
NUM_LONGEST = 8
"""Texts as long as the embedder takes."""
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
    """An embedder that also shows what it evaluates."""

    def input_ids(self, text: str) -> list[int]:
        """The ids that are evaluated for a text, special ones among them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How near a copy's vectors are to the original's over `num_texts`; `num_other_ids` of them it splits into other tokens.

    `original_s` and `converted_s` are what embedding all of them took.
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
        """One clause that says why."""
        if self.num_other_ids:
            return f"{self.num_other_ids} of {self.num_texts} texts are split into other tokens"
        return f"the worst cosine of {self.num_texts} texts is {self.worst_cosine:.6f}, and {MIN_COSINE} is wanted"


def accept(converted: IdEmbedder, original: IdEmbedder, texts: Sequence[str]) -> Acceptance:
    """Embed every text with both. No text may be longer than either takes."""
    import numpy as np  # noqa: PLC0415  # heavy

    originals, original_s = _timed(original, texts)
    others, converted_s = _timed(converted, texts)
    # a dimension that differs makes every cosine 0
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
    """The vectors, and the seconds that they took."""
    embedder.embed(texts[:1])  # what is loaded when the first text comes
    started = time.perf_counter()
    vectors = embedder.embed(texts)
    return vectors, time.perf_counter() - started


def acceptance_texts(count: Callable[[str], int], max_tokens: int) -> list[str]:
    """Several hundred texts of at most `max_tokens` by `count`, the same ones every time: scripts, code, numbers, edges, all lengths."""
    chance = random.Random(5)  # noqa: S311  # no secret
    texts = [*_EDGES, *_SENTENCES, *_mixed(chance), *_numbers(chance), *_code()]
    words = " ".join(texts).split(" ")
    texts += [" ".join(chance.choices(words, k=max_tokens)) for _ in range(NUM_LONGEST)]
    return list(dict.fromkeys(_cut(text, count, max_tokens) for text in texts))


def _mixed(chance: random.Random) -> Iterator[str]:
    """One to four sentences, some in capitals, some without spaces between."""
    for part in range(120):
        joined = (" ", "\n\n", "")[part % 3].join(chance.choices(_SENTENCES, k=1 + part % 4))
        yield joined.upper() if part % 10 == 9 else joined


def _numbers(chance: random.Random) -> Iterator[str]:
    """Numbers, and runs of letters that are no words, as keys and encoded files are."""
    letters = string.ascii_letters + string.digits + "+/="
    for part in range(50):
        yield " ".join(str(chance.randrange(10 ** (1 + part % 12))) for _ in range(1 + part % 7))
        yield "".join(chance.choices(letters, k=3 + 3 * part))


def _code() -> Iterator[str]:
    """Pieces of this very program."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for start in range(0, len(lines) - 4, 4):
        yield "\n".join(lines[start : start + 1 + start % 5])


def _cut(text: str, count: Callable[[str], int], max_tokens: int) -> str:
    """The longest beginning of `text` that a search by halves finds to be short enough."""
    if count(text) <= max_tokens:
        return text
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(text[:middle]) <= max_tokens else (low, middle)
    return text[:low]
