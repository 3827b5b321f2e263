"""Opacus: secure noise, calibration to a risk, statements of risk.

Only this package imports Opacus.
"""

try:
    import opacus as _opacus  # type: ignore[import-untyped]  # noqa: F401
except ImportError as _error:
    raise ImportError("leakbound.opacus needs Opacus; pip install 'leakbound[dp]'") from _error

from leakbound.opacus.engine import RiskEngine
from leakbound.opacus.facts import describe
from leakbound.opacus.optimizer import SecureDPOptimizer, SecureGhostOptimizer
from leakbound.opacus.statement import Statement, risk

__all__ = [
    "RiskEngine",
    "SecureDPOptimizer",
    "SecureGhostOptimizer",
    "Statement",
    "describe",
    "risk",
]
