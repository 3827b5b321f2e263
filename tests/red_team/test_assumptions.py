"""Where an assumption of a statement fails, no verdict rests on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from leakbound import audit, simulate, stream
from leakbound.assess.success import known_model
from leakbound.audit.context import PlanContext
from leakbound.audit.experiment import run_experiment
from leakbound.bounds import identification
from leakbound.bounds.attainable import Attainable
from leakbound.bounds.counting import PublicSample, TheseExamples, same_law
from leakbound.bounds.known_model import KnownModel
from leakbound.captured.assess import public_examples
from leakbound.channel import clipped_gram
from leakbound.core import (
    Batch,
    Gaussian,
    LocalPlan,
    Server,
    Task,
    ThreatModel,
    Unit,
    Update,
)
from leakbound.defenses import DpSgd
from leakbound.domains import of_shape
from leakbound.meter import Policy, measure
from leakbound.risk import TrainingSetting, corridor


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """5,000 random images, of which 3 % are one image: a guess without any update matches those."""
    draw = np.random.default_rng(0)
    images = draw.random((5000, 1, 8, 8)).astype(np.float32)
    images[draw.random(5000) < 0.03] = 0.5
    path = tmp_path_factory.mktemp("data") / "copies.npz"
    np.savez(path, inputs=images, labels=np.arange(5000) % 2)
    return f"npz:{path}"


def test_copies_of_private_images_stay_in_what_is_counted(copies):
    plan = audit.parse(
        {
            "data": {"source": copies},
            "models": [{"name": "mlp", "hidden": [8]}],
            "attacks": [{"name": "mean_image"}],
            "defenses": [{"name": "dp_sgd", "noise_multiplier": 1000.0}],
            "threat": {"labels_known": False},
            "risk": {"probability": 0.01, "prior": "none"},
            "criterion": {"psnr": 30},
            "error_bound": {"kind": "none"},
        }
    )
    context = PlanContext(plan.data)
    record = run_experiment(plan.experiments()[0], context, pictures=False).record
    private = context.private.inputs
    assert float((private == 0.5).flatten(1).all(1).float().mean()) > 0.02
    [counted] = [bound for bound in record.bounds if bound.basis == "sample" and not bound.on_error]
    assert counted.probability > 0.02
    assert not record.verdict.startswith("protected")
    assert not torch.isin(context.splits["public"], context.drawn["private"]).any()


def test_gradients_that_differ_by_little_are_told_apart():
    """Differences of 1e-5 of the clip norm decide at noise 1e-5: products need float64."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    rows = 1e-4 * torch.rand(600, 1, 4, 4, generator=stream(0, "images"))
    public = Batch(rows, torch.zeros(600, dtype=torch.long))
    found = known_model(Task.of(model), public, clip_norm=1.0)
    eta = float(rows.flatten(1).double().var(0).mean()) * 1e-2
    assert found.success_bound(1e-5, eta) > 0.9
    assert found.success_bound(1.0, eta) < 0.1


