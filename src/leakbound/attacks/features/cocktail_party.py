"""The cocktail-party attack: a linear layer's gradient as mixtures of the layer's inputs."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound.attacks.base import seen_task
from leakbound.attacks.features.base import FoundFeatures
from leakbound.attacks.features.lowrank import NotSeparable, fit_column
from leakbound.attacks.features.separation import Separated, Separation, separate
from leakbound.client import forward
from leakbound.domains import has_neighbors
from leakbound.random import uniform
from leakbound.types import NotApplicable, Observation, Task

PROBES, OFTEN, NEAR, SURE = 64, 0.1, 0.02, 4.0


@dataclass(frozen=True)
class CocktailParty(Separation):
    """Row i of dL/dW is sum_b (dL/dh_bi) x_b: independent component analysis takes the x_b apart.

    The layer's inputs on public images, or on uniform pixels, tell what is known of them: that they
    are the image itself, that they are hardly negative and often next to 0 (ReLU, leaky or not), or
    nothing. The signs are
    those of the mean where inputs are not negative, else the bias gradient's, sum_b dL/dh_bi.

    Args:
        layer: the linear layer to read; None: the first trained one that the model runs.

    Assumptions: the layer sees one vector an example, is run once, and has more rows than there are
    examples; the inputs of the examples are independent enough (see `separate`).

    Raises:
        NotApplicable: the layer is not so, or its gradient is zero or of too low a rank.

    Source: Kariyappa et al. 2023 (Cocktail Party Attack).
    """

    layer: str | None = None

    def find(self, observation: Observation, generator: torch.Generator) -> FoundFeatures:
        """The inputs of the layer, of length 1."""
        try:
            heard = listen(observation, generator, self, self.layer)
        except NotSeparable as error:
            raise NotApplicable(str(error)) from error
        sources = heard.signs[:, None] * heard.separated.sources
        vectors = nn.functional.normalize(sources, eps=1e-300).to(observation.update.rows)
        return FoundFeatures(vectors, heard.layer, heard.signed, heard.separated.problem)

    def plant(self, task: Task) -> Task:
        """An honest server's attack: nothing changes."""
        return task


@dataclass(frozen=True, eq=False)
class Heard:
    """The sources of one layer, and what its bias gradient tells of their signs and scales.

    Attributes:
        gains: (B,) the source of index b is gains[b] times an input of the layer.
        sure: (B,) where the gain stands out from the noise.
        positive: inputs of the layer are hardly negative.
        image: the layer's input is the flattened image.
    """

    separated: Separated
    layer: str
    gains: Tensor
    sure: Tensor
    positive: bool
    image: bool

    @property
    def signs(self) -> Tensor:
        """(B,) 1 or -1, to multiply the sources with."""
        told = self.separated.sources.mean(1) if self.positive else self.gains
        return torch.where(told < 0, -1.0, 1.0).to(told)

    @property
    def signed(self) -> bool:
        """Whether all signs are known."""
        return self.positive or bool(self.sure.all())


def listen(
    observation: Observation,
    generator: torch.Generator,
    settings: Separation,
    layer: str | None = None,
) -> Heard:
    """Take apart the gradient of the named linear layer, or of the first trained one that runs.

    Raises:
        NotApplicable: no such layer, it is frozen or not run once on one vector an example, or its
            gradient is zero or not finite.
        NotSeparable: it has fewer rows than there are examples, or a lower rank.
    """
    task = seen_task(observation)
    name, probe, inputs = probed(task, observation, generator, layer)
    image = has_neighbors(observation.input_shape) and torch.equal(inputs, probe.flatten(1))
    small = NEAR * float(inputs.square().mean().sqrt())
    positive = float(inputs.clamp_max(0).norm()) <= NEAR * float(inputs.norm())
    often = float((inputs.abs() <= small).double().mean()) > OFTEN
    if image:
        kind = "nonnegative image" if positive else "image"
    else:
        kind = "nonnegative" if positive and often else "general"
    prefix = f"{name}." if name else ""
    parts = task.unflatten(observation.update.rows.sum(0) / task.plan.steps)
    trust = task.unflatten(_trust(observation))
    weight, bias = parts[f"{prefix}weight"], parts.get(f"{prefix}bias")
    if not bool(weight.isfinite().all()):
        raise NotApplicable("the layer's gradient is not finite")
    if not bool((weight != 0).any()):
        raise NotApplicable("the layer's gradient is zero")
    separated = separate(
        weight,
        observation.examples,
        generator,
        settings,
        kind=kind,
        shape=observation.input_shape if image else None,
        weights=trust[f"{prefix}weight"],
    )
    gains = torch.zeros(observation.examples).to(separated.sources)
    sure = torch.zeros_like(gains, dtype=torch.bool)
    if bias is not None and bool(bias.isfinite().all()):
        known = trust[f"{prefix}bias"]
        gains, spread = fit_column(separated.mixing, bias, known)
        error = (separated.level * spread.diagonal().clamp_min(0)).sqrt()
        enough = int((known > 0).sum()) >= observation.examples
        sure = (gains.abs() > SURE * error) & (gains != 0) & enough
    return Heard(separated, name, gains, sure, positive, image)


def probed(
    task: Task, observation: Observation, generator: torch.Generator, layer: str | None
) -> tuple[str, Tensor, Tensor]:
    """The layer's name, images that the attacker makes or knows, and what the layer sees of them.

    Raises:
        NotApplicable: no such layer, it is frozen, or is not run once on one vector an example.
    """
    shape = observation.input_shape
    public = observation.auxiliary or task.public
    if public is not None and tuple(public.inputs.shape[1:]) == shape:
        probe = public.inputs[:PROBES].to(task.parameters)
    else:
        low, high = task.input_range
        probe = low + (high - low) * uniform((PROBES, *shape), generator, like=task.parameters)
    model, seen = copy.deepcopy(task.model), []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (layer == name or _weight(name) in task.names):
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.append((name, args[0].detach()))
            )
    with torch.no_grad():
        forward(replace(task, model=model), probe)
    found = [(name, inputs) for name, inputs in seen if layer in (None, name)]
    if not found:
        wanted = "trained linear layer" if layer is None else f"linear layer {layer!r}"
        raise NotApplicable(f"the model runs no {wanted}")
    name, inputs = found[0]
    if _weight(name) not in task.names:
        raise NotApplicable(f"the linear layer {name!r} is frozen: its gradient is not sent")
    once = sum(other == name for other, _ in found) == 1
    if not once or inputs.ndim != 2 or len(inputs) != len(probe):
        raise NotApplicable(f"the linear layer {name!r} sees more than one vector an example")
    return name, probe, inputs


def _weight(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def _trust(observation: Observation) -> Tensor:
    """(P,) 1 / standard deviation of the rows' sum up to a factor, 0 where any row is withheld."""
    weights = observation.weights
    if weights is None:
        return torch.ones(observation.update.rows.shape[1]).to(observation.update.rows)
    if len(weights) == 1:
        return weights[0]
    together: Tensor = weights.double().square().reciprocal().sum(0).rsqrt()
    return together * math.sqrt(len(weights))
