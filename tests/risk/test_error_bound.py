"""Floors in the audit: shared by attacks, named with their prior, never more than they are."""

import math
from dataclasses import dataclass

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from leakbound import audit, data, error_bound, registry
from leakbound.assess import limits
from leakbound.assess.criterion import Criterion
from leakbound.attacks import Attack
from leakbound.audit import experiment
from leakbound.core import Reconstruction
from leakbound.risk.statement import of_bound


def records(table, **floor):
    table["error_bound"] = {"images": 8, "components": 8, **floor}
    return [result.record for result in audit.run(audit.parse(table))]


@pytest.fixture
def table():
    return {
        "name": "tiny",
        "data": {"source": "digits"},
        "models": [{"name": "mlp", "hidden": [8], "activation": "tanh"}],
        "attacks": [{"name": "inverting_gradients", "steps": 3}],
        "defenses": [{"name": "gaussian_noise", "noise_std": [0.001, 0.01, 10.0]}],
    }


@pytest.mark.parametrize("kind", ["trace", "full"])
def test_more_noise_lifts_the_floor_up_to_the_prior(table, kind):
    found = [record.bounds[0] for record in records(table, kind=kind)]
    values = [bound.value for bound in found]
    assert values[0] < values[1] < values[2]
    for bound in found:
        assert bound.name == ("tight_trace" if kind == "trace" else "full")
        assert bound.covers == "estimate"
        assert bound.rests_on_prior
        assert bound.prior == "one Gaussian per class in 8 directions, labels known"
        assert bound.psnr == pytest.approx(-10 * math.log10(bound.value))
        assert not bound.excludes_threshold
    # at noise 10 nothing is left but the variance of the class in its leading directions
    bench = audit.PlanContext(audit.parse(table).data)
    cell = audit.parse(table).experiments()[0]
    label = int(bench.batches(1, 1, cell.seed)[0].labels)
    pixels = bench.public.inputs[bench.public.labels == label].flatten(1).double().numpy()
    top = torch.linalg.svdvals(torch.as_tensor(pixels - pixels.mean(0)))[:8].square()
    spread = top / (len(pixels) - 1)
    limit = float(spread.sum()) / 64
    if kind == "trace":
        limit = 8**2 / float((1 / spread).sum()) / 64  # the trace floor's own limit
    assert values[2] <= limit
    assert values[2] == pytest.approx(limit, rel=0.05)


def test_no_bound_is_above_what_the_mean_of_the_class_reaches(table):
    """Labels are known to an attacker, who then guesses the public mean of the class.

    Over all classes the bound at hopeless noise is the mean error of these candidates, and not
    that of the mean of all images.
    """
    table["defenses"] = [{"name": "gaussian_noise", "noise_std": 1e4}]
    table["data"] = {"source": "mnist5k"}
    table["seeds"] = list(range(30))
    bench = audit.PlanContext(audit.parse(table).data)
    public = bench.public
    errors, bounds = [], []
    for record in records(table, prior="isotropic"):
        batch = bench.batches(1, 1, record.seed)[0]
        own = public.inputs[public.labels == int(batch.labels)]
        errors.append(float((batch.inputs[0] - own.mean(0)).square().mean()))
        bounds.append(record.bounds[0].value)
    of_all = float((public.inputs - public.inputs.mean(0)).square().mean())
    spread = 3 * torch.tensor(errors).std() / len(errors) ** 0.5
    assert sum(bounds) / len(bounds) <= sum(errors) / len(errors) + spread < of_all


def test_a_floor_is_computed_once_for_all_attacks(table, monkeypatch):
    table["attacks"] += [{"name": "linear_inversion"}, {"name": "dlg", "steps": 1, "restarts": 1}]
    table["defenses"] = [{"name": "gaussian_noise"}]
    calls = []
    original = limits._error_bound
    monkeypatch.setattr(limits, "_error_bound", lambda *a: calls.append(1) or original(*a))
    found = records(table)
    assert len(calls) == 1
    assert len({repr(record.bounds) for record in found}) == 1


