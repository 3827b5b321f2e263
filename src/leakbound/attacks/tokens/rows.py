"""Token rows: the tokens in a batch, from the rows of the word embedding that have a gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import scipy
import torch
from torch import Tensor

from leakbound.attacks.adaptive import not_sgd
from leakbound.attacks.base import Answer, Attack, SentRow, each_row, rows_of, seen_task
from leakbound.attacks.blind import VANISHED
from leakbound.attacks.idle import beside_decay
from leakbound.attacks.span import Span, above_noise
from leakbound.attacks.tokens.layers import (
    UNIQUE,
    WordTable,
    completed,
    extended,
    filled,
    first_linear,
    handed_on,
    labels_of,
    output_layer,
    place_rows,
    shifted,
    token_domain,
    whole,
    word_table,
    words,
)
from leakbound.core import Laplace, NotApplicable, Observation, Reconstruction, Task

CHANCE = 1e-3
EDGE = 8.0
GAP = 5.0
SMALLEST = 4096
SIGMAS = 5.0
"""Chance that noise alone touches any row; multiple of the edge of rounding errors from which a
singular value counts; smallest ratio of a touched row to any other where rows are dense; number of
rows of which the output's span is made; standard errors that a coefficient of 0 or 1 must resolve.
"""
CLEAR = 100.0
"""The smallest such ratio that states a fact: rounding leaves ratios of thousands."""
SHOWN = 10.0
"""The smallest ratio to noise of a state of the outputs that counts as seen. What the levels of
rows leave out, the second order, is then about a hundredth.
"""
SPARE = 8
"""The fewest rows beyond the directions of their span that show that it is the outputs': rows as
many as its directions lie in a span whatever they are.
"""
ASSUMES = "the client carries no optimizer state from earlier rounds"


@dataclass(frozen=True)
class TokenRows(Attack):
    """Find the tokens in a batch by the rows of the word embedding that have a gradient.

    Only a token that occurs in the batch has a gradient in its row of the word embedding. This
    holds for SGD and for Adam, after any number of local steps. With known noise, a row counts if
    noise alone gives it its size with a chance below 0.1 % over the whole vocabulary.

    If the output layer shares the table, its gradient adds a vector to every row. These vectors lie
    in the span of the N output states. The attack estimates this span from the smallest rows and
    projects it out, which works while N is below the width. Weight decay changes every row, and the
    attack removes what it does alone.

    For one sequence with learned positions, it finds the order, too: the rows of words are sums of
    the rows of positions, by a matrix of 0 and 1 that says which token is where.

    `problem` is None only for one sequence whose places are all known. Otherwise the answer holds
    the tokens in turn, and `problem` says what is not known. The padding token does not count.
    `facts` has the tokens, if rows are touched or not beyond doubt. It is empty if the model may
    replace tokens at random before the embedding.

    The last token of a sequence has no gradient in a causal model that is scored by the next token.
    It is taken from the labels if they are known. For one sequence in order, the gradient of an
    output layer gives it, too.

    Assumptions: no optimizer state of earlier rounds, which moves old rows. Counts of tokens are
        not inferred. Order needs a single step of SGD.

    Raises:
        NotApplicable: no tokens, a frozen word embedding, an update that changes all rows in
            another way, or a shared table with more outputs than the table is wide.

    Source: Melis et al. 2019 for rows. The span of a shared table, the order by positions and the
        levels for noise are this project's.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.domains import TokenDomain
        >>> layers = torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(12, 2)
        >>> batch = lb.Batch(torch.tensor([[7, 2, 7]]), torch.tensor([1]))
        >>> task = lb.Task.of(torch.nn.Sequential(*layers), domain=TokenDomain(9, 3))
        >>> sources = [lb.stream(0, "client"), lb.stream(0, "cohort")]
        >>> seen = lb.play(task, [batch], lb.defenses.NoDefense(), sources).observation
        >>> TokenRows().tokens(seen)
        (2, 7)
    """

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = beside_decay(observation, seen_task(observation))
        task = seen_task(observation)
        domain = token_domain(task)
        table = word_table(task)
        each: list[_Rows] = []

        def one(row: SentRow) -> Answer:
            if row.is_zero:
                return Answer(filled(row, ()), VANISHED)
            rows = _Rows.of(row, table)
            each.append(rows)
            held = rows.tokens.tolist()
            unsure = [rows.problem] if rows.problem else []
            said = "their order is not known"
            if row.count > 1:
                said = "their order, and which sequence holds which, are not known"
            elif held:
                sequence, left, reason = _ordered(row, table, rows)
                if sequence is not None:
                    problem = "; ".join([*unsure, *([reason] if reason else [])])
                    return Answer(sequence, problem or None, left)
                said = f"{said} ({reason})"
            some = f"{len(held)} tokens are found; {said}" if held else "no token is found"
            return Answer(filled(row, held), "; ".join([*unsure, some]))

        answer = each_row(observation, task, one)
        if not each or not all(rows.clear for rows in each) or not handed_on(task):
            return answer
        tokens = torch.stack([rows.seen for rows in each]).any(0).nonzero()[:, 0].tolist()
        level = CHANCE * len(each) if any(rows.noise for rows in each) else None
        return replace(answer, facts=words(domain, tokens, level, ASSUMES))

    def tokens(self, observation: Observation) -> tuple[int, ...]:
        """The tokens in any row of the update, in increasing order.

        In a causal model that is scored by the next token, the last tokens are among them only if
        labels are known.
        """
        observation = beside_decay(observation, seen_task(observation))
        task = seen_task(observation)
        table = word_table(task)
        tokens = set[int]()
        for row in rows_of(observation, task):
            if not row.is_zero:
                tokens |= set(_Rows.of(row, table).tokens.tolist())
            if (labels := labels_of(row)) is not None and shifted(task):
                ends = (label[label >= 0] for label in labels)
                tokens |= {int(end[-1]) for end in ends if len(end)}
        return tuple(sorted(tokens - {token_domain(task).padding}))


def labels_in_outputs(observation: Observation) -> set[int]:
    """The tokens whose rows of the output layer stand out, as those of labels do."""
    task = seen_task(observation)
    tokens = set[int]()
    head = output_layer(task)
    if head is None or not shifted(task):
        return tokens
    most = observation.examples * token_domain(task).length
    for row in rows_of(observation, task):
        values = head.gradient(task, row.values)
        try:
            seen = _apart(values.norm(dim=1), most)
        except NotApplicable:
            if row.variance is None:
                continue
            spread = head.gradient(task, row.variance)
            seen = above_noise(observation, values, spread, CHANCE / len(values))
        if int(seen.sum()) <= most:
            tokens |= set(seen.nonzero()[:, 0].tolist())
    return tokens


def largest_rows(observation: Observation, count: int) -> list[int]:
    """The tokens with the largest rows of the word embedding's gradient; none if it is frozen."""
    task = seen_task(observation)
    try:
        table = word_table(task)
    except NotApplicable:
        return []
    sizes = sum(_part(task, table.weight, row).square().sum(1) for row in observation.update.rows)
    assert isinstance(sizes, Tensor)  # an update has a row or more
    sizes = sizes[: token_domain(task).vocabulary]
    tokens: list[int] = sizes.topk(min(count, len(sizes))).indices.tolist()
    return tokens


