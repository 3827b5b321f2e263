"""Intruders: attackers who have parts of an example, with the truth among their candidates.

A population is all examples that there are. Public ones are drawn from it, and so are victims: the
one assumption of a statement holds, and the attackers know the population itself. The server may
choose the gradient of each example, so two intruders are enough: one gives every example a
direction of its own, one gives every answer a corner of a simplex.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from leakbound import data
from leakbound._util.codewords import covering
from leakbound.assess.attackers import Intruder, rows_of, with_known_parts
from leakbound.assess.criterion import Criterion, distance_of
from leakbound.assess.record import AttackerRow
from leakbound.bounds.counting import PublicSample
from leakbound.domains import Column, TableDomain
from leakbound.risk.corridor import TrainingSetting, success_bound

Array = np.ndarray
Generator = np.random.Generator

TRIALS = 4000
PUBLIC = 600
LEVEL = 1e-4
"""Chance that an attack counts as above a limit that it meets exactly."""
NOISES = (0.5, 1.0, 2.0, 5.0)
SIZES = (1, 2, 3, 4, 8, 16, 64, 256)
"""Answers among which the update chooses; with one, it does not count."""
TRIED = 300
"""Attacks by which an intruder chooses their number."""


@dataclass(frozen=True, eq=False)
class Population:
    """One example (N, *shape) of every person, and what counts of it.

    Attributes:
        copies: (N,) how many equal examples the person has in the update.
        labels: (N,) if intruders know them; None if they do not.
    """

    name: str
    examples: Tensor
    criterion: Criterion
    copies: Array
    labels: Array | None = None

    @property
    def flat(self) -> Array:
        return self.examples.flatten(1).double().numpy()


@dataclass(frozen=True)
class Reached:
    """What intruders reach in TRIALS attacks.

    Attributes:
        hits: of the better intruder.
        prior: the probability of the best answers without the update, exactly.
    """

    hits: int
    prior: float

    def exceeds(self, limit: float) -> bool:
        """Whether intruders are above a limit for certain."""
        if self.hits == 0:
            return False
        return bool(stats.beta.ppf(LEVEL, self.hits, TRIALS - self.hits + 1) > limit)


@dataclass(frozen=True)
class Statement:
    """The rows of stranger, intruder and anyone, and the attack on them."""

    name: str
    noise: float
    stranger: AttackerRow
    intruder: AttackerRow
    anyone: AttackerRow
    reached: Reached

    @property
    def beaten(self) -> bool:
        """Whether intruders reach more than is stated of them, or gain more."""
        reached = self.reached
        gains = (reached.prior + row.gain for row in (self.intruder, self.anyone))
        return any(reached.exceeds(limit) for limit in (self.intruder.bound, *gains))


def stated(
    own: Population, noise: float, draw: Generator, *, people: int | None = None
) -> Statement:
    """State limits from public people, and attack them.

    `people` is the declared number of examples of one person, by default the largest.
    """
    criterion = own.criterion
    who = draw.integers(0, len(own.examples), PUBLIC)
    of_each = own.copies[who]
    sample = PublicSample(
        own.flat[np.repeat(who, of_each)],
        sources=np.repeat(np.arange(PUBLIC), of_each),
        distance=distance_of(criterion.whole),
    )
    most = int(own.copies.max()) if people is None else people
    lift = partial(success_bound, TrainingSetting(noise, dim=sample.dim, people=most))
    knows = Intruder(criterion, with_known_parts(sample, criterion.known), None)
    rows = rows_of(lift, criterion.of_stranger, sample, knows)
    return Statement(own.name, noise, *rows, attacked(own, noise, draw))


def attacked(own: Population, noise: float, draw: Generator) -> Reached:
    """How many of TRIALS random people the better of the two intruders reconstructs."""
    criterion = own.criterion
    values = criterion.known.values(own.examples).flatten(1).double().numpy()
    if own.labels is not None:
        values = np.column_stack([values, own.labels])
    group = np.unique(values, axis=0, return_inverse=True)[1].reshape(-1)
    rest = criterion.counted(own.examples)
    victims = draw.integers(0, len(rest), TRIALS)
    hits = np.zeros(len(ATTACKS), int)
    without = 0
    for one in np.unique(group):
        members = np.flatnonzero(group == one)
        some = rest[torch.from_numpy(members)]
        near = (criterion.domain.distances(some, some) <= criterion.within).numpy()
        without += near.sum(1).max()
        true = np.searchsorted(members, victims[group[victims] == one])
        if len(members) == 1:
            hits += len(true)
        elif len(true):
            hits += [attack(near, own.copies[members], true, noise, draw) for attack in ATTACKS]
    return Reached(int(hits.max()), float(without) / len(rest))


def by_gradient(near: Array, copies: Array, true: Array, noise: float, draw: Generator) -> int:
    """Gradients of all examples are orthogonal; the answer's ball has the largest posterior."""
    seen = noise * draw.standard_normal((len(true), len(near)))
    seen[np.arange(len(true)), true] += copies[true]
    logs = (copies * seen - copies**2 / 2) / noise**2
    posterior = np.exp(logs - logs.max(1, keepdims=True)).astype(np.float32)
    answer = (posterior @ near.astype(np.float32)).argmax(1)
    return int(near[answer, true].sum())


