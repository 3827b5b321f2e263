"""GradInversion: several searches side by side, pulled to their common mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import Attack
from leakbound.attacks.matching.attack import GradientMatching
from leakbound.attacks.matching.engine import Evaluator, Search
from leakbound.attacks.matching.loop import Loop, answer
from leakbound.core import NotApplicable, Observation, Reconstruction
from leakbound.domains import has_neighbors

SEARCHED = (
    "distance",
    "total_variation",
    "steps",
    "learning_rate",
    "size",
    "batch_norm",
    "first_norm",
    "statistics",
)
"""The settings that are those of each start, under the same names."""


@dataclass(frozen=True)
class GradInversion(Attack):
    """Match gradients and batch norm statistics with several starts that are pulled together.

    The starts run side by side. From `after` on, each start is pulled to the mean of all. Before
    the mean is taken, the starts' images are put into one order and shifted onto each other by the
    phase of their spectra. The answer is the start, or the mean, with the lowest objective.

    Args:
        steps: search steps of every start.
        seeds: how many starts.
        group: the weight of the mean squared distance from the registered mean.
        after: the share of the steps before the pull begins.
        registration: the largest shift in pixels, 0 for none. The published version warps images
            freely with another trained network.
        distance: as for `GradientMatching`; the published one is euclidean.
        total_variation, size, batch_norm, first_norm, statistics: as for `GradientMatching`.
        learning_rate: Adam's learning rate at the start; it falls along a cosine.

    Raises:
        NotApplicable: the inputs are not images (C, H, W), or the statistics are withheld.

    Source: Yin et al., "See through Gradients", CVPR 2021.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> lb.simulate(model, batch, attack=GradInversion(steps=20, seeds=2)).scores[0] > 15
        True
    """

    steps: int = 1000
    seeds: int = 4
    group: float = 0.01
    after: float = 0.25
    registration: int = 3
    distance: str = "euclidean"
    total_variation: float = 1e-4
    size: float = 1e-6
    batch_norm: float = 0.1
    first_norm: float = 10.0
    statistics: str = "best"
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        check.count(seeds=self.seeds)
        check.non_negative(group=self.group, registration=self.registration)
        check.fraction(after=self.after)
        self.search()  # checks the rest

    @property
    def step_trainings(self) -> int:
        """All starts take a step together."""
        return self.seeds

    def search(self) -> GradientMatching:
        """The settings of one start."""
        settings = {name: getattr(self, name) for name in SEARCHED}
        return GradientMatching(**settings, signed=False, schedule="cosine")

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        if not has_neighbors(observation.input_shape):
            raise NotApplicable("registration needs images (C, H, W)")
        settings = self.search()
        if not observation.update.rows.any():
            return settings(observation, generator)
        searches = [settings.search(observation, generator) for _ in range(self.seeds)]
        steppers = [Loop(settings, [s]).step for s in searches]
        live = [True] * self.seeds
        for number in range(self.steps):
            if self.group and number >= self.after * self.steps and self.seeds > 1:
                images = [search.images().detach() for search in searches]
                for search, mine in zip(searches, images, strict=True):
                    search.pull = partial(self._apart, self._mean_onto(mine, images))
            for i, step in enumerate(steppers):
                live[i] = live[i] and not step(number)
            if not any(live):
                break
        best = min(searches, key=lambda search: float(search.best))
        self._consider_mean(best, searches)
        return answer(best)

    def _apart(self, anchor: Tensor, images: Tensor) -> Tensor:
        return self.group * (images - anchor).square().mean()

    def _mean_onto(self, images: Tensor, starts: list[Tensor]) -> Tensor:
        """The mean of all starts' images, in the order and position of `images`."""
        return torch.stack([self._onto(images, other) for other in starts]).mean(0)

    def _onto(self, images: Tensor, others: Tensor) -> Tensor:
        """The other start's images, in the order and position of `images`."""
        if images is others:
            return others
        likeness, shifts = _correlations(images, others, self.registration)
        # NaN counts as worse than every correlation.
        rows, columns = linear_sum_assignment(-likeness.nan_to_num(-9.0).cpu().numpy())
        moved = [
            torch.roll(
                others[b],
                tuple(int(v) for v in shifts[a, b]),
                dims=(1, 2),
            )
            for a, b in zip(rows, columns, strict=True)
        ]
        return torch.stack(moved)

    def _consider_mean(self, best: Search, searches: list[Search]) -> None:
        """Take the mean of all starts' best images if the best start's objective prefers it."""
        for search in searches:
            search.recall()
        images = [search.images().detach() for search in searches]
        with torch.no_grad():
            mean = self._mean_onto(images[searches.index(best)], images)
            best.images.variables[0].copy_(mean)
        best.pull = None
        # Keeps the mean as the best iterate if its objective is lower.
        Evaluator([best]).evaluate()


def _correlations(
    images: Tensor,
    others: Tensor,
    reach: int,
) -> tuple[Tensor, Tensor]:
    """Best circular correlation (N, N) within `reach` pixels, and the shifts (N, N, 2) that give
    it: a shift moves the second image onto the first.
    """
    centered = [x - x.mean((1, 2, 3), keepdim=True) for x in (images, others)]
    first, second = (torch.fft.rfft2(x.double()) for x in centered)
    size = images.shape[2:]
    # All circular shifts at once, by the correlation theorem.
    cross = torch.fft.irfft2((first[:, None] * second[None].conj()).sum(2), s=(size[0], size[1]))
    # A shift by more than half of a side is one in the other direction.
    lags = [torch.arange(-min(reach, side // 2), min(reach, (side - 1) // 2) + 1) for side in size]
    window = cross[..., lags[0] % size[0], :][..., lags[1] % size[1]]
    best = window.flatten(2).max(2)
    norms = [x.double().flatten(1).norm(dim=1).clamp_min(1e-12) for x in centered]
    wide = len(lags[1])
    shifts = torch.stack(
        [lags[0][best.indices.cpu() // wide], lags[1][best.indices.cpu() % wide]], -1
    )
    return best.values / (norms[0][:, None] * norms[1][None]), shifts
