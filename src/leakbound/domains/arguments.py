"""How a model takes the rows of a table: as stored, as numbers and codes, or column by column.

A row is stored with one share for each level of a category. A model with embeddings takes codes,
which no search can vary little by little. Here, such a model sees one constant code in every row,
and each embedding returns the mean of its rows, weighted by the shares. This is exact for shares of
0 and 1, as the clients have them, and differentiable in the shares and in the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leakbound.domains.base import Domain
from leakbound.domains.table import Column, TableDomain
from leakbound.random import stream

FORMS = ("split", "keywords", "dictionary")
TRIALS = 16
"""Rows on which an adapted model must agree with the user's."""
CLOSE = 1e-3
"""Largest difference there, relative to the largest output."""


@dataclass(frozen=True)
class _Look:
    """What one position of an embedding's input depends on: the column with its place in a row,
    and the embedding's row for each level; no place: always the same row.
    """

    index: Tensor
    place: tuple[int, int] | None = None

    def shares(self, rows: Tensor) -> Tensor:
        """(N, L) the shares of the levels in stored rows (N, n)."""
        return rows.new_ones(len(rows), 1) if self.place is None else rows[:, slice(*self.place)]


@dataclass(eq=False)
class _Call:
    """One forward pass: the stored rows (N, n), and how often each embedding was called so far."""

    rows: Tensor
    times: dict[int, int] = field(default_factory=dict)

    def looks(self, module: nn.Module) -> Sequence[_Look] | None:
        calls: Any = module.looks
        count = self.times[id(module)] = self.times.get(id(module), 0) + 1
        if count > len(calls):
            raise ValueError(
                f"the model calls an embedding {count} times, and did so {len(calls)} times when "
                "its columns were read; give a model that makes the same calls for all rows"
            )
        found: Sequence[_Look] | None = calls[count - 1]
        return found


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


def _lookups(module: nn.Module) -> tuple[Sequence[_Look], Tensor] | None:
    """Where the next call's input comes from, and the rows; None: from no column."""
    call = _CALL.get()
    looks = None if call is None else call.looks(module)
    return None if call is None or looks is None else (looks, call.rows)


class ColumnEmbedding(nn.Embedding):
    """An embedding of a table's columns: the mean of its rows, weighted by the levels' shares.

    `looks` has the columns behind each call, None for calls that depend on no column.
    """

    looks: Sequence[Sequence[_Look] | None]

    def forward(self, input: Tensor) -> Tensor:
        """Codes (N, ...) to (N, ..., D); their values count only if they come from no column."""
        if (found := _lookups(self)) is None:
            return super().forward(input)
        weight, (looks, rows) = self.weight, found
        if self.padding_idx is not None:  # PyTorch gives this row no gradient
            is_pad = torch.arange(len(weight), device=weight.device) == self.padding_idx
            weight = torch.where(is_pad[:, None], weight.detach(), weight)
        each = [look.shares(rows) @ weight[look.index.to(weight.device)] for look in looks]
        return torch.stack(each, 1).reshape(*input.shape, self.embedding_dim)


