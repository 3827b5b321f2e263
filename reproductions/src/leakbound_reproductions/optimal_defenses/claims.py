"""The paper's claims 0-1 to 0-5, each judged by measured points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leakbound.report.equal_loss import at_equal_loss
from leakbound_reproductions.optimal_defenses.points import Key, Point
from leakbound_reproductions.optimal_defenses.settings import PAPER
from leakbound_reproductions.paired import Gain, gain, logs, paired

LAYERS = "layers,energy"
NOISES = (0.002, 0.005, 0.02, 0.05, 0.1)
COSTS = (0.002, 0.005, 0.02, 0.1)
"""Levels of equal second-order cost."""
RATES = (0.5, 0.7, 0.8, 0.9)
WHEN = {False: "after 5 rounds", True: "after 40 rounds"}
WAYS = (("adam", False), ("adam", True), ("sgd", True))


@dataclass(frozen=True)
class Row:
    """One comparison: what was claimed, what was measured, and its verdict."""

    claim: str
    statement: str
    attacker: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Study:
    """Points against the naive attacker of the paper and against all attacks that know."""

    naive: Mapping[Key, Point]
    aware: Mapping[Key, Point]
    sgd: Mapping[Key, Point]

    def error(self, key: Key, attacker: str) -> dict[int, float]:
        """Mean squared errors by seed: the paper's attack, or the best of all that know."""
        if attacker == "naive":
            return self.naive[key].mse[PAPER]
        return self.aware[key].strongest()

    def loss(self, key: Key, *, optimizer: str = "adam", late: bool = False) -> dict[int, float]:
        """Training loss by seed after 5 rounds, or after the last."""
        point = (self.aware if optimizer == "adam" else self.sgd)[key]
        return point.late if late else point.early


def rows(study: Study) -> list[Row]:
    """All comparisons."""
    found: list[Row] = []
    for attacker in ("naive", "aware"):
        found += _pruning(study, attacker)
        found += _noise(study, attacker)
        found += _public(study, attacker)
    return found + _training(study)


def _pruning(study: Study, attacker: str) -> list[Row]:
    found = []
    for name in ("local_optimal_pruning", "optimal_pruning"):
        ours = _rates(name)
        theirs = _rates("magnitude_pruning")
        for late in (False, True):
            same = _equal_loss(study, ours, theirs, attacker, "adam", late=late)
            text = f"{name}: higher error than magnitude at equal loss {WHEN[late]}"
            found.append(_row("0-1", text, attacker, same))
        for ours_at, theirs_at in ((0.7, 0.9), (0.8, 0.9)):
            a = Key(name, "rate", ours_at)
            b = Key("magnitude_pruning", "rate", theirs_at)
            error = paired(logs(study.error(a, attacker)), logs(study.error(b, attacker)))
            loss = paired(study.loss(b), study.loss(a))
            found.append(
                _both(
                    "0-1",
                    f"{name} {ours_at:.0%} beats magnitude {theirs_at:.0%} on both axes",
                    attacker,
                    error,
                    loss,
                )
            )
        for rate in RATES:
            a = Key(name, "rate", rate)
            b = Key("magnitude_pruning", "rate", rate)
            error = paired(logs(study.error(a, attacker)), logs(study.error(b, attacker)))
            text = f"{name}: higher error than magnitude at {rate:.0%}"
            found.append(_row("0-2", text, attacker, error))
    return found


