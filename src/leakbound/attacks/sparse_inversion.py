"""Gradient inversion of sparse messages: find the withheld coordinates first, and leave them out.

A client that sends weights and withholds some sends exact zeros there. The server's pseudo-gradient
`(weights before - weights sent) / learning rate` then holds weights in these places. They are no
gradients and far larger. Matching them fails; inferring the mask from the zeros avoids this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import Attack, BestOf, seen_task
from leakbound.attacks.matching.attack import GradientMatching, inverting_gradients
from leakbound.core import NotApplicable, Observation, Reconstruction, Task

__all__ = [
    "MASKS",
    "SparseInversion",
    "evidence",
    "sparse_gradient_inversion",
    "sparse_gradient_inversion_paper",
]

MASKS = ("recovered", "blind", "told")
POINTS = ("start", "pruned", "end")


@dataclass(frozen=True, repr=False)
class SparseInversion(Attack):
    """Apply another attack to the part of the message that holds gradients.

    A withheld weight is sent as exactly zero. Tensors of fewer than two dimensions are never
    withheld, unless the mask is known. Weights that the task's own pruning removed are ignored.

    Source: Chu et al. 2024 (PriPrune), algorithm 2. It says "end"; for one local step the gradient
        was taken at the start ("pruned" if the client's own pruning caused the zeros).
    """

    search: Attack
    mask: str = "recovered"
    eval_point: str = "start"

    def __post_init__(self) -> None:
        check.one_of(MASKS, mask=self.mask)
        check.one_of(POINTS, eval_point=self.eval_point)

    def plant(self, task: Task) -> Task:
        return self.search.plant(task)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        gradients = evidence(observation, self.mask)
        if self.eval_point == "start":
            return self.search(gradients, generator)
        count = len(observation.update.rows)
        if count > 1:
            raise NotApplicable(
                f"the message has {count} rows, each from other weights, and eval_point is "
                f'{self.eval_point!r}; use eval_point="start"'
            )
        task = observation.task
        if self.eval_point == "pruned":
            weights = task.parameters * recovered_mask(observation)
        elif observation.sent is not None:
            weights = observation.sent
        else:
            rate = seen_task(observation).plan.learning_rate
            weights = task.parameters - rate * gradients.update.rows
            if gradients.update.mask is not None:
                weights = weights * gradients.update.mask
        task = task.with_parameters(weights[0])
        return self.search(replace(gradients, task=task), generator)


def sparse_gradient_inversion(
    steps: int = 1000,
    total_variation: float = 1e-6,
    learning_rate: float = 0.1,
    restarts: int = 1,
    mask: str = "recovered",
    eval_point: str = "start",
    labels: str = "told",
    noise_variation: float = 0.04,
    ordered: float = 0.0,
    smoothing: float = 3e-2,
) -> Attack:
    """Invert a sparse message: `inverting_gradients` on the coordinates that were not withheld.

    The settings are leakbound's own (signed Adam, four stages, box). If the client withholds the
    largest entries, `ordered` also uses that they are the largest, which sometimes helps.

    Args:
        steps: search steps.
        total_variation: weight of the total variation.
        learning_rate: Adam's learning rate at the start; the schedule lowers it.
        restarts: how many starts; the one with the lowest objective is kept.
        mask: which coordinates count as withheld: "recovered" (those exactly zero in the message),
            "told" (the mask itself if the defense is known; otherwise as "recovered"), or "blind"
            (none: zeros are taken literally).
        eval_point: the weights at which a candidate is trained: "start" (those that the server
            sent), "pruned" (the same with zeros where the message has zeros) or "end" (those that
            came back).
        labels: "told" (inferred if they are not known), "inferred", or "joint".
        noise_variation: what is added to the weight of the total variation under noise.
        ordered: weight of the knowledge that withheld entries are the largest; see
            `GradientMatching`.
        smoothing: what is added to the weight of the total variation in the first stage; see
            `GradientMatching`.

    Source: Chu et al. 2024 (PriPrune), algorithm 2; Geiping et al. 2020.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> withhold = lb.defenses.Withhold(rate=0.3, rule="random")
        >>> attack = sparse_gradient_inversion(steps=100)
        >>> lb.simulate(model, batch, defense=withhold, attack=attack).scores[0] > 25
        True
    """
    search = inverting_gradients(
        steps, total_variation, learning_rate, 1, noise_variation, smoothing
    )
    assert isinstance(search, GradientMatching)  # of one start
    attack = SparseInversion(
        replace(search, labels=labels, ordered=ordered),
        mask,
        eval_point,
    )
    return BestOf(attack, restarts) if restarts > 1 else attack


def sparse_gradient_inversion_paper(
    steps: int = 10000,
    total_variation: float = 1e-4,
    mask: str = "recovered",
    eval_point: str = "start",
) -> Attack:
    """Invert a sparse message as in the paper: Adam at rate 0.01, images and labels jointly.

    Args:
        steps: search steps.
        total_variation: weight of the total variation, which is not in the paper.
        mask: as for `sparse_gradient_inversion`.
        eval_point: as for `sparse_gradient_inversion`.

    Source: Chu et al. 2024 (PriPrune), algorithm 2 and the settings of its experiments.

    Example:
        >>> attack = sparse_gradient_inversion_paper()
        >>> attack.search.steps, attack.search.labels, attack.mask
        (10000, 'joint', 'recovered')
    """
    search = GradientMatching(
        only_images=True,
        total_variation=total_variation,
        steps=steps,
        learning_rate=0.01,
        signed=False,
        schedule="constant",
        box=False,
        labels="joint",
    )
    return SparseInversion(search, mask, eval_point)


def evidence(observation: Observation, mask: str) -> Observation:
    """The observation whose update is the pseudo-gradient on the coordinates that `mask` allows."""
    rows = observation.update.rows
    if observation.sent is not None:
        rate = seen_task(observation).plan.learning_rate
        rows = (observation.task.parameters - observation.sent) / rate
    seen = observation.update.mask
    if mask == "recovered" or (mask == "told" and not observation.threat.defense_known):
        seen = recovered_mask(observation)
    elif mask == "blind":
        seen = None
    if seen is not None:
        rows = rows * seen
    threat = replace(observation.threat, defense_known=True)  # the update contains what is known
    return replace(
        observation,
        update=replace(observation.update, rows=rows, mask=seen),
        threat=threat,
    )


def recovered_mask(observation: Observation) -> Tensor:
    """(R, P) bool: False where the message is exactly zero, or the model has no weight. Tensors of
    fewer than two dimensions count as sent.
    """
    task = observation.task
    message = observation.sent
    mask = (observation.update.rows if message is None else message) != 0
    for _, shape, a, b in task.layout:
        # Biases and norms may be zero without being withheld.
        if len(shape) < 2:
            mask[:, a:b] = True
    return mask if task.kept is None else mask & task.kept
