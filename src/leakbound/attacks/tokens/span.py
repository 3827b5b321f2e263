"""Token span: sequences of tokens from the spans of two layers' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import scipy
import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.adaptive import not_sgd
from leakbound.attacks.base import Answer, Attack, SentRow, each_row, rows_of, seen_task, summed
from leakbound.attacks.blind import VANISHED
from leakbound.attacks.pace import is_over
from leakbound.attacks.span import Span, Tolerance
from leakbound.attacks.tokens.layers import (
    OUT_OF_TIME,
    SAME,
    Readers,
    chosen,
    completed,
    dictionary,
    extended,
    filled,
    inputs_of,
    probe,
    readers,
    shifted,
    token_domain,
    whole,
)
from leakbound.attacks.tokens.rows import TokenRows
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.domains import TokenDomain
from leakbound.domains.tokens import is_padding
from leakbound.randomness import permutation, uniform

PREFIXES = 4096
RESTARTS = 8
SWEEPS = 8
AT_ONCE = 2048
CONFIRM = 3
LEAST = 2e-5
MOST = 0.02
MOVED = 0.02
ROUNDED = 0.2
NEAR = 0.2
CHANCE = 1e-3
EDGE = 8.0
GAP = 3.0
SLACK = 3.0
ABOVE = 1.1
"""Relative distance from a span that rounding allows; largest one that noise may, that several
local steps may, and that the rounding of stored weights may, whose size is known; that which a
second test in float64 looks at. Chance that noise alone moves a point farther than allowed, and
that other points pass. Multiple of the edge of rounding errors from which a singular value counts;
smallest ratio of singular values around noise that is not known; factor for errors of rounding, as
they depend on each other. The edge is a limit of large matrices: in small ones, noise exceeds it
by a few percent.
"""


@dataclass(frozen=True)
class TokenSpan(Attack):
    """Find sequences of tokens whose layer inputs lie in the spans of the layers' gradients.

    The gradient of a linear layer is a sum over tokens, so its rows span the layer's inputs; those
    of layers and of low-rank adapters that get one input count together. The inputs of the first
    attention layer depend on one token and its place. The attack tests all of them, which gives
    candidates for every place. A place has all tokens as candidates that share a component of the
    token-place graph of the batch with it: this test finds the set of tokens.

    The inputs of a later layer depend on several tokens. In a causal model these are the tokens
    before. The attack extends prefixes by the candidates, and keeps those whose newest input lies
    in the span. In an encoder with one example, each place has one candidate. With several, the
    attack changes one token at a time, while the mean distance from the span falls. This finds few
    sequences if the batch is larger than 2. Known tokens are the only candidates of their places,
    and examples with different ones are searched apart.

    Singular values above the edge of the known noise, or of rounding, are the span's rank. Where
    weights are stored, each row of a gradient counts in units of its own rounding. With noise, a
    point may be as far from the span as its weights and the noise say (chi-square).

    `problem` is None only if every place of every sequence passes, as many sequences are found as
    the batch has, and a span has as many directions as they have distinct points. The last token of
    a sequence has no gradient in a causal model that is scored by the next token: it is taken from
    known labels, or from the gradient of the output layer.

    Args:
        prefixes: the largest number of prefixes that the search keeps.
        restarts: for encoders, the number of searches for each example.

    Assumptions: fewer distinct prefixes than the layer is wide, no dropout before the layer, and
        padding on the domain's side. After several local steps, later layers get other inputs:
        points may be farther from the spans, and the answer is not certain.

    Raises:
        NotApplicable: no tokens, an optimizer other than SGD, no trained linear layer before tokens
            are mixed, or withheld entries in it.

    Source: Petrov et al. 2024 (DAGER) for the span test and the search by prefixes. The rank law,
        the levels for noise, the layer that is tested, the output layer's last token and the test
        of chance are this project's.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.domains import TokenDomain
        >>> class Small(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.words, self.places = torch.nn.Embedding(9, 8), torch.nn.Embedding(3, 8)
        ...         self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        ...         self.head = torch.nn.Linear(8, 2)
        ...     def forward(self, ids):
        ...         held = self.words(ids) + self.places(torch.arange(3))
        ...         return self.head(self.layer(held).mean(1))
        >>> batch = lb.Batch(torch.tensor([[7, 2, 7]]), torch.tensor([1]))
        >>> task = lb.Task.of(Small().eval(), domain=TokenDomain(9, 3))
        >>> sources = [lb.stream(0, "client"), lb.stream(0, "cohort")]
        >>> seen = lb.play(task, [batch], lb.defenses.NoDefense(), sources).observation
        >>> TokenSpan()(seen, lb.stream(0)).inputs
        tensor([[7, 2, 7]])
    """

    prefixes: int = PREFIXES
    restarts: int = RESTARTS

    def __post_init__(self) -> None:
        check.count(prefixes=self.prefixes, restarts=self.restarts)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        scene = _Scene.of(observation)
        observation = scene.observation

        def one(row: SentRow) -> Answer:
            if row.is_zero:
                return Answer(filled(row, ()), VANISHED)
            options, placed = scene.listed(row)
            search = _Search(
                scene,
                row,
                _groups(row, options),
                placed,
                self,
                generator,
            )
            held = search.tokens
            if not held:
                said = (
                    "no token passes the span test: noise, dropout, more tokens than width, or an "
                    "update that is not that of SGD"
                )
                return Answer(filled(row, scene.known()), said)
            sequences, left, problem = search.run()
            rows = filled(row, held)
            if len(sequences):
                rows = sequences[torch.arange(row.count) % len(sequences)]
            said = "; ".join(dict.fromkeys(filter(None, [scene.problem, problem])))
            if problem and not len(sequences):
                said = f"{len(held)} tokens are found, but not their order; {said}"
            return Answer(rows, said or None, left)

        return each_row(observation, scene.task, one)

    def tokens(self, observation: Observation) -> tuple[int, ...]:
        """The tokens in any row of the update that pass the first layer's test, in order."""
        scene = _Scene.of(observation)
        rows = rows_of(scene.observation, scene.task)
        each = (scene.listed(row)[0] for row in rows if not row.is_zero)
        return tuple(sorted({k for options in each for tokens in options for k in tokens.tolist()}))


# --- the span of a gradient --------------------------------------------------------------------


TOLERANCE = Tolerance(
    LEAST, MOST, lambda free: float(scipy.stats.chi2.isf(CHANCE, free)) ** 0.5 if free else 0.0
)


def span_of(
    gradient: Tensor,
    noise: float | None,
    rounding: float,
    most: int | None = None,
) -> Span:
    """The span of singular values above the edge of noise, or of relative rounding errors.

    If all of them are, there is noise that is not known: those before the largest gap count. At
    most `most` count, up to the last gap: where gradients of examples nearly cancel, rounding is
    that of the terms and not of their sum.

    Example:
        >>> span = span_of(torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]), None, 1e-7)
        >>> span.rank, span.far(torch.eye(3))[0].tolist()
        (2, [0.0, 0.0, 1.0])
    """
    known = noise or 0.0
    # Rounding errors are nearly as independent as noise: EDGE covers the difference.
    least = EDGE * rounding * float(gradient.double().square().mean().sqrt())

    def ranked(
        s: Tensor,
        edge: float,
    ) -> int:
        rank = int((s > max(known, least) * edge).sum())
        # Nothing lies below the edge: undeclared noise fills all directions.
        if not noise and rank == len(s) > 2:
            ratios = s[:-1] / s[1:].clamp_min(1e-300)
            rank = int(ratios.argmax()) + 1 if float(ratios.max()) > GAP else len(s)
        if most is not None and rank > most:
            gaps = (s[:most] > GAP * s[1 : most + 1]).nonzero()[:, 0].tolist()
            rank = gaps[-1] + 1 if gaps else most
        return rank

    span = Span.of(gradient, ranked, TOLERANCE)
    left = span.noise if known > least else SLACK * span.noise
    return replace(span, noise=max(known, left))


def stored_span(
    gradient: Tensor,
    spread: Tensor,
    rounding: float,
    most: int,
) -> Span:
    """The span of a gradient (units, d) that stored weights rounded by deviations `spread`.

    Each row counts in units of its own rounding, which does not change their span. Then singular
    values above the edge of noise of deviation 1 count, if there are at most `most`. Otherwise
    those before the largest gap do: errors of rounding depend on each other, or a gradient is
    smaller than half a unit. `rounding` is the relative error of the computation.

    Source: this project; the edge is that of Marchenko and Pastur.

    Example:
        >>> gradient = torch.outer(torch.arange(1.0, 9.0), torch.ones(6))
        >>> span = stored_span(gradient.round(decimals=2), torch.full((8, 6), 0.003), 1e-7, 4)
        >>> span.rank
        1
    """
    seen = gradient.any(1)
    gradient = gradient[seen]
    unit = spread[seen].square().mean(1)
    unit += (EDGE * rounding) ** 2 * gradient.square().mean(1)

    def ranked(s: Tensor, edge: float) -> int:
        above = int((s > ABOVE * edge).sum())
        if 0 < above <= min(most, len(s) - 2):
            return above
        ratios = (s[:-1] / s[1:].clamp_min(1e-300))[:most]
        if not len(ratios) or float(ratios.max()) <= GAP:
            return len(s)
        return int(ratios.argmax()) + 1

    span = Span.of(gradient / unit.sqrt()[:, None], ranked, replace(TOLERANCE, most=ROUNDED))
    return replace(span, noise=SLACK * span.noise)


# --- what is known of a model and its update ---------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Scene:
    """The layers to test, and what holds for every row of the update."""

    observation: Observation
    task: Task
    domain: TokenDomain
    first: Readers
    later: tuple[Readers, ...]
    problem: str | None

    @staticmethod
    def of(observation: Observation) -> _Scene:
        observation = summed(observation)
        task = seen_task(observation)
        domain = token_domain(task)
        first, later = chosen(readers(task))
        later = later[: 1 + CONFIRM]
        for group in (first, *later):
            weights = [name for name, _ in group.weights]
            if not whole(observation, task, weights):
                raise NotApplicable(f"the update withholds entries of the layer {weights[0]!r}")
        if (reason := not_sgd(observation)) is not None:
            raise NotApplicable(reason)
        problem = None
        if not task.plan.is_gradient:
            problem = "several local steps change what layers get, so their spans are not exact"
        return _Scene(
            observation,
            task,
            domain,
            first,
            later,
            problem,
        )

    def span(
        self,
        group: Readers,
        row: SentRow,
    ) -> Span:
        """The span of a group's gradient in a row, of at most as many directions as tokens."""
        span = self._span(group, row)
        if group.mixes and not self.task.plan.is_gradient:
            # Its inputs move with the steps, as layers before it are trained.
            return replace(span, tolerance=replace(span.tolerance, least=MOVED))
        return span

    def _span(
        self,
        group: Readers,
        row: SentRow,
    ) -> Span:
        part = partial(group.gradient, self.task)
        gradient = part(row.values)
        rounding = float(torch.finfo(row.values.dtype).eps)
        most = row.count * self.domain.length * self.task.plan.steps
        known = None
        if row.variance is not None:
            known = float(part(row.variance).mean().sqrt())
        elif (spread := row.rounding(part)) is not None:
            return stored_span(gradient, spread, rounding, most)
        return span_of(gradient, known, rounding, most)

    def known(self) -> list[int]:
        """The tokens whose rows of the word embedding have a gradient; empty if it is frozen."""
        try:
            return [*TokenRows().tokens(self.observation)]
        except NotApplicable:
            return []

    def listed(self, row: SentRow) -> tuple[tuple[Tensor, ...], bool]:
        """The candidates (K,) of every place that the first layer's test leaves, and whether places
        differ at this layer.

        If points pass it by chance, they are the tokens that the word embedding shows.
        """
        domain = self.domain
        span = self.span(self.first, row)
        known = self.known()
        # The word embedding often shows the tokens: then few points are tested.
        tokens = [k for k in known or range(domain.vocabulary) if k != domain.padding]
        name = self.first.names[0]
        length = domain.length
        _, some = next(dictionary(self.task, name, length, tokens[:1]))
        # Without positions at this layer, one place stands for all.
        moved = (some[0, 0] - some[0]).norm(dim=-1).max()
        placed = length > 1 and float(moved) > SAME * float(some.norm(dim=-1).mean())
        places = length if placed else 1
        # Random tokens would pass: the test would only add false candidates.
        if span.luck(len(tokens) * places) > CHANCE:
            options = torch.tensor(known, dtype=torch.int64)
            return (options,) * length, placed
        passing: list[list[Tensor]] = [[] for _ in range(places)]
        for part, points in dictionary(self.task, name, places, tokens):
            passed = _inside(span, points.cpu())
            for place, inside in enumerate(passed.T):
                passing[place].append(part[inside])
        each = tuple(torch.cat(parts) for parts in passing)
        return each if placed else each * length, placed


def _inside(
    span: Span,
    points: Tensor,
) -> Tensor:
    """(...,) whether points (..., d) lie in a span; far ones are sorted out in their own type."""
    basis = span.basis.to(points)
    square = points.square().sum(-1)
    # Almost all points are far, and float32 is enough to see it.
    near = square - (points @ basis).square().sum(-1) <= NEAR**2 * square
    passed = torch.zeros(near.shape, dtype=torch.bool)
    if near.any():
        away, allowed = span.far(points[near])
        passed[near] = away <= allowed
    return passed


# --- the search for sequences ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Alike:
    """Examples with the same known tokens: the candidates (K,) of every place, whether a place is
    known (n,), and how many examples there are.
    """

    options: tuple[Tensor, ...]
    known: tuple[bool, ...]
    count: int


def _groups(
    row: SentRow,
    options: tuple[Tensor, ...],
) -> list[_Alike]:
    """The examples of a row by their known tokens; all are one group if none is known."""
    known = row.known
    if known is None:
        return [_Alike(options, (False,) * len(options), row.count)]
    mask = known.mask.clone()
    if shifted(row.task):
        # The last token has no gradient, so the search ends before it.
        mask[-1] = False
    blank = torch.zeros(row.count, len(options), dtype=torch.int64)
    each, counts = torch.unique(
        known.filled(blank) * mask,
        dim=0,
        return_counts=True,
    )
    given = tuple(mask.tolist())
    return [
        _Alike(
            tuple(
                whole[place, None] if given[place] else tokens
                for place, tokens in enumerate(options)
            ),
            given,
            count,
        )
        for whole, count in zip(each, counts.tolist(), strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Search:
    """The search for the sequences behind a row of the update, with the scene's candidates."""

    scene: _Scene
    row: SentRow
    groups: list[_Alike]
    placed: bool
    attack: TokenSpan
    generator: torch.Generator

    @property
    def tokens(self) -> list[int]:
        """The candidates of all places, in order."""
        each = (options for group in self.groups for options in group.options)
        return sorted({token for options in each for token in options.tolist()})

    def run(self) -> tuple[Tensor, float, str | None]:
        """Sequences (K, n), the largest distance of their places, and what is not known."""
        scene = self.scene
        single = all(len(options) <= 1 for options in self.groups[0].options)
        if self.row.count == 1 and single and self.placed:
            return self._alone()
        if not self.tests:
            return self._none("the gradients of later layers span all directions, or none")
        if scene.later[0].causal:
            return self._prefixes()
        if scene.domain.padding is not None:
            return self._none("order undecided: the lengths of the sequences are not known")
        return self._descend()

    @cached_property
    def tests(self) -> list[tuple[str, Span]]:
        """The modules behind mixed places whose spans are tested, in the order of their calls.

        All but the first confirm what passed it. If the gradient does not reach all places, as in
        the last block of a classifier, a layer's span has fewer directions, and it is left out.
        """
        tests: list[tuple[str, Span]] = []
        for group in self.scene.later:
            span = self.scene.span(group, self.row)
            least = tests[0][1].rank if tests else 1
            # A norm takes one direction from all points, so a single free one tests nothing.
            if span.free >= 2 and span.rank >= least:
                tests.append((group.names[0], span))
        return tests

    def _tested(
        self,
        sequences: Tensor,
        *,
        newest: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(N,) whether sequences (N, n) pass every test, and their largest distance at the first.

        `newest`: only their newest places are looked at.
        """
        domain = self.scene.domain
        passed = torch.ones(len(sequences), dtype=torch.bool)
        worst = torch.zeros(len(sequences))
        for k, (name, span) in enumerate(self.tests):
            left = passed.nonzero()[:, 0]
            if not len(left):
                break
            away, allowed = span.far(self._points(name, sequences[left], newest=newest))
            inside = away <= allowed
            if not newest:
                if domain.padded_before:
                    # Whether padding has a gradient depends on the labels.
                    blank = is_padding(domain, sequences[left])
                    away = away.masked_fill(blank, 0.0)
                    inside = inside | blank
                away = away.amax(1)
                inside = inside.all(1)
            passed[left] = inside
            if not k:
                worst = away
        return passed, worst

    def _lucky(self, tests: int) -> list[str]:
        """What is wrong if so many random points could pass all tests."""
        chance = float(tests)
        # Every test has to pass, so the chances multiply.
        for _, span in self.tests:
            chance *= span.luck(1)
        return [] if chance <= CHANCE else ["other sequences may pass the spans' tests by chance"]

    def _none(self, said: str) -> tuple[Tensor, float, str]:
        return (
            torch.zeros(0, self.scene.domain.length, dtype=torch.int64),
            float("nan"),
            said,
        )

    def _points(
        self,
        name: str,
        sequences: Tensor,
        *,
        newest: bool = False,
    ) -> Tensor:
        """(N, n, d) what the module gets for sequences (N, n), or (N, d) for the newest places."""
        parts = []
        device = self.scene.task.parameters.device
        size = max(1, AT_ONCE // max(1, sequences.shape[1]))
        for part in torch.split(sequences, size):
            seen = inputs_of(self.scene.task, name, part.to(device)).cpu()
            parts.append(seen[:, -1] if newest else seen)
        return torch.cat(parts)

    def _alone(self) -> tuple[Tensor, float, str | None]:
        """One example, whose places have one candidate each."""
        domain = self.scene.domain
        options = self.groups[0].options
        start = 0
        if domain.padded_before:
            start = next(place for place, tokens in enumerate(options) if len(tokens))
            options = options[start:]
        length = sum(len(tokens) > 0 for tokens in options)
        if not all(len(tokens) for tokens in options[:length]):
            return self._none("places without a candidate lie between others")
        prefix = torch.cat(options[:length])
        if domain.padded_before:
            prefix = self._last(prefix) if self.movable else self._behind(start, prefix)
        (sequence,), said = self._completed([prefix])
        left = float("nan")
        if self.tests:
            passed, away = self._tested(prefix[None])
            left = float(away)
            said += [] if passed else ["a later layer does not confirm the order"]
        ends_early = len(prefix) + shifted(self.scene.task) < domain.length
        if ends_early and (domain.padding is None or domain.padded_before):
            said.append(f"only {length} of {domain.length} places have a candidate")
        return sequence[None], left, "; ".join(said) or None

    @cached_property
    def movable(self) -> bool:
        """Whether padding before a sequence changes nothing that a layer gets of it.

        This holds for positions that are relative, or that count from the sequence's start.
        """
        domain = self.scene.domain
        if domain.padding is None:
            return True
        words = probe(domain)[:, : max(1, domain.length // 2)]
        moved = self._behind(domain.length - words.shape[1], words[0])[None]
        name = self.tests[0][0] if self.tests else self.scene.first.names[0]
        alone, behind = (self._points(name, ids, newest=True) for ids in (words, moved))
        return float((alone - behind).norm()) <= SAME * float(alone.norm())

    def _behind(self, pads: int, row: Tensor) -> Tensor:
        """A row (L,) behind so many places of padding."""
        return torch.cat([row.new_full((pads,), self.scene.domain.padding or 0), row])

    def _last(self, row: Tensor) -> Tensor:
        """A row (L,) behind the padding that moves it to the last places with a gradient."""
        last = self.scene.domain.length - shifted(self.scene.task)
        return self._behind(max(0, last - len(row)), row)

    def _words(self, row: Tensor) -> Tensor:
        """A row without its padding."""
        return row[~is_padding(self.scene.domain, row)]

    def _extended(
        self,
        group: _Alike,
        last: int,
    ) -> tuple[list[Tensor], float, int] | str:
        """The prefixes of a group that may be sequences, up to the place `last`; their largest
        distance and the number of those tested. Or why the search ended.
        """
        before = self.scene.domain.padded_before
        once = not before or (self.movable and not any(group.known))
        ended: list[Tensor] = []
        worst = 0.0
        tests = 0
        for start in range(1 if once else last):
            found = self._started(
                group,
                start,
                last,
            )
            if isinstance(found, str):
                return found
            rows, away, tested = found
            ended += rows
            worst = max(worst, away)
            tests += tested
        if before and once:
            ended = [*map(self._last, ended)]
        return self._whole(ended, last), worst, tests

    def _started(
        self,
        group: _Alike,
        start: int,
        last: int,
    ) -> tuple[list[Tensor], float, int] | str:
        """The prefixes of a group that start at a place, behind padding, and that no candidate
        extends, or that reach the place `last`. The rest as `_extended`.
        """
        domain = self.scene.domain
        alive = self._behind(start, torch.zeros(0, dtype=torch.int64))[None]
        ended: list[Tensor] = []
        worst = 0.0
        tests = 0
        sure = True
        for place in range(start):
            sure &= group.known[place]
            if group.known[place] and int(group.options[place]) != domain.padding:
                return [], worst, tests
        for place, options in enumerate(group.options[start:last], start):
            if is_over():
                return OUT_OF_TIME
            sure &= group.known[place]
            if sure and int(options[0]) != domain.padding:
                # What the attacker knows from the start on needs no test.
                alive = torch.cat([alive, options[None]], 1)
                continue
            if domain.padded_before:
                options = options[~is_padding(domain, options)]
            longer = torch.cat(
                [alive.repeat_interleave(len(options), 0), options.repeat(len(alive))[:, None]], 1
            )
            if not len(longer):
                break
            kept, away = self._tested(longer, newest=True)
            tests += len(longer)
            goes_on = kept.reshape(len(alive), -1).any(1)
            # What no token extends may be a whole sequence before padding.
            ended += [*alive[~goes_on]]
            if kept.any():
                worst = max(worst, float(away[kept].max()))
            alive = longer[kept]
            if len(alive) > (most := self.attack.prefixes):
                return f"more than {most} prefixes pass the later layers' tests"
        return [row for row in [*ended, *alive] if len(row) > start], worst, tests

    def _prefixes(self) -> tuple[Tensor, float, str | None]:
        """Sequences of a causal model, by prefixes."""
        domain = self.scene.domain
        ended: list[Tensor] = []
        worst = 0.0
        tests = 0
        last = domain.length - shifted(self.scene.task)
        many = False
        for group in self.groups:
            found = self._extended(group, last)
            if isinstance(found, str):
                return self._none(found)
            rows, away, tested = found
            many |= len(rows) > group.count
            ended += rows
            worst = max(worst, away)
            tests += tested
        if not ended:
            return self._none("no sequence passes the later layers' tests")
        sequences, said = self._completed(ended)
        said += self._lucky(tests)
        constant = not self.placed and any(_is_constant(self._words(row)) for row in ended)
        if domain.padding is not None and constant:
            said.append("the lengths of the sequences are not certain")
        distinct = set[tuple[int, ...]]()
        for row in ended:
            words = self._words(row)
            start = 0 if self.movable else len(row) - len(words)
            for k in range(1, len(words) + 1):
                # Without positions, a token repeated from the start is as it is alone.
                same = not self.placed and _is_constant(words[:k])
                distinct.add((start, *words[: 1 if same else k].tolist()))
        said += self._explained(len(distinct), ended)
        if many or len(sequences) != self.row.count:
            said.append(
                f"{len(sequences)} distinct sequences are found for {self.row.count} examples"
            )
        return sequences[: self.row.count], worst, "; ".join(said) or None

    def _padding(self, rows: Sequence[Tensor]) -> list[int]:
        """Of each test, how many points the padding before rows (L,) adds to its span.

        A sequence's first token is the label of the padding before it.
        """
        starts = sorted({len(row) - len(self._words(row)) for row in rows} - {0})
        if self.movable:  # the point is the same at every place
            starts = starts[:1]
        counts = [0] * len(self.tests)
        for start in starts:
            pads = self._behind(start, rows[0][:0])[None]
            for k, (name, span) in enumerate(self.tests):
                point = self._points(
                    name,
                    pads,
                    newest=True,
                )
                away, allowed = span.far(point)
                lucky = span.luck(len(starts)) > CHANCE
                counts[k] += int(not lucky and away <= allowed)
        return counts

    def _sided(self, rows: Sequence[Tensor]) -> list[str]:
        """What is wrong if layers show padding on the other side of rows (L,).

        Only padding before a sequence has a gradient. Where it attends to other places, the first
        layer shows it, else some later one.
        """
        scene = self.scene
        domain = scene.domain
        before = domain.padded_before
        if domain.padding is None or not shifted(scene.task):
            return []
        if not before:
            rows = [self._behind(start, rows[0]) for start in range(1, domain.length)]
        span = scene.span(scene.first, self.row)
        name = scene.first.names[0]
        points = next(
            dictionary(
                scene.task,
                name,
                domain.length,
                [domain.padding],
            )
        )[1]
        clear = span.luck(domain.length) <= CHANCE
        attends = clear and bool(_inside(span, points.cpu()).any())
        seen = attends or any(self._padding(rows))
        if seen and not before:
            return ["padding has a gradient: it may stand before sequences"]
        if not seen and before and any(len(self._words(row)) < len(row) for row in rows):
            return ["padding has no gradient: it may stand behind sequences"]
        return []

    def _explained(
        self,
        distinct: int,
        rows: Sequence[Tensor] = (),
    ) -> list[str]:
        """What is wrong if no span has as many directions as distinct points are found.

        With fewer, points of sequences that are not in the batch may lie in the spans; with more,
        some of the batch are not found. Padding before rows (L,) adds its own.
        """
        ranks = [span.rank for _, span in self.tests]
        added = self._padding(rows)
        if any(distinct + more == rank for more, rank in zip(added, ranks, strict=True)):
            return []
        return [f"{distinct} distinct points are found in spans of {max(ranks)} directions"]

    def _whole(
        self,
        ended: list[Tensor],
        last: int,
    ) -> list[Tensor]:
        """The prefixes that may be sequences: of full length, or of any length with padding behind.

        Without positions, a token repeated from the start has the input that it has alone, so such
        prefixes pass the test whenever a sequence begins with the token. They count only if no
        other sequence does.
        """
        domain = self.scene.domain
        if domain.padding is None or domain.padded_before:
            ended = [row for row in ended if len(row) == last]
        if domain.padded_before and self.movable:
            # The start of a sequence passes at later places, too.
            held = [(*self._words(row).tolist(),) for row in ended]
            parts = {words[:k] for words in held for k in range(1, len(words))}
            ended = [row for row, words in zip(ended, held, strict=True) if words not in parts]
        if self.placed:
            return ended
        constant = [_is_constant(self._words(row)) for row in ended]
        other = [row for row, same in zip(ended, constant, strict=True) if not same]
        explained = {int(self._words(row)[0]) for row in other}
        alone = (row for row, same in zip(ended, constant, strict=True) if same)
        return other + [row for row in alone if int(self._words(row)[0]) not in explained]

    def _completed(self, ended: Sequence[Tensor]) -> tuple[Tensor, list[str]]:
        """Sequences (K, n) of prefixes, with what is not known of them."""
        domain = self.scene.domain
        task = self.scene.task
        said = None
        rows = [*ended]
        if shifted(task):
            rows, said = completed(self.row, rows)
        rows.sort(key=len, reverse=True)
        sequences = torch.cat([extended(domain, row[None]) for row in rows])
        return sequences, [*self._sided(ended), *([said] if said else [])]

    def _descend(self) -> tuple[Tensor, float, str | None]:
        """Sequences of an encoder, by changes of one token at a time.

        Searches follow the spans in turn, that with the most free directions first.
        """
        length = self.scene.domain.length
        if not all(len(tokens) for group in self.groups for tokens in group.options):
            return self._none("order undecided: a place has no candidate")
        sequences: dict[tuple[int, ...], float] = {}
        tests = 0
        # The more free directions, the less often a wrong sequence looks close.
        guides = sorted(self.tests, key=lambda test: -test[1].free)
        for group in self.groups:
            found = set[tuple[int, ...]]()
            for turn in range(self.attack.restarts * group.count):
                if len(found) == group.count or is_over():
                    break
                start = self._start(group, [*sequences])
                ends, used = self._down(group, start, *guides[turn % len(guides)])
                passed, away = self._tested(ends[None])
                tests += used
                if passed:
                    found.add(tuple(ends.tolist()))
                    sequences[tuple(ends.tolist())] = float(away)
        if not sequences:
            return self._none("order undecided: no sequence passes the later layers' tests")
        said = self._lucky(tests) + self._explained(len(sequences) * length)
        if len(sequences) != self.row.count:
            said.append(
                f"{len(sequences)} distinct sequences are found for {self.row.count} examples: the "
                "order of the others is undecided"
            )
        return torch.tensor([*sequences]), max(sequences.values()), "; ".join(said) or None

    def _start(
        self,
        group: _Alike,
        sequences: Sequence[tuple[int, ...]],
    ) -> Tensor:
        """A random sequence (n,) of candidates, of those that no found sequence uses if any is."""
        drawn = []
        shares = uniform((len(group.options),), self.generator).tolist()
        for place, tokens in enumerate(group.options):
            used = {row[place] for row in sequences}
            free = [token for token in tokens.tolist() if token not in used] or tokens.tolist()
            drawn.append(free[int(len(free) * shares[place])])
        return torch.tensor(drawn)

    def _down(
        self,
        group: _Alike,
        start: Tensor,
        name: str,
        span: Span,
    ) -> tuple[Tensor, int]:
        """From a sequence (n,) to one that no change of one token brings closer to a module's span,
        and the number of sequences tested.
        """
        now = start.clone()
        tests = 0
        away, allowed = (part.squeeze(0) for part in span.far(self._points(name, now[None])))
        for _ in range(SWEEPS):
            before = now
            for place in permutation(len(now), self.generator).tolist():
                options = group.options[place]
                others = now.repeat(len(options), 1)
                others[:, place] = options
                each, limits = span.far(self._points(name, others))
                best = int(each.mean(1).argmin())
                if float(each[best].mean()) < float(away.mean()):
                    now = others[best]
                    away = each[best]
                    allowed = limits[best]
                tests += len(options)
            if torch.equal(before, now) or (away <= allowed).all():
                break
        return now, tests


def _is_constant(row: Tensor) -> bool:
    """Whether one token fills a sequence."""
    return bool((row == row[0]).all())
