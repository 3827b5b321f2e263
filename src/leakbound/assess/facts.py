"""What an update reveals for certain, though no example is reconstructed: facts, with a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from leakbound._util.results import LISTED, Fact
from leakbound.assess.sentences import ordered
from leakbound.attacks.analytic import first_layer
from leakbound.attacks.rounding import stored_type, unit_of
from leakbound.core import Batch, Exact, NotApplicable, Observation, Reconstruction
from leakbound.domains import Domain
from leakbound.domains.known import LABEL
from leakbound.engines.path import NoPath, path_to

FAINTEST = 1000.0
"""A value of 0 is stated if one of this share of a row's largest value would have moved a weight by
a unit in the last place. In bfloat16, small gradients leave weights as they were.
"""
STEPS = 8.0
"""The same for optimizers that move weights by equal sizes, whatever the gradient."""
ZEROS = "every example changes the first layer, and the client withholds no entries"


def zero_values(observation: Observation) -> Fact | None:
    """The values that are 0 in all examples: their weights in the first layer have no gradient.

    It holds for SGD and Adam, for any loss and any number of local steps. Values that are 0 in all
    public examples say nothing new and are left out, as are those whose small gradients the
    rounding of stored weights would hide. None if the layer is not linear, if the model may change
    the example before it, if noise or a mask covers it, or if all or no values are 0.

    Assumptions: no weight decay, which changes all weights; then no value is named.

    Source: this project; the gradient of a linear layer is the sum of delta x^T.
    """
    task = observation.task
    update = observation.update
    domain = task.domain
    metric = domain is None or domain.parts is None
    if not isinstance(update.law, Exact) or update.mask is not None or not metric:
        return None
    try:
        name, _ = first_layer(task, observation.input_shape)
        path = path_to(task, observation.input_shape, name)
    except (NotApplicable, NoPath):
        return None
    if not path.unscaled:
        return None
    weight = f"{name}.weight" if name else "weight"
    rows = torch.stack([task.unflatten(row)[weight] for row in update.rows])
    zero = (rows == 0).all(1).all(0)
    if bool(zero.all()):
        return None
    # A column of weights that are all 0 may be pruned, and its gradient withheld.
    held = task.tensors()[weight]
    zero = zero & (held != 0).any(0)
    stored = held
    if observation.sent is not None:
        stored = task.unflatten(observation.sent[0])[weight]
    visible = FAINTEST if task.plan.is_sum else STEPS
    zero = zero & (_clear(rows * task.plan.learning_rate, held, stored) >= visible)
    zero = torch.zeros_like(zero).index_put((path.index.to(zero.device),), zero)
    public = observation.auxiliary
    if public is not None and public.inputs.shape[1:] == observation.input_shape:
        zero = zero & (public.inputs.flatten(1) != 0).any(0).to(zero.device)
    count = int(zero.sum())
    if not count:
        return None
    places = zero.nonzero()[:LISTED, 0].tolist()
    shape = observation.input_shape
    indices = [np.unravel_index(place, shape) for place in places]  # PyTorch's imports sympy
    items = tuple(", ".join(str(int(part)) for part in index) for index in indices)
    return Fact(
        kind="zero values",
        items=items,
        count=count,
        assumes=ZEROS,
    )


def _clear(change: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """(N,) by how many units in the last place the weights of each column might have moved: the
    largest move of a row, over the unit at this row's weight in the column.
    """
    moved = change.abs().amax((0, 2)).double()
    units = [unit_of(weights, stored_type(weights)) for weights in (before, after)]
    return (moved[:, None] / torch.maximum(*units)).amax(0)


def facts_of(
    observation: Observation,
    reconstruction: Reconstruction | None,
    domain: Domain,
    public: Batch | None,
    more: Iterable[Fact] = (),
) -> tuple[Fact, ...]:
    """What an attack found, what the update shows without an attack, and `more`, in order."""
    zeros = zero_values(observation)
    attacked = () if reconstruction is None else reconstruction.facts
    return together((*attacked, *more, *([] if zeros is None else [zeros])), domain, public)


def without_zeros(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """The facts of an update from which weight decay was subtracted.

    A small gradient beside the decay may have been lost by rounding, so no value is surely 0.
    """
    return tuple(fact for fact in facts if fact.kind != "zero values")


def confirmed(
    facts: Iterable[Fact],
    truth: Batch,
    domain: Domain,
) -> tuple[Fact, ...]:
    """The facts, and of attributes only the values that are those of the true examples.

    A wrong one shows nothing, whatever its p-value: if none is right, the level of the fact is 1.
    """
    return tuple(
        _right(fact, truth, domain) if fact.kind == "attribute" else fact for fact in facts
    )


def _right(
    fact: Fact,
    truth: Batch,
    domain: Domain,
) -> Fact:
    values: Sequence[str]
    if fact.subject == LABEL:
        values = [str(label) for label in truth.labels.tolist()]
    else:
        columns = domain.fields(None, truth.inputs).columns or ()
        [values] = (column.reconstruction for column in columns if column.name == fact.subject)
    pairs = zip(fact.items, fact.examples, strict=True)
    right = [(item, place) for item, place in pairs if values[place] == item]
    if not right:
        return replace(fact, level=1.0)
    items, places = zip(*right, strict=True)
    return replace(fact, items=items, examples=places, count=len(items))


def together(
    facts: Iterable[Fact],
    domain: Domain | None = None,
    public: Batch | None = None,
) -> tuple[Fact, ...]:
    """Each fact once, those that matter most first.

    Items that are rarest in public examples come first in their fact.
    """
    # Reversed, so that the first of equal facts wins: attacks say more than what needs none.
    once = {(fact.kind, fact.subject): fact for fact in reversed([*facts])}
    often = {} if domain is None or public is None else domain.frequencies(public.inputs)

    def ranked(fact: Fact) -> Fact:
        if not often or fact.examples:
            return fact
        items = sorted(fact.items, key=lambda item: often.get((fact.subject, item), 0.0))
        return replace(fact, items=tuple(items))

    return tuple(ranked(fact) for fact in ordered(once.values()))
