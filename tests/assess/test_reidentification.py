"""Is it this person? Matchers against chance, the bound, and attackers who do their best."""

import math

import numpy as np
import pytest
import torch

from leakbound import data
from leakbound._util.intervals import clopper_pearson
from leakbound.assess.criterion import Criterion
from leakbound.assess.reidentification import embedded, matcher_of, reidentify
from leakbound.bounds.codebook import identified
from leakbound.bounds.identification import gaussian
from leakbound.bounds.knowledge import naming_success
from leakbound.core import Batch, NotApplicable, Reconstruction
from leakbound.domains import of_shape
from leakbound.pairing import pair
from leakbound.randomness import normal, permutation, stream

TAIL = 0.0005
"""Of the intervals: two-sided 99.9 %."""
VECTORS = Criterion.of(of_shape((20,), (-10.0, 10.0)))


def _batch(inputs):
    return Batch(inputs, torch.zeros(len(inputs), dtype=torch.long))


def _digits():
    dataset = data.load("digits")
    return dataset.batch(torch.arange(len(dataset.labels)))


def _released_share(codewords, noise, trials, seed=0):
    """How often the nearest of the codewords (M, D), of norm 1, is right in a noisy release."""
    source = stream(seed, "released")
    criterion = Criterion.of(of_shape(tuple(codewords.shape[1:]), (-10.0, 10.0)))
    right = 0
    for _ in range(trials):
        order = permutation(len(codewords), source)
        truth, others = codewords[order[:1]], codewords[order[1:]]
        seen = truth + noise * normal(tuple(truth.shape), source)
        found = reidentify(_batch(truth), seen, _batch(others), criterion, source=source)
        right += found.right[0]
    return right


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0])
def test_two_opposite_candidates_attain_the_bound(noise):
    """Their clipped gradients are C and -C: the nearest one is right as often as the bound says."""
    one = torch.zeros(1, 4)
    one[0, 0] = 1.0
    trials = 3000
    right = _released_share(torch.cat([one, -one]), noise, trials)
    low, high = clopper_pearson(right, trials, TAIL)
    bound = naming_success(2, noise)
    assert low <= bound <= high
    assert bound == pytest.approx(0.5 * math.erfc(-1 / noise / math.sqrt(2)), rel=1e-12)


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_a_simplex_of_candidates_has_its_closed_form_and_stays_below_the_bound(noise):
    """The best M signals of norm 1; orthogonal ones of that distance have the same law."""
    size = 20
    simplex = torch.eye(size) - 1 / size
    simplex /= simplex[0].norm()
    trials = 3000
    right = _released_share(simplex, noise, trials)
    low, high = clopper_pearson(right, trials, TAIL)
    exact = float(identified(noise * math.sqrt((size - 1) / size), codewords=size))
    bound = naming_success(size, noise)
    assert low <= exact <= high
    assert exact < bound < 2.2 * exact


def test_the_bound_takes_equal_and_unequal_candidates():
    assert naming_success(1, 5.0) == 1.0
    assert naming_success(10, 1.0) == pytest.approx(float(gaussian(1.0, kappa=0.1)))
    assert naming_success([0.1] * 10, 1.0) == pytest.approx(naming_success(10, 1.0))
    assert naming_success([0.7, 0.3], lambda log: np.exp(log)) == pytest.approx(0.7)
    for wrong in (0, [0.5, 0.6], [1.5, -0.5]):
        with pytest.raises(ValueError, match="gallery"):
            naming_success(wrong, 1.0)


def test_unequal_candidates_are_never_named_more_often():
    """The best answer weighs likelihood by prior; one step of two unequal, opposite candidates."""
    shares = np.array([0.8, 0.2])
    noise = 1.0
    source = np.random.default_rng(0)
    true = source.random(200_000) < shares[1]
    seen = np.where(true, -1.0, 1.0) + noise * source.standard_normal(len(true))
    threshold = -(noise**2) / 2 * math.log(shares[0] / shares[1])
    right = int(((seen < threshold) == true).sum())
    assert clopper_pearson(right, len(true), TAIL)[0] <= naming_success(shares, noise)


