"""Which optimizer an update shows, by the sizes of its entries.

Adam and similar optimizers divide every entry of the gradient by its own size: one step from a
fresh state moves all of them by the learning rate, and several steps by few rates. The entries of a
gradient have many sizes: the largest is far above their root mean square, and layers differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakbound.attacks.adaptive import first_step
from leakbound.core import LocalPlan, Task

Family = Literal["sgd", "equal", "layer-wise", "adaptive"]
LIKE_ADAM = "Adam or another optimizer that divides gradients by their size"
NAMES: Mapping[Family, str] = {
    "sgd": "SGD or LARS, with or without momentum",
    "equal": f"{LIKE_ADAM}, in one step or in several of one direction",
    "layer-wise": f"{LIKE_ADAM}, with a rate for each tensor as in LAMB",
    "adaptive": LIKE_ADAM,
}
CLEAR = 100.0
"""An entry counts from this many roundings on."""
ENTRIES = 20
"""The fewest entries that count of a tensor."""
LINES = 6
"""The fewest rows of a matrix that have entries which count, and columns.

The gradient of a layer with two outputs has two rows of equal sizes, and inputs of zeros and ones
make the sizes of a row equal, so a few lines may look like a step of Adam.
"""
TENSORS = 3
MATRICES = 2
"""The fewest tensors that show several steps, or a rate for each tensor, and for several steps the
fewest matrices with `LINES`: with one hidden layer and one output, SGD on one-hot rows looks the
same.
"""
EQUAL = 0.01
SHARE = 0.5
"""From this share of entries that are within `EQUAL` of the largest, they have one size."""
ALIKE = 1.05
UNLIKE = 2.0
"""The ratio up to which the largest entries of tensors are of one rate, and that from which they
are of several.
"""
FLAT = 2.7
"""An adaptive optimizer: no tensor's largest entry over its root mean square is above this."""
PEAKED = 6.0
LOW = 0.75
"""SGD: some matrix's largest entry over its root mean square is above this, and the rank of a
matrix below this share of its shape.
"""
ROUND = 1e-3
"""How near to a number of two digits a rate must be to count as that number."""
REFINED = 2
"""How often the decay beside equal sizes is fitted again without what does not fit."""


@dataclass(frozen=True)
class Trace:
    """What the sizes of an update's entries show of its optimizer.

    `size` is the largest change of a weight. `decay` is the multiple of the weights before that is
    in it besides equal sizes.
    """

    family: Family
    evidence: str
    size: float
    decay: float = 0.0

    @property
    def name(self) -> str:
        return NAMES[self.family]

    @property
    def plan(self) -> LocalPlan:
        """A local plan with the optimizer that attacks simulate for it."""
        return LocalPlan(optimizer="sgd" if self.family == "sgd" else "adam")

    @property
    def taken(self) -> str:
        """What attacks take it for."""
        return "SGD" if self.family == "sgd" else "Adam or similar"

    def steps(self, plan: LocalPlan, rate: float) -> int:
        """How many steps of the plan's optimizer the largest change is likely to be."""
        return max(1, round(self.size / (rate * first_step(plan))))

    def rate(self, plan: LocalPlan, steps: int) -> float | None:
        """The learning rate behind equal sizes after steps; rounded as people do where it fits."""
        if plan.is_sum:
            return None
        rate = self.size / (steps * first_step(plan))
        round_ = float(f"{rate:.2g}")
        return round_ if abs(round_ / rate - 1) <= ROUND else rate


@dataclass(frozen=True)
class _Sizes:
    """Sizes of one tensor's entries that count: the largest, over the others, and equal ones."""

    count: int
    top: float
    peak: float
    equal: int
    matrix: bool
    rank: float


def detected(
    task: Task,
    change: Tensor,
    spread: Tensor,
) -> Trace | None:
    """What a change of the weights (P,) shows; None if it does not tell optimizers apart.

    `spread` (P,) is the standard deviation of each entry's rounding. Weight decay must have been
    subtracted; the decay of one step of AdamW is found beside the equal sizes.
    """
    held = task.unflatten(task.parameters)
    rounding = task.unflatten(spread)
    parts = task.unflatten(change)
    measured = [_sizes(part, rounding[name]) for name, part in parts.items()]
    trace = _judged([one for one in measured if one is not None])
    if trace is not None and trace.family != "sgd":
        return trace
    decay = _beside_equal_sizes(parts, held, rounding)
    if decay is None:
        return trace
    left = {name: part - decay * held[name] for name, part in parts.items()}
    measured = [_sizes(part, rounding[name]) for name, part in left.items()]
    again = _judged([one for one in measured if one is not None])
    if again is None or again.family != "equal":
        return trace
    return Trace(again.family, again.evidence, again.size, decay)


