"""Numbers and dates as people write them in tables, and the settings of a column that read them.

What has one meaning is always read: Unicode digits and minus signs, no-break spaces and apostrophes
between thousands, the Arabic decimal mark. What has two, such as 12.345 or 03/04/2024, is read as
the schema says. `ColumnTexts` finds the settings that fit a column, and what to ask about them.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leakbound.domains import Column
from leakbound.domains.table import DECIMALS, EPOCH

MISSING = frozenset({"", "NA", "NaN", "nan", "?", "null"})
"""What counts as a missing value."""
BEYOND = "beyond"
OTHER = "other"
"""Names of what `ColumnTexts` shows: a number beyond a limit, a text that is no number."""
ENOUGH = 0.99
MANY = 0.5
"""Share of a column's present values that must be numbers if it is to count as one of numbers; the
share from which it is asked about.
"""
_NAN = dict.fromkeys(MISSING, "nan")
_LONGEST = 64
_KNOWN = 1 << 16
"""Characters of a number; texts of dates whose day is remembered."""

_PLAIN = {
    ord(sign): plain
    for plain, signs in {
        "-": "\u2212\uff0d\ufe63\u2013",
        "+": "\uff0b",
        " ": "\u00a0\u202f\u2009\u2007\u3000",
        "'": "\u2019\u02bc\uff07",
        ".": "\uff0e",
        ",": "\uff0c",
        "%": "\uff05\u066a",
        "": "\u200e\u200f\u061c\ufeff",  # marks of direction, and of the byte order
    }.items()
    for sign in signs
}
"""What stands for a plain sign in other scripts and in typography."""
_ARABIC = {".": str.maketrans("٫٬", ".,"), ",": str.maketrans("٫٬", ",.")}
"""The Arabic marks of decimals and of thousands, in the signs of a decimal mark."""
_NUMBER = {
    decimal: re.compile(
        rf"(?:[1-9]\d{{0,2}}([{thousands}])(?:\d{{2,3}}\1)*\d{{3}}|\d*)"  # 12,34,567 in India
        rf"(?:[{decimal}]\d*)?(?:e[+-]?\d+)?",
        re.ASCII | re.IGNORECASE,
    )
    for decimal, thousands in {".": " ,'", ",": " .'"}.items()
}
_DIGITS = re.compile(r"[.,٫]?\d(?:[\d .,'٫٬]*\d)?[.,]?(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_BEYOND = re.compile(r"^(?:[<>]=?|=[<>]|[≤≥])\s*(?=\S)|(?<=\d)\s*\+$")
"""What says that a number is beyond a limit: <0.5, 90+."""
_MAYBE = re.compile(
    r"[\W_]*(?:[^\W\d_]{1,3}[^\w\s]{1,2} ?|[A-Z]{3} |[^\W\d_]{3,9} (?=\d\d?,))?[+-]?[.,٫]?\d"
)
"""How a number or a date begins: after signs, a currency or the name of a month."""
_NO_UNIT = re.compile(r"[\s()\[\]:;<>=,]")
_COUNTED = re.compile(r"[\W_]*\d")
"""Of a text whose first letter or digit is a digit."""

_TIME = re.compile(
    r"(?:T|,? )\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AP]M)?(?: ?(?:Z|[+-]\d\d:?\d\d))?$",
    re.ASCII | re.IGNORECASE,
)
_DATE = re.compile(r"\d{1,4}[-/. ]?(?:\d\d?|[^\W\d_]{3,9})[-/. \d]|[^\W\d_]{3,9} \d\d?, ?\d")
"""How a date begins: what does not is looked at no further."""
_MONTHS = ("%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%d-%b-%Y", "%d-%b-%y", "%d%b%Y")
_FORMATS: dict[str, tuple[str, ...]] = {
    shape.replace("-", sign): tuple(pattern.replace("-", sign) for pattern in formats)
    for sign in "-/."
    for shape, formats in {
        "4-2-2": ("%Y-%m-%d",),
        "2-2-4": ("%d-%m-%Y", "%m-%d-%Y"),
        "2-2-2": ("%d-%m-%y", "%m-%d-%y", "%y-%m-%d"),
    }.items()
} | dict.fromkeys(("2 a 4", "a 2, 4", "2-a-4", "2-a-2", "2a4"), _MONTHS)
"""Shape of a date -> its possible formats; 2 is up to two digits, 4 is four, `a` is letters."""
_WORD = re.compile(r"\d+|[^\W\d_]+")
_PARTS = {"%d": "day", "%m": "month", "%b": "month", "%B": "month", "%Y": "year", "%y": "year"}


@dataclass(frozen=True)
class NumberFormat:
    """How the texts of a column become numbers; with a `format`, dates become days since 1970.

    Attributes:
        beyond: whether a number beyond a limit, such as "<0.5", counts as the limit.
        latest: a date with a two-digit year lies in the century that ends with it at the latest.

    Example:
        >>> NumberFormat(",", "€").read(["1.234,50 €", "\u22125", "1.5"]).tolist()
        [1234.5, -5.0, nan]
        >>> NumberFormat(format="%d.%m.%Y").read(["02.01.1970", "31.02.2024"]).tolist()
        [1.0, nan]
    """

    decimal: str = "."
    unit: str = ""
    beyond: bool = False
    format: str = ""
    latest: float = np.inf

    @classmethod
    def of(cls, column: Column) -> NumberFormat:
        """As the column's settings say."""
        if column.kind == "date":
            return cls(format=column.format, latest=column.high)
        return cls(column.decimal, plain(column.unit), column.censored == "limit")

    def read(self, texts: Sequence[str]) -> NDArray[Any]:
        """(N,) float64; NaN for a text that is no such number."""
        if self.format:
            return _each(texts, self._day)
        # There a point separates thousands, and `float` would take 1.234 for a fraction.
        values = None if self.decimal == "," and "." in "".join(texts) else floats(texts)
        return _each(texts, self._number) if values is None else values

    def _day(self, text: str) -> float:
        day = _day(text, self.format)
        if day > self.latest and "%y" in self.format:
            return _day(text, self.format, centuries_back=1)
        return day

    def _number(self, text: str) -> float:
        body = plain(text)
        if self.beyond:
            body = _BEYOND.sub("", body, count=1)
        sign, body = _signed(body)
        if self.unit:
            body = body.removeprefix(self.unit).removesuffix(self.unit).strip()
        # The sign stands before the unit or after it: -€5 and €-5.
        if not sign:
            sign, body = _signed(body)
        return _number(sign + body, self.decimal)


