"""The probability in an audit: its verdicts, its priors, and its numbers against other routes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from leakbound import audit
from leakbound.assess import success
from leakbound.assess.limits import RiskSpec
from leakbound.audit.context import PlanContext
from leakbound.audit.experiment import run_experiment
from leakbound.bounds import conversions, counting, record_priors
from leakbound.core import NotApplicable

PLAN = {
    "seeds": [0],
    "data": {"source": "mnist5k", "limit": 600},
    "models": [{"name": "mlp", "hidden": [8]}],
    "attacks": [{"name": "linear_inversion"}],
    "error_bound": {"kind": "none"},
    "defenses": [
        {"name": "none"},
        {"name": "dp_sgd", "noise_multiplier": [0.001, 0.1, 2.0]},
        {"name": "noisy_copy", "noise_std": [0.01, 3.0]},
        {"name": "gaussian_noise", "noise_std": 1.0},
    ],
}
NAMES = ("none", "dp 0.001", "dp 0.1", "dp 2", "copy 0.01", "copy 3", "noise")


def plan(**changes):
    return audit.parse(PLAN | changes)


UNLABELED = {"labels_known": False}


@pytest.fixture(scope="module")
def bench():
    return PlanContext(plan().data)


def records(bench, **changes):
    cells = plan(**changes).experiments()
    found = [run_experiment(cell, bench, pictures=False).record for cell in cells]
    assert all(record.status == "ok" for record in found), [r.reason for r in found]
    return found


@pytest.fixture(scope="module")
def gaussian(bench):
    found = records(bench, risk={"probability": 0.05, "prior": "gaussian"}, threat=UNLABELED)
    return dict(zip(NAMES, found, strict=True))


def chance(record):
    """The bound under a model; beside it stands the one that counts public examples."""
    bounds = {bound.basis: bound for bound in record.bounds}
    assert {"sample", "fitted model"} <= set(bounds)
    return bounds["fitted model"]


def test_verdicts(gaussian):
    """Under a model where its bound is below what is accepted; exposure wins; else undecided."""
    assert {name: record.verdict for name, record in gaussian.items()} == {
        "none": "exposed",
        "dp 0.001": "exposed",
        "dp 0.1": "undecided",
        "dp 2": "protected under a model",
        "copy 0.01": "exposed",
        "copy 3": "protected under a model",
        "noise": "undecided",
    }
    for name, record in gaussian.items():
        if name in ("none", "noise"):  # a law that promises nothing
            assert record.bounds == ()
            continue
        bound = chance(record)
        assert bound.excludes_threshold == (bound.probability <= 0.05)
        assert (bound.psnr, bound.accepted, bound.covers) == (None, 0.05, "all")
        assert bound.prior == "Gaussian images, fitted to public examples"
        said = " ".join(bound.assumptions)
        assert "each for itself" in said
        if name.startswith("dp"):
            assert "on one release" in said
            assert "what several rounds leak, which is more" in said
        else:
            assert bound.name == "probability after a noisy copy under a model"


def test_the_numbers_of_the_mechanism(bench, gaussian):
    """Phi(Phi^-1(kappa) + 1 / noise), kappa from the rung; seven clients' guesses count."""
    rung, _ = success.prior_of(bench.public, "gaussian", 32, False, 0.01)
    public = bench.public.inputs.flatten(1).double().numpy()
    most = max(int((((public - one) ** 2).mean(1) <= 0.01).sum()) - 1 for one in public)
    blind = max(math.exp(float(rung.log_kappa(0.01))), most / (len(public) - 1))
    for name, noise in (("dp 0.1", 0.1), ("dp 2", 2.0)):
        expected = stats.norm.cdf(stats.norm.ppf(blind) + 1 / noise)
        assert chance(gaussian[name]).probability == pytest.approx(expected, rel=1e-6, abs=0)
    seven = records(
        bench,
        risk={"probability": 0.01, "prior": "gaussian"},
        threat=UNLABELED,
        batch_sizes=[7],
        defenses=[{"name": "dp_sgd", "noise_multiplier": 2.0}],
    )
    expected = stats.norm.cdf(stats.norm.ppf(7 * blind) + 0.5)
    assert chance(seven[0]).probability == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("prior", ["gaussian", "mixture", "gallery"])
def test_priors(bench, prior):
    found = records(
        bench,
        risk={"probability": 0.001, "prior": prior, "components": 8},
        threat=UNLABELED,
        defenses=[{"name": "dp_sgd", "noise_multiplier": 1.0}, {"name": "noisy_copy"}],
    )
    for record in found:
        bound = chance(record)
        assert 0 < bound.probability <= 1
        word = {"gaussian": "Gaussian", "mixture": "mixture of"}
        assert word.get(prior, "gallery of") in bound.prior
        assert (record.verdict == "protected under a model") == (bound.probability <= 0.001)


