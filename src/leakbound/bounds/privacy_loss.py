"""The privacy loss of many subsampled Gaussian steps: its curve on a grid, never below the truth.

One step's loss is put on a grid so that each cell keeps its mass under both laws (connect the dots,
2207.04380), which can only raise delta(epsilon); all steps at once are a power of its Fourier
transform. Cut tails count as an infinite loss, and what rounding may have moved is added.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from scipy import fft, optimize, special

from leakbound.bounds.law import Array

T = TypeVar("T")
ENTRY = 512
"""Bytes that an entry counts for beside its arrays."""


class ResultCache:
    """Results by content: the least recently asked for goes first when memory runs out.

    Guarantees: a result depends on its key alone, so that it is the same bits whether it was kept
        or is made anew. Threads may ask at once; two that miss together both compute, and share
        the first result. Each process has its own.

    Args:
        most_bytes: of all results together; a result that is larger alone is not kept.

    Example:
        >>> kept = ResultCache(10_000)
        >>> kept.of(("square", 3), lambda: 9), kept.of(("square", 3), lambda: 0)
        (9, 9)
        >>> kept.hits, kept.misses
        (1, 1)
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self.hits, self.misses = 0, 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, key: Hashable, make: Callable[[], T], *, size: int | None = None) -> T:
        """What `make` gives for the key; made once while it is kept.

        Args:
            key: every number that the result depends on.
            make: computes it; it must not change what it gave away later.
            size: bytes of the result; by default those of the arrays among its attributes.
        """
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                self.hits += 1
                found: T = self._entries[key][0]
                return found
            self.misses += 1
        made = make()
        weight = ENTRY + (_bytes(made) if size is None else size)
        with self._lock:
            if key in self._entries:
                first: T = self._entries[key][0]
                return first
            if weight <= self.most_bytes:
                self._entries[key] = (made, weight)
                self.bytes += weight
                while self.bytes > self.most_bytes:
                    _, (_, gone) = self._entries.popitem(last=False)
                    self.bytes -= gone
        return made

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0


def sealed(array: Array) -> Array:
    """The array as one that nobody can write to, not even by its flags; give the only reference.

    Example:
        >>> sealed(np.zeros(2)).flags.writeable
        False
    """
    whole = np.ascontiguousarray(array)
    return np.frombuffer(whole.reshape(-1).data.toreadonly(), whole.dtype)


def _bytes(thing: Any) -> int:
    parts = thing if isinstance(thing, tuple) else tuple(getattr(thing, "__dict__", {}).values())
    return sum(part.nbytes for part in (thing, *parts) if isinstance(part, np.ndarray))


TAIL = 40.0
"""Cut tails weigh exp(-TAIL) at most, over all steps together; that much is added."""
RESOLUTION = 1e-5
"""The grid of losses raises the sum of all losses by this much on average, if it may be so fine."""
COARSEST = 2.0
"""A grid that raises it by more than this is not used; `visible` stands alone there."""
POINTS = 2**21
WIDEST = 1e6
"""Noise beyond this or its inverse is left to `visible`, which is as good there."""
UNIT = 2.0**-53
HUGE = 700.0
FAINT = 300.0
"""Frequencies of the composed law weaker than exp(-FAINT) are left out, and added to the slack."""
FEW = 2048
"""Cells of one step's grid, at least, on which the window is searched."""
ROUGH = 8.0
"""How much wider the cells of a rough curve are: a first guess, which a fine one then checks."""
KEPT = ResultCache(2**27)
"""Curves of this process, by the numbers that they depend on: 128 MiB at most."""


