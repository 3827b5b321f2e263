"""A captured update as an attacker observes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import check, client, registry, tensors
from leakbound._util import copies
from leakbound._util.memory import GB, Allowed
from leakbound._util.results import Fact
from leakbound.assess.certificate import lengthened, outside
from leakbound.attacks.idle import idle
from leakbound.attacks.planted import Front
from leakbound.attacks.tokens.layers import embeddings
from leakbound.captured import decay, declared, norms, optimizer, proofs, trainer
from leakbound.captured import findings as reading
from leakbound.captured.capture import Capture
from leakbound.captured.findings import Finding
from leakbound.client import respond
from leakbound.core import (
    Batch,
    Gaussian,
    Guarantee,
    Laplace,
    LocalPlan,
    Loss,
    NotApplicable,
    Observation,
    Server,
    Task,
    ThreatModel,
    Unit,
    Unknown,
    Update,
)
from leakbound.defenses import Chain, Defense, NoDefense, chain
from leakbound.domains import Domain, TokenDomain
from leakbound.domains.known import KnownValues
from leakbound.losses import check_fit, named
from leakbound.randomness import stream, uniform
from leakbound.task import drops

COPIES = 12
FROZEN_COPIES = 2
"""Copies of trained and of frozen weights that an attack holds at most. Of a trained GPT-2 of 0.66
GiB, an attack took 8.2 GiB besides the program, with the pages of both files. Of frozen weights, it
holds the pages of their file and a dictionary of the words: 7.4 GB for a base of 4.9 GB.
"""
DECAY = "weight decay"
"""The name of its finding."""
SHOWN = 10
"""The most tensors that a note names."""
KEPT = (
    "Simulated training keeps them as they were before; if the client trained them, "
    "reconstructions explain less of the update"
)
RMSPROP = 10
"""The learning rates in one step of RMSprop, as PyTorch sets it."""
SEARCH = 30.0
"""Seconds for the search for the number of local steps of one update."""


@dataclass(frozen=True)
class TrainingInfo:
    """What is known of the local training in addition to the update; None is not known.

    `labels` are of all examples, in any order. `batch_size` is that of a local step, if it is not
    all `examples`. `defense` is what the client applied to its update, if declared. `weight_decay`
    is that of its optimizer, which is subtracted; None subtracts what the update shows of it.
    `optimizer` is a name of `leakbound.LocalPlan`, "lars" or "lamb", with settings after commas
    ("sgd,momentum=0.9"); None looks for its traces in the update.
    `known` are parts of every example that the attacker has from elsewhere, in the order of
    `labels`.
    """

    examples: int | None = None
    labels: Sequence[float] | Tensor | None = None
    learning_rate: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    defense: Defense | None = None
    weight_decay: float | None = None
    known: KnownValues | None = None
    optimizer: str | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            plan_of(self.optimizer)
        check.given(check.count, examples=self.examples, steps=self.steps)
        check.given(check.count, batch_size=self.batch_size)
        check.given(check.positive, learning_rate=self.learning_rate)
        check.given(check.non_negative, weight_decay=self.weight_decay)
        as_chain(self.defense)


SETTINGS = ("momentum", "epsilon", "betas")
"""Settings of an optimizer, after its name."""


LAYER_WISE: Mapping[str, Mapping[str, Any]] = {
    "lars": {"optimizer": "sgd"},
    "lamb": {"optimizer": "adamw", "epsilon": 1e-6},
}
"""The plan behind optimizers that multiply each tensor's step by a ratio of norms."""


def layer_wise(optimizer: str | None) -> bool:
    """Whether the optimizer that a text names has a rate for each tensor.

    Example:
        >>> layer_wise("lars,momentum=0.9"), layer_wise("sgd"), layer_wise(None)
        (True, False, False)
    """
    if optimizer is None:
        return False
    return registry.row_of("optimizer", optimizer)["name"] in LAYER_WISE


def plan_of(optimizer: str) -> LocalPlan:
    """A local plan with the optimizer that a text names, such as "adam,betas=[0.9,0.98]".

    Of LARS and LAMB it is that of each tensor, whose rate is not known.

    Example:
        >>> plan_of("sgd,momentum=0.9").momentum
        0.9
    """
    row = registry.row_of("optimizer", optimizer)
    name = row.pop("name")
    check.known_keys("optimizer", row, SETTINGS)
    betas = row.pop("betas", None)
    if betas is not None and (not isinstance(betas, list) or len(betas) != 2):
        raise ValueError(f"betas is {betas!r}; give two numbers: betas=[0.9,0.999]")
    made = {"optimizer": name, **LAYER_WISE.get(name, {}), **row}
    try:
        return LocalPlan(
            betas=None if betas is None else tuple(betas),
            **made,
        )
    except TypeError as error:
        raise ValueError(f"optimizer is {optimizer!r}; give numbers as its settings") from error