def test_a_known_label_is_no_secret(bench):
    """Blind guesses by class: the sum over classes of their weight times what one image reaches."""
    public, eta = bench.public, 0.04
    flat, labels = public.inputs.flatten(1).double().numpy(), public.labels.numpy()
    total = 0.0
    for y in np.unique(labels):
        own = flat[labels == y]
        most = max(int((((own - one) ** 2).mean(1) <= eta).sum()) - 1 for one in own)
        total += len(own) / len(flat) * most / (len(own) - 1)
    assert total > 0
    for prior in ("gaussian", "gallery"):
        _, known = success.prior_of(public, prior, 32, True, eta)
        _, unknown = success.prior_of(public, prior, 32, False, eta)
        assert math.exp(known) >= total * (1 - 1e-9)
        assert known > unknown


def test_a_model_of_images_is_not_trusted_below_the_images(bench):
    """A Gaussian thinks near images far rarer than they are: what was seen counts."""
    rung, log = success.prior_of(bench.public, "gaussian", 32, False, 0.03)
    flat = bench.public.inputs.flatten(1).double().numpy()
    most = max(int((((flat - one) ** 2).mean(1) <= 0.03).sum()) - 1 for one in flat)
    seen = most / (len(flat) - 1)
    assert math.exp(float(rung.log_kappa(0.03))) < seen
    assert math.exp(log) >= seen  # means of images match more


def test_a_copy_of_a_gaussian():
    """Against draws: no guess from x + w comes near x more often than the bound says."""
    rng = np.random.default_rng(3)
    spread = np.array([0.5, 0.3, 0.1])
    part = record_priors.GaussianImages.from_samples(
        rng.normal(size=(20000, 3)) * spread, components=3
    )
    noise, eta = 0.15, 0.004
    images = rng.normal(size=(40000, 3)) * spread
    copies = images + noise * rng.normal(size=images.shape)
    guess = copies * spread**2 / (spread**2 + noise**2)  # the posterior mean is best
    reached = float((((guess - images) ** 2).mean(1) <= eta).mean())
    bound = math.exp(success.after_copy(noise, part, eta=eta, baseline=-9.0))
    assert reached < bound < 4 * reached + 0.05
    assert reached > 0.1  # the test has something to say
    blind = math.exp(float(part.log_kappa(eta)))
    assert blind <= bound * 1.001
    far = math.exp(success.after_copy(1e6, part, eta=eta, baseline=-9.0))
    assert far == pytest.approx(blind, rel=1e-6)


def test_a_copy_from_a_gallery():
    rng = np.random.default_rng(4)
    gallery = record_priors.Gallery(rng.random((30, 5)) + 0.1)
    for noise in (0.05, 0.5, 5.0):
        drawn = rng.integers(30, size=4000)
        copies = gallery.images[drawn] + noise * rng.normal(size=(4000, 5))
        near = ((copies[:, None] - gallery.images) ** 2).sum(2).argmin(1)
        blind = float(gallery.log_kappa(1e-6))
        bound = math.exp(success.after_copy(noise, gallery, eta=1e-6, baseline=blind))
        assert (near == drawn).mean() <= bound + 0.02
    assert bound < 0.2


def test_nothing_asked_or_nothing_to_say(bench):
    dp = [{"name": "dp_sgd", "noise_multiplier": 2.0}]
    cell = plan(defenses=dp).experiments()[0]
    off = dataclasses.replace(cell, risk=RiskSpec(probability=None))
    record = run_experiment(off, bench, pictures=False).record
    assert (record.bounds, record.verdict) == ((), "undecided")
    tight = records(bench, risk={"probability": 1e-300}, defenses=dp)[0]
    assert tight.verdict == "undecided"


def test_no_prior_to_be_had(bench):
    small = PlanContext(dataclasses.replace(plan().data, limit=100))  # 20 public images
    with pytest.raises(NotApplicable, match="64 public examples"):
        success.prior_of(small.public, "mixture", 32, True, 0.01)
    cell = plan(data=PLAN["data"] | {"limit": 100}, defenses=[{"name": "dp_sgd"}]).experiments()[0]
    record = run_experiment(cell, small, pictures=False).record
    assert (record.status, record.verdict) == ("ok", "undecided")
    assert "64 public examples" in record.bounds_note


def test_the_plan_s_words():
    spec = plan(risk={"probability": 0.05, "prior": "gallery"}).risk
    assert spec == RiskSpec(0.05, "gallery")
    assert plan().risk == RiskSpec()
    assert plan(risk={"probability": 0}).risk == RiskSpec(probability=None)
    for wrong in (
        {"probability": -0.1},
        {"probability": 1.5},
        {"probability": "often"},
        {"prior": "cats"},
        {"prior": "sphere"},
        {"components": 0},
        {"odds": 0.1},
    ):
        with pytest.raises(ValueError) as caught:
            plan(risk=wrong)
        assert next(iter(wrong)) in str(caught.value)


