"""Updates and release distributions: what leaves a client, and its noise given the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from leakbound.covariance import Structured
from leakbound.randomness import SecureSource, Source, laplace, normal, on_grid

Covariance = float | Tensor | Structured


class Unit(IntEnum):
    """Whose contribution one row of an `Update` holds. A chain of defenses only coarsens it."""

    EXAMPLE = 0
    CLIENT = 1
    COHORT = 2

    @property
    def noun(self) -> str:
        """The unit as a word for messages: 'example', 'client' or 'cohort'."""
        return self.name.lower()


@dataclass(frozen=True, eq=False)
class Exact:
    """The release is a deterministic function of the data (given the mask, if there is one)."""

    private: bool = False


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Gaussian noise on the release.

    `covariance` is a scalar, a diagonal (P,) or (R, P), or diagonal plus low rank.
    """

    covariance: Covariance
    private: bool = False

    @property
    def variance(self) -> float | Tensor:
        """The variance of every coordinate: a scalar, (P,) or (R, P)."""
        covariance = self.covariance
        return covariance.diagonal if isinstance(covariance, Structured) else covariance


@dataclass(frozen=True, eq=False)
class Laplace:
    """Laplace noise on the release; `scale` is a scalar or one number per coordinate (P,)."""

    scale: float | Tensor
    private: bool = False


@dataclass(frozen=True, eq=False)
class Unknown:
    """The release distribution given the data is not known, for the stated reason."""

    reason: str
    private: bool = True


Law = Exact | Gaussian | Laplace | Unknown
"""The release distribution given the data. `private`: the noise itself depends on the batch."""


