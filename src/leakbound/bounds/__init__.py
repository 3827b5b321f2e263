"""Bounds that no attacker can beat. Each states its distribution, assumptions and attackers.

The modules need numpy and scipy only and compute in float64. A bound on the error of a
reconstruction is a lower bound; an estimate says so in `covers`. The risk laws give a probability
for each error threshold and have modules of their own.
"""

from leakbound.bounds import (
    codebook,
    composition,
    conversions,
    correlated,
    counting,
    from_scratch,
    identification,
    known_model,
    language,
    record_priors,
)
from leakbound.bounds.cramer_rao import (
    ErrorBound,
    full_bound,
    full_bound_from_samples,
    tight_trace_bound,
    trace_bound,
    trace_bound_from_samples,
)
from leakbound.bounds.priors import FlatPrior, GaussianPrior, Prior

__all__ = [
    "ErrorBound",
    "FlatPrior",
    "GaussianPrior",
    "Prior",
    "codebook",
    "composition",
    "conversions",
    "correlated",
    "counting",
    "from_scratch",
    "full_bound",
    "full_bound_from_samples",
    "identification",
    "known_model",
    "language",
    "record_priors",
    "tight_trace_bound",
    "trace_bound",
    "trace_bound_from_samples",
]