def test_alone_and_in_a_grid_the_same_bits(table):
    table["batch_sizes"] = [1, 2]
    whole = {r.experiment: repr(r.bounds) for r in records(table)}
    table["batch_sizes"], table["defenses"] = [2], [{"name": "gaussian_noise", "noise_std": 0.01}]
    (alone,) = records(table)
    assert whole[alone.experiment] == repr(alone.bounds)


def test_protected_on_average_is_said_only_of_bounds_for_all_attackers(table):
    table["defenses"] = [{"name": "gaussian_noise", "noise_std": 10.0}]
    for more in ({}, {"kind": "full"}, {"prior": "flat"}):
        (record,) = records(table, **more)
        (bound,) = record.bounds
        assert bound.psnr < 20
        assert bound.covers == "estimate"
        assert not bound.on_average
        assert record.verdict == "undecided"
    assert records(table, kind="none")[0].bounds == ()
    assert records(table, kind="none")[0].verdict == "undecided"


@pytest.mark.parametrize("kind", ["trace", "full"])
def test_steep_thresholds_that_no_draw_shows_protect_nobody(kind):
    """3,000 units of gain 1e7 sort an image's pixel sums finely; hardly a draw shows a slope."""
    digits = data.load("digits")
    public, batch = digits.batch(torch.arange(500)), digits.batch(torch.tensor([1000]))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3000), nn.Tanh(), nn.Linear(3000, 10))
    with torch.no_grad():
        model[1].weight.fill_(1e7)
        model[1].bias.copy_(-1e7 * torch.linspace(5, 40, 3000))
    found = error_bound(
        model, batch, "gaussian_noise,noise_std=0.1", public=public, kind=kind, components=4
    )
    assert found.error.covers == "estimate"
    assert found.error.psnr < 20, "as if it excluded the threshold"
    assert found.psnr is None
    assert found.verdict == "undecided"
    sentence = of_bound(found.error)
    assert sentence.startswith("estimate of a lower bound on the error (")
    assert "not proved" in sentence
    assert "rare ones with much information" in sentence


def test_a_model_with_kinks_is_no_case_for_the_theorem(table):
    """Its gradient jumps; tests/bounds has an attacker who beats the floor of such a model."""
    table["models"] = [{"name": "mlp", "hidden": [8]}]
    table["defenses"] = [{"name": "gaussian_noise", "noise_std": 10.0}]
    (record,) = records(table)
    (bound,) = record.bounds
    assert bound.covers == "estimate"
    assert "ReLU" in bound.assumptions[0]
    assert "sampled examples" in bound.assumptions[0]
    assert not bound.on_average
    assert record.verdict == "undecided"


def test_noise_that_falls_silent_with_the_batch_has_no_floor(table):
    table["models"] = [{"name": "mlp", "hidden": [8]}]
    table["defenses"] = [{"name": "local_optimal_noise", "noise_std": 10.0, "rule": "energy"}]
    (record,) = records(table)
    assert record.bounds == ()
    assert "get no noise depends on private data" in record.bounds_note
    table["models"] = [{"name": "mlp", "hidden": [8], "activation": "tanh"}]
    (record,) = records(table)
    (bound,) = record.bounds
    assert "one draw of the defense's directions" in bound.assumptions[0]


def test_several_images_are_not_protected_on_average(table):
    """Guesses are paired with images in the best order, which a floor does not cover."""
    table["defenses"] = [{"name": "gaussian_noise", "noise_std": 10.0}]
    table["batch_sizes"] = [2]
    (record,) = records(table, kind="weiss_weinstein", components=4)
    assert record.bounds[0].covers == "all"
    assert record.bounds[0].value > 0.01
    assert not record.bounds[0].on_average
    assert record.verdict == "undecided"


@dataclass(frozen=True)
class Planting(Attack):
    """A malicious server's attack that scales all weights."""

    factor: float = 20.0

    def __call__(self, observation, generator):
        return Reconstruction(torch.zeros(observation.batch_shape))

    def plant(self, task):
        return task.with_parameters(task.parameters * self.factor)


