"""Statements of paper C (Riess et al., "From Mean to Extreme") by numbers, and their corrections.

"Sheet" is the project's list of the paper's corrected formulas (H1-H14, errata 3.1-3.14).
"""

import numpy as np
import pytest
from scipy import stats

from leakbound.bounds.from_scratch import averaged, effective_noise, exact
from leakbound.bounds.identification import gaussian, kappa_sphere
from leakbound_reproductions.mean_to_extreme.corrected import rows_needed
from leakbound_reproductions.mean_to_extreme.unbiased import (
    unbiased_error,
    unbiased_noise,
    unbiased_success,
)


@pytest.mark.parametrize(
    ("eta", "noise"), [(0.01, 0.796), (0.1, 2.517), (0.5, 5.627), (1.0, 7.958)]
)
def test_figure_1_from_scratch_curve(eta, noise):
    """Figure 1, sheet 4.3: gamma = .1, N = 1, |X| = 1."""
    assert unbiased_noise(0.1, dim=1, eta=eta) == pytest.approx(noise, abs=6e-4)


def test_figure_1_identification_line_depends_on_kappa():
    """Errata 3.9: the caption's 1/11 gives 18.65, the code's 1/13 6.92; 1/10 has no answer."""
    assert gaussian.noise_for(0.1, kappa=1 / 11) == pytest.approx(18.65, abs=5e-3)
    assert gaussian.noise_for(0.1, kappa=1 / 13) == pytest.approx(6.92, abs=5e-3)
    assert gaussian.noise_for(0.1, kappa=0.1) == np.inf


@pytest.mark.parametrize(("kappa", "crossing"), [(1 / 13, 0.756), (1 / 11, 5.49)])
def test_figure_1_crossing(kappa, crossing):
    """Claim 3-5: an eta exists at which both adversaries need the same noise."""
    noise = gaussian.noise_for(0.1, kappa=kappa)
    assert unbiased_error(noise, dim=1, gamma=0.1) == pytest.approx(crossing, rel=2e-3)


def test_figure_2_rows():
    """Figure 2, errata 3.1 and 3.2: C = 5000, |X| of 160 to 250 needs 400 to 980 rows, not 20."""
    assert rows_needed(5000.0, norm=[160.0, 250.0]).tolist() == [977.0, 400.0]
    one = effective_noise(5e-4, clip_norm=5000.0, norm=200.0, rows=1)
    assert one == pytest.approx(5e-4 * 25, rel=1e-12)
    assert effective_noise(5e-4, clip_norm=5000.0, norm=200.0, rows=1000) == 5e-4
    literal = int(np.ceil(5000 / 200))
    late = effective_noise(5e-4, clip_norm=5000.0, norm=200.0, rows=literal)
    assert (late / 5e-4) ** 2 == pytest.approx(5000 / 200, rel=0.01)  # C / |X| times the variance


def test_figure_4_concentration():
    """Claim 3-6: the MSE's coefficient of variation is sqrt(2 / N)."""
    for dim in (4, 3072):
        levels = (np.arange(4000) + 0.5) / 4000
        mse = unbiased_error(0.1, dim=dim, gamma=levels)
        assert mse.mean() == pytest.approx(0.01, rel=2e-3)
        assert mse.std() / mse.mean() == pytest.approx(np.sqrt(2 / dim), rel=0.02)


def test_section_4_c_counts_are_binomial():
    """Errata 3.3: with (1 - 1/|D|)^(K - k); the paper's C(K, k) / |D|^K sums to 1e-140."""
    size, rounds = 50, 100
    paper = np.sum([stats.binom.pmf(k, rounds, 0.5) * 2.0**rounds for k in range(1, rounds + 1)])
    assert paper / float(size) ** rounds < 1e-139
    level = {"dim": 4, "eta": 0.1, "norm": 1.0}
    all_hit = averaged(1e-9, steps=rounds, sampling_rate=1 / size, **level)
    missed = (1 - 1 / size) ** rounds
    assert all_hit == pytest.approx(1 - missed + missed * exact(np.inf, **level), rel=1e-9)


def test_k_sightings_divide_the_variance():
    """Claim 3-7."""
    found = averaged(0.3, dim=16, eta=0.02, steps=9)
    assert found == pytest.approx(exact(0.1, dim=16, eta=0.02), rel=1e-12)


def test_the_law_is_no_bound_on_all_attackers():
    """Sheet H14, conventions.md 0.2: the zero image at N = 3072, noise .1, |X| = 1."""
    zero = 1 / 3072
    assert unbiased_success(0.1, dim=3072, eta=zero) == 0.0
    assert exact(0.1, dim=3072, eta=zero) == 1.0


ROWS = [  # N, e, the paper's noise, the true risk at it, the noise that is needed / the paper's
    (784, 0.10, 0.01224, 0.171, 1.065),
    (3072, 0.037, 0.003612, 0.058, 1.021),
    (3072, 0.10, 0.005939, 0.82, 1.059),
    (3072, 0.50, 0.01328, 1.00, 1.459),
    (150_528, 0.037, 0.0004986, 1.00, 1.019),
]


@pytest.mark.parametrize(("dim", "error", "noise", "risk", "factor"), ROWS)
def test_table_of_the_true_risk(dim, error, noise, risk, factor):
    """beyond.md F1: the paper's noise for 0.1 % leaves 6 to 100 %."""
    papers = unbiased_noise(1e-3, dim=dim, eta=error / dim)
    assert papers == pytest.approx(noise, rel=5e-4)
    assert exact(papers, dim=dim, eta=error / dim) == pytest.approx(risk, abs=5e-3)
    needed = exact.noise_for(1e-3, dim=dim, eta=error / dim)
    assert needed / papers == pytest.approx(factor, abs=6e-4)


def test_repair_costs_more_where_errors_are_large():
    """beyond.md F1: x 2.4 at e = 0.8, N = 3072."""
    papers = unbiased_noise(1e-3, dim=3072, eta=0.8 / 3072)
    assert exact.noise_for(1e-3, dim=3072, eta=0.8 / 3072) / papers == pytest.approx(2.4, abs=0.05)


def test_small_example_of_the_true_risk():
    """beyond.md F1: N = 16, noise .5, e = .5: .0683, and 0.000 for the unbiased estimator."""
    assert exact(0.5, dim=16, eta=0.5 / 16) == pytest.approx(0.0683, abs=5e-5)
    assert unbiased_success(0.5, dim=16, eta=0.5 / 16) < 5e-4


@pytest.mark.parametrize(("error", "lower", "upper"), [(0.9, 0.762, 0.777), (0.5, 0.068, 0.120)])
def test_section_5_corridor_of_one_step(error, lower, upper):
    """beyond.md section 1 in place of the paper's corridor (sheet H11): N = 16, noise .5."""
    assert exact(0.5, dim=16, eta=error / 16) == pytest.approx(lower, abs=6e-4)
    kappa = kappa_sphere(dim=16, eta=error / 16)
    assert gaussian(0.5, kappa=kappa) == pytest.approx(upper, abs=6e-4)


def test_claim_3_4_limits():
    """Gamma goes to 0 with eta and with the noise; identification goes to kappa."""
    assert unbiased_success(0.1, dim=784, eta=1e-9) == 0.0
    assert unbiased_success(1e9, dim=784, eta=0.1) == 0.0
    assert gaussian(1e9, kappa=0.1) == pytest.approx(0.1, rel=1e-6)
