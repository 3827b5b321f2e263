"""Rounds of a federation whose clients train a part of the model."""

import pytest
import torch
from torch import nn

from leakbound import pruning
from leakbound.core import Task
from leakbound.defenses import NoDefense, Withhold
from leakbound_reproductions.federation import FederatedPlan, observe, train


@pytest.fixture
def frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model[1].requires_grad_(False)
    return Task.of(model, classes=3)


@pytest.mark.parametrize(
    "scheme", [None, pruning.Magnitude(0.4), pruning.Snip(0.4), pruning.PruneFL(0.4, every=1)]
)
def test_clients_train_what_is_trained(frozen, data, plain, scheme):
    """Against plain torch, whose optimizer has the trained parameters alone."""
    plan = FederatedPlan(scheme, NoDefense(), steps=3, learning_rate=0.3)
    for one in train(frozen, data, plan, rounds=2, seed=0):
        assert len(one.task.parameters) == 27
        for turn, batch in zip(one.turns, data, strict=True):
            wanted = plain.trained(turn.task, batch, plan)
            torch.testing.assert_close(turn.sent[0], wanted, rtol=1e-9, atol=1e-12)
        for name, value in frozen.frozen.items():
            assert torch.equal(one.after.tensors()[name], value)


def test_what_is_withheld_and_seen(frozen, data):
    plan = FederatedPlan(None, Withhold(rate=0.4), learning_rate=0.3)
    (one,) = train(frozen, data, plan, rounds=1, seed=0)
    assert int((one.turns[0].sent == 0).sum()) == int(0.4 * 24)
    seen, _ = observe([one], 0)
    assert seen.update.rows.shape == (1, 27)
