"""The facts of a deployment from a Flower app's own strategy and mods, and the faults in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.serverapp.strategy import FedAvg

from leakbound import check
from leakbound.defenses import (
    Clip,
    ClipExamples,
    GaussianMechanism,
    GaussianNoise,
    LaplaceNoise,
    Mean,
)
from leakbound.flower import faults
from leakbound.flower.compat import flower_name
from leakbound.flower.meter import LeakMeter
from leakbound.flower.mods import MASKING, DefenseMod
from leakbound.risk.deployment.facts import Deployment, Mistake
from leakbound.risk.deployment.file import described
from leakbound.risk.deployment.mistakes import MistakeRule, said

CLIPS = frozenset({"fixedclipping_mod", "adaptiveclipping_mod"})
QUIET = frozenset({"arrays_size_mod", "message_size_mod"})
RULES = {
    "nan-disables-clip": MistakeRule(
        "clip.norm",
        "one NaN in an update makes its norm NaN, min(1, NaN) is 1, and no entry is clipped; "
        "let clients refuse updates that are not finite",
        fatal=False,
    ),
    "zero-update-raises": MistakeRule(
        "clip.norm",
        "an update of zero raises a division by zero, and the error reveals it; leave clients"
        " out that have nothing to train on",
        fatal=False,
    ),
    "adaptive-wrong-sign": MistakeRule(
        "clip.adaptive",
        "the count of clipped clients is used as the count of unclipped ones: the norm runs "
        "to 0 or grows until nothing is clipped; take a fixed clip norm",
        fatal=False,
    ),
    "noise-of-next-norm": MistakeRule(
        "clip.adaptive",
        "the noise has the level of the next round's norm: mu is {ratio:.4g} times as large "
        "in a round in which all updates are clipped; take a fixed clip norm",
    ),
    "scalars-pass": MistakeRule(
        "clip.norm",
        "the array {bare!r} has no dimension: Flower counts it in the norm, but does not clip"
        " it, and LocalDpMod adds no noise to it; give it the shape (1,), or do not send it",
    ),
    "integer-buffers": MistakeRule(
        "clip.norm",
        "the array {whole!r} holds whole numbers: clipping it raises, and its noise is cut to"
        " whole numbers; do not send it",
        fatal=False,
    ),
    "example-weights": MistakeRule(
        "weights",
        "FedAvg weighs updates by num-examples, and the noise is for equal weights: a client "
        "with a share w of the examples has a mu that is (number of clients) times w as "
        "large; let clients report equal numbers, or give accountant= to the strategy",
        fatal=False,
    ),
    "count-mismatch": MistakeRule(
        "participation.replies",
        "the noise is for {count} replies; fewer only cause a warning: with half of them mu "
        "is twice as large; give accountant= to the strategy, which stops such a round",
        fatal=False,
    ),
    "no-average": MistakeRule(
        "weights",
        "the noise is for an average, and {average} is not FedAvg's: what one client moves it"
        " by is not known; wrap FedAvg",
    ),
    "noise-before-clip": MistakeRule(
        "clip.kind",
        "{noise} adds noise before {clip} clips: the noise is scaled down with the update; "
        "put the clip after it in the list of mods",
    ),
    "masked-before-clip": MistakeRule(
        "secure_aggregation",
        "{mask} masks the update before it is clipped; put it first in the list of mods",
    ),
    "clip-of-average": MistakeRule(
        "clip.at",
        "under secure aggregation the server can clip only the average, so no client's part "
        "is bounded; clip on the clients",
    ),
    "no-client-clip": MistakeRule(
        "clip.kind",
        "the strategy relies on clients that clip, and they have no {mod}; add it",
    ),
    "unknown-mod": MistakeRule(
        "clip.norm",
        "{late} runs between the clip and the noise and may undo the clip; put it last in the"
        " list of mods",
        fatal=False,
    ),
}


@dataclass(frozen=True)
class ModEffect:
    """What one mod does to a client's update, as one step: a clip, a noise, or something else.

    `facts` are by the keys of a deployment. `gradient`: its levels are in units of the gradient,
    and the learning rate is not known.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    masks: bool = False
    unknown: bool = False
    gradient: bool = False

    @property
    def clips(self) -> bool:
        return "clip.kind" in self.facts

    @property
    def noisy(self) -> bool:
        return "noise.at" in self.facts


