"""The privacy loss of many subsampled Gaussian steps: its curve on a grid, never below the truth.

A step is a `Part` (noise multiplier, sampling rate, number of such steps). The loss of one step is
put on a grid such that each cell keeps its mass under both distributions (connect the dots,
2207.04380), which can only raise delta(epsilon). The sum over all steps is a product of powers of
their Fourier transforms. Cut tails count as an infinite loss, and possible rounding errors are
added.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np
from scipy import fft, optimize, special

from leakbound.bounds.law import Array

Part = tuple[float, float, int]
"""Noise multiplier, sampling rate, steps."""
Pair = Literal["remove", "add", "replace"]
"""P and Q of a step: with an example and without, the reverse, or with two opposite ones."""
T = TypeVar("T")
ENTRY = 512
"""Bytes that a cache entry counts for, besides its arrays."""
TAIL = 40.0
"""Cut tails weigh at most exp(-TAIL) over all steps together; this is added."""
RESOLUTION = 1e-5
"""Target for how much the grid raises the mean of the summed loss, if it may be that fine."""
COARSEST = 2.0
"""A grid that raises it by more than this is not used; then only `visible` applies."""
POINTS = 2**21
WIDEST = 1e6
"""For noise above this or below its inverse `visible` is used, which is equally good there."""
RAREST = 1e-100
"""Lower sampling rates count as this one, which can only raise the curve."""
UNIT = 2.0**-53
HUGE = 700.0
FAINT = 300.0
"""Frequencies of the composition weaker than exp(-FAINT) are left out and added to the slack."""
FEW = 2048
"""Minimum number of cells of one step's grid on which the window is searched."""
ROUGH = 8.0
"""Factor by which the cells of a rough curve are wider; a fine curve then checks the result."""


class ResultCache:
    """Results by content; the least recently used go first when `most_bytes` run out.

    A result depends on its key alone, so it has the same bits whether it was kept or is computed
    again. Threads may ask at once; two that miss together both compute and share the first result.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make` for the key, which holds every number that the result depends on.

        `make` must not change the result later.
        """
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                self.hits += 1
                return cast(T, self._entries[key][0])
            self.misses += 1
        # Outside the lock, so that threads can compute different curves at the same time.
        made = make()
        parts = (made, *getattr(made, "__dict__", {}).values())
        weight = ENTRY + sum(part.nbytes for part in parts if isinstance(part, np.ndarray))
        with self._lock:
            if key in self._entries:
                return cast(T, self._entries[key][0])
            if weight <= self.most_bytes:
                self._entries[key] = (made, weight)
                self.bytes += weight
                while self.bytes > self.most_bytes:
                    _, (_, gone) = self._entries.popitem(last=False)
                    self.bytes -= gone
        return made

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0


CACHE = ResultCache(2**27)
"""Curves of this process, by the numbers that they depend on; at most 128 MiB."""


def sealed(array: Array) -> Array:
    """Make the array read-only, even by its flags; give the only reference."""
    whole = np.ascontiguousarray(array)
    return np.frombuffer(whole.reshape(-1).data.toreadonly(), whole.dtype)


