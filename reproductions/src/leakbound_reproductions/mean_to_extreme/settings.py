"""How much is drawn at each scale."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Counts of one scale.

    Attributes:
        images: of each size, in the boxes of figures 4 and 5.
        tiles: from which they are chosen.
        repeats: noise draws per image and box.
        chances: draws for each certificate and each limit, in thousands.
        rows: draws for each number of rows (claim 3-2).
        sighted: examples that are sent k times (3-7).
        trials: batches of each size (3-8).
        attacked: images under all attacks (3-9, IV.3); steps, restarts: of Inverting Gradients.
        side: pixels per side of the ResNet's input.
        color_attacked: the attacked images are color ones of 32 x 32, as in the paper's code.
        more: attacks compared with gamma*, and noisy copies, which no claim needs.
    """

    images: int
    tiles: int
    repeats: int
    chances: int
    rows: int
    sighted: int
    trials: int
    attacked: int
    steps: int
    restarts: int
    side: int = 32
    color_attacked: bool = False
    more: bool = False


SETTINGS = {
    "minutes": Setting(60, 500, 20, 20, 100, 12, 40, 8, 300, 1),
    "cpu": Setting(500, 4000, 20, 100, 200, 80, 200, 30, 800, 1),
    "paper": Setting(500, 4000, 20, 100, 200, 80, 200, 100, 800, 3, 224, True, True),
}
