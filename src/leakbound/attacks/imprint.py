"""Robbing the Fed: a malicious layer that sorts a batch into bins and separates its images.

LOKI sends every client another convolution before it, so that a sum of updates keeps them apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import scipy
import torch
from torch import Tensor, nn

from leakbound import check
from leakbound.attacks.base import Attack
from leakbound.attacks.blind import answered
from leakbound.attacks.planted import (
    Caught,
    Front,
    PixelPrior,
    caught,
    gain_for,
    gradients_of,
    in_front,
    layer_of,
    placed,
    planted_task,
)
from leakbound.core import Observation, Reconstruction, Task, Unit
from leakbound.randomness import normal, stream
from leakbound.task import shell

MEASURES = ("mean", "cosine", "random")
LAWS = ("public", "normal", "laplace")
# The probability that noise alone makes a step anywhere.
CHANCE = 1e-3
# An image is clear if its expected error is at most this share of the prior's.
CLEAR = 0.25


@dataclass(frozen=True)
class RobbingTheFed(Attack):
    """Send a malicious layer that sorts images into bins, so that gradient differences are images.

    Unit i of the layer is on if a linear measurement q.x exceeds its threshold. The loss has the
    same derivative with respect to all units that are on. The gradients of neighboring units differ
    by the images between their thresholds. If that is one image, it equals (dW_i - dW_i+1) / (db_i
    - db_i+1).

    The attack finds the steps by the best piecewise constant fit under the known noise, without
    withheld coordinates, and averages over all units of a piece. Under noise, it also infers the
    size of a step from its bin, and combines each pixel with the public images' mean and variance.
    Two images in one bin leave their weighted mean. An image without a detected step is answered by
    the mean public image.

    For several local steps, or another optimizer than SGD, the layer is the sum of a frozen one and
    of a trained one that starts at 0, with so small a gain that the client's steps add gradients
    up. Each image then stays in its bin, and is read as from one step.

    Args:
        bins: k, the number of units. With B images in k equally likely bins, all images are alone
            with probability k! / (k - B)! / k^B; on average B (1 - 1/k)^(B - 1) are alone.
        measure: q: "mean" of the pixels, "cosine" (one row of the discrete cosine transform of the
            flattened image) or "random" (normal), the last two of unit norm.
        law: the distribution that sets the thresholds: quantiles of the "public" images'
            measurements, or a "normal" or "laplace" distribution with `mean` and `std`.
        mean, std: of the measurement q.x over images, for "normal" and "laplace"; None: those of
            the public images. With them and `features`, no public image is needed.
        gain: the derivative of the model's input with respect to a unit. A larger gain outweighs
            noise that does not scale with a clip norm. None: 100 for one step of SGD, and otherwise
            little enough for the client's steps to add gradients up.
        frequency: the frequency of the cosine.
        seed: the seed of the random measurement.
        features: the number of values of one input; None: that of the public images.

    Assumptions: the model takes the input at its own shape. If a large `gain` moves the weights
        between local steps, no answer is exact.

    Raises:
        NotApplicable: the server is honest, the data to build the layer is missing, or the client
            trains by Lion, which keeps signs alone.
        ValueError: `mean` without `std`, or with the law "public".

    Source: Fowl et al., "Robbing the Fed", ICLR 2022 (decoding by differences of neighbors); the
        fit under noise is from this project.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.core import Server
        >>> model = lb.models.mlp(input_shape=(1, 6, 6), classes=3, generator=lb.stream(0, "model"))
        >>> images = torch.rand(202, 1, 6, 6, generator=lb.stream(0, "images"))
        >>> public = lb.Batch(images[2:], torch.arange(200) % 3)
        >>> threat = lb.ThreatModel(server=Server.MALICIOUS)
        >>> batch, attack = (images[:2], torch.arange(2)), RobbingTheFed(bins=100)
        >>> min(lb.simulate(model, batch, attack=attack, public=public, threat=threat).scores) > 60
        True
    """

    bins: int = 128
    measure: str = "mean"
    law: str = "public"
    gain: float | None = None
    frequency: int = 32
    seed: int = 0
    features: int | None = None
    mean: float | None = None
    std: float | None = None

    def __post_init__(self) -> None:
        check.count(bins=self.bins, frequency=self.frequency)
        check.one_of(MEASURES, measure=self.measure)
        check.one_of(LAWS, law=self.law)
        check.given(check.positive, gain=self.gain)
        check.given(check.count, features=self.features)
        if self.mean is None and self.std is None:
            return
        stated = f"mean is {self.mean} and std is {self.std}"
        if self.mean is None or self.std is None or not math.isfinite(self.mean):
            raise ValueError(f"{stated}; give two finite numbers, or neither")
        if self.law == "public":
            raise ValueError(f'{stated}, but law is "public"; give law = "normal" or "laplace"')
        check.positive(std=self.std)

    def plant(self, task: Task) -> Task:
        """Put the layer before the model; return the task unchanged if the data to build it is
        missing.
        """
        layer = self._layer(task)
        if layer is None:
            return task
        gain = gain_for(task, self.gain)
        return in_front(task, *layer, gain, "imprint", steady=not task.plan.is_gradient)

    def _layer(self, task: Task) -> tuple[Tensor, Tensor] | None:
        """Weight (bins, N) and bias (bins,), None if the data to build them is missing."""
        public = task.public
        features = public.inputs[0].numel() if public is not None else self.features
        if features is None or (public is None and self.mean is None):
            return None
        direction = self._direction(features)
        seen = None if public is None else public.inputs.flatten(1).double().cpu() @ direction
        low, high = task.input_range
        least = float(torch.minimum(low * direction, high * direction).sum())
        most = float(torch.maximum(low * direction, high * direction).sum())
        # Below every possible measurement: the first unit is on for all inputs.
        first = direction.new_tensor([least - 0.01 * (most - least)])
        thresholds = torch.cat([first, self._thresholds(seen).clamp(least, most)])
        return direction.expand(self.bins, features), -thresholds

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = gradients_of(observation)
        return self._read(observation, planted_task(observation, "imprint"))

    def _read(self, observation: Observation, task: Task) -> Reconstruction:
        prior = PixelPrior.of(observation)
        edges = _Edges(task)
        images = []
        hits = 0
        alone = 0
        moved = False
        for row in caught(observation, task, differences=True):
            decoded, clear = _decoded(row, edges, prior)
            rest = prior.mean.expand(row.examples - len(decoded), -1)
            images += [decoded, rest]
            hits += clear
            # Of s steps for n inputs, at most n - s hold more than one: at least 2 s - n hold one.
            alone += max(0, 2 * clear - row.examples)
            moved = moved or edges.moved(row, decoded)
        problem = None
        if moved:
            problem = "the thresholds passed over inputs in the local steps; give a smaller gain"
        elif hits < observation.examples:
            problem = (
                f"the update shows {hits} clear steps for {observation.examples} inputs: some "
                f"inputs share a bin or are lost in noise; at least {alone} were alone in their bin"
            )
        return answered(observation, task, torch.cat(images), problem)

    def _direction(self, features: int) -> Tensor:
        if self.measure == "mean":
            return torch.full((features,), 1 / features, dtype=torch.float64)
        if self.measure == "random":
            draw = normal((features,), stream(self.seed, "imprint", features)).double()
        else:
            at = torch.arange(features, dtype=torch.float64) + 0.5
            draw = torch.cos(math.pi / features * at * self.frequency)
        return draw / draw.norm()

    def _thresholds(self, seen: Tensor | None) -> Tensor:
        """The upper bins - 1 thresholds, increasing."""
        levels = torch.arange(1, self.bins, dtype=torch.float64) / self.bins
        if self.law == "public":
            assert seen is not None  # `plant` has asked
            return seen.quantile(levels)
        center = self.mean
        spread = self.std
        if center is None or spread is None:
            assert seen is not None  # `plant` has asked for one of the two
            center = float(seen.mean())
            spread = float(seen.std())
        # Variance 1: that of a Laplace distribution is twice its scale squared.
        unit = scipy.stats.norm if self.law == "normal" else scipy.stats.laplace(scale=0.5**0.5)
        return center + spread * torch.from_numpy(unit.ppf(levels.numpy()))


class Routed(Front):
    """A `Front` whose layer sees one block of columns for each client.

    `routes` is a convolution whose output has C + 1 channels for each client: the image, and a
    constant for the biases. In the model of client i, all other clients' channels are 0. So the
    layer's gradient in block i is that of client i alone, also after a sum over clients.
    """

    def __init__(
        self,
        shape: torch.Size,
        clients: int,
        units: int,
        gain: float,
        inner: nn.Module,
        *,
        steady: bool,
    ) -> None:
        layer = nn.Linear(clients * (shape.numel() + 1), units, bias=False)
        super().__init__(layer, gain, "loki", inner, steady=steady)
        channels = clients * (shape[0] + 1)
        routes = nn.Conv2d(shape[0], channels, 3, padding=1).requires_grad_(False)
        self.routes = shell(routes) if steady else routes
        self.clients = clients

    def seen(self, inputs: Tensor) -> Tensor:
        maps = self.routes(inputs).unflatten(1, (self.clients, -1)).flatten(3)
        return torch.cat([maps[:, :, :-1].flatten(2), maps[:, :, -1, :1]], 2).flatten(1)

    def part(self, rows: Tensor) -> Tensor:
        """[dW | db] (clients, units, N + 1) of all clients' blocks, from one row (1, P)."""
        size = self.layer.weight.shape
        return rows[0, : size.numel()].reshape(size[0], self.clients, -1).movedim(1, 0)


