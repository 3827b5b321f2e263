"""Chains: order, guarantees, and the law that is declared before and after a release."""

import re

import pytest
import torch

from leakbound.client import rows
from leakbound.core import Batch, Gaussian, Guarantee, Laplace, Unit, Unknown
from leakbound.defenses import (
    Chain,
    Clip,
    ClipExamples,
    Defense,
    DpSgd,
    GaussianMechanism,
    GaussianNoise,
    GradientDropout,
    HiddenDropout,
    LaplaceNoise,
    LocalAggregation,
    LocalOptimalNoise,
    LocalOptimalPruning,
    MagnitudePruning,
    Mean,
    NoDefense,
    OptimalNoise,
    SecureAggregation,
    Sign,
    chain,
)
from leakbound.protocol import play
from leakbound.randomness import stream

DP, LAW, NONE = Guarantee.DIFFERENTIAL_PRIVACY, Guarantee.KNOWN_NOISE, Guarantee.NONE
NOISE, LAPLACE = GaussianNoise(0.1), LaplaceNoise(0.1)
DROP, HIDE, PRUNE = GradientDropout(0.5), HiddenDropout(0.5), MagnitudePruning(0.5)
SUM, CLIP = SecureAggregation(2), Clip(0.5)


@pytest.mark.parametrize(
    ("links", "named"),
    [
        ([Mean(), ClipExamples(1.0)], ["ClipExamples(clip_norm=1.0) takes", "Mean() before it"]),
        ([SUM, SUM], ["takes one row per client", "SecureAggregation(clients=2) before it"]),
        ([LocalAggregation(), ClipExamples()], ["LocalAggregation(", "ClipExamples("]),
        ([CLIP, Mean()], ["Clip(clip_norm=0.5)", "Mean()"]),
        ([SUM, HIDE], ["HiddenDropout(rate=0.5)", "SecureAggregation(clients=2)"]),
        ([DpSgd(), DpSgd()], ["ClipExamples(", "GaussianMechanism("]),
        ([GaussianMechanism()], ["GaussianMechanism(", "plain gradient", "ClipExamples"]),
        ([NOISE, GaussianMechanism()], ["GaussianMechanism(", "GaussianNoise("]),
        (
            [ClipExamples(), Mean(), PRUNE, GaussianMechanism()],
            ["GaussianMechanism(", "MagnitudePruning("],
        ),
        (
            [ClipExamples(), Mean(), CLIP, GaussianMechanism()],
            ["GaussianMechanism(", "Clip(clip_norm=0.5)"],
        ),
    ],
)
def test_a_wrong_order_names_both_links(links, named):
    with pytest.raises(ValueError) as error:
        chain(*links)
    for name in named:
        assert re.search(re.escape(name), str(error.value))


def test_a_chain_is_flat_and_says_what_it_is():
    nested = chain(chain(CLIP, NOISE), NoDefense(), SUM)
    assert nested == Chain((CLIP, NOISE, SUM))
    assert repr(nested) == (
        "Clip(clip_norm=0.5) → GaussianNoise(noise_std=0.1) → SecureAggregation(clients=2)"
    )
    assert repr(chain()) == repr(NoDefense()) == "none"
    assert chain() == NoDefense() == chain(NoDefense())
    assert hash(chain(DpSgd())) == hash(DpSgd())
    assert DpSgd() == chain(*DpSgd().links) != DpSgd(2.0)
    assert (nested.cohort_size, nested.starts) == (2, Unit.CLIENT)
    assert nested.returns(Unit.CLIENT) is Unit.COHORT
    client, cohort = nested.sides
    assert (client.links, cohort.links) == ((CLIP, NOISE), (SUM,))
    assert DpSgd().starts is Unit.EXAMPLE


class _Peeks(Defense):
    uses_context = True


@pytest.mark.parametrize(
    ("links", "guarantee"),
    [
        ([DpSgd()], DP),
        ([DpSgd(), Sign()], DP),
        ([DpSgd(), PRUNE], DP),
        ([DpSgd(), CLIP], DP),
        ([DpSgd(), DROP], DP),
        ([DpSgd(), SUM, Sign()], DP),
        ([DpSgd(), LAPLACE], DP),
        ([ClipExamples(), Mean(), DROP, GaussianMechanism()], DP),
        ([DpSgd(), _Peeks()], LAW),
        ([DpSgd(), _Peeks(), Sign()], NONE),
    ],
)
def test_differential_privacy_survives_post_processing_alone(links, guarantee):
    assert chain(*links).guarantee is guarantee


