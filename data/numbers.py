"""Reading answers out of replies, and comparing them with gold values.

:func:`parse_number` applies one stated rule for which number of a reply is its answer; :func:`numbers_match`
and :func:`lists_match` compare with the units and the arity of the gold, so that neither a percent sign nor a
thousands separator changes what a right answer is.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from bench.quantities import Quantity, normalise, parse_numbers, scan

__all__ = [
    "Quantity",
    "answer_quantity",
    "as_decimal",
    "candidates",
    "close",
    "fact_number",
    "final_text",
    "lists_match",
    "numbers_match",
    "parse_items",
    "parse_number",
    "parse_number_list",
    "parse_numbers",
    "same_rounded",
]

_SCALE_FACTORS = {"": 1, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

_MARKER = re.compile(
    r"(?:answer|result)[ ]{0,2}(?:\([^()\n]{0,40}\)[ ]{0,2})?(?:is|was|=|:|≈)|####|\[\[",
    re.IGNORECASE,
)
_COPULA = re.compile(
    r"(?<![A-Za-z])(?:is|are|was|were|equals|be|equal to|totals|amounts to)(?![A-Za-z])", re.IGNORECASE
)
_HEDGE = re.compile(
    r"[ :]{0,3}(?:(?:approximately|about|roughly|around|nearly|thus|equal to|to|only|exactly)[ ]){0,3}",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*([^\n*]{0,16})")
_THOUGHT_END = "</think>"


def final_text(reply: str) -> str:
    """Return the reply without its reasoning: what follows the last ``</think>``.

    A ``<think>`` that never closes leaves nothing: reasoning is never read as an answer.
    """
    _, closed, rest = reply.rpartition(_THOUGHT_END)
    if closed:
        return rest
    return reply.split("<think>", 1)[0]


def parse_number(text: str, *, decimal_comma: bool = False) -> float | None:
    """Return the value of the number that is the reply's answer, or None; see :func:`answer_quantity`."""
    quantity = answer_quantity(text, decimal_comma=decimal_comma)
    return None if quantity is None else quantity.value


