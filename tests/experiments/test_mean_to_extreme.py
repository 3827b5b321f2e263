"""The study of paper C: its parts on few images, against laws that they do not use."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound import data
from leakbound.attacks.trap_estimators import unbiased
from leakbound.experiments.claim import Verdict
from leakbound.experiments.mean_to_extreme import (
    claims,
    copies,
    draws,
    figures,
    grid,
    reproduce,
    rivals,
    settings,
    tables,
    trap,
)
from leakbound.random import stream

HOLDS, FAILS, UNDECIDED = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED


def few(dim, count=40):
    size, channels = {4: (2, 1), 3072: (32, 3)}[dim]
    return trap.images(data.load("photos", size=size, channels=channels, limit=200), count)


def records(dim, kind="optimal"):
    inputs = few(dim)
    return trap.Records(inputs, trap.rest(inputs, kind))


@pytest.mark.parametrize(("dim", "shape"), [(4, (1, 2, 2)), (3072, (3, 32, 32))])
def test_records_are_real_images_of_one_norm(dim, shape):
    found = records(dim)
    assert found.inputs.shape == (40, *shape)
    torch.testing.assert_close(found.flat.norm(dim=1), torch.full((40,), 1.01).double())
    assert not found.rest.any()
    assert len(torch.unique(found.flat, dim=0)) > 30


def test_too_few_images_are_told():
    with pytest.raises(ValueError, match=r"color is 'photos', with \d+ images; give 500"):
        few(4, 500)


def test_a_million_weights_take_the_share_of_the_clip_norm_that_their_mean_takes():
    """K rows that each see the input, averaged: norm |X| / sqrt(K)."""
    for dim in trap.DIMS:
        rest = trap.rest(few(dim, 3), trap.KINDS[1])
        expected = 1.01 / math.sqrt(1_000_000 // dim)
        assert rest.numpy() == pytest.approx(np.full(3, expected), rel=1e-5)


def test_a_sink_takes_its_share_of_the_clip_norm():
    found = trap.Records(few(4), torch.full((40,), 0.7).double())
    whole = torch.hypot(found.rest, found.flat.norm(dim=1))
    torch.testing.assert_close(found.beta * whole, torch.ones(40).double())
    near = trap.errors(found, 1e-6, unbiased, stream(0, "sink"))
    forgotten = trap.errors(found, 1e-6, unbiased, stream(0, "sink"), scale_known=False)
    assert float(near.max()) < 1e-8 < 1e-4 < float(forgotten.min())


def test_the_error_is_that_of_the_clipped_noise():
    found = trap.directions(3072, 400, stream(1, "directions"))
    mean = float(trap.errors(found, 0.1, unbiased, stream(1, "noise")).mean())
    assert mean == pytest.approx((0.1 * 1.01) ** 2, rel=0.01)


def test_a_box_follows_the_law_and_rejects_another(monkeypatch):
    found = records(4)
    box = grid.box(found, 4, "optimal", 0.1, 10)
    assert box.distance == box.fit < 0.1
    assert box.draws == 400
    assert box.raised == (1, 0)
    assert box.excess[0] == pytest.approx(1, abs=0.15)
    assert np.mean(box.spreads) == pytest.approx(1, abs=0.2)
    real = trap.release
    monkeypatch.setattr(trap, "release", lambda r, n, s: real(r, 2 * n, s))
    other = grid.box(found, 4, "optimal", 0.1, 10)
    assert other.distance > 0.3
    assert other.excess[0] == pytest.approx(4, rel=0.15)


def test_a_box_with_a_sink_shows_bias_at_small_noise_and_the_law_at_large():
    found = trap.Records(few(4), torch.full((40,), 2.0).double())
    small, large = (grid.box(found, 4, "ResNet-18", noise, 10) for noise in (0.01, 10.0))
    assert small.distance > 0.9
    assert large.distance < 0.1
    assert small.fit < 0.1
    assert small.excess[0] > 100
    assert small.raised[0] == pytest.approx((1.01**2 + 4) / 1.01**2)


def test_certificates_are_beaten_as_often_as_the_exact_law_says(monkeypatch):
    monkeypatch.setattr(grid, "PROMISED_AT", {4: (0.3,), 3072: (0.006,)})
    for row in grid.certificates(400):
        assert row.n == 400
        spread = np.sqrt(row.exact * (1 - row.exact) / row.n)
        assert abs(row.hits / row.n - row.exact) < 4 * spread + 1e-9
        assert row.exact <= row.upper * (1 + 1e-9)
        assert row.exact > row.promised


def test_no_estimator_beats_its_edge_and_a_cheat_is_seen(monkeypatch):
    monkeypatch.setattr(trap, "NOISES", (0.3,))
    found = {(4, "optimal"): records(4)}
    honest = grid.beaten(found)
    assert honest.above == ()
    assert "0 above it" in "".join(tables.edges(honest))
    monkeypatch.setattr(trap, "errors", lambda *_, **__: torch.zeros(400).double() + 1e-9)
    assert grid.beaten(found).above


def test_rows_and_sightings_meet_their_law_through_the_client(monkeypatch):
    monkeypatch.setattr(draws, "ROWS", (5, 25))
    monkeypatch.setattr(draws, "SIGHTINGS", (4,))
    found = draws.rows(4)
    assert np.mean(found["5"]) == pytest.approx(5, rel=0.15)
    assert np.mean(found["25"]) == pytest.approx(1, rel=0.15)
    assert np.mean(draws.sightings(2)["4"]) == pytest.approx(1, rel=0.2)


def test_limits_and_crossing():
    found = draws.limits(1000)
    assert found["far 4"]["hits"] == found["near 3072"]["hits"] == 0
    assert 60 < found["named"]["hits"] < 140
    assert 50 < found["blind"]["hits"] < 150
    cross = draws.crossing(5000)
    assert cross["13"]["crosses"] == pytest.approx(0.756, abs=5e-4)
    assert cross["11"]["crosses"] == pytest.approx(5.491, abs=5e-4)
    assert cross["11"]["noise"] == pytest.approx(18.65, abs=0.01)


def test_company_hides_without_noise_and_helps_the_attacker_with_much():
    found = draws.batches("photos", 6)
    assert all(value > 0 for value in found["0.0 8"])
    assert all(value < 0 for value in found["0.5 8"])
    assert set(found) == {f"{n} {b}" for n in draws.BATCH_NOISES for b in draws.BATCHES}


def test_intervals_cover_as_often_as_they_say():
    """Chi-square and Kolmogorov intervals from draws of a known law."""
    source, hits = np.random.default_rng(0), 0
    for _ in range(300):
        ratios = 1.3 * source.chisquare(20, 8) / 20
        low, high = draws.chi_square(list(ratios), 20)[1](0.9)
        hits += low <= 1.3 <= high
    assert 250 <= hits <= 290
    caught = 0
    for _ in range(300):
        places = stats.norm.cdf(source.standard_normal(200) + 0.2)
        distance = float(stats.kstest(places, "uniform").statistic)
        low, high = draws.kolmogorov(distance, 200)[1](0.9)
        caught += low <= 2 * stats.norm.cdf(0.1) - 1 <= high
    assert caught >= 270


def test_rivals_are_measured_on_the_same_images():
    setting = replace(settings.SETTINGS["minutes"], attacked=2, steps=3)
    bench = rivals.bench_of(setting, "photos")
    ours, zero, other = (
        rivals.errors(name, 0.005, setting, bench)
        for name in (rivals.OURS, rivals.ZERO, "Inverting Gradients")
    )
    assert len(ours) == len(zero) == len(other) == 2
    norms = [float(bench.batches(1, 1, n)[0].inputs.double().square().sum()) for n in range(2)]
    assert zero == pytest.approx([norm / 784 for norm in norms], rel=1e-5)
    assert ours == pytest.approx([0.005**2 * norm for norm in norms], rel=0.3)
    paper = rivals.bench_of(settings.SETTINGS["paper"], "photos")
    assert paper.input_shape == (3, 32, 32)


def _boxes(distance=0.01, raised=1.5, spread=1.0):
    made = []
    for dim in trap.DIMS:
        for kind in trap.KINDS:
            for noise in trap.NOISES:
                far = kind == "ResNet-18" and noise < 1
                made.append(
                    grid.Box(
                        dim,
                        kind,
                        noise,
                        10_000,
                        500,
                        0.9 if far else distance,
                        0.01,
                        tuple(noise**2 * q for q in (0.1, 0.5, 1.0, 1.5, 2.0)),
                        (5.0 if far else 1.0, 0.1),
                        (1.0, 0.0) if kind == "optimal" else (raised, 0.1),
                        tuple(spread + 0.001 * i for i in range(10)),
                    )
                )
    return made


@pytest.mark.parametrize(
    ("change", "claim", "word"),
    [
        ({}, claims.law, HOLDS),
        ({"distance": 0.1}, claims.law, UNDECIDED),
        ({"distance": 0.3}, claims.law, FAILS),
        ({}, claims.sinks, HOLDS),
        ({"raised": 0.9}, claims.sinks, FAILS),
        ({"raised": 1.0}, claims.sinks, UNDECIDED),
        ({"distance": 0.3}, claims.sinks, FAILS),
        ({}, claims.spread, HOLDS),
        ({"spread": 1.2}, claims.spread, FAILS),
    ],
)
def test_claims_of_boxes_follow_the_numbers(change, claim, word):
    assert claim(_boxes(**change)).verdict is word


def _measured():
    """What would be measured were every claim of the paper true."""
    source = np.random.default_rng(1)

    def ratios(mean):
        return (mean + 0.001 * source.standard_normal(200)).tolist()

    shares = {f"{name} {dim}": (0, 10_000) for dim in trap.DIMS for name in ("far", "near")}
    shares |= {"named": (2000, 20_000), "blind": (0, 10_000)}
    limits = {name: {"hits": hits, "n": n} for name, (hits, n) in shares.items()}
    one = {"noise": 9.0, "crosses": 1.0, "0.1": {"hits": 10, "n": 1000}}
    attacks = {
        repr(noise): {
            name: source.lognormal(0 if name == rivals.OURS else 2 * side, 0.1, 20).tolist()
            for name in (rivals.OURS, rivals.ZERO, *rivals.RIVALS)
        }
        for noise, side in zip(rivals.NOISES, (1, 1, -1, -1), strict=True)
    }
    return {
        "rows": {"5": ratios(5), "24": ratios(25 / 24), "25": ratios(1), "100": ratios(1)},
        "limits": limits | {"blind law": 0.0},
        "crossing": {str(k): one | {"10.0": {"hits": 300, "n": 1000}} for k in draws.KAPPAS},
        "sightings": {str(k): ratios(1) for k in draws.SIGHTINGS},
        "batches": {f"{n} {b}": ratios(0.1) for n in draws.BATCH_NOISES for b in draws.BATCHES},
        "rivals": attacks,
        "certificates": [
            vars(grid.Certificate(dim, noise, 0.1, 1.0, 900, 10_000, 0.2, 1.0))
            for dim in trap.DIMS
            for noise in trap.CERTIFIED
        ],
    }


def test_every_claim_holds_where_all_is_as_the_paper_says():
    found = claims.all_claims(_measured(), _boxes())
    assert [claim.number for claim in found] == [*(f"3-{i}" for i in range(1, 10)), "IV.6"]
    assert {claim.verdict for claim in found} == {HOLDS}
    assert all(one.paper for claim in found for one in claim.findings)


@pytest.mark.parametrize(
    ("number", "spoil"),
    [
        ("3-2", lambda m: m["rows"].update({"25": [1.5] * 200})),
        ("3-4", lambda m: m["limits"].update({"far 4": {"hits": 500, "n": 10_000}})),
        ("3-5", lambda m: m["crossing"]["11"].update({"10.0": {"hits": 10, "n": 1000}})),
        ("3-7", lambda m: m["sightings"].update({"16": [1.2] * 200})),
        ("3-8", lambda m: m["batches"].update({"0.5 8": [-1.0, -1.1, -0.9]})),
        ("3-9", lambda m: m["rivals"]["0.02"].update(DLG=[1e-3 + 1e-5 * i for i in range(20)])),
        ("IV.6", lambda m: m["certificates"][0].update(hits=2000)),
    ],
)
def test_one_counterexample_refutes_its_claim_alone(number, spoil):
    measured = _measured()
    spoil(measured)
    found = {claim.number: claim.verdict for claim in claims.all_claims(measured, _boxes())}
    assert found.pop(number) is FAILS
    assert set(found.values()) == {HOLDS}


def test_a_run_keeps_its_parts_and_a_second_one_computes_nothing(monkeypatch, tmp_path):
    """Boxes are measured; the other parts, each tested above, are as if all claims held."""
    small = settings.Setting(12, 100, 2, 1, 2, 2, 2, 2, 2, 1)
    monkeypatch.setitem(reproduce.SETTINGS, "minutes", small)
    monkeypatch.setattr(trap, "rest", lambda inputs, kind, side: torch.ones(12).double())
    measured, told = _measured(), []
    for name in ("calibration", "surface"):  # the same at every run, and tested below
        monkeypatch.setattr(figures, name, lambda folder: None)
    for name in ("rows", "limits", "crossing", "sightings", "batches"):
        monkeypatch.setattr(draws, name, lambda *given, name=name: measured[name])
    made = [grid.Certificate(**row) for row in measured["certificates"]]
    monkeypatch.setattr(grid, "certificates", lambda draws: made)
    monkeypatch.setattr(
        rivals, "errors", lambda name, at, *rest: measured["rivals"][repr(at)][name]
    )

    def run():
        return reproduce.reproduce(
            "minutes", tmp_path, workers=1, color="photos", tell=lambda *now: told.append(now)
        )

    def refuse(*given, **named):
        raise AssertionError("done before")

    first = run()
    assert [claim.number for claim in first.claims][-1] == "IV.6"
    for figure in first.figures[2:]:
        assert (tmp_path / figure.file).read_bytes().startswith(b"\x89PNG")
    assert told[-1] == ("attacks of claim 3-9", 14, 14)
    assert "photos 2 x 2 x 1" in (tmp_path / "data.json").read_text()
    for module, name in ((draws, "rows"), (draws, "batches"), (grid, "box"), (rivals, "errors")):
        monkeypatch.setattr(module, name, refuse)
    assert run() == first


def test_tables_and_pictures(tmp_path):
    rows = [copies.Copied("none", (1.0, 1.0, 1.0), (0.5, 0.7, 0.6))]
    assert tables.noisy_copies(rows)[-1] == "| none | 1 | 1 | 1 | 0.600 (0.500 to 0.700) |"
    figures.calibration(tmp_path)
    assert (tmp_path / "noise_over_eta.png").read_bytes().startswith(b"\x89PNG")
    promised = [grid.Certificate(4, 0.1, 0.1, 1.0, 900, 1000, 0.9, 1.0)]
    assert "Beaten by more than a tenth in 1 of 1" in tables.certificates(promised)[-1]
