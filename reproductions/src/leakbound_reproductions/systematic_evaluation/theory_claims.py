"""Claims 2-1 to 2-4, 2-6 and 2-9 of paper B, and a remark on 2-5, from the rows of the sweep.

The paper's bounds are orders up to logarithms (its tilde), without constants; its attack is the
tensor method of its Section B.1 ("printed"). The slopes and ratios of each claim follow from there,
and so do the tolerances. Claim 2-1, a theorem on the printed attack, is judged by that attack. The
claims on defenses are judged by the library's, the stronger of the two, as the paper's eq. 3
requires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leakbound_reproductions.by_seed import Part, claimed, remarks, repeated
from leakbound_reproductions.claim import Claim, Mark
from leakbound_reproductions.systematic_evaluation.sweep import (
    CLIP_FACTOR,
    CLIPS,
    INPUTS,
    LEARNING,
    LOUD,
    LOUD_WIDTH,
    NOISES,
    RATES,
    WIDTHS,
    Row,
    Slope,
    Withheld,
    interval,
    loud,
    over_inputs,
    slope,
    slopes,
)
from leakbound_reproductions.systematic_evaluation.trial import Cell

WORKS = 0.5
"""Median error up to which an attack counts as working; above, errors saturate."""
TILDE = 1 / math.log(4096)
"""How far a slope may lie from its order: one logarithm more or less, which the tilde hides,
changes the slope in M by 1 / log M, here at the middle width."""
LOGARITHM = f"{TILDE:.2f}, one logarithm at M = 4,096"
STRONGER = "the library's attack (the stronger one, as eq. 3 requires)"
ALIKE = 1.25
"""Factor within which errors of two networks count as equal if the paper writes "about"."""
CLIPPED = 1.023
"""The paper's own error under clipping relative to none (table 2, B = 8: 0.179 and 0.175)."""
AGGREGATED = {3: 1.16, 5: 1.28}
"""The same for local steps, rounded up: table 2 itself reaches 1.154 with three (B = 8: 0.202 /
0.175) and 1.274 with five (B = 8: 0.223 / 0.175)."""
TABLE_2 = {3: "0.181 / 0.171 to 0.202 / 0.175", 5: "0.210 / 0.171 to 0.223 / 0.175"}
"""Errors under local steps relative to one step."""
PRUNED = 1.45
"""The smallest factor by which pruning at 0.7 raises the feature error in table 2 (B = 1)."""
IDENTITY = (
    "The last finding is an identity: the update, times |G| / C, has the same distribution as "
    "that of the other configuration. It compares two sets of draws and does not test the paper"
)
SERIES = (("relu", 1), ("relu", 2), ("cubic", 2), ("tanh", 1))
SMALL = LEARNING[:2]
"""Learning rates, over M, that are judged as small."""
MOVING = (("local_steps", "one rate"), ("mean_field_steps", "w_j trained too"))
INFINITE = math.inf


class Rows:
    """The rows of a sweep by experiment; `again`: of experiments measured a second time."""

    def __init__(self, rows: Sequence[Row], again: Sequence[Row] = ()) -> None:
        self.all = tuple(rows)
        self._by = {row.cell: row for row in rows}
        self._again = {row.cell: row for row in again}

    def __getitem__(self, cell: Cell) -> Row:
        return self._by[cell]

    @property
    def seeds(self) -> str:
        """How many seeds a row has; those that claims need to a few percent have more."""
        counts = {len(row.errors) for row in self.all}
        ends = " to ".join(str(n) for n in sorted({min(counts), max(counts)}))
        return f"{ends} seeds per configuration"

    def slopes(self, part: Part, levels: Sequence[float], cells: Sequence[Cell]) -> list[Part]:
        """The part with slopes of log error in log level, of repeated experiments; or none."""
        if not all(cell in self._again for cell in cells):
            return []
        return [replace(part, values=slopes(levels, [self._again[cell].logs for cell in cells]))]

    def of(self, cells: Sequence[Cell]) -> list[Row]:
        """The rows of those experiments that were measured."""
        return [self._by[cell] for cell in cells if cell in self._by]

    def widths(self, activation: str, batch: int, method: str = "library") -> list[Row]:
        """The rows of one series by width."""
        cells = [Cell(activation, width=m, batch=batch, method=method) for m in WIDTHS]
        return self.of(cells)


def claims(rows: Rows, shares: Sequence[Withheld]) -> list[Claim]:
    """All six."""
    same = replace(clipping(rows), marks=(Mark.THEOREM,))
    found = [rate(rows), same, noise(rows), dropout(rows)]
    return [*found, local_steps(rows), withheld_jump(shares)]


