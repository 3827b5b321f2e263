"""The plan of an audit: a grid of experiments as frozen dataclasses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

from leakbound import check, registry
from leakbound._util.text import digest, plain
from leakbound.assess import header
from leakbound.assess.header import defense_name
from leakbound.assess.record import AttackInfo
from leakbound.attacks import Attack
from leakbound.core import ThreatModel
from leakbound.defenses import Chain, chain
from leakbound.losses import is_code, named
from leakbound.pruning import Pruning
from leakbound.registry import Spec
from leakbound.risk import ErrorBoundSpec, RiskSpec

SCHEME = "scheme"
"""The setting of every model that names what prunes it."""
MOST_EXPERIMENTS = 1_000_000
MOST_SETTINGS = 10_000  # of models, of defenses, of attacks: each is built once before the audit


@dataclass(frozen=True)
class DataSpec:
    """The data: a source, the processing of its images, and the schema's file of a table.

    `bits`: how many bits 16-bit images use. `person`: the part of an image's name that identifies
    its person. `loss` is what models are trained on: a name in
    `leakbound.losses.LOSSES`, or "package.module:name,key=value" (see `leakbound.losses.named`).
    """

    source: str = "mnist5k"
    size: int | None = None
    channels: int | None = None
    limit: int | None = None
    schema: str | None = None
    bits: int | None = None
    person: str | None = None
    loss: str = "cross_entropy"

    def __post_init__(self) -> None:
        if not is_code(self.loss):  # whose import runs it: only once the plan runs
            named(self.loss)


@dataclass(frozen=True)
class ModelSpec:
    """A built-in model or "package.module:build"; trained first, or with given weights.

    One of the settings may be a pruning `scheme` with its own settings, as in "snip,rate=0.3".
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    train_steps: int = 0
    weights: str | None = None

    @property
    def scheme(self) -> Pruning | None:
        """What prunes the model, before its first round and during the training."""
        described = dict(self.settings).get(SCHEME)
        scheme: Pruning | None = described and registry.parse("scheme", described)
        return scheme

    @property
    def own(self) -> dict[str, Any]:
        """The settings of the model itself."""
        return {key: value for key, value in self.settings if key != SCHEME}


@dataclass(frozen=True)
class UtilitySpec:
    """A short federated training under each defense, which measures the defense's cost.

    In each round the server averages `clients` defended updates of `batch_size` images and takes
    one step of "adam" or "sgd". The first `repeats` seeds are used; 0 rounds measure nothing.
    """

    rounds: int = 40
    clients: int = 4
    batch_size: int = 16
    learning_rate: float = 0.002
    repeats: int = 3
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        check.count(
            clients=self.clients,
            batch_size=self.batch_size,
            repeats=self.repeats,
        )
        check.non_negative(rounds=self.rounds)
        check.positive(learning_rate=self.learning_rate)
        check.one_of(["adam", "sgd"], optimizer=self.optimizer)


@dataclass(frozen=True)
class Experiment:
    """One attack on one batch under one defense: everything its record depends on."""

    data: DataSpec
    model: ModelSpec
    defense: tuple[Spec, ...]
    attack: Spec
    batch_size: int
    seed: int
    threat: ThreatModel
    psnr: float
    share: float
    error_bound: ErrorBoundSpec
    risk: RiskSpec
    lpips_weights: str | None = None
    round: int | None = None

    @cached_property
    def id(self) -> str:
        """Sixteen hex digits that name the experiment, in any plan."""
        return digest(plain(self))


@dataclass(frozen=True)
class TrainingUnit:
    """One short training of one model under one defense."""

    data: DataSpec
    model: ModelSpec
    defense: tuple[Spec, ...]
    seed: int
    utility: UtilitySpec

    @cached_property
    def id(self) -> str:
        """Sixteen hex digits that name it."""
        return digest(plain(self))


Unit = Experiment | TrainingUnit
"""The units of a plan."""