def floats(texts: Sequence[str]) -> NDArray[Any] | None:
    """Texts as float64 if all are plain finite numbers or missing (NaN); None for other texts.

    Example:
        >>> floats(["1e3", " -.5", "NA"]).tolist(), floats(["1_0"]), floats(["inf"])
        ([1000.0, -0.5, nan], None, None)
    """
    try:
        values = np.fromiter(map(float, map(_NAN.get, texts, texts)), np.float64, len(texts))
    except ValueError:
        return None
    joined = "".join(texts)
    # `float` also reads other scripts, 1_0 and inf: the rules below decide on those.
    plain = joined.isascii() and "_" not in joined
    return values if plain and not np.isinf(values).any() else None


def plain_numbers(texts: Sequence[str]) -> NDArray[Any]:
    """(N,) float64: numbers that need no settings to be read; NaN for other texts.

    Example:
        >>> plain_numbers(["1.5", "1,234"]).tolist()
        [1.5, nan]
    """
    values = floats(texts)
    return _each(texts, _plain_number) if values is None else values


def _plain_number(text: str) -> float:
    value = floats([text])
    return np.nan if value is None else float(value[0])


def plain(text: str) -> str:
    """A text with plain digits, signs and spaces, none of them around it.

    Example:
        >>> plain("\u2212\u0661\u202f\u0662\u0663\u0664")
        '-1 234'
    """
    line = text.strip() if text.isascii() else text.translate(_PLAIN).strip()
    if line.isascii():
        return line
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in line)


def is_beyond(text: str) -> bool:
    """Whether a text says that a number is beyond a limit.

    Example:
        >>> is_beyond("<0.5"), is_beyond("90+"), is_beyond("+90"), is_beyond("<b>")
        (True, True, False, False)
    """
    return bool(_BEYOND.search(plain(text))) and any(c.isdecimal() for c in text)


def _each(texts: Sequence[str], read: Callable[[str], float]) -> NDArray[Any]:
    none = {text for text in set(texts) if text in MISSING or len(text) > _LONGEST}
    # columns repeat their values, so each text is read once
    known = {text: np.nan if text in none else read(text) for text in set(texts)}
    return np.fromiter(map(known.__getitem__, texts), np.float64, len(texts))


def _signed(text: str) -> tuple[str, str]:
    return (text[0], text[1:].strip()) if text[:1] in ("-", "+") else ("", text)


def _number(text: str, decimal: str) -> float:
    """The number with that decimal mark; NaN if it is none, or not finite."""
    sign, body = _signed(text.translate(_ARABIC[decimal]))
    if len(body) > _LONGEST or not _NUMBER[decimal].fullmatch(body):
        return np.nan
    other = "," if decimal == "." else "."
    for mark in (" ", "'", other):
        body = body.replace(mark, "")
    try:
        value = float(sign + body.replace(decimal, "."))
    except ValueError:  # no digit
        return np.nan
    return value if np.isfinite(value) else np.nan