def over_width(rows: Rows) -> dict[str, Slope]:
    """The slopes of log error in log M of both attacks, where the attack works."""
    found = {}
    for method in ("library", "printed"):
        for activation, batch in SERIES:
            series = _working(rows.widths(activation, batch, method))
            if len(series) >= 2:
                found[f"{method}, {activation}, B = {batch}"] = slope(series, lambda c: c.width)
    return found


def rate(rows: Rows) -> Claim:
    """2-1: sqrt(n / M), and growing with B, for the attack as printed, up to the signs.

    In M: ReLU with one input, which needs no third moment, and the activation with the moments of
    orders 2 and 3 that the proofs treat. In n: one input, so that B <= n^(1/4), as asked there.
    """
    parts = []
    for activation, batch in (SERIES[0], SERIES[2]):
        series = _working(rows.widths(activation, batch, "printed"))
        text = f"{activation}, B = {batch}: slope of log error in log M is -1/2"
        widths = [r.cell.width for r in series]
        logs = [r.logs for r in series]
        values: Sequence[float] | NDArray[Any] = slopes(widths, logs) if len(series) > 1 else ()
        parts.append(Part(text, values, (-0.5 - TILDE, -0.5 + TILDE)))
    each = slopes(INPUTS, [rows[cell].logs for cell in over_inputs()])
    text = "relu, B = 1: slope of log error in log n is 1/2"
    parts.append(Part(text, each, (0.5 - TILDE, 0.5 + TILDE)))
    second = rows.slopes(parts[-1], INPUTS, over_inputs())
    one, two = (rows[Cell(width=WIDTHS[-1], batch=b, method="printed")].logs for b in (1, 2))
    text = f"relu, M = {WIDTHS[-1]}: error at B = 2 relative to B = 1 is above 1"
    parts.append(Part(text, two - one, (1.0, INFINITE), ratio=True))
    used = repeated(parts, second)
    return claimed(
        "2-1",
        "Without a defense, the error of the tensor attack grows as sqrt(n / M), and it is "
        "larger for larger batches.",
        "theorem 3.1, table 1",
        _scale(
            rows,
            "the attack as printed, which the theorem is about (the better sign counts), n = 20 "
            "to 80, M = 512 to 32,768. The theorem is an upper bound; equality is tested, "
            f"because section 3 calls the analysis tight. Tolerance of slopes: {LOGARITHM}",
        ),
        used.parts,
        remarks(used.told, _left_out(rows)),
    )


def _left_out(rows: Rows) -> str:
    """The slope in M of the series without a finding: the moments of ReLU with two inputs."""
    found = over_width(rows)
    printed, ours = (
        str(found.get(f"{method}, relu, B = 2", f"none (errors above {WORKS:g})"))
        for method in ("printed", "library")
    )
    return (
        "ReLU with two inputs is not judged: the proofs leave out its moments of orders 2 and 4 "
        f"as similar to those of 2 and 3. There the printed attack has the slope {printed} in log "
        f"M, the library's {ours}, over the widths with errors up to {WORKS:g}"
    )


def clipping(rows: Rows) -> Claim:
    """2-2: clipping "has no defensive effect": the same error at every threshold."""
    parts = [
        Part(
            f"error at |G| / C = {level:g} relative to no clipping is 1",
            rows[Cell(defense="clipping", level=level)].logs - rows[Cell()].logs,
            (1 / CLIPPED, CLIPPED),
            ratio=True,
            paper="0.179 / 0.175 = 1.02 (table 2, B = 8)",
        )
        for level in CLIPS
    ]
    return claimed(
        "2-2",
        "Clipping alone does not change what the tensor attack finds.",
        "section 3.2, table 2",
        _scale(
            rows,
            f"n = 20, M = 8,192, B = 2, {STRONGER}. Tolerance: 2.3 %, the largest change under "
            "clipping in table 2",
        ),
        parts,
        "The attack computes eigenvectors, which no positive factor changes. Only rounding remains",
    )


