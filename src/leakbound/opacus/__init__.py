"""Opacus: secure noise, noise of a public shape, calibration to a risk, statements of risk.

Only this package imports Opacus.
"""

try:
    import opacus as _opacus  # type: ignore[import-untyped]  # noqa: F401
except ImportError as _error:
    raise ImportError("leakbound.opacus needs Opacus; pip install 'leakbound[dp]'") from _error

from leakbound.opacus.engine import RiskEngine
from leakbound.opacus.facts import describe
from leakbound.opacus.optimizer import (
    PublicRoot,
    SecureDPOptimizer,
    SecureGhostOptimizer,
    WhitenedDPOptimizer,
)
from leakbound.opacus.statement import Statement, risk

__all__ = [
    "PublicRoot",
    "RiskEngine",
    "SecureDPOptimizer",
    "SecureGhostOptimizer",
    "Statement",
    "WhitenedDPOptimizer",
    "describe",
    "risk",
]
