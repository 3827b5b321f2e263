"""Complete examples from the parts that are known, by public examples: imputers.

They are what an attacker answers without an update, and candidates for one with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leakbound.domains.known import Known

__all__ = ["completions"]

FEWEST = 40
"""Fewer public examples are not enough for an imputer."""
NEAREST = 10
"""Number of nearest neighbors that vote."""
FEW_VALUES = 40
"""A part of at most this many values, of which none matches another, is classified.

Others are regressed.
"""
ROUNDS = 60
"""Iterations of gradient boosting."""
LEAVES = 8
"""Most leaves of its trees: 31 take twice the time, and complete about as many new rows."""
NAMED = 500
"""Most examples of a group that vote."""
TIED = 64
"""Most equally near examples that are compared with each other."""
BLOCK = 64
"""Targets whose neighbors are searched at once."""
STEP = 2.0
"""Between the codes of two classes."""
RIDGE = 1e-3
"""Penalty of the linear imputer, in units of the mean variance of the known values."""
Codes = NDArray[np.float64]


def completions(
    fitted: Tensor,
    known: Known,
    targets: Tensor,
    labels: tuple[Tensor, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Each imputer's name and its completions (M, *rest.shape) of the targets' known parts.

    Shapes: `fitted` (N, *shape) and `targets` (M, *shape), of which the known parts alone are read;
    `labels` (N,) and (M,) of both, which count as known. Labels of another shape are not used.
    """
    if labels is not None and labels[0].ndim != 1:
        labels = None
    if known.rest.parts is None:
        yield from _of_numbers(fitted, known, targets, labels)
        return
    known_codes, target_codes = (_known_codes(known, examples) for examples in (fitted, targets))
    if labels is not None:
        # As other categories, of which different ones are more than 1 apart.
        columns = [STEP * each.double().cpu().numpy() for each in labels]
        known_codes = np.column_stack([known_codes, columns[0]])
        target_codes = np.column_stack([target_codes, columns[1]])
    rest = known.unknown(fitted)
    codes = known.rest.coded(rest).numpy()
    ways: dict[str, Callable[[], NDArray[np.int64]]] = {
        "most frequent of the group": lambda: _of_group(known_codes, target_codes, codes),
        "nearest neighbors": lambda: _of_neighbors(known_codes, target_codes, codes),
        # Parts of several examples seldom fit together where examples recur, as in texts.
        "nearest neighbor": lambda: _of_neighbor(known_codes, target_codes, codes),
        "gradient boosting": lambda: _boosted(known_codes, target_codes, codes),
    }
    for name, donors in ways.items():
        yield name, assembled(known.rest.spans, rest, donors())


def assembled(
    spans: Sequence[tuple[int, int]], examples: Tensor, donors: NDArray[np.int64]
) -> Tensor:
    """(M, n) examples whose part k is that of the example donors[:, k] of `examples` (N, n)."""
    places = torch.from_numpy(donors)
    parts = [examples[places[:, k], start:stop] for k, (start, stop) in enumerate(spans)]
    return torch.cat(parts, 1)


def _known_codes(known: Known, examples: Tensor) -> Codes:
    """(N, k) one number for each known part; equal parts have equal numbers."""
    return np.asarray(known.part.coded(known.values(examples)).numpy())


def _of_group(known: Codes, targets: Codes, codes: Codes) -> NDArray[np.int64]:
    """The example of the target's group that matches the most of the group, part by part."""
    _, group = np.unique(np.vstack([known, targets]), axis=0, return_inverse=True)
    group = group.reshape(-1)
    of_fitted = group[: len(known)]
    of_target = group[len(known) :]
    everyone = _voted(codes, np.arange(len(codes)))
    chosen = {int(g): _voted(codes, np.flatnonzero(of_fitted == g)) for g in set(of_target)}
    return np.array([everyone if chosen[g] is None else chosen[g] for g in of_target])


def _of_neighbors(known: Codes, targets: Codes, codes: Codes) -> NDArray[np.int64]:
    """The votes of the fitted examples whose known parts are nearest."""
    near = [
        np.argpartition(apart, min(NEAREST, len(known)) - 1)[:, :NEAREST]
        for apart in _distances(known, targets)
    ]
    return np.array([_voted(codes, places) for places in np.concatenate(near)])


def _of_neighbor(known: Codes, targets: Codes, codes: Codes) -> NDArray[np.int64]:
    """The whole example whose known part is nearest; of several, the one most like the others."""
    donors = []
    for apart in _distances(known, targets):
        for row in apart:
            tied = np.flatnonzero(row == row.min())[:TIED]
            differ = np.abs(codes[tied, None] - codes[tied]) > 1
            donors.append(tied[differ.sum((1, 2)).argmin()])
    return np.tile(np.array(donors)[:, None], codes.shape[1])