def noise(rows: Rows) -> Claim:
    """2-3: flat if noise_std is small relative to B, then linear; clipped, |G| / C times as much.

    Flat: equal at noise_std = B / 8, where the paper's own order already gives 1.125. Linear: a
    slope between that of B + noise_std itself and 1, each up to a logarithm.
    """
    parts = []
    second = list[Part]()
    for batch in (1, 2):
        wide = Cell(width=WIDTHS[-1], batch=batch)
        level = NOISES[0] * batch
        little = rows[replace(wide, noise_std=level)].logs - rows[wide].logs
        text = f"B = {batch}: error at noise_std {level:g} relative to no noise is about 1"
        parts.append(Part(text, little, (1 / ALIKE, ALIKE), ratio=True))
        least = math.log((batch + LOUD[-1]) / (batch + LOUD[0])) / math.log(LOUD[-1] / LOUD[0])
        text = f"B = {batch}: slope of log error in log noise_std, {LOUD[0]:g} to {LOUD[-1]:g}"
        each = slopes(LOUD, [rows[cell].logs for cell in loud(batch)])
        parts.append(Part(text, each, (least - TILDE, 1 + TILDE)))
        second += rows.slopes(parts[-1], LOUD, loud(batch))
    text = (
        f"error at |G| / C = {CLIP_FACTOR:g} relative to as much noise without clipping is 1 "
        "(an identity)"
    )
    parts.append(Part(text, clipped(rows), (1 / 1.1, 1.1), ratio=True))
    used = repeated(parts, second)
    return claimed(
        "2-3",
        "With noise, the error grows as (B + noise_std) sqrt(n / M). Under clipping, the noise "
        "counts |G| / C times.",
        "proposition 3.3, table 1",
        _scale(
            rows,
            f"n = 20, M = 32,768 and {LOUD_WIDTH:,}, {STRONGER}. Tolerances: 'about 1' means up "
            f"to {ALIKE:g} (ours; B + noise_std itself gives 1.125 there). Slopes lie between "
            f"that of B + noise_std and 1, each widened by {LOGARITHM}. The last finding: 10 % "
            "(ours)",
        ),
        used.parts,
        remarks(used.told, IDENTITY),
    )


def clipped(rows: Rows) -> NDArray[Any]:
    """(seeds,) log error of DP-SGD relative to as much noise without clipping: means of levels."""
    wide = Cell(width=WIDTHS[-1])
    scaled = replace(wide, defense="clipping", level=CLIP_FACTOR)
    each = [
        rows[replace(scaled, noise_std=level / CLIP_FACTOR)].logs
        - rows[replace(wide, noise_std=level)].logs
        for level in NOISES[::2]
    ]
    return np.asarray(np.mean(each, 0))


def dropout(rows: Rows) -> Claim:
    """2-4: "effective width" (1 - p) M: level and slope are those of the narrower network."""
    parts = []
    used = RATES[:-1]
    left = [1 - p for p in used]
    narrow = [rows[Cell(width=round(share * Cell().width))].logs for share in left]
    for defense, name in (("dropout_units", "units"), ("dropout_entries", "entries")):
        given = [rows[Cell(defense=defense, level=p)].logs for p in used]
        text = f"dropout of {name}: error relative to the narrower network, p = 0.3 to 0.9, is 1"
        mean = np.mean(np.array(given) - np.array(narrow), 0)
        parts.append(Part(text, mean, (1 / ALIKE, ALIKE), ratio=True))
        text = f"dropout of {name}: slope in log (1 - p) minus that of the narrower network is 0"
        each = slopes(left, given) - slopes(left, narrow)
        parts.append(Part(text, each, (-TILDE, TILDE)))
    return claimed(
        "2-4",
        "Dropout at rate p leaves a network of about the width (1 - p) M.",
        "section 3.4, table 1",
        _scale(
            rows,
            f"n = 20, M = 8,192, B = 2, {STRONGER}. Tolerances: {ALIKE:g} (ours, for the paper's "
            f'"about"). Slopes: {LOGARITHM}',
        ),
        parts,
    )


def pruned_span(rows: Rows) -> str:
    """The remark on 2-5: what pruning at 0.7 does to the tensor attacks on two-layer networks.

    The paper claims only that there is "no evidence" of small errors (section 3.5); it measures
    features of images. Errors are the shares outside the span, relative to no pruning.
    """
    each = {
        f"{method}, B = {batch}": _pruned(rows, Cell(batch=batch, method=method), method)
        for method in ("printed", "library")
        for batch in (1, 2)
    }
    still = all(math.exp(interval(logs).high) < PRUNED for logs in each.values())
    found = ": both tensor attacks still find the span" if still else ""
    unknown = _ratio(_pruned(rows, Cell(), "left_out"))
    return remarks(
        "Two-layer networks (n = 20, M = 8,192), each tensor pruned separately at p = 0.7" + found,
        *(
            f"Feature error relative to no pruning, {name}: {_ratio(logs)}"
            for name, logs in each.items()
        ),
        "The update, zeros included, is a function of the w_j . x_i, so Stein's lemma still gives "
        f"their span. If the library's attack treats the zeros as unknown, the ratio is {unknown} "
        "(B = 2)",
    )


