"""Whether chance explains a match of who knows nearly all: clients train on other parts, too."""

import math

import pytest
import torch

import leakbound as lb
from leakbound import data
from leakbound.assess.chance import LEVEL, replayed
from leakbound.assess.criterion import Criterion
from leakbound.core import Batch, ThreatModel
from leakbound.domains import Column, TableDomain
from leakbound.randomness import stream, uniform

KNOWN = "age_in_years,personal_status_and_sex,foreign_worker"
RUNS = 300
COLUMNS = 9
FEW = TableDomain(tuple(Column(f"c{i}", "categorical", levels=("a", "b")) for i in range(COLUMNS)))


def rows(count, source):
    """(count, 18) rows of nine columns; "a" is three times as frequent as "b"."""
    second = (uniform((count, COLUMNS), source) < 0.25).float()
    return torch.stack([1 - second, second], -1).flatten(1)


def p_value(seed, guess, size=1):
    """Of answers `guess(inputs, source)` to a batch of that size, of which one column is known."""
    source = stream(seed, "replays of a test")
    truth = Batch(rows(size, source), torch.zeros(size, dtype=torch.long))
    decoys = Batch(rows(200, source), torch.zeros(200, dtype=torch.long))
    criterion = Criterion.of(FEW, share=0.8, known="c0")

    def answer(inputs, number):
        known = criterion.known
        return known.joined(known.values(inputs), known.unknown(guess(inputs, source)))

    return replayed(criterion, truth, answer(truth.inputs, 0), decoys, answer).p_value


@pytest.mark.parametrize("size", [1, 3])
def test_guesses_keep_the_level(size):
    """People are alike, so random rows are often right."""
    few = sum(
        p_value(seed, lambda x, source: rows(len(x), source), size) <= LEVEL for seed in range(RUNS)
    )
    assert few / RUNS <= LEVEL + 2 * math.sqrt(LEVEL / RUNS)


def test_who_reads_the_rows_is_told_from_chance():
    read = [p_value(seed, lambda x, source: x) for seed in range(30)]
    assert sum(p <= LEVEL for p in read) >= 27


def test_who_reads_others_but_not_these_is_not_excluded():
    """The victims' answer fits them worse than the answers to other trainings do."""
    first = rows(1, stream(0, "replays of a test"))
    assert p_value(0, lambda x, source: 1 - x if torch.equal(x, first) else x) == 1


@pytest.fixture(scope="module")
def german():
    return data.load("german")


def simulated(german, seed, **more):
    model = lb.models.mlp(
        input_shape=german.domain.shape, classes=2, generator=lb.stream(0, "model")
    )
    return lb.simulate(
        model,
        german.batch(torch.tensor([seed])),
        public=german.batch(torch.arange(400, 800)),
        domain=german.domain,
        threat=ThreatModel(known=KNOWN),
        seed=seed,
        error_bound="none",
        probability=None,
        **more,
    )


def test_who_knows_nearly_unique_parts_is_said_to_expose_the_rest(german):
    test = simulated(german, 3, attack="span_decoding").assessment
    assert test.verdict == "exposed"
    assert (test.chance.decoys, test.chance.replays) == (0, 9)
    assert test.chance.against == "9 trainings on other unknown parts"


def test_noise_that_hides_all_exposes_nobody(german):
    noisy = {
        "attack": "candidate_likelihood",
        "defense": "dp_sgd,clip_norm=1,noise_multiplier=1000",
    }
    for seed in range(2):
        assert simulated(german, seed, **noisy).verdict != "exposed"
