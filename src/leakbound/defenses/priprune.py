"""PriPrune: each client learns which weights to withhold, for accuracy and privacy together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.defenses.withhold import REASON, Kept, _Withholding
from leakbound.random import Source, uniform
from leakbound.types import Task, Unknown, Update

FORMS = ("log", "linear")
TYPICAL = 0.114
"""The mean probability at rest, l_pri / (l_sha N), of the paper's settings for PruneFL."""
ADAM = (0.9, 0.999, 1e-8)
EDGE = 1e-6
BLOCK = 2**16


@dataclass(frozen=True, eq=False)
class Belief:
    """What PriPrune keeps beside the weights.

    Attributes:
        logits: (P,) a, with alpha = sigmoid(a) the probability that a weight is withheld.
        first: (P,) Adam's mean of the slopes.
        second: (P,) Adam's mean of their squares.
        steps: how many steps the logits have taken.
        noise: (P,) the logistic noise of this round's sampled mask.
    """

    logits: Tensor
    first: Tensor
    second: Tensor
    steps: int = 0
    noise: Tensor | None = None

    @property
    def alpha(self) -> Tensor:
        """(P,) the probabilities of being withheld."""
        return self.logits.sigmoid()


@dataclass(frozen=True, repr=False)
class PriPrune(_Withholding):
    """Learn for every weight the probability alpha that it is withheld; keep what is withheld.

    In a round the client draws a mask (share with probability 1 - alpha), starts from the server's
    weights where it says share and from its own elsewhere, trains, and takes `mask_steps` steps on

        l_acc L_acc - l_pri sum_j w_j log alpha_j + l_sha sum_j alpha_j

    with w_j = N_l / N * |g_j| / sum_{j' in layer} |g_j'|, g the loss gradient. The loss L_acc
    depends on alpha through the drawn mask (Gumbel-softmax, hard forward, soft backward). It then
    sends the weights with alpha <= 1/2 and zeros elsewhere. Pruned weights take no part. Biases and
    the scales of norms are always sent.

    At rest alpha_j = l_pri w_j / l_sha without the loss's part, so that a weight is withheld where
    its gradient is more than l_sha N / (2 l_pri) times its layer's mean. By Markov's inequality
    that is at most the share 2 l_pri / (l_sha N), and for most laws of gradients far less.

    All that it reads is its row: after the noise of DP-SGD it is post-processing, and the guarantee
    stays. The mask is seen as zeros and was chosen from the gradients of all rounds so far: a
    release of its own. A withheld weight that is shared later gives its training away. The drawn
    start hides little from who looks for it: see the attack `mixed_start`.

    Args:
        accuracy: l_acc, the weight of the training loss.
        privacy: l_pri.
        sharing: l_sha, the price of withholding one weight; 0 takes l_pri / (0.114 N), the ratio of
            the paper's settings, for N weights that may be withheld.
        form: "log" as above, or "linear": - l_pri sum_j w_j alpha_j, which drives every alpha to 0
            or 1.
        mask_rate: learning rate of the logits (Adam).
        mask_steps: steps on the logits a round.
        start: alpha before the first round.
        temperature: of the Gumbel-softmax.
        compose: "sampled" (with this round's drawn mask), or "last": the server's weights where
            the client shared in its last round, its own elsewhere.

    Guarantees: none. Of the drawn masks each weight is withheld with probability alpha.

    Source: Chu et al. 2024 (paper D), section 5.2, eqs. 16 to 18, algorithm 3. Equation 17 and the
    composition are our reading (docs/errata.md); temperature and `mask_rate` are not printed.

    Example:
        >>> from leakbound.random import stream
        >>> from leakbound.types import Task
        >>> task = Task.of(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1)))
        >>> own = PriPrune(start=0.25).init(task).own
        >>> [round(float(a), 2) for a in own.alpha]
        [0.25, 0.25, 0.25, 0.25, 0.25]
    """

    accuracy: float = 5.0
    privacy: float = 15.0
    sharing: float = 0.0
    form: str = "log"
    mask_rate: float = 0.1
    mask_steps: int = 1
    start: float = 0.2
    temperature: float = 1.0
    compose: str = "sampled"

    def __post_init__(self) -> None:
        check.non_negative(accuracy=self.accuracy, privacy=self.privacy, sharing=self.sharing)
        check.positive(mask_rate=self.mask_rate, temperature=self.temperature)
        check.count(mask_steps=self.mask_steps)
        check.one_of(FORMS, form=self.form)
        check.one_of(["sampled", "last"], compose=self.compose)
        if not 0 < self.start < 1:
            raise ValueError(f"start is {self.start!r}; give a probability between 0 and 1")

    def init(self, task: Task) -> Kept:
        """Nothing kept yet; every alpha at `start`."""
        zero = torch.zeros_like(task.parameters)
        first = torch.full_like(zero, self.start).logit()
        return replace(super().init(task), own=Belief(first, zero, zero))

    def _sketch(self, update: Update) -> Update:
        sent = self._masked(update, torch.ones_like(update.rows[0]).bool())
        return replace(sent, law=Unknown(REASON))

    def _start(self, kept: Kept, server: Tensor, source: Source) -> tuple[Kept, Tensor]:
        belief: Belief = kept.own
        draw = uniform(server.shape, source, like=server)
        noise = draw.clamp_min_(torch.finfo(server.dtype).tiny).logit_()
        kept = replace(kept, own=replace(belief, noise=noise))
        if kept.weights is None or kept.sent is None:
            return kept, server
        own = ~kept.sent if self.compose == "last" else noise <= belief.logits
        return kept, torch.where(own.logical_and_(kept.exists), kept.weights, server)

    def _mask(self, change: Tensor, kept: Kept, source: Source) -> tuple[Tensor, Kept]:
        belief: Belief = kept.own
        for _ in range(self.mask_steps):
            belief = self._step(belief, change, kept)
        share = (belief.logits > 0).logical_and_(kept.exists).logical_not_()
        return share, replace(kept, own=replace(belief, noise=None))

    def _step(self, belief: Belief, change: Tensor, kept: Kept) -> Belief:
        """One step of Adam on the logits, where a weight exists."""
        beta1, beta2, tiny = ADAM
        steps = belief.steps + 1
        first, second, logits = belief.first.clone(), belief.second.clone(), belief.logits.clone()
        for part, slope in self._slopes(belief, change, kept):
            slope = _there(slope, kept.exists[part])
            first[part].lerp_(slope, 1 - beta1)
            second[part].lerp_(slope.square_(), 1 - beta2)
        unbias = 1 / (1 - beta1**steps), 1 / (1 - beta2**steps)
        size = (second.max() * unbias[1]).sqrt()
        floor = (tiny * size).clamp_min(torch.finfo(size.dtype).tiny)  # slopes are tiny
        edge = torch.logit(torch.tensor(1 - EDGE)).item()
        for part in _blocks(kept.spans):
            size = (second[part] * unbias[1]).sqrt_().add_(floor)
            move = (first[part] * (unbias[0] * self.mask_rate)).div_(size)
            logits[part].sub_(move).clamp_(-edge, edge)
        return replace(belief, logits=logits, first=first, second=second, steps=steps)

    def slope(self, belief: Belief, change: Tensor, kept: Kept) -> Tensor:
        """(P,) the derivative of the three-term loss by the logits of what may be withheld.

        Args:
            belief: the logits, with the noise of the mask that was drawn (None: no loss term).
            change: (P,) the change over the local steps, in gradient units.
            kept: with the weights of server and client at the start of the round.
        """
        total = torch.zeros_like(change)
        for part, slope in self._slopes(belief, change, kept):
            total[part] = slope
        return total

    def _slopes(self, belief: Belief, change: Tensor, kept: Kept) -> Iterator[tuple[slice, Tensor]]:
        """The slope in blocks that stay in the processor's cache: memory is most of the cost."""
        count = max(1, int(kept.exists.count_nonzero()))
        price = self.sharing or self.privacy / (TYPICAL * count)
        for span in kept.spans:
            each, even = _layer(change, kept, span, count)
            for part in _blocks((span,)):
                logits, size = belief.logits[part], change[part]
                alpha = logits.sigmoid()
                against = 1 - alpha  # d log alpha / d a; times alpha: d alpha / d a
                total = price * alpha * against
                share = torch.full_like(size, even) if even else size.abs().mul_(each)
                share = _there(share, kept.exists[part])
                share = share * against if self.form == "log" else share * alpha * against
                total.sub_(share, alpha=self.privacy)
                if (
                    belief.noise is not None
                    and kept.weights is not None
                    and kept.server is not None
                ):
                    soft = (belief.noise[part] - logits).div_(self.temperature).sigmoid_()
                    along = (kept.server[part] - kept.weights[part]).mul_(size)  # dL / dv
                    along.mul_(soft).mul_(1 - soft)
                    total.sub_(along, alpha=self.accuracy / self.temperature)
                yield part, total


