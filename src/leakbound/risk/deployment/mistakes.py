"""Mistakes in the settings of a deployment: what a claim says, and what is true."""

from __future__ import annotations

import math
from collections.abc import Iterator

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


def find(given: Deployment) -> tuple[Mistake, ...]:
    """All mistakes that the facts show; `line` is None.

    Example:
        >>> from leakbound.risk.deployment import ClipFacts, Noise
        >>> clip = ClipFacts(norm=0.01, kind="elementwise", entries=1_000_000)
        >>> noise = Noise(epsilon=1.0, delta=1e-5, sensitivity=0.01, at="client")
        >>> [one.name for one in find(Deployment(clip=clip, noise=noise))]
        ['elementwise-clip']
    """
    return (
        *_noise(given),
        *_clip(given),
        *_server(given),
        *_aggregation(given),
        *_sampling(given),
        *_claims(given),
        *_leaks(given),
    )


def _noise(given: Deployment) -> Iterator[Mistake]:
    noise = given.noise
    clip = given.clip
    if noise.epsilon is not None and noise.epsilon > 1 and noise.delta is not None:
        true = float(
            conversions.delta(
                math.sqrt(2 * math.log(1.25 / noise.delta)) / noise.epsilon, epsilon=noise.epsilon
            )
        )
        if true > noise.delta:
            yield Mistake(
                name="classical-formula",
                key="noise.epsilon",
                text=f"the classical Gaussian formula has no proof above epsilon 1: at epsilon "
                f"{noise.epsilon:g} its true delta is {format_upper(true)}, not {noise.delta:g}; "
                "take the noise multiplier from `leakbound calibrate` or an accountant",
            )
    bound = clip.l2
    sensitivity = noise.sensitivity
    if clip.kind != "elementwise" and bound and sensitivity and sensitivity < bound * (1 - 1e-9):
        yield Mistake(
            name="sensitivity-below-clip",
            key="noise.sensitivity",
            text=f"the noise is for a sensitivity of {sensitivity:g}, but clipping lets a unit "
            f"move the update by {bound:.4g}, {bound / sensitivity:.4g} times as much; give the "
            "clip norm",
        )
    if noise.seeded:
        yield Mistake(
            name="seeded-noise",
            key="noise.seeded",
            text="whoever knows the seed can subtract the noise; take it from the operating system",
        )
    claimed = given.claim.multiplier
    if claimed and noise.multiplier is not None and noise.multiplier < claimed * (1 - 1e-9):
        because = f", because {given.claim.because}" if given.claim.because else ""
        yield Mistake(
            name="scaled-noise",
            key="noise.multiplier",
            text=f"the accountant takes a noise multiplier of {claimed:g}, but the noise has "
            f"{noise.multiplier:.4g}{because}",
        )
    if noise.at == "rounded-share":
        yield Mistake(
            name="rounded-shares",
            key="noise.at",
            text="shares of Gaussian noise that are rounded before the sum are not the Gaussian "
            "mechanism; take discrete Gaussian or Skellam noise and its accountant",
        )


def _clip(given: Deployment) -> Iterator[Mistake]:
    clip = given.clip
    noise = given.noise
    adds = noise.at not in (None, "none")
    if clip.kind == "elementwise" and clip.norm and adds and noise.pure_epsilon is None:
        size = "gamma sqrt(P)" if clip.l2 is None else f"{clip.l2:.4g}"
        calibrated = noise.sensitivity
        if calibrated is not None and (clip.l2 is None or calibrated < clip.l2 * (1 - 1e-9)):
            yield Mistake(
                name="elementwise-clip",
                key="clip.kind",
                text=f"the noise is for a sensitivity of {calibrated:g}, but entries of at most "
                f"{clip.norm:g} give an L2 norm of up to {size}; clip the whole update's L2 norm",
            )
    if clip.kind == "none" and adds:
        yield Mistake(
            name="nothing-clipped",
            key="clip.kind",
            text="nothing bounds a unit's part before the noise, so no noise level hides it; clip "
            "first, then add the noise",
        )
    adaptive = clip.adaptive
    if adaptive is not None and adaptive.faults:
        yield Mistake(
            name="adaptive-clip",
            key="clip.adaptive",
            text="the clip norm moves away from its quantile, and the noise follows the next "
            "round's smaller norm (exp(rate (1 - quantile)) times smaller if all are clipped); "
            "take a fixed clip norm",
        )
    if clip.at == "server" and noise.at in ("client", "share", "rounded-share", "optimizer"):
        yield Mistake(
            name="nothing-clipped",
            key="clip.at",
            text="the server clips after clients added their noise, so nothing bounds a unit's "
            "part under the noise; clip on the clients",
        )


def _server(given: Deployment) -> Iterator[Mistake]:
    who = given.participation
    noise = given.noise
    if noise.at != "server":
        return
    if given.weights == "examples" and (given.sizes or given.max_weight) and who.cohort:
        share = largest_weight(given)
        if share * who.cohort > 1 + 1e-9:
            yield Mistake(
                name="unequal-weights",
                key="weights",
                text=f"one client weighs {share:.4g} in the mean, but the noise is for "
                f"1/{who.cohort}: its mu is {share * who.cohort:.4g} times as large; weigh clients "
                "equally",
            )
    short = who.cohort and who.replies and who.replies < who.cohort
    if short and noise.on != "sum":
        assert who.cohort is not None
        assert who.replies is not None
        yield Mistake(
            name="fewer-replies",
            key="participation.replies",
            text=f"the noise is for {who.cohort} clients, but {who.replies} reply: mu is "
            f"{who.cohort / who.replies:.4g} times as large; divide by a constant, or stop the "
            "round",
        )


