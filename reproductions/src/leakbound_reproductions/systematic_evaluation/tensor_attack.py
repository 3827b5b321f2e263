"""The tensor attack on d loss / d a_j of a two-layer network: the library's, and as printed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leakbound.attacks.features.base import FoundFeatures
from leakbound_reproductions.attacks.diagonalize import coefficients, decompose
from leakbound_reproductions.attacks.hermite import hermite_means, tensor_orders, usable_orders
from leakbound_reproductions.attacks.moments import Responses, contracted, moments, resolve_signs

RESTARTS = 4
"""Of the decomposition; `TensorMethod` has 10, which takes twice as long."""
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "softplus": torch.nn.functional.softplus,
    "tanh": torch.tanh,
    "cubic": lambda z: z**3 + z**2,
}


def library(
    outer: Tensor,
    seen: Tensor,
    units: Tensor,
    activation: str,
    batch: int,
    source: torch.Generator,
) -> FoundFeatures:
    """`TensorMethod` on given responses: all usable orders, lower ones removed first.

    Shapes: `outer` (M,) d loss / d a_j, `seen` (M,) whether it was sent, `units` (M, n) the w_j.
    """
    means = hermite_means(FUNCTIONS[activation])
    orders = usable_orders(means)
    found = moments(Responses.of(outer[None], units, seen=seen[None]), batch, orders)
    components, _ = decompose([t for t in found.tensors if t.numel()], source, restarts=RESTARTS)
    components, signed = resolve_signs(found, components, means, orders)
    return FoundFeatures((found.span @ components).T, "inner", signed)


def printed(
    outer: Tensor,
    seen: Tensor,
    units: Tensor,
    activation: str,
    batch: int,
    source: torch.Generator,
) -> FoundFeatures:
    """P = (1/M) sum_j g_j H_k2(w_j), its span, then T in that span from H_k3.

    Source: paper B, Section B.1.
    """
    means = hermite_means(FUNCTIONS[activation])
    second, third = tensor_orders(means)
    values = torch.where(seen, outer, 0) / len(outer)
    matrix, along = _moment(values, units, second)
    sizes, vectors = torch.linalg.eigh(matrix)
    span = vectors[:, sizes.abs().argsort(descending=True)[:batch]]
    inside = units @ span
    cubes, _ = _moment(values, inside, third) if third == 4 else (_third(values, inside), along)
    components, _ = decompose([cubes.reshape(1, batch, batch, batch)], source, restarts=RESTARTS)
    signed = second == 2
    if signed:
        even = coefficients((span.T @ matrix @ span)[None], components)[0] / means[2]
        mean = span.T @ along
        odd = torch.linalg.lstsq(components, mean[:, None]).solution[:, 0] / means[1]
        components = components * torch.where(even * odd < 0, -1.0, 1.0)
    return FoundFeatures((span @ components).T, "inner", signed)


def _third(values: Tensor, units: Tensor) -> Tensor:
    return contracted(values[None], units, units, 3)[0]


def _moment(values: Tensor, units: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """sum_j g_j H_order(w_j), orders 3 and 4 contracted with the first moments; and these."""
    along = values @ units
    a = along / along.norm().clamp_min(1e-300)
    eye = torch.eye(units.shape[1]).to(units)
    plain = (units.T * values) @ units
    if order == 2:
        return plain - values.sum() * eye, along
    weight = values * (units @ a)
    if order == 3:
        outer = torch.outer(a, along)
        return (units.T * weight) @ units - outer - outer.T - (along @ a) * eye, along
    cubes = torch.einsum("j,ja,jb,jc->abc", weight, units, units, units)
    for one, two in (("a", "bc"), ("b", "ac"), ("c", "ab")):
        cubes = cubes - torch.einsum(f"{one},{two}->abc", plain @ a, eye)
        cubes = cubes - torch.einsum(f"{one},{two}->abc", a, plain)
        cubes = cubes + values.sum() * torch.einsum(f"{one},{two}->abc", a, eye)
    return cubes, along


METHODS = {"library": library, "printed": printed}
