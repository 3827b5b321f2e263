"""Whether chance explains a match: the victims compared with examples that no attack saw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leakbound.assess.criterion import Criterion
from leakbound.assess.record import Chance
from leakbound.core import Batch
from leakbound.domains import Domain, smooth_axes
from leakbound.pairing import assigned
from leakbound.randomness import permutation, stream, uniform

LEVEL = 0.01
"""The largest p-value at which matches count."""
FEWEST = 99
"""Fewer decoys cannot show a p-value of LEVEL for one example."""
MOST = 2000
"""Decoys beyond this many are left out: they would only make the p-value finer."""
BLOCKS = (99, 900, *[1000] * 9)
ENOUGH = 25
"""Random subsets drawn at a time, 9,999 in all, and number of at least as good ones after which
drawing stops.
"""
STRATA = 3
DISTINCT = 20
"""Numbers as labels, if more than DISTINCT occur, count as equal within one of STRATA quantiles, or
of as many as leave twice FEWEST examples in each.
"""
CLOSER = 10.0
"""How many times less error than any fixed guess a match has that needs no test: 10 dB."""
REPLAYS = 9
PERMUTATIONS = 9999
TIE = 1e-9
"""Trainings on other unknown parts, random orders of their answers, and up to what sums are equal.
"""
Score = tuple[float, float, float]
Replay = Callable[[Tensor, int], Tensor]
"""From other inputs (B, *S) of the clients, and a number that names the draws, to the candidates
(N, *S) of the same attack on what the clients would have sent."""


def halves(public: Batch | None) -> tuple[Batch | None, Batch | None]:
    """Public examples in two random halves: for the attack, and as decoys.

    Example:
        >>> one, two = halves(Batch(torch.rand(5, 3), torch.zeros(5)))
        >>> one.size, two.size, halves(None)
        (2, 3, (None, None))
    """
    if public is None or public.size < 2:
        return public, None
    order = permutation(public.size, stream(0, "decoys")).to(public.labels.device)
    half = public.size // 2
    attack = order[:half]
    decoys = order[half:]
    return (
        Batch(public.inputs[attack], public.labels[attack]),
        Batch(public.inputs[decoys], public.labels[decoys]),
    )


def comparable(labels: Tensor, others: Tensor) -> Tensor:
    """(D,) which decoys, by their labels, are compared with victims of these labels.

    Example:
        >>> comparable(torch.tensor([1]), torch.tensor([1, 2, 1])).tolist()
        [True, False, True]
    """
    victims, decoys = torch.split(_strata(torch.cat([labels, others])), [len(labels), len(others)])
    return torch.isin(decoys, victims)


def by_label(truth: Batch, others: Batch) -> tuple[Tensor, Tensor]:
    """The groups of equal labels, as `chance` compares them: (B,) of `truth`, (P,) of others.

    Example:
        >>> one, others = Batch(torch.rand(1, 3), torch.tensor([1])), torch.tensor([1, 2, 1])
        >>> [group.tolist() for group in by_label(one, Batch(torch.rand(3, 3), others))]
        [[0], [0, 1, 0]]
    """
    labels = torch.cat([_labels(truth), _labels(others)])
    victims, decoys = torch.split(_strata(labels), [truth.size, others.size])
    return victims, decoys


def chance(
    criterion: Criterion,
    truth: Batch,
    candidates: Tensor,
    decoys: Batch | None,
) -> Chance:
    """A permutation test of candidates (N, *S) for the examples of `truth` (B, *S).

    If the candidates do not depend on the victims, given public data and the labels, the victims
    are like a random part of victims and decoys with the same labels. The statistic is (examples
    that meet the criterion, smallest distance of one, distances in total), after the same pairing
    for each part. So the best of B! pairings, examples that all look alike and candidates near the
    mean are covered. A batch of one is compared with every decoy of its label. Otherwise parts are
    drawn until ENOUGH of them are as good (Besag and Clifford 1991).

    Labels are kept even if the attacker does not know them, because most updates reveal them: a
    label alone is no reconstruction. Labels that are numbers count as the same within a third of
    all ranks, or less if there are many examples. What the exact number says beyond that is left to
    the baseline, which knows it.

    The p-value is valid only if decoys are drawn like the victims and no attack saw them. Other
    examples of the victims' persons are among them.

    If the attacker has parts of the examples, decoys must have the same parts, too. With fewer than
    FEWEST such decoys there is no p-value; `replayed` may have one.

    Source: exchangeability; Besag and Clifford, "Sequential Monte Carlo p-values", 1991.
    """
    if decoys is None:
        return Chance(p_value=None, decoys=0, level=LEVEL)
    victims, others = _alike(criterion, truth, decoys)
    # Labels are kept: a decoy of another class is farther away, and would make any match look good.
    kept = comparable(victims, others).nonzero()[:MOST, 0]
    if len(kept) < FEWEST:
        return Chance(p_value=None, decoys=len(kept), level=LEVEL)
    size = truth.size
    inputs = criterion.counted(torch.cat([truth.inputs.cpu(), decoys.inputs.cpu()[kept]]))
    candidates = criterion.counted(candidates)
    distance = criterion.domain.distances(inputs, candidates).numpy()
    if size == 1:
        nearest = distance.min(1)
        # A tie counts as equally good, which can only raise the p-value.
        as_good = int((nearest[1:] <= nearest[0]).sum())
        p_value = (1 + as_good) / (1 + len(kept))
        return Chance(p_value=p_value, decoys=len(kept), level=LEVEL)
    cost = criterion.domain.costs(inputs, candidates).numpy()
    group = _strata(torch.cat([victims, others[kept]]))
    as_good, drawn = _as_good(distance, cost, criterion.within, group, size)
    # The p-value of Besag and Clifford if drawing stopped early, otherwise the usual one.
    p_value = as_good / drawn if as_good >= ENOUGH else (1 + as_good) / (1 + drawn)
    return Chance(p_value=p_value, decoys=len(kept), level=LEVEL)


def replayed(
    criterion: Criterion,
    truth: Batch,
    candidates: Tensor,
    decoys: Batch,
    replay: Replay,
) -> Chance:
    """A permutation test of candidates (N, *S) for who has so much that few decoys have the same.

    The clients train again, REPLAYS times, on the same known parts and labels with unknown parts of
    decoys, and the attack answers each time. If what they send says nothing of the unknown parts,
    the answers are exchangeable, whatever the decoys are like: each fits its own training no better
    than another one. The statistic is (examples that meet the criterion, distances in total) over
    all trainings, under random permutations of the answers. It proves that the attack reads unknown
    parts; the answer to the victims' update must also fit them better than every other answer does.

    Source: this project; exchangeability.
    """
    known = criterion.known
    assert known is not None
    source = stream(0, "replays")
    values = known.values(truth.inputs)
    # Each part once: answers to trainings on equal parts tell nothing.
    others = torch.unique(known.unknown(decoys.inputs.to(truth.inputs)), dim=0)
    truths = [truth.inputs]
    answers = [candidates]
    for number in range(REPLAYS):
        drawn = (uniform((truth.size,), source) * len(others)).long()
        truths.append(known.joined(values, others[drawn.to(others.device)]))
        answers.append(replay(truths[-1], number))
    matches, totals = _fits(criterion, truths, answers)
    runs = np.arange(len(truths))
    # Distances decide between equal numbers of matches: in total they are less than one match.
    fits = matches - totals / (1 + len(runs) * totals.max())
    p_value = 1.0
    if (fits[0, 1:] < fits[0, 0]).all():
        orders = uniform((PERMUTATIONS, len(runs)), source).argsort(1).numpy()
        as_good = fits[runs, orders].sum(1) >= fits.trace() - TIE
        p_value = (1 + int(as_good.sum())) / (1 + PERMUTATIONS)
    return Chance(p_value=p_value, decoys=0, replays=REPLAYS, level=LEVEL)


def _fits(
    criterion: Criterion,
    truths: Sequence[Tensor],
    answers: Sequence[Tensor],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(R, R) matches and (R, R) distances in total, of each answer with each truth."""
    domain = criterion.domain
    true = criterion.counted(torch.cat([each.cpu() for each in truths]))
    candidates = criterion.counted(torch.cat([each.cpu() for each in answers]))
    distance = domain.distances(true, candidates).numpy()
    cost = domain.costs(true, candidates).numpy()
    size = len(truths[0])
    places = np.split(np.arange(len(candidates)), np.cumsum([len(each) for each in answers])[:-1])
    matches = np.empty((len(truths), len(answers)))
    totals = np.empty_like(matches)
    for row in range(len(truths)):
        some = np.arange(row * size, (row + 1) * size)
        for column, these in enumerate(places):
            pairs = assigned(cost[np.ix_(some, these)])
            paired = distance[some, these[pairs]]
            matches[row, column] = (paired <= criterion.within).sum()
            totals[row, column] = paired.sum()
    return matches, totals


