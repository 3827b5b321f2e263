"""What a linear layer sees of a table's columns: where each one enters, and as which values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakbound.attacks.base import domain_of, modules_of, parameter, seen_by
from leakbound.client import forward
from leakbound.core import NotApplicable, Task
from leakbound.domains import TableDomain

SAME = 1e-5
"""Relative difference up to which two inputs of a layer count as equal (float32 rounds at 1e-7)."""
MIXED = 4
AT_ONCE = 4096
_NONE = torch.zeros(0)
"""Number of trial rows with all columns changed; rows of one call of the model."""


@dataclass(frozen=True, eq=False)
class Block:
    """Entries of a row that vary together: a category, a flag for missing values, or one number.

    `options` (L, width) are their values from entry `start` on; of a number, its lowest, middle and
    highest one. The coordinates `places` (d,) of a layer's input depend on them alone, and take the
    values `seen` (L, d). They fix at most `fixes` coefficients of a row in a span.
    """

    start: int
    options: Tensor
    number: bool = False
    places: Tensor = _NONE
    seen: Tensor = _NONE
    fixes: int = 0

    def only(self, row: Tensor) -> Block:
        """The one option that a row (n,) has, a number included; none if it has another one."""
        held = row[self.start : self.start + self.options.shape[1]]
        if not self.number:
            same = (self.options == held).all(1)
            return replace(self, options=self.options[same], seen=self.seen[same])
        first, last = self.options[[0, -1], 0]
        share = (held.double() - first) / (last - first)
        seen = self.seen[0] + share * (self.seen[-1] - self.seen[0])
        return replace(self, options=held[None], seen=seen[None], number=False)

    def among(self, rows: Tensor) -> Block:
        """Those options of several for which `rows` (L,) is True."""
        seen = self.seen[rows]
        return replace(self, options=self.options[rows], seen=seen, fixes=_rank(seen))

    def put(self, rows: Tensor, chosen: Tensor) -> None:
        """Write the chosen options (N,) into rows (N, n)."""
        rows[:, self.start : self.start + self.options.shape[1]] = self.options[chosen].to(rows)


@dataclass(frozen=True, eq=False)
class LayerView:
    """A linear layer whose input consists of separate blocks, one for each part of a row.

    The bias counts as one more coordinate, which is 1 for all rows. It and other coordinates that
    no column changes are the first of `levels`, with one option.

    Attributes:
        levels: blocks with finitely many values, in the order in which a search adds them.
        numbers: blocks that are linear in a number.
    """

    task: Task
    domain: TableDomain
    name: str
    bias: bool
    levels: tuple[Block, ...]
    numbers: tuple[Block, ...]

    @property
    def coefficients(self) -> int:
        """How many coefficients of a row in the span its categories can fix."""
        return 1 + sum(block.fixes for block in self.levels)

    def given(self, row: Tensor, known: Tensor) -> LayerView:
        """The same layer for rows with the known parts of a row (n,), where `known` (n,) is True.

        Known parts are levels with one option each and come first; so do numbers.
        """
        constant, *levels = self.levels
        blocks = [*levels, *self.numbers]
        fixed = [block.only(row) for block in blocks if known[block.start]]
        levels = [block for block in levels if not known[block.start]]
        numbers = tuple(block for block in self.numbers if not known[block.start])
        return replace(self, levels=(constant, *fixed, *levels), numbers=numbers)

    def unbiased(self) -> LayerView:
        """The same layer without its bias."""
        if not self.bias:
            return self
        first = self.levels[0]
        first = replace(
            first,
            places=first.places[:-1],
            seen=first.seen[:, :-1],
        )
        return replace(self, bias=False, levels=(first, *self.levels[1:]))

    def rows(self, chosen: Tensor, inside: Tensor) -> Tensor:
        """Rows (N, n) with the chosen option (N, len(levels)) of each block; their numbers follow
        from the layer's inputs (N, d).
        """
        rows = torch.zeros(
            len(chosen),
            *self.domain.shape,
            dtype=torch.float64,
        )
        for block, at in zip(self.levels, chosen.T, strict=True):
            block.put(rows, at)
        for block in self.numbers:
            low = block.seen[0]
            slope = block.seen[-1] - block.seen[0]
            share = (inside[:, block.places] - low) @ slope / slope.square().sum()
            first, last = block.options[[0, -1], 0].double()
            rows[:, block.start] = first + (last - first) * share
        return rows


def table_domain(task: Task) -> TableDomain:
    """The columns of the task's inputs."""
    domain = domain_of(task, TableDomain)
    if task.coupled:
        raise NotApplicable("batch norm in training mode mixes the rows of a batch")
    return domain


def view(task: Task, domain: TableDomain) -> LayerView:
    """The first trained linear layer that sees every column, each in coordinates of its own.

    It may see categories as they are, scaled, shifted, coded or embedded.
    """
    parts = _parts(domain)
    base = domain.blind(None)
    trials = [base[None]]
    mixed = base.repeat(MIXED, 1)
    for k, part in enumerate(parts):
        trials.append(base.repeat(len(part.options), 1))
        part.put(trials[-1], torch.arange(len(part.options)))
        # All parts change at once here, so a layer that mixes them shows it.
        part.put(mixed, _turn(k, part))
    for name, values in linear_inputs(task, torch.cat([mixed, *trials])).items():
        blocks = _blocks(parts, values)
        if blocks is not None:
            return _sorted(task, domain, name, values[MIXED], blocks)
    raise NotApplicable(
        "no trained linear layer sees every column of a row in coordinates of its own"
    )


