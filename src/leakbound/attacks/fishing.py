"""Fishing: a malicious output layer that leaves few examples' gradients in the sum of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from leakbound import check, client
from leakbound._util import copies
from leakbound.attacks.analytic import LinearInversion
from leakbound.attacks.base import Attack, seen_task, summed
from leakbound.attacks.blind import answered
from leakbound.attacks.held import hold, needs_holding, prepared, unheld
from leakbound.attacks.matching.attack import inverting_gradients, strong_matching
from leakbound.attacks.matching.newton import GaussNewton
from leakbound.attacks.planted import PixelPrior, chosen, sent_by_attacker
from leakbound.attacks.sparse import SparseRecovery
from leakbound.core import NotApplicable, Observation, Reconstruction, Task, Unit
from leakbound.losses import named

INNER: dict[str, Attack] = {
    "gauss_newton": GaussNewton(),
    "inverting_gradients": inverting_gradients(),
    "linear_inversion": LinearInversion(),
    "sparse_recovery": SparseRecovery(),
    "strong_matching": strong_matching(),
}
TARGETS = ("class", "feature", "direction")
# The logit of class c lies this far below the others: exp(-30) is 0 next to 1 in float32.
FAR = 30.0
# Of the covariance within classes: few public examples do not determine it.
RIDGE = 0.1


@dataclass(frozen=True)
class Fishing(Attack):
    """Send a malicious output layer under which few examples have a gradient, and attack that one.

    Only the weights w and biases of the last linear layer change. One class c keeps a row; all
    other rows are 0. With p the probability of c, an example of class c sends (p - 1) w to the
    features, any other sends p w. The layers below see nothing else of the batch.

    - "class": the bias makes p = 0. The examples of class c remain.
    - "feature": w is one feature's coordinate and the bias a threshold, so that p is nearly 0 or 1.
      Of class c, the examples below the threshold remain; of the others, those above it.
    - "direction": as "feature", but w is the linear discriminant of c against the other classes.

    Class, coordinate and threshold are those under which one of `expected` public examples remains,
    or as near to that as possible. The slope of the bias of c gives the sum of the weights p and
    p - 1, and so the scale of what remains. The inner attack gets the update without the output
    layer, as that of this many examples of class c.

    For several local steps, another optimizer than SGD, batch norm in training mode or weights in
    half precision, the server also holds the model still (`leakbound.attacks.held.Held`): frozen
    weights, plus trained ones that start at 0 with a gain that is too small to matter. The update
    is then the mean gradient at the frozen weights. Batch norms get the statistics of the public
    examples, so they mix no examples.

    No output layer can single out one example exactly for all labels. The weights of two examples
    with equal features and labels y and z differ by w_z - w_y. So the other classes vanish for all
    features only if all of class c remain.

    Args:
        attack: the attack on what remains: a name in `INNER` or any attack.
        target: which examples remain.
        label: c; None: chosen by the public examples.
        expected: the number of examples among which one should remain.
        scale: of the threshold's slope, in 1 / standard deviation of w.x over public examples.
        alone: send the other clients of a sum an output layer of zeros, under which no example has
            a gradient below it. Their labels still move the bias of c: without known labels, the
            count and the scale are estimates from the shares of the public labels.

    Assumptions: cross-entropy with at least 3 classes; an output layer with a bias; the optimizer's
        epsilon, if it has one, is known.

    Raises:
        NotApplicable: the server is honest, there are no public examples, or the client trains by
            Lion, which keeps signs alone.

    Source: Wen et al., "Fishing for User Data in Large-Batch Federated Learning via Gradient
        Magnification", ICML 2022, arXiv 2202.00580 ("class", "feature"). `alone`: Pasquini et al.,
        "Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022.
        "direction" is from this project.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.core import Server
        >>> model = lb.models.mlp(input_shape=(1, 6, 6), classes=3, generator=lb.stream(0, "model"))
        >>> images = torch.rand(204, 1, 6, 6, generator=lb.stream(0, "images"))
        >>> public = lb.Batch(images[4:], torch.arange(200) % 3)
        >>> attack = Fishing("linear_inversion", "class", label=1)
        >>> threat, batch = lb.ThreatModel(server=Server.MALICIOUS), (images[:3], torch.arange(3))
        >>> result = lb.simulate(model, batch, attack=attack, public=public, threat=threat)
        >>> [score > 80 for score in result.scores]
        [False, True, False]
    """

    attack: str | Attack = "inverting_gradients"
    target: str = "direction"
    label: int | None = None
    expected: int = 64
    scale: float = 1000.0
    alone: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.attack, str):
            check.one_of(sorted(INNER), attack=self.attack)
        check.one_of(TARGETS, target=self.target)
        check.given(check.non_negative, label=self.label)
        check.count(expected=self.expected)
        check.positive(scale=self.scale)

    def plant(self, task: Task) -> Task:
        """Write the output layer; return the task unchanged if the data to choose it is missing."""
        return self.plant_each(task, 1)[0]

    def plant_each(self, task: Task, clients: int) -> list[Task]:
        own = prepared(task)
        planted = self._planted(own)
        if planted is own:
            return [task] * clients
        others = planted
        if self.alone:
            others = _written(own, 0, torch.zeros(()), 0.0)
        if needs_holding(task):
            planted = hold(planted, task)
            others = hold(others, task) if self.alone else planted
        return [planted] + [others] * (clients - 1)

    def _planted(self, task: Task) -> Task:
        head = _head(task)
        public = task.public
        if head is None or public is None or named(task.loss).targets != "classes":
            return task
        parts = task.unflatten(task.parameters)
        classes = len(parts[f"{head}.bias"])
        if classes < 3:
            return task
        if self.label is not None and self.label >= classes:
            raise ValueError(f"label is {self.label}; the task has the classes 0 to {classes - 1}")
        with torch.no_grad():
            seen = client.layer_inputs(task, public.inputs.to(task.parameters), [head])[head]
        if seen.ndim != 2:
            return task
        seen, mine = seen.double(), one_hot(public.labels.to(seen.device), classes).double()
        if self.target == "class":
            share = (mine.mean(0) * self.expected - 1).abs()
            label = int(share.argmin()) if self.label is None else self.label
            row = parts[f"{head}.weight"][label].double()
            return _written(task, label, row, -float((seen @ row).max()) - FAR)
        row, label, threshold = self._split(seen, mine)
        row = row * self.scale / (seen @ row).std().clamp_min(1e-12)
        # Where p is 1/2 against the K - 1 other classes, whose logits are 0.
        level = torch.tensor(classes - 1.0).log()
        return _written(task, label, row, float(level - threshold * (row @ row).sqrt()))

    def _split(self, seen: Tensor, mine: Tensor) -> tuple[Tensor, int, float]:
        """The unit row (n,), the class and the threshold on row.x that leave about 1 / `expected`
        of the examples; thresholds come from those that the rows were not fitted to.
        """
        cut = len(seen) // 2
        rows = torch.eye(seen.shape[1]).to(seen)
        rows = (
            torch.cat([rows, -rows])
            if self.target == "feature"
            else _discriminants(seen[:cut], mine[:cut])
        )
        scores = (seen[cut:] @ rows.T).sort(0)
        left = []
        for label in range(mine.shape[1]):
            members = mine[cut:, label][scores.indices]
            below = torch.cat([members[:1] * 0, (2 * members - 1).cumsum(0)])
            left.append((below + (1 - members).sum(0)) / len(members))
        off = (torch.stack(left) - 1 / self.expected).abs()  # (K, thresholds, rows)
        if self.target == "direction":  # each class has its own row
            apart = ~torch.eye(len(off), dtype=torch.bool, device=off.device)
            off.masked_fill_(apart[:, None], torch.inf)
        if self.label is not None:
            off[torch.arange(len(off)) != self.label] = torch.inf
        label, at, row = (int(i) for i in torch.unravel_index(off.argmin(), off.shape))
        ends = scores.values[:, row]
        # A threshold may lie beyond all scores.
        ends = torch.cat([ends[:1] - 1, ends, ends[-1:] + 1])
        return rows[row], label, float(ends[at : at + 2].mean())

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = summed(unheld(observation))
        task = sent_by_attacker(
            observation,
            seen_task,
            lambda task: _label(task) is not None,
            lacks="fishing output layer: there are no public examples, or no classes to choose by",
        )
        if not task.plan.is_gradient:
            raise NotApplicable("the output layer changes over several local steps")
        label = _label(task)
        assert label is not None  # as `sent_by_attacker` found
        mean = PixelPrior.of(observation).mean.to(observation.update.rows)
        answer = mean.expand(observation.examples, -1).reshape(observation.batch_shape).clone()
        slope, size = self._slope(observation, task, label)
        if abs(slope) * size < 0.5:  # it was clipped, or examples of c and others canceled
            # one example of class c gives the mean -1 / size
            slope = -1 / size
        count = min(round(abs(slope) * size), observation.examples)
        problem = f"at most {count} of {observation.examples} examples are answered"
        if observation.update.rows.any():
            inner = INNER[self.attack] if isinstance(self.attack, str) else self.attack
            left = inner(_remaining(observation, task, label, slope, count), generator)
            answer[:count] = left.inputs
            problem = f"{problem}; {left.problem}" if left.problem else problem
        return answered(observation, task, answer, problem)

    def _slope(
        self,
        observation: Observation,
        task: Task,
        label: int,
    ) -> tuple[float, float]:
        """The mean of p - (y = c) over the examples fished, and how many examples that mean has."""
        name = f"{_head(task)}.bias"
        seen = float(sum(task.unflatten(row)[name][label] for row in observation.update.rows))
        cohort = observation.cohort
        if observation.update.unit is Unit.EXAMPLE:
            return seen, 1.0
        if not self.alone or len(cohort) == 1:
            return seen, sum(cohort) / len(cohort)
        assert task.public is not None  # as `plant` found
        each = [task.public.labels] * len(cohort)
        if observation.labels is not None:
            each = list(torch.split(observation.labels, list(cohort)))
        classes = len(task.unflatten(task.parameters)[name])
        # Under a layer of zeros, p is 1 / K for every class: only the others' labels matter.
        seen -= sum(1 / classes - float((one == label).double().mean()) for one in each[1:])
        return seen, float(cohort[0])


def _head(task: Task) -> str | None:
    """The last linear layer, if it has a trained weight and bias."""
    linear = [n for n, m in task.model.named_modules() if isinstance(m, nn.Linear)]
    sent = linear and {f"{linear[-1]}.weight", f"{linear[-1]}.bias"} <= task.names
    return linear[-1] if sent else None


def _label(task: Task) -> int | None:
    """The class whose row alone is not 0."""
    head = _head(task)
    if head is None:
        return None
    rows = task.unflatten(task.parameters)[f"{head}.weight"].any(1).nonzero()
    return int(rows[0]) if len(rows) == 1 else None


def _written(
    task: Task,
    label: int,
    row: Tensor,
    bias: float,
) -> Task:
    """The task with an output layer of one row."""
    head = _head(task)
    flat = task.parameters.clone()
    parts = task.unflatten(flat)
    for name, value in (("weight", row), ("bias", torch.tensor(bias))):
        parts[f"{head}.{name}"].zero_()
        parts[f"{head}.{name}"][label] = value.to(flat)
    return task.with_parameters(flat)


def _discriminants(seen: Tensor, mine: Tensor) -> Tensor:
    """Unit rows (K, n): the linear discriminant of every class against all others."""
    count = mine.sum(0)[:, None]
    center = mine.T @ seen / count.clamp_min(1)
    rest = (seen.sum(0) - mine.T @ seen) / (len(seen) - count).clamp_min(1)
    inside = seen - mine @ center
    spread = inside.T @ inside / len(seen)
    spread.diagonal().add_(RIDGE * spread.diagonal().mean() + 1e-12)
    return nn.functional.normalize(torch.linalg.solve(spread, (center - rest).T).T)


def _remaining(
    observation: Observation,
    task: Task,
    label: int,
    slope: float,
    count: int,
) -> Observation:
    """What remains, as the update of `count` examples of class c under p = 0, without the layer."""
    head = _head(task)
    names = {f"{head}.weight", f"{head}.bias"}
    index = torch.cat([torch.arange(a, z) for n, _, a, z in task.layout if n not in names])
    index = index.to(task.parameters.device)
    row = task.unflatten(task.parameters)[f"{head}.weight"][label]
    # At a bias of -1e4, p is exactly 0.
    values = _written(task, label, row, -1e4).tensors()
    model = copies.duplicate(task.model)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(values[name])
    for name, value in model.named_parameters():
        value.requires_grad_(name not in names)
    below = Task.of(
        model,
        loss=task.loss,
        plan=replace(task.plan, batch_size=None),
        input_range=task.input_range,
        classes=task.label_range,
        public=task.public,
        domain=task.domain,
    ).pruned(None if task.kept is None else task.kept[index])
    factor = torch.tensor(-1 / slope, dtype=torch.float64, device=index.device)
    update = chosen(observation.update.summed(Unit.CLIENT), index, factor)
    seen = replace(
        observation,
        update=replace(update, examples=(count,)),
        task=below,
    )
    labels = torch.full((count,), label, device=index.device)
    # The defense and the statistics are those of the whole batch.
    seen = replace(
        seen,
        cohort=(count,),
        labels=labels,
        defense=None,
        statistics=None,
    )
    threat = replace(observation.threat, labels_known=True)
    return replace(seen, threat=threat, sent=None, history=())
