"""Statements: against the corridor, dp-accounting, a Gaussian's closed form, and draws."""

import json
import math
import warnings

import numpy as np
import pytest
from scipy import optimize, special, stats

from leakbound.bounds import identification, record_priors
from leakbound.bounds import mixed_steps as mixed
from leakbound.bounds.conversions import log_delta
from leakbound.bounds.counting import PublicSample
from leakbound.bounds.from_scratch import exact
from leakbound.bounds.knowledge import informed
from leakbound.opacus import risk, statement
from leakbound.risk import TrainingSetting, corridor
from leakbound.risk.corridor import epsilon

from ..bounds.prior_attacks import KnownNorm

ASK = {"dim": 16, "norm": 1.0, "eta": 0.5 / 16}


class Sphere(KnownNorm):
    """A uniform direction, passed off as knowledge: its closed forms test the numbers."""

    basis = "fitted model"


SPHERE = Sphere(16)
MIXED = [(1.0, 0.01, 300), (1.5, 0.02, 500), (0.8, 0.005, 200)]
SIDES = ("hidden", "visible")


@pytest.mark.parametrize("participation", SIDES)
def test_one_setting_is_the_corridor(participation):
    setting = TrainingSetting(0.7, 16, 1.0, 400, 0.02, participation)
    edges = corridor(setting, [0.5 / 16])
    history = [(0.7, 0.02, 150), (0.7, 0.02, 250)]  # Opacus splits after a load or a change
    found = risk(history, participation=participation, prior=SPHERE, **ASK)
    assert found.history == ((0.7, 0.02, 400),)
    assert (found.attained, found.bound) == (float(edges.attained[0]), float(edges.bound[0]))
    assert found.epsilon == epsilon(setting, 1e-5)


@pytest.mark.parametrize("participation", SIDES)
@pytest.mark.parametrize("rate", [0.02, 1.0], ids=["sampled", "full"])
def test_settings_that_differ_by_nothing_give_the_same_risk(participation, rate):
    """The mixed machinery on two halves of one setting, from outside of it."""
    setting = TrainingSetting(0.9, 16, 1.0, 60, rate, participation)
    edges = corridor(setting, [0.5 / 16])
    halves = [(0.9, rate, 20), (0.9 * (1 + 1e-13), rate, 40)]
    found = risk(halves, participation=participation, prior=SPHERE, **ASK)
    assert found.bound == pytest.approx(float(edges.bound[0]), rel=3e-3)
    assert found.attained == pytest.approx(float(edges.attained[0]), rel=3e-3)
    assert found.epsilon == pytest.approx(epsilon(setting, 1e-5), rel=3e-3)
    assert found.bound >= float(edges.bound[0]) * (1 - 1e-9)
    assert found.attained <= float(edges.attained[0]) * (1 + 1e-9)


def test_full_batches_of_two_noises_are_one_gaussian():
    history = [(2.0, 1.0, 3), (3.0, 1.0, 5)]
    mu = math.sqrt(3 / 4 + 5 / 9)
    blind = float(identification.kappa_sphere(**ASK))
    wanted = special.ndtr(special.ndtri(blind) + mu)
    for participation in SIDES:
        found = risk(history, participation=participation, prior=SPHERE, **ASK)
        assert found.bound == pytest.approx(wanted, rel=1e-3)
        assert found.bound >= wanted * (1 - 1e-12)
        assert found.attained == pytest.approx(float(exact(1 / mu, **ASK)), rel=1e-2)
        level = optimize.brentq(lambda e: float(log_delta(mu, e)) - math.log(1e-5), 0, 50)
        assert found.epsilon == pytest.approx(level, rel=1e-3)
        assert found.epsilon >= level


@pytest.fixture(scope="module")
def accounted():
    """The same steps composed by dp-accounting's privacy loss distributions."""
    pld = pytest.importorskip("dp_accounting").pld.privacy_loss_distribution
    total = None
    for noise, rate, steps in MIXED:
        one = pld.from_gaussian_mechanism(
            noise, sampling_prob=rate, value_discretization_interval=1e-3, use_connect_dots=True
        ).self_compose(steps)
        total = one if total is None else total.compose(one)
    return total


def test_hidden_steps_of_several_settings_are_those_of_dp_accounting(accounted):
    wanted = accounted.get_epsilon_for_delta(1e-5)
    found = mixed.epsilon(MIXED, 1e-5, visible=False)
    assert found == pytest.approx(wanted, rel=5e-3)
    assert found > 1.02 * mixed.epsilon(MIXED[:2], 1e-5, visible=False)  # each kind counts
    for kappa in (1e-6, 1e-3, 0.1):
        levels = np.linspace(-3, 14, 3000)
        deltas = np.array(accounted.get_delta_for_epsilon(list(levels[levels >= 0])))
        envelope = float((np.exp(levels[levels >= 0]) * kappa + deltas).min())
        upper = mixed.hidden_upper(MIXED, math.log(kappa))
        # theirs is the worse of both directions and looks at epsilon >= 0 alone
        assert upper <= envelope * (1 + 1e-3)
        assert upper > 0.9 * envelope or kappa == 0.1