def by_codeword(near: Array, copies: Array, true: Array, noise: float, draw: Generator) -> int:
    """The gradient names one of a few answers, as a corner of a simplex about no gradient at all.

    How many answers there are is chosen on other victims.
    """
    words = np.array(covering(near, max(SIZES))[0])
    tried = draw.integers(0, len(near), TRIED)
    sizes = sorted({min(size, len(words)) for size in SIZES})

    def hits(size: int, victims: Array) -> int:
        answer = words[named(near[words[:size]], copies, victims, noise, draw)]
        return int(near[answer, victims].sum())

    return hits(max(sizes, key=lambda size: hits(size, tried)), true)


def named(covers: Array, copies: Array, true: Array, noise: float, draw: Generator) -> Array:
    """The likeliest of the answers, of which each covers some examples: (size, members)."""
    size = len(covers)
    if size == 1:
        return np.zeros(len(true), int)
    # Who is covered by no answer sends no gradient.
    word = np.where(covers.any(0), covers.argmax(0), size)
    corners = np.sqrt(size / (size - 1)) * (np.eye(size) - 1 / size)
    corners = np.vstack([corners, np.zeros(size)])
    seen = copies[true, None] * corners[word[true]]
    seen = (seen + noise * draw.standard_normal(seen.shape)) @ corners[:size].T / noise**2
    mass = np.zeros((len(true), size))
    for count in np.unique(copies):
        held = np.bincount(word[copies == count], minlength=size + 1)[:size]
        # Scores of far answers may be large: a common factor changes no answer.
        top = copies.max() * seen.max(1, keepdims=True)
        mass += held * np.exp(count * seen - count**2 / (2 * noise**2) - top)
    return mass.argmax(1)


ATTACKS = (by_gradient, by_codeword)


# --- populations of real examples

loaded = cache(data.load)


def some_columns(draw: Generator) -> Population:
    """A table, whose numbers are moved to a few of their values in half of the cases."""
    name = draw.choice(TABLES)
    domain, rows = table(name)
    if draw.random() < 0.5:
        rows = coarse(domain, rows)
    names = [column.name for column in domain.columns]
    known = draw.choice(names, draw.integers(1, few_or_many(len(names), draw)), replace=False)
    share = float(draw.choice([0.4, 0.6, 0.9], p=[0.2, 0.4, 0.4]))
    criterion = Criterion.of(domain, share=share, known=",".join(known))
    return Population(name, rows, criterion, np.ones(len(rows), int))


def few_or_many(parts: int, draw: Generator) -> int:
    """Below which number of parts are known: with many, everyone is alone and no limit says much"""
    return min(4, parts) if draw.random() < 0.5 else parts


TABLES = (
    *("german", "breast_cancer", "diabetes", "iris", "wine"),
    *("boston_housing", "autompg", "digits"),
)
COARSE = 4
"""Levels to which the numbers of a table are cut: groups are larger."""


@cache
def table(name: str) -> tuple[TableDomain, Tensor]:
    """A built-in table, or numbers that come with a package, with a column for each."""
    if name in data.packaged.TABLES:
        found = loaded(name)
        return found.domain, found.inputs
    values = numbers(name)
    low, high = values.min(0), values.max(0)
    values, low, high = (of[..., low < high] for of in (values, low, high))
    columns = [
        Column(f"c{place}", "integer" if (part % 1 == 0).all() else "continuous", *ends)
        for place, (part, *ends) in enumerate(
            zip(values.T, low.tolist(), high.tolist(), strict=True)
        )
    ]
    return TableDomain(tuple(columns)), torch.tensor((values - low) / (high - low)).float()


