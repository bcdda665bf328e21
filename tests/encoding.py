"""An encoder for tests: words and letter triples hashed into a unit vector. Nothing is loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from bench.encoder import Embedding


class HashEncoder:
    """Texts that share words and letters are near each other; equal texts are equal."""

    name = "hash"
    dimensions = 64
    window = 256

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def embed(self, texts: Sequence[str], *, whole: bool = True) -> list[Embedding]:
        self.calls.append(list(texts))
        return [self._embed(text, whole) for text in texts]

    def _embed(self, text: str, whole: bool) -> Embedding:
        words = re.findall(r"\w+", text.lower())
        read = words if whole else words[: self.window]
        vector = np.full(self.dimensions, 1e-3, dtype=np.float32)
        for word in read:
            for piece in [word, *(word[i : i + 3] for i in range(len(word) - 2))]:
                at = int.from_bytes(hashlib.md5(piece.encode()).digest()[:4], "big")
                vector[at % self.dimensions] += 1
        return Embedding(vector / np.linalg.norm(vector), len(words), len(read))
