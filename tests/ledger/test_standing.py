"""What several mechanisms add up to, against closed forms and an attack that is counted."""

import math

import msgspec
import numpy as np
import pytest
from scipy import optimize, stats

from leakbound.ledger import Budget, standings
from leakbound.risk.deployment import parse, state

RECORD = {"examples_per_client": 100}
EXAMPLES = {
    "clip": {"norm": 1.0, "kind": "example", "at": "client"},
    "noise": {"multiplier": 1.0, "at": "optimizer", "seeded": False},
    "local": {"steps": 4, "batch": 10, "examples": 100, "sampler": "poisson", "coupled": False},
}


def _epsilon(mu, delta):
    """Of mu-Gaussian differential privacy (Dong et al. 2022, corollary 2.13)."""

    def excess(epsilon):
        first = stats.norm.cdf(-epsilon / mu + mu / 2)
        return first - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2) - delta

    return optimize.brentq(excess, 0, 200)


def _of(rows, unit="client", audience="server"):
    (row,) = [row for row in rows if (row.unit, row.audience) == (unit, audience)]
    return row


def test_twenty_rounds_of_mediswarm_cost_what_was_found(facts):
    """Noise 2.4, 20 rounds: a client 9.17, one of its examples 22.2 (MediSwarm, issue 593)."""
    rows = standings([(facts(), 20)])
    assert _of(rows).epsilon == pytest.approx(9.17, abs=0.005)
    assert _of(rows, "example").epsilon == pytest.approx(22.2, abs=0.05)


def test_gaussian_mechanisms_add_their_squares(facts):
    rows = standings([(facts(2.0), 9), (facts(0.5), 4)])
    mu = math.sqrt(9 / 2.0**2 + 4 / 0.5**2)
    assert _of(rows).mu == pytest.approx(mu)
    assert _of(rows).epsilon == pytest.approx(_epsilon(mu, 1e-5), rel=1e-6)
    # The total variation of two normal laws that are mu apart.
    assert _of(rows).gain == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, rel=1e-3)
    assert _of(rows).success == pytest.approx(stats.norm.cdf(stats.norm.ppf(1e-3) + mu), rel=1e-6)
    assert _of(rows).rounds == 13


def test_one_mechanism_costs_what_its_deployment_does(facts):
    deployment = facts(1.0, **EXAMPLES)
    alone = _of(standings([(deployment, 6)]), "example")
    (stated,) = (
        row
        for row in state(msgspec.structs.replace(deployment, rounds=6))
        if (row.audience, row.unit) == ("server", "example")
    )
    assert alone.epsilon == stated.epsilon
    cheap = _of(standings([(deployment, 6), (facts(1e6), 1)]), "example")
    # A mechanism of hardly any cost hardly changes it, but takes half of delta.
    assert alone.success <= cheap.success <= 1.001 * alone.success
    assert alone.epsilon < cheap.epsilon < 1.2 * alone.epsilon


def test_no_attack_on_mixed_rounds_exceeds_the_bound(facts):
    """The best attack on one of two gradients that are 2 C apart, counted on 200,000 trainings."""
    rate, noise, plain, trials = 0.5, 0.7, 1.1, 200_000
    local = {"steps": 3, "rate": rate, "batch": 5, "examples": 10, "sampler": "poisson"}
    inside = {
        "clip": {"norm": 1.0, "kind": "example", "at": "client"},
        "noise": {"multiplier": noise, "at": "optimizer", "seeded": False},
        "local": local | {"coupled": False},
    }
    row = _of(standings([(facts(**inside), 1), (facts(plain), 2)], prior=0.5), "example")
    rng = np.random.default_rng(0)
    sign = rng.choice([-1.0, 1.0], trials)
    taken = rng.random((3, trials)) < rate
    seen = sign * taken + noise * rng.standard_normal((3, trials))
    full = sign + plain * rng.standard_normal((2, trials))
    # The attacker sees who takes part, so the log likelihood ratio is a weighted sum.
    evidence = (seen * taken).sum(0) / noise**2 + full.sum(0) / plain**2
    hits = (np.sign(evidence) == sign).mean()
    assert hits > 0.8
    assert hits - 4 * math.sqrt(0.25 / trials) <= row.success < 1


PARTICIPATIONS = (
    {"law": "poisson", "rate": 0.1, "hidden": True},
    {"law": "fixed-size", "cohort": 2, "population": 100, "hidden": True},
    {"law": "server-picks", "min_separation": 10},
    {"law": "cyclic", "bins": 10, "rate": 0.1},
    {"law": "shuffled", "bins": 10},
    {"law": "balls-in-bins", "bins": 10, "hidden": True},
)


@pytest.mark.parametrize("law", PARTICIPATIONS, ids=lambda law: law["law"])
@pytest.mark.parametrize("at", ["client", "server"])
def test_a_round_that_was_paid_for_counts_in_full(facts, law, at):
    """A node knows that it took part: the chance that it did not is in the past."""
    clip = {"norm": 1.0, "kind": "l2", "at": "client"}
    more = {"at": at, "on": "sum", "multiplier": 2.0, "seeded": False}
    rows = standings([(facts(clip=clip, noise=more, participation=law, weights="uniform"), 16)])
    assert _of(rows, audience="clients").mu == pytest.approx(math.sqrt(16) / 2.0)


