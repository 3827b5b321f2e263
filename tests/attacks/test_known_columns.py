"""Span decoding by who knows some columns of every row: in the span, and under noise."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import multivariate_normal
from torch import nn

from leakbound import data
from leakbound.attacks import SpanDecoding, TabLeak
from leakbound.attacks.base import SentRow
from leakbound.attacks.knowing import with_known
from leakbound.attacks.matching.rows import _aligned
from leakbound.attacks.table.decoding import Survivors, _searched, decode, rows_span
from leakbound.attacks.table.fit import Fit, _inverse
from leakbound.attacks.table.view import joint, view
from leakbound.client import gradient
from leakbound.core import (
    Batch,
    LocalPlan,
    NotApplicable,
    Observation,
    Reconstruction,
    Task,
    ThreatModel,
    Unit,
)
from leakbound.defenses import GaussianNoise, MagnitudePruning, NoDefense, Quantization
from leakbound.domains import Column, TableDomain
from leakbound.domains.known import KnownValues, known_parts
from leakbound.protocol import play
from leakbound.randomness import stream


def table(levels=(4, 3, 3, 2), numbers=2):
    named = [
        Column(f"c{k}", "categorical", levels=tuple("abcdefgh"[:n])) for k, n in enumerate(levels)
    ]
    return TableDomain((*named, *(Column(f"n{k}", "continuous") for k in range(numbers))))


def drawn(domain, count, seed):
    return domain.hard(torch.rand((count, *domain.shape), generator=stream(seed, "rows")))


def mlp(inputs, activation=nn.ReLU, seed=0, width=40):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, width), activation(), nn.Linear(width, 2))


def seen(domain, rows, known, defense=None, public=None, activation=nn.ReLU, **more) -> Observation:
    task = Task.of(mlp(domain.shape[0], activation), domain=domain, **more)
    batch = Batch(rows, torch.arange(len(rows)) % 2)
    threat = ThreatModel(known=known)
    sources = [stream(k, "defense") for k in range(2)]
    defense = defense or NoDefense()
    return play(task, [batch], defense, sources, threat=threat, auxiliary=public).observation


def attacked(observation):
    return SpanDecoding()(observation, stream(0, "attack"))


@pytest.mark.parametrize("known", ["c1", "n0", "c0,n1", "c0,c1,c2,c3", "c2,c3,n0,n1"])
def test_the_search_finds_those_of_all_rows_in_the_span_that_have_the_known_values(known):
    domain = table()
    parts = known_parts(domain, known)
    for seed in range(4):
        rows = drawn(domain, 5, seed)
        task = Task.of(mlp(domain.shape[0], seed=seed), domain=domain)
        own = view(task, domain)
        flat = gradient(task, rows, torch.arange(5) % 2)
        span = rows_span(joint(task, own.name, flat), 5, 0.0, 1e-6)
        row = SentRow(seen(domain, rows, ""), task, 0, 5)

        def values(seen_layer, span=span, row=row):
            chosen = decode(span, seen_layer.levels, 10_000)
            return Survivors.of(row, span, [(seen_layer, chosen, 0)]).rows

        every = values(own)
        for one in rows:
            given = own.given(one, parts.places)
            assert len(given.levels) + len(given.numbers) == len(own.levels) + len(own.numbers)
            off = (parts.values(every) - parts.values(one[None])).abs().amax(1)
            wanted = domain.rows(every[off < 1e-6].float())
            assert sorted(domain.rows(values(given).float())) == sorted(wanted)
            assert domain.rows(one[None])[0] in wanted


def test_a_known_number_tells_rows_from_their_mixture():
    domain = table((3, 3, 3, 3), numbers=1)
    levels = [(0, 0, 1, 2), (1, 0, 1, 2), (1, 1, 1, 2), (2, 0, 2, 1), (0, 2, 0, 0)]
    rows = torch.zeros(5, 13)
    for i, chosen in enumerate(levels):
        rows[i, [3 * k + at for k, at in enumerate(chosen)]] = 1
    rows[:, 12] = torch.tensor([0.3, 0.4, 0.6, 0.9, 0.1])
    # rows[0] - rows[1] + rows[2] is a row of the table, and no test can reject it.
    alike = {"activation": nn.Tanh, "plan": LocalPlan(3, 0.1, 2)}
    stranger = attacked(seen(domain, rows, "", **alike))
    assert stranger.problem is not None
    assert "mixtures" in stranger.problem
    knowing = attacked(seen(domain, rows, "n0", **alike))
    assert knowing.problem is None
    # In the order of the known values, which the search gives and no later step.
    assert torch.allclose(knowing.inputs, rows, atol=1e-5)


def test_known_numbers_fix_rows_of_numbers_alone():
    domain = table((), numbers=7)
    rows = drawn(domain, 4, 0)
    with pytest.raises(NotApplicable, match="rank 4"):
        attacked(seen(domain, rows, ""))
    answer = attacked(seen(domain, rows, "n0,n1,n4"))
    assert answer.problem is None
    assert torch.allclose(answer.inputs, rows, atol=1e-4)


def test_rows_with_the_same_known_values_share_a_group():
    domain = table((3, 3, 3, 3, 3, 3), numbers=1)
    rows = drawn(domain, 4, 5)
    rows[1:3, :3] = rows[0, :3]
    answer = attacked(seen(domain, rows, "c0"))
    assert answer.problem is None
    parts = known_parts(domain, "c0")
    assert torch.equal(parts.values(answer.inputs), parts.values(rows))
    assert sorted(domain.rows(answer.inputs)) == sorted(domain.rows(rows))


@pytest.fixture(scope="module")
def german():
    return data.load("german")


KNOWN = 10


def rights(german, defense, count, runs=4, columns=KNOWN):
    """The shares of right unknown columns of who knows the first ones, by search and without."""
    names = ",".join(column.name for column in german.domain.columns[:columns])
    parts = known_parts(german.domain, names)
    public = german.batch(torch.arange(300, 800))
    shares = torch.zeros(2, runs)
    for run in range(runs):
        rows = german.inputs[count * run : count * (run + 1)]
        observation = seen(german.domain, rows, names, defense, public)
        for k, known in enumerate((observation.known, None)):
            try:
                answer = attacked(replace(observation, known=known))
            except NotApplicable:
                continue
            whole = with_known(observation, answer).inputs
            if known is not None:
                assert torch.equal(whole, answer.inputs)
            score = parts.rest.score(parts.unknown(rows), parts.unknown(whole))
            shares[k, run] = score.mean()
    return shares.mean(1).tolist()


def test_known_columns_show_the_others_where_noise_hides_the_span(german):
    knowing, filled = rights(german, GaussianNoise(0.003), 4)
    assert knowing > 80
    assert filled < 60


def test_known_columns_show_the_others_where_entries_are_withheld(german):
    knowing, filled = rights(german, MagnitudePruning(0.5), 12)
    assert filled == 0  # it does not apply
    assert knowing > 80


@pytest.mark.parametrize("defense", [Quantization(8), GaussianNoise(0.0003)])
def test_who_knows_two_columns_does_no_worse_than_who_fills_them_in(german, defense):
    # Noise lets rows pass in the groups of other examples, and rejects some in their own.
    knowing, filled = rights(german, defense, 8, columns=2)
    assert filled > 70
    assert knowing >= filled


def fitted(observation, domain):
    """The fit of one client's rows, each with its own known parts."""
    task = observation.task
    count = observation.examples
    whole = observation.known.filled(torch.zeros(count, *domain.shape))
    views = [view(task, domain).given(one, observation.known.mask) for one in whole]
    members = torch.arange(count).split(1)
    return Fit.of(SentRow(observation, task, 0, count), views, members)


