"""Bounds: what no attacker can beat, each with its law, its assumptions and whom it covers.

Numpy and scipy only, float64: numbers in, numbers out. A bound on the error of a reconstruction
is a lower bound; what is only estimated says so in `covers`. The laws of the risk, a probability
for each error threshold, stand in modules of their own.
"""

from leakbound.bounds import (
    codebook,
    composition,
    conversions,
    counting,
    from_scratch,
    identification,
    information,
    known_model,
    record_priors,
    renyi,
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
    "counting",
    "from_scratch",
    "full_bound",
    "full_bound_from_samples",
    "identification",
    "information",
    "known_model",
    "record_priors",
    "renyi",
    "tight_trace_bound",
    "trace_bound",
    "trace_bound_from_samples",
]
