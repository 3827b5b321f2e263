"""What a language model's layers see of tokens, up to a layer and no further."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from leakbound._util.results import LISTED, Fact
from leakbound.attacks.base import SentRow, domain_of, modules_of, seen_by
from leakbound.attacks.blind import public_images
from leakbound.attacks.pace import is_over
from leakbound.client import call
from leakbound.core import NotApplicable, Observation, Task
from leakbound.domains import TokenDomain
from leakbound.engines.path import unchanging
from leakbound.losses import named, next_labels
from leakbound.randomness import permutation, stream

NUMBERS = 1 << 22
"""Most activations (tokens times width) that one call of the model computes per layer: they fit in
a processor's cache.
"""
SHORT = 8
"""Places that show which tables get the tokens: large output layers take time at each place."""
SAME = 1e-4
OWN = 0.5
"""Relative change of a layer's input that counts as none, for rounding; share of the largest weight
of a place's own token, relative to others, from which a layer is tested.
"""
OUT_OF_TIME = "the time is over before all tokens were tried: give more"
UNIQUE = 0.2
"""How far a coefficient that is 0 or 1 may be from it."""


def token_domain(task: Task) -> TokenDomain:
    """The domain of the task's sequences."""
    return domain_of(task, TokenDomain)


@torch.no_grad()
def inputs_of(
    task: Task,
    name: str,
    sequences: Tensor,
) -> Tensor:
    """What the module `name` gets for sequences (N, n), as (N, n, d); later layers do not run.

    Raises:
        NotApplicable: the model does not call the module with one tensor (N, n, d).
    """
    seen = seen_by(task, [name], sequences, whole=False).get(name)
    if seen is None or seen.ndim != 3 or seen.shape[:2] != sequences.shape:
        raise NotApplicable(f"the model does not call the layer {name!r} with one vector a token")
    return seen


