"""What a malicious server gets from a training like the one behind a captured update.

It is simulated on public examples. Nothing of it is in the update, which an honest server got.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from leakbound._util.intervals import clopper_pearson
from leakbound.assess.criterion import Criterion
from leakbound.attacks import MeanImage, RobbingTheFed
from leakbound.attacks.planted import Front
from leakbound.captured.observe import InferredContext
from leakbound.core import Batch, NotApplicable, Server, ThreatModel
from leakbound.defenses import NoDefense
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

RUNS = 8
"""The most updates that are simulated."""
FEWEST_UNITS = 64
MOST_UNITS = 512
EACH = 8
"""The layer has so many units for each example, within limits: decoding takes their square."""
LARGEST = 1 << 27
"""Values of the layer up to which it is simulated."""
UPDATE = "update shows nothing of such a server"
"""What every sentence of a malicious server says of the captured update."""
FAULTS = (NotApplicable, ValueError, RuntimeError, TypeError, IndexError)
"""What a user's own model or loss may raise behind another layer, or with other labels."""


def simulated(
    inferred: InferredContext,
    halves: tuple[Batch | None, Batch | None],
    criterion: Criterion,
    seconds: float,
) -> str | None:
    """How many public examples a malicious server reconstructs from trainings like this one.

    `halves` are the public examples that it builds its layer from, and those that the simulated
    clients hold. No simulation begins after `seconds`. None if nothing was simulated: no public
    examples, an unknown rate or one for each tensor, a declared defense (against which a server
    would choose another gain), or a model that takes no such layer.
    """
    task = inferred.observation.task
    public, private = halves
    if public is None or private is None or inferred.declared.links:
        return None
    if inferred.observation.layer_rates:  # LARS and LAMB are not simulated
        return None
    if isinstance(task.model, Front) or not (inferred.rate_known or task.plan.is_gradient):
        return None
    size = inferred.observation.examples
    runs = min(RUNS, private.size // size)
    began = time.monotonic()
    right: list[int] = []
    with suppress(*FAULTS):
        while len(right) < runs and time.monotonic() < began + seconds:
            at = slice(len(right) * size, (len(right) + 1) * size)
            right.append(_reconstructed(inferred, public, _part(private, at), criterion))
    if not right:
        return None
    total = len(right) * size
    low, high = clopper_pearson(sum(right), total, 0.025)
    updates = "1 other update" if len(right) == 1 else f"{len(right)} other updates"
    examples = "1 example" if size == 1 else f"{size} examples"
    plan = task.plan
    steps = "1 step" if plan.steps == 1 else f"{plan.steps} steps"
    part = plan.batch_size or size
    batches = "" if part >= size else f" on {part} of them at a time"
    kind = str(task.parameters.dtype).removeprefix("torch.")
    return (
        f"A malicious server that sends this model behind its own layer reconstructs {sum(right)} "
        f"of {total} public examples ({100 * low:.0f} to {100 * high:.0f} %) from {updates} of "
        f"{examples}, simulated in {kind} with {steps} of {plan.rule}{batches}. This {UPDATE}."
    )


def _part(private: Batch, at: slice) -> Batch:
    order = permutation(private.size, stream(0, "malicious server")).to(private.labels.device)
    return Batch(private.inputs[order[at]], private.labels[order[at]])


def _reconstructed(
    inferred: InferredContext,
    public: Batch,
    private: Batch,
    criterion: Criterion,
) -> int:
    """How many of a client's examples the server reconstructs that no fixed answer does."""
    units = min(MOST_UNITS, max(FEWEST_UNITS, EACH * private.size))
    if units * public.inputs[0].numel() > LARGEST:
        raise NotApplicable("the layer is too large to be simulated")
    # The mean of a row of one-hot columns says little of the row.
    measure = "mean" if criterion.domain.distance_is_rmse else "random"
    attack = RobbingTheFed(bins=units, measure=measure)
    threat = ThreatModel(labels_known=False, server=Server.MALICIOUS)
    played = play(
        replace(inferred.observation.task, public=public),
        [private],
        NoDefense(),
        [stream(0, "malicious server", i) for i in range(2)],
        threat=threat,
        attack=attack,
        auxiliary=public,
    )
    seen = played.observation
    source = stream(0, "malicious server", "attack")
    answer, blind = (one(seen, source) for one in (attack, MeanImage()))
    truth = played.truth.inputs
    guess, baseline = (pair(played.truth, one, criterion.costs).inputs for one in (answer, blind))
    return sum(criterion.met(truth, guess, baseline))