def test_the_cost_is_the_density_of_the_gradient_and_of_public_rows(german):
    names = ",".join(column.name for column in german.domain.columns[:KNOWN])
    rows = german.inputs[:3]
    public = german.batch(torch.arange(300, 800))
    observation = seen(german.domain, rows, names, GaussianNoise(0.01), public)
    task = observation.task
    own = view(task, german.domain)
    fit = fitted(observation, german.domain)
    variance = 0.01**2
    layer = joint(task, own.name, observation.update.rows[0]).numpy()
    scale = float((layer**2).mean()) - variance

    def density(some):
        inputs = torch.cat([some.double(), torch.ones(len(some), 1)], 1).numpy()
        covariance = scale * inputs.T @ inputs + variance * torch.eye(inputs.shape[1]).numpy()
        total = multivariate_normal(cov=covariance).logpdf(layer).sum()
        held = public.inputs.double()
        for column, start, stop in german.domain.placed[KNOWN:]:
            if column.categorical:
                shares = (held[:, start:stop].sum(0) + 1) / (len(held) + stop - start)
                total += float((some[:, start:stop].double() @ shares.log()).sum())
            else:
                middle = held[:, start].quantile(0.5)
                spread = held[:, start].quantile(0.75) - held[:, start].quantile(0.25)
                spread = spread / 1.349 if spread > 0 else held[:, start].std(correction=0)
                z = (some[:, start].double() - middle) / spread
                total -= float(z.square().sum()) / 2
        return total

    others = observation.known.filled(german.inputs[[40, 41, 42]])
    ours = fit.cost(others.double())[0] - fit.cost(rows.double())[0]
    assert ours == pytest.approx(density(rows) - density(others), rel=1e-5)
    assert fit.cost(fit.rows())[0] <= fit.cost(rows.double())[0] + 3


