"""*Person named*: what chance does, whoever is in the gallery, and what an attack does."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakbound import data, registry, simulate
from leakbound._util.intervals import clopper_pearson
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import (
    DISCLOSURES,
    EXPOSED,
    NAMED,
    PROTECTED,
    Bound,
    Reidentification,
)
from leakbound.assess.reidentification import reidentify
from leakbound.assess.verdict import (
    LEVEL,
    decide,
    named_by_chance,
    verdict,
)
from leakbound.bounds.knowledge import naming_success
from leakbound.core import Batch, NotApplicable, Server, ThreatModel
from leakbound.domains import of_shape
from leakbound.randomness import normal, permutation, stream

TAIL = 0.0005
RUNS = 300
ALLOWED = RUNS * (LEVEL + 2 * math.sqrt(LEVEL * (1 - LEVEL) / RUNS))
"""How many of RUNS may name somebody if chance does it in one of a hundred."""
VECTORS = Criterion.of(of_shape((2,), (-10.0, 10.0)), psnr=100.0)


def _found(right, candidates=100, matcher="nearest", **more):
    return Reidentification(matcher=matcher, right=tuple(right), candidates=candidates, **more)


def _protects():
    return Bound(
        name="probability", value=0.001, psnr=20.0, prior="public examples", covers="all",
        rests_on_prior=False, excludes_threshold=True, on_average=False, probability=0.001,
        accepted=0.01, basis="sample",
    )  # fmt: skip


def test_the_p_value_is_the_binomial_tail_of_every_way_together():
    one = [_found([True, True, False]), _found([False] * 3)]
    assert named_by_chance([one]) == pytest.approx(stats.binom.sf(1, 6, 0.01))
    other = [_found([False] * 3, matcher="edges")]
    assert named_by_chance([one, other]) == pytest.approx(2 * stats.binom.sf(1, 6, 0.01))
    assert named_by_chance([]) is None
    assert named_by_chance([other]) == pytest.approx(1.0)
    # Galleries of several sizes: all outcomes, one after the other.
    mixed = [_found([True, True], 4), _found([True, False], 10), _found([False], 2)]
    chances = [0.25, 0.25, 0.1, 0.1, 0.5]
    tail = 0.0
    for outcome in np.ndindex(*[2] * 5):
        law = math.prod(p if hit else 1 - p for hit, p in zip(outcome, chances, strict=True))
        tail += law * (sum(outcome) >= 3)
    assert named_by_chance([mixed]) == pytest.approx(tail)
    # Only one of a person's examples counts.
    thrice = _found([True] * 3, counted=(True, False, False))
    # Exactly the level, or one right name of a hundred would count on some machines only.
    assert named_by_chance([[thrice]]) == LEVEL
    with pytest.raises(ValueError, match="right and counted"):
        _found([True], counted=(True, False))


def test_named_is_never_protected_and_never_hides_more():
    assert NAMED in DISCLOSURES
    assert decide(named=True, excluded={"sample"}) == NAMED
    assert decide(named=True, exposed=True) == EXPOSED
    many = [_found([True] * 4 + [False] * 4)]
    assert verdict([False] * 8, [_protects()]) == PROTECTED
    assert verdict([False] * 8, [_protects()], reidentified=many) == NAMED
    assert verdict([False], [_protects()], reidentified=[_found([True]), _found([True])]) != NAMED


@pytest.mark.parametrize(("size", "seeds"), [(1, 6), (8, 2), (32, 1)])
def test_guesses_name_nobody(size, seeds):
    """The mean, prototypes of all classes: by both matchers, pooled over the seeds of a run."""
    digits = data.load("digits")
    criterion = Criterion.of(of_shape((1, 8, 8)))
    order = permutation(len(digits.labels), stream(0, "public"))
    public, rest = order[:300], order[300:]
    classes = digits.labels[public]
    prototypes = torch.cat([digits.inputs[public][classes == one][:1] for one in range(10)])
    guesses = [digits.inputs[public].mean(0, keepdim=True), prototypes]
    named = 0
    for run in range(RUNS):
        ways = {matcher: [] for matcher in ("nearest", "edges")}
        for seed in range(seeds):
            source = stream(seeds * run + seed, "drawn")
            places = rest[permutation(len(rest), source)]
            truth, others = digits.batch(places[:size]), digits.batch(places[size:700])
            for matcher, some in ways.items():
                found = reidentify(
                    truth, guesses[run % 2], others, criterion, matcher, candidates=20,
                    source=stream(seeds * run + seed, "gallery"),
                )  # fmt: skip
                some.append(found)
        named += named_by_chance(ways.values()) <= LEVEL
    assert named <= ALLOWED


def test_galleries_share_no_candidate():
    """Else one gallery's odd candidates are all others' too, and answers depend on each other."""
    people = normal((40, 2), stream(0, "people"))
    seen = []

    def matcher(reconstructions, candidates):
        return -torch.cdist(reconstructions, candidates)

    named = 0
    for run in range(RUNS):
        places = permutation(40, stream(run, "drawn"))
        truth = Batch(people[places[:8]], torch.zeros(8, dtype=torch.long))
        others = Batch(people[places[8:]], torch.zeros(32, dtype=torch.long))
        found = reidentify(
            truth, torch.zeros(1, 2), others, VECTORS, matcher, source=stream(run, "gallery")
        )
        assert found.candidates == 1 + 32 // 8
        seen += found.answers
        named += named_by_chance([[found]]) <= LEVEL
    assert named <= ALLOWED
    low, high = clopper_pearson(sum(seen), len(seen), TAIL)
    assert low <= 1 / 5 <= high


def test_a_persons_examples_and_near_copies_count_once():
    """Eight scans of one person are all named, or none: chance does that in one of M updates."""
    source = stream(1, "scans")
    people = normal((400, 2), source)
    truth = Batch(people[:1].expand(8, 2).contiguous(), torch.zeros(8, dtype=torch.long))
    others = Batch(people[8:], torch.zeros(392, dtype=torch.long))
    found = reidentify(truth, people[:1], others, VECTORS, candidates=20)
    assert found.right == (True,) * 8
    assert found.counted == (True, *(False,) * 7)
    apart = Batch(people[:8] * 9, truth.labels)
    far = Criterion(VECTORS.domain, 0.0)
    assert reidentify(apart, people[:1], others, far, candidates=20).counted == ()
    owner = torch.tensor([0, 0, 1, 1, 2, 3, 3, 0])
    found = reidentify(apart, people[:1], others, far, candidates=20, persons=owner)
    assert found.counted == (True, False, True, False, True, True, False, False)


def _population(source):
    """Two persons with 30 examples lie in the middle, where guesses are near; ten have three."""
    counts = torch.tensor([30, 30, *[3] * 10])
    owner = torch.repeat_interleave(torch.arange(12), counts)
    middle = normal((12, 2), source) * (3.0 / counts[:, None])
    return middle[owner] + 0.02 * normal((len(owner), 2), source), owner


@pytest.mark.parametrize("by_person", [False, True])
def test_persons_with_many_examples_are_named_by_chance_alone(by_person):
    """Such a person is more likely to be in an update; a guess near them must gain nothing."""
    right = trials = 0
    chance = 0.0
    for run in range(400):
        source = stream(run, "population")
        inputs, owner = _population(source)
        places = permutation(len(owner), source)
        here, rest = places[:2], places[2:]
        truth = Batch(inputs[here], torch.zeros(2, dtype=torch.long))
        others = Batch(inputs[rest], torch.zeros(len(rest), dtype=torch.long))
        try:
            found = reidentify(
                truth, torch.zeros(1, 2), others, VECTORS, candidates=8, source=source,
                persons=owner[here], other_persons=owner[rest] if by_person else None,
            )  # fmt: skip
        except NotApplicable:
            continue
        right += sum(found.answers)
        trials += len(found.answers)
        chance += len(found.answers) / found.candidates
    assert trials > 300
    assert clopper_pearson(right, trials, TAIL)[0] <= chance / trials
    assert chance / trials <= clopper_pearson(right, trials, TAIL)[1]


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0])
def test_another_picture_names_its_person_as_often_as_the_bound_says(noise):
    """The adversary of the bound: two persons whose gradients are opposite, and who owns what.

    They know both pictures of everybody, and take the sign of the release. One of the pictures is
    in the update, the other in the gallery.
    """
    trials = 3000
    source = stream(2, "release")
    right = 0
    #                 first and second picture of either person
    pictures = torch.tensor([[1.0, 0.3], [1.0, -0.3], [-1.0, 0.3], [-1.0, -0.3]])
    owner = torch.tensor([0, 0, 1, 1])

    def adversary(reconstructions, candidates):
        return reconstructions[:, :1] * candidates[:, 0]

    for _ in range(trials):
        places = permutation(4, source)
        here, rest = places[:1], places[1:]
        truth = Batch(pictures[here], torch.zeros(1, dtype=torch.long))
        others = Batch(pictures[rest], torch.zeros(3, dtype=torch.long))
        sent = truth.inputs * torch.tensor([1.0, 0.0]) + noise * normal((1, 2), source)
        found = reidentify(
            truth, sent, others, VECTORS, adversary, source=source, noise_multiplier=noise,
            persons=owner[here], other_persons=owner[rest],
        )  # fmt: skip
        right += found.right[0]
        assert found.by_person
        assert found.candidates == 2
    low, high = clopper_pearson(right, trials, TAIL)
    assert low <= naming_success(2, noise) <= high
    assert found.bound == pytest.approx(naming_success(2, noise), rel=1e-6)


def test_by_person_needs_another_picture_and_people_alike():
    pictures = normal((9, 2), stream(4, "pictures"))
    owner = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 4])
    batch = Batch(pictures, torch.zeros(9, dtype=torch.long))

    def ask(*here, persons=owner):
        rest = [place for place in range(9) if place not in here]
        return reidentify(
            Batch(batch.inputs[[*here]], batch.labels[[*here]]), pictures[:1],
            Batch(batch.inputs[rest], batch.labels[rest]), VECTORS,
            persons=None if persons is None else persons[[*here]], other_persons=owner[rest],
        )  # fmt: skip

    assert ask(3).candidates == 2  # the other person with two
    for alone in [(0,), (7,), (3, 4), (3, 5)]:  # three, one, both pictures, both such persons
        with pytest.raises(NotApplicable, match="by person needs"):
            ask(*alone)
    with pytest.raises(ValueError, match="without persons"):
        ask(3, persons=None)


@pytest.mark.slow
def test_noise_of_a_thousand_names_nobody():
    """The linear trap under DP-SGD on digits, eight in an update, as `simulate` judges it."""
    digits = data.load("digits")
    named = 0
    for run in range(RUNS):
        order = permutation(len(digits.labels), stream(run, "drawn"))
        found = simulate(
            registry.parse(
                "model", "mlp,hidden=[16]", input_shape=(1, 8, 8), classes=10,
                generator=stream(run, "model"),
            ),
            digits.batch(order[:8]),
            attack="linear_trap",
            defense="dp_sgd,noise_multiplier=1000",
            public=digits.batch(order[8:1500]),
            threat=ThreatModel(server=Server.MALICIOUS),
            error_bound="none",
            seed=run,
        )  # fmt: skip
        named += found.verdict == NAMED
    assert named <= ALLOWED
