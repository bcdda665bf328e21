"""Sentence embeddings as a method sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]
    """A unit vector, shape (dimensions,)."""

__all__ = ["Embedding", "Encoder"]


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one text.

    Attributes:
        vector: Unit length, float32, shape (dimensions,).
        pieces: Word pieces of the text, special tokens apart.
        read: How many of them the vector stands for; fewer than ``pieces`` where the encoder cut the text.
    """

    vector: Vector
    pieces: int
    read: int


class Encoder(Protocol):
    """A sentence encoder. Building one costs nothing; its model loads at the first use."""

    @property
    def name(self) -> str:
        """The model's name, for ``run.json``."""
        ...

    @property
    def dimensions(self) -> int:
        """Length of every vector."""
        ...

    async def embed(self, texts: Sequence[str], *, whole: bool = True) -> list[Embedding]:
        """Embed texts off the event loop, one call after the other.

        Args:
            texts: Any strings, the empty one included.
            whole: A text longer than the encoder's window becomes the mean over its windows. False cuts it
                at the first window, as the encoder does by itself.

        Raises:
            ModelMissing: The encoder's files are absent or damaged.
        """
        ...
