"""What the server saw of a client, against the weights that it got and was sent."""

import pytest
import torch

from leakbound import pruning
from leakbound.client import gradient
from leakbound.core import ThreatModel, Unknown
from leakbound.defenses import NoDefense, PriPrune, SecureAggregation, Withhold, chain
from leakbound_reproductions.federation import FederatedPlan, observe, train

close = torch.testing.assert_close


def _run(task, data, plan, rounds=6, seed=0):
    return list(train(task, data, plan, rounds=rounds, seed=seed))


@pytest.mark.parametrize(
    "defense", [NoDefense(), Withhold(rate=0.4), PriPrune(start=0.5, sharing=0.1)]
)
@pytest.mark.parametrize("scheme", [None, pruning.Random(0.3), pruning.FedDST(0.3, every=2, end=9)])
def test_the_pseudo_gradient_is_the_update_where_it_was_sent(task, data, defense, scheme):
    plan = FederatedPlan(scheme, defense, steps=2, learning_rate=0.3)
    for one in _run(task, data, plan, 4):
        for turn in one.turns:
            seen, truth = observe([one], turn.client)
            shown = seen.sent[0] != 0
            literal = (seen.task.parameters - seen.sent[0]) / 0.3
            close(literal[shown], seen.update.rows[0, shown], rtol=1e-9, atol=1e-12)
            assert (seen.update.rows[0, ~shown] == 0).all()
            if seen.update.mask is not None:
                odd = seen.update.mask[0] != shown  # grown at 0, and no gradient yet
                assert (odd & seen.update.mask[0]).equal(odd)
                assert (seen.update.rows[0, odd] == 0).all()
                assert (one.task.parameters[odd] == 0).all()
            assert truth is not turn.batch
            assert torch.equal(truth.inputs, turn.batch.inputs)
            assert torch.equal(truth.labels, seen.labels)
            assert seen.cohort == (turn.batch.size,)
            assert seen.input_shape == (1, 4, 4)
            assert seen.threat == ThreatModel()


def test_in_the_first_round_the_attacker_can_simulate_the_client(task, data):
    """Also where the client has a mask of its own, which is seen in what it sends."""
    plan = FederatedPlan(pruning.FedDST(0.3, every=1, end=9), NoDefense())
    (one,) = _run(task, data, plan, 1)
    masks = []
    for turn in one.turns:
        seen, truth = observe([one], turn.client)
        close(gradient(seen.task, truth.inputs, truth.labels), seen.update.rows[0])
        masks.append(seen.task.kept)
    assert not torch.equal(masks[0], masks[1])


def test_the_history_is_of_that_client_alone_and_in_order(task, data):
    plan = FederatedPlan(pruning.Random(0.3), Withhold("random", 0.4), clients=2, batch_size=2)
    rounds = _run(task, data, plan, 9, seed=1)
    last = rounds[-1].turns[0].client
    seen, truth = observe(rounds, last)
    took = [one for one in rounds if last in [turn.client for turn in one.turns]]
    assert len(took) < len(rounds)
    assert len(seen.history) == len(took) - 1 > 1
    for past, one in zip([*seen.history, seen], took, strict=True):
        assert past is seen or past.history == ()
        assert torch.equal(past.sent, one.turn(last).sent)
        assert torch.equal(past.update.rows, one.turn(last).update.rows)
        assert torch.equal(past.task.parameters, one.task.parameters)
    assert torch.equal(truth.inputs, rounds[-1].turn(last).batch.inputs)
    assert observe(rounds[-1:], last)[0].history == ()


def test_what_the_attacker_is_told(task, data):
    (one,) = _run(task, data, FederatedPlan(None, Withhold()), 1)
    seen, _ = observe([one], 0, auxiliary=data[2])
    assert seen.auxiliary is data[2]
    assert seen.defense is one.defense
    threat = ThreatModel(labels_known=False, defense_known=False)
    blind, _ = observe([one], 0, threat=threat)
    assert blind.labels is None
    assert blind.defense is None
    assert blind.update.mask is None
    assert isinstance(blind.update.law, Unknown)
    assert torch.equal(blind.sent, seen.sent)


def test_under_secure_aggregation_the_sum_alone_is_seen(task, data, plain):
    defense = chain(Withhold(rate=0.3), SecureAggregation(3))
    plan = FederatedPlan(None, defense, clients=3, aggregation="unchanged")
    rounds = _run(task, data, plan, 2)
    seen, truth = observe(rounds, 1)
    assert seen.sent is None
    assert seen.cohort == plain.sizes
    assert torch.equal(truth.inputs, torch.cat([b.inputs for b in data]))
    close(seen.update.rows[0], sum(turn.update.rows[0] for turn in rounds[-1].turns))
    assert len(seen.history) == 1


def test_who_took_no_part_is_not_seen(task, data):
    rounds = _run(task, data, FederatedPlan(clients=1), 1)
    (there,) = (turn.client for turn in rounds[0].turns)
    away = (there + 1) % 3
    says = f"client {away} took no part in round 1; {there} did"
    with pytest.raises(ValueError, match=says):
        observe(rounds, away)
    with pytest.raises(ValueError, match=says):
        rounds[0].personal(away)
    with pytest.raises(ValueError, match="rounds is empty; give"):
        observe([], 0)