def _distances(known: Codes, targets: Codes) -> Iterator[Codes]:
    """(BLOCK, N) distances of some targets from all fitted examples, one block after another."""
    scaled, wanted = _scaled(known, targets)
    for start in range(0, len(wanted), BLOCK):
        yield np.abs(wanted[start : start + BLOCK, None] - scaled).clip(max=1.0).sum(-1)


def _scaled(known: Codes, targets: Codes) -> tuple[Codes, Codes]:
    """Both in units in which 1 is far: a category's step, or a spread of a number."""
    spread = np.quantile(known, 0.75, axis=0) - np.quantile(known, 0.25, axis=0)
    unit = np.where(spread > 0, spread, known.std(0))
    unit = np.where(unit > 0, unit, 1.0)
    return known / unit, targets / unit


def _voted(codes: Codes, places: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """For each part, which of the examples at these places matches the most of them."""
    if not len(places):
        return None
    # A group may be large, and votes are quadratic: a part of it tells the most frequent value.
    some = places[:: -(-len(places) // NAMED)]
    held = codes[some]
    votes = (np.abs(held[:, None] - held) <= 1).sum(1)
    return np.asarray(some[votes.argmax(0)])


def _boosted(known: Codes, targets: Codes, codes: Codes) -> NDArray[np.int64]:
    """Gradient boosting of every unknown part on the known ones; the nearest value is the donor."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    donors = np.zeros((len(targets), codes.shape[1]), np.int64)
    for part, values in enumerate(codes.T):
        levels, label = np.unique(values, return_inverse=True)
        if len(levels) == 1:
            continue
        classified = len(levels) <= FEW_VALUES and np.diff(levels).min() > 1
        kind = HistGradientBoostingClassifier if classified else HistGradientBoostingRegressor
        # The median is within a tolerance more often than the mean.
        more = {} if classified else {"loss": "absolute_error"}
        model = kind(
            max_iter=ROUNDS,
            max_leaf_nodes=LEAVES,
            early_stopping=False,
            random_state=0,
            **more,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(known, label.reshape(-1) if classified else values)
        answer = model.predict(targets)
        wanted = levels[answer] if classified else answer
        order = np.argsort(values, kind="stable")
        after = np.searchsorted(values[order], wanted).clip(1, len(order) - 1)
        left = values[order[after - 1]]
        right = values[order[after]]
        nearest = np.where(wanted - left <= right - wanted, after - 1, after)
        donors[:, part] = order[nearest]
    return donors


def _of_numbers(
    fitted: Tensor,
    known: Known,
    targets: Tensor,
    labels: tuple[Tensor, Tensor] | None,
) -> Iterator[tuple[str, Tensor]]:
    """Completions of images, series and other numbers, for which no parts count."""
    x, wanted = (known.values(of).flatten(1).double() for of in (fitted, targets))
    if labels is not None:
        # Another label is as far as another example is on average.
        columns = _label_columns(*labels, x.var(0).sum().sqrt())
        x, wanted = (torch.cat(pair, 1) for pair in zip((x, wanted), columns, strict=True))
    y = known.unknown(fitted).flatten(1).double()
    shape = (-1, *known.rest.shape)
    apart = torch.cdist(wanted, x)
    near = apart.topk(min(NEAREST, len(x)), largest=False).indices
    yield "nearest neighbor", y[near[:, 0]].reshape(shape)
    yield "mean of the nearest neighbors", y[near].mean(1).reshape(shape)
    mean = x.mean(0)
    centered = x - mean
    penalty = RIDGE * centered.square().sum(0).mean() * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.lstsq(centered.T @ centered + penalty, centered.T @ (y - y.mean(0)))
    linear = (wanted - mean) @ weights.solution + y.mean(0)
    yield "linear", known.rest.project(linear.reshape(shape))


def _label_columns(fitted: Tensor, targets: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """(N, k) and (M, k): a column for each class, or one of numbers, in units of distance."""
    fitted = fitted.cpu()
    targets = targets.cpu()
    if fitted.is_floating_point():
        scale = unit / fitted.double().std().clamp_min(1e-12)
        return scale * fitted.double()[:, None], scale * targets.double()[:, None]
    classes = torch.unique(fitted)
    return unit * (fitted[:, None] == classes), unit * (targets[:, None] == classes)
