"""Curves that are kept: the same bits as new ones, by content, in bounded memory, read only."""

import threading

import numpy as np
import pytest

from leakbound.bounds import conversions, mixed_steps, privacy_loss
from leakbound.bounds.composition import subsampled
from leakbound.bounds.privacy_loss import CACHE, ENTRY, ResultCache, curve, mixed_curve, sealed

LOG_KAPPA = np.log([1e-8, 1e-3, 0.3])
PARTS = [(1.0, 0.05, 20), (2.0, 0.1, 30)]


@pytest.fixture(autouse=True)
def empty():
    CACHE.clear()
    yield
    CACHE.clear()


ASKED = {
    "gamma": lambda: subsampled(
        [0.7, 1.3], sampling_rate=0.1, steps=[[20], [30]], log_kappa=LOG_KAPPA[1]
    ),
    "epsilon": lambda: conversions.epsilon(0.9, delta=1e-6, steps=50, sampling_rate=0.05),
    "noise": lambda: subsampled.noise_for(0.2, sampling_rate=0.05, steps=30, kappa=0.01),
    "several kinds": lambda: mixed_steps.hidden_upper(PARTS, LOG_KAPPA),
    "epsilon of several": lambda: mixed_steps.epsilon(PARTS, 1e-5, visible=False),
}


@pytest.mark.parametrize("name", ASKED)
def test_cold_and_warm_are_the_same_bits(name):
    cold = np.asarray(ASKED[name]())
    assert len(CACHE) > 0
    misses = CACHE.misses
    warm = np.asarray(ASKED[name]())
    assert CACHE.misses == misses
    for other in ASKED.values():  # and after other questions
        other()
    assert warm.tobytes() == cold.tobytes() == np.asarray(ASKED[name]()).tobytes()


def test_a_changed_number_misses(monkeypatch):
    first = curve(1.0, 0.1, 10)
    assert curve(1, 0.1, 10.0) is first  # content, not type
    others = [(1.0 + 1e-15, 0.1, 10), (1.0, 0.1 + 1e-16, 10), (1.0, 0.1, 11)]
    others = [curve(*other) for other in others]
    others += [
        curve(1.0, 0.1, 10, "add"),
        curve(1.0, 0.1, 10, "replace"),
        curve(1.0, 0.1, 10, rough=True),
    ]
    assert CACHE.misses >= 7
    assert len({id(found) for found in [first, *others]}) == 7
    monkeypatch.setattr(privacy_loss, "RESOLUTION", 1e-3)
    assert len(curve(1.0, 0.1, 10).delta) < len(first.delta)
    monkeypatch.undo()
    assert curve(1.0, 0.1, 10) is first
    kinds = mixed_curve(PARTS)
    assert mixed_curve([list(part) for part in PARTS]) is kinds
    assert mixed_curve([PARTS[0], (2.0, 0.1, 31)]) is not kinds
    assert mixed_curve(PARTS, "add") is not kinds


def test_nobody_can_write_to_what_is_kept():
    for found in (curve(1.0, 0.1, 10), mixed_curve(PARTS)):
        with pytest.raises(ValueError, match="read-only"):
            found.delta[0] = 0.5
        with pytest.raises(ValueError, match="WRITEABLE"):
            found.delta.flags.writeable = True
        with pytest.raises(AttributeError):
            found.slack = 0.0
    answer = found.gamma(LOG_KAPPA)
    answer[:] = 0.0  # an answer is the caller's own
    assert found.gamma(LOG_KAPPA)[-1] > 0.3


def test_memory_is_bounded():
    """The least recently asked for goes; what is too large alone is not kept."""
    kept = ResultCache(3 * (ENTRY + 800))
    made = []

    def ask(name, length=100):
        return kept.of(name, lambda: made.append(name) or np.zeros(length))

    for name in "abca":
        ask(name)
    assert (made, len(kept), kept.bytes) == (["a", "b", "c"], 3, 3 * (ENTRY + 800))
    ask("d")  # b is the oldest now
    ask("a")
    ask("b")
    assert made == ["a", "b", "c", "d", "b"]
    ask("huge", 10_000)
    assert ask("huge", 10_000).size == 10_000
    assert made.count("huge") == 2
    assert kept.bytes <= kept.most_bytes
    assert len(kept) == 3


def test_curves_count_their_bytes():
    found = curve(1.0, 0.1, 10)
    assert CACHE.bytes == ENTRY + found.delta.nbytes
    assert curve(1e-4, 0.1, 1000) is None  # that there is none is kept too
    misses = CACHE.misses
    assert curve(1e-4, 0.1, 1000) is None
    assert CACHE.misses == misses


def test_threads_share_one_result():
    kept, start = ResultCache(10_000), threading.Barrier(8)
    got = []

    def ask():
        start.wait()
        for number in range(50):
            got.append((number, kept.of(number % 7, lambda: np.zeros(100))))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 400
    assert kept.hits + kept.misses == 400
    assert kept.bytes == len(kept) * (ENTRY + 800) <= 10_000


def test_an_error_is_not_kept():
    kept = ResultCache(10_000)
    with pytest.raises(ZeroDivisionError):
        kept.of("a", lambda: 1 / 0)
    assert kept.of("a", lambda: 2) == 2


def test_sealed():
    found = sealed(np.arange(3.0)[::-1])
    assert found.tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="read-only"):
        found += 1
