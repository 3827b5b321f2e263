"""What a claim of differential privacy has to say, one line a question; what is not known says so.

The questions follow NIST SP 800-226 (2025), in our own words and choice. A line is
"computed" from stated numbers, "by construction" of the mechanism or of the simulation, "measured",
"declared" or "not stated".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from leakbound.report.evidence_text import NOT_STATED
from leakbound.report.evidence_told import Item, item

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
_MECHANISM = re.compile(r"GaussianMechanism\(noise_multiplier=([0-9.eE+-]{1,30})\)")
_CLIP = re.compile(r"ClipExamples\(clip_norm=([0-9.eE+-]{1,30})\)")
UNIT = "one example of a client's batch"
NEIGHBORS = "one example added or removed; the batch size is public and stays the divisor"
FLOATS = (
    "noise is drawn and added in floating point; the proof is for real numbers, and released "
    "digits can tell more (docs/sharp_edges/floating_point_noise.md)"
)


def mechanism(settings: str) -> tuple[float, float] | None:
    """Noise multiplier and clip norm of a chain with one Gaussian mechanism on clipped examples.

    None for every other chain, of which nothing is computed.

    Example:
        >>> mechanism("ClipExamples(clip_norm=2.0) → Mean() → GaussianMechanism(noise_multiplier="
        ...           "0.5)")
        (0.5, 2.0)
    """
    noises, clips = _MECHANISM.findall(settings), _CLIP.findall(settings)
    if (len(noises), len(clips)) != (1, 1):
        return None
    try:
        noise, clip = float(noises[0]), float(clips[0])
    except ValueError:
        return None
    return (noise, clip) if 0 < noise < 1e100 and 0 < clip < 1e100 else None


def epsilons(found: Mapping[str, Any] | None) -> str | None:
    """Epsilon and delta in words; None where nothing is known of them."""
    if found is None:
        return None
    one, other = (_epsilon(found.get(key)) for key in ("add_remove", "replace"))
    words = f"epsilon {one} at delta {found['delta']:g}, one example added or removed"
    return words if other is None else f"{words}; {other} at that delta, one replaced"


def of_defense(
    defense: Mapping[str, Any],
    private: Mapping[str, Any] | None,
    statements: Mapping[str, str],
    *,
    utility: str | None,
    statistics: bool,
) -> list[Item]:
    """Every question for one defense of a run that claims differential privacy.

    Args:
        defense: as records hold it.
        private: epsilons of one release, if its mechanism is known.
        statements: what was declared.
        utility: what was measured of it, in words.
        statistics: the batch's statistics were told beside the release.
    """
    known = mechanism(str(defense.get("settings", "")))
    clip = None if known is None else known[1]
    chosen = (
        "noise or mask depend on the private batch" if defense.get("data_dependent_law") else None
    )
    answers = {
        "unit_of_privacy": beside("unit_of_privacy", UNIT, statements),
        "parameters": item("", epsilons(private), "computed", "of one release, from the settings"),
        "neighboring_relation": beside("neighboring_relation", NEIGHBORS, statements),
        "mechanism": item("", str(defense["settings"]), "by construction", "the records"),
        "sensitivity": _clipped(clip),
        "composition": item("", "none: one release in one round", "by construction", "the audit"),
        "accountant": item(
            "",
            None if known is None else "the trade-off curve of one Gaussian mechanism, exact",
            "computed",
            "leakbound.bounds.conversions",
        ),
        "sampling": item("", "none: every example of the batch takes part", "by construction",
                         "the audit"),
        "trust_model": _simulated(statements),
        "randomness": item(
            "",
            "a seeded generator: EXPERIMENT ONLY. Whoever has the seed subtracts the noise",
            "by construction",
            "the audit's streams are named by the plan's seeds",
        ),
        "floating_point": _constructed(FLOATS),
        "hyperparameters": item("", chosen, "by construction", "the records")
        if chosen
        else _asked("hyperparameters", statements),
        "beyond": _beyond(statistics),
        "utility": item("", utility, "measured", "the trainings of this run"),
    }  # fmt: skip
    return lines(answers, statements)


def lines(answers: Mapping[str, Item], statements: Mapping[str, str]) -> list[Item]:
    """All questions in their order; those without an answer are asked of the statements."""
    answers = {"meaning": _constructed(MEANING), **answers}
    found = []
    for name, words in QUESTIONS.items():
        answer = answers.get(name) or _asked(name, statements)
        found.append({**answer, "name": name, "words": words})
    return found


MEANING = (
    "whatever is done with what was released, a test of whether one unit took part gains at most a "
    "factor of exp(epsilon) in its odds, but for a chance of delta; several releases add up"
)


def beside(name: str, words: str, statements: Mapping[str, str]) -> Item:
    """What the mechanism covers, and beside it what somebody declared."""
    given = statements.get(name)
    return _constructed(f"{words}; declared: {given}" if given else words)


def _asked(name: str, statements: Mapping[str, str]) -> Item:
    given = statements.get(name) or None
    return item("", given, "declared", "--declare" if given else f"nobody: --declare {name}=...")


def _constructed(words: str) -> Item:
    return item("", words, "by construction", "the mechanism")


def _clipped(clip: float | None) -> Item:
    words = None
    if clip is not None:
        words = (
            f"{clip:g} in L2 norm for the sum of clipped gradients, one example added or removed; "
            f"{2 * clip:g}, one replaced"
        )
    return item("", words, "by construction", "the clip norm in the settings")


def _simulated(statements: Mapping[str, str]) -> Item:
    given = statements.get("trust_model")
    if given:
        return _asked("trust_model", statements)
    return item("", None, "declared", "in the simulation each client adds its own noise and the "
                "server is the attacker; of the deployment: --declare trust_model=...")  # fmt: skip


def _beyond(statistics: bool) -> Item:
    parts = ["other rounds, properties of the whole batch, several examples of one person"]
    if statistics:
        parts.insert(0, "the batch's statistics, which were told beside the release without noise")
    return _constructed("; ".join(parts))


def _epsilon(value: float | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else f"{value:.4g}"


def unanswered(items: Sequence[Item]) -> int:
    """How many questions are not stated."""
    return sum(one["status"] == NOT_STATED for one in items)