@dataclass(frozen=True)
class ServerRule:
    """A strategy: the wrapper that adds noise (None: no such one), and the one that averages."""

    outer: Any
    noisy: Any
    inner: Any

    @property
    def name(self) -> str:
        return (flower_name(self.noisy) if self.noisy is not None else None) or ""

    @property
    def known(self) -> bool:
        """Whether it is Flower's own, or averages as FedAvg does: it then adds no other noise."""
        return _averages(self.inner) or type(self.inner).__module__.startswith("flwr.")

    @property
    def adapts(self) -> bool:
        return "Adaptive" in self.name

    @property
    def mod(self) -> str | None:
        """The mod whose clip the strategy relies on; None if it clips itself, or not at all."""
        if "ClientSide" not in self.name:
            return None
        return "adaptiveclipping_mod" if self.adapts else "fixedclipping_mod"

    @property
    def strict(self) -> bool:
        """Whether an accountant enforces equal weights and the number of replies."""
        return getattr(self.noisy, "accountant", None) is not None


def describe(
    strategy: Any,
    mods: Sequence[Any] = (),
    *,
    rounds: int | None = None,
    population: int | None = None,
    sizes: Sequence[int] | None = None,
    replies: int | None = None,
    arrays: Mapping[str, Any] | None = None,
    seeded: bool | None = None,
) -> tuple[Deployment, tuple[Mistake, ...]]:
    """The facts of a Flower app from its live objects, and what makes its protection smaller.

    Nothing is sent and no client is asked. Faults of the installed Flower are found by calls of
    its own classes on a few numbers. What an app's objects do not state stays "not stated".

    Args:
        strategy: of `flwr.serverapp.strategy` or `flwr.server.strategy`, also inside `Watched`.
        mods: of the clients, as given to the `ClientApp`: the first is the outermost. None given
            means that clients have none.
        rounds: of the training.
        population: number of connected clients.
        sizes: number of examples of each client of a round.
        replies: the smallest number of clients whose update arrives in a round.
        arrays: the model's arrays by name, such as an `ArrayRecord`, to find whole-number buffers.
        seeded: whether NumPy's global generator, from which Flower draws, has a known seed.

    Returns:
        The facts, with norms and noise in units of the weights (of the gradient for a `DefenseMod`
        whose learning rate is a key), and the mistakes: those of Flower first.

    Raises:
        ValueError: a count is not a whole number of at least 1.

    Source: Flower 1.41.0; McMahan et al. 2018 (fixed clipping), Andrew et al. 2021 (adaptive).

    Example:
        >>> from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
        >>> rule = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 0.5, 10)
        >>> found, _ = describe(rule, rounds=50, population=10)
        >>> found.clip.norm, found.noise.multiplier, found.noise.at, found.participation.law
        (0.5, 1.0, 'server', 'all')
    """
    check.given(
        check.count,
        rounds=rounds,
        population=population,
        replies=replies,
    )
    rule = _rule(strategy)
    effects = [effect for mod in reversed(mods) for effect in _effects(mod, rule)]
    clips = {effect.name for effect in effects if effect.clips}
    stated = _of_clients(effects)
    if rule.noisy is not None and "none" in (stated["noise.at"], stated.get("clip.kind")):
        stated = _of_strategy(rule, effects)
    elif stated["noise.at"] == "none" and not rule.known:  # it may add noise, or clip
        stated = {key: value for key, value in stated.items() if value != "none"}
    at = stated.get("noise.at")
    weights = "uniform" if rule.strict else "examples"
    if at != "none":
        stated.setdefault("noise.seeded", seeded)
    stated |= _participation(rule, population, replies)
    cohort = stated.get("participation.cohort")
    if at == "server" and cohort and rule.noisy.num_sampled_clients != cohort:
        stated = _divided(rule, stated, cohort)
    if any(effect.masks for effect in effects):
        stated |= {"secure_aggregation.on": True, "secure_aggregation.kind": "secagg"}
    stated |= {
        "title": f"Flower: {rule.name or type(rule.outer).__name__}",
        "unit": "client" if at in ("client", "server") else None,
        "weights": weights if _averages(rule.inner) else None,
        "sizes": None if sizes is None else tuple(sizes),
        "rounds": rounds,
        "correlation": None if at is None else "none",
        "sends": ("examples", "clip bit") if "adaptiveclipping_mod" in clips else None,
    }
    deployment, general = described(stated)
    named = (*_of_flower(clips, rule, deployment, arrays), *_of_order(effects, rule, deployment))
    mistakes = [said(name, RULES, **names) for name, names in named]
    if any(mistake.key == "clip.adaptive" for mistake in mistakes):
        general = tuple(mistake for mistake in general if mistake.name != "adaptive-clip")
    return deployment, (*mistakes, *general)


def _rule(strategy: Any) -> ServerRule:
    while type(strategy).__module__.startswith("leakbound."):  # `Watched`, `WatchedSum`
        strategy = strategy.strategy
    noisy = None
    inner = strategy
    while hasattr(inner, "strategy"):
        if noisy is None and (flower_name(inner) or "").startswith("DifferentialPrivacy"):
            noisy = inner
        inner = inner.strategy
    return ServerRule(strategy, noisy, inner)


