import pytest
import torch

from leakbound.data import split, without_copies


def test_parts_are_disjoint_exact_and_reproducible():
    fractions = {"train": 0.29, "tune": 0.3, "test": 0.41}
    parts = split(100, fractions, seed=3, name="digits")
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 29,
        "tune": 30,
        "test": 41,
    }
    assert torch.cat(list(parts.values())).sort().values.equal(torch.arange(100))
    again = split(100, fractions, seed=3, name="digits")
    assert all(part.equal(again[name]) for name, part in parts.items())


@pytest.mark.parametrize("other", [{"seed": 4, "name": "digits"}, {"seed": 3, "name": "photos"}])
def test_seed_and_name_move_the_split(other):
    first = split(100, {"train": 1.0}, seed=3, name="digits")["train"]
    assert not first.equal(split(100, {"train": 1.0}, **other)["train"])


def test_fractions_below_one_leave_examples_out():
    parts = split(10, {"a": 0.2, "b": 0.3}, seed=0, name="x")
    assert [len(part) for part in parts.values()] == [2, 3]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 997])
def test_thirds_use_every_example(count):
    if count < 3:
        with pytest.raises(ValueError, match="takes none"):
            split(count, dict.fromkeys("abc", 1 / 3), seed=0, name="x")
    else:
        parts = split(count, dict.fromkeys("abc", 1 / 3), seed=0, name="x")
        assert sum(len(part) for part in parts.values()) == count


@pytest.mark.parametrize(
    ("count", "fractions", "words"),
    [
        (10, {}, "empty"),
        (10, {"a": 0.7, "b": 0.4}, "sum to 1.1"),
        (10, {"a": -0.1}, "between 0 and 1"),
        (10, {"a": float("nan")}, "between 0 and 1"),
        (10, {"a": 0.0}, "takes none"),
        (0, {"a": 1.0}, "count is 0"),
    ],
)
def test_wrong_splits_are_refused(count, fractions, words):
    with pytest.raises(ValueError, match=words):
        split(count, fractions, seed=0, name="x")


def test_a_copy_stays_in_the_first_part_only():
    inputs = torch.tensor([0.0, 1, 2, 3, 0, 1, 1, 9]).reshape(8, 1, 1, 1)
    parts = {"a": torch.tensor([3, 0, 2]), "b": torch.tensor([7, 4, 1]), "c": torch.tensor([6, 5])}
    found = without_copies({"a": parts["a"], "b": parts["b"]}, inputs)
    assert {part: rows.tolist() for part, rows in found.items()} == {"a": [3, 0, 2], "b": [7, 1]}
    twice = without_copies({"a": torch.tensor([5, 6])}, inputs)
    assert twice["a"].tolist() == [5, 6], "copies within a part stay"
    with pytest.raises(ValueError, match="each of the 2 examples of the part 'c' is a copy"):
        without_copies(parts, inputs)