def _noise(study: Study, attacker: str) -> list[Row]:
    found = []
    for by, words in (("noise_std", "equal RMS noise"), ("utility_std", "equal U2")):
        levels = COSTS if by == "utility_std" else NOISES
        for level in levels:
            a = Key("local_optimal_noise", by, level)
            b = Key("gaussian_noise", "noise_std", level)
            error = paired(logs(study.error(a, attacker)), logs(study.error(b, attacker)))
            loss = paired(study.loss(b), study.loss(a))
            text = f"local_optimal_noise at {words} {level:g}: error and loss no worse"
            found.append(_both("0-4", text, attacker, error, loss))
        ours = [Key("local_optimal_noise", by, level) for level in levels]
        theirs = [Key("gaussian_noise", "noise_std", level) for level in NOISES]
        for optimizer, late in WAYS:
            same = _equal_loss(study, ours, theirs, attacker, optimizer, late=late)
            text = (
                f"local_optimal_noise ({words}): higher error at equal loss {WHEN[late]}, "
                f"{optimizer}"
            )
            found.append(_row("0-4", text, attacker, same))
    return found


def _public(study: Study, attacker: str) -> list[Row]:
    """Not claimed by the paper: the forms that depend only on public data."""
    theirs = [Key("gaussian_noise", "noise_std", level) for level in NOISES]
    forms = {
        "optimal_noise (utility rule)": [Key("optimal_noise", "noise_std", x) for x in NOISES],
        "optimal_noise (energy, layers)": [
            Key("optimal_noise", "noise_std", x, LAYERS) for x in NOISES
        ],
    }
    found = []
    for words, ours in forms.items():
        for optimizer, late in WAYS:
            same = _equal_loss(study, ours, theirs, attacker, optimizer, late=late)
            text = f"{words}: higher error than equal noise at equal loss {WHEN[late]}, {optimizer}"
            found.append(_row("public", text, attacker, same))
    return found


def _training(study: Study) -> list[Row]:
    found = []
    for optimizer in ("adam", "sgd"):
        for name in ("local_optimal_pruning", "optimal_pruning"):
            ours = study.loss(Key(name, "rate", 0.8), optimizer=optimizer, late=True)
            rate = Key("magnitude_pruning", "rate", 0.9)
            theirs = study.loss(rate, optimizer=optimizer, late=True)
            text = f"{name} 80% trains faster than magnitude 90%, {optimizer}"
            found.append(_row("0-3", text, "", paired(theirs, ours), unit="loss"))
        for name in ("local_optimal_noise", "optimal_noise"):
            for level in NOISES[2:]:
                ours = study.loss(Key(name, "noise_std", level), optimizer=optimizer, late=True)
                equal = Key("gaussian_noise", "noise_std", level)
                theirs = study.loss(equal, optimizer=optimizer, late=True)
                text = f"{name} trains faster than equal noise of RMS {level:g}, {optimizer}"
                found.append(_row("0-4", text, "", paired(theirs, ours), unit="loss"))
    return found


def _rates(name: str) -> list[Key]:
    return [Key(name, "rate", rate) for rate in RATES]


def _equal_loss(
    study: Study,
    ours: list[Key],
    theirs: list[Key],
    attacker: str,
    optimizer: str,
    *,
    late: bool,
) -> Gain | None:
    pairs = [
        [
            (study.loss(key, optimizer=optimizer, late=late), logs(study.error(key, attacker)))
            for key in keys
        ]
        for keys in (ours, theirs)
    ]
    values = at_equal_loss(*pairs)
    return gain(values) if len(values) >= 2 else None


def _row(claim: str, text: str, attacker: str, found: Gain | None, *, unit: str = "dB") -> Row:
    if found is None:
        nothing = "their mean losses do not overlap"
        return Row(claim, text, attacker, nothing, "undecided")
    return Row(claim, text, attacker, _number(found, unit), found.word)


def _both(claim: str, text: str, attacker: str, error: Gain, loss: Gain) -> Row:
    words = (error.word, loss.word)
    if words == ("holds", "holds"):
        word = "holds"
    else:
        word = "does not hold" if "does not hold" in words else "undecided"
    measured = f"error {_number(error, 'dB')}, loss {_number(loss, 'lower')}"
    return Row(claim, text, attacker, measured, word)


def _number(found: Gain, unit: str) -> str:
    digits = 2 if unit == "dB" else 4
    return (
        f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}] {unit}, "
        f"n = {found.n}"
    )