@dataclass(frozen=True, eq=False)
class LossCurve:
    """delta(epsilon) = sup P(E) - e^epsilon Q(E) of all steps, on a grid, never below the truth.

    Attributes:
        first: the lowest loss of the grid.
        interval: its spacing.
        delta: (n,) values, falling.
        slack: possible loss in the Fourier transforms, added to every result.
    """

    first: float
    interval: float
    delta: Array
    slack: float

    def gamma(self, log_kappa: Array) -> Array:
        """Sup P(E) with Q(E) <= kappa: the minimum over epsilon of e^epsilon kappa + delta."""
        low = np.zeros(log_kappa.shape, int)
        high = np.full(log_kappa.shape, len(self.delta) - 1)
        while np.any(low < high):  # convex in e^epsilon: the first place from which it rises
            middle = (low + high) // 2
            after = np.minimum(middle + 1, len(self.delta) - 1)
            rises = self._line(after, log_kappa) >= self._line(middle, log_kappa)
            low = np.where(rises, low, after)
            high = np.where(rises, middle, high)
            low = np.minimum(low, high)
        return np.minimum(1.0, self._line(low, log_kappa) + self.slack)

    def at(self, epsilon: Array) -> Array:
        """delta(epsilon), linear in e^epsilon between the points, as for every such mechanism."""
        place = np.clip((epsilon - self.first) / self.interval, 0.0, len(self.delta) - 1.0)
        left = np.minimum(np.floor(place).astype(int), len(self.delta) - 2)
        part = np.expm1((place - left) * self.interval) / np.expm1(self.interval)
        delta = self.delta[left] + part * (self.delta[left + 1] - self.delta[left])
        before = np.exp(np.minimum(0.0, epsilon - self.first))  # up to 1 at minus infinity
        delta = 1 + before * (delta - 1)
        return np.minimum(1.0, delta + self.slack)

    def _line(self, index: Array, log_kappa: Array) -> Array:
        exponent = self.first + index * self.interval + log_kappa
        return np.exp(np.minimum(exponent, HUGE)) + self.delta[index]


def curve(
    noise: float,
    sampling_rate: float,
    steps: int,
    pair: Pair = "remove",
    *,
    rough: bool = False,
) -> LossCurve | None:
    """`mixed_curve` for steps of one kind."""
    return mixed_curve([(noise, sampling_rate, steps)], pair, rough=rough)


def mixed_curve(
    parts: Sequence[Part],
    pair: Pair = "remove",
    *,
    rough: bool = False,
) -> LossCurve | None:
    """The curve of all steps; None if no grid of a practical size is fine enough.

    Results are cached by their numbers. `rough` uses wider cells: it also errs upwards, is less
    tight and several times faster.

    For "replace", P is (1 - q) N(0, 1) + q N(s, 1) and Q the same at -s, with s = 1 / noise
    multiplier. No two clipped gradients u and v, of length s at most, are easier to distinguish.
    Proof: let P = (1 - q) N(0) + q N(u) and Q = (1 - q) N(0) + q N(v). Take the event that
    distinguishes them best for a factor e^epsilon of 1 or more, and move the centers 0, u and v. On
    the edge of this event the densities q N(u), -(e^epsilon - 1)(1 - q) N(0) and -e^epsilon q N(v)
    have the sum 0. Call them w. The advantage changes by -1/4 of the integral over the edge of
    sum w_i w_j d|x_i - x_j|^2, up to a positive factor. A wider angle raises |u - v| alone, a
    longer u both of its distances, and a longer v raises |u - v|^2 by more than |v|^2. Each raises
    the advantage, as w_u is the sum of the other two sizes. So u = -v at length s is the worst
    pair. For factors below 1, exchange P and Q. A pair that is worst for every epsilon stays worst
    in composition.

    Source: Doroshenko et al. 2022 (connect the dots); Koskela, Jälkö and Honkela 2020 (replace);
    Zhu, Dong and Wang 2022 (worst pairs in composition).
    """
    kinds = tuple((float(noise), float(q), int(steps)) for noise, q, steps in parts)
    what = kinds, pair, bool(rough)
    grid = RESOLUTION, COARSEST, POINTS, WIDEST, TAIL
    return CACHE.of((*what, *grid), lambda: _composed(*what))


