"""Images by the cocktail-party attack, where the separated layer sees the image itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbound.attacks.base import Attack, boxed, seen_task
from leakbound.attacks.features.cocktail_party import Heard, listen
from leakbound.attacks.features.lowrank import NotSeparable
from leakbound.attacks.features.separation import Separation
from leakbound.types import NotApplicable, Observation, Reconstruction, Task

SLACK, OUTSIDE, BRIGHT = 0.1, 0.1, 0.995


@dataclass(frozen=True)
class CocktailPartyImages(Separation, Attack):
    """Take a batch apart into its images, from the gradient of the layer that sees them.

    Sign and scale of each image come from the bias gradient, which is the same mixture of ones;
    where there is none, or noise hides it, from the input range: the brightest pixels reach its
    end. An image that leaves the input range all the same is moved and shrunk into it.

    Args:
        layer: the linear layer to read; None: the first trained one that the model runs.

    Assumptions: that layer sees the flattened image, and has more rows than there are examples.

    Raises:
        NotApplicable: the layer sees anything else, or its gradient is zero or not finite.

    Source: Kariyappa et al. 2023 (Cocktail Party Attack).

    Example:
        >>> import leakbound as lb
        >>> from leakbound.random import uniform
        >>> shape, names = (1, 12, 12), ("client", "server")
        >>> model = lb.models.mlp(input_shape=shape, classes=3, generator=lb.stream(0, "model"))
        >>> batch = lb.Batch(uniform((2, *shape), lb.stream(0, "batch")) ** 6, torch.arange(2))
        >>> task, sources = lb.Task.of(model), [lb.stream(0, name) for name in names]
        >>> seen = lb.play(task, [batch], lb.defenses.NoDefense(), sources).observation
        >>> answer = CocktailPartyImages()(seen, lb.stream(0, "attack"))
        >>> error = torch.cdist(answer.inputs.flatten(1), batch.inputs.flatten(1)).amin(0)
        >>> bool((error < 0.2 * batch.inputs.flatten(1).norm(dim=1)).all())
        True
    """

    layer: str | None = None

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        """Separate, scale, and move into the input range."""
        task = seen_task(observation)
        try:
            heard = listen(observation, generator, self, self.layer)
        except NotSeparable as error:
            middle = torch.full(observation.batch_shape, float("nan")).to(observation.update.rows)
            return Reconstruction(boxed(middle, task), observation.labels, problem=str(error))
        if not heard.image:
            raise NotApplicable(f"the linear layer {heard.layer!r} does not see the image itself")
        images, problem = _scaled(heard, task)
        images = images.to(observation.update.rows)
        return Reconstruction(
            boxed(images.reshape(observation.batch_shape), task),
            None,
            -float(heard.separated.contrast.mean()),
            (),
            heard.separated.problem or problem,
            nn.functional.normalize(images, eps=1e-30),
            heard.layer,
        )


def _scaled(heard: Heard, task: Task) -> tuple[Tensor, str | None]:
    """The sources as images, and whether they do not look like any."""
    low, high = task.input_range
    sources = heard.signs[:, None] * heard.separated.sources
    bright = max(abs(low), abs(high)) / sources.abs().quantile(BRIGHT, dim=1).clamp_min(1e-300)
    told = 1 / heard.gains.abs().clamp_min(1e-300)
    scale = torch.where(heard.sure, told, bright)[:, None]
    images = scale * sources
    slack = SLACK * (high - low) + 3 * scale * heard.separated.noise[:, None]
    outside = ((images < low - slack) | (images > high + slack)).double().mean(1)
    wrong = outside > OUTSIDE
    strange = int(wrong.sum())
    if strange == 0:
        return images, None
    dark, light = (images.quantile(q, dim=1, keepdim=True) for q in (1 - BRIGHT, BRIGHT))
    fitted = low + (high - low) * (images - dark) / (light - dark).clamp_min(1e-300)
    images = torch.where(wrong[:, None], fitted, images)
    return images, f"{strange} of {len(images)} images leave the input range: they may be mixtures"
