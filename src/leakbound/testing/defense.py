"""The contract of a defense: what it declares of its release is true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from leakbound.client import example_gradients, local_update, simulate
from leakbound.defenses import Chain, ClipExamples, Defense, Mean, SecureAggregation, chain
from leakbound.protocol import play
from leakbound.random import stream
from leakbound.testing.common import (
    ContractError,
    Unchanged,
    check_repr,
    check_settings,
    require,
    same_bits,
    small_batch,
    small_task,
)
from leakbound.testing.laws import check_exact, check_law
from leakbound.testing.privacy import check_privacy
from leakbound.types import (
    Batch,
    ClientContext,
    Exact,
    Gaussian,
    Guarantee,
    Laplace,
    Task,
    Unit,
    Update,
)

FEW, MANY = 4, 256


def check_defense(
    defense: Defense, *, task: Task | None = None, batch: Batch | None = None
) -> None:
    """Check that a defense (or a chain) keeps its contract, above all that its law is true.

    Settings, units, purity and determinism; the mask; the declared law by its variance, shape,
    independence and mean over many streams; what differential privacy rests on (the bound and the
    noise); `imitate`, which must be the noise-free part; a server that gives no context; updates
    that are zero or not finite.

    Args:
        defense: a link or a chain; a link that needs others before it is checked behind them.
        task: what the clients train; by default a small perceptron on 6x6 images.
        batch: what one client holds; needed with a task of your own.

    Raises:
        ContractError: the first thing that is broken, in a sentence.
    """
    if task is not None and batch is None:
        raise ValueError("batch is None; give a batch that fits your task")
    task = task or small_task()
    batch = batch or small_batch(task)
    for link in defense.links if isinstance(defense, Chain) else (defense,):
        check_settings(link, repr(link))
        check_repr(link, repr(link))
        _check_link(link.resolve(task, batch.size), task, batch)
    whole = runnable(defense).resolve(task, batch.size)
    _check_task_kept(whole, task, batch)
    _check_releases(whole, task, batch)
    check_privacy(whole, task, batch)


def runnable(defense: Defense) -> Chain:
    """The defense behind the links that it needs, so that a round can run."""
    if isinstance(defense, Chain):
        return defense
    if defense.needs_bound:
        return chain(ClipExamples(1.0), Mean(), defense)
    if defense.accepts == {Unit.COHORT}:
        return chain(SecureAggregation(2), defense)
    return chain(defense)


def _check_link(link: Defense, task: Task, batch: Batch) -> None:
    name = repr(link)
    require(isinstance(link.guarantee, Guarantee), f"guarantee of {name} is not a Guarantee")
    for unit in sorted(link.accepts):
        update = _plain(link, unit, task, batch)
        out = _check_transform(link, update, task, batch)
        _check_imitate(link, update, out, name)
        draws = [_run(link, update, task, batch, seed) for seed in range(FEW)]
        if isinstance(out.law, Exact):
            check_exact(draws, name)
        if isinstance(out.law, Gaussian | Laplace):
            draws += [_run(link, update, task, batch, seed) for seed in range(FEW, MANY)]
        center = None if out.law.private else link.imitate(update.rows)
        check_law(draws, center, name, promise=link.guarantee)
        for value in (0.0, float("nan"), float("inf")):
            _check_survives(link, update, value, task, batch)


def _plain(link: Defense, unit: Unit, task: Task, batch: Batch) -> Update:
    """Rows of a unit before any defense; bounded to 1 where the link asks for a bound."""
    if unit is Unit.EXAMPLE:
        rows = example_gradients(task, batch.inputs, batch.labels)
        examples: tuple[int, ...] = (1,) * batch.size
    else:
        row = local_update(task, batch.inputs, batch.labels)
        count = link.cohort_size if unit is Unit.CLIENT else 1
        rows = torch.stack([row * (1 + i) for i in range(count)])
        examples = (batch.size,) * count
    rows = rows.detach()
    if not link.needs_bound:
        return Update(rows, unit, examples)
    return Update(rows / rows.norm(dim=1, keepdim=True).clamp_min(1), unit, examples, bound=1.0)


def _run(
    link: Defense, update: Update, task: Task, batch: Batch, seed: int, *, server: bool = False
) -> Update:
    context = None if server else ClientContext(task, batch)
    source = stream(seed, "contract", "link")
    return link.transform(update, link.init(task), context, source)[0]


def _check_transform(link: Defense, update: Update, task: Task, batch: Batch) -> Update:
    name = repr(link)
    unchanged = Unchanged(task, batch, update.rows, update.mask)
    out = _run(link, update, task, batch, 0)
    unchanged.check(name)
    unit = link.returns(update.unit)
    require(unit >= update.unit, f"{name} turns rows of a {update.unit.noun} into finer ones")
    require(
        out.unit is unit,
        f"{name} returns rows of unit {out.unit.noun}, but `returns` says {unit.noun}",
    )
    count = len(update.rows) if unit is update.unit else 1
    shape = (count, update.rows.shape[1])
    require(
        tuple(out.rows.shape) == shape,
        f"{name} returns rows of shape {tuple(out.rows.shape)}; one row a {unit.noun} is {shape}",
    )
    require(out.rows.dtype == update.rows.dtype, f"{name} returns rows of type {out.rows.dtype}")
    require(
        sum(out.examples) == sum(update.examples) and len(out.examples) == count,
        f"{name} returns rows of {out.examples} examples, from {update.examples}",
    )
    _check_mask(out, name)
    again = _run(link, update, task, batch, 0)
    same = same_bits(out.rows, again.rows) and same_bits(out.mask, again.mask)
    require(same, f"{name} gives another update from the same source")
    if not link.uses_context:
        at_server = _run(link, update, task, batch, 0, server=True)
        require(
            same_bits(out.rows, at_server.rows),
            f"{name} gives another update without a context; declare uses_context = True",
        )
    return out


def _check_mask(out: Update, name: str) -> None:
    if out.mask is None:
        return
    require(
        out.mask.shape == out.rows.shape and out.mask.dtype == torch.bool,
        f"{name} has a mask that is not a boolean for every coordinate of every row",
    )
    silent = bool((out.rows[~out.mask] == 0).all())
    require(silent, f"{name} sends coordinates that its mask declares withheld")


def _check_imitate(link: Defense, update: Update, out: Update, name: str) -> None:
    for start in (update.rows, torch.zeros_like(update.rows)):
        rows = start.clone().requires_grad_()
        guess = link.imitate(rows)
        require(
            guess.shape == out.rows.shape,
            f"imitate of {name} gives shape {tuple(guess.shape)}, transform gives "
            f"{tuple(out.rows.shape)}",
        )
        require(guess.requires_grad, f"imitate of {name} is not differentiable")
        (slope,) = torch.autograd.grad(guess.sum(), rows)
        require(bool(slope.isfinite().all()), f"imitate of {name} has a slope that is not finite")
    if isinstance(out.law, Exact) and not link.uses_context:
        _check_same(out, link.imitate(update.rows), name)


def _check_same(out: Update, guess: Tensor, name: str) -> None:
    """`imitate` gives the release itself, or at least its signs where that has few values."""
    shown = torch.ones_like(out.rows, dtype=torch.bool) if out.mask is None else out.mask
    seen, guess = out.rows[shown], guess.detach()[shown]
    if len(seen) and len(torch.unique(seen)) < len(seen) / 4:
        same = bool((seen.sign() == guess.sign())[seen != 0].all())
    else:
        tolerance = 1e-9 if seen.dtype == torch.float64 else 1e-4
        scale = float(seen.abs().max()) if len(seen) else 0.0
        same = torch.allclose(seen, guess, rtol=tolerance, atol=tolerance * scale)
    require(same, f"imitate of {name} is not what it releases, though its release is exact")


def _check_survives(link: Defense, update: Update, value: float, task: Task, batch: Batch) -> None:
    rows = torch.full_like(update.rows, value)
    try:
        out = _run(link, replace(update, rows=rows), task, batch, 0)
        if out.unit is Unit.CLIENT and len(out.rows) == 1:
            link.infer(task, out)
    except Exception as error:
        raise ContractError(f"{link!r} crashes on an update of {value}: {error!r}") from error
    if value == 0:
        finite = bool(out.rows.isfinite().all())
        require(finite, f"{link!r} turns an update of zeros into one that is not finite")


def _check_task_kept(whole: Chain, task: Task, batch: Batch) -> None:
    name = repr(whole)
    unchanged = Unchanged(task, batch)
    prepared = whole.prepare(task, stream(0, "contract", "prepare"))
    require(isinstance(prepared, Task), f"prepare of {name} returns no Task")
    local_update(prepared, batch.inputs, batch.labels)
    unchanged.check(f"prepare of {name}")
    again = whole.prepare(task, stream(0, "contract", "prepare"))
    same = same_bits(*(local_update(t, batch.inputs, batch.labels) for t in (prepared, again)))
    require(same, f"prepare of {name} gives another task from the same source")


def _check_releases(whole: Chain, task: Task, batch: Batch) -> None:
    """The declared law over whole rounds: prepare, gradients, every link."""
    name = repr(whole)
    draws = _rounds(whole, task, batch, range(FEW))
    first = draws[0]
    for draw in draws:
        _check_mask(draw, name)
    unchanged = Unchanged(task, batch, first.rows)
    inferred = whole.infer(task, first)
    unchanged.check(f"infer of {name}")
    if isinstance(first.law, Exact):
        check_exact(draws, name)
    if isinstance(first.law, Gaussian | Laplace):
        draws += _rounds(whole, task, batch, range(FEW, MANY))
    center = None
    if not first.law.private:
        inputs = batch.inputs.repeat(whole.cohort_size, *[1] * (batch.inputs.ndim - 1))
        labels = batch.labels.repeat(whole.cohort_size)
        cohort = (batch.size,) * whole.cohort_size
        center = simulate(inferred, inputs, labels, cohort=cohort, defense=whole).detach()
        if isinstance(first.law, Exact) and first.mask is None:
            _check_same(first, center, name)
    check_law(draws, center, name, promise=whole.guarantee)


def _rounds(whole: Chain, task: Task, batch: Batch, seeds: Sequence[int]) -> list[Update]:
    clients = [batch] * whole.cohort_size
    found = []
    for seed in seeds:
        sources = [stream(seed, "contract", "round", i) for i in range(len(clients) + 1)]
        found.append(play(task, clients, whole, sources).update)
    return found