CHAINS = [
    ([], NONE),
    ([CLIP], NONE),
    ([SUM], NONE),
    ([DROP], NONE),
    ([HIDE], NONE),
    ([LocalAggregation()], NONE),
    ([NOISE], LAW),
    ([LAPLACE], LAW),
    ([CLIP, NOISE], LAW),
    ([PRUNE, NOISE], LAW),
    ([Sign(), NOISE], LAW),
    ([LocalAggregation(), NOISE], LAW),
    ([ClipExamples(), Mean(), NOISE], LAW),
    ([NOISE, NOISE], LAW),
    ([NOISE, DROP], LAW),
    ([LAPLACE, DROP], LAW),
    ([NOISE, SUM], LAW),
    ([SUM, NOISE], LAW),
    ([SUM, LAPLACE], LAW),
    ([NOISE, SUM, NOISE], LAW),
    ([NOISE, SUM, DROP], LAW),
    ([NOISE, CLIP], NONE),
    ([NOISE, PRUNE], NONE),
    ([NOISE, Sign()], NONE),
    ([NOISE, LAPLACE], NONE),
    ([LAPLACE, NOISE], NONE),
    ([LAPLACE, LAPLACE], NONE),
    ([LAPLACE, SUM], NONE),
    ([NOISE, CLIP, NOISE], NONE),
    ([DROP, NOISE], NONE),
    ([DROP, LAPLACE], NONE),
    ([DROP, CLIP, NOISE], NONE),
    ([DROP, PRUNE, NOISE], NONE),
    ([DROP, SUM], NONE),
    ([DROP, SUM, NOISE], NONE),
    ([NOISE, DROP, SUM], NONE),
    ([NOISE, DROP, NOISE], NONE),
    ([ClipExamples(), DROP, Mean(), NOISE], NONE),
    ([HIDE, NOISE], NONE),
    ([NOISE, HIDE], NONE),
    ([HIDE, SUM, NOISE], NONE),
    ([LAPLACE, SecureAggregation(1)], LAW),
]


@pytest.mark.parametrize(("links", "guarantee"), CHAINS, ids=lambda x: str(x))
def test_the_chain_promises_the_law_that_the_release_has(task, batch, links, guarantee):
    defense = chain(*links)
    clients = [Batch(batch.inputs[i::2], batch.labels[i::2]) for i in range(defense.cohort_size)]
    sources = [stream(0, i) for i in range(len(clients) + 1)]
    update = play(task, clients, defense, sources).update
    assert defense.guarantee is guarantee
    assert isinstance(update.law, Gaussian | Laplace) is (guarantee is LAW)


@pytest.mark.parametrize("first", [DROP, HIDE])
@pytest.mark.parametrize("noise", [NOISE, LAPLACE, GaussianMechanism()])
def test_noise_over_a_draw_leaves_no_law(task, batch, first, noise):
    links = [first, noise]
    if isinstance(noise, GaussianMechanism):
        links = [ClipExamples(), Mean(), DROP, noise]
    update = play(task, [batch], chain(*links), [stream(0), stream(1)]).update
    assert isinstance(update.law, Unknown)
    assert update.mask is None


def test_a_cohort_is_imitated_as_it_is_sent(task, batch):
    clients = [Batch(batch.inputs[i::2], batch.labels[i::2]) for i in range(2)]
    defense = chain(CLIP, SUM, Clip(0.7))
    sent = play(task, clients, defense, [stream(i) for i in range(3)]).update.rows
    plain = [rows(task, b.inputs, b.labels, Unit.CLIENT) for b in clients]
    by_hand = sum(g * min(1.0, 0.5 / float(g.norm())) for g in plain)
    by_hand = by_hand * min(1.0, 0.7 / float(by_hand.norm()))
    torch.testing.assert_close(sent, by_hand)
    alone, together = defense.sides
    guess = together.imitate(torch.cat([alone.imitate(p) for p in plain]))
    torch.testing.assert_close(guess, by_hand)


def test_local_training_cannot_be_mixed_with_example_rows():
    for links in [(DpSgd(1.0, 1.0), LocalAggregation(3)), (LocalAggregation(3), DpSgd(1.0, 1.0))]:
        with pytest.raises(ValueError, match=r"LocalAggregation.*cannot be combined"):
            chain(*links)


def test_a_floor_is_for_the_plain_gradient():
    floor = OptimalNoise(error_floor=0.02)
    for other in (LocalAggregation(), HIDE):
        for links in [(other, floor), (floor, other)]:
            with pytest.raises(ValueError) as error:
                chain(*links)
            assert repr(other) in str(error.value)
            assert repr(floor) in str(error.value)
        chain(other, OptimalNoise(0.1))


@pytest.mark.parametrize("local", [LocalOptimalNoise(), LocalOptimalPruning()])
def test_what_needs_a_batch_is_refused_on_the_sum(local):
    with pytest.raises(ValueError, match="takes one row per client"):
        chain(SUM, local)
    chain(local, SUM)
