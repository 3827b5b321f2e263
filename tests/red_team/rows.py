"""Rows of tables: where public and held-out ones come from, and adversaries who know public rows.

Every table is a distribution made of real rows, from which public and held-out rows are independent
draws, so that the one assumption of a statement holds. The adversary of the hidden rows knows the
distribution itself: a statement covers that attacker, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from scipy import stats

from leakbound import data
from leakbound._util.codewords import covering
from leakbound.assess.criterion import distance_of
from leakbound.bounds.counting import PublicSample
from leakbound.domains import TableDomain

from .adversaries import Array, Generator

HELD = 4000
LEVEL = 0.01
"""Chance that any attack on a true statement counts as above it: one-sided, Bonferroni."""


@dataclass(eq=False)
class Rows:
    """Public and held-out rows with labels; `hidden` rows of which the distribution is made."""

    name: str
    domain: TableDomain
    rows: Array
    labels: Array
    held: Array
    held_labels: Array
    hidden: Array
    levels: tuple[int, ...]
    kept: dict = field(default_factory=dict)

    def stated(self, labeled: bool) -> PublicSample:
        make = lambda: PublicSample(  # noqa: E731
            self.rows, self.labels if labeled else None, distance=distance_of(self.domain)
        )
        return self.once(("stated", labeled), make)

    def once(self, key, make):
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def of(self, label: int) -> Rows:
        mine, theirs = self.labels == label, self.held_labels == label
        return self.once(
            ("of", label),
            lambda: replace(
                self,
                rows=self.rows[mine],
                labels=self.labels[mine],
                held=self.held[theirs],
                held_labels=self.held_labels[theirs],
                kept={},
            ),
        )

    def apart(self, a: Array, b: Array, scale: float = 1.0) -> Array:
        """(A, B) columns that differ, for the attacks; what counts is `domain.distance`."""
        one, two = (self.domain.coded(torch.tensor(x)).numpy().T for x in (a, b))
        found = np.zeros((len(a), len(b)), np.uint8)
        for x, y in zip(one, two, strict=True):
            found += np.abs(x[:, None] - y) > scale
        return found


def real(name: str) -> tuple[TableDomain, Array, Array]:
    found = data.load(name)
    domain = found.domain.fitted(found.inputs)
    return domain, found.inputs.double().numpy(), found.labels.numpy()


def mixed(rows: Array, domain: TableDomain, share: float, source: Generator) -> Array:
    """Rows of which each column comes from another one with a probability of `share`."""
    made = rows.copy()
    for _, start, stop in domain.placed:
        swap = np.flatnonzero(source.random(len(rows)) < share)
        made[swap, start:stop] = rows[source.integers(0, len(rows), len(swap)), start:stop]
    return made


@cache
def split(name: str, public: int) -> Rows:
    """The real rows: some are public, all others held out."""
    domain, rows, labels = real(name)
    order = np.random.default_rng(31).permutation(len(rows))
    rows, labels = rows[order], labels[order]
    own = rows[:public], labels[:public], rows[public:], labels[public:]
    return Rows(f"{name}, split", domain, *own, rows[:public], levels_of(domain))


@cache
def drawn(name: str, hidden: int, share: float, public: int) -> Rows:
    """Copies of `hidden` real rows, each column of another one with a probability of `share`."""
    domain, rows, labels = real(name)
    source = np.random.default_rng([37, hidden, public])
    base = source.permutation(len(rows))[:hidden]
    chosen = base[source.integers(0, hidden, public + HELD)]
    made = mixed(rows[chosen], domain, share, source)
    own = made[:public], labels[chosen][:public], made[public:], labels[chosen][public:]
    what = f"{name}, {hidden} rows, {share:.0%} mixed"
    return Rows(what, domain, *own, rows[base], levels_of(domain))


@cache
def hidden_center(level: int, public: int = 1000, share: float = 0.05) -> Rows:
    """A share of the borrowers differs from one hidden row in exactly `level` columns."""
    domain, rows, _ = real("german")
    source = np.random.default_rng([41, level])
    made = mixed(rows[source.integers(0, len(rows), public + HELD)], domain, 0.5, source)
    near = np.flatnonzero(source.random(len(made)) < share)
    made[near] = rows[0]
    for row in near:
        for column in source.permutation(len(domain.columns))[:level]:
            _, start, stop = domain.placed[column]
            others = rows[:, start:stop][(rows[:, start:stop] != rows[0, start:stop]).any(1)]
            made[row, start:stop] = others[source.integers(len(others))]
    made_labels = source.integers(0, 2, len(made))
    own = made[:public], made_labels[:public], made[public:], made_labels[public:]
    return Rows("german, a hidden row", domain, *own, rows[:1], (level,))


@cache
def jittered(public: int = 1000, share: float = 0.05) -> Rows:
    """A share of the tumors lies within one tolerance of a hidden row in every column."""
    domain, rows, _ = real("breast_cancer")
    source = np.random.default_rng(43)
    made = mixed(rows[source.integers(0, len(rows), public + HELD)], domain, 0.5, source)
    near = np.flatnonzero(source.random(len(made)) < share)
    allowed = np.array([c.allowed / c.unit_length for c in domain.columns])
    made[near] = rows[0] + 0.999 * allowed * source.uniform(-1, 1, (len(near), len(allowed)))
    labels = source.integers(0, 2, len(made))
    own = made[:public], labels[:public], made[public:], labels[public:]
    return Rows("breast_cancer, a hidden row", domain, *own, rows[:1], (0,))


def levels_of(domain: TableDomain) -> tuple[int, ...]:
    """Columns that may differ: 0, 1, 10 %, 15 % and 20 %."""
    count = len(domain.columns)
    return tuple(sorted({0, 1, *(round(share * count) for share in (0.1, 0.15, 0.2))}))


# --- adversaries: (public rows, level, noise, source) -> guesses for the held-out rows

Guess = Callable[[Rows, int, float, Generator], Array]


def blind(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """Medians and most frequent levels."""
    guess = own.domain.blind(torch.tensor(own.rows)).numpy()
    return np.broadcast_to(guess, own.held.shape)


def center(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """The public row that matches most public rows."""
    near = own.once("near", lambda: own.apart(own.rows, own.rows))
    return np.broadcast_to(own.rows[(near <= level).sum(1).argmax()], own.held.shape)


def between(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """Medians and most frequent levels of the rows around a row, repeated; the best of them."""
    return np.broadcast_to(middles(own, level, 1)[0], own.held.shape)


def middles(own: Rows, level: int, most: int) -> Array:
    """The middles of neighborhoods that match the most public rows, the best first."""

    def made() -> Array:
        near = own.once("near twice", lambda: own.apart(own.rows, own.rows, 2.0))
        found = []
        for start in np.argsort(-(near <= 2 * level).sum(1), kind="stable")[:40]:
            guess = own.rows[start]
            members = near[start] <= 2 * level
            for _ in range(3):
                guess = own.domain.blind(torch.tensor(own.rows[members])).numpy()
                members = own.apart(own.rows, guess[None])[:, 0] <= max(level, 1)
                if not members.any():
                    break
            found.append(guess)
        counts = (own.apart(np.array(found), own.rows) <= level).sum(1)
        return np.array(found)[np.argsort(-counts, kind="stable")]

    return own.once(("middles", level), made)[:most]


def named(apart: Array, shares: Array, size: int, noise: float, source: Generator) -> Array:
    """The release names the nearest of `size` codewords: one coordinate each, norm 1."""
    seen = noise * source.standard_normal((len(apart), size))
    seen[np.arange(len(apart)), apart[:, :size].argmin(1)] += 1
    return (seen + noise**2 * np.log(shares[:size])).argmax(1)


def book(own: Rows, name: str, words: Array, level: int, noise: float, source: Generator) -> Array:
    """A codebook whose size is chosen on public rows, as its order."""

    def made() -> tuple[Array, Array, Array, Array]:
        chosen, shares = covering(own.apart(words, own.rows) <= level, 500)
        chosen, shares = (chosen, shares) if chosen else ([0], np.ones(1))
        kept = words[chosen]
        return kept, shares, own.apart(own.rows[:400], kept), own.apart(own.held, kept)

    kept, shares, tried, held = own.once((name, level), made)
    gained = {}
    for size in {1, 4, 16, 64, len(kept)} & set(range(len(kept) + 1)):
        found = named(tried, shares, size, noise, source)
        gained[size] = (tried[np.arange(len(tried)), found] <= level).mean()
    size = max(gained, key=lambda size: (gained[size], -size))
    return kept[named(held, shares, size, noise, source)]


def codebook(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """Codewords are public rows."""
    return book(own, "public", own.rows, level, noise, source)


def middle_codebook(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """Codewords are middles of neighborhoods, and public rows."""
    words = np.concatenate([middles(own, level, 40), own.rows])
    return book(own, "middles and public", words, level, noise, source)


def hidden_codebook(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """Codewords are the rows of which the distribution is made."""
    return book(own, "hidden", own.hidden, level, noise, source)


def sent(own: Rows, rows: Array) -> Array:
    """A linear trap in clip units: centered rows of norm 1, strong directions turned down."""
    mean = own.rows.mean(0)
    make = lambda: np.linalg.svd(own.rows - mean, full_matrices=False)  # noqa: E731
    _, spread, axes = own.once("trap", make)
    keep = spread > 1e-6 * spread[0]
    seen = (rows - mean) @ axes[keep].T / spread[keep] ** 0.5
    return seen / np.maximum(np.linalg.norm(seen, axis=1, keepdims=True), 1e-12)


def posterior(own: Rows, pool: Array, noise: float, source: Generator) -> Array:
    """(n, pool) weights of rows for one noisy answer to each held-out row."""
    answers = sent(own, own.held)
    seen = answers + noise * source.standard_normal(answers.shape)
    log = seen @ sent(own, pool).T / noise**2
    weights = np.exp(log - log.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def likeliest(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """The public row with the largest posterior."""
    return own.rows[posterior(own, own.rows, noise, source).argmax(1)]


def ball(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """The public row that matches the most posterior mass."""
    near = own.once("near", lambda: own.apart(own.rows, own.rows)) <= level
    weights = posterior(own, own.rows, noise, source).astype(np.float32)
    return own.rows[(weights @ near.astype(np.float32)).argmax(1)]


def by_column(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """The posterior's mean of numbers and likeliest level of categories."""
    mean = posterior(own, own.rows, noise, source) @ own.rows
    return own.domain.hard(torch.tensor(mean)).numpy()


