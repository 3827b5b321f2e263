"""Words from what any optimizer made of low-rank adapters, by pursuit in whitened numbers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import scipy
import torch
from torch import Tensor

from leakbound import check
from leakbound.attacks.base import Answer, Attack, SentRow, each_row, rows_of, seen_task
from leakbound.attacks.blind import VANISHED, public_images
from leakbound.attacks.idle import beside_decay
from leakbound.attacks.tokens.adapters import (
    MOST_ATOMS,
    FirstLayer,
    Pair,
    of_each,
    pairs_of,
    same_inputs,
    shared_space,
)
from leakbound.attacks.tokens.layers import (
    dictionary,
    filled,
    handed_on,
    readers,
    token_domain,
    touched,
    words,
)
from leakbound.core import NotApplicable, Observation, Reconstruction, Task
from leakbound.randomness import normal, stream

BLOCK = 8
"""Tokens that one step of the pursuit may choose."""
ALIKE = 0.3
"""From this cosine on, two tokens are not chosen in one step: one of them may be an echo."""
KEPT = 0.98
"""The share of tokens whose law is that of tokens that do not occur."""
ROUNDS = 3
"""How often this law is fitted to the tokens that it keeps."""
SAMPLED = 2**15
"""About so many tokens show the law; more would take time and hardly change it."""
THIN = 12
"""Directions of the rows that count: the width over this. With more of them, tokens that were not
found leave echoes in words that resemble them.
"""
FAINT = 1e-2
"""Directions with less than this share of the largest are rounding."""
HIDDEN = 0.05
"""The least share of an input outside of the tokens found; less is rounding."""
NEIGHBORS = 64
"""Words whose neighbors are looked for together."""
NEAR = 8
"""A word counts for what sets it apart from so many words that it resembles most: one of them may
occur in its place.
"""
SPREAD = 0.1
"""The least share of the coordinates that an input must spread over. Numbers of one that lies along
a few do not add up to a normal law; only marks, such as [CLS], are known to.
"""
SHARED = 0.8
"""A token whose input is this near to the mean of all has hardly a vector of its own, such as the
row of padding, which is zero: it shows what all tokens share. Others of two real tables and of
random BERT are at most .73 near.
"""
COMMON = 4096
"""The most frequent tokens, whose echoes in other tokens are counted."""
TYPICAL = 1024
"""About so many tokens show the usual echo; more would take time and hardly change it."""
RARE = 10
"""Without public text, token i is as frequent as 1 / (i + RARE): tokenizers sort by frequency."""
MERGED = ""
"""In place of B: the adapter was added to the weight."""
PART = 2**11
"""Rows of the word table that are worked on at a time, where copies take memory."""
FEWEST = 50
"""Tokens for each direction of the rows that the law of the others needs."""
ASSUMES = (
    "tokens that do not occur meet the update as most tokens do, but for their resemblance to "
    "frequent ones"
)


@dataclass(frozen=True)
class LikelyTokens:
    """Tokens of one row of an update, those with the largest statistic first.

    Attributes:
        clear: those that stand out also beside what frequent tokens leave in them.
        likely: others, which may be echoes of frequent tokens that they resemble.
    """

    clear: tuple[int, ...]
    likely: tuple[int, ...]


@dataclass(frozen=True)
class AdapterWords(Attack):
    """Words of the client from changes of low-rank adapters (LoRA), under any optimizer.

    The change of A of an adapter at the first attention layer holds a part along the layer's input
    of each token in the batch, also after Adam: the signs of Gaussian numbers correlate with the
    numbers (Bussgang 1952). What else it holds meets the inputs of all tokens in the same way. So
    the tokens of the vocabulary that do not occur, which are nearly all, show the law of chance:
    their numbers, one for each direction of the changes, have a covariance, and after whitening
    their square is chi-square. Tokens beyond the level are chosen, the most extreme first, and
    projected off; at the end each is tested beside all others.

    Adam divides by sizes, so a coordinate that is large in most inputs counts less in the changes
    than in the inputs. Inputs are scaled by what the update itself shows of this (`_gains`).

    A token that resembles frequent ones meets more of what the pursuit has not found. Its square is
    divided by the root of what frequent tokens leave in it, relative to the median token:
    frequencies of public text if there is some, else by the number of the token, as tokenizers sort
    by frequency. It counts for what sets it apart from its neighbors, and only if it spreads over
    the coordinates and is not what all share. Other tokens that stand out are likely, not stated.

    An adapter that was added to its weight leaves the row space of A in the change. There words
    stand out from a random A as soon as training has moved A far: after hundreds of steps.

    All adapters that get these inputs count together, and so do earlier rounds of the same client,
    whether they hold the same examples or not.

    Args:
        level: of the test for all words of one client. With word tables of two real models and
            two kinds of text, 1 of 895 lists at .01 named a wrong word, and 1 of 665 with public
            text (95 %: at most .007 and .009).

    Assumptions: what precedes the layer is frozen. The level is a p-value under a model of chance,
        not a certificate: it assumes that words that do not occur meet the update as most of the
        vocabulary does.

    Raises:
        NotApplicable: no tokens, no adapter at the first layer, adapters A that did not change (a
            first step from B = 0), or a vocabulary too small for the law of chance.

    Source: this project; the covariance from trimmed samples by Rousseeuw and van Driessen 1999,
        its factor by Croux and Haesbroeck 1999.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.domains import TokenDomain
        >>> class Adapted(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         torch.manual_seed(0)
        ...         self.words = torch.nn.Embedding(500, 96).requires_grad_(False)
        ...         self.base = torch.nn.Linear(96, 96).requires_grad_(False)
        ...         self.lora_A = torch.nn.Linear(96, 8, bias=False)
        ...         self.lora_B = torch.nn.Linear(8, 96, bias=False)
        ...         self.head = torch.nn.Linear(96, 3).requires_grad_(False)
        ...     def forward(self, ids):
        ...         x = self.words(ids)
        ...         return self.head((self.base(x) + self.lora_B(self.lora_A(x))).tanh().mean(1))
        >>> batch = torch.tensor([[3, 314, 159]]), torch.tensor([0])
        >>> found = lb.simulate(
        ...     Adapted(), batch, attack=AdapterWords(), domain=TokenDomain(500, 3),
        ...     plan=lb.LocalPlan(5, 1e-3, optimizer="adamw"))
        >>> sorted(found.reconstruction[0].tolist())
        [3, 159, 314]
    """

    level: float = 0.01

    @property
    def explains(self) -> bool:
        return False

    @property
    def across_rounds(self) -> bool:
        return True

    def __post_init__(self) -> None:
        check.fraction(level=self.level)

    def __call__(
        self,
        observation: Observation,
        generator: torch.Generator,
    ) -> Reconstruction:
        domain = token_domain(observation.task)
        each: list[LikelyTokens] = []

        def one(row: SentRow) -> Answer:
            found = self._of_row(row)
            each.append(found)
            return Answer(filled(row, (*found.clear, *found.likely)), _said(found))

        observation = _without_decay(observation)
        answer = each_row(observation, seen_task(observation), one)
        if not handed_on(observation.task):
            return answer
        tokens = list(dict.fromkeys(token for found in each for token in found.clear))
        found = words(
            domain,
            tokens,
            min(1.0, self.level * len(each)),
            ASSUMES,
        )
        return replace(answer, facts=found)

    def found(self, observation: Observation) -> LikelyTokens:
        """The tokens in the first row of the update."""
        return self._of_row(_rows(observation)[0])

    @torch.no_grad()
    def _of_row(self, row: SentRow) -> LikelyTokens:
        pairs = pairs_of(row.task) or _merged(row.task)
        layers = FirstLayer.each(row.task, pairs)
        if row.is_zero:
            raise NotApplicable(VANISHED)
        level = self.level / len(layers)
        each = of_each(layers, lambda layer: self._of_layer(row, layer, level))
        clear = [token for found in each for token in found.clear]
        likely = [token for found in each for token in found.likely if token not in clear]
        return LikelyTokens(
            clear=tuple(dict.fromkeys(clear)),
            likely=tuple(dict.fromkeys(likely)),
        )

    def _of_layer(
        self,
        row: SentRow,
        layer: FirstLayer,
        level: float,
    ) -> LikelyTokens:
        task = row.task
        earlier = same_inputs(row, layer, _rows)
        changes = [_changes(one, layer) for one in (row, *earlier)]
        rows = torch.cat(changes)
        if not len(rows):
            raise NotApplicable(
                "no adapter A changed: B was 0, and a first step changes B alone; this does not "
                "protect later steps and rounds"
            )
        some = touched(row)
        atoms, tokens = _atoms(task, layer, some)
        inside = None
        if layer.by_place:
            inside = shared_space(task, layer, token_domain(task).length)
        if layer.by_place and inside is None:
            raise NotApplicable("the layer's inputs depend on the place in no additive way")
        shares = _frequencies(row.observation, tokens)
        rows = _normalized(rows)
        gains = _gains(rows, atoms, shares)
        atoms *= gains.to(atoms)  # in place, as what follows: the table may be large
        if inside is not None:
            # What all places share tells no token from another.
            axes = torch.linalg.qr(gains[:, None] * inside)[0]
            rows = _normalized(rows - (rows @ axes) @ axes.T)
            axes = axes.to(atoms)
            for part in torch.split(atoms, PART):
                part -= (part @ axes) @ axes.T
        atoms /= atoms.norm(dim=1, keepdim=True).clamp_min(1e-30)
        pursuit = _Pursuit.of(
            rows,
            atoms,
            level,
        )
        chosen, squares = pursuit.tokens()
        order = squares.argsort(descending=True).tolist()
        clear = _clear(pursuit, chosen, squares, shares).tolist()
        named = [(int(tokens[chosen[k]]), clear[k]) for k in order]
        return LikelyTokens(
            clear=tuple(token for token, alone in named if alone),
            likely=tuple(token for token, alone in named if not alone),
        )


def _said(found: LikelyTokens) -> str:
    """What an answer does not say."""
    count = len(found.clear)
    if not count + len(found.likely):
        return "no token stands out"
    more = f", and {len(found.likely)} more are likely" if found.likely else ""
    return (
        f"{count} words are found, not for certain{more}; their order, other words, and which "
        "sequence holds which are not known"
    )


def _without_decay(observation: Observation) -> Observation:
    """Decay that stays, as of a sum of clients, lies along A, which meets tokens as noise does."""
    with suppress(NotApplicable):
        return beside_decay(observation, seen_task(observation))
    return observation


def _rows(observation: Observation) -> list[SentRow]:
    observation = _without_decay(observation)
    return rows_of(observation, seen_task(observation))


def _merged(task: Task) -> list[Pair]:
    """Trained weights of the first layers, to which a client may have added B A."""
    weights = (
        Pair(weight, MERGED, group.names[0], flip)
        for group in readers(task)
        for weight, flip in group.weights
        if not group.mixes and weight in task.names
    )
    return list(weights)


def _changes(row: SentRow, layer: FirstLayer) -> Tensor:
    """(m, d) the changes of the layer's adapters A that are not zero, float64."""
    parts = row.task.unflatten(row.values)
    pairs = [pair for pair in layer.pairs if pair.a in row.task.names]
    blocks = [pair.matrix(parts, pair.a) for pair in pairs]
    rows = torch.cat(blocks) if blocks else torch.zeros(0, 1, dtype=torch.float64)
    rows = rows[rows.any(1)]
    return _directions(rows) if len(rows) and pairs[0].b == MERGED else rows


def _directions(rows: Tensor) -> Tensor:
    """(k, d) orthonormal: the few directions of the change of weights that adapters leave.

    Raises:
        NotApplicable: there are more.
    """
    most = rows.shape[1] // THIN + 1
    # Random sums of the rows span what they do, and are few.
    weights = normal(
        (most, len(rows)),
        stream(0, "merged"),
        like=rows,
    )
    mixed = weights @ _normalized(rows)
    _, sizes, axes = torch.linalg.svd(mixed, full_matrices=False)
    kept = int((sizes > FAINT * sizes[0]).sum())
    if len(rows) <= most or kept == most:
        raise NotApplicable(
            "the model has no low-rank adapter (a pair of weights A, B), and its first layer "
            f"changed in {most} directions or more, as no merged adapter changes it"
        )
    return axes[:kept]


def _atoms(
    task: Task,
    layer: FirstLayer,
    some: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The layer's inputs (V, d), float32, and the tokens (V,) that they are of.

    Raises:
        NotApplicable: they do not fit in memory.
    """
    numbers: list[Tensor] = []
    atoms = None
    at = 0
    total = token_domain(task).vocabulary if some is None else len(some)
    for tokens, inputs in dictionary(task, layer.hook, 1, some):
        width = inputs.shape[-1]
        if total * width > MOST_ATOMS:
            raise NotApplicable(
                f"{total} tokens of width {width} do not fit in memory ({MOST_ATOMS} numbers)"
            )
        if atoms is None:
            # One piece of memory: parts that are joined need twice as much.
            atoms = torch.empty(total, width)
        atoms[at : at + len(tokens)] = inputs[:, 0].cpu()
        at += len(tokens)
        numbers.append(tokens.cpu())
    assert atoms is not None  # a vocabulary has tokens
    return atoms, torch.cat(numbers)


def _gains(
    rows: Tensor,
    atoms: Tensor,
    shares: Tensor,
) -> Tensor:
    """(d,) what the rows (m, d) show of each coordinate of the inputs, up to a factor.

    SGD shows coordinates as they are. Adam divides each entry by its own size, so that coordinates
    count the same whose inputs do not. What the update does is a power of the coordinate's size in
    the inputs, by least squares between the two, and the gain is what lies between. Half of the
    size is that of frequent tokens.
    """
    squares = torch.zeros(atoms.shape[1], dtype=torch.float64)
    weights = (shares + 1 / len(atoms)).to(atoms)
    parts = zip(
        torch.split(weights, PART),
        torch.split(atoms, PART),
        strict=True,
    )
    for some, part in parts:  # copies of all would take memory
        squares += some @ part.square()
    sizes = squares.clamp_min(1e-30).log() / 2
    shown = rows.square().mean(0).clamp_min(1e-30).log() / 2
    apart = sizes - sizes.mean()
    power = float((apart @ shown) / (apart @ apart).clamp_min(1e-12))
    power = min(max(power, 0.0), 1.0)
    return (apart * (power - 1)).exp()


def _normalized(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)


@dataclass(eq=False)
class _Pursuit:
    """A pursuit for the atoms (V, d) of unit length in rows, by whitened squares.

    Attributes:
        rows: (k, d) the rows' directions, each in its size.
        limit: the square above which no atom lies by chance, at the level.
        met: (k, V) what atoms hold of the rows, outside of those that were chosen.
        left: (V,) the atoms' squares outside of those.
        basis: (s, d) of those.
    """

    atoms: Tensor
    rows: Tensor
    limit: float
    met: Tensor
    left: Tensor
    basis: Tensor

    @staticmethod
    def of(
        rows: Tensor,
        atoms: Tensor,
        level: float,
    ) -> _Pursuit:
        count, width = atoms.shape
        _, sizes, axes = torch.linalg.svd(rows, full_matrices=False)
        kept = int((sizes > FAINT * sizes[0]).sum())
        kept = min(kept, max(1, width // THIN))
        if count < FEWEST * kept:
            raise NotApplicable(
                f"{count} tokens show no law of chance for {kept} directions; {FEWEST * kept} do"
            )
        strong = (axes[:kept] * sizes[:kept, None]).to(atoms)
        # Any of the tokens may be the one that stands out.
        limit = float(scipy.stats.chi2.isf(level / count, kept))
        return _Pursuit(
            atoms=atoms,
            rows=strong,
            limit=limit,
            met=strong @ atoms.T,
            left=torch.ones(count),
            basis=torch.zeros(0, width),
        )

    def tokens(self) -> tuple[list[int], Tensor]:
        """The atoms that stand out beside all others, and their squares."""
        taken = torch.zeros(len(self.atoms), dtype=torch.bool)
        chosen = list[int]()
        most = self.atoms.shape[1] - len(self.rows) - BLOCK
        while len(chosen) < most:
            squares = torch.full((len(taken),), -1.0)
            squares[~taken] = _squares(self._seen()[:, ~taken])
            new = self._unlike(squares)
            if not new:
                break
            self._project(new)
            taken[new] = True
            chosen += new
        return self._tested(chosen, self._seen()[:, ~taken])

    def _seen(self) -> Tensor:
        return self.met / self.left.clamp_min(HIDDEN).sqrt()

    def _unlike(self, squares: Tensor) -> list[int]:
        """The largest squares above the limit, of atoms that do not resemble each other."""
        top = squares.topk(min(BLOCK, len(squares)))
        new = list[int]()
        for atom in top.indices[top.values > self.limit].tolist():
            if not new or float((self.atoms[new] @ self.atoms[atom]).abs().max()) < ALIKE:
                new.append(atom)
        return new

    def _project(self, new: list[int]) -> None:
        """Take new atoms off all others."""
        more = self.atoms[new]
        more = more - (more @ self.basis.T) @ self.basis
        more = torch.linalg.qr(more.T)[0].T
        parts = self.atoms @ more.T
        self.basis = torch.cat([self.basis, more])
        self.met -= (self.rows @ more.T) @ parts.T
        self.left -= parts.square().sum(1)

    def _tested(
        self,
        chosen: list[int],
        others: Tensor,
    ) -> tuple[list[int], Tensor]:
        """Without the weakest while it does not stand out beside the rest; `others`: not chosen."""
        squares = torch.zeros(0)
        near = dict(
            zip(
                chosen,
                self._neighbors(chosen),
                strict=True,
            )
        )
        while chosen:
            alone = self._alone(chosen, near)
            # Their law is that of the others.
            every = torch.cat([others, self.rows @ alone.T], 1)
            squares = _squares(every)[others.shape[1] :]
            if bool((squares > self.limit).all()):
                break
            chosen.pop(int(squares.argmin()))
        return chosen, squares[: len(chosen)]

    def _neighbors(self, chosen: list[int]) -> list[Tensor]:
        """The atoms that each chosen one resembles most, of those that were not chosen."""
        near = list[Tensor]()
        every = torch.tensor(chosen, dtype=torch.int64)
        # Some at a time: the cosines take memory, and each pass over the atoms takes time.
        for some in torch.split(every, NEIGHBORS):
            cosines = (self.atoms[some] @ self.atoms.T).abs()
            cosines[:, chosen] = -1.0
            count = min(NEAR, len(self.atoms) - len(chosen))
            near += [*cosines.topk(count).indices]
        return near

    def _alone(
        self,
        chosen: list[int],
        near: dict[int, Tensor],
    ) -> Tensor:
        """(s, d) what each chosen atom has outside of the other ones and of its own neighbors."""
        every = self.atoms[chosen].double()
        # Rows of the pseudo-inverse: each atom outside of all others that were chosen.
        alone = _normalized(torch.linalg.pinv(every).T)
        basis = torch.linalg.qr(every.T)[0].T
        left = list[Tensor]()
        for atom, direction in zip(chosen, alone, strict=True):
            others = self.atoms[near[atom]].double()
            outside = others - (others @ basis.T) @ basis
            outside = outside + (others @ direction)[:, None] * direction
            # Neighbors count for what no chosen atom explains.
            span = torch.linalg.qr(outside.T)[0].T
            left.append(direction - (span @ direction) @ span)
        return _normalized(torch.stack(left)).to(self.rows)


def _squares(numbers: Tensor) -> Tensor:
    """(V,) squared lengths of columns (k, V) in units of the covariance of most of them."""
    size = len(numbers)
    cut = scipy.stats.chi2.ppf(KEPT, size)
    # The covariance of a normal law without its tail is smaller by this factor.
    shrunk = float(scipy.stats.chi2.cdf(cut, size + 2)) / KEPT
    sample = numbers[:, :: max(1, numbers.shape[1] // SAMPLED)]
    law = _Law.of(sample)
    for _ in range(ROUNDS - 1):
        squares = law.squares(sample)
        most = squares.sort().values[int(KEPT * (len(squares) - 1))]
        law = _Law.of(sample[:, squares <= most], shrunk)
    return law.squares(numbers)


@dataclass(frozen=True)
class _Law:
    """A mean (k, 1) and what gives columns of a covariance that of white noise (k, k)."""

    middle: Tensor
    whitens: Tensor

    @staticmethod
    def of(numbers: Tensor, share: float = 1.0) -> _Law:
        """Of columns (k, n) that show this share of the covariance."""
        some = numbers.double()
        middle = some.mean(1, keepdim=True)
        apart = some - middle
        covariance = apart @ apart.T / (some.shape[1] * share)
        root = torch.linalg.cholesky(covariance)
        identity = torch.eye(len(root), dtype=root.dtype)
        whitens = torch.linalg.solve_triangular(root, identity, upper=False)
        return _Law(middle.to(numbers), whitens.to(numbers))

    def squares(self, numbers: Tensor) -> Tensor:
        """(n,) squared lengths in units of this law."""
        return (self.whitens @ (numbers - self.middle)).square().sum(0)


def _frequencies(observation: Observation, tokens: Tensor) -> Tensor:
    """(V,) the shares of tokens in public text; without it, those of a law of their numbers."""
    public = public_images(observation)
    if public is None:
        shares = 1 / (tokens.double() + RARE)
    else:
        counts = torch.bincount(public.flatten().long().cpu(), minlength=int(tokens.max()) + 1)
        shares = counts[tokens].double()
    return shares / shares.sum()


def _clear(
    pursuit: _Pursuit,
    chosen: list[int],
    squares: Tensor,
    shares: Tensor,
) -> Tensor:
    """(s,) which of the chosen atoms stand out also beside what frequent tokens leave in them."""
    # By the root: of tokens that do not occur, the hundredth that hold most of frequent ones have
    # squares of 1.1 to 1.4 times the others' on average, but a heavier tail.
    echo = _echoes(pursuit.atoms, shares, chosen).sqrt()
    apart = squares > echo * pursuit.limit
    inputs = pursuit.atoms[chosen]
    spread = 1 / inputs.pow(4).sum(1).clamp_min(1e-30)
    wide = spread > SPREAD * inputs.shape[1]
    shared = _normalized(pursuit.atoms.mean(0, keepdim=True))
    own = (inputs @ shared.T).abs()[:, 0] < SHARED
    return apart & wide & own


def _echoes(
    atoms: Tensor,
    shares: Tensor,
    chosen: list[int],
) -> Tensor:
    """(s,) how much more of frequent tokens than the median token each chosen one holds, 1 or more.

    The token itself does not count.
    """
    common = shares.topk(min(COMMON, len(shares))).indices
    frequent = atoms[common] * shares[common].sqrt()[:, None].to(atoms)

    def held(some: Tensor) -> Tensor:
        whole = (atoms[some] @ frequent.T).square().sum(1)
        own = torch.isin(some, common) * shares[some].to(atoms)
        return (whole - own).clamp_min(0)

    usual = held(torch.arange(0, len(atoms), max(1, len(atoms) // TYPICAL))).median()
    return (held(torch.tensor(chosen, dtype=torch.int64)) / usual).clamp_min(1.0)
