"""How a model takes the rows of a table: as stored, as numbers and codes, or column by column.

A row is stored with one share for each level of a category. A model with embeddings takes codes,
which no search can vary little by little. Here, such a model sees one constant code in every row,
and each embedding returns the mean of its rows, weighted by the shares. This is exact for shares of
0 and 1, as the clients have them, and differentiable in the shares and in the embedding.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from leakbound._util.text import printable
from leakbound.domains.base import Domain
from leakbound.domains.table import Column, TableDomain
from leakbound.domains.tokens import TokenDomain, is_padding
from leakbound.randomness import stream

DECODED = "decoder_input_ids"
FORMS = ("split", "keywords", "dictionary")
TRIALS = 16
"""Rows on which an adapted model must agree with the user's."""
CLOSE = 1e-3
"""Largest difference there, relative to the largest output."""


class _Look(NamedTuple):
    """The column behind one position of an embedding's input, as its place in a row (None: no
    column), and the embedding's row for each level.
    """

    levels: Tensor
    place: tuple[int, int] | None = None


_CALL: ContextVar[tuple[Tensor, Counter[int]] | None] = ContextVar("call", default=None)
"""Of the forward pass under way: the stored rows (N, n), and how often each embedding was called.
"""


def _looked_up(module: Any, bag: bool = False) -> tuple[Tensor, Tensor] | None:
    """The weighted means (N, K, D) for all K positions of the next call's input, and the weights
    (N, K) of rows other than the padding's; None if this input comes from no column.
    """
    if (call := _CALL.get()) is None:
        return None
    rows, times = call
    times[id(module)] += 1
    if times[id(module)] > len(module.looks):
        raise ValueError(
            f"the model calls an embedding {times[id(module)]} times, and did so "
            f"{len(module.looks)} times when its columns were read; give a model that makes the "
            "same calls for all rows"
        )
    if (looks := module.looks[times[id(module)] - 1]) is None:
        return None
    weight = module.weight
    # No row has the number -1, so without padding all rows are kept.
    pad = -1 if module.padding_idx is None else module.padding_idx
    kept = torch.arange(len(weight), device=weight.device) != pad
    if pad >= 0:  # PyTorch gives this row no gradient, and leaves it out of a bag
        weight = torch.where(kept[:, None], weight, 0.0 if bag else weight.detach())
    parts = []
    for levels, place in looks:
        index = levels.to(weight.device)
        shares = rows.new_ones(len(rows), 1) if place is None else rows[:, slice(*place)]
        parts.append((shares @ weight[index], shares @ kept[index].to(shares)))
    means, counts = zip(*parts, strict=True)
    return torch.stack(means, 1), torch.stack(counts, 1)


class ColumnEmbedding(nn.Embedding):
    """An embedding of a table's columns: the mean of its rows, weighted by the levels' shares."""

    def forward(self, input: Tensor) -> Tensor:
        """Codes (N, ...) to (N, ..., D); their values count only if they come from no column."""
        if (looked_up_rows := _looked_up(self)) is None:
            return super().forward(input)
        return looked_up_rows[0].reshape(*input.shape, self.embedding_dim)