@dataclass(frozen=True, eq=False)
class InferredContext:
    """An observation, and the source of each fact in it.

    Without `rate_known` only the update's direction is informative. If the declared noise was
    `refuted`, no bound may use it. `findings.searched_steps` can search the `untried` numbers of
    local steps.
    `declared` is the defense before it is resolved for the task. `facts` are what the update shows
    for certain of labels and batch statistics.
    """

    observation: Observation
    findings: tuple[Finding, ...]
    labels: Tensor | None
    rate_known: bool
    defense: Chain
    notes: tuple[str, ...] = ()
    refuted: bool = False
    untried: tuple[int, ...] = ()
    declared: Chain = field(default_factory=chain)
    facts: tuple[Fact, ...] = ()

    @property
    def decay(self) -> str | None:
        """The weight decay that was subtracted."""
        return next((one.value for one in self.findings if one.name == DECAY), None)


def observe(
    capture: Capture,
    task: Task,
    *,
    input_shape: tuple[int, ...],
    training: TrainingInfo | None = None,
    public: Batch | None = None,
) -> Observation:
    """What an attacker with the capture sees; `task` is the model at the weights before.

    What is not given comes from the metadata, or from the number of labels. Otherwise the number of
    examples is inferred from the update. If the rate is known, so is the number of local steps, by
    a search of at most `SEARCH` seconds. `public` are the attacker's data.
    """
    training = training or TrainingInfo()
    read = partial(
        infer_context,
        capture,
        task,
        training,
        input_shape=input_shape,
        public=public,
    )
    inferred = read()
    if inferred.untried:
        inferred = read(
            steps=reading.searched_steps(inferred.observation, inferred.untried, SEARCH)
        )
    return inferred.observation