@dataclass(frozen=True, eq=False)
class _Rows:
    """The gradient's rows (V, k) of tokens as they are tested, which of them are touched, and the
    basis (d, k) on which an output layer's part is zero; None: the whole space. `clear`: no row
    could be either. `padded`: the row of padding is touched, too.
    """

    values: Tensor
    seen: Tensor
    basis: Tensor | None
    noise: float
    problem: str | None = None
    clear: bool = True
    padded: bool = False

    @property
    def tokens(self) -> Tensor:
        """The tokens whose rows are touched, in order."""
        return self.seen.nonzero()[:, 0]

    @staticmethod
    def of(row: SentRow, table: WordTable) -> _Rows:
        observation = row.observation
        task = row.task
        domain = token_domain(task)
        if observation.correlation is not None:
            raise NotApplicable("the noise is correlated, and levels for rows assume it is not")
        values = _part(task, table.weight, row.values)[: domain.vocabulary]
        noise = row.variance
        spread = None if noise is None else _part(task, table.weight, noise)[: len(values)]
        most = row.count * domain.length
        complete = whole(observation, task, [table.weight])
        if table.tied:
            # Only a sum of gradients has the outputs' part in one span.
            if not task.plan.is_sum or not complete:
                raise NotApplicable(
                    "the output layer shares the word embedding, and the update is no sum of "
                    "gradients, or withholds entries of it: its part cannot be removed"
                )
            if (reason := not_sgd(observation)) is not None:
                raise NotApplicable(
                    f"the output layer shares the word embedding, so all rows change; {reason}"
                )
            rows = _untied(observation, values, spread, most, _scored(row))
        elif spread is not None and (spread > 0).any():
            # One false token in the whole vocabulary is what may happen by chance.
            loud = above_noise(observation, values, spread, CHANCE / len(values))
            rows = _Rows(values, loud, None, _level(spread))
        else:
            touched = values.any(1)
            # If all rows changed, something else than tokens may have done so.
            rows = _Rows(values, touched, None, 0.0, clear=not bool(touched.all()))
            if int(rows.seen.sum()) > most:
                rows = _decayed(_part(task, table.weight, task.parameters), values, most)
        kept = rows.seen.clone()
        for pad in (table.padding, domain.padding):
            if pad is not None and pad < len(kept):
                kept[pad] = False
        said = None if complete else "entries of the word embedding are withheld: tokens may lack"
        padded = domain.padding is not None and bool(rows.seen[domain.padding])
        return replace(rows, seen=kept, problem=said, padded=padded)