@pytest.mark.parametrize("matcher", ["nearest", "edges", embedded(lambda x: x.flatten(1) ** 2)])
@pytest.mark.parametrize("size", [1, 4])
def test_reconstructions_without_the_update_are_right_by_chance(matcher, size):
    """The mean, or as many public images as the batch has: 1 / M, whatever their number."""
    every = _digits()
    source = stream(1, "blind")
    criterion = Criterion.of(of_shape((1, 8, 8)))
    right = trials = 0
    for _ in range(400 // size):
        order = permutation(every.size, source)
        truth = _batch(every.inputs[order[:size]])
        others = _batch(every.inputs[order[size:100]])
        blind = every.inputs[order[100 : 100 + size]]
        if size == 1:
            blind = every.inputs[order[100:]].mean(0, keepdim=True)
        found = reidentify(truth, blind, others, criterion, matcher, candidates=10, source=source)
        assert found.candidates == 10
        right += sum(found.right)
        trials += size
    low, high = clopper_pearson(right, trials, TAIL)
    assert low <= 0.1 <= high


def test_pairing_with_the_truth_would_find_people_in_anything():
    """Why the score is the best over reconstructions: the best of B! pairings knows the truth."""
    every = _digits()
    source = stream(2, "blind")
    criterion = Criterion.of(of_shape((1, 8, 8)))
    size = 32
    paired = right = trials = 0
    for _ in range(12):
        order = permutation(every.size, source)
        truth = _batch(every.inputs[order[:size]])
        others = _batch(every.inputs[order[size:1000]])
        blind = every.inputs[order[1000 : 1000 + size]]
        own = pair(truth, Reconstruction(blind)).inputs
        for i in range(size):
            nine = others.inputs[9 * i : 9 * i + 9]
            gallery = torch.cat([truth.inputs[i : i + 1], nine])
            paired += int(criterion.domain.distances(own[i : i + 1], gallery).argmin()) == 0
        found = reidentify(truth, blind, others, criterion, candidates=10, source=source)
        right += sum(found.right)
        trials += size
    assert clopper_pearson(paired, trials, TAIL)[0] > 0.2
    low, high = clopper_pearson(right, trials, TAIL)
    assert low <= 0.1 <= high


def test_noisy_reconstructions_are_named():
    every = _digits()
    criterion = Criterion.of(of_shape((1, 8, 8)))
    truth = Batch(every.inputs[:8], every.labels[:8])
    others = Batch(every.inputs[8:], every.labels[8:])
    seen = truth.inputs + 0.1 * normal((8, 1, 8, 8), stream(0, "noise"))
    for matcher in ("nearest", "edges"):
        found = reidentify(truth, seen.flip(0), others, criterion, matcher)
        assert (found.candidates, found.noise_multiplier, found.bound) == (100, None, None)
        assert sum(found.right) >= 7
    # Brightness and contrast do not hide edges.
    faint = 0.05 * truth.inputs + 0.5
    assert sum(reidentify(truth, faint, others, criterion, "edges").right) == 8
    assert sum(reidentify(truth, faint, others, criterion, "nearest").right) < 4
    bounded = reidentify(truth, seen, others, criterion, noise_multiplier=2.0)
    assert naming_success(100, 2.0) <= bounded.bound < 1.000001 * naming_success(100, 2.0)


def test_candidates_have_the_label_of_the_true_one():
    inputs = torch.arange(12.0).reshape(12, 1)
    labels = torch.tensor([0, 1] * 6)
    criterion = Criterion.of(of_shape((1,), (0.0, 12.0)))
    asked = []

    def matcher(reconstructions, candidates):
        asked.append(sorted(candidates[:, 0].tolist()))
        return -(reconstructions - candidates.T).abs()

    truth, others = Batch(inputs[:1], labels[:1]), Batch(inputs[1:], labels[1:])
    found = reidentify(truth, inputs[:1], others, criterion, matcher)
    assert (found.right, found.candidates) == ((True,), 6)
    assert asked == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]]
    with pytest.raises(NotApplicable, match="two candidates"):
        reidentify(truth, inputs[:1], Batch(inputs[1:2], labels[1:2]), criterion)


