"""Finding requests that repeat, within a split and across splits."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

__all__ = ["normal_form", "repeats", "shared"]

_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[-+*/%=<>^_$€£¥]")


def normal_form(text: str) -> str:
    """Fold case, white space and punctuation; digits, decimal points and operators stay what they are."""
    return " ".join(_TOKEN.findall(unicodedata.normalize("NFKC", text).casefold()))


def repeats(texts: Sequence[str]) -> list[int]:
    """Return the index of every text whose normal form already occurred."""
    seen: set[str] = set()
    found = []
    for index, text in enumerate(texts):
        form = normal_form(text)
        if form in seen:
            found.append(index)
        seen.add(form)
    return found


def shared(texts: Sequence[str], others: Iterable[str]) -> list[int]:
    """Return the index of every text whose normal form occurs among the others."""
    known = {normal_form(text) for text in others}
    return [index for index, text in enumerate(texts) if normal_form(text) in known]
