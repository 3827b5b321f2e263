"""Federated training of a pruned model: clients send weights, a server averages and prunes."""

from leakbound.federation.training import (
    AGGREGATIONS,
    ClientTurn,
    FederatedPlan,
    FederatedRound,
    observe,
    train,
)

__all__ = ["AGGREGATIONS", "ClientTurn", "FederatedPlan", "FederatedRound", "observe", "train"]