def _draws(count, generator):
    """Losses under P (hidden record) of the mixed steps, simulated step by step."""
    total = np.zeros(count)
    for noise, rate, steps in MIXED:
        for _ in range(steps):
            held = generator.random(count) < rate
            y = generator.standard_normal(count) + held / noise
            total += np.log1p(rate * np.expm1(y / noise - 1 / (2 * noise**2)))
    return total


def test_the_hidden_edge_is_the_power_of_the_best_test():
    """Neyman and Pearson on draws: at level kappa the test's power is the edge, not below it."""
    losses = np.sort(_draws(60_000, np.random.default_rng(0)))
    for kappa in (1e-3, 0.03):
        # Q(loss > t) = E_P e^-L 1(L > t); the power is the share of draws beyond that t
        tail = np.cumsum(np.exp(-losses[::-1])) / len(losses)
        power = int(np.searchsorted(tail, kappa)) / len(losses)
        upper = mixed.hidden_upper(MIXED, math.log(kappa))
        spread = 5 * math.sqrt(upper / len(losses))
        assert power <= upper + spread
        assert power >= upper - spread  # and it is tight: no bound of a weaker reduction
        weaker = mixed.hidden_upper([(0.8, 0.02, 1000)], math.log(kappa))
        assert weaker > upper + spread


@pytest.mark.parametrize("participation", SIDES)
def test_the_lower_edge_is_attained_by_playing_the_attack(participation):
    """Records on a sphere, the trap's answers of every step, the attacker's weighted sum."""
    generator, n, dim, eta = np.random.default_rng(1), 40_000, 6, 0.5 / 6
    history = [(0.5, 0.05, 20), (1.0, 0.1, 40)]
    target = np.zeros(dim)
    target[0] = 1.0
    signal = np.zeros((n, dim))
    for noise, rate, steps in history:
        held = generator.random((n, steps)) < rate
        weight = 1 / noise**2 * (rate if participation == "hidden" else 1)
        share = held.sum(1) if participation == "visible" else np.full(n, steps)
        spread = weight * noise * np.sqrt(share)[:, None]
        signal += weight * held.sum(1)[:, None] * target
        signal += spread * generator.standard_normal((n, dim))
    blind = np.linalg.norm(signal, axis=1) == 0  # nothing seen: any direction
    signal[blind] = generator.standard_normal((int(blind.sum()), dim))
    e = dim * eta
    cosine = signal[:, 0] / np.linalg.norm(signal, axis=1)
    hits = float((cosine >= math.sqrt(1 - e)).mean())
    found = risk(
        history, dim=dim, norm=1.0, eta=eta, participation=participation, prior=Sphere(dim)
    )
    spread = 4.5 * math.sqrt(hits * (1 - hits) / n)
    assert hits - spread < found.attained < hits + spread
    assert found.attained < found.bound
    half = [(noise / 1.2, rate, steps) for noise, rate, steps in history]
    sharper = risk(half, dim=dim, norm=1.0, eta=eta, participation=participation)
    assert sharper.attained > hits + spread


@pytest.fixture
def without_gain(monkeypatch):
    """The gain asks for the bound at many prior successes: slow, and not looked at."""
    monkeypatch.setattr(statement, "largest_gain", lambda *given, **named: (math.nan, math.nan))


def test_merging_settings_only_adds_risk(without_gain, monkeypatch):
    monkeypatch.setattr(mixed, "epsilon", lambda *given, **named: math.nan)  # slow, not looked at
    noises = np.geomspace(0.8, 2.0, 20)
    history = [(float(s), 0.01 + 3e-5 * i, 15) for i, s in enumerate(noises)]
    few = mixed.merged(history)
    assert len(few) <= mixed.MOST
    assert sum(t for *_, t in few) == 300
    for kappa in (1e-4, 0.05):
        true = mixed.visible_upper(history, math.log(kappa))
        assert true <= mixed.visible_upper(few, math.log(kappa)) <= 1.3 * true
    ends = [mixed.hidden_upper(part, math.log(1e-3)) for part in ([(2.0, 0.01, 300)], few)]
    worst = mixed.hidden_upper([(0.8, 0.0106, 300)], math.log(1e-3))
    assert ends[0] < ends[1] < worst
    for participation in SIDES:
        found = risk(history, participation=participation, prior=SPHERE, **ASK)
        exact_sum = mixed.visible_lower if participation == "visible" else mixed.hidden_lower
        best = exact_sum(history, **ASK)
        assert 0.85 * best < found.attained <= best < found.bound
    assert found.steps == 300