@dataclass(frozen=True, eq=False)
class Update:
    """What leaves a client, in gradient units: (theta_before - theta_after) / learning_rate.

    Defenses change an update only through `scaled`, `noised`, `masked`, `summed` and `opaque`.
    These keep the declared distribution true, so that attacks and bounds can trust it.

    Attributes:
        rows: (R, P), one row per unit.
        examples: number of examples in each row, R numbers.
        law: the noise of each row, independent between rows.
        mask: (R, P) bool, False if a coordinate is withheld (sent as zero); None: all are sent.
        bound: the L2 bound on what one example can add to a row; None if nothing bounds it.
        drawn: the mask was drawn at random; once it is covered, the distribution is not known.
        mask_private: the visible mask was chosen from the rows, and leaks information about them.
        spread_public: the variances do not depend on the batch, even if the distribution does
            (noise of public variances covered a mask that was chosen by value).
    """

    rows: Tensor
    unit: Unit
    examples: tuple[int, ...]
    law: Law = Exact()
    mask: Tensor | None = None
    bound: float | None = None
    drawn: bool = False
    mask_private: bool = False
    spread_public: bool = False

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or len(self.rows) != len(self.examples):
            raise ValueError(
                f"rows has shape {tuple(self.rows.shape)} and examples names "
                f"{len(self.examples)} rows; give rows (R, P) and R numbers"
            )

    def scaled(self, factor: float) -> Update:
        """Multiply every row by a number that does not depend on the data."""
        law = self.law
        if isinstance(law, Gaussian):
            law = replace(law, covariance=law.covariance * factor**2)
        elif isinstance(law, Laplace):
            law = replace(law, scale=law.scale * abs(factor))
        bound = None if self.bound is None else self.bound * abs(factor)
        return replace(self, rows=self.rows * factor, law=law, bound=bound)

    def noised(
        self,
        noise: Gaussian | Laplace,
        source: Source,
        *,
        keep_mask: bool = False,
    ) -> Update:
        """Add independent noise of the given distribution to every coordinate, also masked ones.

        Noise covers the zeros of a mask, so the mask is no longer visible: it is dropped. With
        `keep_mask` withheld coordinates stay withheld, and noise is added only to the rest. Noise
        from the system's entropy is added in float64, and the sum is put on a grid
        (`randomness.on_grid`).
        """
        _check_representable(noise, self.rows)
        public = not noise.private and (isinstance(self.law, Exact) or self.spread_public)
        kept = self.mask if keep_mask else None
        rows = _noisy(self.rows, noise, source, kept)
        if kept is not None:
            before = self.law
            if self.mask_private and isinstance(before, Exact):
                before = Exact()  # only the mask is private, and it stays visible
            law = _sum_of(before, _restricted(noise, kept))
            return replace(self, rows=rows, law=law, spread_public=public)
        law = _sum_of(self.law, noise)
        if self.mask_private and isinstance(law, Gaussian | Laplace):
            law = replace(law, private=True)
        if self.drawn:
            law = Unknown("noise covers which coordinates were drawn")
        return replace(
            self,
            rows=rows,
            law=law,
            mask=None,
            drawn=False,
            mask_private=False,
            spread_public=public,
        )

    def mapped(self, root: Structured, *, whiten: bool = False) -> Update:
        """Map every row y to S y, S the root of a public covariance, or to S⁻¹ y to `whiten`."""
        law: Law = self.law
        white = isinstance(law, Gaussian) and isinstance(law.covariance, float | int)
        if isinstance(law, Gaussian) and white and not whiten:
            law = replace(law, covariance=root.to(self.rows) * float(law.covariance))  # type: ignore[arg-type]
        elif isinstance(law, Gaussian | Laplace):
            law = Unknown("coordinates were mixed after the noise")
        rows = root.whiten(self.rows) if whiten else root.color(self.rows)
        moved = replace(self, rows=rows, law=law, bound=None)
        if self.mask is not None and root.blocks:
            law = Unknown("coordinates were mixed after a mask")
            return replace(
                moved,
                law=law,
                mask=None,
                drawn=False,
                mask_private=False,
            )
        return moved

    def masked(
        self,
        mask: Tensor,
        *,
        by_value: bool,
        drawn: bool = False,
    ) -> Update:
        """Withhold the coordinates where `mask` (R, P) is False.

        A mask chosen `by_value` of the rows is itself a release (the law is private), and after
        noise the distribution is not known. A mask that was `drawn` is independent of the rows.
        """
        law: Law = self.law
        covered = isinstance(law, Exact) and law.private and not self.mask_private
        private = self.mask_private or (by_value and not covered)
        if by_value and isinstance(law, Exact):
            law = Exact(private=True)
        elif by_value and not isinstance(law, Unknown):
            law = Unknown("coordinates were chosen by their noisy values")
        return replace(
            self,
            rows=self.rows * mask,
            law=law,
            mask=mask if self.mask is None else mask & self.mask,
            bound=None if by_value else self.bound,  # one example can change which ones are sent
            drawn=drawn or self.drawn,
            mask_private=private,
        )

    def summed(self, unit: Unit) -> Update:
        """Add all rows into one row of a coarser unit.

        Only the union of several rows' masks is visible: if they were chosen by value, the law of
        the sum is private.
        """
        law: Law = self.law
        several = len(self.rows) > 1
        if isinstance(law, Gaussian):
            law = self._summed_gaussian(law)
        elif isinstance(law, Laplace) and several:
            law = Unknown("a sum of Laplace draws is not Laplace")
        if self.drawn and several:
            law = Unknown("the sum covers which coordinates each row sent")
        covered = self.mask_private and several
        return replace(
            self,
            rows=self.rows.sum(0, keepdim=True),
            unit=unit,
            examples=(sum(self.examples),),
            law=replace(law, private=True) if covered else law,
            mask=None if self.mask is None else self.mask.any(0, keepdim=True),
            mask_private=self.mask_private and not several,
            spread_public=self.spread_public and not covered,
        )

    def _summed_gaussian(self, law: Gaussian) -> Law:
        covariance = law.covariance
        shared = not isinstance(covariance, Tensor) or covariance.ndim < 2
        if shared and self.mask is None:
            return replace(law, covariance=covariance * len(self.rows))
        if isinstance(covariance, Structured):
            return Unknown("correlated noise was masked and summed")
        wide = torch.as_tensor(covariance, device=self.rows.device).expand_as(self.rows)
        total = (wide if self.mask is None else wide * self.mask).sum(0)
        return replace(law, covariance=total)

    def opaque(
        self,
        rows: Tensor,
        reason: str,
        *,
        bound: float | None = None,
    ) -> Update:
        """Rows changed by any other function of the rows: the noise distribution is then lost."""
        law = Unknown(reason) if isinstance(self.law, Gaussian | Laplace) else self.law
        return replace(self, rows=rows, law=law, bound=bound)

    def seen(self, *, defense_known: bool = True) -> Update:
        """The update as a server sees it, which knows the defense or nothing about it.

        Variances that depend on the batch are not sent and not known: the law is hidden. Noise of
        public variances over a private mask, or on what it leaves, has no such variances.
        """
        if not defense_known:
            law = Unknown("the defense is not known to the attacker")
            return Update(self.rows, self.unit, self.examples, law)
        hidden = self.law.private and not self.spread_public
        if not isinstance(_spread(self.law), float | int | None) and hidden:
            reason = "the noise depends on the private batch: its distribution is not sent"
            return replace(self, law=Unknown(reason))
        return self

    @staticmethod
    def stack(updates: list[Update]) -> Update:
        """Stack one-row updates of several clients into one update with a row for each."""
        rows = torch.cat([u.rows for u in updates])
        mask = None
        if any(u.mask is not None for u in updates):
            masks = (
                torch.ones_like(u.rows, dtype=torch.bool) if u.mask is None else u.mask
                for u in updates
            )
            mask = torch.cat([*masks])
        bounds = [u.bound for u in updates if u.bound is not None]
        return Update(
            rows,
            updates[0].unit,
            tuple(n for u in updates for n in u.examples),
            _law_of_rows(updates),
            mask,
            # A single row without a bound leaves the sum without one.
            max(bounds) if len(bounds) == len(updates) else None,
            drawn=any(u.drawn for u in updates),
            mask_private=any(u.mask_private for u in updates),
            spread_public=all(u.spread_public for u in updates),
        )


