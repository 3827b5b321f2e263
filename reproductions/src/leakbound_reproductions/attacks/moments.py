"""Moments of a random layer's responses: by Stein's lemma they reveal the layer's inputs.

Hidden unit j has the standard normal weight w_j, and source k responds to it with g_k(w_j) = sum_i
r_ki s(w_j . x_i). Then E g_k(w) H_p(w) = sum_i r_ki E s^(p) x_i^(x)p for the Hermite tensors H_p.
The span of the x_i is found first. Tensors of order 2 to 4 are formed only inside it, so nothing
larger than n x n is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from leakbound_reproductions.attacks.diagonalize import coefficients

__all__ = ["Moments", "Responses", "contracted", "moments", "resolve_signs"]

ROUNDS = 4
WIDE = 8
"""With more examples, fourth-order tensors are contracted only with the first moments."""


@dataclass(frozen=True, eq=False)
class Responses:
    """The responses of the sources to the units; float64.

    Attributes:
        values: (K, M) the responses g_k(w_j).
        weights: (K, M) of sum 1 in every row; 0 where a response was withheld.
        units: (M, n) the weights w_j.
        noise: (K,) the variance of the known noise on the responses of each source.
    """

    values: Tensor
    weights: Tensor
    units: Tensor
    noise: Tensor

    @staticmethod
    def of(
        values: Tensor, units: Tensor, *, seen: Tensor | None = None, noise: Tensor | None = None
    ) -> Responses:
        """Responses with a mask and noise variances (K, M); noisier ones have less weight.

        Rounding in the type of the values counts as noise.

        Example:
            >>> Responses.of(torch.ones(1, 2), torch.ones(2, 3)).weights
            tensor([[0.5000, 0.5000]], dtype=torch.float64)
        """
        wide = values.double()
        mask = torch.ones_like(wide) if seen is None else seen.to(wide)
        added = torch.zeros_like(wide) if noise is None else noise.to(wide)
        count = mask.sum(1, keepdim=True).clamp_min(1)
        own = (mask * (wide - (mask * wide).sum(1, keepdim=True) / count).square()).sum(1) / count[
            :, 0
        ]
        level = (mask * added).sum(1) / count[:, 0]
        signal = torch.maximum(own - level, 0.01 * own).clamp_min(1e-300)
        weights = mask / (signal[:, None] + added)
        weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-300)
        rounding = torch.finfo(values.dtype).eps ** 2 * (weights * wide.square()).sum(1)
        return Responses(wide, weights, units.double(), (weights * added).sum(1) + rounding)

    def without(self, features: Tensor) -> Responses:
        """The responses minus their parts along orthonormal functions of the units (M, F).

        A part is removed only to the extent that it exceeds its sampling error.
        """
        parts = (self.weights * self.values) @ features
        spread = (self.weights * self.values.square()).sum(1, keepdim=True)
        error = features.shape[1] * spread * self.weights.square().sum(1, keepdim=True)
        energy = parts.square().sum(1, keepdim=True)
        keep = (1 - error / energy.clamp_min(1e-300)).clamp_min(0)
        rest = self.values - (keep * parts) @ features.T
        return Responses(rest, self.weights, self.units, self.noise)

    def mixed(self, mixing: Tensor) -> Tensor:
        """(S, M) the mixtures mixing (S, K) of the weighted responses; sums over j are means."""
        return mixing @ (self.weights * self.values)


def mixing_of(responses: Responses, most: int) -> Tensor:
    """Mixtures (S, K) of the sources with equal sampling error, at most `most`.

    Sources with proportional responses count as one. Without noise all mixtures count equally,
    however weak. With noise each is shrunk by its share of signal (Wiener). Undeclared noise is
    estimated from the directions beyond the first `most`.
    """
    scaled = responses.weights.sqrt() * responses.values
    noise = responses.noise + _thinned(responses, scaled)
    scale = noise.clamp_min(1e-40 * float(scaled.square().sum()) + 1e-300).sqrt()
    vectors, roots, _ = torch.linalg.svd(scaled / scale[:, None], full_matrices=False)
    values = roots.square()
    level = 1.0
    if len(values) > most:
        level = max(level, float(values[most:].mean()))
    ratio = len(values) / max(1, int((responses.weights > 0).sum(1).max()))
    floor = level * (1 + math.sqrt(ratio)) ** 2 + 1e-26 * float(values[0])
    kept = (values > floor)[:most]
    kept[0] = True
    top = values[:most][kept]
    gain = (top - level).clamp_min(1e-3 * top).sqrt() / top
    found: Tensor = gain[:, None] * vectors[:, :most][:, kept].T / scale
    return found


def _thinned(responses: Responses, scaled: Tensor) -> Tensor:
    """(K,) the error added by withholding other units of each source, as noise would."""
    seen = responses.weights > 0
    missing = 1 - seen.sum(1) / seen.any(0).sum().clamp_min(1)
    return missing * scaled.square().sum(1)


@dataclass(frozen=True, eq=False)
class Moments:
    """Hermite moments of S mixed sources inside the span of the features.

    Attributes:
        span: (n, B) an orthonormal basis of the span.
        gaps: the energy of the last direction chosen over that of the next one: in all directions,
            and after the other modes were held inside the span.
        first: (S, B); second: (S, B, B); third: (S, B, B, B); fourth: (S L, B, B, B), contracted
            with L vectors each. Empty if the activation has no such coefficient.
        probes: (L, B) the vectors that the fourth order was contracted with.
    """

    span: Tensor
    gaps: tuple[float, float]
    first: Tensor
    second: Tensor
    third: Tensor
    fourth: Tensor
    probes: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The stacks to decompose jointly; a contracted fourth order as a third one, scaled."""
        return [self.second, self.third, self.fourth / 2]  # 4! = 3! * 4: equal errors


