"""How often an attacker who knows some parts completes the example without any update.

Imputers are fitted on half of the public examples and counted on the other half, so the share is
what a real attacker reaches: the prior success of an intruder is at least that. No sample bounds it
from above if the known parts are nearly unique (`bounds.knowledge.informed`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from leakbound._util.intervals import clopper_pearson
from leakbound.assess.record import Completed
from leakbound.assess.released import nine
from leakbound.attacks.imputers import FEWEST, completions
from leakbound.domains.known import Known

__all__ = ["prior_of_intruder"]

FITTED = 20_000
COUNTED = 2_000
"""Most examples that imputers are fitted on, and that they are counted on."""


def prior_of_intruder(
    public: Tensor,
    known: Known,
    within: float,
    *,
    labels: Tensor | None = None,
    confidence: float = 0.95,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Completed, ...]:
    """Count every imputer on held-out public examples; the best one comes first.

    Shapes: `public` (N, *shape), independent examples, one of each person.

    Args:
        public: at least FEWEST examples.
        known: the parts that the attacker knows.
        within: the distance of the unknown part up to which it counts as reconstructed.
        labels: (N,) or (N, ...) of the examples, if the attacker knows labels.
        confidence: of the limits, over the draw of the counted examples.
        say: is called with a line of progress for each imputer.

    Raises:
        ValueError: there are fewer than FEWEST public examples.

    Example:
        >>> import torch
        >>> from leakbound.domains import of_shape
        >>> from leakbound.domains.known import known_parts
        >>> domain = of_shape((6,))
        >>> first = torch.rand(200, 3, generator=torch.Generator().manual_seed(0))
        >>> known = known_parts(domain, "places:0-2")
        >>> best = prior_of_intruder(torch.cat([first, first.flip(1)], 1), known, 0.01)[0]
        >>> best.imputer, best.matched, best.total
        ('linear', 100, 100)
    """
    if len(public) < FEWEST:
        raise ValueError(f"public holds {len(public)} examples; give at least {FEWEST}")
    order = np.random.default_rng(0).permutation(len(public))
    half = len(public) // 2
    of_fitted = order[:half][:FITTED]
    of_counted = order[half:][:COUNTED]
    fitted = public[of_fitted]
    counted = public[of_counted]
    told = None if labels is None else (labels[of_fitted], labels[of_counted])
    truth = known.unknown(counted)
    counts = []
    for name, completed in completions(fitted, known, counted, told):
        matched = int((known.rest.distance(truth, completed) <= within).sum())
        counts.append((name, matched))
        say(f"{name}: completes {matched} of {len(counted)} without the update")
    tail = (1 - confidence) / len(counts)
    return tuple(
        Completed(
            imputer=name,
            matched=matched,
            total=len(counted),
            at_least=nine(clopper_pearson(matched, len(counted), tail)[0], up=False),
        )
        for name, matched in sorted(counts, key=lambda pair: -pair[1])
    )
