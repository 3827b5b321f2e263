"""Compare truth and reconstruction: what was measured, and what of it is shown."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from leakbound import metrics
from leakbound.assess.chance import Replay, chance, replayed, unlike_any_guess
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import (
    Chance,
    ObjectiveValues,
    ReleaseInfo,
    picture_name,
    short,
)
from leakbound.assess.released import Once
from leakbound.attacks.imputers import completions
from leakbound.client import gradient
from leakbound.core import Batch, Exact, Gaussian, Observation, Reconstruction, Update
from leakbound.domains import Domain
from leakbound.pairing import Paired, pair

COMPARED = 1000
"""Decoys and public examples that are compared with each other where no test is possible."""
GAP = 2
NEAR = 9


@dataclass(frozen=True, eq=False)
class Measured:
    """A reconstruction in the order of the truth; the fields are those of an `Assessment`."""

    paired: Paired
    metrics: dict[str, tuple[float | None, ...]]
    baseline: tuple[float | None, ...]
    matched: tuple[bool, ...]
    guess: Tensor
    """(B, *S) the closest prior-only baseline of each example."""
    chance: Chance
    agreement: Tensor | None = None
    """(B, m) as the attack's, in the order of the truth."""

    @property
    def fields(self) -> dict[str, Any]:
        names = ("metrics", "baseline", "matched", "chance")
        return {name: getattr(self, name) for name in names}


def measure(
    truth: Batch,
    answer: Reconstruction,
    criterion: Criterion,
    public: Batch | None,
    *,
    more: Sequence[metrics.Metric] = (),
    quick: bool = False,
    decoys: Batch | None = None,
    proved: bool = False,
    once: Once[Tensor] = lambda key, make: make(),
    replay: Replay | None = None,
) -> Measured:
    """Pair a reconstruction with the truth; measure it and the prior-only baseline.

    The baseline is the closest of `guesses`; `quick` measures only the criterion's score. A match
    counts only if chance does not explain it, or if the update proves the answer (`proved`).
    `decoys` are examples drawn like the truth that the attack never saw. Of what the attacker has
    from elsewhere nothing counts, and the baseline completes the rest from it; `once` keeps such
    completions of the public examples. If few decoys have the same parts, the attack may `replay`.
    """
    domain = criterion.domain
    part = criterion.counted
    paired = pair(truth, answer, criterion.costs)
    low, high = domain.input_range
    scores: dict[str, Any] = {}
    # Other metrics are of whole images, where the known part would count as right.
    if domain.distance_is_rmse and criterion.known is None and not quick:
        scores = metrics.evaluate(
            paired,
            data_range=high - low,
            more=more,
        )
    true = part(truth.inputs)
    scores.setdefault(domain.metric, domain.score(true, part(paired.inputs)).tolist())
    # Paired in the same way as the answer, so that neither has an advantage.
    blind = prior_only(criterion, truth, public, once)
    baseline = pair(truth, Reconstruction(blind), criterion.costs).inputs
    met = criterion.met(truth.inputs, paired.inputs, baseline)
    test = chance(criterion, truth, answer.inputs, decoys)
    # A proof needs no test: it holds whatever other examples look like.
    if test.p_value is None and criterion.known is not None and replay and decoys and not proved:
        # Without a match there is nothing to test, but it counts among the tries of a setting.
        test = msgspec.structs.replace(test, p_value=1.0)
        if any(met):
            test = replayed(criterion, truth, answer.inputs, decoys, replay)
    if not proved and any(met):
        if test.p_value is None:
            close = _unlike_any_guess(criterion, paired, baseline, public, decoys, once)
            met = tuple(one and near for one, near in zip(met, close, strict=True))
            test = msgspec.structs.replace(test, closer=any(met))
        elif not test.excluded:
            met = (False,) * truth.size
    return Measured(
        paired,
        {name: tuple(short(value) for value in values) for name, values in scores.items()},
        tuple(short(value) for value in domain.score(true, part(baseline)).tolist()),
        met,
        baseline,
        test,
        None if answer.agreement is None else answer.agreement[list(paired.order)],
    )


