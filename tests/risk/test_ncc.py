"""Targets by normalized cross-correlation: the same as a squared error of standardized examples."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound import data, metrics
from leakbound.bounds.from_scratch import typical_correlation
from leakbound.cli import main
from leakbound.core import Batch
from leakbound.pairing import Paired
from leakbound.risk import TrainingSetting, calibrate, corridor
from leakbound.risk.correlation import standardized
from leakbound.risk.examples import Examples
from leakbound.risk.target import Target


def correlations(a, b):
    """(A, B) of rows, by numpy alone."""
    return np.corrcoef(a, b)[: len(a), len(a) :]


def law(noise, dim, ncc):
    """How often X + noise |X| xi correlates with a centered X in R^dim: a non-central t tail."""
    free = dim - 2
    return stats.nct.sf(ncc * math.sqrt(free) / math.sqrt(1 - ncc**2), free, 1 / noise)


def test_a_correlation_is_a_squared_error_of_standardized_examples():
    rows = np.random.default_rng(0).random((40, 7)) + 3
    examples = Examples(7, (1.0, 9.0), rows, names=tuple("ab" * 20))
    made = standardized(examples).images
    assert made.shape == (40, 6)
    found = correlations(rows[:20], rows[20:])
    truth, guess = made[:20, None], made[None, 20:]
    # The best multiple of each candidate, by least squares.
    factor = (truth * guess).sum(-1) / np.square(guess).sum(-1)
    errors = np.square(truth - factor[..., None] * guess).mean(-1)
    assert np.allclose(errors, 1 - found**2)
    assert np.array_equal(np.sign(factor), np.sign(found))
    # No candidate, whatever its size, is within the error and below the correlation.
    eta = Target.of_ncc(0.6, 0.1).eta
    sizes = np.linspace(0.05, 2, 40)[:, None, None, None]
    within = np.square(truth - sizes * guess).mean(-1) <= eta
    assert within.any()
    assert (found[within.any(0)] >= 0.6 - 1e-12).all()


@pytest.mark.parametrize(("noise", "dim", "ncc"), [(0.3, 17, 0.5), (1.0, 9, 0.2), (0.05, 785, 0.6)])
def test_the_trap_attains_the_law_of_a_correlation(noise, dim, ncc):
    examples = standardized(Examples(dim, (1.0, 1.0)))
    setting = TrainingSetting(noise, dim=examples.dim, norm=examples.norms[0])
    edges = corridor(setting, Target.of_ncc(ncc, 0.5).eta)
    assert edges.attained[0] == pytest.approx(law(noise, dim, ncc), rel=1e-6)
    assert edges.attained[0] <= edges.bound[0]


def test_the_law_is_that_of_drawn_answers():
    rng = np.random.default_rng(1)
    image = rng.random(25)
    image = (image - image.mean()) / np.linalg.norm(image - image.mean())
    seen = image + 0.2 * rng.standard_normal((20_000, 25))
    drawn = correlations(image[None], seen)[0]
    counted = [(drawn >= ncc).mean() for ncc in (0.5, 0.7, 0.9)]
    assert counted == pytest.approx([law(0.2, 25, ncc) for ncc in (0.5, 0.7, 0.9)], abs=0.01)
    assert abs((drawn >= 0.7).mean() - law(0.25, 25, 0.7)) > 0.05


def test_half_of_all_answers_exceed_the_typical_correlation():
    rng = np.random.default_rng(2)
    image = rng.random(3072)
    share = image.var() * 3072 / np.square(image).sum()
    noise = 0.02
    seen = image + noise * np.linalg.norm(image) * rng.standard_normal((400, 3072))
    drawn = correlations(image[None], seen)[0]
    typical = typical_correlation(noise, dim=3072, share=share)
    assert drawn.mean() == pytest.approx(typical, abs=0.005)
    assert 0.4 < (drawn > typical).mean() < 0.6
    assert (
        typical
        < typical_correlation(noise, dim=3072)
        == pytest.approx(1 / math.sqrt(1 + 3072 * noise**2))
    )
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        typical_correlation(noise, dim=3072, share=1.5)


def test_no_public_image_matches_more_than_the_bound_says():
    rows = data.load("digits", size=8).inputs.flatten(1).double().numpy()[:400]
    examples = Examples.of("digits", size=8)
    examples = standardized(Examples(64, (1.0, 9.0), rows, names=examples.names[:400]))
    prior = examples.prior()
    eta = Target.of_ncc(0.9, 0.1).eta
    counted = (correlations(rows, rows) >= 0.9).mean(1).max()
    assert counted <= prior.largest(eta) / 400 <= 1
    assert examples.matches([eta])[0].constant == 0
    assert examples.matches([eta])[0].example == pytest.approx((counted * 400 - 1) / 399)


def test_less_noise_is_needed_for_a_larger_correlation():
    def noise(ncc):
        target = f"ncc>={ncc} with probability<=0.01"
        return calibrate(target, dim=65, norm=[1.0], prior="sphere").noise_multiplier

    assert noise(0.9) < noise(0.6) < noise(0.5)


def test_one_image_resembles_unlike_ones_by_ssim():
    rng = np.random.default_rng(3)
    unlike = torch.tensor(rng.random((2, 1, 32, 32)))
    between = unlike.mean(0, keepdim=True).expand(2, -1, -1, -1)
    paired = Paired(Batch(unlike, torch.zeros(2)), between, None, (0, 1))
    assert min(metrics.ssim(paired, data_range=1.0)) > 0.6
    with pytest.raises(ValueError, match="no law limits"):
        Target.parse("ssim>=0.9 with probability<=0.01")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"target": "ncc>=1 with probability<=0.1"}, "ncc is 1"),
        ({"target": "ncc>=0 with probability<=0.1"}, "ncc is 0"),
        ({"target": "ncc>=0.9 with probability<=0.1", "data": "german"}, "columns"),
        (
            {"target": "ncc>=0.9 with probability<=0.1", "data": "digits", "known": "region:top"},
            "whole images",
        ),
        ({"target": "ncc>=0.9 with probability<=0.1", "dim": 2, "norm": [1.0]}, "dim is 2"),
    ],
)
def test_refused(arguments, reason):
    prior = {} if "data" in arguments else {"prior": "sphere"}
    fixed = {"dim": 9, "norm": [1.0]} if not {"data", "dim"} & set(arguments) else {}
    with pytest.raises(ValueError, match=reason):
        calibrate(**fixed, **prior, **arguments)


def test_constant_images_have_no_correlation():
    rows = np.random.default_rng(4).random((9, 16))
    rows[3] = 0.25
    with pytest.raises(ValueError, match=r"1 constant examples of 9.*: d; leave them out"):
        standardized(Examples(16, (1.0, 4.0), rows, names=tuple("abcdefghi")))


@pytest.mark.usefixtures("wide")
def test_bound_by_correlation(capsys, tmp_path):
    known = ["--dim", "65", "--norm", "3", "--prior", "sphere", "--ncc", "0.9", "0.7"]
    with pytest.raises(SystemExit) as caught:
        main(["bound", "--noise-multiplier", "0.1", *known, "--out", str(tmp_path / "made")])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "NCC 0.7" in text
    assert "mean 0 and variance 1" in text
    rows = json.loads((tmp_path / "made" / "bound.json").read_text())["thresholds"]
    assert [row["ncc"] for row in rows] == [0.7, 0.9]
    assert rows[0]["attained"] == pytest.approx(law(0.1, 65, 0.7), rel=1e-6)
    assert (tmp_path / "made" / "corridor.png").exists()


def test_a_curve_over_correlations():
    found = calibrate("ncc>=0.6 with probability<=0.01", dim=65, norm=[1.0], prior="sphere")
    figure = found._figure()
    assert figure.axes[0].get_xlabel() == "NCC threshold"
