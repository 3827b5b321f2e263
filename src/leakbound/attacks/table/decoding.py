"""Span decoding: whole rows of a table from the span of a first layer's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import (
    Answer,
    Attack,
    SentRow,
    each_row,
    parameter,
    seen_task,
    summed,
)
from leakbound.attacks.blind import VANISHED, public_images
from leakbound.attacks.knowing import paired
from leakbound.attacks.span import Span, Tolerance, independent
from leakbound.attacks.table.fit import Fit
from leakbound.attacks.table.view import (
    Block,
    LayerView,
    joint,
    linear_inputs,
    silent,
    table_domain,
    view,
)
from leakbound.core import NotApplicable, Observation, Reconstruction, Unit
from leakbound.domains import TableDomain
from leakbound.domains.known import KnownValues

PREFIXES = 4_000_000
AT_ONCE = 1024
PUBLIC = 512
REFINED = 3
FALL = 10.0
ROUNDING = 10.0
APART = 1e-2
CLEAR = 1e-3
LIKE = 1e-4
ROOT = 3e-7
"""Relative distance from a row space that counts as outside it; share of a row's largest derivative
that is one; relative distance at which a row depends on others; rounding of a squared value's root.
"""
GAP = 1.5
CHUNK = 1 << 18
FIRST = 3
"""Ratio of singular values at which unknown noise begins; prefixes of one step, and coordinates
outside the span that reject most of them.
"""
OUT = 0.02
BROKEN = 0.1
"""How far a valid number may leave its range, in units of its width, and a whole number 1."""
MOVES = ((0, 1), (-1, 2), (-2, 3), (-4, 5), (-8, 9))
"""Weights at which a unit must be off over several steps: these multiples of the change, in turn.
"""

NOISY = 1e-5
"""Noise over the largest singular value from which an answer is an estimate."""
CAUSES = "noise, an optimizer such as Adam, more examples, or other columns"


@dataclass(frozen=True)
class SpanDecoding(Attack):
    """Find the rows of a batch column by column in the span of a linear layer's gradient.

    The gradient of a layer that sees the rows is a sum over examples: [dW | db] = D^T [X | 1]. If
    it has rank B, each row [x | 1] lies in its row space, under every loss and label, and after any
    number of SGD steps. Few one-hot vectors do. The attack extends prefixes of categories column by
    column and drops those outside the projection of the space. The categories fix a row's
    coefficients, and these its numbers. Noise, known or visible in the spectrum, sets how far from
    the space a row may be.

    Mixtures such as x1 - x2 + x3 can be rows of a table, too. Two tests reject them. The units that
    a row leaves off have no gradient from it, so the row lies outside the row space of their
    gradients; a mixture lies inside. After a single step, a row's input of each later layer lies in
    the row space of that layer's gradient; that of a mixture does not.

    The rows that passed come first. If more remain than the rank, linearly independent ones are
    chosen: inside the columns' ranges, with whole numbers, near public rows. A rank below B means
    repeated rows, or rows without gradient, and repeats fill the answer. `problem` states each of
    these, and noise. If it is None, as many rows passed as the rank, which is B. That is no proof
    if the assumptions fail.

    Who knows some columns searches, for each example, the rows with its known values. Known numbers
    fix coefficients, too. If noise or withheld entries leave a problem, rows are also fitted to the
    gradient, of which known columns show each example's part, and a search without them is tried.
    The likeliest answer is an estimate.

    Args:
        prefixes: the largest number of prefixes that the search keeps.

    Assumptions: a linear layer sees every column in coordinates of its own (one-hot, scaled, coded
        or embedded); at least as many units as examples; a rank of at most the sum of levels minus
        one, plus one. Weight decay of SGD is found and subtracted. An update of Adam is no
        combination of rows, so no gap appears in its spectrum.

    Raises:
        NotApplicable: no table, no such layer, withheld entries, or too few categories.

    Source: this project. Petrov et al. 2024 (DAGER) test tokens for a span.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.domains import Column, TableDomain
        >>> columns = [Column(f"c{i}", "categorical", levels=("a", "b", "c")) for i in range(4)]
        >>> domain = TableDomain((*columns, Column("age", "integer", 0, 100)))
        >>> rows = domain.hard(torch.rand(3, 13, generator=lb.stream(0, "rows")))
        >>> layers = torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
        >>> model, batch = torch.nn.Sequential(*layers), (rows, torch.tensor([0, 1, 1]))
        >>> found = lb.simulate(model, batch, attack=SpanDecoding(), domain=domain)
        >>> sorted(domain.rows(found.reconstruction)) == sorted(domain.rows(rows))
        True
    """

    prefixes: int = PREFIXES

    def __post_init__(self) -> None:
        check.count(prefixes=self.prefixes)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        observation = summed(observation)
        task = seen_task(observation)
        seen = view(task, table_domain(task))

        return each_row(observation, task, lambda row: decoded(row, seen, self.prefixes))


TOLERANCE = Tolerance(1e-5, 0.05, lambda free: 6 * free**0.5)


def rows_span(
    gradient: Tensor,
    count: int,
    noise: float,
    rounding: float,
) -> Span:
    """The row space of a gradient (units, d) of at most `count` examples.

    A singular value counts if it exceeds those of the known noise, or of rounding. If more than
    `count` do, the noise is larger than known, and only those count that stand out.
    """

    def ranked(s: Tensor, edge: float) -> int:
        rank = int((s > max(rounding * float(s[0]), noise * edge)).sum())
        return rank if rank <= count else int((s[:count] > GAP * s[count]).sum())

    span = Span.of(gradient, ranked, TOLERANCE)
    return replace(span, noise=max(noise, span.noise))


class Crowded(Exception):
    """More prefixes survive than the search may keep."""


def decode(
    span: Span,
    blocks: Sequence[Block],
    cap: int,
) -> Tensor:
    """Options (K, len(blocks)) whose values lie in the span, on the coordinates of all blocks.

    Blocks are added one by one, from the last of those with one option that come first. Prefixes
    outside the span's projection are dropped.

    Raises:
        Crowded: more than `cap` prefixes survive.
    """
    first = next((k for k, block in enumerate(blocks) if len(block.seen) != 1), len(blocks))
    prefixes = torch.zeros(1, first - 1, dtype=torch.int32)
    # A known level may be none that a layer's gradient shows.
    if not all(len(block.seen) for block in blocks):
        return prefixes.new_zeros(0, len(blocks))
    for count in range(first, len(blocks) + 1):
        test = _Test.of(span, blocks[:count])
        kept = []
        total = 0
        # Every prefix meets every option: parts bound the memory.
        for chunk in torch.split(prefixes, max(1, CHUNK // len(blocks[count - 1].seen))):
            kept.append(test.longer(chunk))
            total += len(kept[-1])
            if total > cap:
                raise Crowded
        prefixes = torch.cat(kept)
    return prefixes


@dataclass(frozen=True, eq=False)
class _Test:
    """Whether prefixes lie in a span. A row of `adds` is what an option adds to a prefix's
    coordinates outside, to its weights and to its squared norm; those of a block start at `starts`.
    """

    span: Span
    adds: Tensor
    starts: Tensor

    @staticmethod
    def of(whole: Span, blocks: Sequence[Block]) -> _Test:
        projected = whole.on(torch.cat([block.places for block in blocks]))
        wide = torch.cat([projected.outside, projected.basis / projected.sizes], 1)
        adds = []
        start = 0
        for seen in (block.seen for block in blocks):
            part = wide[start : (start := start + seen.shape[1])]
            adds.append(torch.cat([seen @ part, seen.square().sum(1, keepdim=True)], 1))
        counts = torch.tensor([len(add) for add in adds], dtype=torch.int32)
        return _Test(projected, torch.cat(adds), (counts.cumsum(0) - counts).int())

    def longer(self, prefixes: Tensor) -> Tensor:
        """Prefixes (K, k + 1) in the span, made of prefixes (N, k) and one option more.

        Few coordinates reject most of them, so the others are computed for the rest alone.
        """
        free = self.span.free
        first = [*range(min(free, FIRST)), -1]
        few = self._sums(prefixes, first)[:, None] + self.adds[self.starts[-1] :, first]
        inside = torch.ones(few.shape[:2], dtype=torch.bool)
        if free:
            sizes = few[..., -1].sqrt().clamp_min(1e-300)
            norms = self.adds[:, free:-1].norm(dim=1)
            # No sum of options has a larger norm: a bound before the sums are known.
            most = sum(part.max() for part in torch.tensor_split(norms, self.starts[1:].long()))
            inside = few[..., :-1].norm(dim=2) <= self.span.allowed(most / sizes) * sizes
        old, new = inside.nonzero(as_tuple=True)
        longer = torch.cat([prefixes[old], new[:, None].int()], 1)
        if free and len(longer):
            sums = self._sums(longer, [*range(self.adds.shape[1])])
            sizes = sums[:, -1].sqrt().clamp_min(1e-300)
            allowed = self.span.allowed(sums[:, free:-1].norm(dim=1) / sizes)
            longer = longer[sums[:, :free].norm(dim=1) <= allowed * sizes]
        return longer

    def _sums(self, prefixes: Tensor, columns: list[int]) -> Tensor:
        """(N, len(columns)) what the options of prefixes (N, k) add together."""
        if not prefixes.shape[1]:
            return torch.zeros(len(prefixes), len(columns), dtype=torch.float64)
        at = prefixes + self.starts[: prefixes.shape[1]]
        adds = self.adds[:, columns].contiguous()
        return torch.nn.functional.embedding_bag(at, adds, mode="sum")


def prior_rows(row: SentRow, domain: TableDomain) -> Tensor:
    """(count, n) the prior-only baseline, repeated, with the known parts."""
    rows = domain.blind(public_images(row.observation)).double().cpu().repeat(row.count, 1)
    return rows if row.known is None else row.known.filled(rows)


def decoded(
    row: SentRow,
    seen: LayerView,
    prefixes: int,
) -> Answer:
    """The answer for one row of the update, from the layer `seen`.

    With known parts, if the span does not confirm the rows, a search without these parts and fits
    to the gradient compete with them.
    """
    if row.is_zero:
        return Answer(prior_rows(row, seen.domain), VANISHED)
    # Refuses optimizers whose update is no sum of gradients.
    summed(row.observation)
    if row.known is None:
        return _searched(row, seen, prefixes)
    try:
        answer = _searched(row, seen, prefixes)
    except NotApplicable as error:
        answer = Answer(prior_rows(row, seen.domain), error.reason)
        fit = Fit.of(row, *_groups(row, seen))
        if fit is None:
            raise
    else:
        fit = None if answer.problem is None else Fit.of(row, *_groups(row, seen))
    if fit is None:
        return answer
    # Known parts must not mislead: noise lets rows of other examples pass with them.
    with suppress(NotApplicable):
        other = _filled_in(row, row.known, seen, prefixes)
        answer = min(answer, other, key=lambda one: fit.cost(one.inputs)[0])
    blind = seen.domain.hard(prior_rows(row, seen.domain))
    found = (seen.domain.hard(answer.inputs) != blind).any(1)
    # The fit's noise may be an estimate: rows that the span gave stay then.
    stay = found & _noise_unknown(row)
    if stay.all():
        return answer
    fits = [fit.rows()]
    if found.any():
        fits.append(fit.rows(answer.inputs, found))
    fits = [torch.where(stay[:, None], answer.inputs, rows) for rows in fits]
    fitted = min(fits, key=lambda rows: fit.cost(rows)[0])
    cost, left = fit.cost(fitted)
    if cost >= fit.cost(answer.inputs)[0]:
        return answer
    return Answer(
        fitted, f"rows are estimates that the known columns allow ({answer.problem})", left
    )


def _filled_in(
    row: SentRow,
    known: KnownValues,
    seen: LayerView,
    prefixes: int,
) -> Answer:
    """The answer of a search without the known parts, which are put in at the end."""
    stranger = replace(row, observation=replace(row.observation, known=None))
    answer = _searched(stranger, seen, prefixes)
    said = "rows are those of a search without the known columns, which explain the update better"
    rows = known.filled(answer.inputs[paired(known, answer.inputs)])
    return Answer(rows, "; ".join(filter(None, (said, answer.problem))), answer.objective)


def _noise_unknown(row: SentRow) -> bool:
    """Whether a fit has to estimate the noise: errors of a quantization are not Gaussian."""
    weights = row.observation.weights
    return row.variance is None and (weights is None or bool(weights[row.at].all()))


def _searched(row: SentRow, seen: LayerView, prefixes: int) -> Answer:
    """The answer for one row of the update, from the span of a layer's gradient."""
    blind = prior_rows(row, seen.domain)
    span, bias = layer_span(row, seen.name)
    views, members = _groups(row, seen if bias else seen.unbiased())
    coefficients = views[0].coefficients
    if not span.rank:
        reason = f"no singular value of the layer's gradient stands out: {CAUSES}"
        return Answer(blind, reason)
    if span.rank > coefficients:
        raise NotApplicable(
            f"the gradient has rank {span.rank}, and categories fix at most {coefficients} of "
            "as many coefficients: any combination of them lies in the span"
        )
    try:
        chosen = [decode(span, view.levels, prefixes) for view in views]
    except Crowded:
        return Answer(blind, f"over {prefixes} prefixes lie in the span of {span.rank} rows")
    if not any(map(len, chosen)):
        return Answer(blind, f"no row of the table lies in the gradient's span: {CAUSES}")

    def rows(options: Iterable[tuple[int, Tensor]]) -> Survivors:
        return Survivors.of(row, span, [(views[k], some, k) for k, some in options])

    def split(
        each: Sequence[Tensor],
        keep: Callable[[Survivors], Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        kept = [
            torch.cat([keep(rows([(k, part)])) for part in torch.split(some, AT_ONCE * 64)])
            for k, some in enumerate(each)
        ]
        pairs = [(some[at], some[~at]) for some, at in zip(each, kept, strict=True)]
        return [inside for inside, _ in pairs], [outside for _, outside in pairs]

    # This test is free; the next ones run the model.
    valid, others = split(chosen, Survivors.valid)
    passed, failed = split(valid, Survivors.passed)
    tried = sum(map(len, valid))
    # Rows with odd numbers may be real, and are needed to fill the span.
    if rows(enumerate(passed)).dependent():
        tried = sum(map(len, chosen))
        more, others = split(others, Survivors.passed)
        passed = [torch.cat(pair) for pair in zip(passed, more, strict=True)]
    sure = sum(map(len, passed))
    room = max(0, AT_ONCE * 64 // len(views) - sure)
    rest = [torch.cat(pair)[:room] for pair in zip(failed, others, strict=True)]
    survivors = rows([*enumerate(passed), *enumerate(rest)])
    return survivors.answer(sure, tried, blind, members)


def _groups(row: SentRow, seen: LayerView) -> tuple[list[LayerView], list[Tensor]]:
    """The examples of a row of the update by their known parts: the layer with these parts given,
    and the numbers (k,) of the examples. Without known parts all are one group.
    """
    known = row.known
    if known is None:
        return [seen], [torch.arange(row.count)]
    whole = known.filled(torch.zeros(row.count, *seen.domain.shape))
    group = torch.unique(whole, dim=0, return_inverse=True)[1]
    members = [(group == k).nonzero()[:, 0] for k in range(int(group.max()) + 1)]
    return [seen.given(whole[some[0]], known.mask) for some in members], members


def layer_span(row: SentRow, name: str) -> tuple[Span, bool]:
    """The row space of a linear layer's gradient in one row of the update, and whether the bias is
    its last coordinate. Units with a withheld weight have zero rows in `left`.
    """
    task = row.task
    weights = row.observation.weights
    sent = torch.ones_like(row.values) if weights is None else weights[row.at]
    trust = joint(task, name, sent) > 0
    has_bias = parameter(name, "bias") in task.names
    bias = has_bias and bool(trust[:, -1].any())
    width = trust.shape[1] - (has_bias and not bias)
    whole = trust[:, :width].all(1)
    if int(whole.sum()) < row.count:
        raise NotApplicable(
            f"the layer {name!r} has {int(whole.sum())} units without a withheld weight; the span "
            f"of {row.count} rows needs as many"
        )

    def part(flat: Tensor) -> Tensor:
        return joint(task, name, flat)[whole, :width]

    gradient = part(row.values)
    rounding = ROUNDING * float(torch.finfo(row.values.dtype).eps)
    noise = 0.0 if row.variance is None else float(part(row.variance).mean()) ** 0.5
    # Noise hides a multiple of the weights.
    if not noise:
        gradient = _plain(gradient, part(task.parameters), row.count, rounding)
    span = rows_span(gradient, row.count, noise, rounding)
    left = torch.zeros(len(whole), span.rank, dtype=torch.float64)
    left[whole] = span.left
    return replace(span, left=left), bias


def _plain(
    gradient: Tensor,
    held: Tensor,
    count: int,
    rounding: float,
) -> Tensor:
    """A gradient (units, d) less a multiple of the weights `held`, if this lowers its rank.

    SGD with weight decay adds one multiple of the first weights, and multiples of rows that the
    steps saw. The median eigenvalue of the pencil estimates it. Least squares on the directions
    that no row has refines it.
    """
    values = torch.linalg.svdvals(gradient)
    # Too few directions are free of rows to see the decay in them.
    if len(values) <= 2 * count or float(values[count]) <= rounding * float(values[0]):
        return gradient
    # Weight decay often leaves the bias out.
    for weights in (held, torch.cat([held[:, :-1], torch.zeros_like(held[:, -1:])], 1)):
        inverse = torch.linalg.pinv(weights)
        # Both products have the same nonzero eigenvalues; the smaller one is taken.
        tall = len(gradient) > gradient.shape[1]
        eigenvalues = torch.linalg.eigvals(inverse @ gradient if tall else gradient @ inverse)
        decay = float(eigenvalues.real.median())
        for _ in range(REFINED):
            empty = torch.linalg.svd(gradient - decay * weights).Vh[count:].T
            along = weights @ empty
            decay = float(((gradient @ empty) * along).sum() / along.square().sum())
        less = gradient - decay * weights
        if float(torch.linalg.svdvals(less)[count]) < values[count] / FALL:
            return less
    return gradient


@dataclass(frozen=True, eq=False)
class Survivors:
    """Rows (K, n) of the table inside a span, and what is known of each.

    `weights` (K, r) are their combinations of the span's rows, and `points` (K, r) the rows in
    orthonormal coordinates. `group` (K,) numbers the known parts that each has. `determined` says
    that no other combinations exist.
    """

    row: SentRow
    seen: LayerView
    span: Span
    rows: Tensor
    weights: Tensor
    points: Tensor
    group: Tensor
    determined: bool

    @staticmethod
    def of(
        row: SentRow,
        span: Span,
        options: Sequence[tuple[LayerView, Tensor, int]],
    ) -> Survivors:
        """The rows with chosen options (K, len(levels)) of a layer, in groups by number."""
        rows = []
        weights = []
        determined = True
        for seen, chosen, _ in options:
            projected = span.on(torch.cat([block.places for block in seen.levels]))
            values = [b.seen[k] for b, k in zip(seen.levels, chosen.T, strict=True)]
            back = projected.basis / projected.sizes
            weights.append(torch.cat(values, 1) @ back @ projected.left.T)
            rows.append(seen.rows(chosen, weights[-1] @ span.scaled))
            # As many directions as the span has: then the categories fix every coefficient.
            determined &= projected.rank == span.rank
        group = [torch.full((len(chosen),), k) for _, chosen, k in options]
        combined = torch.cat(weights)
        return Survivors(
            row,
            options[0][0],
            span,
            torch.cat(rows),
            combined,
            combined * span.sizes,
            torch.cat(group),
            determined,
        )

    def passed(self) -> Tensor:
        """(K,) whether rows pass both tests; all of them where numbers are not determined."""
        passed = torch.ones(len(self.rows), dtype=torch.bool)
        if self.determined:
            passed = self._later()
            passed[passed.clone()] = self._apart(passed.nonzero()[:, 0])
        return passed

    def dependent(self) -> bool:
        """Whether the rows span less than the gradient does."""
        least = LIKE * float(self.points.norm())
        return int(torch.linalg.matrix_rank(self.points, tol=least)) < self.span.rank

    def answer(
        self,
        sure: int,
        tried: int,
        blind: Tensor,
        members: Sequence[Tensor] | None = None,
    ) -> Answer:
        """Rows for all examples: of the first `sure`, which passed the tests among `tried`, then of
        the others, repeats, baselines. Examples `members` (k,) of a group get rows of the group.
        """
        rank = self.span.rank
        count = self.row.count
        every = torch.arange(len(self.rows))
        members = [torch.arange(count)] if members is None else members
        kept, basis = self._kept(every[:sure], every[:0], self.points[:0], members)
        good = len(kept)
        if good < rank:
            kept, basis = self._kept(every[sure:], kept, basis, members)
        dual = torch.linalg.pinv(self.points[kept])
        column = self.span.left * self.span.sizes @ dual
        repeats = kept[column.norm(dim=0).argsort(descending=True)]
        rows = blind.clone()
        for k, places in enumerate(members):
            own = kept[self.group[kept] == k]
            again = repeats[self.group[repeats] == k].repeat(count)[: count - rank]
            filled = self.rows[torch.cat([own, again])][: len(places)]
            rows[places[: len(filled)]] = filled
        sizes = self.span.sizes
        rest = torch.diag(sizes) @ (torch.eye(rank) - basis.T @ basis)
        left = float(rest.norm() / sizes.norm())
        bound = torch.maximum(CLEAR * column.abs().amax(0), 6 * self.span.noise * dual.norm(dim=0))
        wrong = bool((column.abs() * self._off(kept, MOVES[-1]).T > bound).any())
        said = []
        if rank < count:
            said.append(
                f"the gradient has rank {rank}, not {count}: rows repeat or have no gradient, and "
                "how often each occurs is not known"
            )
        if int(self.span.left.any(1).sum()) <= rank + 1:
            said.append("hardly more units than rows have a gradient: little confirms the span")
        if not self.determined:
            said.append("several rows have the same categories: their numbers are not determined")
        if good < rank:
            said.append(f"only {good} of {rank} rows passed the tests")
        elif sure > rank:
            said.append(f"{sure} rows passed for {rank}: some may be mixtures of others")
        elif tried > rank and self.seen.task.plan.steps > 1:
            said.append(f"{tried} rows fit, and local steps may mislead the test that chose {rank}")
        elif wrong:
            said.append("units have a gradient that all rows leave off: some are mixtures")
        loud = self.span.floor > NOISY * float(self.span.sizes.max())
        if loud or self.row.variance is not None:
            blurred = ", ".join(self._blurred(kept)) or "no column"
            said.append(f"rows are estimates under noise, which exceeds the tolerance of {blurred}")
        return Answer(self.seen.domain.hard(rows), "; ".join(said) or None, left)

    def _kept(
        self,
        at: Tensor,
        kept: Tensor,
        basis: Tensor,
        members: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Positions of linearly independent rows: those kept and more of `at`, at most as many of a
        group as it has examples; and the basis (k, r) of them.
        """
        order = self._order(at)
        # Few candidates first: the rows of other groups can be others.
        counts = self.group[order].bincount(minlength=len(members))
        for k in counts.argsort(stable=True).tolist():
            mine = order[self.group[order] == k]
            free = len(members[k]) - int((self.group[kept] == k).sum())
            most = min(self.span.rank, len(basis) + free)
            more, basis = independent(self.points[mine], most, LIKE, basis)
            kept = torch.cat([kept, mine[more]])
        return kept, basis

    def _blurred(self, kept: Tensor) -> list[str]:
        """The columns whose numbers the noise may move beyond their tolerance, in rows `kept`."""
        most = float(self.weights[kept].norm(dim=1).max())
        domain = self.seen.domain
        spread = 2 * self.span.noise * most
        column = {start: c for c, start, _ in domain.placed}
        return [
            column[b.start].name
            for b in self.seen.numbers
            if spread * float(b.options[-1] - b.options[0]) * column[b.start].unit_length
            > column[b.start].allowed * float((b.seen[-1] - b.seen[0]).norm())
        ]

    def _off(self, at: Tensor, moves: Sequence[int]) -> Tensor:
        """(k, units) whether a unit has no influence on the model's output for a row.

        After several local steps, it has none at other weights on the line of the change, either.
        """
        task = self.seen.task
        update = self.row.observation.update
        name = self.seen.name
        if task.plan.steps == 1:
            return silent(task, name, self.rows[at], task.parameters)
        clients = len(self.row.observation.cohort) if update.unit is Unit.COHORT else 1
        step = task.plan.learning_rate / clients * self.row.values.to(task.parameters)
        each = [silent(task, name, self.rows[at], task.parameters - m * step) for m in (0, *moves)]
        return torch.stack(each).all(0)

    def _apart(self, at: Tensor) -> Tensor:
        """(k,) whether rows lie outside the row space of the gradients of units that are off.

        Local steps may switch a unit on for a while. So units near their threshold are left out in
        turn. A test counts with more than twice as many units as the rank; no test rejects no row.
        """
        outside = torch.zeros(len(at), dtype=torch.bool)
        tested = torch.zeros(len(at)).bool()
        still = self.seen.task.plan.steps == 1
        for moves in MOVES[: 1 if still else None]:
            for part in torch.split((~outside).nonzero()[:, 0], AT_ONCE):
                off = self._off(at[part], moves)
                counts = (off.sum(1) > 2 * self.span.rank) | still
                tested[part] |= counts
                outside[part] = counts & (self._distance(off, at[part]) > APART)
        return outside | ~tested

    def _distance(self, off: Tensor, at: Tensor) -> Tensor:
        """(k,) relative distance of rows from the row space of the gradients of the units `off`."""
        units = self.span.left * self.span.sizes
        rank = self.span.rank
        outer = (units[:, :, None] * units[:, None]).flatten(1)
        values, vectors = torch.linalg.eigh((off.double() @ outer).view(-1, rank, rank))
        # The product squares singular values, and so their rounding.
        least = max(self.span.floor, ROOT * float(self.span.sizes.norm())) ** 2
        points = torch.nn.functional.normalize(self.points[at], dim=1)
        along = (points[:, None] @ vectors)[:, 0]
        distance: Tensor = torch.where(values > least, 0, along).norm(dim=1)
        return distance

    def _later(self) -> Tensor:
        """(K,) whether a row's inputs of later layers lie in the row spaces of their gradients; all
        do after several local steps.
        """
        task = self.seen.task
        inside = torch.ones(len(self.rows), dtype=torch.bool)
        if task.plan.steps > 1:
            return inside
        inputs = linear_inputs(task, self.rows)
        for name in [*inputs][[*inputs].index(self.seen.name) + 1 :]:
            try:
                span, bias = layer_span(self.row, name)
            except NotApplicable:
                continue
            # A lower rank means that the gradients of some rows do not reach this layer.
            if span.rank >= self.span.rank:
                wide = torch.cat([inputs[name], torch.ones(len(self.rows), int(bias))], 1)
                away, allowed = span.far(wide)
                inside &= away <= allowed
        return inside

    def valid(self) -> Tensor:
        """(K,) whether numbers are inside their ranges, and whole where they must be."""
        domain = self.seen.domain
        valid = torch.ones(len(self.rows), dtype=torch.bool)
        for column, start, stop in domain.placed:
            if column.categorical:
                continue
            value = self.rows[:, start] * column.unit_length + column.origin
            slack = OUT * (column.high - column.low)
            right = (value >= column.low - slack) & (value <= column.high + slack)
            if column.whole:
                right &= (value - value.round()).abs() <= BROKEN
            valid &= right | (self.rows[:, start + 1 : stop] > 0.5).any(1)  # or missing
        return valid

    def _order(self, at: Tensor) -> Tensor:
        """Sort positions of rows: valid ones first, of these the ones near public rows."""
        order = at[self.valid()[at].long().argsort(descending=True, stable=True)]
        public = public_images(self.row.observation)
        if public is None:
            return order
        near = order[:AT_ONCE]
        domain = self.seen.domain
        misses = domain.distances(domain.hard(self.rows[near]), public[:PUBLIC]).amin(1)
        rank = misses + len(domain.columns) * ~self.valid()[near]
        return torch.cat([near[rank.argsort(stable=True)], order[AT_ONCE:]])
