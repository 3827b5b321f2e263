"""Rows of a table whose known columns show how much of a layer's gradient each of them has.

The gradient of a linear layer is D^T X + noise, with a row of D and of X for each example. Known
columns are coordinates of X, so they show D, and D shows the other columns. This works where noise
hides the span of the rows, or entries are withheld.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakbound.attacks.base import SentRow
from leakbound.attacks.blind import public_images
from leakbound.attacks.table.view import Block, LayerView, joint, linear_inputs
from leakbound.domains.table import middle_and_spread

COOLING = 30
SETTLING = 10
MOST = 1 << 25
ROUNDING = 10.0
LEAST = 1e-2
FAINT = 1e-2
TINY = 1e-12
HELD = 1e8
"""Steps in which the assumed noise falls to the true one, and steps after that; the largest number
of second moments; relative rounding of a gradient, in units of its type's; smallest spread of a
number, in units of its range; least share of a gradient's size
that is no noise; relative size that is rounding; how much surer a held row is than a public one.
"""


@dataclass(frozen=True, eq=False)
class PublicShares:
    """What rows may add to a layer's input in their free parts, and how likely it is without an
    update.

    Attributes:
        options: (K, d) what each option of a free level adds; `owner` (K,) numbers its block.
        shares: (K,) logarithms of the options' public shares.
        slopes: (N, d) what a free number adds from its lowest to its highest value.
        low: (d,) what all free numbers add at their lowest value.
        middle, spread: (N,) of public numbers, in units of their range.
    """

    levels: tuple[Block, ...]
    numbers: tuple[Block, ...]
    options: Tensor
    owner: Tensor
    shares: Tensor
    slopes: Tensor
    low: Tensor
    middle: Tensor
    spread: Tensor

    @staticmethod
    def of(
        seen: LayerView,
        width: int,
        public: Tensor | None,
    ) -> PublicShares:
        """The prior of public rows (n, *S) for a layer that gets `width` numbers, a bias's one
        included; without any, even shares.
        """
        levels = tuple(block for block in seen.levels if len(block.seen) > 1)
        numbers = seen.numbers
        count = sum(len(block.seen) for block in levels)
        options = torch.zeros(
            count,
            width,
            dtype=torch.float64,
        )
        owner = torch.zeros(count, dtype=torch.int64)
        shares = torch.zeros(count, dtype=torch.float64)
        start = 0
        for k, block in enumerate(levels):
            own = slice(start, start := start + len(block.seen))
            options[own, block.places] = block.seen
            owner[own] = k
            shares[own] = _shares(block, public).log()
        slopes = torch.zeros(
            len(numbers),
            width,
            dtype=torch.float64,
        )
        low = torch.zeros(width, dtype=torch.float64)
        for k, block in enumerate(numbers):
            slopes[k, block.places] = block.seen[-1] - block.seen[0]
            low[block.places] = block.seen[0]
        typical = torch.tensor([_typical(block, public) for block in numbers], dtype=torch.float64)
        middle, spread = typical.reshape(-1, 2).T
        return PublicShares(
            levels,
            numbers,
            options,
            owner,
            shares,
            slopes,
            low,
            middle,
            spread,
        )

    def cost(self, rows: Tensor) -> Tensor:
        """The negative log density of rows (count, n), up to a constant."""
        total = torch.zeros((), dtype=torch.float64)
        for k, block in enumerate(self.levels):
            total -= self.shares[self.owner == k][_nearest(block, rows)].sum()
        for k, block in enumerate(self.numbers):
            off = (_placed(block, rows) - self.middle[k]) / self.spread[k]
            total += off.square().sum() / 2
        return total

    def chosen(self, logits: Tensor) -> Tensor:
        """(K,) the chances of options with these logits, each block's of its own."""
        count = len(self.levels)
        most = logits.new_full((count,), -torch.inf)
        most = most.scatter_reduce(
            0,
            self.owner,
            logits,
            "amax",
        )
        weights = (logits - most[self.owner]).exp()
        sums = logits.new_zeros(count).index_add(
            0,
            self.owner,
            weights,
        )
        return weights / sums[self.owner]


def _nearest(
    block: Block,
    rows: Tensor,
) -> Tensor:
    """(N,) which of a block's options is nearest to each of the rows (N, n)."""
    held = rows[:, block.start : block.start + block.options.shape[1]]
    return torch.cdist(held.cpu().double(), block.options.double()).argmin(1)


def _placed(
    block: Block,
    rows: Tensor,
) -> Tensor:
    """(N,) a block's number in rows (N, n), in units of its range."""
    first, last = block.options[[0, -1], 0].double()
    return (rows[:, block.start].cpu().double() - first) / (last - first)


def _shares(
    block: Block,
    public: Tensor | None,
) -> Tensor:
    """(L,) the shares of a block's options in public rows, as if each occurred once more."""
    counts = torch.ones(len(block.options), dtype=torch.float64)
    if public is not None:
        counts += _nearest(block, public).bincount(minlength=len(counts))
    return counts / counts.sum()