def test_where_all_columns_are_explained_nothing_is_fitted(german, monkeypatch):
    names = ",".join(column.name for column in german.domain.columns[:KNOWN])
    monkeypatch.setattr(Fit, "of", None)
    assert attacked(seen(german.domain, german.inputs[:4], names)).problem is None
    # Who knows nothing never gets a fit.
    attacked(seen(german.domain, german.inputs[:4], "", GaussianNoise(0.01)))


def test_rows_that_are_held_show_the_others(german):
    rows = german.inputs[:8].double()
    public = german.batch(torch.arange(300, 800))
    names = ",".join(column.name for column in german.domain.columns[:2])
    observation = seen(german.domain, rows.float(), names, GaussianNoise(0.0003), public)
    fit = fitted(observation, german.domain)
    held = torch.arange(8) != 4
    alone, shown = fit.rows(), fit.rows(rows, held)
    assert torch.equal(fit.rows(rows.flip(0), torch.zeros(8).bool()), alone)
    scores = [german.domain.score(rows, one) for one in (alone, shown)]
    assert scores[0][4] < 50
    assert scores[1].min() > 80


@pytest.mark.parametrize(
    ("unit", "at", "places"), [(Unit.COHORT, 0, [0, 1, 2, 3, 4]), (Unit.CLIENT, 1, [2, 3, 4])]
)
def test_known_values_follow_the_rows_of_an_update(unit, at, places):
    domain = table()
    parts = known_parts(domain, "c1")
    values = parts.values(drawn(domain, 5, 0))
    update = SimpleNamespace(unit=unit, examples=(2, 3))
    observation = SimpleNamespace(update=update, known=KnownValues(parts, values))
    row = SentRow(observation, None, at, len(places))
    assert torch.equal(row.known.values, values[places])


def test_equal_rows_leave_a_fit_that_is_finite(german):
    names = ",".join(column.name for column in german.domain.columns[:KNOWN])
    rows = german.inputs[[0, 0, 0, 1, 2, 3, 4, 5]]
    for defense in (NoDefense(), MagnitudePruning(0.5), MagnitudePruning(0.1)):
        fit = fitted(seen(german.domain, rows, names, defense), german.domain)
        assert fit.rows().isfinite().all()
        assert math.isfinite(fit.cost(rows.double())[0])
    # Rounding may lose a prior beside a much larger precision.
    assert _inverse(torch.full((1, 3, 3), 1e14, dtype=torch.float64)).isfinite().all()


def test_searches_of_mixed_rows_hold_known_columns():
    domain = table((4, 3, 3, 5), numbers=2)
    parts = known_parts(domain, "c0,c2,n0")
    attack = TabLeak(steps=40, restarts=2)
    rights = torch.zeros(2)
    for seed in range(4):
        rows = drawn(domain, 5, seed)
        observation = seen(domain, rows, "c0,c2,n0")
        answer = attack(observation, stream(seed, "attack"))
        assert torch.allclose(parts.values(answer.inputs), parts.values(rows), atol=1e-6)
        blind = replace(observation, known=None)
        filled = with_known(observation, attack(blind, stream(seed, "attack")))
        for k, one in enumerate((answer, filled)):
            score = parts.rest.score(parts.unknown(rows), parts.unknown(one.inputs))
            rights[k] += score.mean() / 4
    assert rights[0] > rights[1] + 5


def test_searches_with_known_columns_pool_rows_in_their_order():
    domain = table((4, 4, 4, 4), numbers=0)
    parts = known_parts(domain, "c0")
    rows = drawn(domain, 2, 1)
    rows[0, :4], rows[1, :4] = torch.eye(4)[0], torch.eye(4)[1]
    known = KnownValues(parts, parts.values(rows))
    # Its unknown parts are those of the other example, so pairs by distance would cross.
    other = Reconstruction(known.filled(rows.flip(0)))
    best = Reconstruction(rows)
    assert torch.equal(_aligned(domain, best, other, known).inputs, other.inputs)
    assert torch.equal(_aligned(domain, best, other, None).inputs, other.inputs.flip(0))


def test_where_the_noise_is_estimated_rows_of_the_span_stay(german, monkeypatch):
    names = ",".join(column.name for column in german.domain.columns[:KNOWN])
    rows = german.inputs[:4]
    observation = seen(german.domain, rows, names, Quantization(8))
    spans = _searched(
        SentRow(observation, observation.task, 0, 4), view(observation.task, german.domain), 1000
    )
    assert spans.problem is not None
    # A fit that says something else everywhere, and calls it likelier.
    other = observation.known.filled(german.inputs[[500, 501, 502, 503]]).double()
    monkeypatch.setattr(Fit, "rows", lambda self: other)
    monkeypatch.setattr(Fit, "cost", lambda self, rows: (-float((rows == other).sum()), 0.5))
    assert torch.equal(attacked(observation).inputs, spans.inputs.float())
