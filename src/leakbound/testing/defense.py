"""The contract of a defense: its declared distribution is true, by statistics over draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import scipy
import torch
from torch import Tensor

from leakbound.client import example_gradients, local_update, simulate
from leakbound.core import (
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
from leakbound.covariance import Structured
from leakbound.defenses import Chain, ClipExamples, Defense, Mean, SecureAggregation, chain
from leakbound.protocol import play
from leakbound.randomness import normal, stream
from leakbound.testing.common import (
    CHANCE,
    ContractError,
    Unchanged,
    check_repr,
    check_settings,
    given_or_small,
    require,
    same_bits,
)

# Draws that show whether a release is exact, and draws for the statistics of a noisy one.
FEW = 4
MANY = 256
PLACES = 32
HALVINGS = 20
JUMP = 0.01
"""Places on the way to other rows, halvings of its steepest part, and the share of the change there
that counts as a jump: of a continuous output a millionth is left.
"""


def check_defense(
    defense: Defense,
    *,
    task: Task | None = None,
    batch: Batch | None = None,
) -> None:
    """Check the contract of a defense (or a chain), above all its declared distribution.

    The check covers:

    - settings, units, purity and determinism, and the mask;
    - the declared distribution by its variance, shape, independence and mean over many streams;
    - the basis of differential privacy: the bound and the noise;
    - `imitate`, which must be the noise-free part;
    - an output without jumps, if the defense says `continuous`;
    - a server that gives no context, and updates that are zero or not finite.

    `ContractError` states the first violation.

    Args:
        defense: a link or a chain; a link that needs others before it is checked after them.
        task: what the clients train; by default a small perceptron on 6x6 images.
        batch: one client's data; needed with your own task.
    """
    require(
        isinstance(defense, Defense),
        f"{defense!r} is no defense; give an instance of a class derived from "
        "leakbound.defenses.Defense",
    )
    task, batch = given_or_small(task, batch)
    _DefenseContract(task, batch).check(defense)


def runnable(defense: Defense) -> Chain:
    """The defense after the links that it needs, so that a round can run."""
    if isinstance(defense, Chain):
        return defense
    if defense.needs_bound:
        return chain(ClipExamples(1.0), Mean(), defense)
    if defense.accepts == {Unit.COHORT}:
        return chain(SecureAggregation(2), defense)
    return chain(defense)


class _DefenseContract:
    """The task and the batch on which defenses are checked."""

    def __init__(self, task: Task, batch: Batch) -> None:
        self.task = task
        self.batch = batch
        self.context = ClientContext(task, batch)

    def check(self, defense: Defense) -> None:
        """Every link alone, and the defense in whole rounds."""
        for link in defense.links if isinstance(defense, Chain) else (defense,):
            check_settings(link, repr(link))
            check_repr(link, repr(link))
            self._check_link(link.resolve(self.task, self.batch.size))
        whole = runnable(defense).resolve(self.task, self.batch.size)
        self._check_task_kept(whole)
        self._check_releases(whole)
        self._check_privacy(whole)

    def _check_link(self, link: Defense) -> None:
        """One link alone, on rows of every unit that it accepts."""
        name = repr(link)
        require(isinstance(link.guarantee, Guarantee), f"guarantee of {name} is not a Guarantee")
        for unit in sorted(link.accepts):
            update = self._plain(link, unit)
            out = self._check_transform(link, update)
            _check_imitate(link, update, out, name)
            center = None if out.law.private else link.imitate(update.rows)
            draw = partial(self._transformed, link, update)
            _check_draws(draw, center, name, promise=link.guarantee)
            for value in (0.0, float("nan"), float("inf")):
                self._check_survives(link, update, value)
            # Noise that depends on the batch has assumptions of its own.
            if link.continuous and not link.data_dependent_law:
                self._check_continuous(link, update)

    def _plain(self, link: Defense, unit: Unit) -> Update:
        """Rows of a unit before any defense; bounded to 1 if the link needs a bound."""
        batch = self.batch
        if unit is Unit.EXAMPLE:
            rows = example_gradients(self.task, batch.inputs, batch.labels)
            examples: tuple[int, ...] = (1,) * batch.size
        else:
            row = local_update(self.task, batch.inputs, batch.labels)
            count = link.cohort_size if unit is Unit.CLIENT else 1
            # Clients differ: equal rows would hide that a link mixes them up.
            rows = torch.stack([row * (1 + i) for i in range(count)])
            examples = (batch.size,) * count
        rows = rows.detach()
        if not link.needs_bound:
            return Update(rows, unit, examples)
        return Update(
            rows / rows.norm(dim=1, keepdim=True).clamp_min(1),
            unit,
            examples,
            bound=1.0,
        )

    def _transformed(
        self,
        link: Defense,
        update: Update,
        seed: int,
    ) -> Update:
        source = stream(seed, "contract", "link")
        return link.transform(update, link.init(self.task), self.context, source)[0]

    def _check_transform(self, link: Defense, update: Update) -> Update:
        name = repr(link)
        unchanged = Unchanged(self.task, self.batch, update.rows, update.mask)
        out = self._transformed(link, update, 0)
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
            out.rows.shape == shape,
            f"{name} returns rows of shape {tuple(out.rows.shape)}; one row a {unit.noun} is "
            f"{shape}",
        )
        dtype = out.rows.dtype
        require(dtype == update.rows.dtype, f"{name} returns rows of type {dtype}")
        require(
            sum(out.examples) == sum(update.examples) and len(out.examples) == count,
            f"{name} returns rows of {out.examples} examples, from {update.examples}",
        )
        _check_mask(out, name)
        again = self._transformed(link, update, 0)
        same = same_bits(out.rows, again.rows) and same_bits(out.mask, again.mask)
        require(same, f"{name} gives another update from the same source")
        if not link.uses_context:
            source = stream(0, "contract", "link")
            at_server, _ = link.transform(update, link.init(self.task), None, source)
            require(
                same_bits(out.rows, at_server.rows),
                f"{name} gives another update without a context; declare uses_context = True",
            )
        return out

    def _check_continuous(self, link: Defense, update: Update) -> None:
        """No jump on the way to other rows, under one source: its steepest place is bisected.

        Coordinates that are withheld at either end do not count: fewer of them tell no more.
        """
        away = normal(update.rows.shape, stream(0, "contract", "away")).to(update.rows)
        away = away * update.rows.norm() / away.norm()

        def sent(part: float) -> Update:
            return self._transformed(link, replace(update, rows=update.rows + part * away), 0)

        def change(one: Update, other: Update) -> float:
            apart = (one.rows - other.rows).abs()
            for mask in (one.mask, other.mask):
                apart = apart if mask is None else apart * mask
            return float(apart.max())

        ends = [(place / PLACES, sent(place / PLACES)) for place in range(PLACES + 1)]
        steepest = max(pairwise(ends), key=lambda pair: change(pair[0][1], pair[1][1]))
        (low, first), (high, last) = steepest
        before = change(first, last)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            between = sent(middle)
            if change(first, between) > change(between, last):
                high = middle
                last = between
            else:
                low = middle
                first = between
        require(
            change(first, last) <= JUMP * before,
            f"the output of {link!r} jumps by {change(first, last):.3g} where its input changes by "
            "nearly nothing, so bounds from derivatives do not hold behind it; declare continuous "
            "= False",
        )

    def _check_survives(
        self,
        link: Defense,
        update: Update,
        value: float,
    ) -> None:
        rows = torch.full_like(update.rows, value)
        try:
            out = self._transformed(link, replace(update, rows=rows), 0)
            if out.unit is Unit.CLIENT and len(out.rows) == 1:
                link.infer(self.task, out)
        except Exception as error:
            raise ContractError(f"{link!r} crashes on an update of {value}: {error!r}") from error
        if value == 0:
            finite = out.rows.isfinite().all()
            require(finite, f"{link!r} turns an update of zeros into one that is not finite")

    def _check_task_kept(self, whole: Chain) -> None:
        name = repr(whole)
        batch = self.batch
        unchanged = Unchanged(self.task, batch)
        prepared = whole.prepare(self.task, stream(0, "contract", "prepare"))
        require(isinstance(prepared, Task), f"prepare of {name} returns no Task")
        local_update(prepared, batch.inputs, batch.labels)
        unchanged.check(f"prepare of {name}")
        again = whole.prepare(self.task, stream(0, "contract", "prepare"))
        same = same_bits(*(local_update(t, batch.inputs, batch.labels) for t in (prepared, again)))
        require(same, f"prepare of {name} gives another task from the same source")

    def _check_releases(self, whole: Chain) -> None:
        """The declared distribution over whole rounds: prepare, gradients, every link."""
        name = repr(whole)
        batch = self.batch
        clients = [batch] * whole.cohort_size

        def draw(seed: int) -> Update:
            sources = [stream(seed, "contract", "round", i) for i in range(len(clients) + 1)]
            return play(self.task, clients, whole, sources).update

        first = draw(0)
        unchanged = Unchanged(self.task, batch, first.rows)
        inferred = whole.infer(self.task, first)
        unchanged.check(f"infer of {name}")
        center = None
        if not first.law.private:
            inputs = torch.cat([batch.inputs] * len(clients))
            labels = torch.cat([batch.labels] * len(clients))
            cohort = (batch.size,) * len(clients)
            center = simulate(
                inferred,
                inputs,
                labels,
                cohort=cohort,
                defense=whole,
            ).detach()
            if isinstance(first.law, Exact) and first.mask is None:
                _check_same(first, center, name)
        _check_draws(draw, center, name, promise=whole.guarantee)

    def _check_privacy(self, whole: Chain) -> None:
        """Every link that promises differential privacy has the basis of its promise.

        Neighbors differ in one row, which is zero in one of them (add or remove at a fixed
        divisor).
        """
        whole = whole.resolve(self.task, self.batch.size)
        for at, link in enumerate(whole.links):
            if link.guarantee is Guarantee.DIFFERENTIAL_PRIVACY:
                upto = Chain(whole.links[: at + 1])
                clients = self._plain_rows(upto)
                self._check_noise(upto, self._check_bound(upto, clients), clients)

    def _plain_rows(self, upto: Chain) -> list[Tensor]:
        """The rows of each client before any defense."""
        inputs = self.batch.inputs
        labels = self.batch.labels
        if upto.starts is Unit.EXAMPLE:
            rows = example_gradients(self.task, inputs, labels)
        else:
            rows = local_update(self.task, inputs, labels)[None]
        plain = [rows.detach().double()] * upto.cohort_size
        return (
            plain if len(plain) == 1 else [*plain[:-1], plain[-1][:1]]
        )  # the last has least to mix

    def _released(
        self,
        links: Chain,
        clients: list[Tensor],
        unit: Unit,
    ) -> Update:
        """The update of fixed plain rows of a unit under fixed streams."""
        client, cohort = links.sides
        updates = []
        for i, rows in enumerate(clients):
            examples = (1 if unit is Unit.EXAMPLE else self.batch.size,) * len(rows)
            source = stream(0, "contract", "neighbor", i)
            update = Update(rows, unit, examples)
            state = client.init(self.task)
            updates.append(client.transform(update, state, self.context, source)[0])
        if not cohort.links:
            return updates[0]
        source = stream(0, "contract", "neighbor", "cohort")
        return cohort.transform(Update.stack(updates), cohort.init(self.task), None, source)[0]

    def _check_bound(self, upto: Chain, clients: list[Tensor]) -> float:
        """No row, at any scale and direction, moves the release by more than the declared bound."""
        name = f"{upto.links[-1]!r} promises differential privacy, but"
        bound = self._released(upto, clients, upto.starts).bound
        if bound is None:
            raise ContractError(f"{name} declares no bound on what one example adds")
        require(0 < bound < float("inf"), f"{name} its bound is {bound}")
        ends = sorted({0, len(clients) - 1})
        for who, neighbors in ((i, pair) for i in ends for pair in _neighbors(clients[i])):
            with_row, without = (
                self._released(upto, [*clients[:who], rows, *clients[who + 1 :]], upto.starts)
                for rows in neighbors
            )
            require(
                with_row.bound == without.bound == bound,
                f"{name} its bound depends on the data and leaks information about them",
            )
            change = float((with_row.rows - without.rows).norm(dim=1).max())
            rounding = 1e-9 * float(without.rows.abs().max())
            require(
                change <= bound * (1 + 1e-6) + rounding,
                f"{name} one example moves the release by {change:.4g}, above its bound "
                f"{bound:.4g}",
            )
        return bound

    def _check_noise(
        self,
        upto: Chain,
        bound: float,
        clients: list[Tensor],
    ) -> None:
        """The last link's own noise has a true distribution, at least `noise_multiplier` times the
        bound.
        """
        link = upto.links[-1]
        name = f"{link!r} promises differential privacy, but"
        before = self._released(Chain(upto.links[:-1]), clients, upto.starts)
        # Noise of links before it counts as part of the rows: this link's own noise must suffice.
        update = replace(before, law=Exact(), mask=None)
        context = None if update.unit is Unit.COHORT else self.context
        state = link.init(self.task)
        draws = [
            link.transform(update, state, context, stream(seed, "contract", "noise"))[0]
            for seed in range(MANY)
        ]
        law = draws[0].law
        require(isinstance(law, Gaussian | Laplace), f"{name} its declared noise is {law}")
        check_law(draws, link.imitate(update.rows), repr(link))
        wanted = float(getattr(link, "noise_multiplier", 0.0)) * bound
        least = float(spread(draws[0]).min())
        require(
            least > 0 and least >= wanted * (1 - 1e-6),
            f"{name} its noise has standard deviation {least:.4g}, below noise_multiplier times "
            f"its bound, {wanted:.4g}",
        )


def _check_draws(
    draw: Callable[[int], Update],
    center: Tensor | None,
    name: str,
    *,
    promise: Guarantee,
) -> None:
    """Releases by seeds 0, 1, ... have the masks and the distribution that they declare."""
    draws = [draw(seed) for seed in range(FEW)]
    for one in draws:
        _check_mask(one, name)
    if isinstance(draws[0].law, Exact):
        check_exact(draws, name)
    if isinstance(draws[0].law, Gaussian | Laplace):
        draws += [draw(seed) for seed in range(FEW, MANY)]
    check_law(draws, center, name, promise=promise)


def _check_mask(out: Update, name: str) -> None:
    if out.mask is None:
        return
    require(
        out.mask.shape == out.rows.shape and out.mask.dtype == torch.bool,
        f"{name} has a mask that is not a boolean for every coordinate of every row",
    )
    silent = (out.rows[~out.mask] == 0).all()
    require(silent, f"{name} sends coordinates that its mask declares withheld")


def _check_imitate(
    link: Defense,
    update: Update,
    out: Update,
    name: str,
) -> None:
    # Also at 0, where norms and quotients may have no derivative.
    for start in (update.rows, torch.zeros_like(update.rows)):
        rows = start.clone().requires_grad_()
        imitated = link.imitate(rows)
        require(
            imitated.shape == out.rows.shape,
            f"imitate of {name} gives shape {tuple(imitated.shape)}, transform gives "
            f"{tuple(out.rows.shape)}",
        )
        require(imitated.requires_grad, f"imitate of {name} is not differentiable")
        (slope,) = torch.autograd.grad(imitated.sum(), rows)
        finite = slope.isfinite().all()
        require(finite, f"imitate of {name} has a derivative that is not finite")
    if isinstance(out.law, Exact) and not link.uses_context:
        _check_same(out, link.imitate(update.rows), name)


def _check_same(
    out: Update,
    imitated: Tensor,
    name: str,
) -> None:
    """`imitate` gives the release, or at least its signs if that has few values."""
    shown = _shown(out)
    seen = out.rows[shown]
    imitated = imitated.detach()[shown]
    same: object
    if len(seen) and len(torch.unique(seen)) < len(seen) / 4:
        same = (seen.sign() == imitated.sign())[seen != 0].all()
    else:
        tolerance = 1e-9 if seen.dtype == torch.float64 else 1e-4
        scale = float(seen.abs().max()) if len(seen) else 0.0
        same = torch.allclose(
            seen,
            imitated,
            rtol=tolerance,
            atol=tolerance * scale,
        )
    require(same, f"imitate of {name} is not what it releases, though its release is exact")


def _neighbors(rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows with one adversarial row, and with zeros there."""
    noise = normal(rows.shape[1:], stream(0, "contract", "row"), like=rows)
    spike = torch.zeros_like(rows[0])
    spike[0] = 1
    for at in sorted({0, len(rows) - 1}):
        without = rows.clone()
        without[at] = 0
        for direction in (rows[at], -rows.sum(0), noise, spike):
            # Of all sizes: a bound may fail only for huge or tiny rows.
            for scale in (1e-3, 1.0, 1e3, 1e6):
                with_row = without.clone()
                with_row[at] = scale * direction
                yield with_row, without