def test_steps_without_noise_are_read_off():
    for participation in SIDES:
        found = risk(
            [(0.0, 0.1, 2), (1.0, 0.1, 10)], participation=participation, prior=SPHERE, **ASK
        )
        assert 0.19 < found.attained <= found.bound
        assert found.epsilon == math.inf
        assert found.plain()["epsilon"] is None
    alone = risk([(0.0, 1.0, 1)], prior=SPHERE, **ASK)
    assert (alone.attained, alone.bound) == (1.0, 1.0)


def test_before_the_first_step_there_is_a_guess_and_no_more():
    found = risk([], prior=SPHERE, **ASK)
    blind = float(identification.kappa_sphere(**ASK))
    assert found.bound == pytest.approx(blind)
    assert (found.attained, found.epsilon, found.steps) == (blind, 0.0, 0)
    assert "no step" in str(found)


def test_a_prior_moves_the_success_bound_alone(without_gain):
    images = np.random.default_rng(0).normal(0.2, 0.1, (80, 16)).clip(0, 1)
    prior = record_priors.GaussianImages.from_samples(images, components=4)
    plain, sharp = risk(MIXED, prior=SPHERE, **ASK), risk(MIXED, prior=prior, **ASK)
    assert sharp.bound > plain.bound
    assert sharp.attained == plain.attained
    assert prior.name in str(sharp)
    assert "uniform" not in sharp.prior
    with pytest.raises(ValueError, match="prior is of 16 values"):
        risk(MIXED, prior=prior, **{**ASK, "dim": 20})


@pytest.mark.parametrize("prior", [None, KnownNorm(16)])
@pytest.mark.parametrize("history", [[], MIXED, [(1.0, 1.0, 1)]])
def test_without_a_prior_that_knows_the_data_no_probability_is_stated(prior, history, without_gain):
    """A linear estimator beat 0.001 "at most" in 4 % of trials, under a uniform direction."""
    found = risk(history, prior=prior, **ASK)
    assert (found.bound, found.log_kappa) == (None, None)
    text = str(found)
    assert "nothing is called protected" in text
    assert "depends on what they guess without the training" in text
    assert [before for before, _ in found.rises] == [0.01, 0.001, 0.0001]
    for before, after in found.rises:
        assert f"{before:.2%} to at most {after:.3g}" in text
        if not history:
            assert after == pytest.approx(before)
        elif history is MIXED:
            assert after == mixed.hidden_upper(mixed.merged(MIXED), math.log(before))
        else:
            wanted = stats.norm.cdf(stats.norm.ppf(before) + 1)
            assert after == pytest.approx(wanted, rel=1e-6)


def test_what_a_person_and_a_program_read():
    found = risk([(0.6, 0.01, 1000)], dim=784, norm=9.2, psnr=20, experiment_only=True)
    text = str(found)
    assert text.startswith("EXPERIMENT ONLY")
    for part in ("1,000 steps", "20 dB PSNR or better", "Epsilon is", "delta 1e-05", "784 values"):
        assert part in text
    plain = json.loads(json.dumps(found.plain(), allow_nan=False))
    assert plain["bound"] == found.bound
    assert plain["words"] == text
    page = found._repr_html_()
    assert page.startswith("<p><strong>EXPERIMENT ONLY")
    assert "<script" not in page
    quiet = risk([(0.6, 0.01, 1000)], dim=784, norm=9.2, psnr=20)
    assert "EXPERIMENT" not in str(quiet) + quiet._repr_html_()


def test_psnr_and_range_are_an_eta(without_gain):
    a = risk(MIXED, dim=16, norm=1.0, psnr=15, input_range=2.0, prior=SPHERE)
    b = risk(MIXED, dim=16, norm=1.0, eta=4 / 10**1.5, prior=SPHERE)
    assert (a.eta, a.attained, a.bound) == pytest.approx((b.eta, b.attained, b.bound))


@pytest.mark.parametrize("kind", ["rdp", "prv", "gdp"])
def test_accountants_of_opacus_are_read(kind):
    from opacus.accountants import create_accountant

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GDP accounting")
        accountant = create_accountant(kind)
    for _ in range(30):
        accountant.step(noise_multiplier=1.0, sample_rate=0.05)
    if kind == "gdp":
        with pytest.warns(UserWarning, match="may be too low"):
            found = risk(accountant, **ASK)
        assert accountant.get_epsilon(1e-5) < found.epsilon
    else:
        found = risk(accountant, **ASK)
        assert accountant.get_epsilon(1e-5) == pytest.approx(found.epsilon, rel=0.3)
    assert found.history == ((1.0, 0.05, 30),)


