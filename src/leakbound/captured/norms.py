"""What running statistics in a captured update show: the client's mode, passes, and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from leakbound import client, tensors
from leakbound.captured.capture import Capture
from leakbound.core import Statistics, Task


def _moves(capture: Capture, task: Task, kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Before and after of each batch norm's `kind`, by the norm's name, where a file holds both."""
    if capture.before is None or capture.kind == "gradient":
        return {}
    before = tensors.by_name(task, capture.before, what="before")
    sent = tensors.by_name(task, capture.update, what=capture.name)
    pairs = {}
    for name in client.batch_norms(task):
        key = f"{name}.{kind}"
        if key not in before or key not in sent or before[key].shape != sent[key].shape:
            continue
        start = before[key].double()
        end = sent[key].double() + (start if capture.kind == "delta" else 0)
        if bool(start.isfinite().all()) and bool(end.isfinite().all()):
            pairs[name] = start, end
    return pairs


def set_modes(
    capture: Capture,
    task: Task,
    model: nn.Module,
) -> str:
    """Put the batch norms of `model` in the mode in which the client trained; say if one changed.

    In training mode every pass moves the running statistics, in evaluation mode none does. Norms
    whose statistics the file does not hold stay as they are.
    """
    changed = dict[bool, list[str]]()
    for name, (start, end) in _moves(capture, task, "running_mean").items():
        norm = model.get_submodule(name)
        training = not torch.equal(start, end)
        if norm.training != training:
            norm.train(training)
            changed.setdefault(training, []).append(name)
    said = []
    for training, names in changed.items():
        mode, why = ("training", "moved") if training else ("evaluation", "did not move")
        said.append(
            f"{len(names)} batch norms (such as {names[0]}) were set to {mode} mode, as the "
            f"client's were: their running statistics {why}"
        )
    return "; ".join(said)


def passes(capture: Capture, task: Task) -> int | None:
    """How many batches passed the batch norms in training mode; None if norms do not agree."""
    counts = {
        int(end - start) for start, end in _moves(capture, task, "num_batches_tracked").values()
    }
    return counts.pop() if len(counts) == 1 and min(counts) > 0 else None


def of_batch(
    capture: Capture,
    task: Task,
    examples: int,
    input_shape: Sequence[int],
) -> Mapping[str, Statistics] | None:
    """Mean and biased variance (C,) of the inputs of each batch norm, after one step on one batch.

    A pass sets r' = (1 - m) r + m s, with the momentum m and the batch's mean or unbiased variance
    s, so s = r + (r' - r) / m. None if the file does not hold the statistics of every norm.
    """
    names = client.batch_norms(task)
    means = _moves(capture, task, "running_mean")
    variances = _moves(capture, task, "running_var")
    if not task.coupled or passes(capture, task) not in (None, 1) or not names:
        return None
    if not means.keys() == variances.keys() == set(names):
        return None
    low, high = task.input_range
    probe = torch.full((examples, *input_shape), (low + high) / 2).to(task.parameters)
    with torch.no_grad():
        inside = client.layer_inputs(task, probe, names)
    found = {}
    for name in names:
        momentum = getattr(task.model.get_submodule(name), "momentum", None)
        values = inside[name].numel() // inside[name].shape[1]
        if momentum is None or values < 2:  # without a momentum, earlier passes count
            return None
        mean, variance = (
            start + (end - start) / momentum for start, end in (means[name], variances[name])
        )
        biased = variance.clamp_min(0) * (values - 1) / values
        found[name] = mean.to(task.parameters), biased.to(task.parameters)
    return found