MOST = 400
"""Coordinates on which a distribution is checked; evenly spread ones for wider updates."""


def check_law(
    draws: list[Update],
    center: Tensor | None,
    name: str,
    *,
    promise: Guarantee | None = None,
) -> None:
    """Draws of one release by independent streams have the distribution that they declare.

    `center`: the noise-free rows (R, P); None uses the mean of the draws instead. A `promise` of
    KNOWN_NOISE needs a noise distribution on every draw.
    """
    law = draws[0].law
    for draw in draws:
        require(type(draw.law) is type(law), f"{name} declares other noise for another stream")
    if promise is Guarantee.KNOWN_NOISE:
        noisy = isinstance(law, Gaussian | Laplace)
        require(noisy, f"{name} promises a known noise distribution, but its update declares {law}")
    if not isinstance(law, Gaussian | Laplace):
        return
    residual, seen = _standard(draws, center, name)
    if residual.shape[1] == 0:
        return
    _check_spread(residual, seen, law, name, centered=center is None)
    shape = scipy.stats.norm if isinstance(law, Gaussian) else scipy.stats.laplace(scale=0.5**0.5)
    fit = scipy.stats.kstest(residual[seen].numpy(), shape.cdf)
    word = type(law).__name__
    require(fit.pvalue > CHANCE, f"{name} declares {word} noise, but its shape is another")
    _check_independence(residual, name)
    if center is not None:
        shift = (residual.sum(0) / seen.sum(0).double().sqrt()).square().sum()
        chance = scipy.stats.chi2.sf(float(shift), residual.shape[1])
        require(chance > CHANCE, f"{name} releases rows whose mean is not what `imitate` gives")