def _sizes(part: Tensor, rounding: Tensor) -> _Sizes | None:
    """None if too few entries are clear of the rounding."""
    values = part.double().reshape(len(part), -1) if part.ndim > 1 else part.double()[None]
    limit = rounding.double().reshape(values.shape)
    clear = values.abs() > CLEAR * limit
    count = int(clear.sum())
    if count < ENTRIES:
        return None
    sizes = values.abs()[clear]
    top = float(sizes.max())
    equal = sizes >= (1 - EQUAL) * top - 4 * limit[clear]
    lines = min(int(clear.any(0).sum()), int(clear.any(1).sum()))
    rank = 1.0
    if lines >= LINES:
        spectrum = torch.linalg.svdvals(values)
        # A matrix of independent errors has about the norm of its longest row plus longest column.
        noise = 4 * float(limit.norm(dim=0).max() + limit.norm(dim=1).max())
        above = spectrum > max(noise, 1e-6 * float(spectrum[0]))
        rank = int(above.sum()) / len(spectrum)
    return _Sizes(
        count,
        top,
        top / float(sizes.square().mean().sqrt()),
        int(equal.sum()),
        lines >= LINES,
        rank,
    )


def _judged(tensors: list[_Sizes]) -> Trace | None:
    if not any(one.matrix for one in tensors):
        return None
    count = sum(one.count for one in tensors)
    equal = sum(one.equal for one in tensors) / count
    tops = [one.top for one in tensors]
    level = max(tops) / min(tops)
    peak = max(one.peak for one in tensors)
    several = len(tensors) >= TENSORS
    family: Family | None = None
    if equal >= SHARE and level <= ALIKE:
        family = "equal"
    elif equal >= SHARE and level >= UNLIKE and several:
        family = "layer-wise"
    if family is not None:
        of = "" if family == "equal" else " in its tensor"
        return Trace(
            family,
            f"{equal:.1%} of {count:,} entries in {len(tensors)} tensors have the size of the "
            f"largest{of}, {max(tops):.4g}",
            max(tops),
        )
    matrices = [one for one in tensors if one.matrix]
    if peak <= FLAT and level <= UNLIKE and several and len(matrices) >= MATRICES:
        return Trace(
            "adaptive",
            f"no entry of {count:,} is above {peak:.2g} times its tensor's root mean square, and "
            f"{len(tensors)} tensors have about the same largest entry, {max(tops):.4g}",
            max(tops),
        )
    # Biases that few examples move have peaks after steps of Adam, too.
    peak = max(one.peak for one in matrices)
    rank = min(one.rank for one in matrices)
    if peak >= PEAKED and rank <= LOW:
        return Trace(
            "sgd",
            f"entries reach {peak:.3g} times their matrix's root mean square, and a matrix has "
            f"{rank:.0%} of its largest rank",
            max(tops),
        )
    return None


def _beside_equal_sizes(
    parts: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    rounding: Mapping[str, Tensor],
) -> float | None:
    """The s of a change s W +- L, if most entries are of this form; None otherwise."""
    changes = torch.cat([part.flatten() for part in parts.values()]).double()
    weights = torch.cat([held[name].flatten() for name in parts]).double()
    limit = torch.cat([rounding[name].flatten() for name in parts]).double()
    clear = changes.abs() > CLEAR * limit
    changes = changes[clear]
    # In the direction of each change: s times the weight, plus L.
    along = torch.stack([changes.sign() * weights[clear], torch.ones_like(changes)], 1)
    if len(changes) < ENTRIES:
        return None
    kept = torch.ones(len(changes), dtype=torch.bool)
    for _ in range(REFINED + 1):
        if int(kept.sum()) < ENTRIES:
            return None
        share, level = torch.linalg.lstsq(along[kept], changes.abs()[kept]).solution.tolist()
        off = (changes.abs() - along @ torch.tensor([share, level], dtype=torch.float64)).abs()
        kept = off <= max(EQUAL * level, float(off.median()))
    good = float((off <= EQUAL * level + 4 * limit[clear]).double().mean())
    if not (good >= SHARE and share > 0 and level > 0 and math.isfinite(share)):
        return None
    return float(share)