def _as_good(
    distance: NDArray[np.float64],
    cost: NDArray[np.float64],
    within: float,
    group: Tensor,
    size: int,
) -> tuple[int, int]:
    """How many random parts are as good as the first `size` examples, and how many were drawn."""

    def score(part: NDArray[np.int64]) -> Score:
        paired = distance[part, assigned(cost[part])]
        return float((paired <= within).sum()), -float(paired.min()), -float(paired.sum())

    seen = score(np.arange(size))
    nearest = distance.min(1)
    near = nearest <= within
    members = [(group == number).nonzero()[:, 0] for number in torch.unique(group[:size])]
    counts = [int((these < size).sum()) for these in members]
    source = stream(0, "chance")
    as_good = drawn = 0
    for block in BLOCKS:
        parts = np.concatenate(
            [
                _subsets(these, count, block, source)
                for these, count in zip(members, counts, strict=True)
            ],
            axis=1,
        )
        # No pairing of a part does better than every example with its nearest candidate.
        limit = near[parts].sum(1)
        best = -nearest[parts].min(1)
        hopeful = (limit > seen[0]) | ((limit == seen[0]) & (best >= seen[1]))
        for part, possible in zip(parts, hopeful, strict=True):
            drawn += 1
            as_good += bool(possible) and score(part) >= seen
            if as_good == ENOUGH:
                return as_good, drawn
    return as_good, drawn