@pytest.mark.parametrize("correlation", ["tree", "root", "band:4", "bisr:4"])
@pytest.mark.parametrize("at", ["client", "server"])
def test_correlated_noise_has_no_bound(facts, correlation, at):
    """One of 64 rounds of a tree adds .49 for an attacker who sees the later ones, not .20."""
    noise = {"at": at, "on": "sum", "multiplier": 2.0, "seeded": False}
    given = facts(noise=noise, weights="uniform", correlation=correlation)
    row = _of(standings([(given, 1)]), audience="clients")
    assert (row.mu, row.epsilon, row.gain, row.success) == (None, None, 1.0, 1.0)
    assert Budget(max_gain=0.99, audience="clients").exceeded([row])
    # With it, no sum of mechanisms has one.
    both = _of(standings([(facts(2.0), 1), (given, 1)]), audience="clients")
    assert both.epsilon is None


def test_a_node_speaks_of_its_own_examples_of_a_person(facts):
    """At how many other sites a person's examples lie, and what these paid, it does not know."""
    one, many = (
        _of(
            standings([(facts(record=RECORD | {"people": 3, "sites": sites}), 2)]),
            "person",
        )
        for sites in (1, 5)
    )
    assert one == many


def test_a_mechanism_without_a_bound_leaves_none(facts):
    unstated = facts(participation={})
    exact = facts(noise={"at": "none"})
    assert _of(standings([(exact, 1)])).epsilon is None
    both = _of(standings([(facts(), 5), (exact, 1)]))
    assert (both.epsilon, both.gain, both.success) == (None, 1.0, 1.0)
    assert "participation.law" in _of(standings([(facts(), 1), (unstated, 1)])).missing


def test_a_unit_that_one_mechanism_leaves_out_has_no_bound(facts):
    people = facts(record=RECORD | {"people": 3, "sites": 1})
    assert _of(standings([(people, 2)]), "person").epsilon is not None
    assert _of(standings([(people, 2), (facts(), 1)]), "person").epsilon is None


def test_a_budget_names_each_limit(facts):
    rows = standings([(facts(), 20)])
    assert Budget(max_epsilon=9.2, max_gain=0.7, max_probability=0.2).exceeded(rows) == ()
    found = Budget(max_epsilon=9.0, max_gain=0.6, audience="server").exceeded(rows)
    assert found == (
        "server: epsilon would be 9.166, above 9",
        "server: the gain would be 0.6485, above 0.6",
    )
    assert Budget(max_epsilon=9.0, unit="person").exceeded(rows)
    without = standings([(facts(noise={"at": "none"}), 1)])
    assert "has no bound" in Budget(max_epsilon=9.0).exceeded(without)[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give one of them"),
        ({"max_epsilon": -1.0}, "max_epsilon"),
        ({"max_gain": 1.5}, "max_gain"),
        ({"max_gain": 0.5, "unit": "hospital"}, "unit"),
        ({"max_gain": 0.5, "audience": "all"}, "audience"),
        ({"max_gain": 0.5, "on_excess": "stop"}, "on_excess"),
        ({"max_gain": 0.5, "delta": 0.0}, "delta"),
    ],
)
def test_budgets_that_say_nothing_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Budget(**given)


def _drawn(rng):
    """The tables of a random deployment; some contradict themselves."""

    def one(*options):
        return options[rng.integers(len(options))]

    at = one("client", "share", "server", "optimizer")
    clip = {"norm": one(0.5, 1.0, 8.0), "kind": "example" if at == "optimizer" else "l2"}
    cohort = int(rng.integers(2, 20))
    return {
        "clip": clip | {"at": one("client", "client", "server")},
        "noise": {
            "multiplier": one(0.5, 1.0, 3.0),
            "at": at,
            "on": one("sum", "mean"),
            "seeded": False,
        },
        "weights": one("uniform", "examples"),
        "max_weight": one(None, 0.5),
        "participation": {
            "law": one("all", "server-picks", "fixed-size", "poisson", "shuffled"),
            "cohort": cohort,
            "population": 5 * cohort,
            "replies": one(None, cohort - 1),
            "hidden": one(None, True),
        },
        "secure_aggregation": one(None, {"on": True, "kind": "secagg", "colluding": 1}),
        "local": {
            "steps": one(1, 3),
            "batch": 10,
            "examples": 100,
            "sampler": one("poisson", "shuffled", None),
            "normalizer": one("expected", "realized"),
            "coupled": one(False, False, None),
        },
        "sends": one(None, []),
        "record": RECORD | one({}, {"people": 3, "sites": 1}),  # at this node alone
        "correlation": "none",
    }


def _without_none(table):
    if not isinstance(table, dict):
        return table
    return {key: _without_none(value) for key, value in table.items() if value is not None}


def test_no_random_deployment_is_told_less_than_its_rounds_in_full():
    """Against `bound --deployment` for the same rounds; and no further round lowers a number."""
    rng = np.random.default_rng(7)
    compared = 0
    for _ in range(60):
        try:
            given = parse(_without_none(_drawn(rng)))
        except ValueError:
            continue
        few, more = (standings([(given, rounds)]) for rounds in (2, 5))
        for law in ("all", given.participation.law):
            taken = msgspec.structs.replace(given.participation, law=law)
            try:
                whole = msgspec.structs.replace(given, rounds=5, participation=taken)
            except ValueError:
                continue
            for row in state(whole):
                own = _of(more, row.unit, row.audience)
                assert own.epsilon is None or own.epsilon >= 0.999999 * row.epsilon
                assert own.success >= 0.999999 * row.rises[0][1]
                compared += own.epsilon is not None
        for before, after in zip(few, more, strict=True):
            assert after.gain >= before.gain
            assert after.success >= before.success
            assert after.epsilon is None or after.epsilon >= before.epsilon
    assert compared > 100
