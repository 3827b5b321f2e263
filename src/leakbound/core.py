"""The types of every other module: batch, task, update, law, observation, reconstruction.

All types are frozen. Their tensors are never changed in place: a change returns a new value.
Information flows one way, from `Batch` to `Reconstruction`; `Observation` has no field for truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from leakbound._util import pictures
from leakbound._util.results import Fact
from leakbound.covariance import Structured
from leakbound.randomness import Source
from leakbound.release import Exact, Gaussian, Laplace, Law, Unit, Unknown, Update
from leakbound.task import Batch, LocalPlan, Loss, Optimizer, Task

if TYPE_CHECKING:
    from leakbound.domains.known import KnownValues

__all__ = [
    "Batch",
    "ClientContext",
    "DefenseProtocol",
    "Exact",
    "Gaussian",
    "Guarantee",
    "Laplace",
    "Law",
    "LocalPlan",
    "Loss",
    "NotApplicable",
    "Observation",
    "Optimizer",
    "Reconstruction",
    "Server",
    "Statistics",
    "Task",
    "ThreatModel",
    "Unit",
    "Unknown",
    "Update",
]


class Guarantee(Enum):
    """A defense's guarantee: differential privacy, a known noise distribution, or none."""

    DIFFERENTIAL_PRIVACY = "differential privacy"
    KNOWN_NOISE = "known noise distribution"
    NONE = "none"


class Server(Enum):
    """Whether the server only reads the updates, or also changes the model that it sends."""

    HONEST = "honest"
    MALICIOUS = "malicious"


Statistics = tuple[Tensor, Tensor]
"""Mean and biased variance (C,) of a batch norm's input, over examples and positions."""


@dataclass(frozen=True)
class ThreatModel:
    """What the attacker knows. The default attacker knows the defense, its noise and its mask.

    `statistics_known`: the statistics of the batch in every batch norm, which a client reveals if
    it also sends its running statistics. `known`: parts of every example that the attacker has from
    elsewhere, as `domains.known_parts` reads them: "birth_date,sex,zip" or "region:top"; ""
    is a stranger, who knows the population alone. Who knows "all" columns asks for the label.

    Raises:
        ValueError: all columns are known, and the labels too.
    """

    labels_known: bool = True
    defense_known: bool = True
    server: Server = Server.HONEST
    statistics_known: bool = False
    known: str = ""

    def __post_init__(self) -> None:
        if self.known == "all" and self.labels_known:
            raise ValueError(
                "known is 'all' and labels_known is True: nothing is left to reconstruct; give "
                "labels_known = false, or all columns but one"
            )


@dataclass(frozen=True, eq=False)
class ClientContext:
    """Data that exist only on the client; `None` replaces it on the server's side."""

    task: Task
    batch: Batch


class DefenseProtocol(Protocol):
    """What client and attacker need from a defense (every `Defense` has these)."""

    @property
    def starts(self) -> Unit:
        """The unit of the rows that the first link needs."""

    @property
    def sides(self) -> tuple[DefenseProtocol, DefenseProtocol]:
        """The part that runs on each client, and the part that runs on the rows of all."""

    @property
    def continuous(self) -> bool:
        """Whether its output is continuous."""

    @property
    def data_dependent_law(self) -> bool:
        """Whether the release distribution (noise or mask) depends on the client's batch."""

    @property
    def gives_bound(self) -> bool:
        """Whether some link bounds what one example adds, for any gradient."""

    def prepare(self, task: Task, source: Source) -> Task:
        """The task that the client trains."""

    def init(self, task: Task) -> Any:
        """The state of one client between rounds."""

    def begin(
        self,
        task: Task,
        state: Any,
        source: Source,
    ) -> tuple[Task, Any]:
        """The client's starting weights, from those it was sent and those it kept."""

    def transform(
        self,
        update: Update,
        state: Any,
        context: ClientContext | None,
        source: Source,
    ) -> tuple[Update, Any]:
        """Change the update."""

    def imitate(self, rows: Tensor) -> Tensor:
        """The noise-free, differentiable part on rows (R, P)."""

    def noise_variance(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
    ) -> Tensor | None:
        """(P,) the noise variance for a candidate, differentiable; None if it is public."""

    def infer(self, task: Task, update: Update) -> Task:
        """The task that the client really trained, as far as the update reveals it."""