def _noisy(
    rows: Tensor,
    noise: Gaussian | Laplace,
    source: Source,
    mask: Tensor | None,
) -> Tensor:
    """Add noise on a mask to rows; from system entropy in float64, and on a grid if white."""
    if not isinstance(source, SecureSource):
        draw = _draw(rows, noise, source)
        return rows + (draw if mask is None else draw * mask)
    wide = rows.double()
    if isinstance(noise, Gaussian) and isinstance(noise.covariance, Structured):
        root = noise.covariance.to(wide)
        white = root.whiten(wide) + normal(wide.shape, source, like=wide)
        # On the grid while the noise is white; coloring it afterwards is post-processing.
        return root.color(on_grid(white, 1.0)).to(rows)
    size = torch.as_tensor(_spread(noise)).to(wide)
    size = size if isinstance(noise, Laplace) else size.sqrt()
    released = on_grid(wide + _draw(wide, noise, source), size).to(rows)
    return released if mask is None else torch.where(mask, released, rows)


def _draw(
    like: Tensor,
    noise: Gaussian | Laplace,
    source: Source,
) -> Tensor:
    spread = _spread(noise)
    size = spread.to(like) if isinstance(spread, Tensor) else spread
    if isinstance(noise, Laplace):
        return laplace(like.shape, source, like=like) * size
    draw = normal(like.shape, source, like=like)
    return size.color(draw) if isinstance(size, Structured) else draw * size**0.5


def _law_of_rows(updates: list[Update]) -> Law:
    """One law for all rows: the common one, or Gaussian with a covariance for each row."""
    first = updates[0].law
    if all(_same_law(first, update.law) for update in updates):
        return first
    parts = []
    for update in updates:
        law = update.law
        rows = update.rows
        if not isinstance(law, Gaussian) or isinstance(law.covariance, Structured):
            return Unknown("the clients' release distributions differ")
        covariance = torch.as_tensor(
            law.covariance,
            dtype=torch.float64,
            device=rows.device,
        )
        parts.append(covariance.expand(rows.shape))
    return Gaussian(torch.cat(parts), any(update.law.private for update in updates))


def _sum_of(law: Law, noise: Gaussian | Laplace) -> Law:
    if isinstance(law, Exact):
        return replace(noise, private=noise.private or law.private)
    if isinstance(law, Gaussian) and isinstance(noise, Gaussian):
        if isinstance(law.covariance, Structured) or isinstance(noise.covariance, Structured):
            return Unknown("correlated noise was added to other noise")
        return Gaussian(law.covariance + noise.covariance, law.private or noise.private)
    return law if isinstance(law, Unknown) else Unknown("noise of two distributions was added")


def _restricted(noise: Gaussian | Laplace, mask: Tensor) -> Gaussian | Laplace:
    """Noise on the coordinates of a mask (R, P) only; rejects correlated noise."""
    if isinstance(noise, Laplace):
        return replace(noise, scale=mask * torch.as_tensor(noise.scale, device=mask.device))
    if isinstance(noise.covariance, Structured):
        raise ValueError("correlated noise cannot fall on what a mask leaves; use diagonal noise")
    return replace(noise, covariance=mask * torch.as_tensor(noise.covariance, device=mask.device))


def _spread(law: Law) -> Any:
    """The covariance of Gaussian noise, the scale of Laplace noise; None if there is no noise."""
    return getattr(law, "covariance", getattr(law, "scale", None))


def _same_law(a: Law, b: Law) -> bool:
    if type(a) is not type(b) or a.private != b.private:
        return False
    one = _spread(a)
    other = _spread(b)
    if isinstance(one, Structured) and isinstance(other, Structured):
        return one.equals(other)
    if one is None or isinstance(one, Structured) or isinstance(other, Structured):
        return one is other
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def _check_representable(noise: Gaussian | Laplace, rows: Tensor) -> None:
    """No variance (scale for Laplace noise) above 0 may become 0 or infinite in the rows' type."""
    spread = _spread(noise)
    name = "variance" if isinstance(noise, Gaussian) else "scale"
    if isinstance(spread, Structured):
        level = spread.scale
        lost = level.to(rows).square()
        wrong = (lost == 0) | ~lost.isfinite()  # a structured covariance has no zeros itself
        level = level.double().square()
    else:
        level = torch.as_tensor(spread, dtype=None if isinstance(spread, Tensor) else torch.float64)
        alone = isinstance(noise, Gaussian) and not isinstance(spread, Tensor)
        lost = (level.sqrt() if alone else level).to(rows.dtype)  # a number's root is cast
        wrong = ((lost == 0) & (level > 0)) | lost.isinf()
        if not isinstance(spread, Tensor):
            wrong = wrong | (level == 0)
    if bool(wrong.any()):
        value = float(level[wrong].reshape(-1)[0])
        raise ValueError(
            f"the noise has a {name} of {value:.4g}, which is 0 or infinite in {rows.dtype}; give "
            "a level that this type can hold, or a task of another type"
        )
