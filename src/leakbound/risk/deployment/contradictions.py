"""Keys of a deployment that cannot all be true: refused, with what mends them.

Where keys determine each other, a bound would otherwise rest on whichever key it reads first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

Deployment = Any
"""Of facts.py, which calls this module."""

CLOSE = 1e-9
"""Relative difference of two numbers that count as the same."""
STEADY = ("all", "server-picks", "fixed-size")
"""Laws of participation with cohorts of one size."""


def refuse(deployment: Deployment) -> None:
    """Reject keys that contradict each other.

    Raises:
        ValueError: with both keys, their values, and what to change.
    """
    for find in (_noise, _clip, _weights, _participation, _aggregation, _local, _examples):
        words = next(find(deployment), None)
        if words is not None:
            raise ValueError(words)


def _noise(deployment: Deployment) -> Iterator[str]:
    noise = deployment.noise
    clip = deployment.clip
    if noise.delta is not None and not 0 < noise.delta < 1:
        yield f"noise.delta is {noise.delta!r}; give a number between 0 and 1"
    names = ("multiplier", "std", "pure_epsilon", "epsilon")
    said = [name for name in names if getattr(noise, name) is not None]
    if len(said) > 1:
        yield f"noise has {' and '.join(said)}; give one of them, as each determines the level"
    bit = clip.adaptive.bit_noise if clip.kind == "adaptive" and clip.adaptive else None
    if bit is not None and noise.multiplier is not None and noise.multiplier >= 2 * bit:
        yield (
            f"noise.multiplier is {noise.multiplier:g}, at least twice clip.adaptive.bit_noise "
            f"({bit:g}): the number of clipped clients alone reveals more, whatever the noise on "
            f"the sum; give bit_noise above {noise.multiplier / 2:g}"
        )


def _clip(deployment: Deployment) -> Iterator[str]:
    clip = deployment.clip
    if clip.kind is None:
        return
    if clip.adaptive is not None and clip.kind != "adaptive":
        yield (
            f"clip.adaptive is given, but clip.kind is {clip.kind!r}; give kind = 'adaptive', or "
            "leave out adaptive"
        )
    if clip.norms is not None and clip.kind != "per-layer":
        yield (
            f"clip.norms is given, but clip.kind is {clip.kind!r}; give kind = 'per-layer', or "
            "leave out norms"
        )
    if clip.kind == "example" and clip.at == "server":
        yield (
            "clip.kind is 'example', which a server cannot clip, but clip.at is 'server'; give "
            "kind = 'l2', or at = 'client'"
        )


def _weights(deployment: Deployment) -> Iterator[str]:
    who = deployment.participation
    sizes = deployment.sizes
    most = deployment.max_weight
    if sizes and most is not None:
        yield "max_weight and sizes both give the largest weight; give one of them"
    if sizes and len(sizes) < (who.replies or 1):
        yield (
            f"sizes has {len(sizes)} numbers, but participation.replies is {who.replies}; give the "
            "size of each client in a round"
        )
    if most is not None and who.replies and most * who.replies < 1 - CLOSE:
        yield (
            f"max_weight is {most:g}, but one of {who.replies} clients (participation.replies) "
            f"weighs at least 1/{who.replies}; give a larger max_weight or more replies"
        )


def _participation(deployment: Deployment) -> Iterator[str]:
    who = deployment.participation
    for small, large in (("cohort", "population"), ("replies", "cohort")):
        least = getattr(who, small)
        most = getattr(who, large)
        if least and most and least > most:
            yield (
                f"participation.{small} is {least}, more than the {large} of {most}; give at most "
                "as many"
            )
    if who.cohort and who.population:
        share = who.cohort / who.population
        if who.rate is not None and who.law == "poisson":
            yield (
                "participation has rate, and cohort and population: give one, as both determine "
                "the probability of a round"
            )
        if who.rate is not None and who.law == "fixed-size" and not _same(who.rate, share):
            yield (
                f"participation.rate is {who.rate:g}, but {who.cohort} of {who.population} clients "
                f"are a rate of {share:g}; leave out rate"
            )
        if who.law == "shuffled" and who.bins and abs(who.cohort - who.population / who.bins) >= 1:
            yield (
                f"participation.cohort is {who.cohort}, but each of {who.population} clients takes "
                f"part once in {who.bins} rounds (bins), which makes "
                f"{who.population / who.bins:.4g} a round; leave one out"
            )
        if who.law == "cyclic" and who.bins and who.rate is not None:
            mean = who.rate * who.population / who.bins
            if abs(who.cohort - mean) >= 1:
                yield (
                    f"participation.cohort is {who.cohort}, but rate {who.rate:g} of one of "
                    f"{who.bins} groups of {who.population} clients makes {mean:.4g} a round; "
                    "leave one out"
                )
    if (who.min_separation or 1) > 1 and who.law in ("all", "poisson", "fixed-size"):
        yield (
            f"participation.law is {who.law!r}, which does not keep rounds {who.min_separation} "
            "apart; give server-picks, or leave out min_separation"
        )


def _aggregation(deployment: Deployment) -> Iterator[str]:
    hidden = deployment.secure_aggregation
    who = deployment.participation
    if hidden is None:
        return
    if hidden.shared_key and hidden.kind == "secagg":
        yield (
            "secure_aggregation.shared_key is true, but kind is 'secagg', which has no common key; "
            "give kind = 'homomorphic', or leave out shared_key"
        )
    if who.law not in STEADY or not who.cohort or hidden.dropouts is None:
        return
    left = who.cohort - hidden.dropouts
    if who.replies is not None and who.replies != left:
        yield (
            f"participation.replies is {who.replies}, but a cohort of {who.cohort} with "
            f"{hidden.dropouts} dropouts leaves {left}; leave out replies or dropouts"
        )


def _local(deployment: Deployment) -> Iterator[str]:
    local = deployment.local
    size = local.examples
    batch = local.batch
    if not size or not batch:
        return
    # loaders keep the last, smaller batch or drop it: both are consistent
    fewest = max(1, size // batch)
    most = math.ceil(size / batch)
    if local.steps and local.epochs:
        low = local.epochs * fewest
        high = local.epochs * most
        if not low <= local.steps <= high:
            yield (
                f"local.steps is {local.steps}, but {local.epochs} epochs of {size} examples in "
                f"batches of {batch} have {_range(low, high)}; leave one out"
            )
    # 1 / len(loader) and batch / examples are both called the rate
    low_rate = min(batch / size, 1 / most)
    high_rate = max(min(1.0, batch / size), 1 / fewest)
    if local.rate is not None and not (
        low_rate * (1 - CLOSE) <= local.rate <= high_rate * (1 + CLOSE)
    ):
        yield (
            f"local.rate is {local.rate:g}, but a batch of {batch} of {size} examples has a rate "
            f"of {_range(low_rate, high_rate)}; leave one out"
        )


def _examples(deployment: Deployment) -> Iterator[str]:
    examples = deployment.local.examples
    held = deployment.record.examples_per_client
    sizes = deployment.sizes
    if examples and held and examples > held:
        yield (
            f"local.examples is {examples}, more than record.examples_per_client, {held}; give the "
            "number that the largest client holds"
        )
    if held and (deployment.record.people or 1) > held:
        yield (
            f"record.people is {deployment.record.people}, more than record.examples_per_client, "
            f"{held}: no person has more examples than the client; give at most as many"
        )
    sites = deployment.record.sites
    if sites is not None and deployment.record.people is None:
        yield (
            f"record.sites is {sites}, but record.people is not stated; give the most examples of "
            "one person at a client too"
        )
    population = deployment.participation.population
    if sites is not None and population and sites > population:
        yield (
            f"record.sites is {sites}, more than participation.population, {population}; give at "
            "most as many"
        )
    if sizes and held and max(sizes) > held:
        yield (
            f"sizes has a client of {max(sizes)} examples, more than record.examples_per_client, "
            f"{held}; give the number that the largest client holds"
        )


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= CLOSE * max(one, other)


def _range(low: float, high: float) -> str:
    return f"{low:g}" if _same(low, high) else f"{low:g} to {high:g}"
