"""Why a configuration is undecided: does its update hold the example, and only the search fail?

The auditor knows the truth and uses it here, which no attack may. So a diagnosis is no verdict: it
says where a stronger search may help, and where only knowledge about the data could.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leakbound._util import files, optimizers
from leakbound._util.decibels import root_of_psnr
from leakbound._util.groups import grouped
from leakbound.assess import record as records
from leakbound.assess.criterion import Criterion
from leakbound.assess.measure import guesses
from leakbound.assess.verdict import DIAGNOSES as MEANINGS
from leakbound.assess.verdict import of_configuration
from leakbound.attacks.matching.attack import GradientMatching
from leakbound.attacks.matching.images import Pixels
from leakbound.attacks.matching.loop import begin, solve
from leakbound.attacks.matching.newton import GaussNewton, Linearized, PublicGaussian
from leakbound.attacks.matching.objective import Objective
from leakbound.attacks.matching.settings import MatchingSettings
from leakbound.attacks.pace import tick
from leakbound.audit import plan as plans
from leakbound.audit.context import PlanContext, one_thread
from leakbound.audit.experiment import criterion_of, play_round
from leakbound.audit.journal import Journal
from leakbound.audit.plan import Plan
from leakbound.core import (
    Batch,
    Exact,
    Gaussian,
    Law,
    NotApplicable,
    Observation,
    Reconstruction,
    ThreatModel,
    Unknown,
)
from leakbound.covariance import Structured
from leakbound.pairing import pair
from leakbound.protocol import Round
from leakbound.randomness import normal, stream

FILE = "diagnosis.jsonl"

STARTS = (-12.0, -6.0, 0.0, 6.0, 12.0)
"""How much closer than the threshold the starts of searches are, in dB."""
GAIN = 6.0
"""Decibels by which a search from near the truth must come closer: it does not if a quarter of the
directions is not determined.
"""
STEPS = 12
DIRECTIONS = 40
POLISH = 200
"""Of the searches from near the truth, and of that of a witness."""
DENSE = 1024
"""Inputs up to which the information matrix is computed whole."""
PROBES = 4
ORDER = 60
SAME = 2.0
"""Standard deviations of noise up to which two updates count as the same: no test tells them apart
with an error below Phi(-1), 16 %.
"""
BEYOND = 1.2
"""How far from the truth a witness is searched, in threshold distances."""
UNLIKE = 1e-3


def diagnose(
    played: Round,
    criterion: Criterion,
    source: torch.Generator,
    *,
    public: Batch | None = None,
    experiment: str = "",
) -> records.Diagnosis:
    """Test from the truth's side why a round's examples were not reconstructed.

    Three tests, for an attacker who knows defense, mask and labels:

    - Gauss-Newton, with the prior below, and Adam start at the truth plus noise. The radius of
      attraction is the lowest starting score from which a search comes at least 6 dB closer and
      meets the threshold.
    - The Jacobian J of the update at the truth, in units of the known noise or of the update's own
      rounding, gives the information matrix A = JᵀJ. The number of determined directions is
      tr A (A + I / t²)⁻¹, for the threshold's root mean squared error t. The expected error of
      an attacker with a Gaussian prior of public examples, of covariance C, is
      tr (A + C⁻¹)⁻¹ / m; without public examples, C has the baseline's error.
    - A witness is another example, farther away than the threshold, whose update is the same up to
      the noise or rounding.

    Args:
        played: a round with its truth.
        criterion: what counts as reconstructed; its distance is a root mean squared error.
        source: draws the starts.
        public: the public examples behind the prior-only baseline.
        experiment: the name of the assessment that it belongs to.

    Raises:
        NotApplicable: the domain's distance is no root mean squared error, or the law is unknown.

    Source: this project. Two-point argument: Le Cam 1973. Quadrature: Golub and Meurant 1994.

    Example:
        >>> import leakbound as lb
        >>> from leakbound.audit import diagnose
        >>> from leakbound.domains import of_shape
        >>> model = lb.models.mlp(input_shape=(1, 4, 4), classes=3, generator=lb.stream(0, "model"))
        >>> batch = lb.Batch(torch.linspace(0, 1, 16).reshape(1, 1, 4, 4), torch.tensor([2]))
        >>> simulation = lb.simulate(model, batch, attack="linear_inversion")
        >>> criterion = Criterion.of(of_shape((1, 4, 4)))
        >>> diagnose(simulation.round, criterion, lb.stream(0, "diagnosis")).word
        'information present, search fails'
    """
    if not criterion.domain.distance_is_rmse or not played.truth.inputs.is_floating_point():
        raise NotApplicable(
            f"{criterion.domain.name} are compared by {criterion.domain.metric}, and the tests "
            "need a root mean squared error"
        )
    point = _Truth.of(played, criterion, public)
    starts = _attraction(point, source)
    known = None
    witness = None
    missing = None
    try:
        release = _Release.of(point)
        known = _conditioning(point, release)
        if point.mask_leaks:
            raise NotApplicable(
                "the batch chose which coordinates are sent: this leaks more than is counted, so "
                "nothing shows that information is absent"
            )
        witness = _witness(point, release, known, source)
    except NotApplicable as error:
        missing = error.reason
    radius = _radius(starts, criterion)
    word: records.Why
    if radius is not None:
        word = records.UNKNOWN if witness else records.PRESENT
    else:
        counted = None if point.mask_leaks else known
        too_far = counted is not None and counted.expected[1] < point.level
        word = records.ABSENT if witness or too_far else records.UNKNOWN
    return records.Diagnosis(
        experiment=experiment,
        word=word,
        starts=starts,
        radius=radius,
        noise=None if known is None else release.noise,
        inputs=point.truth.inputs.numel(),
        determined=None if known is None else known.determined,
        expected=None if known is None else known.expected,
        witness=witness,
        note=missing,
    )


def diagnose_undecided(
    plan: Plan,
    folder: Path,
    *,
    device: str = "cpu",
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> list[records.Diagnosis]:
    """Diagnose each undecided configuration of an audit's folder, by its best undecided experiment.

    `diagnosis.jsonl` keeps each as soon as it is there, and what it holds is not computed again.
    Diagnoses that do not apply are left out. `watch` is called with how many are done, of how many.
    """
    units = {unit.id: unit for unit in plan.experiments()}
    wanted = _undecided(folder)
    if not units.keys() >= set(wanted):
        raise ValueError(f"folder is {str(folder)!r}, which belongs to another plan; give its own")
    context = PlanContext(plan.data, device)
    journal = Journal(folder / FILE, records.Diagnosis)
    with files.claimed(folder), closing(journal):
        kept = journal.read(lambda one: one.experiment in wanted)
        for number, name in enumerate(wanted):
            watch(number, len(wanted))
            if name not in kept:
                with suppress(NotApplicable), one_thread():
                    journal.append(diagnose_unit(units[name], context))
        watch(len(wanted), len(wanted))
        journal.finish(name for name in wanted if name in journal.ends)
    lines = records.read(folder / FILE, records.Diagnosis) if journal.ends else iter(())
    return [one for one in lines if not isinstance(one, records.Damage)]


def _undecided(folder: Path) -> list[str]:
    """By configuration that is undecided, its undecided experiment with the best example."""

    def key(one: records.Assessment) -> tuple[object, ...]:
        model = one.model.name, str(one.model.parameters), one.model.train_steps
        return *model, one.defense.settings, one.batch_size

    def best_score(one: records.Assessment) -> float:
        return max((score for score in one.scores if score is not None), default=-math.inf)

    lines = records.read(folder / "records.jsonl", records.Assessment)
    groups = grouped(
        (key(one), one)
        for one in lines
        if not isinstance(one, records.Damage) and one.status == "ok"
    )
    names = []
    for experiments in groups.values():
        if of_configuration(experiments) in records.OPEN:
            undecided = [one for one in experiments if one.verdict in records.OPEN]
            names.append(max(undecided, key=best_score).experiment)
    return names


def diagnose_unit(
    unit: plans.Experiment,
    context: PlanContext,
) -> records.Diagnosis:
    """Diagnose one experiment of a plan."""
    return diagnose(
        play_round(unit, context),
        criterion_of(unit, context),
        stream(unit.seed, "diagnosis", unit.batch_size),
        public=context.public,
        experiment=unit.id,
    )


def text(diagnosis: records.Diagnosis) -> str:
    """A diagnosis in a few sentences."""
    said = [f"{diagnosis.word}: {MEANINGS[diagnosis.word]}"]
    if diagnosis.radius is not None:
        said.append(f"Searches reach it from {diagnosis.radius:.0f} dB.")
    elif diagnosis.starts:
        nearest = diagnosis.starts[-1]
        said.append(f"A start at {nearest.before:.0f} dB ends at {nearest.after:.0f} dB.")
    if diagnosis.determined is not None and diagnosis.expected is not None:
        low, high = (round(value) for value in diagnosis.determined)
        many = f"{low}" if low == high else f"{low} to {high}"
        unit = "the known noise" if diagnosis.noise == "noise" else "the update's rounding"
        said.append(
            f"{many} of {diagnosis.inputs} directions are determined to the threshold under "
            f"{unit}; with a Gaussian prior of public examples, {diagnosis.expected[0]:.0f} dB are "
            "expected"
            + ("." if low == high else f" at least, {diagnosis.expected[1]:.0f} at most.")
        )
    if diagnosis.witness is not None:
        said.append(f"Another example, at {diagnosis.witness.score:.0f} dB, has the same update.")
    return " ".join([*said, *([f"Note: {diagnosis.note}."] if diagnosis.note else [])])


@dataclass(frozen=True, eq=False)
class _Truth:
    """The truth, and what the strongest attacker sees: defense, mask and labels are known."""

    observation: Observation
    truth: Batch
    criterion: Criterion
    baseline: float
    """Mean squared error of the prior-only baseline."""
    prior: PublicGaussian
    """Of public examples; without them of equal variances, the baseline's error."""

    @staticmethod
    def of(
        played: Round,
        criterion: Criterion,
        public: Batch | None,
    ) -> _Truth:
        seen = played.observation
        truth = played.truth
        threat = ThreatModel(server=seen.threat.server)
        observation = replace(
            seen,
            threat=threat,
            update=played.update,
            defense=played.defense,
            labels=truth.labels,
        )
        baseline = guesses(criterion.domain, truth, public)
        error = max(float((baseline - truth.inputs).double().square().mean()), 1e-12)
        wide = _double(observation)
        prior = PublicGaussian.of(
            wide,
            wide.task,
            truth.labels,
            known=public is not None,
        )
        prior = prior if len(prior.extra) else replace(prior, rest=error)
        return _Truth(observation, truth, criterion, error, prior)

    @property
    def mask_leaks(self) -> bool:
        """Whether the batch chose the mask, so that the mask itself says something of it."""
        update = self.observation.update
        return update.mask_private or (isinstance(update.law, Exact) and update.law.private)

    @property
    def level(self) -> float:
        return self.criterion.domain.level(self.criterion.within)

    def score(self, inputs: Tensor) -> float:
        """The median score of a batch, in the best order."""
        domain = self.criterion.domain
        paired = pair(self.truth, Reconstruction(inputs), domain.costs)
        return float(domain.score(self.truth.inputs, paired.inputs).median())


