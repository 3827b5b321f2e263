"""Tokens from low-rank adapters, by pursuit over the dictionary of the first layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from leakbound import check
from leakbound.attacks.adaptive import not_sgd
from leakbound.attacks.base import (
    Answer,
    Attack,
    SentRow,
    each_row,
    rows_of,
    seen_by,
    seen_task,
    summed,
)
from leakbound.attacks.blind import VANISHED
from leakbound.attacks.rounding import narrowest
from leakbound.attacks.span import Span, Tolerance
from leakbound.attacks.tokens.layers import (
    dictionary,
    handed_on,
    inputs_of,
    probe,
    token_domain,
    touched,
    words,
)
from leakbound.attacks.tokens.pursuit import (
    CHANCE,
    EDGE,
    Atoms,
    certified,
    edge,
    pursue,
)
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.domains.arguments import decodes
from leakbound.randomness import permutation, stream, uniform

MOST_ATOMS = 600_000_000
"""Most numbers of a dictionary that is kept in memory (2.4 GB as float32): 128,256 words of width
4,096 have 525 million."""
WIDE = 150_000_000
"""Most weights of a model that is copied in double precision to measure its positions."""
ROUNDING = 6.5
"""Rounding of one entry of a gradient, in units of its type's step times the row's mean size."""
LAYER_ONE = 1e-3
"""Largest relative difference of two inputs that count as equal when layers are compared."""
ASSUMES = "the client trains by SGD, and inputs of different tokens are in general position"


@dataclass(frozen=True)
class FoundTokens:
    """The tokens in one row of an update.

    Attributes:
        tokens: the tokens, sorted, each once.
        places: (token, place) pairs, if the places are known; None otherwise.
        residual: the share of the adapters' gradient that these tokens do not explain.
        certain: whether no other set of as few tokens explains the gradient: all of these tokens
            are in the batch. Others may be missing: their part is below its rounding, or the
            adapters that were tested do not show it (queries show no first token).
        why: the reason for `certain`, or why it is not.
    """

    tokens: tuple[int, ...]
    places: tuple[tuple[int, int], ...] | None
    residual: float
    certain: bool
    why: str


@dataclass(frozen=True, eq=False)
class Pair:
    """A low-rank adapter: y = W x + s B A x, with A (r, d) and B (o, r) by name.

    `hook` is the module that gets x. `across`: stored as (d, r) and (r, o).
    """

    a: str
    b: str
    hook: str
    across: bool = False

    def matrix(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        """A (r, d) or B (o, r) by name, or what a flat vector's parts hold for it, float64."""
        value = tensors[name].double().cpu()
        return value.T if self.across else value


def pairs_of(task: Task) -> tuple[Pair, ...]:
    """The adapters of a model: by name (`lora_A`, `lora_B`), else by an experiment with its layers.

    In the experiment, a layer holds weights A and B and a matrix W that B A fits. It is called on
    random vectors, with and without B, and the difference must be s B A x.

    Example:
        >>> pairs_of(Task.of(nn.Linear(2, 2)))
        ()
    """
    tensors = {k: v for k, v in task.tensors().items() if v.ndim == 2 and v.is_floating_point()}
    pairs: list[Pair] = []
    for name in tensors:
        other = name.replace("lora_A", "lora_B")
        if other != name and other in tensors and "lora_A" in name.split("."):
            down = tensors[name].shape
            up = tensors[other].shape
            if down[0] == up[1] and {name, other} & task.names:
                pairs.append(Pair(name, other, name.rpartition(".")[0]))
    used = {name for pair in pairs for name in (pair.a, pair.b)}
    # Innermost modules first: those around them hold the same weights.
    for prefix, module in sorted(task.model.named_modules(), key=lambda kind: -len(kind[0])):
        inside = [k for k in tensors if k.startswith(f"{prefix}.") and k not in used]
        # An adapter has at least A, B and W; with many weights, there are too many roles to try.
        if 3 <= len(inside) <= 6 and prefix:
            # Libraries name the parts as they like, so all roles are tried.
            roles = (
                Pair(a, b, prefix, across)
                for a, b, w in permutations(inside, 3)
                # Of an adapter, B is trained and W is frozen.
                if b in task.names and w not in task.names
                for across in (False, True)
                if _fits(tensors[a], tensors[b], tensors[w], across)
            )
            pair = next((role for role in roles if _adds(task, module, role)), None)
            if pair is not None:
                pairs.append(pair)
                used |= {pair.a, pair.b}
    return tuple(pairs)


