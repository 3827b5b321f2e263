"""Floors for the two-layer network, against automatic differentiation and estimators at work."""

import numpy as np
import pytest
import torch
from scipy import optimize
from torch.func import grad, jacrev

from leakbound_reproductions.systematic_evaluation.activations import ACTIVATIONS
from leakbound_reproductions.systematic_evaluation.two_layer import (
    DEFENSES,
    OrderSetting,
    TwoLayer,
    bayes_bound,
    conditions,
    energy,
    fisher,
    gradient,
    jacobian,
    local_bound,
    lower_order,
    mean_derivative,
    upper_order,
    withheld_share,
)

TORCH = {
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "gelu": torch.nn.functional.gelu,
    "cubic": lambda z: z**3 + z**2,
}


def _problem(activation="gelu", batch=2, inputs=4, width=9, seed=0):
    """Weights of order one throughout, so that every part of J counts."""
    source = np.random.default_rng(seed)
    network = TwoLayer(
        source.standard_normal((width, inputs)), source.standard_normal(width), activation
    )
    x = source.standard_normal((batch, inputs))
    return network, x / np.linalg.norm(x, axis=1)[:, None], source.choice([-1.0, 1.0], batch)


def _torch_gradient(network, targets, clip_norm=None):
    """x -> the gradient (M, 1 + n) by automatic differentiation of the loss itself."""
    inner, outer = torch.from_numpy(network.inner), torch.from_numpy(network.outer)
    y, act = torch.from_numpy(targets), TORCH[network.activation]

    def loss(weights, x):
        a, w = weights
        return (y - act(x @ w.T) @ a).square().sum()

    def whole(x):
        first, rest = grad(loss)((outer, inner), x)
        found = torch.cat([first[:, None], rest], 1)
        scale = 1.0 if clip_norm is None else torch.clamp(found.norm() / clip_norm, min=1)
        return found / scale

    return whole