def _parts(text: str) -> tuple[str, str] | None:
    """A plain text as number and unit, such as ("-5", "€") for "-€5"; None if it is neither."""
    digits = _DIGITS.search(text)
    if digits is None or len(text) > _LONGEST:
        return None
    before = text[: digits.start()]
    sign = ""
    if before[:1] in ("-", "+"):
        sign = before[0]
        before = before[1:]
    elif before[-1:] in ("-", "+"):
        sign = before[-1]
        before = before[:-1]
    after = text[digits.end() :].strip()
    name = before.strip()
    money = name == "%" or (unicodedata.category(name[-1:] or " ") == "Sc" and len(name) <= 4)
    money |= re.fullmatch(" ?[A-Z]{3} ", before) is not None
    # Only a currency or a percent sign may stand before its number.
    if (name and (after or not money)) or (after and not _is_unit(after)):
        return None
    return sign + digits[0], name or after


def _form(text: str) -> tuple[str, str] | None:
    """The decimal marks with which a plain text is a number, as in `ColumnTexts`, and its unit."""
    parts = _parts(_BEYOND.sub("", text, count=1))
    if parts is None:
        return None
    digits, unit = parts
    values = {mark: _number(digits, mark) for mark in DECIMALS}
    marks = "".join(mark for mark, value in values.items() if not np.isnan(value))
    if not marks:
        return None
    return "" if values["."] == values[","] else marks, unit


class _TextKind(NamedTuple):
    """What one text may be: its decimal marks and unit as a number, or its formats as a date."""

    number: tuple[str, str] | None = None
    formats: tuple[str, ...] = ()
    beyond: bool = False
    time: bool = False
    counted: bool = False


@lru_cache(_KNOWN)
def _look(text: str) -> _TextKind:
    body = plain(text)
    if _MAYBE.match(body) is None:
        return _TextKind()
    counted = _COUNTED.match(body) is not None
    if formats := formats_of(body):
        return _TextKind(
            None,
            formats,
            time=_TIME.search(body) is not None,
            counted=counted,
        )
    return _TextKind(
        _form(body),
        beyond=_BEYOND.search(body) is not None,
        counted=counted,
    )


def _is_unit(text: str) -> bool:
    first = text[0]
    begins = first.isalpha() or first in "%‰°" or unicodedata.category(first) == "Sc"
    return begins and len(text) <= 12 and _NO_UNIT.search(text) is None


@lru_cache(_KNOWN)
def _day(
    text: str,
    form: str,
    centuries_back: int = 0,
) -> float:
    """The day since 1970 that a date in this format names; NaN if it is none."""
    try:
        date = datetime.strptime(_TIME.sub("", plain(text)), form).date()
        # 29 February may not exist then, which is an error, too.
        return date.replace(year=date.year - 100 * centuries_back).toordinal() - EPOCH
    except ValueError:
        return np.nan


def formats_of(text: str) -> tuple[str, ...]:
    """The formats in which a text is a date.

    Example:
        >>> formats_of("2024-03-01 12:30"), formats_of("03/04/2024"), formats_of("13/04/2024")
        (('%Y-%m-%d',), ('%d/%m/%Y', '%m/%d/%Y'), ('%d/%m/%Y',))
    """
    body = plain(text)
    if len(body) > _LONGEST or not _DATE.match(body):
        return ()
    body = _TIME.sub("", body)
    shape = _WORD.sub(_place, body)
    return tuple(form for form in _FORMATS.get(shape, ()) if not np.isnan(_day(text, form)))


def _place(word: re.Match[str]) -> str:
    if not word[0].isdecimal():
        return "a"
    return {1: "2", 2: "2", 4: "4"}.get(len(word[0]), "?")