def _fits(
    down: Tensor,
    up: Tensor,
    whole: Tensor,
    across: bool,
) -> bool:
    """Whether weights have the shapes of A, B and W."""
    rank, inputs = reversed(down.shape) if across else down.shape
    outputs, inner = reversed(up.shape) if across else up.shape
    same = sorted(whole.shape) == sorted((outputs, inputs))
    return same and rank == inner and rank < min(outputs, inputs)


@torch.no_grad()
def _adds(
    task: Task,
    module: nn.Module,
    pair: Pair,
) -> bool:
    """Whether the module adds a multiple of B A x to what it computes without B."""
    tensors = task.tensors()
    source = stream(0, "adapter", "experiment")
    down = pair.matrix(tensors, pair.a)
    up = uniform(tensors[pair.b].shape, source, like=tensors[pair.b]) - 0.5
    x = uniform((1, 4, down.shape[1]), source, like=up) - 0.5
    start = f"{pair.hook}."
    changes = []
    for value in (up, torch.zeros_like(up)):
        tensors[pair.b] = value
        inside = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        try:
            # Weights in the wrong roles fail in many ways.
            output = functional_call(module, inside, (x,))
        except (TypeError, RuntimeError, ValueError, IndexError):
            return False
        if not isinstance(output, Tensor) or output.shape[:2] != x.shape[:2]:
            return False
        changes.append(output[0].double().cpu())
    change = changes[0] - changes[1]
    wanted = x[0].double().cpu() @ down.T @ pair.matrix({pair.b: up}, pair.b).T
    if change.shape != wanted.shape or not change.any():
        return False
    scale = (change * wanted).sum() / wanted.square().sum().clamp_min(1e-300)
    return float((change - scale * wanted).norm()) <= LAYER_ONE * float(change.norm())


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """The adapters that get the first attention layer's inputs, which mix no places.

    Such layers are one, or two of an encoder-decoder: its decoder reads tokens of its own. `hook`
    is a module that gets these inputs. `by_place`: they depend on the place, too.
    """

    pairs: tuple[Pair, ...]
    hook: str
    by_place: bool

    @staticmethod
    def each(task: Task, pairs: Sequence[Pair]) -> tuple[FirstLayer, ...]:
        """Find them by an experiment: each place of a random sequence must give what the place
        gives if its token fills the whole sequence.

        Raises:
            NotApplicable: the model has no adapter, or none there.
        """
        domain = token_domain(task)
        if not pairs:
            raise NotApplicable("the model has no low-rank adapter (a pair of weights A, B)")
        draw = uniform((2, domain.length), stream(0, "adapter", "layer"))
        drawn = (draw * domain.vocabulary).long().clamp_max(domain.vocabulary - 1)
        # Every other place of both holds one token: where it shows more, places mix.
        drawn[1, ::2] = drawn[0, ::2]
        drawn = drawn.to(task.parameters.device)
        every = drawn.flatten()[:, None].expand(-1, domain.length)
        place = torch.arange(domain.length).repeat(2)
        first: dict[str, Tensor] = {}
        found: dict[str, FirstLayer] = {}
        not_called: list[str] = []
        most = 1 + decodes(task.model)
        for pair in pairs:
            called, inputs = _called(task, pair, drawn)
            if inputs is None:
                not_called.append(pair.hook)
                continue
            seen = inputs.double().cpu()
            same = next((hook for hook, held in first.items() if _same(held, seen)), None)
            mixed = _differ(seen[0, ::2], seen[1, ::2])
            if same is None and len(found) < most and not mixed:
                alone = inputs_of(task, called, every).double().cpu()
                if _differ(seen.flatten(0, 1), alone[torch.arange(len(place)), place]):
                    continue
                if seen_by(task, [called], drawn[:1])[called] is None:
                    raise NotApplicable(
                        f"the model calls {called!r} several times, as with layers that share "
                        "weights (ALBERT): its change is also that of later layers' inputs; this "
                        "attack does not cover it, and nothing says that it reveals less"
                    )
                first[called] = seen
                hook = _earliest(task, called, drawn, seen)
                found[called] = FirstLayer((), hook, _differ(alone, alone[:, :1]))
                same = called
            if same is not None:
                layer = found[same]
                found[same] = replace(layer, pairs=(*layer.pairs, pair))
        if not found and not_called:
            raise NotApplicable(
                f"the model calls neither {not_called[0]!r} nor the layer around it on the "
                "layer's inputs; this attack does not cover such adapters, and nothing says that "
                "they reveal less"
            )
        if not found:
            raise NotApplicable(
                "no adapter gets the first attention layer's inputs: those of the others mix places"
            )
        return tuple(found.values())


