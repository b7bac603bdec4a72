"""Embed passages, and calibrate the cosine similarity at which an embedder's vectors count as relevant.

A passage whose text is stored already, in any document, is not embedded again.

Cosine similarities of different embedders are not comparable: unrelated passages are near 0 for one and near 0.7 for another. So each
embedder is measured once on questions with and without their answers, before its first vectors are stored, and the threshold lies between
the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from localrag.kb.chunking import Passage
from localrag.kb.protocols import AnyStore
from localrag.tokens import Embedder

EMBED_AT_ONCE = 128
"""Chunks to embed in one call, from several documents if they are short: one by one, those took 1.7 times the CPU time. Chunks that wait
are lost if the process is killed."""

_MAX_AT_ONCE = 512  # of a long document, so that progress is reported

SHARE = 0.47
"""Position of the threshold between the similarity of unrelated passages (0) and that of answers (1). For all-MiniLM-L6-v2, with 0.02 and
0.62 on these pairs, it gives the 0.30 that was measured on other questions (see retrieve.MIN_SIMILARITY)."""
MIN_GAP = 0.05
"""Least difference of the two in cosine similarity; an embedder with less does not tell them apart."""

PAIRS = (
    ("How long do eggs have to boil to be hard?", "For a firm yolk, leave the eggs in boiling water for ten minutes, then cool them."),
    ("What is the capital of Kenya?", "Nairobi, founded in 1899 as a railway depot, is Kenya's capital and its largest city."),
    ("Why do leaves turn red in autumn?", "When chlorophyll breaks down in the fall, red anthocyanins become visible in the foliage."),
    (
        "How do I reset the router's password?",
        "Hold the small button on the back of the router for ten seconds; the factory login works again.",
    ),
    ("When was the printing press invented?", "Johannes Gutenberg built his press with movable type in Mainz around 1440."),
    ("Which vitamin prevents scurvy?", "Sailors without fresh fruit fell ill with scurvy, for they lacked vitamin C."),
    ("What notice period applies to the lease?", "The tenant may terminate the rental agreement by giving three months' written notice."),
    ("How fast does sound travel in air?", "At 20 degrees Celsius sound moves through air at about 343 metres per second."),
    ("What should I do about a flat bicycle tyre?", "Take the wheel off, find the hole in the inner tube, and glue a patch on it."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci worked on the portrait of Lisa Gherardini for many years."),
    (
        "How is the interest on savings taxed?",
        "Earnings on bank deposits above the allowance are subject to a withholding tax of 25 percent.",
    ),
    ("How do I undo the last commit in git?", "git reset --soft HEAD~1 takes back the most recent commit and keeps its changes staged."),
    ("What do bees make honey from?", "Worker bees collect the nectar of flowers and thicken it into honey in the comb."),
    ("At what temperature does iron melt?", "Iron becomes liquid at 1,538 degrees Celsius; cast iron at considerably less."),
    (
        "How often should a dog be vaccinated?",
        "After the puppy's first shots, most vaccines for dogs are refreshed every one to three years.",
    ),
    (
        "Why is the night sky dark?",
        "The universe is of finite age, so the light of the most distant stars has not reached us; hence darkness.",
    ),
    ("What are the symptoms of the flu?", "Influenza begins suddenly, with fever, aching limbs, headache and a dry cough."),
    ("How many players does a football team have?", "In association football each side fields eleven players, one of whom keeps the goal."),
    (
        "How do I prune tomato plants?",
        "Break out the side shoots of the tomatoes every week so that the plant's strength goes into its fruit.",
    ),
    (
        "What caused the fall of the Berlin Wall?",
        "Mass protests and a botched press conference in November 1989 opened the border in Berlin.",
    ),
    ("How does a heat pump work?", "It evaporates a refrigerant with heat from outside, compresses it, and gives the heat off indoors."),
    ("Which key is Beethoven's fifth symphony in?", "The Fifth by Ludwig van Beethoven stands in C minor and ends in a radiant C major."),
    ("How can I get a wine stain out of a carpet?", "Dab the red wine up at once, then put salt or soda water on the rug; never rub it."),
    (
        "When does the warranty on the washing machine end?",
        "The manufacturer guarantees this washer for 24 months from the date of purchase.",
    ),
)
"""24 questions on different topics, each with a passage that answers it."""


def vectors_for(
    store: AnyStore, passages: Iterable[Passage], embedder: Embedder, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> dict[bytes, bytes]:
    """sha256 → vector as float32 bytes, for each passage. `progress(done, total)` is called as chunks are embedded."""
    texts = {passage.sha256: passage.embedded for passage in passages}
    vectors = store.vectors_of(list(texts))
    missing = [sha256 for sha256 in texts if sha256 not in vectors]
    for at in range(0, len(missing), _MAX_AT_ONCE):
        batch = missing[at : at + _MAX_AT_ONCE]
        embedded = embedder.embed([texts[sha256] for sha256 in batch])
        vectors.update((sha256, vector.astype("<f4").tobytes()) for sha256, vector in zip(batch, embedded, strict=True))
        progress(at + len(batch), len(missing))
    return vectors


def min_similarity(embedder: Embedder) -> float | None:
    """The least cosine similarity of a relevant passage; None for an embedder that does not tell the pairs apart."""
    import numpy as np  # noqa: PLC0415  # heavy

    if any(embedder.count(text) > embedder.max_tokens for pair in PAIRS for text in pair):
        return None
    questions, passages = (embedder.embed(list(texts)) for texts in zip(*PAIRS, strict=True))
    similarities = questions @ passages.T
    answers = float(np.median(similarities.diagonal()))
    unrelated = float(np.median(similarities[~np.eye(len(PAIRS), dtype=bool)]))
    if not answers - unrelated >= MIN_GAP:
        return None
    return max(0.0, unrelated + SHARE * (answers - unrelated))
