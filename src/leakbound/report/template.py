"""How every page is made: the jinja2 environment, numbers for reading, and the file at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leakbound._util import files
from leakbound.report.tables import SHOWN, plain

if TYPE_CHECKING:
    from jinja2 import Environment

NEEDS = ("jinja2", "matplotlib", "markupsafe")


def check_installed() -> None:
    """Raise `ValueError` unless the libraries that a report needs can be imported."""
    for name in NEEDS:
        try:
            __import__(name)
        except ImportError:
            raise ValueError(f"the report needs {name}; pip install 'leakbound[report]'") from None


def save(path: Path, page: str) -> Path:
    """Put a page at a path, in one step and readable by its owner only.

    Raises:
        ValueError: it cannot be written there, or would replace a file that leakbound did not
            write.
    """
    with files.writing(path, name="page"):
        files.folder(path.parent)
        files.write(path, page.encode("utf-8"))
    return path


def environment_of(**settings: Any) -> Environment:
    """The jinja2 environment of every page: it escapes, and refuses what no reader should see.

    `row.update` is the entry of a dictionary that has one, not the dictionary's method. A name that
    is not there, or a value that is a function, is an error: the page would show Python internals.
    """
    from jinja2 import Environment, StrictUndefined, Undefined

    class Pages(Environment):
        def getattr(self, obj: Any, attribute: str) -> Any:
            own = isinstance(obj, Mapping) and attribute in obj
            return obj[attribute] if own else super().getattr(obj, attribute)

    def shown(value: Any) -> Any:
        if callable(value) and not isinstance(value, Undefined):
            raise TypeError(f"a page would show {value!r}; name an entry, or call the function")
        return value

    return Pages(autoescape=True, undefined=StrictUndefined, finalize=shown, **settings)


def rendered(
    template: str, context: dict[str, Any], filters: dict[str, Callable[..., str]] | None = None
) -> str:
    """A page from one of the report's templates, with its own filters beside the common ones."""
    from jinja2 import PackageLoader
    from markupsafe import Markup

    environment = environment_of(
        loader=PackageLoader("leakbound.report"), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "decimal": decimal,
        "significant": significant,
        "brief": brief,
        "percent": percent,
        "chance": probability,
        "plain": plain,
        "listing": listing,
        "plural": plural,
        "explained": explained,
        "svg": Markup,  # our charts' own markup; matplotlib escapes what it is given
        **(filters or {}),
    }
    return environment.get_template(template).render(context) + "\n"


def decimal(value: float | None, digits: int = 1) -> str:
    """A number for reading; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def significant(value: float | None) -> str:
    """A number of any size in three digits; a dash where there is none.

    Example:
        >>> significant(1.9), significant(100.0)
        ('1.90', '100')
    """
    return "–" if value is None else f"{value:#.3g}".rstrip(".").replace("-", "−")


def percent(value: float | None, digits: int = 0) -> str:
    """A share for reading."""
    return "–" if value is None else f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"


def probability(value: float | None) -> str:
    """A probability of any size, never below itself.

    Example:
        >>> probability(0.1234), probability(2.11e-14), probability(0.0)
        ('0.124', '2.2e−14', 'at most 1e−300')
    """
    if value is None:
        return "–"
    if value <= 1e-300:
        return "at most 1e−300"
    digits = 2 if value < 1e-4 else 3
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
    up = value if value == float(f"{value:.{digits}g}") else math.ceil(value / unit) * unit
    return f"{up:.{digits}g}".replace("-", "−")


def explained(value: float | None) -> str:
    r"""A share of an update for reading, with digits for what is left.

    Example:
        >>> explained(0.99999), explained(-0.3), explained(None)
        ('99.999\xa0%', '0.0\xa0%', '–')
    """
    if value is None:
        return "–"
    left = 1 - value
    return percent(max(value, 0.0), 1 if left >= 1e-3 else 3 if left >= 1e-6 else 5)


def listing(values: Iterable[Any]) -> str:
    """Words joined as in a sentence.

    Example:
        >>> listing([1, 4, 8])
        '1, 4 and 8'
    """
    words = [plain(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def brief(values: Sequence[str]) -> str:
    """`listing`; of very many, the first and a count of the rest."""
    more = len(values) - SHOWN
    return listing([*values[:SHOWN], f"{more} more"] if more > 0 else values)


def plural(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun.

    Example:
        >>> plural(1, "batch", "batches"), plural(0, "experiment")
        ('1 batch', '0 experiments')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