def _effects(mod: Any, rule: ServerRule) -> Iterator[ModEffect]:
    """A mod's steps in the order in which they change the update."""
    name = flower_name(mod) or str(getattr(mod, "__name__", type(mod).__name__))
    if name == "LocalDpMod":
        yield ModEffect(name, _l2(mod.clipping_norm))
        privacy = {"epsilon": mod.epsilon or None, "delta": mod.delta}
        noise = {"noise.at": "client", "noise.sensitivity": mod.sensitivity or None}
        noise |= {f"{part}.{key}": v for part in ("noise", "claim") for key, v in privacy.items()}
        # LocalDpMod states its epsilon for one round.
        noise |= {"claim.rounds": 1, "claim.unit": "client", "claim.neighbors": "add-remove"}
        yield ModEffect(name, noise)
    elif name in CLIPS:
        norm = rule.noisy.clipping_norm if rule.mod == name else None
        yield ModEffect(name, _clip(rule, norm, "client"))
    elif name in MASKING:
        yield ModEffect(name, masks=True)
    elif isinstance(mod, DefenseMod):
        yield from (_of_link(mod, link) for link in mod.defense.links)
    elif not isinstance(mod, LeakMeter) and name not in QUIET:
        yield ModEffect(name, unknown=True)


def _l2(norm: float, at: str = "client") -> dict[str, Any]:
    return {"clip.norm": norm, "clip.kind": "l2", "clip.at": at}


def _of_link(mod: DefenseMod, link: Any) -> ModEffect:
    name = f"DefenseMod({link!r})"
    rate = mod.setup.learning_rate
    gradient = isinstance(rate, str)
    rate = 1.0 if isinstance(rate, str) else rate
    noise = {"noise.at": "client", "noise.seeded": mod.seed is not None}
    if isinstance(link, Clip):
        return ModEffect(name, _l2(rate * link.clip_norm), gradient=gradient)
    if isinstance(link, ClipExamples):
        return ModEffect(name, {**_l2(link.clip_norm), "clip.kind": "example"})
    if isinstance(link, GaussianNoise):
        return ModEffect(
            name,
            {**noise, "noise.std": rate * link.noise_std},
            gradient=gradient,
        )
    if type(link) is GaussianMechanism:  # not one whose noise is correlated over rounds
        level = {"noise.multiplier": link.noise_multiplier, "noise.at": "optimizer"}
        local = {"local.steps": mod.setup.steps, "local.batch": mod.setup.batch_size}
        return ModEffect(name, {**noise, **level, **local, "local.normalizer": "realized"})
    if isinstance(link, LaplaceNoise):
        return ModEffect(name, noise)  # no L2 statement
    return ModEffect(name, unknown=not isinstance(link, Mean))


def _of_clients(effects: Sequence[ModEffect]) -> dict[str, Any]:
    """The first noise of the clients, and the last clip before it."""
    stated: dict[str, Any] = {"clip.kind": "none"}
    clip: ModEffect | None = None
    for effect in effects:
        if effect.clips:
            clip = effect
            stated = dict(effect.facts)
        elif clip is not None and effect.unknown:
            stated = {}  # it may undo the clip
        elif effect.noisy:
            stated |= effect.facts
            if clip is not None and clip.gradient != effect.gradient:
                stated.pop("noise.std", None)  # the rate between is not known
            return stated
    return {**stated, "noise.at": "none"}


def _of_strategy(
    rule: ServerRule,
    effects: Sequence[ModEffect],
) -> dict[str, Any]:
    """The noise that the strategy adds, and the clip that it relies on."""
    clips = (effect.facts for effect in effects if effect.name == rule.mod)
    stated: dict[str, Any] = dict(next(clips, {"clip.kind": "none"}))
    if rule.mod is None:
        stated = _clip(rule, rule.noisy.clipping_norm, "server")
    z = float(rule.noisy.noise_multiplier)
    if rule.adapts and z > 0:  # the attribute is z_v, which leaves room for the clip bits
        z = (z**-2 + (2 * rule.noisy.clipped_count_stddev) ** -2) ** -0.5
    stated |= {"noise.multiplier": z, "noise.at": "server", "noise.on": "mean"}
    if rule.strict:
        delta = rule.noisy.accountant.config.target_delta
        stated |= {"claim.delta": delta, "claim.unit": "client", "claim.neighbors": "add-remove"}
    return stated


def _clip(
    rule: ServerRule,
    norm: float | None,
    at: str,
) -> dict[str, Any]:
    if norm is None or not rule.adapts:
        return {**_l2(0.0, at), "clip.norm": norm}
    return {
        **_l2(norm, at),
        "clip.kind": "adaptive",
        "clip.adaptive.quantile": rule.noisy.target_clipped_quantile,
        "clip.adaptive.rate": rule.noisy.clip_norm_lr,
        "clip.adaptive.bit_noise": rule.noisy.clipped_count_stddev or None,
        "clip.adaptive.faults": bool(faults.of_adaptive(rule.name)),
    }


