"""What each audience can do to each unit: the law of what it sees, with both sides of its success.

Every bound compares what an audience sees with a release in which the unit contributes nothing and
divisor, weights and participation are unchanged. So a unit's shift is its clip norm C, and never
2C, in a statement about reconstruction (docs/federated_privacy.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leakbound.assess.sentences import unit_of
from leakbound.bounds import clients
from leakbound.bounds.correlated import balls_in_bins
from leakbound.correlation import MOST_ROUNDS, Factor, Scheme
from leakbound.risk.corridor import (
    MOST_STEPS,
    Participation,
    TrainingSetting,
    seen_of,
    success_bound,
)
from leakbound.risk.corridor import epsilon as epsilon_of
from leakbound.risk.deployment.contradictions import STEADY
from leakbound.risk.deployment.facts import ClipFacts, Deployment, Noise

Array = NDArray[Any]
Audience = Literal["server", "clients"]
Unit = Literal["client", "example", "any example", "person"]

AUDIENCES: Final[tuple[Audience, ...]] = ("server", "clients")
UNITS: Final[tuple[Unit, ...]] = ("client", "example", "any example", "person")
SEES_ALL = "the server itself sees every update before any noise"
UNBOUNDED = "no noise hides a client's part, so no bound is known"
MOST_SITES = 100
"""Of more clients, no bound is computed for a person who may be at all of them."""
BITS = 6.0
"""Standard deviations of the noise on the number of clipped clients that a bound allows for."""
GRID = 64
"""Points for each factor e of kappa at which a costly bound is computed."""
BEYOND = 1e-9
"""More than the probability of one normal number above BITS; added for every round."""


@dataclass(frozen=True)
class Level:
    """What one participation shows of one unit.

    Attributes:
        reason: the rule in words.
        mu: shift / standard deviation of the Gaussian noise; infinite without a law.
        missing: keys that are not stated and count as their worst case.
        exact: whether the audience gets the unit's update itself.
        pure: epsilon of a mechanism without delta, in place of mu.
        beyond: probability, in a round, that mu does not hold.
    """

    reason: str
    mu: float = math.inf
    missing: tuple[str, ...] = ()
    exact: bool = False
    pure: float | None = None
    beyond: float = 0.0


def unstated(reason: str, *keys: str) -> Level:
    """No law, because of keys that are not stated."""
    return Level(reason, missing=keys)


def uncorrelated_only(deployment: Deployment, what: str) -> Level:
    """No law, because no bound is known for noise that cancels across rounds."""
    missing = () if deployment.correlation else ("correlation",)
    return Level(f"no bound is known for {what}", missing=missing)


@dataclass(frozen=True, eq=False)
class AudienceLaw:
    """The law of all rounds for one audience and one unit.

    Attributes:
        audience, unit: who, and what of whom.
        reason: the rules in words.
        missing: keys that are not stated.
        exact: whether the audience gets the unit's updates themselves.
        setting: the Gaussian steps; None if there is no law.
        attack_noise: noise multiplier that the built-in attack faces over all rounds, if it is not
            that of the setting.
        pure: epsilon of all rounds, of a mechanism without delta.
        copies: of how many units one is enough, and whether the bound of each is summed.
        beyond: probability that is added to every bound.
        sites: number of clients that hold examples of the unit, if it is a person.
        special: a better bound for this participation, as a function of log kappa.
    """

    audience: Audience
    unit: Unit
    reason: str
    missing: tuple[str, ...] = ()
    exact: bool = False
    setting: TrainingSetting | None = None
    attack_noise: float | None = None
    pure: float | None = None
    copies: float = 1.0
    summed: bool = False
    beyond: float = 0.0
    sites: int = 1
    special: Callable[[Array], Array] | None = None

    @property
    def mu(self) -> float | None:
        """Of all rounds together, if the number of participations is certain."""
        if self.setting is None or self.setting.sampling_rate < 1:
            return None
        setting = self.setting.of_person
        return self.sites * math.sqrt(setting.steps) / setting.noise_multiplier

    def bound(self, log_kappa: Array | float) -> Array:
        """Upper bound on any attacker's success for a prior-only success kappa of one unit."""
        blind = np.atleast_1d(np.asarray(log_kappa, float))
        many = math.log(self.copies) if self.copies < math.inf else math.inf
        together = np.where(blind == -np.inf, -np.inf, np.minimum(0.0, blind + many))
        success = self._of_sites(together)
        if self.summed and self.copies > 1:
            each = self._of_sites(blind)
            success = np.minimum(1.0, np.where(each == 0, 0.0, self.copies * each))
        return np.minimum(1.0, success + self.beyond)

    def _of_sites(self, blind: Array) -> Array:
        """The same if the unit's part leaves one client after another.

        With each, the success grows from q to F(q) at most: no law of participation is needed. For
        one full-batch step, the shifts of all clients add up.
        """
        success = self._of_one(blind)
        for _ in range(self.sites - 1):
            with np.errstate(divide="ignore"):
                before = np.log(np.minimum(1.0, success + self.beyond))
            success = self._of_one(before)
        return success

    def _of_one(self, blind: Array) -> Array:
        if self.pure is not None:
            return np.atleast_1d(np.asarray(clients.pure(self.pure, log_kappa=blind)))
        if self.setting is None:
            return np.ones(blind.shape)
        success = np.atleast_1d(success_bound(self.setting, blind))
        return success if self.special is None else np.minimum(success, self.special(blind))

    def hits(self) -> list[tuple[float, float]]:
        """(probability, noise multiplier) of what the built-in attack gets of one example."""
        if self.exact:
            return [(1.0, 0.0)]
        if self.attack_noise is not None:
            return [(1.0, self.attack_noise)]
        if self.setting is None or self.pure is not None:
            return [(1.0, math.inf)]
        return seen_of(self.setting)

    def epsilon(self, delta: float, *, replace_one: bool = False) -> float:
        """For the unit's membership, adding or removing it (or replacing it: twice the shift).

        One example of a client whose whole update is clipped moves the update by up to 2C.
        """
        inside = self.unit != "client" and not self.summed  # a part of what is clipped
        twice = (2 if replace_one else 1) * (2 if inside else 1)
        if self.pure is not None:
            return twice * self.sites * self.pure
        if self.setting is None or self.beyond >= delta:
            return math.inf
        own = self._at_sites(self.setting)
        setting = replace(own, noise_multiplier=own.noise_multiplier / twice)
        if twice > 1 and setting.participation == "hidden":  # absence brings in no other unit
            setting = replace(setting, participation="visible")
        return epsilon_of(setting, delta - self.beyond)

    def _at_sites(self, setting: TrainingSetting) -> TrainingSetting:
        """Steps that hold the unit at any of its clients, with the shift of all of them.

        The server may see who takes part. Correlated noise joins steps: each then counts.
        """
        if self.sites == 1:
            return setting
        rate = min(1.0, self.sites * setting.sampling_rate)
        return replace(
            setting,
            noise_multiplier=setting.noise_multiplier / self.sites,
            sampling_rate=rate if self.attack_noise is None else 1.0,
            participation="visible",
        )


