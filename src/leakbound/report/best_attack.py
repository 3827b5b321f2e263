"""S_D, the best-attack error of a defense: the smallest mean error that any attack reached.

The error of an attack in one round is the root of the mean squared error over the batch's examples,
relative to the inputs' range; its mean is over rounds, each with its own weights, batch and noise.
Attackers who must choose an attack before they know the truth get no less than the smallest of
these means. Nobody can choose the best attack for each example without the truth: that error is
given as `oracle`.

Source: Liu et al. 2025 (paper B), section 4.1, which prints the largest error where its text and
tables take the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from leakbound._util.decibels import mse_of_psnr
from leakbound._util.groups import grouped
from leakbound._util.intervals import student_reach
from leakbound.assess.record import ESTIMATE, Assessment, Training, Values
from leakbound.report.tables import LEVEL, Names, defined

__all__ = [
    "BASELINE",
    "BestAttackError",
    "Rounds",
    "best_attack_error",
    "measured",
    "rounds_of",
    "squared_errors",
]

BASELINE = "prior-only baseline"
"""The guess that sees no update, which every attacker has."""
Errors = Mapping[int, Sequence[float]]
"""Squared errors by round (its seed), one number an example."""


@dataclass(frozen=True)
class BestAttackError:
    """What the best of some attacks leaves.

    Attributes:
        rmse: S_D, the smallest mean error, in the units of the errors given.
        low, high: cover the smallest of the true means with 95 %, whichever attack has it.
        attack: the one that reached it; `BASELINE` where no attack beats the baseline.
        oracle: the mean error if the best attack were known for each example.
        baseline: the mean error of the prior-only baseline.
        held_out: by round, the error of the attack that is best on all other rounds: what choosing
            an attack beforehand gives, and what comparisons of defenses take.
        means: the mean error of every attack, and of the baseline.
        n: the rounds.
    """

    rmse: float
    low: float
    high: float
    attack: str
    oracle: float
    baseline: float
    held_out: Mapping[int, float]
    means: Mapping[str, float]
    n: int


@dataclass(frozen=True)
class Rounds:
    """Squared errors of some attacks on the same rounds, in squared units of the inputs' range.

    Attributes:
        left_out: how many rounds were left out, as some attack crashed or has not run there.
        missing: the attacks that have no result at all, and would apply as far as is known.
    """

    attacks: Mapping[str, Errors]
    baseline: Errors
    left_out: int
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class TightestBound:
    """A lower bound on the error of single examples, and how near the best attack comes.

    `root`: of the mean of the bounds over `n` rounds, relative to the inputs' range; `tightness`:
    the best attack's root mean squared error there over `root`, None where that is 0.
    """

    root: float
    tightness: float | None
    name: str
    prior: str
    n: int


@dataclass(frozen=True)
class BestAttackRow:
    """One defense: its S_D, and a bound or in a few words why none applies.

    `found` is None where no round has a result of every attack; `loss`: the mean training loss.
    """

    defense: str
    found: BestAttackError | None
    left_out: int
    missing: tuple[str, ...]
    bound: TightestBound | str
    loss: float | None

    @property
    def winner(self) -> str:
        return self.found.attack if self.found else "no round has a result of every attack"


@dataclass(frozen=True)
class BestAttackTable:
    model: str
    batch_size: int
    rows: tuple[BestAttackRow, ...]


def best_attack_error(
    attacks: Mapping[str, Errors],
    baseline: Errors,
) -> BestAttackError:
    """S_D of the attacks and the prior-only baseline, from squared errors by round.

    The interval joins t intervals of the means, and allows for the choice of the smallest: the
    smallest true mean belongs to one attack, so the least of the one-sided lower limits needs no
    correction; the least of the upper limits may be any attack's, so each has its share of the
    error (Bonferroni). The t intervals take errors as nearly normal: of three to six rounds of
    skewed errors the upper limit is too low in up to 8 % of cases (2.5 % by right). A round in
    which an attack did not apply counts with the baseline.

    Raises:
        ValueError: no round, or an attack with another number of examples.

    Example:
        >>> error = best_attack_error({"a": {0: [0.01], 1: [0.04]}}, {0: [0.09], 1: [0.09]})
        >>> error.attack, round(error.rmse, 3), round(error.baseline, 3), error.held_out
        ('a', 0.15, 0.3, {0: 0.1, 1: 0.2})
    """
    rounds = sorted(baseline)
    if not rounds:
        raise ValueError("baseline has no round; run at least one")
    tables = {BASELINE: dict(baseline)}
    for name, errors in attacks.items():
        tables[name] = {seed: errors.get(seed, baseline[seed]) for seed in rounds}
        for seed in rounds:
            if len(tables[name][seed]) != len(baseline[seed]):
                raise ValueError(
                    f"attack {name!r} has {len(tables[name][seed])} examples in round {seed}, the "
                    f"baseline {len(baseline[seed])}; give errors of the same examples"
                )
    errors_of = {name: [_root(table[seed]) for seed in rounds] for name, table in tables.items()}
    means = {name: fmean(values) for name, values in errors_of.items()}
    # Of equal means, the baseline: then no attack beats it.
    best = min(means, key=lambda name: (means[name], name != BASELINE))
    tail = (1 - LEVEL) / 2
    low = min(means[name] - student_reach(values, tail) for name, values in errors_of.items())
    high = min(
        means[name] + student_reach(values, tail / len(errors_of))
        for name, values in errors_of.items()
    )
    examples = [zip(*(t[seed] for t in tables.values()), strict=True) for seed in rounds]
    nearest = [_root([min(errors) for errors in some]) for some in examples]
    return BestAttackError(
        rmse=means[best],
        # Student's interval may go below 0; an error cannot.
        low=max(0.0, low),
        high=high,
        attack=best,
        oracle=fmean(nearest),
        baseline=means[BASELINE],
        held_out={seed: _held_out(errors_of, i) for i, seed in enumerate(rounds)},
        means=means,
        n=len(rounds),
    )


def rounds_of(
    attacks: Mapping[str, Iterable[Assessment]],
    errors_of: Callable[[Values], list[float]] | None = None,
) -> Rounds:
    """The errors of attacks, from their experiments on one configuration.

    A round counts if every attack ran or did not apply there; else a crash would look like a weak
    attack. What never ran is no attack here. `errors_of`: the squared errors of an experiment's
    scores; by default `squared_errors`, and only experiments whose scores are PSNRs count.
    """
    known = measured if errors_of is None else scored
    of = errors_of or squared_errors
    every = {name: {a.seed: a for a in some} for name, some in attacks.items()}
    seeds = sorted({seed for some in every.values() for seed in some})
    ran = {name: some for name, some in every.items() if any(map(known, some.values()))}
    missing = tuple(
        name
        for name, some in every.items()
        if name not in ran and any(a.status != "not_applicable" for a in some.values())
    )
    # A crash in one round would otherwise look like a weak attack.
    kept = [seed for seed in seeds if _whole([some.get(seed) for some in ran.values()], known)]
    errors = {
        name: {seed: of(some[seed].scores) for seed in kept if known(some.get(seed))}
        for name, some in ran.items()
    }
    baseline = {
        seed: next(of(c[seed].baseline) for c in ran.values() if known(c[seed])) for seed in kept
    }
    return Rounds(errors, baseline, len(seeds) - len(kept), missing)


def measured(assessment: Assessment | None) -> bool:
    """Whether an experiment has an error for every example, which other scores than PSNR lack."""
    return assessment is not None and assessment.criterion.has_errors and scored(assessment)


def scored(assessment: Assessment | None) -> bool:
    """Whether an experiment has a score for every example, and one of the prior-only baseline."""
    if assessment is None or assessment.status != "ok":
        return False
    return bool(assessment.scores) and None not in (*assessment.scores, *assessment.baseline)


def squared_errors(psnrs: Values) -> list[float]:
    """The squared error of each example, in squared units of the inputs' range."""
    return [mse_of_psnr(psnr) for psnr in defined(psnrs)]


