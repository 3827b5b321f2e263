"""The bigram prior of text, against enumeration and Monte Carlo."""

import itertools

import numpy as np
import pytest
from scipy import stats

from leakbound import data
from leakbound.bounds.language import BigramText
from leakbound.risk.examples import Examples

VOCABULARY, LENGTH = 4, 4


@pytest.fixture(scope="module")
def sequences():
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 3, (200, LENGTH))
    rows[:60] = [0, 1, 2, 1]
    rows[60:90, 1] = 2
    return rows


@pytest.fixture(scope="module")
def model(sequences):
    return BigramText.from_sequences(sequences, VOCABULARY)


def chances(model):
    """(V,) first tokens and (V, V) those after, written out."""
    after = model.follows.toarray() + model.mixed[:, None] * model.shared
    return model.first, after


def enumerated(model):
    """All sequences and their probabilities."""
    first, after = chances(model)
    every = np.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    each = first[every[:, 0]]
    for before, now in itertools.pairwise(every.T):
        each = each * after[before, now]
    return every, each


def test_chances_are_those_of_the_formula(model, sequences):
    first, after = chances(model)
    assert first.sum() == pytest.approx(1)
    np.testing.assert_allclose(after.sum(1), 1)
    pairs = [(int(a), int(b)) for row in sequences for a, b in itertools.pairwise(row)]
    begun = [b for a, b in pairs if a == 1]
    kinds, count = len(set(begun)), len(begun)
    shared = (np.sum(sequences == 2) + 1) / (sequences.size + VOCABULARY)
    expected = (begun.count(2) + kinds * shared) / (count + kinds)
    assert after[1, 2] == pytest.approx(expected)
    assert after[1, 3] == pytest.approx(kinds / (count + kinds) * model.shared[3])  # never seen
    np.testing.assert_allclose(after[3], model.shared)  # nothing ever followed


def test_no_sequence_matches_more_often_than_the_bound(model):
    every, each = enumerated(model)
    apart = (every[:, None] != every[None]).sum(2)
    pure = np.array(model._best(LENGTH))
    for level in range(LENGTH + 1):
        largest = ((apart <= level) @ each).max()
        assert largest <= pure[level] * (1 + 1e-12)
        if level in (0, LENGTH):
            assert pure[level] == pytest.approx(largest)
        assert largest > pure[level] / 2  # it is no empty bound


def test_the_bound_is_at_least_what_public_sequences_match(model, sequences):
    count, n = int(((sequences != [0, 1, 2, 1]).sum(1) == 0).sum()), len(sequences)
    found = float(np.exp(model.log_kappa(0)))
    limit = max(found, model._best(0)[0])
    assert found == pytest.approx(limit)
    # so few matches have a chance of 5 % at the limit (Clopper-Pearson)
    assert stats.binom.cdf(count, n, found) <= 0.05 + 1e-9
    several = np.exp(model.log_kappa(np.array([0, 1.5, 9])))
    assert several[0] == pytest.approx(found)
    assert several[2] == 1
    assert several[1] == pytest.approx(float(np.exp(model.log_kappa(1))))


def test_drawn_sequences_match_within_the_bound(model):
    generator, first_after = np.random.default_rng(1), chances(model)
    draws = np.zeros((20_000, LENGTH), int)
    draws[:, 0] = generator.choice(VOCABULARY, len(draws), p=first_after[0])
    for place in range(1, LENGTH):
        u = generator.random(len(draws))[:, None]
        draws[:, place] = (u > first_after[1][draws[:, place - 1]].cumsum(1)).sum(1)
    every, each = enumerated(model)
    best = every[each.argmax()]
    hits = float((draws == best).all(1).mean())
    error = 4 * np.sqrt(hits / len(draws))
    bound = model._best(0)[0]
    assert abs(hits - bound) < error
    assert abs(hits - 1.3 * bound) > error  # it would see another law


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (np.zeros((10, 3)), "64 or more"),
        (np.full((80, 3), 9), "the vocabulary has the tokens 0 to 3"),
        (np.full((80, 3), -1), "run from -1 to -1"),
    ],
)
def test_wrong_sequences_are_refused(rows, said):
    with pytest.raises(ValueError, match=said):
        BigramText.from_sequences(rows, VOCABULARY)


def test_bound_and_calibrate_take_it():
    examples = Examples.of("topics")
    prior = examples.prior("bigram")
    assert prior.name.startswith("bigram model")
    assert prior.dim == examples.dim
    assert float(prior.log_kappa(8)) > float(prior.log_kappa(0))
    with pytest.raises(ValueError, match="no model of data"):
        examples.prior("gaussian")
    with pytest.raises(ValueError, match="no model of data"):
        Examples.of("digits").prior("bigram")


def test_it_fits_a_large_vocabulary_in_seconds():
    text = data.load("topics")
    model = BigramText.from_sequences(text.inputs.numpy(), 50_000)
    assert float(np.exp(model.log_kappa(0))) < 0.02


@pytest.mark.parametrize("level", [0, 1, 4])
def test_candidates_from_public_text_do_not_beat_it_on_held_out_text(level):
    """The red team's check: the best public candidates, on sentences that nothing was fitted to."""
    text = data.load("topics")
    rows = text.inputs.numpy()
    beaten = 0
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(rows))
        public, held = rows[order[: len(rows) // 2]], rows[order[len(rows) // 2 :]]
        kappa = float(
            np.exp(BigramText.from_sequences(public, text.domain.vocabulary).log_kappa(level))
        )
        near = np.stack([(public != row).sum(1) <= level for row in public]).sum(1)
        for best in near.argsort()[-5:]:
            share = ((held != public[best]).sum(1) <= level).mean()
            beaten += share > kappa + 3 * np.sqrt(kappa * (1 - kappa) / len(held))
    assert beaten == 0
