"""Noise laws: the declared one is accepted, one of a 10 % other scale is rejected."""

import pytest
import torch
from scipy import stats

from leakbound.core import Gaussian, Laplace, Unit, Update
from leakbound.defenses import GaussianMechanism, GaussianNoise, LaplaceNoise
from leakbound.randomness import secure, stream

COUNT, STD = 100_000, 0.3
ACCEPT, REJECT = 1e-3, 1e-9


def _noise(defense, source=None, dtype=torch.float32):
    plain = torch.full((2, COUNT // 2), 5.0, dtype=dtype)
    update = Update(plain, Unit.CLIENT, (3, 3), bound=1.5)
    sent, _ = defense.transform(update, None, None, source or stream(0, "noise"))
    assert sent.rows.dtype == dtype
    return (sent.rows - plain).double().flatten().numpy(), sent


def _two_sided(value, law):
    return 2 * min(law.cdf(value), law.sf(value))


def _gaussian(draws, std):
    energy, law = (draws**2).sum() / std**2, stats.norm(0, std)
    return stats.kstest(draws, law.cdf).pvalue, _two_sided(energy, stats.chi2(draws.size))


def _laplace(draws, std):
    scale = std / 2**0.5  # |draw| / scale is exponential, twice that chi-square with 2 degrees
    size = 2 * abs(draws).sum() / scale
    fit = stats.kstest(draws, "laplace", (0, scale)).pvalue
    return fit, _two_sided(size, stats.chi2(2 * draws.size))


CASES = [
    (GaussianNoise(STD), _gaussian, STD),
    (LaplaceNoise(STD), _laplace, STD),
    (GaussianMechanism(0.2), _gaussian, 0.2 * 1.5),
]


@pytest.mark.parametrize(("defense", "values", "std"), CASES)
@pytest.mark.parametrize("source", [None, secure()], ids=["stream", "secure"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_law_is_the_declared_one(defense, values, std, source, dtype):
    draws, _ = _noise(defense, source, dtype)
    floor = ACCEPT if source is None else 1e-9  # the system's entropy has no seed
    assert min(values(draws, std)) > floor
    for wrong in (0.9, 1.1):
        assert max(values(draws, wrong * std)) < REJECT


@pytest.mark.parametrize(("defense", "values", "std"), CASES)
def test_the_other_law_is_rejected(defense, values, std):
    draws, _ = _noise(defense)
    other = _laplace if values is _gaussian else _gaussian
    assert other(draws, std)[0] < REJECT


@pytest.mark.parametrize(("defense", "values", "std"), CASES)
def test_draws_are_independent_of_each_other(defense, values, std):
    draws, _ = _noise(defense)
    rows = draws.reshape(2, -1)
    for a, b in [(rows[0], rows[1]), (draws[:-1], draws[1:])]:
        assert stats.pearsonr(a, b).pvalue > ACCEPT


def test_laws_are_declared():
    assert _noise(GaussianNoise(STD))[1].law.covariance == pytest.approx(STD**2)
    assert isinstance(_noise(GaussianNoise(STD))[1].law, Gaussian)
    law = _noise(LaplaceNoise(STD))[1].law
    assert isinstance(law, Laplace)
    assert 2 * law.scale**2 == pytest.approx(STD**2)
    assert _noise(GaussianMechanism(0.2))[1].law.covariance == pytest.approx(0.09)


def test_the_mechanism_refuses_rows_without_a_bound():
    update = Update(torch.zeros(1, 3), Unit.CLIENT, (1,))
    with pytest.raises(ValueError, match="not bounded"):
        GaussianMechanism(1.0).transform(update, None, None, stream(0))


@pytest.mark.parametrize("kind", [GaussianNoise, LaplaceNoise, GaussianMechanism])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_checked(kind, value):
    with pytest.raises(ValueError, match="noise_"):
        kind(value)
