"""What every attack gains from parts of the examples that the attacker has from elsewhere."""

from __future__ import annotations

from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakbound.core import Observation, Reconstruction
from leakbound.domains.known import KnownValues

OTHER_LABEL = 1e9
"""The cost of a pair whose labels or known parts differ, above any distance."""


def with_known(observation: Observation, answer: Reconstruction) -> Reconstruction:
    """The answer with the known parts put in, in the order of the observation's known values.

    An attack that ignores the known parts answers in an order of its own. Each of its examples is
    paired with the known values that are nearest to it, and with an equal label if labels are
    known.

    Example:
        >>> import leakbound as lb
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> batch = lb.Batch(torch.rand(1, 1, 2, 2), torch.tensor([0]))
        >>> threat = lb.ThreatModel(known="region:top")
        >>> result = lb.simulate(model, batch, attack="linear_inversion", threat=threat)
        >>> torch.equal(result.reconstruction[:, :, 0], batch.inputs[:, :, 0])
        True
    """
    known = observation.known
    if known is None or len(answer.inputs) < observation.examples:
        return answer
    order = paired(known, answer.inputs, _differ(observation.labels, answer.labels))
    return replace(
        answer,
        inputs=known.filled(answer.inputs[order]),
        labels=None if answer.labels is None else answer.labels[order],
        agreement=None if answer.agreement is None else answer.agreement[order],
    )


def paired(known: KnownValues, inputs: Tensor, differ: Tensor | None = None) -> Tensor:
    """(N,) which of the examples (N, *S) belongs to each known value: the nearest ones together.

    Pairs for which `differ` (N, N) is True are avoided.
    """
    part = known.parts.part
    costs = part.costs(known.values.to(inputs), known.parts.values(inputs)).double().cpu()
    if differ is not None:
        costs = costs + OTHER_LABEL * differ
    places = linear_sum_assignment(costs.numpy())[1]
    return torch.as_tensor(places, device=inputs.device)


def _differ(given: Tensor | None, found: Tensor | None) -> Tensor | None:
    """(N, N) whether given labels (N,) differ from found ones; None if either has none."""
    if given is None or found is None or given.ndim != 1 or found.ndim != 1:
        return None
    return given.cpu()[:, None] != found.cpu()[None]
