"""What the trees of one client reveal about its rows: thresholds, counts of leaves, brackets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from leakbound.trees.model import Doubles, Floats, Numbers, Tree, TreeModel

LAMBDA = 1.0
"""XGBoost's default regularization, for trees that do not determine their own."""
FIT = 1e-6
"""Error of a fit to numbers of 32 bits, relative to their sum."""
WHOLE = 0.01
"""How far a count may be from a whole number, plus 1e-6 of the rows: sums of 32-bit floats."""
LOGISTIC = ("binary:logistic", "reg:logistic")
SOFTMAX = ("multi:softprob", "multi:softmax")
SQUARED = ("reg:squarederror", "reg:linear")
LEAVES = 6
"""So many sums that share a divisor are no chance: of 2^-6 for 2."""
AGREE = 1e-4
"""How far sums of second derivatives of one set of rows may differ, relative to them."""
BALANCED = 1e-4
"""Largest weight of a root whose rows have the base score as mean, in units of the largest."""
WEIGHTED = "rows of leaves: weighted or subsampled rows, so sums are not numbers of rows"
ASSUMED = (
    "rows of leaves: sums of weights. They are numbers of rows if every row has weight 1 and each "
    "tree draws all rows (subsample 1); the file says neither"
)
DRAWN = (
    "rows of leaves: sums of weights. They are numbers of rows if every row has weight 1, which "
    "the file does not say; the trees agree that each drew all rows"
)
THRESHOLDS = (
    "each threshold is a value of a row of this client under tree_method hist (the default) and "
    "approx, and halfway between two values under exact; the file does not say which"
)


@dataclass(frozen=True)
class LeafCount:
    """The rows in one leaf of a tree, and what is known about their targets.

    `rows`: the sum of the weights of the rows that the tree drew. This is their number if every row
    has weight 1 and each tree draws all rows. The file says neither; `Revealed.notes` say what the
    trees show of it. `targets`: rows of the positive class (of the class `output`), or the sum of
    the targets in a regression, which has the rounding of the file; None if unknown.
    """

    tree: int
    leaf: int
    output: int
    rows: int
    targets: float | None


@dataclass(frozen=True, eq=False)
class Revealed:
    """What one client's update reveals to all who see it. Made by `revealed`.

    `trees`: those of the client; `before`: those that the client received. `eta`, `reg_lambda`: of
    the client's training, given or inferred; None if the trees do not determine them. `counts`:
    rows in leaves; empty where `notes` say why.
    """

    model: TreeModel
    trees: tuple[Tree, ...]
    before: tuple[Tree, ...]
    counts: tuple[LeafCount, ...]
    eta: float | None
    reg_lambda: float | None
    notes: tuple[str, ...]

    @cached_property
    def thresholds(self) -> dict[int, Floats]:
        """The distinct split thresholds of the client's trees by feature, sorted."""
        return thresholds_of(self.trees)

    def brackets(
        self,
        rows: ArrayLike,
        *,
        update: bool = True,
    ) -> tuple[Floats, Floats]:
        """The lowest and highest values (n, m) of rows (n, m), if the leaf of each row is known.

        The region of a row's leaf in every tree, intersected: low <= value < high. An auditor knows
        the leaves, because they have the rows. An attacker must infer them, so what brackets reveal
        is an upper bound for attackers. `update=False`: from the trees before alone.

        Raises:
            ValueError: the rows are no matrix with one column per feature.
        """
        held = self._rows(rows)
        low, high = (np.full(held.shape, x, np.float32) for x in (-np.inf, np.inf))
        for tree in (*self.before, *(self.trees if update else ())):
            tree.descend(held, low, high)
        return low, high

    def leaves(self, rows: ArrayLike) -> Numbers:
        """(n, trees) the leaf of each row in each of the client's trees."""
        held = self._rows(rows)
        return np.stack([tree.descend(held) for tree in self.trees], 1)

    def _rows(self, rows: ArrayLike) -> Floats:
        held = np.asarray(rows, dtype=np.float32)
        if held.ndim != 2 or held.shape[1] != self.model.features:
            raise ValueError(
                f"rows have shape {held.shape}; give (n, {self.model.features}), a column for each "
                "feature of the model"
            )
        return held


