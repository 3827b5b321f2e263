"""Audits of a client's epsilon: from many runs with and without a canary, or from one run.

A quarter of many runs finds directions in which the canary shows. A quarter chooses one of them,
and a threshold. Half gives the rates of this event. So nothing is chosen on the runs that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor
from torch.nn.functional import normalize

from leakbound import check
from leakbound._util import stops
from leakbound._util.formats import format_lower, format_upper
from leakbound._util.user_code import seeded
from leakbound.audit_epsilon.clients import Client, gradient_places, over_rounds, vector
from leakbound.audit_epsilon.finding import Claims, EpsilonAudit, LowerEpsilon
from leakbound.bounds import empirical
from leakbound.bounds.counting import CONFIDENCE
from leakbound.bounds.law import probability
from leakbound.client import example_gradients
from leakbound.core import Batch, Task
from leakbound.losses import next_labels
from leakbound.randomness import bernoulli, permutation, stream, uniform

FEWEST = 40
TRIED = 12
"""The fewest runs; the number of random inputs among which the canary is chosen."""
FLOOR = 1e-12
"""The least variance of an entry, as a share of the largest."""
SHARES = (16, 8, 4, 2)
"""One run guesses this part of the canaries: one in 16, 8, 4 or 2."""
Watch = Callable[[int, int, str], None]
"""Called with runs done, runs in total, and what runs now."""
Weights = dict[str, Tensor]
Scores = NDArray[np.float64]


def audit_many_runs(
    client: Client,
    weights: Weights,
    base: Batch,
    task: Task,
    claims: Claims,
    *,
    runs: int = 500,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    watch: Watch | None = None,
    canary: Batch | None = None,
) -> EpsilonAudit:
    """Lower limits on epsilon from `runs` runs with the canary and as many without.

    A run calls the client once for each round of the claims. Two limits hold together:
    Clopper-Pearson's, which assumes nothing, and one for Gaussian noise of unknown size with the
    claimed sampling rate, steps and rounds.

    `weights` are given to the client, by name; `base` are its other examples; `task` is the
    auditor's copy of the model, in which the canary's gradient is known. `seed` fixes the runs'
    order and the client's draws, except those of the operating system. `canary` is one example,
    such as a sequence of tokens; without one, the audit makes it.

    Raises:
        ValueError: too few runs, several canaries, a client that raises, or updates of different
            sizes.

    Source: Jagielski et al. 2020 (rates); Nasr et al. 2023 (Gaussian).
    """
    check.count(runs=runs)
    probability("confidence", confidence)
    if runs < FEWEST:
        raise ValueError(f"runs is {runs}; give at least {FEWEST}")
    if canary is not None and canary.size != 1:
        raise ValueError(f"canary holds {canary.size} examples; give one")
    client = over_rounds(client, claims.rounds)
    draws = stream(seed, "epsilon audit")
    quarter = runs // 4
    canary, other = _canary_pair(task, base, draws, canary)
    batches = [_joined(base, other) if claims.replace else base, _joined(base, canary)]
    # Scores are of changes from this update: sums over runs then keep their digits.
    first = _sent(client, weights, batches[0], draws)
    start = vector(first)
    places = gradient_places(first, task)
    done = 0

    def phase(count: int) -> Iterator[tuple[bool, Tensor]]:
        """Updates with and without the canary, `count` of each, in a random order."""
        nonlocal done
        # A program that drifts from run to run must not show as a difference.
        for place in permutation(2 * count, draws).tolist():
            held = place < count
            done = done + 1
            yield held, vector(_sent(client, weights, batches[held], draws), like=start)
            if watch is not None:
                watch(done, 2 * runs, "running the client")

    slope = None if places is None else _gradients(task, canary)[0]
    rows = _directions(phase(quarter), start, slope, places)
    chosen = _scores(rows, phase(quarter))
    counted = _scores(rows, phase(runs - 2 * quarter))
    level = 1 - (1 - confidence) / 4  # two limits for each of two tests
    none = float(empirical.count_limits(counted.shape[1], level)[0])
    lower = []
    power = 0.0
    for method, assumes, merit, epsilon in _tests(claims):
        high, low = _event(merit, chosen, counted, level)
        shown = (
            f"an event of probability {format_lower(high)} or more, {format_upper(low)} or less "
            "for a neighbor"
        )
        lower.append(LowerEpsilon(method, float(epsilon(high, low)), assumes, shown))
        # The most that so many runs show: the event in all with the canary, and in none without.
        power = max(power, float(epsilon(1 - none, none)))
    # One more run than counted: it gave the update from which changes are measured.
    return EpsilonAudit(claims, tuple(lower), confidence, 2 * runs + 1, power)


def audit_one_run(
    client: Client,
    weights: Weights,
    base: Batch,
    task: Task,
    claims: Claims,
    *,
    canaries: int = 500,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> EpsilonAudit:
    """A lower limit on epsilon from one call, with many canaries that fair coins include.

    It assumes nothing of the program, and is loose. Arguments as in `audit_many_runs`.

    Raises:
        ValueError: a client that raises, an update without the model's parameters, or `replace`.

    Source: Steinke, Nasr and Jagielski 2023.
    """
    check.count(canaries=canaries)
    probability("confidence", confidence)
    if claims.replace or canaries < 2 * SHARES[0]:
        raise ValueError(
            f"canaries is {canaries} and replace {claims.replace}; one run needs at least "
            f"{2 * SHARES[0]} canaries, and neighbors that add or remove an example"
        )
    client = over_rounds(client, claims.rounds)
    draws = stream(seed, "epsilon audit")
    labels = base.labels[(uniform((canaries,), draws) * base.size).long()]
    extremes = _extremes(task, base, canaries, draws)
    planted = Batch(extremes, _own_labels(task, extremes, labels))
    coins = bernoulli((canaries,), 0.5, draws)
    held = Batch(planted.inputs[coins], planted.labels[coins])
    update = _sent(client, weights, _joined(base, held), draws)
    if (places := gradient_places(update, task)) is None:
        raise ValueError("update does not hold the model's parameters, which one run needs")
    scores = _matched(vector(update)[places], task, planted, base, claims.noise_multiplier or 1.0)
    # Each share and each sign is a test of its own.
    level = 1 - (1 - confidence) / (2 * len(SHARES))
    best = (0.0, 0, 0)
    how: dict[str, float] = {"delta": claims.delta, "confidence": level}
    for size in (canaries // (2 * share) for share in SHARES):
        for order in (scores.argsort(), (-scores).argsort()):  # the update's sign is not known
            right = int(coins[order[-size:]].sum() + (~coins[order[:size]]).sum())
            epsilon = empirical.epsilon_of_guesses(right, 2 * size, canaries, **how)
            best = max(best, (epsilon, right, 2 * size))
    power = empirical.epsilon_of_guesses(2 * size, 2 * size, canaries, **how)
    shown = f"{best[1]} of {best[2]} guesses right, {canaries} canaries"
    lower = LowerEpsilon("guesses of one run", best[0], "nothing", shown)
    return EpsilonAudit(claims, (lower,), confidence, 1, power)


def _extremes(
    task: Task,
    base: Batch,
    count: int,
    draws: torch.Generator,
) -> Tensor:
    """Inputs (count, *S) of entries that are the least or largest allowed; any, if tokens."""
    low, high = task.input_range
    shape = (count, *base.inputs.shape[1:])
    if not base.inputs.is_floating_point():
        return (low + (high - low + 1) * uniform(shape, draws)).to(base.inputs)
    upper = bernoulli(shape, 0.5, draws)
    return torch.where(upper, high, low).to(base.inputs)


def _own_labels(
    task: Task,
    inputs: Tensor,
    labels: Tensor,
) -> Tensor:
    """The labels; those of inputs whose labels are their own tokens, whatever was given."""
    if not getattr(task.loss, "of_inputs", False):
        return labels
    return next_labels(inputs, getattr(task.domain, "padding", None))


def _canary_pair(
    task: Task,
    base: Batch,
    draws: torch.Generator,
    canary: Batch | None = None,
) -> tuple[Batch, Batch]:
    """The candidate whose gradient differs most from the base's, and the one opposite to it.

    Candidates are blank, full and random inputs and the base's, with every label of the base. So
    most are blank or mislabeled. Sequences of tokens are never blank, for a blank one is padding. A
    `canary` that is given is taken.
    """
    dense = base.inputs.is_floating_point()
    blank = [torch.full_like(base.inputs[:1], value) for value in task.input_range * dense]
    inputs = torch.cat([*blank, base.inputs[:TRIED], _extremes(task, base, TRIED, draws)])
    labels = torch.unique(base.labels, dim=0)
    rows = inputs.repeat_interleave(len(labels), 0)
    # Text models take the next tokens as labels: others would be no training.
    every = _own_labels(task, rows, labels.repeat(len(inputs), *[1] * (labels.ndim - 1)))
    if canary is not None:
        rows = torch.cat([canary.inputs, rows])
        every = torch.cat([canary.labels, every])
    gradients = _gradients(task, Batch(rows, every))
    mean = _gradients(task, base).mean(0)
    mean = normalize(mean, dim=0)
    apart = (gradients - torch.outer(gradients @ mean, mean)).norm(dim=1)
    # A canary that was given stands first.
    best = int(apart.argmax()) if canary is None else 0
    far = int((normalize(gradients) @ gradients[best]).argmin())
    return Batch(rows[best, None], every[best, None]), Batch(rows[far, None], every[far, None])


def _gradients(task: Task, batch: Batch) -> Tensor:
    return example_gradients(task, batch.inputs, batch.labels).double()


def _joined(base: Batch, more: Batch) -> Batch:
    inputs = torch.cat([base.inputs, more.inputs])
    labels = torch.cat([base.labels, more.labels])
    return Batch(inputs, labels)


def _sent(
    client: Client,
    weights: Weights,
    batch: Batch,
    draws: torch.Generator,
) -> Any:
    number = int(torch.randint(2**31, (), generator=draws))
    start = {name: value.clone() for name, value in weights.items()}
    try:
        with seeded(torch.Generator().manual_seed(number)):
            return client(start, Batch(batch.inputs.clone(), batch.labels.clone()), number)
    except Exception as error:
        stops.reraise(error)
        raise ValueError(
            f"client raised {type(error).__name__} on {batch.size} examples: {error}; mend it"
        ) from error


def _directions(
    runs: Iterator[tuple[bool, Tensor]],
    start: Tensor,
    slope: Tensor | None,
    places: Tensor | None,
) -> Tensor:
    """Unit directions (K, D) in which the canary shows: the mean change and its gradient.

    Each is there twice, plain and divided by the variance of each entry. This finds entries with
    too little noise.
    """
    sums = [0 * start, 0 * start]
    squares = 0 * start
    count = 0
    for held, update in runs:
        count += held
        sums[held] += update - start
        squares += (update - start).square()
    means = [total / count for total in sums]
    change = means[1] - means[0]
    # The variances without and with the canary, added; rounding may leave less than 0.
    spread = (squares / count - means[0].square() - means[1].square()).clamp_min(0)
    # An entry without noise shows the canary for certain: its weight must stay finite.
    spread += FLOOR * max(float(spread.max()), float(change.square().max()), 1e-200)
    plain = [change]
    if slope is not None:
        gradient = torch.zeros_like(change)
        gradient[places] = slope
        # Clients send gradients or changes of the weights: the sign is not known.
        plain.append(gradient if gradient @ change >= 0 else -gradient)
    rows = torch.stack([way for one in plain for way in (one, one / spread)])
    # `normalize` divides by at least 1e-12: rows of tiny entries have to grow first.
    return normalize(rows / rows.abs().amax(1, keepdim=True).clamp_min(1e-300))


def _scores(rows: Tensor, runs: Iterator[tuple[bool, Tensor]]) -> Scores:
    """(2, N, K): scores without and with the canary, of every run in every direction."""
    scores: tuple[list[Tensor], list[Tensor]] = ([], [])
    for held, update in runs:
        scores[held].append(rows @ update)
    return torch.stack([torch.stack(part) for part in scores]).numpy()


def _tests(claims: Claims) -> Iterator[tuple[str, str, Callable[..., Any], Callable[..., float]]]:
    """Name and assumption of each test; which events serve it best; epsilon from an event."""
    delta = claims.delta
    training = claims.training

    def ratio(high: Scores, low: Scores) -> Any:
        return np.log(np.maximum(high - delta, 1e-12) / low)

    def excess(high: Scores, low: Scores) -> Any:
        noise = claims.noise_multiplier or 1.0
        return special.ndtri(high) - special.ndtri(empirical.most_power(noise, low, **training))

    steps = f"Gaussian noise, {claims.schedule}"
    yield "Clopper-Pearson", "nothing", ratio, partial(empirical.epsilon_of_rates, delta=delta)
    gaussian = partial(empirical.epsilon_of_steps, delta=delta, **training)
    yield "Gaussian", steps, excess, gaussian


def _event(
    merit: Callable[..., Any],
    chosen: Scores,
    counted: Scores,
    level: float,
) -> tuple[float, float]:
    """Limits on the rates of the best event: it is found on one half, counted on the other."""
    best: tuple[float, int, float, int] = (-np.inf, 0, 0.0, 0)
    for way in range(chosen.shape[2]):
        values = np.unique(chosen[..., way])
        # Between two scores: on a score, the event would depend on ties.
        cuts = np.append((values[1:] + values[:-1]) / 2, values[-1])
        for side, (high, low) in enumerate(_limits(chosen[..., way], cuts, level)):
            merits = merit(high, low)
            at = int(merits.argmax())
            best = max(best, (float(merits[at]), way, float(cuts[at]), side))
    _, way, cut, side = best
    high, low = _limits(counted[..., way], np.array([cut]), level)[side]
    return float(high[0]), float(low[0])


def _limits(
    scores: Scores,
    cuts: Scores,
    level: float,
) -> tuple[tuple[Scores, Scores], ...]:
    """For the events "above the cut" and "not above": limits on the larger and smaller rate."""
    n = scores.shape[1]
    limits = empirical.count_limits(n, level)
    without, held = (n - np.searchsorted(np.sort(part), cuts, side="right") for part in scores)
    return (1 - limits[n - held], limits[without]), (1 - limits[without], limits[n - held])


def _matched(
    update: Tensor,
    task: Task,
    planted: Batch,
    base: Batch,
    noise: float,
) -> Tensor:
    """Scores (m,) of canaries: the update on their unit gradients, each without the others.

    Common parts are removed first, so that the unknown scale of the update does not matter. The
    ridge is the best linear estimate's, for the claimed noise and coins of variance 1/4.
    """
    unit, rest = (normalize(_gradients(task, batch)) for batch in (planted, base))
    common = torch.linalg.qr(torch.stack([unit.mean(0), rest.mean(0)]).T)[0]
    residual = unit - (unit @ common) @ common.T
    gram = residual @ residual.T + 4 * noise**2 * torch.eye(len(residual), dtype=residual.dtype)
    scores: Tensor = torch.linalg.solve(gram, residual @ update)
    return scores