def infer_context(
    capture: Capture,
    task: Task,
    info: TrainingInfo,
    *,
    input_shape: tuple[int, ...],
    public: Batch | None = None,
    steps: Finding | None = None,
) -> InferredContext:
    """As `observe`, with the source of each fact; `steps` is a finding of `searched_steps`."""
    change, sent = _change(capture, task)
    findings = list[Finding]()
    notes = _thawed(capture, task)
    rate = _rate(capture, info, findings)
    user_info = info
    info = _declared(capture, info, rate, findings, notes)
    info, stated_by = _recorded(capture, info, notes)
    known = _known("local steps", info.steps, capture, "steps", findings)
    if capture.kind == "gradient" and (known or 1) > 1:
        raise ValueError(f"steps is {known}, but a gradient is that of one step; give kind delta")
    one = 1 if capture.kind == "gradient" else known
    stated = as_chain(info.defense)
    rule = None if info.optimizer is None else plan_of(info.optimizer)
    layered = layer_wise(info.optimizer) and capture.kind != "gradient"
    if layered and info.weight_decay:  # its part depends on the rates
        info = replace(info, weight_decay=None)
    rate = None if layered else rate
    rounding = proofs.spread(capture, task, None)
    shrunk = _decay(capture, task, change, rounding, info, rate, known, rule)
    trace = None
    if capture.kind != "gradient" and not stated.links:
        left = change if shrunk is None else shrunk.subtracted(task, change, rounding)
        trace = optimizer.detected(task, left, rounding)
        if shrunk is None and trace is not None and trace.decay and info.weight_decay is None:
            shrunk = decay.same(task, trace.decay)
    if info.optimizer is not None:
        name = registry.row_of("optimizer", info.optimizer)["name"]
        findings.append(Finding("optimizer", name, stated_by, True))
    plan, rate = _planned(rule, trace, rate, known, shrunk is not None, findings, notes)
    if layered:
        rate = None
        findings = [one for one in findings if one.name != "learning rate"]
        how = "a ratio of norms, which the update does not show, multiplies it"
        findings.append(
            Finding(
                "learning rate",
                "another one in each tensor",
                how,
                False,
            )
        )
    if not (plan.is_sum or plan.decoupled) and rule is not None:
        plan = replace(plan, weight_decay=info.weight_decay or 0.0)
    row = change / (rate or 1.0)
    spread = proofs.spread(capture, task, rate)
    if shrunk is not None:
        shrunk = shrunk.over(rate or 1.0)
        row = shrunk.subtracted(task, row, spread)
        findings.append(_decay_finding(shrunk, info, rate))
    unit = rate or 1.0
    if layered and not plan.is_sum:
        row, unit = _evened(task, row, known or 1)
    size = reading.Size(1, None, "", 1)
    # Ranks count examples in sums of gradients; those of tokens count otherwise.
    if plan.is_sum and not stated.links and not named(task.loss).of_inputs:
        size = reading.batch_size(
            task,
            row,
            input_shape=input_shape,
            steps=one,
            spread=spread,
        )
    count = _examples(capture, info, size, findings, notes)
    part = _known("local batch size", info.batch_size, capture, "batch_size", findings)
    if size.layer:
        how = f"of the layer {size.layer!r}: batch size times local steps is at least this"
        findings.append(Finding("rank", str(size.products), f"{how}, {reading.PLAIN}", True))
    task = replace(
        task,
        plan=replace(
            plan,
            steps=known or 1,
            learning_rate=unit,
            batch_size=part,
        ),
        public=public,
    )
    chained = stated.resolve(task, count)
    labels = _labels(info, task, count, input_shape)
    server = Server.MALICIOUS if isinstance(task.model, Front) else Server.HONEST
    observation = Observation(
        update=_with_law(row, task, _of_one(capture, chained), count, input_shape, labels),
        task=task,
        cohort=(count,),
        input_shape=input_shape,
        threat=ThreatModel(
            labels_known=labels is not None,
            server=server,
            known="" if info.known is None else info.known.parts.text,
        ),
        labels=labels,
        known=None if info.known is None else _known_values(info.known, task, count, input_shape),
        auxiliary=public,
        defense=chained,
        sent=sent,
        layer_rates=layered,
    )
    untried: tuple[int, ...] = ()
    if known is None:
        step, untried = (steps, ()) if steps else _steps(capture, observation, rate, size, trace)
        findings.append(step)
        plan = replace(task.plan, steps=int(step.value))
        observation = replace(observation, task=replace(task, plan=plan))
    if layered:
        observation = lengthened(observation)
    whole_batch = (part or count) >= count and (capture.whole("clients") or 1) == 1
    if whole_batch and 1 in (known, norms.passes(capture, task)):
        moments = norms.of_batch(capture, task, count, input_shape)
        threat = replace(observation.threat, statistics_known=moments is not None)
        observation = replace(observation, threat=threat, statistics=moments)
    if info.known is not None:
        findings.append(Finding("known parts", info.known.parts.text, "given", True))
    certain, odd = proofs.classes(observation, spread, proofs.coarsest(capture))
    notes += filter(None, [odd])
    facts = proofs.batch_statistics(capture)
    if info.labels is None:
        facts += proofs.classes_fact(certain)
    labels = _label_finding(observation, certain, findings, notes, rate)
    false = None if rate is None else proofs.missing_noise(observation)
    if false is not None and user_info.defense is None:  # metadata that the update itself refutes
        # This ends: without a declared defense there is no noise to refute.
        about = {key: value for key, value in capture.about.items() if key != declared.KEY}
        about[declared.NOTE] = f"the metadata's defense is left out: {false}"
        capture = replace(capture, about=about)
        return infer_context(
            capture,
            task,
            user_info,
            input_shape=input_shape,
            public=public,
            steps=steps,
        )
    # Under other rates of weights and biases, the layer's input is known up to one factor.
    beyond = None if chained.links or layered else outside(observation)
    notes += filter(None, [false, beyond])
    return InferredContext(
        observation,
        tuple(findings),
        labels,
        rate is not None,
        chained,
        tuple(notes),
        refuted=false is not None,
        untried=untried,
        declared=stated,
        facts=facts,
    )


def _evened(
    task: Task,
    change: Tensor,
    steps: int,
) -> tuple[Tensor, float]:
    """A change (P,) by steps like Adam's, at a rate of 1 in each tensor, and the least rate."""
    row = change.clone()
    tops = []
    for part in task.unflatten(row).values():
        top = float(part.abs().max())
        if top > 0:
            part *= steps / top
            tops.append(top)
    # Rounding is largest beside the smallest rate.
    return row, min(tops) / steps


def _recorded(
    capture: Capture,
    info: TrainingInfo,
    notes: list[str],
) -> tuple[TrainingInfo, str]:
    """With the metadata's optimizer and its weight decay, unless given, and where it is from."""
    if info.optimizer is not None:
        return info, "given"
    if declared.OPTIMIZER_NOTE in capture.about:
        notes.append(capture.about[declared.OPTIMIZER_NOTE])
    text = capture.about.get(declared.OPTIMIZER)
    if text is None:
        return info, ""
    try:
        plan_of(text)
    except ValueError as error:
        raise ValueError(
            f"{capture.name}: the metadata name an optimizer that is not known ({error}); give "
            "optimizer as an option"
        ) from None
    shrinks = info.weight_decay
    if shrinks is None and not as_chain(info.defense).links:
        # Behind a defense the weights' part is not subtracted.
        shrinks = capture.number("weight_decay", or_zero=True)
    return replace(info, optimizer=text, weight_decay=shrinks), "the file's metadata"