def thresholds_of(trees: Sequence[Tree]) -> dict[int, Floats]:
    """The distinct split thresholds by feature, sorted."""
    # NumPy cannot concatenate an empty list, as of no trees.
    column = np.concatenate([np.zeros(0, np.int64), *(t.feature[t.inner] for t in trees)])
    value = np.concatenate([np.zeros(0, np.float32), *(t.threshold[t.inner] for t in trees)])
    return {int(j): np.unique(value[column == j]) for j in np.unique(column)}


def revealed(
    after: TreeModel,
    before: TreeModel | None = None,
    *,
    eta: float | None = None,
    reg_lambda: float | None = None,
) -> Revealed:
    """What a client's trees reveal, given the model that the client received.

    A client of Flower's `FedXgbBagging` sends its new trees; one of `FedXgbCyclic` sends the trees
    that it received and its new ones. Both are recognized.

    - Thresholds: with tree_method hist, every threshold is a value of one of the client's rows.
    - Rows of a leaf, in trees that start from no other tree, if every row has weight 1 and each
      tree draws all rows: H / h, where H is the sum of second
      derivatives in the file and h that of one row: p(1 - p) for logistic loss at base score p,
      2p(1 - p) for softmax, 1 for squared error (there in all trees). Positives: rows p - G, with
      G = -value (H + lambda) / eta (Chen and Guestrin 2016, eq. 5). No count is
      given if the trees show weights or a subsample: sums that are not whole or share a divisor,
      trees that disagree about the rows, or a root that does not balance at their mean. Whole
      weights, such as those of a bootstrap, may show nothing.
    - eta and lambda: from inner nodes, whose weight -G / (H + lambda) is in the file without eta,
      because G of a node is the sum of its children's. Lambda is 1 where this is not enough.

    Args:
        after: the client's message.
        before: the model that the client received; None or without trees in round 1.
        eta: learning rate of the client's training if known; otherwise inferred.
        reg_lambda: its L2 penalty if known; otherwise inferred.

    Raises:
        ValueError: the client has no trees of its own, or `before` is not what it received.

    Example:
        >>> import json
        >>> from leakbound.trees.model import read
        >>> tree = {"left_children": [1, -1, -1], "right_children": [2, -1, -1],
        ...         "split_indices": [3, 0, 0], "split_conditions": [41.0, 0.25, -0.125],
        ...         "base_weights": [0.0, 0.25, -0.125], "sum_hessian": [8.0, 3.0, 5.0]}
        >>> revealed(read(json.dumps([tree]).encode())).thresholds[3].tolist()
        [41.0]
    """
    trees, start = _own_trees(after, before)
    rate, strength = _rates(trees, eta, reg_lambda)
    counts, notes = _counts(after, trees, start, rate, strength)
    notes = (THRESHOLDS, *notes)
    return Revealed(after, trees, before.trees if before else (), counts, rate, strength, notes)


def _own_trees(
    after: TreeModel,
    before: TreeModel | None,
) -> tuple[tuple[Tree, ...], bool]:
    """The client's trees, and whether its training started without trees."""
    if not after.trees:
        raise ValueError("after holds no trees; give the model that the client sent")
    sent = before.trees if before else ()
    if before and sent and before.features != after.features:
        raise ValueError(
            f"before has {before.features} features and after {after.features}; give the model "
            "that this client received"
        )
    shared = 0
    while shared < min(len(sent), len(after.trees)) and sent[shared].same(after.trees[shared]):
        shared += 1
    if shared not in (0, len(sent)) or shared == len(after.trees):
        raise ValueError(
            f"after has the first {shared} of {len(sent)} trees of before and "
            f"{len(after.trees) - shared} others; give as before the model that the client received"
        )
    return after.trees[shared:], not sent