def _attraction(
    point: _Truth,
    source: torch.Generator,
) -> tuple[records.Start, ...]:
    """Searches from ever closer starts, until one comes closer and reaches the threshold."""
    objective = Objective.of(MatchingSettings(distance="euclidean"), point.observation)
    newton = GaussNewton(steps=STEPS, directions=DIRECTIONS)
    low, high = point.criterion.domain.input_range
    starts = list[records.Start]()
    for closer in STARTS:
        spread = point.criterion.within * root_of_psnr(closer)
        truth = point.truth.inputs
        start = (truth + spread * normal(truth.shape, source, like=truth)).clamp(low, high)
        adam = GradientMatching(steps=POLISH, learning_rate=spread / 2)
        first = begin(
            adam, Objective.of(adam, point.observation), source, images=Pixels(start.clone())
        )
        ends = newton.near(objective, point.truth.labels, start), solve(adam, [first])[0].inputs
        after = max(map(point.score, ends))
        starts.append(records.Start(before=point.score(start), after=after))
        if tick() or _radius(starts, point.criterion) is not None:
            break
    return tuple(starts)


def _radius(
    starts: Iterable[records.Start],
    criterion: Criterion,
) -> float | None:
    level = criterion.info.value
    drawn = [one.before for one in starts if one.after >= max(level, one.before + GAIN)]
    return min(drawn, default=None)


