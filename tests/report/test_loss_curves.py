"""Training curves: what is averaged, which lines are drawn, and what is refused."""

from __future__ import annotations

import re

import msgspec
import pytest

from leakbound.report import charts, tables, write
from leakbound.report.folder import read


def _rows(units):
    return charts.loss_curves(units, tables.Names([], units))


def test_means_over_seeds_at_shared_rounds(make_training, make_defense):
    given = make_defense("none")
    units = [
        make_training(given, 0, 0.8, optimizer="sgd", curve=[[0, 2.0], [5, 1.0], [7, 0.5]]),
        make_training(given, 1, 0.9, optimizer="sgd", curve=[[0, 3.0], [5, 2.0], [9, 0.5]]),
        make_training(given, 2, None, optimizer="sgd", curve=[[0, 99.0]]),
    ]
    (row,) = _rows(units)
    assert (row.losses, row.n, row.optimizer) == ({0: 2.5, 5: 1.5}, 2, "sgd")
    assert (row.early, row.last, row.rounds) == (1.5, 1.5, 5)


def test_a_loss_that_is_no_number_is_not_averaged_away(make_training, make_defense):
    given = make_defense("none")
    units = [
        make_training(given, s, 0.1, curve=[[0, 2.0], [5, v]]) for s, v in ((0, 1.0), (1, None))
    ]
    (row,) = _rows(units)
    assert row.losses == {0: 2.0, 5: None}
    assert row.early is None


def test_at_most_ten_lines_with_both_ends_of_the_strengths(make_training, make_defense):
    stds = [i / 10 for i in range(1, 15)]
    given = [make_defense("noise", std=std) for std in stds]
    given += [make_defense("prune", rate=rate) for rate in (0.5, 0.9)] + [make_defense("none")]
    units = [make_training(d, 0, 0.5, curve=[[0, 2.0], [4, 1.0]]) for d in given]
    names = tables.Names([], units)
    labels = charts.drawn_losses(_rows(units), names)
    assert len(labels) == charts.LINES
    ends = {"no defense", "noise std=0.1", "noise std=1.4", "prune rate=0.5", "prune rate=0.9"}
    assert ends <= set(labels)


def test_costs_are_drawn_for_all_settings_and_losses_stand_in_a_table(tmp_path, make_bounded):
    folder = make_bounded(tmp_path / "run", seeds=1, strengths=12)
    text = write(folder).read_text()
    part = text[text.index('id="utility-fold"') : text.index('id="best-attack-fold"')]
    costs = re.search(
        r'<table class="intervals stack costs-table">.*?</table>', part, re.DOTALL
    ).group()
    assert costs.count("gaussian_noise noise_std=") == 12
    assert costs.count('class="dot"') == 14  # all settings but no defense
    losses = re.search(r'aria-label="Training losses".*?</table>', part, re.DOTALL).group()
    assert losses.count("gaussian_noise noise_std=") == 12
    assert "Loss after 5 rounds" in losses
    assert '<td class="n" data-sort="1.6' in losses
    run = read(folder)
    names = tables.Names(run.assessments, run.trainings)
    rows = charts.loss_curves(run.trainings, names)
    (panel,) = charts.loss_panels(rows, charts.drawn_losses(rows, names))
    assert ">training loss</text>" in panel.svg
    assert len(re.findall(r'<g id="l0-line2d_\d+">\s*<path d="[^"]+" clip-path', panel.svg)) >= 10


def test_without_round_five_there_is_no_such_column(
    tmp_path, make_assessment, make_run, make_training, make_defense
):
    units = [make_training(make_defense("none"), 0, 0.9, curve=[[0, 2.0], [3, 1.0]])]
    text = write(make_run(tmp_path / "run", [make_assessment()], units)).read_text()
    assert "Last loss" in text
    assert "Loss after 5 rounds" not in text


def test_what_diverges_does_not_flatten_the_rest(
    tmp_path, make_assessment, make_run, make_training, make_defense
):
    wild = [[0, 2.5], *([i, 1e299] for i in range(1, 3000))]
    units = [make_training(make_defense("noise"), 0, 0.1, curve=wild)]
    units.append(make_training(make_defense("none"), 0, 0.9, curve=[[0, 2.5], [2999, 0.1]]))
    units.append(make_training(make_defense("nan"), 0, 0.9, curve=[[0, None]]))
    text = write(make_run(tmp_path / "run", [make_assessment()], units)).read_text()
    assert "1.00e+299" in text
    rows = _rows(units)
    panels = charts.loss_panels(rows, [row.defense for row in rows])
    assert any("losses over 5 are drawn at 5" in panel.notes for panel in panels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curve": "x"}, r".*`\$\.curve`"),
        ({"curve": [3]}, r".*`\$\.curve\["),
        ({"curve": [[0, 1.0, 2.0]]}, r".*`\$\.curve\["),
        ({"curve": [[0, "1"]]}, r".*`\$\.curve\["),
        ({"curve": [[0, 10**301]]}, r".*`\$\.curve\["),
        ({"curve": [[0.5, 1.0]]}, r".*`\$\.curve\["),
        ({"curve": [[5, 1.0], [5, 2.0]]}, "the rounds of the curve do not rise"),
        ({"curve": [[-1, 1.0]]}, r".*`\$\.curve\["),
        ({"optimizer": 3}, r".*`\$\.optimizer`"),
    ],
)
def test_damaged_curves_are_refused(
    tmp_path, make_assessment, make_run, make_training, make_defense, changes, message
):
    own = msgspec.to_builtins(make_training(make_defense("none"), 0, 0.9)) | changes
    with pytest.raises(ValueError, match=rf"utility\.jsonl, line 1 is damaged: {message}"):
        write(make_run(tmp_path / "run", [make_assessment()], [own]))
