"""Routing by embedding: groups with running-mean centroids, searched exactly."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from bench.encoder import Vector

__all__ = ["CentroidIndex", "pack_vector", "unpack_vector"]

_TINY = 1e-12


def pack_vector(vector: Vector) -> str:
    """Return a vector's float32 bytes in base64, for a JSON event; exact."""
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode("ascii")


def unpack_vector(text: str) -> Vector:
    """Return what :func:`pack_vector` was given.

    Raises:
        ValueError: ``text`` is no base64 of whole float32 numbers.
    """
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4").astype(np.float32)


class CentroidIndex:
    """Rows of running means, compared by cosine in one matrix product: exact, up to 100k rows and more.

    Rows are numbered from 0 in the order in which they were added, and never removed.
    """

    def __init__(self, dimensions: int) -> None:
        self._sums = np.zeros((16, dimensions), dtype=np.float32)
        self._units = np.zeros((16, dimensions), dtype=np.float32)
        self._counts: list[int] = []

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, vector: Vector) -> int:
        """Add a row with ``vector`` (shape (dimensions,)) as its only member, and return its number."""
        row = len(self._counts)
        if row == len(self._sums):
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums)])
            self._units = np.concatenate([self._units, np.zeros_like(self._units)])
        self._counts.append(0)
        self.update(row, vector)
        return row

    def update(self, row: int, vector: Vector) -> None:
        """Add a member to a row: its centroid is the mean over all its members."""
        self._counts[row] += 1
        self._sums[row] += vector
        self._units[row] = self._sums[row] / max(float(np.linalg.norm(self._sums[row])), _TINY)

    def count(self, row: int) -> int:
        """Return how many members a row has."""
        return self._counts[row]

    def total(self, row: int) -> Vector:
        """Return the sum of a row's members, shape (dimensions,); exact, unlike their mean."""
        total: Vector = self._sums[row].copy()
        return total

    def restore(self, total: Vector, count: int) -> int:
        """Add a row with the sum and number of members that an earlier one had, and return its number."""
        row = self.add(total)
        self._counts[row] = count
        return row

    def scores(self, vector: Vector) -> Vector:
        """Return the cosine of ``vector`` (unit length) with every row, shape (len(self),)."""
        scores: Vector = self._units[: len(self._counts)] @ vector
        return scores

    def nearest(self, vector: Vector, rows: Sequence[int] | None = None) -> tuple[int, float] | None:
        """Return the row of the highest cosine (the first of equals) and that cosine; None without rows.

        Args:
            vector: Unit length, shape (dimensions,).
            rows: The rows to look at; None means all.
        """
        if not self._counts or rows == []:
            return None
        scores = self.scores(vector)
        row = int(scores.argmax()) if rows is None else rows[int(scores[rows].argmax())]
        return row, min(1.0, max(-1.0, float(scores[row])))