def best_attack_tables(
    assessments: Iterable[Assessment],
    trainings: Iterable[Training],
    names: Names,
) -> tuple[BestAttackTable, ...]:
    losses = grouped(
        ((names.model(t), names.defense(t)), t.training_loss)
        for t in trainings
        if t.status == "ok" and t.training_loss is not None
    )
    by_configuration = grouped((names.key(a), a) for a in assessments)
    rows = grouped(
        ((model, size), _row(defense, experiments, names, losses.get((model, defense))))
        for (model, size, defense), experiments in by_configuration.items()
    )
    made = [BestAttackTable(*key, tuple(experiments)) for key, experiments in rows.items()]
    return tuple(one for one in made if any(row.found for row in one.rows))


def _row(
    defense: str,
    experiments: Sequence[Assessment],
    names: Names,
    losses: Sequence[float] | None,
) -> BestAttackRow:
    rounds = rounds_of(grouped((names.attack(a), a) for a in experiments))
    loss = None if losses is None else fmean(losses)
    if not rounds.baseline:
        return BestAttackRow(defense, None, rounds.left_out, rounds.missing, "–", loss)
    error = best_attack_error(rounds.attacks, rounds.baseline)
    winner = {**rounds.baseline, **rounds.attacks.get(error.attack, {})}
    held = [a for a in experiments if a.seed in rounds.baseline and measured(a)]
    bound = _tightest(held, winner)
    return BestAttackRow(defense, error, rounds.left_out, rounds.missing, bound, loss)


