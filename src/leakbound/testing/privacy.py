"""What differential privacy rests on: a true bound of one row's part, and noise in proportion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from leakbound.client import example_gradients, local_update
from leakbound.defenses import Chain, Defense
from leakbound.random import normal, stream
from leakbound.testing.common import require
from leakbound.testing.laws import check_law, spread
from leakbound.types import (
    Batch,
    ClientContext,
    Exact,
    Gaussian,
    Guarantee,
    Laplace,
    Task,
    Unit,
    Update,
)

DRAWS = 256


def check_privacy(whole: Chain, task: Task, batch: Batch) -> None:
    """Every link that promises differential privacy has what its promise rests on.

    Neighbors are two sets of rows that differ in one row, which is zero in one of them (add or
    remove at a fixed, public divisor). With the same streams for both, all noise cancels, and what
    is left is the change of the noise-free rows.
    """
    whole = whole.resolve(task, batch.size)
    for at, link in enumerate(whole.links):
        if link.guarantee is Guarantee.DIFFERENTIAL_PRIVACY:
            upto = Chain(whole.links[: at + 1])
            clients = _plain_rows(upto, task, batch)
            bound = _check_bound(upto, link, clients, task, batch)
            _check_noise(upto, link, bound, clients, task, batch)


def _plain_rows(upto: Chain, task: Task, batch: Batch) -> list[Tensor]:
    if upto.starts is Unit.EXAMPLE:
        rows = example_gradients(task, batch.inputs, batch.labels)
    else:
        rows = local_update(task, batch.inputs, batch.labels)[None]
    plain = [rows.detach().double()] * upto.cohort_size
    return plain if len(plain) == 1 else [*plain[:-1], plain[-1][:1]]  # the last has least to mix


def _check_bound(
    upto: Chain, link: Defense, clients: list[Tensor], task: Task, batch: Batch
) -> float:
    """No row, however scaled or turned, moves the release by more than the declared bound."""
    name = f"{link!r} promises differential privacy, but"
    bound = _released(upto, clients, task, batch).bound
    if bound is None:
        require(False, f"{name} declares no bound on what one example adds")
        raise AssertionError
    require(0 < bound < float("inf"), f"{name} its bound is {bound}")
    for at, with_row, without in _neighbors(clients):
        pair = [
            _released(upto, [*clients[:at], own, *clients[at + 1 :]], task, batch)
            for own in (with_row, without)
        ]
        require(
            all(u.bound == bound for u in pair),
            f"{name} its bound depends on the data and leaks information about them",
        )
        change = float((pair[0].rows - pair[1].rows).norm(dim=1).max())
        rounding = 1e-9 * float(pair[1].rows.abs().max())
        require(
            change <= bound * (1 + 1e-6) + rounding,
            f"{name} one example moves the release by {change:.4g}, above its bound {bound:.4g}",
        )
    return bound


def _neighbors(clients: list[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of the first and the last client: rows with one adversarial row, and with zeros there."""
    for who in sorted({0, len(clients) - 1}):
        for with_row, without in _changed(clients[who]):
            yield who, with_row, without


def _changed(rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    noise = normal(rows.shape[1:], stream(0, "contract", "row"), like=rows)
    spike = torch.zeros_like(rows[0])
    spike[0] = 1
    for at in sorted({0, len(rows) - 1}):
        without = rows.clone()
        without[at] = 0
        for direction in (rows[at], -rows.sum(0), noise, spike):
            for scale in (1e-3, 1.0, 1e3, 1e6):
                with_row = without.clone()
                with_row[at] = scale * direction
                yield with_row, without


def _check_noise(
    upto: Chain, link: Defense, bound: float, clients: list[Tensor], task: Task, batch: Batch
) -> None:
    """The link's own noise has a true law, at least `noise_multiplier` times the bound."""
    name = f"{link!r} promises differential privacy, but"
    before = Chain(upto.links[:-1])
    given = replace(
        _released(before, clients, task, batch, unit=upto.starts), law=Exact(), mask=None
    )
    context = None if given.unit is Unit.COHORT else ClientContext(task, batch)
    state = link.init(task)
    draws = [
        link.transform(given, state, context, stream(seed, "contract", "noise"))[0]
        for seed in range(DRAWS)
    ]
    law = draws[0].law
    require(isinstance(law, Gaussian | Laplace), f"{name} the law of its noise is {law}")
    check_law(draws, link.imitate(given.rows), repr(link))
    wanted = float(getattr(link, "noise_multiplier", 0.0)) * bound
    least = float(spread(draws[0]).min())
    require(
        least > 0 and least >= wanted * (1 - 1e-6),
        f"{name} its noise has standard deviation {least:.4g}, below noise_multiplier times its "
        f"bound, {wanted:.4g}",
    )


def _released(
    links: Chain, clients: list[Tensor], task: Task, batch: Batch, *, unit: Unit | None = None
) -> Update:
    """The update of fixed plain rows under fixed streams."""
    client, cohort = links.sides
    unit = links.starts if unit is None else unit
    updates = []
    for i, rows in enumerate(clients):
        examples = (1,) * len(rows) if unit is Unit.EXAMPLE else (batch.size,)
        source = stream(0, "contract", "neighbor", i)
        context = ClientContext(task, batch)
        update = Update(rows, unit, examples)
        updates.append(client.transform(update, client.init(task), context, source)[0])
    if not cohort.links:
        return updates[0]
    source = stream(0, "contract", "neighbor", "cohort")
    return cohort.transform(Update.stack(updates), cohort.init(task), None, source)[0]