@dataclass(frozen=True, eq=False)
class _Release:
    """The noise-free update of candidates in float64, in units of the noise's deviation."""

    rows: Callable[[Tensor], Tensor]
    noise: records.Unit
    same: float
    """Distance up to which two updates are the same."""
    at_truth: Tensor

    @staticmethod
    def of(point: _Truth) -> _Release:
        observation = _double(point.observation)
        law = point.observation.update.law
        defense = point.observation.defense
        if isinstance(law, Unknown):
            raise NotApplicable(f"the noise distribution is not known: {law.reason}")
        if not isinstance(law, Exact | Gaussian):
            raise NotApplicable("the noise is not Gaussian")
        if law.private and not isinstance(law, Exact):
            raise NotApplicable("the noise depends on the private batch, and so leaks more")
        if defense is not None and not defense.continuous:
            raise NotApplicable("what is sent is no continuous function of the example")
        labels = point.truth.labels
        settings = MatchingSettings(distance="euclidean")
        # Not whitened here: the rows are divided by the deviation below.
        objective = replace(Objective.of(settings, observation), whitener=None)
        mask = observation.update.mask
        with torch.enable_grad():
            plain = objective.rows(point.truth.inputs.double().requires_grad_(), labels).detach()
        plain = plain if mask is None else plain * mask
        seen = observation.update.rows
        spread, noise = _spread(law, seen - plain, observation, point)

        def rows(x: Tensor) -> Tensor:
            sent = objective.rows(x, labels)
            sent = sent if mask is None else sent * mask
            return spread.whiten(sent) if isinstance(spread, Structured) else sent / spread

        moved = rows(point.truth.inputs.double()).detach()
        sent = moved.numel() if mask is None else int(mask.sum())
        rounding = isinstance(law, Exact)
        # By rounding, each number is off by about a unit: all together by the root of their count.
        return _Release(rows, noise, math.sqrt(sent) if rounding else SAME, moved)


