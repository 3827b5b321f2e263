"""Which of a model's trained tensors an update holds in a usable form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leakbound import tensors
from leakbound.captured.capture import Capture
from leakbound.core import Task

SHOWN = 10
"""The most tensors that a note names."""
KEPT = (
    "Simulated training keeps them as they were before; if the client trained them, "
    "reconstructions explain less of the update"
)


@dataclass(frozen=True)
class LeftOut:
    """Trained tensors that no attack can use: `absent` were not sent, `spoiled` are not finite."""

    absent: tuple[str, ...]
    spoiled: tuple[str, ...]
    total: int

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.absent, *self.spoiled)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each reason."""
        reasons = (
            (self.absent, "are not in the file, so they were not sent"),
            (self.spoiled, "hold NaN or infinite values, or values beyond the model's type"),
        )
        return tuple(
            f"{len(names)} of {self.total} trained tensors {reason}: {_listed(names)}. They are "
            f"left out as if frozen, and the others are attacked. {KEPT}"
            for names, reason in reasons
            if names
        )


def left_out(capture: Capture, task: Task) -> LeftOut:
    """What an attack on this update has to leave out.

    Raises:
        ValueError: nothing is left.
    """
    own = capture.update
    what = capture.name
    found = LeftOut(
        tensors.absent(task, own, what=what), tensors.spoiled(task, own, what=what), len(task.names)
    )
    if found.spoiled and len(found.names) == found.total:
        raise ValueError(
            f"{what} has NaN or infinite values in every tensor that was sent "
            f"({_listed(found.spoiled)}), so no value is left to attack; give a file that is whole"
        )
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
