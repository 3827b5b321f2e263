"""Hermite moments against brute force over all indices, and against their expectations."""

import itertools
import math

import numpy as np
import pytest
import torch

from leakbound.attacks.features.base import feature_errors, subspace_error
from leakbound.randomness import bernoulli, normal, stream
from leakbound_reproductions.attacks.diagonalize import decompose
from leakbound_reproductions.attacks.hermite import hermite_means, usable_orders
from leakbound_reproductions.attacks.moments import (
    Responses,
    contracted,
    mixing_of,
    moments,
    resolve_signs,
)

WIDE = torch.zeros((), dtype=torch.float64)


def draw(shape, *name):
    return normal(shape, stream(0, "moments", *name), like=WIDE)


def unit(vectors):
    return vectors / vectors.norm(dim=1, keepdim=True)


def hermite_tensor(w, order):
    """H_order(w), w (n, ...), entry by entry: He_m(w_i) for every index i that occurs m times."""
    he = [np.polynomial.hermite_e.HermiteE.basis(m) for m in range(order + 1)]
    found = np.empty((len(w),) * order + w.shape[1:])
    for index in itertools.product(range(len(w)), repeat=order):
        found[index] = math.prod(he[index.count(i)](w[i]) for i in set(index))
    return found


@pytest.mark.parametrize("order", [2, 3])
def test_contracted_moments_are_the_sum_over_units(order):
    units, mixed = draw((40, 3), "units"), draw((2, 40), "mixed")
    wanted = np.einsum(
        "sj,j...->s...", mixed, np.stack([hermite_tensor(w, order) for w in units.numpy()])
    )
    np.testing.assert_allclose(contracted(mixed, units, units, order), wanted, atol=1e-12)


def scene(activation, *, n=12, width=4000, examples=3, sources=1, seed=0, same=False):
    features = unit(draw((examples, n), "features", seed))
    units = draw((width, n), "units", seed)
    r = draw((sources, examples), "r", seed).sign() * (1 + draw((sources, examples), "s").abs())
    r = r[:, :1].expand(sources, examples) if same else r
    return features, units, r, r @ activation(features @ units.T).view(examples, width)


def test_the_fourth_order_is_contracted_as_a_whole():
    _, units, _, values = scene(torch.relu, width=60, examples=2, n=2)
    seen = moments(Responses.of(values, units), 2, (1, 2, 4))
    responses = Responses.of(values, units)
    flat = responses.without(torch.ones(60, 1).to(WIDE))
    peeled = flat.without(units)
    u = (units @ seen.span).numpy()
    quadratic = np.stack(
        [(u[:, 0] ** 2 - 1) / math.sqrt(2), u[:, 0] * u[:, 1], (u[:, 1] ** 2 - 1) / math.sqrt(2)], 1
    )
    rest = peeled.without(torch.from_numpy(quadratic))
    mixed = rest.mixed(mixing_of(flat, 2)).numpy()
    whole = np.einsum("sj,jabcd->sabcd", mixed, np.stack([hermite_tensor(w, 4) for w in u]))
    np.testing.assert_allclose(seen.fourth, whole[0].transpose(3, 0, 1, 2), atol=1e-12)


@pytest.mark.parametrize(
    ("activation", "order"),
    [(torch.relu, 2), (lambda z: z**3 + z**2, 2), (lambda z: z**3 + z**2, 3), (torch.tanh, 3)],
)
def test_moments_tend_to_sums_of_powers(activation, order):
    """E g H_p = sum_i r_i E s^(p) x_i^(x)p, within 4.5 standard errors of the mean."""
    width = 50_000
    features, units, r, values = scene(activation, n=3, width=width, examples=2)
    centered = Responses.of(values, units).without(torch.ones(width, 1).to(WIDE))
    plain = centered.mixed(torch.ones(1, 1).to(WIDE))
    found = contracted(plain, units, units, order)[0].numpy()
    power = {2: "i,ia,ib->ab", 3: "i,ia,ib,ic->abc"}[order]
    mean = hermite_means(activation)[order]
    wanted = np.einsum(power, (r[0] * mean).numpy(), *[features.numpy()] * order)
    terms = centered.values[0].numpy() * hermite_tensor(units.T.numpy(), order)
    error = terms.std(-1) / math.sqrt(width)
    assert np.abs((found - wanted) / error).max() < 4.5
    assert np.abs((found - 1.5 * wanted) / error).max() > 4.5


def test_taking_parts_out_does_not_bias_and_lowers_the_error():
    """Second moments of ReLU responses: with and without the linear part, over 30 draws."""
    errors = {"plain": [], "peeled": []}
    for seed in range(30):
        features, units, r, values = scene(torch.relu, n=4, width=2000, examples=1, seed=seed)
        responses = Responses.of(values, units)
        wanted = r[0, 0] * hermite_means(torch.relu)[2] * torch.outer(features[0], features[0])
        one = torch.ones(1, 1).to(WIDE)
        flat = responses.without(torch.ones(2000, 1).to(WIDE))
        for name, given in (("plain", responses), ("peeled", flat.without(units))):
            found = contracted(given.mixed(one), units, units, 2)[0]
            errors[name].append(((found - wanted) / r[0, 0]).numpy())
    plain, peeled = (np.array(errors[k]) for k in ("plain", "peeled"))
    assert np.mean(peeled**2) < 0.3 * np.mean(plain**2)
    spread = peeled.std(0, ddof=1) / math.sqrt(30)
    assert np.abs(peeled.mean(0) / spread).max() < 4.5


