"""Gradient inversion of a client that starts each round partly from its own weights.

PriPrune's client draws, for every weight, whether it starts from the server's weight or its own. If
it starts from its own, the server's pseudo-gradient is not a gradient, and the search trains its
candidate at the wrong point. But the server knows each own weight that the client sent before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.matching.loop import answer, begin, run, solve
from leakbound.attacks.matching.objective import Objective, withheld
from leakbound.attacks.matching.settings import MatchingSettings, unlisted
from leakbound.attacks.sparse_inversion import MASKS, evidence
from leakbound.core import NotApplicable, Observation, Reconstruction

UNKNOWN = ("search", "server")
SHARE = 0.2
"""Initial share of weights that are assumed to start from the client's own."""
LEAST = 0.01
"""The estimated share stays between this and 1 minus this."""


@dataclass(frozen=True, repr=False)
class MixedStart(MatchingSettings):
    """Match gradients and estimate which weights the client started from.

    A weight that the client sent in the previous round has two candidate starts: the server's
    weight, or the one sent. So it has two candidate gradients, (start - weight sent) / learning
    rate. After every step, the attack estimates the probability of the own start from the distances
    between the candidate batch's gradient and the two (expectation maximization, normal errors with
    one variance per tensor). It then trains the candidate batch at the mixed weights.

    If the client withheld a weight in the previous round, nobody saw its own value. The attack
    leaves this weight out of the match, and searches its start with the images. It does the same
    for a weight that is withheld now. It assumes nothing about the batches of other rounds. An
    attacker who knows that they are the same attacks the first round, or all (`AcrossRounds`).
    Without a history, or if the client sends no weights, the result equals that of
    `SparseInversion` with the same search bit for bit. The preset `sparse_gradient_inversion`
    smooths first, which wants more than a hundred steps.

    Args:
        mask: which coordinates count as withheld: "recovered" (those exactly zero in the message),
            "told" (the mask itself if the defense is known; otherwise as "recovered"), or "blind"
            (none: zeros are taken literally).
        stages: how often the descent of `steps` runs, each from the end of the previous one.
        unknown: where weights start that were withheld now or in the previous round: "search", or
            "server" (from the server's weight, which is wrong more often than not).
        reach: the step size of that search, relative to the root mean square distance between the
            server's weights and the client's last known ones (of those withheld, or of all others,
            whichever is larger).

    The other settings are those of `GradientMatching`.

    Measured against PriPrune's defaults (MNIST at 14 x 14, one image, five seeds, 800 steps): 41,
    31, 34 and 17 dB in rounds 5, 10, 20 and 50; `sparse_gradient_inversion` has 13, 10, 11 and 11
    dB.

    Assumptions: the client took part in the last round of the history; tensors of fewer than two
        dimensions start from the server's weights.

    Raises:
        NotApplicable: the history has other clients, or several rows.

    Source: this project, against algorithm 3 of Chu et al. 2024 (PriPrune).

    Example:
        >>> MixedStart(steps=10).stages
        2
    """

    total_variation: float = 1e-4
    noise_variation: float = 0.04
    only_images: bool = unlisted(True)
    mask: str = "recovered"
    stages: int = 2
    unknown: str = "search"
    reach: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(["adam"], optimizer=self.optimizer)
        check.one_of(MASKS, mask=self.mask)
        check.count(stages=self.stages)
        check.one_of(UNKNOWN, unknown=self.unknown)
        check.positive(reach=self.reach)

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        rounds = [evidence(seen, self.mask) for seen in (*observation.history, observation)]
        objective = Objective.of(self, rounds[-1])
        if len(rounds) == 1 or any(seen.sent is None for seen in rounds):
            return solve(self, [begin(self, objective, generator)])[0]
        shapes = {(seen.cohort, seen.update.rows.shape) for seen in rounds}
        if len(shapes) > 1 or len(observation.update.rows) > 1:
            raise NotApplicable(
                f"the rounds have {sorted({len(seen.update.rows) for seen in rounds})} rows of "
                f"batches of {sorted({seen.cohort for seen in rounds})}; give the rounds of one "
                "client"
            )
        starts = Starts(self, objective, rounds)
        objective = replace(objective, whitener=None, weights=starts.trust)
        search = begin(self, objective, generator, companion=starts)
        for _ in range(self.stages):
            run(self, [search])
        return answer(search)


