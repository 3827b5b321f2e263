"""Deployment files that leave a key out: adversaries of the worst training that the file allows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from leakbound.risk.deployment import laws_of, parse

KAPPA, TRIALS = 1e-3, 20_000
CANDIDATES = round(1 / KAPPA)
WHOLE = {
    "rounds": 1,
    "correlation": "none",
    "sends": [],
    "weights": "uniform",
    "clip": {"norm": 1.0, "kind": "l2", "at": "client"},
    "noise": {"multiplier": 4.0, "at": "server", "on": "sum", "seeded": False},
    "participation": {"law": "all", "cohort": 10, "population": 10, "replies": 10},
    "secure_aggregation": {"on": False},
}


def stated(table, kappa=KAPPA):
    """The probability that the file states for one client against the others: the server of this
    file sees updates without noise.
    """
    laws = [law for law in laws_of(parse(table)) if law.unit == "client"]
    (found,) = [law for law in laws if law.audience == "clients"]
    return float(found.bound(np.log([kappa]))[0])


def identified(shift, trials=TRIALS):
    """How often the likeliest of the candidates is right: of equally likely orthogonal updates,
    each of them `shift` standard deviations of the noise long.
    """
    draw = np.random.default_rng(1)
    own = shift + draw.standard_normal(trials)
    # The largest of the others has a known law, so one draw stands for all of them.
    others = stats.norm.ppf(draw.random(trials) ** (1 / (CANDIDATES - 1)))
    return stats.binomtest(int((own > others).sum()), trials).proportion_ci(0.999).low


def without(*path):
    table = {key: dict(own) if isinstance(own, dict) else own for key, own in WHOLE.items()}
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return table


def test_the_whole_file_is_nearly_attained():
    assert 0.6 * stated(WHOLE) < identified(1 / 4) < stated(WHOLE)


def test_weights_of_a_sum_with_noise_at_the_server():
    """Noise on a sum in which a client weighs as many as its examples: 500 times the clip norm."""
    table = without("noise", "on") | {"weights": "examples"}
    table["record"] = {"examples_per_client": 500}
    assert identified(500 / 4) > 0.99
    assert stated(table) == 1.0


@pytest.mark.parametrize(
    ("path", "shift"),
    [
        (("weights",), np.inf),  # any weight
        (("noise", "on"), 1 / 4),  # on the sum; on the mean it would be ten times as much
        (("noise", "seeded"), np.inf),  # a seed that is known: no noise
        (("rounds",), np.inf),  # any number of rounds
        (("clip", "norm"), np.inf),
    ],
)
def test_no_missing_key_hides_the_worst_training(path, shift):
    assert identified(min(shift, 1e6)) <= stated(without(*path)) + 1e-12


def with_bit_noise(bit_noise):
    adaptive = {"bit_noise": bit_noise, "quantile": 0.5, "rate": 0.2, "faults": False}
    return WHOLE | {"clip": WHOLE["clip"] | {"kind": "adaptive", "adaptive": adaptive}}


def test_a_bit_of_an_adaptive_clip_norm():
    """The count of clipped clients has noise of its own; its bit is 0 or 1, equally likely."""
    told = stats.norm.cdf(1 / (2 * 2.5))
    assert told <= stated(with_bit_noise(2.5), 0.5)


@pytest.mark.parametrize("bit_noise", [1e-3, 0.4])
def test_a_bit_that_reveals_more_than_the_sum_is_refused(bit_noise):
    with pytest.raises(ValueError, match="the number of clipped clients alone reveals more"):
        stated(with_bit_noise(bit_noise), 0.5)