def found_features(values, units, activation, examples, **given):
    means = hermite_means(activation)
    orders = usable_orders(means)
    seen = moments(Responses.of(values, units, **given), examples, orders)
    stacks = [t for t in seen.tensors if t.numel()]
    components, _ = decompose(stacks, stream(0, "starts"))
    components, signed = resolve_signs(seen, components, means, orders)
    return (seen.span @ components).T, signed, seen


@pytest.mark.parametrize(
    ("activation", "knows_signs"),
    [(lambda z: z**3 + z**2, True), (torch.relu, True), (torch.tanh, False)],
)
@pytest.mark.parametrize("sources", [1, 4])
def test_signs_are_found_where_they_can_be(activation, knows_signs, sources):
    for seed in range(3):
        features, units, _, values = scene(
            activation, width=20_000, sources=sources, examples=2, seed=seed
        )
        vectors, signed, seen = found_features(values, units, activation, 2)
        assert signed is knows_signs
        assert feature_errors(vectors, features, signed=signed).max() < 0.25
        means, orders = hermite_means(activation), usable_orders(hermite_means(activation))
        turned = torch.tensor([1.0, -1.0]).to(WIDE)
        again, _ = resolve_signs(seen, (seen.span.T @ vectors.T) * turned, means, orders)
        kept = torch.allclose(seen.span @ again, vectors.T)
        assert kept is knows_signs


def test_mirrored_features_answer_alike_where_the_activation_is_odd():
    features, units, r, values = scene(torch.tanh, examples=2, width=100)
    mirrored = -r @ torch.tanh(-features @ units.T)
    torch.testing.assert_close(mirrored, values)


def test_equal_coefficients_do_no_harm():
    features, units, _, values = scene(torch.relu, width=40_000, examples=3, same=True)
    vectors, signed, _ = found_features(values, units, torch.relu, 3)
    assert feature_errors(vectors, features, signed=signed).max() < 0.2


def test_classes_that_sum_to_zero_are_kept_apart():
    """Cross-entropy: rows of p - y. Their sum is nothing; jointly they tell each example."""
    features, units, _, _ = scene(torch.relu, examples=4, width=8000)
    r = torch.full((5, 4), 0.2, dtype=WIDE.dtype) - torch.eye(5)[:, :4].to(WIDE)
    values = r @ torch.relu(features @ units.T)
    assert values.sum(0).abs().max() < 1e-12
    vectors, signed, seen = found_features(values, units, torch.relu, 4)
    assert len(seen.first) == 4
    joint = feature_errors(vectors, features, signed=signed).mean()
    one, signed, _ = found_features(values[:1], units, torch.relu, 4)
    alone = feature_errors(one, features, signed=signed).mean()
    assert joint < 0.06 < 2 * joint < alone


def test_noise_and_masks_weigh_the_responses():
    values = draw((2, 1000), "values")
    noise = torch.ones(2, 1000).to(WIDE)
    noise[:, 500:] = 99.0
    seen = torch.ones(2, 1000, dtype=torch.bool)
    seen[1, ::2] = False
    weights = Responses.of(values, draw((1000, 3), "w"), seen=seen, noise=noise).weights
    torch.testing.assert_close(weights.sum(1), torch.ones(2).to(WIDE))
    assert (weights[1, ::2] == 0).all()
    assert weights[0, 0] > 20 * weights[0, -1]


def test_noise_does_not_drown_sources_that_are_strong():
    """Rows of nothing but noise beside strong ones: mixtures follow the signal."""
    features, units, _, values = scene(torch.relu, examples=2, sources=2, width=8000)
    weak = torch.cat([values, 1e-4 * values.flip(0).repeat(3, 1)])
    noisy = weak + 0.01 * draw(weak.shape, "noise")
    variance = torch.full_like(noisy, 1e-4)
    vectors, signed, _ = found_features(noisy, units, torch.relu, 2, noise=variance)
    assert feature_errors(vectors, features, signed=signed).max() < 0.1


def test_a_source_of_nothing_but_noise_is_left_out():
    values = draw((2, 4000), "signal")
    noisy = torch.cat([values, 0.1 * draw((1, 4000), "nothing")])
    units, variance = draw((4000, 3), "w"), torch.full_like(noisy, 0.01)
    known, unknown = Responses.of(noisy, units, noise=variance), Responses.of(noisy, units)
    assert len(mixing_of(known, 3)) == 2
    assert mixing_of(known, 3)[:, 2].abs().max() < 0.1 * mixing_of(known, 3).abs().max()
    assert len(mixing_of(unknown, 3)) == 3


def test_the_span_needs_no_components():
    features, units, _, values = scene(torch.relu, examples=3, width=16_000)
    seen = moments(Responses.of(values, units), 3, (1, 2, 4))
    assert subspace_error(seen.span, features) < 0.1
    identity = seen.span.T @ seen.span
    torch.testing.assert_close(identity, torch.eye(3).to(identity))
    dropped = bernoulli((1, 16_000), 0.5, stream(0, "drop"))
    half = moments(Responses.of(values, units, seen=dropped), 3, (1, 2, 4))
    assert subspace_error(half.span, features) < 0.2
