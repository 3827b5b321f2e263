"""Statements of paper D (Chu et al., "PriPrune", arXiv 2310.19958) by numbers.

"Sheet" is the project's list of the paper's corrected formulas (section 5, errata 4.1 to 4.10).
"""

import math

import numpy as np
import pytest
import torch

from leakbound.core import Batch
from leakbound.metrics import adjusted_mi, binned_nmi, nmi
from leakbound.pairing import Paired
from leakbound_reproductions.priprune.information import (
    binary_entropy,
    corrected,
    gradient_entropy,
    printed,
)

PAIRS = 40

TABLE_2 = {  # section 6: NMI of the base method, and of the same with PriPrune
    "FEMNIST": {
        "PruneFL": (0.22, 0.12),
        "FedDST": (0.21, 0.13),
        "SynFlow": (0.22, 0.15),
        "SNIP": (0.23, 0.13),
    },
    "CIFAR-10": {
        "PruneFL": (0.29, 0.24),
        "FedDST": (0.25, 0.18),
        "SynFlow": (0.25, 0.21),
        "SNIP": (0.24, 0.22),
    },
}

# Appendix D.3: NMI; rows are the weight of accuracy, columns that of privacy (1, 10, 15) and,
# within it, of sharing (2e-4, 2e-5, 2e-6).
TABLE_A1 = {
    1: (0.166, 0.171, 0.156, 0.138, 0.153, 0.154, 0.138, 0.159, 0.151),
    5: (0.154, 0.158, 0.136, 0.125, 0.121, 0.123, 0.135, 0.123, 0.130),
    10: (0.148, 0.142, 0.140, 0.132, 0.126, 0.118, 0.135, 0.132, 0.140),
}


def between(first, second, measure=nmi, **settings):
    """The mean over independent pairs of images of gray levels (PAIRS, N)."""
    u, v = (torch.tensor(x / 255) for x in (first, second))
    batch = Batch(u, torch.zeros(len(u), dtype=torch.long))
    found = measure(Paired(batch, v, None, tuple(range(len(u)))), data_range=1.0, **settings)
    return np.mean(found)


def uniform(n, levels=256, seed=0):
    return np.random.default_rng(seed).integers(0, levels, (PAIRS, n)) * (256 // levels)


def mostly_white(n, seed):
    """White with probability .8, else any of 256 gray levels."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random((PAIRS, n)) < 0.8, 255, rng.integers(0, 256, (PAIRS, n)))


@pytest.mark.parametrize(
    ("n", "levels", "level"),
    [(784, 256, 0.76), (3072, 256, 0.547), (784, 16, 0.057), (3072, 16, 0.013)],
)
def test_nmi_of_independent_uniform_images(n, levels, level):
    """Sheet, conventions 0.2: raw NMI is far above 0 by chance, its adjusted form is not."""
    one, other = uniform(n, levels), uniform(n, levels, seed=1)
    assert between(one, other) == pytest.approx(level, abs=3e-3)
    assert abs(between(one, other, adjusted_mi)) < 5e-3
    assert between(one, other, binned_nmi) < 0.06


@pytest.mark.parametrize(
    ("normalizer", "level"), [("arithmetic", 0.30), ("geometric", 0.37), ("max", 0.195)]
)
def test_nmi_of_mostly_white_images_and_noise(normalizer, level):
    """Sheet, conventions 0.2: FEMNIST-like, N = 784."""
    noise = uniform(784, seed=2)
    found = between(mostly_white(784, 0), noise, normalizer=normalizer)
    assert found == pytest.approx(level, abs=6e-3)
    assert abs(between(mostly_white(784, 0), noise, adjusted_mi)) < 5e-3


def test_nmi_of_two_unrelated_mostly_white_images():
    assert between(mostly_white(784, 0), mostly_white(784, 1)) == pytest.approx(0.20, abs=0.01)


def test_table_2_lies_at_or_below_the_level_of_noise():
    """Claim 4-0: what noise scores on mostly white images exceeds all of FEMNIST's column."""
    noise = between(mostly_white(784, 0), uniform(784, seed=2))
    values = [value for pair in TABLE_2["FEMNIST"].values() for value in pair]
    assert max(values) < noise
    color = between(uniform(3072), uniform(3072, seed=1))
    assert max(v for pair in TABLE_2["CIFAR-10"].values() for v in pair) < color


def test_section_6_reductions():
    """Section 6: 45.5 % on FEMNIST with PruneFL, 28 % on CIFAR-10 with FedDST, from Table 2."""
    base, ours = TABLE_2["FEMNIST"]["PruneFL"]
    assert (base - ours) / base == pytest.approx(0.455, abs=5e-4)
    base, ours = TABLE_2["CIFAR-10"]["FedDST"]
    assert (base - ours) / base == pytest.approx(0.28, abs=5e-4)
    for rows in TABLE_2.values():
        assert all(ours < base for base, ours in rows.values())


def test_table_a1():
    """Appendix D.3: the least NMI is not at the weights chosen; it rises again with privacy's."""
    flat = {(a, i): v for a, row in TABLE_A1.items() for i, v in enumerate(row)}
    assert min(flat, key=flat.get) == (10, 5)
    assert min(flat.values()) == 0.118
    assert flat[5, 7] == 0.123  # accuracy 5, privacy 15, sharing 2e-5
    by_privacy = np.array(list(TABLE_A1.values())).reshape(3, 3, 3)
    falls = np.diff(by_privacy, axis=1) < 0
    assert falls[:, 0].all()
    assert not falls[:, 1].all()


def test_theorem_4_1_mask_term():
    """Errata 4.1, p = .3: .8846 as printed (squared), .8813 exactly, 1.505 in the other reading."""
    assert printed(0.3, [1.0], batch_size=1).mask == pytest.approx(0.8846, abs=5e-5)
    assert binary_entropy(0.3) == pytest.approx(0.8813, abs=5e-5)
    other = printed(0.3, [1.0], batch_size=1, mask_term="linear").mask
    assert other == pytest.approx(1 + 0.7 / (2 * math.log(2)))


def test_theorem_4_1_mask_term_rises_with_the_pruning_rate_below_one_half():
    """Section 4.1: "higher p, smaller bound" does not follow from the mask's entropy."""
    rates = [0.1, 0.2, 0.3, 0.4, 0.5]
    terms = [printed(p, [1.0], batch_size=1).mask for p in rates]
    assert terms == sorted(terms)
    wholes = [corrected(p, [1.0], coordinates=10, batch_size=1).value for p in rates]
    assert wholes == sorted(wholes)


def test_equation_24_against_the_entropy_of_a_gaussian():
    """Errata 4.2 to 4.4: right for B = 1 and Sigma = I, and for d* = 2 two of them cancel."""
    for batch, values in ((1, [1.0] * 3), (4, [1.0] * 3), (1, [2.0, 3.0]), (4, [1.0] * 2)):
        part = printed(0.5, values, batch_size=batch)
        half = (part.value - part.mask) / 2 / math.log(2)
        right = gradient_entropy(values, batch_size=batch)
        agrees = set(values) == {1.0} and (batch == 1 or len(values) == 2)
        assert (half == pytest.approx(right)) is agrees


def test_corollary_4_2_is_linear_in_the_rounds():
    one = printed(0.3, [0.5, 2.0], batch_size=20)
    assert printed(0.3, [0.5, 2.0], batch_size=20, rounds=7).value == pytest.approx(7 * one.value)
