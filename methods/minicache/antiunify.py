"""Anti-unification of exemplars' programs: what they share becomes P, what differs becomes its parameters.

Programs of one group differ in names, in the order of their lines and in their values. Each is turned into
the one expression of its answer (assignments inlined), in which every constant that the request gives is a
placeholder, sums and products are in one order, and placeholders are numbered as they appear. Programs that
compute the same thing then read the same, however they were written, and no model has to be asked.
"""

from __future__ import annotations

import ast
import copy
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from methods.minicache.template import Span, Template, Variable

__all__ = ["Shared", "assigned_constants", "shape_of", "shared_program"]

_MOST_ORDERS = 64
_MODULES = frozenset({"math", "statistics"})
_FUNCTIONS = frozenset({"abs", "float", "int", "len", "list", "max", "min", "pow", "range", "round", "sum"})
_UNITS = {("month", "year"): 12.0, ("quarter", "year"): 4.0, ("month", "quarter"): 3.0}
"""How a program may count a time that the request gives in another unit: (given, counted) → divisor."""
_REL = 1e-9


@dataclass(frozen=True, slots=True)
class Shared:
    """What several exemplars' programs have in common.

    Attributes:
        template: Its parameters, described by the names that the programs gave them.
        code: ``def solve(...)``.
        members: Positions of the exemplars whose programs it stands for.
        shots: For each of them, which span of its request each parameter took, by parameter.
    """

    template: Template
    code: str
    members: tuple[int, ...]
    shots: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Reading:
    """One canonical form of a program: its text over p0, p1, … and what stands behind each of them."""

    text: str
    spans: tuple[int, ...]
    names: tuple[str, ...]
    units: tuple[str, ...]


class _Unfit(Exception):
    """The program is no straight line to one expression, or a value in it is not the request's."""


def shared_program(programs: Sequence[str | None], spans: Sequence[Sequence[Span]]) -> Shared | None:
    """Return the program that most exemplars share; None where no two do.

    Args:
        programs: The exemplars' programs; None where there is none.
        spans: The quantities of each exemplar's request.
    """
    readings = [
        {reading.text: reading for reading in _readings(program, list(own))} if program else {}
        for program, own in zip(programs, spans, strict=True)
    ]
    counted = Counter(text for found in readings for text in found)
    # The more specific form goes first among equals: one with more parameters knows more of its values.
    best = max(counted, key=lambda text: (counted[text], text.count("p"), text), default=None)
    if best is None or counted[best] < 2:
        return None
    members = tuple(position for position, found in enumerate(readings) if best in found)
    chosen = [readings[position][best] for position in members]
    names = _parameter_names(chosen)
    variables = tuple(
        Variable(name, "number", _description(chosen, at, name), _most_common([r.units[at] for r in chosen]))
        for at, name in enumerate(names)
    )
    body = re.sub(r"\bp(\d+)\b", lambda match: names[int(match[1])], best)
    code = f"def solve({', '.join(f'{name}: float' for name in names)}) -> float:\n    return {body}\n"
    shots = tuple(
        {name: spans[position][reading.spans[at]].text for at, name in enumerate(names)}
        for position, reading in zip(members, chosen, strict=True)
    )
    return Shared(Template(variables), f"import math\nimport statistics\n{code}", members, shots)


def shape_of(program: str, spans: Sequence[Span]) -> str | None:
    """Return one program's canonical form, equal for all that compute the same; None if it has none."""
    found = [reading.text for reading in _readings(program, list(spans))]
    return found[0] if found else None


def assigned_constants(program: str) -> dict[str, float]:
    """Return the constants that a program assigns to names, by name."""
    try:
        body = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found = {}
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value = _folded(statement.value)
            if value is not None:
                found[statement.targets[0].id] = float(value)
    return found


def _parameter_names(readings: Sequence[_Reading]) -> list[str]:
    names: list[str] = []
    for at in range(len(readings[0].spans)):
        name = (
            _most_common([reading.names[at] for reading in readings if reading.names[at]])
            or f"value_{at + 1}"
        )
        name = re.sub(r"\W", "_", name)
        while name in names or name in _MODULES or name in _FUNCTIONS:
            name += "_"
        names.append(name)
    return names


