"""Lower bounds on the epsilon of running code, from canaries, as a black box over the update."""

from leakbound.audit_epsilon.clients import Client, of_flower, of_training
from leakbound.audit_epsilon.finding import Claims, EpsilonAudit, LowerEpsilon
from leakbound.audit_epsilon.runs import audit_many_runs, audit_one_run

__all__ = [
    "Claims",
    "Client",
    "EpsilonAudit",
    "LowerEpsilon",
    "audit_many_runs",
    "audit_one_run",
    "of_flower",
    "of_training",
]
