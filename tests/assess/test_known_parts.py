"""What an attacker has from elsewhere: attacks use it, and only the rest counts."""

from __future__ import annotations

import dataclasses
from statistics import NormalDist

import pytest
import torch

import leakbound as lb
from leakbound import data
from leakbound.assess.chance import chance
from leakbound.assess.criterion import Criterion
from leakbound.assess.measure import prior_only
from leakbound.attacks.knowing import with_known
from leakbound.core import Batch, Observation, Reconstruction, ThreatModel
from leakbound.domains import of_shape
from leakbound.domains.known import KnownValues, known_parts

COLUMNS = "personal_status_and_sex,foreign_worker"


@pytest.fixture(scope="module")
def german():
    return data.load("german")


@pytest.fixture(scope="module")
def rows(german):
    """One row with frequent known columns, and all others: imputers of these are fitted once."""
    values = known_parts(german.domain, COLUMNS).values(german.inputs)
    groups, counts = torch.unique(values, dim=0, return_counts=True)
    frequent = (values == groups[counts.argmax()]).all(1).nonzero()[0]
    others = torch.arange(1000) != frequent
    return german.batch(frequent), german.batch(others.nonzero()[:, 0])


def simulated(german, rows, known: str, **more):
    model = lb.models.mlp(
        input_shape=german.domain.shape, classes=2, generator=lb.stream(0, "model")
    )
    batch, public = rows
    threat = ThreatModel(known=known)
    return lb.simulate(model, batch, public=public, domain=german.domain, threat=threat, **more)


def test_only_the_unknown_part_counts(german, rows):
    result = simulated(german, rows, COLUMNS, attack="span_decoding")
    criterion = result.assessment.criterion
    assert (criterion.of, criterion.known) == (18, COLUMNS)
    assert criterion.text.endswith("columns of the unknown part or more")
    assert result.verdict == "exposed"
    # Who knows nothing of the update has the known columns right, and is not said to expose them.
    blind = simulated(german, rows, COLUMNS, attack="mean_image")
    parts = known_parts(german.domain, COLUMNS)
    assert torch.equal(parts.values(blind.reconstruction), parts.values(blind.truth))
    assert blind.verdict == "undecided"
    assert blind.scores[0] < 100


def test_knowing_all_but_one_column_is_no_reconstruction(german, rows):
    names = [column.name for column in german.domain.columns]
    result = simulated(german, rows, ",".join(names[:-1]), attack="mean_image")
    # The last column has two values, of which one is frequent: right, and not by the update.
    assert result.assessment.criterion.of == 1
    assert result.scores == (100.0,)
    assert result.verdict != "exposed"


def test_completions_are_baselines(german):
    known = ",".join(column.name for column in german.domain.columns[:14])
    criterion = Criterion.of(german.domain, known=known)
    public = german.batch(torch.arange(300, 900))
    victims = german.batch(torch.arange(60))
    completed = prior_only(criterion, victims, public)
    parts = criterion.known
    assert torch.equal(parts.values(completed), parts.values(victims.inputs))
    truth = parts.unknown(victims.inputs)
    right = parts.rest.score(truth, parts.unknown(completed)).mean()
    stranger = prior_only(Criterion.of(german.domain), victims, public)
    assert right > parts.rest.score(truth, parts.unknown(stranger)).mean() + 5


def test_decoys_share_the_known_part(german):
    criterion = Criterion.of(german.domain, known=COLUMNS)
    truth = german.batch(torch.arange(1))
    decoys = german.batch(torch.arange(100, 900))
    same = (criterion.known.values(decoys.inputs) == criterion.known.values(truth.inputs)).all(1)
    same &= decoys.labels == truth.labels
    test = chance(criterion, truth, truth.inputs, decoys)
    assert test.decoys == int(same.sum())
    # Nobody shares an exact age, duration and amount: chance cannot be excluded.
    fine = Criterion.of(german.domain, known="age_in_years,duration_in_month,credit_amount")
    assert chance(fine, truth, truth.inputs, decoys).p_value is None


