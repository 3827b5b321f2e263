"""One call over a grid equals the scalar calls: every law, every inverse that takes arrays."""

import numpy as np
import pytest

from leakbound.bounds import conversions, identification, mixed_steps
from leakbound.bounds.composition import subsampled, visible
from leakbound.bounds.from_scratch import averaged, exact
from leakbound.bounds.roots import edge, last_that, least_root

NOISE = np.array([0.4, 1.0, 3.0])
KAPPA = np.array([1e-9, 1e-3, 0.2])
RATE = np.array([0.01, 0.3])
STEPS = np.array([1, 7, 40])
GAMMA = np.array([0.25, 0.6])
ETA = np.array([0.001, 0.02, 0.05])

LAWS = {
    "visible": (visible, {"sampling_rate": RATE, "steps": STEPS, "kappa": KAPPA}),
    "subsampled": (subsampled, {"sampling_rate": RATE, "steps": STEPS, "kappa": KAPPA}),
    "gaussian": (identification.gaussian, {"kappa": KAPPA, "steps": STEPS}),
    "exact": (exact, {"dim": STEPS, "eta": ETA, "norm": GAMMA}),
    "averaged": (averaged, {"dim": STEPS[1:], "eta": ETA, "steps": STEPS, "sampling_rate": RATE}),
    "hidden average": (
        lambda noise, **given: averaged(noise, participation="hidden", **given),
        {"dim": STEPS[1:], "eta": ETA, "steps": STEPS, "sampling_rate": RATE},
    ),
    "delta": (
        conversions.delta,
        {"epsilon": np.array([0.0, 0.5, 4.0]), "steps": STEPS, "sampling_rate": RATE},
    ),
    "epsilon": (
        conversions.epsilon,
        {"delta": KAPPA[:2], "steps": STEPS, "sampling_rate": RATE},
    ),
    "mu": (conversions.mu, {"steps": STEPS}),
    "mixed visible": (
        lambda log: mixed_steps.visible_upper([(1.0, 0.1, 9), (2.0, 0.3, 4)], -log),
        {},
    ),
    "mixed hidden": (
        lambda log: mixed_steps.hidden_upper([(1.0, 0.1, 9), (2.0, 0.3, 4)], -log),
        {},
    ),
}
INVERSES = {
    "visible noise": (visible.noise_for, {"sampling_rate": RATE, "steps": STEPS, "kappa": KAPPA}),
    "hidden noise": (
        subsampled.noise_for,
        {"sampling_rate": RATE[:1], "steps": STEPS[1:], "kappa": KAPPA[1:2]},
    ),
    "visible rate": (
        visible.rate_for,
        {"noise_multiplier": NOISE, "steps": STEPS, "kappa": KAPPA[:2]},
    ),
    "hidden rate": (
        subsampled.rate_for,
        {"noise_multiplier": NOISE[1:], "steps": STEPS[1:2], "kappa": KAPPA[:1]},
    ),
    "visible steps": (
        visible.steps_for,
        {"noise_multiplier": NOISE, "sampling_rate": RATE, "kappa": KAPPA[:2]},
    ),
    "hidden steps": (
        subsampled.steps_for,
        {"noise_multiplier": NOISE[:2], "sampling_rate": RATE[1:], "kappa": KAPPA[1:2]},
    ),
    "gaussian noise": (identification.gaussian.noise_for, {"kappa": KAPPA, "steps": STEPS}),
    "exact noise": (exact.noise_for, {"dim": STEPS[1:] * 9, "eta": ETA[:1] / 9}),
}


def over_a_grid(function, first, given):
    """(values of one call, values of a loop of scalar calls) over the outer product."""
    axes = [first, *given.values()]
    mesh = np.meshgrid(*axes, indexing="ij")
    whole = np.asarray(function(mesh[0], **dict(zip(given, mesh[1:], strict=True))))
    assert whole.shape == mesh[0].shape
    alone = []
    for place in np.ndindex(whole.shape):
        found = function(
            mesh[0][place].item(), **{k: m[place] for k, m in zip(given, mesh[1:], strict=True)}
        )
        assert isinstance(found, float | int)
        alone.append(found)
    return whole, np.reshape(alone, whole.shape)


