"""PriPrune: each client learns which weights to withhold, for accuracy and privacy together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.core import Task
from leakbound.defenses.base import State
from leakbound.defenses.withhold import (
    BLOCK,
    ClientState,
    Masked,
    Started,
    Withholding,
    as_bytes,
    blocks,
    choose,
)
from leakbound.randomness import Source, uniform

FORMS = ("log", "linear")
TYPICAL = 0.114
"""The mean probability at rest, l_pri / (l_sha N), in the paper's settings for PruneFL."""
ADAM = (0.9, 0.999, 1e-8)
EDGE = 1e-6
SUMMED = 2**16
"""Number of sizes per partial sum; the rounding of a layer's norm depends on it."""


@dataclass(frozen=True, eq=False)
class Belief:
    """PriPrune's state besides the weights, (P,) each.

    `logits` are a, with alpha = sigmoid(a) the probability that a weight is withheld. `first` and
    `second` are Adam's means of the slopes and of their squares after `steps` steps. `noise` is the
    logistic noise of this round's sampled mask.
    """

    logits: Tensor
    first: Tensor
    second: Tensor
    steps: int = 0
    noise: Tensor | None = None

    @property
    def alpha(self) -> Tensor:
        return self.logits.sigmoid()


@dataclass(frozen=True, repr=False)
class PriPrune(Withholding):
    """Learn which weights to withhold, for accuracy and privacy together.

    Every weight has a probability alpha of being withheld, and the client keeps the withheld ones.
    In a round, the client draws a mask (share with probability 1 - alpha). It starts from the
    server's weights for shared ones and from its own elsewhere, trains, and takes `mask_steps`
    steps on

        l_acc L_acc - l_pri sum_j w_j log alpha_j + l_sha sum_j alpha_j

    with w_j = N_l / N * |g_j| / sum_{j' in layer} |g_j'|, g the loss gradient. The loss L_acc
    depends on alpha through the drawn mask (Gumbel-softmax, hard forward, soft backward). The
    client then sends the weights with alpha <= 1/2 and zeros elsewhere. Pruned weights take no
    part. Biases and the scales of norms are always sent.

    Without the loss term alpha_j converges to l_pri w_j / l_sha, so a weight is withheld if its
    gradient is more than l_sha N / (2 l_pri) times its layer's mean. By Markov's inequality this is
    at most the share 2 l_pri / (l_sha N), and usually far less.

    It reads only its row: after the noise of DP-SGD it is post-processing, and the guarantee stays.
    The mask is visible as zeros and was chosen from the gradients of all rounds so far, so the mask
    itself is a release. A withheld weight that is shared later leaks its training, and the attack
    `mixed_start` searches for the drawn start.

    Args:
        accuracy: l_acc, the weight of the training loss.
        privacy: l_pri, the weight of the privacy term.
        sharing: l_sha, the price of withholding one weight; 0 uses l_pri / (0.114 N), the ratio of
            the paper's settings, for N weights that may be withheld.
        form: "log" as above, or "linear": - l_pri sum_j w_j alpha_j, which drives every alpha to 0
            or 1.
        mask_rate: learning rate of the logits (Adam).
        mask_steps: number of steps on the logits per round.
        start: alpha before the first round.
        temperature: of the Gumbel-softmax.
        compose: "sampled" (with this round's drawn mask), or "last": the server's weights that the
            client shared in its last round, and its own elsewhere.

    Guarantees: none. In the drawn masks each weight is withheld with probability alpha.

    Source: Chu et al. 2024 (paper D), section 5.2, eqs. 16 to 18, algorithm 3. Equation 17 and the
    composition are our reading (docs/errata.md); temperature and `mask_rate` are not printed.

    Example:
        >>> from leakbound.randomness import stream
        >>> from leakbound.core import Task
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
        check.non_negative(
            accuracy=self.accuracy,
            privacy=self.privacy,
            sharing=self.sharing,
        )
        check.positive(mask_rate=self.mask_rate, temperature=self.temperature)
        check.count(mask_steps=self.mask_steps)
        check.one_of(FORMS, form=self.form)
        check.one_of(["sampled", "last"], compose=self.compose)
        if not 0 < self.start < 1:
            raise ValueError(f"start is {self.start!r}; give a probability between 0 and 1")

    def init(self, task: Task) -> ClientState:
        zero = torch.zeros_like(task.parameters)
        first = torch.full_like(zero, self.start).logit()
        return replace(super().init(task), own=Belief(first, zero, zero))

    def acts(self, state: State) -> bool:
        """Whether the client withheld a weight: the first rounds withhold none."""
        kept: ClientState = state
        return kept.sent is not None and bool((kept.exists & ~kept.sent).any())

    @torch.no_grad()
    def _start(
        self,
        kept: ClientState,
        server: Tensor,
        source: Source,
    ) -> Started:
        belief: Belief = kept.own
        noise = torch.empty_like(server)
        start = server
        weights = kept.weights
        sent = kept.sent
        # The logit of 0 is infinite.
        least = torch.finfo(server.dtype).tiny
        if weights is not None and sent is not None:
            start = torch.empty_like(server)
        for part in blocks(((0, len(server)),)):  # the same draws as all at once
            draw = uniform(server[part].shape, source, like=server)
            torch.logit(draw.clamp_min_(least), out=noise[part])
            if weights is not None and sent is not None:
                last = self.compose == "last"
                # Logistic noise is below the logit with probability alpha.
                mask = ~sent[part] if last else noise[part] <= belief.logits[part]
                mask.logical_and_(kept.exists[part])
                choose(mask, weights[part], server[part], start[part])
        return replace(kept, own=replace(belief, noise=noise)), start

    @torch.no_grad()
    def _mask(
        self,
        change: Tensor,
        kept: ClientState,
        source: Source,
    ) -> Masked:
        belief: Belief = kept.own
        layers = layer_shares(change, kept)
        for _ in range(self.mask_steps):
            belief = self._step(belief, change, kept, layers)
        share = torch.empty_like(kept.exists)
        for part in blocks(((0, len(share)),)):
            gone = torch.gt(belief.logits[part], 0, out=share[part])
            gone.logical_and_(kept.exists[part]).logical_not_()
        return share, replace(kept, own=replace(belief, noise=None))

    def _step(
        self,
        belief: Belief,
        change: Tensor,
        kept: ClientState,
        layers: list[_LayerShare],
    ) -> Belief:
        """One step of Adam on the logits of existing weights."""
        beta1, beta2, tiny = ADAM
        steps = belief.steps + 1
        first, second, logits = (
            _with_gaps(old, kept.spans) for old in (belief.first, belief.second, belief.logits)
        )
        tops = [change.new_zeros(())]
        for part, slope in self._slopes(belief, change, kept, layers):
            torch.lerp(belief.first[part], slope, 1 - beta1, out=first[part])
            torch.lerp(
                belief.second[part],
                slope.square_(),
                1 - beta2,
                out=second[part],
            )
            tops.append(second[part].max())
        unbias = 1 / (1 - beta1**steps), 1 / (1 - beta2**steps)
        size = (torch.stack(tops).max() * unbias[1]).sqrt()
        floor = (tiny * size).clamp_min(torch.finfo(size.dtype).tiny)  # slopes are tiny
        edge = torch.logit(torch.tensor(1 - EDGE)).item()
        spare = change.new_empty(2, BLOCK)
        for part in blocks(kept.spans):
            size, move = spare[:, : part.stop - part.start]
            torch.mul(second[part], unbias[1], out=size).sqrt_().add_(floor)
            torch.mul(first[part], unbias[0] * self.mask_rate, out=move).div_(size)
            torch.sub(belief.logits[part], move, out=logits[part]).clamp_(-edge, edge)
        return replace(
            belief,
            logits=logits,
            first=first,
            second=second,
            steps=steps,
        )

    def _slopes(
        self,
        belief: Belief,
        change: Tensor,
        kept: ClientState,
        layers: list[_LayerShare],
    ) -> Iterator[tuple[slice, Tensor]]:
        """(P,) the derivative of the three-term loss with respect to the logits, in blocks.

        Memory access is most of the cost, so blocks stay in the processor's cache and reuse the
        same memory. `change` is in gradient units; without `noise` there is no loss term.
        """
        price = self.sharing or self.privacy / (TYPICAL * max(1, sum(one.count for one in layers)))
        spare = change.new_empty(4, BLOCK)
        one = change.new_ones(())
        noise = belief.noise
        server = kept.server
        weights = kept.weights
        for layer in layers:
            for part in blocks((layer.span,)):
                total, alpha, against, share = spare[:, : part.stop - part.start]
                torch.sigmoid(belief.logits[part], out=alpha)
                torch.sub(one, alpha, out=against)  # d log alpha / d a; times alpha: d alpha / d a
                torch.mul(alpha, price, out=total).mul_(against)
                layer.shares(change, kept, part, share)
                if self.form == "linear":
                    share.mul_(alpha)
                total.sub_(share.mul_(against), alpha=self.privacy)
                if noise is not None and server is not None and weights is not None:
                    soft = alpha
                    along = share
                    torch.sub(noise[part], belief.logits[part], out=soft)
                    soft.div_(self.temperature).sigmoid_()
                    torch.sub(server[part], weights[part], out=along)
                    along.mul_(change[part]).mul_(soft)  # dL / dv times the soft mask
                    along.mul_(torch.sub(one, soft, out=soft))
                    total.sub_(along, alpha=self.accuracy / self.temperature)
                if not layer.whole:
                    total.mul_(as_bytes(kept.exists[part]))
                yield part, total


@dataclass(frozen=True)
class _LayerShare:
    """The importance w_j of a layer's weights: a share of its |g|, times its share of the weights.

    `each` is the factor on |g|; `even` is the share of every weight if all gradients are zero.
    """

    span: tuple[int, int]
    count: int
    each: float
    even: float

    @property
    def whole(self) -> bool:
        """Whether no weight of the layer is pruned."""
        return self.count == self.span[1] - self.span[0]

    def shares(
        self,
        change: Tensor,
        kept: ClientState,
        part: slice,
        out: Tensor,
    ) -> None:
        """Write the importance of a part of the layer."""
        if self.even:
            out.fill_(self.even)
        else:
            torch.abs(change[part], out=out).mul_(self.each)
        if not self.whole:
            out.mul_(as_bytes(kept.exists[part]))


def layer_shares(change: Tensor, kept: ClientState) -> list[_LayerShare]:
    """For every layer, the number of weights and their importance at this change (P,)."""
    counts = [int(kept.exists[slice(*span)].count_nonzero()) for span in kept.spans]
    total = max(1, sum(counts))
    shares = []
    for span, count in zip(kept.spans, counts, strict=True):
        norm = 0.0
        for part in blocks((span,), SUMMED):
            size = change[part].abs()
            if count < span[1] - span[0]:
                size.mul_(as_bytes(kept.exists[part]))
            norm += float(size.sum(dtype=torch.float64))
        each, even = (count / total / norm, 0.0) if norm > 0 else (0.0, 1 / total)
        shares.append(_LayerShare(span, count, each, even))
    return shares


def _with_gaps(old: Tensor, spans: tuple[tuple[int, int], ...]) -> Tensor:
    """A new tensor with the old values outside of the spans and no values yet inside."""
    fresh = torch.empty_like(old)
    edges = (0, *(edge for span in spans for edge in span), len(old))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        fresh[start:stop] = old[start:stop]
    return fresh