class ColumnEmbeddingBag(nn.EmbeddingBag):
    """As `ColumnEmbedding`, with the rows of one example reduced to their sum, mean or maximum."""

    looks: Sequence[Sequence[_Look] | None]

    def forward(
        self, input: Tensor, offsets: Any = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Codes (N, K) to (N, D)."""
        if (found := _lookups(self)) is None:
            return super().forward(input, offsets, per_sample_weights)
        parts, counts = [], []
        for look in found[0]:
            index = look.index.to(self.weight.device)
            shares = look.shares(found[1])
            if self.padding_idx is not None:  # PyTorch leaves this row out
                shares = shares * (index != self.padding_idx)
            parts.append(shares @ self.weight[index])
            counts.append(shares.sum(1))
        rows, count = torch.stack(parts, 1), torch.stack(counts, 1).sum(1, keepdim=True)
        if self.mode == "max":
            return rows.amax(1)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[..., None]
        total = rows.sum(1)
        return total if self.mode == "sum" else total / torch.where(count == 0, 1.0, count)


_COLUMNS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: ColumnEmbedding,
    nn.EmbeddingBag: ColumnEmbeddingBag,
}


class TakesRows:
    """The forward pass of a model for the stored rows (N, n) of a table.

    `form` and `names` say how the model is called; see `leakbound.models.adapted`. `constant`:
    columns whose codes only embeddings use; the model is called with code 0 for them. None: the
    model was not read yet and gets the codes themselves.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        domain: TableDomain,
        form: str = "split",
        names: Sequence[str] = (),
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"form is {form!r}; give one of {', '.join(FORMS)}")
        if names and (form != "split" or len(names) != 2):
            raise ValueError(
                f"names is {tuple(names)!r}; give the names of the arguments for numbers and for "
                'codes, with the form "split"'
            )
        self.forward, self.domain, self.form, self.names = forward, domain, form, tuple(names)
        self.constant: frozenset[int] | None = None

    def __call__(self, rows: Tensor) -> Any:
        """The model's output for stored rows."""
        codes = {}
        for k, column, (start, stop) in self.coded:
            shares = rows[:, start:stop]
            if self.constant is not None and k in self.constant:
                codes[k] = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
            elif column.encoding == "embedding":
                codes[k] = shares.argmax(-1)
            else:
                codes[k] = shares @ torch.arange(stop - start).to(shares)
        held = _CALL.set(None if self.constant is None else _Call(rows))
        try:
            return self.run(rows, codes)
        finally:
            _CALL.reset(held)

    @property
    def coded(self) -> list[tuple[int, Column, tuple[int, int]]]:
        """The columns that the model takes as codes, with their numbers and places."""
        pairs = zip(self.domain.columns, self.domain.places, strict=True)
        return [(k, c, place) for k, (c, place) in enumerate(pairs) if takes_codes(c)]

    def run(self, rows: Tensor, codes: Mapping[int, Tensor]) -> Any:
        """Call the model: numbers and shares come from `rows`, codes (N,) by column."""
        parts: dict[str, Tensor] = {}
        apart = []
        for k, (column, place) in enumerate(
            zip(self.domain.columns, self.domain.places, strict=True)
        ):
            if k not in codes:
                parts[column.name] = rows[:, slice(*place)]
            elif column.encoding == "embedding":
                parts[column.name] = codes[k].long()
                apart.append(column.name)
            else:
                parts[column.name] = codes[k].to(rows)[:, None]
        if self.form == "keywords":
            return self.forward(**parts)
        if self.form == "dictionary":
            return self.forward(parts)
        numbers = [part for name, part in parts.items() if name not in apart]
        given = [torch.cat(numbers, 1)] if numbers else []
        given += [torch.stack([parts[name] for name in apart], 1)] if apart else []
        if not self.names:
            return self.forward(*given)
        names = [name for name, own in zip(self.names, (numbers, apart), strict=True) if own]
        return self.forward(**dict(zip(names, given, strict=True)))


def arguments(domain: TableDomain, rows: Tensor) -> tuple[Tensor, ...]:
    """What a model takes for stored rows (N, n) of a table, by default.

    Numbers, shares and single codes are one tensor (N, a), in the order of the columns. Columns
    with encoding "embedding" are codes (N, b) of int64 in a second one. A table without the one or
    the other has one tensor.

    Example:
        >>> city = Column("city", "categorical", levels=("a", "b", "c"), encoding="embedding")
        >>> domain = TableDomain((Column("age", "integer", 0, 100), city))
        >>> [part.tolist() for part in arguments(domain, torch.tensor([[0.5, 0, 0, 1]]))]
        [[[0.5]], [[2]]]
    """
    found: tuple[Tensor, ...] = TakesRows(lambda *given: given, domain)(rows)
    return found


def takes_codes(column: Column) -> bool:
    """Whether a model takes a column as a code, not as stored."""
    return column.categorical and column.encoding != "onehot"


def adapt(model: nn.Module, domain: Domain | None) -> nn.Module:
    """Let a model take the stored rows of a table, in place; others stay as they are.

    The model is called on trial rows, to find the column behind every input of its embeddings.

    Raises:
        ValueError: the model cannot be called as the columns say, or uses codes in other ways.
    """
    own = vars(model).get("forward")
    if not isinstance(own, TakesRows):
        if not isinstance(domain, TableDomain) or not any(map(takes_codes, domain.columns)):
            return model
        own = TakesRows(model.forward, domain)
    elif isinstance(domain, TableDomain):
        own.domain = domain
    vars(model)["forward"] = own
    if own.coded:
        _read(model, own)
    return model