def dictionary(
    task: Task,
    name: str,
    places: int,
    tokens: Sequence[int] | Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of (tokens (K,), what the module `name` gets for each at every place (K, places, d)).

    Each token is repeated over a whole sequence. So this is what a layer gets that mixes no places
    before it, such as the first attention layer.

    Raises:
        NotApplicable: the time of an open `Pace` is over.
    """
    domain = token_domain(task)
    every = torch.arange(domain.vocabulary) if tokens is None else torch.as_tensor(tokens)
    device = task.parameters.device
    width = inputs_of(task, name, every[:1, None].expand(1, places).to(device)).shape[-1]
    for part in torch.split(every, max(1, NUMBERS // (places * width))):
        if is_over():
            raise NotApplicable(OUT_OF_TIME)
        yield part, inputs_of(task, name, part[:, None].expand(-1, places).to(device))


def labels_of(row: SentRow) -> Tensor | None:
    """The labels (count, n) of the examples behind a row, if they are known and are tokens."""
    labels = row.observation.labels
    return None if labels is None or labels.ndim != 2 else labels[row.places].cpu()


def shifted(task: Task) -> bool:
    """Whether each place's output is scored by the next token, so the last place by none."""
    return named(task.loss).name == "next_token"


def filled(row: SentRow, tokens: Sequence[int]) -> Tensor:
    """(count, n) sequences of these tokens, in turn; without any, the prior-only baseline."""
    domain = token_domain(row.task)
    if not tokens:
        return domain.blind(public_images(row.observation)).cpu().repeat(row.count, 1)
    turn = torch.arange(row.count * domain.length) % len(tokens)
    return torch.tensor(tokens, dtype=domain.dtype)[turn].reshape(row.count, domain.length)


def words(
    domain: TokenDomain,
    tokens: Sequence[int],
    level: float | None,
    assumes: str,
) -> tuple[Fact, ...]:
    """The fact that these tokens occur in the batch; none without a token. Padding is no word.

    Numbers and names come first: they may identify a person.
    """
    tokens = [token for token in tokens if token != domain.padding]
    if not tokens:
        return ()
    told = sorted(tokens, key=lambda token: _telling(domain, token))
    shown = domain.text(torch.tensor(told[:LISTED]))
    return (
        Fact(
            kind="words",
            items=shown,
            count=len(tokens),
            level=level,
            assumes=assumes,
        ),
    )


def _telling(domain: TokenDomain, token: int) -> tuple[bool, ...]:
    """Sort key: numbers first, then names, other words, and parts of words."""
    if not domain.words:
        return ()
    text = domain.words[token]
    number = any(letter.isdigit() for letter in text)
    name = text[:1].isupper() and text[1:].islower()
    word = text.isalpha() and len(text) > 3
    return not number, not name, not word


def extended(domain: TokenDomain, prefixes: Tensor) -> Tensor:
    """(N, n) sequences that begin with prefixes (N, L); then padding, or the last token again."""
    missing = domain.length - prefixes.shape[1]
    rest = prefixes[:, -1:].repeat(1, missing)
    if domain.padding is not None and not domain.padded_before:
        rest = torch.full_like(rest, domain.padding)
    return torch.cat([prefixes, rest], 1)


def whole(
    observation: Observation,
    task: Task,
    names: Sequence[str],
) -> bool:
    """Whether the update has every entry of these parameters: no mask withholds some."""
    mask = observation.update.mask
    if mask is None:
        return True
    sent = [task.unflatten(row) for row in mask]
    return all(bool(parts[name].all()) for parts in sent for name in names)


# --- word and position tables ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WordTable:
    """A trained embedding of the tokens: its parameter, the module, and whether outputs share it.

    `padding` has no gradient.
    """

    weight: str
    module: str
    tied: bool
    padding: int | None


def probe(domain: TokenDomain, seed: int = 0) -> Tensor:
    """(1, n) random public tokens, all different if there are enough, and none is padding."""
    # A fixed stream: what a model does must not depend on the run's seed.
    order = permutation(domain.vocabulary, stream(0, "probe", seed))
    order = order[order != (-1 if domain.padding is None else domain.padding)]
    return order[torch.arange(domain.length) % len(order)][None]


def word_table(task: Task) -> WordTable:
    """The trained embedding that the model calls with the tokens.

    Raises:
        NotApplicable: there is none, or it is frozen.
    """
    # By identity: a shared weight is listed under one of its names.
    names = {id(p): name for name, p in task.model.named_parameters()}
    read = embeddings(task)
    for name in read:
        module: Any = task.model.get_submodule(name)
        if id(module.weight) in names and not module.scale_grad_by_freq:
            others = (m for m in task.model.modules() if m is not module)
            # A tied table gets the output layer's gradient, too.
            tied = any(getattr(other, "weight", None) is module.weight for other in others)
            return WordTable(names[id(module.weight)], name, tied, module.padding_idx)
    raise NotApplicable(
        f"the word embedding {read[0]!r} is frozen, so the client sends no gradient of it"
    )


def handed_on(task: Task) -> bool:
    """Whether the word embedding gets the same tokens in every mode: none are masked at random."""
    ids = probe(token_domain(task)).to(task.parameters.device)
    return unchanging(task, ids, embeddings(task)[0], whole=False)


_EMBEDDINGS: WeakKeyDictionary[nn.Module, dict[Any, list[str]]] = WeakKeyDictionary()
"""The tables found, for a run takes time: by model, then by vocabulary, length and padding."""


def embeddings(task: Task) -> list[str]:
    """The modules `nn.Embedding`, trained or not, that the model calls with the tokens.

    Raises:
        NotApplicable: there is none.
    """
    domain = token_domain(task)
    known = _EMBEDDINGS.setdefault(task.model, {})
    kind = (domain.vocabulary, domain.length, domain.padding)
    if kind not in known:
        known[kind] = _embeddings(task, domain)
    if not known[kind]:
        raise NotApplicable("the model calls no nn.Embedding with the tokens")
    return known[kind]


def _embeddings(task: Task, domain: TokenDomain) -> list[str]:
    ids = probe(domain).to(task.parameters.device)
    # A model may take whole sequences only, or fill short ones up to its length.
    with suppress(Exception):
        if read := _read(task, domain, ids[:, :SHORT]):
            return read
    return _read(task, domain, ids)


def _read(task: Task, domain: TokenDomain, ids: Tensor) -> list[str]:
    calls = _calls(task, ids, nn.Embedding)
    read = [name for name, seen in calls.items() if seen is not None and torch.equal(seen, ids)]
    # Tables of places may get tokens, too, whose number alone they use.
    modules: dict[str, Any] = {name: task.model.get_submodule(name) for name in read}
    return [name for name in read if modules[name].num_embeddings >= domain.vocabulary]


def touched(row: SentRow) -> Tensor | None:
    """The tokens whose rows of a trained word table have a gradient; None if no such table is
    trained, or all rows have one (as of tied weights, or noise).
    """
    task = row.task
    sent = task.unflatten(row.values)
    tables = list[Tensor]()
    with suppress(NotApplicable):  # the model calls no table with the tokens
        for name in embeddings(task):
            if (weight := sent.get(f"{name}.weight")) is not None:
                rows = weight[: token_domain(task).vocabulary].any(1).cpu()
                if not rows.any():  # frozen, whatever the model says
                    continue
                padding: Any = task.model.get_submodule(name).padding_idx
                if padding is not None:
                    # Its row never has a gradient, whether it occurs or not.
                    rows[padding] = True
                tables.append(rows)
    every = torch.stack(tables).all(0) if tables else torch.ones(1, dtype=torch.bool)
    return None if every.all() else every.nonzero()[:, 0]


def place_rows(
    task: Task,
    table: WordTable,
    reader: str,
) -> tuple[str, Tensor, float] | None:
    """The parameter of learned positions, its row (n,) of every place, and a row's slope over that
    of a word row; None if there is none.

    Found by an experiment: for distinct tokens, a row of positions and the row of the token there
    have one slope, up to a factor, in whatever the module `reader` gets.
    """
    domain = token_domain(task)
    ids = probe(domain)
    if len(set(ids[0].tolist())) < domain.length:
        return None
    slopes = _slopes(task, reader, ids.to(task.parameters.device))
    if table.weight not in slopes:
        return None
    words = slopes.pop(table.weight)[ids[0]].double()
    for name, slope in slopes.items():
        wide = slope.reshape(-1, slope.shape[-1]).double() if slope.ndim > 1 else slope[None]
        if wide.shape[1] != words.shape[1] or len(wide) < domain.length:
            continue
        sizes = wide.norm(dim=1) * words.norm(dim=1)[:, None]
        angles = (words @ wide.T) / sizes.clamp_min(1e-300)
        near, rows = angles.max(1)
        if (near > 1 - SAME).all() and len(set(rows.tolist())) == domain.length:
            factors = wide[rows].norm(dim=1) / words.norm(dim=1)
            if float(factors.max()) <= (1 + SAME) * float(factors.min()):
                return name, rows, float(factors.mean())
    return None


def first_linear(task: Task) -> str | None:
    """The first linear module, trained or not, that gets a tensor (N, n, d)."""
    ids = probe(token_domain(task))
    for name, seen in _calls(task, ids.to(task.parameters.device)).items():
        module = task.model.get_submodule(name)
        if seen is not None and seen.ndim == 3 and _matrix(module) is not None:
            return name if seen.shape[:2] == ids.shape else None
    return None


def _slopes(
    task: Task,
    reader: str,
    ids: Tensor,
) -> dict[str, Tensor]:
    """The slopes of a random mixture of what the module `reader` gets, by parameters that matter"""
    leaves = {
        k: p.detach().clone().requires_grad_() for k, p in task.unflatten(task.parameters).items()
    }
    with torch.enable_grad():
        tensors = {**task.buffers, **leaves}
        seen = seen_by(task, [reader], ids, tensors, whole=False)[reader]
        assert seen is not None  # the reader is a layer that gets tensors
        # Weighted at random: behind a norm, a plain sum has no slope.
        mixture = torch.randn(seen.shape, generator=stream(0, "mixture")).to(seen)
        parts = torch.autograd.grad(
            (seen * mixture).sum(), list(leaves.values()), allow_unused=True
        )
    return {name: part.cpu() for name, part in zip(leaves, parts, strict=True) if part is not None}


# --- linear layers and what they get -----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Readers:
    """Linear modules that get the same tensor (N, n, d), with the trained weights that multiply it.

    Attributes:
        names: the modules.
        weights: of each weight, its parameter, and whether it is stored (d, outputs).
        mixes: its input at a place depends on tokens of other places.
        causal: only of places before.
        influence: change of the last place's input by its own token over that by the first token.
    """

    names: tuple[str, ...]
    weights: tuple[tuple[str, bool], ...]
    mixes: bool
    causal: bool
    influence: float

    def gradient(self, task: Task, flat: Tensor) -> Tensor:
        """(outputs, d) the stacked part of a flat vector (P,), float64 on the CPU."""
        sent = task.unflatten(flat)
        parts = (sent[name].T if flip else sent[name] for name, flip in self.weights)
        return torch.cat([part.double().cpu() for part in parts])


def readers(task: Task) -> list[Readers]:
    """The groups of linear modules by the tensor that they get, in the order of their calls.

    Found by an experiment with public tokens: one changed token shows which inputs mix places, and
    whether they depend on later ones.
    """
    domain = token_domain(task)
    names = {id(p): k for k, p in task.model.named_parameters()}
    device = task.parameters.device
    base = probe(domain)
    other = probe(domain, 1)
    first = base.clone()
    last = base.clone()
    first[:, 0] = _another(base, other, 0)
    last[:, -1] = _another(base, other, -1)
    calls = [_calls(task, ids.to(device)) for ids in (base, first, last)]
    groups: list[tuple[dict[str, tuple[str, bool]], Tensor]] = []
    for name, value in calls[0].items():
        held = _matrix(task.model.get_submodule(name))
        fits = value is not None and value.ndim == 3 and value.shape[:2] == base.shape
        if not fits or held is None or not value.is_floating_point():
            continue
        matrix, flip = held
        if id(matrix) not in names:
            continue
        # Queries, keys and values get one tensor, and so do their adapters, between other calls.
        same = next((group for group, seen in groups if torch.equal(seen, value)), None)
        if same is None:
            same = {}
            groups.append((same, value))
        same[name] = names[id(matrix)], flip
    readers_in_order = []
    for weights, value in groups:
        name = next(iter(weights))
        # Changes below rounding count as none.
        size = float(value.norm(dim=-1).mean()) * SAME
        ahead = (calls[1][name] - value).norm(dim=-1)[0, 1:]
        back = (calls[2][name] - value).norm(dim=-1)[0]
        behind = bool((back[:-1] > size).any())
        mixes = behind or bool((ahead > size).any())
        first_token = float(ahead[-1]) if len(ahead) else 0.0
        influence = float(back[-1]) / max(first_token, size, 1e-300)
        causal = mixes and not behind
        readers_in_order.append(
            Readers(tuple(weights), tuple(weights.values()), mixes, causal, influence)
        )
    return readers_in_order


def chosen(groups: Sequence[Readers]) -> tuple[Readers, tuple[Readers, ...]]:
    """The first group whose input mixes no places; and those that mix them, from the first that
    depends most on the token of its own place.

    The projection behind attention gets sums over places, in which tokens of several prefixes can
    cancel. A layer behind the shortcut gets the token of its place as well.

    Raises:
        NotApplicable: the first does not exist.
    """
    plain = [group for group in groups if not group.mixes]
    if not plain:
        raise NotApplicable("no trained linear layer gets each token alone, before places mix")
    mixed = [group for group in groups if group.mixes]
    most = max((group.influence for group in mixed), default=0.0)
    start = next((k for k, group in enumerate(mixed) if group.influence >= OWN * most), 0)
    return plain[0], tuple(mixed[start:])


def _another(
    base: Tensor,
    other: Tensor,
    place: int,
) -> int:
    """A token other than that of the probe at a place, if there is one."""
    used = int(base[0, place])
    tokens = (*other[0].tolist(), *base[0].tolist())
    return next((token for token in tokens if token != used), used)


def _matrix(module: nn.Module) -> tuple[Any, bool] | None:
    """The matrix of a linear module, and whether it is stored (d, outputs); None for others."""
    layer: Any = module
    if isinstance(module, nn.MultiheadAttention):
        return layer.in_proj_weight, False
    # Conv1D by its name: transformers may not be installed.
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return layer.weight, not isinstance(module, nn.Linear)
    return None


@torch.no_grad()
def _calls(
    task: Task,
    ids: Tensor,
    kinds: type[nn.Module] = nn.Module,
) -> dict[str, Any]:
    """What modules of a kind get for tokens; see `seen_by`."""
    return seen_by(task, [name for name in modules_of(task, kinds) if name], ids)


# --- the last token of causal models -----------------------------------------------------------


def completed(
    row: SentRow,
    prefixes: Sequence[Tensor],
) -> tuple[list[Tensor], str | None]:
    """Sequences that extend prefixes (L,) by their last token, and what is not known of these.

    A causal model that is scored by the next token has no gradient through its last token: it is a
    label. Known labels give it. Otherwise the gradient of the output layer does: its rows are
    sum_t (p_t - y_t) h_t, where only the last y_t of each sequence is not known. If the layer
    shares the word embedding, this holds for tokens that occur nowhere else.
    """
    task = row.task
    labels = labels_of(row)
    longest = token_domain(task).length
    open_ones = [prefix for prefix in prefixes if len(prefix) < longest]
    whole_ones = [prefix for prefix in prefixes if len(prefix) == longest]
    if not open_ones:
        return whole_ones, None
    if labels is not None:
        padding = token_domain(task).padding
        completions = [
            torch.cat([prefix, label[len(prefix) : len(prefix) + 1]])
            for prefix in open_ones
            for label in labels
            if torch.equal(label[1 : len(prefix)], next_labels(prefix[1:], padding))
            and int(label[len(prefix)]) >= 0
        ]
        if len({tuple(whole[:-1].tolist()) for whole in completions}) == len(open_ones):
            return whole_ones + completions, None
        return [*prefixes], "the last token has no gradient, and no known label fits"
    said = "no gradient shows the last token"
    if whole_ones or len(prefixes) != row.count or not task.plan.is_gradient or not shifted(task):
        return [*prefixes], said
    last, sure = _last_labels(row, prefixes)
    rows = [
        torch.cat([prefix, last[k : k + 1]]) if sure[k] else prefix
        for k, prefix in enumerate(prefixes)
    ]
    missing = len(prefixes) - sum(sure)
    return rows, f"{said} of {missing} sequences" if missing else None


@torch.no_grad()
def _last_labels(
    row: SentRow,
    prefixes: Sequence[Tensor],
) -> tuple[Tensor, list[bool]]:
    """The labels (N,) of the last places of prefixes (L,), if these are the whole batch, and which
    of them are known.
    """
    task = row.task
    vocabulary = token_domain(task).vocabulary
    padding = token_domain(task).padding
    device = task.parameters.device
    none = torch.zeros(len(prefixes), dtype=torch.int64), [False] * len(prefixes)
    head = output_layer(task)
    names = [] if head is None else [name for name, _ in head.weights]
    if head is None or not whole(row.observation, task, names):
        return none
    gradient = head.gradient(task, row.values)
    left = torch.zeros_like(gradient)
    ends = []
    scored = 0
    for prefix in prefixes:
        ids = prefix[None].to(device)
        inside = inputs_of(task, head.names[0], ids)[0].double().cpu()
        errors = call(task, task.tensors(), ids, twice=False)[0].double().cpu().softmax(-1)
        if errors.shape[-1] != vocabulary:
            return none
        # All labels but the last are known: they are the next tokens, where these are scored.
        known = next_labels(prefix[1:], padding) >= 0
        errors[:-1] -= nn.functional.one_hot(prefix[1:], vocabulary)
        errors[:-1][~known] = 0.0
        left += errors.T @ inside
        ends.append(inside[-1])
        scored += 1 + int(known.sum())
    # The loss is a mean over scored places; the sum of errors is not.
    left -= gradient * scored
    shares = left @ torch.linalg.pinv(torch.stack(ends))
    with suppress(NotApplicable):
        if word_table(task).weight == names[0]:
            # These tokens' rows also have the gradient of the inputs.
            shares[torch.cat([*prefixes])] = 0.0
    most, last = shares.max(0)
    rest = shares.scatter(0, last[None], 0.0).abs().amax(0)
    return last, (((most - 1).abs() < UNIQUE) & (rest < UNIQUE)).tolist()


def output_layer(task: Task) -> Readers | None:
    """The last linear layer with a row for every token; None if there is none."""
    count = token_domain(task).vocabulary
    heads = [g for g in readers(task) if len(g.gradient(task, task.parameters)) == count]
    return heads[-1] if heads else None
