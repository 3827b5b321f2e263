"""A gate for a project: what its audits, deployments, models and clients must be, and whether."""

from leakbound.gate.policy import Requirement, read
from leakbound.gate.rules import decide

__all__ = ["Requirement", "decide", "read"]