def _rates(
    trees: Sequence[Tree],
    eta: float | None,
    strength: float | None,
) -> tuple[float | None, float]:
    """1/eta and lambda, by least squares: G of an inner node is the sum of its children's G.

    This is linear in lambda, 1/eta and their product. Lambda is 1 where that fits as well.
    """
    for name, value, low in (("eta", eta, 1e-9), ("reg_lambda", strength, 0.0)):
        if value is not None and not low <= value < np.inf:
            raise ValueError(f"{name} is {value}; give the finite number of the client's training")
    constant, *known = np.concatenate([_equations(tree) for tree in trees]).T

    def inverse(strength: float) -> tuple[float, ...]:
        """1/eta at a lambda, the error of the fit, and the size of what is fitted."""
        weight = known[1] + strength * known[2]
        right = constant - strength * known[0]
        fitted = float(weight @ right / max(weight @ weight, 1e-300))
        size = [float(np.abs(x).max(initial=0)) for x in (right - fitted * weight, right)]
        return fitted, *size

    if strength is None:
        strength = LAMBDA
        if inverse(LAMBDA)[1] > FIT:
            strength = max(float(np.linalg.lstsq(np.stack(known, 1), constant)[0][0]), 0.0)
    if eta is None:
        inverse_eta, error, size = inverse(strength)
        # The terms must be far above the rounding of the file: otherwise any eta would fit.
        eta = 1 / inverse_eta if error < 10 * FIT < size / 100 and inverse_eta > 1e-9 else None
    return eta, strength


def _equations(tree: Tree) -> Doubles:
    """(inner nodes, 4) constant = a lambda + b / eta + c lambda / eta, in units of its terms."""
    inner = tree.inner
    nodes = np.stack([inner, tree.left[inner], tree.right[inner]])
    leaf = tree.left[nodes] < 0
    hessian = tree.hessian[nodes]
    weight = np.where(leaf, 0.0, tree.weight[nodes]) * np.array([[-1], [1], [1]])
    value = np.where(leaf, tree.value[nodes], 0.0)
    terms = np.stack([weight * hessian, -weight, -value * hessian, -value])
    return np.asarray(terms.sum(1) / (np.abs(terms).sum((0, 1)) + 1e-300)).T


def _counts(
    model: TreeModel,
    trees: Sequence[Tree],
    start: bool,
    eta: float | None,
    strength: float,
) -> tuple[tuple[LeafCount, ...], tuple[str, ...]]:
    squared = model.objective in SQUARED
    if not (squared or model.objective in (*LOGISTIC, *SOFTMAX)):
        return (), (f"rows of leaves: not known for the objective {model.objective or '(none)'!r}",)
    # The second derivative of a squared loss is 1 for every row in any tree; of others it is known
    # only where all rows have the starting margin.
    many = model.first if start else 0
    if squared:
        many = len(trees)
    if not many:
        return (), ("rows of leaves: known for trees that start from no other tree alone",)
    by_tree = []
    for number, tree in enumerate(trees[:many]):
        rate = eta if start and number < model.first else None
        by_tree.append(_leaf_counts(model, number, tree, rate, strength))
        if not by_tree[-1]:
            why = "sums are no whole numbers (or a starting margin, or noise)"
            return (), (f"{WEIGHTED}: {why}",)
    why, tested = _contradiction(model, trees, by_tree, start)
    if why:
        return (), (f"{WEIGHTED}: {why}",)
    notes = [DRAWN if tested else ASSUMED]
    counts = tuple(chain.from_iterable(by_tree))
    if all(leaf.targets is None for leaf in counts):
        notes.append(
            "targets of leaves: not known: the trees determine no eta and lambda (a penalty alpha?)"
        )
    return counts, tuple(notes)