def _true_jacobian(network, x, targets, clip_norm=None):
    call = _torch_gradient(network, targets, clip_norm)
    found = jacrev(call)(torch.from_numpy(x))
    return found.reshape(-1, x.size).T.numpy()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_and_jacobian_by_automatic_differentiation(activation):
    network, x, y = _problem(activation, batch=3)
    auto = _torch_gradient(network, y)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(gradient(network, x, y), auto, rtol=1e-10, atol=1e-12)
    expected = _true_jacobian(network, x, y)
    np.testing.assert_allclose(jacobian(network, x, y), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_jacobian_by_finite_differences(activation):
    network, x, y = _problem(activation, seed=3)
    step = 1e-6
    for index in range(x.size):
        moved = np.zeros(x.size)
        moved[index] = step
        ahead, behind = (gradient(network, x + s * moved.reshape(x.shape), y) for s in (1, -1))
        slope = ((ahead - behind) / (2 * step)).ravel()
        np.testing.assert_allclose(jacobian(network, x, y)[index], slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("masked", [False, True])
def test_fisher_information_of_the_release(clip_norm, masked):
    network, x, y = _problem()
    mask = np.random.default_rng(1).random((9, 5)) < 0.6 if masked else None
    own = _true_jacobian(network, x, y, clip_norm)
    kept = own if mask is None else own[:, mask.ravel()]
    found = fisher(network, x, y, noise_std=0.3, clip_norm=clip_norm, mask=mask)
    np.testing.assert_allclose(found, kept @ kept.T / 0.09, rtol=1e-8, atol=1e-8)


def test_clipping_informs_less_than_the_papers_factor_on_the_noise():
    network, x, y = _problem()
    length = np.linalg.norm(gradient(network, x, y))
    clipped = fisher(network, x, y, noise_std=0.3, clip_norm=length / 4)
    scaled = fisher(network, x, y, noise_std=0.3 * 4)
    gap = np.linalg.eigvalsh(scaled - clipped)
    assert gap.min() > -1e-9
    assert gap.max() > 0.01


def test_energy_and_withheld_share():
    network, x, y = _problem("cubic", batch=3)
    dense = (jacobian(network, x, y) ** 2).sum(0).reshape(9, 5)
    np.testing.assert_allclose(energy(network, x, y), dense, rtol=1e-10)
    mask = np.arange(45).reshape(9, 5) % 3 == 0
    share = dense[~mask].sum() / dense.sum()
    assert withheld_share(network, x, y, mask) == pytest.approx(share, rel=1e-10)


def test_floors_are_the_papers_formulas():
    network, x, y = _problem(batch=2, width=30)
    dense = _true_jacobian(network, x, y)
    noise = 1e-3
    full = local_bound(network, x, y, noise_std=noise)
    trace = local_bound(network, x, y, noise_std=noise, trace=True)
    exact = noise**2 / 2 * np.trace(np.linalg.inv(dense @ dense.T))
    assert full.value * 4 == pytest.approx(exact, rel=1e-8)
    assert trace.value * 4 == pytest.approx(noise**2 * 2 * 4**2 / (dense**2).sum(), rel=1e-8)
    assert trace.value < full.value
    assert full.covers == trace.covers == "unbiased"


def test_a_floor_is_capped_at_the_zero_guess():
    network, x, y = _problem()
    for norm_known in (False, True):
        floor = local_bound(network, x, y, noise_std=1e6, norm_known=norm_known)
        assert floor.value == pytest.approx(1 / 4)  # |x_i| = 1, four inputs each
    few = np.zeros((9, 5), dtype=bool)
    few[0, 0] = True  # one number cannot tell eight
    assert local_bound(network, x, y, noise_std=1.0, mask=few).value == pytest.approx(1 / 4)


def test_a_known_norm_leaves_the_directions_of_the_sphere():
    network, x, y = _problem(batch=1, inputs=3, width=12)
    frame = np.linalg.svd(x)[2][1:].T

    def on_sphere(angles):
        moved = torch.from_numpy(x[0]) + torch.from_numpy(frame) @ angles
        return _torch_gradient(network, y)((moved / moved.norm())[None])

    slope = jacrev(on_sphere)(torch.zeros(2).double()).reshape(-1, 2).numpy()
    expected = 1e-6 * np.trace(np.linalg.inv(slope.T @ slope))
    floor = local_bound(network, x, y, noise_std=1e-3, norm_known=True)
    assert floor.value * 3 == pytest.approx(expected, rel=1e-8)
    assert floor.value < local_bound(network, x, y, noise_std=1e-3).value


def test_maximum_likelihood_attains_the_floor_at_little_noise():
    network, x, y = _problem("tanh", batch=1, inputs=3, width=12)
    noise, source = 1e-3, np.random.default_rng(5)
    errors = []
    for _ in range(300):
        seen = gradient(network, x, y) + noise * source.standard_normal((12, 4))
        answer = optimize.least_squares(
            lambda guess, seen=seen: (gradient(network, guess[None], y) - seen).ravel(), x[0]
        )
        errors.append(((answer.x - x[0]) ** 2).mean())
    floor = local_bound(network, x, y, noise_std=noise).value
    spread = np.std(errors) / 300**0.5
    assert abs(np.mean(errors) - floor) < 4 * spread
    assert spread < 0.06 * floor  # a floor wrong by a quarter would be seen


def test_dropped_units_are_a_narrower_network():
    network, x, y = _problem(width=20)
    units = np.arange(20) % 2 == 0
    small = TwoLayer(network.inner[units], network.outer[units], "gelu")
    assert local_bound(network.kept(units), x, y, noise_std=0.01).value == pytest.approx(
        local_bound(small, x, y, noise_std=0.01).value
    )
    dense = _true_jacobian(small, x, y)
    exact = 1e-4 / 8 * np.trace(np.linalg.inv(dense @ dense.T))
    assert local_bound(small, x, y, noise_std=0.01).value == pytest.approx(exact, rel=1e-8)


def test_no_attacker_beats_the_bayes_floor():
    """MAP, the posterior's best guess at this noise, lies above; a floor of 3 x noise is beaten."""
    network, _, y = _problem("tanh", batch=1, inputs=3, width=12)
    network = TwoLayer(network.inner, network.outer / 12, "tanh")
    noise, source, errors = 1.0, np.random.default_rng(6), []
    for _ in range(400):
        x = source.standard_normal(3) / 3**0.5
        seen = gradient(network, x[None], y) + noise * source.standard_normal((12, 4))

        def residual(guess, seen=seen):
            misfit = (gradient(network, guess[None], y) - seen).ravel() / noise
            return np.concatenate([misfit, guess * 3**0.5])

        errors.append(((optimize.least_squares(residual, np.zeros(3)).x - x) ** 2).mean())
    mean, spread = np.mean(errors), np.std(errors) / 400**0.5
    floor = bayes_bound(network, y, np.random.default_rng(7), noise_std=noise, draws=200)
    assert floor.covers == "estimate"
    assert 0.4 * mean < floor.value < mean + 3 * spread
    wrong = bayes_bound(network, y, np.random.default_rng(7), noise_std=3 * noise, draws=200)
    assert wrong.value > mean + 3 * spread


def test_the_bayes_floor_never_exceeds_the_prior():
    network, _, y = _problem("softplus")
    wide = bayes_bound(network, y, np.random.default_rng(0), noise_std=1e4)
    assert wide.value == pytest.approx(1 / 4, rel=1e-3)
    assert wide.value <= 1 / 4
    small = bayes_bound(network, y, np.random.default_rng(0), noise_std=1e-4)
    assert small.value < 1e-4


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_a_gradient_that_jumps_has_no_floor_for_all(activation):
    network, x, y = _problem(activation)
    with pytest.raises(ValueError, match="jumps"):
        bayes_bound(network, y, np.random.default_rng(0), noise_std=1.0)
    assert any(
        "non-smooth" in text for text in local_bound(network, x, y, noise_std=1.0).assumptions
    )


def test_refuses():
    network, x, y = _problem()
    for wrong in ({"noise_std": 0.0}, {"noise_std": 1.0, "clip_norm": -1.0}):
        with pytest.raises(ValueError, match="above 0"):
            fisher(network, x, y, **wrong)
    with pytest.raises(ValueError, match="mask"):
        fisher(network, x, y, noise_std=1.0, mask=np.ones((9, 4), dtype=bool))
    with pytest.raises(ValueError, match="inputs"):
        gradient(network, x[:, :3], y)
    with pytest.raises(ValueError, match="outer"):
        TwoLayer(np.ones((3, 2)), np.ones(2))
    with pytest.raises(ValueError, match="activation"):
        TwoLayer(np.ones((3, 2)), np.ones(3), "swish")


SETTING = OrderSetting(
    inputs=100,
    width=10_000,
    batch=2,
    noise_std=3.0,
    gradient_norm=10.0,
    clip_norm=2.0,
    rate=0.75,
    withheld_share=0.96,
)


def test_orders_of_table_1():
    root = 0.1  # sqrt(100 / 10000)
    upper = {"none": 2, "local_aggregation": 2, "noise": 5, "clipping": 2, "dp_sgd": 2 + 15}
    lower = {"none": 3, "local_aggregation": 3, "noise": 3, "clipping": 15, "dp_sgd": 15}
    upper, lower = upper | {"dropout": 4, "pruning": None}, lower | {"dropout": 6, "pruning": 15}
    for defense in DEFENSES:
        found = upper_order(defense, SETTING)
        expected = upper[defense]
        assert found.value == (None if expected is None else pytest.approx(expected * root))
        below = lower_order(defense, SETTING)
        assert below.value == pytest.approx(lower[defense] * root)
        assert (found.side, below.side) == ("upper", "lower")


def test_orders_are_no_floors():
    order = upper_order("none", SETTING)
    assert not hasattr(order, "covers")
    assert type(order).__name__ == "Order"


def test_conditions():
    few, wide = conditions(OrderSetting(inputs=16, width=2000, batch=2))
    assert few.holds  # 16^(1/4) = 2
    assert wide.right == pytest.approx(16 * 4 * 2 * np.pi)
    assert wide.holds
    assert not conditions(OrderSetting(inputs=15, width=2000, batch=2))[0].holds
    assert not conditions(OrderSetting(inputs=16, width=400, batch=2))[1].holds
    near = OrderSetting(inputs=16, width=2000, batch=2, smallest_singular_value=0.1)
    assert not conditions(near)[1].holds
    thinned = upper_order("dropout", OrderSetting(inputs=16, width=1600, batch=2, rate=0.9))
    assert not thinned.conditions[1].holds


@pytest.mark.parametrize(
    ("activation", "order", "value"),
    [
        ("relu", 2, 1 / np.sqrt(2 * np.pi)),
        ("relu", 3, 0.0),
        ("relu", 4, -1 / np.sqrt(2 * np.pi)),
        ("leaky_relu", 2, 0.99 / np.sqrt(2 * np.pi)),
        ("cubic", 2, 2.0),
        ("cubic", 3, 6.0),
        ("tanh", 2, 0.0),
        ("sigmoid", 2, 0.0),
    ],
)
def test_mean_derivatives_of_the_sheet(activation, order, value):
    assert mean_derivative(activation, order) == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("activation", ["tanh", "softplus", "gelu"])
def test_mean_derivatives_by_differentiation(activation):
    """E s'' and E s''' by derivatives of torch's own function, at Gauss-Hermite nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    call = TORCH[activation]
    for order in (2, 3):
        for _ in range(order):
            call = grad(call)
        values = torch.func.vmap(call)(torch.from_numpy(nodes)).numpy()
        call = TORCH[activation]
        expected = weights @ values / weights.sum()
        assert mean_derivative(activation, order) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate": 1.0}, "rate"),
        ({"batch": 0}, "batch"),
        ({"noise_std": -1.0}, "noise_std"),
        ({"activation": "swish"}, "activation"),
    ],
)
def test_settings_refuse(wrong, message):
    with pytest.raises(ValueError, match=message):
        OrderSetting(**{"inputs": 4, "width": 4} | wrong)
    with pytest.raises(ValueError, match="clip_norm"):
        upper_order("dp_sgd", OrderSetting(inputs=4, width=4))
