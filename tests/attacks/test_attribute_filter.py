"""The last unknown column of people whose others are known: read, tested, and refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import leakbound as lb
from leakbound.assess.facts import confirmed
from leakbound.attacks import AttributeFilter
from leakbound.core import Batch, LocalPlan, NotApplicable, Task, ThreatModel
from leakbound.defenses import DpSgd, NoDefense
from leakbound.domains.known import KnownValues, known_parts
from leakbound.protocol import play
from leakbound.randomness import stream

ALL_BUT = ThreatModel(known="all but foreign_worker")
LABEL = ThreatModel(known="all", labels_known=False)


@pytest.fixture(scope="module")
def rows():
    return lb.data.load("german")


def model_of(rows, seed):
    model = nn.Linear(rows.inputs.shape[1], 2)
    draw = stream(seed, "weights")
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(0.2 * torch.randn(weights.shape, generator=draw))
    return model


def attacked(
    rows, seed, *, size=4, defense=None, threat=ALL_BUT, plan=None, absent=False, **settings
):
    """The answer, and the batch behind the update."""
    order = torch.randperm(1000, generator=stream(seed, "rows"))
    batch = rows.batch(order[:size])
    task = Task.of(model_of(rows, seed), domain=rows.domain, plan=plan or LocalPlan())
    sources = [stream(seed, "play", at) for at in range(2)]
    played = play(
        task,
        [batch],
        defense or NoDefense(),
        sources,
        threat=threat,
        auxiliary=rows.batch(order[500:]),
    )
    seen = played.observation
    if absent:  # what is known is of people who do not take part
        others = rows.batch(order[size : 2 * size])
        known = KnownValues(seen.known.parts, seen.known.parts.values(others.inputs))
        seen = replace(seen, known=known, labels=others.labels if threat.labels_known else None)
    return AttributeFilter(**settings)(seen, stream(seed, "attack")), batch


@pytest.mark.parametrize(
    "plan",
    [
        None,
        LocalPlan(steps=4, learning_rate=0.1, batch_size=2),
        LocalPlan(steps=4, learning_rate=1e-3, batch_size=3, optimizer="adam"),
    ],
    ids=["one step", "epochs", "Adam, a short last batch"],
)
def test_every_level_is_read_without_noise(rows, plan):
    for seed in range(3):
        answer, batch = attacked(rows, seed, plan=plan, tests=99, tried=1)
        assert torch.equal(answer.inputs, batch.inputs)
        [fact] = answer.facts
        assert (fact.kind, fact.subject) == ("attribute", "foreign_worker")
        assert fact.level == 0.01
        [place] = fact.examples
        assert fact.items[0] == rows.domain.rows(batch.inputs)[place][-1]


def test_the_label_is_read_without_noise(rows):
    for seed in range(3):
        answer, batch = attacked(rows, seed, threat=LABEL, tests=99, tried=1)
        assert torch.equal(answer.inputs, batch.inputs)
        assert torch.equal(answer.labels, batch.labels)
        [fact] = answer.facts
        assert (fact.subject, fact.level) == ("the label", 0.01)
        [place] = fact.examples
        assert fact.items == (str(int(batch.labels[place])),)


def test_a_wrong_label_shows_nothing(rows):
    """The verdict needs the right label, whatever its p-value."""
    batch = rows.batch(torch.arange(4))
    public = rows.batch(torch.arange(500, 900))
    settings = {"threat": LABEL, "domain": rows.domain, "public": public}
    attack = AttributeFilter(tests=199)
    found = lb.simulate(model_of(rows, 0), batch, attack=attack, **settings)
    assert found.verdict == "attribute exposed"
    assert found.assessment.matched == found.assessment.bounds == ()
    assert found.assessment.criterion.text == "the label"
    [fact] = found.assessment.facts
    wrong = Batch(batch.inputs, 1 - batch.labels)
    [shown] = confirmed([fact], wrong, rows.domain)
    assert (fact.level, shown.level) == (0.01, 1.0)
    noisy = lb.simulate(
        model_of(rows, 0), batch, attack=attack, defense=DpSgd(1.0, 100.0), **settings
    )
    assert noisy.verdict == "undecided"


@pytest.mark.slow
@pytest.mark.parametrize("threat", [ALL_BUT, LABEL], ids=["column", "label"])
@pytest.mark.parametrize("absent", [False, True], ids=["noise", "other people"])
def test_chance_reads_nothing(rows, absent, threat):
    """Noise multiplier 1,000, or an update of others: at most 1 % + 2 standard errors of runs."""
    runs = 300
    few = {"size": 2, "replays": 2, "tests": 99, "tried": 1}
    defense = None if absent else DpSgd(1.0, 1000.0)
    read = 0
    for seed in range(runs):
        answer, _ = attacked(rows, seed, absent=absent, defense=defense, threat=threat, **few)
        read += answer.facts[0].level <= 0.01
    assert read / runs <= 0.01 + 2 * (0.0099 / runs) ** 0.5


def test_without_a_signal_the_answer_is_the_prior(rows):
    answer, _ = attacked(rows, 0, size=8, defense=DpSgd(1.0, 1e6), replays=2, tests=9)
    column = answer.inputs[:, -2:]
    assert torch.equal(
        column, rows.inputs[:, -2:].mean(0).argmax().eq(torch.arange(2)).expand(8, 2)
    )


def test_several_tries_are_counted(rows):
    [one] = attacked(rows, 0, tests=99, tried=1)[0].facts
    [three] = attacked(rows, 0, tests=99, tried=3)[0].facts
    assert three.level == pytest.approx(3 * one.level)
    assert len(three.items) == 3


def test_the_verdict_and_what_breaks_it(rows):
    batch = rows.batch(torch.arange(4))
    public = rows.batch(torch.arange(500, 1000))
    settings = {
        "attack": AttributeFilter(tests=199, tried=2),
        "threat": ALL_BUT,
        "domain": rows.domain,
        "public": public,
        "error_bound": "none",
    }
    found = lb.simulate(model_of(rows, 0), batch, **settings)
    assert found.verdict == "attribute exposed"
    assert found.assessment.matched == (False,) * 4, "too few rows have the same other columns"
    noisy = lb.simulate(model_of(rows, 0), batch, defense=DpSgd(1.0, 100.0), **settings)
    assert noisy.verdict != "attribute exposed"


def test_what_it_needs(rows):
    needs = {
        "more than one column": ThreatModel(known="foreign_worker"),
        "no columns are known": ThreatModel(),
        "labels are not known": replace(ALL_BUT, labels_known=False),
        "more than one": ThreatModel(known="foreign_worker", labels_known=False),
        "no category": ThreatModel(known="all but age_in_years"),
    }
    for reason, threat in needs.items():
        with pytest.raises(NotApplicable, match=reason):
            attacked(rows, 0, threat=threat)


def test_who_knows_the_label_and_all_columns_has_nothing_left():
    with pytest.raises(ValueError, match="nothing is left to reconstruct"):
        ThreatModel(known="all")


def test_who_does_not_know_the_defense_tests_nothing(rows):
    answer, _ = attacked(rows, 0, threat=replace(ALL_BUT, defense_known=False), tests=9)
    assert answer.facts == ()


def test_all_but_names_what_is_open(rows):
    whole = known_parts(rows.domain, "all but age_in_years,purpose")
    assert [column.name for column in whole.rest.columns] == ["purpose", "age_in_years"]
    assert Batch(whole.joined(whole.values(rows.inputs), whole.unknown(rows.inputs)), rows.labels)
