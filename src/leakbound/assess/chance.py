"""Whether matching columns are chance: the victims compared with rows that no attack saw."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leakbound.assess.criterion import Criterion
from leakbound.assess.record import Chance
from leakbound.domains import Domain
from leakbound.pairing import assigned
from leakbound.random import permutation, stream
from leakbound.types import Batch

LEVEL = 0.01
"""The largest p-value at which matches count."""
FEWEST = 99
"""Fewer decoys cannot show a p-value of LEVEL for one row."""
DRAWS, ENOUGH = 9999, 25
"""Most random subsets, and number of at least as good ones after which drawing stops."""
STRATA, DISTINCT = 3, 20
"""Numbers as labels, if more than DISTINCT occur, count as equal within one of STRATA quantiles, or
of as many as leave twice FEWEST rows in each.
"""
Score = tuple[float, float, float]


def halves(domain: Domain, public: Batch | None) -> tuple[Batch | None, Batch | None]:
    """Public rows of a table in two random halves: for the attack, and as decoys; else unchanged.

    Example:
        >>> from leakbound.domains import of_shape
        >>> halves(of_shape((3,)), None)
        (None, None)
    """
    if public is None or domain.metric != "columns" or public.size < 2:
        return public, None
    order = permutation(public.size, stream(0, "decoys")).to(public.labels.device)
    parts = order[: public.size // 2], order[public.size // 2 :]
    one, two = (Batch(public.inputs[own], public.labels[own]) for own in parts)
    return one, two


def chance(
    criterion: Criterion, truth: Batch, guesses: Tensor, decoys: Batch | None
) -> Chance | None:
    """A permutation test of candidates (N, n) for the rows of `truth` (B, n) against decoys.

    If the candidates do not depend on the victims, given public data and the labels, the victims
    are like a random part of victims and decoys with the same labels. The statistic is (rows that
    meet the criterion, most columns of one row, columns in total), after the same pairing for each
    part. A batch of one is compared with every decoy of its label. Otherwise parts are drawn until
    ENOUGH of them are as good (Besag and Clifford 1991). Labels are kept even if the attacker does
    not know them, because most updates reveal them: a label alone is no reconstruction. Labels that
    are numbers count as the same within a third of all ranks, or less if there are many rows. What
    the exact number says beyond that is left to the baseline, which knows it.

    The p-value is valid only if decoys are drawn like the victims and no attack saw them.

    None if there are fewer than FEWEST decoys with these labels.

    Source: exchangeability; Besag and Clifford, "Sequential Monte Carlo p-values", 1991.
    """
    if decoys is None:
        return None
    labels = torch.cat([truth.labels.cpu(), decoys.labels.cpu()])
    groups = torch.split(_strata(labels), [truth.size, decoys.size])
    usable = torch.isin(groups[1], groups[0])
    pool = int(usable.sum())
    if pool < FEWEST:
        return None
    rows = torch.cat([truth.inputs.cpu(), decoys.inputs.cpu()[usable]])
    group = torch.cat([groups[0], groups[1][usable]]).numpy()
    cost = criterion.domain.costs(rows, guesses).numpy()
    missed = np.floor(cost + 1e-9)  # the rest of a cost only breaks ties
    size = truth.size

    def score(part: np.ndarray) -> Score:
        own = missed[part, assigned(cost[part])]
        return float((own <= criterion.within).sum()), -float(own.min()), -float(own.sum())

    seen = score(np.arange(size))
    if size == 1:
        best = cost.min(1)
        as_good = int((np.floor(best[1:] + 1e-9) <= np.floor(best[0] + 1e-9)).sum())
        return Chance(p_value=(1 + as_good) / (1 + pool), decoys=pool, level=LEVEL)
    own = np.unique(group[:size])
    wanted = [(np.flatnonzero(group == g), int((group[:size] == g).sum())) for g in own]
    source, as_good, drawn = stream(0, "chance"), 0, 0
    while drawn < DRAWS and as_good < ENOUGH:
        drawn += 1
        parts = [these[permutation(len(these), source).numpy()[:k]] for these, k in wanted]
        as_good += score(np.concatenate(parts)) >= seen
    p_value = as_good / drawn if as_good >= ENOUGH else (1 + as_good) / (1 + drawn)
    return Chance(p_value=p_value, decoys=pool, level=LEVEL)


def _strata(labels: Tensor) -> Tensor:
    """(N,) the group of each label: equal ones, or near ones if they are many numbers."""
    group: Tensor
    values, group = torch.unique(labels, return_inverse=True, dim=0)
    if labels.is_floating_point() and labels.ndim == 1 and len(values) > DISTINCT:
        parts = max(STRATA, len(labels) // (2 * FEWEST))
        edges = torch.linspace(0, 1, parts + 1, dtype=torch.float64)[1:-1]
        return torch.bucketize(labels.double(), labels.double().quantile(edges))
    return group