def _planned(
    rule: LocalPlan | None,
    trace: optimizer.Trace | None,
    rate: float | None,
    steps: int | None,
    decays: bool,
    findings: list[Finding],
    notes: list[str],
) -> tuple[LocalPlan, float | None]:
    """The plan with the optimizer that is given or shown, and the learning rate, which equal sizes
    show. An adaptive optimizer whose weight decay shows is AdamW.
    """
    shown = None if trace is None else f"the update looks like {trace.name}: {trace.evidence}"
    if rule is None:
        if trace is None:
            how = "assumed: the update does not show it; give it with --optimizer"
            findings.append(Finding("optimizer", "SGD", how, False))
            return LocalPlan(), rate
        rule = trace.plan
        if decays and not rule.is_sum:
            rule = replace(rule, optimizer="adamw")
        findings.append(
            Finding("optimizer", trace.taken, f"{shown}; --optimizer says which", False)
        )
    elif trace is not None and (trace.family == "sgd") != (rule.optimizer == "sgd"):
        notes.append(f"the optimizer is given as {rule.optimizer}, but {shown}")
    if rate is None and trace is not None and trace.family == "equal":
        rate = trace.rate(rule, steps or 1)
        if rate is not None:
            # It is known now.
            findings[:] = [one for one in findings if one.name != "learning rate"]
            how = "the size of the update's entries"
            findings.append(Finding("learning rate", f"{rate:.6g}", how, False))
    return rule, rate


def _decay(
    capture: Capture,
    task: Task,
    change: Tensor,
    spread: Tensor,
    info: TrainingInfo,
    rate: float | None,
    steps: int | None,
    rule: LocalPlan | None,
) -> decay.Decay | None:
    """The multiples of the weights before in a change of the weights (or a gradient), as given or
    as the change shows them.
    """
    stated = info.weight_decay
    defended = bool(as_chain(info.defense).links)
    if stated == 0 or (stated is None and defended):
        return None
    if rule is not None and not (rule.is_sum or rule.decoupled):
        return None  # its decay goes through the division, as gradients do
    if defended:
        raise ValueError(
            f"weight_decay is {stated:g}, and a defense is declared, which may have changed the "
            "weights' part of the update: leave weight_decay out"
        )
    if stated is None or rate is None:
        shown = decay.detected(task, change, spread)
        if stated is None or shown is not None:
            return shown
        raise ValueError(
            f"weight_decay is {stated:g}, and its part of the update depends on the learning rate: "
            "give learning_rate too"
        )
    if capture.kind == "gradient":
        return decay.same(task, stated)
    plan = replace(rule or LocalPlan(), steps=steps or 1, learning_rate=rate, weight_decay=stated)
    if not plan.decoupled:
        one = torch.ones(1, dtype=torch.float64)
        return decay.same(task, rate * float(idle(plan, one)))
    # PyTorch multiplies the weights by a number in their own precision.
    kept = torch.tensor(1 - rate * stated, dtype=task.parameters.dtype)
    return decay.same(task, 1 - float(kept) ** plan.steps)


def _decay_finding(
    shrunk: decay.Decay,
    info: TrainingInfo,
    rate: float | None,
) -> Finding:
    if info.weight_decay is not None and rate is not None:
        return Finding(DECAY, f"{info.weight_decay:g}", "given; its part is subtracted", True)
    share = shrunk.common
    each = len(shrunk.found)
    value = "differs between tensors" if share is None else f"{share:.4g} of the weights before"
    how = f"{each} tensor{'s' * (each != 1)} show it by their rank, or where nothing else changed"
    if shrunk.assumed:
        how += f"; assumed in {len(shrunk.assumed)} others"
    if rate is not None:
        how += "; in units of the learning rate, all local steps together"
    return Finding(DECAY, value, f"{how}. It is subtracted; --weight-decay 0 keeps it", False)


def _declared(
    capture: Capture,
    info: TrainingInfo,
    rate: float | None,
    findings: list[Finding],
    notes: list[str],
) -> TrainingInfo:
    """With the defense that the metadata declare, unless one is given."""
    if info.defense is not None:
        return info
    if declared.NOTE in capture.about:
        notes.append(capture.about[declared.NOTE])
    defense = declared.of(capture, rate or 1.0)
    if defense is None:
        return info
    how = f"declared in the file's metadata ({capture.about.get(declared.FROM, 'no source')})"
    findings.append(Finding("defense", repr(defense), f"{how}; bounds rest on it", False))
    return replace(info, defense=defense)


