"""The facts of a federated deployment: who clips, who adds noise, who takes part, who sees what.

A deployment file (TOML) has exactly these tables and keys. Readers of other programs' settings
write the same tables, so everything that is stated rests on these facts alone. None always means
"not stated", never a default of some framework: what is not stated counts as its worst case.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import msgspec

from leakbound import check
from leakbound.risk.deployment import contradictions

LARGEST = 1e12
"""Largest number in a deployment; larger ones describe no training."""


class _Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Adaptive(_Facts, frozen=True):
    """A clip norm that follows a quantile of the clients' norms, as Andrew et al. 2021 do.

    Attributes:
        quantile: the share of clients that should not be clipped.
        rate: of the norm's exponential steps.
        bit_noise: standard deviation of the noise on the number of clipped clients; None: not
            stated.
        faults: whether the norm moves away from the quantile and the noise follows the next round's
            norm (flwr 1.41); None: not stated, which counts as true.
    """

    quantile: float | None = None
    rate: float | None = None
    bit_noise: float | None = None
    faults: bool | None = None


class ClipFacts(_Facts, frozen=True):
    """What bounds a unit's part.

    Attributes:
        norm: L2 norm of a whole update ("l2") or of one example's gradient ("example"); largest
            size of each entry ("elementwise").
        kind: what `norm` bounds. "adaptive" is "l2" with a norm that changes. "none" bounds
            nothing; so does a clip after the noise.
        norms: of each layer, for "per-layer"; their root of the sum of squares counts.
        entries: number of entries of an update, for "elementwise".
        adaptive: how the norm changes.
        at: who clips; a server that clips sees every update before.
    """

    norm: float | None = None
    kind: Literal["l2", "adaptive", "per-layer", "elementwise", "example", "none"] | None = None
    norms: tuple[float, ...] | None = None
    entries: int | None = None
    adaptive: Adaptive | None = None
    at: Literal["client", "server"] | None = None

    @property
    def l2(self) -> float | None:
        """The largest L2 norm of one unit; None if nothing bounds it or it is not stated."""
        if self.kind == "per-layer":
            return math.hypot(*self.norms) if self.norms else None
        if self.norm is None or self.kind in (None, "none"):
            return None
        if self.kind == "elementwise":
            return None if self.entries is None else self.norm * math.sqrt(self.entries)
        return self.norm


class Noise(_Facts, frozen=True):
    """The noise, stated in one of four ways.

    Attributes:
        multiplier: standard deviation / clip norm, on the sum of all parts (at "client": on the
            client's own update).
        std: the standard deviation itself, in the same place.
        epsilon, delta, sensitivity: of the classical Gaussian formula, std = sensitivity
            sqrt(2 ln(1.25 / delta)) / epsilon; it is computed, never trusted.
        pure_epsilon: of a mechanism without delta for each round (Laplace, sparse vector).
        at: "client" (each adds all of it), "share" (each adds its part of the sum's noise),
            "rounded-share" (the same, rounded to integers before the sum), "server" (after the
            updates arrived), "optimizer" (each local step, on clipped gradients of examples),
            "none".
        seeded: whether someone can compute the noise again.
    """

    multiplier: float | None = None
    std: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    sensitivity: float | None = None
    pure_epsilon: float | None = None
    on: Literal["sum", "mean"] | None = None
    at: Literal["client", "share", "rounded-share", "server", "optimizer", "none"] | None = None
    seeded: bool | None = None

    @property
    def classical_std(self) -> float | None:
        """The standard deviation of the classical formula; None if it is not stated so."""
        if self.epsilon is None or self.delta is None or self.sensitivity is None:
            return None
        return self.sensitivity * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon


class Participation(_Facts, frozen=True):
    """Which clients (or examples, with noise at the optimizer) take part in a round.

    Attributes:
        law: "all", "server-picks", "fixed-size" (`cohort` of `population`), "poisson" (`rate`),
            "cyclic" (groups in turn, each by Poisson sampling of rate `rate`), "balls-in-bins" (a
            random, fixed one of `bins`), "shuffled" (once in every `bins` rounds).
        cohort, population: how many take part, and of how many.
        replies: the smallest number whose update arrives; None: not stated.
        rate: of Poisson sampling; None: cohort / population.
        bins: the number of groups or of rounds of an epoch.
        min_separation: fewest rounds from one participation of a client to its next.
        hidden: whether outsiders cannot see who takes part.
    """

    law: (
        Literal[
            "all", "server-picks", "fixed-size", "poisson", "cyclic", "balls-in-bins", "shuffled"
        ]
        | None
    ) = None
    cohort: int | None = None
    population: int | None = None
    replies: int | None = None
    rate: float | None = None
    bins: int | None = None
    min_separation: int | None = None
    hidden: bool | None = None

    @property
    def share(self) -> float | None:
        """The probability that a given unit takes part in a round, if it is stated."""
        known = [] if self.rate is None or self.law == "fixed-size" else [self.rate]
        if self.cohort is not None and self.population is not None:
            known.append(self.cohort / self.population)
        return max(known, default=None)


class AggregationFacts(_Facts, frozen=True):
    """Sums that hide single updates: from all, or ("homomorphic") from those without the key.

    Attributes:
        colluding, dropouts: clients who work with the attacker or do not send; None: not stated,
            which counts as all but one.
        shared_key: whether all clients hold one secret key, so that the server and any client
            read every update; only for "homomorphic".
    """

    on: bool = False
    kind: Literal["secagg", "homomorphic"] | None = None
    colluding: int | None = None
    dropouts: int | None = None
    shared_key: bool | None = None


class Local(_Facts, frozen=True):
    """The training of one client between two updates.

    Attributes:
        epochs, batch, steps: `steps` of a round; None: from epochs, batch and `examples`.
        examples: N of one client.
        rate: of Poisson sampling of examples; None: the largest that batch and examples allow.
        normalizer: what each noisy sum of gradients is divided by: the "expected" batch size, a
            constant, or the "realized" one, which the noise's level then reveals.
        sampler: how batches are drawn.
        learning_rate: of the local steps.
        new_engine: whether every round starts a new accountant.
        coupled: whether examples see each other (batch norm, contrastive losses, class weights).
    """

    epochs: int | None = None
    batch: int | None = None
    steps: int | None = None
    examples: int | None = None
    rate: float | None = None
    normalizer: Literal["expected", "realized"] | None = None
    sampler: Literal["poisson", "shuffled"] | None = None
    learning_rate: float | None = None
    new_engine: bool | None = None
    coupled: bool | None = None


class Record(_Facts, frozen=True):
    """One example.

    Attributes:
        dim, norm: number of values, and least L2 norm.
        examples_per_client: how many a client holds.
        people: the largest number of one person's examples that a client holds. Rows for a person
            are stated only if it is given.
        sites: the largest number of clients that hold examples of one person; None: not stated,
            which counts as all.
        kappa: success of the best fixed guess, if it is known.
        known: the parts of an example that an intruder has, as `domains.known_parts` reads them.
    """

    dim: int | None = None
    norm: float | None = None
    examples_per_client: int | None = None
    people: int | None = None
    sites: int | None = None
    kappa: float | None = None
    known: str | None = None


class Claim(_Facts, frozen=True):
    """What the program, or its paper, says about itself; it is compared, never used.

    Attributes:
        epsilon, delta, rounds, neighbors, unit: of the privacy that it states.
        amplified: whether its accountant counts random participation as secret.
        multiplier: the noise multiplier that its accountant takes.
        because: what makes the real one smaller, such as "the noise is multiplied by the learning
            rate".
    """

    epsilon: float | None = None
    delta: float | None = None
    rounds: int | None = None
    neighbors: Literal["add-remove", "replace"] | None = None
    unit: Literal["client", "example"] | None = None
    amplified: bool | None = None
    multiplier: float | None = None
    because: str | None = None


class Mistake(_Facts, frozen=True):
    """Something that makes the protection smaller than it looks.

    Attributes:
        name: of the kind of mistake, such as "classical-formula".
        key: the file's key (or a path) that shows it, such as "noise.epsilon".
        text: what is wrong, by how much, and what mends it.
        line: where the file says so; None if it is no file.
        fatal: whether the intended guarantee fails, not only its number.
    """

    name: str
    key: str
    text: str
    line: int | None = None
    fatal: bool = True


class Deployment(_Facts, frozen=True):
    """All facts of a federated training; see the attributes of each part.

    Attributes:
        title: for the page.
        unit: whose protection is asked for; None asks for all units.
        weights: how the server weighs updates: "uniform", or by their numbers of "examples".
        sizes: numbers of examples of the clients in a round, if weights are by them.
        max_weight: the largest share of one client in the mean, if that is known instead.
        rounds: number of rounds (at the optimizer: rounds of `local` training).
        correlation: noise across rounds: "none", "tree", "band:4", "bisr:4", "root" or a .npy file
            with the factor C.
        sends: other things that leave a client in the clear: "metrics", "examples", "batch size",
            "clip bit"; None: not stated.
    """

    title: str = "deployment"
    unit: Literal["client", "example"] | None = None
    clip: ClipFacts = ClipFacts()
    noise: Noise = Noise()
    weights: Literal["uniform", "examples"] | None = None
    sizes: tuple[int, ...] | None = None
    max_weight: float | None = None
    rounds: int | None = None
    participation: Participation = Participation()
    secure_aggregation: AggregationFacts | None = None
    local: Local = Local()
    correlation: str | None = None
    record: Record = Record()
    claim: Claim = Claim()
    sends: tuple[Literal["metrics", "examples", "batch size", "clip bit"], ...] | None = None

    def __post_init__(self) -> None:
        _refuse_extremes(msgspec.to_builtins(self), "")
        clip = self.clip
        noise = self.noise
        who = self.participation
        hidden = self.secure_aggregation
        adaptive = clip.adaptive or Adaptive()
        positive = {
            "clip.norm": clip.norm,
            "noise.epsilon": noise.epsilon,
            "noise.sensitivity": noise.sensitivity,
            "clip.adaptive.bit_noise": adaptive.bit_noise,
        }
        check.given(check.positive, **positive)
        for norm in clip.norms or ():
            check.positive(**{"clip.norms": norm})
        for size in self.sizes or ():
            check.count(sizes=size)
        unsigned = {
            "noise.multiplier": noise.multiplier,
            "noise.std": noise.std,
            "noise.pure_epsilon": noise.pure_epsilon,
            "clip.adaptive.rate": adaptive.rate,
            "secure_aggregation.colluding": None if hidden is None else hidden.colluding,
            "secure_aggregation.dropouts": None if hidden is None else hidden.dropouts,
        }
        check.given(check.non_negative, **unsigned)
        shares = {
            "participation.rate": who.rate,
            "local.rate": self.local.rate,
            "max_weight": self.max_weight,
            "record.kappa": self.record.kappa,
            "clip.adaptive.quantile": adaptive.quantile,
        }
        check.given(check.fraction, **shares)
        counts = {"rounds": self.rounds, "clip.entries": clip.entries}
        for part in ("participation", "local", "record"):
            facts: _Facts = getattr(self, part)
            counts |= {f"{part}.{name}": getattr(facts, name) for name in _counts(type(facts))}
        check.given(check.count, **counts)
        # last: it may rely on every single value being sound
        contradictions.refuse(self)


@cache
def _counts(kind: type[_Facts]) -> tuple[str, ...]:
    """The fields that are whole numbers."""
    return tuple(f.name for f in msgspec.structs.fields(kind) if f.type == int | None)


def _refuse_extremes(value: object, key: str) -> None:
    """Reject numbers with which floating-point arithmetic overflows."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_extremes(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for inner in value:
            _refuse_extremes(inner, key)
    # a comparison with NaN is false, so NaN is rejected here
    elif isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:
        raise ValueError(
            f"{key} is {str(value)[:20]}; give a number of at most {LARGEST:g} in size"
        )
