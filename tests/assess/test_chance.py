"""The permutation test of matching rows: brute force, and false alarms on real tables."""

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_diabetes

from leakbound import Batch, data
from leakbound.assess.chance import FEWEST, chance, halves
from leakbound.assess.criterion import Criterion
from leakbound.assess.measure import measure
from leakbound.assess.record import Chance
from leakbound.assess.verdict import by_chance, of_configuration
from leakbound.core import Reconstruction
from leakbound.domains import Column, TableDomain, of_shape

LEVELS = ("a", "b", "c")
DOMAIN = TableDomain(tuple(Column(f"c{k}", "categorical", levels=LEVELS) for k in range(4)))


def rows(count, source):
    drawn = torch.from_numpy(source.integers(0, 3, (count, 4)))
    return torch.nn.functional.one_hot(drawn, 3).flatten(1).float()


def batch(inputs, labels=None):
    return Batch(inputs, torch.zeros(len(inputs), dtype=torch.long) if labels is None else labels)


def statistic(part, guesses, within):
    """(rows that meet the criterion, most columns, columns in total), columns compared by hand."""
    wrong = np.array(
        [[sum(x[3 * k : 3 * k + 3].argmax() != y[3 * k : 3 * k + 3].argmax() for k in range(4))
          for y in guesses] for x in part]
    )  # fmt: skip
    held, given = linear_sum_assignment(wrong)
    own = wrong[held, given]
    return (own <= within).sum(), -own.min(), -own.sum()


def test_one_row_against_every_decoy():
    source = np.random.default_rng(0)
    for _ in range(20):
        truth, decoys, guess = rows(1, source), rows(150, source), rows(1, source)
        criterion = Criterion(DOMAIN, 1)
        found = chance(criterion, batch(truth), guess, batch(decoys))
        best = statistic(truth, guess, 1)
        as_good = sum(statistic(decoys[k : k + 1], guess, 1) >= best for k in range(150))
        assert found.p_value == pytest.approx((1 + as_good) / 151)
        assert found.decoys == 150


def test_a_guess_near_a_person_with_many_examples_is_chance():
    """One person has 5 % of the images, and every answer is near them: the level holds."""
    runs, count = 300, 400
    low = {"all": 0, "of strangers": 0}
    criterion = Criterion.of(of_shape((6,)), psnr=20.0)
    own = np.arange(count) < count // 20
    for run in range(runs):
        source = np.random.default_rng(run)
        inputs = torch.from_numpy(source.random((count, 6), np.float32))
        spread = torch.from_numpy(0.03 * source.standard_normal((len(inputs), 6), np.float32))
        inputs[own] = inputs[:1] + spread[own]
        first, *others = source.permutation(count).tolist()
        answer = inputs[:1]
        strangers = [at for at in others if not (own[at] and own[first])]
        for name, decoys in (("all", others), ("of strangers", strangers)):
            found = chance(criterion, batch(inputs[[first]]), answer, batch(inputs[decoys]))
            low[name] += found.p_value <= 0.01
    limit = runs * 0.01 + 2 * (runs * 0.0099) ** 0.5
    assert low["all"] <= limit < low["of strangers"], low


def test_pairs_against_all_subsets():
    """With two rows, the p-value over random pairs comes close to that over all pairs."""
    source = np.random.default_rng(1)
    truth, decoys = rows(2, source), rows(120, source)
    guess = truth.clone()
    guess[0, :3] = guess[0, :3].roll(1)
    criterion = Criterion(DOMAIN, 1)
    found = chance(criterion, batch(truth), guess, batch(decoys))
    union, best = torch.cat([truth, decoys]), statistic(truth, guess, 1)
    wrong = np.array([[(4 - (x * y).sum()).item() for y in guess] for x in union])
    as_good = 0
    for i, j in combinations(range(len(union)), 2):
        one, two = wrong[i, 0] + wrong[j, 1], wrong[i, 1] + wrong[j, 0]
        own = (wrong[i, 0], wrong[j, 1]) if one <= two else (wrong[i, 1], wrong[j, 0])
        as_good += (sum(v <= 1 for v in own), -min(own), -sum(own)) >= best
    share = as_good / len(list(combinations(range(len(union)), 2)))
    assert abs(found.p_value - share) < 4 * (share / 9999) ** 0.5 + 1e-3