def check_exact(draws: list[Update], name: str) -> None:
    """Draws are equal; with masks, on coordinates that two of them show, up to a mask's factor."""
    first = draws[0]
    for draw in draws[1:]:
        if first.mask is None and draw.mask is None:
            same = torch.equal(first.rows, draw.rows)
        else:
            shown = _shown(first) & _shown(draw)
            a, b = (u.rows.detach().double() * shown for u in (first, draw))
            lengths = a.norm(dim=1) * b.norm(dim=1)
            same = bool(((a * b).sum(1) >= lengths * (1 - 1e-6)).all())
        require(same, f"{name} declares an exact release, but another stream gives another one")


def spread(update: Update) -> Tensor:
    """The declared standard deviation (R, P) of every coordinate."""
    law = update.law
    if isinstance(law, Gaussian):
        value = torch.as_tensor(law.variance, dtype=torch.float64).sqrt()
    elif isinstance(law, Laplace):
        value = torch.as_tensor(law.scale, dtype=torch.float64) * 2**0.5
    else:
        value = torch.zeros((), dtype=torch.float64)
    return value.cpu().expand(update.rows.shape)


def _shown(update: Update) -> Tensor:
    return torch.ones_like(update.rows, dtype=torch.bool) if update.mask is None else update.mask


def _standard(
    draws: list[Update],
    center: Tensor | None,
    name: str,
) -> tuple[Tensor, Tensor]:
    """(draws, coordinates) residuals over declared standard deviations, 0 where not `seen`."""
    rows = torch.stack([draw.rows.detach().double().cpu() for draw in draws])
    seen = torch.stack([_shown(draw).cpu() for draw in draws])
    std = torch.stack([spread(draw) for draw in draws])
    if center is None:
        middle = (rows * seen).sum(0) / seen.sum(0).clamp_min(1)
        # Differences from the draws' own mean are smaller by this factor.
        count = seen.sum(0).clamp_min(2)
        rest = (rows - middle) * seen * (count / (count - 1)).sqrt()
    else:
        rest = (rows - center.detach().double().cpu()) * seen
    still = (std == 0) & seen
    tiny = 1e-5 * rows.abs().amax() + 1e-12
    require(
        (rest[still].abs() <= tiny).all(),
        f"{name} declares no noise on coordinates that have some",
    )
    seen = (seen & (std > 0)).flatten(1)
    residual = torch.where(seen, rest.flatten(1) / std.flatten(1).clamp_min(1e-300), 0)
    law = draws[0].law
    if isinstance(law, Gaussian) and isinstance(law.covariance, Structured):
        residual = law.covariance.whiten(rest.flatten(0, 1)).reshape(len(rest), -1)
    width = residual.shape[1]
    index = torch.linspace(0, width - 1, MOST).long() if width > MOST else torch.arange(width)
    # Coordinates that few draws show say nothing of their distribution.
    index = index[seen[:, index].sum(0) > len(draws) / 10]
    return residual[:, index], seen[:, index]


