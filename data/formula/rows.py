"""Reading FinLoRA rows: ``{"context": …, "target": …}`` as JSON lines, concatenated objects or an array."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import DataMissing
from data.numbers import as_decimal

__all__ = ["Row", "formula_name", "is_percent_formula", "read_rows"]

_NAME = re.compile(r"(?:Use|Apply)(?: the)? formula (.{1,200}?) to (?:answer )?the question", re.DOTALL)
_EXPRESSION = re.compile(r"Formula:(.{1,600}?)(?:Explanation:|Symbols:|Question:)", re.DOTALL)
_TIMES_100 = re.compile(r"[×x*·]\s?100(?![0-9.])")
_SPACE = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a FinLoRA file.

    Attributes:
        index: Its position in the file, from 0.
        context: The whole request.
        gold: The gold as it is written.
    """

    index: int
    context: str
    gold: str


def formula_name(context: str) -> str | None:
    """Return the formula that a request names, or None."""
    match = _NAME.search(context)
    return match[1].strip() if match else None


def is_percent_formula(context: str) -> bool:
    """Tell whether the request's formula multiplies by 100, so that its gold is in percent units."""
    match = _EXPRESSION.search(context)
    return match is not None and _TIMES_100.search(match[1]) is not None


def read_rows(path: Path, title: str) -> tuple[list[Row], str]:
    """Return a file's rows and its sha256.

    Raises:
        DataMissing: Unreadable, no rows, another schema, or rows without a numeric gold.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataMissing(
            f"{title}: found {path}, which can't be read ({error}); wanted UTF-8 JSON. {_CURE}"
        ) from error
    rows: list[Row] = []
    bad: list[tuple[int, Any]] = []
    total = 0
    for index, record in enumerate(_records(text, path, title)):
        total += 1
        if (
            not isinstance(record, dict)
            or not isinstance(record.get("context"), str)
            or "target" not in record
        ):
            keys = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise DataMissing(
                f'{title}: found {keys} in row {index + 1} of {path}; wanted "context" (text) and "target" '
                f"(a number). {_CURE}"
            )
        gold = _gold(record["target"])
        if gold is None or not record["context"].strip():
            bad.append((index + 1, record["target"]))
        else:
            rows.append(Row(index, record["context"], gold))
    if bad:
        first, value = bad[0]
        raise DataMissing(
            f"{title}: found {len(bad)} of {total} rows of {path} without a gold (the first is row {first}: "
            f'"target" is {json.dumps(value)[:60]}); wanted a number in each. {_CURE}'
        )
    if not rows:
        raise DataMissing(f"{title}: found 0 rows in {path}; wanted at least 1. {_CURE}")
    return rows, hashlib.sha256(content).hexdigest()


_CURE = "Mend the file, or take the pinned one with source = hub."


def _gold(target: Any) -> str | None:
    if isinstance(target, bool) or not isinstance(target, (str, int, float)):
        return None
    text = str(target).strip()
    value = as_decimal(text)
    return text if value is not None and math.isfinite(float(value)) else None


def _records(text: str, path: Path, title: str) -> Iterator[Any]:
    """Yield the JSON values of a text: one array's items, or values with nothing but white space between."""
    decoder = json.JSONDecoder()
    position = _end_of_space(text, 0)
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, RecursionError) as error:
            line = text.count("\n", 0, position) + 1
            raise DataMissing(
                f"{title}: found no valid JSON in {path}, in the value that starts on line {line} ({error}); "
                f"wanted one object for each row. {_CURE}"
            ) from error
        if isinstance(value, list):
            yield from value
        else:
            yield value
        position = _end_of_space(text, position)


def _end_of_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position