@dataclass(frozen=True)
class Loki(RobbingTheFed):
    """Send every client another convolution, so that the sum of their updates keeps them apart.

    A convolution comes first, then the layer of `RobbingTheFed` on all its channels. Of the
    convolution, client i gets the identity for the i-th group of channels and zeros for the others.
    So each client's images reach their own columns of the layer's weights. The sum of the clients'
    updates holds the gradients of every client apart. Each client's images are then read as
    `RobbingTheFed` reads one batch. The layer has `clients` times as many weights as that one.

    A further channel of each group is constant. It carries the biases, so that their gradients
    also stay apart. (With one bias for all clients, they would be summed.)

    Args:
        bins, measure, law, gain, mean, std, frequency, seed, features: as of `RobbingTheFed`.

    Assumptions: the server knows which client is which, and may send different models; the inputs
        are images (C, H, W), with public ones of the same shape.

    Raises:
        NotApplicable: the server is honest, or it has no public images to build the layer from.

    Source: Zhao et al., "LOKI: Large-scale Data Reconstruction Attack against Federated Learning
        through Model Manipulation", IEEE S&P 2024, arXiv 2303.12233. The constant channel and the
        decoding under noise are from this project.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.core import Server
        >>> model = lb.models.mlp(input_shape=(1, 6, 6), classes=3, generator=lb.stream(0, "model"))
        >>> images = torch.rand(206, 1, 6, 6, generator=lb.stream(0, "images"))
        >>> public = lb.Batch(images[6:], torch.arange(200) % 3)
        >>> task = Task.of(model, classes=3, public=public)
        >>> clients = [lb.Batch(images[i : i + 2], torch.arange(2)) for i in (0, 2, 4)]
        >>> streams = [lb.stream(0, "noise", i) for i in range(4)]
        >>> threat, summed = lb.ThreatModel(server=Server.MALICIOUS), lb.defenses.SecureAggregation
        >>> seen = lb.play(task, clients, summed(3), streams, threat=threat, attack=Loki())
        >>> result = Loki()(seen.observation, lb.stream(0, "attack")).inputs
        >>> bool((torch.cdist(images[:6].flatten(1), result.flatten(1)).amin(1) < 1e-3).all())
        True
    """

    bins: int = 256

    def plant(self, task: Task) -> Task:
        """The first client's model; the task unchanged if the data to build it is missing."""
        return self.plant_each(task, 1)[0]

    def plant_each(self, task: Task, clients: int) -> list[Task]:
        """One model for each client: only the kernels and biases of the convolution differ."""
        layer = self._layer(task)
        if layer is None or task.public is None or task.public.inputs.ndim != 4:
            return [task] * clients
        shape = task.public.inputs.shape[1:]
        gain = gain_for(task, self.gain)
        steady = not task.plan.is_gradient
        model = Routed(shape, clients, self.bins, gain, task.model, steady=steady)
        # The scale of `in_front`: the image is brightened by a mean over units, for any gain.
        block = torch.cat([layer[0], layer[1][:, None]], 1) / (gain * self.bins)
        planted = []
        for client in range(clients):
            kernels = torch.zeros(clients, shape[0] + 1, shape[0], 3, 3)
            kernels[client, :-1, :, 1, 1] = torch.eye(shape[0])
            bias = torch.zeros(clients, shape[0] + 1)
            bias[client, -1] = 1.0
            own = model.weights({"weight": block.repeat(1, clients)})
            routes = {"routes.weight": kernels.flatten(0, 1), "routes.bias": bias.flatten()}
            planted.append(placed(task, model, own | routes))
        return planted

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        task = planted_task(observation, "loki")
        update = observation.update.summed(Unit.COHORT)
        return self._read(replace(observation, update=update), task)


