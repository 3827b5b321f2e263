"""How every page is made: the jinja2 environment, numbers for reading, the file at the end.

A result of the five verbs is `Presented`: it has a verdict, a figure and a small page of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakbound._util import files
from leakbound._util.formats import (
    BELOW,
    format_explained,
    format_fixed,
    format_interval,
    format_lower,
    format_number,
    format_percent,
    format_upper,
)
from leakbound.assess.record import CriterionInfo, Verdict
from leakbound.report.tables import SHOWN, plain

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.figure import Figure

NEEDS = ("jinja2", "matplotlib", "markupsafe")
BREAKS = re.compile(r".*?[_/](?=[^_/])|.+", re.DOTALL)
"""The parts of a name: each may begin a line."""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'">
<style>body{{margin:2em auto;max-width:60em;padding:0 1em;color-scheme:light dark}}</style>
</head><body>{body}</body></html>
"""


def check_installed() -> None:
    """Raise `ValueError` unless the libraries that a report needs can be imported."""
    for name in NEEDS:
        try:
            __import__(name)
        except ImportError:
            raise ValueError(f"the report needs {name}; pip install 'leakbound[report]'") from None


def save(path: Path, page: str) -> Path:
    """Put a page at a path, in one step; refuses to replace a file that leakbound did not write."""
    with files.writing(path, name="page"):
        files.folder(path.parent)
        files.write(path, page.encode("utf-8"))
    return path


def environment_of(**settings: Any) -> Environment:
    """The jinja2 environment of every page: it escapes, and refuses what no reader should see.

    `row.update` is the entry of a dictionary that has one. A name that is not there, or a value
    that is a function, is an error: the page would show Python internals.
    """
    from jinja2 import Environment, StrictUndefined, Undefined

    class Pages(Environment):
        def getattr(
            self,
            obj: Any,
            attribute: str,
        ) -> Any:
            # `versions.items` is the version of a library of that name, not the method.
            is_entry = isinstance(obj, Mapping) and attribute in obj
            return obj[attribute] if is_entry else super().getattr(obj, attribute)

    def shown(value: Any) -> Any:
        if callable(value) and not isinstance(value, Undefined):
            raise TypeError(f"a page would show {value!r}; name an entry, or call the function")
        return value

    return Pages(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        **settings,
    )


def rendered(
    template: str,
    context: dict[str, Any],
    filters: dict[str, Callable[..., str]] | None = None,
) -> str:
    environment = _environment()
    if filters:
        environment = environment.overlay()
        environment.filters = environment.filters | filters
    return environment.get_template(template).render(context) + "\n"


@cache
def _environment() -> Environment:
    """That of our pages, which keeps its templates: a large run has many pages."""
    from jinja2 import PackageLoader

    environment = environment_of(
        loader=PackageLoader("leakbound.report"),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers: list[Callable[..., str]] = [decimal, significant, percent, explained]
    numbers += [upper_decimal, upper_bound, lower_bound, lower_percent, interval]
    words = (score, cell, brief, plain, listing, plural)
    environment.filters |= {function.__name__: function for function in (*numbers, *words)}
    environment.filters["name"] = breakable
    return environment


def breakable(text: str) -> Markup:
    """A text as HTML whose names break between their words only, and where no line holds one."""
    from markupsafe import Markup, escape

    return Markup(" ").join(
        Markup('<span class="w">{}</span>').format(
            Markup("<wbr>").join(map(escape, BREAKS.findall(word)))
        )
        if "_" in word or "/" in word
        else escape(word)
        for word in text.split(" ")
    )


def typeset(number: str) -> str:
    """A number's text with the signs that pages use."""
    return number.replace("-", "−").replace("%", "\N{NO-BREAK SPACE}%")


def decimal(value: float | None, digits: int = 1) -> str:
    return typeset(format_fixed(value, digits))


def upper_decimal(value: float | None, digits: int = 1) -> str:
    """An upper bound, such as a PSNR that no attacker exceeds."""
    return typeset(format_fixed(value, digits, up=True))


def score(value: float | None, criterion: CriterionInfo) -> str:
    """One example's score with its unit."""
    return decimal(None) if value is None else criterion.shown(value).replace("-", "−")


def cell(value: float | None, criterion: CriterionInfo) -> str:
    """One example's score where a heading names the unit."""
    return score(value, criterion).rpartition(" ")[0] or decimal(None)


def significant(value: float | None) -> str:
    """A number of any size in three digits."""
    return typeset(format_number(value))


def upper_bound(value: float | None) -> str:
    """An upper bound of any size, such as a probability that no attacker exceeds."""
    # It may be a number that underflowed.
    if value == 0:
        return typeset(BELOW)
    return typeset(format_upper(value))


def lower_bound(value: float | None) -> str:
    """A lower bound of any size, such as a probability that an attack attains."""
    return typeset(format_lower(value))


def percent(value: float | None, digits: int = 0) -> str:
    return typeset(format_percent(value, digits))


def lower_percent(value: float | None, digits: int = 1) -> str:
    """A share that an attack attains at least."""
    return typeset(format_percent(value, digits, up=False))


def interval(
    low: float,
    high: float,
    digits: int = 0,
) -> str:
    """The ends of an interval of shares, rounded outwards."""
    return typeset(format_interval(low, high, digits))


def explained(value: float | None) -> str:
    """A share of an update, with digits for what is left."""
    return typeset(format_explained(value))


def listing(values: Iterable[Any]) -> str:
    """Words joined as in a sentence."""
    words = [plain(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def brief(values: Sequence[str]) -> str:
    """`listing`; of very many, the first and a count of the rest."""
    more = len(values) - SHOWN
    return listing([*values[:SHOWN], f"{more} more"] if more > 0 else values)


def plural(
    count: int,
    one: str,
    many: str | None = None,
) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


class Presented:
    """A result with a verdict, a figure, a form in notebooks and a page of its own."""

    @property
    def verdict(self) -> Verdict:
        """The verdict in a word (docs/evidence.md)."""
        raise NotImplementedError

    def _figure(self) -> Figure:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def plot(self) -> Figure:
        """The result as a matplotlib figure.

        Raises:
            ValueError: there is nothing to draw, or `leakbound[report]` is not installed.
        """
        check_installed()
        return self._figure()

    def to_html(self, path: Path | str) -> Path:
        """Write the result as a page: one file that loads nothing; its path.

        Raises:
            ValueError: it cannot be written, or would replace a file that leakbound did not write.
        """
        check_installed()
        from leakbound._util import pictures  # late: it brings torch, which no other page needs

        title = pictures.text(f"leakbound: {self.verdict}")
        return save(Path(path), PAGE.format(title=title, body=self._repr_html_()))
