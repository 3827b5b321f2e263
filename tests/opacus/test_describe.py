"""Facts of live Opacus trainings, and what they protect."""

import pytest
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from leakbound.bounds import composition
from leakbound.opacus import RiskEngine, describe
from leakbound.randomness import stream
from leakbound.risk.deployment import laws_of


def made(engine, **more):
    rows = TensorDataset(torch.rand(2000, 4), torch.arange(2000) % 2)
    model = torch.nn.Linear(4, 2)
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(rows, batch_size=32),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **more,
    )[1:]


def example(given):
    return next(e for e in laws_of(given) if (e.audience, e.unit) == ("server", "example"))


def test_secure_poisson_batches_have_the_hidden_law():
    stated = {"epochs": 2, "rounds": 3, "coupled": False, "sends": ()}
    given, mistakes = describe(*made(RiskEngine()), **stated)
    assert mistakes == ()
    found = example(given)
    q = 1 / 63
    wanted = composition.subsampled(1.0, sampling_rate=q, steps=6 * 63, kappa=1e-3)
    assert found.bound(-6.907755278982137)[0] == pytest.approx(wanted)
    assert found.missing == ()


@pytest.mark.parametrize(("left", "key"), [("coupled", "local.coupled"), ("rounds", "rounds")])
def test_what_is_not_stated_is_named(left, key):
    stated = {"epochs": 2, "rounds": 3, "coupled": False, "sends": ()} | {left: None}
    found = example(describe(*made(RiskEngine()), **stated)[0])
    assert key in found.missing
    assert found.bound(-9.0)[0] == 1


def test_seeds_shuffles_and_new_engines_are_mistakes():
    stated = {"epochs": 1, "rounds": 3, "coupled": False, "sends": ()}
    given, mistakes = describe(*made(RiskEngine(), noise_generator=stream(0)), **stated)
    assert [one.name for one in mistakes] == ["seeded-noise"]
    given, mistakes = describe(*made(PrivacyEngine()), **stated)
    assert mistakes == ()
    assert example(given).missing == ("noise.seeded",)
    shuffled = made(RiskEngine(), poisson_sampling=False)
    given, mistakes = describe(*shuffled, epsilon=0.5, delta=1e-5, **stated)
    assert [one.name for one in mistakes] == ["shuffled-batches", "epsilon-too-small"]
    assert example(given).setting.steps == 3
    given, mistakes = describe(*made(RiskEngine()), epsilon=0.9, new_engine=True, **stated)
    assert "uncounted-rounds" in [one.name for one in mistakes]
