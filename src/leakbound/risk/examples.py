"""The examples that a statement about risk is for: from a data source, or by their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leakbound.assess.criterion import distance_of
from leakbound.bounds import record_priors
from leakbound.bounds.attainable import Attainable
from leakbound.bounds.counting import PublicSample, TheseExamples
from leakbound.bounds.language import BIGRAM, BigramText
from leakbound.bounds.law import positive, whole
from leakbound.domains import Domain
from leakbound.domains.known import NOTHING, as_marked, known_parts
from leakbound.risk.kappa import BaselineMatches, matches_at, row_matches
from leakbound.risk.target import Target

SHOWN = 10
NAMED = 5
"""Maximum number of example names in one line, and of names of rare rows."""
WIDEST = 1e100  # squares and their sums stay finite
SAMPLE = "sample"
THESE = "these"
SPHERE = "sphere"
ASKED = (
    "give data with examples like yours (the bound then needs no model), or dim, norm and the "
    'prior "sphere" (a uniform direction, under which nothing is called protected)'
)
"""What a statement about risk needs. The prior that knows nothing about the data is no default."""


@dataclass(frozen=True, eq=False)
class Examples:
    """The number of values and the range of norms of an example; with data, the examples too.

    `images` are (n, dim), in the model's input units. `origins` says which come from one source.
    `persons` is the largest number of one person's examples; None if nobody said who is who.
    `person_sizes` are the declared largest and mean number of one person's examples: statements are
    then for a random example, not for a random person.
    `left_out` names those that no amount of noise protects. `correlated`: they are standardized,
    so that they count by their normalized cross-correlation. `domain`: of rows of a table and of
    series, whose distance is no mean squared error. `form`: the domain of data, whatever its
    distance.
    """

    dim: int
    norms: tuple[float, float]
    images: NDArray[Any] | None = None
    source: str | None = None
    names: tuple[str, ...] = ()
    labels: NDArray[Any] | None = None
    origins: NDArray[Any] | None = None
    persons: int | None = None
    person_sizes: tuple[float, float] | None = None
    left_out: tuple[str, ...] = ()
    correlated: bool = False
    domain: Domain | None = None
    form: Domain | None = None

    @property
    def count(self) -> int | None:
        return None if self.images is None else len(self.images)

    @staticmethod
    def of(
        data: str | None,
        *,
        dim: int | None = None,
        norm: Sequence[float] | None = None,
        size: int | None = None,
        channels: int | None = None,
        schema: str | Path | None = None,
        person: str | None = None,
        exclude: Sequence[str] = (),
        input_range: tuple[float, float] = (0.0, 1.0),
        person_sizes: tuple[float, float] | None = None,
    ) -> Examples:
        """The examples of a data source, which must fit dim and norm if given; else of these two.

        Raises:
            ValueError: neither data nor both numbers are given, or data do not agree with them.
        """
        if data is None:
            if dim is None or norm is None:
                raise ValueError(f"dim and norm are not given; {ASKED}")
            options = size, channels, schema, person, person_sizes
            if any(value is not None for value in options):
                raise ValueError(
                    "size, channels, schema, person and people_mean are those of data, which are "
                    "not given"
                )
            if exclude:
                raise ValueError("exclude leaves out examples of data, which are not given")
            width_of(input_range)
            return Examples(dim, _possible(_range(norm), dim, input_range))
        examples = _loaded(data, size, channels, schema, person, exclude, input_range)
        if person_sizes is not None and examples.persons is None:
            raise ValueError(
                f"people_mean is {person_sizes[1]:g}, which needs data that say who is who (person "
                "in a table's schema, or --person for images); leave it out"
            )
        flat = examples.images
        assert flat is not None  # they were loaded
        if dim is not None and dim != examples.dim:
            raise ValueError(f"dim is {dim}, but the data have {examples.dim} values per example")
        sizes = np.ones(len(flat))
        if examples.domain is None:
            sizes = np.linalg.norm(flat, axis=1)
        norms = (float(sizes.min()), float(sizes.max()))
        if norm is not None:
            declared = _range(norm)
            if norms[0] < declared[0] or (len(norm) > 1 and norms[1] > declared[1]):
                raise ValueError(
                    f"norm is {declared[0]:g} to {declared[1]:g}, but the data's run from "
                    f"{norms[0]:.6g} to {norms[1]:.6g}; give a range that contains them"
                )
            norms = declared
        if norms[0] == 0:
            zero = sizes == 0
            raise ValueError(
                f"data holds {int(zero.sum())} examples of {len(zero)} that are all zeros, "
                "which the zero image matches without any update: "
                f"{listed(np.array(examples.names)[zero])}; leave them out: --exclude"
            )
        return replace(examples, norms=norms, person_sizes=person_sizes)

    def without_constants(self, target: Target) -> Examples:
        """Without those that a constant image matches; no amount of noise protects them."""
        if self.images is None or self.domain is not None:
            return self
        matched = self.images.var(1) <= target.eta
        # Leaving out most of the data would change what the statement is about.
        if 2 * matched.sum() > len(matched):
            raise ValueError(
                f"target is {target}, but a constant image matches {int(matched.sum())} of "
                f"{len(matched)} examples within it, without any update: no amount of noise helps; "
                "ask for a smaller error"
            )
        images = self.images[~matched]
        norms = self.norms
        # Norms of the data follow what is left; a declared range stays as it is.
        if matched.any() and norms[0] == np.linalg.norm(self.images, axis=1).min():
            norms = (float(np.linalg.norm(images, axis=1).min()), norms[1])
        names = np.array(self.names)
        kept = tuple(names[~matched])
        left = tuple(names[matched])
        origins, labels = (
            None if of is None else of[~matched] for of in (self.origins, self.labels)
        )
        return replace(
            self,
            images=images,
            norms=norms,
            names=kept,
            labels=labels,
            origins=origins,
            left_out=left,
        )

    def known(self, text: str | None) -> str | None:
        """The parts that an intruder knows: what a schema marks, if nothing is said; None: no part.

        "none" says that nobody knows a part.

        Raises:
            ValueError: it names no part of these data, or they count by correlation.
        """
        if self.form is None:
            return None if text == NOTHING else text
        named = as_marked(self.form, text or "") or None
        if named is not None and self.correlated:
            raise ValueError(f"ncc counts whole images, but known is {named!r}; leave one out")
        if named is not None:
            known_parts(self.form, named)
        return named

    def matches(self, levels: Sequence[float]) -> Sequence[BaselineMatches | None]:
        """What the prior-only baselines match in the data at each level; None without data.

        The data are compared with each other once.
        """
        if self.images is None:
            return [None for _ in levels]
        if self.domain is not None:
            return [self._row_matches(eta) for eta in levels]
        found = matches_at(self.images, levels)
        # No constant image has an NCC.
        return [replace(one, constant=0.0) for one in found] if self.correlated else found

    def people(self, declared: int | None) -> int:
        """The most examples of one person: as declared, else as counted, else 1.

        Raises:
            ValueError: the data hold more than are declared.
        """
        held = self.persons or 1
        if declared is not None and declared < held:
            raise ValueError(
                f"people is {declared}, but the data hold {held} examples of one person; give "
                f"people = {held} or more, or leave it out: they are then counted"
            )
        return held if declared is None else declared

    def prior(
        self, name: str | None = None, *, labels_known: bool = False
    ) -> record_priors.Baseline | None:
        """The prior by name; by default "sample" (no model), which needs data.

        None is a uniform direction ("sphere"), which knows nothing about the data. Known labels
        count if there is no model.

        Raises:
            ValueError: neither a prior nor data are given, or the data do not give the prior.
        """
        if name == SPHERE:
            return None
        if self.images is None and name is None:
            raise ValueError(f"prior is not given; {ASKED}")
        if self.images is None:
            raise ValueError(f"prior is {name!r}, which is taken from examples; give --data")
        kind = name or SAMPLE
        if self.person_sizes is not None and kind != SAMPLE:
            raise ValueError(
                f"people_mean is {self.person_sizes[1]:g}, which needs the prior {SAMPLE!r}, but "
                f"prior is {name!r}; leave one out"
            )
        if kind == SAMPLE:
            return self._labeled if labels_known else self._sample
        if kind == THESE:
            labels = self.labels if labels_known else None
            return TheseExamples(self.images, labels, **self._measured)
        vocabulary = None if self.domain is None else self.domain.vocabulary
        if vocabulary is not None and kind == BIGRAM:
            return BigramText.from_sequences(self.images, vocabulary)
        if self.domain is not None or kind == BIGRAM:
            what = "images" if self.domain is None else self.domain.name
            raise ValueError(
                f"prior is {kind!r}, no model of data with this distance ({what}); give "
                f"{SAMPLE!r} or {THESE!r}, or {BIGRAM!r} for text"
            )
        if labels_known:
            raise ValueError(
                f"labels_known needs the prior {SAMPLE!r} or {THESE!r}, but prior is {kind!r}"
            )
        try:
            return record_priors.from_images(self.images, kind)
        except ValueError as error:
            raise ValueError(
                f"prior {kind!r} cannot be taken from the data: {error}; give more data, or "
                "--prior sphere, under which nothing is called protected"
            ) from None

    def rare(
        self, prior: record_priors.Baseline | None, eta: float
    ) -> tuple[int, tuple[str, ...]] | None:
        """How many public rows no candidate matches together with another, and names of some.

        None for other data, and for private rows, whose numbers stay where they are.
        """
        if not isinstance(prior, PublicSample) or prior.basis != SAMPLE or self.domain is None:
            return None
        alone = prior.alone(eta)
        return len(alone), tuple(self.names[place] for place in alone[:NAMED])

    def attacks(self) -> Attainable | None:
        """Attacks that are counted on these examples, one per source; None without data."""
        if self.images is None:
            return None
        return Attainable.of(self._sample)

    @cached_property
    def _row_matches(self) -> Callable[[float], BaselineMatches]:
        assert self.images is not None  # checked by the caller
        assert self.domain is not None
        return row_matches(self.images, self.domain)

    @cached_property
    def _sample(self) -> PublicSample:
        """The examples as public ones; made once, because a sample keeps what it counted."""
        assert self.images is not None  # checked by the callers
        return PublicSample(self.images, **self._drawn)

    @cached_property
    def _labeled(self) -> PublicSample:
        """The same for an attacker who knows the labels."""
        assert self.images is not None  # checked by the callers
        return PublicSample(self.images, self.labels, **self._drawn)

    @property
    def _drawn(self) -> dict[str, Any]:
        """Which examples are independent, and how bounds measure distances."""
        return {"sources": self.origins, "source_sizes": self.person_sizes, **self._measured}

    @property
    def _measured(self) -> dict[str, Any]:
        """How bounds measure distances, if not by the mean squared error."""
        return {} if self.domain is None else {"distance": distance_of(self.domain)}


def person_sizes(people: int | None, mean: float | None) -> tuple[float, float] | None:
    """The declared largest and mean number of one person's examples, if a mean is declared.

    Raises:
        ValueError: the largest is not declared. No sample shows it: it may lack that person.
    """
    if mean is None:
        return None
    if people is None:
        raise ValueError(
            f"people_mean is {mean:g}, but people is not given; declare the largest number of one "
            "person's examples, as no sample shows it"
        )
    if not 1 <= mean <= people:
        raise ValueError(f"people_mean is {mean:g}; give a mean from 1 to people = {people}")
    return float(people), mean


def listed(names: Sequence[str] | NDArray[Any]) -> str:
    return ", ".join(map(str, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")


def width_of(input_range: tuple[float, float]) -> float:
    low, high = input_range
    if not (abs(low) <= WIDEST and abs(high) <= WIDEST and high - low >= 1 / WIDEST):
        raise ValueError(
            f"input_range is {low:g} {high:g}; give the lowest and the highest value of an input"
        )
    return high - low


def _loaded(
    source: str,
    size: int | None,
    channels: int | None,
    schema: str | Path | None,
    person: str | None,
    exclude: Sequence[str],
    input_range: tuple[float, float],
) -> Examples:
    """The examples of a source without the excluded ones; their norms are not known yet."""
    from leakbound import data

    width_of(input_range)
    low, high = input_range
    dataset = data.load(source, size=size, channels=channels, schema=schema, person=person)
    flat = dataset.inputs.flatten(1).double().numpy()
    names = dataset.files or tuple(map(str, range(len(flat))))
    keep = _kept(names, exclude)
    flat = flat[keep]
    domain = dataset.domain.fitted(dataset.inputs)
    least = flat.min()
    most = flat.max()
    if domain.distance_is_rmse and (least < low or most > high):
        raise ValueError(
            f"input_range is {low:g} to {high:g}, but the data run from {least:.6g} to "
            f"{most:.6g}; give a range that contains them"
        )
    return Examples(
        flat.shape[1],
        (0.0, 0.0),
        flat,
        source,
        tuple(np.array(names)[keep]),
        dataset.labels.numpy()[keep],
        None if dataset.origins is None else dataset.origins.numpy()[keep],
        None if dataset.people is None else int(dataset.people[keep].bincount().max()),
        domain=None if domain.distance_is_rmse else domain,
        form=domain,
    )


def _kept(names: Sequence[str], exclude: Sequence[str]) -> NDArray[Any]:
    """Which of the examples with these names (or numbers from 0) stay."""
    keep = np.ones(len(names), dtype=bool)
    place = {name: i for i, name in enumerate(names)}
    for word in exclude:
        # `isdecimal`, because int() rejects the other digits, such as superscripts.
        at = place.get(word, int(word) if word.isdecimal() else len(names))
        if at >= len(names):
            raise ValueError(
                f"exclude holds {word!r}, which names no example of the data; give numbers from 0 "
                f"to {len(names) - 1}, or names of image files"
            )
        keep[at] = False
    if not keep.any():
        raise ValueError(f"exclude leaves out all {len(names)} examples; leave some")
    return keep


def _possible(
    norms: tuple[float, float],
    dim: int,
    input_range: tuple[float, float],
) -> tuple[float, float]:
    """The norms that examples of dim values in this range can have."""
    low, high = input_range
    widest = math.sqrt(float(whole("dim", dim))) * max(abs(low), abs(high))
    nearest = math.sqrt(dim) * max(0.0, low, -high)
    if norms[1] > widest * (1 + 1e-9) or norms[0] < nearest * (1 - 1e-9):
        raise ValueError(
            f"norm is {norms[0]:g} to {norms[1]:g}, but {dim} values from {low:g} to {high:g} have "
            f"one of {nearest:.6g} to {widest:.6g}; give --input-range as it is in your data"
        )
    return norms


def _range(norm: Sequence[float]) -> tuple[float, float]:
    if not 1 <= len(norm) <= 2 or list(norm) != sorted(norm):
        raise ValueError(
            f"norm is {list(norm)}; give the smallest, or the smallest and the largest"
        )
    positive("norm", list(norm))
    return float(norm[0]), float(norm[-1])