def _there(values: Tensor, exists: Tensor) -> Tensor:
    """Zero where a weight is pruned; the values themselves where none is, which is faster."""
    return values if bool(exists.all()) else values * exists.to(values.dtype)


def _blocks(spans: tuple[tuple[int, int], ...]) -> Iterator[slice]:
    for start, stop in spans:
        for at in range(start, stop, BLOCK):
            yield slice(at, min(at + BLOCK, stop))


def _layer(change: Tensor, kept: Kept, span: tuple[int, int], total: int) -> tuple[float, float]:
    """A layer's factor on |g|, and what every weight has where all of its gradients are zero."""
    part = slice(*span)
    count = int(kept.exists[part].count_nonzero())
    sizes = (_there(change[b].abs(), kept.exists[b]) for b in _blocks((span,)))
    norm = sum(float(size.sum(dtype=torch.float64)) for size in sizes)
    return (count / total / norm, 0.0) if norm > 0 else (0.0, 1 / total)


def importance(change: Tensor, kept: Kept) -> Tensor:
    """(P,) w_j: a weight's share of its layer's |g|, times the layer's share of the weights."""
    shares, total = torch.zeros_like(change), max(1, int(kept.exists.count_nonzero()))
    for start, stop in kept.spans:
        each, even = _layer(change, kept, (start, stop), total)
        size = change[start:stop].abs() * each + even
        shares[start:stop] = size * kept.exists[start:stop]
    return shares
