"""Gradient matching: search the inputs whose update looks like the one that was seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from leakbound.attacks.base import rank
from leakbound.attacks.matching.loop import WIDTH, answer, batch_key, begin, run, solve
from leakbound.attacks.matching.objective import Objective, hides
from leakbound.attacks.matching.search import Search
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.types import Observation, Reconstruction


@dataclass(frozen=True, repr=False)
class GradientMatching(MatchingSettings):
    """Minimize distance(update of the guess, update seen) + what else makes a guess unlikely.

    Those are the total variation, statistics in batch norms, features that another method found,
    and the size. Every part is a setting, so an ablation changes a field.

    Knows what the threat model grants: the guess is sent through the known defense's deterministic
    part, coordinates are weighted by the known noise law (whitened, where its noise is correlated)
    and restricted to the known mask. The answer is the iterate with the lowest objective, the last
    one included.

    The fewer coordinates a known mask shows, the more wrong images match them, and a search that
    knows the mask can end further off than one that takes what is withheld for zeros. So where the
    answer has a problem under the schedule "stages", a second search starts as the latter and
    counts the zeros less from stage to stage, in the last one not at all. The answer with the lower
    masked objective is kept.

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

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        """Search from one random start."""
        return self._second_chance(
            solve(self, [self.search(observation, generator)])[0], observation, generator
        )

    def search(
        self, observation: Observation, generator: torch.Generator, *, many: bool = False
    ) -> Search:
        """The search, before its first step; `many`: other searches may share its computation."""
        return begin(self, Objective.of(self, observation), generator, many=many)

    @property
    def at_once(self) -> int:
        """How many searches `many` runs together."""
        return WIDTH if self.optimizer == "adam" else 1

    def many(
        self, observations: Sequence[Observation], generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Searches of small models of equal shapes share their computation; no bit changes."""
        answers: list[Reconstruction] = []
        pairs, width = list(zip(observations, generators, strict=True)), self.at_once
        for start in range(0, len(pairs), width):
            few = pairs[start : start + width]
            searches = [self.search(*pair, many=width > 1) for pair in few]
            groups: dict[object, list[Search]] = defaultdict(list)
            for search in searches:
                groups[batch_key(search)].append(search)
            for group in groups.values():
                run(self, group)
            found = [answer(search) for search in searches]
            answers += [self._second_chance(f, *pair) for f, pair in zip(found, few, strict=True)]
        return answers

    def _second_chance(
        self, first: Reconstruction, observation: Observation, generator: torch.Generator
    ) -> Reconstruction:
        """The answer, or that of a search that begins with zeros where nothing was sent."""
        staged = self.schedule == "stages" and self.optimizer == "adam"
        if first.problem is None or not staged or not hides(observation):
            return first
        objective = Objective.of(self, observation, zeros_first=True)
        second = solve(self, [begin(self, objective, generator)])[0]
        return min(first, second, key=rank)
