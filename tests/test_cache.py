"""Results that are kept for a while."""

import pytest
import torch

from leakbound._util.cache import RecentCache, size


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
    assert _asked(RecentCache(8 * 3), "abcabcabc") == list("abc")
    assert _asked(RecentCache(8 * 3), "abcadbca") == list("abcdbca")  # the least recent goes


def test_two_stay_however_large():
    assert _asked(RecentCache(8), "ababab", numbers=100) == list("ab")
    assert _asked(RecentCache(8), "abcabc", numbers=100) == list("abcabc")


def test_a_failure_is_not_kept():
    kept = RecentCache[int]()
    with pytest.raises(ZeroDivisionError):
        kept.get("a", lambda: 1 // 0)
    assert kept.get("a", lambda: 7) == 7


def test_all_tensors_are_counted():
    assert size([torch.zeros(2), {"x": torch.zeros(3, dtype=torch.float64)}, "word"]) == 32


def test_keys_count_too():
    """What a key holds stays alive with it."""
    kept = RecentCache(8 * 100)
    keys = [(torch.zeros(50), name) for name in "abcd"]  # 200 bytes each, and 8 for the result
    assert len(_asked(kept, keys)) == 4
    assert not _asked(kept, keys[1:])
    assert len(_asked(kept, keys[:1])) == 1
    assert size(torch.nn.BatchNorm1d(3)) == 4 * 4 * 3 + 8


def test_an_overwritten_key_is_another():
    kept, key = RecentCache(), torch.zeros(3)
    assert len(_asked(kept, [key, key])) == 1
    key.add_(1)
    assert len(_asked(kept, [key, key])) == 1
    with torch.inference_mode():
        frozen = torch.zeros(2)
    assert len(_asked(kept, [frozen, frozen])) == 1
