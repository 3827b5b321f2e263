"""Quantization: send every coordinate as its sign, or as one of a few evenly spaced levels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.client import local_update
from leakbound.core import Task, Unit, Unknown, Update
from leakbound.defenses.base import Context, Defense, Resolved, Sent, State
from leakbound.randomness import Source, uniform

MOST_BITS = 24
COARSE = 4
"""Up to this number of bits, matching attacks compare with the plain gradient."""
REASON = "values were rounded at random, with a distribution that depends on them"


@dataclass(frozen=True, repr=False)
class Sign(Defense):
    """Send only the sign of every coordinate (signSGD).

    Guarantees: none. Every released coordinate is -1, 0 or 1.

    Source: Bernstein et al. 2018.

    Example:
        >>> update = Update(torch.tensor([[0.3, -4.0, 0.0]]), Unit.CLIENT, (1,))
        >>> Sign().transform(update, None, None, torch.Generator())[0].rows
        tensor([[ 1., -1.,  0.]])
    """

    accepts = frozenset({Unit.CLIENT, Unit.COHORT})
    keeps_law = False

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        return update.opaque(update.rows.sign(), f"{self!r} came after the noise"), state

    def imitate(self, rows: Tensor) -> Tensor:
        """A smooth sign, g / sqrt(g² + s²) with s the mean |g|: attackers need its slope."""
        smooth = rows.detach().abs().mean(1, keepdim=True).clamp_min(1e-12)
        return rows / (rows.square() + smooth.square()).sqrt()


@dataclass(frozen=True, repr=False)
class Quantization(Defense):
    """Round every coordinate to one of 2^bits - 1 evenly spaced levels between -max|g| and max|g|.

    The levels are k · step for whole k, with step = max|g| / (2^(bits-1) - 1). Zero is a level, so
    withheld coordinates stay zero. Stochastic rounding takes the level below with probability 1 - f
    and the level above with probability f, where f is the value's relative position between them.
    It is unbiased, with variance f (1 - f) step². No noise distribution is declared for it: it has
    two values, and both depend on the gradient.

    An attacker who knows the defense sees the step in the values. They simulate rounding to the
    nearest level on the candidate's grid, with the slope of the plain gradient (straight-through),
    so the true input matches exactly. At 4 bits or less the plain gradient's slope points better,
    and they compare with it. Stochastic rounding is compared with its mean, the plain gradient, or
    (`noise_variance`) weighted by the variance that the candidate would have got.

    Args:
        bits: 2 to 24; one bit has only the signs as levels, see `Sign`.
        stochastic: unbiased random rounding.
        scope: the maximum is over every "tensor", or "global": over the whole row.

    Guarantees: none. Rounding hides at most half a step, and hardly anything of the largest values.

    Source: Alistarh et al. 2017, "QSGD", section 3.1 (stochastic rounding; there of |g| / ||g||
    beside the sign, here of g / max|g|).

    Example:
        >>> task, rows = Task.of(torch.nn.Linear(3, 1)), torch.tensor([[0.3, -1.0, 0.0, 0.6]])
        >>> ready = Quantization(2, scope="global").resolve(task, 1)
        >>> update = Update(rows, Unit.CLIENT, (1,))
        >>> ready.transform(update, None, None, torch.Generator())[0].rows
        tensor([[ 0., -1.,  0.,  1.]])
    """

    accepts = frozenset({Unit.CLIENT, Unit.COHORT})
    keeps_law = False
    law_of_rows = True

    bits: int = 8
    stochastic: bool = False
    scope: str = "tensor"

    def __post_init__(self) -> None:
        check.count(bits=self.bits)
        if not 2 <= self.bits <= MOST_BITS:
            raise ValueError(
                f"bits is {self.bits}; give 2 to {MOST_BITS} (one bit: the defense sign)"
            )
        check.one_of(["tensor", "global"], scope=self.scope)

    @property
    def hides_law(self) -> bool:  # type: ignore[override]
        return self.stochastic

    @property
    def data_dependent_law(self) -> bool:  # type: ignore[override]
        """Whether there is noise; its width depends on the batch."""
        return self.stochastic

    def resolve(
        self,
        task: Task,
        examples: int,
        previous: Defense | None = None,
    ) -> Defense:
        whole = ((0, len(task.parameters)),)
        spans = tuple((a, b) for *_, a, b in task.layout) if self.scope == "tensor" else whole
        return FixedQuantization(self, spans)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        raise ValueError(f"{self!r} does not know the model's tensors; use resolve(task, examples)")


@dataclass(frozen=True, repr=False, eq=False)
class FixedQuantization(Resolved):
    """`Quantization` for one model, whose tensors lie at `spans` within a row."""

    settings: Quantization
    spans: tuple[tuple[int, int], ...]

    def steps(self, rows: Tensor) -> Tensor:
        """(R, P) the step between levels at every coordinate, float64; 0 if a tensor is zero."""
        half = 2 ** (self.settings.bits - 1) - 1
        parts = []
        for a, b in self.spans:
            if a == b:  # a weight without entries
                continue
            largest = rows[:, a:b].abs().amax(1, keepdim=True).double()
            parts.append((largest / half).expand(-1, b - a))
        return torch.cat(parts, 1)

    def transform(
        self,
        update: Update,
        state: State,
        context: Context,
        source: Source,
    ) -> Sent:
        reason = f"{self!r} came after the noise"
        if not self.settings.stochastic:
            return update.opaque(self._rounded(update.rows, None), reason), state
        draw = uniform(update.rows.shape, source, like=update.rows.double())
        sent = update.opaque(self._rounded(update.rows, draw), reason)
        return replace(sent, law=Unknown(REASON)), state

    def imitate(self, rows: Tensor) -> Tensor:
        """Rounding to the nearest with the slope of the identity; coarse or stochastic: `rows`."""
        if self.settings.stochastic or self.settings.bits <= COARSE:
            return rows
        plain = rows.detach()
        return rows + (self._rounded(plain, None) - plain)

    def noise_variance(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
    ) -> Tensor | None:
        """Stochastic: f (1 - f) step² of the candidate's gradient, differentiable."""
        if not self.settings.stochastic:
            return None
        rows = local_update(task, inputs, labels)[None]
        step = self.steps(rows.detach()).to(rows)
        # The level below a value has no slope, the distance to it has one.
        above = rows - (rows.detach() / _safe(step)).floor() * step
        return (above * (step - above)).clamp_min(0)[0]

    def _rounded(self, rows: Tensor, draw: Tensor | None) -> Tensor:
        """Rows (R, P) on their grids: the nearest level, or floor(value + draw), draw in [0, 1)."""
        half = 2 ** (self.settings.bits - 1) - 1
        step = self.steps(rows)
        # With 24 bits, float32 has no digits left for the place between two levels.
        places = rows.double() / _safe(step)
        whole = places.round() if draw is None else (places + draw).floor()
        return (whole.clamp(-half, half) * step).to(rows)


def _safe(step: Tensor) -> Tensor:
    return torch.where(step > 0, step, 1.0)
