"""What a small model leaves out of an otherwise whole program."""

from __future__ import annotations

import ast

__all__ = ["PRELUDE", "finish_program"]

PRELUDE = "import math\nimport statistics\n"
"""What the program prompt promises to be imported."""


def finish_program(code: str) -> str:
    """Return ``code`` with the promised imports, and with its value named where it names none.

    A program that defines no ``solve``, sets no ``answer`` and prints nothing has computed its value in its
    last statement: an assignment to one name, or an expression. That one becomes ``answer``. A program
    that does not parse is returned as it is, to fail with its own message.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    last = tree.body[-1] if tree.body else None
    if not ({"answer", "print"} & names or "solve" in defined):
        if isinstance(last, ast.Assign) and len(last.targets) == 1 and isinstance(last.targets[0], ast.Name):
            code = f"{code.rstrip()}\nanswer = {last.targets[0].id}\n"
        elif isinstance(last, ast.Expr):
            # The statement may share its line with the one before it; offsets count bytes of UTF-8.
            lines = code.encode().split(b"\n")[: last.lineno]
            before = b"\n".join([*lines[:-1], lines[-1][: last.col_offset]]).decode().rstrip("; \n")
            code = f"{before}\nanswer = ({ast.unparse(last.value)})\n"
    if any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body):
        return code  # nothing may stand before such an import
    return PRELUDE + code