def _label_finding(
    observation: Observation,
    certain: tuple[int, ...],
    findings: list[Finding],
    notes: list[str],
    rate: float | None,
) -> Tensor | None:
    """The labels that are given or inferred, compared with the signs of the last bias."""
    if named(observation.task.loss).of_inputs:
        findings.append(Finding("labels", "the tokens", "what a language model trains on", True))
        return None
    if observation.labels is None:
        if named(observation.task.loss).name == "cross_entropy":
            labels, finding = reading.labels(observation, certain)
        else:
            sure = rate is not None and any(f.name == "local steps" and f.sure for f in findings)
            labels, finding = reading.targets(observation, sure=sure)
        findings.append(finding)
        return labels
    findings.append(Finding("labels", reading.shown(observation.labels), "given", True))
    if lost := [str(label) for label in certain if label not in observation.labels.tolist()]:
        notes.append(
            f"the given labels do not include {', '.join(lost)}, which occur by the signs of the "
            "last layer's bias gradients (for plain cross-entropy, without weight decay or "
            "noise): check the labels, the kind and the weights before"
        )
    return observation.labels


def _steps(
    capture: Capture,
    observation: Observation,
    rate: float | None,
    size: reading.Size,
    trace: optimizer.Trace | None,
) -> tuple[Finding, tuple[int, ...]]:
    if capture.kind == "gradient":
        return Finding("local steps", "1", "a gradient is that of one step", True), ()
    counted = norms.passes(capture, observation.task)
    if counted is not None:
        how = "so many batches passed its batch norms in training mode (num_batches_tracked)"
        return Finding("local steps", str(counted), how, False), ()
    if rate is None:
        how = "assumed; give the learning rate or the number of local steps to test that"
        return Finding("local steps", "1", how, False), ()
    if observation.defense is not None and observation.defense.starts is Unit.EXAMPLE:
        how = "the defense works on every example's gradient, which implies one step"
        return Finding("local steps", "1", how, True), ()
    plan = observation.task.plan
    if trace is not None and not plan.is_sum:
        count = trace.steps(plan, rate)
        how = f"likely: the largest change of a weight, {trace.size:.4g}, is this many steps long"
        if count == RMSPROP and trace.family == "equal":
            how += ", or one of RMSprop"
        return Finding("local steps", str(count), f"{how}; {reading.GIVE}", False), ()
    return reading.steps(observation, size)


def _change(capture: Capture, task: Task) -> tuple[Tensor, Tensor | None]:
    """The weights before minus those after, or the gradient, (P,); and the weights, if sent."""
    value = tensors.flat(task, capture.update, what=capture.name)
    weights = capture.kind == "weights"
    change = task.parameters - value if weights else -value
    if not bool((change != 0).any()):
        same = "and the weights before are identical" if weights else "is zero"
        raise ValueError(
            f"{capture.name} {same} in every tensor that the model trains: nothing was trained; "
            "give the weights that the client received and those that it sent back"
        )
    return (value if capture.kind == "gradient" else change), value[None] if weights else None


def _thawed(capture: Capture, task: Task) -> list[str]:
    """A note if the training changed weights that are frozen in the model."""
    named = tensors.by_name(task, capture.update, what=capture.name)
    moved = []
    for name, value in task.frozen.items():
        usable = name in named and named[name].is_floating_point()
        if usable and bool(named[name].isfinite().all()):
            expected = value if capture.kind == "weights" else torch.zeros_like(value)
            # A file in half precision also rounds weights that nobody trained.
            rounded = torch.finfo(named[name].dtype).eps
            if not torch.allclose(
                named[name].to(expected),
                expected,
                rtol=rounded,
                atol=0,
            ):
                moved.append(name)
    if not moved:
        return []
    note = (
        f"{len(moved)} of {len(task.frozen)} tensors that are frozen in the model (such as "
        f"{moved[0]}) were changed by the training: what they reveal is not attacked; call "
        "requires_grad_(True) on what the client trained, or give the weights before that belong "
        "to the update"
    )
    return [note]


def _rate(
    capture: Capture,
    info: TrainingInfo,
    findings: list[Finding],
) -> float | None:
    if capture.kind == "gradient" and info.learning_rate is None:
        return 1.0
    rate = info.learning_rate or capture.number("learning_rate")
    if rate is None:
        how = "not known: the update's direction counts, its length does not"
        if as_chain(info.defense).links:
            how += ", so declared noise cannot be compared with it"
        findings.append(Finding("learning rate", "unknown", how, False))
        return None
    how = "given" if info.learning_rate else "the file's metadata"
    findings.append(Finding("learning rate", f"{rate:g}", how, True))
    return 1.0 if capture.kind == "gradient" else rate  # the rate is not in a gradient


def _known(
    name: str,
    stated: int | None,
    capture: Capture,
    key: str,
    findings: list[Finding],
) -> int | None:
    how = capture.source if stated is None else "given"
    value = capture.whole(key) if stated is None else stated
    if value is not None:
        findings.append(Finding(name, str(value), how, how != trainer.STATE))
    return value