def _description(readings: Sequence[_Reading], at: int, name: str) -> str:
    said = dict.fromkeys(reading.names[at] for reading in readings if reading.names[at])
    return " / ".join(one.replace("_", " ") for one in said) or name.replace("_", " ")


def _most_common(values: Sequence[str]) -> str:
    return Counter(values).most_common(1)[0][0] if values else ""


def _readings(program: str, spans: list[Span]) -> Iterator[_Reading]:
    """Yield a program's canonical forms: bare small numbers taken as constants, then as the request's."""
    try:
        expression = _inline(program, spans)
        seen: set[str] = set()
        for bind_bare in (False, True):
            reading = _canonical(copy.deepcopy(expression), spans, bind_bare)
            if reading is not None and reading.text not in seen:
                seen.add(reading.text)
                yield reading
    except (_Unfit, SyntaxError, ValueError, RecursionError, MemoryError):
        return


def _inline(program: str, spans: Sequence[Span]) -> ast.expr:
    """Return the expression of the program's answer; constants that were assigned carry the name as hint."""
    known: dict[str, ast.expr] = {}
    for statement in ast.parse(program).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        if (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            name = statement.targets[0].id
            folded = _folded(statement.value)
            literal = isinstance(statement.value, ast.Constant | ast.UnaryOp)
            if folded is not None and (literal or any(_fits(folded, span) is not None for span in spans)):
                value: ast.expr = ast.Constant(folded)
                value.hint = name  # type: ignore[attr-defined]
            else:
                value = _Inliner(known).visit(statement.value)
            known[name] = value
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name | ast.Constant)):
            raise _Unfit
    if "answer" not in known:
        raise _Unfit
    answer = known["answer"]
    while isinstance(answer, ast.Call) and ast.unparse(answer.func) == "round" and answer.args:
        answer = answer.args[0]  # the answer's format rounds anyway
    return answer


