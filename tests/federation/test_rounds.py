"""Rounds of a federation against plain torch loops and arithmetic by hand."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from leakbound import pruning
from leakbound.core import Batch
from leakbound.defenses import (
    ClipExamples,
    DpSgd,
    GaussianNoise,
    LocalAggregation,
    NoDefense,
    PriPrune,
    SecureAggregation,
    Withhold,
    chain,
)
from leakbound.pruning import FedDST, PruneFL, density, layer_counts, prunable
from leakbound.randomness import stream
from leakbound_reproductions.federation import AGGREGATIONS, FederatedPlan, train

close = torch.testing.assert_close
SCHEMES = {
    "random": pruning.Random(0.4),
    "magnitude": pruning.Magnitude(0.4, scope="layer"),
    "snip": pruning.Snip(0.4),
    "grasp": pruning.Grasp(0.4),
    "synflow": pruning.Synflow(0.4),
    "prunefl": PruneFL(0.4, every=4),
    "feddst": FedDST(0.4, every=4, end=20),
}
PRIPRUNE = PriPrune(start=0.5, sharing=0.1)  # withholds about half from the first round
schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def _run(task, data, plan, rounds, seed=0, **more):
    return list(train(task, data, plan, rounds=rounds, seed=seed, **more))


@pytest.mark.parametrize("rule", AGGREGATIONS)
@pytest.mark.parametrize("scheme", [None, pruning.Random(0.3)], ids=["dense", "pruned"])
def test_the_mean_by_hand(task, data, plain, rule, scheme):
    plan = FederatedPlan(scheme, Withhold(rate=0.4), learning_rate=0.3, aggregation=rule)
    rounds = _run(task, data, plan, 3)
    for one, after in zip(rounds, [*rounds[1:], None], strict=True):
        want = plain.mean(one.turns, plain.sizes, one.task.parameters, rule)
        close(one.after.parameters, want, rtol=1e-12, atol=1e-14)
        if after is not None:
            assert after.task is one.after
        several = sum((turn.sent[0] != 0).int() for turn in one.turns)
        assert {0, 1, 2, 3} == set(several[prunable(task)].tolist())
        assert (several[~prunable(task)] == 3).all()


def test_what_is_sent_by_hand(task, data, plain):
    plan = FederatedPlan(None, Withhold(rate=0.4), steps=2, learning_rate=0.3)
    for one in _run(task, data, plan, 1):
        for turn, batch in zip(one.turns, data, strict=True):
            own = plain.trained(task, batch, plan)
            size = (own - task.parameters).abs()
            want = own.clone()
            for _, shape, a, b in task.layout:
                if len(shape) > 1:
                    order = size[a:b].argsort(descending=True)
                    want[a:b][order[: int(0.4 * (b - a))]] = 0
            close(turn.sent[0], want)
            assert torch.equal(turn.sent[0] == 0, want == 0)
            assert turn.rate == pytest.approx((51 + 9) / (128 + 24))


def test_one_step_on_equal_clients_is_central_descent(task, plain):
    data = plain.clients((5, 5, 5))
    union = Batch(torch.cat([b.inputs for b in data]), torch.cat([b.labels for b in data]))
    plan = FederatedPlan(learning_rate=0.5)
    weights = task.parameters
    for rule in AGGREGATIONS:
        weights = task.parameters
        for one in _run(task, data, replace(plan, aggregation=rule), 6):
            weights = plain.trained(task, union, plan, weights)
            close(one.after.parameters, weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scheme", [None, pruning.Snip(0.5)], ids=["dense", "pruned"])
def test_local_steps_on_minibatches_are_torchs(task, data, plain, scheme):
    plan = FederatedPlan(scheme, batch_size=2, steps=3, learning_rate=0.4)
    seen = []
    for one in _run(task, data, plan, 3):
        own = []
        for turn, batch in zip(one.turns, data, strict=True):
            assert turn.batch.size == min(6, batch.size)
            places = [
                int((batch.inputs == image).flatten(1).all(1).nonzero())
                for image in turn.batch.inputs
            ]
            assert len(set(places)) == len(places)
            assert torch.equal(batch.labels[places], turn.batch.labels)
            own.append(plain.trained(one.task, turn.batch, plan))
            close(turn.sent[0], own[-1], rtol=1e-12, atol=1e-14)
        seen.append(tuple(places))
        want = sum(n * w for n, w in zip(plain.sizes, own, strict=True)) / sum(plain.sizes)
        close(one.after.parameters, want, rtol=1e-12, atol=1e-14)
    assert len(set(seen)) == 3  # the largest client draws anew


@schemes
@pytest.mark.parametrize("defense", [NoDefense(), Withhold("mix", 0.3), PRIPRUNE])
def test_every_scheme_prunes_for_good(convnet, data, scheme, defense):
    plan = FederatedPlan(scheme, defense, learning_rate=0.2)
    rounds = _run(convnet, data, plan, 12)
    total = int(prunable(convnet).sum())
    want = total - int(0.4 * total)
    layers = [c.kept for c in layer_counts(convnet, rounds[0].task.kept)]
    for one in rounds:
        for model in (one.task, one.after):
            assert (model.parameters[~model.kept] == 0).all()
            assert model.kept[~prunable(convnet)].all()
            exact = sum(c.kept for c in layer_counts(model, model.kept))
            by_layer = scheme == SCHEMES["magnitude"] or (
                isinstance(scheme, PruneFL) and one.number + (model is one.after) <= 4
            )
            assert 0 <= exact - want <= (2 if by_layer else 0)  # rounded in every layer
            if isinstance(scheme, FedDST):
                assert [c.kept for c in layer_counts(model, model.kept)] == layers
        for turn in one.turns:
            gone = ~turn.task.kept
            assert (turn.sent[0, gone] == 0).all()
            assert (turn.update.rows[0, gone] == 0).all()
            assert not turn.update.mask[0, gone].any()
            assert (turn.kept is None) == (defense == NoDefense())
            if turn.kept is not None:
                assert (turn.kept.weights[gone] == 0).all()
    rates = [turn.rate for one in rounds for turn in one.turns]
    assert all(0 < rate < 0.9 for rate in rates) != (defense == NoDefense())
    changed = [one.number for one in rounds if not torch.equal(one.task.kept, one.after.kept)]
    assert changed == ([4, 8, 12] if isinstance(scheme, PruneFL | FedDST) else [])
    assert density(convnet, rounds[-1].after.kept) == pytest.approx(0.6, abs=0.02)
    assert torch.isfinite(rounds[-1].after.parameters).all()


@dataclass(frozen=True)
class _Watched(PruneFL):
    def server_mask(self, task, report, round_):
        asked.append((task, report))
        return super().server_mask(task, report, round_)


@dataclass(frozen=True)
class _WatchedDST(FedDST):
    def server_mask(self, task, report, round_):
        asked.append((task, report))
        return super().server_mask(task, report, round_)


asked: list = []


def test_reports_are_masked_and_averaged_by_size(task, data, plain):
    asked.clear()
    data[0].inputs[:, 0, 0, 0] = 0  # weights of this pixel get a true zero from this client
    plan = FederatedPlan(_Watched(0.4, every=2), Withhold("random", 0.5), learning_rate=0.3)
    one, two = _run(task, data, plan, 2)
    assert all(turn.report is None for turn in one.turns)
    (given, report), shown = asked[0], 0
    assert len(asked) == 1
    total = torch.zeros_like(report)
    for turn, size in zip(two.turns, plain.sizes, strict=True):
        model = copy.deepcopy(task.model).requires_grad_(True)
        nn.utils.vector_to_parameters(two.task.parameters, model.parameters())
        nn.functional.cross_entropy(model(turn.batch.inputs), turn.batch.labels).backward()
        slope = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        withheld = two.task.kept & (turn.sent[0] == 0)
        assert withheld.any()
        assert (turn.report[withheld] == 0).all()
        close(turn.report, slope.square() * ~withheld)
        total += size * slope.square() * ~withheld
        shown = shown + size * (~withheld).int()
    close(report, total / shown.clamp_min(1))
    zero = torch.zeros(8, 16, dtype=torch.bool)
    zero[:, 0] = True
    assert (two.turns[0].report[:128][zero.flatten()] == 0).all()
    close(given.parameters, plain.mean(two.turns, plain.sizes, two.task.parameters, "masked"))
    assert torch.equal(given.kept, two.task.kept)
    assert torch.equal(two.after.kept, plan.pruning.server_mask(given, report, 2))
    back = two.after.kept & ~two.task.kept
    assert back.any()
    assert (two.after.parameters[back] == 0).all()


@pytest.mark.parametrize("defense", [NoDefense(), Withhold(rate=0.3)], ids=["none", "withhold"])
@pytest.mark.parametrize("rule", AGGREGATIONS)
def test_feddst_averages_over_all_masks(task, data, plain, defense, rule):
    asked.clear()
    plan = FederatedPlan(_WatchedDST(0.5, every=2), defense, learning_rate=0.3, aggregation=rule)
    _, two = _run(task, data, plan, 2)
    ((given, report),) = asked
    assert report is None
    own = torch.stack([turn.task.kept for turn in two.turns])
    assert not torch.equal(own[0], own[1])
    grown = own.any(0) & ~two.task.kept
    assert (given.parameters[grown] != 0).any()
    want = plain.mean(two.turns, plain.sizes, two.task.parameters, rule)
    close(given.parameters, want, rtol=1e-12, atol=1e-14)
    assert (given.parameters[~(own.any(0) | two.task.kept)] == 0).all()
    assert torch.equal(two.after.kept, plan.pruning.server_mask(given, None, 2))
    close(two.after.parameters, want * two.after.kept)
    assert (two.after.kept & grown).any()


def test_a_client_keeps_its_weights_while_others_train(task, data, plain):
    plan = FederatedPlan(None, Withhold("random", 0.5), clients=1, learning_rate=0.3)
    held, gaps, last = {}, set(), {}
    for one in _run(task, data, plan, 12, seed=3):
        (turn,) = one.turns
        start = one.task.parameters
        if turn.client in held:
            before = held[turn.client]
            start = torch.where(before.sent, start, before.weights)
            gaps.add(one.number - last[turn.client])
        close(turn.kept.weights, plain.trained(task, data[turn.client], plan, start))
        assert torch.equal(turn.batch.inputs, data[turn.client].inputs)
        held[turn.client], last[turn.client] = turn.kept, one.number
    assert set(held) == {0, 1, 2}
    assert max(gaps) > 2


def test_those_who_take_part_are_drawn_without_replacement(task, plain):
    data = plain.clients((2,) * 7)
    plan = FederatedPlan(clients=3)
    count = torch.zeros(7)
    for one in _run(task, data, plan, 200):
        numbers = [turn.client for turn in one.turns]
        assert numbers == sorted(set(numbers))
        assert len(numbers) == 3
        count[numbers] += 1
    assert ((count - 200 * 3 / 7).abs() < 4 * (200 * 12 / 49) ** 0.5).all()


@pytest.mark.parametrize("defense", [Withhold("random"), PRIPRUNE, DpSgd()])
def test_a_seed_names_every_draw(task, data, defense):
    plan = FederatedPlan(pruning.Random(0.3), defense, clients=2, batch_size=2)
    ends = [
        torch.stack([one.after.parameters for one in _run(task, data, plan, 4, seed)])
        for seed in (5, 5, 6)
    ]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_every_kind_of_draw_has_a_name_of_its_own(task, plain):
    data = plain.clients((4, 4, 4, 4))

    def drawn(seed):
        plan = FederatedPlan(pruning.Random(0.3), Withhold("random", 0.5), clients=3, batch_size=2)
        rounds = _run(task, data, plan, 2, seed)
        masks = [turn.update.mask[0] for one in rounds for turn in one.turns]
        assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
        images = [turn.batch.inputs for turn in rounds[0].turns]
        return [rounds[0].task.kept, masks[0] | ~rounds[0].task.kept, images[0]]

    assert all(torch.equal(a, b) for a, b in zip(drawn(0), drawn(0), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(drawn(0), drawn(1), strict=True))
    full = FederatedPlan(None, Withhold("random", 0.5))
    one, two = (_run(task, data, full, 1, seed)[0].turns[0].update.mask for seed in (0, 1))
    assert not torch.equal(one, two)


def test_the_systems_entropy(task, data):
    plan = FederatedPlan(pruning.Random(0.3), PRIPRUNE, clients=2, batch_size=1)
    one, two = (_run(task, data, plan, 3, None)[-1].after.parameters for _ in range(2))
    assert torch.isfinite(one).all()
    assert not torch.equal(one, two)


@pytest.mark.parametrize("defense", [Withhold(rate=0.3), PRIPRUNE, NoDefense()])
@pytest.mark.parametrize("scheme", [None, pruning.Magnitude(0.3)], ids=["dense", "pruned"])
def test_secure_aggregation_is_the_mean_of_changes(task, plain, defense, scheme):
    data = plain.clients((4, 4, 4))
    plan = FederatedPlan(scheme, defense, learning_rate=0.3, aggregation="unchanged")
    hidden = replace(plan, defense=chain(defense, SecureAggregation(3)), clients=3)
    for open_, closed in zip(_run(task, data, plan, 5), _run(task, data, hidden, 5), strict=True):
        close(open_.after.parameters, closed.after.parameters, rtol=1e-10, atol=1e-12)
        assert all(turn.sent is None for turn in closed.turns)
        rows = [turn.update.rows[0] for turn in closed.turns]
        close(closed.total.rows[0], sum(rows))
        assert open_.total is None


def test_what_comes_after_a_sum_runs(task, data):
    for count in (1, 3):
        noisy = chain(SecureAggregation(count), GaussianNoise(1.0))
        plan = FederatedPlan(None, noisy, clients=count, aggregation="unchanged")
        (one,) = _run(task, data, plan, 1)
        plain_sum = sum(turn.update.rows[0] for turn in one.turns)
        assert float((one.total.rows[0] - plain_sum).std()) == pytest.approx(1, abs=0.2)
        change = (task.parameters - one.after.parameters) / 0.1 * count
        close(change, one.total.rows[0])


def test_dp_sgd_then_priprune(task, data):
    plan = FederatedPlan(None, chain(*DpSgd().links, PRIPRUNE), batch_size=2)
    rounds = _run(task, data, plan, 4)
    assert all(0 < turn.rate < 1 for turn in rounds[0].turns)
    assert rounds[-1].turns[0].kept.own.steps == 4


def test_no_withholding_gives_the_same_bits(task, data):
    none = _run(task, data, FederatedPlan(pruning.Random(0.3)), 3)
    zero = _run(task, data, FederatedPlan(pruning.Random(0.3), Withhold(rate=0.0)), 3)
    assert torch.equal(none[-1].after.parameters, zero[-1].after.parameters)
    assert none[-1].turns[0].rate == zero[-1].turns[0].rate == 0


def test_the_model_that_a_client_goes_on_with(task, data):
    for defense in (
        Withhold(rate=0.4),
        Withhold(rate=0.4, pseudo=False),
        PRIPRUNE,
    ):
        plan = FederatedPlan(pruning.Random(0.3), defense, learning_rate=0.3)
        for one in _run(task, data, plan, 3):
            for turn in one.turns:
                own = one.personal(turn.client)
                shown = (turn.sent[0] != 0) | ~one.after.kept
                want = one.after.parameters
                if getattr(defense, "pseudo", True):
                    want = torch.where(shown, want, turn.kept.weights)
                    assert (want != one.after.parameters).any() == (turn.rate > 0)
                assert torch.equal(own.parameters, want)
    (one,) = _run(task, data, FederatedPlan(), 1)
    assert one.personal(0) is one.after


def test_nothing_that_is_given_changes(convnet, data):
    model = copy.deepcopy(convnet.model.state_dict())
    weights, plan_before = convnet.parameters.clone(), convnet.plan
    kept = [(b.inputs.clone(), b.labels.clone()) for b in data]
    plan = FederatedPlan(PruneFL(0.4, every=2), PRIPRUNE, steps=2)
    rounds = train(convnet, data, plan, rounds=4, seed=0)
    before = None
    for one in rounds:
        if before is not None:
            assert torch.equal(before[0].after.parameters, before[1])
            assert torch.equal(before[0].turns[0].kept.weights, before[2])
            assert torch.equal(before[0].turns[0].kept.own.logits, before[3])
        turn = one.turns[0]
        held = turn.kept.weights.clone(), turn.kept.own.logits.clone()
        before = (one, one.after.parameters.clone(), *held)
    assert torch.equal(convnet.parameters, weights)
    assert convnet.plan == plan_before
    assert convnet.kept is None
    assert all(torch.equal(v, model[k]) for k, v in convnet.model.state_dict().items())
    for batch, (inputs, labels) in zip(data, kept, strict=True):
        assert torch.equal(batch.inputs, inputs)
        assert torch.equal(batch.labels, labels)


def test_rounds_are_played_one_by_one(task, data):
    calls = []

    def loss(outputs, labels):
        calls.append(1)
        return nn.functional.cross_entropy(outputs, labels)

    rounds = train(replace(task, loss=loss), data, FederatedPlan(), rounds=5, seed=0)
    assert not calls
    next(rounds)
    assert len(calls) == 3
    next(rounds)
    assert len(calls) == 6


def test_wrong_arguments_are_refused_at_once(task, data):
    plan = FederatedPlan()
    for more, says in {
        (("rounds", 0),): "rounds is 0; give a whole number",
        (("clients", ()),): "clients is empty; give the data of each client",
        (("plan", FederatedPlan(clients=4)),): "clients is 4 a round, but there are 3; give at mo",
    }.items():
        given = {"task": task, "clients": data, "plan": plan, "rounds": 2, "seed": 0, **dict(more)}
        with pytest.raises(ValueError, match=says):
            train(**given)
    pruned = task.pruned(torch.ones_like(task.parameters).bool())
    with pytest.raises(ValueError, match="task is already pruned"):
        train(pruned, data, FederatedPlan(pruning.Random()), rounds=1, seed=0)
    odd = [*data[:2], Batch(data[2].inputs, data[2].labels + 5)]
    with pytest.raises(ValueError, match="labels run from"):
        list(train(task, odd, plan, rounds=1, seed=0))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"clients": -1}, "clients is -1; give a whole number"),
        ({"batch_size": 2.5}, "batch_size is 2.5; give a whole number"),
        ({"steps": 0}, "steps is 0; give a whole number"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; give a finite number above 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf; give a finite number above 0"),
        ({"aggregation": "median"}, "aggregation is 'median'"),
        ({"defense": SecureAggregation(3), "clients": 3}, 'give aggregation="unchanged"'),
        (
            {"defense": SecureAggregation(3), "clients": 3, "aggregation": "plain"},
            'give aggregation="unchanged"',
        ),
        (
            {"defense": SecureAggregation(3), "aggregation": "unchanged"},
            r"clients is 0, but .* runs on 3; give as many",
        ),
        ({"defense": ClipExamples(1.0)}, r"one row per example; put Mean\(\) after it"),
        ({"defense": LocalAggregation(3, 0.1)}, "give its steps and learning_rate to the plan"),
    ],
)
def test_wrong_plans_are_named(bad, says):
    with pytest.raises(ValueError, match=says):
        FederatedPlan(**bad)


def test_public_images_choose_the_first_mask(task, data, plain):
    public = plain.clients((8, 8))[1]
    plan = FederatedPlan(pruning.Snip(0.5))
    own, given = (_run(task, data, plan, 1, public=extra)[0].task.kept for extra in (None, public))
    assert torch.equal(own, plan.pruning.start(task, data[0], stream(0)))
    assert torch.equal(given, plan.pruning.start(task, public, stream(0)))
    assert not torch.equal(own, given)


@pytest.mark.parametrize("scheme", [PruneFL(0.3, every=1), FedDST(0.3, every=1)], ids=repr)
@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        (DpSgd(1.0, 1.0), {}),
        (GaussianNoise(0.1), {}),
        (SecureAggregation(3), {"clients": 3, "aggregation": "unchanged"}),
    ],
    ids=["dp", "noise", "sum"],
)
def test_reports_in_the_clear_are_refused_where_something_is_promised(scheme, defense, settings):
    with pytest.raises(ValueError, match="give a scheme that does not adapt"):
        FederatedPlan(scheme, defense, **settings)


def test_a_mask_from_a_clients_images_is_refused_under_differential_privacy(task, data):
    plan = FederatedPlan(pruning.Snip(0.3), DpSgd(1.0, 1.0))
    with pytest.raises(ValueError, match="public is None"):
        train(task, data, plan, rounds=1, seed=0)
    list(train(task, data, plan, rounds=1, seed=0, public=data[1]))


def test_a_defense_that_is_none_is_named():
    with pytest.raises(ValueError, match="defense is None"):
        FederatedPlan(defense=None)