@pytest.mark.parametrize("count", [900, 1500])
def test_fewer_weights_than_examples(count):
    """The matrix of inner products has no full rank, and rounding must not make it invalid."""
    rows = torch.rand(count, 1, 8, 8, generator=stream(1, "images"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    gram = clipped_gram(Task.of(model), Batch(rows, torch.arange(count) % 10), 1.0)
    assert 0 < KnownModel(rows.flatten(1).numpy(), gram).success_bound(1.0, 0.01) < 0.2


def test_classes_of_one_example():
    labels = np.concatenate([np.zeros(480, int), np.arange(1, 21)])
    known = KnownModel(np.arange(500.0)[:, None], np.eye(500), labels, draws=64)
    assert 0.02 < known.success_bound(1.0, 0.01) <= 1.0


def test_all_others_of_a_batch_of_these_examples_may_be_known():
    """100 examples, 50 sent: who knows the other 49 guesses among 51 with 50 guesses."""
    found = TheseExamples(np.arange(100.0)[:, None], guesses=50)
    assert found.success_bound(1e9, 0.01)[0][0] >= 50 / 51


@pytest.mark.parametrize("kind", ["batch norm", "local steps"])
def test_no_probability_where_clipping_bounds_no_part(kind):
    rows = torch.rand(6000, 1, 4, 4, generator=stream(0, "images"))
    public = Batch(rows, torch.arange(6000) % 3)
    norm = [nn.BatchNorm1d(8)] if kind == "batch norm" else []
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *norm, nn.Tanh(), nn.Linear(8, 3))
    plan = LocalPlan(steps=10, learning_rate=0.1) if kind == "local steps" else LocalPlan()
    task = Task.of(model.train(), plan=plan, public=public, input_range=(0.0, 1.0))
    sent = Update(torch.zeros(1, len(task.parameters)), Unit.CLIENT, (4,), Gaussian(1.0))
    reading = measure(
        task,
        sent,
        source=stream(0, "meter"),
        defense=DpSgd(1.0, 5.0),
        policy=Policy(probability=0.05, psnr=30.0),
        input_shape=(1, 4, 4),
    )
    assert reading.verdict == "undecided"
    assert reading.bounds == ()
    why = "clipping bounds no example" if norm else "covers one of sgd"
    assert why in " ".join(reading.notes)


def test_tiles_of_few_photographs_are_few_examples_in_captured_updates():
    context = public_examples("photos", of_shape((3, 16, 16)))
    assert len(torch.unique(context.origins)) == 8


def test_sorted_samples_of_one_law_are_not_doubted():
    rows = np.random.default_rng(0).random((4000, 3))
    ordered = rows[:2000][np.argsort(rows[:2000, 0])]
    assert same_law(ordered, rows[2000:], np.random.default_rng(1)) > 0.01


def test_a_source_with_many_examples_is_guessed_more_often():
    """One of 500 people has 29 % of the examples, all alike: a guess reaches that share."""
    draw = np.random.default_rng(0)
    people = np.concatenate([np.repeat(np.arange(1, 500), 5), np.zeros(1000, int)])
    rows = draw.random((len(people), 64))
    rows[people == 0] = rows[0] + 0.001 * draw.random((1000, 64))
    share, eta = float((people == 0).mean()), 1e-3
    declared = 1000.0, len(people) / 500
    uneven = PublicSample(rows, sources=people, source_sizes=declared)
    assert uneven.n == 500
    assert uneven.density == pytest.approx(share * 500)
    for noise in (1.0, 3.0, 1e9):
        assert uneven.success_bound(noise, eta)[0][0] > share
    assert uneven.mean_error(3.0, [eta]) == 0.0
    gradients = rows[uneven.places] / np.linalg.norm(rows[uneven.places], axis=1, keepdims=True)
    known = KnownModel(uneven.examples, gradients @ gradients.T, density=uneven.density)
    assert known.success_bound(3.0, eta) > share
    # An attack that is counted on one of each is stated for the least dense examples.
    found = Attainable.of(uneven).success([(1.0, 1e-3)], eta)
    assert found.success[0] <= uneven.thinness
    person = PublicSample(rows, sources=people)
    assert (person.density, person.thinness) == (1.0, 1.0)
    assert "for a random example of a random source" in person.name
    for wrong in ((1.0, 2.0), (3.0, 0.5)):
        with pytest.raises(ValueError, match="source_sizes"):
            PublicSample(rows, sources=people, source_sizes=wrong)


def test_sources_of_very_different_sizes_are_no_longer_beaten():
    """Ten of 5,000 patients have 2,500 near-identical images each, all others one.

    Stated from all images of n random patients: per patient, and per image with the declared sizes.
    A factor from the sample's own largest source was below the attacker's success in 89 of 200
    samples.
    """
    draw, noise, eta = np.random.default_rng(2), 2.0, 0.01
    own = draw.random((5000, 16))
    sizes = np.where(np.arange(5000) < 10, 2500, 1)
    share = 2500 / sizes.sum()  # of one template among the images
    attained = float(identification.gaussian(noise, kappa=share))
    per_person = float(identification.gaussian(noise, kappa=1 / 5000))
    beaten = {"sample": 0, "person": 0, "image": 0}
    for _ in range(15):
        some = draw.choice(5000, 400, replace=False)
        found = PublicSample(own[some], sources=some)  # one image of each
        bound = float(found.success_bound(noise, eta)[0][0])
        beaten["person"] += bound < per_person
        factor = sizes[some].max() / sizes[some].mean()
        beaten["sample"] += min(1.0, factor * bound) < attained
        declared = PublicSample(own[some], sources=some, source_sizes=(2500.0, sizes.mean()))
        beaten["image"] += float(declared.success_bound(noise, eta)[0][0]) < attained
    assert beaten["sample"] > 3
    assert beaten["person"] == beaten["image"] == 0


def test_statistics_beside_the_update_leave_a_guess():
    """No bound, and no crash: a malicious server that also gets batch norm's statistics."""
    public = Batch(torch.rand(200, 1, 4, 4, generator=stream(0, "images")), torch.arange(200) % 3)
    layers = nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    threat = ThreatModel(server=Server.MALICIOUS, statistics_known=True)
    found = simulate(
        nn.Sequential(*layers).eval(),
        Batch(public.inputs[:1], public.labels[:1]),
        defense=DpSgd(1.0, 1.0),
        attack="constant_image",
        public=public,
        threat=threat,
    )
    assert found.assessment.bounds == ()
    assert found.assessment.attained.attack == "guess without an update"


@pytest.mark.parametrize("participation", ["visible", "hidden"])
def test_a_codebook_over_sampled_steps_is_between_its_law_and_the_bound(participation):
    """100 kinds far apart: every step is sampled, noised and summed, as the attacker sees it."""
    kinds, steps, rate, noise, trials = 100, 50, 0.1, 0.8, 5_000
    draw = np.random.default_rng(3)
    held = draw.random((trials, steps)) < rate
    seen = noise * draw.standard_normal((trials, steps, kinds), dtype=np.float32)
    kind = draw.integers(0, kinds, trials)
    seen[np.arange(trials), :, kind] += held
    # Visible: only the steps that hold the example; hidden: all.
    total = (seen * held[:, :, None]).sum(1) if participation == "visible" else seen.sum(1)
    reached = float((total.argmax(1) == kind).mean())
    rows = 10.0 * np.eye(kinds)[draw.integers(0, kinds, 4000)]
    setting = TrainingSetting(
        noise, kinds, 10.0, steps=steps, sampling_rate=rate, participation=participation
    )
    edges = corridor(setting, 1e-3, prior=PublicSample(rows))
    least = stats.beta.ppf(1e-4, reached * trials, trials - reached * trials + 1)
    assert edges.attained[0] <= reached + 3 * (reached / trials) ** 0.5
    assert edges.attained[0] > 0.8 * reached
    assert least <= edges.bound[0] < 2.5 * reached
