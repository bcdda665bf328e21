"""Finding the Python program in a model's reply."""

from __future__ import annotations

import ast
import keyword
import re
import textwrap
import warnings
from dataclasses import dataclass, field

__all__ = ["extract_program"]

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})([^`]*)")
_LANGUAGE = re.compile(r"[{.\s]*([^\s{}.:,]*)")
_PYTHON = frozenset({"py", "py3", "python", "python3"})


def extract_program(reply: str, *, truncated: bool = False) -> str | None:
    """Return the program in ``reply``, dedented, or None if there is none.

    It is the last fenced block that is Python: tagged as such and parsing, or untagged and more than an
    expression. Without one, the reply is read as if the prompt had opened a fence before it; after that, a
    reply with no fence counts if it is a program as a whole; and last, a block tagged as Python that does
    not parse, so that running it says what is wrong.

    Args:
        reply: The model's text.
        truncated: The text was cut off: what no fence closes is then not a whole program.
    """
    text = reply.replace("\r\n", "\n").replace("\r", "\n")
    blocks = [block for block in _blocks(text) if block.closed or not truncated]
    for block in reversed(blocks):
        if _parses(block.code, program=block.tag not in _PYTHON) and block.tag in _PYTHON | {""}:
            return block.code
    for block in reversed(_blocks("```\n" + text)):
        # With no fence at all, this is the whole reply.
        if (block.closed or not truncated) and block.tag in _PYTHON | {""} and _parses(block.code):
            return block.code
    return next((block.code for block in reversed(blocks) if block.tag in _PYTHON and block.code), None)


@dataclass
class _Block:
    mark: str
    tag: str
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def code(self) -> str:
        return textwrap.dedent("\n".join(self.lines)).strip("\n").rstrip()


def _blocks(text: str) -> list[_Block]:
    """Split off the fenced blocks, line by line: a fence within a line is part of a string or of prose."""
    blocks: list[_Block] = []
    block: _Block | None = None
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line)
        if block is not None and fence and fence[1].startswith(block.mark) and not fence[2].strip():
            block.closed = True
            block = None
        elif block is not None:
            block.lines.append(line)
        elif fence:
            block = _opened(fence[1], fence[2].strip())
            blocks.append(block)
    return blocks


def _opened(mark: str, info: str) -> _Block:
    words = info.split()
    if words and keyword.iskeyword(words[0]):  # the program begins beside the fence
        return _Block(mark, "", [info])
    language = _LANGUAGE.match(info)
    return _Block(mark, language[1].lower() if language else "")


def _parses(code: str, *, program: bool = True) -> bool:
    """Say whether ``code`` is Python; as a ``program``, it must define, assign or print something."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the program's text deserves is not ours to hear
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(tree.body) if not program else any(map(_does_something, ast.walk(tree)))


def _does_something(node: ast.AST) -> bool:
    match node:
        case ast.Assign() | ast.AugAssign() | ast.NamedExpr() | ast.FunctionDef():
            return True
        case ast.AnnAssign():
            return node.value is not None  # "answer: 42" is prose
        case ast.Call(func=ast.Name(id="print")):
            return True
    return False
