"""Finding quantities in text: numbers with their sign, currency, scale word and percent mark.

The scanner works on a normalised copy of the text (LaTeX and Unicode spellings folded to one form) and does
bounded work at each position, so its time is linear in the length. It never raises on a string and never
yields a value that is not finite.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

__all__ = ["Quantity", "normalise", "parse_numbers", "scan"]

_MAX_DIGITS = 300

_CURRENCY_SIGN = r"(?:US|A|C|NZ|HK|S|R)?\$|[€£¥₹₩₽₺₦₫฿]"
_CURRENCY_CODE = (
    "USD|EUR|GBP|JPY|CNY|RMB|CHF|AUD|CAD|NZD|INR|SEK|NOK|DKK|BRL|MXN|ZAR|KRW|SGD|HKD|PLN|CZK|TRY|Rs\\.?|Fr\\."
)
_CURRENCY = rf"(?:{_CURRENCY_SIGN}|(?<![A-Za-z])(?:{_CURRENCY_CODE}))"

_FOLD = {
    **{ord(c): "-" for c in "−–—―‒‐‑﹣－⁻"},
    **{ord(c): "\u00a0" for c in "\u2007\u2009\u200a\u202f"},
    **{ord(c): None for c in "\u200b\u200e\u200f\u2060\ufeff"},
    **{0xFF10 + i: str(i) for i in range(10)},
    ord("．"): ".",
    ord("，"): ",",
    ord("％"): "%",
    ord("﹪"): "%",
    ord("＄"): "$",
    ord("（"): "(",
    ord("）"): ")",
    ord("＋"): "+",
    ord("’"): "'",
}
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_POWER_OF_TEN = re.compile(r"(?<=10)[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,4}")
_REWRITES = (
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,;:! ](?=\d{3})"), "\u00a0"),
    (re.compile(r"\\[,;:! ]|\\quad|\\qquad|~(?=\d)"), " "),
    (re.compile(r"\\([$%#&_{}])"), r"\1"),
    (re.compile(r"\\[()\[\]]"), " "),
    (re.compile(r"\\(?:left|right)(?=[()\[\]|.])"), ""),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "×"),
    (re.compile(r"(?<=[0-9]):1(?![0-9.,:])"), ""),
    (re.compile(r"\\approx(?![A-Za-z])"), "≈"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s?\{"), " "),
    (re.compile(r"(?<![\d)])\*\*|\*\*(?![\d(])"), ""),
)
_FRACTION = re.compile(
    r"\\[dt]?frac\s?\{\s?(-?[\d,]{1,30}(?:\.\d{1,30})?)\s?\}\s?\{\s?([\d,]{1,30}(?:\.\d{1,30})?)\s?\}"
)

_NUMBER = re.compile(
    r"""(?: [0-9]{1,3}(?:,[0-9]{3}){1,30}(?![0-9])
          | [0-9]{1,2}(?:,[0-9]{2}){1,8},[0-9]{3}(?![0-9])
          | [0-9]{1,3}(?:'[0-9]{3}){1,30}(?![0-9])
          | [0-9]{1,3}(?:\u00a0[0-9]{3}){1,30}(?![0-9])
          | [0-9]{1,3}(?:\ [0-9]{3}){1,30}(?![0-9,]|\ [0-9])
          | [0-9]+ ) (?:\.[0-9]+)?
        | \.[0-9]+""",
    re.VERBOSE,
)
_EXPONENT = re.compile(
    r"[eE](?P<e>[+-]?[0-9]{1,4})(?![0-9A-Za-z])"
    r"|[ \u00a0]?[×xX*·][ \u00a0]?10[ ]?(?:\^|\*\*)[ ]?\{?[ ]?(?P<p>[+-]?[0-9]{1,4})[ ]?\}?"
)
_SCALES = {
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "lakh": 10**5,
    "lac": 10**5,
    "crore": 10**7,
    "mn": 10**6,
    "mln": 10**6,
    "mio": 10**6,
    "mm": 10**6,
    "bn": 10**9,
    "bln": 10**9,
    "tn": 10**12,
    "trn": 10**12,
    "k": 10**3,
    "m": 10**6,
    "b": 10**9,
    "t": 10**12,
    "cr": 10**7,
}
_SCALE_WORD = re.compile(
    r"[ \u00a0-]?(?P<word>thousand|million|billion|trillion|lakh|lac|crore|mln|mio|mn|bln|bn|trn|tn)s?"
    r"(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
_SCALE_LETTER = re.compile(r"(?P<space>[ \u00a0]?)(?P<word>MM|Cr|cr|[kKmMbBtT])(?![A-Za-z0-9_])")
_PERCENT = re.compile(
    r"[ \u00a0]{0,3}(?:(?P<percent>%|(?:percent|per[ ]cent|pct|percentage[ ]points?)(?![A-Za-z]))"
    r"|(?P<bps>(?:bps|basis[ -]points?)(?![A-Za-z]))|(?P<permille>‰))",
    re.IGNORECASE,
)
_BEFORE = re.compile(
    rf"(?P<sign1>[+-]?)(?P<gap1>[ \u00a0]?)(?P<cur>{_CURRENCY})?(?P<gap2>[ \u00a0]?)(?P<sign2>[+-]?)"
    r"(?P<gap3>[ \u00a0]?)$"
)
_CURRENCY_BEFORE = re.compile(rf"(?P<sign>[+-]?)[ \u00a0]?(?P<cur>{_CURRENCY})[ \u00a0]?$")
_CURRENCY_AFTER = re.compile(rf"[ \u00a0]?{_CURRENCY}")
_ORDINAL = re.compile(r"(?:st|nd|rd|th)(?![A-Za-z])|\([a-z]\)|-[A-Z](?![A-Za-z])|_|[:][0-9]|[xX][0-9A-Fa-f]")
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|sept|oct|nov|dec)[a-z]{0,6}\.?"
_DATES = re.compile(
    r"(?<![\d.,/-])(?:\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/(?:\d{4}|\d{2})|\d{1,2}:\d{2}(?::\d{2})?"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?[ ]{_MONTH}(?:,?[ ]\d{{4}})?)(?![\d/])"
    rf"|(?<![A-Za-z]){_MONTH}[ ]\d{{1,2}}(?:st|nd|rd|th)?(?![\d.])(?:,?[ ]\d{{4}}(?!\d))?"
    rf"|(?<![A-Za-z]){_MONTH}[ ](?:19|20)\d{{2}}(?!\d)"
    r"|(?<![A-Za-z])(?:FY|Q[1-4]|H[12]|fiscal|year|in|of|since|during|by)[ ](?:FY[ ]?)?(?:19|20)\d{2}"
    r"(?![\d,.%]\d|\d|[ ]?%)"
    r"|(?:19|20)\d{2}[-/](?:19|20)?\d{2}(?![\d,.])",
    re.IGNORECASE,
)
_LABELS = re.compile(
    r"^[ \t>*#-]{0,8}(?:\(\d{1,2}\)[ ](?=[A-Za-z*])|\d{1,2}[.)][ \t]+(?=\S))"
    r"|(?<![A-Za-z])(?:step|part|note|table|figure|case|question|equation|chapter|section|item|option)"
    r"[ ]#?\d{1,3}(?![\d.,]\d|\d)"
    r"|(?<!#)#[ ]?\d{1,3}(?!\d)"
    r"|(?<!\d)\d{1,2}[ -](?:decimal|significant|d\.p\.|dp(?![a-z])|s\.f\.)[a-z ]{0,12}",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity read from a text.

    Attributes:
        exact: The value: sign and scale word applied; a percentage is a fraction (23.4 % is 0.234).
        number: The number as written, with its sign but without scale word or percent mark.
        percent: Whether it was written as a percentage (per cent, basis points, per mille).
        currency: Whether a currency sign or code stood beside it.
        scale: The factor of its scale word; 1 where there was none.
        start: Offset in the normalised text.
        end: End offset in the normalised text.
    """

    exact: Decimal
    number: Decimal
    percent: bool
    currency: bool
    scale: int
    start: int
    end: int

    @property
    def value(self) -> float:
        """The value as a float; always finite."""
        return float(self.exact)

    @property
    def percent_value(self) -> float:
        """The value in percent units: 23.4 for "23.4%"."""
        return float(self.exact * 100)


def normalise(text: str) -> str:
    """Fold LaTeX and Unicode spellings of digits, signs, spaces and separators into one form."""
    text = _POWER_OF_TEN.sub(lambda m: "^" + m[0].translate(_SUPERSCRIPT), text).translate(_FOLD)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _FRACTION.sub(_fraction, text)


def _fraction(match: re.Match[str]) -> str:
    try:
        top, bottom = (Decimal(part.replace(",", "")) for part in match.groups())
        return f"{top / bottom:f}"
    except ArithmeticError:
        return match[0]


def parse_numbers(text: str, *, decimal_comma: bool = False) -> list[Quantity]:
    """Return every quantity in a text, in order.

    Dates, list numbering, step and note numbers, ordinals and digits inside names (``S_0``, ``CO2``,
    ``10-K``) are not quantities.

    Args:
        text: Any string.
        decimal_comma: Read ``2.718,05`` as 2718.05.
    """
    return scan(normalise(text), decimal_comma=decimal_comma)


def scan(text: str, *, decimal_comma: bool = False) -> list[Quantity]:
    """As :func:`parse_numbers`, for a text that :func:`normalise` returned; offsets are into it."""
    if decimal_comma:
        text = text.translate({ord(","): ".", ord("."): ","})
    taken = [match.span() for pattern in (_DATES, _LABELS) for match in pattern.finditer(text)]
    taken.sort()
    found: list[Quantity] = []
    position = index = 0
    while match := _NUMBER.search(text, position):
        position = match.end()
        while index < len(taken) and taken[index][1] <= match.start():
            index += 1
        if index < len(taken) and taken[index][0] <= match.start():
            position = max(taken[index][1], match.start() + 1)
            continue
        quantity = _read(text, match)
        if quantity is not None:
            found.append(quantity)
            position = max(position, quantity.end)
    return found


def _read(text: str, match: re.Match[str]) -> Quantity | None:
    """Read the quantity around one run of digits, or None where the digits belong to a name."""
    start, end = match.span()
    before = _BEFORE.search(text[max(0, start - 12) : start])
    assert before is not None  # every part is optional
    currency = before["cur"] is not None
    if not currency and start and (text[start - 1].isalnum() or text[start - 1] == "_"):
        return None
    if start > 1 and text[start - 1] == "." and text[start - 2].isdigit():
        return None
    exponent = _EXPONENT.match(text, end)
    power = int(exponent["e"] or exponent["p"]) if exponent else 0
    if exponent:
        end = exponent.end()
    elif _ORDINAL.match(text, end):
        return None
    digits = re.sub(r"[^0-9.]", "", match[0])
    if len(digits) > _MAX_DIGITS:
        return None

    left = start - len(before[0])
    negative = _negative(text, left, before)
    opened = _accounting(text, start)
    end, scale, percent, currency_after = _suffix(text, end, currency)
    if opened is not None and text[end : end + 1] == ")":
        end, outer, percent_outer, currency_after = _suffix(text, end + 1, currency)
        left, negative = opened, True
        scale *= outer
        percent = percent_outer if percent is None else percent
    number = Decimal(digits).scaleb(power)
    if negative and number:
        number = -number
    exact = number * scale / (percent or 1)
    if not math.isfinite(float(exact)) or not math.isfinite(float(exact * 100)):
        return None
    return Quantity(exact, number, percent is not None, currency or currency_after, scale, left, end)


def _negative(text: str, left: int, before: re.Match[str]) -> bool:
    """Tell whether a minus before the number is its sign rather than a dash, a range or a subtraction."""
    if before["sign2"] == "-":
        if before["cur"]:
            return True
        at, gap = left + len(before[0]) - len(before["gap3"]) - 1, before["gap3"]
    elif before["sign1"] == "-":
        at, gap = left, before["gap1"]
        if not before["cur"]:
            gap = before["gap1"] + before["gap2"] + before["gap3"]
    else:
        return False
    ahead = text[max(0, at - 8) : at]
    stripped = ahead.rstrip()
    if not stripped or stripped[-1] in "=:([{≈~>|,;\"'`$*":
        return True
    return not gap and (ahead != stripped)


def _accounting(text: str, start: int) -> int | None:
    """Return where accounting parentheses open right before the number, or None.

    They hold nothing but the amount, and stand neither after a name (a call) nor after an operator.
    """
    slice_start = max(0, start - 10)
    inner = text[slice_start:start].rstrip(" \u00a0")
    currency = _CURRENCY_BEFORE.search(inner)
    if currency:
        inner = inner[: currency.start()]
    if inner[-1:] in "+-" and inner:
        inner = inner[:-1]
    if not inner.endswith("("):
        return None
    at = slice_start + len(inner) - 1
    outside = text[max(0, at - 10) : at]
    code = _CURRENCY_BEFORE.search(outside)
    if code:
        return at - (len(outside) - code.start())
    if outside[-1:].isalnum() or outside[-1:] in set("_)]}"):
        return None
    if outside.rstrip()[-1:] in set("×*/+^÷"):
        return None
    if outside.strip() and re.match(r"(?:19|20)\d{2}\)", text[start : start + 5]):
        return None
    return at


def _suffix(text: str, end: int, currency: bool) -> tuple[int, int, Decimal | None, bool]:
    """Read scale word, percent mark and currency after a number.

    Returns:
        The end offset, the scale's factor, the percent divisor (100, 10000, 1000) or None, and whether a
        currency followed.
    """
    scale = 1
    word = _SCALE_WORD.match(text, end)
    if word is None:
        word = _SCALE_LETTER.match(text, end)
        if word is not None and not _letter_scales(word, currency):
            word = None
    if word is not None:
        scale = _SCALES[word["word"].lower()]
        end = word.end()
    mark = _PERCENT.match(text, end)
    if mark is not None:
        divisor = 100 if mark["percent"] else 10_000 if mark["bps"] else 1_000
        return mark.end(), scale, Decimal(divisor), False
    after = _CURRENCY_AFTER.match(text, end)
    return (after.end() if after and not currency else end), scale, None, after is not None


def _letter_scales(word: re.Match[str], currency: bool) -> bool:
    """Tell whether a lone letter is a scale: ``5k``, ``5M``, ``$5m``, but not ``5 m``."""
    letter, spaced = word["word"], bool(word["space"])
    if letter in ("m", "b", "t", "cr"):
        return currency
    return currency or not spaced
