"""Signs and zeros of one example behind steps of an optimizer that keeps nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound.attacks.analytic import first_layer, layer_part
from leakbound.attacks.base import Attack, seen_task
from leakbound.attacks.blind import answered, public_examples
from leakbound.core import Exact, NotApplicable, Observation, Reconstruction

ABOUT = (
    "it shows zeros and signs of the inputs (of normalized images, a picture of two tones): their "
    "sizes are typical ones"
)


@dataclass(frozen=True)
class SignInversion(Attack):
    """Read which inputs of one example are zero, and the signs of the others.

    Row i of the first linear layer's gradient is dL/db_i times the input. Adam and similar
    optimizers keep the sign of each entry, and leave an entry at zero that has no gradient: an
    input of zero leaves a column of zeros, and the sign of an input is that of its column times
    those of the bias. The rows vote. This also holds after several steps while dL/db_i keeps its
    sign, and for sign compression.

    Where weights are stored in bfloat16, small gradients leave them as they were and look like
    zeros.

    The size of an input is that of a typical one of its sign: the mean over public examples, or the
    middle between zero and the end of the range.

    Assumptions: one example; a linear layer with a bias has the flattened example as its input; no
        weight decay that goes through the optimizer's division (`weight_decay` of Adam, not AdamW).

    Raises:
        NotApplicable: several examples, no such layer, noise, the client trains by SGD, or the
            range of inputs does not have zero inside or at an end.

    Source: this project.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.tensor([0.0, 0.7] * 8).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> plan = lb.LocalPlan(3, 1e-3, optimizer="adam")
        >>> found = lb.simulate(model, batch, attack=SignInversion(), plan=plan).reconstruction
        >>> torch.equal(found > 0, batch[0] > 0)
        True
    """

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        task = seen_task(observation)
        if task.plan.optimizer == "sgd":
            raise NotApplicable("the client trains by SGD, which keeps more than signs")
        if observation.examples != 1:
            raise NotApplicable("signs of several examples mix: their columns add up")
        if not isinstance(observation.update.law, Exact) or observation.update.mask is not None:
            raise NotApplicable("noise or withheld entries hide the signs of gradients")
        low, high = task.input_range
        if low > 0 or high < 0:
            raise NotApplicable(
                f"inputs run from {low:g} to {high:g}: none is zero or has two signs"
            )
        name, path = first_layer(task, observation.input_shape)
        if path is not None:
            raise NotApplicable("the model changes the example before its first linear layer")
        weight, bias = layer_part(task, observation.update.rows.sum(0), name)
        signs = (bias.sign() @ weight.sign()).sign()
        if low == 0 or high == 0:  # only one sign is possible
            signs = torch.full_like(signs, 1.0 if low == 0 else -1.0)
        signs = signs * (weight != 0).any(0)
        above, below = self._sizes(observation)
        image = torch.where(signs > 0, above, torch.where(signs < 0, below, 0.0))
        return answered(observation, task, image, ABOUT, labels=observation.labels)

    def _sizes(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Typical inputs above and below zero, each (D,)."""
        low, high = observation.task.input_range
        like = observation.update.rows
        public = public_examples(observation)
        middles = like.new_tensor([high / 2, low / 2])
        if public is None:
            return middles[0], middles[1]
        values = public.inputs.flatten(1).to(like)
        sizes = []
        for kept, middle in zip((values > 0, values < 0), middles, strict=True):
            count = kept.sum(0)
            mean = (values * kept).sum(0) / count.clamp_min(1)
            sizes.append(torch.where(count > 0, mean, middle))
        return sizes[0], sizes[1]
