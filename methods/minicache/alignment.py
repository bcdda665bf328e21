"""Which values of a request a program must have taken to give the request's known answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import perm
from typing import Any

from bench.errors import ExecutorFailed
from bench.execution import ProgramExecutor
from bench.workload import Task
from methods.minicache.antiunify import assigned_constants
from methods.minicache.generation import Entry, Exemplar
from methods.minicache.template import Refused, Span, Values

__all__ = ["align", "run_program"]

_MOST_ASSIGNMENTS = 400
_BATCH = 60
"""Assignments per program: their values must fit into one result."""
_HARNESS = """
_one = solve
def solve(picks, table):
    found = []
    for pick in picks:
        try:
            value = _one(**{name: values[at] for (name, values), at in zip(table.items(), pick)})
            value = float(value)
            found.append(value if value == value and abs(value) < 1e300 else None)
        except Exception:
            found.append(None)
    return found
"""


async def run_program(executor: ProgramExecutor, task: Task, code: str, values: Values) -> str:
    """Return the answer that a cached program gives for ``values``.

    Raises:
        Refused: It failed, or its value is no answer.
        ExecutorFailed: Our executor failed.
    """
    result = await executor.run(code, arguments=dict(values))
    if result.status == "executor_error":
        raise ExecutorFailed(f"the program executor failed: {result.error}")
    if result.status != "ok":
        raise Refused(
            f"program {result.status}: {result.error}" if result.error else f"program {result.status}"
        )
    try:
        return task.format_value(result.value)
    except ValueError as error:
        raise Refused(f"unusable value: {error}") from error


async def align(
    executor: ProgramExecutor, task: Task, entry: Entry, exemplar: Exemplar, spans: Sequence[Span]
) -> Mapping[str, str] | None:
    """Return the spans, by variable, with which ``entry`` gives the exemplar's own answer.

    Where several assignments do (a sum does not tell its terms apart), the one whose spans come in the order
    in which the exemplar's program names them is taken.

    Returns:
        None where this can't be told: a text among the variables, or too many assignments.

    Raises:
        Refused: No assignment gives the answer: the program is wrong for this exemplar.
        ExecutorFailed: Our executor failed.
    """
    variables = entry.template.variables
    if any(variable.type == "text" for variable in variables):
        return None
    if len(spans) < len(variables):
        raise Refused(f"{len(variables)} numbers wanted, {len(spans)} in the request")
    if perm(len(spans), len(variables)) > _MOST_ASSIGNMENTS:
        return None
    table: dict[str, list[Any]] = {}
    for variable in variables:
        table[variable.name] = [entry.template.value(variable, span) for span in spans]
    picks = [
        pick
        for pick in permutations(range(len(spans)), len(variables))
        if all(values[at] is not None for values, at in zip(table.values(), pick, strict=True))
    ]
    fitting = []
    for start in range(0, len(picks), _BATCH):
        batch = picks[start : start + _BATCH]
        result = await executor.run(
            entry.code + _HARNESS, arguments={"picks": [list(pick) for pick in batch], "table": table}
        )
        if result.status == "executor_error":
            raise ExecutorFailed(f"the program executor failed: {result.error}")
        if result.status != "ok" or not isinstance(result.value, list):
            raise Refused(f"program {result.status}: {result.error}")
        for pick, value in zip(batch, result.value, strict=True):
            if value is not None and _gives(task, value, exemplar.answer):
                fitting.append(pick)
    if not fitting:
        raise Refused(f"no choice of its values gives its answer {exemplar.answer[:40]!r}")
    named = _named_spans(exemplar.program or "", spans)
    best = max(
        fitting,
        key=lambda pick: sum(
            named.get(variable.name) == at for variable, at in zip(variables, pick, strict=True)
        ),
    )
    return {variable.name: spans[at].text for variable, at in zip(variables, best, strict=True)}


def _gives(task: Task, value: float, answer: str) -> bool:
    try:
        return task.same_answer(task.format_value(value), answer)
    except ValueError:
        return False


def _named_spans(program: str, spans: Sequence[Span]) -> dict[str, int]:
    """Return which span each assigned constant of a program is."""
    found = {}
    for name, value in assigned_constants(program).items():
        equal = [at for at, span in enumerate(spans) if abs(span.quantity.value - value) <= 1e-9 * abs(value)]
        if len(equal) == 1:
            found[name] = equal[0]
    return found
