"""What a client does with a measurement: decide, log, and release the few numbers it allows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leakbound._util import files
from leakbound.assess.record import UNDECIDED
from leakbound.core import Batch, Guarantee, Task, Update
from leakbound.defenses.base import Chain
from leakbound.inspection import LayerFinding
from leakbound.meter.reading import EXPERIMENT, Decision, Policy, Reading, measure
from leakbound.randomness import stream

REFUSED = "refused by the client's policy"
BROKEN = "the leak meter could not evaluate the update; the client's log says why"
NOT_MEASURED = "the update could not be measured, and no bound is given"
logger = logging.getLogger("leakbound.meter")


def settle(
    task: Task,
    update: Update,
    batch: Batch,
    policy: Policy,
    defense: Chain,
    findings: Sequence[LayerFinding],
    **more: Any,
) -> tuple[Reading | None, Decision]:
    """The reading of an update and the decision; no reading if it fails on a private update.

    Arguments are as in `measure`.

    Raises:
        Exception: the measurement fails, and the defense gives no differential privacy.
    """
    given = {"batch": batch, "defense": defense, "policy": policy, "findings": findings}
    try:
        reading = measure(task, update, source=stream(0, "meter"), **given, **more)  # type: ignore[arg-type]
    except Exception as error:
        # an error that depends on the data would leak what the defense's noise does not cover
        if defense.guarantee is not Guarantee.DIFFERENTIAL_PRIVACY:
            raise
        logger.error("not measured: %s: %s", type(error).__name__, error)
        return None, policy.decide(UNDECIDED, findings, NOT_MEASURED)
    return reading, reading.decision


def note(who: str, decision: Decision, reading: Reading | None) -> None:
    """Log a decision on the client."""
    verdict = "not measured" if reading is None else reading.verdict
    reasons = list(decision.reasons)
    if reading is not None and EXPERIMENT in reading.notes:
        reasons.append(EXPERIMENT)
    words = "; ".join(reasons) or "no remarks"
    level = logging.INFO if decision.action == "send" else logging.WARNING
    logger.log(level, "client %s: %s (%s): %s", who, decision.action, verdict, words)


def keep(path: Path, who: str, number: int, decision: Decision, reading: Reading | None) -> None:
    """Append the decision and the reading of a round to a JSON Lines file on the client."""
    line: dict[str, Any] = {"action": decision.action, "reasons": list(decision.reasons)}
    line |= {} if reading is None else reading.record()
    files.append(path, line | {"schema": 1, "client": who, "round": number}, "client")


def released(reading: Reading | None) -> dict[str, float]:
    """`Reading.release`, also of a refusal without a reading."""
    if reading is None:
        return {"released-best": 0.0, "released-exposed": 0.0, "released-refused": 1.0}
    return reading.release()
