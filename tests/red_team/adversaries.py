"""Attackers that know public data alone, each with the model it plants.

Every planted model answers an example with a vector of norm 1 at most, so clipping at 1 changes
nothing, and a release is that vector plus `noise` times standard normal values. `fit` may look at
public examples only; `answers` makes the releases of private ones and returns a guess for each.
Where the public sample has labels, the attacker knows those of private examples, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from leakbound._util.codewords import codewords

from .codebooks import choose

Array = NDArray[Any]
Generator = np.random.Generator

MOST = 800
"""Codewords of a book."""
LOOKED = 1000
"""Public examples of which books are made: candidates grow with their square."""
KNOWN = 2000
"""Public examples in galleries and covariances."""
DIRECTIONS = 150
"""Principal directions that a linear trap sends."""
STEPS = 150
"""Of the denoiser's training."""


@dataclass(eq=False)
class Sample:
    """Rows (n, N), their labels where the attacker knows them, and what was computed from them."""

    rows: Array
    labels: Array | None = None
    kept: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def of(self, label: int) -> Sample:
        """Those of one class, without labels."""
        return self.once(("of", label), lambda: Sample(self.rows[self.labels == label]))

    @property
    def classes(self) -> list[int]:
        return [] if self.labels is None else np.unique(self.labels).tolist()


class Fitted(Protocol):
    def answers(self, private: Sample, source: Generator) -> Array: ...


Fit = Callable[[Sample, float, float, Generator], Fitted]
"""(public, noise, eta, source) -> what answers; `noise` and `eta` are known to attackers."""


@dataclass(frozen=True)
class Adversary:
    """`needs`: whether its guesses depend on the noise, on the threshold."""

    name: str
    fit: Fit
    needs: frozenset[str]


def errors(guesses: Array, rows: Array) -> Array:
    """(n,) mean squared errors."""
    return np.square(guesses - rows).mean(1)


def distances(a: Array, b: Array) -> Array:
    """(n, m) mean squared errors."""
    return (np.square(a).sum(1)[:, None] + np.square(b).sum(1) - 2 * a @ b.T) / a.shape[1]


@dataclass(eq=False)
class ByClass:
    """One attacker a class, for the label that is known."""

    parts: dict[int, Fitted]

    def answers(self, private: Sample, source: Generator) -> Array:
        guesses = np.zeros_like(private.rows)
        for label, part in self.parts.items():
            guesses[private.labels == label] = part.answers(private.of(label), source)
        return guesses


