"""Mixup: train on convex combinations of the client's own examples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound._util import copies
from leakbound.core import LocalPlan, Task, Unit, Unknown, Update
from leakbound.defenses.base import Context, Defense, Resolved, Sent, State
from leakbound.randomness import Source, uniform

REASON = "examples were mixed by a draw that is not seen"


@dataclass(frozen=True, repr=False)
class Mixup(Defense):
    """Train on convex combinations of the client's examples.

    An example becomes share · x_i + (1 - share) · x_j for a random order j, with the same mix of
    the labels. Each client and round has one share and one order of the batch (or minibatch), as in
    the released mixup. Labels enter through the loss, which for cross-entropy is that of the mixed
    label.

    An attacker who knows the defense does not see the order and the share, but knows their
    distribution. They expect (`infer`) each example to be mixed with the batch's mean, with its
    deviations from the mean shrunk by E[s² + (1 - s)²] / E[s]. What explains the mixes is then the
    best linear estimate of the examples. `mixed` is the task under a given draw, for an attacker
    who tries draws: the right one undoes the mixing, except at s = 1/2.

    Args:
        alpha: parameter of the share's Beta distribution; 1 is uniform, small values hardly mix.
        share: a fixed share of the example itself, 1/2 to 1, instead of a drawn one.

    Guarantees: none. The batch's sums of pixels, its labels and its mean image stay as they are.

    Raises:
        ValueError: a client or a minibatch has one example.

    Source: Zhang et al. 2018, eq. 1; Huang et al. 2021 (as a defense).

    Example:
        >>> Mixup(share=0.5).moments
        (0.5, 0.5)
        >>> Mixup(alpha=1.0).moments
        (0.75, 0.6666666666666666)
    """

    accepts = frozenset({Unit.CLIENT})
    keeps_law = False
    hides_law = True

    alpha: float = 1.0
    share: float | None = None

    def __post_init__(self) -> None:
        check.positive(alpha=self.alpha)
        if self.share is not None:
            check.fraction(share=self.share)
            if self.share < 0.5:
                raise ValueError(f"share is {self.share}; give the larger part, 1/2 to 1")

    @property
    def moments(self) -> tuple[float, float]:
        """E[s] and E[s² + (1 - s)²] of the share s."""
        if self.share is not None:
            return self.share, self.share**2 + (1 - self.share) ** 2
        from scipy.special import beta

        a = self.alpha
        away = float(4**-a / (a * beta(a, a)))  # E |s - 1/2|
        return 0.5 + away, 0.5 + 0.5 / (2 * a + 1)

    def resolve(
        self,
        task: Task,
        examples: int,
        previous: Defense | None = None,
    ) -> Defense:
        """Reject batches with nothing to mix; store the required length of an order."""
        _check_mixable(self, task.plan, examples)
        return FixedMixup(self, examples=examples)

    def prepare(self, task: Task, source: Source) -> Task:
        raise ValueError(f"{self!r} does not know the batch's size; use resolve(task, examples)")


@dataclass(frozen=True, repr=False, eq=False)
class FixedMixup(Resolved):
    """`Mixup` for batches of at most `examples`."""

    settings: Mixup

    def prepare(self, task: Task, source: Source) -> Task:
        like = torch.zeros(0, dtype=torch.float64)
        keys = uniform((self.examples,), source, like=like)
        share = self.settings.share
        if share is None:
            from scipy.special import betaincinv

            alpha = self.settings.alpha
            # By the inverse distribution function: PyTorch's Beta takes no generator.
            drawn = float(
                betaincinv(
                    alpha,
                    alpha,
                    float(uniform((1,), source, like=like)),
                )
            )
            share = max(drawn, 1 - drawn)  # s with an order mixes as 1 - s with its inverse
        return mixed(task, share, keys)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        """Nothing more to do; the release is random, and its distribution is not tracked."""
        plan = LocalPlan() if context is None else context.task.plan
        for examples in update.examples:
            _check_mixable(self, plan, examples)
        return replace(update, law=Unknown(REASON)), state

    def infer(self, task: Task, update: Update) -> Task:
        """Mixing with the batch's mean, as far as the best linear estimate would undo it."""
        mean, squares = self.settings.moments
        return _mixing(task, _Average(squares / mean), _Average(mean))


def mixed(
    task: Task,
    share: float,
    keys: Tensor,
) -> Task:
    """The task that mixes every batch by a given draw, differentiable in inputs and soft labels.

    A batch of B examples is mixed with itself in the order argsort(keys[:B]), keys (n,), n >= B.
    """
    rule = _Draw(share, keys)
    return _mixing(task, rule, rule)


@dataclass(frozen=True, eq=False)
class _Draw:
    """share · v_i + (1 - share) · v_order(i) for a batch of values."""

    share: float
    keys: Tensor

    def parts(self, values: Tensor) -> list[tuple[float, Tensor]]:
        if len(values) > len(self.keys):
            raise ValueError(f"keys holds {len(self.keys)} numbers for a batch of {len(values)}")
        order = self.keys[: len(values)].argsort().to(values.device)
        return [(self.share, values), (1 - self.share, values[order])]


@dataclass(frozen=True, eq=False)
class _Average:
    """share · v_i + (1 - share) · mean of the batch."""

    share: float

    def parts(self, values: Tensor) -> list[tuple[float, Tensor]]:
        rest = 1 - self.share
        if values.is_floating_point():
            return [(self.share, values), (rest, values.mean(0, keepdim=True).expand_as(values))]
        # Numbers of classes have no mean, so the loss is averaged over all orders.
        size = len(values)
        return [(self.share, values), *((rest / size, values.roll(i, 0)) for i in range(size))]


@dataclass(frozen=True, eq=False)
class _MixInputs:
    """Mixes a model's first input; used as a forward pre-hook."""

    rule: _Draw | _Average

    def __call__(
        self,
        module: nn.Module,
        args: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        (share, first), (other, second) = self.rule.parts(args[0])
        return (share * first + other * second, *args[1:])


def _mixing(
    task: Task,
    inputs: _Draw | _Average,
    labels: _Draw | _Average,
) -> Task:
    """The task whose model mixes its inputs by one rule and whose loss mixes labels by another."""
    # A copy: the hook must not stay on the client's model.
    model = copies.duplicate(task.model)
    plain = task.loss
    model.register_forward_pre_hook(_MixInputs(inputs))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([part * plain(outputs, y) for part, y in labels.parts(targets)]).sum()

    return replace(task, model=model, loss=loss)


def _check_mixable(
    link: Defense,
    plan: LocalPlan,
    examples: int,
) -> None:
    """Every minibatch has at least two examples."""
    size = plan.batch_size or examples
    # The last minibatch has what is left.
    smallest = min(examples, size, examples % size or size)
    if smallest < 2:
        where = f"a batch of {examples}" + (f" in parts of {size}" if size < examples else "")
        raise ValueError(
            f"{link!r} got {where}, which leaves an example alone; give two or more to every step"
        )
