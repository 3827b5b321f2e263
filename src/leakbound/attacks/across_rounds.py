"""One guess for what a client sent in several rounds: what it withheld in one, it sends in another.

A client that keeps the weights it withholds and trains on them (pseudo-pruning) shows, once it
sends such a weight, the sum of all gradients since it last did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import expected_rows, seen_task
from leakbound.attacks.matching.loop import begin, solve
from leakbound.attacks.matching.objective import Objective, withheld
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.attacks.sparse_inversion import MASKS, evidence
from leakbound.types import NotApplicable, Observation, Reconstruction, Task

WITHHELD = ("kept", "forgotten")


@dataclass(frozen=True, repr=False)
class AcrossRounds(MatchingSettings):
    """Gradient matching over all rounds of an observation's history, with one guess for all.

    A guess is played through all rounds: where the client sent a coordinate in the round before (or
    in the first round) it trains from the server's weight, and where it withheld it, from its own.
    The distance is between the rows of all rounds, on the coordinates that were sent. What is seen
    of a coordinate last sent in round s is (server's weight of round s + 1 - weight sent) /
    learning rate; what is expected is the sum of the guess's gradients from round s + 1 on. Without
    a history this is `sparse_gradient_inversion`; with T rounds a step costs T gradients.

    Args:
        mask: what counts as withheld: "recovered" (what is exactly zero in the message), "told"
            (the mask itself, where the defense is known; else as "recovered"), or "blind" (nothing:
            zeros are taken literally).
        withheld: "kept" (the client goes on with the weights that it withheld) or "forgotten" (it
            starts every round from the server's). Clients who send updates and no weights count as
            forgetful.

    All others are those of `GradientMatching`.

    Assumptions: the client took part in the rounds of the history and in no others, and trained on
        the same batch in each: all of its data, in one batch.

    Raises:
        NotApplicable: a history of other clients (of batches of other sizes), or of several rows
            whose clients kept weights: each would have a model of its own.

    Source: ours. The rules of the client are those of Chu et al. 2024 (PriPrune), pseudo-pruning.

    Example:
        >>> attack = AcrossRounds(steps=200, withheld="forgotten")
        >>> attack.mask, attack.withheld, attack.total_variation
        ('recovered', 'forgotten', 0.0001)
    """

    total_variation: float = 1e-4
    noise_variation: float = 0.04
    mask: str = "recovered"
    withheld: str = "kept"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(MASKS, mask=self.mask)
        check.one_of(WITHHELD, withheld=self.withheld)

    def __call__(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        rounds = [evidence(seen, self.mask) for seen in (*observation.history, observation)]
        for earlier, later in pairwise(rounds):
            same = earlier.update.rows.shape == later.update.rows.shape
            if earlier.cohort != later.cohort or not same:
                raise NotApplicable(
                    f"the history is of other clients: their batches are of {earlier.cohort} "
                    f"examples, then of {later.cohort}"
                )
        objective = Objective.of(self, rounds[-1])
        if len(rounds) > 1:
            objective = over_rounds(objective, rounds, keeps=self.withheld == "kept")
        return solve(self, [begin(self, objective, generator)])[0]


@dataclass(frozen=True, eq=False)
class _Round:
    """What is known of one round before any guess: where the client goes on from a weight of its
    own (R, P), and the server's weight (R, P) that it last started from.
    """

    seen: Observation
    task: Task
    own: Tensor
    base: Tensor

    @property
    def rate(self) -> float:
        return self.task.plan.learning_rate

    def moved(self, before: Tensor, rows: Tensor) -> Tensor:
        """(R, P) how far the client is from `base` after the round."""
        return before * self.own + self.rate * rows

    def started(self, moved: Tensor) -> Task:
        """The task at the weights that the client starts from, which had moved so far."""
        if not bool(self.own.any()):
            return self.task
        return replace(self.task, parameters=(self.base - moved * self.own)[0])


def over_rounds(objective: Objective, seen: list[Observation], keeps: bool) -> Objective:
    """The objective of the last round, over the rows (T R, P) of all T, the oldest first."""
    nothing = torch.zeros_like(objective.seen)
    hidden = [_or(withheld(each), nothing.bool()) for each in seen]
    rounds = _rounds(seen, hidden, keeps)
    weights = torch.cat([_or(each.weights, nothing + 1) for each in seen])
    since = [r.seen.update.rows + (r.base - r.task.parameters) / r.rate for r in rounds]
    return replace(
        objective,
        client=_KeptWeights(rounds),
        withheld=torch.cat(hidden),
        whitener=None,
        weights=weights,
        seen=torch.cat(since) * (weights > 0),
    )


@dataclass(frozen=True, eq=False)
class _KeptWeights:
    """A client that goes on, round after round, from the weights that it withheld."""

    rounds: list[_Round]

    def rows(self, images: Tensor, labels: Tensor) -> Tensor:
        each, moved = list[Tensor](), torch.zeros_like(self.rounds[0].base)
        for played in self.rounds:
            each.append(expected_rows(played.seen, played.started(moved), images, labels))
            moved = played.moved(moved, each[-1])
        return torch.cat(each)

    def seen_of(self, rows: Tensor) -> Tensor:
        """The rows added up where the client went on from a weight of its own."""
        parts, moved = list[Tensor](), torch.zeros_like(self.rounds[0].base)
        for played, each in zip(self.rounds, rows.chunk(len(self.rounds)), strict=True):
            moved = played.moved(moved, each)
            parts.append(moved / played.rate)
        return torch.cat(parts)


def _rounds(seen: list[Observation], hidden: list[Tensor], keeps: bool) -> list[_Round]:
    """Who starts from what; `hidden` (R, P) is what was withheld in each round."""
    found, own = list[_Round](), torch.zeros_like(hidden[0])
    for each, mask in zip(seen, hidden, strict=True):
        task = seen_task(each)
        base = task.parameters.expand_as(mask)
        if found:
            base = torch.where(own, found[-1].base, base)
        if len(own) > 1 and bool(own.any()):
            raise NotApplicable(
                f"the history has {len(own)} rows a round, whose clients kept weights; attack one"
            )
        found.append(_Round(each, task, own, base))
        own = mask & (keeps and each.sent is not None)
    return found


def _or(value: Tensor | None, default: Tensor) -> Tensor:
    return default if value is None else value