@pytest.mark.parametrize("name", LAWS)
def test_a_law_over_a_grid(name):
    function, given = LAWS[name]
    whole, alone = over_a_grid(function, NOISE, given)
    np.testing.assert_allclose(whole, alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", INVERSES)
def test_an_inverse_over_a_grid(name):
    function, given = INVERSES[name]
    whole, alone = over_a_grid(function, GAMMA, given)
    np.testing.assert_allclose(whole, alone, rtol=1e-12, atol=0)


def test_axes_broadcast():
    """Each argument on an axis of its own, as numpy has it."""
    found = subsampled(
        NOISE[:, None, None],
        sampling_rate=RATE[:, None],
        steps=STEPS,
        kappa=0.01,
    )
    assert found.shape == (3, 2, 3)
    assert found[1, 0, 2] == subsampled(1.0, sampling_rate=0.01, steps=40, kappa=0.01)
    with pytest.raises(ValueError, match="broadcast"):
        visible(NOISE, sampling_rate=RATE, steps=1, kappa=0.01)


def test_least_root_against_bisection():
    draw = np.random.default_rng(0)
    scale, where = draw.uniform(0.1, 50, 200), draw.uniform(-20, 20, 200)
    shapes = {
        "cubic": lambda x: -((x - where) ** 3),
        "step": lambda x: np.where(x >= where, -1.0, 1.0),
        "steep": lambda x: -np.expm1(np.clip(scale * (x - where), -700, 50)),
        "flat": lambda x: -np.tanh(1e-3 * (x - where)),
    }
    for name, excess in shapes.items():
        found = least_root(excess, np.full(200, -60.0), np.full(200, 75.0))
        assert np.all(excess(found) <= 0), name
        assert np.all(excess(found - 1e-5 - 1e-13 * np.abs(found)) > 0), name
        if name != "cubic":  # whose values vanish around its root
            np.testing.assert_allclose(found, where, rtol=1e-13, atol=1e-14)


def test_least_root_beyond_the_bracket():
    low, high = np.zeros(2), np.ones(2)
    assert least_root(lambda x: np.ones(2), low, high).tolist() == [1, 1]
    assert least_root(lambda x: -np.ones(2), low, high).tolist() == [0, 0]


@pytest.mark.parametrize("way", [1, -1])
@pytest.mark.parametrize("off", [0.0, 1e-6, 1e-3, 0.3, -0.3, 20.0], ids=str)
def test_edge_whatever_the_stand_in(way, off):
    """A stand-in that errs costs evaluations; the answer is fine, and a little on it is not."""
    root, seen = way * 3.7, []

    def excess(x):
        seen.append(x)
        return np.tanh(way * (x - root)) + 0.1 * way * (x - root)

    def rough(x):
        return way * (x - root) + off

    found = edge(excess, 0.0, way, near=1e-5, rough=rough)
    assert excess(found) <= 0
    assert abs(found - root) <= 1e-5
    assert len(seen) <= (6 if abs(off) < 0.01 else 40)


def test_edge_that_never_comes():
    assert edge(lambda x: -1.0, 2.0, 1, near=1e-5, rough=lambda x: -1.0, most=5.0) == 7.0
    assert edge(lambda x: 1.0, 2.0, 1, near=1e-5, rough=lambda x: 1.0, most=5.0) == 2.0


@pytest.mark.parametrize("last", [0, 1, 2, 999, 1000, 2**30])
@pytest.mark.parametrize("guess", [0, 1, 900, 1000, 5000, 2**30])
def test_last_that(last, guess):
    assert last_that(lambda count: count <= last, guess) == last


def test_mass_that_is_left_out_is_lost_to_the_bound(monkeypatch):
    """However much is left out, the bound does not fall."""
    parts, logs = [(1.0, 0.1, 9), (2.0, 0.3, 4)], np.log([1e-4, 0.1])
    whole = mixed_steps.visible_upper(parts, logs)
    for faint in (1e-6, 1e-3):
        mixed_steps._gains.cache_clear()
        monkeypatch.setattr(mixed_steps, "FAINT", faint)
        assert np.all(mixed_steps.visible_upper(parts, logs) >= whole * (1 - 1e-12))
    assert mixed_steps.visible_upper(parts, logs)[0] > whole[0] * 1.01
    mixed_steps._gains.cache_clear()
