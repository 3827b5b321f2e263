"""Statements of paper B (Liu et al., "Systematic Evaluation") by numbers, and their corrections.

"Sheet" is the project's list of the paper's corrected formulas (G1-G13, errata 2.1-2.15).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leakbound.attacks.features.base import feature_errors
from leakbound.core import Batch, Task
from leakbound.defenses import GaussianNoise
from leakbound.models import two_layer
from leakbound.protocol import play
from leakbound.randomness import normal, stream
from leakbound_reproductions.attacks.tensor import TensorMethod
from leakbound_reproductions.systematic_evaluation import trial
from leakbound_reproductions.systematic_evaluation import two_layer as theory
from leakbound_reproductions.systematic_evaluation.sweep import interval, row, slope
from leakbound_reproductions.systematic_evaluation.tensor_attack import FUNCTIONS, library, printed
from leakbound_reproductions.systematic_evaluation.trial import Cell, draw, local_update, pruned
from leakbound_reproductions.systematic_evaluation.two_layer import (
    OrderSetting,
    lower_order,
    upper_order,
)

SMALL = Cell(inputs=10, width=4096, batch=1)


def _mean(cell, seeds=4, start=0):
    found = [trial.run(cell, seed) for seed in range(start, start + seeds)]
    return float(np.mean([t.error for t in found])), float(np.mean([t.span for t in found]))


@pytest.mark.parametrize(("activation", "batch"), [("relu", 1), ("cubic", 2), ("tanh", 1)])
@pytest.mark.parametrize("method", ["library", "printed"])
def test_claim_2_1_error_over_width(activation, batch, method):
    base = Cell(activation, inputs=10, batch=batch, method=method)
    rows = [
        row(cell, [trial.run(cell, seed) for seed in range(5)])
        for cell in (replace(base, width=m) for m in (4096, 32_768))
    ]
    found = slope(rows, lambda cell: cell.width)
    assert abs(found.value + 0.5) < 0.2
    assert rows[1].median < 0.25


def test_claim_2_2_clipping_changes_nothing():
    """Up to rounding and the decomposition's tolerance: its restarts are drawn anew."""
    plain = trial.run(replace(SMALL, batch=2), 0)
    for level in (2.0, 16.0, 7.3):
        clipped = trial.run(replace(SMALL, batch=2, defense="clipping", level=level), 0)
        assert abs(clipped.error - plain.error) <= 1e-7


def test_claim_2_3_noise_is_flat_then_linear():
    """At noise far above the responses the error is linear in it; far below it does not matter."""
    big = replace(SMALL, width=32_768)
    plain, _ = _mean(big)
    little, _ = _mean(replace(big, noise_std=0.05))
    assert little == pytest.approx(plain, rel=0.1)
    loud, louder = (_mean(replace(big, noise_std=s))[0] for s in (4.0, 8.0))
    assert louder / loud == pytest.approx(2, rel=0.25)
    assert loud > 3 * plain


def test_claim_2_4_dropped_units_are_a_narrower_network():
    narrow, _ = _mean(replace(SMALL, width=1024), seeds=8)
    for defense in ("dropout_units", "dropout_entries"):
        dropped, _ = _mean(replace(SMALL, defense=defense, level=0.75), seeds=8)
        assert dropped == pytest.approx(narrow, rel=0.3)
    assert narrow > 1.5 * _mean(SMALL, seeds=8)[0]


def test_claim_2_5_pruned_zeros_still_show_the_span():
    """What is sent is a function of the w_j . x_i alone, so Stein's lemma gives their span still.

    Left out, the units that are left are no longer Gaussian.
    """
    base = replace(SMALL, batch=2, width=8192)
    _, plain = _mean(base)
    cut = replace(base, defense="prune_layer", level=0.7)
    _, zeros = _mean(cut)
    _, left_out = _mean(replace(cut, method="left_out"))
    assert zeros < 2 * plain
    assert left_out > 2.5 * zeros
    problem = draw(base, 0)
    keep = pruned(problem.gradient, 0.9, whole_model=False)[:, 0]
    along = (problem.network.inner[keep] @ problem.inputs.T) ** 2
    assert keep.mean() == pytest.approx(0.1, abs=1e-3)
    assert along.mean() > 1.3  # of Gaussian weights: 1


def test_claim_2_6_local_steps():
    """Even where the outer layer has moved by its own size, and the inner one with it."""
    plain = trial.run(SMALL, 0)
    for defense in ("local_steps", "mean_field_steps"):
        own = trial.run(replace(SMALL, defense=defense, level=0.05, steps=3), 0)
        assert own.error == pytest.approx(plain.error, rel=0.15)