def _check_spread(
    residual: Tensor,
    seen: Tensor,
    law: Gaussian | Laplace,
    name: str,
    *,
    centered: bool,
) -> None:
    """The variance is 1: pooled, and of every coordinate separately."""
    # The fourth moment sets how far a sample's variance strays.
    kurtosis = 3.0 if isinstance(law, Gaussian) else 6.0
    count = seen.sum(0).double() - (1 if centered else 0)
    squares = residual.square()
    if centered:
        squares = squares * (count / (count + 1))
    each = squares.sum(0)
    total = float(each.sum())
    number = float(count.sum())
    surprise = abs(total - number) / ((kurtosis - 1) * number) ** 0.5
    require(
        2 * scipy.stats.norm.sf(surprise) > CHANCE,
        f"{name} declares {type(law).__name__} noise, but its variance is {total / number:.3f} "
        "times the declared one",
    )
    # The sum of squares is chi-square for Gaussian noise only.
    if isinstance(law, Gaussian):
        low = scipy.stats.chi2.cdf(each.numpy(), count.numpy())
        worst = float(min(low.min(), (1 - low).min()))
        require(
            worst * 2 * len(each) > CHANCE,
            f"{name} declares a Gaussian variance that is wrong on some coordinates",
        )


def _check_independence(residual: Tensor, name: str) -> None:
    """No two coordinates (of any layer or row) are correlated, nor all of them slightly."""
    draws, width = residual.shape
    if width < 2:
        return
    unit = residual / residual.norm(dim=0).clamp_min(1e-300)
    upper = torch.triu(unit.T @ unit, 1)
    pairs = width * (width - 1) / 2
    limit = scipy.stats.norm.isf(CHANCE / 2 / pairs) / draws**0.5
    require(
        float(upper.abs().max()) < min(0.95, 1.2 * limit),
        f"{name} gives two coordinates correlated noise; draw it separately for each",
    )
    average = float(upper.square().sum() / pairs) * draws
    require(
        average < 1.1 + 6 * (2 / pairs) ** 0.5,
        f"{name} gives noise that is correlated over many coordinates",
    )
