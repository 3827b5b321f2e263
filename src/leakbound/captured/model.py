"""The user's model as a task at the weights that the client was sent."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from leakbound import check, client, tensors
from leakbound.captured.capture import Capture
from leakbound.tensors import Named
from leakbound.types import Batch, NotApplicable, Task


def task_of(
    model: nn.Module,
    capture: Capture,
    *,
    input_shape: tuple[int, ...],
    input_range: tuple[float, float] = (0.0, 1.0),
    classes: int | None = None,
    public: Batch | None = None,
) -> tuple[Task, tuple[str, ...]]:
    """The model at the capture's weights before, and what was done to get there.

    Dropout is switched off, since its draws are the client's secret; batch norms stay in the mode
    in which the model is; running statistics are those of the weights before.

    Raises:
        ValueError: weights of another model, a model that cannot take inputs of that shape or
            returns no row of class scores.
    """
    own, notes = copy.deepcopy(model), []
    off = [m for m in own.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    if any(m.training and m.p > 0 for m in off):
        notes.append(
            "the model has dropout in training mode: it was switched off, since nobody but the "
            "client knows its draws (the simulation is then only near to what was trained)"
        )
    quiet = (nn.modules.dropout._DropoutNd, nn.modules.instancenorm._InstanceNorm)
    for module in own.modules():
        if isinstance(module, quiet):
            module.eval()
    if any(m.training for m in own.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
        notes.append(
            "batch norms are in training mode, as the client's were: examples of a batch see each "
            "other (build the model with .eval() if the client trained with fixed statistics)"
        )
    task = Task.of(own, input_range=input_range, classes=classes, public=public)
    if capture.before is None:
        notes.append("no weights before were given: the model's own, as it was built, were taken")
    else:
        weights = tensors.flat(task, capture.before, what="before")
        named = tensors.by_name(task, capture.before, what="before")
        task = _with_buffers(task.with_parameters(weights), named)
        if missing := [name for name in task.frozen if name not in named]:
            notes.append(
                f"the weights before hold no value for {len(missing)} of {len(task.frozen)} frozen "
                f"tensors (such as {missing[0]}): those of the model, as it was built, were taken"
            )
    return _checked(task, input_shape), tuple(notes)


def _checked(task: Task, input_shape: tuple[int, ...]) -> Task:
    """The task with its number of classes, once one input went through."""
    low, high = task.input_range
    shape = (2 if task.coupled else 1, *input_shape)
    image = torch.full(shape, (low + high) / 2).to(task.parameters)
    try:
        client.refuse_codes(task, input_shape)
        with torch.no_grad():
            output = client.forward(task, image)
    except (NotApplicable, client.WrongOutput) as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"input_shape is {input_shape}, and the model cannot take it ({reason}); give the "
            "shape of one input without the batch, such as 1,28,28"
        ) from None
    if output.ndim != 2 or len(output) != len(image):
        raise ValueError(
            f"the model returns {tuple(output.shape)} for inputs of shape {shape}; give a "
            "classifier that returns one row of class scores (B, K)"
        )
    if task.label_range is not None and task.label_range > output.shape[1]:
        raise ValueError(
            f"classes is {task.label_range}, but the model has {output.shape[1]} outputs; leave "
            "classes out, or build the model with as many"
        )
    return replace(task, label_range=task.label_range or output.shape[1])


def _with_buffers(task: Task, named: Named) -> Task:
    """The task with running statistics and frozen weights of the weights before, where they fit."""
    held = {
        name: named[name].detach().to(value)
        for name, value in task.buffers.items()
        if name in named and named[name].shape == value.shape
    }
    for name in held.keys() & task.frozen.keys():
        check.finite(f"before: {name}", held[name])
    return replace(task, buffers={**task.buffers, **held})
