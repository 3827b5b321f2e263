"""The study's arithmetic against other code, and its parts on a small scale."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from leakbound import audit
from leakbound.defenses import GaussianNoise, LocalOptimalNoise
from leakbound.experiments import paired
from leakbound.experiments.optimal_defenses import claims, points, side_channel
from leakbound.experiments.optimal_defenses.__main__ import plans
from leakbound.experiments.optimal_defenses.points import Key, Point


def test_plans_are_the_same_cells_for_both_attackers():
    found = plans()
    naive, aware = found["naive"], found["aware"]
    assert not naive.threat.defense_known
    assert aware.threat.defense_known
    assert naive.defenses == aware.defenses
    assert naive.seeds == aware.seeds
    assert found["sgd"].utility.optimizer == "sgd"
    assert len(found["sgd"].utility_cells()) == len(aware.utility_cells())


def test_paired_is_a_paired_t_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.1, 2, 9), rng.normal(0, 2, 9)
    found = paired.paired(dict(enumerate(a)), dict(enumerate(b)))
    other = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((other.low, other.high))
    assert paired.paired({0: 1.0, 1: -1.0}, {0: 0.0, 1: 0.0}).word == "undecided"
    assert paired.paired({0: 1.0, 1: 1.1}, {0: 0.0, 1: 0.1}).word == "holds"
    assert paired.paired({0: 0.0, 1: 0.1}, {0: 1.0, 1: 1.1}).word == "does not hold"


def test_at_equal_loss_compares_curves_where_they_meet():
    """Two straight lines 3 dB apart in error at every loss."""
    losses = [{0: x, 1: x + 0.01} for x in (1.0, 1.5, 2.0)]
    lower = [{s: 10 ** (v / 5) for s, v in loss.items()} for loss in losses]
    higher = [{s: v * 2 for s, v in error.items()} for error in lower]
    found = paired.at_equal_loss(
        list(zip(losses, higher, strict=True)), list(zip(losses, lower, strict=True))
    )
    assert found.mean == pytest.approx(10 * math.log10(2))
    assert found.n == 2
    far = [({0: 9.0, 1: 9.0}, {0: 1.0, 1: 1.0}), ({0: 9.5, 1: 9.5}, {0: 1.0, 1: 1.0})]
    assert paired.at_equal_loss(far, list(zip(losses, lower, strict=True))) is None


def test_reading_an_audit(tmp_path):
    plan = audit.parse(
        {
            "data": {"source": "digits"},
            "models": [{"name": "mlp", "hidden": [8]}],
            "attacks": [{"name": "inverting_gradients", "steps": 2}, {"name": "linear_inversion"}],
            "defenses": [{"name": "gaussian_noise", "noise_std": [0.1, 1.0]}],
            "seeds": [0, 1],
            "utility": {"rounds": 6, "repeats": 2},
        }
    )
    audit.audit(plan, tmp_path / "run", pictures=False)
    found = points.read(tmp_path / "run")
    assert set(found) == {Key("gaussian_noise", "noise_std", x) for x in (0.1, 1.0)}
    point = found[Key("gaussian_noise", "noise_std", 0.1)]
    assert set(point.mse) == {"inverting_gradients", "linear_inversion", "blind"}
    with (tmp_path / "run" / "records.jsonl").open() as stream:
        records = [json.loads(line) for line in stream]
    own = [r for r in records if r["seed"] == 1 and r["defense"]["parameters"]["noise_std"] == 0.1]
    best = min(np.mean(r["metrics"]["mse"]) for r in own)
    blind = 10 ** (-own[0]["blind"]["psnr"][0] / 10)
    assert point.strongest()[1] == pytest.approx(min(best, blind))
    assert set(point.early) == {0, 1}
    assert point.floor[0] > 0


def _study(better):
    """Points where every form of ours has `better` times the error of its rival, at its loss."""
    found = {}
    names = [("gaussian_noise", "noise_std", ""), ("local_optimal_noise", "noise_std", "")]
    names += [("local_optimal_noise", "utility_std", ""), ("optimal_noise", "noise_std", "")]
    names += [("optimal_noise", "noise_std", claims.LAYERS)]
    names += [(n, "rate", "") for n in ("magnitude_pruning", "local_optimal_pruning")]
    names += [("optimal_pruning", "rate", "")]
    for name, by, variant in names:
        plain = name in ("gaussian_noise", "magnitude_pruning")
        for level in claims.RATES if by == "rate" else claims.NOISES:
            point = Point()
            for seed in range(4):
                error = (level + 0.01 * seed) * (1 if plain else better)
                point.mse[claims.PAPER][seed] = error
                point.early[seed] = point.late[seed] = level - (0 if plain else 0.01) + seed / 1e3
            found[Key(name, by, level, variant)] = point
    return claims.Study(found, found, found)


@pytest.mark.parametrize(("better", "word"), [(2.0, "holds"), (0.5, "does not hold")])
def test_claims_follow_the_numbers(better, word):
    rows = claims.rows(_study(better))
    assert {row.claim for row in rows} == {"0-1", "0-2", "0-3", "0-4", "public"}
    for row in rows:
        if row.claim in ("0-2", "public") or "equal loss" in row.statement:
            assert row.verdict == word, row
            assert "n = 4" in row.measured


def test_the_pattern_names_the_record():
    """Few candidates and trials; the full figures are in the results page."""
    found = side_channel.identify("mlp", LocalOptimalNoise(1e4), trials=10, candidates=20)
    plain = side_channel.identify("mlp", GaussianNoise(1e4), trials=10, candidates=20)
    assert found.hits >= 9
    assert plain.hits <= 4
    low, high = found.interval
    assert low <= found.hits / found.n <= high


def _family(levels, shift, source, base):
    """Levels (loss, extra dB) of a family whose error grows by 10 dB for each doubled loss."""
    made = []
    for loss, extra in levels:
        own = {s: loss * (1 + 0.02 * source.normal()) for s in range(6)}
        level = 10 * math.log2(loss / 0.2) + shift + extra - 20
        made.append((own, {s: 10 ** ((level + base[s] + source.normal()) / 10) for s in own}))
    return made


def test_at_equal_loss_does_not_depend_on_useless_levels():
    """A family that is 2 dB safer is found so with and without a level that costs and brings none;
    of equal families few are told apart."""
    plain, more = [(0.2, 0), (0.25, 0), (0.4, 0)], [(0.2, -6), (0.2, 0), (0.25, 0), (0.4, 0)]
    source = np.random.default_rng(0)

    def words(ours, theirs, shift):
        found = []
        for _ in range(100):
            base = 2 * source.normal(size=6)
            gain = paired.at_equal_loss(
                _family(ours, shift, source, base), _family(theirs, 0, source, base)
            )
            found.append(gain.word)
        return found

    for ours, theirs in ((plain, plain), (more, plain), (plain, more)):
        assert words(ours, theirs, 2).count("holds") >= 90
        assert words(ours, theirs, 0).count("undecided") >= 88


def test_at_equal_loss_needs_most_seeds():
    losses = [dict.fromkeys(range(6), x) for x in (1.0, 2.0)]
    errors = [dict.fromkeys(range(6), x) for x in (0.1, 0.2)]
    apart = [{s: x + 5 * (s > 2) for s, x in loss.items()} for loss in losses]
    assert (
        paired.at_equal_loss(zip(apart, errors, strict=True), zip(losses, errors, strict=True))
        is None
    )
