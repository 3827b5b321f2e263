"""What a claim of differential privacy has to say, one line a question; what is not known says so.

The questions follow NIST SP 800-226 (2025), in our own words and choice. A line is
"computed" from stated numbers, "by construction" of the mechanism or of the simulation, "measured",
"declared" or "not stated".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import msgspec

from leakbound.assess.record import DefenseInfo
from leakbound.report.evidence.auxiliary import asked, item
from leakbound.report.evidence.parts import NOT_STATED, Epsilons, Item, PrivacyClaim

Accountant = Callable[[float], Epsilons]
"""Epsilons of one release with a noise multiplier."""
QUESTIONS = {
    "unit_of_privacy": "Unit of privacy",
    "parameters": "Epsilon and delta",
    "meaning": "What they mean",
    "neighboring_relation": "Neighboring relation",
    "mechanism": "Mechanism",
    "sensitivity": "Sensitivity",
    "composition": "Composition",
    "privacy_budget": "Privacy budget over later releases",
    "accountant": "Accountant",
    "sampling": "Sampling and participation",
    "trust_model": "Trust model",
    "randomness": "Source of randomness",
    "floating_point": "Floating point",
    "side_channels": "Side channels",
    "hyperparameters": "Parameters that depend on data",
    "beyond": "What the guarantee leaves out",
    "utility": "Utility",
    "bias": "Bias",
    "data_collection": "Exposure before the mechanism",
    "data_security": "Data security and access control",
}
# The settings are a stranger's text, so the number of digits has a limit.
_MECHANISM = re.compile(r"GaussianMechanism\(noise_multiplier=([0-9.eE+-]{1,30})\)")
_CLIP = re.compile(r"ClipExamples\(clip_norm=([0-9.eE+-]{1,30})\)")
MEANING = (
    "whatever is done with what was released, a test of whether one unit took part gains at most a "
    "factor of exp(epsilon) in its odds, but for a chance of delta; several releases add up"
)
NEIGHBORS = "one example added or removed; the batch size is public and stays the divisor"
FLOATS = (
    "noise is drawn and added in floating point; the proof is for real numbers, and released "
    "digits can reveal more (docs/sharp_edges/floating_point_noise.md)"
)


def accountant_of(epsilon: Callable[..., float], delta: float) -> Accountant:
    """`epsilon`: that of `leakbound.bounds.conversions`, which this package may not import."""

    def of_release(noise: float) -> Epsilons:
        both = (epsilon(noise, delta=delta, replace=replace) for replace in (False, True))
        return Epsilons(delta, *(one if math.isfinite(one) else "infinite" for one in both))

    return of_release


def mechanism(settings: str) -> tuple[float, float] | None:
    """Noise multiplier and clip norm of a chain with one Gaussian mechanism on clipped examples.

    None for every other chain, of which nothing is computed.
    """
    # Two mechanisms compose, and what they compose to depends on more than their settings.
    noises = _MECHANISM.findall(settings)
    clips = _CLIP.findall(settings)
    if (len(noises), len(clips)) != (1, 1):
        return None
    try:
        noise = float(noises[0])
        clip = float(clips[0])
    except ValueError:
        return None
    return (noise, clip) if 0 < noise < 1e100 and 0 < clip < 1e100 else None


def of_defense(
    claim: str,
    defense: DefenseInfo,
    epsilons: Epsilons | None,
    statements: Mapping[str, str],
    *,
    utility: str | None,
    statistics: bool,
) -> PrivacyClaim:
    """Every question for one defense of a run that claims differential privacy.

    `epsilons` are of one release, if its mechanism is known; `statistics`: the batch's are known.
    """
    known = mechanism(defense.settings)
    audit = "the audit"
    sensitivity = None
    if known is not None:
        _, clip = known
        sensitivity = (
            f"{clip:g} in L2 norm for the sum of clipped gradients, one example added or removed; "
            f"{2 * clip:g}, one replaced"
        )
    answers = [
        _constructed("meaning", MEANING),
        _covered("unit_of_privacy", "one example of a client's batch", statements),
        item("parameters", _words(epsilons), "computed", "of one release, from the settings"),
        _covered("neighboring_relation", NEIGHBORS, statements),
        item("mechanism", defense.settings, "by construction", "the records"),
        item("sensitivity", sensitivity, "by construction", "the clip norm in the settings"),
        item("composition", "none: one release in one round", "by construction", audit),
        item("accountant", known and "the trade-off curve of one Gaussian mechanism, exact",
             "computed", "leakbound.bounds.conversions"),
        item("sampling", "none: every example of the batch takes part", "by construction", audit),
        item("randomness", "a seeded generator: EXPERIMENT ONLY. Whoever has the seed subtracts "
             "the noise", "by construction", "the audit's streams are named by the plan's seeds"),
        _constructed("floating_point", FLOATS),
        _constructed("beyond", "the batch's statistics, which are known besides the release "
                     "without noise; " * statistics + "other rounds, properties of the whole "
                     "batch, several examples of one person"),
        item("utility", utility, "measured", "the trainings of this run"),
    ]  # fmt: skip
    if not statements.get("trust_model"):
        source = "in the simulation each client adds its own noise and the server is the attacker"
        more = f"{source}; of the deployment: --declare trust_model=..."
        answers.append(item("trust_model", None, "declared", more))
    if defense.data_dependent_law:
        chosen = "noise or mask depend on the private batch"
        answers.append(item("hyperparameters", chosen, "by construction", "the records"))
    by_name = {one.name: one for one in answers}
    # All questions in their order; those without an answer are asked of the statements.
    items = [
        msgspec.structs.replace(by_name.get(name) or asked(name, statements), words=words)
        for name, words in QUESTIONS.items()
    ]
    open_ = sum(one.status == NOT_STATED for one in items)
    return PrivacyClaim(claim, epsilons, open_, tuple(items))


def _words(epsilons: Epsilons | None) -> str | None:
    if epsilons is None:
        return None
    one, other = (
        f"{value:.4g}" if isinstance(value, float) else value
        for value in (epsilons.add_remove, epsilons.replace)
    )
    words = f"epsilon {one} at delta {epsilons.delta:g}, one example added or removed"
    return words if other is None else f"{words}; {other} at that delta, one replaced"


def _covered(
    name: str,
    words: str,
    statements: Mapping[str, str],
) -> Item:
    """What the mechanism covers, and beside it what somebody declared."""
    stated = statements.get(name)
    return _constructed(name, f"{words}; declared: {stated}" if stated else words)


def _constructed(name: str, words: str) -> Item:
    return item(name, words, "by construction", "the mechanism")
