"""Where a bound meets a target: few evaluations, and an answer that was evaluated and holds."""

from __future__ import annotations

from collections.abc import Callable

from scipy import optimize

Excess = Callable[[float], float]
FAR = 60.0
"""How far from its start a search goes, in the logarithm that it searches."""
GUESS = 2e-4
"""How close the rough search comes; what it is off from the fine edge is mostly more."""
TRIES = 12
MOST_STEPS = 2**30


def crossing(excess: Excess, fine: float, bad: float) -> float:
    """Where `excess` turns positive between a place where it is not and one where it is.

    The answer is on the safe side: excess was evaluated there and is 0 or less.

    Example:
        >>> round(crossing(lambda x: 2 - x * x, 3.0, 0.0), 4)
        1.4142
    """
    step = 1e-6 if bad > fine else -1e-6
    place = float(optimize.brentq(excess, fine, bad, xtol=1e-6, rtol=1e-12))
    while excess(place) > 0:
        place, step = place - step, 2 * step
        if (place - fine) * step <= 0:
            return fine
    return place


def last_that(holds: Callable[[int], bool], guess: int) -> int:
    """The largest number that holds, 2^30 at the most, 0 if none; looked for around the guess.

    Example:
        >>> last_that(lambda count: count <= 1000, 990), last_that(lambda count: False, 5)
        (1000, 0)
    """
    low, step = min(guess, MOST_STEPS), 1
    while low > 0 and not holds(low):
        low, step = max(0, low - step), 2 * step
    high, step = low + 1, 1
    while low < MOST_STEPS and high <= MOST_STEPS and holds(high):
        step *= 2
        low, high = high, min(high + step, MOST_STEPS + 1)
    while high - low > 1 and low < MOST_STEPS:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def edge(
    excess: Excess, fine: float, way: float, *, near: float, rough: Excess, most: float = FAR
) -> float:
    """The farthest place on the way from `fine`, to `near`, where `excess` is not positive.

    `rough` stands in for `excess`, cheaper and less exact: its edge is where the search starts, so
    that `excess` is evaluated a few times. A poor stand-in costs evaluations and no more.

    Args:
        excess: continuous; falls to 0 or below towards `fine`, rises along the way.
        fine: a place where it is not positive; not evaluated.
        way: 1 or -1.
        near: the answer is at most so far before a place where excess was found positive.
        rough: as excess, cheaper.
        most: places farther from `fine` are not looked at.

    Returns:
        A place where excess was evaluated and is not positive, or `fine`, or the last place.

    Example:
        >>> seen = []
        >>> def excess(x):
        ...     seen.append(x)
        ...     return 2 - x * x
        >>> found = edge(excess, 9.0, -1, near=1e-4, rough=lambda x: 2.01 - x * x)
        >>> 0 <= found - 2**0.5 <= 1e-4, len(seen) <= 5
        (True, True)
    """
    start, slope = _rough_edge(rough, fine, way, most)
    good, bad, place = 0.0, most, start  # distances along the way
    known = closed = False
    before: tuple[float, float] | None = None
    for _ in range(TRIES):
        value = excess(fine + way * place)
        good, bad = (place, bad) if value <= 0 else (good, place)
        known, closed = known or value <= 0, closed or value > 0
        if (bad - good <= near) if closed else good >= most:
            return fine + way * good
        if before is not None and (value - before[1]) * (place - before[0]) > 0:
            slope = (value - before[1]) / (place - before[0])
        before = place, value
        root = place - value / slope if slope > 0 else 2 * place + near
        aim = root - near / 4 if not known or good < root - near / 2 else root + near / 4
        inside = good + near / 8 < aim < bad - near / 8 if closed else aim > good
        place = aim if inside else (good + bad) / 2 if closed else 2 * good + near
        place = min(place, most)
    if not closed:
        return fine + way * good
    return crossing(excess, fine + way * good, fine + way * bad)


def _rough_edge(rough: Excess, fine: float, way: float, most: float) -> tuple[float, float]:
    """How far from `fine` the stand-in turns positive, and its slope there."""

    def at(place: float) -> float:
        return rough(fine + way * place)

    low, high = 0.0, 0.25
    first = at(low)
    if first > 0:  # a stand-in that errs upwards may say so next to the edge
        return 0.0, max(at(0.01) - first, 0.0) / 0.01
    last = at(high)
    while last <= 0 and high < most:
        low, first, high = high, last, min(most, 2 * high + 0.25)
        last = at(high)
    if last <= 0:
        return most, 0.0
    place = float(optimize.brentq(at, low, high, xtol=GUESS, rtol=1e-12))
    step = min(0.01, (high - low) / 2)
    return place, -at(place - step) / step