@dataclass(frozen=True, eq=False)
class Observation:
    """Everything that the attacker sees. There is no field for the truth.

    Attributes:
        cohort: the batch size of every client whose data is in `update`.
        input_shape: shape of one input, (C, H, W).
        labels: (N,) true labels of all examples, if the threat model grants them.
        auxiliary: public data of the same kind, never the victims'.
        defense: the defense, if it is known under the threat model.
        statistics: of the clients' batches in every batch norm, by its name, if the threat model
            grants them; for several clients, the mean.
        sent: (R, P) the weights that the clients sent, if they send weights and not a change:
            exact zeros are visible in them. `update` is then `(weights before - sent) / rate`.
        history: what the same server saw of the same clients before, the oldest first.
        known: the parts of every example that the attacker has from elsewhere, with their values in
            the order of `labels`; None for a stranger.
        layer_rates: each tensor of `update` is known up to a positive factor of its own, as under
            LARS and LAMB.
    """

    update: Update
    task: Task
    cohort: tuple[int, ...]
    input_shape: tuple[int, ...]
    threat: ThreatModel = ThreatModel()
    labels: Tensor | None = None
    auxiliary: Batch | None = None
    defense: DefenseProtocol | None = None
    statistics: Mapping[str, Statistics] | None = None
    sent: Tensor | None = None
    history: tuple[Observation, ...] = ()
    known: KnownValues | None = None
    layer_rates: bool = False

    @property
    def examples(self) -> int:
        """The number of examples to reconstruct."""
        return sum(self.cohort)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the reconstruction, (N, *S)."""
        return (self.examples, *self.input_shape)

    @property
    def weights(self) -> Tensor | None:
        """(R, P) weight of each coordinate if the attacker knows noise and mask; None: all equal.

        It is 1 / standard deviation, 0 for a withheld coordinate; the largest is 1. Coordinates
        without noise count as if their noise were a thousandth of the smallest.
        """
        law = self.update.law
        mask = self.update.mask
        rows = self.update.rows
        if not self.threat.defense_known:
            return None
        spread = torch.ones((), dtype=torch.float64)
        if isinstance(law, Gaussian):
            spread = torch.as_tensor(law.variance, dtype=torch.float64).sqrt()
        elif isinstance(law, Laplace):
            spread = torch.as_tensor(law.scale, dtype=torch.float64)
        if spread.ndim == 0 and mask is None:
            return None
        some = spread[spread > 0]
        floor = some.min() if len(some) else spread.new_ones(())
        weights = (1 / (spread / floor).clamp_min(1e-3)).to(rows).expand_as(rows)
        weights = weights if mask is None else weights * mask
        # A mask may withhold every coordinate.
        return weights / weights.max().clamp_min(1e-30)

    @property
    def correlation(self) -> Structured | None:
        """The covariance of correlated noise that the attacker knows; None otherwise."""
        law = self.update.law
        if not self.threat.defense_known or not isinstance(law, Gaussian):
            return None
        return law.covariance if isinstance(law.covariance, Structured) else None

    @property
    def noise_variance(self) -> Tensor | None:
        """(R, P) variance of the noise that the attacker knows, float64; None if none is known."""
        law = self.update.law
        rows = self.update.rows
        if not self.threat.defense_known or not isinstance(law, Gaussian | Laplace):
            return None
        variance = law.variance if isinstance(law, Gaussian) else 2 * law.scale**2
        wide = torch.as_tensor(
            variance,
            dtype=torch.float64,
            device=rows.device,
        )
        return wide.expand_as(rows)

    @property
    def noise_share(self) -> float:
        """Expected share of noise in the (weighted) energy seen, in [0, 1]; 0 if unknown."""
        rows = self.update.rows.double()
        weights = self.weights
        noise = self.noise_variance
        if noise is None:
            return 0.0
        scale = torch.ones_like(rows) if weights is None else weights.double().square()
        seen = float((scale * rows.square()).sum())
        return min(1.0, float((scale * noise).sum()) / seen) if seen > 0 else 0.0

    def _repr_html_(self) -> str:
        """The notebook display: what the attacker knows, as text; it shows no truth."""
        update = self.update
        kind = type(self.update.law)
        law = {Exact: "none", Unknown: "of an unknown distribution"}.get(kind, kind.__name__)
        sent = "all" if update.mask is None else f"{float(update.mask.double().mean()):.1%}"
        known = ["labels"] * (self.labels is not None)
        known += ["the defense"] * self.threat.defense_known
        known += ["batch norm statistics"] * (self.statistics is not None)
        known += [] if self.known is None else [self.known.parts.text]
        known += [] if self.auxiliary is None else [f"{self.auxiliary.size} public examples"]
        pairs = (
            ("rows", f"{len(update.rows)} of {update.rows.shape[1]} numbers"),
            ("one row is of one", update.unit.name.lower()),
            ("coordinates seen", sent),
            ("noise", law),
            ("examples to reconstruct", self.examples),
            ("each", " x ".join(map(str, self.input_shape))),
            ("the attacker knows", ", ".join(known) or "nothing more"),
            ("server", self.threat.server.value),
            ("earlier rounds", len(self.history) or None),
        )
        return pictures.block("What the server sees", pictures.facts(pairs))


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The result of an attack.

    Attributes:
        inputs: (N, *S), inside the task's input range.
        labels: (N,) the labels that the attack inferred or was given; None if it has none.
        objective: the attack's final objective (lower is better); NaN if it has none.
        trace: the objective over time, for plots.
        problem: why the attack reports its own failure; None if it reports none. A picture with a
            problem is no evidence of safety.
        features: (N, n) unit vectors, the inputs of the layer `layer` as far as the attack found
            them, in a separate order; None if the attack does not look for them.
        agreement: (N, m) of rows of a table with m columns, or sequences of m tokens: the share of
            the attack's searches that agree with each value; None if it does not count them.
        facts: what the attack found for certain, or at a stated level, though no example is
            reconstructed: the words of a batch, the levels of columns.
    """

    inputs: Tensor
    labels: Tensor | None = None
    objective: float = float("nan")
    trace: tuple[float, ...] = ()
    problem: str | None = None
    features: Tensor | None = None
    layer: str | None = None
    agreement: Tensor | None = None
    facts: tuple[Fact, ...] = ()

    def _repr_html_(self) -> str:
        """The notebook display: the pictures, their labels, and whether they are trusted."""
        labels = self.labels if self.labels is not None and self.labels.ndim == 1 else ()
        captions = [f"label {float(label):g}" for label in labels[: pictures.MOST]]
        # NaN, for an attack without an objective, differs from itself.
        notes = [] if self.objective != self.objective else [f"objective {self.objective:.4g}"]
        if self.features is not None:
            notes.append(f"{len(self.features)} inputs of the layer {self.layer}")
        problem = f"the attack reports a problem: {pictures.text(self.problem)}"
        return pictures.block(
            "Reconstruction",
            pictures.images(self.inputs, captions, name="reconstructed image"),
            pictures.note(", ".join(notes)) if notes else "",
            f"<em>{problem}; this is no evidence of safety</em>" if self.problem else "",
        )


class Refused(ValueError):
    """A defense that does not work for this model or training: nothing runs, and nothing failed."""


class NotApplicable(Exception):
    """The assumptions of an attack or bound do not hold here; the message says which."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