def test_no_bound_for_one_model_counts_against_a_server_who_chooses_it(table, monkeypatch):
    entry = registry.Entry("attack", "planting", Planting)
    known = {**registry.entries("attack"), "planting": entry}
    original = registry.entries
    monkeypatch.setattr(
        registry, "entries", lambda kind: known if kind == "attack" else original(kind)
    )
    table["defenses"] = [{"name": "gaussian_noise", "noise_std": 0.01}]
    table["threat"] = {"server": "malicious"}
    table["attacks"] = [{"name": "planting"}]
    table["attacks"] = [{"name": "inverting_gradients", "steps": 2}, {"name": "planting"}]
    for record in records(table):
        assert record.bounds == ()
        assert "does not bound others" in record.bounds_note
        assert record.verdict != "protected on average"


def test_no_picture_changes_the_record(table, monkeypatch):
    table["defenses"] = [{"name": "gaussian_noise", "noise_std": 0.01}]
    table["error_bound"] = {"kind": "full", "components": 4}
    plan = audit.parse(table)

    def broken(*_):
        raise ValueError("fisher has the eigenvalue -1e-7; it must not be negative")

    (plain,) = audit.run(plan)
    monkeypatch.setattr(limits, "full_bound", broken)
    (other,) = audit.run(plan)
    shown = other.record.pictures
    assert "leak_map" not in shown
    assert replace(other.record, pictures={}) == replace(plain.record, pictures={})


def test_a_stand_in_gets_no_floor(table):
    """`imitate` of a sign is smooth for the attacker's sake; what is sent is not."""
    noise = {"name": "gaussian_noise", "noise_std": 0.001}
    table["defenses"] = [{"links": [{"name": "sign"}, noise]}]
    (record,) = records(table)
    assert record.bounds == ()
    assert "stand-in" in record.bounds_note


def test_a_rounded_update_has_no_proved_floor(table):
    noise = {"name": "gaussian_noise", "noise_std": 1.0}
    rounding = {"name": "optimal_noise", "noise_std": 0.5, "rounding": True}
    table["defenses"] = [{"links": [rounding, noise]}]
    (record,) = records(table)
    assert "the defense" in record.bounds[0].assumptions[0]
    assert record.verdict == "undecided"


def test_what_is_imitated_exactly_has_its_floor(table):
    noise = {"name": "gaussian_noise", "noise_std": 0.01}
    table["defenses"] = [{"links": [{"name": "clip", "clip_norm": 0.1}, noise]}]
    table["defenses"] += [{"name": "whitened_dp_sgd", "correlation": "layers"}]
    table["defenses"] += [{"links": [{"name": "optimal_pruning"}, {"name": "optimal_noise"}]}]
    table["batch_sizes"] = [1, 3]
    found = [record.bounds for record in records(table)]
    assert all("smooth" not in bounds[0].assumptions[0] for bounds in found)
    assert len(found) == 6


def test_a_leak_map_needs_a_prior(table):
    table["defenses"] = [{"name": "gaussian_noise", "noise_std": 0.001}]
    (record,) = records(table, kind="full", prior="flat")
    assert "leak_map" not in record.pictures


@pytest.mark.parametrize(
    ("defense", "reason"),
    [
        ([{"name": "none"}], "no Gaussian noise"),
        ([{"name": "magnitude_pruning"}], "no Gaussian noise"),
        ([{"name": "laplace_noise"}], "no Gaussian noise"),
        ([{"name": "hidden_dropout"}], "dropped at random"),
        (
            [{"links": [{"name": "gaussian_noise"}, {"name": "clip"}]}],
            "came after the noise",
        ),
        (
            [{"links": [{"name": "gaussian_noise"}, {"name": "secure_aggregation", "clients": 2}]}],
            "several clients",
        ),
    ],
)
def test_no_floor_says_why(table, defense, reason):
    table["defenses"] = defense
    (record,) = records(table)
    assert record.bounds == ()
    assert reason in record.bounds_note
    assert record.status == "ok"


