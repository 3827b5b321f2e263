"""One release, and all that bounds on it may rest on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from leakbound._util.rounding import rounded
from leakbound.assess.criterion import Criterion
from leakbound.client import batch_norms
from leakbound.defenses import Chain
from leakbound.types import Batch, NotApplicable, Task, ThreatModel, Update

T = TypeVar("T")
_MADE: WeakKeyDictionary[Batch, dict[Any, Any]] = WeakKeyDictionary()
Once = Callable[[Any, Callable[[], T]], T]


@dataclass(frozen=True, eq=False)
class Released:
    """One release, and all that bounds on it may rest on.

    Attributes:
        task: the model as the attacker knows it.
        cohort: batch size of every client in the update.
        batch: its labels count as known; its inputs are looked at only with `truth_known`, to
            compare what was sent with what the defense's `imitate` gives.
        public: public examples of the same kind.
        origins: (n,) what each public example comes from, where several come from one.
        same_law: p-value of a test that private examples are drawn like public ones; None: no test.
        private: all private examples, of which the batch is some, for a statement about these.
        fresh: the model was not chosen from the public examples, nor from private ones.
        key: what names the release, so that a bound is computed once; None computes it anew.
        once: keeps what was made by its key; None keeps it with the public examples.
    """

    task: Task
    update: Update
    defense: Chain
    criterion: Criterion
    threat: ThreatModel
    cohort: tuple[int, ...]
    batch: Batch | None
    public: Batch | None
    truth_known: bool = True
    origins: Tensor | None = None
    same_law: float | None = None
    private: Batch | None = None
    fresh: bool = False
    key: Any = None
    once: Once[Any] | None = None

    def cached(self, name: str, key: Any, make: Callable[[], T]) -> T:
        """What belongs to this release, made once where it has a name."""
        return make() if self.key is None else self.of_public((name, self.key, key), make)

    def of_public(self, key: Any, make: Callable[[], T]) -> T:
        """What follows from the public examples and the key, made once as long as they live.

        What is made must not hold the public batch, which would then live for ever.
        """
        if self.once is not None:
            found: T = self.once(key, make)
            return found
        public = self.public
        if public is None or public.inputs.is_inference() or public.labels.is_inference():
            return make()  # whether they change cannot be seen
        kept = _MADE.setdefault(public, {})
        place = key, public.inputs._version, public.labels._version
        if place not in kept:
            kept[place] = make()
        made: T = kept[place]
        return made

    @property
    def examples(self) -> int:
        return sum(self.cohort)


def refuse_side_information(released: Released) -> None:
    """Refuse where the attacker knows more of the batch than the release: no bound covers that."""
    if released.threat.statistics_known and batch_norms(released.task):
        raise NotApplicable(
            "the batch's statistics leave beside the update, without noise: no bound covers them, "
            "and no guarantee of the defense does"
        )


def nine(value: float, *, up: bool) -> float:
    """Nine digits, rounded to the safe side: up for upper bounds."""
    return rounded(value, 9, up=up)