def _composed(
    parts: tuple[Part, ...],
    pair: Pair,
    rough: bool,
) -> LossCurve | None:
    if any(not 1 / WIDEST < noise < WIDEST for noise, *_ in parts):
        return None
    steps = [(1 / noise, max(q, RAREST)) for noise, q, _ in parts]
    counts = [count for *_, count in parts]
    total = sum(counts)
    wider = ROUGH if rough else 1.0
    spread = min(
        q * (np.sqrt(np.expm1(min(shift**2, TAIL))) if pair != "add" else min(shift, 1.0))
        for shift, q in steps
    )
    interval = wider * float(min(np.sqrt(8 * RESOLUTION / total), spread / 20))
    points = POINTS / wider**1.5
    ranges = [_loss_range(shift, q, total, pair) for shift, q in steps]
    interval = max(interval, max(high - low for low, high in ranges) / points)
    for _ in range(4):
        if total * interval**2 / 8 > COARSEST * wider or not interval > 0:
            return None
        ends = [(int(np.floor(a / interval)), int(np.ceil(b / interval))) for a, b in ranges]
        rows = [
            one_step(shift, q, interval, span, pair)
            for (shift, q), span in zip(steps, ends, strict=True)
        ]
        laws = [(mass, span[0]) for (mass, _), span in zip(rows, ends, strict=True)]
        first, last = _window(laws, counts, interval)
        if last - first < points:
            break
        # A little wider than needed, because the window changes with the interval.
        interval *= 1.05 * (last - first) / points
    else:
        return None
    mass, slack = _power(laws, counts, first, last)
    lost = sum(count * np.log1p(-beyond) for count, (_, beyond) in zip(counts, rows, strict=True))
    infinite = float(-np.expm1(lost)) + np.exp(-TAIL)
    drift = (
        16
        * UNIT
        * sum(
            count * (1 + max(abs(low), abs(high)) + shift**2 - np.log(q))
            for count, (low, high), (shift, q) in zip(counts, ranges, steps, strict=True)
        )
    )
    delta = sealed(hockey_stick(mass, infinite, interval))
    # The possible error of all losses moves the whole grid up.
    return LossCurve(first * interval + float(drift), interval, delta, slack)


def _loss_range(
    shift: float,
    q: float,
    steps: int,
    pair: Pair,
) -> tuple[float, float]:
    """The range of losses of one step, without exp(-TAIL) / (2 steps) of P at either end."""
    far = -float(special.ndtri_exp(-TAIL - np.log(2 * steps)))
    held = pair != "add"
    ends = np.array([-far + (shift if held and q == 1 else 0), far + (shift if held else 0)])
    with np.errstate(divide="ignore"):
        losses, other = (
            np.logaddexp(np.log1p(-q), np.log(q) + side * shift * ends - shift**2 / 2)
            for side in (1, -1)
        )
    if pair == "replace":
        losses = losses - other
    elif pair == "add":
        losses = -losses[::-1]
    return float(losses[0]), float(losses[1])


def _tails(
    losses: Array,
    shift: float,
    q: float,
    pair: Pair,
) -> tuple[Array, Array]:
    """P(loss > l) and log Q(loss > l) of one step."""
    if pair == "replace":
        return _replaced(losses, shift, q)
    signed = losses if pair == "remove" else -losses
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        odds = np.where(
            # expm1 keeps the digits near 0; the second form does not overflow for large losses.
            signed < 1,
            np.log(np.maximum(0.0, np.expm1(np.minimum(signed, 1.0)) + q)),
            signed + np.log1p(-(1 - q) * np.exp(-np.maximum(signed, 1.0))),
        )
        x = (odds - np.log(q)) / shift + shift / 2
        if pair == "remove":
            upper = (1 - q) * special.ndtr(-x) + q * special.ndtr(shift - x)
            return upper, special.log_ndtr(-x)
        mixed = np.log1p(-q) + special.log_ndtr(x), np.log(q) + special.log_ndtr(x - shift)
        return special.ndtr(x), np.logaddexp(*mixed)


def _replaced(
    losses: Array,
    shift: float,
    q: float,
) -> tuple[Array, Array]:
    """The tails of "replace": the loss is l at shift x = l / 2 + asinh(odds sinh(l / 2))."""
    size = np.abs(losses)
    with np.errstate(divide="ignore"):
        odds = np.log1p(-q) - np.log(q) + shift**2 / 2
        log_sinh = odds + size / 2 + np.log(-np.expm1(-size) / 2)
        rest = np.logaddexp(log_sinh, np.logaddexp(0.0, 2 * log_sinh) / 2)
        x = (losses / 2 + np.sign(losses) * rest) / shift
        upper = (1 - q) * special.ndtr(-x) + q * special.ndtr(shift - x)
        mixed = np.log1p(-q) + special.log_ndtr(-x), np.log(q) + special.log_ndtr(-x - shift)
    return upper, np.logaddexp(*mixed)


