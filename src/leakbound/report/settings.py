"""What a defense setting shows over some models and batch sizes: the worst of everything.

The chart of the report, the sign-off page and the model card show the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from leakbound._util.groups import grouped
from leakbound.assess.record import PROTECTS, VERDICTS, Basis, Verdict
from leakbound.assess.verdict import together
from leakbound.report.tables import (
    NO_DEFENSE,
    Configuration,
    MeanInterval,
    ReportPart,
    RunSummary,
    ShareInterval,
    TrainingCost,
    defined,
    largest_share,
    title,
)
from leakbound.report.template import interval

CONDITIONS: Final[dict[Basis, str]] = {
    "sample": "",
    "known parts": "with the known parts",
    "examples": "for these very examples",
    "known model": "from this model’s updates",
    "fitted model": "under a model",
}
"""Under what else a limit holds, by what it rests on."""


class Limit(ReportPart, frozen=True):
    """A probability of reconstruction that no attacker exceeds, under a condition or none ("")."""

    probability: float
    condition: str


class DeclaredTraining(ReportPart, frozen=True):
    """What a deployment file says of all rounds of a training, at the run's threshold.

    `noise_multiplier`: that of the training. `holds`: whether every bound of `says` is at most what
    the run accepts. `why`: what is against it; empty if it holds.
    """

    file: str
    rounds: int | None
    noise_multiplier: float | None
    holds: bool
    says: str
    why: str


class SettingRow(ReportPart, frozen=True):
    """One defense setting over some models and batch sizes: the worst of everything.

    `reconstructed`: by the attack with the largest share, on any configuration. `limits`: empty
    where some configuration has none. `attained`: a malicious server's attack succeeds at least so
    often. `cost`: test accuracy lost against no defense; null where a model was not trained, or
    where the training without a defense did not beat the majority class (`unskilled`). `auc_cost`:
    the same of the area under the ROC curve.
    """

    defense: str
    verdict: Verdict
    configurations: int
    reconstructed: ShareInterval | None = None
    proved: int = 0
    attained: float | None = None
    limits: tuple[Limit, ...] = ()
    cost: MeanInterval | None = None
    auc_cost: MeanInterval | None = None
    unskilled: bool = False

    @property
    def undefended(self) -> bool:
        return self.defense == title(NO_DEFENSE)

    @property
    def cost_unknown(self) -> bool:
        """Whether a defense's cost is not known because no training shows any skill."""
        return self.unskilled and not self.undefended

    @property
    def measured(self) -> str:
        """The share of reconstructed examples, its interval and n, as text."""
        share = self.reconstructed
        if share is None:
            return "proved by the update" if self.proved else "not measured"
        return f"{share.hits} of {share.n} ({interval(share.low, share.high)})"

    @property
    def named_limits(self) -> tuple[Limit, ...]:
        """Two at most: that with the fewest conditions, and that of the verdict or the lowest.

        Example:
            >>> conditions = ("", "from this model’s updates", "under a model")
            >>> every = tuple(map(Limit, (0.2, 0.04, 0.03), conditions))
            >>> row = SettingRow("a", "protected from an honest server", 1, limits=every)
            >>> [one.probability for one in row.named_limits]
            [0.2, 0.04]
            >>> row = SettingRow("a", "undecided", 1, limits=every)
            >>> [one.probability for one in row.named_limits]
            [0.2, 0.03]
        """
        words = {CONDITIONS[basis]: word for basis, word in PROTECTS.items()}
        behind = [one for one in self.limits if words.get(one.condition) == self.verdict]
        return tuple(dict.fromkeys([*self.limits[:1], *(behind or self.limits[-1:])]))


def setting_row(
    defense: str,
    rows: Sequence[Configuration],
    reconstructed: ShareInterval | None,
    costs: Sequence[TrainingCost | None],
) -> SettingRow:
    """The worst of some configurations and of the trainings of their models."""
    bounds = [row.success_bound for row in rows if row.success_bound]
    return SettingRow(
        defense,
        together(row.verdict for row in rows),
        len(rows),
        reconstructed=reconstructed,
        proved=sum(row.proved for row in rows),
        attained=max(defined(bound.attained for bound in bounds), default=None),
        limits=limits(rows),
        cost=_highest([None if cost is None else cost.lost for cost in costs]),
        auc_cost=_highest([None if cost is None else cost.auc_lost for cost in costs]),
        unskilled=any(cost.unskilled for cost in costs if cost is not None),
    )


def by_setting(summary: RunSummary) -> list[SettingRow]:
    """Every defense setting over all models and batch sizes, in the order of the records."""
    names = summary.names
    ran = grouped((names.defense(a), a) for a in summary.assessments if a.status == "ok")
    settings = []
    for defense, rows in grouped((row.defense, row) for row in summary.configurations).items():
        matched = grouped(
            ((names.key(a), names.attack(a)), hit)
            for a in ran.get(defense, ())
            for hit in a.matched
        )
        costs = [summary.costs.get((row.model, defense)) for row in rows]
        settings.append(setting_row(defense, rows, largest_share(matched)[1], costs))
    return settings


def _highest(costs: Sequence[MeanInterval | None]) -> MeanInterval | None:
    """The highest cost; None unless all are known."""
    # The worst of all models is not known while one of them is not.
    known = [one for one in costs if one is not None]
    if len(known) < len(costs):
        return None
    return max(known, key=lambda one: one.mean, default=None)


def limits(rows: Sequence[Configuration]) -> tuple[Limit, ...]:
    """What no attacker exceeds on any of the configurations: unknown unless known on all.

    Sorted by what they need, the fewest conditions first; each is lower than those before it.
    """
    known: list[dict[Basis, float]] = []
    for row in rows:
        bound = row.success_bound
        if bound is None or bound.experiments < bound.of_experiments:
            return ()
        known.append(dict([(bound.basis, bound.probability), *bound.others]))
    on_all = [
        Limit(max(one[basis] for one in known), words)
        for basis, words in CONDITIONS.items()
        if all(basis in one for one in known)
    ]
    below = [one for one in on_all if one.probability < 1]
    # A limit with more conditions says something only where it is lower.
    return tuple(
        one
        for place, one in enumerate(below)
        if all(one.probability < stronger.probability for stronger in below[:place])
    )


def safety(row: SettingRow) -> tuple[float, ...]:
    """Rises with how safe a setting is, then with how cheap."""
    share = row.reconstructed.value if row.reconstructed else 0.0
    limit = min((one.probability for one in row.limits), default=1.0)
    return VERDICTS.index(row.verdict), -share, -limit, -(row.cost.mean if row.cost else 2.0)