def laws_of(deployment: Deployment) -> tuple[AudienceLaw, ...]:
    """Every audience and unit; `deployment.unit` restricts the units.

    A person is a unit if the number of their examples is stated (`record.people`).
    """
    asked = [unit for unit in UNITS if deployment.unit is None or deployment.unit in unit]
    if deployment.record.people is not None and deployment.unit != "client":
        asked = list(dict.fromkeys([*asked, "person"]))
    else:
        asked = [unit for unit in asked if unit != "person"]
    return tuple(_law_of(deployment, who, unit) for who in AUDIENCES for unit in asked)


def _law_of(
    deployment: Deployment,
    audience: Audience,
    unit: Unit,
) -> AudienceLaw:
    level = per_participation(deployment, audience)
    inside = deployment.noise.at == "optimizer"
    if inside and unit == "client":
        level = Level("the noise covers one example, not a whole client")
    missing = [*level.missing]
    copies = 1.0
    if unit == "any example":
        count = deployment.record.examples_per_client
        missing += [] if count else ["record.examples_per_client"]
        copies = float(count or math.inf)
    if deployment.rounds is None:
        missing.append("rounds")
    sites = 1
    if unit == "person":
        if deployment.record.sites is None:
            missing.append("record.sites")
        sites = deployment.record.sites or deployment.participation.population or 0
        if deployment.record.sites is None and sites > MOST_SITES:
            sites = 0
    law = AudienceLaw(
        audience,
        unit,
        level.reason,
        tuple(missing),
        level.exact,
        copies=copies,
        summed=inside,
        sites=max(1, sites),
    )
    if deployment.rounds is None:
        return law
    if sites == 0:
        where = "at how many clients a person has examples is not stated"
        return replace(law, reason=f"{level.reason}; {where}")
    if level.pure is not None:
        return replace(law, pure=level.pure * deployment.rounds)
    if math.isinf(level.mu):
        return law
    if level.mu == 0:
        return replace(law, pure=0.0)
    work = _Work(deployment, level, audience, deployment.rounds)
    steps = work.local() if inside else work.by_participation()
    setting = steps.setting
    if setting is not None and setting.steps > MOST_STEPS:
        return law
    people = deployment.record.people
    if unit == "person" and inside and setting is not None and people is not None:
        setting = replace(setting, people=people)
    at = ""
    if unit == "person":
        at = f"; {unit_of(people or 1)} at a client"
        at += "" if sites == 1 else f", at {sites} clients at most, which counts {sites} times"
    return replace(
        law,
        reason=f"{level.reason}; {steps.reason}{at}",
        missing=(*missing, *steps.missing),
        setting=setting,
        attack_noise=steps.attack_noise,
        special=steps.special,
        beyond=level.beyond * deployment.rounds,
    )