def one_step(
    shift: float,
    q: float,
    interval: float,
    ends: tuple[int, int],
    pair: Pair,
) -> tuple[Array, float]:
    """Mass of one step on the grid and at infinity; no loss is below the true one."""
    losses = np.arange(ends[0], ends[1] + 1) * interval
    upper, log_lower = _tails(losses, shift, q, pair)
    # Rounding could make the tail rise, and the mass of a cell negative.
    upper = np.minimum.accumulate(upper)
    cell = -np.diff(upper)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        fall = np.minimum(0.0, log_lower[1:] - log_lower[:-1])
        other = np.exp(log_lower[:-1] + losses[:-1] + np.log(-np.expm1(fall)))
        other = np.where(log_lower[:-1] == -np.inf, 0.0, other)
        # Possible rounding is added, which moves mass to the higher end of its cell.
        blur = 8 * UNIT * upper[:-1] * (1 + np.abs(losses[:-1]) + np.abs(log_lower[:-1]))
        right = (cell - other + np.where(np.isfinite(blur), blur, np.inf)) / -np.expm1(-interval)
    right = np.clip(np.nan_to_num(right, nan=np.inf), 0.0, cell)
    mass = np.zeros(len(losses))
    # All that lies below the grid counts at its lowest loss, which is rounded up.
    mass[0] = 1 - upper[0]
    mass[:-1] += cell - right
    mass[1:] += right
    return mass, float(upper[-1])


def _window(
    laws: list[tuple[Array, int]],
    counts: list[int],
    interval: float,
) -> tuple[int, int]:
    """Grid range of the sum of all steps, without exp(-TAIL) on either side (Chernoff)."""
    kinds = [(places * interval, mass) for places, mass in (_coarser(*law) for law in laws)]
    variance = sum(
        count * float((losses - float(losses @ mass)) ** 2 @ mass)
        for count, (losses, mass) in zip(counts, kinds, strict=True)
    )
    spread = np.sqrt(variance) + interval
    ends = []
    for sign in (-1.0, 1.0):
        tops = [float((sign * losses).max()) for losses, _ in kinds]
        below = [
            (count, sign * losses - top, mass)
            for count, top, (losses, mass) in zip(counts, tops, kinds, strict=True)
        ]

        def reach(
            log_tilt: float,
            below: list[tuple[int, Array, Array]] = below,
        ) -> float:
            tilt = np.exp(log_tilt)
            logs = sum(count * np.log(np.exp(tilt * down) @ mass) for count, down, mass in below)
            return float((logs + TAIL) / tilt)

        bounds = np.log(1e-3 / spread), np.log(1e2 / spread)
        optimum = optimize.minimize_scalar(
            reach,
            bounds=bounds,
            method="bounded",
            options={"xatol": 0.05, "maxiter": 20},
        )
        highest = sum(count * top for count, top in zip(counts, tops, strict=True))
        ends.append(highest + min(0.0, float(optimum.fun)))
    return int(np.floor(-ends[0] / interval)) - 1, int(np.ceil(ends[1] / interval)) + 1