def _part(
    task: Task,
    name: str,
    flat: Tensor,
) -> Tensor:
    """(rows, d) a parameter's part of a flat vector (P,), float64 on the CPU."""
    part = task.unflatten(flat)[name]
    return part.reshape(-1, part.shape[-1]).double().cpu()


def _level(spread: Tensor) -> float:
    return float(spread.mean().sqrt())


def _scored(row: SentRow) -> int:
    """How many outputs of all local steps have a label, at most."""
    task = row.task
    scored = row.count * (token_domain(task).length - shifted(task))
    if (labels := labels_of(row)) is not None:
        scored = int((labels[:, int(shifted(task)) :] >= 0).sum())
    return scored * task.plan.steps


def _untied(
    observation: Observation,
    values: Tensor,
    spread: Tensor | None,
    most: int,
    scored: int,
) -> _Rows:
    """The rows without the part in the span of at most `most` output states.

    The span is that of the smallest rows, which no token of the batch has. A state whose
    probabilities lie on a few tokens does not show there; it shows in the rows of these tokens, of
    which one may occur nowhere. So rows are clear only if the span has as many directions as there
    are states, `scored`, all far above noise, and if `SPARE` further rows lie in it.

    A row in the span is off by noise^2 (1 + sum_k (u_k . row)^2 / s_k^2) in each direction outside,
    to first order.
    """
    count, width = values.shape
    if isinstance(observation.update.law, Laplace):
        raise NotApplicable("Laplace noise covers the output layer's part of the word embedding")
    sizes = values.norm(dim=1)
    # Most tokens do not occur: the smallest rows hold the outputs' part alone.
    some = values[sizes.argsort()[: min(SMALLEST, count // 2)]]
    rounding = EDGE * float(torch.finfo(observation.update.rows.dtype).eps)
    noise = rounding * float(some.square().mean().sqrt())
    known = 0.0 if spread is None else _level(spread)

    def ranked(sizes: Tensor, edge: float) -> int:
        rank = int((sizes > max(noise, known) * edge).sum())
        return rank if known else min(rank, most)

    span = Span.of(some, ranked)
    if span.rank >= min(width - 1, len(some)):
        raise NotApplicable(
            f"the output layer shares the word embedding, and its outputs span all {width} "
            "directions of it: the tokens' own part cannot be separated"
        )
    outside = span.outside
    rest = values @ outside
    away = rest.square().sum(1)
    shown = float(span.sizes.min()) if span.rank else 0.0
    complete = span.rank >= scored and shown > SHOWN * max(noise, known) * span.edge

    def proved(seen: Tensor) -> bool:
        inside = int((sizes[~seen] > 2 * max(noise, known) * width**0.5).sum())
        return complete and inside >= span.rank + SPARE

    if known:
        part = (values @ span.basis / span.sizes).square().sum(1)
        limit = float(scipy.stats.chi2.isf(CHANCE / count, span.free))
        loud = away > known**2 * (1 + part) * limit
        return _Rows(rest, loud, outside, known, clear=proved(loud))
    seen = _apart(away.sqrt(), most)
    return _Rows(rest, seen, outside, 0.0, clear=proved(seen) and _clear(away.sqrt(), seen))


def _decayed(
    weights: Tensor,
    values: Tensor,
    most: int,
) -> _Rows:
    """The rows without a multiple of the weights, as weight decay adds it."""
    kept = weights[: len(values)]
    size = kept.square().sum(1)
    shares = (values * kept).sum(1)[size > 0] / size[size > 0]
    if not len(shares):
        raise NotApplicable("all rows of the word embedding changed")
    # Most tokens do not occur, so the median share is the decay's.
    rest = values - shares.median() * kept
    sizes = rest.norm(dim=1)
    seen = _apart(sizes, most)
    return _Rows(rest, seen, None, 0.0, clear=_clear(sizes, seen))


def _clear(sizes: Tensor, seen: Tensor) -> bool:
    """Whether the sizes of touched rows are far above those of all others."""
    if not seen.any() or seen.all():
        return False
    return float(sizes[seen].min()) > CLEAR * float(sizes[~seen].max())


def _apart(sizes: Tensor, most: int) -> Tensor:
    """Which of the rows with these sizes stand out, at most `most`.

    Raises:
        NotApplicable: no gap separates them from the others.
    """
    ordered = sizes.sort(descending=True).values
    # A gap behind as many rows as tokens can occur separates nothing.
    head = ordered[: min(most, len(sizes) - 1) + 1].clamp_min(1e-300)
    if float(ordered[0]) == 0.0:
        return torch.zeros(len(sizes), dtype=torch.bool)
    ratios = head[:-1] / head[1:]
    at = int(ratios.argmax()) if len(ratios) else 0
    if not len(ratios) or float(ratios[at]) < GAP:
        raise NotApplicable(
            "all rows of the word embedding changed, and no gap separates the rows of tokens in "
            "the batch: noise, or optimizer state of earlier rounds"
        )
    return sizes > head[at + 1]


def _ordered(
    row: SentRow,
    table: WordTable,
    rows: _Rows,
) -> tuple[Tensor | None, float, str | None]:
    """The sequence (1, n) of one example, the largest distance of a coefficient from 0 or 1, and
    what is not known of it; None and the reason if its order is not known.
    """
    task = row.task
    reader = first_linear(task)
    nan = float("nan")
    if not task.plan.is_gradient:
        return None, nan, "several local steps, or an optimizer, mix the places"
    known = None if reader is None else place_rows(task, table, reader)
    if known is None:
        return None, nan, "the model has no trained positions"
    name, at_rows, factor = known
    if not whole(row.observation, task, [name]):
        return None, nan, "entries of the position embedding are withheld"
    places = _part(task, name, row.values)[at_rows]
    used = places.any(1)
    if rows.noise and row.variance is not None:
        spread = _part(task, name, row.variance)[at_rows]
        used = above_noise(row.observation, places, spread, CHANCE / len(places))
    domain = token_domain(task)
    length = int(used.sum())
    start = int(used.long().argmax()) if domain.padded_before else 0
    if not length or not used[start : start + length].all():
        return None, nan, "places without a gradient lie between others"
    # The rows of words were reduced to these directions, so places are, too.
    if rows.basis is not None:
        places = places @ rows.basis
    if length > places.shape[1]:
        return None, nan, f"{length} places are more than the {places.shape[1]} free directions"
    held = rows.tokens
    if domain.padded_before and rows.padded:
        held = torch.cat([held, held.new_tensor([domain.padding])])
    at = places[start : start + length]
    turn, left, sure = _placed(rows.values[held], at / factor, rows.noise)
    if not sure:
        return None, left, "the rows of words are no sums of rows of positions"
    prefix = held[turn]
    if start:
        prefix = torch.cat([prefix.new_full((start,), int(domain.padding or 0)), prefix])
    said = None
    if shifted(task):
        (prefix,), said = completed(row, [prefix])
    unpadded = domain.padding is None or domain.padded_before
    if len(prefix) < domain.length and unpadded and said is None:
        said = f"only {len(prefix)} of {domain.length} places have a gradient"
    return extended(domain, prefix[None]), left, said


def _placed(
    words: Tensor,
    places: Tensor,
    noise: float,
) -> tuple[Tensor, float, bool]:
    """The word (L,) at each place; how far the coefficients are from 0 and 1; whether it is sure"""
    back = torch.linalg.pinv(places)
    shares = words @ back  # (U, L)
    turn = shares.argmax(0)
    whole_numbers = torch.zeros_like(shares).scatter(0, turn[None], 1.0)
    left = float((shares - whole_numbers).abs().max())
    # Rows of words and of places both have noise.
    error = noise * 2**0.5 * float(back.norm(dim=0).max())
    sure = left < UNIQUE and SIGMAS * error < 1 / 2 and bool(whole_numbers.any(1).all())
    return turn, left, sure
