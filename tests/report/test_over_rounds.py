"""The table and the panels of attacked rounds, against hand computations."""

import pytest
from msgspec.structs import replace

from leakbound.assess.record import ObjectiveValues, ReleaseInfo, RoundInfo
from leakbound.report.over_rounds import HEIGHT, LINES, WIDTH, panels, round_rows
from leakbound.report.tables import Names


@pytest.fixture
def make(make_assessment):
    def made(number, seed, score, accuracy, **more):
        one = make_assessment(seed=seed)
        training = RoundInfo(kept=0.7, sent=100 * number, dense=1000, accuracy=accuracy)
        release = ReleaseInfo(
            law="Exact",
            data_dependent=True,
            withheld=0.1 * seed,
            unit="client",
            round=number,
            training=training,
        )
        return replace(
            one,
            attack=replace(one.attack, round=number, hash=f"{number:016x}"),
            release=release,
            metrics={
                **one.metrics,
                one.criterion.metric: (score - 1, score + 1),
                "nmi": (score / 100,) * 2,
            },
            objective=ObjectiveValues(start=1.0, end=0.1 * number),
            **more,
        )

    return made


@pytest.fixture
def rounds(make):
    return [
        make(number, seed, 10.0 * number + seed, accuracy)
        for number, accuracy in ((1, 0.1), (3, 0.5), (5, 0.9))
        for seed in range(3)
    ]


def test_a_row_for_each_round(rounds):
    rows = round_rows(rounds, Names(rounds))
    assert [row.rounds for row in rows] == [(1, 1), (3, 3), (5, 5)]
    first = rows[0]
    assert first.n == 3
    score = first.measures["score"]
    assert (score.median, score.low, score.high) == (11, 10, 12)
    assert score.level is None
    assert first.measures["nmi"].median == 0.11
    assert first.measures["adjusted_mi"] is None
    assert rows[2].measures["loss"].median == pytest.approx(0.5)
    assert (first.kept, first.sent, first.dense) == (pytest.approx(0.7), 100, 1000)
    assert first.withheld == pytest.approx(0.1)
    assert first.accuracy.mean == pytest.approx(0.1)
    assert "round" not in first.attack


def test_panels_place_values_between_the_ends_of_their_axes(rounds):
    score, nmi, loss, accuracy = panels(rounds, Names(rounds), "PSNR, dB")
    assert [p.title for p in (score, nmi, loss)] == ["PSNR, dB", "NMI", "attack loss"]
    assert (score.first, score.last, score.lowest, score.highest) == (1, 5, 10, 52)
    (line,) = score.lines
    assert [point.x for point in line.points] == [0, WIDTH / 2, WIDTH]
    middle = line.points[1]
    for drawn, value in ((middle.y, 31), (middle.low, 30), (middle.high, 32)):
        assert drawn == pytest.approx(HEIGHT * (52 - value) / 42, abs=0.06)
    (line,) = accuracy.lines
    assert line.points[0].y == HEIGHT
    assert line.points[2].y == 0
    assert score.more == 0


def test_lines_that_are_not_drawn_are_counted(rounds):
    many = [
        replace(a, attack=replace(a.attack, name=f"attack_{k}", settings="", hash=f"{k:016x}"))
        for k in range(LINES + 2)
        for a in rounds
    ]
    panel = panels(many, Names(many), "PSNR, dB")[0]
    assert (len(panel.lines), panel.more) == (LINES, 2)


def test_one_round_draws_nothing_and_records_without_a_training_have_no_row(make, make_assessment):
    one = [make(4, seed, 20.0, 0.5) for seed in range(2)]
    assert panels(one, Names(one), "PSNR") == []
    assert len(round_rows(one, Names(one))) == 1
    plain = [make_assessment(seed=0)]
    assert round_rows(plain, Names(plain)) == []


def test_rounds_that_each_experiment_chose_are_a_range(make):
    some = [make(number, seed, 20.0, 0.5) for seed, number in enumerate((14, 16))]
    some = [replace(a, attack=replace(a.attack, round=some[0].attack.round, hash="0" * 16))
            for a in some]  # fmt: skip
    (row,) = round_rows(some, Names(some))
    assert row.rounds == (14, 16)


def test_a_failed_experiment_has_no_round(make):
    some = [make(2, 0, 20.0, 0.5), make(2, 1, 20.0, 0.5)]
    some[1] = replace(make(2, 1, 20.0, 0.5), status="failed", reason="x", verdict="undecided")
    (row,) = round_rows(some, Names(some))
    assert row.n == 1