@pytest.mark.parametrize(
    ("history", "word"),
    [
        ([(1.0, 0.1)], "noise multiplier, rate, steps"),
        ((1.0, 0.1, 5), r"history holds 1\.0; give a list of \(noise multiplier, rate, steps\)"),
        ([(-1.0, 0.1, 5)], "at least 0"),
        ([(math.nan, 0.1, 5)], "at least 0"),
        ([(1.0, 1.5, 5)], "accumulated"),
        ([(1.0, 0.1, 0)], "whole number"),
        ([(1.0, 0.1, 2.5)], "whole number"),
    ],
    ids=["short", "single", "negative", "nan", "rate", "none", "half"],
)
def test_a_history_that_is_none_is_refused(history, word):
    with pytest.raises(ValueError, match=word):
        risk(history, **ASK)


def test_one_goal_is_asked_for():
    with pytest.raises(ValueError, match="exactly one"):
        risk(MIXED, dim=16, norm=1.0)
    with pytest.raises(ValueError, match="exactly one"):
        risk(MIXED, psnr=20, **ASK)
    with pytest.raises(ValueError, match="delta"):
        risk(MIXED, delta=1.0, **ASK)


def test_sums_hold_the_law_of_weighted_sightings():
    parts, weights = [(1.0, 0.3, 4), (2.0, 0.5, 3)], [1.0, 0.25]
    law = {}
    for a in range(5):
        for b in range(4):
            goal = a + 0.25 * b
            chance = stats.binom.pmf(a, 4, 0.3) * stats.binom.pmf(b, 3, 0.5)
            law[goal] = law.get(goal, 0) + chance
    for up in (True, False):
        value, mass = mixed.sums(parts, weights, up=up)
        assert mass.sum() == pytest.approx(1.0, abs=1e-12)
        for goal in (0.0, 0.6, 1.6, 3.1):
            wanted = sum(chance for at, chance in law.items() if at <= goal)
            assert mass[value <= goal].sum() == pytest.approx(wanted, abs=1e-12)
        mean = sum(at * chance for at, chance in law.items())
        assert (value @ mass - mean) * (1 if up else -1) >= -1e-12
        assert value @ mass == pytest.approx(mean, rel=1e-3)


def test_light_steps_are_not_drowned_by_heavy_ones():
    """Nearly no noise in a few steps, much in many: given no heavy sighting, the light ones."""
    parts, kappa = [(0.01, 0.01, 100), (100.0, 0.5, 1000)], math.log(1e-3)
    light = mixed.visible_upper(parts[1:], kappa)
    wanted = 1 - 0.99**100 * (1 - light)
    assert mixed.visible_upper(parts, kappa) == pytest.approx(wanted, rel=1e-6)
    assert light < 0.003


def test_columns_of_a_table_are_refused():
    """A statement here is about mean squared errors; two columns are no error of 2."""
    from leakbound.risk.examples import Examples

    with pytest.raises(ValueError, match="columns that may differ"):
        risk([(1.0, 1.0, 1)], dim=61, norm=1.0, eta=2.0, prior=Examples.of("german").prior())


def test_an_intruder_is_named_and_anyones_gain_is_the_total_variation():
    rows = np.random.default_rng(0).integers(0, 3, (2000, 12)).astype(float)
    rows[:, 0] = np.arange(2000) % 2
    sample = PublicSample(rows)
    ask = {"norm": 1.0, "eta": 1e-4, "participation": "visible"}
    stranger = risk([(2.0, 1.0, 1)], dim=12, prior=sample, **ask)
    intruder = risk([(2.0, 1.0, 1)], dim=11, prior=informed(sample, [0], words="sex"), **ask)
    assert (stranger.known, intruder.known) == ("", "sex")
    assert stranger.bound < intruder.bound < 1
    assert "the rest of an example, of which they have sex," in str(intruder)
    assert "anyone, whatever they know" in str(stranger)
    assert stranger.gain == pytest.approx(2 * stats.norm.cdf(1 / 4) - 1, rel=1e-4)
    assert risk([], dim=12, **ask).gain == 0
    mixed_steps = risk([(2.0, 1.0, 1), (4.0, 1.0, 4)], dim=12, **ask)
    # One step at 2 and four at 4 are one with 1 / sqrt(1/4 + 4/16).
    assert mixed_steps.gain == pytest.approx(2 * stats.norm.cdf(math.sqrt(0.5) / 2) - 1, rel=1e-3)