def test_blocks_of_candidates_give_the_same_names(monkeypatch):
    every = _digits()
    criterion = Criterion.of(of_shape((1, 8, 8)))
    truth, others = Batch(every.inputs[:8], every.labels[:8]), Batch(every.inputs, every.labels)
    seen = truth.inputs + 0.3 * normal((8, 1, 8, 8), stream(0, "noise"))
    whole = reidentify(truth, seen, others, criterion, "edges")
    monkeypatch.setattr("leakbound.assess.reidentification.BLOCK", 7 * 64)
    assert reidentify(truth, seen, others, criterion, "edges") == whole
    assert 0 < sum(whole.right) < 8


def test_near_copies_are_counted_and_drawn_by_lot():
    """A gallery with a copy of the true example: naming the copy is wrong, in half of the cases."""
    source = stream(3, "copies")
    right = near = 0
    trials = 300
    for _ in range(trials):
        people = normal((20, 20), source)
        truth, others = _batch(people[:1]), _batch(torch.cat([people[:1], people[1:]]))
        found = reidentify(truth, people[:1], others, VECTORS, candidates=21, source=source)
        right += sum(found.right)
        near += found.near
    assert near == trials
    low, high = clopper_pearson(right, trials, TAIL)
    assert low <= 0.5 <= high


@pytest.mark.parametrize(
    ("matcher", "match"),
    [
        (lambda a, b: 1 / 0, "'mine'.*raised ZeroDivisionError: division by zero"),
        (lambda a, b: torch.zeros(len(a)), r"'mine'.*returned shape \(2,\); return \(2, 12\)"),
        (lambda a, b: torch.full((len(a), len(b)), math.nan), "'mine'.*returned NaN"),
        (lambda a, b: "no", "'mine'.*raised TypeError"),
        (embedded(lambda x: x.sum(), "mine"), r"embedding 'mine'.*returned shape \(\)"),
        ("nobody.has:this", "no module 'nobody'"),
        ("leakbound:nothing", "has no 'nothing'"),
        ("neighbor", "matcher is 'neighbor'"),
        ("edges", "for images"),
    ],
)
def test_a_matcher_that_fails_is_named(matcher, match):
    people = normal((12, 20), stream(0, "people"))
    truth, others = _batch(people[:2]), _batch(people[2:])
    with pytest.raises(ValueError, match=match):
        reidentify(truth, people[:2], others, VECTORS, matcher, name="mine")


def test_what_is_given_must_fit():
    people = normal((12, 20), stream(0, "people"))
    truth, others = _batch(people[:1]), _batch(people[1:])
    with pytest.raises(ValueError, match="reconstructions holds examples"):
        reidentify(truth, people[:1, :3], others, VECTORS)
    for few in (0, 1):
        with pytest.raises(ValueError, match=f"candidates is {few}"):
            reidentify(truth, people[:1], others, VECTORS, candidates=few)
    with pytest.raises(ValueError, match="NaN"):
        reidentify(truth, people[:1] * math.nan, others, VECTORS)


def test_a_function_changes_nothing_and_may_return_arrays():
    people = normal((12, 20), stream(0, "people"))
    before = people.clone()

    def matcher(reconstructions, candidates):
        scores = -np.abs(reconstructions.numpy()[:, None] - candidates.numpy()).sum(2)
        candidates.zero_()
        reconstructions.zero_()
        return scores

    found = reidentify(_batch(people[:1]), people[:1], _batch(people[1:]), VECTORS, matcher)
    assert found.right == (True,)
    assert found.matcher == "your function"
    assert bool((people == before).all())
    assert matcher_of("nearest", VECTORS.domain)(people[:2], people).shape == (2, 12)
