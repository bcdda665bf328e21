"""Runs one program in this process, which exists for it alone, and writes how it ended.

Standard library only: the zygote loads it by path, so that a program finds nothing else in memory.
"""

from __future__ import annotations

import errno
import json
import math
import numbers
import os
import random
import sys
import types
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from methods.execution.wire import Limits

__all__ = ["preload", "run"]

_FILE = "<program>"
_MAX_INT_BITS = 14_284  # what 4300 decimal digits hold, Python's own limit for printing a number
_ERROR_CHARACTERS = 300

# Some of them also because they need C libraries from outside what a program may read.
_COMMON = (
    "binascii bisect calendar cmath collections collections.abc contextlib copy dataclasses datetime "
    "decimal enum fractions functools heapq inspect itertools math operator re statistics string textwrap "
    "typing zlib"
)


def preload() -> None:
    """Import what programs commonly use, and give them the ``exit`` and ``quit`` of a usual interpreter."""
    import builtins

    for name in _COMMON.split():
        __import__(name)
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)


class _TooLarge(Exception):
    """The value is over the limits for a result."""


def run(request: bytes, result: int, limits: Limits) -> None:
    """Run the program in ``request`` and write its end to the descriptor ``result`` as one JSON object.

    Args:
        request: JSON object with ``code`` and ``arguments``.
        result: Descriptor of a file, opened for writing.
        limits: Caps on the value.

    Raises:
        OSError: The result could not be written: the program closed or filled its descriptor.
    """
    task = json.loads(request)
    # The program may replace anything in any module, so what comes after it is bound before it.
    out, write, dumps = sys.stdout, os.write, json.dumps
    end = _end(task["code"], task["arguments"] or {}, limits)
    try:
        out.flush()
    except (OSError, ValueError) as error:
        end = _failure(error)
    write(result, dumps(end).encode())


def _end(code: str, arguments: dict[str, Any], limits: Limits) -> dict[str, object]:
    random.seed(0)
    sys.argv = [""]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        compiled = compile(code, _FILE, "exec")
    except SyntaxError as error:
        line = f" (line {error.lineno})" if error.lineno else ""
        return _report("syntax_error", f"{type(error).__name__}: {error.msg}{line}")
    except ValueError as error:  # null bytes, lone surrogates
        return _report("syntax_error", f"{type(error).__name__}: {error}")
    except (MemoryError, RecursionError) as error:
        return _failure(error)
    try:
        exec(compiled, module.__dict__)
        found, value = _value(module.__dict__, arguments)
        if not found:
            return _report("no_value", "the program defines neither solve nor answer")
        return {"status": "ok", "value": _encodable(value, limits)}
    except _TooLarge as error:
        return _report("result_too_large", str(error))
    except BaseException as error:  # noqa: BLE001 - the program's own exception, of whatever kind, is its end
        return _failure(error)


def _value(namespace: dict[str, Any], arguments: dict[str, Any]) -> tuple[bool, object]:
    solve = namespace.get("solve")
    if callable(solve) and (arguments or not _needs_arguments(solve)):
        return True, solve(**arguments)
    return "answer" in namespace, namespace.get("answer")


def _needs_arguments(function: Any) -> bool:
    import inspect

    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(
        parameter.default is parameter.empty and parameter.kind not in optional
        for parameter in inspect.signature(function).parameters.values()
    )


def _encodable(value: object, limits: Limits) -> object:
    """Return ``value`` in JSON's types (nan and inf as floats, which our decoder knows); checked for size."""
    left = limits.result_bytes

    def plain(item: object, depth: int) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise _TooLarge(f"the value has more than {limits.result_bytes} parts")
        if depth > limits.result_depth:
            raise _TooLarge(f"the value nests deeper than {limits.result_depth}")
        if item is None or isinstance(item, bool):
            return item
        if isinstance(item, str):
            return str(item)
        if isinstance(item, (int, float, Decimal, numbers.Real)):  # noqa: UP038 - the abstract class last
            return _number(item)
        if isinstance(item, list | tuple):
            return [plain(part, depth + 1) for part in item]
        if isinstance(item, dict):
            return {str(plain(key, depth + 1)): plain(part, depth + 1) for key, part in item.items()}
        raise TypeError(f"a value of type {type(item).__name__} cannot be returned")

    checked = plain(value, 0)
    sys.set_int_max_str_digits(4300)  # Python's default, whatever the program set
    if len(json.dumps(checked)) > limits.result_bytes:
        raise _TooLarge(f"the value takes more than {limits.result_bytes} bytes")
    return checked


def _number(value: float | numbers.Real | Decimal) -> int | float:
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Decimal):
        if not value.is_finite():
            return float(value)
        if value.adjusted() > _MAX_INT_BITS:  # before a huge integer is made of a small exponent
            raise _TooLarge("the value has more than 4300 digits")
    whole = int(math.trunc(value))
    if value != whole:
        return float(value)
    if whole.bit_length() > _MAX_INT_BITS:
        raise _TooLarge("the value has more than 4300 digits")
    return whole


def _report(status: str, error: str) -> dict[str, object]:
    return {"status": status, "error": " ".join(error.split())[:_ERROR_CHARACTERS]}


def _failure(error: BaseException) -> dict[str, object]:
    """Say in one line how an exception ended the program."""
    if isinstance(error, SystemExit):
        return _report("exit", "the program called exit")
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - an exception of the program's own class may do anything
        text = "(no message)"
    line = _line(error)
    message = type(error).__name__ + (f": {text[:_ERROR_CHARACTERS]}" if text else "")
    return _report(_status(error, text), message + (f" (line {line})" if line else ""))


def _status(error: BaseException, text: str) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or code == errno.ENOMEM:
        return "memory_limit"
    if code == errno.EFBIG:
        return "output_limit"
    # Libraries wrap what was denied: a thread, a name look-up, an error raised from another one.
    if "can't start new thread" in text or type(error).__name__ == "gaierror":
        return "refused"
    cause: BaseException | None = error
    for _ in range(10):
        if isinstance(cause, PermissionError):
            return "refused"
        cause = cause and (cause.__cause__ or cause.__context__)
    return "error"


def _line(error: BaseException) -> int | None:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
