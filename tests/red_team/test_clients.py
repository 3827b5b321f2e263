"""Statements on clients over rounds, against adversaries who plant models in a real mechanism.

A client's clipped update is the planted model's answer to the attacked example; all its other
examples are gated off. The mechanisms are simulated here number by number, with sums, shares,
weights and rounds. What an adversary gets is the measured spread of its best combination of all
releases, not the noise that a statement was computed from.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from leakbound.risk.deployment import laws_of, parse

from . import domains, matrix
from .adversaries import ADVERSARIES, Array, Sample, errors
from .matrix import Pair, Statement

DRAWS = 40_000
PSNR = (20.0, 25.5)
QUICK = [one for one in matrix.with_update() if one.name != "denoiser"]
CLIP = {"norm": 2.0, "kind": "l2", "at": "client"}


def spread(rounds: int, release: Callable[[np.random.Generator], Array], shift: Array) -> float:
    """Noise of the best unbiased linear combination of the releases of a unit's rounds, over C.

    `release` draws the (rounds, DRAWS) noise; `shift` (rounds,) is what a part of size 1 adds.
    """
    noise = release(np.random.default_rng(5))
    assert noise.shape == (rounds, DRAWS)
    covariance = np.atleast_2d(np.cov(noise))
    return float(1 / np.sqrt(shift @ np.linalg.solve(covariance, shift)))


def local(rounds: int, std: float) -> float:
    return spread(rounds, lambda g: std * g.standard_normal((rounds, DRAWS)), np.full(rounds, 2.0))


def shares(z: float, cohort: int, known: int) -> float:
    """The sum of all shares, less those that colluding or missing clients account for."""

    def release(g: np.random.Generator) -> Array:
        own = np.zeros((1, DRAWS))
        for _ in range(cohort - known):
            own += z * 2 / np.sqrt(cohort) * g.standard_normal((1, DRAWS))
        return own

    return spread(1, release, np.array([2.0]))


def averaged(z: float, cohort: int, weights: list[float], rounds: int = 1) -> float:
    """The server averages by weights and adds noise of zC / cohort; the first client is attacked"""
    std = z * 2 / cohort
    share = weights[0] / sum(weights)
    return spread(
        rounds, lambda g: std * g.standard_normal((rounds, DRAWS)), np.full(rounds, share * 2.0)
    )


def correlated(z: float, rounds: int, pattern: list[int]) -> float:
    """Noise that the next round takes back in part: rows C^-1 Z, for a C written down here."""
    factor = np.eye(rounds) + 0.5 * np.eye(rounds, k=-1)
    inverse = np.linalg.inv(factor)
    shift = np.zeros(rounds)
    shift[pattern] = 2.0
    return spread(rounds, lambda g: inverse @ (z * 2 * g.standard_normal((rounds, DRAWS))), shift)


def given(at: str, multiplier: float, **more: object) -> dict[str, object]:
    noise = {"multiplier": multiplier, "at": at, "seeded": False}
    if at == "server":
        noise["on"] = "mean"
    return {
        "clip": CLIP,
        "noise": noise,
        "weights": "uniform",
        "rounds": 1,
        "participation": {"law": "all"},
        "correlation": "none",
        "record": {"examples_per_client": 20},
        **more,
    }


FIXED = {"law": "fixed-size", "cohort": 10, "population": 50, "replies": 10}
SCENES = {
    "local": (given("client", 1.5, rounds=9), "server", [(1.0, local(9, 3.0))]),
    "shares": (
        given("share", 0.8, participation={"law": "all", "cohort": 40})
        | {"secure_aggregation": {"on": True, "kind": "secagg", "colluding": 15, "dropouts": 5}},
        "clients",
        [(1.0, shares(0.8, 40, 20))],
    ),
    "shares without aggregation": (
        given("share", 3.0, participation={"law": "all", "cohort": 40}),
        "server",
        [(1.0, shares(3.0, 40, 39))],
    ),
    "weights": (
        given("server", 2.0, participation={"law": "all", "cohort": 10, "replies": 10})
        | {"weights": "examples", "sizes": [15] + 9 * [5]},
        "clients",
        [(1.0, averaged(2.0, 10, [15] + 9 * [5]))],
    ),
    "fewer replies": (
        given("server", 4.0, participation={"law": "all", "cohort": 20, "replies": 5}),
        "clients",
        [(1.0, averaged(4.0, 20, [1.0] * 5))],
    ),
    "fixed size": (
        given("server", 1.0, rounds=6, participation=FIXED),
        "clients",
        [
            (share, averaged(1.0, 10, [1.0] * 10, k) if k else np.inf)
            for k, share in zip(
                *np.unique(
                    (np.random.default_rng(3).random((domains.HELD, 6)) < 0.2).sum(1),
                    return_counts=True,
                ),
                strict=True,
            )
        ],
    ),
}


def nearest(answers: Array, rows: Array, copies: int) -> Array:
    """(n,) mean squared error of each answer for the nearest of its row and the next ones."""
    n, dim = rows.shape
    after = rows[np.arange(n + copies - 1) % n]
    squares, own = np.square(after).sum(1), np.square(answers).sum(1)
    found = np.full(n, np.inf)
    for k in range(copies):
        inner = np.einsum("ij,ij->i", answers, after[k : k + n])
        found = np.minimum(found, (own + squares[k : k + n] - 2 * inner) / dim)
    return found


def test_the_nearest_of_several_rows():
    source = np.random.default_rng(1)
    answers, rows = source.standard_normal((2, 7, 5))
    each = [errors(answers, np.roll(rows, -k, 0)) for k in range(9)]
    for copies in (1, 3, 9):
        wanted = np.min(each[:copies], 0)
        assert nearest(answers, rows, copies) == pytest.approx(wanted, rel=1e-12)


def hits(domain: domains.Domain, adversary, seen, eta: float, counts: tuple[int, ...]) -> Array:
    """How many held-out examples an adversary reconstructs; each is seen with one of the noises.

    For each of the counts `copies`, an example counts if the answer for it matches it or one of
    the copies - 1 examples that follow it, which its client holds as well.
    """
    held = domain.held[False].rows
    shares_ = np.array([share for share, _ in seen], float)
    ends = np.round(np.cumsum(shares_ / shares_.sum()) * len(held)).astype(int)
    found, start = np.zeros(len(counts), int), 0
    for (_, noise), end in zip(seen, ends, strict=True):
        rows = held[start:end]
        if len(rows) == 0:
            continue
        source = np.random.default_rng(zlib.crc32(repr((adversary.name, noise, eta)).encode()))
        finite = min(noise, 1e6)
        fitted = adversary.fit(domain.public[False], finite, eta, source)
        answers = fitted.answers(Sample(rows), source)
        found += [int((nearest(answers, rows, copies) <= eta).sum()) for copies in counts]
        start = end
    return found


def stated(scene, psnr: float, unit: str) -> tuple[float, object]:
    table, audience, seen = SCENES[scene]
    own = next(e for e in laws_of(parse(table)) if (e.audience, e.unit) == (audience, unit))
    value = domains.mnist().stated[False].success_bound(own.bound, matrix.eta_of(psnr))[0][0]
    return float(value), seen


ONE_OF_EACH = ("local", "shares", "fixed size")
"""Of each way to add noise one: clients alone, shares of a sum, the server in sampled rounds."""


@pytest.mark.parametrize(
    "scene",
    [one if one in ONE_OF_EACH else pytest.param(one, marks=pytest.mark.slow) for one in SCENES],
)
def test_no_adversary_is_above_a_statement_on_clients(scene):
    """The statement on one example of a client, and the one on any of its 20."""
    domain = domains.mnist()
    n = len(domain.held[False].rows)
    for psnr in PSNR:
        both = [stated(scene, psnr, unit) for unit in ("example", "any example")]
        if min(value for value, _ in both) >= matrix.OPEN:
            continue
        for adversary in QUICK:
            counts = hits(domain, adversary, both[0][1], matrix.eta_of(psnr), (1, 20))
            for found, (value, _) in zip(counts, both, strict=True):
                pair = Pair(Statement(domain, False, psnr, 0.0, value), adversary.name, found, n)
                assert value >= matrix.OPEN or not pair.beaten, (adversary.name, found / n)


FORGOTTEN = {
    "local": {"rounds": 1},
    "shares": {
        "secure_aggregation": {"on": True, "kind": "secagg"} | {"colluding": 0, "dropouts": 0}
    },
    "shares without aggregation": {"noise": {"multiplier": 3.0, "at": "client", "seeded": False}},
    "weights": {"weights": "uniform", "participation": {"law": "all", "cohort": 10, "replies": 10}},
    "fewer replies": {"participation": {"law": "all", "cohort": 20, "replies": 20}},
    "fixed size": {"rounds": 1},
}


@pytest.mark.parametrize("scene", SCENES)
def test_statements_on_clients_are_nearly_attained(scene):
    """Two digits, each as likely: opposite answers attain the bound, and beat one that forgets
    rounds, weights, replies or who knows shares."""
    domain, (table, audience, seen) = domains.two_digits(), SCENES[scene]
    best = next(one for one in ADVERSARIES if one.name == "antipodal codebook")
    (found,), n = hits(domain, best, seen, matrix.eta_of(25.5), (1,)), len(domain.held[False].rows)
    true, wrong = (
        next(e for e in laws_of(parse(own)) if (e.audience, e.unit) == (audience, "example"))
        for own in (table, table | FORGOTTEN[scene])
    )
    half = np.log(0.5)
    value, less = float(true.bound(half)[0]), float(wrong.bound(half)[0])
    assert found / n == pytest.approx(value, abs=4 * np.sqrt(value * (1 - value) / n) + 1e-3)
    assert not Pair(Statement(domain, False, 25.5, 0.0, value), best.name, found, n).beaten
    assert Pair(Statement(domain, False, 25.5, 0.0, less), best.name, found, n).beaten