def _aggregation(given: Deployment) -> Iterator[Mistake]:
    hidden = given.secure_aggregation
    if hidden is None or not hidden.on:
        return
    if given.noise.at in (None, "none"):
        yield Mistake(
            name="aggregation-alone",
            key="secure_aggregation",
            text="secure aggregation sends the exact sum, so nothing random bounds what it reveals;"
            " let clients add shares of noise",
        )
    if hidden.kind == "homomorphic" and hidden.shared_key:
        yield Mistake(
            name="shared-key",
            key="secure_aggregation.shared_key",
            text="all clients hold one secret key, so the server and any client together read every"
            " update; let clients add noise",
        )


def _sampling(given: Deployment) -> Iterator[Mistake]:
    who = given.participation
    local = given.local
    claim = given.claim
    if not claim.amplified:
        return
    if given.noise.at == "optimizer":
        if local.sampler == "shuffled":
            yield Mistake(
                name="shuffled-batches",
                key="local.sampler",
                text="the accountant is for Poisson sampling, but batches are shuffled: an example "
                "is in one batch of every epoch, for which sampling proves no better than one "
                "full-batch step an epoch; sample by Poisson",
            )
        # sent, or seen in the level of the noise
        sizes = given.sends is not None and "batch size" in given.sends
        if local.normalizer == "realized" or sizes:
            yield Mistake(
                name="batch-size-seen",
                key="local.normalizer" if local.normalizer == "realized" else "sends",
                text=f"the size of each batch can be seen{_power(given)}, so the accountant may "
                "not count batches as hidden; divide by the expected size",
            )
        return
    laws = {
        "all": "all clients take part",
        "server-picks": "the server picks the clients",
        "fixed-size": "a fixed number of clients is drawn, which is not Poisson sampling",
        "shuffled": "each client takes part once in every epoch",
    }
    seen = laws.get(who.law or "")
    if who.law == "fixed-size" and who.hidden and claim.neighbors == "replace":
        return  # accountants for sampling without replacement compare replacements
    if seen is None and not who.hidden:
        seen = "it can be seen who takes part"
    if seen is not None:
        yield Mistake(
            name="false-amplification",
            key="participation.law",
            text=f"the accountant counts participation as secret and random, but {seen}; count "
            "every participation",
        )


def _power(given: Deployment) -> str:
    size = given.local.batch
    entries = given.clip.entries
    if given.local.normalizer != "realized" or size is None or size < 2 or entries is None:
        return ""
    power = float(clients.batch_size_power(1e-3, batch=size, weights=entries))
    return f" (from the noise's level, one test of level 0.001 tells it in {power:.3g} of cases)"


def _claims(given: Deployment) -> Iterator[Mistake]:
    claim = given.claim
    if claim.epsilon is None:
        return
    unit = claim.unit or ("example" if given.noise.at == "optimizer" else "client")
    own = next(
        (e for e in laws_of(_unasked(given)) if (e.audience, e.unit) == ("clients", unit)), None
    )
    # what is not stated counts as its worst case, which is nobody's mistake
    if own is None or own.setting is None or own.missing:
        return
    delta = claim.delta or DELTA
    # accountants round differently
    allowed = claim.epsilon * TOLERANCE
    rounds = given.rounds or 1
    true = own.epsilon(delta)
    if true > allowed:
        some = claim.rounds or 1
        partly = some < rounds and (claim.rounds or given.local.new_engine)
        if partly or _of_rounds(given, own, some, delta) <= allowed:
            yield Mistake(
                name="uncounted-rounds",
                key="local.new_engine" if given.local.new_engine else "claim.epsilon",
                text=f"epsilon {claim.epsilon:g} is that of {some} of {rounds} rounds; all "
                f"together have at most {format_upper(true, 4)} at delta {delta:g}",
            )
        else:
            yield Mistake(
                name="epsilon-too-small",
                key="claim.epsilon",
                text=f"epsilon is at most {format_upper(true, 4)} at delta {delta:g}, not "
                f"{claim.epsilon:g}",
            )
    elif claim.neighbors == "replace" and own.setting.sampling_rate == 1:
        both = own.epsilon(delta, replace_one=True)
        if both > allowed:
            yield Mistake(
                name="missing-two",
                key="claim.neighbors",
                text=f"replacing one {unit} moves the sum by up to 2C: epsilon is "
                f"{format_upper(both, 4)} at delta {delta:g}, not {claim.epsilon:g}, which is that "
                "of adding or removing it",
            )


def _unasked(given: Deployment) -> Deployment:
    """The same for all units."""
    return msgspec.structs.replace(given, unit=None)


def _of_rounds(given: Deployment, own: AudienceLaw, rounds: int, delta: float) -> float:
    """Epsilon of some rounds, as an accountant that starts anew counts it."""
    if given.rounds is None or rounds >= given.rounds:
        return own.epsilon(delta)
    few = msgspec.structs.replace(given, rounds=rounds, unit=None)
    found = next(e for e in laws_of(few) if (e.audience, e.unit) == (own.audience, own.unit))
    return found.epsilon(delta)


def _leaks(given: Deployment) -> Iterator[Mistake]:
    known = given.noise.at in ("client", "share", "optimizer")
    if known and math.isfinite(per_participation(given, "clients").mu):
        for what in given.sends or ():
            if what == "batch size" and not given.claim.amplified:
                continue  # counted: participation is visible
            if what == "batch size":
                continue  # named by `_sampling`
            yield Mistake(
                name=CLEAR,
                key="sends",
                text=f"{what} leave the client without noise, and no number here covers them; do "
                "not send them, or add noise",
                fatal=False,
            )
