"""The Formula workload: loading and grading."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from bench.errors import UsageError, did_you_mean
from bench.samples import Sample, last_user_text
from bench.workload import DatasetFacts, Grade, Selection, Task
from data.duplicates import repeats, shared
from data.formula import builtin
from data.formula.rows import Row, formula_name, is_percent_formula, read_rows
from data.formula.task import FormulaTask
from data.numbers import answer_quantity, as_decimal, candidates, close, final_text, same_rounded
from data.selection import check_options, choose
from data.sources import fetch, local_file, source

__all__ = ["Formula"]

_TITLE = "Formula (FinLoRA Financial Math)"
_DATASET = "formula"
_SPLITS = ("test", "train")
_DECIMALS = 2
"""The request asks for 2 decimals; upstream golds are printed floats, which drop trailing zeros."""


class Formula:
    """Questions on named financial formulas, each with one number as its gold.

    ``reference`` is the gold as text, in the unit that the formula yields. ``meta["percent"]`` says that the
    formula multiplies by 100. Scores:

    - ``strict`` (primary): ``|e - a| <= 1e-4 * max(1, |e|, |a|)``;
    - ``rounded``: equal at the gold's number of decimals, but at least 2;
    - ``corrected``: as strict, against the right value where the gold is known to be wrong upstream.

    A written percent sign is understood on both sides: "40%" is 40 for a formula that multiplies by 100, and
    0.4 for one that does not. A plain 0.4 is no answer to the former: the request itself asks for the × 100.
    """

    name: str = "formula"
    version: str = "1"
    primary_score: str = "strict"
    task: Task

    def __init__(self) -> None:
        self.task = FormulaTask()

    def load(self, selection: Selection) -> tuple[list[Sample], DatasetFacts]:
        """Return the selected samples and facts about their source.

        Options: ``order`` (``shuffled`` or ``file``) for files; ``repeats`` (the share of requests that copy
        an earlier one, 0 by default) for ``builtin``.

        Raises:
            UsageError: Unknown split, order or option, or more asked for than there is.
            DataMissing: The source is absent, empty, of another schema or hash, or lacks golds.
        """
        if selection.split not in _SPLITS:
            raise UsageError(
                f'{_TITLE} has no split "{selection.split}".{did_you_mean(selection.split, _SPLITS)}'
            )
        if selection.source == "builtin":
            return builtin.load(selection)
        check_options(selection, ("order",), _TITLE)
        order = selection.options.get("order", "shuffled")
        if order not in ("shuffled", "file"):
            raise UsageError(
                f'{_TITLE}: order = "{order}" is unknown.{did_you_mean(str(order), ("shuffled", "file"))}'
            )
        if selection.source == "hub":
            pin = source(_DATASET, selection.split)
            path, split, origin = fetch(pin), selection.split, pin.url
        else:
            name = f"formula_{selection.split}.jsonl"
            path = local_file(selection.path or "", title=_TITLE, file_name=name)
            split, origin = _split_of(path, selection.split), path.name
        rows, sha256 = read_rows(path, _TITLE)
        samples, notes = _samples(rows, split, _other_rows(path, split))
        chosen = choose(_by_group(samples), selection, _TITLE)
        if order == "file":
            chosen.sort(key=lambda sample: int(sample.meta["row"]))
        repeated = sum("duplicate_of_earlier" in sample.meta for sample in samples)
        return chosen, DatasetFacts(selection.source, origin, sha256, len(rows), repeated, notes)

    def grade(self, sample: Sample, reply: str) -> Grade:
        """Grade the number in a reply; reasoning before ``</think>`` is not read."""
        text = str(sample.reference)
        gold = as_decimal(text)
        if gold is None:
            raise ValueError(f"sample {sample.id} has a reference that is not a number: {text!r}")
        percent = sample.meta.get("percent")
        if percent is None:
            percent = is_percent_formula(last_user_text(sample.messages))
        quantity = answer_quantity(final_text(reply))
        if quantity is None:
            zero = {"strict": 0.0, "rounded": 0.0, "corrected": 0.0}
            return Grade(zero, None, False, f"no number in the reply; gold {text}")
        actual = candidates(quantity, "percent" if percent else "", plain_fraction=False)[0]
        strict = close(float(gold), float(actual))
        decimals = max(_DECIMALS, -int(gold.as_tuple().exponent))
        rounded = same_rounded(gold, actual, decimals)
        erratum = sample.meta.get("erratum")
        corrected = strict if erratum is None else close(float(erratum), float(actual))
        scores = {"strict": float(strict), "rounded": float(rounded), "corrected": float(corrected)}
        verdict = "equal" if strict else "equal when rounded" if rounded else "different"
        known = "" if erratum is None else f" (known to be wrong; {erratum} is right)"
        return Grade(scores, float(actual), True, f"read {float(actual)!r}; gold {text}{known}: {verdict}")


def _split_of(path: Path, fallback: str) -> str:
    named = [split for split in _SPLITS if split in path.stem.lower()]
    return named[0] if len(named) == 1 else fallback


def _other_rows(path: Path, split: str) -> tuple[str, Sequence[Row]] | None:
    """Return the other split's file name and rows, where it lies beside this one or in the cache."""
    other = "train" if split == "test" else "test"
    pin = source(_DATASET, other)
    beside = path.with_name(path.name.replace(split, other))
    for candidate in (beside, path.parent.parent / pin.sha256 / pin.file):
        if candidate != path and candidate.is_file():
            return candidate.name, read_rows(candidate, _TITLE)[0]
    return None


def _samples(
    rows: Sequence[Row], split: str, other: tuple[str, Sequence[Row]] | None
) -> tuple[list[Sample], tuple[str, ...]]:
    contexts = [row.context for row in rows]
    repeated = set(repeats(contexts))
    elsewhere = set(shared(contexts, [row.context for row in other[1]])) if other else set()
    errata = _errata()
    samples = []
    for position, row in enumerate(rows):
        name = formula_name(row.context)
        meta: dict[str, object] = {
            "row": row.index,
            "split": split,
            "percent": is_percent_formula(row.context),
        }
        if position in repeated:
            meta["duplicate_of_earlier"] = True
        if position in elsewhere:
            meta["duplicate_in_other_split"] = True
        erratum = errata.get(hashlib.sha256(row.context.encode()).hexdigest())
        if erratum is not None:
            meta["erratum"] = erratum
        message = {"role": "user", "content": row.context}
        samples.append(Sample(f"finlora-{split}-{row.index:06d}", (message,), row.gold, name, meta))
    wrong = sum("erratum" in sample.meta for sample in samples)
    notes = []
    if other:
        notes.append(f"{len(elsewhere)} rows also occur in {other[0]}")
    if wrong:
        notes.append(
            f"{wrong} golds are known to be wrong (the list is partial); score `corrected` allows for them"
        )
    unnamed = sum(sample.group is None for sample in samples)
    if unnamed:
        notes.append(f"{unnamed} rows name no formula")
    return samples, tuple(notes)


def _by_group(samples: Sequence[Sample]) -> Mapping[str, list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group or "", []).append(sample)
    return groups


@cache
def _errata() -> dict[str, float]:
    text = files("data.formula").joinpath("errata.toml").read_text(encoding="utf-8")
    return {entry["context_sha256"]: float(entry["value"]) for entry in tomllib.loads(text)["errata"]}