def _unlike_any_guess(
    criterion: Criterion,
    paired: Paired,
    baseline: Tensor,
    public: Batch | None,
    decoys: Batch | None,
    once: Once[Tensor],
) -> list[bool]:
    """For each example, whether its match is closer than a fixed guess comes to any example."""
    domain = criterion.domain
    part = criterion.counted
    inputs = part(paired.truth.inputs)
    distances = domain.distance(inputs, part(paired.inputs))
    guessed = domain.distance(inputs, part(baseline))
    if decoys is not None:
        # A baseline that is near any of them may be near the truth by chance as well.
        few = Batch(decoys.inputs[:COMPARED], decoys.labels[:COMPARED])
        others = part(few.inputs)
        blind = part(prior_only(criterion, few, public, once))
        guessed = torch.cat([guessed, domain.distance(others, blind)])
        inputs = torch.cat([inputs.cpu(), others.cpu()])
    known = None
    if public is not None and public.inputs.shape[1:] == paired.inputs.shape[1:]:
        known = part(public.inputs[:COMPARED])
    close: list[bool] = unlike_any_guess(domain, distances, guessed, inputs, known).tolist()
    return close


def prior_only(
    criterion: Criterion,
    examples: Batch,
    public: Batch | None,
    once: Once[Tensor] = lambda key, make: make(),
) -> Tensor:
    """For each example (B, *S) the closest prior-only baseline of the part that counts.

    If the attacker has parts of the examples, the imputers' completions from them are baselines.
    """
    known = criterion.known
    if known is None:
        return guesses(criterion.domain, examples, public)
    fits = public is not None and public.inputs.shape[1:] == examples.inputs.shape[1:]
    completed: tuple[Tensor, ...] = ()
    if public is not None and fits:
        values = known.values(examples.inputs)
        read = values, examples.labels
        key = "completions", known, *(each.numpy(force=True).tobytes() for each in read)

        fitted = public
        # An update often reveals labels, so a baseline has them.
        labels = fitted.labels, examples.labels

        def make() -> Tensor:
            made = completions(fitted.inputs, known, examples.inputs, labels)
            return torch.stack([each for _, each in made])

        completed = tuple(once(key, make))
        public = Batch(known.unknown(public.inputs), public.labels)
    unknown = Batch(known.unknown(examples.inputs), examples.labels)
    closest = guesses(criterion.domain, unknown, public if fits else None, completed)
    return known.joined(known.values(examples.inputs), closest)


def guesses(
    domain: Domain,
    truth: Batch,
    public: Batch | None,
    more: Sequence[Tensor] = (),
) -> Tensor:
    """For each example (B, *S) the closest prior-only baseline, `more` (B, *S) among them.

    The baselines are the domain's best guess from public examples, from those of its class (an
    update often reveals the class), and constants. If labels are numbers, the class are the public
    examples with the closest numbers. Of a text, the closest public sequence is a baseline, too, as
    texts repeat sentences. An attack must be closer than these.
    """
    shape = truth.inputs.shape
    fits = public is not None and public.inputs.shape[1:] == shape[1:]
    blind = domain.blind(public.inputs if public is not None and fits else None)
    blind = blind.to(truth.inputs).expand(shape)
    every = [blind, *(one.to(truth.inputs).expand(shape) for one in (*domain.constants(), *more))]
    if public is not None and fits:
        if domain.examples_recur:
            near = domain.costs(truth.inputs, public.inputs).argmin(1)
            every.append(public.inputs[near.to(public.inputs.device)].to(truth.inputs))
        if public.labels.shape[1:] == truth.labels.shape[1:]:
            every += _by_label(domain, blind, truth.labels, public)
    apart = torch.stack([domain.distance(truth.inputs, guess) for guess in every])
    return torch.stack(every)[apart.argmin(0), torch.arange(shape[0])]


def _by_label(
    domain: Domain,
    blind: Tensor,
    labels: Tensor,
    public: Batch,
) -> list[Tensor]:
    """The best guesses (B, *S) from public examples with these labels: equal ones, and if they are
    numbers the closest, alone and with NEAR others.
    """
    known = public.labels.to(labels.device)
    by_class = [blind.clone()]
    numbers = known.is_floating_point() and known.ndim == 1
    by_class += [blind.clone(), blind.clone()] * numbers
    for place, label in enumerate(labels):
        same = (known == label).reshape(public.size, -1).all(1).nonzero()[:, 0]
        groups = [same]
        if numbers:
            order = (known - label).abs().argsort(stable=True)
            groups += [order[:1], order[: 1 + NEAR]]
        for guess, group in zip(by_class, groups, strict=True):
            if len(group):
                guess[place] = domain.blind(public.inputs[group.to(public.inputs.device)]).to(blind)
    return by_class