def _spread(
    law: Law,
    off: Tensor,
    observation: Observation,
    point: _Truth,
) -> tuple[Tensor | Structured, records.Unit]:
    """The deviation of the noise, at least that of the rounding of every tensor."""
    seen = observation.update.rows
    noise = law.covariance if isinstance(law, Gaussian) else 0.0
    if isinstance(noise, Structured):
        return noise.to(seen), "noise"
    exact = isinstance(law, Exact)
    if exact and float(off.norm()) > UNLIKE * float(seen.norm()):
        raise NotApplicable("what is sent is not what the client's model and defense give")
    spread = torch.as_tensor(noise).to(seen).expand_as(seen).sqrt().clone()
    unit = torch.finfo(point.observation.update.rows.dtype).eps
    for _, _, start, stop in observation.task.layout:
        # One rounding has a deviation of step / sqrt(12), about a quarter of eps.
        least = unit / 4 * seen[:, start:stop].square().mean().sqrt().clamp_min(1e-30)
        if exact:
            least = torch.maximum(least, off[:, start:stop].square().mean().sqrt())
        spread[:, start:stop].clamp_min_(least)
    return spread, "rounding" if exact else "noise"


def _double(observation: Observation) -> Observation:
    update = observation.update
    task = observation.task.to(update.rows.device, torch.float64)
    return replace(
        observation,
        task=task,
        update=replace(update, rows=update.rows.double()),
    )


@dataclass(frozen=True, eq=False)
class _Known:
    """What the update determines at the truth; ranges where the matrix is not computed whole."""

    determined: tuple[float, float]
    expected: tuple[float, float]
    vectors: Tensor | None = None
    values: Tensor | None = None


def _conditioning(point: _Truth, release: _Release) -> _Known:
    x = point.truth.inputs.double()
    prior = point.prior
    at = Linearized(release.rows, x)

    def product(v: Tensor) -> Tensor:
        return at.pull(at.push(v.view_as(x))).flatten()

    def root(v: Tensor) -> Tensor:
        return prior.root(v.view_as(x)).flatten()

    m = x.numel()
    least = 1 / point.criterion.within**2
    vectors = values = None
    if m <= DENSE:
        frame = torch.eye(m, dtype=x.dtype, device=x.device)
        matrix = torch.stack([product(e) for e in frame])
        matrix = (matrix + matrix.T) / 2  # eigh sees only one triangle
        values, vectors = torch.linalg.eigh(matrix)
        values = values.clamp_min(0)  # negative only by rounding
        unknown = (float((1 / (values + least)).sum()),) * 2
        inverse = torch.stack([prior.precision(e.view_as(x)).flatten() for e in frame])
        errors = (float(torch.linalg.inv(matrix + inverse).diagonal().sum()),) * 2
    else:
        # With C = R R: (A + C⁻¹)⁻¹ = R (R A R + I)⁻¹ R, which needs no inverse of C.
        unknown = _traces(product, m, least)
        errors = _traces(lambda v: root(product(root(v))), m, 1.0, root)
    known = sorted(max(0.0, m - least * trace) for trace in unknown)
    domain = point.criterion.domain
    blind = point.baseline  # an attacker may answer the baseline itself
    scores = sorted(domain.level(max(min(error / m, blind), 1e-30) ** 0.5) for error in errors)
    return _Known((known[0], known[1]), (scores[0], scores[1]), vectors, values)


