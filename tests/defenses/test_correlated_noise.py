"""Correlated noise over a client's rounds: its distribution, its state and what it claims."""

import numpy as np
import pytest
import torch

from leakbound.assess.success import _multiplier
from leakbound.audit import parse
from leakbound.audit.plan import build_defense
from leakbound.bounds.correlated import Factor, Scheme
from leakbound.core import Batch, Gaussian, Guarantee, Task, Unit, Update
from leakbound.defenses import (
    ClipExamples,
    CorrelatedNoise,
    GaussianMechanism,
    Mean,
    SecureAggregation,
    chain,
)
from leakbound.protocol import step
from leakbound.randomness import secure, stream
from leakbound_reproductions.federation import FederatedPlan, train

WIDTH = 20_000
MECHANISMS = ("none", "root", "tree", "tree_prefixes", "band:3", "bisr:3", "blt:0.9,0.5/0.1,0.2")


def update(bound=0.5, width=WIDTH):
    rows = torch.linspace(-1, 1, width, dtype=torch.float64)[None]
    return Update(rows, Unit.CLIENT, (2,), bound=bound)


def released(defense, source, bounds):
    """The releases of consecutive rounds with these bounds, and the states."""
    state, sent, states = None, [], []
    for bound in bounds:
        one, state = defense.transform(update(bound), state, None, source)
        sent.append(one)
        states.append(state)
    return sent, states


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_factor_whitens_what_was_released(mechanism):
    """C (release - G) / (sigma bound) is white, for bounds that differ between rounds."""
    defense, bounds = (
        CorrelatedNoise(2.0, mechanism, rounds=8),
        [0.5, 0.5, 2.0, 1.0, 0.1, 0.5, 3, 1],
    )
    sent, _ = released(defense, stream(0, "noise"), bounds)
    noise = torch.stack(
        [(u.rows[0] - update().rows[0]) / b for u, b in zip(sent, bounds, strict=True)]
    ).numpy()
    factor = Factor.parse(mechanism, 8)
    white = factor.triangular @ noise / defense.sigma
    covariance = white @ white.T / WIDTH
    assert np.abs(covariance - np.eye(8)).max() < 5 * np.sqrt(2 / WIDTH)
    for one, bound, row in zip(sent, bounds, factor.inverse, strict=True):
        assert isinstance(one.law, Gaussian)
        assert not one.law.private
        assert one.bound == bound
        wanted = (defense.sigma * bound) ** 2 * (row @ row)
        assert float(one.law.covariance) == pytest.approx(wanted, rel=1e-9)
        assert float((one.rows - update().rows).var()) == pytest.approx(wanted, rel=0.05)
    assert sent[0].law.covariance == pytest.approx((2.0 * 0.5) ** 2)


def test_sums_have_less_noise():
    plain, tied = (CorrelatedNoise(1.0, name, rounds=8) for name in ("none", "band:4"))
    errors = []
    for defense in (plain, tied):
        sent, _ = released(defense, stream(0, "noise"), [1.0] * 8)
        errors.append(float(sum(u.rows - update().rows for u in sent).var()))
    assert errors[0] == pytest.approx(8, rel=0.05)
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("mechanism", "kept"),
    [("none", 0), ("band:3", 2), ("bisr:3", 2), ("root", 6), ("tree", 6)],
)
def test_how_much_a_client_keeps(mechanism, kept):
    _, states = released(CorrelatedNoise(1.0, mechanism, rounds=8), stream(0), [1.0] * 6)
    assert [s.round for s in states] == [1, 2, 3, 4, 5, 6]
    assert [len(s.kept) for s in states] == [min(n, kept) for n in range(1, 7)]


def test_without_correlation_it_is_the_gaussian_mechanism():
    for number in range(2):
        own = CorrelatedNoise(0.7, "none", rounds=4).transform(update(), None, None, stream(number))
        wanted = GaussianMechanism(0.7).transform(update(), None, None, stream(number))
        assert torch.equal(own[0].rows, wanted[0].rows)
        assert own[0].law.covariance == pytest.approx(wanted[0].law.covariance)


def test_one_release_has_the_bound_of_one_round():
    for mechanism in MECHANISMS:
        noise = CorrelatedNoise(0.8, mechanism, rounds=8)
        whole = chain(ClipExamples(1.0), Mean(), noise)
        assert whole.guarantee is Guarantee.DIFFERENTIAL_PRIVACY
        assert _multiplier(whole) == 0.8
        # all rounds leak more than one
        assert noise.mu(Scheme()) > noise.mu([0]) >= 1 / 0.8 - 1e-12
        assert noise.mu([0]) == pytest.approx(noise.factor.sensitivity([0]) / noise.sigma)


def test_it_needs_a_bound_and_a_client():
    with pytest.raises(ValueError, match="put ClipExamples before it"):
        chain(Mean(), CorrelatedNoise())
    with pytest.raises(ValueError, match="not bounded"):
        CorrelatedNoise().transform(update(None), None, None, stream(0))
    with pytest.raises(ValueError, match="one row per client"):
        chain(ClipExamples(1.0), Mean(), SecureAggregation(2), CorrelatedNoise())