Found = TypeVar("Found")


def of_each(
    layers: Sequence[FirstLayer],
    find: Callable[[FirstLayer], Found],
) -> list[Found]:
    """What `find` gives for each layer to which it applies.

    Raises:
        NotApplicable: it applies to none; the first reason.
    """
    found = list[Found]()
    reasons = list[NotApplicable]()
    for layer in layers:
        try:
            found.append(find(layer))
        except NotApplicable as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def _called(
    task: Task,
    pair: Pair,
    sequences: Tensor,
) -> tuple[str, Tensor | None]:
    """The module that gets the inputs of an adapter, which is A, or the layer of an adapter like
    DoRA, and what it gets; None if neither is called.
    """
    layer, adapter, _ = pair.hook.partition(".lora_A")
    for name in (pair.hook, *((layer,) if adapter else ())):
        with suppress(NotApplicable):
            return name, inputs_of(task, name, sequences)
    return pair.hook, None


def _earliest(
    task: Task,
    called: str,
    sequences: Tensor,
    seen: Tensor,
) -> str:
    """The layer around an adapter, if it gets the adapter's inputs: a run that ends there does not
    compute the frozen layer, which takes longer than all before it.
    """
    layer, adapter, _ = called.partition(".lora_A")
    if adapter:
        with suppress(NotApplicable):
            around = inputs_of(task, layer, sequences).double().cpu()
            if around.equal(seen):
                return layer
    return called


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and not _differ(a, b)


def _differ(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) > LAYER_ONE * float(a.abs().max())


def gradient_rows(
    row: SentRow,
    pair: Pair,
    name: str,
) -> Tensor:
    """Rows (m, w) of the gradient of A or B in one row of the update, in units of their rounding.

    Noise that the attacker knows counts as rounding. If the update is a difference of rounded
    weights, so does their spacing. Rows of zeros, and those that a mask cuts, are left out.
    """
    task = row.task

    def part(values: Tensor) -> Tensor:
        return pair.matrix(task.unflatten(values), name)

    observation = row.observation
    update = observation.update
    rows = part(row.values)
    kinds = (update.rows.dtype, task.parameters.dtype)
    size = rows.norm(dim=1) / math.sqrt(rows.shape[1])
    # A row of zeros is not exact: it has the rounding of its neighbors.
    size = torch.maximum(size, LAYER_ONE * size.max())
    variance = (ROUNDING * max(torch.finfo(kind).eps for kind in kinds) * size).square()
    # Values that a narrower type holds were rounded to it on their way.
    if (kind := narrowest(rows)) is not None:
        variance += (torch.finfo(kind).eps * size).square() / 12
    if (stored := row.rounding(part)) is not None:
        variance += stored.square().mean(1)
    if row.variance is not None:
        variance += part(row.variance).mean(1)
    if update.mask is not None:
        mask = update.mask if update.mask.ndim == 1 else update.mask[row.at]
        rows = rows * (part(mask.double()) > 0).all(1)[:, None]
    seen = rows.any(1)
    return rows[seen] / variance.sqrt().clamp_min(1e-300)[seen, None]