def test_what_is_asked_of_bounds_is_in_the_id():
    plain, same = plan().experiments()[0], plan(risk={"components": 32}).experiments()[0]
    assert plain.id == same.id
    assert plan(risk={"probability": 0.002}).experiments()[0].id != plain.id
    assert dataclasses.replace(plain, risk=RiskSpec(probability=None)).id != plain.id


KNOWN = {
    "data": {"source": "mnist5k", "limit": 4000},
    "models": [{"name": "lenet"}],
    "attacks": [{"name": "constant_image"}],
    "defenses": [{"name": "dp_sgd", "noise_multiplier": 0.5, "clip_norm": 5.0}],
    "risk": {"probability": 0.05, "prior": "none"},
    "threat": UNLABELED,
    "criterion": {"psnr": 26},
}


@pytest.fixture(scope="module")
def many():
    return PlanContext(plan(**KNOWN).data)


def test_an_honest_server_learns_less_from_the_model_it_sends(many):
    """The bound for any model misses the target, the one for this model meets it."""
    [record] = records(many, **KNOWN)
    general, own = record.bounds
    assert (general.basis, own.basis) == ("sample", "known model")
    assert own.probability < 0.05 < general.probability
    assert own.public_examples == len(many.public.labels)
    assert record.verdict == "protected from an honest server"
    assert own.epsilon == pytest.approx(float(conversions.epsilon(0.5, delta=1e-5)), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": [{"name": "lenet", "train_steps": 3}]}, "the weights may depend"),
        (
            {"defenses": [{"links": [{"name": "dp_sgd"}, {"name": "top_k"}]}]},
            None,  # what comes after the noise is a function of it
        ),
    ],
)
def test_what_closes_the_bound_for_one_model(many, changes, words):
    [record] = records(many, **KNOWN | changes)
    bases = [bound.basis for bound in record.bounds]
    assert ("known model" in bases) == (words is None)
    assert words is None or words in record.bounds_note


def test_a_malicious_server_has_no_bound_for_one_model(many):
    threat = UNLABELED | {"server": "malicious"}
    [record] = records(many, **KNOWN | {"threat": threat})
    assert [bound.basis for bound in record.bounds] == ["sample"]
    assert record.verdict == "undecided"


def test_what_a_malicious_server_attains_is_recoverable_in_principle(many):
    """At 20 dB and little noise its codebook is known to succeed, though no attack was planted."""
    threat = UNLABELED | {"server": "malicious"}
    defenses = [{"name": "dp_sgd", "noise_multiplier": [0.03, 100.0]}]
    changes = {"threat": threat, "defenses": defenses, "criterion": {"psnr": 20}}
    little, much = records(many, **KNOWN | changes)
    assert little.attained.attack == "linear estimator"
    assert little.attained.success > 0.5 > little.attained.baseline[1]
    assert little.verdict == "recoverable in principle"
    assert much.attained.success < 0.05
    assert much.verdict in ("undecided", "protected from strangers")


def test_what_a_guess_matches_is_guessable(many):
    changes = {"criterion": {"psnr": 18}, "risk": {"probability": 0.001, "prior": "none"}}
    [record] = records(many, **KNOWN | changes)
    assert record.attained.baseline[0] > 0.001
    assert record.attained.attack == "guess without an update"
    assert record.verdict == "undecided (guessable)"


def test_a_batch_has_as_many_guesses_as_examples(many):
    """At 20 dB one guess is not enough to be guessable, and one for each of 32 examples is."""
    settings = {"risk": {"probability": 0.01, "prior": "none"}, "criterion": {"psnr": 20}}
    one, batch = (records(many, **KNOWN | settings | {"batch_sizes": [n]})[0] for n in (1, 32))
    assert (one.attained.guessable, batch.attained.guessable) == (False, True)
    assert batch.attained.attack == "guess without an update"
    assert batch.attained.baseline[0] > 2 * one.attained.baseline[0]
    assert batch.verdict == "undecided (guessable)"


def test_who_holds_the_private_examples_has_an_exact_statement_about_them(many):
    """Between the profile over them and the limit for new ones; off by default."""
    noise = [{"name": "dp_sgd", "noise_multiplier": 0.62}]
    threat = UNLABELED | {"server": "malicious"}
    risk = {"probability": 0.05, "prior": "none", "these": True}
    changes = {"defenses": noise, "risk": risk, "threat": threat, "criterion": {"psnr": 30}}
    [record] = records(many, **KNOWN | changes)
    general, own = record.bounds
    assert (general.basis, own.basis) == ("sample", "examples")
    rows = many.private.inputs.flatten(1).double().numpy()
    known = counting.TheseExamples(rows).success_bound(0.62, record.criterion.within**2)[0][0]
    assert own.probability == pytest.approx(known, rel=1e-6)
    assert own.probability < 0.05 < general.probability
    assert record.verdict == "protected (these examples)"
    assert "keep it local" in own.assumptions[-1]