def _typical(
    block: Block,
    public: Tensor | None,
) -> tuple[float, float]:
    """The median and the spread of public numbers, in units of their range; its middle without."""
    if public is None:
        return 0.5, 0.5
    middle, spread = middle_and_spread(_placed(block, public))
    return middle, max(spread, LEAST)


@dataclass(eq=False)
class _Belief:
    """Means and variances (count, d) of the layer's inputs, and variances (units,) of D."""

    inputs: Tensor
    blur: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Fit:
    """Rows that explain a layer's gradient under Gaussian noise, given their known parts.

    Attributes:
        gradient, precision: (units, d) the layer's gradient, and 1 / variance of its noise; 0 where
            it is withheld.
        fixed: (count, d) what the known parts add to the layer's input.
        prior: of the others.
    """

    row: SentRow
    views: tuple[LayerView, ...]
    members: tuple[Tensor, ...]
    gradient: Tensor
    precision: Tensor
    fixed: Tensor
    prior: PublicShares

    @staticmethod
    def of(
        row: SentRow,
        views: Sequence[LayerView],
        members: Sequence[Tensor],
    ) -> Fit | None:
        """The fit to a row of an update, for examples `members` (k,) of each group with known parts
        given; None if the layer is too wide, or the touched levels lack a known one.
        """
        name = views[0].name
        gradient, variance, sent = _layer(row, name)
        width = gradient.shape[1]
        if max(gradient.shape) * row.count**2 > MOST:
            return None
        if not all(len(block.seen) for view in views for block in view.levels):
            return None
        fixed = gradient.new_zeros(row.count, width)
        for view, some in zip(
            views,
            members,
            strict=True,
        ):
            for block in view.levels:
                if len(block.seen) == 1:
                    fixed[some[:, None], block.places] = block.seen[0]
        prior = PublicShares.of(
            views[0],
            width,
            public_images(row.observation),
        )
        precision = sent / variance
        return Fit(
            row,
            tuple(views),
            tuple(members),
            gradient,
            precision,
            fixed,
            prior,
        )

    def rows(self, held: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """(count, n) the likeliest rows, by mean-field variational Bayes.

        D is Gaussian, with a variance for each unit. At first the free coordinates of each input
        are Gaussian, too, so that all rows move together. Then each row in turn chooses options.
        The rows `held` (count, n) where `at` (count,) is True are taken as right until then.
        """
        return self._chosen(self._blended(held, at))

    def _blended(self, held: Tensor | None, at: Tensor | None) -> _Belief:
        """The inputs, if their free coordinates were Gaussian with the mean and variance that they
        have in public rows. The noise is taken to be as large as the gradient at first, so that no
        early choice decides.
        """
        prior = self.prior
        count = len(self.fixed)
        shares = prior.shares.exp()
        mean = shares @ prior.options + prior.low + prior.middle @ prior.slopes
        spread = shares @ prior.options.square() - (shares @ prior.options).square()
        spread = spread + prior.spread.square() @ prior.slopes.square()
        # Coordinates that all options share stay as they are.
        free = spread > TINY * spread.sum()
        sure = spread[free].reciprocal()[:, None].repeat(1, count)
        center = self.fixed + mean
        if held is not None:
            center[at] = self._inputs(held)[at]
            sure[:, at] *= HELD
        belief = _Belief(
            center.clone(),
            torch.zeros_like(self.fixed),
            self._scale(),
        )
        hot = float((self.gradient.square() * self.precision).mean().clamp_min(1.0))
        for k in range(COOLING + SETTLING):
            cold = hot ** (min(k / COOLING, 1.0) - 1)
            curve, pull = self._moments(belief, self.precision * cold)
            wide = curve[free] + torch.diag_embed(sure)
            along = pull[free] + sure * center[:, free].T
            blur = _inverse(wide)
            belief.inputs[:, free] = (blur @ along[:, :, None])[:, :, 0].T
            belief.blur[:, free] = blur.diagonal(dim1=1, dim2=2).T
        return belief

    def _chosen(self, belief: _Belief) -> Tensor:
        """(count, n) rows whose options are chosen one row after the other, given the others."""
        prior = self.prior
        count = len(self.fixed)
        options = prior.options.new_zeros(count, len(prior.options))
        places = prior.middle.repeat(count, 1)
        squares = prior.options.square()
        slopes = prior.slopes.square()
        sure = prior.spread.square().reciprocal()
        for _ in range(SETTLING):
            curve, pull = self._moments(belief, self.precision)
            for at in range(count):
                bend = curve[:, at, at]
                # What the other rows leave for this one's free parts.
                rest = pull[:, at] - (curve[:, at] * belief.inputs.T).sum(1)
                rest += bend * (belief.inputs[at] - self.fixed[at])
                gain = prior.options @ rest - squares @ bend / 2
                options[at] = prior.chosen(prior.shares + gain)
                level = options[at] @ prior.options
                steep = slopes @ bend + sure
                along = prior.slopes @ (rest - bend * prior.low)
                places[at] = (along + sure * prior.middle) / steep
                number = prior.low + places[at] @ prior.slopes
                belief.inputs[at] = self.fixed[at] + level + number
                belief.blur[at] = options[at] @ squares - level.square()
                belief.blur[at] += steep.reciprocal() @ slopes
        return self._whole(options, places)

    def _scale(self) -> Tensor:
        """(units,) a variance of D that explains the size of the gradient beyond its noise, before
        units differ.
        """
        size = self.gradient.square().mean()
        noise = self.precision[self.precision > 0].reciprocal().mean()
        return torch.maximum(size - noise, size * FAINT).expand(len(self.gradient))

    def _moments(
        self,
        belief: _Belief,
        precision: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What D, given the inputs, says of them: (d, count, count) and (d, count), the quadratic
        and the linear part of the log likelihood of each coordinate. It updates D's variances.
        """
        delta, spread = self._deltas(
            belief.inputs,
            belief.blur,
            precision,
            belief.scale,
        )
        second = delta[:, :, None] * delta[:, None] + spread
        belief.scale = second.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
        curve = torch.einsum(
            "uj,ubc->jbc",
            precision,
            second,
        )
        return curve, (precision * self.gradient).T @ delta

    def _deltas(
        self,
        inputs: Tensor,
        blur: Tensor,
        precision: Tensor,
        scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(units, count) the mean of D, and (units, count, count) its covariance, for inputs
        (count, d) with variances `blur`; the prior variance of a unit's is `scale`.
        """
        square = torch.einsum(
            "bj,uj,cj->ubc",
            inputs,
            precision,
            inputs,
        )
        square += torch.diag_embed(precision @ blur.T + 1 / scale[:, None])
        spread = _inverse(square)
        delta = torch.einsum(
            "ubc,cj,uj->ub",
            spread,
            inputs,
            precision * self.gradient,
        )
        return delta, spread

    def _whole(
        self,
        chances: Tensor,
        places: Tensor,
    ) -> Tensor:
        """(count, n) rows with the likeliest options and the mean numbers in their free parts."""
        prior = self.prior
        rows = torch.zeros(
            len(chances),
            *self.views[0].domain.shape,
            dtype=torch.float64,
        )
        for view, some in zip(
            self.views,
            self.members,
            strict=True,
        ):
            part = rows[some]
            for block in view.levels:
                if len(block.seen) == 1:
                    block.put(part, torch.zeros(len(some), dtype=torch.int64))
            rows[some] = part
        for k, block in enumerate(prior.levels):
            block.put(rows, chances[:, prior.owner == k].argmax(1))
        for k, block in enumerate(prior.numbers):
            first, last = block.options[[0, -1], 0].double()
            rows[:, block.start] = first + (last - first) * places[:, k]
        return self.views[0].domain.hard(rows)

    def _inputs(self, rows: Tensor) -> Tensor:
        """(count, d) what the layer gets from rows (count, n), with 1 for its bias."""
        inputs = linear_inputs(self.row.task, rows)[self.views[0].name]
        rest = self.gradient.shape[1] - inputs.shape[1]
        return torch.cat([inputs, inputs.new_ones(len(rows), rest)], 1)

    def cost(self, rows: Tensor) -> tuple[float, float]:
        """The negative log posterior of rows (count, n) up to a constant, lower for better ones,
        and the share of the gradient's size that they leave.
        """
        inputs = self._inputs(rows)
        still = torch.zeros_like(inputs)
        delta, spread = self._deltas(
            inputs,
            still,
            self.precision,
            self._scale(),
        )
        explained = torch.einsum(
            "ub,bj,uj->",
            delta,
            inputs,
            self.precision * self.gradient,
        )
        left = (self.gradient - delta @ inputs).square() * self.precision
        whole = self.gradient.square() * self.precision
        share = float((left.sum() / whole.sum()).sqrt())
        return float(self.prior.cost(rows) - (explained + spread.logdet().sum()) / 2), share


def _layer(
    row: SentRow,
    name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(units, d) a layer's gradient with the bias last, its noise's variance, and what was sent."""
    task = row.task
    weights = row.observation.weights
    gradient = joint(
        task,
        name,
        row.values,
    )
    flags = torch.ones_like(row.values) if weights is None else weights[row.at]
    sent = (
        joint(
            task,
            name,
            flags,
        )
        > 0
    )
    rounding = ROUNDING * float(torch.finfo(row.values.dtype).eps)
    variance = torch.full_like(gradient, (rounding * float(gradient.abs().max())) ** 2)
    if row.variance is not None:
        variance += joint(
            task,
            name,
            row.variance,
        )
    elif sent.all():
        # What no rows explain is noise, or weight decay, that is not known.
        rest = torch.linalg.svdvals(gradient)[row.count :]
        variance += rest.square().sum() / max(1, len(rest) * (max(gradient.shape) - row.count))
    return gradient, variance, sent


def _inverse(matrices: Tensor) -> Tensor:
    """The inverses of positive definite matrices (N, k, k), as far as rounding leaves them so."""
    largest = matrices.diagonal(dim1=1, dim2=2).amax(1)
    # Rows with equal inputs, and a precision far above that of the prior.
    jitter = TINY * largest[:, None].expand(-1, matrices.shape[1])
    return torch.linalg.inv(matrices + torch.diag_embed(jitter))