def per_participation(deployment: Deployment, audience: Audience) -> Level:
    """What one participation shows an audience of what is clipped."""
    clip = deployment.clip
    noise = deployment.noise
    hidden = deployment.secure_aggregation
    summed = hidden is not None and hidden.on and not _opened(deployment)
    server = audience == "server"
    if noise.at is None:
        return unstated("who adds noise is not stated", "noise.at")
    # noise that the server adds comes after it has seen the updates
    if noise.at in ("none", "server") and server:
        if summed:
            return Level(f"the server sees the exact sum of the cohort: {UNBOUNDED}")
        return Level(SEES_ALL, exact=True)
    if noise.at == "none":
        return Level(f"the model is the exact mean: {UNBOUNDED}")
    if noise.at == "rounded-share":
        return Level(
            "shares are rounded before the sum, which is no post-processing of the noisy sum"
        )
    bad = _unusable(clip, noise)
    if bad is not None:
        return bad
    if noise.pure_epsilon is not None:
        if noise.at != "client":
            return Level("pure epsilon has a known bound only for noise at the client")
        if deployment.correlation != "none":
            return uncorrelated_only(deployment, "pure epsilon that is correlated")
        return Level("a mechanism of pure epsilon each round", pure=noise.pure_epsilon)
    z = noise_of(deployment)
    assert z is not None  # its level is stated, or the noise were unusable
    if noise.at == "client":
        return _adaptive(deployment, Level("each client adds all of its noise", 1 / z))
    if noise.at == "share":
        return _adaptive(deployment, _shares(deployment, z, server and not summed))
    if noise.at == "server":
        return _adaptive(deployment, _after(deployment, z))
    return _optimizer(deployment, z)


