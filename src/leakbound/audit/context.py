"""Data, splits and models that the experiments of one plan share in one process."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from leakbound import check, client, data, registry
from leakbound._util import files, optimizers
from leakbound.assess.chance import FEWEST, MOST, comparable
from leakbound.audit.attacked_round import OTHERS
from leakbound.audit.plan import DataSpec, ModelSpec, Plan, build_defense
from leakbound.bounds.counting import LOOKED, same_law
from leakbound.core import Batch, NotApplicable, Task, ThreatModel
from leakbound.domains import Domain
from leakbound.domains.known import as_marked, known_parts, mask_file
from leakbound.losses import NamedLoss, check_fit, is_code, named
from leakbound.lpips import Lpips
from leakbound.models.custom import load_weights
from leakbound.randomness import permutation, stream
from leakbound.task import trained

SPLITS = {"private": 0.6, "public": 0.2, "test": 0.2}
SMALLEST = 50
"""Minimum number of a split's images that are compared with others."""
FEW = 10
TRAINED_ON = 64
"""Public examples of each step of a model's `train_steps`."""
SCORED = 128
"""Public examples from which a pruning scheme chooses its first mask, as many as SNIP's authors."""
MOST_WEIGHTS = 1 << 28
"""Weights of new models that are kept, 1 GiB; trained and loaded models are all kept."""
T = TypeVar("T")


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PlanContext:
    """Loads each object once; everything it returns depends only on names and seeds.

    Args:
        spec: the data.
        device: device of models and batches. Every draw is made on the CPU, so a GPU computes from
            the same weights, batches and noise.
    """

    def __init__(self, spec: DataSpec, device: str = "cpu") -> None:
        self.spec = spec
        self.device = usable(device)
        if self.device.type == "cuda":  # float32 as on the CPU, and the same sums each time
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.cudnn.deterministic = True
        self._kept: dict[Any, Any] = {}
        self._new: dict[tuple[ModelSpec, int], Task] = {}
        self._weights = 0  # of all of them

    @cached_property
    def dataset(self) -> data.Dataset:
        """The plan's data."""
        spec = self.spec
        return data.load(
            spec.source,
            size=spec.size,
            channels=spec.channels,
            limit=spec.limit,
            schema=spec.schema,
            bits=spec.bits,
            person=spec.person,
        )

    @cached_property
    def loss(self) -> NamedLoss:
        """What clients train on, for the data's labels."""
        return named(self.spec.loss).of_data(self.dataset.labels)

    def threat(self, given: ThreatModel) -> ThreatModel:
        """What attackers know, columns included that a schema marks as known.

        Labels that are the input's own tokens are never known.
        """
        return replace(
            given,
            labels_known=given.labels_known and not self.loss.of_inputs,
            known=as_marked(self.domain, given.known),
        )

    @cached_property
    def domain(self) -> Domain:
        """What one example is, with what public examples show about its scales."""
        domain = self.dataset.domain
        public = self.dataset.inputs[self.drawn["public"]]
        return domain.fitted(public)

    @cached_property
    def splits(self) -> dict[str, Tensor]:
        """Disjoint indices: private (the clients'), public (the attacker's) and test.

        With fewer than 10 images, all are private. Copies of an image are only in the first split;
        equal rows of a table may belong to different people and stay.
        """
        once = self.dataset.domain.copies_count_once and len(self.drawn["public"])
        return data.without_copies(self.drawn, self.dataset.inputs) if once else self.drawn

    @cached_property
    def drawn(self) -> dict[str, Tensor]:
        """The splits with all copies: each is a draw from the same distribution.

        The bounds count on such draws. Without copies of private images, the public part would lack
        exactly the images that a candidate matches best.
        """
        count = len(self.dataset.labels)
        if count < FEW:
            none = torch.zeros(0, dtype=torch.long)
            return {"private": torch.arange(count), "public": none, "test": none}
        return data.split(count, SPLITS, seed=0, name="audit", persons=self.dataset.people)

    @cached_property
    def counted(self) -> Batch | None:
        """The public draw on which bounds count; attacks get `public`."""
        indices = self.drawn["public"]
        return self.batch(indices) if len(indices) else None

    @property
    def copies(self) -> int:
        """Number of images left out because another split holds a copy."""
        return len(self.dataset.labels) - sum(map(len, self.splits.values()))

    @cached_property
    def public(self) -> Batch | None:
        """Public images: what the attacker may know about this kind of data; None if none exist."""
        indices = self.splits["public"]
        return self.batch(indices) if len(indices) else None

    @cached_property
    def private(self) -> Batch:
        """Private images of the clients."""
        return self.batch(self.drawn["private"])

    @cached_property
    def origins(self) -> Tensor | None:
        """The source of each image of `counted`, if several images share one."""
        origins = self.dataset.origins
        return None if origins is None else origins[self.drawn["public"]]

    @cached_property
    def same_law(self) -> float | None:
        """p-value of a test that private and public images have one distribution; None: too few."""
        parts = [self._one_each(self.drawn[name]) for name in ("public", "private")]
        if min(map(len, parts)) < SMALLEST:
            return None
        # fixed draws: the same data give the same p-value
        rows = [
            self.dataset.inputs[places[:LOOKED]].flatten(1).double().numpy() for places in parts
        ]
        return same_law(rows[0], rows[1], np.random.default_rng(0))

    def _one_each(self, places: Tensor) -> Tensor:
        """One example of each person, as a person's examples are similar; all if nobody knows."""
        people = self.dataset.people
        if people is None:
            return places
        first = np.unique(people[places].numpy(), return_index=True)[1]
        return places[torch.from_numpy(np.sort(first))]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example, such as (C, H, W)."""
        return tuple(self.dataset.inputs.shape[1:])

    def batch(self, indices: Tensor) -> Batch:
        """The images with these indices, on the device."""
        batch = self.dataset.batch(indices)
        labels = batch.labels
        if labels.ndim > 1 and self.loss.targets != "class map":  # two classes as a mask
            labels = labels.to(batch.inputs.dtype)
        return Batch(batch.inputs.to(self.device), labels.to(self.device))

    def batches(
        self,
        size: int,
        clients: int,
        seed: int,
    ) -> list[Batch]:
        """Private batches, the same for every defense and attack with that size and seed."""
        taken = self._order(size, clients, seed)[: size * clients]
        return [self.batch(taken[at : at + size]) for at in range(0, size * clients, size)]

    def others(
        self,
        size: int,
        clients: int,
        seed: int,
    ) -> Batch | None:
        """Private and test examples outside of these batches, which no attack sees.

        Of many, those with the classes of the batches come first, and others are left out. Other
        examples of persons in the batches stay: without them, the batches would stand out, and a
        candidate near a person with many examples would look like no chance.
        """
        return self._of_places(size, clients, seed, self._outside(size, clients, seed))

    def _outside(
        self,
        size: int,
        clients: int,
        seed: int,
    ) -> Tensor:
        """Private and test examples outside of these batches."""
        order = self._order(size, clients, seed)
        return torch.cat([order[size * clients :], self.splits["test"]])

    def _of_places(
        self,
        size: int,
        clients: int,
        seed: int,
        rest: Tensor,
    ) -> Batch | None:
        if not len(rest):
            return None
        taken = self._order(size, clients, seed)[: size * clients]
        labels = self.dataset.labels
        if (
            labels.is_floating_point() and labels.ndim == 1
        ):  # near labels count as equal, by the ranks of all
            return self.batch(rest[:MOST])
        same = comparable(labels[taken], labels[rest])
        return self.batch(torch.cat([rest[same][:MOST], rest[~same][:FEWEST]]))

    def _order(
        self,
        size: int,
        clients: int,
        seed: int,
    ) -> Tensor:
        """The private examples in the order in which batches take them."""
        private = self.splits["private"]
        if size * clients > len(private):
            raise ValueError(
                f"batch size {size} times {clients} clients makes {size * clients} examples, but "
                f"the data has {len(private)} private ones of {len(self.dataset.labels)}; give "
                "smaller batches or more data"
            )
        return private[permutation(len(private), stream(seed, "batch", size))]

    def task(self, spec: ModelSpec, seed: int) -> Task:
        """The model at its weights: new from the seed, from a file, or trained for some steps."""
        with one_thread():
            if spec.train_steps or spec.weights is not None:
                return self.once(("task", spec, seed), lambda: self._make_task(spec, seed))
            task = self._new.pop((spec, seed), None)
            if task is None:
                task = self._make_task(spec, seed)
                self._weights += len(task.parameters)
                while self._new and self._weights > MOST_WEIGHTS:  # the longest unused first
                    self._weights -= len(self._new.pop(next(iter(self._new))).parameters)
            self._new[spec, seed] = task  # at the end: the first is the longest unused
            return task

    def _make_task(self, spec: ModelSpec, seed: int) -> Task:
        module = self._module(spec, seed).to(self.device)
        try:
            task = Task.of(
                module,
                loss=self.loss,
                classes=self.dataset.classes,
                public=self.public,
                domain=self.domain,
            )
        except ValueError as error:
            raise ValueError(f"model {spec.name!r}: {error}") from None
        task = check_outputs(self, task, spec.name)
        if spec.train_steps:
            task = self._trained(task, spec.train_steps, seed)
        scheme = spec.scheme
        if scheme is None:
            return task
        public = self.splits["public"][:SCORED]
        batch = self.batch(public) if len(public) else None
        return task.pruned(scheme.start(task, batch, stream(seed, "scheme")))

    def _module(self, spec: ModelSpec, seed: int) -> nn.Module:
        model: nn.Module = registry.build(
            "model",
            spec.name,
            spec.own,
            input_shape=self.input_shape,
            classes=self.loss.outputs(self.dataset.classes),
            generator=stream(seed, "model", spec.name),
            domain=self.domain,
        )
        if spec.weights is not None:
            load_weights(model, Path(spec.weights))
        return model

    def _trained(
        self,
        task: Task,
        steps: int,
        seed: int,
    ) -> Task:
        """Adam (rate 1e-3) on batches of public images, never on private or test images."""
        pool = self.splits["public"]
        source = stream(seed, "pretrain")  # its own stream: batches do not shift with train_steps
        weights = nn.Parameter(task.parameters.clone())
        optimizer = optimizers.Adam([weights], lr=1e-3)
        for _ in range(steps):
            batch = self.batch(pool[permutation(len(pool), source)[:TRAINED_ON]])
            gradient = client.gradient(task, batch.inputs, batch.labels, weights.detach())
            weights.grad = gradient.detach()
            optimizer.step()
        check.finite(f"the weights after {steps} train_steps", weights.detach())
        return task.with_parameters(weights.detach().clone())

    def size(self, spec: ModelSpec) -> int | None:
        """Number of the model's trained parameters; None if it cannot be built."""

        def count() -> int | None:
            try:
                return sum(p.numel() for p in trained(self._module(spec, 0)).values())
            except ValueError:
                return None

        return self.once(("size", spec), count)

    def lpips(self, path: str) -> Lpips:
        """The LPIPS metric with the weights of that file."""
        return self.once(("lpips", path), lambda: Lpips.load(Path(path)))

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The result of `make`, computed at the first call with that key."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(T, self._kept[key])