def shown(
    criterion: Criterion,
    truth: Tensor | None,
    guess: Tensor,
    *,
    images: bool,
    leaks: Tensor | None = None,
    baseline: Tensor | None = None,
    agreement: Tensor | None = None,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a record shows of examples: fields of an `Assessment`, and files by name.

    Pictures or columns, depending on the domain; without `images` only matches by column.
    `guess` is in the order of the truth, as is `agreement` (N, m); `leaks` is a leak map in [0, 1].
    Columns that the attacker has from elsewhere are left out: nobody reconstructed them.
    """
    domain = criterion.whole
    known = criterion.known
    if known is not None and domain.parts is not None:
        domain = criterion.domain
        guess = criterion.counted(guess)
        truth = None if truth is None else criterion.counted(truth)
        baseline = None if baseline is None else criterion.counted(baseline)
        open_parts = [not bool(known.places[start]) for start, _ in known.domain.spans]
        agreement = None if agreement is None else agreement[:, open_parts]
    parts = domain.fields(truth, guess, baseline)

    def agreed(part: Any, shares: list[float]) -> Any:
        return msgspec.structs.replace(part, agreement=tuple(short(v) or 0.0 for v in shares))

    columns = parts.columns or ()
    if agreement is not None and columns:
        columns = tuple(map(agreed, columns, agreement.T.tolist()))
    if not images:
        columns = tuple(
            msgspec.structs.replace(column, truth=(), reconstruction=()) for column in columns
        )
    fields: dict[str, Any] = {"columns": columns} if columns else {}
    if not images:
        return fields, {}
    if parts.sequences is not None:
        fields["sequences"] = parts.sequences
        if agreement is not None:
            fields["sequences"] = tuple(map(agreed, parts.sequences, agreement.tolist()))
    files = {}
    named = {}
    strips = [(name, part, domain.input_range) for name, part in (parts.pictures or {}).items()]
    if leaks is not None and strips:
        maps = domain.fields(None, leaks).pictures or {}
        strips += [("leak_map", part, (0.0, 1.0)) for part in maps.values()]
    for name, part, span in strips:
        file, content = strip(part, span)
        files[file] = content
        named[name] = file
    return {**fields, "pictures": named, "values": parts.values}, files


def objective_of(answer: Reconstruction) -> ObjectiveValues:
    start = answer.trace[0] if answer.trace else answer.objective
    return ObjectiveValues(start=short(start), end=short(answer.objective))


def release_of(
    update: Update,
    utility: dict[str, float | None],
    *,
    noise_share: float | None = None,
) -> ReleaseInfo:
    withheld = 0.0 if update.mask is None else 1 - float(update.mask.double().mean())
    return ReleaseInfo(
        law=type(update.law).__name__,
        data_dependent=update.law.private or update.mask_private,
        withheld=short(withheld),
        unit=update.unit.noun,
        utility=utility,
        noise_share=noise_share,
    )


def utility_of(
    update: Update,
    truth: Batch,
    seen: Observation,
) -> dict[str, float | None]:
    """First-order utility kept, and the equal noise of the same second-order cost (paper A).

    Both are shares of the plain gradient's: <g, E y> / ||g||², and sqrt(Σ g² v / ||g||²) for noise
    of variances v. None if the release is not one client's gradient, or its distribution is not
    known.
    """
    nothing: dict[str, float | None] = {"first_order": None, "second_order": None}
    plain = len(update.rows) == 1 and len(seen.cohort) == 1
    if not plain or not seen.task.plan.is_gradient:
        return nothing
    g = gradient(seen.task, truth.inputs, truth.labels).detach().double()
    total = float(g.square().sum())
    law = update.law
    if not total > 0 or not isinstance(law, Exact | Gaussian):
        return nothing
    variance = law.variance if isinstance(law, Gaussian) else 0.0
    noise = float((g.square() * torch.as_tensor(variance).to(g)).sum()) / total
    if isinstance(law, Gaussian):
        return {"first_order": None, "second_order": short(noise**0.5)}
    share = float((g * update.rows[0].double()).sum()) / total
    return {"first_order": short(share), "second_order": 0.0}


def strip(
    images: Tensor,
    input_range: tuple[float, float],
) -> tuple[str, bytes]:
    """The images (B, C, H, W) side by side as one PNG; returns its file name and bytes.

    One channel becomes gray, three become RGB; of other numbers only the first is shown.
    """
    from PIL import Image

    low, high = input_range
    # PNG holds whole numbers: what lies outside of the range is cut, as a viewer would.
    pixels = ((images.detach().cpu().double() - low) / (high - low)).clamp(0, 1)
    if pixels.shape[1] != 3:
        pixels = pixels[:, :1]
    count, channels, height, width = pixels.shape
    canvas = torch.ones(
        channels,
        height,
        count * width + (count - 1) * GAP,
        dtype=torch.float64,
    )
    for i, image in enumerate(pixels):
        canvas[:, :, i * (width + GAP) : i * (width + GAP) + width] = image
    array = (canvas * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[:, :, 0] if channels == 1 else array)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    content = buffer.getvalue()
    return picture_name(content), content
