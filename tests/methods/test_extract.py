"""Finding the program in a reply."""

from __future__ import annotations

import pytest

from methods.execution.extract import extract_program

TICKS = "`" * 3


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("```python\nans = 1  # draft\n```\nFixed:\n```python\nans = 2\n```", "ans = 2"),
        ("def solve():\n    return 4\n```", "def solve():\n    return 4"),
        ("```python\nans = 5", "ans = 5"),
        ("```\nans = 5\n```", "ans = 5"),
        ("```py\nans = 5\n```", "ans = 5"),
        ("```Python3\nans = 5\n```", "ans = 5"),
        ("``` python title=x\nans = 5\n```", "ans = 5"),
        ("```{.python}\nans = 5\n```", "ans = 5"),
        ("~~~python\nans = 5\n~~~", "ans = 5"),
        ("````python\nans = 5\n```\nx = 1\n````", "ans = 5\n```\nx = 1"),
        ("````python\nans = 5\n````", "ans = 5"),
        ("```python\r\nans = 5\r\nb = 6\r\n```\r\n", "ans = 5\nb = 6"),
        ("1. First:\n   ```python\n   if True:\n       ans = 5\n   ```", "if True:\n    ans = 5"),
        ("```def solve():\n    return 4\n```", "def solve():\n    return 4"),
        ("```import math\nans = math.pi\n```", "import math\nans = math.pi"),
        ("ans = 5", "ans = 5"),
        ("print(5)\n", "print(5)"),
        ("Sure!\nThe answer is 5.", None),
        ("Sure", None),
        ("answer: 42", None),
        ("42", None),
        ("", None),
        ("```", None),
        ("```python\n```", None),
        # What the program printed, or another language, is not the program.
        ("```python\nprint(6 * 7)\n```\nOutput:\n```\n42\n```", "print(6 * 7)"),
        ("```python\nans = 1\n```\n```json\n{}\n```", "ans = 1"),
        ("```javascript\nx = 1\n```", None),
        # The last one that parses, and one that does not rather than nothing.
        ("```python\nans = 1\n```\n```python\nans = = 2\n```", "ans = 1"),
        ("Here:\n```python\nans = = 2\n```", "ans = = 2"),
        ("```python\nans = 1\n```\nor\n```python\nans = 2", "ans = 2"),
        # The prompt opened the fence.
        ("ans = 1\n```\nThis adds the numbers.", "ans = 1"),
        ("ans = 1\n```\nBetter:\n```python\nans = 2\n```", "ans = 2"),
        # Fences within a line.
        (f'```python\ns = """{TICKS}"""\nans = 3\n```', f's = """{TICKS}"""\nans = 3'),
        (f"```python\n# {TICKS}\nans = 3\n```", f"# {TICKS}\nans = 3"),
        (f"Use {TICKS}print(1){TICKS} to print.", None),
        ("```python\npattern = '\\d'\n```", "pattern = '\\d'"),
    ],
)
def test_extract(reply: str, program: str | None) -> None:
    assert extract_program(reply) == program


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("```python\nans = 5", None),
        ("ans = 5", None),
        ("```python\nans = 1\n```\nor\n```python\nans = 2", "ans = 1"),
        ("ans = 1\n```\nThis adds", "ans = 1"),
    ],
)
def test_what_was_cut_off_is_no_program(reply: str, program: str | None) -> None:
    assert extract_program(reply, truncated=True) == program


@pytest.mark.parametrize(
    "text", ["(" * 5000, "1+" * 50_000 + "1", "x = \0", "-" * 20_000 + "1", "x = '\ud800'"]
)
def test_text_that_troubles_the_parser(text: str) -> None:
    extract_program(text)
    assert extract_program(f"```python\n{text}\n```") is not None
