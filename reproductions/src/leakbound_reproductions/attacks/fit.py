"""Fit features to a random layer's responses, to refine the rough estimate from moments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leakbound_reproductions.attacks.moments import Responses

INNER = 60
FIRST_DAMPING = 1e-3
STILL = 1e-5
EXACT = 1e-26
LENGTHS = tuple(2.0**k for k in range(-6, 5))
SURELY = 1 - 1e-6


def fit_features(
    responses: Responses, activation: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> tuple[Tensor, float]:
    """Features (B, n), with the lengths that enter `activation`, of least squared error of g_k(w_j)
    = sum_i r_ki s(w_j . z_i), from a start nearby; and the share of variance they leave.

    The server drew the units and knows s: B n + K B unknowns against K M equations. Without noise,
    the answer is exact if the start is near enough. Coefficients are eliminated (variable
    projection, Kaufman 1975); damped Gauss-Newton steps use conjugate gradients.
    """
    problem = _Problem(responses, activation)
    z = _turned(problem, start.double().clone())
    damping = FIRST_DAMPING
    values, slopes = problem.hidden(z)
    r, residual = problem.solved(values)
    left = problem.energy(residual)
    for _ in range(steps):
        move = problem.step(values, slopes, r, residual, damping)
        tried = z + move
        new_values, new_slopes = problem.hidden(tried)
        new_r, new_residual = problem.solved(new_values)
        found = problem.energy(new_residual)
        if not found < left:
            damping *= 10
            if damping > 1e8:
                break
            continue
        gain = 1 - found / left
        left = found
        z = tried
        values = new_values
        slopes = new_slopes
        r = new_r
        residual = new_residual
        damping = max(damping / 10, 1e-12)
        if gain < STILL or left < EXACT:
            break
    return z, left


def noise_share(responses: Responses) -> float:
    """The share of known noise in the variance of the responses, weighted as in the fit."""
    mean = (responses.weights * responses.values).sum(1, keepdim=True)
    spread = (responses.weights * (responses.values - mean).square()).sum(1)
    energy = (responses.weights * responses.values.square()).sum(1)
    trust = 1 / (responses.noise + 1e-6 * energy).clamp_min(1e-300)
    return float((trust * responses.noise).sum() / (trust * spread).sum().clamp_min(1e-300))


def _turned(problem: _Problem, z: Tensor) -> Tensor:
    """The start with the common length and the signs that leave least."""

    def left(tried: Tensor) -> float:
        return problem.energy(problem.solved(problem.hidden(tried)[0])[1])

    best = z
    least = left(z)
    for factor in LENGTHS:
        found = left(factor * z)
        if found < SURELY * least:
            best = factor * z
            least = found
    for i in range(len(z)):
        tried = best.clone()
        tried[i] = -tried[i]
        found = left(tried)
        if found < SURELY * least:
            best = tried
            least = found
    return best


class _Problem:
    """Weighted least squares over sources (K, M); row weights are from noise, otherwise energy."""

    def __init__(self, responses: Responses, activation: Callable[[Tensor], Tensor]) -> None:
        self.activation = activation
        self.units = responses.units
        energy = (responses.weights * responses.values.square()).sum(1)
        trust = 1 / (responses.noise + 1e-6 * energy).clamp_min(1e-300)
        self.weights = responses.weights * trust[:, None]
        self.target = responses.values
        mean = (responses.weights * self.target).sum(1, keepdim=True)
        self.total = float((self.weights * (self.target - mean).square()).sum())

    def hidden(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The activation and its derivative at all units, (B, M) each."""
        with torch.enable_grad():
            before = (z @ self.units.T).requires_grad_()
            values = self.activation(before)
            (slopes,) = torch.autograd.grad(values.sum(), before)
        return values.detach(), slopes

    def solved(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Best coefficients (K, B) and the residual (K, M)."""
        r = self._projected(values, self.target)
        return r, self.target - r @ values

    def _projected(self, values: Tensor, rows: Tensor) -> Tensor:
        grams = torch.einsum("im,km,jm->kij", values, self.weights, values)
        sizes = grams.diagonal(dim1=1, dim2=2).amax(1)
        eye = torch.eye(len(values)).to(values)
        grams = grams + (1e-13 * sizes + 1e-300)[:, None, None] * eye
        inner = (self.weights * rows) @ values.T
        found: Tensor = torch.linalg.solve(grams, inner)
        return found

    def energy(self, residual: Tensor) -> float:
        """Share of the variance that is left."""
        return float((self.weights * residual.square()).sum()) / max(self.total, 1e-300)

    def step(
        self, values: Tensor, slopes: Tensor, r: Tensor, residual: Tensor, damping: float
    ) -> Tensor:
        """The damped Gauss-Newton move of the features, (B, n)."""

        def ahead(move: Tensor) -> Tensor:
            change = r @ (slopes * (move @ self.units.T))
            return change - self._projected(values, change) @ values

        def back(rows: Tensor) -> Tensor:
            weighted = self.weights * rows
            return ((r.T @ weighted) * slopes) @ self.units

        scale = ((r.square().T @ self.weights) * slopes.square()).sum(1, keepdim=True)
        scale = scale.clamp_min(1e-12 * float(scale.max()) + 1e-300)
        right = back(residual)
        move = torch.zeros_like(right)
        rest = right.clone()
        ready = rest / scale
        direction = ready.clone()
        size = float((rest * ready).sum())
        first = size
        for _ in range(INNER):
            if size <= 1e-10 * first or size == 0:
                break
            curved = back(ahead(direction)) + damping * scale * direction
            length = size / max(float((direction * curved).sum()), 1e-300)
            move = move + length * direction
            rest = rest - length * curved
            ready = rest / scale
            size, before = float((rest * ready).sum()), size
            direction = ready + (size / before) * direction
        return move