def moments(responses: Responses, examples: int, orders: tuple[int, ...]) -> Moments:
    """Span and moments of all usable orders for `examples` features.

    The mean, then linear and quadratic parts are removed from the responses before higher moments
    are formed. These parts are orthogonal to the higher moments and only add to their sampling
    error.

    Assumptions: `orders` holds an order of at least 2; units are standard normal.

    Source: paper B, Section B.4 and algorithm of Zhong et al. 2017.
    """
    centered = responses.without(torch.ones_like(responses.units[:, :1]))
    mixing = mixing_of(centered, examples)
    flat = centered.mixed(mixing)
    first = flat @ responses.units
    linear = centered.without(responses.units)
    mixed = linear.mixed(mixing)
    span, gaps = _span(mixed, first if 1 in orders else None, responses.units, examples, orders)
    inside = responses.units @ span
    second = contracted(mixed, inside, inside, 2) if 2 in orders else flat.new_zeros(0)
    smooth = linear
    if 2 in orders:
        smooth = linear.without(_quadratic(inside))
    mixed = smooth.mixed(mixing)
    third = contracted(mixed, inside, inside, 3) if 3 in orders else flat.new_zeros(0)
    own = first @ span
    probes = torch.eye(examples).to(own)
    if examples > WIDE:
        probes = own / own.norm(dim=1, keepdim=True).clamp_min(1e-300)
    fourth = _fourth(mixed, inside, probes) if 4 in orders else flat.new_zeros(0)
    return Moments(span, gaps, own, second, third, fourth, probes)


def _span(
    mixed: Tensor, first: Tensor | None, units: Tensor, examples: int, orders: tuple[int, ...]
) -> tuple[Tensor, tuple[float, float]]:
    """Orthonormal basis (n, B) of the features' span, and how clearly it stands out. First come the
    eigenvectors of the second moments, or of third ones contracted with the first; then, in turns,
    those of all moments with every other mode inside the span.
    """
    columns = [] if first is None else [first.T]
    eye = torch.eye(units.shape[1]).to(units)
    for i, row in enumerate(mixed):
        if 2 in orders:
            columns.append((units.T * row) @ units - row.sum() * eye)
        elif first is not None:
            for other in first[: i + 1]:
                a = other / other.norm().clamp_min(1e-300)
                along = row @ units
                outer = torch.outer(a, along)
                matrix = (units.T * (row * (units @ a))) @ units
                columns.append(matrix - outer - outer.T - (along @ a) * eye)
    span, wide = _leading(columns, examples)
    for _ in range(ROUNDS):
        inside = units @ span
        columns = [] if first is None else [first.T]
        for order in (2, 3):
            if order in orders:
                block = _one_open(mixed, units, inside, span, order)
                columns.append(block / math.sqrt(math.factorial(order - 1)))
        span, narrow = _leading(columns, examples)
    return span, (wide, narrow)


def _leading(columns: list[Tensor], count: int) -> tuple[Tensor, float]:
    joined = torch.cat(columns, 1)
    if joined.shape[1] <= len(joined):
        vectors, sizes, _ = torch.linalg.svd(joined, full_matrices=False)
        energies = sizes.square()
    else:
        energies, vectors = torch.linalg.eigh(joined @ joined.T)
        energies = energies.flip(0)
        vectors = vectors.flip(1)
    if vectors.shape[1] < count:  # fewer directions than examples: add any others
        vectors = torch.linalg.qr(torch.cat([vectors, torch.eye(len(joined)).to(vectors)], 1))[0]
    following = float(energies[count]) if len(energies) > count else 0.0
    gap = float(energies[min(count, len(energies)) - 1]) / following if following else math.inf
    return vectors[:, :count], gap