class _Edges:
    """The layer [W | b] (units, N + 1), its direction q (N,), and the ends of all bins (units,)."""

    def __init__(self, task: Task) -> None:
        assert isinstance(task.model, Front)  # as planted_task found
        self.plan = task.plan
        self.layer = layer_of(task)  # the first client's
        scaled = self.layer * task.model.gain * len(self.layer)
        self.direction = scaled[0, :-1]
        self.lower = -scaled[:, -1]
        self.upper = torch.cat([self.lower[1:], self.lower.new_tensor([math.inf])])

    def moved(self, row: Caught, images: Tensor) -> bool:
        """Whether several local steps moved the layer enough to switch an image's units."""
        if self.plan.steps == 1:
            return False
        after = self.layer - self.plan.learning_rate * self.plan.steps * row.values
        inputs = torch.cat([images, images.new_ones(len(images), 1)], 1)
        return not torch.equal(inputs @ self.layer.T > 0, inputs @ after.T > 0)


def _decoded(
    row: Caught,
    edges: _Edges,
    prior: PixelPrior,
) -> tuple[Tensor, int]:
    """The images (n, N) behind the steps, the clearest first, and how many are clear: their
    expected squared error is at most a quarter of the prior's.
    """
    # From the highest threshold down: there, no input switches a unit on, and the level is 0.
    values = row.values.flip(0)
    precision = row.precision.flip(0)
    starts = _steps(values, precision)
    ends = [*starts[1:], len(values)][: len(starts)]
    level = torch.zeros_like(values[0])
    doubt = torch.zeros_like(level)
    images = []
    clarity = []
    clear = []
    for start, end in zip(starts, ends, strict=True):
        total = precision[start:end].sum(0)
        above = level
        doubt_above = doubt
        level = (precision[start:end] * values[start:end]).sum(0) / total.clamp_min(1e-300)
        doubt = 1 / total  # infinite where a pixel is withheld
        step = level - above
        variance = doubt + doubt_above
        size = _size(step, variance, edges, len(values) - 1 - start, prior)
        image = step[:-1] / size
        spread = variance[:-1] / size**2
        images.append(prior.fused(image, spread))
        clarity.append(float((step.square() / variance).sum()))
        clear.append(bool(prior.left(spread).mean() <= CLEAR * prior.variance.mean()))
    order = sorted(range(len(images)), key=lambda i: -clarity[i])[: row.examples]
    clearest = [images[i] for i in order]
    none = values.new_zeros(0, len(level) - 1)
    return torch.stack(clearest) if clearest else none, sum(clear[i] for i in order)