class _Inliner(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, ast.expr], bound: frozenset[str] = frozenset()) -> None:
        self._known = known
        self._bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._bound or (node.id not in self._known and node.id in _MODULES | _FUNCTIONS):
            return node
        if node.id not in self._known:
            raise _Unfit
        return copy.deepcopy(self._known[node.id])

    def _comprehension(self, node: ast.GeneratorExp | ast.ListComp) -> ast.expr:
        names = [c.target.id for c in node.generators if isinstance(c.target, ast.Name)]
        if len(names) != len(node.generators):
            raise _Unfit
        renamed = {name: f"i{len(self._bound) + at}" for at, name in enumerate(names)}
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in renamed:
                part.id = renamed[part.id]
        inner = _Inliner(self._known, self._bound | set(renamed.values()))
        node.elt = inner.visit(node.elt)
        for clause in node.generators:
            clause.iter = inner.visit(clause.iter)
            clause.ifs = [inner.visit(test) for test in clause.ifs]
        return node

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.expr:
        return self._comprehension(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        return self._comprehension(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        raise _Unfit


def _folded(node: ast.expr) -> float | int | None:
    """Return the value of an expression of literals alone."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value is not True:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _folded(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.Add | ast.Sub):
        left, right = _folded(node.left), _folded(node.right)
        if left is None or right is None or (isinstance(node.op, ast.Div) and right == 0):
            return None
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
        return left + right if isinstance(node.op, ast.Add) else left - right
    return None


def _canonical(expression: ast.expr, spans: list[Span], bind_bare: bool) -> _Reading | None:
    binder = _Binder(spans, bind_bare)
    bound = binder.visit(expression)
    if not binder.used:
        raise _Unfit
    best: tuple[str, list[int]] | None = None
    for tree in _orders(bound):
        written = ast.unparse(tree)
        order = list(dict.fromkeys(int(span) for span in re.findall(r"\b_s(\d+)\b", written)))
        text = re.sub(r"\b_s(\d+)\b", lambda match, order=order: f"p{order.index(int(match[1]))}", written)  # type: ignore[misc]
        if best is None or text < best[0]:
            best = (text, order)
    if best is None:
        return None
    text, order = best
    names = tuple(binder.names.get(span, "") for span in order)
    return _Reading(text, tuple(order), names, tuple(binder.units.get(span, "") for span in order))


class _Binder(ast.NodeTransformer):
    """Replaces each constant that the request gives by a placeholder for its span."""

    def __init__(self, spans: list[Span], bind_bare: bool) -> None:
        self._spans = spans
        self._bind_bare = bind_bare
        self.used: set[int] = set()
        self.names: dict[int, str] = {}
        self.units: dict[int, str] = {}

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return node
        hint = getattr(node, "hint", "")
        whole = float(value) == int(value) if abs(value) < 1e15 else False
        if not hint and whole and 0 <= value <= 1000 and not self._bind_bare:
            return ast.Constant(int(value))
        for at, span in enumerate(self._spans):
            unit = _fits(float(value), span)
            if unit is not None:
                self.used.add(at)
                if hint:
                    self.names.setdefault(at, hint)
                if unit:
                    self.units[at] = unit
                return ast.Name(f"_s{at}", ast.Load())
        if hint and not (whole and 0 <= value <= 1000):
            raise _Unfit  # a value that was read wrongly, or made up
        return ast.Constant(int(value) if whole else float(value))


def _fits(value: float, span: Span) -> str | None:
    """Return the unit of time in which a constant is a span's value ("": as written); None if it is not."""
    given = span.quantity.value
    if _near(value, given):
        return ""
    for (written, counted), divisor in _UNITS.items():
        if span.time == written and _near(value, given / divisor):
            return f"{counted}s"
    return None


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _REL * max(abs(a), abs(b))


def _orders(node: ast.expr) -> list[ast.expr]:
    """Return the tree with sums and products in canonical order; several where operands look the same."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        chain = (ast.Add, ast.Sub) if isinstance(node.op, ast.Add | ast.Sub) else (ast.Mult, ast.Div)
        plus, minus = _flatten(node, chain)
        sides = [
            [list(pick) for pick in itertools.product(*(_orders(part) for part in side))]
            for side in (plus, minus)
        ]
        return [
            _chain(front, back, chain)
            for first, second in itertools.islice(itertools.product(*sides), _MOST_ORDERS)
            for front in _sorted(first)
            for back in _sorted(second)
        ][:_MOST_ORDERS]
    fields = [(name, value) for name, value in ast.iter_fields(node)]
    options: list[list[object]] = []
    for _, value in fields:
        if isinstance(value, ast.expr):
            options.append(list(_orders(value)))
        elif isinstance(value, list) and value and all(isinstance(one, ast.expr) for one in value):
            options.append([list(pick) for pick in itertools.product(*(_orders(one) for one in value))])
        else:
            options.append([value])
    made: list[ast.expr] = []
    for pick in itertools.islice(itertools.product(*options), _MOST_ORDERS):
        fresh = copy.copy(node)
        for (name, _), value in zip(fields, pick, strict=True):
            setattr(fresh, name, value)
        made.append(fresh)
    return made


def _flatten(
    node: ast.expr, chain: tuple[type[ast.operator], type[ast.operator]]
) -> tuple[list[ast.expr], list[ast.expr]]:
    """Return what a chain of one kind of operators adds and subtracts, or multiplies and divides by."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, chain):
        left, right = _flatten(node.left, chain), _flatten(node.right, chain)
        if isinstance(node.op, chain[1]):
            right = (right[1], right[0])
        return left[0] + right[0], left[1] + right[1]
    return [node], []


def _sorted(parts: list[ast.expr]) -> list[list[ast.expr]]:
    """Return the orders of operands by shape; more than one where shapes are equal."""
    keyed = sorted(
        ((re.sub(r"\b_s\d+\b", "_s", ast.unparse(part)), part) for part in parts), key=lambda k: k[0]
    )
    runs = [[part for _, part in run] for _, run in itertools.groupby(keyed, key=lambda k: k[0])]
    picks = itertools.product(*(itertools.permutations(run) for run in runs))
    return [[part for run in pick for part in run] for pick in itertools.islice(picks, _MOST_ORDERS)]


def _chain(
    front: list[ast.expr], back: list[ast.expr], chain: tuple[type[ast.operator], type[ast.operator]]
) -> ast.expr:
    if not front:
        front = [ast.Constant(0 if chain[0] is ast.Add else 1)]
    result = front[0]
    for part in front[1:]:
        result = ast.BinOp(result, chain[0](), part)
    for part in back:
        result = ast.BinOp(result, chain[1](), part)
    return result