def hidden_likeliest(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """The likeliest of the rows of which the distribution is made."""
    return own.hidden[posterior(own, own.hidden, noise, source).argmax(1)]


def linear(own: Rows, level: int, noise: float, source: Generator) -> Array:
    """The best linear estimator, by covariances of public rows and their answers."""
    seen, mean = sent(own, own.rows), own.rows.mean(0)
    middle = seen.mean(0)
    inner = (seen - middle).T @ (seen - middle) / len(seen) + noise**2 * np.eye(seen.shape[1])
    weights = np.linalg.solve(inner, (seen - middle).T @ (own.rows - mean) / len(seen))
    answers = sent(own, own.held)
    answers = answers + noise * source.standard_normal(answers.shape)
    return own.domain.hard(torch.tensor(mean + (answers - middle) @ weights)).numpy()


ADVERSARIES: tuple[Guess, ...] = (
    *(blind, center, between, codebook, middle_codebook, hidden_codebook),
    *(likeliest, ball, by_column, hidden_likeliest, linear),
)


@dataclass(frozen=True)
class Attack:
    """What an adversary reached against a statement: `hits` of `n` held-out rows."""

    table: str
    labeled: bool
    level: int
    noise: float
    adversary: str
    stated: float
    hits: int
    n: int

    @property
    def chance(self) -> float:
        """Probability of as many hits if the statement holds."""
        return float(stats.binom.sf(self.hits - 1, self.n, min(1.0, self.stated)))


def hits(own: Rows, guess: Guess, labeled: bool, level: int, noise: float, seed: int) -> int:
    """How many held-out rows an adversary reconstructs; by class if labels are known."""
    total = 0
    for part in [own.of(label) for label in np.unique(own.labels)] if labeled else [own]:
        source = np.random.default_rng([seed, level, round(1000 * noise)])
        found = guess(part, level, noise, source)
        far = part.domain.distance(torch.tensor(found), torch.tensor(part.held))
        total += int((far <= level).sum())
    return total


def attacked(
    own: Rows,
    noises: tuple[float, ...],
    *,
    labeled: bool,
    stated: Callable[[PublicSample, float, int], float] | None = None,
) -> Iterator[Attack]:
    """Every adversary against every statement about a table that says something."""
    sample = own.stated(labeled)
    for level in own.levels:
        for noise in noises:
            value = (stated or _stated)(sample, noise, level)
            if value >= 0.99:
                continue
            for seed, guess in enumerate(ADVERSARIES):
                found = hits(own, guess, labeled, level, noise, seed)
                case = (own.name, labeled, level, noise, guess.__name__)
                yield Attack(*case, value, found, len(own.held))


def _stated(sample: PublicSample, noise: float, level: int) -> float:
    return float(sample.success_bound(noise, level)[0][0])


def beaten(attacks: list[Attack]) -> list[Attack]:
    """Those above their statement."""
    return [one for one in attacks if one.chance < LEVEL / len(attacks)]