def _averages(inner: Any) -> bool:
    """Whether the updates are averaged as FedAvg does."""
    kind = type(inner)
    if isinstance(inner, FedAvg):
        return kind.aggregate_train is FedAvg.aggregate_train
    return isinstance(inner, OlderFedAvg) and kind.aggregate_fit is OlderFedAvg.aggregate_fit


def _participation(
    rule: ServerRule,
    population: int | None,
    replies: int | None,
) -> dict[str, Any]:
    inner = rule.inner
    cohort = getattr(rule.noisy, "num_sampled_clients", None)
    share = getattr(inner, "fraction_train", getattr(inner, "fraction_fit", None))
    least = getattr(inner, "min_train_nodes", getattr(inner, "min_fit_clients", None))
    if rule.strict:
        replies = cohort
        held = rule.noisy.accountant.config.population_size
        population = held if population is None else population
    law = None
    if share is not None and least is not None:
        if population is not None:
            # As FedAvg samples: a share of the nodes, at least the minimum, at most all.
            cohort = max(1, min(population, max(int(population * share), least)))
        law = "all" if share >= 1 or cohort == population else "fixed-size"
    return {
        "participation.law": law,
        "participation.cohort": cohort,
        "participation.population": population,
        "participation.replies": replies,
    }


def _divided(
    rule: ServerRule,
    stated: Mapping[str, Any],
    cohort: int,
) -> dict[str, Any]:
    """The noise on the sum of the clients that are really sampled."""
    said = rule.noisy.num_sampled_clients
    z = stated["noise.multiplier"]
    kept = {key: value for key, value in stated.items() if not key.startswith("claim.")}
    because = f"it is divided by num_sampled_clients = {said}, and {cohort} clients are sampled"
    claim = {"claim.multiplier": z, "claim.because": because}
    return {**kept, "noise.multiplier": z * cohort / said, **claim}


def _of_flower(
    clipping: set[str],
    rule: ServerRule,
    deployment: Deployment,
    arrays: Mapping[str, Any] | None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Faults of the installed Flower that this app meets: names, and what their texts name."""
    clips = clipping | ({rule.name} if "ServerSide" in rule.name else set())
    met = {fault for name in clips for fault in faults.of_clip(name)}
    met |= faults.of_adaptive(rule.name) if rule.adapts else set()
    sent = (arrays or {}).items()
    bare = next((name for name, value in sent if not value.shape), None)
    whole = next((name for name, value in sent if value.shape and "int" in str(value.dtype)), None)
    adaptive = deployment.clip.adaptive
    ratio = None
    if adaptive is not None and adaptive.rate is not None and adaptive.quantile is not None:
        # A larger exponent overflows a float.
        ratio = math.exp(min(700.0, adaptive.rate * (1 - adaptive.quantile)))
    needs = {"scalars-pass": bare, "integer-buffers": whole, "noise-of-next-norm": ratio}
    for name in RULES:
        if name in met and needs.get(name, True) is not None:
            yield name, {"bare": bare, "whole": whole, "ratio": ratio}
    if deployment.noise.at != "server":
        return
    if deployment.weights == "examples" and deployment.sizes is None:
        yield "example-weights", {}
    who = deployment.participation
    unsure = who.population is None or who.replies is None
    if unsure and not rule.strict and faults.only_warns(rule.name):
        yield "count-mismatch", {"count": rule.noisy.num_sampled_clients}
    if not _averages(rule.inner):
        yield "no-average", {"average": type(rule.inner).__name__}


def _of_order(
    effects: Sequence[ModEffect],
    rule: ServerRule,
    deployment: Deployment,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Mods that are missing or in a wrong place."""
    noises = [at for at, effect in enumerate(effects) if effect.noisy]
    clips = [at for at, effect in enumerate(effects) if effect.clips]
    masks = [at for at, effect in enumerate(effects) if effect.masks]
    if noises and clips and deployment.clip.kind == "none":
        names = {"noise": effects[noises[0]].name, "clip": effects[clips[0]].name}
        yield "noise-before-clip", names
    if masks and max([*noises, *clips], default=-1) > masks[0]:
        yield "masked-before-clip", {"mask": effects[masks[0]].name}
    if masks and "ServerSide" in rule.name:
        yield "clip-of-average", {}
    if rule.mod is not None and rule.mod not in {effects[at].name for at in clips}:
        yield "no-client-clip", {"mod": rule.mod}
    end = noises[0] if noises else len(effects)
    after = effects[min(clips, default=end) : end]
    late = [effect.name for effect in after if effect.unknown]
    if late and (noises or rule.noisy is not None):
        yield "unknown-mod", {"late": late[0]}
