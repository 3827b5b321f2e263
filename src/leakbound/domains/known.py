"""Parts of an example that an attacker knows already, and the domain of what is left.

Only the unknown part counts as reconstructed: a criterion, a baseline or a bound for an attacker
who knows some parts is that of `Known.rest`, on `Known.unknown(examples)`.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, field, replace
from functools import singledispatch

import torch
from torch import Tensor

from leakbound.domains.base import Domain, ImageDomain, NumberDomain, SeriesDomain
from leakbound.domains.masks import read_mask
from leakbound.domains.table import TableDomain
from leakbound.domains.tokens import TokenDomain

__all__ = ["Known", "KnownValues", "as_marked", "known_parts", "names_in"]

NOTHING = "none"
"""The text for who knows no part, whatever a schema marks as known."""

EVERYTHING = "all"
"""The text for who knows every column of a table: the label is asked for."""
LABEL = "the label"
"""What an attribute is called that is no column."""
ALL_BUT = "all but "
"""Before names of columns: all others are known."""
MASK = "mask:"
"""Before a file that says which pixels are known."""
HALVES = {"top": (0, 0), "bottom": (0, 1), "left": (1, 0), "right": (1, 1)}
"""Regions of an image by name: the axis that is halved, and which half is known."""


@dataclass(frozen=True)
class Known:
    """The parts of an example that an attacker knows, without their values.

    Attributes:
        text: the parts as they were given, such as "sex,zip" or "region:top".
        domain: of whole examples.
        places: (n,) True where a number of the flat example belongs to a known part.
        part, rest: the domains of the known and of the unknown part.
    """

    text: str
    domain: Domain
    # They follow from text and domain.
    places: Tensor = field(compare=False)
    part: Domain = field(compare=False)
    rest: Domain = field(compare=False)

    @property
    def everything(self) -> bool:
        """Whether all columns of a table are known: the label is asked for."""
        return self.rest.parts == 0

    def unknown(self, examples: Tensor) -> Tensor:
        """(N, *rest.shape) the unknown part of examples (N, *shape)."""
        return examples.flatten(1)[:, ~self.places].reshape(len(examples), *self.rest.shape)

    def values(self, examples: Tensor) -> Tensor:
        """(N, *part.shape) the known part of examples (N, *shape)."""
        return examples.flatten(1)[:, self.places].reshape(-1, *self.part.shape)

    def joined(
        self,
        values: Tensor,
        unknown: Tensor,
    ) -> Tensor:
        """(N, *shape) whole examples from known and unknown parts."""
        whole = unknown.new_empty(len(unknown), len(self.places))
        whole[:, self.places] = values.to(unknown).flatten(1)
        whole[:, ~self.places] = unknown.flatten(1)
        return whole.reshape(-1, *self.domain.shape)


@dataclass(frozen=True, eq=False)
class KnownValues:
    """The known parts (N, *parts.part.shape) of a batch's examples."""

    parts: Known
    values: Tensor

    @property
    def mask(self) -> Tensor:
        """(*shape) True where a number of an example is known."""
        return self.parts.places.reshape(self.parts.domain.shape).to(self.values.device)

    def filled(self, examples: Tensor) -> Tensor:
        """Examples (N, *shape), one for each value, with the known parts put in."""
        parts = self.parts
        return parts.joined(self.values, parts.unknown(examples))


def known_parts(domain: Domain, text: str) -> Known:
    """The known parts that a text names, for examples of a domain.

    Args:
        domain: of the examples.
        text: for a table, names of columns, such as "birth_date,sex,zip", or "all but diagnosis",
            or "all", which leaves the label alone; names with a comma are in quotes, as in CSV. For
            images "region:top" (bottom, left, right) or "region:Y0-Y1,X0-X1", rows and columns of
            pixels from 0, the last included, or "mask:FILE", the pixels that are not 0 in a .npz,
            .safetensors or .png file. For series "channels:0,2" or "past:24", the first times of
            every channel; for text "prefix:N", the first tokens, or "places:0-9,15"; for other
            inputs "places:...".

    Raises:
        ValueError: the text names no part, an unknown one, or all of them.

    Example:
        >>> from leakbound.domains import of_shape
        >>> known = known_parts(of_shape((1, 28, 28)), "region:top")
        >>> int(known.places.sum()), known.rest.shape
        (392, (392,))
    """
    places = _places_of(domain, text)
    if bool(places.all()) and text != EVERYTHING:
        raise ValueError(f"known is {text!r}, the whole example: nothing is left to reconstruct")
    return Known(text, domain, places, _restricted(domain, places), _restricted(domain, ~places))


def as_marked(domain: Domain, text: str) -> str:
    """The text of the known parts: "" gives the columns that a table's schema marks as known.

    "none" is nobody's knowledge, and gives "".

    Example:
        >>> from leakbound.domains import Column
        >>> table = TableDomain((Column("age", known=True), Column("income")))
        >>> as_marked(table, ""), as_marked(table, "income"), as_marked(table, "none")
        ('age', 'income', '')
    """
    if text == NOTHING:
        return ""
    if text or not isinstance(domain, TableDomain):
        return text
    return ",".join(_quoted(column.name) for column in domain.columns if column.known)