def test_local_steps_are_gradient_descent():
    problem = draw(replace(SMALL, width=32, batch=2, activation="tanh"), 0)
    inner = torch.from_numpy(problem.network.inner.copy()).requires_grad_()
    outer = torch.from_numpy(problem.network.outer.copy()).requires_grad_()
    start = [inner.detach().clone(), outer.detach().clone()]
    x, y = torch.from_numpy(problem.inputs), torch.from_numpy(problem.targets)
    for _ in range(3):
        loss = (y - torch.tanh(x @ inner.T) @ outer).square().sum()
        slopes = torch.autograd.grad(loss, (inner, outer))
        with torch.no_grad():
            for weight, change in zip((inner, outer), slopes, strict=True):
                weight -= 0.01 * change
    total = local_update(problem, 3, 0.01, 0.01) * 3
    seen = [(a - b.detach()) / 0.01 for a, b in zip(start, (inner, outer), strict=True)]
    np.testing.assert_allclose(total[:, 1:], seen[0].numpy(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(total[:, 0], seen[1].numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("inputs", [5, 10, 20])
def test_claim_2_9_the_inner_layer_is_pruned_first(inputs):
    """p_hat stays near 0 up to n / (n + 1), and reaches 1 in what is left (Remark E.4)."""
    problem = draw(Cell("softplus", inputs=inputs, width=512), 0)
    edge, shares = inputs / (inputs + 1), []
    for rate in (edge, edge + 0.5 * (1 - edge), edge + 0.95 * (1 - edge)):
        mask = pruned(problem.gradient, rate, whole_model=True)
        data = (problem.network, problem.inputs, problem.targets)
        shares.append(theory.withheld_share(*data, mask))
    assert shares[0] < 0.01
    assert 0.2 < shares[1] < 0.7
    assert shares[2] > 0.85


def test_remark_e_4_dead_relu_units_move_the_jump():
    """A unit that no input turns on sends 0: with B = 2, a quarter of the a_j is pruned first."""
    problem = draw(Cell(inputs=10, width=4096), 0)
    dead = (problem.gradient[:, 0] == 0).mean()
    assert dead == pytest.approx(0.25, abs=0.1)  # 1/4 for orthogonal inputs
    data = (problem.network, problem.inputs, problem.targets)
    mask = pruned(problem.gradient, (10 + dead) / 11, whole_model=True)
    assert theory.withheld_share(*data, mask) < 0.01


def test_theorem_3_2_the_floor_scales_as_its_order():
    """noise sqrt(n / M) with the constant of |r| sqrt(E s'^2), and no growth with B."""
    ratios = []
    for inputs, width, batch in ((10, 2048, 1), (40, 2048, 1), (10, 16_384, 1), (20, 8192, 2)):
        cell = Cell("softplus", inputs=inputs, width=width, batch=batch)
        problem = draw(cell, 0)
        floor = theory.local_bound(
            problem.network, problem.inputs, problem.targets, noise_std=0.1, trace=True
        )
        order = lower_order("noise", OrderSetting(inputs, width, batch, noise_std=0.1)).value
        ratios.append((inputs * floor.value) ** 0.5 / order)
    assert max(ratios) / min(ratios) < 1.25
    assert 0.5 < min(ratios) < 2


def test_no_measured_error_below_the_floor_that_covers_it():
    for cell in (
        replace(SMALL, noise_std=2.0),
        replace(SMALL, batch=2, noise_std=1.0),
        replace(SMALL, defense="clipping", level=4.0, noise_std=0.5),
        replace(SMALL, defense="dropout_units", level=0.5, noise_std=2.0),
        replace(SMALL, defense="prune_layer", level=0.5, noise_std=2.0),
    ):
        trials = [trial.run(cell, seed) for seed in range(6)]
        above = interval(np.array([t.error**2 - t.floor**2 for t in trials]))
        assert above.high > 0
        assert np.mean([t.error for t in trials]) < 12 * np.mean([t.floor for t in trials])


def test_stein_moments_without_sampling_error():
    """Both attacks are exact where the responses are one Hermite polynomial's, M large."""
    source = stream(0, "exact")
    units = normal((40_000, 4), source, like=torch.zeros(1).double())
    x = torch.tensor([[0.6, 0.8, 0.0, 0.0]]).double()
    outer = FUNCTIONS["cubic"](units @ x[0])
    seen = torch.ones(len(outer), dtype=torch.bool)
    for find in (library, printed):
        found = find(outer, seen, units, "cubic", 1, source)
        assert float(feature_errors(found.vectors, x)[0]) < 0.1
        flipped = find(-outer, seen, units, "cubic", 1, source)  # a residual of the other sign
        assert float(feature_errors(flipped.vectors, x)[0]) < 0.1


def test_the_librarys_attack_on_a_model_is_the_one_measured_here():
    """`TensorMethod` on `models.two_layer`, through the client and a defense of the package."""
    model = two_layer(input_shape=(1, 1, 10), classes=1, generator=stream(0, "model"), width=4096)
    task = Task.of(
        model, loss=lambda out, y: (y - out[:, 0]).square().sum(), input_range=(-1.0, 1.0)
    ).to("cpu", torch.float64)
    x = torch.nn.functional.normalize(normal((2, 10), stream(1, "x")).double(), dim=1)
    batch = Batch(x.view(2, 1, 1, 10), torch.tensor([1.0, -1.0]).double())
    played = play(task, [batch], GaussianNoise(1e-6), [stream(2, "noise", i) for i in range(2)])
    found = TensorMethod().find(played.observation, stream(3, "attack"))
    named = task.unflatten(task.parameters)
    row_ = task.unflatten(played.observation.update.rows.sum(0))["outer.weight"][0]
    seen = torch.ones(4096, dtype=torch.bool)
    here = library(row_, seen, named["inner.weight"], "relu", 2, stream(4, "attack"))
    theirs, ours = (feature_errors(f.vectors, x) for f in (found, here))
    torch.testing.assert_close(theirs, ours, rtol=1e-2, atol=1e-3)
    assert float(ours.max()) < 0.4


def test_table_1_and_its_errata():
    """B in Theorem B.6 (errata 2.2), the drop probability (2.9), the pruned energy (2.10)."""
    setting = OrderSetting(
        inputs=64, width=6400, batch=3, noise_std=1.0, rate=0.9, withheld_share=0.75
    )
    assert upper_order("none", setting).value == pytest.approx(3 * 0.1)
    assert upper_order("dropout", setting).value == pytest.approx(3 * 0.1 / 0.1**0.5, rel=1e-3)
    assert lower_order("pruning", setting).value == pytest.approx(0.1 / 0.25**0.5)
    assert upper_order("pruning", setting).value is None
