"""Deployments: what a federated training protects, by audience and by unit, from its settings."""

from leakbound.risk.deployment.facts import (
    Adaptive,
    AggregationFacts,
    Claim,
    ClipFacts,
    Deployment,
    Local,
    Mistake,
    Noise,
    Participation,
    Record,
)
from leakbound.risk.deployment.file import parse, read, text_of
from leakbound.risk.deployment.laws import AudienceLaw, laws_of
from leakbound.risk.deployment.statement import Row, state

__all__ = [
    "Adaptive",
    "Claim",
    "ClipFacts",
    "Deployment",
    "AudienceLaw",
    "Local",
    "Mistake",
    "Noise",
    "Participation",
    "Record",
    "Row",
    "AggregationFacts",
    "laws_of",
    "parse",
    "read",
    "state",
    "text_of",
]