def _contradiction(
    model: TreeModel,
    trees: Sequence[Tree],
    by_tree: Sequence[Sequence[LeafCount]],
    start: bool,
) -> tuple[str, bool]:
    """Why counts are not those of rows ("" if nothing shows it); whether a subsample would show.

    One client's rows have one sum in every tree, balance at their mean, and give the second
    iteration the second derivatives that the first one's leaves predict.
    """
    totals = [sum(leaf.rows for leaf in leaves) for leaves in by_tree]
    if max(totals) - min(totals) > WHOLE + AGREE * max(totals):
        return f"one tree has {min(totals):,} and another {max(totals):,}", True
    tested = len(totals) > 1
    if start and model.averaged and model.objective not in SOFTMAX:
        tested = True
        for number, tree in enumerate(trees[: model.first]):
            largest = float(np.abs(tree.weight[tree.order]).max())
            if abs(float(tree.weight[0])) > BALANCED * max(largest, abs(model.base_score[0])):
                return f"those of tree {number} do not have the mean target of all rows", True
    if start and model.objective in LOGISTIC and model.first == 1 < len(trees):
        expected = _next_hessian(model, trees[0], by_tree[0])
        if expected is not None:
            tested = True
            if abs(expected - float(trees[1].hessian[0])) > AGREE * expected:
                return "the second tree has other rows than the first", True
    if model.objective in SQUARED:  # targets are no counts
        return "", tested
    known = [
        (leaf.targets, leaf.rows - leaf.targets)
        for leaf in chain.from_iterable(by_tree)
        if leaf.targets is not None
    ]
    for what, sums in zip(
        ("positive", "negative"),
        zip(*known, strict=True),
        strict=False,
    ):
        above = [int(one) for one in sums if one > 0]
        divisor = math.gcd(*above)
        if len(above) >= LEAVES and divisor > 1:
            return f"all sums of {what} rows are multiples of {divisor}", tested
    return "", tested


def _next_hessian(
    model: TreeModel,
    tree: Tree,
    counts: Sequence[LeafCount],
) -> float | None:
    """The second derivatives that the first tree's rows have after it, summed; None: not known."""
    more = model.positive_weight - 1
    if more and any(leaf.targets is None for leaf in counts):
        return None
    chance = model.base_score[0]
    margin = math.log(chance / (1 - chance))
    total = 0.0
    for leaf in counts:
        # The logistic function as a tanh, which cannot overflow.
        after = (1 + math.tanh((margin + float(tree.value[leaf.leaf])) / 2)) / 2
        total += (leaf.rows + more * (leaf.targets or 0)) * after * (1 - after)
    return total


def _leaf_counts(
    model: TreeModel,
    number: int,
    tree: Tree,
    eta: float | None,
    strength: float,
) -> list[LeafCount]:
    """Rows and targets of each leaf; () if the rows are not whole."""
    output = model.output[number] if number < model.first else 0
    hessian = tree.hessian[tree.leaves]
    weight = model.positive_weight
    squared = model.objective in SQUARED
    softmax = model.objective in SOFTMAX
    chance = float(model.base_score[0])
    targets = None
    if softmax:  # before XGBoost 3.1 one base score for all classes
        base = np.resize(model.base_score, 1 + max(model.output))
        shares = np.exp(base - base.max())
        chance = float(shares[output] / shares.sum())
    if not squared and not (1e-9 < chance < 1 - 1e-9 and (eta or weight == 1)):
        return []
    rows = hessian / (1.0 if squared else chance * (1 - chance) * (1 + softmax))
    if eta is not None:
        gradient = -tree.value[tree.leaves] * (hessian + strength) / eta
        targets = (rows * chance - gradient) / weight
        rows = rows - (weight - 1) * targets
    counts = np.rint(rows)
    slack = WHOLE + 1e-6 * np.abs(rows)
    if (np.abs(rows - counts) > slack).any() or counts.min() < 1 or slack.max() > 0.25:
        return []
    if targets is not None and not squared:
        sums = np.rint(targets)
        possible = (np.abs(targets - sums) <= slack) & (sums >= 0) & (sums <= counts)
        targets = sums if possible.all() else None
    sums_ = [None] * len(counts) if targets is None else targets.tolist()
    triples = zip(
        tree.leaves.tolist(),
        counts.astype(int).tolist(),
        sums_,
        strict=True,
    )
    return [LeafCount(number, leaf, output, n, target) for leaf, n, target in triples]
