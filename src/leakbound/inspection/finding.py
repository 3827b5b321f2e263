"""What inspection finds: one statistic of one layer, and from where on it is a mark."""

from __future__ import annotations

from dataclasses import dataclass

MANY = 4.0
"""So many units that are alike are a mark."""


@dataclass(frozen=True)
class Finding:
    """One statistic of one layer; a mark of a planted model where it reaches its threshold.

    Attributes:
        layer: name of the layer; "loss" for the loss.
        kind: one of `KINDS`.
        strength: the statistic; what it counts is in `words`. Larger is more suspicious.
        threshold: from where on it is a mark.
        words: what was seen, for people.
        rows: the units concerned.
    """

    layer: str
    kind: str
    strength: float
    threshold: float
    words: str
    rows: tuple[int, ...] = ()

    @property
    def marked(self) -> bool:
        """Whether the statistic reaches its threshold."""
        return self.strength >= self.threshold
