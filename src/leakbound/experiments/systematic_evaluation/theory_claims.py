"""Claims 2-1 to 2-6 and 2-9 of paper B, from the rows of the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from leakbound.experiments.systematic_evaluation.sweep import (
    BATCHES,
    CLIP_FACTOR,
    CLIPS,
    INPUTS,
    LEARNING,
    NOISES,
    RATES,
    WIDTHS,
    Row,
    Slope,
    Withheld,
    interval,
    slope,
)
from leakbound.experiments.systematic_evaluation.trial import Cell, draw, pruned

WORKS = 0.5
"""Median error up to which an attack counts as working; above, errors saturate."""
CLOSE = 0.1
"""How far a measured slope, or the logarithm of a ratio, may lie from the stated one."""
ALIKE = float(np.log(1.25))
"""The same for a ratio between different draws."""
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Claim:
    """One claim, what was measured for it, and the word."""

    number: str
    statement: str
    measured: str
    word: str


class Rows:
    """The rows of a sweep by their cells."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.all = tuple(rows)
        self._by = {row.cell: row for row in rows}

    def __getitem__(self, cell: Cell) -> Row:
        return self._by[cell]

    def of(self, cells: Sequence[Cell]) -> list[Row]:
        """The rows of those cells that were measured."""
        return [self._by[cell] for cell in cells if cell in self._by]

    def widths(self, activation: str, batch: int, method: str = "library") -> list[Row]:
        """The rows of one series over the width."""
        cells = [Cell(activation, width=m, batch=batch, method=method) for m in WIDTHS]
        return self.of(cells)


def claims(rows: Rows, shares: Sequence[Withheld]) -> list[Claim]:
    """All seven."""
    found = [rate(rows), clipping(rows), noise(rows), dropout(rows)]
    return [*found, pruning(rows), local_steps(rows), withheld_jump(shares)]


def slopes(rows: Rows) -> dict[str, Slope]:
    """The slopes of log error over log M where the attack works."""
    found = {}
    for method in ("library", "printed"):
        for activation, batch in (("relu", 1), ("relu", 2), ("cubic", 2), ("tanh", 1)):
            series = [r for r in rows.widths(activation, batch, method) if r.median <= WORKS]
            if len(series) >= 2:
                found[f"{method}, {activation}, B = {batch}"] = slope(series, lambda c: c.width)
    return found


def rate(rows: Rows) -> Claim:
    """2-1: sqrt(n / M), and growing with B."""
    over_m = slopes(rows)
    over_n = slope(rows.of([Cell(inputs=n, width=WIDTHS[-1]) for n in INPUTS]), lambda c: c.inputs)
    by_batch = rows.of([Cell(width=WIDTHS[-1], batch=b) for b in BATCHES])
    over_b = slope(by_batch, lambda c: c.batch)
    words = [within(s, -0.5 - CLOSE, -0.5 + CLOSE) for s in over_m.values()]
    words += [within(over_n, 0.5 - CLOSE, 0.5 + CLOSE), within(over_b, 0.0, np.inf)]
    text = "; ".join(f"{name}: {s}" for name, s in over_m.items())
    grown = ", ".join(f"B = {r.cell.batch}: {r.median:.3f}" for r in by_batch)
    return Claim(
        "2-1",
        "error ~ B sqrt(n / M): slope -1/2 in M, 1/2 in n, growing with B",
        f"slopes in M: {text}. In n, relu, B = 2: {over_n}. In B, M = {WIDTHS[-1]}: {over_b} "
        f"(medians {grown})",
        joined(words),
    )


def clipping(rows: Rows) -> Claim:
    """2-2: an invariance, so the same numbers."""
    plain = np.array(rows[Cell()].errors)
    worst = max(
        float(np.abs(np.array(rows[Cell(defense="clipping", level=c)].errors) - plain).max())
        for c in CLIPS
    )
    return Claim(
        "2-2",
        "clipping alone does not change the tensor attack's error",
        f"|G| / C of {', '.join(f'{c:g}' for c in CLIPS)}: the largest change of an error is "
        f"{worst:.1e} (n = {len(plain)} each)",
        HOLDS if worst < 1e-6 else FAILS,
    )


