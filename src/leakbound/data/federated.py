"""Assign images to the clients of a federation: by person, by class shares, or evenly."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leakbound import check
from leakbound.data.raw import expect
from leakbound.data.sources import Dataset
from leakbound.randomness import permutation

__all__ = ["by_person", "dirichlet", "equal"]

_TRIES = 1000


def by_person(dataset: Dataset) -> list[Tensor]:
    """One client per person: ascending indices, in the order of `dataset.person_names`.

    Persons without an image (after a limit or a subset) are left out: client k's name is
    `dataset.person_names[dataset.persons[parts[k][0]]]`.
    """
    if dataset.persons is None:
        raise ValueError(
            f"data set {dataset.name!r} does not say who made its images; load it with person, "
            "such as load('folder:PATH', person='last'), or split it with dirichlet or equal"
        )
    return _groups(dataset.persons)


def dirichlet(
    labels: Tensor,
    clients: int,
    concentration: float,
    generator: torch.Generator,
    *,
    least: int = 1,
) -> list[Tensor]:
    """Split data into clients with different classes and sizes, by Dirichlet shares of each class.

    The shares of a class over the K clients are Dirichlet(concentration, ..., concentration),
    independent of those of other classes, and rounded to whole images. A small concentration gives
    most of a class to one client; a large one splits every class evenly. Returns K disjoint
    ascending index tensors that together hold every image.

    Args:
        labels: (N,) int64, the class of each image.
        clients: the number of clients, K.
        concentration: above 0; 0.1 to 1 are usual.
        generator: the source of the shares and of the order of the images.
        least: the fewest images of a client. A split that leaves a client with fewer is drawn
            again, up to 1,000 times; if this is frequent, it shifts the distribution.

    Source: Yurochkin et al., "Bayesian nonparametric federated learning of neural networks", ICML
    2019. Hsu, Qi and Brown, arXiv 1909.06335, draw each client's shares of the classes instead.

    Example:
        >>> parts = dirichlet(torch.arange(100) % 10, 5, 0.5, torch.Generator().manual_seed(0))
        >>> len(parts), sum(len(part) for part in parts)
        (5, 100)
    """
    fits = labels.ndim == 1 and labels.dtype == torch.int64 and not bool((labels < 0).any())
    expect(fits, "labels", labels, "(N,) of int64, 0 or above")
    check.positive(concentration=concentration)
    check.count(least=least)
    _enough(len(labels), clients, least)
    groups = _groups(labels)
    # By NumPy: `torch.distributions.Dirichlet` takes no generator.
    draws = np.random.default_rng(int(torch.randint(2**63 - 1, (1,), generator=generator)))
    alpha = np.full(clients, float(concentration))
    for _ in range(_TRIES):
        owner = torch.empty_like(labels)
        for group in groups:
            order = permutation(len(group), generator)
            owner[group[order]] = _cut(len(group), draws.dirichlet(alpha))
        sizes = owner.bincount(minlength=clients)
        if int(sizes.min()) >= least:
            return _groups(owner)
    raise ValueError(
        f"client {int(sizes.argmin())} has {int(sizes.min())} of {len(labels)} images, less than "
        f"least = {least}, in each of {_TRIES} draws; lower clients ({clients}) or raise "
        f"concentration ({concentration:g})"
    )


def equal(
    count: int,
    clients: int,
    generator: torch.Generator,
) -> list[Tensor]:
    """Split `count` images at random into clients whose sizes differ by at most one.

    Returns disjoint ascending index tensors, one per client, that together hold every image.
    """
    check.count(count=count)
    _enough(count, clients, 1)
    return [part.sort().values for part in permutation(count, generator).tensor_split(clients)]


def _enough(
    count: int,
    clients: int,
    least: int,
) -> None:
    check.count(clients=clients)
    if clients * least > count:
        raise ValueError(
            f"clients is {clients}, but {count} images give {least} each to at most "
            f"{count // least}; lower clients or give more images"
        )


def _cut(count: int, shares: np.ndarray) -> Tensor:
    """The owner of each of `count` images if client k gets the k-th share of them."""
    # Ends are rounded, not sizes: rounded sizes need not sum to the count.
    ends = np.rint(np.cumsum(shares) * count).astype(np.int64)
    ends[-1] = count  # the shares may sum to a little less than 1
    held = torch.from_numpy(np.diff(ends, prepend=0))
    return torch.repeat_interleave(torch.arange(len(shares)), held)


def _groups(numbers: Tensor) -> list[Tensor]:
    """The ascending indices of each number that occurs, in the order of the numbers."""
    order = numbers.argsort(stable=True)
    counts = torch.unique(numbers, return_counts=True)[1]
    return list(torch.split(order, counts.tolist()))
