"""Intruders on real tables, with the truth among their candidates, against the stated limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound import data
from leakbound.assess.attackers import with_known_parts
from leakbound.assess.criterion import Criterion, distance_of
from leakbound.bounds.counting import PublicSample
from leakbound.bounds.knowledge import largest_gain

TABLES = ("german", "breast_cancer", "diabetes", "iris", "wine")
COARSE = 4
"""Levels to which the numbers of a table are cut in half of the statements: groups are larger."""
TRIALS = 4000
PUBLIC = 600


def coarse(table: data.Dataset, draw: np.random.Generator) -> torch.Tensor:
    """The rows, with every number moved to the nearest of a few of its values, or as they are."""
    rows = table.inputs.clone()
    if draw.random() < 0.5:
        return rows
    for column, start, _ in table.domain.placed:
        if not column.categorical:
            values = rows[:, start]
            levels = values.quantile(torch.linspace(0, 1, COARSE))
            rows[:, start] = levels[(values[:, None] - levels).abs().argmin(1)]
    return rows


def statement(seed: int) -> tuple[float, float, int]:
    """The intruder's limit, that of a stranger, and the intruder's successes in TRIALS attacks."""
    draw = np.random.default_rng(seed)
    table = data.load(TABLES[seed % len(TABLES)])
    names = [column.name for column in table.domain.columns]
    # With many known columns every row is alone, and the limit says nothing: half know few.
    most = 4 if draw.random() < 0.5 else len(names)
    known = draw.choice(names, draw.integers(1, most), replace=False)
    noise = float(draw.choice([0.5, 1.0, 2.0, 5.0]))
    rows = coarse(table, draw)
    criterion = Criterion.of(table.domain, share=0.9, known=",".join(known))
    parts = criterion.known
    assert parts is not None
    # The table is the whole population; public rows are drawn from it.
    flat = rows.double().numpy()
    public = flat[draw.integers(0, len(flat), PUBLIC)]
    whole = Criterion.of(table.domain, share=0.9)
    stranger = PublicSample(public, distance=distance_of(table.domain))
    intruder = with_known_parts(stranger, parts)
    limit = float(intruder.success_bound(noise, criterion.level)[0][0])
    of_stranger = float(stranger.success_bound(noise, whole.level)[0][0])
    hits = attacked(parts, rows, criterion, noise, draw)
    return limit, of_stranger, hits


def attacked(parts, rows, criterion, noise, draw) -> int:
    """Matches of the Bayes attacker whose candidates are all rows with the known values.

    Every candidate has a gradient of its own, of the full norm and orthogonal to the others: the
    true one is among them. It answers with the candidate whose ball has the largest posterior.
    """
    values = parts.values(rows).flatten(1).double().numpy()
    group = np.unique(values, axis=0, return_inverse=True)[1].reshape(-1)
    rest = parts.unknown(rows)
    hits = 0
    victims = draw.integers(0, len(rows), TRIALS)
    for one in np.unique(group[victims]):
        members = np.flatnonzero(group == one)
        some = rest[torch.from_numpy(members)]
        near = (criterion.domain.distances(some, some) <= criterion.within).numpy()
        true = np.searchsorted(members, victims[group[victims] == one])
        seen = noise * draw.standard_normal((len(true), len(members)))
        seen[np.arange(len(true)), true] += 1
        logs = seen / noise**2
        posterior = np.exp(logs - logs.max(1, keepdims=True))
        answer = (posterior @ near).argmax(1)
        hits += int(near[answer, true].sum())
    return hits


def beaten(seeds: range) -> tuple[int, int, int]:
    """How many statements an attack exceeds for certain, how many limits of strangers, and how many
    limits say something.
    """
    of_intruder = of_stranger = informative = 0
    for seed in seeds:
        limit, stranger, hits = statement(seed)
        least = stats.beta.ppf(1e-4, hits, TRIALS - hits + 1) if hits else 0.0
        of_intruder += bool(least > limit)
        of_stranger += bool(least > stranger)
        informative += limit < 0.9
    return of_intruder, of_stranger, informative


def test_limits_of_intruders_hold_and_those_of_strangers_do_not():
    of_intruder, of_stranger, informative = beaten(range(10))
    assert of_intruder == 0
    # Knowing columns beats a limit that ignores them: a verdict must name its attacker.
    assert of_stranger >= 3
    assert informative >= 2


@pytest.mark.slow
def test_300_statements_on_real_tables():
    of_intruder, of_stranger, informative = beaten(range(300))
    # Each holds with 95 % confidence over the draw of public rows.
    assert of_intruder <= stats.binom.ppf(0.999, 300, 0.05)
    assert of_stranger >= 60
    assert informative >= 60


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0, 5.0])
def test_the_gain_holds_for_any_prior(noise):
    """Two candidates at distance 2 / noise: the largest gain is the total variation."""
    draw = np.random.default_rng(int(10 * noise))
    gain, _ = largest_gain(noise)
    for prior in (0.1, 0.3, 0.5, 0.8):
        own = draw.random(200_000) < prior
        # Opposite gradients would be two units apart; one against none is what a bound allows.
        seen = own + noise * draw.standard_normal(len(own))
        answer = (seen - 0.5) / noise**2 + np.log(prior / (1 - prior)) > 0
        success = float((answer == own).mean())
        assert success - max(prior, 1 - prior) <= gain + 0.005