def _traces(
    product: Callable[[Tensor], Tensor],
    m: int,
    floor: float,
    root: Callable[[Tensor], Tensor] = lambda v: v,
) -> tuple[float, float]:
    """Bounds on tr R (A + c)⁻¹ R for a symmetric R, averaged over PROBES random signs.

    Gauss quadrature is a lower bound, Gauss-Radau with a node at 0 an upper one.
    """
    source = torch.Generator().manual_seed(0)
    ends = np.zeros(2)
    for _ in range(PROBES):
        # Random signs have the least variance of such estimates of a trace (Hutchinson 1990).
        v = root(normal((m,), source, like=torch.zeros(1, dtype=torch.float64)).sign())
        size = float(v.square().sum())
        alpha, beta = _lanczos(product, v / size**0.5, ORDER)
        low, high = (
            size * _quadrature(own, beta[:-1], floor)
            for own in (alpha, _with_node_at_zero(alpha, beta))
        )
        ends += low, min(high, size / floor)  # (A + c)⁻¹ has no eigenvalue above 1 / c
        if tick():
            raise NotApplicable("the time limit was reached")
    return float(ends[0]) / PROBES, float(ends[1]) / PROBES


def _lanczos(
    product: Callable[[Tensor], Tensor],
    v: Tensor,
    order: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Diagonal (k,) and off-diagonal (k,) of the tridiagonal matrix, all vectors orthogonalized."""
    basis = [v]
    alpha = list[float]()
    beta = list[float]()
    for _ in range(order):
        w = product(basis[-1])
        alpha.append(float(w @ basis[-1]))
        frame = torch.stack(basis)
        # One pass of Gram-Schmidt loses orthogonality to rounding; a second one restores it.
        for _ in range(2):
            w = w - frame.T @ (frame @ w)
        beta.append(float(w.norm()))
        # The space is exhausted: what is left is rounding.
        if beta[-1] <= 1e-14 * max(alpha):
            break
        basis.append(w / beta[-1])
    return np.array(alpha), np.array(beta)


def _with_node_at_zero(
    alpha: NDArray[np.float64], beta: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The diagonal whose last entry makes 0 an eigenvalue (Golub and Meurant 1994)."""
    diagonal = alpha.copy()
    pivot = diagonal[0]
    for i in range(1, len(diagonal)):
        if i == len(diagonal) - 1:
            diagonal[i] = beta[i - 1] ** 2 / pivot
        pivot = diagonal[i] - beta[i - 1] ** 2 / pivot
    return diagonal


def _quadrature(
    alpha: NDArray[np.float64],
    beta: NDArray[np.float64],
    floor: float,
) -> float:
    matrix = np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1)
    nodes, vectors = np.linalg.eigh(matrix)
    # Weights of Gauss quadrature: the squared first components (Golub and Welsch 1969).
    return float((vectors[0] ** 2 / (np.maximum(nodes, 0) + floor)).sum())


def _witness(
    point: _Truth,
    release: _Release,
    known: _Known,
    source: torch.Generator,
) -> records.Witness | None:
    """Another example with the same update, at a fixed distance from the truth.

    The search starts where the Jacobian does not determine the example.
    """
    truth = point.truth.inputs.double()
    draw = normal((truth.numel(),), source, like=truth)
    if known.vectors is not None and known.values is not None:
        # The less the update determines a direction, the farther the start moves along it.
        draw = known.vectors @ (draw / (known.values + 1 / point.baseline).sqrt())
    domain = point.criterion.domain
    low, high = domain.input_range
    length = BEYOND * point.criterion.within * truth.numel() ** 0.5
    free = draw.view_as(truth).clone().requires_grad_()

    def candidate() -> Tensor:
        unit = free / free.norm().clamp_min(1e-12)
        return torch.add(truth, unit, alpha=length).clamp(low, high)

    def off(x: Tensor) -> Tensor:
        return torch.sub(release.rows(x), release.at_truth).square().sum()

    optimizer = optimizers.LBFGS(
        [free],
        max_iter=POLISH,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        # The logarithm, because the distance has to fall by orders of magnitude.
        value = (off(candidate()) + 1e-12).log()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        x = candidate().detach()
    distance = float(off(x.requires_grad_()).detach().sqrt())
    score = point.score(x.detach().to(point.truth.inputs))
    if not distance <= release.same or score >= point.level:
        return None
    # Phi(-distance / 2): the error of the best test between the two updates.
    error = None if release.noise == "rounding" else 0.5 * math.erfc(distance / 2 / 2**0.5)
    return records.Witness(score=score, distance=distance, error=error)
