"""The codebook on real digits: what is sent, what is named, and how often, against its law."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from leakbound import data
from leakbound.attacks import Codebook
from leakbound.client import example_gradients
from leakbound.core import Batch, NotApplicable, Server, Task, ThreatModel
from leakbound.defenses import (
    ClipExamples,
    DpSgd,
    GaussianNoise,
    GradientDropout,
    LocalAggregation,
    MagnitudePruning,
    NoDefense,
    SecureAggregation,
    chain,
)
from leakbound.inspection import inspect
from leakbound.models import mlp
from leakbound.protocol import play
from leakbound.randomness import stream

from ..red_team import codebooks as law

MALICIOUS = ThreatModel(server=Server.MALICIOUS)
UNKNOWN = ThreatModel(server=Server.MALICIOUS, defense_known=False, labels_known=False)


@pytest.fixture(scope="module")
def digits():
    """1,000 public digits and 4,000 others."""
    given = data.load("mnist5k")
    order = torch.randperm(5000, generator=stream(0, "digits"))
    public = Batch(given.inputs[order[:1000]], given.labels[order[:1000]])
    return public, Batch(given.inputs[order[1000:]], given.labels[order[1000:]])


@pytest.fixture(scope="module")
def task(digits):
    model = mlp(input_shape=(1, 28, 28), classes=10, generator=stream(0, "model"), hidden=(8,))
    return Task.of(model, classes=10, public=digits[0])


@pytest.fixture(scope="module")
def planted(task):
    return Codebook(psnr=15.0).plant(task)


def parts(batch, size, count):
    for start in range(0, size * count, size):
        yield Batch(batch.inputs[start : start + size], batch.labels[start : start + size])


def errors(planted, inputs):
    """(n, M) mean squared errors of the codewords, by their definition."""
    words, flat = planted.buffers["words"].double(), inputs.flatten(1).double()
    apart = torch.cdist(flat, words, compute_mode="donot_use_mm_for_euclid_dist")
    return apart.square() / flat.shape[1]


def answer(planted, batches, defense=None, threat=MALICIOUS, seed=0):
    """The answer to one round of a model that was planted before."""
    sources = [stream(seed, "codebook", i) for i in range(len(batches) + 1)]
    played = play(planted, batches, defense or NoDefense(), sources, threat=threat)
    return Codebook()(played.observation, stream(seed, "attack"))


def agree(planted, batches, found):
    """How many of the nearest codewords were named, with how often."""
    inputs = torch.cat([batch.inputs for batch in batches])
    true = Counter(errors(planted, inputs).argmin(1).tolist())
    said = Counter(errors(planted, found.inputs).argmin(1).tolist())
    return (true & said).total()


# what is sent


def test_a_gradient_names_the_nearest_codeword(planted, digits):
    one = Batch(digits[1].inputs[:50], digits[1].labels[:50])
    sent = example_gradients(planted, one.inputs, one.labels)
    nearest = errors(planted, one.inputs).argmin(1)
    onehot = torch.nn.functional.one_hot(nearest, sent.shape[1]).float()
    assert torch.equal(sent, 1000 * onehot)
    clipped = play(planted, [one], chain(ClipExamples(0.5)), [stream(0), stream(1)]).update.rows
    torch.testing.assert_close(clipped, 0.5 * onehot)
    assert len(nearest.unique()) > 20


def test_codewords_are_the_greedy_cover(task):
    """Another program: explicit candidates, and counts anew in every turn."""
    public = task.public.inputs[:40].flatten(1).double()
    within, near = 10**-1.2, 10**-0.7
    apart = (public[:, None] - public).square().mean(2)
    groups = {(i,) for i in range(40)}
    for k in (2, 3, 4, 6, 8, 12):
        for i in range(40):
            row = apart[i].argsort()[:k]
            groups |= {tuple(sorted(row.tolist()))} if apart[i][row[-1]] <= near else set()
    pairs = sorted((float(apart[i, j]), i, j) for i in range(40) for j in range(i))
    groups |= {(j, i) for gap, i, j in pairs[:400] if gap <= near}
    means = torch.stack([public[list(group)].mean(0) for group in sorted(groups)])
    covers = (means[:, None] - public).square().mean(2) <= 1.15 * within
    shares = []
    while covers.any():
        best = covers.sum(1).argmax()
        shares.append(int(covers[best].sum()))
        covers &= ~covers[best].clone()
    found = Codebook(psnr=12.0, limit=40).plant(task)
    assert (found.buffers["shares"] * 40).round().tolist() == shares
    few = Codebook(psnr=12.0, limit=40, codewords=3).plant(task)
    assert torch.equal(few.buffers["words"], found.buffers["words"][:3])
    assert sum(len(group) > 1 for group in groups) > 40
    assert max(shares) > 3


def test_the_inspection_marks_it(planted):
    assert [finding.layer for finding in inspect(planted)] == ["loss"]


# what is named


@pytest.mark.parametrize("size", [1, 4, 64])
@pytest.mark.parametrize(
    "defense",
    [
        NoDefense(),
        DpSgd(1.0, 0.01),
        DpSgd(10.0**4, 0.01),
        GaussianNoise(1.0),
        MagnitudePruning(0.5),
        LocalAggregation(3, 0.1),
    ],
    ids=lambda defense: type(defense).__name__,
)
def test_with_little_noise_every_codeword_is_named(planted, digits, size, defense):
    batch = next(parts(digits[1], size, 1))
    found = answer(planted, [batch], defense)
    assert agree(planted, [batch], found) == size
    assert found.problem is None


def test_clients_behind_a_sum(planted, digits):
    batches = list(parts(digits[1], 4, 3))
    assert agree(planted, batches, answer(planted, batches, SecureAggregation(3))) == 12


def test_an_unknown_defense(planted, digits):
    batches = list(parts(digits[1], 4, 10))
    for defense, least in ((NoDefense(), 40), (DpSgd(1.0, 0.1), 36)):
        found = [answer(planted, [b], defense, UNKNOWN, i) for i, b in enumerate(batches)]
        hits = sum(agree(planted, [b], f) for b, f in zip(batches, found, strict=True))
        assert hits >= least
        assert not any(f.problem for f in found)
    loud = answer(planted, batches[:1], DpSgd(1.0, 3.0), UNKNOWN)
    assert "noise hides the codewords" in loud.problem


def test_what_was_dropped_is_taken_from_the_shares(planted, digits):
    """Of a codeword whose coordinate was dropped the update says nothing."""
    named = dropped = 0
    for i, batch in enumerate(parts(digits[1], 1, 60)):
        source = [stream(i, "codebook", j) for j in range(2)]
        played = play(planted, [batch], GradientDropout(0.3), source, threat=MALICIOUS)
        found = Codebook()(played.observation, stream(i))
        right = int(errors(planted, batch.inputs).argmin(1))
        if bool(played.update.mask[0, right]):
            assert torch.equal(found.inputs.flatten(), planted.buffers["words"][right])
            assert found.problem is None
            named += 1
            continue
        withheld = (~played.update.mask[0]).nonzero()[:, 0]
        likely = withheld[planted.buffers["shares"][withheld].argmax()]
        assert torch.equal(found.inputs.flatten(), planted.buffers["words"][likely])
        dropped += 1
    assert min(named, dropped) > 8


# how often


def rounds(planted, batch, count, noise, within):
    """Of the first examples: named and covered, reconstructed, and the cell of each."""
    table = errors(planted, batch.inputs[:count])
    near, covered = table.argmin(1), table.min(1).values <= within
    named, hits = [], []
    for i, one in enumerate(parts(batch, 1, count)):
        found = answer(planted, [one], DpSgd(1.0, noise), seed=i).inputs[0]
        named.append(torch.equal(found.flatten(), planted.buffers["words"][near[i]]))
        hits.append(float((found - one.inputs[0]).double().square().mean()) <= within)
    return torch.tensor(named) & covered, torch.tensor(hits), near[covered]


def expected(planted, near, noise, *, weighted=True):
    """Mean and standard deviation of the number named among covered examples of these cells."""
    shares = planted.buffers["shares"].double().numpy()
    weights = shares if weighted else np.ones(len(shares))
    each = [law.success(noise, covered=row, weights=weights) for row in np.eye(len(shares))]
    chance = np.array(each)[near]
    return chance.sum(), math.sqrt((chance * (1 - chance)).sum())


@pytest.mark.parametrize(
    ("psnr", "noise", "count"),
    [
        (15.0, 0.3, 400),
        (15.0, 0.7, 400),
        pytest.param(20.0, 0.3, 4000, marks=pytest.mark.slow),
    ],
)
def test_through_the_protocol_it_attains_its_law(task, digits, psnr, noise, count):
    within = 10 ** (-psnr / 10)
    book = Codebook(psnr=psnr).plant(task)
    named, hits, near = rounds(book, digits[1], count, noise, within)
    mean, deviation = expected(book, near, noise)
    assert abs(int(named.sum()) - mean) < 3 * deviation
    assert int(hits.sum()) >= int(named.sum())  # a wrong codeword may be near enough, too
    fixed = (errors(book, digits[1].inputs[:count]) <= within).sum(0)  # one codeword, always
    assert int(hits.sum()) > int(fixed.max())
    for wrong in (noise / 2, 2 * noise):
        mean, deviation = expected(book, near, wrong)
        assert abs(int(named.sum()) - mean) > 3 * deviation


def test_the_number_of_codewords_is_chosen_on_public_digits(task, digits):
    """One half of the public digits makes the codewords, the other chooses; others confirm it."""
    public, private = digits
    book = Codebook(psnr=15.0, codewords=400, limit=500).plant(task)
    shares = book.buffers["shares"].double().numpy()
    within, noise = 10**-1.5, 0.5
    given = {"within": within, "weights": shares}
    size, stated = law.choose(noise, errors=errors(book, public.inputs[500:]).numpy(), **given)
    assert 1 < size < len(shares)
    fresh = errors(book, private.inputs).numpy()
    _, attained = law.choose(noise, errors=fresh, sizes=[size], **given)
    _, best = law.choose(noise, errors=fresh, **given)
    assert stated == pytest.approx(attained, abs=0.04)
    assert attained > 0.9 * best


# where it does not apply


def test_where_it_does_not_apply(task, planted, digits):
    batch = next(parts(digits[1], 1, 1))
    with pytest.raises(NotApplicable, match="honest"):
        answer(planted, [batch], threat=ThreatModel())
    with pytest.raises(NotApplicable, match="no public examples"):
        answer(task, [batch])
    alone = Task.of(mlp(input_shape=(1, 28, 28), classes=10, generator=stream(0, "model")))
    assert Codebook().plant(alone) is alone


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"psnr": 0.0}, "psnr"),
        ({"psnr": 1e6}, "psnr"),
        ({"codewords": 0}, "codewords"),
        ({"scale": -1.0}, "scale"),
        ({"limit": 0}, "limit"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        Codebook(**settings)
