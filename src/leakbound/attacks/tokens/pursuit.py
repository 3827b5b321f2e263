"""Rank-aware matching pursuit: which atoms of a dictionary explain rows, for certain or likely."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import scipy
import torch
from torch import Tensor

CHANCE = 1e-3
"""The chance of a wrong token, by counting, below which an answer may be certain."""


class Atoms:
    """The layer's inputs for every token (and place), with what they have outside of a subspace."""

    def __init__(
        self,
        parts: Iterator[tuple[Tensor, Tensor]],
        by_place: bool,
    ) -> None:
        self.parts = []
        for tokens, values in parts:
            inputs = values if by_place else values[:, :1]
            count, places, _ = inputs.shape
            index = torch.stack(
                [tokens.cpu().repeat_interleave(places), torch.arange(places).repeat(count)], 1
            )
            flat = inputs.flatten(0, 1).cpu()
            flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
            size = flat.square().sum(1)
            self.parts.append((index, flat, size, size.clone()))

    def __len__(self) -> int:
        return sum(len(index) for index, *_ in self.parts)

    def at(self, where: tuple[int, int]) -> Tensor:
        """One atom (d,), float64."""
        return self.parts[where[0]][1][where[1]].double()

    def named(self, where: tuple[int, int]) -> tuple[int, int]:
        """Token and place of one atom."""
        token, place = self.parts[where[0]][0][where[1]].tolist()
        return token, place

    def room(self, inside: Tensor) -> int:
        """The number of dimensions that the atoms span outside of a subspace (d, c)."""
        _, values, *_ = self.parts[0]
        step = max(1, len(values) // (2 * values.shape[1]))
        some = values[::step][: 2 * values.shape[1]].double()
        some = some - (some @ inside) @ inside.T
        some = some / some.norm(dim=1, keepdim=True).clamp_min(1e-300)
        return int(torch.linalg.matrix_rank(some, rtol=1e-5))

    def reset(self) -> None:
        """Forget the subspace."""
        self.parts = [(index, values, size, size.clone()) for index, values, size, _ in self.parts]

    def best(
        self,
        new: Tensor,
        wanted: Tensor,
    ) -> tuple[float, tuple[int, int]]:
        """Add `new` (d, c) to the subspace; the atom whose direction outside of it holds the most
        of `wanted` (d, k), and how much; (-1, -1) if all atoms lie inside.
        """
        top = 0.0
        where = (-1, -1)
        both = torch.cat([new, wanted], 1)
        for number, (_, values, size, rest) in enumerate(self.parts):
            seen = (values @ both.to(values)).square()
            rest -= seen[:, : new.shape[1]].sum(1)
            score = seen[:, new.shape[1] :].sum(1) / rest
            # There the quotient is rounding over rounding.
            score[rest <= INSIDE * size] = 0.0
            value, row = score.max(0)
            if float(value) > top:
                top = float(value)
                where = (number, int(row))
        return math.sqrt(top), where


ROWS = 4096
"""Atoms that one step of a comparison takes."""
INSIDE = 1e-4
"""An atom with less than this share of its square outside of a subspace lies in it."""
EDGE = 1.25
"""Factor on the largest singular value that rounding has."""


def edge(rows: int, width: int) -> float:
    """The largest singular value that counts as rounding, of rows in its units."""
    return EDGE * (math.sqrt(rows) + math.sqrt(max(width, 1)))


ALIKE = 0.99
"""The share of a direction above which another atom's is computed in double precision."""
MARGIN = 2.0
"""Factor on what rounding puts into one direction, for an answer that is certain."""


def faint(rows: int, atoms: int) -> float:
    """What rounding puts into the direction of any of so many atoms, but for a small chance."""
    return math.sqrt(rows) + math.sqrt(2 * math.log(atoms / CHANCE))


@dataclass(frozen=True, eq=False)
class Chosen:
    """Atoms (k, d) that explain rows: their positions, and for each the part of the rows' norm that
    only it explains (`alone`), in its own direction (`along`, (d, k)).
    """

    where: list[tuple[int, int]]
    alone: Tensor
    along: Tensor
    residual: Tensor
    done: bool


SHARE = 0.6
KEPT = 0.7
RETRIES = 4
"""Atoms of a failed pursuit that are looked at, relative to the dimensions; those of them that are
kept; and the number of further attempts.
"""


def pursue(
    atoms: Atoms,
    rows: Tensor,
    inside: Tensor,
    most: int,
) -> Chosen:
    """Rank-aware matching pursuit of rows (m, d) in units of their rounding.

    It adds the atom with the largest share in the residual's column space of what it has outside of
    the atoms so far, until the residual is rounding; then weak atoms that still stand out of it.
    Then it drops atoms that were not needed.
    `inside` (d, c) is a space that all atoms share, which counts as chosen. A failed pursuit starts
    again `RETRIES` times, from the most needed of its first atoms.
    """
    first, done = _grown(atoms, rows, inside, [], most)
    where = first
    size = SHARE * (len(inside) - inside.shape[1])
    for _ in range(RETRIES):
        if done:
            break
        held = pruned(atoms, rows, inside, where[: int(size)], False)
        # Wrong early choices are those that the later ones made superfluous.
        order = held.alone.argsort(descending=True).tolist()[: int(KEPT * len(held.where))]
        where, done = _grown(atoms, rows, inside, [held.where[k] for k in order], most)
    return pruned(atoms, rows, inside, where if done else first, done)


def _grown(
    atoms: Atoms,
    rows: Tensor,
    inside: Tensor,
    where: list[tuple[int, int]],
    most: int,
) -> tuple[list[tuple[int, int]], bool]:
    """Add atoms one by one until the residual is rounding; whether it is."""
    atoms.reset()
    basis = inside
    where = list(where)
    if where:
        held = torch.stack([atoms.at(one) for one in where], 1)
        basis = torch.linalg.qr(torch.cat([inside, held], 1))[0]
    new = basis
    rest = rows.T - basis @ (basis.T @ rows.T)
    while True:
        u, s, _ = torch.linalg.svd(rest, full_matrices=False)
        keep = s > edge(len(rows), len(u) - basis.shape[1])
        done = not keep.any()  # then single weak atoms may still stand out
        if len(where) >= most:
            return where, done
        size, position = atoms.best(new, rest if done else u[:, keep])
        if position[0] < 0 or (done and size <= faint(len(rows), len(atoms))):
            return where, done
        atom = atoms.at(position)
        # Twice: one step loses digits where atoms are nearly dependent.
        for _ in range(2):
            atom = atom - basis @ (basis.T @ atom)
        new = (atom / atom.norm())[:, None]
        basis = torch.cat([basis, new], 1)
        rest = rest - new @ (new.T @ rest)
        where.append(position)


def pruned(
    atoms: Atoms,
    rows: Tensor,
    inside: Tensor,
    where: list[tuple[int, int]],
    done: bool,
) -> Chosen:
    """Drop atoms one by one, the least needed first, as long as the residual is rounding."""
    target = rows.T - inside @ (inside.T @ rows.T)
    while True:
        if not where:
            none = torch.zeros(0, dtype=torch.float64)
            return Chosen([], none, target[:, :0], target, done)
        held = torch.stack([atoms.at(one) for one in where], 1)
        held = held - inside @ (inside.T @ held)
        q, r = torch.linalg.qr(held)
        inverse = torch.linalg.solve_triangular(
            r,
            torch.eye(len(r)).double(),
            upper=True,
        )
        coefficients = inverse @ (q.T @ target)
        length = inverse.norm(dim=1)
        alone = coefficients.norm(dim=1) / length
        residual = target - held @ coefficients
        along = q @ (inverse / length[:, None]).T
        last = int(alone.argmin())
        if done and float(alone[last]) <= faint(len(rows), len(atoms)):
            where = [one for k, one in enumerate(where) if k != last]
            continue
        return Chosen(where, alone, along, residual, done)


def certified(
    atoms: Atoms,
    chosen: Chosen,
    rows: Tensor,
    inside: Tensor,
    room: int,
) -> tuple[bool, str]:
    """Whether no other set of as few atoms explains the rows, and why.

    The number of atoms leaves one sparse answer if the atoms are in general position. A random set
    explains the rows with a small chance. No single atom can replace another one, and two or three
    random ones do with a small chance.
    """
    target = rows.T - inside @ (inside.T @ rows.T)
    limit = edge(len(rows), room - len(chosen.where))
    count = len(chosen.where)
    size = float(torch.linalg.matrix_norm(chosen.residual, 2))
    if not chosen.done:
        return False, (
            f"the residual is {size / limit:.3g} times the rounding of the update (too many "
            "tokens, Adam, weight decay or undeclared noise): undecided, not protected"
        )
    if not count:
        return False, "the update is not larger than its rounding"
    s = torch.linalg.svdvals(target)
    s = s[s > limit]
    # Otherwise the atoms are independent, and any answer is the only one.
    several = room < len(atoms)
    if several and count >= (room + len(s)) / 2:
        return False, (
            f"{count} tokens explain the update; one answer alone is assured below half of "
            f"{room} dimensions plus rank {len(s)}"
        )
    others = count * math.log(max(len(atoms), 2)) - math.log(CHANCE)
    if several and others > float((s / limit).log().sum()) * (room - count):
        return False, "the rounding of the update is too large to exclude other sets by counting"
    left = chosen.alone * (1 - _replaced(atoms, chosen, inside)).clamp_min(0).sqrt()
    noise = MARGIN * faint(len(rows), len(atoms))
    if (left <= size + noise).any():
        odd = atoms.named(chosen.where[int(left.argmin())])[0]
        return False, f"another token explains the update as well as token {odd}"
    weak = int(chosen.alone.argmin())
    free = room - count + 1
    share = min(1.0, (noise / float(chosen.alone[weak])) ** 2)
    if several and _by_chance(len(atoms), free, share) > CHANCE:
        odd = atoms.named(chosen.where[weak])[0]
        return False, f"the part of token {odd} is near to rounding: some others may explain it"
    return True, f"{count} tokens, {room} dimensions and rank {len(s)}: no other set is as small"


def _by_chance(
    atoms: int,
    free: int,
    share: float,
) -> float:
    """How many sets of two or three random atoms, in `free` dimensions, leave at most this share of
    the square of a direction.
    """
    total = 0.0
    for size in (2, 3):
        if free <= size:
            return math.inf
        odds = float(scipy.stats.beta.logcdf(share, (free - size) / 2, size / 2))
        # The exponential of more than 709 overflows.
        total += math.exp(min(700.0, size * math.log(atoms) - math.lgamma(size + 1) + odds))
    return total


def _replaced(
    atoms: Atoms,
    chosen: Chosen,
    inside: Tensor,
) -> Tensor:
    """(k,) for each chosen atom, the largest share of its own direction that another one covers."""
    held = torch.stack([atoms.at(one) for one in chosen.where], 1)
    basis = torch.linalg.qr(torch.cat([inside, held], 1))[0]
    top = torch.zeros(len(chosen.where), dtype=torch.float64)
    for number, (_, values, size, _) in enumerate(atoms.parts):
        taken = [row for part, row in chosen.where if part == number]
        for at, some in enumerate(torch.split(values, ROWS)):
            start = at * ROWS
            along = (some @ chosen.along.to(some)).square()
            rest = size[start : start + ROWS] - (some @ basis.to(some)).square().sum(1)
            share = (along / (along + rest.clamp_min(0)[:, None])).nan_to_num(0.0).double()
            near = (share > ALIKE).any(1).nonzero()[:, 0]  # float32 cancels there
            exact = some[near].double()
            along = (exact @ chosen.along).square()
            rest = (exact - (exact @ basis) @ basis.T).square().sum(1)
            share[near] = along / (along + rest[:, None]).clamp_min(1e-24 * float(size.max()))
            chosen_rows = [row - start for row in taken if start <= row < start + len(some)]
            share[chosen_rows] = 0.0
            top = torch.maximum(top, share.max(0).values)
    return top
