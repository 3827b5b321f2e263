"""Gradient matching: search the inputs whose update looks like the one that was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from leakbound import check
from leakbound.attacks.base import Attack
from leakbound.attacks.features.methods import METHODS
from leakbound.attacks.lockstep import WIDTH, many
from leakbound.attacks.objectives import DISTANCES
from leakbound.attacks.search import Search, with_and_without_mask
from leakbound.attacks.terms import FORMS, STATISTICS
from leakbound.types import Observation, Reconstruction, Task


def later(default: Any) -> Any:
    """A setting of a later version: records name it only where it is not the default."""
    return field(default=default, metadata={"later": True})


@dataclass(frozen=True, repr=False)
class GradientMatching(Attack):
    """Minimize distance(update of the guess, update seen) + what else makes a guess unlikely.

    Those are the total variation, statistics in batch norms, features that another method found,
    and the size. Every part is a setting, so an ablation changes a field.

    Knows what the threat model grants: the guess is sent through the known defense's deterministic
    part, coordinates are weighted by the known noise law (whitened, where its noise is correlated)
    and restricted to the known mask. The answer is the iterate with the lowest objective, the last
    one included. With the schedule "stages", an answer that does not explain what a known mask
    shows is searched for a second time (see `search.with_and_without_mask`).

    Args:
        distance: cosine, cosine_layers, cosine_weighted, euclidean or manhattan.
        total_variation: weight of the total variation.
        smoothing: weight that the schedule "stages" adds to the total variation in its first stage.
            The next two stages add a tenth and a hundredth of it, the last stage nothing. Smooth
            images are better starts for the later stages. Where a known mask hides coordinates, it
            is divided by the root of the share that is seen. Inputs that are no images: no effect.
        noise_variation: what is added to that weight, times the root of the share of noise in the
            update's energy, which the attacker computes from the declared law.
        optimizer: "adam" or "lbfgs" (then `steps` counts outer steps of up to 20 iterations).
        learning_rate: of the optimizer, at the start: `schedule` lowers it.
        steps: of the search.
        signed: feed Adam only the gradient's sign.
        schedule: "step" (rate x 0.1 at 3/8, 5/8, 7/8), "stages" (the same rates, and each of the
            four stages starts from the best iterate so far with momentum 0), "cosine", "constant".
        initialization: "normal" (standard normal) or "uniform" (over the input range).
        box: project on the input range after every step.
        labels: "told" (inferred where they are not told), "inferred", or "joint" (optimized as
            soft labels together with the inputs, told or not).
        enough: stop once the objective is at most this; None: never.
        image: "pixels", or "deep_prior": an untrained network draws the images, and its weights
            are searched (`initialization` and `box` are then without effect).
        width: channels of that network.
        batch_norm: weight of the distance between the guess's statistics in the batch norms and
            those known; a model without batch norms has no such term.
        statistics: which ones: "exact", "proxy", "running", or "best" (see `terms.statistics`).
        first_norm: how many times more the first batch norm counts.
        features: "none", or the method that finds a linear layer's inputs: "cocktail_party", or
            "tensor" and "tensor_fit" for two-layer heads with random units, which a malicious
            server's `plant` makes.
        feature_weight: weight of the distance between the guess's features and those.
        feature_form: "cosine", "span", or "best" (cosine for up to 8 examples).
        size: weight of the mean squared distance from the middle of the input range.
        prior: "package.module:build" of the user: `build(input_shape=(C, H, W))` returns a function
            from images (N, C, H, W) to one number, lower for likelier images (a plan that names
            it is code).
        prior_weight: its weight.
        ordered: weight of `objectives.disorder`, for a client known to withhold the largest entries
            of every tensor: each is then larger than what it sends. With 0.1 ReLU networks gave
            more away at 30 % withheld (5 dB and up); at 60 %, over several rounds, or with tanh
            units it did little or harm. It misleads where other entries are withheld.

    Source: Zhu et al. 2019; Geiping et al. 2020; Yin et al. 2021; Liu et al. 2025 (paper B), eq. 9.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = lb.Batch(torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2]))
        >>> task, sources = lb.Task.of(model, classes=3), [lb.stream(0, "a"), lb.stream(0, "b")]
        >>> seen = lb.play(task, [batch], lb.defenses.NoDefense(), sources).observation
        >>> attack = GradientMatching(distance="euclidean", optimizer="lbfgs", steps=10)
        >>> answer = attack(seen, lb.stream(0, "attack"))
        >>> bool((answer.inputs - batch.inputs).abs().max() < 0.05)
        True
    """

    distance: str = "cosine"
    total_variation: float = 0.0
    noise_variation: float = 0.0
    optimizer: str = "adam"
    learning_rate: float = 0.1
    steps: int = 1000
    signed: bool = True
    schedule: str = "step"
    initialization: str = "normal"
    box: bool = True
    labels: str = "told"
    enough: float | None = None
    smoothing: float = later(0.0)
    image: str = later("pixels")
    width: int = later(32)
    batch_norm: float = later(0.0)
    statistics: str = later("best")
    first_norm: float = later(1.0)
    features: str = later("none")
    feature_weight: float = later(0.1)
    feature_form: str = later("best")
    size: float = later(0.0)
    prior: str = later("")
    prior_weight: float = later(0.0)
    ordered: float = later(0.0)

    def __post_init__(self) -> None:
        check.one_of(DISTANCES, distance=self.distance)
        check.one_of(["adam", "lbfgs"], optimizer=self.optimizer)
        check.one_of(["stages", "step", "cosine", "constant"], schedule=self.schedule)
        check.one_of(["normal", "uniform"], initialization=self.initialization)
        check.one_of(["told", "inferred", "joint"], labels=self.labels)
        check.count(steps=self.steps)
        check.positive(learning_rate=self.learning_rate)
        check.non_negative(smoothing=self.smoothing)
        if self.smoothing and self.schedule != "stages":
            raise ValueError(
                f"smoothing is {self.smoothing} and schedule {self.schedule!r}: smoothing falls "
                "from stage to stage, so set schedule to 'stages' or smoothing to 0"
            )
        check.non_negative(total_variation=self.total_variation, size=self.size)
        check.non_negative(noise_variation=self.noise_variation, enough=self.enough or 0.0)
        check.one_of(["pixels", "deep_prior"], image=self.image)
        check.count(width=self.width)
        check.non_negative(batch_norm=self.batch_norm, feature_weight=self.feature_weight)
        check.non_negative(prior_weight=self.prior_weight, ordered=self.ordered)
        check.positive(first_norm=self.first_norm)
        check.one_of(STATISTICS, statistics=self.statistics)
        check.one_of(["none", *METHODS], features=self.features)
        check.one_of(FORMS, feature_form=self.feature_form)

    def plant(self, task: Task) -> Task:
        """The change that the feature method needs."""
        return task if self.features == "none" else METHODS[self.features].plant(task)

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        """Search from one random start."""
        answer = self.search(observation, generator).solve()
        return with_and_without_mask(answer, self, observation, generator)

    def search(self, observation: Observation, generator: torch.Generator) -> Search:
        """The search, before its first step."""
        return Search(self, observation, generator)

    @property
    def at_once(self) -> int:
        """How many searches `many` runs together; 1 where a subclass searches in its own way."""
        return WIDTH if self.shares(GradientMatching) and self.optimizer == "adam" else 1

    def many(
        self, observations: Sequence[Observation], generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Searches of small models of equal shapes share their computation; no bit changes."""
        if self.at_once == 1:
            return super().many(observations, generators)
        answers = many(self, observations, generators)
        given = zip(answers, observations, generators, strict=True)
        return [with_and_without_mask(a, self, seen, own) for a, seen, own in given]