def answer_quantity(text: str, *, decimal_comma: bool = False) -> Quantity | None:
    r"""Return the quantity that is the reply's answer, or None where the reply holds none.

    The first of these that holds a quantity decides:

    1. the last ``\boxed{...}``;
    2. what follows the last marker ("answer is", "answer:", "####"), up to the end of its line;
    3. the first line, where it is nothing but the quantity;
    4. the last line: its last bold span, else what follows its last "=" or "≈", else the quantity right
       after a verb such as "is" or "equals";
    5. the last quantity of the text.

    After a marker or a bold span, a chain "a + b = c" yields c.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        inside = parse_numbers(boxed, decimal_comma=decimal_comma)
        if inside:
            return _end_of_chain(normalise(boxed), inside)
    body = normalise(text)
    quantities = scan(body, decimal_comma=decimal_comma)
    if not quantities:
        return None
    marked = _after_marker(body, quantities)
    if marked is not None:
        return marked
    opening = next(line for line in body.splitlines() if line.strip()).strip(" \u00a0*_`$").rstrip(".")
    alone = scan(opening, decimal_comma=decimal_comma)
    if len(alone) == 1 and alone[0].start == 0 and alone[0].end == len(opening):
        return alone[0]
    last_line = next(line for line in reversed(text.splitlines()) if line.strip())
    for match in reversed(list(_BOLD.finditer(last_line))):
        inside = parse_numbers(match[0], decimal_comma=decimal_comma)
        if inside and not match[1].rstrip().endswith(":"):
            return _end_of_chain(normalise(match[0]), inside)
    body = normalise(last_line)
    inside = scan(body, decimal_comma=decimal_comma)
    return (_in_sentence(body, inside) if inside else None) or quantities[-1]


def _last_boxed(text: str) -> str | None:
    r"""Return what the last complete ``\boxed{...}`` holds, braces balanced."""
    at = text.rfind("\\boxed")
    if at < 0:
        return None
    opening = text.find("{", at)
    if opening < 0 or text[at + len("\\boxed") : opening].strip():
        return None
    depth = 0
    for index in range(opening, len(text)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : index]
    return text[opening + 1 :]


def _after_marker(body: str, quantities: Sequence[Quantity]) -> Quantity | None:
    starts = [quantity.start for quantity in quantities]
    limit = len(body)
    for match in reversed(list(_MARKER.finditer(body))):
        line_end = body.find("\n", match.end())
        if line_end < 0:
            line_end = len(body)
        if not body[match.end() : line_end].strip(" *:$"):
            line_end = body.find("\n", line_end + 1)
            line_end = len(body) if line_end < 0 else line_end
        low = bisect_left(starts, match.end() - 1)
        inside = quantities[low : bisect_left(starts, min(limit, line_end))]
        if inside:
            return _end_of_chain(body, inside)
        limit = match.start()
    return None


def _end_of_chain(body: str, inside: Sequence[Quantity]) -> Quantity:
    """Return the first quantity, or the one after the last "=" that joins two of them."""
    chosen = inside[0]
    for left, right in zip(inside, inside[1:], strict=False):
        if re.search(r"[=≈]", body[left.end : right.start]):
            chosen = right
    return chosen


def _in_sentence(body: str, inside: Sequence[Quantity]) -> Quantity | None:
    sign = max(body.rfind("="), body.rfind("≈"))
    if sign >= 0:
        after = [q for q in inside if q.end > sign and q.start >= sign]
        if after:
            return after[0]
    starts = {q.start: q for q in inside}
    chosen: Quantity | None = None
    for match in _COPULA.finditer(body):
        hedge = _HEDGE.match(body, match.end())
        end = hedge.end() if hedge else match.end()
        for offset in range(max(match.end(), end - 2), end + 3):
            if offset in starts:
                chosen = starts[offset]
                break
    return chosen


def close(expected: float, actual: float, tolerance: float = 1e-4) -> bool:
    """Tell whether ``|e - a| <= tolerance * max(1, |e|, |a|)``."""
    return abs(expected - actual) <= tolerance * max(1.0, abs(expected), abs(actual))


def same_rounded(gold: Decimal, actual: Decimal, decimals: int) -> bool:
    """Tell whether a value rounds to the gold at a number of decimals, whichever way ties go."""
    half = Decimal(5).scaleb(-decimals - 1)
    slack = max(abs(gold), Decimal(1)) * Decimal("1e-12")
    return abs(gold - actual) <= half + slack


def candidates(quantity: Quantity, scale: str = "", *, plain_fraction: bool = True) -> list[Decimal]:
    """Return what a reply's quantity may mean in the unit of a gold.

    Args:
        quantity: The reply's answer.
        scale: The gold's unit: ``""`` (a plain number or a fraction), ``percent`` (a gold of 23.4 is 23.4 %)
            or a scale word.
        plain_fraction: For ``percent``: whether a bare 0.234 may also say 23.4 %.
    """
    if scale == "percent":
        if quantity.percent:
            return [quantity.exact * 100]
        return [quantity.exact, quantity.exact * 100] if plain_fraction else [quantity.exact]
    factor = _SCALE_FACTORS[scale]
    if quantity.scale != 1 or factor == 1:
        return [quantity.exact / factor]
    return [quantity.exact, quantity.exact / factor]


def numbers_match(
    gold: float,
    reply: Quantity,
    *,
    scale: str = "",
    plain_fraction: bool = True,
    tolerance: float = 1e-4,
) -> bool:
    """Tell whether a reply's quantity equals a gold in the gold's unit; see :func:`candidates`.

    A percentage is read as what it says: against a gold of 23.4 percent, "23.4%" and "0.234" are right,
    "0.234%" and "2.34%" are wrong.
    """
    found = candidates(reply, scale, plain_fraction=plain_fraction)
    return any(close(gold, float(value), tolerance) for value in found)


def fact_number(text: str, *, sign: str = "", scale: int = 0, format: str = "") -> float | None:
    """Return the value of an inline-XBRL fact.

    Args:
        text: The displayed text. Parentheses around it are decoration beside ``sign="-"``: two marks of a
            negative make one.
        sign: The fact's ``sign`` attribute.
        scale: Its power of ten.
        format: Its transformation; ``numcommadecimal`` and ``num-comma-decimal`` read a decimal comma, and
            ``zerodash`` or ``fixed-zero`` mean 0.
    """
    name = format.rpartition(":")[2].replace("-", "").lower()
    if name in ("zerodash", "fixedzero", "numdash"):
        return 0.0
    quantities = parse_numbers(text, decimal_comma=name == "numcommadecimal")
    if not quantities:
        return None
    value = quantities[0].exact * Decimal(10) ** scale
    return float(-abs(value) if sign == "-" else value)


def parse_items(text: str) -> list[str]:
    """Split a list answer into its items: "ANSWER: B, C, and D" gives B, C, D.

    Only the bracketed part or what follows the last marker counts, where there is one; an Oxford comma and
    a trailing comma add nothing.
    """
    pieces = re.split(r"[,;\n]|(?<=\s)(?:and|&)(?=\s)", _list_text(text))
    cleaned = (re.sub(r"^(?:and|&)\s+", "", piece.strip()).strip(" .\"'`*$") for piece in pieces)
    return [piece for piece in cleaned if piece]


def _list_text(text: str) -> str:
    opening, closing = text.rfind("["), text.rfind("]")
    if 0 <= opening < closing:
        return text[opening + 1 : closing]
    markers = list(_MARKER.finditer(text))
    return text[markers[-1].end() :] if markers else text


def parse_number_list(text: str) -> list[float]:
    """Return the numbers of a list answer whose arity is unknown.

    A comma without a space after it separates items too, unless other commas of the same list are followed
    by spaces: "[31,1877.5]" has two items, "[9, 161,340]" has two as well.
    """
    text = _list_text(normalise(text))
    parts = re.split(r",\s+|;", text) if ", " in text or ";" in text else text.split(",")
    quantities = (scan(part.strip()) for part in parts)
    return [found[0].value for found in quantities if found]


def lists_match(gold: Sequence[float], text: str, *, tolerance: float = 1e-4) -> bool:
    """Tell whether a list answer equals the gold, the gold's arity deciding what each comma means.

    "[9,161,340]" equals [9, 161340]: the pieces between commas may be joined into thousands groups where
    that gives as many items as the gold has.
    """
    pieces = [piece.strip() for piece in _list_text(normalise(text)).split(",")]
    pieces = [re.sub(r"^and\s+", "", piece) for piece in pieces if piece]
    reachable = {0}
    for value in gold:
        following: set[int] = set()
        for start in reachable:
            for end in range(start + 1, min(len(pieces), start + 10) + 1):
                joined = ",".join(pieces[start:end])
                found = scan(joined)
                if len(found) == 1 and close(value, found[0].value, tolerance):
                    following.add(end)
        reachable = following
    return len(pieces) in reachable


def as_decimal(text: str) -> Decimal | None:
    """Return a plain decimal string exactly, or None (also for NaN and infinities)."""
    try:
        value = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
