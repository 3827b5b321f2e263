"""Paper E's configurations, networks and claims."""

from dataclasses import replace

import pytest
import torch

from leakbound.client import gradient
from leakbound_reproductions.claim import Verdict
from leakbound_reproductions.practical_feasibility import claims, study
from leakbound_reproductions.practical_feasibility.claims import Scores
from leakbound_reproductions.practical_feasibility.networks import Design, draw, drops, network
from leakbound_reproductions.practical_feasibility.study import BASE, Cell


def test_there_are_200_configurations_each_with_a_name():
    cells = study.cells()
    assert len(cells) == len(set(cells)) == len(set(map(study.name, cells))) == 200


@pytest.mark.parametrize("design", [BASE, Design("convnext", 1, 8), Design("vit", 1, 8)])
def test_networks_score_every_class(design):
    images = torch.rand(3, 1, 8, 8)
    model = network(design, 0)
    assert model(images).shape == (3, 10)
    again = network(design, 0).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_a_block_is_the_identity_without_its_convolutions_if_norms_stand_before_them():
    model, images = network(BASE, 0), torch.rand(2, 1, 8, 8)
    before = model[0](images)
    torch.nn.init.zeros_(model[1].conv2.weight)
    assert torch.equal(model[1](before), before)


def test_dropout_is_drawn_for_each_example_and_known_only_to_the_client():
    cell = Cell(replace(BASE, dropout=0.5), training=True, batch=2, trained=False)
    observation, truth = study.seen(cell, 0, "test")
    known, _ = study.seen(replace(cell, known="draws"), 0, "test")
    assert torch.equal(observation.update.rows, known.update.rows)
    exact, guess = (
        gradient(seen.task, truth.inputs, truth.labels) for seen in (known, observation)
    )
    torch.testing.assert_close(exact, known.update.rows[0])
    assert float((guess - exact).norm()) > 0.1 * float(exact.norm())
    model = network(cell.design, 0)
    draw(model, truth.inputs, 0)
    (drop,) = drops(model)
    assert not torch.equal(drop.kept[0], drop.kept[1])


def test_modes_share_weights_and_batch():
    cell = Cell(BASE, training=True, batch=2, trained=False)
    first, truth = study.seen(cell, 0, "test")
    second, other = study.seen(replace(cell, training=False), 0, "test")
    assert torch.equal(truth.inputs, other.inputs)
    assert torch.equal(first.task.parameters, second.task.parameters)
    assert first.task.coupled
    assert not second.task.coupled


def _verdicts(score):
    """The claims' verdicts for made-up scores: a function of the configuration and the seed."""
    found = {}
    for cell in study.cells():
        seeds = 4 if cell in study.repeated() else 2
        values = [score(cell) + 0.1 * seed for seed in range(seeds)]
        found[cell] = Scores(values, [float(value > study.MATCHED) for value in values])
    made = claims.all_claims(found)
    assert len(list(claims.table(found))) == 4 + len(found)
    return {claim.number: claim.verdict for claim in made}


def _as_printed(cell):
    """Only the base design leaks in training mode; inference mode and known draws help."""
    own = cell.design
    if own.family != "residual":
        return 5.0
    lacking = (own.depth > 1) + (own.width < 32) + (not own.skip) + (not own.before)
    value = 30 - 11 * lacking + 10 * (not cell.training)
    return value - (5 if own.dropout and cell.known != "draws" else 0)


def test_the_papers_statements_hold_where_they_are_true():
    found = _verdicts(_as_printed)
    assert found.pop("5-8") is Verdict.UNTESTED
    assert set(found.values()) == {Verdict.HOLDS}


def test_they_fail_where_the_opposite_is_true():
    found = _verdicts(lambda cell: 60 - _as_printed(cell))
    assert {found[number] for number in ("5-1", "5-3", "5-4", "5-5", "5-6", "5-7")} == {
        Verdict.FAILS
    }
