"""Federated training of a pruned model: clients send weights, a server averages and prunes."""

from leakbound.federation.plan import AGGREGATIONS, FederatedPlan, FederatedRound, Turn
from leakbound.federation.rounds import train
from leakbound.federation.seen import observe

__all__ = ["AGGREGATIONS", "FederatedPlan", "FederatedRound", "Turn", "observe", "train"]