def numbers(name: str) -> Array:
    if name == "digits":
        return 16 * loaded(name).inputs.flatten(1).double().numpy()
    from mlxtend.data import autompg_data, boston_housing_data

    # The last column of cars is their name.
    return boston_housing_data()[0] if name == "boston_housing" else autompg_data()[0][:, :7]


def coarse(domain: TableDomain, rows: Tensor) -> Tensor:
    """The rows with every number at the nearest of COARSE of its values."""
    rows = rows.clone()
    for column, start, _ in domain.placed:
        if not column.categorical:
            values = rows[:, start]
            levels = values.quantile(torch.linspace(0, 1, COARSE))
            rows[:, start] = levels[(values[:, None] - levels).abs().argmin(1)]
    return rows


def half_of_an_image(draw: Generator) -> Population:
    """Digits of which a half, or a band, is known: as it is, coarse, or that of few prototypes."""
    name = str(draw.choice(["digits", "mnist5k"]))
    found = loaded(name, limit=IMAGES)
    images = found.inputs.clone()
    side = images.shape[-1]
    bands = [f"0-{side // 4 - 1},0-{side - 1}", f"0-{side - 1},0-{side // 8 - 1}"]
    region = draw.choice(["top", "bottom", "left", "right", *bands])
    psnr = float(draw.choice([12, 15, 18]))
    criterion = Criterion.of(found.domain, psnr=psnr, known=f"region:{region}")
    parts = criterion.known
    form = draw.choice(["as it is", "coarse", "prototypes"], p=[0.2, 0.3, 0.5])
    values = parts.values(images)
    if form == "coarse":
        values = values.round()
    elif form == "prototypes":
        # Halves of one digit beside halves of others of its class.
        for label in found.labels.unique():
            of_class = (found.labels == label).nonzero()[:, 0]
            kept = of_class[: draw.integers(1, PROTOTYPES)]
            values[of_class] = values[kept[torch.arange(len(of_class)) % len(kept)]]
    images = parts.joined(values, parts.unknown(images))
    return Population(f"{name}, {form}", images, criterion, np.ones(len(images), int))


IMAGES = 1500
PROTOTYPES = 6
"""Below this many prototypes of a class."""


def form_letter(draw: Generator) -> Population:
    """Sentences of which words at the start, or at some places, are known."""
    found = loaded("topics")
    tokens = found.inputs.clone()
    # Words are numbered by how frequent they are; rare ones count as unknown.
    tokens[tokens >= int(draw.choice([10, 100, 5000]))] = 1
    length = tokens.shape[1]
    count = draw.integers(1, few_or_many(length, draw))
    if draw.random() < 0.5:
        known = f"prefix:{count}"
    else:
        places = draw.choice(length, count, replace=False)
        known = "places:" + ",".join(map(str, places))
    share = float(draw.choice([0.5, 0.7, 0.9]))
    criterion = Criterion.of(found.domain, share=share, known=known)
    return Population("topics", tokens, criterion, np.ones(len(tokens), int))


def people(draw: Generator) -> Population:
    """People with several equal examples in the update: all the same number, or up to it."""
    own = DOMAINS[draw.choice(["columns", "halves", "texts"])](draw)
    most = int(draw.choice([2, 3, 5]))
    count = len(own.examples)
    copies = np.full(count, most) if draw.random() < 0.5 else draw.integers(1, most + 1, count)
    return replace(own, name=f"{own.name}, people with {most}", copies=copies)


DOMAINS: dict[str, Callable[[Generator], Population]] = {
    "columns": some_columns,
    "halves": half_of_an_image,
    "texts": form_letter,
    "people": people,
}


def statements(domain: str, seeds: Iterable[int], *, people: int | None = None) -> list[Statement]:
    """A statement of each seed about a random population, known part and noise."""
    made = []
    for seed in seeds:
        draw = np.random.default_rng([list(DOMAINS).index(domain), seed])
        own = DOMAINS[domain](draw)
        # In units of all that a person sends: otherwise limits on several examples say little.
        noise = float(draw.choice(NOISES)) * int(own.copies.max())
        made.append(stated(own, noise, draw, people=people))
    return made
