"""DP-SGD as a chain of plain links."""

from __future__ import annotations

from leakbound.defenses.base import Chain, chain
from leakbound.defenses.noise import GaussianMechanism
from leakbound.defenses.rows import ClipExamples, Mean


def dp_sgd(clip_norm: float = 1.0, noise_multiplier: float = 1.0) -> Chain:
    """Clip every example's gradient, average, add Gaussian noise: one step of DP-SGD.

    Args:
        clip_norm: L2 bound of every example's gradient.
        noise_multiplier: noise standard deviation over the most that one example adds. The noise on
            the batch mean has standard deviation noise_multiplier · clip_norm / batch size.

    Guarantees: the Gaussian mechanism with that multiplier, for adding or removing one example.

    Source: Abadi et al. 2016, algorithm 1.

    Example:
        >>> dp_sgd(clip_norm=2.0, noise_multiplier=0.5)
        ClipExamples(clip_norm=2.0) → Mean() → GaussianMechanism(noise_multiplier=0.5)
    """
    return chain(ClipExamples(clip_norm), Mean(), GaussianMechanism(noise_multiplier))
