"""Disjoint splits of a data set, drawn from the split's name and nothing else."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Mapping

import torch
from torch import Tensor

from leakbound import check
from leakbound.randomness import permutation, stream


def split(
    count: int,
    fractions: Mapping[str, float],
    *,
    seed: int,
    name: str,
    persons: Tensor | None = None,
) -> dict[str, Tensor]:
    """Disjoint random indices into `count` examples, one tensor per part.

    The parts follow each other in one permutation and end at the rounded cumulative fractions. A
    part differs from `fraction * count` by at most one example, and not at all if that is whole.
    Fractions that sum to less than 1 leave examples out. With `persons`, persons are permuted and
    no part ends within the examples of one.

    Args:
        count: the number of examples.
        fractions: the share of each part, in (0, 1].
        seed: the seed of the experiment.
        name: the name of the split, usually that of the data set.
        persons: (count,) the person of each example, as numbers from 0. All examples of one person
            are then in one part.

    Example:
        >>> parts = split(10, {"train": 0.8, "test": 0.2}, seed=0, name="mnist5k")
        >>> {part: len(indices) for part, indices in parts.items()}
        {'train': 8, 'test': 2}
    """
    check.count(count=count)
    if not fractions:
        raise ValueError("fractions is empty; give at least one part, such as {'train': 0.8}")
    for part, fraction in fractions.items():
        check.fraction(**{f"fractions[{part!r}]": fraction})
    total = math.fsum(fractions.values())
    if total > 1 + 1e-9:  # fractions such as 0.1 have no exact binary form
        raise ValueError(f"fractions sum to {total:g}; they may sum to at most 1")
    source = stream(seed, "split", name)
    order = permutation(count, source) if persons is None else _by_person(persons, source)
    shares = list(fractions.values())
    # Exact sums: a rounding error could move an end by one example.
    ends = [round(count * math.fsum(shares[: k + 1])) for k in range(len(shares))]
    if persons is not None:
        # The first end of a person's examples that is no earlier.
        last = torch.nonzero(persons[order].diff()).flatten() + 1
        between = [0, *last.tolist(), count]
        ends = [between[bisect_left(between, end)] for end in ends]
    of = "" if persons is None else f" of {len(torch.unique(persons))} persons"
    parts = {}
    for part, start, end in zip(fractions, [0, *ends], ends, strict=False):
        if start == end:
            raise ValueError(
                f"fractions[{part!r}] is {fractions[part]}: it takes none of {count} examples{of}; "
                "give a larger fraction or more examples"
            )
        parts[part] = order[start:end]
    return parts


def _by_person(persons: Tensor, source: torch.Generator) -> Tensor:
    """The indices of all examples, person after person in random order."""
    place = permutation(int(persons.max()) + 1, source)
    return place[persons].argsort(stable=True)


def without_copies(
    parts: Mapping[str, Tensor],
    inputs: Tensor,
) -> dict[str, Tensor]:
    """Remove from each part the examples that equal one of an earlier part.

    Disjoint indices are not enough if a data set holds one image twice. Copies within a part stay.
    A part with nothing but copies raises a ValueError. `inputs` (N, ...) holds all examples.

    Example:
        >>> inputs = torch.tensor([[1.0], [2.0], [1.0], [3.0]])
        >>> parts = {"train": torch.tensor([0, 1]), "test": torch.tensor([2, 3])}
        >>> without_copies(parts, inputs)["test"].tolist()
        [3]
    """
    seen: set[bytes] = set()
    kept = {}
    for part, indices in parts.items():
        digests = [hashlib.sha256(inputs[i].numpy().tobytes()).digest() for i in indices]
        kept[part] = indices[torch.tensor([key not in seen for key in digests], dtype=torch.bool)]
        if len(indices) and not len(kept[part]):
            raise ValueError(
                f"each of the {len(indices)} examples of the part {part!r} is a copy of one in "
                "another part; give more different examples"
            )
        seen.update(digests)
    return kept
