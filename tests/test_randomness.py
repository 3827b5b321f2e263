"""Random draws: their names, their laws, and that nothing global is touched."""

import inspect

import pytest
import torch
from scipy import stats

from leakbound import randomness
from leakbound.randomness import bernoulli, laplace, normal, permutation, secure, stream, uniform

COUNT = 40_000
LAWS = {
    "normal": (normal, stats.norm),
    "uniform": (uniform, stats.uniform),
    "laplace": (laplace, stats.laplace),
}
SOURCES = {"stream": (lambda: stream(0, "law"), 1e-3), "secure": (secure, 1e-9)}
DOUBLE = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("like", [None, DOUBLE], ids=["float32", "float64"])
def test_laws(law, source, like):
    (draw, wanted), (build, alpha) = LAWS[law], SOURCES[source]
    values = draw((COUNT,), build(), like=like).double().numpy()
    assert stats.kstest(values, wanted.cdf).pvalue > alpha
    assert stats.kstest(values * 1.1, wanted.cdf).pvalue < 1e-9


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.7, 1.0])
def test_bernoulli(source, probability):
    build, alpha = SOURCES[source]
    draws = bernoulli((COUNT,), probability, build())
    assert draws.dtype == torch.bool
    hits = int(draws.sum())
    assert stats.binomtest(hits, COUNT, probability).pvalue > alpha
    assert stats.binomtest(hits, COUNT, abs(probability - 0.05)).pvalue < 1e-9


@pytest.mark.parametrize("draw", [normal, uniform, laplace])
@pytest.mark.parametrize("source", SOURCES)
def test_shape_and_type_follow_what_is_asked(draw, source):
    build, _ = SOURCES[source]
    assert draw((2, 3), build()).dtype == torch.float32
    values = draw((2, 3), build(), like=DOUBLE)
    assert values.dtype == torch.float64
    assert values.shape == (2, 3)
    assert bool((values != values.float().double()).any())  # full precision, not a cast float32
    assert draw((), build()).shape == ()
    assert draw((0, 4), build()).shape == (0, 4)


def test_streams_do_not_depend_on_the_order_of_draws():
    names = [("noise", 1), ("noise", 2), ("start",)]
    there = {name: normal((5,), stream(3, *name)) for name in names}
    back = {name: normal((5,), stream(3, *name)) for name in reversed(names)}
    assert all(torch.equal(there[name], back[name]) for name in names)


def test_a_stream_is_named_by_seed_and_typed_path():
    names = [(0,), (0, "a"), (0, "a", 1), (0, "a", "1"), (0, 1, "a"), (0, "a1"), (1, "a"), (-1,)]
    draws = [uniform((8,), stream(*name)) for name in names]
    for i, a in enumerate(draws):
        assert not any(torch.equal(a, b) for b in draws[i + 1 :])


def test_streams_of_other_names_are_uncorrelated():
    a, b = (normal((COUNT,), stream(0, "client", i)) for i in range(2))
    assert abs(stats.pearsonr(a.numpy(), b.numpy()).statistic) < 5 / COUNT**0.5


def test_secure_has_no_seed_and_never_repeats():
    assert not inspect.signature(secure).parameters
    assert not torch.equal(
        uniform((4,), secure(), like=DOUBLE), uniform((4,), secure(), like=DOUBLE)
    )
    raw = randomness.SecureSource().uniform(1000)
    assert bool(((raw > 0) & (raw < 1)).all())


def test_extreme_uniforms_give_finite_draws(monkeypatch):
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(randomness.os, "urandom", lambda n, byte=byte: byte * n)
        for draw in (normal, laplace):
            assert bool(torch.isfinite(draw((3,), secure(), like=DOUBLE)).all())
        assert bool((uniform((3,), secure()) < 1).all())
        assert bool(bernoulli((3,), 1.0, secure()).all())
        assert not bool(bernoulli((3,), 0.0, secure()).any())


def test_global_state_is_untouched():
    before = torch.get_rng_state()
    for build, _ in SOURCES.values():
        for draw in (normal, uniform, laplace):
            draw((3,), build())
        bernoulli((3,), 0.5, build())
    permutation(5, stream(0))
    assert torch.equal(before, torch.get_rng_state())


def test_permutation_holds_every_number_once():
    order = permutation(50, stream(0, "order"))
    assert sorted(order.tolist()) == list(range(50))
    assert torch.equal(order, permutation(50, stream(0, "order")))
