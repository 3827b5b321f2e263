"""The settings of gradient matching, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leakbound import check
from leakbound._util import user_code
from leakbound.attacks.base import Attack
from leakbound.attacks.features.base import FeatureMethod
from leakbound.attacks.features.cocktail_party import CocktailParty
from leakbound.attacks.matching.distances import DISTANCES
from leakbound.attacks.pace import EVALUATIONS
from leakbound.core import Task

__all__ = ["MatchingSettings", "unlisted"]

CHOICES = {
    "distance": tuple(DISTANCES),
    "optimizer": ("adam", "lbfgs"),
    "schedule": ("stages", "step", "cosine", "constant"),
    "initialization": ("normal", "uniform"),
    "labels": ("told", "inferred", "joint"),
    "image": ("pixels", "deep_prior", "mixed"),
    "statistics": ("best", "running", "proxy", "exact"),
    "feature_form": ("best", "cosine", "span"),
    "rounds": ("last", "together"),
}
"""The words that a setting may have."""


def unlisted(default: Any) -> Any:
    """A setting that the attack's `repr`, and so its stored name, shows only if changed."""
    return field(default=default, metadata={"unlisted": True})


@dataclass(frozen=True, repr=False)
class MatchingSettings(Attack):
    """The settings of gradient matching; subclasses run the search.

    Args:
        distance: cosine, cosine_layers, cosine_weighted, euclidean or manhattan.
        total_variation: weight of the total variation, of series along time. Rows of a table have
            none and are refused.
        only_images: only images and volumes have a total variation, as in the presets.
        smoothing: weight that the schedule "stages" adds to the total variation in its first stage.
            The next two stages add a tenth and a hundredth of it, the last stage nothing. Smooth
            images are better starts for the later stages. If a known mask hides coordinates, it is
            divided by the square root of the share that is seen. No effect if inputs are not
            images.
        noise_variation: what is added to that weight, times the square root of the share of noise
            in the update's energy, which the attacker computes from the declared distribution.
        optimizer: "adam" or "lbfgs" (then `steps` counts outer steps of up to 20 iterations).
        learning_rate: the optimizer's learning rate at the start; `schedule` lowers it.
        steps: search steps.
        signed: feed Adam only the gradient's sign.
        schedule: "step" (rate x 0.1 at 3/8, 5/8, 7/8), "stages" (the same rates; each of the four
            stages starts from the best iterate so far with momentum 0), "cosine", "constant".
        initialization: "normal" (standard normal; of series, if public ones are known, their mean
            plus noise of a tenth of their spread) or "uniform" (over the input range).
        box: project on the input range after every step.
        labels: "told" (inferred if they are not known), "inferred", or "joint" (optimized as soft
            labels together with the inputs, known or not).
        enough: stop once the objective is at most this; None: never.
        image: "pixels", or "deep_prior": an untrained network draws the images, and its weights are
            searched, or "mixed": rows of a table, with a softmax for each categorical column (then
            `initialization` and `box` have no effect).
        width: channels of that network.
        batch_norm: weight of the distance between the candidate's statistics in the batch norms and
            the known ones; a model without batch norms has no such term.
        statistics: the source of the known statistics: "exact", "proxy", "running", or "best" (see
            `terms.statistics`).
        first_norm: factor on the first batch norm.
        features: "none", or the method that finds a linear layer's inputs: "cocktail_party", or
            "package.module:build", where `build()` returns a `FeatureMethod` (a plan that names it
            runs code). leakbound-reproductions has such methods.
        feature_weight: weight of the distance between the candidate's features and the found ones.
        feature_form: "cosine", "span", or "best" (cosine for up to 8 examples).
        size: weight of the mean squared distance from the middle of the input range.
        prior: the user's "package.module:build": `build(input_shape=(C, H, W))` returns a function
            from images (N, C, H, W) to one number, lower for more likely images (a plan that names
            it runs code).
        prior_weight: its weight.
        ordered: weight of `objectives.disorder`, for a client known to withhold the largest entries
            of every tensor: each is then larger than what it sends. With 0.1, ReLU networks leaked
            more at 30 % withheld (5 dB and up). At 60 %, over several rounds, or with tanh units it
            had little effect or did harm. It misleads if other entries are withheld.
        rounds: "last", or "together": the candidate must also explain what the same clients sent in
            the rounds before (`Observation.history`). This assumes the same examples in each, as of
            clients that train on all of their few examples. Noise of the rounds averages out.
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
    only_images: bool = unlisted(False)
    smoothing: float = unlisted(0.0)
    image: str = unlisted("pixels")
    width: int = unlisted(32)
    batch_norm: float = unlisted(0.0)
    statistics: str = unlisted("best")
    first_norm: float = unlisted(1.0)
    features: str = unlisted("none")
    feature_weight: float = unlisted(0.1)
    feature_form: str = unlisted("best")
    size: float = unlisted(0.0)
    prior: str = unlisted("")
    prior_weight: float = unlisted(0.0)
    ordered: float = unlisted(0.0)
    rounds: str = unlisted("last")

    @property
    def step_trainings(self) -> int:
        """A line search asks for the time only when it has ended."""
        return EVALUATIONS if self.optimizer == "lbfgs" else 1

    @property
    def across_rounds(self) -> bool:
        return self.rounds == "together"

    def __post_init__(self) -> None:
        for name, words in CHOICES.items():
            check.one_of(words, **{name: getattr(self, name)})
        # The user's own method is imported when it is used: settings alone run no code.
        if ":" not in self.features:
            check.one_of(["none", "cocktail_party"], features=self.features)
        check.count(steps=self.steps, width=self.width)
        check.positive(learning_rate=self.learning_rate, first_norm=self.first_norm)
        check.non_negative(
            total_variation=self.total_variation,
            noise_variation=self.noise_variation,
            smoothing=self.smoothing,
            enough=self.enough or 0.0,
            batch_norm=self.batch_norm,
            feature_weight=self.feature_weight,
            size=self.size,
            prior_weight=self.prior_weight,
            ordered=self.ordered,
        )
        if self.smoothing and self.schedule != "stages":
            raise ValueError(
                f"smoothing is {self.smoothing} and schedule {self.schedule!r}: smoothing falls "
                "from stage to stage, so set schedule to 'stages' or smoothing to 0"
            )

    @property
    def feature_method(self) -> FeatureMethod | None:
        """The method that `features` names; None for "none"."""
        if self.features == "none":
            return None
        if self.features == "cocktail_party":
            return CocktailParty()
        return user_code.find("features", self.features)()

    def plant(self, task: Task) -> Task:
        """The task that the features' method needs from a malicious server."""
        method = self.feature_method
        return task if method is None else method.plant(task)