def by_class(fit: Fit) -> Fit:
    """Fit each class for itself where labels are known."""

    def fitted(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
        if public.labels is None:
            return fit(public, noise, eta, source)
        return ByClass({y: fit(public.of(y), noise, eta, source) for y in public.classes})

    return fitted


# --- codebooks


@dataclass(eq=False)
class Book:
    """Codewords (M, N), the best first, and how many public examples each was first to cover."""

    words: Array
    counts: Array


@dataclass(eq=False)
class Codebook:
    """The release names the codeword nearest to the example.

    `shape`: one coordinate a codeword ("orthogonal"), two opposite codewords a coordinate
    ("antipodal"), or coordinates less their mean at full norm ("simplex"): that leaves the
    distances of orthogonal vectors of norm sqrt(M / (M - 1)), and only distances count.
    """

    book: Book
    size: int
    noise: float
    shape: str = "orthogonal"

    def answers(self, private: Sample, source: Generator) -> Array:
        words = self.book.words[: self.size]
        nearest = private.once(
            (self.book, self.size), lambda: distances(private.rows, words).argmin(1)
        )
        prior = self.noise**2 * np.log(self.book.counts[: self.size] / self.book.counts.sum())
        every = np.arange(len(nearest))
        if self.shape == "antipodal":
            seen = self.noise * source.standard_normal((len(nearest), -(-self.size // 2)))
            seen[every, nearest // 2] += 1 - 2 * (nearest % 2)
            scores = np.stack([seen, -seen], 2).reshape(len(seen), -1)[:, : self.size]
            return words[(scores + prior).argmax(1)]
        norm = 1.0
        if self.shape == "simplex" and self.size > 1:
            norm = (self.size / (self.size - 1)) ** 0.5
        seen = self.noise * source.standard_normal((len(nearest), self.size))
        seen[every, nearest] += norm
        return words[(seen + prior / norm).argmax(1)]


def cover(public: Sample, level: float) -> tuple[Book, Array]:
    """A book of three quarters of the public examples, its errors to some of the others."""

    def made() -> tuple[Book, Array]:
        rows = public.rows[:LOOKED]
        cut = max(1, len(rows) * 3 // 4)
        book = Book(*codewords(rows[:cut], level, MOST))
        return book, distances(rows[cut:] if cut < len(rows) else rows, book.words)

    return public.once(("cover", level), made)


def atoms(public: Sample) -> tuple[Book, Array]:
    """Every different public example, the most frequent first: for distributions of few values."""

    def made() -> tuple[Book, Array]:
        rows, counts = np.unique(public.rows, axis=0, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:5000]
        book = Book(rows[order], counts[order] / counts.sum())
        return book, distances(public.rows[:LOOKED], book.words)

    return public.once("atoms", made)


def codebook(
    radius: float, shape: str = "orthogonal", book: Callable[..., tuple[Book, Array]] = cover
) -> Fit:
    """A codebook for balls of `radius` times the criterion's; its size is chosen on public data."""

    def fit(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
        own, apart = book(public, radius**2 * eta)
        size, _ = choose(noise, apart, eta, own.counts)
        return Codebook(own, size, noise, shape)

    return by_class(fit)


def kmeans(public: Sample, level: float) -> tuple[Book, Array]:
    """Centers of Lloyd's algorithm, which blur more than means of near examples; the fullest first.

    How many: of four numbers the one that covers most of the public examples kept out.
    """

    def made() -> tuple[Book, Array]:
        rows = public.rows[:LOOKED]
        cut = max(1, len(rows) * 3 // 4)
        kept = rows[cut:] if cut < len(rows) else rows
        books = []
        for count in (1, 4, 16, 64, 256):
            if count > cut:
                continue
            words = rows[:count].copy()
            for _ in range(12):
                own = distances(rows[:cut], words).argmin(1)
                for place in np.unique(own):
                    words[place] = rows[:cut][own == place].mean(0)
            counts = np.bincount(distances(rows[:cut], words).argmin(1), minlength=count) + 0.5
            order = np.argsort(-counts, kind="stable")
            books.append(Book(words[order], counts[order] / counts.sum()))
        apart = [distances(kept, book.words) for book in books]
        best = max(range(len(books)), key=lambda i: (apart[i].min(1) <= level).sum())
        return books[best], apart[best]

    return public.once(("k-means", level), made)


def every_example(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
    """All public examples are codewords."""
    return Codebook(atoms(public)[0], len(atoms(public)[0].words), noise)


# --- estimators from a linear trap


class Trap:
    """Principal components of the public examples, weak ones turned up, at a norm of at most 1.

    `scale` 0: every answer is turned up to norm 1. Else answers are divided by it and clipped.
    """

    def __init__(self, public: Sample, power: float, saturate: bool = True) -> None:
        rows = public.rows[:KNOWN]
        self.mean = rows.mean(0)
        _, spread, directions = np.linalg.svd(rows - self.mean, full_matrices=False)
        # Which sign an axis has depends on the machine's LAPACK, and with it what the noise does.
        largest = abs(directions).argmax(1)[:, None]
        directions *= np.sign(np.take_along_axis(directions, largest, 1))
        keep = int((spread[:DIRECTIONS] > 1e-9 * max(float(spread[0]), 1e-12)).sum())
        self.directions = directions[: max(1, keep)]
        self.layer = self.directions.T / np.maximum(spread[: max(1, keep)], 1e-12) ** power
        self.scale = 0.0
        if not saturate:
            self.scale = float(np.median(np.linalg.norm((rows - self.mean) @ self.layer, axis=1)))

    def sent(self, rows: Array) -> Array:
        answers = (rows - self.mean) @ self.layer
        norm = np.linalg.norm(answers, axis=1, keepdims=True)
        return answers / np.maximum(norm, self.scale or 1e-12)

    def released(self, rows: Array, noise: float, source: Generator) -> Array:
        answers = self.sent(rows)
        return answers + noise * source.standard_normal(answers.shape)


def trap(public: Sample, power: float, saturate: bool = True) -> Trap:
    return public.once(("trap", power, saturate), lambda: Trap(public, power, saturate))


@dataclass(eq=False)
class Linear:
    """guess = mean + (release - middle) @ weights."""

    trap: Trap
    middle: Array
    weights: Array
    noise: float

    def answers(self, private: Sample, source: Generator) -> Array:
        seen = self.trap.released(private.rows, self.noise, source)
        return self.trap.mean + (seen - self.middle) @ self.weights


def lmmse(power: float) -> Fit:
    """The best linear estimator, by covariances of public examples and their noiseless answers."""

    def fit(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
        own = trap(public, power)
        rows = public.rows[:KNOWN]
        seen = own.sent(rows)
        middle = seen.mean(0)
        both = (seen - middle).T @ (rows - own.mean) / len(rows)
        inner = (seen - middle).T @ (seen - middle) / len(rows)
        inner += max(noise**2, 1e-12) * np.eye(len(inner))
        return Linear(own, middle, np.linalg.solve(inner, both), noise)

    return by_class(fit)


def ridge(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
    """Ridge regression on simulated releases; the penalty is chosen on public examples kept out."""
    own = trap(public, 0.0, False)
    rows = public.rows[:KNOWN]
    cut = max(1, len(rows) * 3 // 4)
    seen = np.concatenate([own.released(rows[:cut], noise, source) for _ in range(4)])
    true = np.tile(rows[:cut] - own.mean, (4, 1))
    middle = seen.mean(0)
    inner, both = (seen - middle).T @ (seen - middle), (seen - middle).T @ true
    kept = rows[cut:] if cut < len(rows) else rows
    best: tuple[float, Fitted] | None = None
    for penalty in (1e-3, 1e-2, 1e-1, 1.0):
        eye = penalty * np.trace(inner) / len(inner) * np.eye(len(inner))
        weights = np.linalg.solve(inner + eye + 1e-12 * np.eye(len(inner)), both)
        found = Linear(own, middle, weights, noise)
        error = float(errors(found.answers(Sample(kept), source), kept).mean())
        if best is None or error < best[0]:
            best = error, found
    assert best is not None
    return best[1]


@dataclass(eq=False)
class Nearest:
    """The mean of the `count` public examples whose noiseless answers are nearest."""

    trap: Trap
    rows: Array
    noise: float
    count: int

    def answers(self, private: Sample, source: Generator) -> Array:
        seen = self.trap.released(private.rows, self.noise, source)
        apart = distances(seen, self.trap.sent(self.rows))
        count = min(self.count, len(self.rows))
        near = np.argpartition(apart, count - 1, axis=1)[:, :count]
        return sum(self.rows[near[:, i]] for i in range(count)) / count


def nearest(count: int) -> Fit:
    def fit(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
        return Nearest(trap(public, 0.5), public.rows[:KNOWN], noise, count)

    return by_class(fit)


@dataclass(eq=False)
class Gallery:
    """Private examples taken for one of the public ones: exact posterior, three ways to answer."""

    rows: Array
    mean: Array
    noise: float
    close: Array | None
    decode: str

    def sent(self, rows: Array) -> Array:
        return (rows - self.mean) / np.maximum(
            np.linalg.norm(rows - self.mean, axis=1, keepdims=True), 1e-12
        )

    def answers(self, private: Sample, source: Generator) -> Array:
        answers = self.sent(private.rows)
        seen = answers + self.noise * source.standard_normal(answers.shape)
        log = seen @ self.sent(self.rows).T / self.noise**2
        if self.decode == "most probable":
            return self.rows[log.argmax(1)]
        weights = np.exp(log - log.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        if self.close is None:
            return weights @ self.rows
        return self.rows[(weights.astype(np.float32) @ self.close).argmax(1)]


def gallery(decode: str) -> Fit:
    """`decode`: "most probable", "mean", or "ball": the largest posterior mass within reach."""

    def fit(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
        rows = public.rows[:KNOWN]
        close = None
        if decode == "ball":
            make = lambda: (distances(rows, rows) <= eta).astype(np.float32)  # noqa: E731
            close = public.once(("close", eta), make)
        return Gallery(rows, rows.mean(0), noise, close, decode)

    return by_class(fit)


@dataclass(eq=False)
class Denoiser:
    """A perceptron from the trap's noisy answer, and the label where it is known."""

    trap: Trap
    net: torch.nn.Module
    classes: list[int]
    spread: float
    noise: float

    def given(self, rows: Array, labels: Array | None, source: Generator) -> torch.Tensor:
        seen = self.trap.released(rows, self.noise, source)
        if labels is not None:
            seen = np.concatenate([seen, labels[:, None] == np.array(self.classes)], 1)
        return torch.from_numpy(seen).float()

    def answers(self, private: Sample, source: Generator) -> Array:
        with torch.no_grad():
            found = self.net(self.given(private.rows, private.labels, source)).double().numpy()
        return self.trap.mean + self.spread * found @ self.trap.directions


def denoiser(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
    """Trained on public examples with noise drawn anew in every step; seconds."""
    own, rows = trap(public, 0.5), public.rows[:KNOWN]
    true = (rows - own.mean) @ own.directions.T
    spread = max(float(true.std()), 1e-9)
    width = len(own.directions) + len(public.classes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(width, 256),
            torch.nn.GELU(),
            torch.nn.Linear(256, 256),
            torch.nn.GELU(),
            torch.nn.Linear(256, len(own.directions)),
        )
    found = Denoiser(own, net, public.classes, spread, noise)
    goal = torch.from_numpy(true / spread).float()
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for _ in range(STEPS):
        own_rows = source.integers(0, len(rows), 256)
        labels = None if public.labels is None else public.labels[own_rows]
        loss = (net(found.given(rows[own_rows], labels, source)) - goal[own_rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return found


# --- no update at all


@dataclass(eq=False)
class Constant:
    guess: Array

    def answers(self, private: Sample, source: Generator) -> Array:
        return np.broadcast_to(self.guess, private.rows.shape)


def mean(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
    """The mean, of the class where it is known."""
    return Constant(public.rows.mean(0))


def flat(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
    """The one value for all coordinates that comes near to most public examples."""
    value = max(np.linspace(0, 1, 101), key=lambda v: (errors(v, public.rows) <= eta).sum())
    return Constant(np.full(public.rows.shape[1], value))


def densest(public: Sample, noise: float, eta: float, source: Generator) -> Fitted:
    """From the public examples with most neighbors to where the density is largest."""
    rows = public.rows[:KNOWN]
    apart = public.once("apart", lambda: distances(rows, rows))
    best: tuple[int, Array] = -1, rows[0]
    for start in np.argsort(-(apart <= 2 * eta).sum(1), kind="stable")[:8]:
        guess = rows[start]
        for reach in (2.0, 1.5, 1.3, 1.15, 1.0):
            near = errors(guess, rows) <= reach * eta
            guess = rows[near].mean(0) if near.any() else guess
            count = int((errors(guess, rows) <= eta).sum())
            best = max(best, (count, guess), key=lambda pair: pair[0])
    return Constant(best[1])


NOISE, ETA = frozenset({"noise"}), frozenset({"eta"})
BOTH = NOISE | ETA
RADII = (0.8, 1.0, 1.15, 1.3, 1.6)
"""Design radii of codebooks, in units of the criterion's."""

ADVERSARIES = (
    *(Adversary(f"codebook, radius x{radius:g}", codebook(radius), BOTH) for radius in RADII),
    Adversary("antipodal codebook", codebook(1.15, "antipodal"), BOTH),
    Adversary("simplex codebook", codebook(1.15, "simplex"), BOTH),
    Adversary("frequent examples", codebook(1.0, book=lambda public, level: atoms(public)), BOTH),
    Adversary("k-means codebook", codebook(1.0, book=kmeans), BOTH),
    Adversary("every example", by_class(every_example), NOISE),
    Adversary("linear (LMMSE)", lmmse(0.5), NOISE),
    Adversary("linear (LMMSE), plain", lmmse(0.0), NOISE),
    Adversary("ridge", by_class(ridge), NOISE),
    Adversary("nearest example", nearest(1), NOISE),
    Adversary("nearest four", nearest(4), NOISE),
    Adversary("gallery, most probable", gallery("most probable"), NOISE),
    Adversary("gallery, mean", gallery("mean"), NOISE),
    Adversary("gallery, ball", gallery("ball"), BOTH),
    Adversary("denoiser", denoiser, NOISE),
    Adversary("mean", by_class(mean), frozenset()),
    Adversary("constant", by_class(flat), ETA),
    Adversary("densest point", by_class(densest), ETA),
)
