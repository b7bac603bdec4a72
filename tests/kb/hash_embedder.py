"""A small, real embedder for tests: words hashed into a unit vector, so that texts that share words are near each other."""

import hashlib
import re

import numpy as np

from localrag.text.tokens import check_length

_TOKEN = re.compile(r"\w{1,4}|[^\w\s]")


class HashEmbedder:
    """Four letters of a word are a token, and so is each other sign. `num_embedded` counts the texts that were embedded."""

    def __init__(self, *, dim: int = 256, max_tokens: int = 64, fingerprint: str = "hash-1") -> None:
        self.dim = dim
        self.max_tokens = max_tokens
        self.fingerprint = fingerprint
        self.num_embedded = 0

    def count(self, text: str) -> int:
        return len(_TOKEN.findall(text))

    def embed(self, texts):
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            check_length(self.count(text), self.max_tokens)
            for word in re.findall(r"\w+", text.lower()):
                digest = hashlib.sha256(word.encode("utf-8", "replace")).digest()
                row[int.from_bytes(digest[:4], "little") % self.dim] += 1 if digest[4] & 1 else -1
            if not row.any():
                row[0] = 1
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        self.num_embedded += len(texts)
        return vectors