def _pruned(rows: Rows, plain: Cell, method: str) -> NDArray[Any]:
    """(seeds,) log share outside the span under pruning, by a method, relative to no pruning."""
    under = replace(plain, defense="prune_layer", level=RATES[2], method=method)
    return np.asarray(np.log(rows[under].spans) - np.log(rows[plain].spans))


def local_steps(rows: Rows) -> Claim:
    """2-6: several local steps compared with one, at rates above that of remark C.3."""
    plain = rows[Cell()].logs
    parts = []
    for level in SMALL:
        for (defense, name), (steps, most) in product(MOVING, AGGREGATED.items()):
            own = rows[Cell(defense=defense, level=level, steps=steps)].logs
            text = f"{name}, {level:g} / M, {steps} steps: error relative to one step is about 1"
            paper = f"{TABLE_2[steps]} (table 2)"
            parts.append(Part(text, own - plain, (1 / most, most), ratio=True, paper=paper))
    return claimed(
        "2-6",
        "Local aggregation changes the tensor attack's error little at a small learning rate.",
        "proposition 3.1, table 2",
        _scale(
            rows,
            f"n = 20, M = 8,192, B = 2, {STRONGER}. Tolerances: {AGGREGATED[3]:g} and "
            f"{AGGREGATED[5]:g}, which table 2 itself reaches with 3 and 5 steps",
        ),
        parts,
        _faster(rows),
    )


def _faster(rows: Rows) -> str:
    """Results of larger learning rates than the judged ones."""
    larger = []
    for defense, name in MOVING:
        for level in LEARNING[len(SMALL) :]:
            cells = [Cell(defense=defense, level=level, steps=steps) for steps in AGGREGATED]
            larger += [
                f"Larger rate, {name}, {level:g} / M, {own.cell.steps} steps: "
                f"{_ratio(own.logs - rows[Cell()].logs)}"
                for own in rows.of(cells)
            ]
    slow = (
        f"At {SMALL[0]:g} / M, {SMALL[0] * Cell().width:.0f} / M^2 (remark C.3 asks for a rate of "
        f"order 1 / M^2), hardly anything moves. So {SMALL[1]:g} / M, where it does, is judged "
        "too. This was decided after its numbers were known, and makes the claim harder to meet"
    )
    return remarks(slow, *larger)


def withheld_jump(shares: Sequence[Withheld]) -> Claim:
    """2-9: p_hat by the pruned share of the whole gradient, smallest entries first.

    "Does not change the lower bound much" up to n / (n + 1): at most 2 %, which moves the bound by
    1 %. "Greatly increase" after: above 1/2 at 90 % of the remaining range.
    """
    parts = []
    for inputs in sorted({s.inputs for s in shares}):
        edge = inputs / (inputs + 1)
        own = sorted((s for s in shares if s.inputs == inputs), key=lambda s: s.rate)
        at = [s for s in own if s.rate <= edge + 1e-9][-1]
        text = f"n = {inputs}: p_hat at the rate {at.rate:.3f} = n / (n + 1) is small"
        parts.append(Part(text, at.shares, (-INFINITE, 0.02)))
        text = f"n = {inputs}: p_hat at the rate {own[-1].rate:.3f} is large"
        parts.append(Part(text, own[-1].shares, (0.5, INFINITE)))
    return claimed(
        "2-9",
        "p_hat is small up to a pruning rate of n / (n + 1) and grows greatly after it.",
        "remark E.4",
        "two-layer ReLU networks, M = 512, B = 2. Tolerances (ours): 0.02, which moves the bound "
        "by 1 %, and 0.5 at 90 % of the remaining range. No attack is run; "
        f"{len(shares[0].shares)} seeds",
        parts,
    )


def _working(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.median <= WORKS]


def _ratio(logs: NDArray[Any]) -> str:
    """A ratio from its logarithms by seed, with its interval of 95 %."""
    found = interval(logs)
    value, low, high = (f"{math.exp(end):.3g}" for end in (found.value, found.low, found.high))
    return f"{value} [{low}, {high}]"


def _scale(rows: Rows, text: str) -> str:
    return f"two-layer networks, {text}. {rows.seeds}"
