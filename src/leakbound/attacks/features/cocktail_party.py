"""The cocktail-party attack: a linear layer's gradient as mixtures of the layer's inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound._util import copies
from leakbound.attacks.base import (
    Attack,
    boxed,
    modules_of,
    parameter,
    seen_by,
    seen_task,
    summed,
    uniform_inputs,
)
from leakbound.attacks.blind import gray, public_examples
from leakbound.attacks.features.base import FoundFeatures
from leakbound.attacks.features.separation import (
    NotSeparable,
    Separated,
    Separation,
    fit_column,
    separate,
)
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.domains import has_neighbors

# Public images that show what kind of inputs the layer takes.
PROBES = 64
# Inputs that are 0 at more than this share of places come from a ReLU.
OFTEN = 0.1
# What counts as 0: relative to the root mean square (leaky ReLUs send small negatives).
NEAR = 0.02
# A gain this many standard deviations from 0 is no noise.
SURE = 4.0
# An image may leave the input range by this share of it, and no more than this share of its
# pixels may leave it further: separation is exact up to noise only.
SLACK = 0.1
OUTSIDE = 0.1
# The quantile that sets the scale: the brightest single pixel may be noise.
BRIGHT = 0.995


@dataclass(frozen=True)
class CocktailParty(Separation):
    """Infer a linear layer's inputs: independent component analysis separates its gradient.

    Row i of dL/dW is sum_b (dL/dh_bi) x_b, a mixture of the inputs x_b. The layer's inputs on
    public images, or on uniform pixels, show their kind: the image itself; values that are rarely
    negative and often near 0 (ReLU, leaky or not); or unknown. If inputs are not negative, the sign
    of the mean fixes their signs; otherwise the bias gradient does.

    Args:
        layer: the linear layer to use; None: the first trained one that the model runs.

    Assumptions: the layer sees one vector per example, runs once, and has more rows than there are
        examples; the inputs of the examples are sufficiently independent.

    Raises:
        NotApplicable: the layer does not meet these assumptions, or its gradient is zero or of too
            low a rank.

    Source: Kariyappa et al. 2023 (Cocktail Party Attack).
    """

    layer: str | None = None

    def find(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> FoundFeatures:
        """The features behind the update; NotApplicable if the update does not allow it."""
        try:
            heard = listen(observation, generator, self, self.layer)
        except NotSeparable as error:
            raise NotApplicable(str(error)) from error
        vectors = nn.functional.normalize(heard.sources, eps=1e-300).to(observation.update.rows)
        return FoundFeatures(vectors, heard.layer, heard.signed, heard.separated.problem)

    def plant(self, task: Task) -> Task:
        """Return the task unchanged: the attack needs no malicious layer."""
        return task


@dataclass(frozen=True, eq=False)
class Heard:
    """The sources of one layer, and what its bias gradient shows of their signs and scales.

    The source of index b is gains[b] times an input of the layer; `sure` if the gain stands out
    from the noise. `positive`: the inputs are rarely negative; `image`: they are the image.
    """

    separated: Separated
    layer: str
    gains: Tensor
    sure: Tensor
    positive: bool
    image: bool

    @property
    def sources(self) -> Tensor:
        """(B, n) the sources, with their signs as far as these are known."""
        sources = self.separated.sources
        direction = sources.mean(1) if self.positive else self.gains
        return torch.where(direction < 0, -1.0, 1.0).to(direction)[:, None] * sources

    @property
    def signed(self) -> bool:
        return self.positive or bool(self.sure.all())


def listen(
    observation: Observation,
    generator: torch.Generator,
    settings: Separation,
    layer: str | None = None,
) -> Heard:
    """Separate the gradient of the named linear layer, or of the first trained one that runs."""
    observation = summed(observation)
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
    parts = task.unflatten(observation.update.rows.sum(0) / task.plan.total_weight)
    trust = task.unflatten(_trust(observation))
    weight = parts[parameter(name, "weight")]
    bias = parts.get(parameter(name, "bias"))
    if not weight.isfinite().all():
        raise NotApplicable("the layer's gradient is not finite")
    if not weight.any():
        raise NotApplicable("the layer's gradient is zero")
    separated = separate(
        weight,
        observation.examples,
        generator,
        settings,
        kind=kind,
        shape=observation.input_shape if image else None,
        weights=trust[parameter(name, "weight")],
    )
    gains = torch.zeros(observation.examples).to(separated.sources)
    sure = torch.zeros_like(gains, dtype=torch.bool)
    if bias is not None and bias.isfinite().all():
        known = trust[parameter(name, "bias")]
        gains, spread = fit_column(separated.mixing, bias, known)
        error = (separated.level * spread.diagonal().clamp_min(0)).sqrt()
        enough = int((known > 0).sum()) >= observation.examples
        sure = (gains.abs() > SURE * error) & (gains != 0) & enough
    return Heard(separated, name, gains, sure, positive, image)


def probed(
    task: Task,
    observation: Observation,
    generator: torch.Generator,
    layer: str | None,
) -> tuple[str, Tensor, Tensor]:
    """The layer's name, images that the attacker has, and the layer's inputs for them."""
    public = public_examples(observation)
    if public is not None:
        probe = public.inputs[:PROBES].to(task.parameters)
    else:
        probe = uniform_inputs(task, (PROBES, *observation.input_shape), generator)
    # A copy: a client may train the model at the same time.
    apart = replace(task, model=copies.duplicate(task.model))
    linear = modules_of(apart, nn.Linear)
    trained = {name for name in linear if parameter(name, "weight") in task.names}
    wanted = trained if layer is None else linear.keys() & {layer}
    with torch.no_grad():
        seen = seen_by(apart, sorted(wanted), probe)
    if not seen:
        kind = "trained linear layer" if layer is None else f"linear layer {layer!r}"
        raise NotApplicable(f"the model runs no {kind}")
    name, inputs = next(iter(seen.items()))
    if name not in trained:
        raise NotApplicable(f"the linear layer {name!r} is frozen: its gradient is not sent")
    if inputs is None or inputs.ndim != 2 or len(inputs) != len(probe):
        raise NotApplicable(f"the linear layer {name!r} sees more than one vector per example")
    return name, probe, inputs


def _trust(observation: Observation) -> Tensor:
    """(P,) 1 / standard deviation of the rows' sum up to a factor, 0 if any row is withheld."""
    weights = observation.weights
    if weights is None:
        return torch.ones(observation.update.rows.shape[1]).to(observation.update.rows)
    if len(weights) == 1:
        return weights[0]
    # Variances add up; that of a withheld row (weight 0) is infinite, which gives 0.
    together = weights.double().square().reciprocal().sum(0).rsqrt()
    return together * math.sqrt(len(weights))


