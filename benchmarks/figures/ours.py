"""leakbound's side of a comparison, with the classes that an audit uses."""

from __future__ import annotations

import torch
from torch import Tensor

from figures.setting import Setting, attack_stream
from leakbound.attacks import GradientMatching
from leakbound.attacks.matching.engine import Evaluator


def settings(steps: int, enough: float | None = None) -> GradientMatching:
    """Inverting Gradients as breaching runs it, without total variation."""
    return GradientMatching(steps=steps, enough=enough)


class Ours:
    """The public attack's step on one setting."""

    def __init__(self, given: Setting, steps: int, seed: int = 0) -> None:
        self.search = settings(steps).search(given.observation, attack_stream(seed))
        self.evaluator = Evaluator([self.search])
        if not torch.equal(self.search.images().detach(), given.start):
            raise RuntimeError("the attack's start is not the setting's: the comparison is void")

    def step(self) -> Tensor:
        """Objective and gradient at the current candidate; keeps the best candidate."""
        self.evaluator.evaluate()
        return self.search.total

    def compare(self) -> tuple[float, Tensor]:
        """Value and gradient at the start."""
        value = float(self.step())
        gradient = self.search.variables[0].grad
        assert gradient is not None
        return value, gradient.detach().clone()
