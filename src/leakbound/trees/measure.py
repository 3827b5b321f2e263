"""The share of a client's values that its trees reveal, measured with its true rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from leakbound._util import files
from leakbound.trees.model import Floats, TreeModel
from leakbound.trees.reveal import Revealed, thresholds_of

INTEGER = 0.49
NEAR = 0.05
"""Default tolerances: of whole numbers; of others, in units of the public spread."""
ROW = 0.9
"""A row is known if this share of its columns is."""
PRIOR = "prior only"
GLOBAL = "global model alone"
UPDATE = "with the update"
"""What is known: public rows; also the trees before; also the client's trees."""
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Share:
    """`hits` of `n`, with Wilson's 95 % interval, which takes all n as independent.

    Example:
        >>> share = Share(8, 10)
        >>> share.value, [round(edge, 3) for edge in share.interval]
        (0.8, [0.49, 0.943])
    """

    hits: int
    n: int

    @property
    def value(self) -> float:
        """The share; NaN of nothing."""
        return self.hits / self.n if self.n else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson 1927; (0, 1) of nothing."""
        from leakbound._util.intervals import wilson  # SciPy: reading trees does without it

        return wilson(self.hits, self.n)


@dataclass(frozen=True)
class TreeMeasure:
    """What a client's trees reveal about its rows.

    `thresholds`: thresholds of the client that are values of its rows. `distinct`: distinct values
    of the rows that are thresholds, by what is known. `alone`: rows alone in a leaf of a tree of
    the client. If public rows are given, and the leaf of each row is known: `pinned`, entries whose
    bracket holds at most one public value (whole numbers) or is at most two tolerances wide;
    `entries` within tolerance, and `rows` with 90 % of such entries, by what is known. The value
    tried is the median or mode of public values in the bracket, or else its middle.
    """

    thresholds: Share
    distinct: dict[str, Share]
    alone: Share
    pinned: Share | None = None
    entries: dict[str, Share] | None = None
    rows: dict[str, Share] | None = None

    @property
    def shares(self) -> dict[str, Share]:
        """All shares by what they say."""
        groups = {
            "values that are thresholds": self.distinct,
            "entries pinned": {UPDATE: self.pinned} if self.pinned else {},
            "entries known": self.entries or {},
            "rows known": self.rows or {},
        }
        return {
            "thresholds that are values": self.thresholds,
            "rows alone in a leaf": self.alone,
            **{f"{what}, {who}": part for what, g in groups.items() for who, part in g.items()},
        }


def measured(
    revealed: Revealed,
    rows: ArrayLike,
    public: ArrayLike | None = None,
    *,
    tolerance: ArrayLike | None = None,
) -> TreeMeasure:
    """Measure what a client's trees reveal about its rows; for an auditor, who has the rows.

    Args:
        revealed: of the client's update.
        rows: (n, m) the client's rows, as its trees see them. NaN is missing and never known.
        public: (N, m) other rows of the same kind. Without them no entry is measured.
        tolerance: (m,) the error up to which a value is known. Default: 0.49 where all public
            values are whole; otherwise 0.05 IQR / 1.349 of the public rows (standard deviation
            where the IQR is 0).

    Raises:
        ValueError: rows or public are not (n, m) for the model's m features, or a tolerance is not
            positive.
    """
    held = revealed._rows(rows)
    values = [np.unique(column[~np.isnan(column)]) for column in held.T]
    models = {GLOBAL: revealed.before} if revealed.before else {}
    models[UPDATE] = (*revealed.before, *revealed.trees)
    distinct = {
        name: Share(_hits(thresholds_of(trees), values), sum(map(len, values)))
        for name, trees in models.items()
    }
    alone = np.zeros(len(held), bool)
    for leaf in revealed.leaves(held).T:
        alone |= np.bincount(leaf)[leaf] == 1
    splits = revealed.thresholds
    thresholds = Share(_hits(splits, values), sum(map(len, splits.values())))
    measure = TreeMeasure(thresholds, distinct, _share(alone))
    if public is None:
        return measure
    others = revealed._rows(public).astype(np.float64)
    columns = [np.sort(column[~np.isnan(column)]) for column in others.T]
    if not all(map(len, columns)):
        raise ValueError("public has a column without values; give public rows with all columns")
    whole = [bool((column % 1 == 0).all()) for column in columns]
    tau = _tolerances(columns, whole, tolerance)
    known = {PRIOR: (np.full(held.shape, -np.inf), np.full(held.shape, np.inf))}
    for name in models:
        known[name] = revealed.brackets(held, update=name == UPDATE)
    entries = {}
    known_rows = {}
    for name, edges in known.items():
        guess, pinned = _guesses(columns, whole, tau, *edges)
        # The rows are 32-bit floats: an error of exactly the tolerance may round to above it.
        right = np.abs(guess - held) <= tau * (1 + 1e-6)
        entries[name] = _share(right)
        # A mean of 9 of 10 may round to just below 0.9.
        known_rows[name] = _share(right.mean(1) >= ROW - 1e-9)
    # The update comes last.
    return replace(
        measure,
        pinned=_share(pinned),
        entries=entries,
        rows=known_rows,
    )


def _hits(thresholds: dict[int, Floats], values: list[Floats]) -> int:
    return sum(int(np.isin(limits, values[j]).sum()) for j, limits in thresholds.items())


def _share(hits: NDArray[np.bool_]) -> Share:
    return Share(int(hits.sum()), hits.size)


def _tolerances(
    columns: list[Values],
    whole: list[bool],
    tolerance: ArrayLike | None,
) -> Values:
    if tolerance is None:
        spread = [np.subtract(*np.percentile(c, (75, 25))) / 1.349 or c.std() for c in columns]
        return np.where(whole, INTEGER, NEAR * np.array(spread))
    tau = np.asarray(tolerance, dtype=np.float64)
    if tau.shape != (len(columns),) or not (np.isfinite(tau) & (tau >= 0)).all():
        raise ValueError(
            f"tolerance has shape {tau.shape}; give {len(columns)} finite numbers of at least 0, "
            "one for each column"
        )
    return tau


def _guesses(
    columns: list[Values],
    whole: list[bool],
    tau: Values,
    low: Any,
    high: Any,
) -> tuple[Values, NDArray[np.bool_]]:
    """The best guess in each bracket (n, m), and which brackets are pinned."""
    guess = np.empty(low.shape)
    pinned = np.zeros(low.shape, bool)
    for j, public in enumerate(columns):
        distinct, counts = np.unique(public, return_counts=True)
        brackets = np.stack([low[:, j], high[:, j]], 1).astype(np.float64)
        edges, place = np.unique(brackets, axis=0, return_inverse=True)
        guesses = []
        for lo, hi in edges.tolist():
            first, last = np.searchsorted(distinct, (lo, hi))
            inside = public[slice(*np.searchsorted(public, (lo, hi)))]
            if not len(inside):
                ends = [end for end in (lo, hi) if np.isfinite(end)]
                middle = float(np.mean(ends)) if ends else hi  # an open bracket: its only end
                best = np.clip(round(middle), np.ceil(lo), np.ceil(hi) - 1) if whole[j] else middle
            else:
                mode = distinct[first:last][counts[first:last].argmax()]
                best = mode if whole[j] else np.median(inside)
            width = min(hi, public[-1]) - max(lo, public[0])
            guesses.append((best, last - first <= 1 if whole[j] else width <= 2 * tau[j]))
        best, tight = zip(*guesses, strict=True)
        guess[:, j] = np.array(best)[place.ravel()]
        pinned[:, j] = np.array(tight)[place.ravel()]
    return guess, pinned


def load_rows(path: Path | str, model: TreeModel) -> Values:
    """Rows (n, m) of numbers from a table (.csv, .parquet), or from a .npz or .safetensors file.

    A table has the columns that the model names, in any order and among others; if the model names
    none, its m features in order. The others hold one matrix, or one named `rows` or `inputs`.

    Raises:
        ValueError: the file is missing or damaged, lacks a column, or holds text.
    """
    from leakbound import tensors  # torch: trees need none
    from leakbound.data import rows
    from leakbound.data.values import MISSING, plain_numbers

    path = Path(path)
    files.check_regular(path, "rows")
    if path.suffix in (".npz", ".safetensors"):
        named, _ = tensors.read(path)
        matrices = [named[key] for key in ("rows", "inputs") if key in named] or [*named.values()]
        if len(matrices) != 1 or matrices[0].dim() != 2:
            raise ValueError(f"{str(path)!r} holds {sorted(named)[:9]}; give one matrix `rows`")
        return np.asarray(matrices[0].double().numpy())
    parts = []
    try:
        with rows.opened(path) as table:
            names = [name for name in model.names or table.names if name in table.names]
            if len(names) != model.features:
                wanted = ", ".join(model.names[:9]) or f"{model.features} features in order"
                raise ValueError(f"it has {', '.join(table.names)[:200]}; give {wanted}")
            for block in table.blocks:
                parts.append(np.stack([plain_numbers(block.values[name]) for name in names], 1))
                for i, j in np.argwhere(np.isnan(parts[-1])).tolist():
                    if str(text := block.values[names[j]][i]).strip() not in MISSING:
                        where = f"{block.word} {block.lines[i]}, column {names[j]!r}"
                        raise ValueError(f"{where}: {str(text)[:60]!r} is no number; give numbers")
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from None
    return np.concatenate(parts)