def _unusable(clip: ClipFacts, noise: Noise) -> Level | None:
    """Why the noise gives no law; None if it does."""
    if noise.seeded is None:
        return unstated("whether the noise can be replayed is not stated", "noise.seeded")
    if noise.seeded:
        return Level("the noise comes from a seed, so it can be subtracted")
    if noise.pure_epsilon is not None:
        return None
    # noise is worth what is clipped before it
    if clip.kind == "none" or (clip.at == "server" and noise.at != "server"):
        return Level("nothing bounds a unit's part before the noise")
    if clip.at is None and noise.at in ("client", "share"):
        return unstated("who clips is not stated", "clip.at")
    if clip.l2 is None:
        key = "clip.norm" if clip.norm is None else "clip.entries"
        if clip.kind is None:
            key = "clip.kind"
        elif clip.kind == "per-layer":
            key = "clip.norms"
        return unstated("the L2 bound of a unit's part is not stated", key)
    if clip.kind == "adaptive" and noise.multiplier is None:
        return Level("the norm adapts, and the noise does not follow it")
    # a clip of examples bounds no whole update, and one of updates no example
    if (clip.kind == "example") != (noise.at == "optimizer"):
        return Level("a clip of each example's gradient needs noise at the optimizer, and reverse")
    z = multiplier_of(clip, noise)
    if z is None:
        return unstated("the noise's level is not stated", "noise.multiplier")
    return Level("the noise is zero") if z == 0 else None


def std_of(clip: ClipFacts, noise: Noise) -> float | None:
    """Standard deviation, in the place where `noise.multiplier` counts."""
    if noise.multiplier is not None:
        return None if clip.l2 is None else noise.multiplier * clip.l2
    return noise.std if noise.std is not None else noise.classical_std


def multiplier_of(clip: ClipFacts, noise: Noise) -> float | None:
    """The noise multiplier, as stated or from the standard deviation; None if it is not known."""
    if noise.multiplier is not None:  # exact, as stated
        return noise.multiplier
    std = std_of(clip, noise)
    return None if std is None or not clip.l2 else std / clip.l2


def noise_of(deployment: Deployment) -> float | None:
    return multiplier_of(deployment.clip, deployment.noise)


def _opened(deployment: Deployment) -> bool:
    """Whether the server can read single updates in spite of the aggregation's protocol."""
    hidden = deployment.secure_aggregation
    if hidden is None or hidden.kind is None:
        return True
    return hidden.kind == "homomorphic" and hidden.shared_key is not False


def _shares(
    deployment: Deployment,
    z: float,
    server: bool,
) -> Level:
    """Each client adds its part of the sum's noise."""
    cohort = deployment.participation.cohort
    hidden = deployment.secure_aggregation
    if cohort is None:
        return unstated("the size of the cohort is not stated", "participation.cohort")
    if deployment.correlation != "none":
        return uncorrelated_only(deployment, "shares that are correlated over rounds")
    if server:
        words = f"the server sees each update with 1/{cohort} of the noise's variance"
        return Level(words, math.sqrt(cohort) / z)
    if (
        deployment.weights != "uniform"
    ):  # the weighted sum is computed from the single noisy updates
        missing = () if deployment.weights else ("weights",)
        words = f"a client's own share, 1/{cohort} of the noise's variance, hides its update"
        return Level(words, math.sqrt(cohort) / z, missing)
    senders = _senders(deployment, cohort)
    colluding = None if hidden is None else hidden.colluding
    keys = {"participation.replies": senders, "secure_aggregation.colluding": colluding}
    absent = tuple(key for key, value in keys.items() if value is None)
    left = 1  # its own share, at least
    if senders is not None and colluding is not None:
        left = max(1, senders - colluding)
    words = f"{left} of {cohort} shares of the noise are unknown to the attacker"
    return Level(words, math.sqrt(cohort / left) / z, absent)


def _senders(deployment: Deployment, cohort: int) -> int | None:
    """The fewest clients whose share of the noise arrives; None if that is not stated."""
    who = deployment.participation
    hidden = deployment.secure_aggregation
    if who.replies is not None:
        return who.replies
    dropouts = None if hidden is None else hidden.dropouts
    if dropouts is None or who.law not in STEADY:
        return None  # a cohort of random size has no fewest number of senders
    return cohort - dropouts