def mask_file(text: str) -> str | None:
    """The file that says what is known, if there is one."""
    return text.removeprefix(MASK) if text.startswith(MASK) else None


def names_in(text: str) -> list[str]:
    """The names in a line of CSV: one with a comma is in quotes.

    Example:
        >>> names_in('age, "weight, kg"')
        ['age', 'weight, kg']
    """
    [names] = csv.reader([text], skipinitialspace=True)
    return [name.strip() for name in names]


def _quoted(name: str) -> str:
    """A name as `names_in` reads it."""
    plain = not {",", '"'} & {*name} and name == name.strip()
    return name if plain else '"' + name.replace('"', '""') + '"'


@singledispatch
def _places_of(domain: Domain, text: str) -> Tensor:
    """(n,) which numbers of the flat example the text names."""
    raise ValueError(f"known is {text!r}, but examples of {domain.name} have no named parts")


@_places_of.register
def _(domain: NumberDomain, text: str) -> Tensor:
    return _listed(_after("places", text), math.prod(domain.shape), text)


@_places_of.register
def _(domain: ImageDomain, text: str) -> Tensor:
    height, width = domain.shape[1:]
    file = mask_file(text)
    if file is not None:
        return read_mask(file, height, width).expand(domain.shape).flatten()
    region = _after("region", text)
    known = torch.zeros(height, width, dtype=torch.bool)
    if region in HALVES:
        axis, half = HALVES[region]
        known.chunk(2, axis)[half].fill_(True)
    else:
        rows, _, columns = region.partition(",")
        known[_span(rows, height, text), _span(columns, width, text)] = True
    return known.expand(domain.shape).flatten()


@_places_of.register
def _(domain: SeriesDomain, text: str) -> Tensor:
    channels, times = domain.shape
    known = torch.zeros(domain.shape, dtype=torch.bool)
    if text.startswith("past:"):
        known[:, : _count(_after("past", text), times, text)] = True
    else:
        known[_listed(_after("channels", text), channels, text)] = True
    return known.flatten()


@_places_of.register
def _(domain: TokenDomain, text: str) -> Tensor:
    if text.startswith("prefix:"):
        return torch.arange(domain.length) < _count(_after("prefix", text), domain.length, text)
    return _listed(_after("places", text), domain.length, text)


@_places_of.register
def _(domain: TableDomain, text: str) -> Tensor:
    but = text.startswith(ALL_BUT)
    names = names_in(text.removeprefix(ALL_BUT))
    columns = [column.name for column in domain.columns]
    if text == EVERYTHING:
        names = columns
    for name in names:
        if name not in columns:
            shown = ", ".join(map(_quoted, columns[:30]))
            raise ValueError(f"known names {name!r}; the columns are {shown}")
    places = torch.zeros(domain.shape, dtype=torch.bool)
    for column, start, stop in domain.placed:
        places[start:stop] = (column.name in names) is not but
    return places


@singledispatch
def _restricted(domain: Domain, places: Tensor) -> Domain:
    """The domain of a part of an example."""
    raise NotImplementedError(domain.name)


@_restricted.register
def _(domain: NumberDomain, places: Tensor) -> Domain:
    # Neighbors of a region are not those of its numbers in a line.
    return NumberDomain((int(places.sum()),), domain.input_range, domain.dtype)


@_restricted.register
def _(domain: SeriesDomain, places: Tensor) -> Domain:
    inside = places.reshape(domain.shape)
    kept = inside.any(1).nonzero().flatten().tolist()
    # Without scales every channel counts in units of the input range.
    scales = tuple(domain.scales[channel] for channel in kept) if domain.scales else ()
    return replace(domain, shape=(len(kept), int(inside.sum()) // len(kept)), scales=scales)


@_restricted.register
def _(domain: TokenDomain, places: Tensor) -> Domain:
    return replace(domain, length=int(places.sum()))


@_restricted.register
def _(domain: TableDomain, places: Tensor) -> Domain:
    columns = tuple(column for column, start, _ in domain.placed if bool(places[start]))
    return replace(domain, columns=columns)


def _after(word: str, text: str) -> str:
    head, _, parts = text.partition(":")
    if head.strip() != word or not parts.strip():
        raise ValueError(f"known is {text!r}; give {word}:..., see `leakbound.domains.known_parts`")
    return parts.strip()


def _count(
    part: str,
    most: int,
    text: str,
) -> int:
    if not part.isdecimal() or not 0 < int(part) < most:
        raise ValueError(f"known is {text!r}; give a number from 1 to {most - 1}")
    return int(part)


def _listed(
    parts: str,
    size: int,
    text: str,
) -> Tensor:
    """(size,) True at numbers and ranges such as 0-9,15."""
    known = torch.zeros(size, dtype=torch.bool)
    for part in parts.split(","):
        known[_span(part, size, text)] = True
    return known


def _span(
    part: str,
    size: int,
    text: str,
) -> slice:
    """A number, or numbers from A to B written A-B, both included."""
    ends = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
    if ends is None:
        raise ValueError(f"known is {text!r}; {part!r} is no number or range such as 0-9")
    first = int(ends[1])
    last = int(ends[2] or first)
    if not first <= last < size:
        raise ValueError(f"known is {text!r}; give numbers from 0 to {size - 1}")
    return slice(first, last + 1)