def shared_space(
    task: Task,
    layer: FirstLayer,
    places: int,
) -> Tensor | None:
    """(d, c) orthonormal: the space of what the places add to the layer's inputs; outside of it,
    all places of a token have one direction. None if the inputs have another form.

    It is the common part of what several groups of tokens span over all places.
    """
    domain = token_domain(task)
    weights = sum(v.numel() for v in task.tensors().values())
    # Float32 blurs which directions are common.
    wide = task.to("cpu", torch.float64) if weights <= WIDE else task
    source = stream(0, "adapter", "places")
    groups = min(6, domain.vocabulary // 4 - 1)
    if groups < 2:
        return None
    drawn = permutation(domain.vocabulary, source)[: 4 * (groups + 1)]
    sequences = drawn[:, None].expand(-1, places).to(wide.parameters.device)
    seen = inputs_of(wide, layer.hook, sequences).double().cpu()
    tolerance = 1e3 * torch.finfo(wide.parameters.dtype).eps
    total = torch.zeros(seen.shape[-1], seen.shape[-1], dtype=torch.float64)
    for group in seen[: 4 * groups].view(groups, 4 * places, -1):
        _, s, v = torch.linalg.svd(group, full_matrices=False)
        basis = v[s > tolerance * s[0]]
        # Directions that all groups span are eigenvectors of the mean with value 1.
        total += basis.T @ basis / groups
    values, vectors = torch.linalg.eigh(total)
    space = vectors[:, values > 1 - math.sqrt(tolerance)]
    if not 0 < space.shape[1] < seen.shape[-1] - 1:
        return None
    # The last group took no part in the search: it tests the result.
    left = seen[4 * groups :]
    left = left - (left @ space) @ space.T
    s = torch.linalg.svdvals(left)
    if places > 1 and (s[:, 1] > math.sqrt(tolerance) * s[:, 0]).any():
        return None
    return space


def image_span(row: SentRow, pair: Pair) -> Span | None:
    """The span of a gradient of B, which holds A x of each input x; None if it is empty or R^r."""
    rows = gradient_rows(row, pair, pair.b)
    if not len(rows):
        return None
    eps = torch.finfo(row.task.parameters.dtype).eps
    tolerance = Tolerance(64 * eps, 1.0, lambda free: EDGE * (math.sqrt(free) + 3))
    limit = edge(*rows.shape)
    span = Span.of(rows, lambda s, _: int((s > limit).sum()), tolerance)
    # The rows are in units of their rounding.
    return replace(span, noise=1.0) if 0 < span.rank < rows.shape[1] else None


def in_span(span: Span, images: Tensor) -> tuple[Tensor, float]:
    """Which images A x (K, r) lie in a span, and how many of them would by chance."""
    away, allowed = span.far(images)
    # All inputs may lie in fewer dimensions than A has rows, as a norm takes their mean.
    few = nn.functional.normalize(images[:: max(1, len(images) // (4 * images.shape[1]))])
    room = int(torch.linalg.matrix_rank(few, rtol=1e-5)) - span.rank
    chance = span.chance(allowed.numpy(), room).sum() if room > 0 else len(images)
    return away <= allowed, float(chance)


@dataclass(frozen=True)
class AdapterPursuit(Attack):
    """The set of tokens, from updates of low-rank adapters (LoRA) at the first attention layer.

    The gradient of A is a sum of the layer's inputs, one for each token. As the attacker knows the
    input of every token, rank-aware matching pursuit finds the few that explain it, also if there
    are far more than the rank. At a first step B is 0 and the gradient of A, too. Then the gradient
    of B shows A x for each input x: tokens are tested against its row space, as long as their
    number is below the rank. All adapters that get these inputs count together, such as those of
    queries and values. If the word table is trained, only tokens with a gradient there count.

    If one round has too many tokens for one answer, earlier rounds of the same client count, too:
    they give candidates, whether they hold the same examples or not.

    Layers show no order of tokens. If positions are learned, outside of what they add each token
    has one direction, which is searched for; for one sequence the places follow.

    Args:
        spare: how many atoms the pursuit may choose, relative to the number of places in the batch;
            what is not needed is dropped at the end.

    Assumptions: the client trains by SGD, in any number of local steps, and what precedes the layer
        is frozen. A token whose output is not scored, and that no other token attends to, has no
        gradient: the last one of each sequence in a causal model. A certain answer assumes that
        inputs of different tokens are in general position.

    Raises:
        NotApplicable: no tokens, no adapter at the first layer, another optimizer than SGD (whose
            updates leave the span; this is undecided, not protected), or B is 0 and there are as
            many tokens as the rank.

    Source: this project; rank-aware pursuit by Davies and Eldar 2012, span test by Petrov et al.
        2024 (DAGER).

    Example:
        >>> import leakbound as lb
        >>> from leakbound.domains import TokenDomain
        >>> class Adapted(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         torch.manual_seed(0)
        ...         self.words = torch.nn.Embedding(20, 8).requires_grad_(False)
        ...         self.base = torch.nn.Linear(8, 8).requires_grad_(False)
        ...         self.lora_A = torch.nn.Linear(8, 2, bias=False)
        ...         self.lora_B = torch.nn.Linear(2, 8, bias=False)
        ...         self.head = torch.nn.Linear(8, 3).requires_grad_(False)
        ...     def forward(self, ids):
        ...         x = self.words(ids)
        ...         return self.head((self.base(x) + self.lora_B(self.lora_A(x))).tanh().mean(1))
        >>> batch = torch.tensor([[3, 14, 15]]), torch.tensor([0])
        >>> found = lb.simulate(
        ...     Adapted(), batch, attack=AdapterPursuit(), domain=TokenDomain(20, 3))
        >>> sorted(found.reconstruction[0].tolist())
        [3, 14, 15]
    """

    spare: float = 2.0

    @property
    def across_rounds(self) -> bool:
        return True

    def __post_init__(self) -> None:
        check.positive(spare=self.spare)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        domain = token_domain(observation.task)
        each: list[FoundTokens] = []

        def one(row: SentRow) -> Answer:
            results = self._of_row(row)
            each.extend(results)
            result = results[0]
            rows, problem = _filled(
                result,
                row.count,
                domain.length,
            )
            return Answer(rows, problem, result.residual)

        observation = summed(observation)
        answer = each_row(observation, seen_task(observation), one)
        sure = [result.tokens for result in each if result.certain]
        if not sure or not handed_on(observation.task):
            return answer
        tokens = sorted(set().union(*sure))
        return replace(answer, facts=words(domain, tokens, CHANCE * len(each), ASSUMES))

    def tokens(self, observation: Observation) -> tuple[int, ...]:
        """The tokens in any row of the update, sorted."""
        each = (result for row in _sums(observation) for result in self._of_row(row))
        return tuple(sorted({token for result in each for token in result.tokens}))

    def found(self, observation: Observation) -> FoundTokens:
        """The tokens of the first such layer in the first row of the update."""
        return self._of_row(_sums(observation)[0])[0]

    @torch.no_grad()
    def _of_row(self, row: SentRow) -> list[FoundTokens]:
        """The tokens of each layer that reads them, as far as it shows them."""
        if not row.values.isfinite().all():
            raise NotApplicable("the update is not finite")
        if (reason := not_sgd(row.observation)) is not None:
            raise NotApplicable(reason)
        pairs = pairs_of(row.task)
        layers = FirstLayer.each(row.task, pairs)
        if row.is_zero:
            return [FoundTokens((), None, float("nan"), False, VANISHED)]
        return of_each(layers, lambda layer: self._of_layer(row, layer))

    def _of_layer(self, row: SentRow, layer: FirstLayer) -> FoundTokens:
        task = row.task
        count = row.count
        some = touched(row)
        rows = _downs(row, layer)
        first: FoundTokens | None = None
        if len(rows):
            first = self._pursued(task, layer, rows, count, some)
            past = () if first.certain else same_inputs(row, layer, _sums)
            if past:
                every = torch.cat([rows, *(_downs(earlier, layer) for earlier in past)])
                union = self._pursued(task, layer, every, count * (1 + len(past)), some)
                if union.certain:  # of all rounds; which of them are in this one?
                    first = self._pursued(task, layer, rows, count, torch.tensor(union.tokens))
            if first.certain:
                return first
        try:
            second = spanned_tokens(row, layer, some)
        except NotApplicable:
            if first is None:
                raise
            return first
        return second if first is None or second.certain else first

    def _pursued(
        self,
        task: Task,
        layer: FirstLayer,
        rows: Tensor,
        count: int,
        some: Tensor | None,
    ) -> FoundTokens:
        """By pursuit, from gradients of A in units of their rounding."""
        domain = token_domain(task)
        width = rows.shape[1]
        space = shared_space(task, layer, domain.length) if layer.by_place else None
        pairs = layer.by_place and space is None
        total = domain.vocabulary if some is None else len(some)
        if pairs and total * domain.length * width > MOST_ATOMS:
            raise NotApplicable(
                f"the layer's inputs depend on the place in no additive way, and {total} tokens at "
                f"{domain.length} places do not fit in memory"
            )
        inside = torch.zeros(width, 0, dtype=torch.float64) if space is None else space
        # Wrong atoms may be chosen on the way; pruning drops them.
        most = int(self.spare * count * domain.length) + 8
        atoms = Atoms(dictionary(task, layer.hook, domain.length if pairs else 1, some), pairs)
        chosen = pursue(atoms, rows, inside, most)
        certain, why = certified(atoms, chosen, rows, inside, atoms.room(inside))
        if chosen.done and len(chosen.where) > count * domain.length:
            certain = False
            why = f"{len(chosen.where)} tokens explain the update, more than places"
        share = float(chosen.residual.norm() / rows.norm())
        tokens = tuple(sorted({atoms.named(one)[0] for one in chosen.where}))
        places = tuple(sorted(atoms.named(one) for one in chosen.where)) if pairs else None
        if space is not None and count == 1 and chosen.done and tokens:
            # Few tokens are left, so atoms for each of their places fit in memory.
            placed = Atoms(dictionary(task, layer.hook, domain.length, torch.tensor(tokens)), True)
            # What places add is not projected out now: it shows the place.
            again = pursue(placed, rows, inside[:, :0], most)
            if again.done:
                places = tuple(sorted(placed.named(one) for one in again.where))
        return FoundTokens(tokens, places, share, certain, why)


def _downs(row: SentRow, layer: FirstLayer) -> Tensor:
    """The gradients of A of the layer's adapters in one row, in units of their rounding."""
    pairs = [pair for pair in layer.pairs if pair.a in row.task.names]
    blocks = [gradient_rows(row, pair, pair.a) for pair in pairs]
    return torch.cat(blocks) if blocks else torch.zeros(0, 1, dtype=torch.float64)


def _sums(observation: Observation) -> list[SentRow]:
    """The rows of the update, as sums of gradients."""
    observation = summed(observation)
    return rows_of(observation, seen_task(observation))


def same_inputs(
    row: SentRow,
    layer: FirstLayer,
    of: Callable[[Observation], list[SentRow]],
) -> list[SentRow]:
    """The client's rows of earlier rounds in which the layer got the same inputs for the same
    tokens: what precedes it has not changed. `of` gives the rows of a round.
    """
    ids = probe(token_domain(row.task)).to(row.task.parameters.device)
    now = inputs_of(row.task, layer.hook, ids)
    rows = list[SentRow]()
    for seen in row.observation.history:
        with suppress(NotApplicable):
            earlier = of(seen)
            same = inputs_of(earlier[0].task, layer.hook, ids).equal(now)
            if same and len(earlier) == len(row.observation.update.rows):
                rows.append(earlier[row.at])
    return rows


def spanned_tokens(
    row: SentRow,
    layer: FirstLayer,
    some: Tensor | None,
) -> FoundTokens:
    """The tokens that A maps into the row space of B's gradient, for any adapter of the layer.

    Raises:
        NotApplicable: the space is all of R^r, or A changes during several local steps.
    """
    task = row.task
    domain = token_domain(task)
    moved = task.plan.steps > 1 and any(pair.a in task.names for pair in layer.pairs)
    if moved:
        raise NotApplicable("A changes in the local steps, so B's gradient has no fixed row space")
    weights = task.tensors()
    downs = {pair: pair.matrix(weights, pair.a) for pair in layer.pairs}
    each = {pair: image_span(row, pair) for pair in downs if pair.b in task.names}
    spans = [(downs[pair], span) for pair, span in each.items() if span is not None]
    if not spans:
        rank = max(len(down) for down in downs.values())
        raise NotApplicable(
            f"A has no gradient, as B is 0 or A is frozen, and B's fills all {rank} dimensions: "
            "there are as many tokens as the rank, or more; this does not protect later rounds"
        )
    chance = 0.0
    pairs: list[tuple[int, int]] = []
    for tokens, inputs in dictionary(
        task, layer.hook, domain.length if layer.by_place else 1, some
    ):
        flat = inputs.flatten(0, 1)
        places = inputs.shape[1]
        fits = torch.zeros(len(flat), dtype=torch.bool)
        for down, span in spans:
            # One span is enough for a token, so the chances of all spans add up.
            inside, odds = in_span(span, flat.double().cpu() @ down.T)
            fits |= inside
            chance += odds
        pairs += [(int(tokens[k // places]), k % places) for k in fits.nonzero()[:, 0].tolist()]
    held = tuple(sorted({token for token, _ in pairs}))
    once = len({place for _, place in pairs}) == len(pairs)
    known = tuple(sorted(pairs)) if layer.by_place and row.count == 1 and once else None
    rank = max(span.rank for _, span in spans)
    why = f"{len(held)} tokens in a space of {rank} dimensions; {chance:.2g} would be by chance"
    # Inputs in general position are at most as many as the directions that they span.
    many = len(held) > sum(span.rank for _, span in spans) and not layer.by_place
    return FoundTokens(held, known, 0.0, bool(held) and chance < CHANCE and not many, why)


def _filled(
    result: FoundTokens,
    count: int,
    length: int,
) -> tuple[Tensor, str | None]:
    """Sequences (count, n) with the tokens found, and what is not known of them."""
    if not result.tokens:
        return torch.zeros(count, length, dtype=torch.int64), f"no token was found: {result.why}"
    if len(result.tokens) > count * length:
        return torch.zeros(count, length, dtype=torch.int64), (
            f"no set of tokens is found: {result.why}. Noise, dropout, or an update that is not "
            "that of SGD explains it"
        )
    held = torch.tensor(result.tokens)
    rows = held[torch.arange(count * length) % len(held)].view(count, length)
    said = [] if result.certain else [f"the tokens are likely, not certain: {result.why}"]
    open_places = set(range(length))
    if count == 1 and result.places is not None:
        at = [place for _, place in result.places]
        if len(set(at)) == len(at):
            open_places -= set(at)
            for token, place in result.places:
                rows[0, place] = token
    if count > 1 or len(open_places) == length:
        said.append("the order of the tokens, and which sequence holds which, are not known")
    elif open_places:
        said.append(f"the tokens of {len(open_places)} places have no gradient or are not known")
    return rows, "; ".join(said) or None
