"""What the target is asked when an entry is made, and what its reply must be (section 3.5 and A.2)."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

from bench.samples import Message
from methods.execution.extract import extract_program
from methods.execution.finish import PRELUDE
from methods.minicache.template import Template, Variable

__all__ = ["Entry", "Exemplar", "Unusable", "generation_messages", "read_entry", "reflection_messages"]

_PROMPTS = files("methods") / "prompts"
_TYPES: Mapping[str, Literal["number", "integer", "text"]] = {
    "float": "number",
    "int": "integer",
    "str": "text",
}
_UNIT = re.compile(r"\b(?:in|number of)\s+(days|weeks|months|quarters|years)\b", re.IGNORECASE)
_MOST_VARIABLES = 12


class Unusable(ValueError):
    """The target's reply is no entry; the message says why, for the next attempt."""


@dataclass(frozen=True, slots=True)
class Exemplar:
    """A request that the miss path answered cleanly.

    Attributes:
        request: Its instruction text.
        answer: The reply.
        program: What computed it; None where no program did.
        vector: Its embedding, packed.
    """

    request: str
    answer: str
    program: str | None
    vector: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached program C = (T, P).

    Attributes:
        id: Unique within the method's state.
        template: T.
        code: P, which defines ``solve``.
        shots: Requests with the values found in them, verified by P's answer: they show the small model what
            each variable is.
        made_by: ``target`` or ``antiunify``.
        pattern: Regular expression with a named group per variable, where extraction is by pattern.
    """

    id: str
    template: Template
    code: str
    shots: tuple[tuple[str, Mapping[str, str]], ...] = field(default=())
    made_by: str = "target"
    pattern: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a JSON object."""
        return {
            "id": self.id,
            "template": self.template.to_json(),
            "code": self.code,
            "shots": [[request, dict(values)] for request, values in self.shots],
            "made_by": self.made_by,
            "pattern": self.pattern,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        """Return what :meth:`to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: It is something else.
        """
        return cls(
            data["id"],
            Template.from_json(data["template"]),
            data["code"],
            tuple((request, dict(values)) for request, values in data["shots"]),
            data["made_by"],
            data["pattern"],
        )


def generation_messages(
    exemplars: Sequence[Exemplar], summaries: Sequence[str], *, with_pattern: bool = False
) -> list[Message]:
    """Return the prompt for one attempt.

    Args:
        exemplars: What the entry is made of.
        summaries: Why earlier attempts failed, oldest first.
        with_pattern: Ask for a regular expression that extracts the variables, too.
    """
    system = (_PROMPTS / "minicache_generate_system.txt").read_text(encoding="utf-8").strip()
    if with_pattern:
        system += "\n\n" + (_PROMPTS / "minicache_pattern.txt").read_text(encoding="utf-8").strip()
    parts = []
    for number, exemplar in enumerate(exemplars, start=1):
        parts.append(f"Request {number}: {exemplar.request}")
        if exemplar.program is None:
            parts.append(f"Answer {number}: {exemplar.answer}")
        else:
            parts.append(f"Program {number}:\n{exemplar.program.removeprefix(PRELUDE).strip()}")
    if summaries:
        parts.append("Earlier versions failed. Mind this:")
        parts += [f"- {summary}" for summary in summaries]
    parts.append("Reply with the function only.")
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(parts)}]


def reflection_messages(code: str | None, failures: Sequence[str]) -> list[Message]:
    """Return the prompt that asks what went wrong in one attempt."""
    system = (_PROMPTS / "minicache_reflect_system.txt").read_text(encoding="utf-8").strip()
    shown = f"Function:\n{code.removeprefix(PRELUDE).strip()}\n" if code else ""
    user = shown + "What happened:\n" + "\n".join(f"- {failure}" for failure in failures)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def read_entry(reply: str, *, identifier: str, truncated: bool, with_pattern: bool = False) -> Entry:
    """Read T and P out of the target's reply.

    Raises:
        Unusable: It holds no function with named, described arguments.
    """
    code = extract_program(reply, truncated=truncated)
    if code is None:
        raise Unusable("the reply holds no Python block")
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unusable(f"the function does not parse: {error}") from error
    solve = next(
        (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "solve"), None
    )
    if solve is None:
        raise Unusable("the reply defines no function `solve`")
    given = solve.args
    if given.vararg or given.kwarg or given.posonlyargs:
        raise Unusable("`solve` must name every argument; *args and **kwargs are not allowed")
    used = {part.id for node in solve.body for part in ast.walk(node) if isinstance(part, ast.Name)}
    # Small targets add what is asked for to the arguments; what the body does not use need not be found.
    given.args = [argument for argument in given.args if argument.arg in used]
    given.kwonlyargs = [argument for argument in given.kwonlyargs if argument.arg in used]
    named = [*given.args, *given.kwonlyargs]
    if not 1 <= len(named) <= _MOST_VARIABLES:
        raise Unusable(f"`solve` has {len(named)} arguments; one per value of a request is wanted")
    said = _descriptions(ast.get_docstring(solve) or "")
    variables = []
    for argument in named:
        hint = ast.unparse(argument.annotation) if argument.annotation else "float"
        if hint not in _TYPES:
            raise Unusable(f"argument {argument.arg} has type {hint}; float, int or str is wanted")
        description = said.get(argument.arg) or argument.arg.replace("_", " ")
        unit = _UNIT.search(description)
        variables.append(Variable(argument.arg, _TYPES[hint], description, unit[1].lower() if unit else ""))
    # An argument with a default would hide a value that the small model did not find.
    given.defaults, given.kw_defaults = [], [None] * len(given.kwonlyargs)
    functions = ast.Module([node for node in tree.body if not _is_call(node)], [])
    pattern = _pattern(tree, {variable.name for variable in variables}) if with_pattern else None
    code = PRELUDE + ast.unparse(ast.fix_missing_locations(functions)) + "\n"
    return Entry(identifier, Template(tuple(variables)), code, pattern=pattern)


def _descriptions(docstring: str) -> dict[str, str]:
    found = re.findall(r"^\s*[-*]?\s*`?(\w+)`?\s*(?:\([^)]*\))?\s*:\s*(.+?)\s*$", docstring, re.MULTILINE)
    return {name: text.rstrip(".") for name, text in found}


def _is_call(node: ast.stmt) -> bool:
    """Tell whether a statement runs something at once, as the examples of use that a target adds."""
    if isinstance(node, ast.Assign):
        return any(isinstance(part, ast.Call) for part in ast.walk(node.value))
    return isinstance(node, ast.Expr | ast.If | ast.For | ast.While)


def _pattern(tree: ast.Module, names: set[str]) -> str:
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "PATTERN"
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            text = node.value.value
            try:
                groups = set(re.compile(text).groupindex)
            except re.error as error:
                raise Unusable(f"PATTERN is no regular expression: {error}") from error
            if not names <= groups:
                raise Unusable(f"PATTERN has no group for {', '.join(sorted(names - groups))}")
            return text
    raise Unusable("the reply assigns no PATTERN")
