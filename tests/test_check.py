"""Every validator's message names the argument, its value and the mend."""

import pytest
import torch

from leakbound import check

BAD = [
    (check.positive, {"eta": 0}, "eta is 0; give a finite number above 0"),
    (check.positive, {"eta": float("inf")}, "eta is inf; give a finite number above 0"),
    (check.positive, {"eta": float("nan")}, "eta is nan; give a finite number above 0"),
    (check.positive, {"eta": True}, "eta is True; give a number"),
    (check.positive, {"a": 1.0, "eta": "1"}, "eta is '1'; give a number"),
    (check.non_negative, {"eta": -1e-9}, "eta is -1e-09; give a finite number of at least 0"),
    (check.non_negative, {"eta": float("nan")}, "eta is nan; give a finite number of at least 0"),
    (check.fraction, {"rate": 1.5}, "rate is 1.5; give a fraction between 0 and 1"),
    (check.fraction, {"rate": float("nan")}, "rate is nan; give a fraction between 0 and 1"),
    (check.fraction, {"rate": None}, "rate is None; give a number"),
    (check.count, {"steps": 0}, "steps is 0; give a whole number of at least 1"),
    (check.count, {"steps": 2.0}, "steps is 2.0; give a whole number of at least 1"),
    (check.count, {"steps": True}, "steps is True; give a whole number of at least 1"),
]


@pytest.mark.parametrize(("validator", "values", "message"), BAD)
def test_numbers(validator, values, message):
    with pytest.raises(ValueError) as error:
        validator(**values)
    assert str(error.value) == message


def test_good_numbers_pass():
    check.positive(a=1, b=1e-300)
    check.non_negative(a=0, b=0.0)
    check.fraction(a=0, b=1, c=0.5)
    check.count(a=1)


def test_one_of_offers_the_closest():
    check.one_of(["adam", "lbfgs"], optimizer="adam")
    with pytest.raises(ValueError) as error:
        check.one_of(["adam", "lbfgs"], optimizer="adm")
    assert str(error.value) == ("optimizer is 'adm'; did you mean 'adam'? (known: adam, lbfgs)")
    with pytest.raises(ValueError, match="scope is 3; known: a, b"):
        check.one_of(iter("ab"), scope=3)


def test_closest_lists_all_where_nothing_is_near():
    assert check.closest("zzz", ["b", "a"]) == "known: a, b"


def test_finite_counts_the_bad_entries():
    check.finite("x", torch.ones(3))
    with pytest.raises(ValueError, match="x holds 2 of 3 entries that are NaN or infinite"):
        check.finite("x", torch.tensor([1.0, float("nan"), float("inf")]))
    with pytest.raises(ValueError, match="x holds 2 of 2 entries that are NaN or infinite"):
        check.finite("x", torch.tensor([float("inf"), -float("inf")]))
    with pytest.raises(ValueError, match="x holds 1 of 2 entries that are NaN or infinite"):
        check.finite("x", torch.tensor([1.0, float("inf")]))
    check.finite("x", torch.full((9,), 3e38))  # the sum is not, and says nothing


def test_labels():
    check.labels(torch.tensor([0, 9]), 10)
    check.labels(torch.tensor([0.5]), None)
    check.labels(torch.tensor([], dtype=torch.int64), 10)
    for values, low, high in (([0, 10], 0, 10), ([-1, 3], -1, 3)):
        with pytest.raises(ValueError) as error:
            check.labels(torch.tensor(values), 10)
        assert str(error.value) == (
            f"labels run from {low} to {high}, but the model has 10 classes; give labels in 0..9"
        )
    for wrong in (torch.tensor([[1]]), torch.tensor([1.0])):
        with pytest.raises(ValueError, match=r"labels has shape .* give one class number"):
            check.labels(wrong, 10)
