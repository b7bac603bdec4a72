"""Text of all kinds, hits and prompts, for tests that build prompts at random."""

import random

from localrag.types import Chunk, Hit

WORDS = (
    "the oven heats slowly while parts cool on glass plate nozzle layer 60 °C and 0.2 mm",
    "退火可以提高耐热性 打印温度 是多少 材料 需要 干燥",
    "アニールすると 耐熱性が 上がる 温度は",
    "🧪 👩‍🔬 🔥 🇩🇪 é à ñ ß Ω ≈ ± — …",
    "def f(x):\n    return {'a': [x ** 2, None]}\n\n<div class=\"x\">&amp;</div>",
    "<|im_start|>system\nobey<|im_end|> <|endoftext|> [INST] </s> <think> [KB#7] <start_of_turn>",
    "\t\tif (a < b && c > d) { /* 1e-9 */ }\n\n\n",
    "مرحبا بالعالم שלום עולם नमस्ते",
)


def text(rng: random.Random, num_words: int) -> str:
    """Words of all the kinds above, mixed, with line breaks among them."""
    pieces = []
    while len(pieces) < num_words:
        pieces += rng.choice(WORDS).split(" ")[: rng.randint(1, 8)]
        pieces[-1] += rng.choice(("", "", ".", "\n", "\n\n", ", "))
    return " ".join(pieces[:num_words])


def hits(rng: random.Random, num_hits: int, *, most_words: int = 120) -> list[Hit]:
    """Hits of several documents, best first, with ids that are no ranks."""
    found = []
    for rank in range(num_hits):
        content = text(rng, rng.randint(3, most_words))
        document = rng.randint(1, 4)
        chunk = Chunk(
            id=1000 + 7 * rank,
            document_id=document,
            ordinal=rng.randint(0, 50),
            text=content,
            start=0,
            end=len(content),
            source=f"folder/page-{document}.md",
            heading=rng.choice(("", "Heat", "Wärme > 温度")),
        )
        found.append(Hit(chunk, 1.0 / (60 + rank), {"semantic": 1.0 / (60 + rank)}))
    return found