def noise(rows: Rows) -> Claim:
    """2-3: flat until noise_std ~ B, then linear; under clipping the noise counts |G| / C times."""
    parts, words = [], []
    for batch in (1, 2):
        base = Cell(width=WIDTHS[-1], batch=batch)
        noisy = rows.of([replace(base, noise_std=s) for s in NOISES])
        working = [r for r in noisy if r.median <= WORKS]
        plain = rows[base]
        first = interval(np.log(noisy[0].errors) - np.log(plain.errors))
        loud = [r for r in working if r.cell.noise_std >= 2 * batch]
        loud = loud if len(loud) > 1 else working[-2:]
        steep, loud = slope(loud, lambda c: c.noise_std), loud or noisy
        last = loud[-1]
        turn = interval(last.cell.noise_std * np.array(plain.errors) / np.array(last.errors))
        parts.append(
            f"B = {batch}: error at noise {noisy[0].cell.noise_std:g} over none "
            f"{np.exp(first.value):.3f} [{np.exp(first.low):.3f}, {np.exp(first.high):.3f}], slope "
            f"from {loud[0].cell.noise_std:g} to {last.cell.noise_std:g} {steep}, the lines "
            f"meet at noise_std {turn}"
        )
        words += [within(first, -CLOSE, CLOSE), within(steep, 1 - 2 * CLOSE, 1 + 2 * CLOSE)]
    clipped, wide = [], Cell(width=WIDTHS[-1])
    scaled = replace(wide, defense="clipping", level=CLIP_FACTOR)
    for level in NOISES[::2]:
        one = rows[replace(scaled, noise_std=level / CLIP_FACTOR)]
        clipped.append(np.log(one.errors) - np.log(rows[replace(wide, noise_std=level)].errors))
    ratio = interval(np.concatenate(clipped))
    parts.append(
        f"DP-SGD at |G| / C = {CLIP_FACTOR:g} over noise of {CLIP_FACTOR:g} times: "
        f"{np.exp(ratio.value):.3f} [{np.exp(ratio.low):.3f}, {np.exp(ratio.high):.3f}]"
    )
    return Claim(
        "2-3",
        "noise: (B + noise_std) sqrt(n / M), flat until noise_std ~ B, then linear",
        "; ".join(parts),
        joined([*words, within(ratio, -CLOSE, CLOSE)]),
    )


def dropout(rows: Rows) -> Claim:
    """2-4: dropout of units or entries against a network of width (1 - p) M."""
    parts, words = [], []
    for p in RATES[:-1]:
        narrow = np.log(rows[Cell(width=round((1 - p) * Cell().width))].errors)
        for defense, name in (("dropout_units", "units"), ("dropout_entries", "entries")):
            given = np.log(rows[Cell(defense=defense, level=p)].errors)
            low, high = stats.ttest_ind(given, narrow, equal_var=False).confidence_interval(0.95)
            middle = float(given.mean() - narrow.mean())
            parts.append(
                f"{p:g} {name} {np.exp(middle):.2f} [{np.exp(low):.2f}, {np.exp(high):.2f}]"
            )
            words.append(within(Slope(middle, low, high, len(given)), -ALIKE, ALIKE))
    return Claim(
        "2-4",
        "dropout at rate p is a network of width (1 - p) M",
        f"mean error over that of the narrower network, n = {len(narrow)} each: {', '.join(parts)}",
        joined(words),
    )


