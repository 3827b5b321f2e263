"""No adversary on public data is above what is stated, on examples that it was not fitted to.

The fast part attacks digits and a table at two thresholds; the slow one is the whole matrix, the
page docs/results/evidence-of-truth.json, and audits through the real pipeline.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats

from leakbound import audit, registry
from leakbound.bounds import identification

from . import domains, matrix, table
from .adversaries import ADVERSARIES, Sample
from .matrix import LEAST, Statement

NAMES = [adversary.name for adversary in ADVERSARIES]
NOISE = {("digits", False): 0.3}
"""Else 1: less noise leaves statements on the table, and on digits with labels, near 1."""
DOMAINS = {"digits": domains.mnist, "table": lambda: domains.table("breast_cancer")}


def stated(domain, labeled, psnr, noise):
    value = float(domain.stated[labeled].success_bound(noise, matrix.eta_of(psnr))[0][0])
    return Statement(domain, labeled, psnr, noise, value)


@pytest.mark.parametrize("labeled", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("name", DOMAINS)
def test_no_adversary_is_above_a_statement(name, labeled):
    domain = DOMAINS[name]()
    for psnr in (20.0, 25.5):
        one = stated(domain, labeled, psnr, NOISE.get((name, labeled), 1.0))
        assert one.value < matrix.OPEN
        pairs = matrix.attack(one)
        assert [pair.adversary for pair in pairs] == NAMES
        assert [pair for pair in pairs if pair.beaten] == []
        assert min(pair.n for pair in pairs) == domains.HELD


@pytest.mark.parametrize("labeled", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("name", DOMAINS)
def test_no_mean_error_is_below_a_bound(name, labeled):
    domain = DOMAINS[name]()
    one = stated(domain, labeled, 20.0, NOISE.get((name, labeled), 1.0))
    bound, least, who = matrix.mean_errors(one)
    assert bound <= least, who


@pytest.mark.parametrize("gamma", [0.05, 0.02])
@pytest.mark.parametrize("psnr", [25.5, 32.0])
def test_no_adversary_is_above_what_was_calibrated(psnr, gamma):
    """The least noise for a target, for DP-SGD as `calibrate` states it."""
    one = matrix.calibrated(domains.mnist(), False, psnr, gamma)
    quick = [adversary for adversary in ADVERSARIES if adversary.name != "denoiser"]
    assert [pair for pair in matrix.attack(one, quick) if pair.beaten] == []


def test_a_target_that_the_sample_does_not_support_stays_closed():
    assert matrix.calibrated(domains.mnist(), False, 25.5, 0.001) is None


@pytest.mark.parametrize("psnr", [12.0, 15.0, 18.0])
def test_class_means_are_not_above_the_count_by_class(psnr):
    one = stated(domains.mnist(), True, psnr, 100.0)
    assert not any(pair.beaten for pair in matrix.attack(one, matrix.without_update()))


# --- the suite has power


def reached(domain, labeled, psnr, noise, *names):
    one = Statement(domain, labeled, psnr, noise, 0.5)
    chosen = [adversary for adversary in ADVERSARIES if adversary.name in names]
    assert len(chosen) == len(names)
    return [pair.hits / pair.n for pair in matrix.attack(one, chosen)]


def test_adversaries_are_real():
    """So that no test above passes for attacks that fail."""
    digits = domains.mnist()
    assert reached(digits, False, 20.0, 0.3, "codebook, radius x1")[0] > 0.02
    assert reached(digits, False, 20.0, 0.04, "linear (LMMSE)")[0] > 0.14
    assert (
        min(reached(digits, False, 18.0, 0.1, "gallery, most probable", "nearest example")) > 0.02
    )
    assert reached(digits, False, 18.0, 0.04, "denoiser")[0] > 0.1
    assert reached(digits, True, 12.0, 1.0, "mean")[0] > 0.1
    rows = domains.table("breast_cancer")
    assert min(reached(rows, False, 20.0, 1.0, "ridge", "gallery, ball", "densest point")) > 0.4


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0])
def test_what_is_nearly_attained_fails_if_it_is_lowered(noise):
    """Two digits, each as likely: opposite answers attain F(1/2), which no attacker exceeds."""
    one = stated(domains.two_digits(), False, 25.5, noise)
    (pair,) = matrix.attack(one, [ADVERSARIES[NAMES.index("antipodal codebook")]])
    true = float(identification.gaussian(noise, log_kappa=np.log(0.5)))
    assert pair.hits / pair.n == pytest.approx(true, abs=4 * np.sqrt(true * (1 - true) / pair.n))
    assert not pair.beaten
    assert matrix.Pair(replace(one, value=0.9 * one.value), "", pair.hits, pair.n).beaten
    assert matrix.Pair(replace(one, value=one.value / 2), "", pair.hits, pair.n).beaten


def test_codebooks_attain_their_law():
    """Ten examples far apart: a simplex of ten answers, and ten orthogonal ones."""
    rows = np.repeat(10 * np.eye(10), 100, axis=0)
    public = Sample(np.random.default_rng(0).permutation(rows))
    private = Sample(np.repeat(10 * np.eye(10), 1000, axis=0))
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    for name, norm in (("codebook, radius x1", 1.0), ("simplex codebook", np.sqrt(10 / 9))):
        source = np.random.default_rng(1)
        fitted = ADVERSARIES[NAMES.index(name)].fit(public, 0.7, 0.1, source)
        found = (fitted.answers(private, source) == private.rows).all(1).mean()
        law = weights @ special.ndtr(nodes + norm / 0.7) ** 9 / weights.sum()
        assert found == pytest.approx(law, abs=0.02)
        assert found > 0.8 * identification.gaussian(0.7, log_kappa=np.log(0.1))


# --- the whole matrix


@pytest.mark.slow
def test_the_whole_matrix():
    found = table.run()
    assert found.beaten == []
    assert found.means_beaten == []
    assert len(found.pairs) >= 3000
    assert min(pair.n for pair in found.pairs) >= 4000


PLANTED = ["codebook", "fishing", "linear_trap", "loki", "robbing_the_fed", "trap_weights"]
PLANTED += ["linear_inversion"]
OTHERS = [
    "candidate_likelihood",
    "cocktail_party_images",
    "constant_image",
    "dlg",
    "fed_avg_matching",
    "gauss_newton",
    "gias",
    "grad_inversion",
    "gradient_matching",
    "idlg",
    "inverting_gradients",
    "inverting_gradients_large_steps",
    "law_evolution",
    "learned_prior",
    "mean_image",
    "published_inverting_gradients",
    "sparse_gradient_inversion",
    "sparse_gradient_inversion_paper",
    "sparse_recovery",
    "strong_matching",
]
"""All built-in attacks but the two that read noise which depends on the batch."""
SHORT = {"steps": 40, "restarts": 1, "training": 200, "attack": "linear_inversion"}


def planned(names, seeds, server):
    """An audit behind DP-SGD; iterations are cut short, as noise decides, not they."""
    known = registry.entries("attack")
    takes = {name: {p.name for p in known[name].parameters} for name in names}
    attacks = [
        {"name": name, **{key: SHORT[key] for key in sorted(SHORT.keys() & takes[name])}}
        for name in names
    ]
    return audit.parse(
        {
            "seeds": list(range(seeds)),
            "data": {"source": "mnist5k"},
            "models": [{"name": "mlp", "hidden": [16]}],
            "attacks": attacks,
            "defenses": [{"name": "dp_sgd", "noise_multiplier": [0.1, 0.3, 1.0, 5.0]}],
            "threat": {"server": server},
            "error_bound": {"kind": "none"},
            "risk": {"probability": 0.05, "prior": "none"},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "seeds", "server"),
    [(PLANTED, 30, "malicious"), (OTHERS, 3, "malicious"), (OTHERS, 3, "honest")],
    ids=["planted", "malicious", "honest"],
)
def test_no_attack_of_an_audit_is_above_what_its_record_states(names, seeds, server):
    """Every attack through the real pipeline: models sent, gradients clipped, noise added."""
    tried, reached, stated = Counter(), Counter(), Counter()
    for result in audit.run(planned(names, seeds, server), pictures=False):
        record = result.record
        assert record.status == "ok", (record.attack.name, record.problem)
        key = record.attack.name, record.defense.parameters["noise_multiplier"]
        tried[key] += 1
        reached[key] += record.scores[0] >= 20.0
        # Honest servers have a bound of their own; models and with them bounds differ by seed.
        stated[key] += min(
            bound.probability
            for bound in record.bounds
            if bound.model_free and bound.probability is not None
        )
    assert {name for name, _ in tried} == set(names)
    for key, count in reached.items():
        if count:
            least = stats.beta.ppf(LEAST, count, tried[key] - count + 1)
            assert least <= stated[key] / tried[key], key
    if names is PLANTED:
        assert reached["linear_trap", 0.1] + reached["codebook", 0.1] > 0