@dataclass(frozen=True)
class Plan:
    """A grid: every attack on every batch of every model under every defense.

    A defense is a chain of links; () is no defense. Each seed is a repetition with separate initial
    weights, batch and noise. An example counts as reconstructed from `psnr` in dB on; a row of a
    table or a sequence, from a `share` of right columns or tokens on. `rounds` are those of a
    training that are attacked; None is the first in which the defense has an effect.
    """

    name: str
    data: DataSpec
    models: tuple[ModelSpec, ...]
    defenses: tuple[tuple[Spec, ...], ...]
    attacks: tuple[Spec, ...]
    batch_sizes: tuple[int, ...] = (1,)
    seeds: tuple[int, ...] = (0,)
    threat: ThreatModel = field(default_factory=ThreatModel)
    psnr: float = 20.0
    share: float = 0.9
    utility: UtilitySpec = field(default_factory=lambda: UtilitySpec(rounds=0))
    error_bound: ErrorBoundSpec = field(default_factory=ErrorBoundSpec)
    risk: RiskSpec = field(default_factory=RiskSpec)
    lpips_weights: str | None = None
    rounds: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        names = ("models", "batch_sizes", "defenses", "attacks", "seeds", "rounds")
        refuse_large({name: len(getattr(self, name)) for name in names})
        for name in names:
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name} is empty; name at least one")
            seen: set[str] = set()
            for value in values:
                key = digest(plain(value))
                if key in seen:
                    links = isinstance(value, tuple)
                    word = defense_name(value) if links else getattr(value, "name", value)
                    raise ValueError(f"{name} holds {word!r} twice; name each once")
                seen.add(key)

    @property
    def hash(self) -> str:
        """Sixteen hex digits that name the whole plan."""
        return digest(plain(self))

    def experiments(self) -> tuple[Experiment, ...]:
        """All experiments in the plan's order.

        A pair of attack and defense that applies to no batch of its size is left out. If a plan has
        no other pair, all remain: their records then state the reason.
        """
        pairs = [*product(self.batch_sizes, self.defenses, self.attacks)]
        defenses = {links: build_defense(links) for links in self.defenses}
        attacks = {attack: build_attack(attack) for attack in self.attacks}
        kept = {
            (size, links, attack)
            for size, links, attack in pairs
            if attacks[attack].why_not(defenses[links], size) is None
        } or {*pairs}
        grid = product(
            self.models,
            self.batch_sizes,
            self.defenses,
            self.attacks,
            self.seeds,
            self.rounds,
        )
        same = (
            self.threat,
            self.psnr,
            self.share,
            self.error_bound,
            self.risk,
            self.lpips_weights,
        )
        return tuple(
            Experiment(self.data, model, defense, attack, size, seed, *same, number)
            for model, size, defense, attack, seed, number in grid
            if (size, defense, attack) in kept
        )

    def trainings(self) -> tuple[TrainingUnit, ...]:
        """All trainings in the plan's order; none if utility is not measured."""
        seeds = self.seeds[: self.utility.repeats if self.utility.rounds else 0]
        return tuple(
            TrainingUnit(self.data, model, defense, seed, self.utility)
            for model, defense, seed in product(self.models, self.defenses, seeds)
        )


def units_left(plan: Plan, done: Iterable[str]) -> list[Unit]:
    """The units of a plan without those of the given names, in their order."""
    finished = set(done)
    every: list[Unit] = [*plan.trainings(), *plan.experiments()]
    return [unit for unit in every if unit.id not in finished]


def refuse_large(sizes: Mapping[str, int]) -> None:
    """Reject a grid that is too large by its lengths alone, before any of it is made."""
    count = math.prod(sizes.values())
    if count > MOST_EXPERIMENTS:
        factors = " x ".join(f"{size} {name}" for name, size in sizes.items())
        raise ValueError(
            f"the plan makes {factors} = {count} experiments, more than {MOST_EXPERIMENTS}; "
            "split it"
        )
    for name in ("models", "defenses", "attacks"):
        if sizes.get(name, 0) > MOST_SETTINGS:
            raise ValueError(
                f"{name} has {sizes[name]} settings, more than {MOST_SETTINGS}; give fewer values, "
                "or split the plan"
            )


def build_defense(links: tuple[Spec, ...]) -> Chain:
    """The chain for a plan's defense."""
    return chain(*(registry.build("defense", link.name, link.parameters) for link in links))


def build_attack(spec: Spec) -> Attack:
    attack = registry.build("attack", spec.name, spec.parameters)
    assert isinstance(attack, Attack)  # the registry holds attacks only
    return attack


def attack_info(spec: Spec) -> AttackInfo:
    """An attack as named in records: its name, full settings and their hash."""
    return header.attack_info(build_attack(spec), spec.name)