def pruning(rows: Rows) -> Claim:
    """2-5: what pruning by |g_j| leaves, for an attacker who counts the pruned as zeros or not."""
    parts = []
    for batch in (1, 2):
        own = [rows[Cell(batch=batch, defense="prune_layer", level=p)] for p in RATES]
        text = ", ".join(f"{r.cell.level:g}: {r.median:.3f} / {r.span:.3f}" for r in own)
        plain = rows[Cell(batch=batch)]
        parts.append(f"B = {batch}, none: {plain.median:.3f} / {plain.span:.3f}, {text}")
    out = [rows[Cell(defense="prune_layer", level=p, method="left_out")] for p in RATES]
    text = ", ".join(f"{r.cell.level:g}: {r.median:.3f} / {r.span:.3f}" for r in out)
    kept = _survivors(0.9, len(out[0].errors))
    seven = rows[Cell(defense="prune_layer", level=0.7)]
    plain = rows[Cell()]
    small = seven.span < 2 * plain.span
    return Claim(
        "2-5",
        "pruning breaks the Gaussianity of the surviving w_j: large error from p = 0.7 on",
        f"error / share outside the span, pruned taken as zeros: {'; '.join(parts)}. B = 2, pruned "
        f"left out: {text}. At p = 0.9 the survivors' mean (w_j . x_i)^2 is {kept} instead of 1",
        "does not hold at p = 0.7 for an attacker who takes pruned entries for zeros; holds for "
        "one who leaves them out"
        if small
        else HOLDS,
    )


def _survivors(p: float, seeds: int) -> Slope:
    found = []
    for seed in range(seeds):
        problem = draw(Cell(), seed)
        keep = pruned(problem.gradient, p, whole_model=False)[:, 0]
        found.append(((problem.network.inner[keep] @ problem.inputs.T) ** 2).mean())
    return interval(np.array(found))


def local_steps(rows: Rows) -> Claim:
    """2-6: several local steps against one."""
    plain, parts, words = np.log(rows[Cell()].errors), [], []
    for defense, name in (("local_steps", "one rate"), ("mean_field_steps", "w_j moving as well")):
        for steps in (3, 5):
            for lr in LEARNING:
                own = np.log(rows[Cell(defense=defense, level=lr, steps=steps)].errors)
                change = interval(own - plain)
                parts.append(
                    f"{name}, {steps} steps, rate {lr:g} / M: {np.exp(change.value):.3f} "
                    f"[{np.exp(change.low):.3f}, {np.exp(change.high):.3f}]"
                )
                if lr == LEARNING[0]:
                    words.append(within(change, -CLOSE, CLOSE))
    return Claim(
        "2-6",
        "local aggregation changes the error little at a small learning rate",
        f"error over that of one step, n = {len(plain)}: {'; '.join(parts)}",
        joined(words),
    )


def withheld_jump(shares: Sequence[Withheld]) -> Claim:
    """2-9: p_hat as a function of the share of the whole gradient that is pruned."""
    parts, words = [], []
    for inputs in sorted({s.inputs for s in shares}):
        edge = inputs / (inputs + 1)
        own = sorted((s for s in shares if s.inputs == inputs), key=lambda s: s.rate)
        parts.append(
            f"n = {inputs}, n / (n + 1) = {edge:.3f}: "
            + ", ".join(f"{s.rate:.3f}: {s.share.value:.3g}" for s in own)
        )
        at = [s.share for s in own if s.rate <= edge + 1e-9]
        after = [s.share for s in own if s.rate > edge + 1e-9]
        words += [*(within(s, -np.inf, 0.02) for s in at), within(after[-1], 0.5, np.inf)]
    return Claim(
        "2-9",
        "p_hat is near 0 up to a global pruning rate of n / (n + 1) and jumps there",
        f"{'; '.join(parts)} (means of n = {shares[0].share.seeds} seeds)",
        joined(words),
    )


def within(found: Slope, low: float, high: float) -> str:
    """Whether a quantity lies in a range: its whole interval does, none of it does, or neither."""
    if low <= found.low and found.high <= high:
        return HOLDS
    return FAILS if found.high < low or found.low > high else UNDECIDED


def joined(words: Sequence[str]) -> str:
    """The verdict on a claim of several parts."""
    return FAILS if FAILS in words else UNDECIDED if UNDECIDED in words else HOLDS
