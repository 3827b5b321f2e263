"""The integral behind gamma*, against 50-digit quadrature and against scipy where that is sound."""

import itertools

import mpmath
import numpy as np
import pytest
from scipy import stats

from leakbound.bounds.cone import log_cone

DEEP = np.log(1e-12)


def reference(a, c, dim):
    """The same integral with 50 digits: mode by bisection, panels set by the curvature there."""
    with mpmath.workdps(50):
        a, c, k = mpmath.mpf(float(a)), mpmath.mpf(float(c)), dim - 1

        def log(r):
            return (k - 1) * mpmath.log(r) - r * r / 2 + mpmath.log(mpmath.ncdf(a - c * r))

        def slope(r):
            return (k - 1) / r - r - c * mpmath.npdf(a - c * r) / mpmath.ncdf(a - c * r)

        low, high = mpmath.mpf(10) ** -320, mpmath.sqrt(k) + abs(c) + 9
        for _ in range(90):
            middle = mpmath.sqrt(low * high) if high > 4 * low else (low + high) / 2
            low, high = (middle, high) if slope(middle) > 0 else (low, middle)
        mode, top = low, log(low)
        steep = mpmath.sqrt((k - 1) / mode**2 + 1 + c**2)
        widths = [1 / steep, 1 / mpmath.sqrt((k - 1) / mode**2 + 1), 1 / (1 + abs(c)), 1]
        anchors = [mode, a / c] if c > 0 else [mode]
        edges = {mpmath.mpf(0), mode + 22}
        for anchor in anchors:
            for width in widths:
                edges |= {anchor + sign * x * width for sign in (-1, 1) for x in (0, 1, 3, 7, 14)}
        edges = sorted(e for e in edges if 0 <= e <= mode + 22)
        total = mpmath.mpf(0)
        for left, right in itertools.pairwise(edges):
            total += mpmath.quad(lambda r: mpmath.exp(log(r) - top), [left, right], maxdegree=5)
        norm = (1 - mpmath.mpf(k) / 2) * mpmath.log(2) - mpmath.loggamma(mpmath.mpf(k) / 2)
        return mpmath.log(total) + top + norm


def check(a, c, dim):
    exact, ours = reference(a, c, dim), float(log_cone(a, c, dim))
    if exact > DEEP:
        assert abs(mpmath.expm1(ours - exact)) < 1e-6
    else:
        assert abs((ours - exact) / exact) < 1e-6


def cell(dim, error, place):
    """cot(theta) of a relative error, and an inverse noise at a multiple of the transition."""
    cotangent = np.sqrt((1 - error) / error)
    return place * cotangent * np.sqrt(dim - 1), cotangent


@pytest.mark.parametrize(
    ("dim", "error", "place"),
    [(2, 0.5, 0.3), (3, 0.037, 1.0), (784, 0.5, 0.3), (10**6, 0.037, 1.0)],
)
def test_agrees_with_fifty_digits(dim, error, place):
    check(*cell(dim, error, place), dim)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [2, 3, 16, 784, 3072, 150_528, 1_000_000])
@pytest.mark.parametrize("error", [1e-30, 1e-6, 0.037, 0.5, 0.97, 1 - 1e-9])
@pytest.mark.parametrize("place", [0.0, 0.97, 1.01])
def test_agrees_with_fifty_digits_far_out(dim, error, place):
    check(*cell(dim, error, place), dim)


@pytest.mark.parametrize("dim", [2, 5, 40])
@pytest.mark.parametrize("cotangent", [-2.0, -0.1, 0.0, 0.3, 2.0])
def test_is_the_tail_of_the_non_central_t(dim, cotangent):
    shift = np.sqrt(dim - 1) * cotangent
    for a in (0.0, 0.5, 3.0):
        tail = stats.nct.sf(shift, dim - 1, a) if a else stats.t.sf(shift, dim - 1)
        assert float(np.exp(log_cone(a, cotangent, dim))) == pytest.approx(tail, rel=1e-7)


@pytest.mark.parametrize("dim", [2, 3, 784, 1_000_000])
@pytest.mark.parametrize("error", [1e-300, 1e-100, 1e-16])
def test_small_errors_leave_the_law_of_the_orthogonal_part(dim, error):
    """With a = place * cot(theta) and Phi a step, it is P(R <= place), R chi of dim - 1."""
    cotangent = np.sqrt((1 - error) / error)
    for place in np.sqrt(dim - 1) * np.array([0.5, 0.99, 1.0, 1.01]):
        log = stats.chi2.logcdf(place**2, dim - 1)
        if np.isfinite(log):
            found = float(log_cone(place * cotangent, cotangent, dim))
            assert found == pytest.approx(log, rel=1e-6, abs=1e-7)


def test_on_a_line_is_the_sign_and_without_noise_is_certain():
    assert float(log_cone(1.0, 5.0, 1)) == pytest.approx(stats.norm.logcdf(1.0), rel=1e-14)
    assert float(log_cone(np.inf, 5.0, 9)) == 0.0
    assert float(log_cone(1.0, np.inf, 9)) == -np.inf
    assert float(log_cone(1.0, -np.inf, 9)) == 0.0


def test_a_block_of_cells_gives_what_each_gives_alone():
    a, c, dim = np.broadcast_arrays(np.linspace(0, 60, 7)[:, None], np.linspace(-1, 9, 40), 50)
    together = log_cone(a, c, dim)
    alone = [
        [float(log_cone(x, y, 50)) for x, y in zip(*row, strict=True)]
        for row in zip(a, c, strict=True)
    ]
    np.testing.assert_allclose(together, alone, rtol=1e-13)
