"""Mistakes in the settings of a deployment: what a claim says, and what is true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from leakbound._util.formats import format_upper
from leakbound.bounds import clients, conversions
from leakbound.risk.deployment.facts import Deployment, Mistake
from leakbound.risk.deployment.laws import AudienceLaw, largest_weight, laws_of, per_participation

CLEAR = "sent-in-clear"
"""The mistake of a client that sends more than its update."""
DELTA = 1e-5
TOLERANCE = 1.02
"""Ratio of a true to a claimed epsilon up to which accountants differ (RDP is above, CLT below)."""


class MistakeRule(NamedTuple):
    """A kind of mistake: the key that shows it, its sentence, and whether the guarantee fails."""

    key: str
    text: str
    fatal: bool = True


RULES: dict[str, MistakeRule] = {
    "classical-formula": MistakeRule(
        "noise.epsilon",
        "the classical Gaussian formula has no proof above epsilon 1: at epsilon {epsilon:g} its "
        "true delta is {true}, not {delta:g}; take the noise multiplier from `leakbound calibrate` "
        "or an accountant",
    ),
    "sensitivity-below-clip": MistakeRule(
        "noise.sensitivity",
        "the noise is for a sensitivity of {sensitivity:g}, but clipping lets a unit move the "
        "update by {bound:.4g}, {ratio:.4g} times as much; give the clip norm",
    ),
    "seeded-noise": MistakeRule(
        "noise.seeded",
        "whoever knows the seed can subtract the noise; take it from the operating system",
    ),
    "scaled-noise": MistakeRule(
        "noise.multiplier",
        "the accountant takes a noise multiplier of {claimed:g}, but the noise has "
        "{multiplier:.4g}{because}",
    ),
    "rounded-shares": MistakeRule(
        "noise.at",
        "shares of Gaussian noise that are rounded before the sum are not the Gaussian mechanism; "
        "take discrete Gaussian or Skellam noise and its accountant",
    ),
    "elementwise-clip": MistakeRule(
        "clip.kind",
        "the noise is for a sensitivity of {sensitivity:g}, but entries of at most {norm:g} give "
        "an L2 norm of up to {size}; clip the whole update's L2 norm",
    ),
    "nothing-clipped": MistakeRule("clip.kind", "{why}"),
    "adaptive-clip": MistakeRule(
        "clip.adaptive",
        "the clip norm moves away from its quantile, and the noise follows the next round's "
        "smaller norm (exp(rate (1 - quantile)) times smaller if all are clipped); take a fixed "
        "clip norm",
    ),
    "unequal-weights": MistakeRule(
        "weights",
        "one client weighs {share:.4g} in the mean, but the noise is for 1/{cohort}: its mu is "
        "{ratio:.4g} times as large; weigh clients equally",
    ),
    "fewer-replies": MistakeRule(
        "participation.replies",
        "the noise is for {cohort} clients, but {replies} reply: mu is {ratio:.4g} times as large; "
        "divide by a constant, or stop the round",
    ),
    "aggregation-alone": MistakeRule(
        "secure_aggregation",
        "secure aggregation sends the exact sum, so nothing random bounds what it reveals; let "
        "clients add shares of noise",
    ),
    "shared-key": MistakeRule(
        "secure_aggregation.shared_key",
        "all clients hold one secret key, so the server and any client together read every update; "
        "let clients add noise",
    ),
    "shuffled-batches": MistakeRule(
        "local.sampler",
        "the accountant is for Poisson sampling, but batches are shuffled: an example is in one "
        "batch of every epoch, for which sampling proves no better than one full-batch step an "
        "epoch; sample by Poisson",
    ),
    "batch-size-seen": MistakeRule(
        "sends",
        "the size of each batch can be seen{power}, so the accountant may not count batches as "
        "hidden; divide by the expected size",
    ),
    "false-amplification": MistakeRule(
        "participation.law",
        "the accountant counts participation as secret and random, but {seen}; count every "
        "participation",
    ),
    "uncounted-rounds": MistakeRule(
        "claim.epsilon",
        "epsilon {claimed:g} is that of {some} of {rounds} rounds; all together have at most "
        "{true} at delta {delta:g}",
    ),
    "epsilon-too-small": MistakeRule(
        "claim.epsilon", "epsilon is at most {true} at delta {delta:g}, not {claimed:g}"
    ),
    "missing-two": MistakeRule(
        "claim.neighbors",
        "replacing one {unit} moves the sum by up to 2C: epsilon is {true} at delta {delta:g}, not "
        "{claimed:g}, which is that of adding or removing it",
    ),
    CLEAR: MistakeRule(
        "sends",
        "{what} leave the client without noise, and no number here covers them; do not send them, "
        "or add noise",
        fatal=False,
    ),
}
PREDICTABLE = {
    "all": "all clients take part",
    "server-picks": "the server picks the clients",
    "fixed-size": "a fixed number of clients is drawn, which is not Poisson sampling",
    "shuffled": "each client takes part once in every epoch",
}
"""Laws of participation that no accountant may count as secret and random."""


def said(
    name: str,
    rules: Mapping[str, MistakeRule] = RULES,
    *,
    key: str | None = None,
    **values: Any,
) -> Mistake:
    """A mistake in words: the sentence of its rule with values; `key` if another one shows it."""
    rule = rules[name]
    text = rule.text.format(**values)
    return Mistake(
        name=name,
        key=key or rule.key,
        text=text,
        fatal=rule.fatal,
    )


def find(deployment: Deployment) -> tuple[Mistake, ...]:
    """All mistakes that the facts show; `line` is None.

    Example:
        >>> from leakbound.risk.deployment import ClipFacts, Noise
        >>> clip = ClipFacts(norm=0.01, kind="elementwise", entries=1_000_000)
        >>> noise = Noise(epsilon=1.0, delta=1e-5, sensitivity=0.01, at="client")
        >>> [one.name for one in find(Deployment(clip=clip, noise=noise))]
        ['elementwise-clip']
    """
    rules = (_noise, _clip, _server, _aggregation, _sampling, _claims, _leaks)
    return tuple(one for rule in rules for one in rule(deployment))


def _noise(deployment: Deployment) -> Iterator[Mistake]:
    noise = deployment.noise
    epsilon = noise.epsilon
    delta = noise.delta
    if epsilon is not None and epsilon > 1 and delta is not None:
        level = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
        true = float(conversions.delta(level, epsilon=epsilon))
        if true > delta:
            words = format_upper(true)
            yield said(
                "classical-formula",
                epsilon=epsilon,
                true=words,
                delta=delta,
            )
    bound = deployment.clip.l2
    sensitivity = noise.sensitivity
    whole = deployment.clip.kind != "elementwise"
    if whole and bound and sensitivity and sensitivity < bound * (1 - 1e-9):
        ratio = bound / sensitivity
        yield said(
            "sensitivity-below-clip",
            sensitivity=sensitivity,
            bound=bound,
            ratio=ratio,
        )
    if noise.seeded:
        yield said("seeded-noise")
    claim = deployment.claim
    real = noise.multiplier
    if claim.multiplier and real is not None and real < claim.multiplier * (1 - 1e-9):
        because = f", because {claim.because}" if claim.because else ""
        yield said(
            "scaled-noise",
            claimed=claim.multiplier,
            multiplier=real,
            because=because,
        )
    if noise.at == "rounded-share":
        yield said("rounded-shares")


def _clip(deployment: Deployment) -> Iterator[Mistake]:
    clip = deployment.clip
    noise = deployment.noise
    adds = noise.at not in (None, "none")
    if clip.kind == "elementwise" and clip.norm and adds and noise.pure_epsilon is None:
        size = "gamma sqrt(P)" if clip.l2 is None else f"{clip.l2:.4g}"
        sensitivity = noise.sensitivity
        if sensitivity is not None and (clip.l2 is None or sensitivity < clip.l2 * (1 - 1e-9)):
            yield said(
                "elementwise-clip",
                sensitivity=sensitivity,
                norm=clip.norm,
                size=size,
            )
    if clip.kind == "none" and adds:
        why = (
            "nothing bounds a unit's part before the noise, so no noise level hides it; clip "
            "first, then add the noise"
        )
        yield said("nothing-clipped", why=why)
    if clip.adaptive is not None and clip.adaptive.faults:
        yield said("adaptive-clip")
    if clip.at == "server" and noise.at in ("client", "share", "rounded-share", "optimizer"):
        why = (
            "the server clips after clients added their noise, so nothing bounds a unit's part "
            "under the noise; clip on the clients"
        )
        yield said("nothing-clipped", key="clip.at", why=why)


def _server(deployment: Deployment) -> Iterator[Mistake]:
    cohort = deployment.participation.cohort
    replies = deployment.participation.replies
    if deployment.noise.at != "server" or not cohort:
        return
    if deployment.weights == "examples" and (deployment.sizes or deployment.max_weight):
        share = largest_weight(deployment)
        if share * cohort > 1 + 1e-9:
            yield said(
                "unequal-weights",
                share=share,
                cohort=cohort,
                ratio=share * cohort,
            )
    if replies and replies < cohort and deployment.noise.on != "sum":
        yield said(
            "fewer-replies",
            cohort=cohort,
            replies=replies,
            ratio=cohort / replies,
        )


def _aggregation(deployment: Deployment) -> Iterator[Mistake]:
    hidden = deployment.secure_aggregation
    if hidden is None or not hidden.on:
        return
    if deployment.noise.at in (None, "none"):
        yield said("aggregation-alone")
    if hidden.kind == "homomorphic" and hidden.shared_key:
        yield said("shared-key")


def _sampling(deployment: Deployment) -> Iterator[Mistake]:
    who = deployment.participation
    local = deployment.local
    claim = deployment.claim
    if not claim.amplified:
        return
    if deployment.noise.at == "optimizer":
        if local.sampler == "shuffled":
            yield said("shuffled-batches")
        realized = local.normalizer == "realized"
        # sent, or seen in the level of the noise
        if realized or (deployment.sends is not None and "batch size" in deployment.sends):
            key = "local.normalizer" if realized else None
            yield said("batch-size-seen", key=key, power=_power(deployment))
        return
    if who.law == "fixed-size" and who.hidden and claim.neighbors == "replace":
        return  # accountants for sampling without replacement compare replacements
    seen = PREDICTABLE.get(who.law or "")
    if seen is None and not who.hidden:
        seen = "it can be seen who takes part"
    if seen is not None:
        yield said("false-amplification", seen=seen)


def _power(deployment: Deployment) -> str:
    size = deployment.local.batch
    entries = deployment.clip.entries
    if deployment.local.normalizer != "realized" or size is None or size < 2 or entries is None:
        return ""
    power = float(clients.batch_size_power(1e-3, batch=size, weights=entries))
    return f" (from the noise's level, one test of level 0.001 tells it in {power:.3g} of cases)"


def _claims(deployment: Deployment) -> Iterator[Mistake]:
    claim = deployment.claim
    if claim.epsilon is None:
        return
    unit = claim.unit or ("example" if deployment.noise.at == "optimizer" else "client")
    law = _law_of(deployment, unit)
    # what is not stated counts as its worst case, which is nobody's mistake
    if law is None or law.setting is None or law.missing:
        return
    delta = claim.delta or DELTA
    # accountants round differently
    allowed = claim.epsilon * TOLERANCE
    rounds = deployment.rounds or 1
    stated: dict[str, Any] = {"claimed": claim.epsilon, "delta": delta}
    true = law.epsilon(delta)
    if true > allowed:
        words = format_upper(true, 4)
        some = claim.rounds or 1
        anew = deployment.local.new_engine
        few = law
        if some < rounds:  # as an accountant that starts anew counts them
            few = _law_of(msgspec.structs.replace(deployment, rounds=some), unit) or law
        if (some < rounds and (claim.rounds or anew)) or few.epsilon(delta) <= allowed:
            key = "local.new_engine" if anew else None
            yield said(
                "uncounted-rounds",
                key=key,
                some=some,
                rounds=rounds,
                true=words,
                **stated,
            )
        else:
            yield said("epsilon-too-small", true=words, **stated)
    elif claim.neighbors == "replace" and law.setting.sampling_rate == 1:
        both = law.epsilon(delta, replace_one=True)
        if both > allowed:
            yield said(
                "missing-two",
                unit=unit,
                true=format_upper(both, 4),
                **stated,
            )


def _law_of(deployment: Deployment, unit: str) -> AudienceLaw | None:
    """What clients see of a unit, whichever units are asked for."""
    laws = laws_of(msgspec.structs.replace(deployment, unit=None))
    return next((law for law in laws if (law.audience, law.unit) == ("clients", unit)), None)


def _leaks(deployment: Deployment) -> Iterator[Mistake]:
    known = deployment.noise.at in ("client", "share", "optimizer")
    if known and math.isfinite(per_participation(deployment, "clients").mu):
        # the batch size is a matter of sampling, and counted there
        yield from (
            said(CLEAR, what=what) for what in deployment.sends or () if what != "batch size"
        )