def test_few_images_give_no_prior(table):
    table["data"]["limit"] = 12
    table["defenses"] = [{"name": "gaussian_noise"}]
    (record,) = records(table)
    assert "public examples of class" in record.bounds_note


def test_the_attacker_need_not_know_the_defense(table):
    table["defenses"] = [{"name": "gaussian_noise"}]
    told = records(table)[0].bounds
    table["threat"] = {"defense_known": False}
    assert records(table)[0].bounds == told


def test_local_steps_are_part_of_the_release(table):
    table["defenses"] = [
        {"links": [{"name": "local_aggregation", "steps": n}, {"name": "gaussian_noise"}]}
        for n in (1, 5)
    ]
    one, five = (record.bounds[0].value for record in records(table, kind="full"))
    assert five < one, "the sum of several gradients tells more under the same noise"


def test_the_leak_map_shows_what_is_given_away(table):
    table["defenses"] = [{"name": "gaussian_noise", "noise_std": [1e-5, 100.0]}]
    table["error_bound"] = {"kind": "full", "components": 8}
    plan = audit.parse(table)
    shown = list(audit.run(plan))
    for result in shown:
        assert result.record.pictures["leak_map"] in result.pictures
    bench = audit.PlanContext(plan.data)
    maps = []
    for cell in plan.experiments():
        played = experiment.play_round(cell, bench)
        criterion = Criterion.of(bench.dataset.domain, psnr=20.0)
        released = experiment.released(played, criterion, cell.threat, bench.public)
        maps.append(limits.leak_map(released, cell.error_bound))
    assert maps[0].shape == (1, 1, 8, 8)
    assert float(maps[0].max()) > 0.9
    assert float(maps[1].abs().max()) < 0.01
    table["error_bound"] = {"kind": "trace"}
    (first, _) = records(table)
    assert "leak_map" not in first.pictures


@pytest.mark.parametrize(
    ("floor", "message"),
    [
        ({"kind": "tight"}, "trace"),
        ({"prior": "uniform"}, "gaussian"),
        ({"components": 0}, "components is 0"),
        ({"images": -1}, "images is -1"),
        ({"kinds": "full"}, "kind"),
    ],
)
def test_bad_settings(table, floor, message):
    with pytest.raises(ValueError, match=message):
        audit.parse({**table, "error_bound": floor})


def test_the_weiss_weinstein_floor_covers_models_with_kinks(table):
    """And lies below the Cramér-Rao floors of a smooth one."""
    table["defenses"] = [{"name": "gaussian_noise", "noise_std": [0.01, 10.0]}]
    spec = {"kind": "weiss_weinstein", "components": 4}
    table["models"] = [{"name": "mlp", "hidden": [8]}]
    low, high = (record for record in records(table, **spec))
    for record in (low, high):
        (bound,) = record.bounds
        assert bound.name == "weiss_weinstein"
        assert bound.covers == "all"
        assert bound.confidence == 0.99
        assert of_bound(bound).endswith("(99% confidence)")
    assert 0 <= low.bounds[0].value < high.bounds[0].value
    assert high.bounds[0].on_average
    assert high.verdict == "undecided"  # under a Gaussian prior, which no real images follow
    table["models"] = [{"name": "mlp", "hidden": [8], "activation": "tanh"}]
    ours = [record.bounds[0].value for record in records(table, **spec)]
    full = [r.bounds[0].value for r in records(table, **(spec | {"kind": "full"}))]
    assert 0 < ours[1] <= full[1] * 1.01
    table["defenses"] = [{"name": "local_optimal_noise", "noise_std": 10.0}]
    (record,) = records(table, **spec)
    assert "depends on the batch" in record.bounds_note
    with pytest.raises(ValueError, match="Gaussian prior"):
        audit.parse({**table, "error_bound": {"kind": "weiss_weinstein", "prior": "flat"}})