def persons_of(context: PlanContext, size: int, clients: int, seed: int) -> Tensor | None:
    """The person of each example of the context's `batches`, in their order; None if not known."""
    people = context.dataset.people
    taken = context._order(size, clients, seed)[: size * clients]
    return None if people is None else people[taken]


def acquaintances_of(
    context: PlanContext,
    size: int,
    clients: int,
    seed: int,
) -> tuple[Batch, Tensor] | None:
    """Other examples of persons in these batches and of MOST others, and whose they are.

    All of a person's examples outside of the batches are here. None if nobody knows who is who.
    """
    people = context.dataset.people
    if people is None:
        return None
    taken = context._order(size, clients, seed)[: size * clients]
    places = context._outside(size, clients, seed)
    whose = people[places]
    strangers = torch.unique(whose[~torch.isin(whose, people[taken])])
    order = permutation(len(strangers), stream(seed, "acquaintances"))
    shown = strangers[order[:MOST]]
    kept = places[torch.isin(people[places], torch.cat([shown, people[taken]]))]
    return context.batch(kept), people[kept]


def others_in_round(
    context: PlanContext,
    size: int,
    clients: int,
    seed: int,
    number: int,
) -> list[Batch]:
    """Batches of other clients in a round before the attacked one, as far as there are examples."""
    rest = context._order(size, clients, seed)[size * clients :]
    source = stream(seed, "other clients", size, number)
    drawn = rest[permutation(len(rest), source)[: size * OTHERS]]
    return [context.batch(places) for places in torch.split(drawn, size) if len(places) == size]