def _tightest(
    experiments: Sequence[Assessment],
    winner: Errors,
) -> TightestBound | str:
    """Of several bounds on all attackers the one in most rounds, of these the highest.

    Where the attacks' experiments of one round hold different bounds (a malicious server changes
    the model), the lowest covers them all.
    """
    # Pairing in the best order lowers a batch's error below what the bound is on.
    if any(len(errors) > 1 for errors in winner.values()):
        return "single examples only"
    bounds = [(a.seed, bound) for a in experiments for bound in a.bounds if bound.on_error]
    known = grouped(((b.name, b.prior), (seed, b.psnr)) for seed, b in bounds if b.covers == "all")
    made = []
    for kind, values in known.items():
        by_round = grouped(
            (seed, 0.0 if psnr is None else mse_of_psnr(psnr)) for seed, psnr in values
        )
        # A malicious server's attacks face other models, and the lowest bound covers them all.
        root = math.sqrt(fmean(min(levels) for levels in by_round.values()))
        error = math.sqrt(fmean(value for seed in by_round for value in winner[seed]))
        made.append(TightestBound(root, error / root if root else None, *kind, len(by_round)))
    if made:
        return max(made, key=lambda one: (one.n, one.root))
    if not bounds:
        return "none"
    proved_for = dict.fromkeys(b.covers for _, b in bounds if b.covers != ESTIMATE)
    return f"only for {' and '.join(proved_for)} attackers" if proved_for else "estimate only"


def _whole(
    round_: Sequence[Assessment | None],
    known: Callable[[Assessment | None], bool],
) -> bool:
    """Whether every attack ran or did not apply in a round, at least one ran, on equal examples."""
    ran = [a for a in round_ if a is not None and known(a)]
    idle = [a for a in round_ if a is not None and a.status == "not_applicable"]
    return len({len(a.scores) for a in ran}) == 1 and len(ran) + len(idle) == len(round_)


def _held_out(errors: Mapping[str, Sequence[float]], at: int) -> float:
    def elsewhere(name: str) -> float:
        return math.fsum(value for i, value in enumerate(errors[name]) if i != at)

    return errors[min(errors, key=elsewhere)][at]


def _root(squares: Sequence[float]) -> float:
    return math.sqrt(fmean(squares))