def _coarser(mass: Array, lowest: int) -> tuple[Array, Array]:
    """Places and weights whose every moment generating function is at least that of the mass.

    Each weight goes to the two ends of its group, so that the mean stays. The chord of the convex
    exponential lies above it. A group is a sixteenth of the factor by which the grid is finer than
    `FEW` cells.
    """
    group = max(1, len(mass) // (16 * FEW))
    count = -(-(len(mass) - 1) // group)
    wide = np.zeros((count + 1) * group)
    wide[: len(mass)] = mass
    rows = wide.reshape(-1, group)
    share = np.arange(group) / group
    weights = rows @ (1 - share)
    weights[1:] += (rows @ share)[:-1]
    places = lowest + group * np.arange(len(weights))
    some = weights > 0
    return places[some], weights[some]


def _power(
    laws: list[tuple[Array, int]],
    counts: list[int],
    first: int,
    last: int,
) -> tuple[Array, float]:
    """The distribution of the sum of all steps on [first, last], and a bound on its rounding error.

    A transform of length n has an error of log2(n) * 7e-16 of its size in the 2-norm. Entry by
    entry, the error is this part of the sum of magnitudes (Higham, theorem 24.2). A power
    multiplies it by the number of steps; the other factors, of magnitude at most 1, do not raise
    it. The second value is the total variation that this allows.
    """
    length = int(fft.next_fast_len(last - first + 1, real=True))
    error = (np.log2(length) + 1) * 8 * UNIT
    wraps = [_folded(mass, length) for mass, _ in laws]
    spectra = [fft.rfft(wrapped) for wrapped in wraps]
    logs = [np.log(np.minimum(np.abs(spectrum) + error, 1 + error)) for spectrum in spectra]
    sizes = np.asarray(sum(count * log for count, log in zip(counts, logs, strict=True)))
    power = None
    slack = 0.0
    for wrapped, spectrum, log, count in zip(wraps, spectra, logs, counts, strict=True):
        factor = _raised(spectrum, count, sizes)
        power = factor if power is None else power * factor
        with np.errstate(under="ignore"):  # the magnitude of all factors but one of this kind
            near = np.exp((sizes - count * log) + (count - 1) * log)
        products = count if len(laws) == 1 else count + 1
        entrywise = 2 * float(near.sum()) * (error + 4 * UNIT) * products
        normwise = np.sqrt(length) * float(np.linalg.norm(wrapped)) * (error + 4 * UNIT) * products
        slack += min(entrywise, normwise)
    assert power is not None  # there is at least one kind of step
    lowest = sum(count * low for count, (_, low) in zip(counts, laws, strict=True))
    total = np.roll(fft.irfft(power, length), -((first - lowest) % length))
    back = error * np.sqrt(2 * float((np.abs(power) ** 2).sum())) + length * np.exp(-FAINT)
    return np.maximum(0.0, total[: last - first + 1]), slack + back


def _folded(mass: Array, length: int) -> Array:
    """The mass on a circle of `length` places."""
    wrapped = np.zeros(-(-len(mass) // length) * length)
    wrapped[: len(mass)] = mass
    return wrapped.reshape(-1, length).sum(0)


def _raised(
    base: Array,
    count: int,
    logs: Array,
) -> Array:
    """base^count where the whole product, below exp(logs), is above exp(-FAINT); 0 elsewhere.

    Smaller values would soon be subnormal, and processors are tens of times slower on those.
    """
    loud = logs > -FAINT
    whole = bool(loud.all())
    part = base if whole else base[loud]
    power = None
    while count:
        if count & 1:
            power = part if power is None else power * part
        count >>= 1
        part = part * part if count else part
    if whole:
        return np.asarray(power)
    raised = np.zeros_like(base)
    raised[loud] = power
    return raised


def hockey_stick(
    mass: Array,
    beyond: float,
    interval: float,
) -> Array:
    """At each grid point l, delta: the sum of P(loss > t) e^(l - t) over t > l, all positive."""
    from scipy.signal import lfilter

    above = beyond + np.concatenate([np.cumsum(mass[:0:-1])[::-1], [0.0]])
    decay = np.exp(-interval)
    sums, _ = lfilter(
        [-np.expm1(-interval)],
        [1, -decay],
        above[::-1],
        zi=[decay * beyond],
    )
    rounding = 4 * UNIT * (len(sums) + 1 / interval)  # of the two running sums, upwards
    return np.minimum(1.0, sums[::-1] * (1 + rounding))