def _read(model: nn.Module, own: TakesRows) -> None:
    """Find the columns of every embedding, and compare with the model as it was."""
    like = next(p for p in (*model.parameters(), *model.buffers()) if p.is_floating_point())
    low, high = (edge.to(like) for edge in own.domain.box)
    base = own.domain.hard((low + high)[None] / 2)
    changes = [(k, level) for k, _, (a, z) in own.coded for level in range(1, z - a)]
    count = 1 + len(changes)
    codes = {
        k: torch.zeros(count + TRIALS, dtype=torch.long, device=like.device) for k, *_ in own.coded
    }
    for row, (k, level) in enumerate(changes, 1):
        codes[k][row] = level
    for k, _, (start, stop) in own.coded:
        drawn = torch.randint(stop - start, (TRIALS,), generator=stream(0, "trials", k))
        codes[k][count:] = drawn.to(like.device)
    trials = {k: part[count:] for k, part in codes.items()}
    numbers = torch.linspace(0, 1, TRIALS).to(like)[:, None]
    rows = low + (high - low) * numbers
    for start, stop in own.domain.groups:
        rows[:, start:stop] = base[:, start:stop]
    known = _embeddings(model)
    with torch.no_grad():
        wide = torch.cat([base.expand(count, -1), rows])
        calls = _recorded(own, known, wide, codes)
        wanted = _tensor(own.run(rows, trials))
        used: set[int] = set()
        for name, module in known.items():
            looks: Any = [_looks(name, index, own, changes, codes) for index in calls[name]]
            module.__class__, module.looks = _COLUMNS[type(module)], looks
            places = {look.place for each in looks for look in each or ()}
            used |= {k for k, _, place in own.coded if place in places}
        own.constant = frozenset(
            k for k, column, _ in own.coded if k in used or column.encoding == "embedding"
        )
        for k, _, (start, stop) in own.coded:
            rows[:, start:stop] = nn.functional.one_hot(trials[k], stop - start).to(rows)
        found = _tensor(own(rows))
    if not bool((found - wanted).abs().max() <= CLOSE * wanted.abs().max()):
        raise ValueError(
            "the model uses codes other than in nn.Embedding, or in nn.EmbeddingBag for codes "
            "(N, K): its output changes if only the embeddings see them; take these columns with "
            'encoding "onehot"'
        )


def _embeddings(model: nn.Module) -> dict[str, Any]:
    """The embeddings that may look columns up, by name."""
    found = {name: module for name, module in model.named_modules() if type(module) in _COLUMNS}
    for name, own in found.items():
        module: Any = own
        padded = getattr(module, "mode", "") == "max" and module.padding_idx is not None
        if module.max_norm is not None or module.scale_grad_by_freq or padded:
            raise ValueError(
                f"the embedding {name!r} has max_norm, scale_grad_by_freq, or padding_idx with a "
                "maximum; its gradient depends on more than its rows: leave this setting out"
            )
    return found


def _recorded(
    own: TakesRows, known: Mapping[str, nn.Module], rows: Tensor, codes: Mapping[int, Tensor]
) -> dict[str, list[Tensor]]:
    """The inputs of every embedding in one call of the model, by name."""
    calls: dict[str, list[Tensor]] = {name: [] for name in known}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            calls[name].append((args[0] if args else kwargs["input"]).clone())

        return hook

    hooks = [m.register_forward_pre_hook(note(n), with_kwargs=True) for n, m in known.items()]
    try:
        own.run(rows, codes)
    except Exception as error:
        takes = {"split": "numbers (N, a), codes (N, b)"}.get(
            own.form, "one tensor for each column"
        )
        raise ValueError(
            f"the model cannot be called with {takes} and codes from 0 to the number of levels "
            f"minus 1 ({' '.join(str(error).split())[:300]}); give leakbound.models.adapted("
            "model, domain, form=..., names=...), or another encoding of the columns"
        ) from error
    finally:
        for one in hooks:
            one.remove()
    return calls


def _looks(
    name: str,
    index: Tensor,
    own: TakesRows,
    changes: list[tuple[int, int]],
    codes: Mapping[int, Tensor],
) -> list[_Look] | None:
    """The column behind every position of an embedding's input (N, ...) for the trial rows."""
    if index.ndim == 0 or len(index) != len(next(iter(codes.values()))):
        return None
    looks, flat = [], index.reshape(len(index), -1)
    changed, places = flat[1 : len(changes) + 1] != flat[0], dict[int, tuple[int, int]]()
    places.update((k, place) for k, _, place in own.coded)
    for at, seen in enumerate(flat.T):
        columns = {changes[r][0] for r in changed[:, at].nonzero()[:, 0].tolist()}
        look, expected = _Look(seen[:1]), seen[:1].expand(TRIALS)
        for k in columns:
            rows = [0, *(r for r, (other, _) in enumerate(changes, 1) if other == k)]
            look = _Look(seen[rows], places[k])
            expected = look.index[codes[k][-TRIALS:]]
        if len(columns) > 1 or not torch.equal(seen[-TRIALS:], expected):
            raise ValueError(
                f"the embedding {name!r} looks up a mix of several columns, or a number; take "
                'such columns with encoding "onehot", or look every column up alone'
            )
        looks.append(look)
    return looks if any(look.place is not None for look in looks) else None


def _tensor(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise ValueError(f"the model returns a {type(output).__name__}; return a tensor (B, K)")
    return found
