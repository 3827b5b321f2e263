"""Gradient matching: search the inputs whose update resembles the one that was seen."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leakbound import check
from leakbound.attacks.base import Attack, BestOf, ByNoise, rank
from leakbound.attacks.matching.engine import Search
from leakbound.attacks.matching.loop import WIDTH, answer, batch_key, begin, run, solve
from leakbound.attacks.matching.objective import Objective, hides
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.attacks.pace import is_over
from leakbound.core import Observation, Reconstruction


@dataclass(frozen=True, repr=False)
class GradientMatching(MatchingSettings):
    """Search the inputs whose simulated update is closest to the update that was seen.

    The objective is a distance between the two updates plus penalties on unlikely candidates: total
    variation, statistics in batch norms, features that another method found, and size. The attack
    sends a candidate through the known defense's deterministic part. It weights coordinates by the
    known noise (whitened if it is correlated) and restricts them to the known mask. The answer is
    the iterate with the lowest objective.

    With a known mask that shows few coordinates, the search can end farther from the truth than one
    that takes withheld coordinates as zeros. So if the answer has a problem under the schedule
    "stages", a second search starts with these zeros and reduces their weight from stage to stage,
    to none in the last. The answer with the lower masked objective is kept.

    Source: Zhu et al. 2019; Geiping et al. 2020; Yin et al. 2021; Liu et al. 2025 (paper B),
    section 4.2.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> attack = GradientMatching(distance="euclidean", optimizer="lbfgs", steps=10)
        >>> lb.simulate(model, batch, attack=attack).scores[0] > 80
        True
    """

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        return self._second_chance(
            solve(self, [self.search(observation, generator)])[0], observation, generator
        )

    def search(
        self,
        observation: Observation,
        generator: torch.Generator,
        *,
        many: bool = False,
    ) -> Search:
        """The search before its first step; `many`: other searches may share its computation."""
        return begin(
            self,
            Objective.of(self, observation),
            generator,
            many=many,
        )

    @property
    def at_once(self) -> int:
        # The line search of L-BFGS evaluates each search at points of its own.
        return WIDTH if self.optimizer == "adam" else 1

    def many(
        self,
        observations: Sequence[Observation],
        generators: Sequence[torch.Generator],
    ) -> list[Reconstruction]:
        """Searches of small models with equal shapes share their computation; no bit changes."""
        answers: list[Reconstruction] = []
        pairs = list(zip(observations, generators, strict=True))
        width = self.at_once
        for start in range(0, len(pairs), width):
            few = pairs[start : start + width]
            searches = [self.search(*pair, many=width > 1) for pair in few]
            groups: dict[object, list[Search]] = defaultdict(list)
            for search in searches:
                groups[batch_key(search)].append(search)
            for group in groups.values():
                run(self, group)
            results = [answer(search) for search in searches]
            answers += [self._second_chance(f, *pair) for f, pair in zip(results, few, strict=True)]
        return answers

    def _second_chance(
        self,
        first: Reconstruction,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        """The answer, or that of a search that begins with zeros for withheld coordinates."""
        staged = self.schedule == "stages" and self.optimizer == "adam"
        if first.problem is None or not staged or not hides(observation) or is_over():
            return first
        objective = Objective.of(self, observation, zeros_first=True)
        second = solve(self, [begin(self, objective, generator)])[0]
        return min(first, second, key=rank)


def settings_hash(attack: Attack) -> str:
    """Twelve hex digits that identify an attack's full settings.

    Example:
        >>> settings_hash(dlg()) == settings_hash(dlg())
        True
        >>> settings_hash(dlg()) == settings_hash(idlg())
        False
    """
    return hashlib.sha256(repr(attack).encode()).hexdigest()[:12]


def dlg(
    steps: int = 100,
    restarts: int = 3,
    learning_rate: float = 1.0,
) -> Attack:
    """Match gradients by squared distance with L-BFGS, over inputs and soft labels jointly.

    This is Deep Leakage from Gradients (DLG). It works on smooth (sigmoid) models. It keeps the
    start with the lowest objective.

    Args:
        steps: outer steps of L-BFGS, of up to 20 iterations each.
        restarts: how many starts; the one with the lowest objective is kept.
        learning_rate: the length of a step of L-BFGS.

    Source: Zhu et al. 2019; released code: L-BFGS, rate 1, 300 outer steps, normal start, no line
        search (this version has one, see `GradientMatching`).

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, activation="sigmoid",
        ...     generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> lb.simulate(model, batch, classes=3, attack=dlg(steps=10, restarts=1)).scores[0] > 80
        True
    """
    return _lbfgs("joint", steps, restarts, learning_rate)


def idlg(
    steps: int = 100,
    restarts: int = 3,
    learning_rate: float = 1.0,
) -> Attack:
    """Infer the label from the last layer, then match gradients as DLG does (Improved DLG).

    Args:
        steps: outer steps of L-BFGS, of up to 20 iterations each.
        restarts: how many starts; the one with the lowest objective is kept.
        learning_rate: the length of a step of L-BFGS.

    Source: Zhao et al. 2020; released code as DLG's.

    Example:
        >>> idlg().attack.labels, dlg().attack.labels
        ('inferred', 'joint')
    """
    return _lbfgs("inferred", steps, restarts, learning_rate)


def inverting_gradients(
    steps: int = 1000,
    total_variation: float = 1e-6,
    learning_rate: float = 0.1,
    restarts: int = 1,
    noise_variation: float = 0.04,
    smoothing: float = 3e-2,
) -> Attack:
    """Match gradients by cosine distance, with signed Adam, total variation and a box.

    This is Inverting Gradients. The settings are leakbound's own; presets named by source have
    those of published code. If the defense is known to add noise, the total variation has more
    weight (`noise_variation`).

    Args:
        steps: search steps.
        total_variation: weight of the total variation at the end.
        learning_rate: Adam's learning rate at the start; the schedule lowers it.
        restarts: how many starts; the one with the lowest objective is kept.
        noise_variation: what is added to that weight under noise; see `GradientMatching`.
        smoothing: what is added to that weight in the first stage; see `GradientMatching`.

    Source: Geiping et al. 2020.

    Example:
        >>> import leakbound as lb
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2])
        >>> lb.simulate(model, batch, attack=inverting_gradients(steps=100)).scores[0] > 45
        True
    """
    search = GradientMatching(
        only_images=True,
        total_variation=total_variation,
        noise_variation=noise_variation,
        smoothing=smoothing,
        steps=steps,
        learning_rate=learning_rate,
        schedule="stages",
    )
    return BestOf(search, restarts) if restarts > 1 else search


def matching_over_rounds(
    steps: int = 1000,
    total_variation: float = 1e-6,
    noise_variation: float = 0.04,
) -> Attack:
    """Inverting Gradients on all rounds of a client that trains on the same examples in each.

    Noise of the rounds averages out, and other weights in each round show more of the examples.
    Without earlier rounds it is `inverting_gradients`.

    Args:
        steps: search steps; each simulates up to eight rounds.
        total_variation: weight of the total variation at the end.
        noise_variation: what is added to that weight under noise; see `GradientMatching`.

    Assumptions: the examples are the same in each round; else the answer reports a problem.

    Source: this project, after Geiping et al. 2020.

    Example:
        >>> matching_over_rounds().rounds
        'together'
    """
    return GradientMatching(
        only_images=True,
        total_variation=total_variation,
        noise_variation=noise_variation,
        smoothing=3e-2,
        steps=steps,
        schedule="stages",
        rounds="together",
    )


def inverting_gradients_large_steps(
    steps: int = 2500,
    total_variation: float = 5e-3,
    learning_rate: float = 0.3,
    restarts: int = 3,
    noise_variation: float = 0.04,
) -> Attack:
    """Inverting Gradients with large, slowly shrinking steps: for ReLU networks with max pools.

    In these networks a candidate changes which units are on, and small steps stay near the start.
    Tuned on six one-image updates of a network like LeNet with ReLU
    (`benchmarks/quickstart_leak.py`).

    Args:
        steps: search steps.
        total_variation: weight of the total variation.
        learning_rate: Adam's learning rate at the start; the schedule lowers it.
        restarts: how many starts; the one with the lowest objective is kept.
        noise_variation: what is added to that weight under noise; see `GradientMatching`.

    Source: Geiping et al. 2020; the settings are from this project.

    Example:
        >>> attack = inverting_gradients_large_steps()
        >>> attack.restarts, attack.attack.schedule, attack.attack.learning_rate
        (3, 'cosine', 0.3)
    """
    search = GradientMatching(
        only_images=True,
        total_variation=total_variation,
        noise_variation=noise_variation,
        steps=steps,
        learning_rate=learning_rate,
        schedule="cosine",
        initialization="uniform",
    )
    return BestOf(search, restarts) if restarts > 1 else search


def strong_matching(
    steps: int = 1000,
    total_variation: float = 1e-3,
    feature_weight: float = 0.1,
    features: str = "cocktail_party",
    batch_norm: float = 1e-3,
    prior_rate: float = 1e-3,
    prior_variation: float = 1e-3,
) -> Attack:
    """Match gradients with features, batch statistics or a deep image prior, by the noise level.

    This is paper B's strong attack, with each part used where it helps. Every variant matches
    gradients by the cosine, with total variation and the statistics of batch norms. If noise is a
    small share of the update, the attack searches pixels whose features lie in the span of those
    that another method inferred from the update. If the declared distribution says that noise
    dominates, such features mislead. Then an untrained network draws the images (deep image prior),
    and every tensor is weighted by its size.

    Args:
        steps: steps of either search.
        total_variation: its weight without much noise.
        feature_weight: weight of the features without much noise.
        features: "none", "cocktail_party" (any model with a linear layer), or your own method; see
            `GradientMatching`.
        batch_norm: weight of the statistics.
        prior_rate: learning rate under noise.
        prior_variation: weight of total variation under noise.

    Source: Liu et al. 2025 (paper B), section 4.2, whose last formula has no number. Its appendix F
    has weights of 0.01 (total variation), 0.001 (statistics) and 0.1 (features), at rate 1e-5 for
    10,000 steps.

    Example:
        >>> attack = strong_matching(steps=500)
        >>> attack.clean.features, attack.noisy.image
        ('cocktail_party', 'deep_prior')
    """
    clean = GradientMatching(
        only_images=True,
        total_variation=total_variation,
        noise_variation=0.04,
        steps=steps,
        features=features,
        feature_weight=feature_weight,
        feature_form="span",
        batch_norm=batch_norm,
    )
    noisy = GradientMatching(
        distance="cosine_weighted",
        only_images=True,
        total_variation=prior_variation,
        noise_variation=0.04,
        steps=steps,
        learning_rate=prior_rate,
        signed=False,
        image="deep_prior",
        batch_norm=batch_norm,
    )
    return ByNoise(clean, noisy)


PUBLISHED: dict[str, dict[str, Any]] = {
    # released library, reconstruction_algorithms.py, DEFAULT_CONFIG
    "geiping_library": {"steps": 4800, "total_variation": 1e-1, "signed": False},
    # released command line, reconstruct_image.py
    "geiping_cli": {"steps": 24_000, "total_variation": 1e-4},
    # config/attack/invertinggradients.yaml has 0.2 for its form of the total variation, which pads
    # with zeros, so that borders count as edges
    "breaching": {"steps": 24_000, "total_variation": 1e-1},
    # attacks/gradientinversion.py
    "gradattack": {"steps": 10_000, "total_variation": 1e-1},
    # Chen, Gursoy and Lei (optimal defenses), MNIST
    "chen": {"steps": 2000, "total_variation": 1e-6, "learning_rate": 0.2},
}
"""The settings of Inverting Gradients in published code."""


def published_inverting_gradients(
    source: str = "geiping_cli",
    steps: int | None = None,
) -> Attack:
    """Inverting Gradients with the settings of published code.

    | source | steps | total variation | rate | signed |
    |---|--:|--:|--:|---|
    | geiping_library | 4,800 | 0.1 | 0.1 | no |
    | geiping_cli | 24,000 | 1e-4 | 0.1 | yes |
    | breaching | 24,000 | 0.1 (0.2 in its form) | 0.1 | yes |
    | gradattack | 10,000 | 0.1 | 0.1 | yes |
    | chen | 2,000 | 1e-6 | 0.2 | yes |

    Args:
        source: "geiping_library" and "geiping_cli" (the released library and its command line),
            "breaching", "gradattack", or "chen" (the paper on optimal defenses).
        steps: search steps; None: as published.

    Source: Geiping et al. 2020 and the code named.

    Example:
        >>> attack = published_inverting_gradients("chen")
        >>> attack.learning_rate, attack.total_variation, attack.steps
        (0.2, 1e-06, 2000)
    """
    check.one_of(PUBLISHED, source=source)
    settings = PUBLISHED[source] if steps is None else PUBLISHED[source] | {"steps": steps}
    return GradientMatching(only_images=True, **settings)


def _lbfgs(
    labels: str,
    steps: int,
    restarts: int,
    learning_rate: float,
) -> Attack:
    search = GradientMatching(
        distance="euclidean",
        optimizer="lbfgs",
        learning_rate=learning_rate,
        steps=steps,
        signed=False,
        schedule="constant",
        box=False,
        labels=labels,
        enough=1e-9,
    )
    return BestOf(search, restarts, enough=1e-7) if restarts > 1 else search
