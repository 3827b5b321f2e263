"""Results that are kept for a while."""

import pytest
import torch

from leakbound.recent import Recent, size


def _asked(kept, keys, numbers=1):
    """What had to be made, in order."""
    made = []

    def make(key):
        made.append(key)
        return torch.zeros(numbers, dtype=torch.float64)

    for key in keys:
        kept.get(key, lambda key=key: make(key))
    return made


def test_the_latest_stay_as_far_as_memory_goes():
    assert _asked(Recent(8 * 3), "abcabcabc") == list("abc")
    assert _asked(Recent(8 * 3), "abcadbca") == list("abcdbca")  # the least recent goes


def test_two_stay_however_large():
    assert _asked(Recent(8), "ababab", numbers=100) == list("ab")
    assert _asked(Recent(8), "abcabc", numbers=100) == list("abcabc")


def test_a_failure_is_not_kept():
    kept = Recent[int]()
    with pytest.raises(ZeroDivisionError):
        kept.get("a", lambda: 1 // 0)
    assert kept.get("a", lambda: 7) == 7


def test_all_tensors_are_counted():
    assert size([torch.zeros(2), {"x": torch.zeros(3, dtype=torch.float64)}, "word"]) == 32
