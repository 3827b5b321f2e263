"""Train on one noisy copy of each example: the update leaks no more than the copy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound import check
from leakbound.client import rows as client_rows
from leakbound.core import Batch, Exact, Task, Unit, Unknown, Update
from leakbound.defenses.base import Context, Defense, Sent, State
from leakbound.randomness import Source, normal

REASON = "noise was added to each example before the gradient: the update's distribution is unknown"


@dataclass(frozen=True, repr=False)
class NoisyCopy(Defense):
    """Train on one noisy copy of each example, drawn once for all rounds.

    An example x becomes x + w, w ~ N(0, noise_std² I), moved into the task's input range. The
    client trains only on this copy. Everything sent is computed from the copies, so attackers see
    at most x + w. With noise_multiplier = noise_std / |X|, `bounds.from_scratch.exact` bounds every
    attacker on an example of uniformly random direction, for any model, local steps and rounds. The
    bound does not cover attackers who know what images look like. It does not protect labels, or
    hide that one example took part in two rounds.

    The client's state keeps the copies, under a digest of the example's values: an example that is
    seen again has the same copy. Keep the state between rounds (`protocol.step`). If it is lost, or
    an example comes back with other values (augmented, edited), another copy is drawn, and k copies
    leak as noise_std / sqrt(k). The same holds for the copies of k clients with the same example.

    Matching attacks find x + w. Put clipping and noise after it, as in
    chain(NoisyCopy(0.1), DpSgd()). A chain rejects other changes of the rows before it, and links
    that read the client's batch.

    Args:
        noise_std: standard deviation of the noise, in input units.

    Guarantees: no differential privacy of the update. Its distribution given the data is not known
    (the noise passes through the model); that of the copies is known. A chain with `DpSgd` after it
    declares the same, although more holds.

    Raises:
        ValueError: an earlier link masked, bounded or added noise to the rows.

    Source: this project (docs/errata.md, "gamma*", for the bound).

    Example:
        >>> NoisyCopy(0.1).guarantee.value
        'none'
    """

    accepts = frozenset({Unit.EXAMPLE, Unit.CLIENT})
    keeps_law = False
    keeps_bound = False
    uses_context = True
    replaces_examples = True
    hides_law = True

    noise_std: float = 0.1

    def __post_init__(self) -> None:
        check.positive(noise_std=self.noise_std)

    def init(self, task: Task) -> State:
        return {}

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        """The client's rows again, from the copies; what they were before is not used."""
        if context is None:
            raise ValueError(
                f"{self!r} draws copies of the client's examples; run it on the client"
            )
        changed = update.mask is not None or update.bound is not None
        if changed or not isinstance(update.law, Exact | Unknown):
            raise ValueError(
                f"{self!r} recomputes the gradient from noisy copies, and would undo what an "
                f"earlier link did to the rows; put {self!r} first"
            )
        copies, state = self.copies(context.batch, context.task, state, source)
        rows = client_rows(context.task, copies, context.batch.labels, update.unit).detach()
        return Update(rows, update.unit, update.examples, Unknown(REASON)), state

    def copies(
        self,
        batch: Batch,
        task: Task,
        state: Mapping[str, Tensor] | None,
        source: Source,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The copies (B, *S) of a batch's examples, and all copies to keep from now on."""
        kept = dict(state or {})
        low, high = task.input_range
        copies = []
        for example in batch.inputs:
            name = _digest(example)
            if name not in kept:
                noise = normal(example.shape, source, like=example)
                kept[name] = (example + self.noise_std * noise).detach().clamp(low, high)
            copies.append(kept[name].to(example))
        return torch.stack(copies), kept


def _digest(example: Tensor) -> str:
    """A digest of an example's values, whatever their type and device."""
    values = example.detach().to("cpu", torch.float64) + 0.0  # -0 is 0
    # The same values in another shape are another example.
    digest = hashlib.sha256(repr(tuple(example.shape)).encode())
    digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()
