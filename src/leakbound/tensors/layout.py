"""Named tensors as one vector, in the order of a model's weights, with checks of every name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from leakbound.task import Task, weight_names
from leakbound.tensors.peft_names import is_of_peft, renamed

Named = Mapping[str, Tensor]
"""Tensors by name, as `model.state_dict()` names them."""

_Names = Sequence[tuple[str, tuple[int, ...] | None]]
_WRAPPERS = ("module.", "_module.", "model.")
_COMPILED = "_orig_mod."
"""What torch.compile puts into a name, at any place."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_SHOWN = 10
_ABSENT = "is missing"
_NUMBER = re.compile(r"(?:arr_)?(\d+)")


def flat(
    task: Task,
    named: Named,
    *,
    what: str,
) -> Tensor:
    """Named tensors as the vector (P,) in the order of `task.layout`, in the type of its weights.

    Buffers (running statistics) and frozen parameters are skipped. A prefix that a wrapper put
    before every name (`module.`, `_module.`, `_orig_mod.`) is removed. Lists without names (keys
    "0", "1", ... or "arr_0", ...) are matched by position with the model's state dict, its
    parameters, or its trained parameters, if every shape agrees. `what` is the name of the tensors
    in errors.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape (the error lists the first ten
            by name), or holds whole numbers, NaN or infinity.

    Example:
        >>> task = Task.of(nn.Sequential(nn.Flatten(), nn.Linear(2, 1)))
        >>> flat(task, {"1.bias": torch.ones(1), "1.weight": torch.zeros(1, 2)}, what="update")
        tensor([0., 0., 1.])
    """
    held = by_name(task, named, what=what)
    problems = list(_problems(task, held))
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        mend = "is it from another model or version?"
        if all(words.endswith(_ABSENT) for words in problems):
            mend += " If these were not sent, freeze them (requires_grad_(False))"
        if any(".lora_" in key for key in held.keys() - task.names):
            mend = "it is an adapter: give the one that was sent (--adapter PATH), and its base"
        raise ValueError(
            f"{what} does not fit the model: {'; '.join(problems[:_SHOWN])}{more}; {mend}"
        )
    parts = []
    for name, _, _, _ in task.layout:
        value = held[name].detach()
        if not value.is_floating_point():
            raise ValueError(
                f"{what}: {name} holds values of type {value.dtype}; give floats of 16, 32 or 64 "
                "bits (undo a quantization first)"
            )
        # Checked after the conversion, because a finite float64 may overflow in a smaller type.
        moved = value.to(task.parameters).reshape(-1)
        bad = int((~torch.isfinite(moved)).sum())
        if bad:
            raise ValueError(
                f"{what}: {name} holds {bad} of {value.numel()} entries that are NaN or infinite "
                f"(as {task.parameters.dtype}); give a file whose values are finite"
            )
        parts.append(moved)
    return torch.cat(parts)


