"""Independent component analysis: separate sources from linear mixtures of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from leakbound import check
from leakbound._util import optimizers
from leakbound.domains import has_neighbors
from leakbound.randomness import normal

__all__ = [
    "Separation",
    "contrasts",
    "differences",
    "log_cosh",
    "row_space",
    "separate",
    "whitener",
]

# Alternating least squares with withheld entries: rounds, and the penalty at first and at last,
# relative to the largest singular value.
ROUNDS = 100
PENALTIES = (0.1, 1e-8)
TINY = 1e-300
# The fixed point: iterations, and the change of all rows at which it has settled.
TURNS = 300
SETTLED = 1e-9
# Draws of Gaussian rows that show how much contrast chance finds.
DRAWS = 10
# Smoothing of the absolute value, and of the bend at 0, from stage to stage.
WIDTHS = (0.1, 0.03, 0.01)
BENDS = (0.03, 0.01, 0.001)
# Weight of negative values of what cannot be negative.
COST = 8.0
# The penalty on negative values grows from stage to stage: its slope and its smoothing.
SLOPES = ((1.0, 0.02), (4.0, 0.02), (16.0, 0.02), (64.0, 0.005), (256.0, 0.005))
# Below this noise, rows are moved to where their sources are exactly 0, with a width that shrinks
# by the factor at each of the steps, down to the least.
EXACT = 1e-5
SHARPENED = 30
SHRINK = 0.7
LEAST = 1e-6
KINDS = ("general", "nonnegative", "image", "nonnegative image")
SOLVERS = ("likelihood", "contrast")
# A value below this share of the root mean square is 0.
ZERO = 1e-2
# A source has to exceed the contrast of Gaussian rows by this factor.
MARGIN = 1.5


class NotSeparable(ValueError):
    """Why mixtures cannot be separated: there are too few, or their rank is too low."""


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The fit `left @ inner`, (h, B) @ (B, n), of a matrix of rank B; float64.

    The rows of `inner` are orthogonal. `noise` is the (B, B) covariance of the error of a typical
    column, `level` the variance of the noise on an entry of weight 1, `clear` how many of the B
    directions stand out from the noise.
    """

    left: Tensor
    inner: Tensor
    noise: Tensor
    level: float
    clear: int


def row_space(
    matrix: Tensor,
    rank: int,
    weights: Tensor | None = None,
) -> RowSpace:
    """The best fit of rank `rank` to (h, n) in weighted squares, and its noise, estimated from the
    residual. `weights` are 1 / standard deviation of independent noise up to a factor, 0 if an
    entry is not known. NotSeparable: fewer rows or columns than `rank`, or a lower rank.
    """
    # Of the given type: the values were rounded before they became float64.
    exact = torch.finfo(matrix.dtype).eps
    matrix = matrix.double()
    weights = torch.ones_like(matrix) if weights is None else weights.double()
    matrix = torch.where(weights > 0, matrix, 0)
    seen = (weights > 0).any(1)
    full = matrix.new_zeros(len(matrix), rank)
    matrix = matrix[seen]
    weights = weights[seen]
    if min(matrix.shape) < rank:
        raise NotSeparable(
            f"{rank} sources need as many mixtures and values; "
            f"there are {matrix.shape[0]} mixtures of {matrix.shape[1]} values"
        )
    by_row = weights.amax(1, keepdim=True)
    if (weights == by_row).all():
        # Weights of whole rows scale them, so a truncated SVD is the best fit.
        left, inner = _truncated(matrix * by_row, rank)
        left = left / by_row
        columns = by_row
    else:
        left, inner = _weighted(matrix, rank, weights)
        columns = weights
    size = inner.norm(dim=1)
    if not size.min() > 30 * exact * size.max():
        raise NotSeparable(f"the mixtures have a rank below {rank}")
    level = _level(weights * (matrix - left @ inner), weights, rank)
    noise = level * torch.linalg.inv(_grams(left, columns.square()).mean(0))
    share = float((weights > 0).double().mean())
    # The largest singular value of a matrix of noise (Marchenko and Pastur).
    edge = math.sqrt(level) * sum(math.sqrt(side * share) for side in matrix.shape)
    loud = left * weights.square().mean(1, keepdim=True).sqrt()
    # Singular values of the large product are those of a B x B matrix.
    sides = [torch.linalg.qr(side, mode="r")[1] for side in (loud, inner.T)]
    strength = torch.linalg.svdvals(sides[0] @ sides[1].T)
    full[seen] = left
    return RowSpace(full, inner, noise, level, int((strength > 1.02 * edge).sum()))