def _after(deployment: Deployment, z: float) -> Level:
    """The server adds the noise to what it sums; for all others."""
    who = deployment.participation
    noise = deployment.noise
    if deployment.weights is None:
        return unstated("how updates are weighted is not stated", "weights")
    if noise.on != "mean" and deployment.weights == "examples":
        words = "a sum that is weighted by examples is not bounded by the clip"
        return Level(words, missing=() if noise.on else ("noise.on",))
    if noise.on == "sum":
        return Level("the server adds the noise to an unweighted sum", 1 / z)
    if who.cohort is None:
        return unstated("the size of the cohort is not stated", "participation.cohort")
    missing = [] if who.replies else ["participation.replies"]
    share = 1 / (who.replies or 1)
    kind = f"on a mean of {who.replies or 1} or more"
    if deployment.weights == "examples":
        share = max(share, largest_weight(deployment))
        missing += [] if deployment.sizes or deployment.max_weight else ["sizes"]
        kind = f"on a mean in which one client weighs {share:.4g}"
    # A standard deviation is stated on the mean itself, a multiplier on the sum.
    mu = (1 if noise.multiplier is None else who.cohort) * share / z
    if noise.on is None:
        missing.append("noise.on")
        mu = max(mu, 1 / z)
    return Level(f"noise for {who.cohort} clients {kind}", mu, tuple(missing))


def largest_weight(deployment: Deployment) -> float:
    """The largest client's share in a mean with the smallest others; 1 if it is not stated."""
    if deployment.sizes is None:
        return deployment.max_weight or 1.0
    *others, largest = sorted(deployment.sizes)
    return largest / (largest + sum(others[: (deployment.participation.replies or 1) - 1]))


def _adaptive(deployment: Deployment, level: Level) -> Level:
    """The same with a norm that follows a quantile, and the number of clipped clients sent."""
    adaptive = deployment.clip.adaptive
    who = deployment.participation
    if deployment.clip.kind != "adaptive" or math.isinf(level.mu):
        return level
    if deployment.noise.at != "server":
        return Level("clients also send whether they were clipped, and no bound covers that")
    words = "how the norm adapts is not stated"
    if adaptive is None:
        return unstated(words, "clip.adaptive")
    for name in ("bit_noise", "quantile", "rate"):
        if getattr(adaptive, name) is None:
            return unstated(words, f"clip.adaptive.{name}")
    if deployment.correlation != "none":
        return Level("noise that is correlated over rounds needs one clip norm")
    assert adaptive.bit_noise is not None
    assert adaptive.quantile is not None
    assert adaptive.rate is not None
    if adaptive.faults is False:
        return replace(level, reason=f"{level.reason}; the clip norm adapts within the same budget")
    missing = [] if adaptive.faults else ["clip.adaptive.faults"]
    missing += [] if who.replies else ["participation.replies"]
    try:
        # the norm grows most if all clients are clipped and the noise on their count adds to it
        worst = 1 - adaptive.quantile + BITS * adaptive.bit_noise / (who.replies or 1)
        mu = level.mu * clients.adaptive_mu(
            1.0, bit_noise=adaptive.bit_noise * level.mu, norm_ratio=math.exp(adaptive.rate * worst)
        )
    except (ValueError, OverflowError):
        return Level("the number of clipped clients has too little noise")
    return Level(
        f"{level.reason}; the noise follows the next round's clip norm",
        mu,
        (*level.missing, *missing),
        beyond=BEYOND,
    )


def _optimizer(deployment: Deployment, z: float) -> Level:
    """Noise on clipped gradients of examples in every local step."""
    if deployment.local.coupled is None:
        words = "whether examples see each other in the loss or the model is not stated"
        return unstated(words, "local.coupled")
    if deployment.correlation != "none":
        return uncorrelated_only(deployment, "noise that is correlated over local steps")
    if deployment.local.coupled:
        return Level("examples change each other's gradients, so no clip bounds one")
    return Level("every local step adds noise to clipped gradients of examples", 1 / z)


