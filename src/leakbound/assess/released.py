"""One release, and everything that bounds on it may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import Tensor

from leakbound._util.formats import rounded
from leakbound.assess.criterion import Criterion
from leakbound.client import batch_norms
from leakbound.core import Batch, NotApplicable, Task, ThreatModel, Update
from leakbound.defenses import Chain

T = TypeVar("T")
_MADE: WeakKeyDictionary[Batch, dict[Any, Any]] = WeakKeyDictionary()
Once = Callable[[Any, Callable[[], T]], T]


@dataclass(frozen=True, eq=False)
class Released:
    """One release, and everything that bounds on it may use.

    Attributes:
        task: the model as the attacker knows it.
        cohort: batch size of every client in the update.
        batch: its labels count as known. Its inputs are used only with `truth_known`, to compare
            what was sent with the result of the defense's `imitate`.
        public: public examples of the same kind.
        origins: (n,) the source of each public example, if several share one.
        persons: (B,) the person of each example of the batch; None if not known.
        same_law: p-value of a test that private and public examples have one distribution; None:
            no test.
        private: all private examples, including the batch, for a statement about these.
        fresh: the model was chosen neither from the public examples nor from private ones.
        key: name of the release, if several objects describe it: its bounds are computed once.
        once: cache by key; None caches with the public examples.
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
    persons: Tensor | None = None
    same_law: float | None = None
    private: Batch | None = None
    fresh: bool = False
    key: Any = None
    once: Once[Any] | None = None
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def cached(
        self,
        name: str,
        key: Any,
        make: Callable[[], T],
    ) -> T:
        """A value that belongs to this release, computed once."""
        if self.key is not None:
            return self.of_public((name, self.key, key), make)
        if (name, key) not in self._made:
            self._made[name, key] = make()
        return cast(T, self._made[name, key])

    def of_public(self, key: Any, make: Callable[[], T]) -> T:
        """A value computed from the public examples and the key, once as long as they live.

        The value must not hold the public batch, which would then never be freed.
        """
        if self.once is not None:
            return cast(T, self.once(key, make))
        public = self.public
        if public is None or public.inputs.is_inference() or public.labels.is_inference():
            return make()  # changes to them cannot be detected
        # The version counts too: examples that were overwritten in place are others.
        kept = _MADE.setdefault(public, {})
        place = key, public.inputs._version, public.labels._version
        if place not in kept:
            kept[place] = make()
        return cast(T, kept[place])

    @property
    def examples(self) -> int:
        return sum(self.cohort)


def refuse_side_information(released: Released) -> None:
    """Reject a release if the attacker knows more about the batch: no bound covers that."""
    if released.threat.statistics_known and batch_norms(released.task):
        raise NotApplicable(
            "the batch's statistics are sent with the update, without noise: no bound covers them, "
            "and no guarantee of the defense does"
        )


def refuse_other_distances(released: Released) -> None:
    """Reject a release if the criterion is not about the mean squared error."""
    domain = released.criterion.domain
    if not domain.distance_is_rmse:
        raise NotApplicable(
            "bounds on an error, and bounds that use a model, are for mean squared errors: none is "
            f"known for what is counted of a {domain.noun}"
        )


def refuse_known_parts(released: Released) -> None:
    """Reject a release if the attacker has parts of the examples: the bound is for strangers."""
    known = released.criterion.known
    if known is not None:
        raise NotApplicable(
            f"the attacker knows {known.text}: only the count of public examples covers that, and "
            "bounds that use a model, these examples or a mean error do not"
        )


def nine(value: float, *, up: bool) -> float:
    """Nine digits, rounded to the safe side: up for upper bounds."""
    return rounded(value, 9, up=up)
