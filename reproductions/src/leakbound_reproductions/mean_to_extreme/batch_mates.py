"""Claim 3-8: the smallest error from a sum of B clipped examples, B = 1 included, by example.

The attacker knows the noise, the clip norm, B and the example's norm. At every B they also know the
same about such examples: nothing, or their mean. The estimate is the prior-only baseline plus the
best multiple of what the sum adds to it. The plain estimate and the baseline (the zero image, if
the attacker knows nothing) are multiples too, so the attacker takes the best of all three. The
multiple is in closed form and is not chosen on the draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound import data
from leakbound.randomness import normal, permutation, stream
from leakbound_reproductions.mean_to_extreme.draws import BATCH_NOISES, BATCHES

SIZES = (1, *BATCHES)
SIDE = 32
CHANNELS = 3
DIM = CHANNELS * SIDE**2
READABLE = 0.9
"""Share of the zero image's error below which an attacker at B = 1 learns something."""
INFORMED = "informed"
BLIND = "blind"


def share(noise: float, size: int, dim: int = DIM) -> float:
    """Error of the best linear attacker relative to the zero image, in closed form.

    For clipped examples of norm C that share nothing, sums are X plus B - 1 others and noise of C
    sigma, so the multiple 1 / (B + sigma^2 N) leaves this share.

    Source: paper C's channel; minimum of (1 - c)^2 + c^2 (B - 1 + sigma^2 N) over c.

    Example:
        >>> [round(share(0.1, size), 4) for size in (1, 2, 8, 32)]
        [0.9685, 0.9694, 0.9742, 0.9841]
    """
    return 1 - 1 / (size + noise**2 * dim)


JUDGED = tuple(noise for noise in BATCH_NOISES if share(noise, 1) < READABLE)
"""Noise multipliers at which the attack at B = 1 still learns something."""
FAINT = tuple(noise for noise in BATCH_NOISES if share(noise, 1) >= READABLE)


@dataclass(frozen=True, eq=False)
class Prior:
    """What the attacker knows about all examples.

    Attributes:
        direction: (N,) mean of X / |X|.
        sent: (N,) mean of the clipped examples.
        spread: mean squared distance of a clipped example from `sent`.
    """

    direction: Tensor
    sent: Tensor
    spread: float


def blind(dim: int, clip: float) -> Prior:
    """For an attacker who knows nothing: mean direction zero, other examples of the clip norm."""
    nothing = torch.zeros(dim, dtype=torch.float64)
    return Prior(nothing, nothing, clip**2)


def informed(public: Tensor, clip: float) -> Prior:
    """For an attacker who has other examples of the same kind, (n, N)."""
    sent = clipped(public, clip)
    mean = sent.mean(0)
    directions = public / public.norm(dim=1, keepdim=True)
    return Prior(directions.mean(0), mean, float((sent - mean).square().sum(1).mean()))


def clipped(records: Tensor, clip: float) -> Tensor:
    """(n, N), each of norm C at most."""
    sent: Tensor = records * (clip / records.norm(dim=1, keepdim=True)).clamp_max(1)
    return sent


def guess(seen: Tensor, norm: float, size: int, deviation: float, clip: float, of: Prior) -> Tensor:
    """The attacker's estimate of one example in a sum, (N,).

    Args:
        seen: (N,) the sum of `size` clipped examples plus noise.
        norm: of the example.
        size: how many examples are in the sum.
        deviation: of the noise in each coordinate.
        clip: the clip norm.
        of: what is known about all examples.
    """
    sent = min(norm, clip)
    own = 1 - float(of.direction.square().sum())
    others = (size - 1) * of.spread + len(seen) * deviation**2
    multiple = sent * norm * own / (sent**2 * own + others)
    return norm * of.direction + multiple * (seen - sent * of.direction - (size - 1) * of.sent)


def errors(color: str, trials: int) -> dict[str, list[float]]:
    """Errors relative to the zero image, one per trial: "KNOWS NOISE B", same examples at every B.

    A trial draws examples with natural norms, of which the first is attacked, and noise; the first
    B are summed. Half of the images are public, and `INFORMED` knows their mean. The clip norm is
    the median of all norms, as in `draws.batches`. Black images are left out.

    Args:
        color: a data source of color images.
        trials: how many at each noise multiplier.
    """
    source = data.load(color, size=SIDE, channels=CHANNELS, limit=max(SIZES) * trials)
    flat = source.inputs.flatten(1).double()
    flat = flat[permutation(len(flat), stream(11, "company"))]
    flat = flat[flat.norm(dim=1) > 0]
    private = flat[: len(flat) // 2]
    public = flat[len(flat) // 2 :]
    if len(private) < max(SIZES):
        raise ValueError(f"color is {color!r}, with {len(flat)} images; give {2 * max(SIZES)}")
    clip = float(flat.norm(dim=1).median())
    priors = {INFORMED: informed(public, clip), BLIND: blind(flat.shape[1], clip)}
    found: dict[str, list[float]] = {}
    for noise in BATCH_NOISES:
        drawn = stream(11, "company", repr(noise))
        for _ in range(trials):
            x = private[permutation(len(private), drawn)[: max(SIZES)]]
            for name, value in _trial(x, noise * clip, clip, priors, drawn).items():
                knows, size = name
                found.setdefault(f"{knows} {noise} {size}", []).append(value)
    return found


def _trial(
    x: Tensor, deviation: float, clip: float, priors: dict[str, Prior], source: torch.Generator
) -> dict[tuple[str, int], float]:
    sent = clipped(x, clip)
    norm = float(x[0].norm())
    noise = deviation * normal(x.shape[1:], source, like=x)
    found = {}
    for size in SIZES:
        seen = sent[:size].sum(0) + noise
        for knows, prior in priors.items():
            off = guess(seen, norm, size, deviation, clip, prior) - x[0]
            found[knows, size] = float(off.square().sum()) / norm**2
    return found