def fit_column(
    left: Tensor,
    column: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Coefficients (B,) of a column (h,) in `left` (h, B), and their covariance at noise 1."""
    scaled = weights.double()[:, None] * left
    inverse = torch.linalg.pinv(scaled.T @ scaled, rtol=1e-14, hermitian=True)
    return inverse @ (scaled.T @ (weights * column).double()), inverse


def _truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The `rank` largest singular directions, from the smaller of the two Gram matrices."""
    tall = matrix.shape[0] > matrix.shape[1]
    small = matrix.T if tall else matrix
    left = torch.linalg.eigh(small @ small.T)[1][:, -rank:].flip(1)
    inner = left.T @ small
    if not tall:
        return left, inner
    size = inner.norm(dim=1).clamp_min(TINY)
    return (inner / size[:, None]).T, left.T * size[:, None]


def _weighted(
    matrix: Tensor,
    rank: int,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Alternating weighted least squares from the fit of the matrix filled with zeros. Both factors
    have a penalty that falls to almost nothing: without it, the rounds end in fits that match the
    seen entries and nothing else.
    """
    weight = (weights / weights.max()).square()
    left, inner = _truncated(weight * matrix, rank)
    largest = float(inner.norm(dim=1).max())
    root = (inner.norm(dim=1) * left.norm(dim=0)).sqrt()
    left = left / left.norm(dim=0) * root
    for done in range(ROUNDS):
        # The last rounds all have the least penalty, so that the fit settles.
        share = min(1.0, done / (0.7 * ROUNDS))
        ridge = largest * PENALTIES[0] ** (1 - share) * PENALTIES[1] ** share
        inner = _solve(left, matrix, weight, ridge)
        left = _solve(inner.T, matrix.T, weight.T, ridge).T
    # Alternating steps leave rows that are not orthogonal.
    left, turn = torch.linalg.qr(left)
    across, inner = _truncated(turn @ inner, rank)
    return left @ across, inner


def _solve(
    left: Tensor,
    matrix: Tensor,
    weight: Tensor,
    ridge: float,
) -> Tensor:
    """For every column its weighted, penalized least squares in `left`, (B, n)."""
    right = (weight * matrix).T @ left
    solved = torch.linalg.solve(_grams(left, weight, ridge), right[:, :, None])[:, :, 0]
    return solved.T


def _grams(
    left: Tensor,
    weight: Tensor,
    ridge: float = 0.0,
) -> Tensor:
    """(n, B, B) the normal matrix of every column."""
    rank = left.shape[1]
    flat = weight.T @ (left[:, :, None] * left[:, None, :]).flatten(1)
    regular = (ridge + TINY) * torch.eye(rank).to(flat)
    return flat.reshape(-1, rank, rank) + regular


def _level(
    left_over: Tensor,
    weights: Tensor,
    rank: int,
) -> float:
    """Variance of the noise at weight 1, from what a fit of that rank leaves."""
    rows, columns = left_over.shape
    # A matrix of rank r has r (rows + columns - r) free numbers.
    free = int((weights > 0).sum()) - rank * (rows + columns - rank)
    return float(left_over.square().sum()) / free if free > 0 else 0.0


def contrasts(sources: Tensor, slope: float = 1.0) -> Tensor:
    """How far every source is from Gaussian, [mean_t log cosh(a s_t) / a - c_a]^2, (B,).

    Rows (B, n) are first scaled to mean square 1. `slope` is a; c_a is the value of a Gaussian
    (Hyvarinen 1999).
    """
    unit = sources / sources.square().mean(1, keepdim=True).sqrt().clamp_min(TINY)
    return (log_cosh(slope * unit).mean(1) / slope - gaussian_level(slope)).square()


def log_cosh(values: Tensor) -> Tensor:
    """The log cosh of the values, without overflow."""
    size = values.abs()
    return size + functional.softplus(-2 * size) - math.log(2)


@lru_cache
def gaussian_level(slope: float) -> float:
    """c_a = E log cosh(a z) / a for a standard normal z."""
    from scipy.integrate import quad

    def density(z: float) -> float:
        size = slope * z
        if size < 1:
            value = math.log1p(2 * math.sinh(size / 2) ** 2)  # without cancellation near 0
        else:
            value = size + math.log1p(math.exp(-2 * size)) - math.log(2)
        return value * math.exp(-z * z / 2) * math.sqrt(2 / math.pi) / slope

    # The integrand bends at multiples of 1 / slope; beyond 40 the normal density is 0 in float64.
    edges = sorted({0.0, *(min(k / slope, 40.0) for k in (1, 3, 10, 20)), 2.0, 6.0, 40.0})
    return float(sum(quad(density, a, b, epsabs=0, epsrel=1e-13)[0] for a, b in pairwise(edges)))


def whitener(rows: Tensor) -> Tensor:
    """(B, B) the matrix that makes rows (B, n) uncorrelated, of mean square 1."""
    values, vectors = torch.linalg.eigh(rows @ rows.T / rows.shape[1])
    if not values.min() > 1e-13 * values.max():
        raise NotSeparable("the sources' differences from their means are linearly dependent")
    return (vectors / values.sqrt()).T


def rotation(
    white: Tensor,
    generator: torch.Generator,
    *,
    slope: float = 1.0,
    restarts: int = 1,
) -> Tensor:
    """The orthogonal matrix (B, B) of the largest contrast on whitened rows (B, n): FastICA's
    symmetric fixed-point iteration from random starts, then L-BFGS over rotations from the best.
    """
    if len(white) == 1:
        return torch.eye(1).to(white)

    def reached(turn: Tensor) -> Tensor:
        return contrasts(turn @ white, slope).mean()

    starts = []
    for _ in range(restarts):
        turn = torch.linalg.qr(normal(white.shape[:1] * 2, generator, like=white))[0]
        starts.append(_fixed_point(turn, white, slope))
    best = max(starts, key=lambda turn: float(reached(turn)))
    start = float(reached(best))

    def loss(raw: Tensor) -> Tensor:
        # A skew-symmetric matrix gives a rotation, so that no constraint is needed.
        # Contrasts are tiny, and the tolerances of L-BFGS are absolute: the start is the unit.
        return -reached(torch.matrix_exp(raw - raw.T) @ best) / max(start, 1e-300)

    raw = minimized(loss, torch.zeros_like(best))
    return torch.matrix_exp(raw - raw.T) @ best


def gaussian_ceiling(
    shape: tuple[int, int],
    generator: torch.Generator,
    slope: float,
) -> float:
    """The largest contrast that the rotation finds in Gaussian rows (B, n), in a few draws. It
    falls as 1 / n, so fewer columns are drawn and the result is scaled.
    """
    rows, columns = shape
    drawn = min(columns, max(500, 50 * rows))
    largest = 0.0
    for _ in range(DRAWS):
        white = normal(
            (rows, drawn),
            generator,
            like=torch.zeros((), dtype=torch.float64),
        )
        white = whitener(white) @ white
        turn = torch.linalg.qr(normal((rows, rows), generator, like=white))[0]
        turn = _fixed_point(turn, white, slope, 60)
        largest = max(largest, float(contrasts(turn @ white, slope).max()))
    return largest * drawn / columns


def minimized(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """L-BFGS with a line search; returns the start if the search leaves the finite numbers."""
    with torch.enable_grad():
        value = start.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        search = optimizers.LBFGS(
            [value],
            max_iter=300,
            history_size=20,
            tolerance_grad=1e-8,
            tolerance_change=1e-11,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            now = loss(value)
            # L-BFGS takes a flat view, which needs contiguous values.
            value.grad = torch.autograd.grad(now, value)[0].contiguous()
            return now

        search.step(closure)  # type: ignore[no-untyped-call]
    end = value.detach()
    return end if end.isfinite().all() else start


def _fixed_point(
    turn: Tensor,
    white: Tensor,
    slope: float,
    turns: int = TURNS,
) -> Tensor:
    for _ in range(turns):
        level = (slope * (turn @ white)).tanh()
        bend = slope * (1 - level.square()).mean(1, keepdim=True)
        u, _, vh = torch.linalg.svd(level @ white.T / white.shape[1] - bend * turn)
        before = turn
        turn = u @ vh
        # The absolute value: a row may change its sign in every turn.
        if float(((turn * before).sum(1).abs() - 1).abs().max()) < SETTLED:
            break
    return turn


def heavy_tailed(
    unmixing: Tensor,
    rows: Tensor,
    fit: RowSpace | None = None,
) -> Tensor:
    """The unmixing W (B, B) of symmetric, heavy-tailed sources W @ rows, near the one given.

    Minimizes sum_i mean_t |s_it| - log |det W|, the likelihood of Laplace-distributed values; the
    smoothing of the absolute value shrinks. With a `fit`, negative W @ fit.inner has a penalty.
    """
    base = whitener(rows)
    white = base @ rows
    turn = unmixing @ torch.linalg.inv(base)
    if fit is not None:
        inner = base @ fit.inner
        quiet = base @ fit.noise @ base.T
        # The sign of a source is arbitrary, but the penalty is on negative values.
        turn = turn * (turn @ inner).mean(1, keepdim=True).sign()
        scale = float((turn @ inner).square().mean(1).sqrt().mean())
    for width, bend in zip(WIDTHS, BENDS, strict=True):

        def loss(
            w: Tensor,
            width: float = width,
            bend: float = bend,
        ) -> Tensor:
            size = ((w @ white).square() + width**2).sqrt().mean(1).sum()
            value = size - torch.linalg.slogdet(w)[1]
            if fit is not None:
                value = value + COST * _below(w @ inner, w, quiet, bend * scale).mean(1).sum()
            return value

        turn = minimized(loss, turn)
    return turn @ base


def nonnegative(unmixing: Tensor, fit: RowSpace) -> Tensor:
    """The unmixing of sources that are at least 0, and often 0, near the one given.

    Minimizes sum_i mean_t r(s_it) - log |det W| with r(s) = s above 0 and -c s below, for a growing
    c. Of the unmixings whose sources have mean 1 and are rarely negative, this finds the one of the
    largest volume. r bends smoothly within the noise's standard deviation of 0. Without noise, each
    row is finally moved to where most of its source's values are exactly 0.
    """
    size = fit.inner.norm(dim=1, keepdim=True) / fit.inner.shape[1] ** 0.5
    white = fit.inner / size
    turn = unmixing * size.T
    quiet = fit.noise / size / size.T
    turn = turn * (turn @ white).mean(1, keepdim=True).sign()
    turn = turn / (turn @ white).abs().mean(1, keepdim=True)
    for slope, width in SLOPES:

        def loss(
            w: Tensor,
            slope: float = slope,
            width: float = width,
        ) -> Tensor:
            rows = w @ white
            below = (slope + 1) * _below(rows, w, quiet, width)
            return (rows + below).mean(1).sum() - torch.linalg.slogdet(w)[1]

        turn = minimized(loss, turn)
    noise = ((turn @ quiet) * turn).sum(1).clamp_min(0).sqrt()
    if float(noise.max()) < EXACT:
        turn = _onto_zeros(turn, white)
    return turn / size.T


def _below(
    rows: Tensor,
    w: Tensor,
    quiet: Tensor,
    width: float,
) -> Tensor:
    """How far values are below 0, smooth within `width` and the noise's standard deviation."""
    bend = ((w @ quiet) * w).sum(1, keepdim=True).clamp_min(1e-30).sqrt() + width
    return bend * functional.softplus(-rows / bend)


def _onto_zeros(turn: Tensor, white: Tensor) -> Tensor:
    """Least squares, reweighted by 1 / (s^2 + w^2) with a shrinking w."""
    width = 0.1
    for _ in range(SHARPENED):
        rows = turn @ white
        turn = turn / rows.square().mean(1, keepdim=True).sqrt()
        near = 1 / ((turn @ white).square() + width**2)
        moments = torch.stack([(white * row) @ white.T for row in near])
        least = torch.linalg.eigh(moments)[1][:, :, 0]
        turn = least * (least * turn).sum(1, keepdim=True).sign()
        width = max(SHRINK * width, LEAST)
    return turn


@dataclass(frozen=True)
class Separation:
    """How sources are separated; the settings of a cocktail-party attack.

    Args:
        solver: "likelihood" finds the rotation of the whitened mixtures with the largest contrast.
            Then, for images and for sources that are not negative, it finds the most likely
            unmixing, in which the sources may be correlated. "contrast" stops after the rotation.
        slope: a of the contrast mean_i [mean_t log cosh(a s_it) / a - c_a]^2, the squared distance
            of each source from a Gaussian's expectation c_a.
        restarts: random rotations to start from; the largest contrast wins.

    Source: Kariyappa et al. 2023 (Cocktail Party Attack), with the centered contrast of Hyvarinen
    1999 (FastICA).
    """

    solver: str = "likelihood"
    slope: float = 1.0
    restarts: int = 4

    def __post_init__(self) -> None:
        check.one_of(SOLVERS, solver=self.solver)
        check.positive(slope=self.slope)
        check.count(restarts=self.restarts)


@dataclass(frozen=True, eq=False)
class Separated:
    """Sources (B, n), float64, in arbitrary order, sign and scale.

    `mixing` (h, B) @ sources is the fit of the mixtures. `contrast` (B,) is each source's squared
    distance from a Gaussian. `noise` (B,) is the standard deviation on a value of each source, in
    that source's unit. `level` is the variance of the noise on a mixture of weight 1.
    """

    sources: Tensor
    mixing: Tensor
    contrast: Tensor
    noise: Tensor
    level: float
    problem: str | None


def separate(
    mixtures: Tensor,
    count: int,
    generator: torch.Generator,
    settings: Separation | None = None,
    *,
    kind: str = "general",
    shape: tuple[int, ...] | None = None,
    weights: Tensor | None = None,
) -> Separated:
    """Separate `count` sources (B, n) from linear mixtures (h, n) of them.

    For images of `shape` (C, H, W), the contrast uses the differences of neighboring pixels, which
    commute with mixing. The matrix found then unmixes the raw rows. Noise, at the level that the
    low-rank fit gives, is shrunk away at the end. Whitening does not subtract the noise's
    covariance first: that would amplify directions that hold little but noise.

    `weights` (h, n) are 1 / standard deviation of the noise up to a factor, 0 if an entry is
    withheld. `kind` is "nonnegative" if all sources are at least 0 and often 0. Sources must be
    linearly independent, and at most one may be Gaussian.

    Source: Kariyappa et al. 2023; Hyvarinen 1999. The differences and the likelihood are from this
        project.
    """
    settings = settings or Separation()
    check.one_of(KINDS, kind=kind)
    fit = row_space(mixtures, count, weights)
    seen = fit.inner - fit.inner.mean(1, keepdim=True)
    if kind.endswith("image"):
        seen = differences(fit.inner, shape)
    base = whitener(seen)
    turn = rotation(
        base @ seen,
        generator,
        slope=settings.slope,
        restarts=settings.restarts,
    )
    unmixing = turn @ base
    contrast = contrasts(unmixing @ seen, settings.slope)
    if settings.solver == "likelihood" and kind == "nonnegative":
        unmixing = nonnegative(unmixing, fit)
    elif settings.solver == "likelihood" and kind != "general":
        unmixing = heavy_tailed(unmixing, seen, fit if kind == "nonnegative image" else None)
    noise = ((unmixing @ fit.noise) * unmixing).sum(1).clamp_min(0).sqrt()
    if fit.clear < count:
        problem: str | None = f"only {fit.clear} of {count} sources stand out from the noise"
    elif settings.solver == "likelihood" and kind == "nonnegative":
        problem = _too_few_zeros(unmixing @ fit.inner, noise)
    else:
        problem = _looks_gaussian(contrast, seen.shape[1], generator, settings.slope)
    mixing = fit.left @ torch.linalg.inv(unmixing)
    return Separated(unmixing @ _shrunk(fit), mixing, contrast, noise, fit.level, problem)


def differences(rows: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """Differences of neighbors along both image axes, (B, n) to (B, n'), centered."""
    if shape is None or not has_neighbors(shape) or math.prod(shape) != rows.shape[1]:
        raise ValueError(f"shape is {shape}; images of {rows.shape[1]} values need (C, H, W)")
    images = rows.reshape(-1, *shape)
    parts = [images.diff(dim=axis).flatten(1) for axis in (2, 3)]
    joined = torch.cat(parts, 1)
    return joined - joined.mean(1, keepdim=True)


def _shrunk(fit: RowSpace) -> Tensor:
    """The rows of the fit, moved to their mean as far as noise explains their spread."""
    mean = fit.inner.mean(1, keepdim=True)
    away = fit.inner - mean
    whiten = whitener(away)
    values, turn = torch.linalg.eigh(whiten @ fit.noise @ whiten.T)
    kept = (1 - values).clamp(0, 1)
    back = torch.linalg.inv(whiten) @ turn
    return mean + (back * kept) @ (turn.T @ whiten @ away)


def _looks_gaussian(
    contrast: Tensor,
    columns: int,
    generator: torch.Generator,
    slope: float,
) -> str | None:
    """Whether two sources or more are no further from Gaussian than rotated noise gets."""
    if len(contrast) == 1:
        return None
    limit = MARGIN * gaussian_ceiling((len(contrast), columns), generator, slope)
    near = int((contrast <= limit).sum())
    if near < 2:
        return None
    return f"{near} of {len(contrast)} sources look Gaussian: they cannot be distinguished"


def _too_few_zeros(sources: Tensor, noise: Tensor) -> str | None:
    scale = sources.square().mean(1).sqrt()
    zeros = (sources.abs() < (ZERO * scale + 2 * noise)[:, None]).sum(1)
    least = int(zeros.min())
    if least >= 2 * len(sources):
        return None
    return f"a source is 0 at {least} of {sources.shape[1]} places: too few to identify it"
