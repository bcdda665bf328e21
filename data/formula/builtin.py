"""The built-in source: seeded questions on the catalogue's formulas, with golds from code."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace

from bench.errors import UsageError
from bench.samples import Sample
from bench.workload import DatasetFacts, Selection
from data.formula.catalogue import FormulaSpec, catalogue
from data.formula.questions import write_question
from data.formula.values import draw_inputs
from data.selection import Stream, check_options, choose_groups

__all__ = ["DEFAULT_SIZE", "GENERATOR", "MOST_SAMPLES", "load"]

GENERATOR = "formula-builtin-1"
"""Changes whenever a seed would give other samples."""
DEFAULT_SIZE = 200
MOST_SAMPLES = 2_000_000

_TITLE = "Formula (builtin)"
_FRAME = (
    "Apply the formula {name} to the question below. Reply with one number, rounded to 2 decimal places, and "
    'nothing else. Formula: {expression}. Symbols: {symbols}. Question: "{question}" Answer:'
)


def load(selection: Selection) -> tuple[list[Sample], DatasetFacts]:
    """Generate the selected samples; every request is unique unless the option ``repeats`` asks otherwise.

    Sample ``k`` of a formula depends on seed, split and ``k`` alone, not on how many are asked for.

    Raises:
        UsageError: A size below 1 or above :data:`MOST_SAMPLES`, unknown options, too many groups.
    """
    check_options(selection, ("repeats",), _TITLE)
    share = selection.options.get("repeats", 0.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise UsageError(f"{_TITLE}: repeats = {share!r} is not a share; it must be at least 0 and below 1.")
    wanted = DEFAULT_SIZE if selection.n is None else selection.n
    if wanted > MOST_SAMPLES:
        raise UsageError(f"{_TITLE}: n = {wanted} is too many; at most {MOST_SAMPLES} can be generated.")
    by_name = {spec.name: spec for spec in catalogue()}
    names = choose_groups(list(by_name), selection, _TITLE)
    turns = Stream("turns", selection.seed, selection.split).shuffled(names)
    makers = [_unique(by_name[name], selection) for name in turns]
    samples = [next(makers[position % len(makers)]) for position in range(wanted)]
    samples = Stream("order", selection.seed, selection.split).shuffled(samples)
    samples, repeated = _with_repeats(samples, float(share), selection)
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.id, sample.messages, sample.reference]).encode())
    facts = DatasetFacts("builtin", GENERATOR, digest.hexdigest(), wanted, duplicates=repeated)
    return samples, facts


def _unique(spec: FormulaSpec, selection: Selection) -> Iterator[Sample]:
    """Yield samples of one formula; a request that occurred before is drawn again."""
    seen: set[bytes] = set()
    slug = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    draw = number = 0
    while True:
        stream = Stream(GENERATOR, selection.seed, selection.split, spec.name, draw)
        sample = _sample(spec, f"builtin-{selection.split}-{selection.seed}-{slug}-{number:06d}", stream)
        draw += 1
        key = hashlib.sha256(str(sample.messages[0]["content"]).encode()).digest()[:12]
        if key not in seen:
            seen.add(key)
            number += 1
            yield sample


def _sample(spec: FormulaSpec, identifier: str, stream: Stream) -> Sample:
    inputs, gold = draw_inputs(spec, stream)
    question = write_question(spec, inputs, stream)
    content = _FRAME.format(
        name=spec.name,
        expression=spec.expression,
        symbols=", ".join(f"{variable.symbol}: {variable.meaning}" for variable in spec.variables),
        question=question.text,
    )
    meta = {
        "inputs": inputs,
        "written": dict(question.written),
        "layout": question.layout,
        "percent": spec.percent,
    }
    return Sample(identifier, ({"role": "user", "content": content},), gold, spec.name, meta)


def _with_repeats(samples: list[Sample], share: float, selection: Selection) -> tuple[list[Sample], int]:
    """Turn a share of the samples into verbatim copies of earlier ones, under their own ids."""
    stream = Stream("repeats", selection.seed, selection.split)
    mixed: list[Sample] = []
    repeated = 0
    for sample in samples:
        if mixed and stream.chance(share):
            original = stream.pick(mixed)
            first = original.meta.get("repeat_of", original.id)
            sample = replace(original, id=sample.id, meta={**original.meta, "repeat_of": first})
            repeated += 1
        mixed.append(sample)
    return mixed, repeated
