"""A captured update as what an attacker observes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from leakbound import check, tensors
from leakbound.captured import findings as reading
from leakbound.captured import label_proofs, proofs, rounding
from leakbound.captured.capture import Capture
from leakbound.captured.findings import Finding
from leakbound.client import respond
from leakbound.defenses import Chain, Defense, NoDefense, chain
from leakbound.random import stream, uniform
from leakbound.types import (
    Batch,
    Gaussian,
    Laplace,
    LocalPlan,
    Observation,
    Server,
    Task,
    ThreatModel,
    Unit,
    Unknown,
    Update,
)

SEARCH = 30.0
"""Seconds that a search for the number of local steps of one update may take."""


@dataclass(frozen=True)
class TrainingInfo:
    """What is known of the local training besides the update; None is not known.

    Attributes:
        examples: how many examples the client trained on.
        labels: of all of them, in any order.
        learning_rate: of the client's SGD.
        steps: local steps.
        batch_size: examples a local step; None is all of them.
        defense: what the client applied to its update, where it is declared.
    """

    examples: int | None = None
    labels: Sequence[int] | Tensor | None = None
    learning_rate: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    defense: Defense | None = None

    def __post_init__(self) -> None:
        for name in ("examples", "steps", "batch_size"):
            if getattr(self, name) is not None:
                check.count(**{name: getattr(self, name)})
        if self.learning_rate is not None:
            check.positive(learning_rate=self.learning_rate)


@dataclass(frozen=True, eq=False)
class Understood:
    """An observation, and where each thing in it comes from.

    Attributes:
        labels: (N,) told or inferred; None where no rule applies.
        rate_known: the update's length says something; else only its direction does.
        notes: where the update contradicts what was told or declared, in sentences.
        refuted: the declared noise was not added, so that no bound may rest on it.
        untried: numbers of local steps among which `found_steps` can search; empty where that is
            settled.
    """

    observation: Observation
    findings: tuple[Finding, ...]
    labels: Tensor | None
    rate_known: bool
    defense: Chain
    notes: tuple[str, ...] = ()
    refuted: bool = False
    untried: tuple[int, ...] = ()

    def sure(self, name: str) -> bool:
        """Whether a finding of this name is known for certain."""
        return any(found.name == name and found.sure for found in self.findings)


def observe(
    capture: Capture,
    task: Task,
    *,
    input_shape: tuple[int, ...],
    examples: int | None = None,
    labels: Sequence[int] | Tensor | None = None,
    learning_rate: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    defense: Defense | None = None,
    public: Batch | None = None,
) -> Observation:
    """What an attacker sees who holds the capture.

    Args:
        capture: the update.
        task: the model at the weights before.
        input_shape: of one input, (C, H, W).
        examples: how many the client trained on; else the metadata's, the number of labels, or
            what the update tells.
        labels: of all examples, where they are known.
        learning_rate: of the local SGD; else the metadata's.
        steps: local steps; else the metadata's, or what the update tells where the rate is known
            (a search of at most `SEARCH` seconds).
        batch_size: examples a local step; None is all of them.
        defense: what was applied to the update, where it is declared.
        public: public data that the attacker has.

    Raises:
        ValueError: what does not fit the model, or cannot be told and must be given, by name.

    Example:
        >>> from leakbound.captured import load
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
        >>> before = dict(model.state_dict())
        >>> loss = torch.nn.functional.cross_entropy(model(torch.ones(1, 1, 2, 2)),
        ...                                          torch.tensor([1]))
        >>> names = [name for name, _ in model.named_parameters()]
        >>> gradient = dict(zip(names, torch.autograd.grad(loss, list(model.parameters()))))
        >>> capture = load(gradient, before, kind="gradient")
        >>> seen = observe(capture, Task.of(model), input_shape=(1, 2, 2))
        >>> seen.cohort, seen.update.rows.shape
        ((1,), torch.Size([1, 15]))
    """
    told = TrainingInfo(examples, labels, learning_rate, steps, batch_size, defense)
    read = partial(understand, capture, task, told, input_shape=input_shape, public=public)
    found = read()
    return (read(steps=found_steps(found, SEARCH)) if found.untried else found).observation


def found_steps(understood: Understood, seconds: float) -> Finding:
    """The number of local steps by a search among `untried`; see `findings.searched_steps`."""
    return reading.searched_steps(understood.observation, understood.untried, seconds)


def understand(
    capture: Capture,
    task: Task,
    told: TrainingInfo,
    *,
    input_shape: tuple[int, ...],
    public: Batch | None = None,
    steps: Finding | None = None,
) -> Understood:
    """As `observe`, with where each thing comes from, and without a search.

    `steps` is what `found_steps` said of this update.

    Raises:
        ValueError: as `observe`.
    """
    found, notes = list[Finding](), list[str]()
    change, sent = _change(capture, task)
    notes += filter(None, [_thawed(capture, task)])
    rate = _rate(capture, told, found)
    row = change / rate if rate is not None else change
    known = _told("local steps", told.steps, capture.whole("steps"), found)
    if capture.kind == "gradient" and (known or 1) > 1:
        raise ValueError(f"steps is {known}, but a gradient is that of one step; give kind delta")
    spread = rounding.spread(capture, task, rate)
    chained, size = as_chain(told.defense), reading.Size(1, None, "", 1)
    if not chained.links:
        one = 1 if capture.kind == "gradient" else known
        size = reading.batch_size(task, row, input_shape=input_shape, steps=one, spread=spread)
    count = _examples(capture, told, size, found, notes)
    part = _told("local batch size", told.batch_size, capture.whole("batch_size"), found)
    found += reading.rank(size)
    plan = LocalPlan(known or 1, rate if rate is not None else 1.0, part)
    task = replace(task, plan=plan, public=public)
    chained = chained.resolve(task, count)
    labels = _labels(told, task, count)
    threat = ThreatModel(labels_known=labels is not None, server=_server(task))
    observation = Observation(
        update=_with_law(row, task, chained, count, input_shape),
        task=task,
        cohort=(count,),
        input_shape=input_shape,
        threat=threat,
        labels=labels,
        auxiliary=public,
        defense=chained,
        sent=sent,
    )
    untried: tuple[int, ...] = ()
    if known is None:
        step, untried = (steps, ()) if steps else _steps(capture, observation, rate, size)
        found.append(step)
        plan = replace(plan, steps=int(step.value))
        observation = replace(observation, task=replace(task, plan=plan))
    labels = _label_finding(observation, spread, rounding.coarsest(capture), found, notes)
    false = None if rate is None else proofs.missing_noise(observation)
    notes += filter(None, [false, None if chained.links else proofs.outside(observation)])
    return Understood(
        observation,
        tuple(found),
        labels,
        rate is not None,
        chained,
        tuple(notes),
        refuted=false is not None,
        untried=untried,
    )


def _label_finding(
    observation: Observation,
    spread: Tensor,
    precision: float,
    found: list[Finding],
    notes: list[str],
) -> Tensor | None:
    """The labels that were told or are inferred, held against the signs of the last bias."""
    certain, odd = label_proofs.classes(observation, spread, precision)
    labels, wrong = observation.labels, None
    if labels is None:
        labels, finding = reading.labels(observation, certain)
        found.append(finding)
    else:
        found.append(Finding("labels", ", ".join(map(str, labels.tolist()[:64])), "told", True))
        wrong = label_proofs.contradiction(labels.tolist(), certain)
    notes += filter(None, [odd, wrong])
    return labels


def _steps(
    capture: Capture, observation: Observation, rate: float | None, size: reading.Size
) -> tuple[Finding, tuple[int, ...]]:
    if capture.kind == "gradient":
        return Finding("local steps", "1", "a gradient is that of one step", True), ()
    if rate is None:
        how = "assumed; give the learning rate or the number of local steps to test that"
        return Finding("local steps", "1", how, False), ()
    if observation.defense is not None and observation.defense.starts is Unit.EXAMPLE:
        how = "the defense works on every example's gradient, which one step has"
        return Finding("local steps", "1", how, True), ()
    return reading.steps(observation, size)


def _change(capture: Capture, task: Task) -> tuple[Tensor, Tensor | None]:
    """The weights before less those after, or the gradient, (P,); and the weights, where sent."""
    value = tensors.flat(task, capture.update, what=capture.name)
    if capture.kind == "gradient":
        return value, None
    if capture.kind == "delta":
        return -value, None
    change = task.parameters - value
    if not bool((change != 0).any()):
        raise ValueError(
            f"{capture.name} and the weights before are identical: nothing was trained between "
            "them; give the weights that the client was sent and those that it sent back"
        )
    return change, value[None]


def _thawed(capture: Capture, task: Task) -> str | None:
    """A note where weights that the model holds frozen were changed by the training."""
    named = tensors.by_name(task, capture.update, what=capture.name)
    moved = []
    for name, value in task.frozen.items():
        if name in named and named[name].is_floating_point():
            expected = value if capture.kind == "weights" else torch.zeros_like(value)
            rounded = torch.finfo(named[name].dtype).eps
            if not torch.allclose(named[name].to(expected), expected, rtol=rounded, atol=0):
                moved.append(name)
    if not moved:
        return None
    return (
        f"{len(moved)} of {len(task.frozen)} tensors that are frozen in the model (such as "
        f"{moved[0]}) were changed by the training: what they tell is not attacked; call "
        "requires_grad_(True) on what the client trained, or give the weights before that belong "
        "to the update"
    )


def _rate(capture: Capture, told: TrainingInfo, found: list[Finding]) -> float | None:
    if capture.kind == "gradient" and told.learning_rate is None:
        return 1.0
    rate = told.learning_rate or capture.number("learning_rate")
    if rate is None:
        how = "not known: the update's direction counts, its length does not"
        if as_chain(told.defense).links:
            how += ", so declared noise cannot be held against it"
        found.append(Finding("learning rate", "unknown", how, False))
        return None
    how = "told" if told.learning_rate else "the file's metadata"
    found.append(Finding("learning rate", f"{rate:g}", how, True))
    return 1.0 if capture.kind == "gradient" else rate


def _told(name: str, given: int | None, about: int | None, found: list[Finding]) -> int | None:
    value = given if given is not None else about
    if value is not None:
        how = "told" if given is not None else "the file's metadata"
        found.append(Finding(name, str(value), how, True))
    return value


def _examples(
    capture: Capture, told: TrainingInfo, size: reading.Size, found: list[Finding], notes: list[str]
) -> int:
    given = told.examples
    if given is None and told.labels is not None:
        given = len(told.labels)
    count = _told("batch size", given, capture.whole("examples"), found)
    if count is not None:
        if count < size.least:
            notes.append(
                f"batch size {count} was told, but the gradient of the layer {size.layer!r} has "
                f"the rank of at least {size.least} examples: float16 or mixed precision, Adam, "
                "weight decay or undeclared noise would explain it, or more examples or local steps"
            )
        return count
    if size.likely is None:
        sure = f"it is at least {size.least}"
        if size.products > size.least:
            sure += f", and batch size times local steps at least {size.products}"
        sure += f", {reading.PLAIN}"
        raise ValueError(
            f"batch size is not known, and {capture.name} does not tell it ({sure}); give the "
            "number of examples that the client trained on (--batch-size), and of its local steps"
        )
    how = (
        f"likely: the gradient of the layer {size.layer!r} has this rank; at least {size.least} "
        f"{reading.PLAIN}; give the batch size if you know it"
    )
    found.append(Finding("batch size", str(size.likely), how, False))
    return size.likely


def _labels(told: TrainingInfo, task: Task, count: int) -> Tensor | None:
    if told.labels is None:
        return None
    labels = torch.as_tensor(told.labels).reshape(-1)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels hold values of type {labels.dtype}; give class numbers")
    if len(labels) != count:
        raise ValueError(f"labels holds {len(labels)} for {count} examples; give one for each")
    check.labels(labels.long(), task.label_range)
    return labels.long().to(task.parameters.device)


def as_chain(defense: Defense | None) -> Chain:
    """The defense as a chain, the empty one for None.

    Raises:
        ValueError: something else, such as a name.
    """
    if defense is not None and not isinstance(defense, Defense):
        raise ValueError(
            f"defense is {str(defense)[:60]!r}, a {type(defense).__name__}; give a defense such as "
            "leakbound.defenses.GaussianNoise(noise_std=0.1)"
        )
    if isinstance(defense, Chain):
        return defense
    return NoDefense() if defense is None else chain(defense)


def _server(task: Task) -> Server:
    from leakbound.attacks.planted import Front

    return Server.MALICIOUS if isinstance(task.model, Front) else Server.HONEST


def _with_law(
    row: Tensor, task: Task, defense: Chain, count: int, input_shape: tuple[int, ...]
) -> Update:
    """The row as an update with the law that the declared defense gives a release.

    The defense runs on a stand-in batch of random images; only what does not depend on the batch is
    taken from that: the law, whether a mask was drawn or chosen, and the bound. The mask itself is
    where the captured row is zero.

    Raises:
        ValueError: a defense that runs on several clients together.
    """
    if not defense.links:
        return Update(row[None], Unit.CLIENT, (count,))
    if defense.cohort_size > 1:
        raise ValueError(
            f"defense is {defense!r}, which adds up {defense.cohort_size} clients; a captured "
            "update is one client's: leave that link out"
        )
    source = stream(0, "captured", "stand-in")
    low, high = task.input_range
    shape = (count, *input_shape)
    images = low + (high - low) * uniform(shape, source, like=task.parameters)
    labels = (uniform((count,), source) * (task.label_range or 1)).long()
    stand_in, _ = respond(task, Batch(images, labels.to(images.device)), defense, source)
    known = stand_in.seen(defense_known=True)
    mask = None if known.mask is None else (row != 0)[None]
    law = known.law
    if mask is not None and isinstance(law, Gaussian | Laplace):
        law = _on(mask, law)
    return replace(known, rows=row[None], examples=(count,), mask=mask, law=law)


def _on(mask: Tensor, law: Gaussian | Laplace) -> Gaussian | Laplace | Unknown:
    """A law that fell on what a stand-in's mask left, on this mask; it must be alike everywhere."""
    spread = law.covariance if isinstance(law, Gaussian) else law.scale
    if not isinstance(spread, Tensor) or spread.ndim < 2:
        return law
    levels = torch.unique(spread[spread > 0])
    if len(levels) != 1:
        return Unknown("noise of unequal variances fell on what a mask left")
    if isinstance(law, Gaussian):
        return replace(law, covariance=mask * levels[0])
    return replace(law, scale=mask * levels[0])