@pytest.mark.parametrize("labels", [None, torch.tensor([1, 0, 1])])
def test_answers_take_the_order_of_the_known_values(labels):
    images = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    images[2, :, :2] = images[0, :, :2]
    parts = known_parts(of_shape((1, 4, 4)), "region:top")
    known = KnownValues(parts, parts.values(images))
    task = lb.Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)))
    update = lb.send(
        task, Batch(images, torch.tensor([1, 0, 1])), lb.defenses.chain(), lb.stream(0)
    )
    observation = Observation(update, task, (3,), (1, 4, 4), labels=labels, known=known)
    order = [1, 2, 0]
    moved = None if labels is None else labels[order]
    answer = with_known(observation, Reconstruction(images[order] + 0.01, moved))
    assert torch.equal(parts.values(answer.inputs), known.values)
    assert (answer.inputs[1] - images[1]).abs().max() < 0.02
    if labels is not None:
        assert answer.labels.tolist() == labels.tolist()


def test_searches_hold_known_pixels():
    digits = data.load("digits")
    model = lb.models.mlp(input_shape=(1, 8, 8), classes=10, generator=lb.stream(0, "model"))
    batch = digits.batch(torch.arange(1))
    short = "gradient_matching,steps=60"
    scores = {}
    for known in ("", "region:top"):
        result = lb.simulate(model, batch, attack=short, threat=ThreatModel(known=known))
        part = result.truth[:, :, 4:] - result.reconstruction[:, :, 4:]
        scores[known] = float(part.square().mean())
    # Half of the unknowns are given, so the same steps come closer on the other half.
    assert scores["region:top"] < scores[""]


def test_a_part_that_is_not_there_is_named(german, rows):
    with pytest.raises(ValueError, match="known names 'zip'"):
        simulated(german, rows, "zip", attack="mean_image")


def test_bounds_are_those_of_the_intruder(german, rows):
    noisy = {"attack": "mean_image", "defense": "dp_sgd,clip_norm=1,noise_multiplier=3"}
    stranger = simulated(german, rows, "", probability=0.2, **noisy).assessment
    intruder = simulated(german, rows, COLUMNS, probability=0.2, **noisy).assessment
    fine = simulated(
        german, rows, "age_in_years,credit_amount", probability=0.2, **noisy
    ).assessment
    (of_stranger,) = (b for b in stranger.bounds if b.basis == "sample" and not b.on_error)
    (of_intruder,) = (b for b in intruder.bounds if not b.on_error)
    (of_fine,) = (b for b in fine.bounds if not b.on_error)
    assert of_stranger.value < of_intruder.value < of_fine.value
    assert of_fine.value > 0.99
    assert COLUMNS in of_intruder.prior
    assert "the attacker knows" in intruder.bounds_note


def test_completions_are_counted_once_for_all_noises(german, rows, monkeypatch):
    counted = []
    monkeypatch.setattr(
        "leakbound.assess.success.best_completion",
        lambda public, criterion, labels: counted.append(criterion.known.text),
    )
    few = rows[0], german.batch(torch.arange(100, 200))
    for noise in (3, 30):
        for known in (COLUMNS, "foreign_worker"):
            defense = f"dp_sgd,clip_norm=1,noise_multiplier={noise}"
            simulated(german, few, known, attack="mean_image", defense=defense)
    assert counted == [COLUMNS, "foreign_worker"]


def test_candidates_complete_the_known_part():
    digits = data.load("digits")
    model = lb.models.mlp(input_shape=(1, 8, 8), classes=10, generator=lb.stream(0, "model"))
    public = digits.batch(torch.arange(20, 1200))
    noisy = {"defense": "dp_sgd,clip_norm=1,noise_multiplier=0.02", "public": public}
    bare = {"attack": "candidate_likelihood", "error_bound": "none", "probability": None}
    error = {"": 0.0, "region:top": 0.0}
    for seed in range(20):
        batch = digits.batch(torch.tensor([seed]))
        for known in error:
            threat = ThreatModel(known=known)
            result = lb.simulate(model, batch, threat=threat, seed=seed, **noisy, **bare)
            error[known] += float((result.reconstruction - result.truth)[:, :, 4:].square().mean())
    assert torch.equal(result.reconstruction[:, :, :4], result.truth[:, :, :4])
    # Candidates that continue the very upper half are nearer on the lower one, too.
    assert error["region:top"] < 0.9 * error[""]


