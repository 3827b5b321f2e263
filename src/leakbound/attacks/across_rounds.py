"""Gradient matching over several rounds: the client may send in one round what it withheld before.

In pseudo-pruning, the client keeps the weights it withholds and trains on them. When it sends one,
the server sees the sum of all gradients since the client last sent it.
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
from leakbound.attacks.matching.settings import MatchingSettings, unlisted
from leakbound.attacks.sparse_inversion import MASKS, evidence
from leakbound.core import NotApplicable, Observation, Reconstruction, Task

WITHHELD = ("kept", "forgotten")


@dataclass(frozen=True, repr=False)
class AcrossRounds(MatchingSettings):
    """Match the gradients of all rounds in an observation's history with one candidate batch.

    The attack simulates the client for each candidate, round after round. In the first round, every
    coordinate starts from the server's weight. Later, a coordinate that the client sent in the
    previous round does so too. One that it withheld starts from the client's own weight.

    The distance compares the rows of all rounds on the sent coordinates. For a coordinate last sent
    in round s, the observed value is (server's weight of round s + 1 - weight sent) / learning
    rate. The expected value is the sum of the candidate's gradients from round s + 1 on. Without a
    history, the attack equals `SparseInversion` with the same search. With T rounds, a step costs T
    gradients.

    Args:
        mask: which coordinates count as withheld: "recovered" (those exactly zero in the message),
            "told" (the mask itself if the defense is known; otherwise as "recovered"), or "blind"
            (none: zeros are taken literally).
        withheld: "kept" (the client continues from the weights that it withheld) or "forgotten" (it
            starts every round from the server's weights). A client that sends updates instead of
            weights counts as "forgotten".

    The other settings are those of `GradientMatching`.

    Assumptions: the client took part in exactly the rounds of the history. In each, it trained on
        the same batch: all of its data.

    Raises:
        NotApplicable: the history has other clients (other batch sizes), or several rows whose
            clients kept weights, so each row has a different model.

    Source: this project, for the client of Chu et al. 2024 (PriPrune, pseudo-pruning).

    Example:
        >>> attack = AcrossRounds(steps=200, withheld="forgotten")
        >>> attack.mask, attack.withheld, attack.total_variation
        ('recovered', 'forgotten', 0.0001)
    """

    total_variation: float = 1e-4
    noise_variation: float = 0.04
    only_images: bool = unlisted(True)
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
                    f"the batches of the history have {earlier.cohort} examples, then "
                    f"{later.cohort}; give rounds of the same clients"
                )
        objective = Objective.of(self, rounds[-1])
        if len(rounds) > 1:
            objective = over_rounds(objective, rounds, keeps=self.withheld == "kept")
        return solve(self, [begin(self, objective, generator)])[0]


@dataclass(frozen=True, eq=False)
class _Round:
    """What the attacker knows of one round: where the client continues from its own weight (R, P),
    and the server's weight (R, P) that it last started from.
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
        """The task at the weights that the client starts from, moved by `moved` so far."""
        if not bool(self.own.any()):
            return self.task
        return replace(self.task, parameters=(self.base - moved * self.own)[0])


def over_rounds(
    objective: Objective,
    seen: list[Observation],
    keeps: bool,
) -> Objective:
    """The last round's objective, over the rows (T R, P) of all T rounds, oldest first."""
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
    """A client that continues each round from the weights that it withheld."""

    rounds: list[_Round]

    def rows(self, images: Tensor, labels: Tensor) -> Tensor:
        each = list[Tensor]()
        moved = torch.zeros_like(self.rounds[0].base)
        for played in self.rounds:
            each.append(expected_rows(played.seen, played.started(moved), images, labels))
            moved = played.moved(moved, each[-1])
        return torch.cat(each)

    def seen_of(self, rows: Tensor) -> Tensor:
        """Sum the rows where the client continued from its own weight."""
        parts = list[Tensor]()
        moved = torch.zeros_like(self.rounds[0].base)
        for played, each in zip(self.rounds, rows.chunk(len(self.rounds)), strict=True):
            moved = played.moved(moved, each)
            parts.append(moved / played.rate)
        return torch.cat(parts)


def _rounds(
    seen: list[Observation],
    hidden: list[Tensor],
    keeps: bool,
) -> list[_Round]:
    """Where the client starts in each round; `hidden` (R, P) is what each round withheld."""
    found = list[_Round]()
    own = torch.zeros_like(hidden[0])
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
