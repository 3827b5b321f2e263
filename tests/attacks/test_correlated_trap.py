"""The linear trap over rounds attains gamma* at sigma / |C p|, by real clients and defenses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leakbound.attacks import CorrelatedTrap, LinearTrap
from leakbound.bounds import from_scratch
from leakbound.bounds.correlated import Factor
from leakbound.core import Batch, NotApplicable, Server, Task, ThreatModel
from leakbound.defenses import ClipExamples, CorrelatedNoise, DpSgd, GaussianNoise, Mean, chain
from leakbound.protocol import observed, resolve, step
from leakbound.randomness import normal, stream
from leakbound_reproductions.federation import FederatedPlan, observe, train

MALICIOUS = ThreatModel(server=Server.MALICIOUS)
SHAPE, DIM, ETA = (1, 4, 4), 16, 0.5 / 16


def sent_model(attack):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(DIM, 2))
    return attack.plant(Task.of(model, input_range=(-1000.0, 1000.0)))


def rounds_of(task, defense, pattern, rounds, seed):
    """An observation with its history: the example takes part in `pattern`, else zeros do."""
    draw = normal(SHAPE, stream(seed, "example"))
    truth = draw / draw.norm()
    ready, source, state = resolve(defense, task, 1), stream(seed, "noise"), None
    history = ()
    for number in range(rounds):
        inputs = (truth if number in pattern else torch.zeros(SHAPE))[None]
        batch = Batch(inputs, torch.zeros(1, dtype=torch.long))
        update, state = step(task, batch, ready, source, state)
        seen, _ = observed(update, task, [batch], MALICIOUS, defense=ready, history=history)
        history = (*history, replace(seen, history=()))
    return seen, truth.flatten().double()


def trap(**more):
    return CorrelatedTrap("gamma", eta=ETA, norm=1.0, features=DIM, rows=1, **more)


def defended(noise, mechanism, rounds):
    return chain(ClipExamples(1.0), Mean(), CorrelatedNoise(noise, mechanism, rounds=rounds))


def hits(estimates, truths):
    errors = [float((e[0] - t).square().mean()) for e, t in zip(estimates, truths, strict=True)]
    return np.mean(np.array(errors) <= ETA)


@pytest.mark.parametrize("mechanism", ["band:4", "tree"])
def test_it_attains_the_lower_bound(mechanism):
    rounds, pattern, draws = 8, (0, 4), 250
    factor = Factor.parse(mechanism, rounds)
    noise = 0.3 * factor.attained(pattern) * float(factor.inverse[0, 0])
    defense = defended(noise, mechanism, rounds)
    assert defense.links[2].sigma == pytest.approx(0.3 * factor.attained(pattern))
    attack, own = trap(pattern=pattern), trap()
    task = sent_model(attack)
    best, mean, truths = [], [], []
    for seed in range(draws):
        seen, truth = rounds_of(task, defense, pattern, rounds, seed)
        best.append(attack.estimate(seen))
        rows = sum(seen.history[at].update.rows for at in pattern) / len(pattern)
        alone = replace(seen, update=replace(seen.update, rows=rows), history=())
        mean.append(own.estimate(alone))
        truths.append(truth)
    sigma = defense.links[2].sigma
    value = from_scratch.exact(sigma / factor.attained(pattern), dim=DIM, eta=ETA)
    error = np.sqrt(value * (1 - value) / draws)
    assert value == pytest.approx(from_scratch.exact(0.3, dim=DIM, eta=ETA))
    assert abs(hits(best, truths) - value) < 4 * error
    own = np.linalg.norm(factor.inverse[list(pattern)].sum(0)) / len(pattern)
    weaker = from_scratch.exact(sigma * own, dim=DIM, eta=ETA)
    assert abs(hits(mean, truths) - weaker) < 4 * np.sqrt(weaker * (1 - weaker) / draws)
    assert hits(mean, truths) < hits(best, truths) - 4 * error


def test_what_it_combines():
    """The weighted sum, its declared noise, and the exact example without noise."""
    attack = replace(trap(pattern=(0, 2)), estimator="unbiased")
    task = sent_model(attack)
    for mechanism in ("none", "root", "tree", "bisr:2"):
        seen, truth = rounds_of(task, defended(1e-7, mechanism, 8), (0, 2), 5, seed=1)
        assert torch.allclose(attack.estimate(seen)[0], truth, atol=1e-4)
        own = seen.defense.links[2]
        law = attack._together(seen).update.law
        part = own.factor.first(5).attained((0, 2))
        assert float(law.covariance) == pytest.approx((own.sigma / part) ** 2, rel=1e-6)
        assert part <= own.factor.attained((0, 2)) * (1 + 1e-12)


def test_independent_noise_is_averaged():
    seen, _ = rounds_of(sent_model(trap()), DpSgd(1.0, 0.2), (0, 1, 2), 3, seed=0)
    together = trap()._together(seen)
    assert torch.allclose(together.update.rows, sum(
        each.update.rows for each in (*seen.history, seen)) / 3)  # fmt: skip
    assert together.update.law.covariance == pytest.approx(0.04 / 3)


def test_without_a_history_it_is_the_trap():
    seen, _ = rounds_of(sent_model(trap()), defended(0.2, "band:4", 8), (0,), 1, seed=0)
    plain = LinearTrap("gamma", eta=ETA, norm=1.0, features=DIM, rows=1)
    assert torch.equal(trap().estimate(seen), plain.estimate(seen))
    answer = trap()(seen, stream(0))
    assert torch.equal(answer.inputs, plain(seen, stream(0)).inputs)


def test_rounds_of_a_federation_are_attacked():
    attack = trap()
    task = sent_model(attack)
    draw = normal(SHAPE, stream(0, "x"))
    truth = draw / draw.norm()
    clients = [Batch(truth[None], torch.zeros(1, dtype=torch.long))] * 2
    plan = FederatedPlan(defense=defended(0.2, "band:4", 8))
    rounds = list(train(task, clients, plan, rounds=6, seed=0))
    seen, batch = observe(rounds, 1, threat=MALICIOUS)
    assert len(seen.history) == 5
    found = attack(seen, stream(0)).inputs
    alone = attack(replace(seen, history=()), stream(0)).inputs
    assert (found - batch.inputs).square().mean() < (alone - batch.inputs).square().mean()


def test_rounds_that_do_not_fit():
    seen, _ = rounds_of(sent_model(trap()), defended(0.2, "band:4", 8), (0, 1), 3, seed=0)
    with pytest.raises(NotApplicable, match="only 3 rounds were seen"):
        trap(pattern=(3,)).estimate(seen)
    other = replace(seen, update=replace(seen.update, bound=3.0))
    with pytest.raises(NotApplicable, match="in the bound"):
        trap().estimate(other)
    for bad in ((0, 0), (-1,), (0.5,)):
        with pytest.raises(ValueError, match="different rounds"):
            trap(pattern=bad)
    unknown, _ = rounds_of(sent_model(trap()), GaussianNoise(0.1), (0, 1), 2, seed=0)
    assert trap().estimate(replace(unknown, defense=None)).isfinite().all()