def test_imputers_complete_candidates():
    """No public row has this one's unknown part, which follows from the known one."""
    source = torch.Generator().manual_seed(0)
    x = torch.rand(300, 1, 2, 4, generator=source)
    x[:, :, 1] = 1 - x[:, :, 0]
    model = lb.models.mlp(input_shape=(1, 2, 4), classes=2, generator=lb.stream(0, "model"))
    labels = torch.zeros(300, dtype=torch.long)
    result = lb.simulate(
        model,
        Batch(x[:1], labels[:1]),
        attack="candidate_likelihood",
        defense="dp_sgd,clip_norm=1,noise_multiplier=0.001",
        public=Batch(x[1:], labels[1:]),
        threat=ThreatModel(known="region:top"),
        error_bound="none",
        probability=None,
    )
    assert (result.reconstruction - result.truth).abs().max() < 0.05


def test_nobody_is_named_by_what_was_known(german, rows):
    """The known columns name a row among 100 without the update, beyond F(1 / 100)."""
    names = ",".join(column.name for column in german.domain.columns[:12])
    noisy = {"attack": "mean_image", "defense": "dp_sgd,clip_norm=1,noise_multiplier=50"}
    assert simulated(german, rows, "", **noisy).assessment.reidentified
    assert simulated(german, rows, names, **noisy).assessment.reidentified == ()


def test_enough_noise_protects_from_intruders(german, rows):
    noisy = {"attack": "mean_image", "defense": "dp_sgd,clip_norm=1,noise_multiplier=30"}
    intruder = simulated(german, rows, COLUMNS, probability=0.2, **noisy)
    assert intruder.verdict == "protected from intruders"
    bounds = {row.attacker: row.bound for row in intruder.assessment.attackers}
    assert [*bounds] == ["stranger", "intruder", "anyone"]
    assert bounds["stranger"] < bounds["intruder"] < 0.2
    stranger = simulated(german, rows, "", probability=0.2, **noisy)
    assert stranger.verdict == "protected from strangers"
    # With nearly unique parts the limit is 1, whatever the noise is.
    fine = simulated(german, rows, "age_in_years,credit_amount", probability=0.2, **noisy)
    assert not fine.verdict.startswith("protected")


def test_other_people_than_the_public_ones_leave_the_gain_alone(german):
    """A batch of one row, many times, is not drawn like the public rows: the count covers it not"""
    model = lb.models.mlp(
        input_shape=german.domain.shape, classes=2, generator=lb.stream(0, "model")
    )
    same = german.batch(torch.zeros(24, dtype=torch.long))
    noisy = {"attack": "mean_image", "defense": "dp_sgd,clip_norm=1,noise_multiplier=100"}
    public = german.batch(torch.arange(100, 1000))
    result = lb.simulate(model, same, public=public, domain=german.domain, **noisy)
    (anyone,) = result.assessment.attackers
    assert anyone.attacker == "anyone"
    # All 24 are one unit: the noise of one is divided by 24.
    assert anyone.gain == pytest.approx(2 * NormalDist().cdf(24 / 200) - 1, rel=1e-3)


def test_columns_that_a_schema_marks_are_known(german, rows):
    marked = tuple(
        dataclasses.replace(column, known=column.name in COLUMNS.split(","))
        for column in german.domain.columns
    )
    table = dataclasses.replace(german, columns=marked)
    for asked, known in (("", COLUMNS), ("none", ""), ("housing", "housing")):
        result = simulated(table, rows, asked, attack="mean_image")
        assert result.assessment.threat.known == known
        assert result.assessment.criterion.known == known
