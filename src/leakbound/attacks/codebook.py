"""A malicious server's codebook: a model whose gradient identifies the nearest codeword."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakbound import check
from leakbound._util.codewords import codewords
from leakbound._util.decibels import EXTREME, mse_of_psnr
from leakbound.attacks.base import Attack, expected_rows, seen_task
from leakbound.attacks.blind import answered
from leakbound.attacks.planted import sent_by_attacker, takes_numbers
from leakbound.attacks.trap import TrapLoss
from leakbound.core import Exact, Observation, Reconstruction, Task


class CodebookModel(nn.Module):
    """scale * the trained weight of the codeword nearest to the input, (B, 1).

    Words (M, N) and their shares (M,) are constants that the server sends with the model.
    """

    words: Tensor
    shares: Tensor

    def __init__(
        self,
        words: Tensor,
        shares: Tensor,
        scale: float,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(words.new_zeros(len(words)), requires_grad=False)
        self.register_buffer("words", words)
        self.register_buffer("shares", shares)
        self.scale = scale
        self.training = False

    def forward(self, inputs: Tensor) -> Tensor:
        # |x - w|^2 without |x|^2, which is the same for all words.
        away = self.words.square().sum(1) - 2 * inputs.flatten(1) @ self.words.T
        places = torch.arange(len(self.words), device=inputs.device)
        chosen = (away.argmin(1, keepdim=True) == places).to(self.weight)
        return self.scale * (chosen @ self.weight)[:, None]


@dataclass(frozen=True)
class Codebook(Attack):
    """Send a malicious codebook model whose gradient identifies the nearest public example.

    The candidate codewords are the public examples, means of 2 to 12 near ones, and midpoints of
    near pairs. A greedy search chooses the `codewords` of them that cover the most public examples.
    The model has one trained weight per codeword. An example's gradient is `scale` times
    onehot(nearest codeword); clipping to C makes it C onehot(k).

    The answer is the most probable codeword under the known noise: argmax y_k + s^2 ln pi_k. Here y
    is in units of what one example adds, s is the noise's standard deviation in these units, and
    pi_k is the share of public examples that codeword k covers. For several examples in one row of
    the update, the attack takes the most probable counts of codewords. It simulates the client to
    find what one example adds. It estimates unknown noise from the row.

    `bounds.codebook` gives the probability that noise leaves the right codeword on top. The attack
    cannot reconstruct an example that is farther from all codewords than the criterion.

    Args:
        psnr: the criterion that the codebook targets, in dB.
        codewords: M, the largest number of codewords; fewer if these cover all public examples.
        scale: the gradient's norm before clipping; a large one outweighs noise that does not scale
            with a clip norm.
        limit: how many public examples are used, from the first on.

    Assumptions: private examples resemble public ones; the model takes inputs of the public shape.

    Raises:
        NotApplicable: the server is honest, there are no public examples, or the update is not
            finite.

    Source: this project; a codebook as in Fano's inequality.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.core import Server
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> images = torch.rand(20, 1, 4, 4, generator=lb.stream(0, "images"))
        >>> public, batch = lb.Batch(images, torch.arange(20) % 3), (images[5:6], torch.tensor([2]))
        >>> threat, defense = lb.ThreatModel(server=Server.MALICIOUS), lb.defenses.DpSgd(1.0, 0.1)
        >>> setup = {"attack": Codebook(), "defense": defense, "public": public, "threat": threat}
        >>> torch.equal(lb.simulate(model, batch, **setup).reconstruction, images[5:6])
        True
    """

    psnr: float = 20.0
    codewords: int = 100
    scale: float = 1000.0
    limit: int = 2000

    def __post_init__(self) -> None:
        check.positive(psnr=self.psnr, scale=self.scale)
        check.count(codewords=self.codewords, limit=self.limit)
        if self.psnr >= EXTREME:
            raise ValueError(f"psnr is {self.psnr:g}; give decibels, such as 20")

    def plant(self, task: Task) -> Task:
        """Replace the model by the codebook; the task unchanged without public examples, and of a
        model that takes tokens.
        """
        if task.public is None or not takes_numbers(task):
            return task
        low, high = task.input_range
        public = task.public.inputs[: self.limit].flatten(1).double().cpu().numpy()
        book = codewords(public, mse_of_psnr(self.psnr, high - low), self.codewords)
        words, shares = (torch.from_numpy(part).to(task.parameters) for part in book)
        model = CodebookModel(words, shares, self.scale)
        weights = task.parameters.new_zeros(len(words))
        buffers = {"words": words, "shares": shares}
        # The model is replaced as a whole, so none of its weights is pruned.
        planted = replace(
            task,
            model=model,
            parameters=weights,
            loss=TrapLoss(1),
            kept=None,
        )
        return replace(planted, buffers=buffers)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        task = sent_by_attacker(
            observation,
            seen_task,
            lambda task: isinstance(task.model, CodebookModel),
            lacks="codebook: there are no public examples to build one",
        )
        update = observation.update
        sizes = _sizes(observation, task)
        prior = task.buffers["shares"].double().log()
        named_words = []
        sure = 1.0
        rows = zip(
            update.rows.double(),
            _precision(observation),
            sizes,
            strict=True,
        )
        for (row, precision, size), examples in zip(rows, update.examples, strict=True):
            named, trust = _most_probable(row, precision, float(size), prior, examples)
            named_words.append(named)
            sure = min(sure, trust)
        problem = None
        if sure < 0.5:
            problem = f"noise hides the codewords: the answer has a probability of {sure:.2g}"
        return answered(observation, task, task.buffers["words"][torch.cat(named_words)], problem)


def _sizes(observation: Observation, task: Task) -> Tensor:
    """What one example adds to its codeword's coordinate in each row (R,), by simulation."""
    words = task.buffers["words"]
    update = observation.update
    labels = observation.labels
    places = torch.arange(observation.examples, device=words.device)
    # Any labels: the codebook's loss does not use them.
    if labels is None:
        labels = torch.zeros_like(places)
    inputs = words[places % len(words)].reshape(observation.batch_shape)
    with torch.no_grad():
        sent = expected_rows(observation, task, inputs, labels).detach().double().sum(1)
    each = sent / torch.tensor(update.examples, device=words.device)
    if observation.defense is None:  # it may have clipped
        return each.minimum(update.rows.double().amax(1).clamp_min(0))
    return each


