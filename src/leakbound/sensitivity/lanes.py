"""Sums over lanes: one lane is one example with one direction to move it along.

A round of lanes goes through the taps where the model allows it, else through `torch.func` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from leakbound import client
from leakbound.random import Source, normal
from leakbound.sensitivity import taps
from leakbound.sensitivity.squares import Power, of_lanes
from leakbound.types import Task

_BYTES = 2**26

Lanes = Callable[[int], Iterator[tuple[Tensor, Tensor]]]
"""Given how many lanes fit, rounds of them: the examples' places (n,), directions (n, *S)."""


def draws(inputs: Tensor, source: Source, repetitions: int) -> Lanes:
    """One Gaussian direction for each example and repetition; the first round starts the batch."""
    size = len(inputs)

    def rounds(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        together = max(1, step // size)
        places = torch.arange(size, device=inputs.device)
        for start in range(0, repetitions, together):
            count = min(together, repetitions - start)
            drawn = [normal(inputs.shape, source, like=inputs) for _ in range(count)]
            which, ways = places.repeat(count), torch.cat(drawn)
            for at in range(0, len(which), step):
                yield which[at : at + step], ways[at : at + step]

    return rounds


def pixels(inputs: Tensor) -> Lanes:
    """Every entry of every example by itself."""
    each = inputs[0].numel()

    def rounds(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, inputs.numel(), step):
            stop = min(start + step, inputs.numel())
            part = torch.arange(start, stop, device=inputs.device)
            ways = inputs.new_zeros(len(part), each).scatter_(1, (part % each)[:, None], 1.0)
            yield part // each, ways.view(-1, *inputs.shape[1:])

    return rounds


def over_lanes(
    task: Task, inputs: Tensor, labels: Tensor, lanes: Lanes, *, leading: bool, chunk: int | None
) -> tuple[Power, Tensor]:
    """The sums over all lanes of the squared changes of each example's own gradient, (P,) each.

    With them the batch's gradient (P,), which is nearly free where the first lanes are the batch
    in order (`leading`).
    """
    found, size = taps.plan(task, inputs, labels), len(inputs)
    wide = found.lane_elements if found else generic_elements(task, inputs)
    sums: Power | None = None
    gradient: Tensor | None = None
    left, covered = size if leading else 0, leading
    for places, tangents in lanes(chunk or fitting(wide, inputs)):
        x, y, fresh = inputs[places], labels[places], min(left, len(places))
        fast = taps.powers(task, found, x, y, tangents, fresh) if found else None
        if fast:
            part, first = fast
            if first is not None:
                gradient = first / size if gradient is None else gradient + first / size
        else:
            part, covered = of_lanes(changes(task, x, y, tangents)), covered and not fresh
        sums, left = part if sums is None else sums.plus(part), left - fresh
    if gradient is None or not covered:
        gradient = client.gradient(task, inputs, labels).detach()
    assert sums is not None  # a batch holds at least one example
    return sums, gradient


def changes(task: Task, inputs: Tensor, labels: Tensor, tangents: Tensor) -> Tensor:
    """Change (N, P) of every example's own gradient along its own direction (N, *S).

    The generic path: works for whatever `torch.func` can differentiate.
    """

    def lane(image: Tensor, label: Tensor, tangent: Tensor) -> Tensor:
        def own(x: Tensor) -> Tensor:
            def loss(flat: Tensor) -> Tensor:
                return task.loss(client.forward(task, x[None], flat), label[None])

            found: Tensor = grad(loss)(task.parameters)
            return found

        moved: Tensor = jvp(own, (image,), (tangent,))[1]
        return moved

    each: Tensor = vmap(lane)(inputs, labels, tangents)
    return each.detach()


def generic_elements(task: Task, inputs: Tensor) -> int:
    """About how many numbers one lane of the generic path needs."""
    return 4 * len(task.parameters) + 64 * inputs[0].numel()


def fitting(elements: int, like: Tensor, limit: int = _BYTES) -> int:
    """How many lanes of so many numbers fit the limit in bytes; at least 1."""
    return max(1, limit // (elements * like.element_size()))