@dataclass(frozen=True, eq=False)
class LossCurve:
    """delta(epsilon) = sup P(E) - e^epsilon Q(E) of all steps, on a grid, never below the truth.

    Attributes:
        first: the lowest loss of the grid.
        interval: its spacing.
        delta: (n,) values, falling.
        slack: what the Fourier transforms may have lost: added to every answer.
    """

    first: float
    interval: float
    delta: Array
    slack: float

    def gamma(self, log_kappa: Array) -> Array:
        """Sup P(E) with Q(E) <= kappa: the least over epsilon of e^epsilon kappa + delta."""
        low = np.zeros(log_kappa.shape, int)
        high = np.full(log_kappa.shape, len(self.delta) - 1)
        while np.any(low < high):  # convex in e^epsilon: the first place from which it rises
            middle = (low + high) // 2
            after = np.minimum(middle + 1, len(self.delta) - 1)
            rises = self._line(after, log_kappa) >= self._line(middle, log_kappa)
            low, high = np.where(rises, low, after), np.where(rises, middle, high)
            low = np.minimum(low, high)
        return np.minimum(1.0, self._line(low, log_kappa) + self.slack)

    def at(self, epsilon: Array) -> Array:
        """delta(epsilon), linear in e^epsilon between the points, as such a mechanism has it."""
        place = np.clip((epsilon - self.first) / self.interval, 0.0, len(self.delta) - 1.0)
        left = np.minimum(np.floor(place).astype(int), len(self.delta) - 2)
        part = np.expm1((place - left) * self.interval) / np.expm1(self.interval)
        found = self.delta[left] + part * (self.delta[left + 1] - self.delta[left])
        before = np.exp(np.minimum(0.0, epsilon - self.first))  # and up to 1 at minus infinity
        found = 1 + before * (found - 1)
        return np.asarray(np.minimum(1.0, found + self.slack))

    def _line(self, index: Array, log_kappa: Array) -> Array:
        exponent = self.first + index * self.interval + log_kappa
        return np.asarray(np.exp(np.minimum(exponent, HUGE)) + self.delta[index])


def curve(
    noise: float, sampling_rate: float, steps: int, remove: bool = True, *, rough: bool = False
) -> LossCurve | None:
    """The curve of all steps; none where no grid of a sensible size is fine enough.

    ResultCache by its numbers, so that asking again costs nothing.

    Args:
        noise: noise multiplier, above 0 and finite.
        sampling_rate: the chance that a step holds the record, in (0, 1].
        steps: how many.
        remove: P with the record and Q without; else the reverse.
        rough: on wider cells: above the truth too, less close, several times faster.

    Source: Doroshenko et al. 2022 (connect the dots).

    Example:
        >>> curve(1.0, 0.1, 10) is curve(1.0, 0.1, 10)
        True
    """
    what = float(noise), float(sampling_rate), int(steps), bool(remove), bool(rough)
    grid = RESOLUTION, COARSEST, POINTS, WIDEST, TAIL
    return KEPT.of(("steps", *what, *grid), lambda: _composed(*what))


def _composed(noise: float, q: float, steps: int, remove: bool, rough: bool) -> LossCurve | None:
    if not 1 / WIDEST < noise < WIDEST:
        return None
    shift, wider = 1 / noise, ROUGH if rough else 1.0
    spread = q * (np.sqrt(np.expm1(min(shift**2, TAIL))) if remove else min(shift, 1.0))
    interval = wider * float(min(np.sqrt(8 * RESOLUTION / steps), spread / 20))
    points = POINTS / wider**1.5
    low, high = loss_range(shift, q, steps, remove)
    interval = max(interval, (high - low) / points)
    for _ in range(4):
        if steps * interval**2 / 8 > COARSEST * wider or not interval > 0:
            return None
        edges = int(np.floor(low / interval)), int(np.ceil(high / interval))
        mass, beyond = one_step(shift, q, interval, edges, remove)
        first, last = _window(mass, edges[0], interval, steps)
        if last - first < points:
            break
        interval *= 1.05 * (last - first) / points
    else:
        return None
    total, slack = _power(mass, edges[0], steps, first, last)
    beyond = float(-np.expm1(steps * np.log1p(-beyond))) + np.exp(-TAIL)
    size = 1 + max(abs(low), abs(high)) + shift**2 - np.log(q)
    drift = float(16 * UNIT * steps * size)
    delta = sealed(hockey_stick(total, beyond, interval))
    return LossCurve(first * interval + drift, interval, delta, slack)


