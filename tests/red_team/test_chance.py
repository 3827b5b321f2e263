"""*Exposed* is never chance: with almost nothing sent, at most 1 % of runs are exposed."""

from __future__ import annotations

import pytest

from leakbound import attacks, simulate
from leakbound.core import ThreatModel
from leakbound.randomness import stream

from ..test_contracts import FEW
from .chance import KINDS, SIZES, Tally, kind, tally

CHEAP = {
    name: FEW[name]
    for name in (
        "codebook",
        "candidate_likelihood",
        "linear_trap",
        "robbing_the_fed",
        "linear_inversion",
        "inverting_gradients",
        "mean_image",
        "tab_leak",
        "token_rows",
        "token_span",
    )
}


def many(found: dict[str, attacks.Attack], sizes: tuple[int, ...], seeds: range, name: str):
    each = {
        (attack, size): tally(name, size, own, seeds)
        for attack, own in found.items()
        for size in sizes
    }
    return each, sum(each.values(), Tally(0, 0, 0))


@pytest.mark.parametrize("name", KINDS)
def test_few_runs_are_exposed(name):
    each, total = many(CHEAP, (1, 8), range(6), name)
    assert total.runs > 30
    assert total.exposed <= total.most, each


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_few_runs_of_any_attack_are_exposed(name):
    each, total = many(FEW, SIZES[:2], range(100, 120), name)
    assert total.runs > 150  # of texts, five attacks apply
    assert total.exposed <= total.most, each


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_few_large_batches_are_exposed(name):
    each, total = many(CHEAP, SIZES[2:], range(100, 150), name)
    assert total.runs > 100
    assert total.exposed <= total.most, each


def test_the_count_alone_would_be_wrong():
    """What the permutation test prevents: nearly every batch of 64 digits has a match."""
    found = tally("digits", 64, attacks.Codebook(), range(6))
    assert found.matched >= 4
    assert found.exposed <= 1


@pytest.mark.parametrize("name", ["digits", "prototypes", "near mean", "german", "series"])
def test_without_public_examples_chance_is_not_called_exposed(name):
    """No decoys are left: only what is far closer than any guess counts."""
    each, total = {}, Tally(0, 0, 0)
    for attack in ("linear_inversion", "inverting_gradients", "robbing_the_fed", "gauss_newton"):
        for size in (1, 8):
            each[attack, size] = tally(name, size, FEW[attack], range(6), public=False)
            total += each[attack, size]
    assert total.runs >= 30
    assert total.exposed == 0, each


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("size", [1, 4])
def test_what_really_leaks_stays_exposed(size, labels):
    """Without noise, the same rule still says exposed: with decoys, and without."""
    own = kind("digits")
    for seed in range(3):
        batch, public = own.drawn(size, seed)
        model = own.build(stream(seed, "model"))
        for others in (public, None):
            settings = "" if size == 1 else ",steps=300"
            name = "linear_inversion" if size == 1 else "inverting_gradients"
            threat = ThreatModel(labels_known=labels)
            attack = name + settings
            run = simulate(model, batch, attack=attack, public=others, seed=seed, threat=threat)
            if max(run.scores) > 25:
                assert "exposed" in run.verdict, (seed, run.scores, run.assessment.chance)
