"""The Edgeworth series errs to both sides; its cumulants are right."""

import numpy as np
import pytest

from leakbound.bounds.composition import subsampled
from leakbound.bounds.identification import gaussian
from leakbound_reproductions.mean_to_extreme.edgeworth import cumulants, edgeworth


@pytest.mark.parametrize(
    ("noise", "q", "steps", "kappa", "stated", "least", "most"),
    [
        (0.6, 0.01, 1000, 1e-3, 0.0311, 0.92, 0.95),  # 7 % below the bound's value
        (0.5, 0.001, 1000, 1e-4, 0.0235, 27.0, 29.0),
        (0.4, 0.001, 100, 1e-4, 1.0, 750.0, 760.0),
        (1.0, 0.01, 1000, 1e-3, 0.00407, 0.999, 1.002),
    ],
)
def test_errs_to_both_sides(noise, q, steps, kappa, stated, least, most):
    found = edgeworth(noise, sampling_rate=q, steps=steps, kappa=kappa)
    assert found == pytest.approx(stated, rel=5e-3)
    bound = subsampled(noise, sampling_rate=q, steps=steps, kappa=kappa)
    assert least <= found / bound <= most


def test_exact_where_the_loss_is_normal():
    found = edgeworth([0.5, 5.0], sampling_rate=1.0, steps=10, kappa=[0.1, 0.2])
    np.testing.assert_allclose(found, gaussian([0.5, 5.0], kappa=[0.1, 0.2], steps=10), rtol=1e-6)


def test_cumulants_against_samples():
    draw = np.random.default_rng(0)
    noise, q, n = 1.5, 0.2, 1_000_000
    x = draw.standard_normal(n)
    moved = x + (draw.random(n) < q) / noise
    for sample, found in zip((moved, x), cumulants(1 / noise, q), strict=True):
        loss = np.log1p(q * np.expm1(sample / noise - 0.5 / noise**2))
        centered = loss - loss.mean()
        moments = [np.mean(centered**order) for order in (2, 3, 4, 5)]
        assert loss.mean() == pytest.approx(found[0], abs=6e-4)
        assert moments[0] == pytest.approx(found[1], rel=0.01)
        assert moments[1] == pytest.approx(found[2], rel=0.02)
        assert moments[2] - 3 * moments[0] ** 2 == pytest.approx(found[3], rel=0.1)
        assert moments[3] - 10 * moments[0] * moments[1] == pytest.approx(found[4], rel=0.3)


def test_a_grid_equals_the_single_calls():
    noise, rates, steps = np.array([0.4, 1.0, 3.0]), [0.01, 0.3], [1, 7, 40]
    grid = edgeworth(
        noise[:, None, None], sampling_rate=np.array(rates)[:, None], steps=steps, kappa=0.2
    )
    alone = [
        edgeworth(a, sampling_rate=b, steps=c, kappa=0.2)
        for a in noise.tolist()
        for b in rates
        for c in steps
    ]
    assert all(isinstance(one, float) for one in alone)
    np.testing.assert_allclose(grid.ravel(), alone, rtol=1e-12, atol=0)


def test_refusals():
    with pytest.raises(ValueError, match="noise_multiplier"):
        edgeworth(0.0, sampling_rate=0.1, steps=10, kappa=0.1)
    with pytest.raises(ValueError, match="kappa"):
        edgeworth(1.0, sampling_rate=0.1, steps=10, kappa=0.0)
