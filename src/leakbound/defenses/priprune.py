"""PriPrune: each client learns which weights to withhold, for accuracy and privacy together."""

from __future__ import annotations

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
    release of its own. A withheld weight that is shared later gives its training away.

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
        draw = uniform(server.shape, source, like=server).clamp_min(torch.finfo(server.dtype).tiny)
        noise = draw.log() - torch.log1p(-draw)
        kept = replace(kept, own=replace(belief, noise=noise))
        if kept.weights is None or kept.sent is None:
            return kept, server
        shared = kept.sent if self.compose == "last" else noise > belief.logits
        return kept, torch.where(shared | ~kept.exists, server, kept.weights)

    def _mask(self, change: Tensor, kept: Kept, source: Source) -> tuple[Tensor, Kept]:
        belief: Belief = kept.own
        for _ in range(self.mask_steps):
            belief = self._step(belief, change, kept)
        share = (belief.logits <= 0) | ~kept.exists
        return share, replace(kept, own=replace(belief, noise=None))

    def _step(self, belief: Belief, change: Tensor, kept: Kept) -> Belief:
        """One step of Adam on the logits, where a weight exists."""
        slope = self.slope(belief, change, kept) * kept.exists
        beta1, beta2, tiny = ADAM
        steps = belief.steps + 1
        first = torch.lerp(slope, belief.first, beta1)
        second = torch.lerp(slope.square(), belief.second, beta2)
        size = (second / (1 - beta2**steps)).sqrt()
        floor = (tiny * size.max()).clamp_min(torch.finfo(size.dtype).tiny)  # slopes are tiny
        move = first / (1 - beta1**steps) / (size + floor)
        edge = torch.logit(torch.tensor(1 - EDGE)).item()
        logits = (belief.logits - self.mask_rate * move).clamp(-edge, edge)
        return replace(belief, logits=logits, first=first, second=second, steps=steps)

    def slope(self, belief: Belief, change: Tensor, kept: Kept) -> Tensor:
        """(P,) the derivative of the three-term loss by the logits.

        Args:
            belief: the logits, with the noise of the mask that was drawn (None: no loss term).
            change: (P,) the change over the local steps, in gradient units.
            kept: with the weights of server and client at the start of the round.
        """
        alpha, count = belief.alpha, int(kept.exists.count_nonzero())
        each = alpha * (1 - alpha)  # d alpha / d a
        price = self.sharing or self.privacy / (TYPICAL * max(1, count))
        total = price * each
        share = importance(change, kept)
        # d log alpha / d a = 1 - alpha
        total = total - self.privacy * share * ((1 - alpha) if self.form == "log" else each)
        if belief.noise is not None and kept.weights is not None and kept.server is not None:
            soft = torch.sigmoid((belief.noise - belief.logits) / self.temperature)
            along = change * (kept.server - kept.weights)  # dL / dv, v = 1 where shared
            total = total - self.accuracy * along * soft * (1 - soft) / self.temperature
        return total


def importance(change: Tensor, kept: Kept) -> Tensor:
    """(P,) w_j: a weight's share of its layer's |g|, times the layer's share of the weights."""
    size = change.abs() * kept.exists
    total, shares = max(1, int(kept.exists.count_nonzero())), torch.zeros_like(size)
    for start, stop in kept.spans:
        count, layer = int(kept.exists[start:stop].count_nonzero()), size[start:stop]
        norm = layer.sum()
        if count and bool(norm > 0):
            shares[start:stop] = layer / norm * (count / total)
        elif count:
            shares[start:stop] = kept.exists[start:stop] / total
    return shares
