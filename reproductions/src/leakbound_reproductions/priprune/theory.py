"""Theorem 4.1 in numbers, for the study's model: as printed, as corrected, and a bound."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from leakbound import client
from leakbound.core import Batch, Task
from leakbound.randomness import stream
from leakbound_reproductions.priprune import cell as cells
from leakbound_reproductions.priprune import information as bits
from leakbound_reproductions.priprune.study import Study

Spectrum = NDArray[np.float64]
RATES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
NOISE = 0.01
IMAGES = 200
SMALL = 1e-8
"""Noise on the gradient for the rigorous bound; images behind Sigma; eigenvalues, relative to the
largest, that count as zero."""


@dataclass(frozen=True)
class Row:
    """All forms at one rate, in bits but for `printed`, for one image in one round.

    Attributes:
        rank: d*, the eigenvalues that are not zero, of at most `IMAGES` - 1.
        private, public: the Gaussian channel with noise, if the mask leaks (with the Sigma of the
            whole gradient) or does not; a bound only with the true Sigma.
        precision: the rigorous bound without noise: the bits of the message.
    """

    rate: float
    coordinates: int
    rank: int
    printed: float
    corrected: float
    private: float
    public: float
    precision: float


def rows(study: Study, seed: int = 0) -> list[Row]:
    """One row per rate, for the base scheme at the initial weights; Sigma of public images."""
    found = []
    for rate in RATES:
        cell = replace(study.cell("theory", seed, rate or 0.1), images=study.cell("t", 0).images)
        task, public = cells.fresh(cell)
        if rate:
            scheme = cells.built("scheme", cell.pruning)
            task = task.pruned(scheme.start(task, public, stream(seed, "priprune", "theory")))
        known = _spectrum(task, public)
        if not rate:
            dense = known
        found.append(_row(task, public, rate, known, dense))
    return found


def _spectrum(task: Task, public: Batch) -> Spectrum:
    """The eigenvalues of the sample's Sigma that are not zero."""
    some = slice(0, IMAGES)
    each = client.example_gradients(task, public.inputs[some], public.labels[some]).double()
    centered = each - each.mean(0)
    # the nonzero eigenvalues of Sigma are those of the Gram matrix
    gram = centered @ centered.T / (len(centered) - 1)
    values = torch.linalg.eigvalsh(gram)
    return np.asarray(values[values > SMALL * values[-1]].numpy())


def _row(task: Task, public: Batch, rate: float, known: Spectrum, dense: Spectrum) -> Row:
    whole = len(task.parameters)
    kept = whole if task.kept is None else int(task.kept.sum())
    private = bits.gaussian_channel(
        dense, noise_std=NOISE, coordinates=whole, kept=kept, mask="fixed count"
    )
    public_mask = bits.gaussian_channel(known, noise_std=NOISE)
    return Row(
        rate,
        kept,
        len(known),
        bits.printed(rate, known, batch_size=1).value,
        bits.corrected(rate, known, coordinates=whole, batch_size=1).value,
        private.value,
        public_mask.value,
        bits.finite_precision(whole, kept, data_bits=8.0 * public.inputs[0].numel()).value,
    )
