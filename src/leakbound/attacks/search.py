"""One search of gradient matching: its variables, its objective, its best guess so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leakbound._util import user_code
from leakbound.attacks import exact
from leakbound.attacks.base import boxed, expected_rows, rank, seen_task
from leakbound.attacks.features.base import FoundFeatures
from leakbound.attacks.features.methods import METHODS
from leakbound.attacks.images import DeepPrior, Images, Pixels
from leakbound.attacks.labels import infer_labels
from leakbound.attacks.lockstep import Lockstep, stopped
from leakbound.attacks.objectives import DISTANCES, disorder
from leakbound.attacks.terms import (
    Learned,
    SameFeatures,
    SameStatistics,
    Small,
    Smooth,
    Term,
    form_for,
    statistics,
)
from leakbound.client import clients_layer_inputs, refuse_codes
from leakbound.covariance import Structured
from leakbound.engines.base import Engine, aligned
from leakbound.random import normal, uniform
from leakbound.types import Exact, NotApplicable, Observation, Reconstruction, Task

if TYPE_CHECKING:
    from leakbound.attacks.matching import GradientMatching

STUCK = 0.9
UNEXPLAINED = 0.1
MASKED = 1e-3
"""What an answer may leave of an exact update of which a known mask withholds a part: the fewer
coordinates are seen, the better wrong images match them (at 90 % pruned, to half a percent)."""
MOSTLY = 0.99


class Search:
    """One descent: the variables, the objective and the best iterate so far.

    `zeros_first`: what a known mask withholds counts as zeros that were sent, fully in the first
    stage, less in the next ones, not at all in the last one.
    """

    def __init__(
        self,
        settings: GradientMatching,
        observation: Observation,
        generator: torch.Generator,
        images: Images | None = None,
        zeros_first: bool = False,
    ) -> None:
        refuse_codes(observation.task, observation.input_shape)
        self.settings, self.observation, self.zeros_first = settings, observation, zeros_first
        self.task = seen_task(observation)
        self.whitener = _whitener(observation)
        self.weights = observation.weights if self.whitener is None else None
        self.seen = self._white(observation.update.rows)
        self.blank = not bool((self.seen != 0).any())
        self.withheld = withheld(observation)
        if zeros_first and self.withheld is not None:
            self.seen = self.seen.masked_fill(self.withheld, 0.0)
        self.noise_share = self._noise_share()
        self.spans = [(a, b) for _, _, a, b in self.task.layout]
        self.distance = DISTANCES[settings.distance]
        self.images = images or _images(settings, self.task, observation, generator)
        self.labels = _labels(settings, observation, generator)
        self.joint = settings.labels == "joint"
        self.variables = list(self.images.variables)
        self.found = _found(settings, observation, generator)
        self.terms = self._terms(generator)
        self.layers = tuple(dict.fromkeys(name for term in self.terms for name in term.layers))
        if settings.labels == "joint":
            self.labels.requires_grad_()
            self.variables.append(self.labels)
        self.best = torch.tensor(float("inf"), device=self.seen.device)
        self.last = self.last_match = self.best
        self.inputs = self.images()
        self.kept: list[Tensor] = []
        self.trace: list[float] = []
        self.vanished = False
        self.pull: Callable[[Tensor], Tensor] | None = None
        """What else moves the search, without a say in which iterate is best."""
        self.engine: Engine | None = None
        self.slope: Tensor | None = None
        own = type(self)
        self.plain = own is Search
        self.usual = own.rows is Search.rows and own.objective is Search.objective
        self.exact = exact.engine_of(self)

    def _white(self, rows: Tensor) -> Tensor:
        """Rows in coordinates in which known correlated noise is white."""
        return rows if self.whitener is None else self.whitener.whiten(rows)

    def _noise_share(self) -> float:
        if self.whitener is None:
            return self.observation.noise_share
        energy = float(self.seen.double().square().sum())
        return min(1.0, self.seen.numel() / energy) if energy > 0 else 0.0

    def _terms(self, generator: torch.Generator) -> list[Term]:
        """The other summands of the objective, as far as their weights are not zero."""
        settings, observation, terms = self.settings, self.observation, list[Term]()
        images = len(observation.input_shape) == 3
        noise = settings.noise_variation * self.noise_share**0.5
        self.variation = settings.total_variation + noise
        seen = 1.0 if self.withheld is None else 1 - float(self.withheld.double().mean())
        self.smoothing = settings.smoothing / max(seen, 1e-3) ** 0.5 if images else 0.0
        if self.variation and not images:
            raise NotApplicable("total variation needs images (C, H, W)")
        self.smooth = Smooth(self.variation)
        if self.variation or self.smoothing:
            terms.append(self.smooth)
        if settings.size:
            terms.append(Small(settings.size, sum(self.task.input_range) / 2))
        if settings.batch_norm:
            known = statistics(settings.statistics, observation, self.task)
            if known:
                first, cohort = settings.first_norm, observation.cohort
                terms.append(SameStatistics(settings.batch_norm, known, first, cohort))
        if settings.prior and settings.prior_weight:
            build = user_code.find("prior", settings.prior)
            with user_code.seeded(generator):
                penalty = build(input_shape=observation.input_shape)
            terms.append(Learned(settings.prior_weight, penalty))
        if self.found is not None:
            form = form_for(settings.feature_form, observation.examples)
            terms.append(SameFeatures(settings.feature_weight, self.found, form))
        return terms

    def rows(self, images: Tensor, labels: Tensor) -> Tensor:
        """The rows that the client would have had of a guess."""
        return expected_rows(self.observation, self.task, images, labels)

    def expected(self, rows: Tensor) -> Tensor:
        """What would have been seen of the client's rows, to be compared with `seen`."""
        return self._white(rows)

    def objective(self) -> tuple[Tensor, Tensor]:
        """(distance + terms, distance alone) at the present guess."""
        labels = self.labels.softmax(-1) if self.settings.labels == "joint" else self.labels
        images = self.inputs = self.images()
        rows = self.rows(images, labels)
        match = self.distance(self.expected(rows), self.seen, self.weights, self.spans)
        inside: dict[str, Tensor] = {}
        if self.layers:
            cohort = self.observation.cohort
            inside = clients_layer_inputs(self.task, images, self.layers, cohort)
        total = match
        for term in self.terms:
            total = total + term.weight * term(images, inside)
        if self.withheld is not None and self.settings.ordered:
            total = total + self.settings.ordered * disorder(rows, self.withheld, self.spans)
        return total, match

    def descend(self) -> Tensor:
        """Evaluate, keep the best iterate, and leave gradients in the variables."""
        if self.exact is None:
            total, match = self.objective()
            driven = total if self.pull is None else total + self.pull(self.inputs)
            exact.absorb(self, total, match, torch.autograd.grad(driven, self.variables))
            return self.last
        choice, step = self.exact
        if self.engine is None:
            self.engine = choice.engine([self.task], step.rows)
        plain = self.engine.gradient(*step.guess())
        if self.slope is None:
            self.slope = aligned(len(plain), plain)
        step.compare(plain, self.slope)
        step.finish(self.engine.pull(self.slope))
        return self.last

    def recall(self) -> None:
        """Put the variables back to the best iterate."""
        with torch.no_grad():
            for variable, kept in zip(self.variables, self.kept, strict=False):
                variable.copy_(kept)  # nothing is kept before the first evaluation
        self.inputs = self.images().detach()

    def adam(self) -> None:
        """Adam with the settings' schedule, sign and box."""
        Lockstep([self]).run()

    def _lbfgs(self) -> None:
        """L-BFGS with a strong-Wolfe line search and no early tolerance.

        DLG's released code has no line search: on its own LeNet and MNIST it then reached 40 dB for
        18 of 20 images within 3 restarts, with the search for 19 of 20 in a third of the time.
        """
        settings = self.settings
        optimizer = torch.optim.LBFGS(
            self.variables,
            lr=settings.learning_rate,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            return self.descend()

        for step in range(settings.steps):
            before = [variable.detach().clone() for variable in self.images.variables]
            optimizer.step(closure)  # type: ignore[no-untyped-call]
            after = [variable.detach() for variable in self.images.variables]
            if stopped(self, step) or all(map(torch.equal, before, after)):
                break

    def solve(self) -> Reconstruction:
        """The answer after a descent with the settings' optimizer, if anything was seen."""
        if self.blank:
            middle = boxed(torch.full_like(self.inputs.detach(), float("nan")), self.task)
            return Reconstruction(
                middle, problem="gradient vanished: the update is zero everywhere"
            )
        if self.settings.optimizer == "lbfgs":
            self._lbfgs()
        else:
            self.adam()
        return self.answer()

    def answer(self) -> Reconstruction:
        """The best iterate, and what the search thinks of it."""
        self.recall()
        labels = self.labels.argmax(-1) if self.joint else self.labels
        inputs = boxed(self.inputs.detach(), self.task)
        final = float(self.best)
        features = layer = None
        if self.found is not None:
            features, layer = self.found.vectors, self.found.layer
        trace, problem = tuple(self.trace), self._problem(final)
        if problem is None and self.found is not None and self.found.problem is not None:
            problem = f"its features failed: {self.found.problem}"
        return Reconstruction(inputs, labels.detach(), final, trace, problem, features, layer)

    def _problem(self, final: float) -> str | None:
        """Why the search failed, if it did."""
        if self.vanished:
            return "gradient vanished: the objective does not change with the inputs"
        if not final < float("inf"):
            return "not finite: the objective was never a number"
        noise = self.noise_share
        if noise > MOSTLY:
            return f"too much noise: it is {noise:.0%} of the update, and a match says little"
        lowest = min((v for v in self.trace if v == v), default=float("nan"))
        if not lowest <= STUCK * self.trace[0]:
            return f"objective did not fall: {self.trace[0]:.3g} at the start, {lowest:.3g} at best"
        left = self._unexplained()
        if left < noise / 2:
            return (
                f"noise was fitted: the answer leaves {left:.0%} of the update unexplained, though "
                f"{noise:.0%} of it is noise"
            )
        masked = hides(self.observation) and isinstance(self.observation.update.law, Exact)
        if not left <= (MASKED if masked else UNEXPLAINED) + noise:
            return (
                f"objective did not fall far enough: the answer leaves {100 * left:.2g}% of the "
                f"update unexplained, of which noise would be {noise:.0%}"
            )
        return None

    def _unexplained(self) -> float:
        """Share of the (weighted) update's energy that no multiple of the answer's update has."""
        labels = self.labels.softmax(-1) if self.joint else self.labels
        rows = self.expected(self.rows(self.inputs, labels)).detach()
        scale = 1.0 if self.weights is None else self.weights
        mine, seen = (rows * scale).double().flatten(), (self.seen * scale).double().flatten()
        both = (mine.square().sum() * seen.square().sum()).clamp_min(1e-300)
        return float(1 - (mine @ seen).square() / both)


def with_and_without_mask(
    answer: Reconstruction,
    settings: GradientMatching,
    observation: Observation,
    generator: torch.Generator,
) -> Reconstruction:
    """The answer of a search with a known mask, or a better one where the mask was no help.

    The fewer coordinates a mask shows, the more wrong images match them: a search that knows the
    mask can then end further off than one that takes what is withheld for zeros. So where the
    answer has a problem, a second search starts as the latter, and counts what is withheld less
    from stage to stage, in the last stage not at all. The better of both by the masked objective.
    """
    staged = settings.schedule == "stages" and settings.optimizer == "adam"
    if answer.problem is None or not staged or not hides(observation):
        return answer
    other = Search(settings, observation, generator, zeros_first=True).solve()
    return min(answer, other, key=rank)


def withheld(observation: Observation) -> Tensor | None:
    """(R, P) bool: what is known to be withheld of what the model has; None where all was sent."""
    mask, kept = observation.update.mask, observation.task.kept
    if mask is None or not observation.threat.defense_known:
        return None
    return ~mask if kept is None else ~mask & kept


def hides(observation: Observation) -> bool:
    """Whether a known mask withholds anything."""
    hidden = withheld(observation)
    return hidden is not None and bool(hidden.any())


def _whitener(observation: Observation) -> Structured | None:
    """The known covariance of correlated noise; None where a mask cut through it."""
    correlation = observation.correlation
    if correlation is None or (correlation.blocks and observation.update.mask is not None):
        return None
    return correlation.to(observation.update.rows)


def _images(
    settings: GradientMatching, task: Task, observation: Observation, generator: torch.Generator
) -> Images:
    if settings.image == "deep_prior":
        return DeepPrior(
            observation.batch_shape, task.input_range, settings.width, generator, task.parameters
        )
    return Pixels(_start(settings, task, observation, generator))


def _found(
    settings: GradientMatching, observation: Observation, generator: torch.Generator
) -> FoundFeatures | None:
    """The features that the settings' method reads off the update; None where none is set."""
    if settings.features == "none" or not settings.feature_weight:
        return None
    return METHODS[settings.features].find(observation, generator)


def _start(
    settings: GradientMatching, task: Task, observation: Observation, generator: torch.Generator
) -> Tensor:
    if settings.initialization == "normal":
        return normal(observation.batch_shape, generator, like=task.parameters)
    low, high = task.input_range
    return low + (high - low) * uniform(observation.batch_shape, generator, like=task.parameters)


def _labels(
    settings: GradientMatching, observation: Observation, generator: torch.Generator
) -> Tensor:
    if settings.labels == "joint":
        classes = observation.task.label_range
        if classes is None:
            raise NotApplicable(
                "labels are to be optimized, but the number of classes is not known"
            )
        return normal((observation.examples, classes), generator, like=observation.task.parameters)
    if settings.labels == "told" and observation.labels is not None:
        return observation.labels.clone()
    try:
        return infer_labels(observation, generator)
    except NotApplicable as error:
        mend = "give the labels, or search for them too (labels='joint')"
        raise NotApplicable(f"{error.reason}; {mend}") from error