def _one_open(mixed: Tensor, units: Tensor, inside: Tensor, span: Tensor, order: int) -> Tensor:
    """(n, S B^(order-1)): sum_j h_sj H_order(w_j) with all modes but the first inside the span."""
    along = mixed @ units
    found = []
    eye = torch.eye(span.shape[1]).to(span)
    for row, first in zip(mixed, along, strict=True):
        if order == 2:
            found.append((units.T * row) @ inside - row.sum() * span)
            continue
        pairs = (inside[:, :, None] * inside[:, None, :]).flatten(1)
        block = (units.T * row) @ pairs
        mean = first @ span
        crossed = span[:, :, None] * mean + span[:, None, :] * mean[:, None]
        block = block - (first[:, None, None] * eye + crossed).flatten(1)
        found.append(block)
    return torch.cat(found, 1)


def contracted(mixed: Tensor, units: Tensor, inside: Tensor, order: int) -> Tensor:
    """Moments (S, B, B) or (S, B, B, B) of responses (S, M) to units (M, B) that lie in the span.

    Example:
        >>> u = torch.tensor([[2.0]])
        >>> [float(contracted(torch.ones(1, 1), u, u, p)) for p in (2, 3)]
        [3.0, 2.0]
    """
    size = inside.shape[1]
    block = _one_open(mixed, units, inside, torch.eye(size).to(inside), order)
    whole = block.view(size, len(mixed), *[size] * (order - 1))
    return whole.movedim(0, 1)


def _fourth(mixed: Tensor, units: Tensor, probes: Tensor) -> Tensor:
    """(S L, B, B, B): the fourth moments of (S, M) responses, contracted with (L, B) probes."""
    size = units.shape[1]
    eye = torch.eye(size).to(units)
    pairs = (units[:, :, None] * units[:, None, :]).flatten(1)
    found = []
    for row in mixed:
        second = ((units.T * row) @ units).contiguous()
        for b in probes:
            weight = row * (units @ b)
            cubes = ((units.T * weight) @ pairs).view(size, size, size)
            vector = second @ b  # sum h (w.b) w
            total = cubes
            for i, j, k in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
                # one mode open, the other two joined by an identity; and b in one mode
                total = total - torch.einsum("a,bc->abc", vector, eye).permute(_order(i, j, k))
                total = total - torch.einsum("a,bc->abc", b, second).permute(_order(i, j, k))
                total = total + row.sum() * torch.einsum("a,bc->abc", b, eye).permute(
                    _order(i, j, k)
                )
            found.append(total)
    return torch.stack(found)


def _order(i: int, j: int, k: int) -> tuple[int, int, int]:
    """The permutation that moves mode 0 to position i."""
    places = [0, 0, 0]
    places[i] = 0
    places[j] = 1
    places[k] = 2
    return places[0], places[1], places[2]


def _quadratic(units: Tensor) -> Tensor:
    """The orthonormal quadratic functions of standard normal units (M, B): (M, B (B + 1) / 2)."""
    found = []
    for a, b in combinations_with_replacement(range(units.shape[1]), 2):
        product = units[:, a] * units[:, b]
        found.append((product - 1) / math.sqrt(2) if a == b else product)
    return torch.stack(found, 1)


def resolve_signs(
    found: Moments, components: Tensor, means: tuple[float, ...], orders: tuple[int, ...]
) -> tuple[Tensor, bool]:
    """Components (B, B) with the signs on which the moments of odd and even order agree, and
    whether there are any of even order: otherwise no sign is determined.

    In every source, the coefficient of x_i has the sign of r_i E s^(p) times the sign of x_i^p: an
    odd and an even order together give that of x_i. First and third orders vote, weighted by size.

    Source: this project; in paper B, theorem B.1, the signs stay unknown.
    """
    stacks = {2: found.second, 3: found.third}
    even = torch.zeros(len(found.first), components.shape[1]).to(components)
    if 2 in orders:
        even = coefficients(stacks[2], components) / means[2]
    elif 4 in orders:
        along = found.probes @ components
        parts = coefficients(found.fourth, components).view(len(even), len(along), -1)
        even = (parts * along).sum(1) / along.square().sum(0) / means[4]
    else:
        return components, False
    votes = torch.zeros_like(even[0])
    if 1 in orders:
        gram = torch.linalg.pinv(components)
        votes = votes + (means[1] ** 2) * (even * (found.first @ gram.T) / means[1]).sum(0)
    if 3 in orders:
        third = coefficients(stacks[3], components) / means[3]
        votes = votes + (means[3] ** 2 / 6) * (even * third).sum(0)
    return components * torch.where(votes < 0, -1.0, 1.0), bool((votes != 0).all())