def _steps(values: Tensor, precision: Tensor) -> list[int]:
    """Where the best piecewise constant fit starts a new level; the first level is 0. A step costs
    what noise alone gains with probability `CHANCE` at most (optimal partitioning).
    """
    count, width = values.shape
    # A step may be anywhere: all places share the chance.
    price = float(scipy.stats.chi2.isf(CHANCE / count, width))
    zero = torch.cat([values.new_zeros(1), (precision * values.square()).sum(1).cumsum(0)])
    mean = torch.zeros_like(values)
    total = torch.zeros_like(values)
    cost = values.new_zeros(count)
    best = values.new_zeros(count + 1)
    came = [-1] * (count + 1)
    for j in range(count):
        before = total[: j + 1]
        new = precision[j]
        after = before + new
        share = new / after.clamp_min(1e-300)
        # The costs of all segments that end here, each with one value more (Welford's update).
        gap = values[j] - mean[: j + 1]
        cost[: j + 1] += (before * share * gap.square()).sum(1)
        mean[: j + 1] += share * gap
        total[: j + 1] = after
        least, at = (best[: j + 1] + cost[: j + 1] + price).min(0)
        best[j + 1] = zero[j + 1]
        if least < zero[j + 1]:
            best[j + 1] = least
            came[j + 1] = int(at)
    starts = []
    j = count
    while came[j] >= 0:
        j = came[j]
        starts.append(j)
    return starts[::-1]


def _size(
    step: Tensor,
    variance: Tensor,
    edges: _Edges,
    at: int,
    prior: PixelPrior,
) -> Tensor:
    """The step of the bias, estimated from itself and from q.x, which its bin confines."""
    rise = step[-1]
    trust = 1 / variance[-1]
    middle = (edges.lower[at] + edges.upper[at]) / 2
    width = edges.upper[at] - edges.lower[at]
    seen = variance[:-1].isfinite()
    q = torch.where(seen, edges.direction, 0)
    whole = (edges.direction * prior.mean).sum()
    # The outermost bins are too wide to confine q.x: the prior does.
    if at == 0 or not width.isfinite() or not whole.abs() > 0:
        middle = whole
        width = torch.zeros_like(whole)
        inside = (edges.direction.square() * prior.variance).sum() * len(q)
    else:
        # The variance of a uniform distribution over the bin.
        inside = width.square() / 12
    kept = (q * prior.mean).sum() / whole if whole.abs() > 0 else whole
    expected = middle * kept
    if not seen.all():
        inside = inside + (q.square() * prior.variance).sum()
    if not expected.abs() > 0:
        return rise
    other = (q * step[:-1]).sum() / expected
    noise = (q.square() * torch.where(seen, variance[:-1], 0)).sum()
    trust_other = expected.square() / (noise + other.square() * inside)
    return (trust * rise + trust_other * other) / (trust + trust_other)
