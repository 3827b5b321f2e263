"""Training curves: what is averaged and what is refused."""

from __future__ import annotations

import re

import msgspec
import pytest

from leakbound.report import tables, write


def _rows(units):
    return tables.loss_curves(units, tables.Names([], units))


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


def test_costs_and_losses_stand_in_one_table(tmp_path, make_bounded):
    text = write(make_bounded(tmp_path / "run", seeds=1, strengths=12)).read_text()
    part = text[text.index('id="utility-fold"') : text.index('id="best-attack-fold"')]
    losses = re.search(r'aria-label="Training losses".*?</table>', part, re.DOTALL).group()
    assert losses.count("gaussian_noise noise_std=") == 12
    assert "Loss after 5 rounds" in losses
    assert "Points lost" in losses
    assert "Strongest attack, dB" in losses
    assert '<td class="n" data-sort="1.6' in losses


def test_without_round_five_there_is_no_such_column(
    tmp_path, make_assessment, make_run, make_training, make_defense
):
    units = [make_training(make_defense("none"), 0, 0.9, curve=[[0, 2.0], [3, 1.0]])]
    text = write(make_run(tmp_path / "run", [make_assessment()], units)).read_text()
    assert "Last loss" in text
    assert "Loss after 5 rounds" not in text


def test_what_diverges_is_shown(tmp_path, make_assessment, make_run, make_training, make_defense):
    wild = [[0, 2.5], *([i, 1e299] for i in range(1, 3000))]
    units = [make_training(make_defense("noise"), 0, 0.1, curve=wild)]
    units.append(make_training(make_defense("none"), 0, 0.9, curve=[[0, 2.5], [2999, 0.1]]))
    units.append(make_training(make_defense("nan"), 0, 0.9, curve=[[0, None]]))
    text = write(make_run(tmp_path / "run", [make_assessment()], units)).read_text()
    assert "1e+299" in text


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
