"""Where public and held-out examples come from, by fixed streams.

`mnist` splits real digits. The others define a distribution by real examples, from which public
and held-out examples are independent draws, so that the one assumption of a statement holds
exactly: tiles at uniform positions of the packaged photographs; rows of a packaged table, or of
the 5,000 digits, drawn with replacement; collages, each quarter of them from a digit of its own;
and two digits, each as likely, for which statements are nearly attained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from leakbound import data
from leakbound.bounds.counting import PublicSample
from leakbound.data import packaged
from leakbound.data.images import decode

from .adversaries import Array, Sample

HELD = 4000
TILE = 16


@dataclass(eq=False)
class Domain:
    """Public and held-out examples without labels and with them, and what is stated of them."""

    name: str
    rows: Array
    labels: Array
    held_rows: Array
    held_labels: Array

    def __post_init__(self) -> None:
        self.public = {False: Sample(self.rows), True: Sample(self.rows, self.labels)}
        self.held = {
            False: Sample(self.held_rows),
            True: Sample(self.held_rows, self.held_labels),
        }
        self.stated = {
            False: PublicSample(self.rows),
            True: PublicSample(self.rows, labels=self.labels),
        }


def split(name: str, rows: Array, labels: Array, public: int) -> Domain:
    return Domain(name, rows[:public], labels[:public], rows[public:], labels[public:])


def digits() -> tuple[Array, Array]:
    found = data.load("mnist5k")
    return found.inputs.flatten(1).double().numpy(), found.labels.numpy()


@cache
def mnist(public: int = 1000, seed: int = 7) -> Domain:
    """5,000 real digits: `public` of them in an order of their own, the others held out."""
    rows, labels = digits()
    order = np.random.default_rng(seed).permutation(len(rows))
    return split("digits", rows[order], labels[order], public)


@cache
def photographs(public: int = 2000) -> Domain:
    """Color tiles, each position of the eight photographs as likely; labels name the photograph."""
    files = packaged.PHOTOS.items()
    images = [decode(packaged._packaged(*file).read_bytes(), name).numpy() for name, file in files]
    sizes = [(image.shape[1] - TILE + 1, image.shape[2] - TILE + 1) for image in images]
    many = np.array([high * wide for high, wide in sizes])
    source = np.random.default_rng([11, public])
    labels = source.choice(len(images), public + HELD, p=many / many.sum())
    rows = np.empty((len(labels), 3 * TILE * TILE))
    for row, label in zip(rows, labels, strict=True):
        top, left = source.integers(0, sizes[label])
        row[:] = images[label][:, top : top + TILE, left : left + TILE].ravel() / 255
    return split("photographs", rows, labels, public)


def drawn(name: str, rows: Array, labels: Array, public: int, seed: int) -> Domain:
    """Rows of a data set with replacement."""
    chosen = np.random.default_rng([seed, public]).integers(0, len(rows), public + HELD)
    return split(name, rows[chosen], labels[chosen], public)


@cache
def table(name: str, public: int = 4000) -> Domain:
    found = data.load(name)
    rows, labels = found.inputs.flatten(1).double().numpy(), found.labels.numpy()
    return drawn(f"table {name}", rows, labels, public, 13)


@cache
def resampled(public: int = 20_000) -> Domain:
    return drawn("digits with replacement", *digits(), public, 17)


@cache
def collages(public: int = 20_000) -> Domain:
    """Each quarter is that of a digit drawn for it; the label is that of the first."""
    rows, labels = digits()
    images = rows.reshape(-1, 28, 28)
    count = public + HELD
    chosen = np.random.default_rng([19, public]).integers(0, len(rows), (4, count))
    made = np.empty((count, 28, 28))
    for place, own in enumerate(chosen):
        down, right = (slice(14 * at, 14 * at + 14) for at in divmod(place, 2))
        made[:, down, right] = images[own][:, down, right]
    return split("digit collages", made.reshape(count, -1), labels[chosen[0]], public)


@cache
def two_digits(public: int = 4000) -> Domain:
    """A 0 and a 1: opposite answers attain the best that any attacker can do."""
    rows, labels = digits()
    return drawn("two digits", rows[:2], labels[:2], public, 23)
