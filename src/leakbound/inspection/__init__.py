"""Signs that a server has prepared a malicious model to reconstruct its clients' images.

Published malicious layers leave signs ("marks") in the weights, in the loss, and in the units that
real images switch on. `inspect` looks for these marks before a client trains. If it finds none,
that is no proof of safety: a server that knows the marks can avoid them (`BLIND_SPOTS`).
"""

from __future__ import annotations

from leakbound.core import Batch, Task
from leakbound.inspection.marks import (
    MANY,
    LayerFinding,
    balanced_signs,
    equal_columns,
    evened,
    head_of,
    layers,
    lone_classes,
    on_probes,
    parallel,
    parallel_rows,
    tried,
    zeroed,
)

__all__ = [
    "BLIND_SPOTS",
    "KINDS",
    "MANY",
    "NOT_SAFE",
    "LayerFinding",
    "evened",
    "inspect",
    "parallel",
    "statistics",
]

# Fewer images do not show that a unit is rarely on; more take time and show nothing else.
LEAST_PROBES = 64
MOST_PROBES = 256

KINDS = (
    "imprint",
    "near-duplicate rows",
    "imprint on probes",
    "equal columns",
    "trap weights",
    "rarely active",
    "linear trap",
    "zeroed paths",
    "huge gain",
    "lone classes",
)
"""Every kind of mark."""

BLIND_SPOTS = (
    "rows with equal outputs on real images but different directions, without probes",
    "an imprint on fewer than about eight input values, or behind a layer that mixes them",
    "trap weights whose rows have a random number of negative weights, without probes",
    "weights that were found by optimizing the leak instead of by a published recipe",
)
"""What this inspection cannot detect."""

NOT_SAFE = (
    "Nothing was found. This does not prove safety: a server that knows these marks can avoid them."
)


def inspect(
    task: Task,
    probes: Batch | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
) -> tuple[LayerFinding, ...]:
    """Find the marks of malicious layers; no mark is no proof of safety.

    Args:
        task: the model as the server sent it.
        probes: images to run the model on, public ones or the client's own (nothing of them is
            sent); some checks need at least 64. None: the task's public ones, if there are some.
        input_shape: (C, H, W) of one image if there are no images at all: the loss and the gains
            are then tested on random ones.

    Example:
        >>> import torch
        >>> from leakbound import models
        >>> from leakbound.randomness import stream, uniform
        >>> from leakbound.attacks import RobbingTheFed
        >>> def of(images):
        ...     net = models.mlp(input_shape=(1, 6, 6), classes=3, generator=stream(0, "model"))
        ...     return Task.of(net, classes=3, public=images)
        >>> images = Batch(uniform((99, 1, 6, 6), stream(0, "images")), torch.arange(99) % 3)
        >>> inspect(of(images))
        ()
        >>> [(f.layer, f.kind, f.strength) for f in inspect(RobbingTheFed().plant(of(images)))]
        [('layer', 'imprint', 128.0)]
    """
    marks = [f for f in statistics(task, probes, input_shape=input_shape) if f.marked]
    imprinted = {f.layer for f in marks if f.kind in ("imprint", "near-duplicate rows")}
    doubled = ("equal columns", "imprint on probes")
    return tuple(f for f in marks if not (f.kind in doubled and f.layer in imprinted))


def statistics(
    task: Task,
    probes: Batch | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
) -> tuple[LayerFinding, ...]:
    """Every statistic that `inspect` tests, marked or not: for margins and calibration."""
    images = probes or task.public
    inputs = None if images is None else images.inputs[:MOST_PROBES].to(task.parameters)
    findings: list[LayerFinding] = []
    every = layers(task)
    head = head_of(every)
    for layer in every:
        if layer.name != head:
            findings.append(parallel_rows(layer))
            findings.append(balanced_signs(layer))
        elif len(layer.rows) == task.label_range and task.label_range > 2:
            findings.append(lone_classes(layer))
        if layer.follows:
            findings.append(equal_columns(layer))
        findings.append(zeroed(layer))
    if inputs is not None and len(inputs) >= LEAST_PROBES:
        findings += on_probes(task, [layer for layer in every if layer.name != head], inputs)
    shape = input_shape if inputs is None else tuple(inputs.shape[1:])
    if shape is not None:
        findings += tried(task, inputs, shape)
    return tuple(findings)
