"""What a client does with a measurement: decide, log, and release the few numbers it allows."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ClientMeter:
    """A client's own rules for what leaves, and where its measurements go.

    Attributes:
        policy: the rules.
        path: a JSON Lines file on the client for every reading; only its owner can read it.
        release: whether the client sends `Reading.release()`.
        logs: whether decisions go to the Python log, which some libraries send to the server.
    """

    policy: Policy
    path: Path | None = None
    release: bool = False
    logs: bool = True

    def __post_init__(self) -> None:
        if self.path is not None:
            files.check(self.path, key="client")

    def measured(
        self,
        task: Task,
        update: Update,
        batch: Batch,
        defense: Chain,
        findings: Sequence[LayerFinding],
        **more: Any,
    ) -> tuple[Reading | None, Decision]:
        """The reading of an update and the decision; no reading if it fails on a private update.

        Arguments are as in `meter.measure`.

        Raises:
            Exception: the measurement fails, and the defense gives no differential privacy.
        """
        try:
            reading = measure(
                task,
                update,
                source=stream(0, "meter"),
                batch=batch,
                defense=defense,
                policy=self.policy,
                findings=findings,
                **more,
            )
        except Exception as error:
            # an error that depends on the data would leak what the defense's noise does not cover
            if defense.guarantee is not Guarantee.DIFFERENTIAL_PRIVACY:
                raise
            logger.error("not measured: %s: %s", type(error).__name__, error)
            return None, self.policy.decide(UNDECIDED, findings, NOT_MEASURED)
        return reading, reading.decision

    def keep(
        self,
        who: str,
        number: int,
        decision: Decision,
        reading: Reading | None,
    ) -> None:
        """Log the decision of a round on the client, and append it with its reading to the file."""
        reasons = list(decision.reasons)
        if self.logs:
            verdict = "not measured"
            words = [*reasons]
            if reading is not None:
                verdict = reading.verdict
                words += {EXPERIMENT} & {*reading.notes}
            level = logging.INFO if decision.action == "send" else logging.WARNING
            remarks = "; ".join(words) or "no remarks"
            logger.log(level, "client %s: %s (%s): %s", who, decision.action, verdict, remarks)
        if self.path is not None:
            line: dict[str, Any] = {"action": decision.action, "reasons": reasons}
            line |= {} if reading is None else reading.record()
            files.append(self.path, line | {"schema": 1, "client": who, "round": number}, "client")

    def released(
        self,
        decision: Decision,
        reading: Reading | None,
    ) -> dict[str, float]:
        """The numbers that leave: those of the reading, or of a refusal without one."""
        if not self.release or (reading is None and not decision.refused):
            return {}
        if reading is None:
            # the keys of `Reading.release`: whoever reads them knows one form
            return {"released-best": 0.0, "released-exposed": 0.0, "released-refused": 1.0}
        return reading.release()

    def refusal(self, decision: Decision, reading: Reading | None) -> str:
        """The text of a refusal."""
        numbers = self.released(decision, reading)
        if not numbers:
            return REFUSED
        return f"{REFUSED}; released knowingly: {json.dumps(numbers, sort_keys=True)}"
