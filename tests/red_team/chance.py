"""Runs in which almost nothing was sent: whatever they call exposed, chance did it.

Every run is one update under DP-SGD with noise multiplier 1,000 (epsilon .0019 at delta 1e-5), one
attack and one verdict. The kinds of data make matches by chance likely: digits that look alike, few
prototypes, images near their mean, rows of a table, short texts, series.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from leakbound import Batch, data, models, simulate
from leakbound.attacks import Attack
from leakbound.core import NotApplicable, Server, ThreatModel
from leakbound.domains import Domain
from leakbound.randomness import normal, permutation, stream

NOTHING = "dp_sgd,noise_multiplier=1000,clip_norm=1"
SIZES = (1, 8, 64)


@dataclass(frozen=True, eq=False)
class Kind:
    """Examples of one kind, a model for them, and the criterion that chance meets most easily."""

    inputs: Tensor
    labels: Tensor
    build: Callable[[torch.Generator], nn.Module]
    domain: Domain | None = None
    loss: str = "cross_entropy"
    psnr: float = 20.0
    share: float = 0.9

    def drawn(self, size: int, seed: int) -> tuple[Batch, Batch]:
        """A private batch, and public examples: a random part of the others."""
        order = permutation(len(self.inputs), stream(seed, "chance", size))
        private, public = order[:size], order[size : size + 1000]
        return tuple(Batch(self.inputs[own], self.labels[own]) for own in (private, public))  # type: ignore[return-value]


def mlp(shape: tuple[int, ...], classes: int) -> Callable[[torch.Generator], nn.Module]:
    return lambda source: models.mlp(
        input_shape=shape, classes=classes, hidden=(32,), generator=source
    )


def digits() -> Kind:
    found = data.load("mnist5k")
    return Kind(found.inputs, found.labels, mlp((1, 28, 28), 10))


def prototypes(count: int = 20, copies: int = 100) -> Kind:
    """Omniglot-like: few characters, each drawn many times with small differences."""
    found = data.load("mnist5k").inputs[:: 5000 // count][:count]
    inputs = found.repeat_interleave(copies, 0)
    inputs = (inputs + 0.05 * normal(inputs.shape, stream(0, "prototypes"))).clamp(0, 1)
    labels = torch.arange(count).repeat_interleave(copies)
    return Kind(inputs, labels, mlp((1, 28, 28), count))


def near_mean() -> Kind:
    """Images that differ little from their mean: any guess near it meets 20 dB for many."""
    found = data.load("mnist5k")
    mean = found.inputs.mean(0)
    return Kind(mean + 0.35 * (found.inputs - mean), found.labels, mlp((1, 28, 28), 10))


def rows(name: str, share: float) -> Kind:
    found = data.load(name)
    width = found.domain.shape
    return Kind(found.inputs, found.labels, mlp(width, found.classes), found.domain, share=share)


def texts() -> Kind:
    """Sentences of eight words, many of which begin alike."""
    found = data.load("topics")
    vocabulary, length = found.domain.vocabulary, found.domain.length

    def build(source: torch.Generator) -> nn.Module:
        return models.decoder(
            input_shape=(length,), classes=vocabulary, width=16, layers=1, heads=2, generator=source
        )

    return Kind(found.inputs, found.inputs, build, found.domain, "next_token", share=0.3)


def series() -> Kind:
    found = data.load("ecg")
    return Kind(found.inputs, found.labels, mlp(found.domain.shape, 2), found.domain, psnr=3.0)


KINDS: dict[str, Callable[[], Kind]] = {
    "digits": digits,
    "prototypes": prototypes,
    "near mean": near_mean,
    "german": lambda: rows("german", 0.5),
    "breast cancer": lambda: rows("breast_cancer", 0.2),
    "texts": texts,
    "series": series,
}


@cache
def kind(name: str) -> Kind:
    return KINDS[name]()


@dataclass(frozen=True)
class Tally:
    """Runs, those with a match by the criterion alone, and those called exposed."""

    runs: int
    matched: int
    exposed: int

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.runs + other.runs, self.matched + other.matched, self.exposed + other.exposed
        )

    @property
    def most(self) -> float:
        """The largest number of exposed runs at a level of 1 %: two standard errors above."""
        return 0.01 * self.runs + 2 * (0.01 * 0.99 * self.runs) ** 0.5


def tally(name: str, size: int, attack: Attack, seeds: range, *, public: bool = True) -> Tally:
    """Runs of one attack on batches of this size; none if it does not apply."""
    own, found = kind(name), Tally(0, 0, 0)
    threat = ThreatModel(server=Server.MALICIOUS, labels_known=own.loss != "next_token")
    for seed in seeds:
        batch, others = own.drawn(size, seed)
        try:
            run = simulate(
                own.build(stream(seed, "model")),
                batch,
                defense=NOTHING,
                attack=attack,
                seed=seed,
                public=others if public else None,
                psnr=own.psnr,
                share=own.share,
                threat=threat,
                domain=own.domain,
                loss=own.loss,
                error_bound="none",
                probability=None,
            )
        except NotApplicable:
            return found
        close = any(v is not None and v >= run.assessment.criterion.value for v in run.scores)
        found += Tally(1, int(close), int("exposed" in run.verdict))
    return found