def loss_range(shift: float, q: float, steps: int, remove: bool) -> tuple[float, float]:
    """The losses of one step, but for exp(-TAIL) / (2 steps) of P at either end."""
    far = -float(special.ndtri_exp(-TAIL - np.log(2 * steps)))
    ends = np.array([-far + (shift if remove and q == 1 else 0), far + (shift if remove else 0)])
    with np.errstate(divide="ignore"):
        losses = np.logaddexp(np.log1p(-q), np.log(q) + shift * ends - shift**2 / 2)
    low, high = losses if remove else -losses[::-1]
    return float(low), float(high)


def _tails(losses: Array, shift: float, q: float, remove: bool) -> tuple[Array, Array]:
    """P(loss > l) and log Q(loss > l) of one step."""
    signed = losses if remove else -losses
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        odds = np.where(
            signed < 1,
            np.log(np.maximum(0.0, np.expm1(np.minimum(signed, 1.0)) + q)),
            signed + np.log1p(-(1 - q) * np.exp(-np.maximum(signed, 1.0))),
        )
        x = (odds - np.log(q)) / shift + shift / 2
        if remove:
            upper = (1 - q) * special.ndtr(-x) + q * special.ndtr(shift - x)
            return upper, special.log_ndtr(-x)
        mixed = np.log1p(-q) + special.log_ndtr(x), np.log(q) + special.log_ndtr(x - shift)
        return special.ndtr(x), np.logaddexp(*mixed)


def one_step(
    shift: float, q: float, interval: float, edges: tuple[int, int], remove: bool
) -> tuple[Array, float]:
    """Mass of one step on the grid, and at infinity: never lower losses than the true ones."""
    losses = np.arange(edges[0], edges[1] + 1) * interval
    upper, log_lower = _tails(losses, shift, q, remove)
    upper = np.minimum.accumulate(upper)
    cell = -np.diff(upper)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fall = np.minimum(0.0, log_lower[1:] - log_lower[:-1])
        other = np.exp(log_lower[:-1] + losses[:-1] + np.log(-np.expm1(fall)))
        other = np.where(log_lower[:-1] == -np.inf, 0.0, other)
        blur = 8 * UNIT * upper[:-1] * (1 + np.abs(losses[:-1]) + np.abs(log_lower[:-1]))
        right = (cell - other + np.where(np.isfinite(blur), blur, np.inf)) / -np.expm1(-interval)
    right = np.clip(np.nan_to_num(right, nan=np.inf), 0.0, cell)
    mass = np.zeros(len(losses))
    mass[0] = 1 - upper[0]
    mass[:-1] += cell - right
    mass[1:] += right
    return mass, float(upper[-1])


def _window(mass: Array, lowest: int, interval: float, steps: int) -> tuple[int, int]:
    """Grid places that hold the sum of all steps but for exp(-TAIL) on either side (Chernoff)."""
    places, weights = coarser(mass, lowest)
    losses = places * interval
    mean = float(losses @ weights)
    spread = np.sqrt(steps * float((losses - mean) ** 2 @ weights)) + interval
    ends = []
    for sign in (-1.0, 1.0):
        top = float((sign * losses).max())
        below = sign * losses - top

        def reach(log_tilt: float, below: Array = below) -> float:
            tilt = np.exp(log_tilt)
            return float((steps * np.log(np.exp(tilt * below) @ weights) + TAIL) / tilt)

        bounds = np.log(1e-3 / spread), np.log(1e2 / spread)
        found = optimize.minimize_scalar(
            reach, bounds=bounds, method="bounded", options={"xatol": 0.05, "maxiter": 20}
        )
        ends.append(steps * top + min(0.0, float(found.fun)))
    return int(np.floor(-ends[0] / interval)) - 1, int(np.ceil(ends[1] / interval)) + 1