def _precision(observation: Observation) -> Tensor:
    """1 / variance of each coordinate (R, M), float64; 0 where it was withheld at random.

    Values without noise have the variance of rounding. A coordinate withheld for its size is known
    to be small.
    """
    update = observation.update
    values = update.rows.double()
    variance = observation.noise_variance
    if variance is None:
        # The median of |N(0, 1)| is 0.6745.
        quiet = values.abs().median(1, keepdim=True).values / 0.6745  # most codewords have no input
        variance = torch.zeros_like(values) if isinstance(update.law, Exact) else quiet.square()
    rounding = 16 * torch.finfo(update.rows.dtype).eps * values.abs().amax(1, keepdim=True)
    precision = 1 / (variance + rounding.square().clamp_min(1e-300))
    if update.mask is None or not observation.threat.defense_known:
        return precision.expand_as(values)
    return precision * (update.mask | (update.mask_private and not update.drawn))


def _most_probable(
    row: Tensor,
    precision: Tensor,
    size: float,
    prior: Tensor,
    examples: int,
) -> tuple[Tensor, float]:
    """The most probable codewords of a row (examples,), and the last one's probability given the
    others. The log-probability is concave in every count, so a greedy choice is optimal.
    """
    counts = torch.zeros_like(row)
    named = []
    gain = prior + size * (row - size / 2) * precision
    trust = 1.0
    for _ in range(examples):
        best = int(gain.argmax())
        trust = float(gain.softmax(0)[best])
        named.append(best)
        counts[best] += 1
        more = float(counts[best])
        rise = size * (row[best] - (more + 0.5) * size) * precision[best]
        # Counts are multinomial: one example more divides by the new count.
        gain[best] = prior[best] - math.log(more + 1) + rise
    return torch.tensor(named, device=row.device), trust
