"""Deployments of a node that pays for its rounds."""

import pytest

from leakbound.ledger import Budget
from leakbound.risk.deployment import parse

FACTS = {
    "clip": {"norm": 1.0, "kind": "l2", "at": "client"},
    "noise": {"multiplier": 2.4, "at": "client", "seeded": False},
    "participation": {"law": "all"},
    "correlation": "none",
    "record": {"examples_per_client": 100},
}


@pytest.fixture
def facts():
    """Of a client that adds its own noise: (noise multiplier, more tables) -> deployment."""

    def of(multiplier=2.4, **more):
        return parse(FACTS | {"noise": FACTS["noise"] | {"multiplier": multiplier}} | more)

    return of


@pytest.fixture
def wide():
    """A budget that no test spends."""
    return Budget(max_epsilon=1e6)