def _examples(
    capture: Capture,
    info: TrainingInfo,
    size: reading.Size,
    findings: list[Finding],
    notes: list[str],
) -> int:
    stated = info.examples
    if stated is None and info.labels is not None:
        stated = len(info.labels)
    if stated is None and info.known is not None:
        stated = len(info.known.values)
    count = _known("batch size", stated, capture, "examples", findings)
    if count is not None and count < size.least:
        notes.append(
            f"the given batch size is {count}, but the gradient of the layer {size.layer!r} has "
            f"the rank of at least {size.least} examples: float16 or mixed precision, Adam, "
            "weight decay or undeclared noise would explain it, or more examples or local steps"
        )
    if count is not None:
        return count
    if size.likely is None:
        sure = f"it is at least {size.least}"
        if size.products > size.least:
            sure += f", and batch size times local steps at least {size.products}"
        sure += f", {reading.PLAIN}"
        raise ValueError(
            f"batch size is not known, and {capture.name} does not reveal it ({sure}); give the "
            "number of examples that the client trained on (--batch-size), and of its local steps"
        )
    how = (
        f"likely: the gradient of the layer {size.layer!r} has this rank; at least {size.least} "
        f"{reading.PLAIN}; give the batch size if you know it"
    )
    findings.append(Finding("batch size", str(size.likely), how, False))
    return size.likely


def _known_values(
    known: KnownValues,
    task: Task,
    count: int,
    input_shape: tuple[int, ...],
) -> KnownValues:
    """The known parts as the task gets inputs, after a check that they fit the update."""
    parts = known.parts
    if parts.domain.shape != input_shape:
        raise ValueError(
            f"known is of examples of shape {parts.domain.shape}, but the model takes "
            f"{input_shape}; give the parts of the model's input"
        )
    wanted = (count, *parts.part.shape)
    if tuple(known.values.shape) != wanted:
        raise ValueError(
            f"known holds values of shape {tuple(known.values.shape)}; give {wanted}: the known "
            f"part of each of the {count} examples"
        )
    kind = parts.domain.dtype
    if known.values.is_floating_point() != kind.is_floating_point:
        takes = "floats" if kind.is_floating_point else "whole numbers"
        raise ValueError(f"known holds values of type {known.values.dtype}; give {takes}")
    check.finite("known", known.values)
    check.within("known", known.values, parts.part.input_range)
    if kind.is_floating_point:
        kind = task.parameters.dtype
    return KnownValues(parts, known.values.to(task.parameters.device, kind))


def _labels(
    info: TrainingInfo,
    task: Task,
    count: int,
    input_shape: tuple[int, ...],
) -> Tensor | None:
    if info.labels is None:
        return None
    try:
        labels = torch.as_tensor(info.labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"labels is {str(info.labels)[:60]!r}; give one number for each example"
        ) from error
    if labels.is_complex() or labels.ndim < 1 or not len(labels):
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} and type {labels.dtype}; give one label for "
            "each example, such as [3]"
        )
    loss = named(task.loss)
    if loss.by_class and loss.targets != "any":
        labels = labels.reshape(-1)
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError(f"labels hold values of type {labels.dtype}; give class numbers")
    if len(labels) != count:
        raise ValueError(f"labels holds {len(labels)} for {count} examples; give one for each")
    return fitting(task, labels, input_shape)


def fitting(
    task: Task,
    labels: Tensor,
    input_shape: tuple[int, ...],
) -> Tensor:
    """Labels in the type that the task's loss takes, on its device, after a test of the loss."""
    loss = named(task.loss)
    whole = loss.has_classes
    if loss.targets == "any":
        whole = not labels.is_floating_point()
    if not whole:
        labels = labels.to(task.parameters.dtype)
    elif loss.targets != "any" or labels.ndim == 1:
        labels = labels.long()
    labels = labels.to(task.parameters.device)
    loss.check(labels, task.label_range)
    if loss.of_inputs:
        return labels
    with torch.no_grad():
        output = client.forward(task, reading.probes(task, len(labels), input_shape))
    if loss.targets == "any" and whole:
        with suppress(ValueError):
            check_fit(loss, output, labels)
            return labels
        labels = labels.to(output.dtype)  # a file often holds masks as bytes
    check_fit(loss, output, labels)
    return labels


def _check_memory(model: nn.Module, allowed: Allowed | None) -> None:
    """Reject a model whose copies and updates would not fit into memory."""
    needed = sum(
        (COPIES if p.requires_grad else FROZEN_COPIES) * p.numel() * p.element_size()
        for p in model.parameters()
    )
    free = (allowed or Allowed()).room
    if needed > free:
        raise ValueError(
            f"the model has {sum(p.numel() for p in model.parameters()):,} numbers; an attack on "
            f"its update takes about {needed / GB:.1f} GB, and {free / GB:.1f} GB of "
            "memory are free for it: freeze what is not sent (requires_grad_(False)), load the "
            "model in 16 bits, allow more, or use a larger machine"
        )


