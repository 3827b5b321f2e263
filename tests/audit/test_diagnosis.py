"""Why a configuration is undecided: each test against something that shares no code with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import leakbound as lb
from leakbound import audit, defenses
from leakbound.assess import record as records
from leakbound.assess.chance import halves
from leakbound.assess.criterion import Criterion
from leakbound.audit import diagnosis
from leakbound.domains import Column, TableDomain, of_shape
from leakbound.randomness import normal, stream


def simulated(model, batch, shape, **more):
    defaults = {"attack": "linear_inversion", "error_bound": "none", "probability": None}
    found = lb.simulate(model, batch, **defaults | more)
    criterion = Criterion.of(of_shape(shape))
    return found, criterion


def tanh_net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3))


def batch_of(n, shape, classes=3):
    inputs = torch.rand((n, *shape), generator=stream(0, "batch"))
    return lb.Batch(inputs, torch.arange(n) % classes)


@pytest.mark.parametrize("std", [0.003, 0.1])
def test_directions_and_expected_error_equal_those_of_the_dense_jacobian(std):
    model, batch = tanh_net(), batch_of(2, (1, 3, 3))
    found, criterion = simulated(model, batch, (1, 3, 3), defense=f"gaussian_noise,noise_std={std}")
    own = diagnosis.diagnose(found.round, criterion, stream(0, "why"))

    wide = model.double()

    def update(x):
        loss = nn.functional.cross_entropy(wide(x.view(2, 1, 3, 3)), batch.labels)
        parts = torch.autograd.grad(loss, list(wide.parameters()), create_graph=True)
        return torch.cat([part.flatten() for part in parts])

    jacobian = torch.autograd.functional.jacobian(update, batch.inputs.double().flatten())
    values = np.linalg.eigvalsh((jacobian.T @ jacobian).numpy()) / std**2
    determined = float((values / (values + 100)).sum())  # 20 dB: a squared error of 0.01
    blind = float((batch.inputs - 0.5).square().mean())
    guess = min(blind, *[float((batch.inputs - c).square().mean()) for c in (0.0, 1.0)])
    error = float((1 / (values + 1 / guess)).mean())
    assert own.determined == pytest.approx((determined, determined), rel=1e-3)
    assert own.expected[0] == pytest.approx(-10 * math.log10(error), abs=0.7)
    assert own.noise == "noise"
    assert own.inputs == 18


def test_quadrature_brackets_the_traces():
    root = normal((300, 40), stream(0, "root")).double()
    scale = torch.logspace(-4, 3, 40, dtype=torch.float64)
    matrix = (root * scale) @ root.T
    values = torch.linalg.eigvalsh(matrix).clamp_min(0)
    for floor in (1.0, 100.0):
        low, high = diagnosis._traces(lambda v: matrix @ v, 300, floor)
        exact = float((1 / (values + floor)).sum())
        assert low - 0.05 * exact <= exact <= high + 0.05 * exact  # four probes
        assert high - low < 0.2 * exact


def test_with_public_examples_the_prior_is_their_covariance(monkeypatch):
    model, batch = tanh_net(), batch_of(2, (1, 3, 3))
    mix = normal((3, 9), stream(0, "mix"))
    inputs = (0.5 + 0.1 * normal((60, 3), stream(0, "few")) @ mix).view(60, 1, 3, 3).clamp(0, 1)
    public = lb.Batch(inputs, torch.arange(60) % 3)
    found, criterion = simulated(
        model, batch, (1, 3, 3), defense="gaussian_noise,noise_std=0.3", public=public
    )
    dense = diagnosis.diagnose(found.round, criterion, stream(0, "why"), public=public)
    attacker = halves(public)[0].inputs
    covariance = torch.cov(attacker.flatten(1).double().T, correction=0)
    rest = 1e-3 * covariance.diagonal().mean()
    inverse = torch.linalg.inv(covariance + rest * torch.eye(9))
    wide = model.double()

    def update(x):
        loss = nn.functional.cross_entropy(wide(x.view(2, 1, 3, 3)), batch.labels)
        parts = torch.autograd.grad(loss, list(wide.parameters()), create_graph=True)
        return torch.cat([part.flatten() for part in parts])

    jacobian = torch.autograd.functional.jacobian(update, batch.inputs.double().flatten())
    matrix = jacobian.T @ jacobian / 0.09 + torch.block_diag(inverse, inverse)
    error = float(torch.linalg.inv(matrix).diagonal().mean())
    assert dense.expected[0] == pytest.approx(-10 * math.log10(error), abs=0.01)
    monkeypatch.setattr(diagnosis, "DENSE", 1)  # the same by quadrature
    monkeypatch.setattr(diagnosis, "PROBES", 300)
    model.float()
    few = diagnosis.diagnose(found.round, criterion, stream(0, "why"), public=public)
    assert few.expected[0] == pytest.approx(dense.expected[0], abs=0.5)
    assert few.determined[0] == pytest.approx(dense.determined[0], abs=0.5)


def test_pixels_that_the_model_ignores_give_a_witness():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tanh_net()
            mask = torch.ones(1, 1, 3, 3)
            mask[..., 1:, :] = 0
            self.register_buffer("mask", mask)

        def forward(self, x):
            return self.net(x * self.mask)

    more = {"attack": "inverting_gradients,steps=5"}
    found, criterion = simulated(Half(), batch_of(1, (1, 3, 3)), (1, 3, 3), **more)
    own = diagnosis.diagnose(found.round, criterion, stream(0, "why"))
    assert own.word == records.ABSENT
    assert own.radius is None
    assert own.witness.score < 20
    assert own.witness.error is None
    assert own.determined[0] == pytest.approx(3, abs=0.01)


def test_an_update_that_determines_its_input_has_none():
    found, criterion = simulated(tanh_net(), batch_of(1, (1, 3, 3)), (1, 3, 3))
    own = diagnosis.diagnose(found.round, criterion, stream(0, "why"))
    assert own.word == records.PRESENT
    assert own.witness is None
    assert own.radius < 15
    assert own.determined[0] == pytest.approx(9, abs=1e-3)
    assert own.noise == "rounding"


def test_noise_gives_a_witness_whose_error_is_that_of_the_best_test():
    found, criterion = simulated(
        tanh_net(), batch_of(1, (1, 3, 3)), (1, 3, 3), defense="gaussian_noise,noise_std=3.0"
    )
    own = diagnosis.diagnose(found.round, criterion, stream(0, "why"))
    assert own.word == records.ABSENT
    assert own.witness.error == pytest.approx(norm.sf(own.witness.distance / 2), rel=1e-6)
    assert own.witness.error > 0.15
    assert own.expected[1] < 20


@pytest.mark.parametrize("defense", ["sign", "quantization,bits=8"])
def test_what_is_sent_may_be_no_continuous_function(defense):
    found, criterion = simulated(tanh_net(), batch_of(1, (1, 3, 3)), (1, 3, 3), defense=defense)
    own = diagnosis.diagnose(found.round, criterion, stream(0, "why"))
    assert "no continuous function" in own.note
    assert own.determined is None


def test_a_mask_that_the_batch_chose_leaks_more_than_is_counted():
    """Few coordinates determine few directions, but which ones are sent says more."""
    defense = "magnitude_pruning,rate=0.99,scope=global"
    found, criterion = simulated(tanh_net(), batch_of(1, (1, 3, 3)), (1, 3, 3), defense=defense)
    own = diagnosis.diagnose(found.round, criterion, stream(0, "why"))
    assert own.expected[1] < 20
    assert own.word == records.UNKNOWN
    assert own.witness is None
    assert "the batch chose" in own.note


def test_coordinates_without_noise_count_by_their_rounding():
    """Noise of a public mask is 0 where nothing is sent: no division by it."""
    links = defenses.chain(defenses.OptimalPruning(0.5), defenses.GaussianNoise(0.01))
    public = batch_of(40, (1, 3, 3))
    more = {"defense": links, "public": public}
    found, criterion = simulated(tanh_net(), batch_of(1, (1, 3, 3)), (1, 3, 3), **more)
    own = diagnosis.diagnose(found.round, criterion, stream(0, "why"), public=public)
    assert own.noise == "noise"
    assert math.isfinite(own.expected[0])


def test_counts_of_columns_are_refused():
    domain = TableDomain((Column("age", "integer", 0, 100), Column("n", "integer", 0, 9)))
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    batch = lb.Batch(torch.rand(1, 2, generator=stream(0, "x")), torch.tensor([1]))
    found = lb.simulate(model, batch, attack="linear_inversion", domain=domain)
    with pytest.raises(lb.NotApplicable, match="columns"):
        diagnosis.diagnose(found.round, Criterion.of(domain), stream(0, "why"))


PLAN = {
    "name": "why",
    "data": {"source": "digits"},
    "models": [{"name": "mlp", "hidden": [16]}],
    "attacks": [{"name": "constant_image"}],
    "defenses": [{"name": "none"}, {"name": "gaussian_noise", "noise_std": 3.0}],
    "batch_sizes": [1],
    "seeds": [0, 1],
    "error_bound": {"kind": "none"},
    "risk": {"probability": 0},
}


def test_a_folder_has_one_diagnosis_for_each_undecided_configuration(tmp_path, monkeypatch):
    plan = audit.parse(PLAN)
    audit.audit(plan, tmp_path / "run")
    first = audit.diagnose_undecided(plan, tmp_path / "run")
    assert [one.word for one in first] == [records.PRESENT, records.ABSENT]
    stored = (tmp_path / "run" / diagnosis.FILE).read_bytes()

    def never(*args):
        raise AssertionError("computed again")

    monkeypatch.setattr(diagnosis, "diagnose_unit", never)
    assert audit.diagnose_undecided(plan, tmp_path / "run") == first
    assert (tmp_path / "run" / diagnosis.FILE).read_bytes() == stored

    other = audit.parse(PLAN | {"seeds": [5]})
    with pytest.raises(ValueError, match="another plan"):
        audit.diagnose_undecided(other, tmp_path / "run")

    page = lb.report.write(tmp_path / "run").read_text()
    assert "information present, search fails" in page
    assert "no verdict" in page


def test_text_says_each_part():
    witness = records.Witness(score=12.0, distance=1.0, error=0.3)
    one = records.Diagnosis(
        experiment="x",
        word=records.ABSENT,
        starts=(records.Start(before=34.0, after=11.0),),
        radius=None,
        noise="noise",
        inputs=100,
        determined=(3.0, 5.0),
        expected=(11.0, 14.0),
        witness=witness,
    )
    said = diagnosis.text(one)
    for part in ("A start at 34 dB ends at 11 dB", "3 to 5 of 100", "14 at most", "at 12 dB"):
        assert part in said
