"""What an attacker completes without any update, measured on held-out examples."""

import math

import numpy as np
import pytest
import torch

from leakbound.assess.imputers import prior_of_intruder
from leakbound.attacks.imputers import completions
from leakbound.domains import Column, TableDomain, TokenDomain, of_shape
from leakbound.domains.known import known_parts

COLUMNS = ("sex", "region", "illness")
TABLE = TableDomain(
    (
        *(Column(name, "categorical", levels=("a", "b", "c", "d")) for name in COLUMNS),
        Column("age", "integer", 0, 100, tolerance=2),
    )
)


def rows(n, seed, depends=0.8):
    """The illness is (sex + region) modulo 4 with a known probability; age follows the illness."""
    draw = np.random.default_rng(seed)
    sex, region = draw.integers(0, 4, (2, n))
    clear = draw.random(n) < depends
    illness = np.where(clear, (sex + region) % 4, draw.integers(0, 4, n))
    age = (20 * illness + 10) / 100
    hot = [np.eye(4)[values] for values in (sex, region, illness)]
    return torch.tensor(np.column_stack([*hot, age]), dtype=torch.float32)


def test_imputers_reach_what_the_law_allows_and_no_more():
    q = 0.8 + 0.2 / 4
    found = prior_of_intruder(rows(4000, 0), known_parts(TABLE, "sex,region"), 0.0)
    assert {own.imputer for own in found} == {
        "most frequent of the group",
        "nearest neighbors",
        "nearest neighbor",
        "gradient boosting",
    }
    spread = math.sqrt(q * (1 - q) / 2000)
    for own in found:
        assert own.total == 2000
        assert abs(own.share - q) < 4 * spread, own
        assert own.at_least < q
    assert found[0].at_least > q - 5 * spread
    # Without dependence no imputer knows more than chance.
    blind = prior_of_intruder(rows(4000, 1, depends=0.0), known_parts(TABLE, "sex,region"), 0.0)
    assert blind[0].share < 0.25 + 4 * math.sqrt(0.25 * 0.75 / 2000)


def test_completions_are_valid_and_read_the_known_part_only():
    public, targets = rows(200, 2), rows(50, 3)
    known = known_parts(TABLE, "sex,region")
    shuffled = known.joined(known.values(targets), known.unknown(rows(50, 4)))
    for (name, one), (_, two) in zip(
        completions(public, known, targets), completions(public, known, shuffled), strict=True
    ):
        assert one.shape == (50, *known.rest.shape), name
        assert torch.equal(known.rest.project(one), one)
        assert torch.equal(one, two), f"{name} reads the truth"


@pytest.mark.parametrize(
    ("domain", "text"), [(of_shape((1, 6, 6)), "region:top"), (of_shape((2, 9)), "past:4")]
)
def test_numbers_are_completed_by_neighbors_and_by_a_linear_rule(domain, text):
    draw = torch.Generator().manual_seed(0)
    factors = torch.rand(400, 3, generator=draw)
    basis = torch.rand(3, math.prod(domain.shape), generator=draw) / 3
    public = (factors @ basis).reshape(-1, *domain.shape)
    best = prior_of_intruder(public, known_parts(domain, text), 0.02)[0]
    assert (best.imputer, best.matched) == ("linear", 200)


def test_tokens_are_completed_and_few_examples_refused():
    draw = torch.Generator().manual_seed(1)
    first = torch.randint(0, 9, (300, 1), generator=draw)
    public = torch.cat([first, first + 1, first + 2], 1)
    best = prior_of_intruder(public, known_parts(TokenDomain(12, 3), "prefix:1"), 0)[0]
    assert best.matched == best.total == 150
    with pytest.raises(ValueError, match="at least 40"):
        prior_of_intruder(public[:39], known_parts(TokenDomain(12, 3), "prefix:1"), 0)


def test_whole_examples_are_completed_where_the_likeliest_parts_do_not_fit_together():
    """Three endings, of which no two share the odd word: the commonest words are no ending."""
    draw = torch.Generator().manual_seed(2)
    endings = torch.tensor([[2, 1, 1], [1, 2, 1], [1, 1, 2]])
    which = torch.randint(0, 3, (600,), generator=draw)
    public = torch.cat([torch.zeros(600, 1, dtype=torch.int64), endings[which]], 1)
    found = prior_of_intruder(public, known_parts(TokenDomain(3, 4), "prefix:1"), 0)
    matched = {own.imputer: own.matched for own in found}
    assert 60 < matched["nearest neighbor"] < 140
    assert matched["most frequent of the group"] == matched["gradient boosting"] == 0


def test_numbers_within_a_tolerance_are_regressed_where_classes_are_too_thin():
    doses = Column("dose", "integer", 0, 35, tolerance=2)
    age = Column("age", "integer", 0, 100)
    table = TableDomain((age, doses))
    draw = np.random.default_rng(5)
    ages = draw.random(1200)
    dose = np.clip((5 + 25 * ages + 2 * draw.standard_normal(1200)).round(), 0, 35)
    examples = torch.tensor(np.column_stack([ages, dose / 35]), dtype=torch.float32)
    known = known_parts(table, "age")
    answers = dict(completions(examples[:600], known, examples[600:]))["gradient boosting"]
    off = (35 * (answers - known.unknown(examples[600:]))).abs().flatten()
    # With a spread of 2, the median is within a tolerance of 2 for .79 of normal values (2.5 of
    # the doses before they are rounded); as 36 classes of 17 examples each, .63.
    assert (off < 2.5).float().mean() > 0.7


def test_labels_that_are_known_complete_better():
    """The hidden column is the label, most of the time: nothing else tells it."""
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (1200,), generator=source)
    told = torch.randint(0, 3, (1200,), generator=source)
    hidden = torch.where(torch.rand(1200, generator=source) < 0.9, labels, told)
    public = torch.stack([told, hidden], 1)
    known = known_parts(TokenDomain(3, 2), "prefix:1")
    blind = prior_of_intruder(public, known, 0)[0]
    knows = prior_of_intruder(public, known, 0, labels=labels)[0]
    assert blind.share < 0.45
    assert knows.share > 0.9
    # Of numbers, too: an image whose lower half is its class.
    images = torch.rand(1200, 1, 4, 4, generator=source)
    images[:, :, 2:] = labels[:, None, None, None] / 2
    half = known_parts(of_shape((1, 4, 4)), "region:top")
    assert prior_of_intruder(images, half, 0.1)[0].share < 0.6
    assert prior_of_intruder(images, half, 0.1, labels=labels)[0].share == 1
    assert prior_of_intruder(images, half, 0.1, labels=labels.float())[0].share == 1