def as_chain(defense: Defense | None) -> Chain:
    if defense is not None and not isinstance(defense, Defense):
        raise ValueError(
            f"defense is {str(defense)[:60]!r}, a {type(defense).__name__}; give a defense such as "
            "leakbound.defenses.GaussianNoise(noise_std=0.1)"
        )
    if isinstance(defense, Chain):
        return defense
    return NoDefense() if defense is None else chain(defense)


def task_of(
    model: nn.Module,
    capture: Capture,
    form: Domain,
    *,
    classes: int | None = None,
    loss: str | Loss = "cross_entropy",
    allowed: Allowed | None = None,
) -> tuple[Task, tuple[str, ...]]:
    """The model at the capture's weights before, and notes on how it was made.

    Dropout is switched off, since its draws are the client's secret. Batch norms stay in the
    model's mode; running statistics are those of the weights before. `allowed` is the memory, and
    the device; by default what is free, and where the model is.
    """
    copies.refuse(model)
    _check_memory(model, allowed)
    plain = copies.plain(model)
    if allowed is not None:
        plain = plain.to(allowed.device)
    notes = []
    if copies.compiled(model):
        notes.append("the model is compiled: its Python modules run instead, with equal results")
    if any(map(drops, plain.modules())):
        notes.append(
            "the model has dropout in training mode: it was switched off, since only the client "
            "knows its draws (so the simulation only approximates the training)"
        )
    quiet = (nn.modules.dropout._DropoutNd, nn.modules.instancenorm._InstanceNorm, nn.RNNBase)
    # These draw random numbers (recurrent layers have dropout between them) or update statistics.
    for module in plain.modules():
        if isinstance(module, quiet):
            module.eval()
    task = Task.of(plain, loss=loss, classes=classes, domain=form)
    if changed := norms.set_modes(capture, task, plain):
        notes.append(changed)
        task = Task.of(plain, loss=loss, classes=classes, domain=form)
    if task.coupled:
        notes.append(
            "batch norms are in training mode: examples of a batch affect each other (build the "
            "model with .eval() if the client trained with fixed statistics)"
        )
    lost = _left_out(capture, task, notes)
    if lost:
        for name in lost:
            plain.get_parameter(name).requires_grad_(False)
        task = Task.of(plain, loss=loss, classes=classes, domain=form)
    if capture.before is None:
        notes.append("no weights before were given: the model's own weights were used, as built")
    else:
        weights = tensors.flat(task, capture.before, what="before")
        named = tensors.by_name(task, capture.before, what="before")
        held = {
            name: named[name].detach().to(value)
            for name, value in task.buffers.items()
            if name in named and named[name].shape == value.shape
        }
        for name in held.keys() & task.frozen.keys():
            if held[name].data_ptr() != task.frozen[name].data_ptr():  # else it was checked
                check.finite(f"before: {name}", held[name])
        task = replace(task.with_parameters(weights), buffers={**task.buffers, **held})
        if missing := [name for name in task.frozen if name not in named]:
            notes.append(
                f"the weights before hold no value for {len(missing)} of {len(task.frozen)} frozen "
                f"tensors (such as {missing[0]}): the model's own were used, as built"
            )
    return _checked(task, form.shape), tuple(notes)


def _left_out(
    capture: Capture,
    task: Task,
    notes: list[str],
) -> list[str]:
    """The trained tensors that no attack on this update can use; `notes` get the reasons."""
    absent, spoiled = tensors.unusable(task, capture.update, what=capture.name)
    total = len(task.names)
    if spoiled and len(absent) + len(spoiled) == total:
        raise ValueError(
            f"{capture.name} has NaN or infinite values in every tensor that was sent "
            f"({_listed(spoiled)}), so no value is left to attack; give a file that is whole"
        )
    reasons = (
        (absent, "are not in the file, so they were not sent"),
        (spoiled, "hold NaN or infinite values, or values beyond the model's type"),
    )
    notes += (
        f"{len(names)} of {total} trained tensors {reason}: {_listed(names)}. They are left out as "
        f"if frozen, and the others are attacked. {KEPT}"
        for names, reason in reasons
        if names
    )
    return [*absent, *spoiled]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _checked(task: Task, input_shape: tuple[int, ...]) -> Task:
    """The task with its number of classes, after a test with one input."""
    low, high = task.input_range
    shape = (2 if task.coupled else 1, *input_shape)  # a batch norm in training mode refuses one
    image = torch.full(shape, (low + high) / 2).to(task.parameters)
    tokens = task.domain is not None and not task.domain.dtype.is_floating_point
    _check_vocabulary(task)
    try:
        if tokens:
            image = reading.probes(task, shape[0], input_shape)
        task, output = client.fitted(task, image)
        if not tokens:
            client.refuse_codes(task, input_shape)
    except (NotApplicable, client.WrongOutput) as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(
            f"input_shape is {input_shape}, and {client.unfit(task, image, error)}"
        ) from None
    client.refuse_changing(task, image)
    loss = named(task.loss)
    if wrong := loss.misfit(output, len(image)):
        raise ValueError(f"for inputs of shape {shape} {wrong}")
    if not loss.has_classes:
        return task
    width = output.shape[2 if loss.of_inputs else 1]
    if loss.of_inputs and task.label_range not in (None, width):
        raise ValueError(
            f"vocabulary is {task.label_range}, but the model scores {width} tokens; give "
            f"--vocabulary {width}"
        )
    if task.label_range is not None and loss.outputs(task.label_range) > width:
        raise ValueError(
            f"classes is {task.label_range}, but the model has {width} outputs; leave classes out, "
            "or build the model with this many"
        )
    # A single output decides between two classes.
    return replace(task, label_range=task.label_range or max(2, width))