@dataclass(frozen=True)
class CocktailPartyImages(CocktailParty, Attack):
    """Separate a batch into its images, from the gradient of the layer that sees them.

    Sign and scale of each image come from the bias gradient, which is the same mixture of ones.
    Without a bias, or if noise hides its gradient, they come from the input range. An image that
    still leaves the input range is moved and scaled into it.

    Args:
        layer: the linear layer to use; None: the first trained one that the model runs.

    Assumptions: that layer sees the flattened image, and has more rows than there are examples.

    Raises:
        NotApplicable: the layer sees anything else, or its gradient is zero or not finite.

    Source: Kariyappa et al. 2023 (Cocktail Party Attack).

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 12, 12), classes=3, generator=lb.stream(0, "mlp"))
        >>> inputs = torch.rand(2, 1, 12, 12, generator=lb.stream(0, "batch")) ** 6
        >>> result = lb.simulate(model, (inputs, torch.arange(2)), attack=CocktailPartyImages())
        >>> min(result.scores) > 15
        True
    """

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = summed(observation)
        task = seen_task(observation)
        try:
            heard = listen(observation, generator, self, self.layer)
        except NotSeparable as error:
            return replace(gray(observation, str(error)), labels=observation.labels)
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
    """The sources as images, and why they do not look like images, if so."""
    low, high = task.input_range
    sources = heard.sources
    bright = max(abs(low), abs(high)) / sources.abs().quantile(BRIGHT, dim=1).clamp_min(1e-300)
    known = 1 / heard.gains.abs().clamp_min(1e-300)
    scale = torch.where(heard.sure, known, bright)[:, None]
    images = scale * sources
    # Three standard deviations: noise alone may leave the range.
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