class Starts:
    """Which weights the client started from, as the search estimates it together with the images.

    `literal` (1, P) is the gradient seen where the client started from the server's weights. `gap`
    (P,) is what to add where it started from its own weights. `own` (P,) is the probability of
    that. `hidden` (P,): nobody saw the own value, or nothing is seen now. `variables`: the searched
    starts of hidden weights, in units of `scale`.
    """

    def __init__(
        self,
        settings: MixedStart,
        objective: Objective,
        rounds: list[Observation],
    ) -> None:
        task = objective.task
        observation = objective.observation
        gone = objective.withheld
        self.server = task.parameters
        self.rate = task.plan.learning_rate
        self.spans = objective.spans
        self.literal = observation.update.rows
        known, self.hidden = last_sent(rounds)
        if gone is not None:
            self.hidden = self.hidden | (gone[0] & (known != self.server))
        self.gap = (known - self.server) / self.rate * ~self.hidden
        weights = observation.weights
        given = torch.ones_like(self.literal) if weights is None else weights
        self.trust = given * ~self.hidden
        self.used = (self.trust > 0)[0] & (self.gap != 0)
        self.own = self.best_own = SHARE * self.used.to(self.server)
        self.variables: list[Tensor] = []
        away = known - self.server
        far = max(_size(away[self.hidden]), _size(away[self.used]))
        self.scale = settings.reach * far
        if settings.unknown == "search" and bool(self.hidden.any()) and far > 0:
            self.server = self.server + self.hidden * away / 2
            self.variables = [torch.zeros_like(away[self.hidden]).requires_grad_()]

    def place(self, objective: Objective) -> Objective:
        """Train the candidate, and take the gradient, at the estimated start; where the client's
        own weight is not known, at `server` plus the searched offset.
        """
        start = self.server + self.rate * self.gap * self.own
        for moved in self.variables:
            at = self.hidden.nonzero().squeeze(1)
            start = start.index_add(0, at, self.scale * moved)
        task = replace(objective.task, parameters=start)
        seen = (self.literal + self.gap * self.own) * (self.trust > 0)
        return replace(objective, task=task, seen=seen)

    def learn(self, rows: Tensor, better: bool) -> None:
        """Estimate the starts again from the gradient (1, P) of the candidate."""
        if better:
            self.best_own = self.own
        literal = (rows - self.literal)[0].square()
        own = (rows - self.literal - self.gap)[0].square()
        chances = self.own.clone()
        for start, stop in self.spans:
            used = self.used[start:stop]
            if not bool(used.any()):
                continue
            far, near, chance = (part[start:stop][used] for part in (literal, own, self.own))
            spread = (chance * near + (1 - chance) * far).mean()
            share = chance.mean().clamp(LEAST, 1 - LEAST).logit()
            least = torch.finfo(spread.dtype).tiny
            chances[start:stop][used] = torch.sigmoid((far - near) / (2 * spread + least) + share)
        self.own = chances

    def recall(self) -> None:
        self.own = self.best_own


def last_sent(rounds: list[Observation]) -> tuple[Tensor, Tensor]:
    """The client's last known weights (P,), and bool (P,) where it has trained on since unseen. A
    pruned weight is known to be 0. The server's weight stands for what is pruned in the last round
    (the one under attack), for tensors of fewer than two dimensions, and for weights never sent.
    """
    now = rounds[-1].task
    weights = now.parameters.clone()
    hidden = torch.zeros_like(weights, dtype=torch.bool)
    own = hidden.clone()
    for _, shape, start, stop in now.layout:
        own[start:stop] = len(shape) > 1
    own = own if now.kept is None else own & now.kept
    for seen in rounds[:-1]:
        assert seen.sent is not None  # checked before
        gone = withheld(seen)
        hidden = own & (torch.zeros_like(hidden) if gone is None else gone[0])
        weights = torch.where(own & ~hidden, seen.sent[0], weights)
    return weights, hidden


def _size(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if len(values) else 0.0
