"""All comparisons behind claims 2-7, 2-8 and 2-10, and lower bounds, for the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean

from leakbound.report.equal_loss import at_equal_loss
from leakbound_reproductions.comparison import FAILS, HOLDS, UNDECIDED, Comparison
from leakbound_reproductions.paired import Gain, gain, logs, paired
from leakbound_reproductions.systematic_evaluation.measured import (
    ANY,
    HONEST,
    SERVERS,
    Floor,
    Measured,
    family,
)
from leakbound_reproductions.systematic_evaluation.parts import HONEST as ATTACKS

PRUNE = "prune"
IMPRINT = "robbing the fed"
Curve = list[tuple[Mapping[int, float], Mapping[int, float]]]


def comparisons(found: Measured) -> list[Comparison]:
    """All rows, by number."""
    rows: list[Comparison] = []
    for data in found.data:
        rows += features_help(found, data)
    for data in found.data:
        for batch in found.batches(data):
            for server in SERVERS:
                rows += pruning_is_best(found, data, batch, server)
    for data in found.data:
        rows += imprint_is_strongest(found, data, max(found.batches(data)))
    return [*rows, floors_hold([floor for data in found.data for floor in found.floors(data)])]


def features_help(found: Measured, data: str) -> list[Comparison]:
    """2-7: features make the attack more robust to clipping and noise, not to heavy pruning."""
    rows = []
    for defense, variants in found.ablation(data, longest=True).items():
        ours = variants.get(ATTACKS[0], {})
        without = variants.get("without features", {})
        if defense == "none" or len(set(ours) & set(without)) < 2:
            continue
        helped = paired(logs(without), logs(ours))
        heavy = family(defense) == PRUNE
        text = "do not lower the error" if heavy else "lower the error"
        word = helped.word
        if heavy:
            word = {HOLDS: FAILS, FAILS: HOLDS}.get(word, word)
        rows.append(
            Comparison(
                "2-7", f"{data}, {defense}: features {text}", f"lower by {spoken(helped)}", word
            )
        )
    return rows


def pruning_is_best(found: Measured, data: str, batch: int, server: str) -> list[Comparison]:
    """2-8: at equal training loss the strongest attack has the largest error under pruning."""
    curves = by_family(found, data, batch, server)
    if PRUNE not in curves:
        return []
    rows = []
    for name, curve in curves.items():
        if name == PRUNE or len(curve) < 2:
            continue
        values = at_equal_loss(curves[PRUNE], curve)
        more = gain(values) if values else None
        told = "their losses do not overlap" if more is None else spoken(more)
        rows.append(
            Comparison(
                "2-8",
                f"{data}, B = {batch}, {server} server: at equal loss the error is larger under "
                f"pruning than under {name}",
                told,
                UNDECIDED if more is None else more.word,
            )
        )
    return rows


def by_family(found: Measured, data: str, batch: int, server: str) -> dict[str, Curve]:
    """Losses and errors in dB of the attack chosen on the other rounds, level by level."""
    losses = found.trained(data)
    curves: dict[str, Curve] = {}
    for defense, own in found.strengths(data, batch, server).items():
        if losses.get(defense) and defense != "none":
            error = {seed: value**2 for seed, value in own.held_out.items()}
            curves.setdefault(family(defense), []).append((losses[defense], logs(error)))
    return curves


def imprint_is_strongest(found: Measured, data: str, batch: int) -> list[Comparison]:
    """2-10: Robbing the Fed is the best attack under little noise, and fails under masks."""
    everything = found.rounds(data, batch, ANY)
    honest = found.strengths(data, batch, HONEST)
    rows = []
    for defense, rounds in everything.items():
        little = defense in ("noise 0.001", "noise 0.01")
        masked = family(defense) in MASKS
        if not little and not masked:
            continue
        own = {seed: fmean(errors) for seed, errors in rounds.attacks.get(IMPRINT, {}).items()}
        if defense not in honest or len(own) < 2:
            continue
        others = {seed: value**2 for seed, value in honest[defense].held_out.items()}
        ahead = paired(logs(others), logs(own))
        text = "a lower error than the best honest attack"
        word = ahead.word
        if masked:
            text = "a higher error than the best honest attack"
            word = {HOLDS: FAILS, FAILS: HOLDS}.get(word, word)
        statement = f"{data}, B = {batch}, {defense}: Robbing the Fed has {text}"
        rows.append(Comparison("2-10", statement, f"lower by {spoken(ahead)}", word))
    return rows


MASKS = ("dropout", PRUNE)


def floors_hold(floors: Iterable[Floor]) -> Comparison:
    """No attack is better than the estimated lower bound, by the mean and interval over rounds."""
    compared = 0
    closest = math.inf
    beaten = []
    near = 0
    for floor in floors:
        if len(floor.floors) < 2:
            continue
        compared += 1
        over = [floor.errors[seed] - floor.floors[seed] for seed in floor.floors]
        closest = min(closest, fmean(floor.errors.values()) / fmean(floor.floors.values()))
        found = gain(over)
        near += found.low <= 0
        if found.high < 0:
            beaten.append(f"{floor.attack} at noise {floor.noise_std:g}")
    told = f"{compared} comparisons, {len(beaten)} below"
    told += f" ({', '.join(beaten)})" if beaten else ""
    if compared:
        told += f"; the closest error is {math.sqrt(closest):.3g} times the root of the bound"
    told += f"; {near} intervals include the bound" if near else ""
    word = UNDECIDED if near or not compared else HOLDS
    if beaten:
        word = FAILS
    statement = "no attack is better than the estimated lower bound (for images of the prior)"
    return Comparison("bounds", statement, told, word)


def spoken(found: Gain) -> str:
    """A difference in decibels with its interval."""
    return f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}] dB, n = {found.n}"
