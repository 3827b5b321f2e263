"""Count what a computation costs in operations: the same number on any machine.

Multiplications and additions of matrix products and convolutions; element-wise work is not counted.
Bytes are those of the tensors alive at once; memory that a kernel allocates and frees within one
call is not counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class Product(NamedTuple):
    """One matrix product: (rows, inner) times (inner, columns)."""

    rows: int
    inner: int
    columns: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.inner * self.columns


class Products(TorchDispatchMode):
    """All matrix products within the context; a convolution counts as in its unfolded form.

    Raises:
        RuntimeError: an operation that looks like a product and is unknown here.

    Example:
        >>> with Products() as products:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> products.operations
        48
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Product] = Counter()

    @property
    def operations(self) -> int:
        """Of all products."""
        return sum(number * product.operations for product, number in self.counts.items())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).rstrip("_")
        rule = RULES.get(name)
        if rule is not None:
            for product, number in rule(args, out):
                self.counts[product] += number
        elif name not in LAYOUTS and any(part in name for part in LIKE_A_PRODUCT):
            raise RuntimeError(f"{name} may be a product, and is not counted; add its rule")
        return out


def _mm(args: Any, out: Any) -> list[tuple[Product, int]]:
    a, b = args[:2]
    return [(Product(a.shape[-2], a.shape[-1], b.shape[-1]), a.shape[0] if a.ndim == 3 else 1)]


def _mv(args: Any, out: Any) -> list[tuple[Product, int]]:
    return [(Product(args[0].shape[0], args[0].shape[1], 1), 1)]


def _outer(args: Any, out: Tensor) -> list[tuple[Product, int]]:
    """A product of a column and a row that is written as an element-wise one."""
    sizes = [part.numel() if isinstance(part, Tensor) else 1 for part in args[:2]]
    if out.numel() <= max(sizes):
        return []
    return [(Product(out.numel() // out.shape[-1], 1, out.shape[-1]), 1)]


def _nothing(args: Any, out: Any) -> list[tuple[Product, int]]:
    """A sum over the update in the objective, as `(a * b).sum()` is one: no layer's product."""
    return []


def _convolution(args: Any, out: Tensor) -> list[tuple[Product, int]]:
    inputs, weight, *_, transposed, _, groups = args[:9]
    return [(_unfolded(inputs if transposed else out, weight, groups), groups)]


def _packed_convolution(args: Any, out: Tensor) -> list[tuple[Product, int]]:
    return [(_unfolded(out, args[1], args[6]), args[6])]


def _convolution_backward(args: Any, out: Any) -> list[tuple[Product, int]]:
    slope, inputs, weight, *_, transposed, _, groups, wanted = args[:11]
    forward = _unfolded(inputs if transposed else slope, weight, groups)
    found = []
    if wanted[0]:
        found.append((Product(forward.rows, forward.columns, forward.inner), groups))
    if wanted[1]:
        found.append((Product(forward.columns, forward.rows, forward.inner), groups))
    return found


def _unfolded(places: Tensor, weight: Tensor, groups: int) -> Product:
    """The product of one group: a row for each place of the filter."""
    rows = places.shape[0] * places.shape[2:].numel()
    return Product(rows, weight.shape[1:].numel(), weight.shape[0] // groups)


RULES: dict[str, Callable[[Any, Any], list[tuple[Product, int]]]] = {
    "aten.mm": _mm,
    "aten.bmm": _mm,
    "aten.addmm": lambda args, out: _mm(args[1:], out),
    "aten.baddbmm": lambda args, out: _mm(args[1:], out),
    "aten.mv": _mv,
    "aten.addmv": lambda args, out: _mv(args[1:], out),
    "aten.dot": _nothing,
    "aten.vdot": _nothing,
    "aten.mul": _outer,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "mkldnn._convolution_pointwise": _packed_convolution,
}
LIKE_A_PRODUCT = ("mm", "mv", "dot", "conv", "linear", "matmul", "einsum", "addr", "ger", "cdist")
LAYOUTS = frozenset({"mkldnn._reorder_convolution_weight"})


class LiveBytes(TorchDispatchMode):
    """Peak bytes of tensors created within the context.

    Example:
        >>> with LiveBytes() as memory:
        ...     for _ in range(3):
        ...         made = torch.zeros(10, dtype=torch.float32)
        >>> memory.peak <= 80
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            self._meet(leaf, own=False)
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            self._meet(leaf, own=True)
        return out

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._known.clear()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _meet(self, leaf: object, own: bool) -> None:
        """Count each storage once; storage from outside does not count."""
        if not isinstance(leaf, Tensor):
            return
        holder: Any = leaf
        if leaf.layout != torch.strided or leaf.is_mkldnn:
            name, size = id(leaf), leaf.numel() * leaf.element_size()
        else:
            holder = leaf.untyped_storage()
            name, size = holder._cdata, holder.nbytes()
        if name in self._known:
            return
        self._known.add(name)
        size = size if own else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(holder, self._freed, name, size)

    def _freed(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.live -= size


def count(run: Callable[[], object]) -> Products:
    """The products of one call."""
    with Products() as products:
        run()
    return products


def peak(run: Callable[[], object]) -> int:
    """Peak bytes of one call."""
    with LiveBytes() as memory:
        run()
    return memory.peak