def usable(device: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: torch cannot use it here.
    """
    mend = 'give "cpu", or "cuda" on a machine with a GPU and a torch build for it'
    try:
        place = torch.device(device)
        if place.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, but torch finds no GPU here; {mend}")
        # Only a computation shows whether this build of torch runs on the device.
        torch.zeros(1, device=place).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device is {device!r} ({one_line(error)[:120]}); {mend}") from None
    return place


def one_line(error: BaseException) -> str:
    """An exception as one short line that is the same in every run."""
    # Addresses in memory differ from run to run.
    text = re.sub(r"0x[0-9a-fA-F]+", "0x", " ".join(str(error).split()))[:500]
    # A record is UTF-8, which has no surrogates.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def named_code_of(plan: Plan) -> list[str]:
    """What a plan names as "package.module:build": models, settings of attacks, data, the loss."""
    named = {model.name for model in plan.models}
    if data.sources.is_code(plan.data.source):
        named.add(plan.data.source.partition(",")[0])
    if is_code(plan.data.loss):
        named.add(plan.data.loss.partition(",")[0])
    for attack in plan.attacks:
        named |= {value for value in attack.parameters.values() if isinstance(value, str)}
    return sorted(name for name in named if ":" in name)


def code(plan: Plan) -> dict[str, str]:
    digests = {}
    for name in named_code_of(plan):
        file = _file_of(name.partition(":")[0])
        if file and Path(file).is_file():
            digests[name] = _digest(file)
    return digests


def _file_of(module: str) -> str | None:
    """Where a module's code is. Found without its import, which may come during the run."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # said where the code is needed
        return None
    return None if spec is None else spec.origin


def _digest(file: str) -> str:
    return hashlib.sha256(files.read(Path(file))).hexdigest()


def fingerprint(plan: Plan, context: PlanContext) -> dict[str, Any]:
    dataset = context.dataset
    mask = mask_file(plan.threat.known)
    named = [*(spec.weights for spec in plan.models), plan.lpips_weights, mask]
    return {
        "source": plan.data.source,
        "fingerprint": dataset.fingerprint,
        "examples": len(dataset.labels),
        "copies": context.copies,
        "shape": list(context.input_shape),
        "classes": dataset.classes,
        "weights": {file: _digest(file) for file in named if file is not None},
    }


def check_outputs(
    context: PlanContext,
    task: Task,
    name: str,
) -> Task:
    """The task with a loss that fits the outputs of its model, which is called `name`.

    Raises:
        ValueError: the model cannot take an example, has other outputs than the loss needs, or
            gives other gradients when it is called again.
    """
    classes = context.dataset.classes
    # Two examples: a batch norm in training mode refuses one.
    image = context.dataset.inputs[: 2 if task.coupled else 1].to(context.device)
    kind = task.parameters.dtype
    if image.is_floating_point() and kind != image.dtype:
        raise ValueError(
            f"model {name!r} has weights of {kind}, and an audit computes in {image.dtype}; return "
            "model.float() from the function that builds it"
        )
    try:
        task, _ = client.fitted(task, image)
        if context.domain.dtype.is_floating_point:
            client.refuse_codes(task, context.input_shape)
        with torch.enable_grad():
            output = client.forward(task, image, task.parameters.detach().requires_grad_())
        wrong = client.no_gradient(output)
        output = output.detach()
        if not wrong and not bool(output.isfinite().all()):
            wrong = "it returns values that are not finite; check its weights"
        if wrong:
            raise client.WrongOutput(wrong)
    except (NotApplicable, client.WrongOutput) as error:
        raise ValueError(f"model {name!r}: {error}") from None
    except Exception as error:
        if not context.domain.dtype.is_floating_point:
            raise ValueError(f"model {name!r}: {client.unfit(task, image, error)}") from None
        raise ValueError(
            f"model {name!r} cannot take an input of shape {tuple(image.shape)} "
            f"({one_line(error)}); give another model, or set size and channels of the data"
        ) from None
    try:
        client.refuse_changing(task, image)
    except ValueError as error:
        raise ValueError(f"model {name!r}: {error}") from None
    loss = named(task.loss)
    if loss.assumed or loss.targets == "any":  # only the function knows which outputs it takes
        try:
            check_fit(loss, output, context.batch(torch.arange(len(image))).labels)
        except ValueError as error:
            raise ValueError(f"model {name!r}: {error}") from None
        return task
    shape = tuple(output.shape)
    wanted = loss.outputs(classes)
    more = loss.name in ("cross_entropy", "dense_cross_entropy")
    width = output.shape[2 if loss.of_inputs else 1] if output.ndim > 1 else 1
    if loss.misfit(output, len(image)) or width < wanted or (width > wanted and not more):
        raise ValueError(
            f"model {name!r} returns {shape} for one example; give a model that returns "
            f"(1, K{', H, W' * loss.dense}) with K {'at least ' * more}{wanted} (loss "
            f"{loss.name!r}, {classes or 'no'} classes of the data)"
        )
    return task


def check_plan(plan: Plan, context: PlanContext) -> None:
    """Build every model once and compare batches with the data, before any experiment runs."""
    available = len(context.splits["private"])
    if context.copies:
        warnings.warn(
            f"{context.copies} of {len(context.dataset.labels)} examples are copies of examples in "
            "another split (private, public, test) and are left out",
            stacklevel=2,
        )
    # For its error: it names a part that the examples do not have.
    if known := context.threat(plan.threat).known:
        known_parts(context.domain, known)
    # Drawn only for its error: too few examples must stop the plan before its first experiment.
    for clients in sorted({build_defense(links).cohort_size for links in plan.defenses}):
        for size in plan.batch_sizes:
            context.batches(size, clients, plan.seeds[0])
    if plan.utility.rounds and plan.utility.batch_size * plan.utility.clients > available:
        raise ValueError(
            f"utility trains {plan.utility.clients} clients on {plan.utility.batch_size} examples "
            f"each, but the data has {available} private ones; lower utility.batch_size"
        )
    trains = plan.utility.rounds or any(spec.train_steps for spec in plan.models)
    if trains and len(context.dataset.labels) < FEW:
        raise ValueError(
            f"data has {len(context.dataset.labels)} examples, too few to train on: give at least "
            f"{FEW}, or leave out [utility] and train_steps"
        )
    if plan.utility.rounds and not context.dataset.classes:
        raise ValueError(
            "utility measures the accuracy of classes, but the data's labels are numbers; leave "
            "[utility] out"
        )
    if context.dataset.classes == 1:
        raise ValueError(
            f"data has one class ({context.dataset.class_names[0]!r}), on which cross-entropy has "
            "no gradient: give two classes or more (for images: two class folders)"
        )
    if plan.lpips_weights is not None:
        network = context.lpips(plan.lpips_weights)
        shape = context.input_shape
        if not network.takes(shape):
            raise ValueError(
                f"lpips_weights is {plan.lpips_weights!r}, of the network {network.name!r}, which "
                f"takes images of 1 or 3 channels and at least {network.smallest} x "
                f"{network.smallest} pixels; the data has {shape}: set size of the data, give a "
                "file of another network, or leave lpips_weights out"
            )
    for spec in plan.models:
        context.task(spec, plan.seeds[0])