@dataclass
class ColumnTexts:
    """What the texts of a column say about how to read them.

    `numbers` counts values by (decimal mark, unit): the mark is "" where none is needed, and ".,"
    where both give a number, but not the same. `shown` holds the first text of each kind.
    """

    present: int = 0
    numbers: Counter[tuple[str, str]] = field(default_factory=Counter)
    dates: Counter[tuple[str, ...]] = field(default_factory=Counter)
    beyond: int = 0
    times: int = 0
    counted: int = 0
    shown: dict[Any, str] = field(default_factory=dict)

    def add(self, texts: Sequence[str]) -> None:
        """Count the values of a block."""
        values = floats(texts)
        points = "." in "".join(texts)
        # Until a text shows that the point is the decimal mark, 1.234 may mean thousands.
        if values is None or (points and not self.numbers[".", ""]):
            for text, count in Counter(texts).items():
                if text not in MISSING:
                    self.present += count
                    self._add(text, count)
            return
        known = int((~np.isnan(values)).sum())
        missing = sum(map(MISSING.__contains__, texts)) if known < len(texts) else 0
        self.present += len(texts) - missing
        self.numbers["." if points else "", ""] += known

    def _add(self, text: str, count: int) -> None:
        look = _look(text) if len(text) <= _LONGEST else _TextKind()
        self.counted += count * look.counted
        if look.formats:
            self.dates[look.formats] += count
            self.times += count * look.time
        elif look.number is not None:
            self.numbers[look.number] += count
            self.beyond += count * look.beyond
            if look.beyond:
                self.shown.setdefault(BEYOND, text)
        self.shown.setdefault(look.formats or look.number or OTHER, text)

    @property
    def mark(self) -> str:
        """The decimal mark that its numbers need; "" if none, or both."""
        # The plus drops kinds that were counted 0 times.
        needed = {marks for marks, _ in +self.numbers if marks in DECIMALS}
        return needed.pop() if len(needed) == 1 else ""

    def choice(self, mark: str) -> DraftedFormat:
        """How to read the column; `mark` is the decimal mark where nothing in it says which."""
        choice = self._date() or self._numbers(mark)
        if choice is not None:
            return choice
        read = sum(self.numbers.values()) + sum(self.dates.values())
        mixed = bool(read) and read >= ENOUGH * self.present
        forms = [repr(text[:20]) for key, text in self.shown.items() if key not in (BEYOND, OTHER)]
        ask = ""
        if mixed:
            ask = f"ask: numbers or dates in several forms, as {', '.join(forms[:3])}? Write one"
        elif self.present and max(read, self.counted) >= MANY * self.present:
            text = self.shown.get(OTHER, "")[:20]
            ask = f"ask: numbers? {read} of {self.present} values are read as such, {text!r} is not"
        return DraftedFormat(None, None, (ask,) if ask else (), mixed=mixed)

    def _date(self) -> DraftedFormat | None:
        fits = Counter[str]()
        for formats, count in self.dates.items():
            fits.update(dict.fromkeys(formats, count))
        fit = [form for form, count in fits.most_common() if count >= ENOUGH * self.present]
        if not fit:
            return None
        said = [] if fit[0] == "%Y-%m-%d" else [f"dates as {order(fit[0])}"]
        if "%y" in fit[0]:
            said.append("ask: years of two digits; a date after high is a century earlier")
        said += ["times of day are left out"] if self.times else []
        other = NumberFormat(format=fit[1]) if len(fit) > 1 else None
        return DraftedFormat(NumberFormat(format=fit[0]), other, tuple(said))

    def _numbers(self, mark: str) -> DraftedFormat | None:
        enough = ENOUGH * self.present
        units = Counter[str]()
        for (_, unit), count in self.numbers.items():
            units[unit] += count
        bare = units.pop("", 0)
        few = bare >= enough  # values with a unit are then among those to mend
        name = "" if few else max(units, key=units.__getitem__, default="")
        fits = dict.fromkeys(DECIMALS, 0)
        for (marks, unit), count in self.numbers.items():
            if unit in ("", name):
                fits |= {decimal: fits[decimal] + count for decimal in marks or DECIMALS}
        best, second = sorted(
            DECIMALS,
            key=lambda one: (fits[one], one == mark),
            reverse=True,
        )
        if not fits[best] or fits[best] < enough:
            return None
        said = []
        if name and bare:
            said.append(f"ask: {bare} values have no {name!r}; are they in {name!r} too?")
        elif name:
            said.append(f"{'ask: ' * name[0].isalpha()}numbers in {name!r}")
        if best == ",":
            said.append("a comma is the decimal mark")
        if self.beyond:
            said.append(
                f"ask: does {self.shown[BEYOND][:20]!r} count as the limit? For a missing value: "
                'censored = "missing", missing = true'
            )
        both = any(marks == ".," and unit in ("", name) for marks, unit in self.numbers)
        same = both and fits[second] == fits[best]
        other = NumberFormat(second, name, beyond=True) if same else None
        return DraftedFormat(NumberFormat(best, name, self.beyond > 0), other, tuple(said))


@dataclass(frozen=True)
class DraftedFormat:
    """How a column is read; None if it holds no numbers and no dates.

    Attributes:
        other: another reading, under which the same texts are other numbers.
        said: what a person should know, or is asked.
        mixed: whether its values are numbers and dates of which no reading reads all.
    """

    reading: NumberFormat | None
    other: NumberFormat | None
    said: tuple[str, ...]
    mixed: bool = False


def order(form: str) -> str:
    """The order of a date's parts.

    Example:
        >>> order("%d.%m.%Y")
        'day, month, year'
    """
    return ", ".join(_PARTS[code] for code in re.findall("%[a-zA-Z]", form))