class Steps(NamedTuple):
    """The Gaussian steps of all rounds, in words and numbers; fields as in `AudienceLaw`."""

    reason: str
    setting: TrainingSetting | None = None
    missing: tuple[str, ...] = ()
    attack_noise: float | None = None
    special: Callable[[Array], Array] | None = None


@dataclass(frozen=True)
class _Work:
    """All rounds of a deployment for one audience, to which one participation shows `level`."""

    deployment: Deployment
    level: Level
    audience: Audience
    rounds: int

    def steps(
        self,
        count: int,
        reason: str,
        *missing: str,
        rate: float = 1.0,
        see: Participation = "visible",
        mu: float | None = None,
    ) -> Steps:
        record = self.deployment.record
        noise = 1 / (mu or self.level.mu)
        shape = record.dim or 1, record.norm or 1.0
        return Steps(reason, TrainingSetting(noise, *shape, count, rate, see), missing)

    def local(self) -> Steps:
        """All local steps; a client counts as taking part in every round."""
        local = self.deployment.local
        sends = self.deployment.sends
        size = local.examples
        batch = local.batch
        epoch = None
        fewest = 1
        largest = 1.0
        if size is not None and batch is not None:
            epoch = math.ceil(size / batch)
            fewest = max(1, size // batch)  # loaders may drop the last batch
            largest = max(batch / size, 1 / fewest)
        steps = local.steps
        if steps is None and epoch is not None and local.epochs is not None:
            steps = epoch * local.epochs
        if steps is None:
            key = "local.epochs" if epoch else "local.examples"
            return Steps("the number of steps is not stated", missing=(key,))
        rate = min(1.0, largest if local.rate is None else local.rate)
        if local.sampler == "poisson" and epoch is not None:
            silent = sends is not None and "batch size" not in sends
            if local.normalizer == "expected" and silent:
                words = "no attacker sees which batch holds an example"
                return self.steps(
                    self.rounds * steps,
                    words,
                    rate=rate,
                    see="hidden",
                )
            keys = {"local.normalizer": local.normalizer, "sends": sends}
            missing = [key for key, value in keys.items() if value is None]
            words = "the size of each batch may be seen, so the steps that hold an example may be"
            return self.steps(self.rounds * steps, words, *missing, rate=rate)
        if local.sampler == "shuffled" and epoch is not None:
            count = self.rounds * (local.epochs or math.ceil(steps / fewest))
            words = "each example takes part once an epoch, as in one full-batch step"
            return self.steps(count, words)
        key = "local.sampler" if local.sampler is None else "local.examples"
        return self.steps(self.rounds * steps, "every step may hold the example", key)

    def by_participation(self) -> Steps:
        """All rounds of a client, by the law of its participation."""
        if self.deployment.correlation != "none":
            return self.correlated()
        who = self.deployment.participation
        rounds = self.rounds
        if self.audience == "server" and who.law not in (None, "all", "server-picks"):
            return self.steps(rounds, f"the server can pick all {rounds} rounds")
        see: Participation = "visible"
        secret = "the audience sees who takes part"
        if self.unseen:
            see = "hidden"
            secret = "nobody here sees who takes part"
        if who.law in ("fixed-size", "poisson") and who.share is not None:
            if who.law == "fixed-size":  # the pair with and without is not Poisson's: no hidden law
                see = "visible"
                secret = "it counts as seen who takes part"
            words = f"in each of {rounds} rounds with probability {who.share:.4g}; {secret}"
            return self.steps(rounds, words, rate=who.share, see=see)
        if who.law in ("all", "server-picks"):
            apart = who.min_separation or 1
            # rounds 1, 1 + apart, 1 + 2 apart, ...
            most = math.ceil(rounds / apart)
            words = f"all {rounds} rounds"
            if apart > 1:
                words = f"up to {most} of {rounds} rounds, {apart} or more apart"
            elif who.law == "server-picks":
                words = f"the server picks: all {rounds} rounds in the worst case"
            return self.steps(most, words)
        if who.bins is None or who.law not in ("cyclic", "balls-in-bins", "shuffled"):
            key = "participation.population"
            if who.law is None:
                key = "participation.law"
            elif who.law in ("cyclic", "balls-in-bins", "shuffled"):
                key = "participation.bins"
            return self.steps(rounds, f"all rounds count ({rounds})", key)
        turns = math.ceil(rounds / who.bins)
        if who.law == "cyclic":
            missing = [] if who.rate else ["participation.rate"]
            words = f"in each of {turns} turns of its group; {secret}"
            return self.steps(
                turns,
                words,
                *missing,
                rate=who.rate or 1.0,
                see=see,
            )
        made = self.steps(turns, f"in one of every {who.bins} rounds, {turns} times")
        if who.law == "balls-in-bins" and self.unseen and who.bins <= MOST_ROUNDS:
            one = Factor.parse("none", who.bins)  # a sum of all turns is sufficient
            made = _in_bins(made, one, 1 / (self.level.mu * math.sqrt(turns)), who.bins)
        return made

    @property
    def unseen(self) -> bool:
        """Whether the audience cannot see who takes part: a noise level that depends on it shows
        it.
        """
        noise = self.deployment.noise
        constant = noise.at == "server" and noise.on == "sum"
        return bool(self.deployment.participation.hidden) and self.audience != "server" and constant

    def correlated(self) -> Steps:
        """Noise that cancels across rounds: both sides by the factor C."""
        deployment = self.deployment
        if deployment.correlation is None:
            words = "whether noise cancels across rounds is not stated"
            return Steps(words, missing=("correlation",))
        who = deployment.participation
        mu = self.level.mu
        factor = Factor.parse(deployment.correlation, self.rounds)
        share = who.rate if who.law == "cyclic" and self.unseen else None
        if share is not None and who.bins is not None and factor.width <= who.bins:
            longest = math.sqrt(float(np.diag(factor.gram).max()))
            turns = math.ceil(self.rounds / who.bins)
            words = f"in each of {turns} turns of its group, {factor.name}; nobody here sees who"
            made = self.steps(
                turns,
                words,
                rate=share,
                see="hidden",
                mu=mu * longest,
            )
            return made._replace(attack_noise=math.inf)
        apart = who.min_separation or 1
        words = f"{apart} or more apart"
        scheme = Scheme(separation=apart)
        if deployment.noise.at != "server":  # the rows of C are the client's own releases
            factor = factor.first(scheme.most_of(self.rounds))
            scheme = Scheme()
            words = "as the client's own releases"
        made = self.steps(
            1,
            f"up to {scheme.most_of(factor.rounds)} of {self.rounds} rounds, {words}, with noise "
            f"correlated by {factor.name}",
            *([] if who.min_separation else ["participation.min_separation"]),
            mu=mu * factor.sensitivity(scheme),
        )
        made = made._replace(attack_noise=1 / (mu * factor.attained(factor.worst(scheme))))
        if who.law == "balls-in-bins" and who.bins and self.unseen:
            made = _in_bins(made, factor, 1 / mu, who.bins)._replace(missing=())
        return made


def _in_bins(
    made: Steps,
    factor: Factor,
    noise: float,
    bins: int,
) -> Steps:
    """The same for a random, hidden bin; the attack that knows the rounds does not apply."""

    @cache
    def at(log: float) -> float:
        inside = math.exp(min(max(log, -700.0), math.log1p(-1e-12)))
        return balls_in_bins(noise, factor=factor, bins=bins, kappa=inside)

    def special(blind: Array) -> Array:  # it rises with kappa: the next grid point is above
        many = blind.size > 16
        above = np.minimum(0.0, np.ceil(blind * GRID) / GRID) if many else blind
        each = [at(float(log)) if log > -np.inf else 0.0 for log in above]
        return np.where(blind == 0, 1.0, np.where(blind == -np.inf, 0.0, each))

    return made._replace(special=special, attack_noise=math.inf)
