"""Programs that name no value get one; the others stay as they are."""

import pytest

from methods.execution.finish import PRELUDE, finish_program


@pytest.mark.parametrize(
    ("code", "finished"),
    [
        ("a = 2\nratio = a / 4", "a = 2\nratio = a / 4\nanswer = ratio\n"),
        ("a = 2\na / 4", "a = 2\nanswer = (a / 4)\n"),
        ("a = 2; b = 'é'; a / 4", "a = 2; b = 'é'\nanswer = (a / 4)\n"),
        ("a = 2\n(a +\n 4)", "a = 2\nanswer = (a + 4)\n"),
        ("a = 2\nanswer = a", "a = 2\nanswer = a"),
        ("a = 2\nprint(a)", "a = 2\nprint(a)"),
        ("def solve():\n    return 3", "def solve():\n    return 3"),
        ("a, b = 1, 2", "a, b = 1, 2"),
        ("for i in range(3):\n    x = i", "for i in range(3):\n    x = i"),
    ],
)
def test_value_is_named(code: str, finished: str) -> None:
    assert finish_program(code) == PRELUDE + finished


def test_future_imports_stay_first() -> None:
    code = "from __future__ import annotations\nanswer = 2"
    assert finish_program(code) == code


@pytest.mark.parametrize("code", ["a = = 2", "a\0", "x y"])
def test_what_does_not_parse_stays(code: str) -> None:
    assert finish_program(code) == code
