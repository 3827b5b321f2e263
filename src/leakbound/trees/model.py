"""Trees of an XGBoost model, read from its JSON without XGBoost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leakbound._util import files

MOST_BYTES = 2**26
"""Bytes of one model. Parsed JSON takes up to 20 times the memory."""
_AGAIN = "save the model again with booster.save_model('model.json')"
_GBTREE = "train with booster gbtree"
_BOOSTERS = {
    "dart": (
        "which scales trees after training, so that their sums mean something else",
        "for thresholds alone give the list learner.gradient_booster.gbtree.model.trees as a file; "
        f"for all else {_GBTREE}",
    ),
    "gblinear": (
        "a linear model without trees",
        "attack its weights (learner.gradient_booster.model.weights) as those of a linear layer: "
        "--model package.module:build, without --kind xgboost",
    ),
}
"""Boosters of XGBoost that are not read: why, and what to do instead."""
_NODES = ("right_children", "split_indices", "split_conditions", "base_weights", "sum_hessian")
_ADDED = ("default_left", "split_type")  # not in every version
Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tree:
    """One tree, as arrays over its nodes; node 0 is the root, and a leaf has children -1.

    A row goes left where its value is below the threshold, and to the default side where it is
    missing. `value` is the output of a leaf (eta included), `weight` that of an inner node
    (without eta), `hessian` the sum of the loss's second derivatives over the node's rows. `order`
    holds the nodes that the root reaches, parents first.
    """

    feature: Numbers
    threshold: Floats
    left: Numbers
    right: Numbers
    default_left: NDArray[np.bool_]
    value: Doubles
    weight: Doubles
    hessian: Doubles
    order: Numbers

    @cached_property
    def inner(self) -> Numbers:
        """Nodes with a split."""
        return self.order[self.left[self.order] >= 0]

    @cached_property
    def leaves(self) -> Numbers:
        """Nodes without a split."""
        return self.order[self.left[self.order] < 0]

    @cached_property
    def _parent(self) -> Numbers:
        parent = np.zeros(len(self.left), np.int64)
        parent[self.left[self.inner]] = parent[self.right[self.inner]] = self.inner
        return parent

    def descend(
        self,
        rows: Floats,
        low: Floats | None = None,
        high: Floats | None = None,
    ) -> Any:
        """(n,) the leaf of each row (n, m); narrows brackets low <= value < high (n, m) in place.

        A value that is missing narrows nothing.
        """
        node = np.zeros(len(rows), np.int64)
        active = np.arange(len(rows))
        while len(active := active[self.left[node[active]] >= 0]):
            at = node[active]
            column = self.feature[at]
            limit = self.threshold[at]
            held = rows[active, column]
            known = ~np.isnan(held)
            goes_left = np.where(known, held < limit, self.default_left[at])
            if low is not None and high is not None:
                for side, edge, narrow in ((goes_left, high, np.fmin), (~goes_left, low, np.fmax)):
                    place = active[side & known], column[side & known]
                    edge[place] = narrow(edge[place], limit[side & known])
            node[active] = np.where(goes_left, self.left[at], self.right[at])
        return node

    def region(self, leaf: int) -> dict[int, tuple[float, float]]:
        """Of a leaf: low <= value < high for each feature on its path."""
        limits: dict[int, tuple[float, float]] = {}
        while leaf:
            above = int(self._parent[leaf])
            column = int(self.feature[above])
            limit = float(self.threshold[above])
            low, high = limits.get(column, (-np.inf, np.inf))
            is_left = self.left[above] == leaf
            limits[column] = (low, min(high, limit)) if is_left else (max(low, limit), high)
            leaf = above
        return dict(sorted(limits.items()))

    def same(self, other: Tree) -> bool:
        """Whether both have the same splits and leaf values."""
        names = ("feature", "threshold", "left", "right", "value")
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)


@dataclass(frozen=True, eq=False)
class TreeModel:
    """The trees of a model, and what its file says about their training.

    `first`: how many trees the first iteration made. `output`: the class of each tree, 0 unless
    the objective has several. `base_score`: as in the file, one number per output; () if unknown.
    `averaged`: it is the mean target of all rows of the training, with their weights.
    """

    trees: tuple[Tree, ...]
    features: int
    names: tuple[str, ...] = ()
    objective: str = ""
    base_score: tuple[float, ...] = ()
    positive_weight: float = 1.0
    first: int = 1
    output: tuple[int, ...] = ()
    averaged: bool = False

    def name(self, feature: int) -> str:
        """The name of a feature; f0, f1, ... where the file has none."""
        return self.names[feature] if self.names else f"f{feature}"


def read(source: Path | str | bytes, *, most: int = MOST_BYTES) -> TreeModel:
    """The trees of an XGBoost model in JSON.

    Args:
        source: a .json file or its bytes: `booster.save_model("x.json")`, `save_raw("json")`, or a
            list of trees. A Flower client's message is `record["0"].numpy().tobytes()`. Also a
            .safetensors or .npz file that holds such bytes, as `leakbound capture` writes it. Empty
            bytes are a model without trees, which is what Flower's server sends first.
        most: the largest number of bytes.

    Raises:
        ValueError: the file is missing, too large, damaged, of another format (UBJ), or holds what
            is not read: other boosters than gbtree, splits by categories, leaves of vectors.

    Example:
        >>> leaf = {"left_children": [-1], "right_children": [-1], "split_indices": [0],
        ...         "split_conditions": [0.5], "base_weights": [0.5], "sum_hessian": [3.0]}
        >>> read(json.dumps([leaf]).encode()).trees[0].leaves.tolist()
        [0]
    """
    what = "the model" if isinstance(source, bytes) else repr(str(source))
    content = source if isinstance(source, bytes) else _bytes(Path(source), most)
    if len(content) > most:
        raise ValueError(f"{what} has over {most:,} bytes; give read a larger `most`")
    if not content:
        return TreeModel((), 0)
    # In UBJ the type of the key's length follows the brace; in JSON a quotation mark does.
    if content[:1] == b"{" and content[1:2] in b"LlIiUSmM":
        raise ValueError(f"{what} is UBJ, which is not read; {_AGAIN} or save_raw('json')")
    try:
        parsed = json.loads(content)
    # Lists nested thousands deep, by accident or on purpose, exhaust the stack.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON ({str(error)[:80]}); {_AGAIN}") from None
    try:
        return _list(parsed) if isinstance(parsed, list) else _model(parsed)
    except _Damaged as error:
        raise ValueError(f"{what} {error}; {error.mend}") from None


class _Damaged(Exception):
    """What is wrong with a file, as the rest of a sentence, and what to do."""

    def __init__(self, text: str, mend: str = _AGAIN) -> None:
        super().__init__(text)
        self.mend = mend


def _bytes(path: Path, most: int) -> bytes:
    files.check_regular(path, "model")
    if path.suffix in (".safetensors", ".npz"):
        from leakbound import tensors  # it takes a second to import

        # The header of the file comes on top of the model.
        held = [v.numpy() for v in tensors.read(path, most=most + 2**16)[0].values()]
        if len(held) != 1 or held[0].dtype != np.uint8:
            raise ValueError(f"{str(path)!r} holds no single array of bytes; give a model in JSON")
        return bytes(held[0].tobytes())
    with files.opened(path) as stream:
        return stream.read(most + 1)  # one byte more shows that there is more


def _get(
    table: Any,
    path: str,
    kind: type,
) -> Any:
    for key in path.split("."):
        if not isinstance(table, Mapping) or key not in table:
            raise _Damaged(f"has no {path}")
        table = table[key]
    if not isinstance(table, kind):
        raise _Damaged(f"holds {path} as {type(table).__name__}, not as {kind.__name__}")
    return table


def _number(
    table: Any,
    path: str,
    *,
    count: bool = False,
) -> float:
    text = _get(table, path, object)
    try:
        # XGBoost writes the numbers of its parameters as text.
        value = float(text)
    except (TypeError, ValueError, OverflowError):
        value = np.nan
    # The range of XGBoost's 32-bit floats. NaN compares false, so it is rejected too.
    if not abs(value) < 2**128 or (count and not (value % 1 == 0 and 0 <= value <= 2**31)):
        # Shortened below, because the text comes from the file and may be huge.
        kind = "count" if count else "finite number"
        raise _Damaged(f"holds {path} as {str(text)[:40]!r}, which is no {kind}")
    return value


def _count(table: Any, path: str) -> int:
    return int(_number(table, path, count=True))


def _model(parsed: Any) -> TreeModel:
    if (booster := _get(parsed, "learner.gradient_booster.name", str)) != "gbtree":
        why, mend = _BOOSTERS.get(booster, ("and only gbtree is read", _GBTREE))
        raise _Damaged(f"has the booster {booster[:40]!r}, {why}", mend)
    learner = parsed["learner"]
    made = _get(parsed, "learner.gradient_booster.model", dict)
    trees = _get(made, "trees", list)
    features = _count(learner, "learner_model_param.num_feature")
    said = _count(made, "gbtree_model_param.num_trees")
    output = _get(made, "tree_info", list)
    if not said == len(trees) == len(output):
        raise _Damaged(f"holds {len(trees)} trees, but says {said} (tree_info: {len(output)})")
    ends = _get(made, "iteration_indptr", list) if "iteration_indptr" in made else [0, 1]
    numbers = (*output, *ends[: len(trees) + 1])
    whole = all(type(x) is int and 0 <= x <= len(trees) for x in numbers)
    if not whole or (trees and len(ends) < 2):
        raise _Damaged("holds tree_info or iteration_indptr that are no numbers of trees")
    names = _get(learner, "feature_names", list) if "feature_names" in learner else []
    if names and (len(names) != features or not all(isinstance(name, str) for name in names)):
        raise _Damaged(f"names {len(names)} features of {features}")
    # "5E-1"; since XGBoost 3.1 one number per output: "[5E-1]"
    scores = str(_get(learner, "learner_model_param.base_score", object)).strip("[]").split(",")
    path = "objective.reg_loss_param.scale_pos_weight"
    weighted = "reg_loss_param" in _get(learner, "objective", dict)
    weight = _number(learner, path) if weighted else 1.0
    if not 1e-9 < weight < 1e9:
        raise _Damaged(f"holds {path} as {weight:g}, which weighs nothing")
    # XGBoost estimated the base score: as the mean since version 3, by a step to it before.
    version = parsed.get("version")
    mean = isinstance(version, list) and bool(version) and version[0] in range(3, 100)
    averaged = mean and learner["learner_model_param"].get("boost_from_average") == "1"
    return TreeModel(
        tuple(_tree(tree, f"has a tree {i} that", features) for i, tree in enumerate(trees)),
        features,
        tuple(names),
        _get(learner, "objective.name", str),
        tuple(_number({"base_score": score}, "base_score") for score in scores),
        weight,
        ends[1] if trees else 1,
        tuple(output),
        averaged=weight == 1 and averaged,
    )


def _list(parsed: list[Any]) -> TreeModel:
    trees = tuple(_tree(tree, f"has a tree {i} that", 2**31) for i, tree in enumerate(parsed))
    if not trees:
        raise _Damaged("is a list without trees")
    return TreeModel(trees, 1 + max(int(t.feature[t.inner].max(initial=0)) for t in trees))


def _tree(
    tree: Any,
    where: str,
    features: int,
) -> Tree:
    """One tree, checked: lengths, children, features, and numbers of what the root reaches."""
    left = _array(tree, "left_children", None, where)
    if tree.get("leaf_weights"):
        raise _Damaged(
            f"{where} has a vector in each leaf (multi_strategy multi_output_tree)",
            "train with multi_strategy one_output_per_tree",
        )
    zeros = np.zeros(len(left))
    arrays = {name: _array(tree, name, len(left), where) for name in _NODES}
    for name in _ADDED:
        arrays[name] = _array(tree, name, len(left), where) if name in tree else zeros
    for key, most in (("num_nodes", len(left)), ("size_leaf_vector", 1)):
        if "tree_param" in tree and (said := _count(tree, f"tree_param.{key}")) > most:
            raise _Damaged(f"{where} says {key} {said}; at most {most} is read")
    right = arrays["right_children"]
    order = _order(left, right, where)
    inner = order[left[order] >= 0]
    if arrays["split_type"][inner].any():
        mend = "train with one-hot columns (enable_categorical=False)"
        raise _Damaged(f"{where} splits by categories, which is not read", mend)
    used = arrays["split_indices"][inner]
    if not ((used >= 0) & (used < features) & (used == np.floor(used))).all():
        raise _Damaged(f"{where} splits a feature that is none of {features}")
    feature = zeros.astype(np.int64)
    feature[inner] = used
    value, weight, hessian = (arrays[name] for name in _NODES[2:])
    with np.errstate(over="ignore"):  # XGBoost has 32-bit floats
        narrow = np.stack([value, weight, hessian]).astype(np.float32)
    if not np.isfinite(narrow[:, order]).all():
        raise _Damaged(f"{where} has a threshold, weight or sum_hessian that is no finite number")
    return Tree(
        feature,
        narrow[0],
        left.astype(np.int64),
        right.astype(np.int64),
        arrays["default_left"] != 0,
        value,
        weight,
        hessian,
        order,
    )


def _array(
    tree: Any,
    name: str,
    length: int | None,
    where: str,
) -> Doubles:
    if not isinstance(tree, Mapping) or not isinstance(tree.get(name), list):
        raise _Damaged(f"{where} has no list {name}")
    try:
        values = np.asarray(tree[name], dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.empty((0, 0))
    if values.ndim != 1 or not len(values):
        raise _Damaged(f"{where} holds {name} that are no list of numbers")
    if length is not None and len(values) != length:
        raise _Damaged(f"{where} has {len(values)} {name} for {length} nodes")
    return values


def _order(
    left: Doubles,
    right: Doubles,
    where: str,
) -> Numbers:
    """The nodes from the root on, parents first; each may be reached once."""
    seen = np.zeros(len(left), bool)
    front = np.zeros(1, np.int64)
    parts = []
    while len(front):
        if seen[front].any() or len(np.unique(front)) < len(front):
            raise _Damaged(f"{where} reaches a node twice (a cycle)")
        seen[front] = True
        parts.append(front)
        children = np.stack([left[front], right[front]])
        children = children[:, ~(children == -1).all(0)].ravel()
        # A child 0 would be the root again.
        if not ((children > 0) & (children < len(left)) & (children == np.floor(children))).all():
            raise _Damaged(f"{where} has a child that is none of its {len(left)} nodes")
        front = children.astype(np.int64)
    return np.concatenate(parts)