def _parts(domain: TableDomain) -> list[Block]:
    """The parts of a row, in its order, as no layer sees them yet."""
    low, high = domain.box
    parts = []
    for column, start, stop in domain.placed:
        if column.categorical:
            parts.append(Block(start, torch.eye(stop - start)))
            continue
        ends = torch.stack([low[start], (low[start] + high[start]) / 2, high[start]])
        parts.append(Block(start, ends[:, None], number=True))
        if column.missing:
            parts.append(Block(start + 1, torch.tensor([[0.0], [1.0]])))
    return parts


def _turn(k: int, part: Block) -> Tensor:
    """The options of part k in the mixed trial rows."""
    # Each part has an order of its own: parts that changed together would hide a mix.
    return (torch.arange(MIXED) * (2 * k + 1) + k) % len(part.options)


def _blocks(parts: Sequence[Block], seen: Tensor) -> list[Block] | None:
    """The parts as a layer sees them, from its inputs (N, d) for the mixed trial rows, the first
    row, and every option; None if parts share coordinates, are not seen, or numbers bend.
    """
    mixed = seen[:MIXED]
    same = SAME * float(seen.abs().max())
    expected = seen[MIXED].repeat(MIXED, 1)
    blocks = []
    start = MIXED + 1
    for k, part in enumerate(parts):
        varied = seen[start : (start := start + len(part.options))]
        places = ((varied - varied[0]).abs().amax(0) > same).nonzero()[:, 0]
        values = varied[:, places]
        # What is linear in a number has no second difference.
        bent = part.number and (values[0] + values[2] - 2 * values[1]).abs().gt(2 * same).any()
        if not len(places) or bent:
            return None
        expected[:, places] = values[_turn(k, part)]
        blocks.append(replace(part, places=places, seen=values, fixes=_rank(values)))
    return blocks if float((mixed - expected).abs().max()) <= same else None


def _sorted(
    task: Task,
    domain: TableDomain,
    name: str,
    first: Tensor,
    blocks: Sequence[Block],
) -> LayerView:
    """The view, from the layer's input (d,) for one row and its blocks."""
    bias = parameter(name, "bias") in task.names
    whole = torch.cat([first, first.new_ones(int(bias))])
    free = torch.ones(len(first) + bias)
    free[torch.cat([block.places for block in blocks])] = 0
    places = free.nonzero()[:, 0]
    constant = Block(0, torch.zeros(1, 0), False, places, whole[places][None])
    levels = [block for block in blocks if not block.number]
    # Blocks that fix much with few options prune most prefixes first.
    levels.sort(key=lambda b: -b.fixes / float(torch.tensor(len(b.seen)).log()))
    numbers = tuple(block for block in blocks if block.number)
    return LayerView(task, domain, name, bias, (constant, *levels), numbers)


def _rank(values: Tensor) -> int:
    """The number of directions in which the rows (L, d) of a matrix differ."""
    return int(torch.linalg.matrix_rank(values - values[0], tol=SAME))


@torch.no_grad()
def linear_inputs(task: Task, rows: Tensor) -> dict[str, Tensor]:
    """The inputs (N, d) of trained linear layers for rows (N, n), by name in their order."""
    seen = seen_by(task, modules_of(task, nn.Linear), rows.to(task.parameters))
    return {
        name: values.double().cpu()
        for name, values in seen.items()
        if values is not None
        and values.ndim == 2
        and len(values) == len(rows)
        and parameter(name, "weight") in task.names
    }


def joint(
    task: Task,
    name: str,
    flat: Tensor,
) -> Tensor:
    """(units, d) a linear layer's part of a flat vector (P,), with its bias last if it is sent."""
    sent = task.unflatten(flat)
    weight = sent[parameter(name, "weight")]
    bias = sent.get(parameter(name, "bias"))
    wide = [weight] if bias is None else [weight, bias[:, None]]
    return torch.cat(wide, 1).double().cpu()


def silent(
    task: Task,
    name: str,
    rows: Tensor,
    parameters: Tensor,
) -> Tensor:
    """(N, units) whether no output of the model depends on a unit of the linear layer `name`."""
    held: list[Tensor] = []

    def cut(
        _: nn.Module,
        __: Any,
        output: Tensor,
    ) -> Tensor:
        held.append(output.detach().requires_grad_())
        return held[-1]

    off = []
    layer = task.model.get_submodule(name)
    for part in torch.split(rows, AT_ONCE):
        with torch.enable_grad(), layer.register_forward_hook(cut):
            output = forward(task, part.to(task.parameters), parameters).flatten(1)
        weight = torch.arange(1, output.shape[1] + 1).to(output).sqrt()  # no sum of slopes is 0
        (slope,) = torch.autograd.grad((output * weight).sum(), held.pop())
        off.append((slope == 0).cpu())
    return torch.cat(off)