def test_decoys_of_other_labels_do_not_count():
    """A label alone may explain every match: all rows of its class look alike here."""
    source = np.random.default_rng(2)
    one, two = rows(1, source), rows(1, source)
    inputs = torch.cat([one.expand(200, -1), two.expand(200, -1)])
    labels = torch.cat([torch.zeros(200), torch.ones(200)]).long()
    criterion, truth = Criterion(DOMAIN, 0), batch(one, torch.zeros(1).long())
    found = chance(criterion, truth, one, batch(inputs, labels))
    assert (found.p_value, found.decoys) == (1, 200)


def test_too_few_decoys_say_nothing():
    source = np.random.default_rng(3)
    truth, few = rows(1, source), rows(FEWEST - 1, source)
    found = chance(Criterion(DOMAIN, 0), batch(truth), truth, batch(few))
    assert (found.p_value, found.decoys, found.excluded) == (None, FEWEST - 1, False)
    assert chance(Criterion(DOMAIN, 0), batch(truth), truth, None).p_value is None


def test_public_rows_are_split_once():
    inputs = torch.arange(11.0)[:, None].expand(-1, 12).contiguous()
    one, two = halves(batch(inputs))
    assert sorted([*one.inputs[:, 0].tolist(), *two.inputs[:, 0].tolist()]) == list(range(11))
    assert torch.equal(one.inputs, halves(batch(inputs))[0].inputs)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("german", 1),
        ("german", 8),
        ("diabetes", 8),
        ("breast_cancer", 1),
        ("iris", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("diabetes", 1),
                ("breast_cancer", 8),
                ("wine", 1),
                ("wine", 8),
                ("iris", 8),
            ]
        ),
    ],
)
def test_guesses_without_an_update_are_seldom_called_exposed(name, size):
    """400 trials on a built-in table: half guess the median row, half random public rows."""
    table = data.load(name)
    source, trials = np.random.default_rng(7), 400
    order = torch.from_numpy(source.permutation(len(table.labels)))
    public, private = order[: len(order) // 4], order[len(order) // 4 :]
    domain = table.domain.fitted(table.inputs[public])
    blind = domain.blind(table.inputs[public])
    for share in (0.5, 0.9):
        criterion = Criterion.of(domain, share=share)
        alarms = count_only = 0
        for trial in range(trials):
            drawn = private[torch.from_numpy(source.permutation(len(private)))]
            truth, decoys = table.batch(drawn[:size]), table.batch(drawn[size:])
            guess = table.inputs[public[torch.from_numpy(source.integers(0, len(public), size))]]
            if trial % 2:
                guess = blind.expand(size, -1)
            found = chance(criterion, truth, guess, decoys)
            count_only += int((domain.distances(truth.inputs, guess) <= criterion.within).any())
            alarms += found is not None and found.excluded
        # at most alpha + 2 standard errors, the standard error at alpha
        assert alarms <= 0.01 * trials + 2 * (0.01 * 0.99 * trials) ** 0.5, (share, alarms)
        if (name, size, share) == ("german", 8, 0.5):
            assert count_only > 0.9 * trials  # the count alone would be wrong nearly always


@pytest.mark.parametrize("size", [1, 8])
def test_guesses_by_a_label_that_is_a_number_are_seldom_called_exposed(size):
    """400 trials: the public rows whose progression of diabetes is closest to the victims'."""
    table, source, trials = data.load("diabetes"), np.random.default_rng(9), 400
    numbers = torch.from_numpy(load_diabetes().target)
    order = torch.from_numpy(source.permutation(len(numbers)))
    public, private = order[:110], order[110:]
    domain = table.domain.fitted(table.inputs[public])
    for share in (0.3, 0.5):
        criterion, alarms = Criterion.of(domain, share=share), 0
        for _ in range(trials):
            drawn = private[torch.from_numpy(source.permutation(len(private)))]
            own = drawn[:size], drawn[size:]
            truth, decoys = (Batch(table.inputs[at], numbers[at]) for at in own)
            near = (numbers[public][:, None] - truth.labels).abs().argmin(0)
            found = chance(criterion, truth, table.inputs[public[near]], decoys)
            assert found is not None
            alarms += found.excluded
        assert alarms <= 0.01 * trials + 2 * (0.01 * 0.99 * trials) ** 0.5, (share, alarms)


def test_exact_rows_with_numbers_as_labels_are_no_chance():
    table, numbers = data.load("diabetes"), torch.from_numpy(load_diabetes().target)
    criterion = Criterion.of(table.domain.fitted(table.inputs[:100]), share=0.9)
    truth, decoys = Batch(table.inputs[:8], numbers[:8]), Batch(table.inputs[8:], numbers[8:])
    assert chance(criterion, truth, truth.inputs, decoys).p_value == 1e-4


def of_chance(p_values, attack="a", verdict="undecided"):
    """Records of one attack with these p-values; only what `by_chance` reads."""
    test = {"decoys": 400, "level": 0.01}
    return [
        SimpleNamespace(
            attack=SimpleNamespace(name="matching", hash=attack),
            facts=(),
            reidentified=(),
            status="ok",
            chance=Chance(p_value=p, **test),
            certificate=None,
            verdict="exposed" if p <= 0.01 else verdict,
        )
        for p in p_values
    ]


def test_configurations_of_guesses_are_seldom_exposed():
    """Ten thousand configurations of three dependent attacks and four draws: at most the level."""
    source, found = np.random.default_rng(5), 0
    shared = source.random((10_000, 1, 4))
    p_values = np.where(source.random((10_000, 3, 4)) < 0.5, shared, source.random((10_000, 3, 4)))
    for own in p_values:
        records = [one for name, p in zip("abc", own, strict=True) for one in of_chance(p, name)]
        found += of_configuration(records) == "exposed"
    assert found <= 10_000 * 0.01 + 2 * (10_000 * 0.01 * 0.99) ** 0.5


def test_strong_and_repeated_matches_are_exposed():
    exact = of_chance([1 / 178] * 4) + of_chance([0.5, 0.7, 0.2, 0.9], "b")
    assert of_configuration(exact) == "exposed"  # every row right, few decoys
    assert of_configuration(of_chance([2e-4, 0.7, 0.5, 0.8])) == "exposed"  # one batch of four
    assert of_configuration(of_chance([0.009, 0.7, 0.5, 0.8])) == "undecided"
    assert by_chance(of_chance([0.004])) == 0.004
    assert by_chance([]) is None


def test_a_column_that_follows_from_a_number_as_label_is_no_reconstruction():
    """The row whose label is closest knows both columns, without any update."""
    source = torch.Generator().manual_seed(3)
    labels = torch.rand(1200, generator=source)
    inputs = torch.stack([labels, 1 - labels], 1)
    domain = TableDomain((Column("a"), Column("b"))).fitted(inputs[:400])
    public, decoys = Batch(inputs[:400], labels[:400]), Batch(inputs[800:], labels[800:])
    criterion = Criterion.of(domain, share=1.0)
    for seed in range(100):
        truth = Batch(inputs[400 + seed : 401 + seed], labels[400 + seed : 401 + seed])
        near = (public.labels - truth.labels).abs().argmin()
        guess = Reconstruction(public.inputs[near][None])
        assert not any(measure(truth, guess, criterion, public, decoys=decoys).matched)
        exact = Reconstruction(truth.inputs)
        by_guess = measure(truth, guess, criterion, public, decoys=decoys).metrics["columns"][0]
        found = measure(truth, exact, criterion, public, decoys=decoys).matched
        assert found == (by_guess < 100,)
