"""How well a record is rebuilt from scratch out of a linear trap's noisy gradient.

The trap f(X) = W X sends, in every row, X scaled to the clip norm. `exact` is gamma*, the best that
any estimator does; `unbiased` is paper C's law, which covers unbiased estimators only; `ncc` the
law of the correlation. `effective_noise`, `averaged` and `unknown_scale` lead from a real setting
to these.
"""

from leakbound.bounds.from_scratch.correlation import ncc
from leakbound.bounds.from_scratch.laws import exact, unbiased
from leakbound.bounds.from_scratch.settings import (
    averaged,
    effective_noise,
    rows_needed,
    separation,
    unknown_scale,
)

__all__ = [
    "averaged",
    "effective_noise",
    "exact",
    "ncc",
    "rows_needed",
    "separation",
    "unbiased",
    "unknown_scale",
]
