"""A client as a plain function, and adapters for training functions (Opacus) and Flower clients.

The adapters use what both libraries document, and import neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from leakbound._util import copies
from leakbound.core import Batch, Task
from leakbound.tensors.layout import Named, bare, by_name

Client = Callable[[dict[str, Tensor], Batch, int], Any]
"""From weights by name, a batch and a seed to the update: all that leaves the client.

The update is a tensor, an array, a number, or any nesting of them in dictionaries and lists.
PyTorch's global random state is seeded before each call.
"""


def leaves(update: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an update, by name; None is left out."""
    if isinstance(update, Tensor | np.ndarray | np.generic | int | float):
        yield name, torch.as_tensor(update).detach().cpu()
    elif isinstance(update, Mapping):
        # Sorted: the order in a dictionary may change from run to run.
        for key in sorted(update, key=str):
            yield from leaves(update[key], f"{name}.{key}" if name else str(key))
    elif isinstance(update, Sequence) and not isinstance(update, str | bytes):
        yield from leaves(dict(enumerate(update)), name)
    elif update is not None:
        raise ValueError(
            f"update holds a {type(update).__name__}; return tensors, arrays, numbers, or "
            "dictionaries and lists of them"
        )


def vector(update: Any, like: Tensor | None = None) -> Tensor:
    """All numbers of an update in one float64 vector (D,), as many as in `like`."""
    # Float64: the client's own type would round the sums over runs.
    parts = [value.reshape(-1).double() for _, value in leaves(update)]
    numbers = torch.cat(parts) if parts else torch.zeros(0)
    count = len(numbers) if like is None else len(like)
    if not count == len(numbers) > 0 or not torch.isfinite(numbers).all():
        raise ValueError(
            f"update holds {len(numbers)} numbers, another one {count}, or some are not finite; "
            "return the same finite tensors for every batch"
        )
    return numbers


def gradient_places(update: Any, task: Task) -> Tensor | None:
    """The places (P,) of the task's parameters in `vector(update)`; None if they are not there."""
    places = {}
    at = 0
    for name, value in leaves(update):
        places[name] = torch.arange(at, at + value.numel()).reshape(value.shape)
        at += value.numel()
    try:
        by_parameter = by_name(task, bare(places), what="update")
        ordered = [by_parameter[name].expand(shape).reshape(-1) for name, shape, *_ in task.layout]
    except (ValueError, KeyError, RuntimeError):
        return None
    return torch.cat(ordered)


def over_rounds(client: Client, rounds: int) -> Client:
    """A client that takes part in several rounds from the same weights; it sends their sum.

    The auditor is the server, and may send what it likes. The canary then moves every update in the
    same direction, and the noise does not.

    Example:
        >>> client = over_rounds(lambda weights, batch, seed: {"n": batch.size}, 3)
        >>> client({}, Batch(torch.ones(2, 1), torch.zeros(2)), 0)
        {'n': tensor(6., dtype=torch.float64)}
    """

    def several(
        weights: dict[str, Tensor],
        batch: Batch,
        seed: int,
    ) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(seed)
        total = dict[str, Tensor]()
        for number in torch.randint(2**31, (rounds,), generator=source).tolist():
            # Copies: the client may train in place.
            start = {name: value.clone() for name, value in weights.items()}
            examples = Batch(batch.inputs.clone(), batch.labels.clone())
            sent = {name: value.double() for name, value in leaves(client(start, examples, number))}
            form, before = ({k: v.shape for k, v in one.items()} for one in (sent, total or sent))
            if form != before:
                raise ValueError("its rounds send different tensors; return the same in each")
            total = {name: value + total.get(name, 0) for name, value in sent.items()}
        return total

    return client if rounds == 1 else several


def of_training(
    train: Callable[[nn.Module, Dataset[Any]], Any],
    model: nn.Module,
) -> Client:
    """A client from a training function, such as one with Opacus inside.

    Args:
        train: `train(model, dataset)` changes a copy of the model, which it may wrap, or returns
            the trained one. The change of the weights is the update.
        model: the architecture.

    Example:
        >>> def train(model, dataset):
        ...     with torch.no_grad():
        ...         model.bias += dataset.tensors[0].sum()
        >>> model = nn.Linear(1, 1)
        >>> weights = {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}
        >>> client = of_training(train, model)
        >>> client(weights, Batch(torch.ones(2, 1), torch.zeros(2)), 0)["bias"].tolist()
        [2.0]
    """

    def client(
        weights: dict[str, Tensor],
        batch: Batch,
        seed: int,
    ) -> dict[str, Tensor]:
        copy = copies.duplicate(model)
        copy.load_state_dict(weights)
        trained = train(copy, TensorDataset(batch.inputs, batch.labels))
        return _change((trained if isinstance(trained, nn.Module) else copy).state_dict(), weights)

    return client


def of_flower(build: Callable[[Batch], Any]) -> Client:
    """A client from a function that makes a Flower `NumPyClient` for a batch.

    Its `fit` gets the weights in the order of the state dict. The update is their change, and the
    numbers among the metrics. The number of examples is left out: it reveals an added example.

    Example:
        >>> class Sum:
        ...     def fit(self, parameters, config):
        ...         return [parameters[0] + 2.0], 1, {"loss": 0.5, "name": "a"}
        >>> client = of_flower(lambda batch: Sum())
        >>> client({"w": torch.ones(1)}, Batch(torch.ones(1, 1), torch.zeros(1)), 0)
        {'w': tensor([2.], dtype=torch.float64), 'metrics': {'loss': 0.5}}
    """

    def client(
        weights: dict[str, Tensor],
        batch: Batch,
        seed: int,
    ) -> dict[str, Any]:
        sent, _, metrics = build(batch).fit([v.numpy() for v in weights.values()], {})
        after = {k: torch.as_tensor(v) for k, v in zip(weights, sent, strict=True)}
        said = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        return _change(after, weights) | ({"metrics": said} if said else {})

    return client


def _change(after: Named, before: Named) -> dict[str, Tensor]:
    trained = bare(after)
    return {name: trained[name].detach().cpu().double() - before[name].double() for name in before}