class ColumnEmbeddingBag(nn.EmbeddingBag):
    """As `ColumnEmbedding`, with the rows of one example reduced to their sum, mean or maximum."""

    def forward(
        self,
        input: Tensor,
        offsets: Any = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Codes (N, K) to (N, D)."""
        if (looked_up_rows := _looked_up(self, bag=True)) is None:
            return super().forward(input, offsets, per_sample_weights)
        means, counts = looked_up_rows
        if self.mode == "max":
            return means.amax(1)
        if per_sample_weights is not None:
            means = means * per_sample_weights[..., None]
        count = counts.sum(1, keepdim=True)
        return means.sum(1) / (torch.where(count == 0, 1.0, count) if self.mode == "mean" else 1.0)


def looked_up(module: nn.Module) -> list[tuple[Tensor, int]]:
    """For each column that an embedding looks up: its row for each level, and where the column
    starts in a stored row. Empty for other modules.
    """
    if not isinstance(module, ColumnEmbedding | ColumnEmbeddingBag):
        return []
    every: Any = module.looks
    each = (look for call in every for look in call or ())
    return [(look.levels.cpu(), look.place[0]) for look in each if look.place is not None]


_COLUMNS = {nn.Embedding: ColumnEmbedding, nn.EmbeddingBag: ColumnEmbeddingBag}


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
        self.forward = forward
        self.domain = domain
        self.form = form
        self.names = tuple(names)
        self.constant: frozenset[int] | None = None

    def __call__(self, rows: Tensor) -> Any:
        """The model's output for stored rows."""
        codes = {}
        for k, (start, stop) in self.coded.items():
            shares = rows[:, start:stop]
            codes[k] = shares.argmax(-1)
            if k in (self.constant or ()):
                codes[k] = torch.zeros_like(codes[k])
            elif self.domain.columns[k].encoding == "code":
                # As a number, a code keeps its derivative in the shares.
                codes[k] = shares @ torch.arange(stop - start).to(shares)
        # A context variable: several threads may call the model.
        held = _CALL.set(None if self.constant is None else (rows, Counter()))
        try:
            return self.run(rows, codes)
        finally:
            _CALL.reset(held)

    @property
    def coded(self) -> dict[int, tuple[int, int]]:
        """The places of the columns that the model takes as codes, by number."""
        return {
            k: (start, stop)
            for k, (column, start, stop) in enumerate(self.domain.placed)
            if takes_codes(column)
        }

    def run(self, rows: Tensor, codes: Mapping[int, Tensor]) -> Any:
        """Call the model: numbers and shares come from `rows`, codes (N,) by column."""
        numbers = dict[str, Tensor]()
        apart = dict[str, Tensor]()
        for k, (column, start, stop) in enumerate(self.domain.placed):
            if column.encoding == "embedding" and k in codes:
                apart[column.name] = codes[k].long()
            else:
                value = codes[k].to(rows)[:, None] if k in codes else rows[:, start:stop]
                numbers[column.name] = value
        if self.form != "split":
            parts = {c.name: {**numbers, **apart}[c.name] for c in self.domain.columns}
            return self.forward(**parts) if self.form == "keywords" else self.forward(parts)
        inputs = [torch.cat([*numbers.values()], 1) if numbers else None]
        inputs.append(torch.stack([*apart.values()], 1) if apart else None)
        if not self.names:
            return self.forward(*(value for value in inputs if value is not None))
        named = zip(self.names, inputs, strict=True)
        return self.forward(**{name: value for name, value in named if value is not None})


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
    return cast(tuple[Tensor, ...], TakesRows(lambda *parts: parts, domain)(rows))


class TakesTokens:
    """The forward pass of a language model for token numbers (N, n), padded to the right or left.

    A model with an argument `attention_mask` gets 0 there for padding; one with `use_cache` keeps
    no cache. The decoder of an encoder-decoder gets the encoder's tokens. Other models get the
    tokens alone.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        domain: TokenDomain,
    ) -> None:
        self.forward = forward
        self.domain = domain
        base = getattr(getattr(forward, "__self__", None), "get_base_model", None)
        # PEFT's model hands named arguments on to its base.
        known = inspect.signature(base().forward if base else forward).parameters
        self.masked = "attention_mask" in known and domain.padding is not None
        self.decoded = DECODED in known
        self.fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}

    def __call__(self, tokens: Tensor) -> Any:
        """The model's output for tokens (N, n)."""
        more = dict(self.fixed)
        if self.masked:
            more["attention_mask"] = (~is_padding(self.domain, tokens)).long()
        if self.decoded:
            more[DECODED] = tokens
        return self.forward(tokens, **more)


def decodes(model: nn.Module) -> bool:
    """Whether a model that takes tokens is an encoder-decoder."""
    return getattr(vars(model).get("forward"), "decoded", False)


def takes_codes(column: Column) -> bool:
    """Whether a model takes a column as a code, not as stored."""
    return column.categorical and column.encoding != "onehot"


def adapt(model: nn.Module, domain: Domain | None) -> nn.Module:
    """Let a model take the rows of a table, or tokens, in place; others stay as they are.

    The model is called on trial rows, to find the column behind every input of its embeddings.

    Raises:
        ValueError: the model cannot be called as the columns say, or uses codes in other ways.
    """
    takes = vars(model).get("forward")
    if isinstance(domain, TokenDomain):
        forward = takes.forward if isinstance(takes, TakesTokens) else model.forward
        vars(model)["forward"] = TakesTokens(forward, domain)
        return model
    if not isinstance(takes, TakesRows):
        if not isinstance(domain, TableDomain) or not any(map(takes_codes, domain.columns)):
            return model
        takes = vars(model)["forward"] = TakesRows(model.forward, domain)
    elif isinstance(domain, TableDomain):
        takes.domain = domain
    if takes.coded:
        _read(model, takes)
    return model


def _read(model: nn.Module, takes: TakesRows) -> None:
    """Find the columns of every embedding, and compare with the model as it was.

    The first rows differ from one row in one code each. In the last ones, all codes are random.
    """
    like = next(p for p in (*model.parameters(), *model.buffers()) if p.is_floating_point())
    low, high = (edge.to(like) for edge in takes.domain.box)
    # One row for each level: what changes with it is looked up by this column.
    changes = [(k, level) for k, (a, z) in takes.coded.items() for level in range(1, z - a)]
    rows = takes.domain.hard((low + high)[None] / 2).repeat(1 + len(changes) + TRIALS, 1)
    # Numbers vary, too: an embedding that looks one up shows here.
    shares = torch.linspace(-0.5, 0.5, TRIALS).to(like)[:, None]
    varied = rows[-TRIALS:] + (high - low) * shares
    for start, stop in takes.domain.groups:
        varied[:, start:stop] = rows[-TRIALS:, start:stop]
    rows[-TRIALS:] = varied
    codes = dict[int, Tensor]()
    for k, (start, stop) in takes.coded.items():
        alone = torch.tensor([0, *(level * (k == other) for other, level in changes)])
        # All codes at once: an input that mixes columns shows here.
        trials = torch.randint(
            stop - start,
            (TRIALS,),
            generator=stream(0, "trials", k),
        )
        codes[k] = torch.cat([alone, trials])
        rows[:, start:stop] = nn.functional.one_hot(codes[k], stop - start).to(like)
    known = _embeddings(model)
    calls, wanted = _recorded(takes, known, rows, codes)
    used: set[int] = set()
    for name, module in known.items():
        looks = [_looks(name, takes, changes, codes, seen) for seen in calls[name]]
        # In place: weights keep their names, and references to the module hold.
        module.__class__ = _COLUMNS[type(module)]
        module.looks = looks
        places = {look.place for each in looks for look in each or ()}
        used |= {k for k, place in takes.coded.items() if place in places}
    apart = (k for k in takes.coded if takes.domain.columns[k].encoding == "embedding")
    takes.constant = frozenset(used.union(apart))
    with torch.no_grad():
        off = (_tensor(takes(rows)) - wanted).abs().max()
    if not (off <= CLOSE * wanted.abs().max()):  # NaN fails, too
        raise ValueError(
            "the model uses codes other than in nn.Embedding, or in nn.EmbeddingBag for codes "
            "(N, K): its output changes if only the embeddings see them; take these columns with "
            'encoding "onehot"'
        )


def _embeddings(model: nn.Module) -> dict[str, Any]:
    """The embeddings that may look columns up, by name."""
    # Exact types only: a subclass may look up in another way.
    embeddings = {
        name: module for name, module in model.named_modules() if type(module) in _COLUMNS
    }
    for name, embedding in embeddings.items():
        module: Any = embedding
        padded = getattr(module, "mode", "") == "max" and module.padding_idx is not None
        if module.max_norm is not None or module.scale_grad_by_freq or padded:
            raise ValueError(
                f"the embedding {name!r} has max_norm, scale_grad_by_freq, or padding_idx with a "
                "maximum; its gradient depends on more than its rows: leave this setting out"
            )
    return embeddings


def _recorded(
    adapter: TakesRows,
    known: Mapping[str, nn.Module],
    rows: Tensor,
    codes: Mapping[int, Tensor],
) -> tuple[dict[str, list[Tensor]], Tensor]:
    """The inputs of every embedding in one call of the model, by name, and the output."""
    inputs: dict[str, list[Tensor]] = {name: [] for name in known}

    def note(name: str) -> Any:
        def hook(
            _: nn.Module,
            args: Any,
            kwargs: Any,
        ) -> None:
            # A copy: a model may write to its codes.
            inputs[name].append((args[0] if args else kwargs["input"]).clone())

        return hook

    try:
        with torch.no_grad(), ExitStack() as hooks:
            for name, module in known.items():
                hook = module.register_forward_pre_hook(note(name), with_kwargs=True)
                hooks.enter_context(hook)
            output = adapter.run(rows, {k: part.to(rows.device) for k, part in codes.items()})
    except Exception as error:
        takes = (
            "numbers (N, a), codes (N, b)" if adapter.form == "split" else "one tensor per column"
        )
        raise ValueError(
            f"the model cannot be called with {takes} and codes from 0 to the number of levels "
            f"minus 1 ({printable(str(error))[:300]}); give leakbound.models.adapted("
            "model, domain, form=..., names=...), or another encoding of the columns"
        ) from error
    return inputs, _tensor(output)


def _looks(
    name: str,
    takes: TakesRows,
    changes: Sequence[tuple[int, int]],
    codes: Mapping[int, Tensor],
    seen: Tensor,
) -> list[_Look] | None:
    """The column behind every position of an embedding's input in the rows of `_read`."""
    count = 1 + len(changes) + TRIALS
    if seen.ndim == 0 or len(seen) != count:
        return None
    looks = []
    for values in seen.reshape(count, -1).cpu().T:
        alone = values[:-TRIALS]
        changed = (alone[1:] != alone[0]).tolist()
        columns = {k for (k, _), is_changed in zip(changes, changed, strict=True) if is_changed}
        look = _Look(alone[:1])
        expected = alone[:1].expand(TRIALS)
        for k in columns:
            levels = [0, *(r for r, (other, _) in enumerate(changes, 1) if other == k)]
            look = _Look(alone[levels], takes.coded[k])
            expected = look.levels[codes[k][-TRIALS:]]
        if len(columns) > 1 or not torch.equal(values[-TRIALS:], expected):
            raise ValueError(
                f"the embedding {name!r} looks up a mix of several columns, or a number; take "
                'such columns with encoding "onehot", or look every column up alone'
            )
        looks.append(look)
    return looks if any(look.place is not None for look in looks) else None


def _tensor(output: Any) -> Tensor:
    tensor = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"the model returns a {type(output).__name__}; return a tensor (B, K)")
    return tensor
