"""Token matching: search sequences of tokens whose simulated update is closest to the one seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from leakbound import check
from leakbound.attacks.base import Attack
from leakbound.attacks.labels import infer_labels
from leakbound.attacks.matching.attack import GradientMatching
from leakbound.attacks.matching.images import Images
from leakbound.attacks.matching.loop import MOSTLY, begin, solve, unexplained
from leakbound.attacks.matching.objective import Objective, hides
from leakbound.attacks.pace import tick
from leakbound.attacks.tokens.adapters import AdapterPursuit
from leakbound.attacks.tokens.layers import embeddings, shifted, token_domain
from leakbound.attacks.tokens.rows import TokenRows, labels_in_outputs, largest_rows
from leakbound.attacks.tokens.span import TokenSpan
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.losses import NamedLoss, named
from leakbound.randomness import normal

START = 0.1
EXPLAINED = 1e-6
ENDS = 16
LIKELY = 4
"""Spread of the logits at the start; share of an exact update that the right sequences may leave
unexplained, for rounding; how many tokens are tried at the end of a sequence; candidates for each
place if noise or compression hides which tokens occur.
"""
RIVALS = "other sequences explain the update as well"


@dataclass(frozen=True)
class TokenMatching(Attack):
    """Search sequences of tokens whose simulated update is closest to the update that was seen.

    Every place has a softmax over candidate tokens, which weights the rows of the word embedding.
    Gradient matching moves the logits; then the search changes or swaps single tokens, in the order
    that the objective's derivative suggests, while the distance falls. Other attacks give the
    candidates where they apply: rows of the word embedding, spans, adapters, and rows of the output
    layer for labels. Otherwise all tokens are candidates.

    It needs no exact gradient, so it applies to noise, compression, several local steps and other
    optimizers, where spans fail. It simulates what is known of the client and its defense.

    Known tokens stay at their places, and are candidates.

    `problem` is None only if the sequences explain the update up to rounding and known noise, and
    neither a search nor, under noise, a change of a token found others that do. There is no
    certificate.

    Args:
        steps: steps of the search over weights.
        restarts: the largest number of searches; the first that explains the update ends them.
        learning_rate: Adam's, at the start.
        moves: the largest number of changes after a search.
        tries: how many changes are simulated for each, at most; the first that helps is made.
        among: the tokens that may occur; none given: those that other attacks find.

    Assumptions: the model looks tokens up in one `nn.Embedding`. Lengths are searched as padding.

    Raises:
        NotApplicable: no tokens, no such embedding, or labels that are other tokens.

    Source: Balunovic et al. 2022 (LAMP) and Deng et al. 2021 (TAG) for searches over embeddings,
        which alternate with changes of tokens; Ebrahimi et al. 2018 (HotFlip) for the order of
        changes. The softmax over candidates and their sources are this project's.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.domains import TokenDomain
        >>> model = lb.models.decoder(input_shape=(4,), classes=9, width=8, layers=1, heads=2,
        ...     generator=lb.stream(0, "model"))
        >>> tokens = torch.tensor([[7, 2, 7, 1]])
        >>> task = lb.Task.of(model, domain=TokenDomain(9, 4), loss="next_token", classes=9)
        >>> sources = [lb.stream(0, "client"), lb.stream(0, "cohort")]
        >>> seen = lb.play(task, [lb.Batch(tokens, tokens)], lb.defenses.NoDefense(), sources)
        >>> TokenMatching(steps=100)(seen.observation, lb.stream(0)).inputs
        tensor([[7, 2, 7, 1]])
    """

    steps: int = 300
    restarts: int = 3
    learning_rate: float = 0.1
    moves: int = 100
    tries: int = 24
    among: tuple[int, ...] = ()

    @property
    def step_trainings(self) -> int:
        """The search over weights asks after each step."""
        return 1

    def __post_init__(self) -> None:
        check.count(
            steps=self.steps,
            restarts=self.restarts,
            tries=self.tries,
        )
        check.non_negative(moves=self.moves)
        check.positive(learning_rate=self.learning_rate)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        labels = _labels(observation, generator)
        results = list[tuple[float, float, Tensor, str | None]]()
        search = _Matching.of(self, observation, labels, self._candidates(observation))
        noise = search.objective.noise_share
        for _ in range(self.restarts):
            results.append(search.run(generator))
            right = [sequences for *_, sequences, wrong in results if wrong is None]
            enough = results[-1][1] <= EXPLAINED + noise and len(right) > (noise > 0)
            if (right and enough) or tick():
                break
        value, _, tokens, problem = min(results, key=lambda result: result[0])
        agreement = None
        if not all(bool(_same(tokens, sequences).all()) for sequences in right):
            problem = problem or RIVALS
        if len(results) > 1:
            agreeing = [_same(tokens, sequences) for *_, sequences, _ in results]
            agreement = torch.stack(agreeing).double().mean(0)
        return Reconstruction(
            tokens.cpu(),
            None,
            value,
            (),
            problem,
            agreement=agreement,
        )

    def _candidates(self, observation: Observation) -> Tensor:
        """(K,) `among`, what is known and padding, or what other attacks find."""
        if not self.among:
            return candidates_of(observation)
        known = observation.known
        some = {*self.among} | (set() if known is None else {*known.values.flatten().tolist()})
        domain = token_domain(observation.task)
        outside = [token for token in self.among if not 0 <= token < domain.vocabulary]
        if outside:
            raise ValueError(
                f"among holds {outside[0]}; the domain's tokens are 0 to {domain.vocabulary - 1}"
            )
        return torch.tensor(sorted(some if domain.padding is None else some | {domain.padding}))


def candidates_of(observation: Observation) -> Tensor:
    """(K,) the tokens that other attacks find, in order; all tokens if none of them applies.

    If noise or compression hides most of them, those with the largest gradients. Padding is one of
    them if the domain has it.
    """
    domain = token_domain(observation.task)
    tokens: set[int] = set()
    for attack in (TokenRows(), TokenSpan(), AdapterPursuit()):
        try:
            tokens = {*attack.tokens(observation)}
        except NotApplicable:
            continue
        if tokens:
            break
    known = observation.known
    places = observation.examples * domain.length
    changed = getattr(observation.defense, "links", True)  # not known, or there are some
    if changed and 2 * len(tokens) < places:
        tokens |= set(largest_rows(observation, LIKELY * places))
    if not tokens:
        return torch.arange(domain.vocabulary)
    tokens |= labels_in_outputs(observation)
    tokens |= set() if known is None else {*known.values.flatten().tolist()}
    return torch.tensor(sorted(tokens if domain.padding is None else tokens | {domain.padding}))


def soft(
    observation: Observation,
    generator: torch.Generator,
    most: int | None = None,
) -> Observation:
    """The observation as the search sees it: inputs are the weights of its first candidates, or of
    the first `most` tokens.

    Raises:
        NotApplicable: the search does not apply.
    """
    vocabulary = token_domain(observation.task).vocabulary
    candidates = (
        candidates_of(observation) if most is None else torch.arange(min(most, vocabulary))
    ).to(observation.task.parameters.device)
    return _of_weights(observation, _labels(observation, generator), candidates)


def _of_weights(
    observation: Observation,
    labels: Tensor | None,
    candidates: Tensor,
) -> Observation:
    return replace(
        observation,
        task=weighted(observation.task, candidates),
        input_shape=(token_domain(observation.task).length, len(candidates)),
        labels=labels,
        auxiliary=None,
    )


def _same(tokens: Tensor, others: Tensor) -> Tensor:
    """(B, n) whether other sequences, in the order that fits best, have the same tokens."""
    costs = (tokens[:, None] != others).sum(-1)
    order = torch.as_tensor(linear_sum_assignment(costs.cpu().numpy())[1])
    return (tokens == others[order.to(others.device)]).cpu()


@dataclass(frozen=True, eq=False)
class _Matching:
    """Weights (B, n, K) of candidates (K,) for the places, and the objective that they have."""

    attack: TokenMatching
    observation: Observation
    labels: Tensor | None
    candidates: Tensor
    settings: GradientMatching
    objective: Objective

    @staticmethod
    def of(
        attack: TokenMatching,
        observation: Observation,
        labels: Tensor | None,
        candidates: Tensor,
    ) -> _Matching:
        candidates = candidates.to(observation.task.parameters.device)
        weights = _of_weights(observation, labels, candidates)
        noisy = observation.noise_variance is not None  # weights of a mask alone are no 1/std
        settings = GradientMatching(
            distance="cosine_signal" if noisy else "cosine_layers",
            steps=attack.steps,
            learning_rate=attack.learning_rate,
            schedule="cosine",
            box=False,
            labels="told" if labels is not None else "joint",
        )
        objective = Objective.of(settings, weights)
        return _Matching(attack, observation, labels, candidates, settings, objective)

    def problem(self, left: float) -> str | None:
        """What is wrong with sequences that leave this share of the update unexplained: more than
        rounding, and noise with four standard errors of its energy.
        """
        noise = self.objective.noise_share
        if noise > MOSTLY:
            return f"too much noise: it is {noise:.1%} of the update, and a match proves little"
        if left <= EXPLAINED + noise * (1 + 4 * (2 / self.objective.seen.numel()) ** 0.5):
            return None
        return (
            f"the sequences leave {left:.2g} of the update unexplained, and noise would leave "
            f"{noise:.2g}: some tokens may be wrong"
        )

    def run(self, generator: torch.Generator) -> tuple[float, float, Tensor, str | None]:
        """The lowest distance of one search, the share of the update that it does not explain, the
        sequences (B, n), and what is wrong with them.
        """
        shape = self.observation.examples, *self.objective.observation.input_shape
        start = START * normal(shape, generator, like=self.objective.seen)
        search = begin(
            self.settings,
            self.objective,
            generator,
            images=_Weights(start, *self._fixed()),
        )
        result = solve(self.settings, [search])[0]
        labels = self.labels if self.labels is not None else result.labels
        assert labels is not None  # the search has found them
        tokens = self.candidates[result.inputs.argmax(-1)]
        wider = self._wider(tokens, labels)
        tokens = wider._changed(wider._ended(tokens, labels), labels)
        # Again: after changes of other tokens, another end may be the best.
        tokens = wider._ended(tokens, labels)
        value = wider._value(tokens, labels)
        left = wider._left(tokens, labels)
        problem = wider.problem(left)
        if problem is None and self.objective.noise_share > 0 and wider._rivals(tokens, labels):
            problem = RIVALS
        return value, left, tokens, problem

    def _left(self, tokens: Tensor, labels: Tensor) -> float:
        return unexplained(self.objective, self._one_hot(tokens), labels)

    def _rivals(self, tokens: Tensor, labels: Tensor) -> bool:
        """Whether noise hides one of the likeliest changes of the sequences."""
        return any(
            self.problem(self._left(other, labels)) is None
            for other in self._options(tokens, labels)
            if not bool(_same(tokens, other).all())
        )

    def _wider(self, tokens: Tensor, labels: Tensor) -> _Matching:
        """A search with those tokens of the whole vocabulary, too, that the derivative suggests.

        The last token of a sequence may be a label alone, and tokens may be withheld.
        """
        vocabulary = token_domain(self.observation.task).vocabulary
        complete = not shifted(self.observation.task) and not hides(self.observation)
        if complete or self.attack.among or len(self.candidates) == vocabulary:
            return self
        every = self._among(torch.arange(vocabulary))
        change = every._slope(tokens, labels)
        # These are in the search already.
        change[:, :, self.candidates] = torch.inf
        parts = [change[row, at] for row, at in enumerate(self._ends(tokens))]
        parts += [*change] if hides(self.observation) else []
        least = [at % vocabulary for part in parts for at in _least(part, ENDS)]
        more = torch.unique(torch.cat([self.candidates, self.candidates.new_tensor(least)]))
        return self._among(more)

    def _among(self, candidates: Tensor) -> _Matching:
        """The same search with other candidates."""
        return _Matching.of(self.attack, self.observation, self.labels, candidates)

    def _changed(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The sequences (B, n) after changes of single tokens that lower the distance."""
        value = self._value(tokens, labels)
        for _ in range(self.attack.moves):
            if value <= EXPLAINED**2 or tick():
                break
            pairs = (
                (self._value(changed, labels), changed) for changed in self._options(tokens, labels)
            )
            better = next((pair for pair in pairs if pair[0] < value), None)
            if better is None:
                break
            value, tokens = better
        return tokens

    def _ended(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The sequences with the best of the last tokens that the derivative suggests most."""
        if not shifted(self.observation.task):
            return tokens
        slope = self._slope(tokens, labels)
        best = self._value(tokens, labels)
        for row, at in enumerate(self._ends(tokens)):
            for k in _least(slope[row, at], ENDS):
                other = tokens.clone()
                other[row, at] = self.candidates[k]
                if (value := self._value(other, labels)) < best:
                    best = value
                    tokens = other
        return tokens

    def _slope(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """(B, n, K) how much each candidate at a place would change the distance, to first order"""
        weights = self._one_hot(tokens).requires_grad_()
        match = self.objective.match(self.objective.rows(weights, labels))
        slope = torch.autograd.grad(match, weights)[0]
        change = slope - (slope * weights.detach()).sum(-1, keepdim=True)
        # No other token stands at a known place.
        return change.masked_fill(self._fixed()[0] & (weights == 0), torch.inf)

    def _options(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        """The changes that the derivative suggests most: another token, two that swap, one that
        moves within its sequence, or more padding.
        """
        each = self._slope(tokens, labels)
        slope = each.flatten(0, 1)
        now = self._places(tokens).flatten()
        swap = slope[:, now]  # (places, tokens of the others)
        swap = (swap + swap.T).masked_fill(now[:, None] == now, torch.inf)
        swap = swap.masked_fill(torch.ones_like(swap).tril() > 0, torch.inf)
        change = slope.scatter(1, now[:, None], torch.inf)
        options: list[list[Tensor]] = [[], []]
        part = -(-self.attack.tries // 3)
        for at in _least(change, part):
            other = now.clone()
            other[at // change.shape[1]] = at % change.shape[1]
            options[0].append(other)
        for at in _least(swap, part):
            other = now.clone()
            first = at // len(now)
            second = at % len(now)
            other[first] = now[second]
            other[second] = now[first]
            options[1].append(other)
        orders = _moved(tokens.shape[1]).to(tokens.device)
        kinds = [self._places(tokens)[:, orders]]  # (B, orders, n)
        domain = token_domain(self.observation.task)
        if domain.padding is not None:
            ended = self._places(tokens)[:, None].repeat(1, tokens.shape[1] - 1, 1)
            pad = self._places(tokens.new_tensor([domain.padding]))
            blank = torch.ones_like(ended[0])
            blank = blank.tril() if domain.padded_before else blank.triu(1)
            kinds.append(torch.where(blank > 0, pad, ended))
        for moved in kinds:
            gains = each[:, None].expand(-1, moved.shape[1], -1, -1).gather(3, moved[..., None])
            others = list[Tensor]()
            for at in _least(gains.sum((2, 3)), part):
                other = now.clone().view_as(tokens)
                row = at // moved.shape[1]
                other[row] = moved[row, at % moved.shape[1]]
                others.append(other.flatten())
            options.append(others)
        # Kinds of changes take turns, as the first that helps is made.
        turns = (other for turn in zip_longest(*options) for other in turn if other is not None)
        return [self.candidates[other].view_as(tokens) for other in turns]

    def _ends(self, tokens: Tensor) -> list[int]:
        """The last place of each sequence that is not padding."""
        domain = token_domain(self.observation.task)
        if domain.padding is None or domain.padded_before:
            return [tokens.shape[1] - 1] * len(tokens)
        return [max(1, length) - 1 for length in (tokens != domain.padding).sum(1).tolist()]

    @torch.no_grad()
    def _value(self, tokens: Tensor, labels: Tensor) -> float:
        return float(self.objective.match(self.objective.rows(self._one_hot(tokens), labels)))

    def _fixed(self) -> tuple[Tensor, Tensor]:
        """(n, 1) where the attacker knows the token, and the weights (B, n, K) there."""
        known = self.observation.known
        length = token_domain(self.observation.task).length
        if known is None:
            nowhere = torch.zeros(length, 1, dtype=torch.bool, device=self.candidates.device)
            return nowhere, self.objective.seen.new_zeros(1, length, len(self.candidates))
        # Elsewhere stands any candidate; the mask leaves it out.
        any_token = self.candidates[:1].expand(self.observation.examples, length)
        return known.mask[:, None], self._one_hot(known.filled(any_token))

    def _places(self, tokens: Tensor) -> Tensor:
        """The numbers of tokens among the candidates, which are in increasing order."""
        return torch.searchsorted(self.candidates, tokens)

    def _one_hot(self, tokens: Tensor) -> Tensor:
        weights = nn.functional.one_hot(self._places(tokens), len(self.candidates))
        return weights.to(self.objective.seen)


def _moved(length: int) -> Tensor:
    """(n (n - 1) - 1, n) the orders in which one of n places is moved to another."""
    orders = set[tuple[int, ...]]()
    for at in range(length):
        rest = [k for k in range(length) if k != at]
        orders |= {(*rest[:to], at, *rest[to:]) for to in range(length)}
    return torch.tensor(sorted(orders - {tuple(range(length))}))


def _least(values: Tensor, count: int) -> list[int]:
    """The places of the smallest finite values of a tensor, as if it were flat."""
    flat = values.flatten()
    best = flat.topk(min(count, len(flat)), largest=False)
    places: list[int] = best.indices[best.values.isfinite()].tolist()
    return places


class _Weights(Images):
    """The variables of the search: logits (B, n, K) of the weights; `fixed` ones where `mask`."""

    def __init__(self, start: Tensor, mask: Tensor, fixed: Tensor) -> None:
        self.logits = start.requires_grad_()
        self.variables = [self.logits]
        self.mask = mask
        self.fixed = fixed

    def __call__(self) -> Tensor:
        return torch.where(self.mask, self.fixed, self.logits.softmax(-1))


def _labels(
    observation: Observation,
    generator: torch.Generator,
) -> Tensor | None:
    """The labels that the simulated loss takes; None: they are searched."""
    loss = named(observation.task.loss)
    if loss.name == "next_token":  # the weighted tokens are the labels
        return torch.zeros(observation.examples, dtype=torch.int64)
    if loss.of_inputs:
        raise NotApplicable(f"labels under {loss.name!r} are other tokens than the input's")
    if observation.labels is not None:
        return observation.labels
    try:
        return infer_labels(observation, generator)
    except NotApplicable:
        return None


# --- a model of weighted tokens ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _TakesWeights:
    """The forward pass of a language model for weights (B, n, K) of candidate tokens.

    What depends on the tokens themselves, such as the mask of padding, follows the heaviest ones.
    `labeled`: the weights of all tokens (B, n, V) stand behind the scores (B, n, V). `padding` is
    no label, so it has no weight there.
    """

    forward: Callable[[Tensor], Any]
    module: nn.Embedding
    candidates: Tensor
    labeled: bool
    padding: int | None

    def __call__(self, weights: Tensor) -> Tensor:
        def mixed(
            module: Any,
            _: Any,
            output: Tensor,
        ) -> Tensor:
            rows = module.weight[self.candidates]
            if module.padding_idx is not None:  # its row has no gradient
                fixed = (self.candidates == module.padding_idx)[:, None]
                rows = torch.where(fixed, rows.detach(), rows)
            mixture: Tensor = weights.to(rows) @ rows
            return mixture

        with self.module.register_forward_hook(mixed):
            output = self.forward(self.candidates[weights.argmax(-1)])
        scores: Tensor = output if isinstance(output, Tensor) else output["logits"]
        if not self.labeled:
            return scores
        if self.padding is not None:
            weights = weights * (self.candidates != self.padding)
        labels = torch.zeros_like(scores).index_add(-1, self.candidates, weights.to(scores))
        return torch.cat([scores, labels], -1)


def _next_weights(output: Tensor, _: Tensor) -> Tensor:
    """`losses.next_token` for scores and weights (B, n, 2 V)."""
    scores, labels = output.chunk(2, -1)
    labels = labels[:, 1:]
    return -(labels * scores[:, :-1].log_softmax(-1)).sum() / labels.sum()


def weighted(task: Task, candidates: Tensor) -> Task:
    """The task with weights (n, K) of candidate tokens (K,) as inputs, at the same parameters.

    With a weight of 1 for one token of each place, it has the update of these tokens.

    Raises:
        NotApplicable: the model does not take its tokens from one embedding alone.
    """
    # A shallow copy shares the client's weights, but `forward` changes on the copy alone.
    model = copy.copy(task.model)
    vars(model)["_modules"] = dict(task.model._modules)
    table: Any = task.model.get_submodule(embeddings(task)[0])
    labeled = shifted(task)
    padding = token_domain(task).padding
    vars(model)["forward"] = _TakesWeights(task.model.forward, table, candidates, labeled, padding)
    changed = replace(
        task,
        model=model,
        domain=None,
        input_range=(0.0, 1.0),
        public=None,
    )
    if labeled:
        loss = NamedLoss("next weights", _next_weights, "any")
        changed = replace(changed, loss=loss, label_range=None)
    return changed
