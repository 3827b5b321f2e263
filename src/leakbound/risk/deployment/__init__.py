"""Deployments: what a federated training protects, by audience and by unit, from its settings."""

from leakbound.risk.deployment.facts import (
    Adaptive,
    Claim,
    Clip,
    Deployment,
    Local,
    Mistake,
    Noise,
    Participation,
    Record,
    SecureAggregation,
)

__all__ = [
    "Adaptive",
    "Claim",
    "Clip",
    "Deployment",
    "Local",
    "Mistake",
    "Noise",
    "Participation",
    "Record",
    "SecureAggregation",
]