def unusable(
    task: Task,
    named: Named,
    *,
    what: str,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The trained tensors that are not there, and those that are not finite in the task's type.

    A client that keeps some layers to itself does not send them. If there are tensors that the
    model does not have, or of another shape, the file belongs to another model: none is then called
    missing.

    Example:
        >>> task = Task.of(nn.Linear(1, 1))
        >>> unusable(task, {"bias": torch.tensor([torch.inf])}, what="update")
        (('weight',), ('bias',))
        >>> unusable(task, {"bias": torch.ones(1), "scale": torch.ones(1)}, what="update")
        ((), ())
    """
    held = by_name(task, named, what=what)
    absent = tuple(name for name, *_ in task.layout if name not in held)
    if len(absent) == len(task.layout) or len(list(_problems(task, held))) > len(absent):
        absent = ()
    sent = ((name, held[name]) for name, *_ in task.layout if name in held)
    spoiled = tuple(
        name
        for name, value in sent
        if value.is_floating_point() and not bool(value.to(task.parameters).isfinite().all())
    )
    return absent, spoiled


def weight_spans(task: Task) -> tuple[tuple[str, int, int], ...]:
    """(name, start, stop) of every tensor of layer weights within the flat vector of parameters.

    Weights have two or more dimensions; biases and the scales of a norm are excluded.

    Example:
        >>> weight_spans(Task.of(nn.Sequential(nn.Flatten(), nn.Linear(2, 1))))
        (('1.weight', 0, 2),)
    """
    rows = []
    for name, shape, start, stop in task.layout:
        owner, _, leaf = name.rpartition(".")
        scales = isinstance(task.model.get_submodule(owner), nn.LayerNorm | nn.RMSNorm)
        if len(shape) >= 2 and leaf != "bias" and not scales:
            rows.append((name, start, stop))
    return tuple(rows)


def bare(named: Named) -> dict[str, Tensor]:
    """The tensors without the prefixes that wrappers put before every name.

    Example:
        >>> list(bare({"module._orig_mod.0.weight": torch.ones(1)}))
        ['0.weight']
    """
    *_, shortest = _unwrapped(named)
    return shortest


def _unwrapped(named: Named) -> Iterator[dict[str, Tensor]]:
    """The tensors as they are named before compilation, and again without each shared prefix."""
    bare = {str(key).replace(_COMPILED, ""): value for key, value in named.items()}
    yield bare
    while bare and (shared := [p for p in _WRAPPERS if all(k.startswith(p) for k in bare)]):
        bare = {key.removeprefix(shared[0]): value for key, value in bare.items()}
        yield bare


def unnamed(key: str) -> bool:
    """Whether a key is only a position, as in lists and unnamed .npz files.

    Example:
        >>> unnamed("arr_3"), unnamed("3"), unnamed("3.weight")
        (True, True, False)
    """
    return _NUMBER.fullmatch(key) is not None


def by_name(
    task: Task,
    named: Named,
    *,
    what: str,
) -> dict[str, Tensor]:
    """The tensors under the names of the task's model: no wrapper's prefix, shared weights once.

    Arguments and errors are those of `flat`, but missing tensors are not an error.

    Example:
        >>> task = Task.of(nn.Linear(1, 1))
        >>> by_name(task, {"module.bias": torch.ones(1)}, what="update")
        {'bias': tensor([1.])}
    """
    held = {str(key): value for key, value in named.items()}
    if not held:
        raise ValueError(f"{what} holds no tensor; give the model's tensors by name")
    for key, value in held.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{what}: {key} is a {type(value).__name__}; give torch tensors by name"
            )
    # Only as many prefixes as needed: `model.` may also be the name of a part.
    held = next((some for some in _unwrapped(held) if task.names & set(some)), held)
    if not task.names & set(held) and is_of_peft(task.model):
        held = renamed(task.model, held)
    if not task.names & set(held) and all(map(unnamed, held)):
        return _by_position(task, held, what)
    for name, canonical in _first_names(task.model).items():
        if name != canonical and name in held:
            shared = held.pop(name)
            kept = held.setdefault(canonical, shared)
            same = kept.shape == shared.shape
            if not same or not torch.allclose(kept, shared, rtol=0, atol=0, equal_nan=True):
                raise ValueError(
                    f"{what}: {name} and {canonical} are one tensor in the model but differ here; "
                    "is it from another model?"
                )
    return held


def _problems(task: Task, held: dict[str, Tensor]) -> Iterator[str]:
    shapes = {name: tuple(shape) for name, shape, _, _ in task.layout}
    for name, shape in shapes.items():
        if name not in held:
            yield f"{name} {shape} {_ABSENT}"
    known = shapes.keys() | _buffers(task.model)
    shapes |= {name: tuple(value.shape) for name, value in task.frozen.items()}
    for name, value in held.items():
        shape = tuple(value.shape)
        if name in shapes and shape != shapes[name]:
            yield f"{name} is {shape}, in the model {shapes[name]}"
        elif name not in known:
            yield f"{name} {shape} is not in the model"


def _buffers(model: nn.Module) -> set[str]:
    names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.modules.batchnorm._NormBase):
            names |= {f"{name}.{part}" if name else part for part in _STATISTICS}
    return names


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every weight, also of shared ones, with the first name of the same weight."""
    first: dict[int, str] = {}
    weights = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(weight), name) for name, weight in weights}


def _by_position(
    task: Task,
    held: dict[str, Tensor],
    what: str,
) -> dict[str, Tensor]:
    """Tensors of a list without names, by the first order of the model's own that they fit."""
    # As numbers, so that 10 comes after 9.
    values = [held[key] for key in sorted(held, key=lambda key: int(key.removeprefix("arr_")))]
    first = _first_names(task.model)
    whole, now = (list(_state_names(task.model, statistics=kept)) for kept in (True, False))
    plain: _Names = [(name, tuple(shape)) for name, shape, _, _ in task.layout]
    for names in (whole, now, plain, [row for row in now if row[1] is not None]):
        pairs = list(zip(names, values, strict=False))
        fit = all(shape is None or tuple(value.shape) == shape for (_, shape), value in pairs)
        if fit and len(names) == len(values):
            return {first.get(n, n): v for (n, shape), v in pairs if shape is not None}
    shapes = ", ".join(str(tuple(v.shape)) for v in values[:_SHOWN])
    wanted = ", ".join(f"{name} {shape}" for name, shape in plain[:_SHOWN])
    raise ValueError(
        f"{what} is a list of {len(values)} tensors without names ({shapes}), which is not the "
        f"order of the model's {len(plain)} ({wanted}); save the tensors by name"
    )


def _state_names(
    model: nn.Module, *, statistics: bool
) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """Names of the state dict in its order, with the shape of weights and None for buffers.

    `statistics`: batch norms keep theirs, also where the task's copy dropped them.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        weights = weight_names(module)
        for name in weights:
            if (weight := getattr(module, name)) is not None:
                yield dot + name, tuple(weight.shape)
        held = [k for k, v in module._buffers.items() if v is not None and k not in weights]
        if statistics and isinstance(module, nn.modules.batchnorm._NormBase):
            held = list(_STATISTICS)
        yield from ((dot + k, None) for k in held if k not in module._non_persistent_buffers_set)