def coarser(mass: Array, lowest: int) -> tuple[Array, Array]:
    """Places and weights of a law whose every moment generating function is at least the mass's.

    Each weight goes to the two ends of its group, so that the mean stays; the chord of the convex
    exponential lies above it. A group is a sixteenth of what the grid is finer than `FEW` cells.
    """
    group = max(1, len(mass) // (16 * FEW))
    count = -(-(len(mass) - 1) // group)
    wide = np.zeros((count + 1) * group)
    wide[: len(mass)] = mass
    rows, share = wide.reshape(-1, group), np.arange(group) / group
    weights = rows @ (1 - share)
    weights[1:] += (rows @ share)[:-1]
    places = lowest + group * np.arange(len(weights))
    kept = weights > 0
    return places[kept], weights[kept]


def _power(mass: Array, lowest: int, steps: int, first: int, last: int) -> tuple[Array, float]:
    """The law of the sum of all steps on [first, last], and the most that rounding moved in it.

    A transform of length n errs by log2(n) * 7e-16 of its own size in the 2-norm and, entry by
    entry, by that part of the sum of magnitudes (Higham, theorem 24.2); the power multiplies it by
    the number of steps. The total variation that this allows is the second value.
    """
    length = int(fft.next_fast_len(last - first + 1, real=True))
    wrapped = folded(mass, length)
    spectrum = fft.rfft(wrapped)
    error = (np.log2(length) + 1) * 8 * UNIT
    size = np.abs(spectrum)
    logs = np.log(np.minimum(size + error, 1 + error))
    power = raised(spectrum, steps, steps * logs)
    total = np.roll(fft.irfft(power, length), -((first - steps * lowest) % length))
    with np.errstate(under="ignore"):
        near = np.exp((steps - 1) * logs)
    entrywise = 2 * float(near.sum()) * (error + 4 * UNIT) * steps
    normwise = np.sqrt(length) * float(np.linalg.norm(wrapped)) * (error + 4 * UNIT) * steps
    back = error * np.sqrt(2 * float((np.abs(power) ** 2).sum())) + length * np.exp(-FAINT)
    return np.maximum(0.0, total[: last - first + 1]), min(entrywise, normwise) + back


def folded(mass: Array, length: int) -> Array:
    """The mass on a circle of so many places."""
    wrapped = np.zeros(-(-len(mass) // length) * length)
    wrapped[: len(mass)] = mass
    return np.asarray(wrapped.reshape(-1, length).sum(0))


def raised(base: Array, count: int, logs: Array) -> Array:
    """base^count where its magnitude, below exp(logs), is above exp(-FAINT); 0 elsewhere.

    What is fainter would be subnormal soon, on which processors are tens of times slower.
    """
    loud = logs > -FAINT
    whole = bool(loud.all())
    part, power = base if whole else base[loud], None
    while count:
        if count & 1:
            power = part if power is None else power * part
        count >>= 1
        part = part * part if count else part
    if whole:
        return np.asarray(power)
    found = np.zeros_like(base)
    found[loud] = power
    return found


def hockey_stick(mass: Array, beyond: float, interval: float) -> Array:
    """At each grid point delta, the sum of P(loss > t) e^(l - t) over t above l, all positive."""
    from scipy.signal import lfilter

    above = beyond + np.concatenate([np.cumsum(mass[:0:-1])[::-1], [0.0]])
    decay = np.exp(-interval)
    found, _ = lfilter([-np.expm1(-interval)], [1, -decay], above[::-1], zi=[decay * beyond])
    rounding = 4 * UNIT * (len(found) + 1 / interval)  # of the two running sums, upwards
    return np.asarray(np.minimum(1.0, found[::-1] * (1 + rounding)))