def test_wrong_settings_and_states():
    for bad in ({"noise_multiplier": 0.0}, {"mechanism": "bend:4"}, {"rounds": 0}):
        with pytest.raises(ValueError):
            CorrelatedNoise(**bad)
    defense = CorrelatedNoise(rounds=2)
    _, states = released(defense, stream(0), [1.0, 1.0])
    with pytest.raises(ValueError, match="rounds is 2"):
        defense.transform(update(), states[-1], None, stream(0))
    with pytest.raises(ValueError, match="start with the state None"):
        defense.transform(update(width=5), states[0], None, stream(0))


def test_the_state_is_not_changed_and_a_round_repeats():
    defense = CorrelatedNoise(mechanism="bisr:3", rounds=8)
    _, states = released(defense, stream(0), [1.0] * 3)
    before = [k.clone() for k in states[-1].kept]
    first, _ = defense.transform(update(), states[-1], None, stream(1))
    again, _ = defense.transform(update(), states[-1], None, stream(1))
    assert torch.equal(first.rows, again.rows)
    assert all(torch.equal(a, b) for a, b in zip(before, states[-1].kept, strict=True))


def test_a_state_is_stored_and_read():
    messages = pytest.importorskip("leakbound.flower.messages")
    from flwr.app import RecordDict

    whole = chain(ClipExamples(1.0), Mean(), CorrelatedNoise(mechanism="band:3", rounds=8))
    _, states = released(whole.links[2], stream(0), [1.0] * 3)
    records = RecordDict()
    messages.save(records, "noise", "owner", (None, None, states[-1]))
    read = messages.load(records, "noise", "owner", whole)[2]
    assert read.round == 3
    both = [whole.links[2].transform(update(), s, None, stream(1))[0] for s in (states[-1], read)]
    assert torch.equal(both[0].rows, both[1].rows)


def test_noise_from_the_system():
    defense = CorrelatedNoise(2.0, "band:3", rounds=8)
    sent, _ = released(defense, secure(), [1.0] * 8)
    noise = torch.stack([u.rows[0] - update().rows[0] for u in sent]).numpy()
    white = Factor.parse("band:3", 8).matrix @ noise / 2.0
    assert np.abs(white @ white.T / WIDTH - np.eye(8)).max() < 5 * np.sqrt(2 / WIDTH)


def small():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)).double()
    draw = torch.Generator().manual_seed(0)
    data = [
        Batch(
            torch.rand(4, 1, 4, 4, generator=draw, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
        )
        for _ in range(3)
    ]
    return Task.of(model), data


def test_rounds_of_a_federation_carry_the_noise():
    task, data = small()
    errors = {}
    for mechanism in ("none", "band:4"):
        defense = chain(ClipExamples(0.1), Mean(), CorrelatedNoise(20.0, mechanism, rounds=8))
        rounds = list(train(task, data, FederatedPlan(defense=defense), rounds=8, seed=0))
        noise = []
        for one in rounds:
            turn = one.turn(0)
            bounded = chain(ClipExamples(0.1), Mean())
            plain, _ = step(one.task, turn.batch, bounded, stream(0))
            noise.append((turn.update.rows - plain.rows)[0].numpy() / (20 * 0.1 / 4))
        white = Factor.parse(mechanism, 8).matrix @ np.array(noise)
        assert np.isclose(white.var(), 1, atol=5 * np.sqrt(2 / white.size))
        errors[mechanism] = np.mean(np.sum(noise, 0) ** 2)
    assert errors["band:4"] < errors["none"]


def test_a_plan_builds_it():
    table = {
        "models": [{"name": "mlp"}],
        "attacks": [{"name": "linear_inversion"}],
        "defenses": [
            {
                "links": [
                    {"name": "clip_examples", "clip_norm": 1.0},
                    {"name": "mean"},
                    {"name": "correlated_noise", "mechanism": "tree", "rounds": 4},
                ]
            }
        ],
    }
    built = build_defense(parse(table).defenses[0])
    assert built.links[-1] == CorrelatedNoise(mechanism="tree", rounds=4)


@pytest.mark.parametrize("rounds", [5, 6, 7, 16])
@pytest.mark.parametrize("mechanism", ["tree", "tree_prefixes", "root", "band:3", "file"])
def test_no_single_release_has_less_noise_than_is_said(mechanism, rounds, tmp_path):
    """A tree's fifth release has 0.67 of the first one's noise; a file's may have any part."""
    if mechanism == "file":
        mechanism = str(tmp_path / "C.npy")
        np.save(mechanism, np.diag(np.r_[1.0, 10.0, np.ones(rounds - 2)]))
    noise = CorrelatedNoise(2.0, mechanism=mechanism, rounds=rounds)
    state, least = None, []
    given = Update(torch.zeros(1, 3), Unit.CLIENT, (1,), bound=1.0)
    for _ in range(rounds):
        sent, state = noise.transform(given, state, None, stream(0, "noise"))
        least.append(float(sent.law.covariance) ** 0.5)
    assert min(least) == pytest.approx(2.0, rel=1e-6)