def _check_vocabulary(task: Task) -> None:
    """Reject a number of tokens that is not that of the model's word table.

    Tokens beyond it cannot occur, and missing ones would never be found. Sequences of two tokens
    find the table without an error; from three places on, no numbers of places look like them.
    """
    vocabulary = None if task.domain is None else task.domain.vocabulary
    if task.domain is None or vocabulary is None or task.domain.shape[0] < 3:
        return
    names: list[str] = []
    with suppress(Exception):  # the caller's own test reports a model that fails
        names = embeddings(replace(task, domain=TokenDomain(2, task.domain.shape[0])))
    modules: dict[str, Any] = {name: task.model.get_submodule(name) for name in names}
    sizes = {name: module.num_embeddings for name, module in modules.items()}
    # Tables of places may get tokens, too.
    if sizes and vocabulary not in sizes.values():
        name, rows = next(iter(sizes.items()))
        raise ValueError(
            f"vocabulary is {vocabulary}, but the model's table {name!r} has {rows} "
            f"tokens; give --vocabulary {rows}"
        )


def _of_one(capture: Capture, defense: Chain) -> Chain:
    """Reject noise that was declared for one client if the update is many clients' average."""
    clients = capture.whole("clients") or 1
    if clients > 1 and defense.guarantee is not Guarantee.NONE:
        raise ValueError(
            f"defense is {defense!r}, but {capture.name} is the average of {clients} clients, "
            "weighted by their numbers of examples: the level of its noise depends on these "
            "numbers, which it does not hold; leave defense out, or give one client's update"
        )
    return defense


def _with_law(
    row: Tensor,
    task: Task,
    defense: Chain,
    count: int,
    input_shape: tuple[int, ...],
    known_labels: Tensor | None,
) -> Update:
    """The row as an update with the distribution that the declared defense gives a release.

    The defense runs on a substitute batch of random images; only what does not depend on the batch
    is used. The mask is where the captured row is zero.
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
    loss = named(task.loss)
    if task.domain is not None and not task.domain.dtype.is_floating_point:
        images = reading.probes(task, count, input_shape)
    if loss.of_inputs:
        labels = images
    elif not loss.by_class:
        with torch.no_grad():
            labels = loss.decided(torch.zeros_like(client.forward(task, images)))
    elif loss.targets == "any":
        labels = _taken(task, images, labels if known_labels is None else known_labels)
    stand_in, _ = respond(task, Batch(images, labels.to(images.device)), defense, source)
    known = stand_in.seen(defense_known=True)
    mask = None if known.mask is None else (row != 0)[None]
    law = known.law
    if mask is not None and isinstance(law, Gaussian | Laplace):
        law = _on(mask, law)
    return replace(
        known,
        rows=row[None],
        examples=(count,),
        mask=mask,
        law=law,
    )


def _taken(
    task: Task,
    images: Tensor,
    labels: Tensor,
) -> Tensor:
    """Labels that a function takes which leakbound does not know: these, or masks of zeros."""
    loss = named(task.loss)
    with torch.no_grad():
        output = client.forward(task, images)
    masks = torch.zeros_like(output), torch.zeros_like(output[:, :1]).long()
    for candidate in (labels, *masks):
        with suppress(ValueError):
            check_fit(loss, output, candidate)
            return candidate
    raise ValueError(
        f"the loss is {loss.name}, and the labels that it takes are not known; give labels, so "
        "that the declared noise can be compared with the update"
    )


def _on(mask: Tensor, law: Gaussian | Laplace) -> Gaussian | Laplace | Unknown:
    """Move a distribution from a substitute's mask to this one; it must be uniform over it."""
    name = "covariance" if isinstance(law, Gaussian) else "scale"
    spread = getattr(law, name)
    if not isinstance(spread, Tensor) or spread.ndim < 2:
        return law
    levels = torch.unique(spread[spread > 0])
    if len(levels) != 1:
        return Unknown("noise of unequal variances was added after a mask")
    return replace(law, **{name: mask * levels[0]})
