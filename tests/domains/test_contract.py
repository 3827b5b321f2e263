"""What every domain promises. A new domain is one row in `DOMAINS`."""

import math

import pytest
import torch

from leakbound.domains import (
    Column,
    ImageDomain,
    NumberDomain,
    SeriesDomain,
    TableDomain,
    TokenDomain,
    VolumeDomain,
)
from leakbound.randomness import stream

COLUMNS = (
    Column("age", "integer", 18, 90, typical=40, spread=15),
    Column("weight", low=40.0, high=160.0, missing=True),
    Column("dose", low=0.0, high=2.0, center=1.0, scale=0.25, tolerance=0.3),
    Column("sex", "categorical", levels=("f", "m")),
    Column("region", "categorical", levels=("n", "e", "s", "w"), missing=True),
)
DOMAINS = [
    NumberDomain((5,)),
    NumberDomain((2, 3), (-1.0, 2.0)),
    ImageDomain((3, 6, 5), (-2.0, 2.0)),
    VolumeDomain((1, 4, 3, 5), (-1.0, 1.0)),
    SeriesDomain((2, 7), (-1.0, 1.0), scales=(0.5, 2.0)),
    TableDomain(COLUMNS),
    TokenDomain(11, 6),
    TokenDomain(50, 9, padding=0),
]


@pytest.fixture(params=DOMAINS, ids=repr)
def domain(request):
    return request.param


def drawn(domain, seed, n=40):
    return domain.start(n, stream(seed, "contract"))


def corners(domain):
    """The lowest example, the highest, their halves: where distances that are no metric fail."""
    low, high = domain.input_range
    ends = torch.tensor([low, high], dtype=domain.dtype)
    size = math.prod(domain.shape)
    masks = [torch.zeros(size), torch.ones(size), torch.arange(size) % 2]
    masks += [torch.arange(size) < size // 2, torch.arange(size) == 0]
    examples = torch.stack([ends[mask.long()].reshape(domain.shape) for mask in masks])
    return domain.project(examples)


def test_starts_are_valid_and_repeat(domain):
    first = drawn(domain, 0)
    assert first.shape == (40, *domain.shape)
    assert first.dtype == domain.dtype
    assert torch.equal(domain.project(first), first)
    assert torch.equal(drawn(domain, 0), first)
    assert not torch.equal(drawn(domain, 1), first)


def test_projection_gives_valid_examples(domain):
    wild = 100 * (drawn(domain, 0) - 0.5)
    wild[0] = float("nan")
    wild[1] = float("inf")
    once = domain.project(wild)
    low, high = domain.input_range
    assert bool(((once >= low) & (once <= high)).all())
    assert torch.equal(domain.project(once), once)


def test_the_blind_guess_is_valid(domain):
    for guess in (domain.blind(None), domain.blind(drawn(domain, 2)), *domain.constants()):
        assert guess.shape == domain.shape
        assert torch.allclose(domain.project(guess[None])[0], guess)


def test_the_distance_is_what_bounds_need(domain):
    """d_{s+t}(x, y) <= d_s(x, z) + d_t(z, y), and nothing is nearer than itself."""
    x, y, z = (drawn(domain, seed) for seed in range(3))
    assert domain.distance(x, x).tolist() == [0.0] * 40
    assert torch.allclose(domain.distance(x, y), domain.distance(y, x))

    def apart(a, b, scale):
        if domain.parts is None:
            return domain.distance(a, b)
        return (~((domain.coded(a) - domain.coded(b)).abs() <= scale)).sum(-1)

    assert torch.equal(domain.distance(x, y), apart(x, y, 1.0).double())
    far = corners(domain)
    every = torch.cartesian_prod(*[torch.arange(len(far))] * 3)
    for one, two, between in ((x, y, z), [far[places] for places in every.T]):
        for s, t in ((1.0, 1.0), (0.5, 2.0)):
            sides = apart(one, between, s) + apart(between, two, t)
            assert bool((apart(one, two, s + t) <= sides + 1e-12).all())


def test_scores_and_costs_follow_the_distance(domain):
    x, y = drawn(domain, 0, 12), drawn(domain, 1, 9)
    costs = domain.costs(x, y)
    assert (costs.shape, costs.dtype) == ((12, 9), torch.float64)
    assert domain.costs(x, x).argmin(1).tolist() == list(range(12))
    order = domain.distance(x[:9], y).argsort()
    scores = domain.score(x[:9], y)[order]
    assert bool((scores.diff() <= 1e-9).all())
    apart = torch.stack([domain.distance(x[k : k + 1].expand_as(y), y) for k in range(12)])
    assert torch.allclose(domain.distances(x, y), apart, rtol=1e-12, atol=0)
    assert domain.distances(x, y).dtype == torch.float64
    assert domain.distances(x[:0], y).shape == (0, 9)
    if domain.distance_is_rmse:
        assert torch.allclose(costs, apart.square())
    elif domain.parts is not None:
        assert torch.equal(costs.floor(), apart)


def test_a_domain_that_says_so_measures_root_mean_squares(domain):
    x, y = drawn(domain, 0), drawn(domain, 1)
    wanted = (x - y).double().square().flatten(1).mean(1).sqrt()
    assert torch.allclose(domain.distance(x, y), wanted) == domain.distance_is_rmse


def test_fields_are_of_all_examples(domain):
    x, y = drawn(domain, 0, 3), drawn(domain, 1, 3)
    shown = domain.fields(x, y)
    every = shown.pictures, shown.columns, shown.values, shown.sequences
    assert any(part is not None for part in every)