def _subsets(
    members: Tensor,
    count: int,
    block: int,
    source: torch.Generator,
) -> NDArray[np.int64]:
    """(block, count) uniformly random subsets of the members."""
    if count == 1:
        # A single index needs no sort of random keys.
        at = (uniform((block, 1), source) * len(members)).long()
    else:
        # The places of the largest random keys are a uniform subset, without repetition.
        at = uniform((block, len(members)), source).topk(count).indices
    return np.asarray(members[at].numpy())


def unlike_any_guess(
    domain: Domain,
    distances: Tensor,
    guessed: Tensor,
    inputs: Tensor,
    public: Tensor | None,
) -> Tensor:
    """(B,) whether a match is far closer than any fixed guess is to any example.

    It replaces the test where there are too few decoys. No guess without the update, for any of the
    examples `inputs` (victims and decoys), may come nearer than CLOSER times the match's error.
    Such candidates are the prior-only baselines, whose distances are `guessed`, the public
    examples and flat examples.

    Args:
        domain: the form of an example.
        distances: (B,) of the matches.
        guessed: (E,) of each example's closest prior-only baseline.
        inputs: (E, *S) the examples.
        public: (P, *S) what the attacker may have; None if there is nothing.
    """
    nearest = guessed.clone()
    if domain.parts is None:
        axes = smooth_axes(domain.shape) or tuple(range(1 - inputs.ndim, 0))
        flat = inputs.double().mean(axes, keepdim=True).expand(inputs.shape)
        nearest = torch.minimum(nearest, domain.distance(inputs, flat))
    if public is not None and len(public):
        nearest = torch.minimum(nearest, domain.distances(inputs, public).amin(1))
    closest = float(nearest.min())
    if domain.parts is None:
        # Distances are roots of mean squares, so 10 dB is a factor of sqrt(10).
        return distances * math.sqrt(CLOSER) <= closest
    # A count of wrong parts has no square; below CLOSER, not even 0 is ten times less than it.
    return (distances * CLOSER <= closest) & (closest >= CLOSER)


def _alike(criterion: Criterion, truth: Batch, decoys: Batch) -> tuple[Tensor, Tensor]:
    """What must be equal in victims and decoys: labels, and what the attacker has of them."""
    victims = _labels(truth)
    others = _labels(decoys)
    known = criterion.known
    if known is None:
        return victims, others
    strata = _strata(torch.cat([victims, others]))
    values = torch.cat([known.values(each.inputs).cpu() for each in (truth, decoys)])
    rows = torch.column_stack([strata.double(), values.flatten(1).double()])
    group = torch.unique(rows, return_inverse=True, dim=0)[1]
    return group[: truth.size], group[truth.size :]


def _labels(batch: Batch) -> Tensor:
    """What must be equal in victims and decoys: nothing if the labels are the input's own."""
    labels = batch.labels.cpu()
    own_tokens = not batch.inputs.is_floating_point() and labels.shape == batch.inputs.shape
    return torch.zeros(len(labels)) if own_tokens else labels


def _strata(labels: Tensor) -> Tensor:
    """(N,) the group of each label: equal ones, or near ones if they are many numbers."""
    group: Tensor
    values, group = torch.unique(labels, return_inverse=True, dim=0)
    if labels.is_floating_point() and labels.ndim == 1 and len(values) > DISTINCT:
        parts = max(STRATA, len(labels) // (2 * FEWEST))
        edges = torch.linspace(0, 1, parts + 1, dtype=torch.float64)[1:-1]
        return torch.bucketize(labels.double(), labels.double().quantile(edges))
    return group
