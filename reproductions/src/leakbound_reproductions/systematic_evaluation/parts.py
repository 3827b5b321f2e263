"""The audits of the systematic evaluation: one for each question, on each set of images."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from leakbound import audit
from leakbound.audit import defense_name
from leakbound.audit.plan import (
    DataSpec,
    Plan,
    UtilitySpec,
    attack_info,
)
from leakbound.core import Server
from leakbound.registry import Spec
from leakbound.risk import ErrorBoundSpec
from leakbound_reproductions.outcome import SCALES


def _dropout(rate: float) -> tuple[Spec, ...]:
    return (Spec("gradient_dropout", (("rate", rate),)),)


def _prune(rate: float) -> tuple[Spec, ...]:
    return (Spec("magnitude_pruning", (("rate", rate),)),)


DIGITS = "digits"
COLOR = "color"
FEATURE_BATCHES = (1, 2, 4, 8)
FEW = 3
"""Rounds of parts that no claim rests on: features, further defenses and variants of the attack."""
NOISES = (0.001, 0.01, 0.1, 1.0)
ABLATED: tuple[tuple[Spec, ...], ...] = (
    (),
    (Spec("clip", (("clip_norm", 2.0),)),),
    (Spec("gaussian_noise", (("noise_std", 0.01),)),),
    _prune(0.9),
)
"""The defenses under which single parts of the attack are removed."""
FEATURE_DEFENSES: tuple[tuple[Spec, ...], ...] = (
    (),
    *map(_prune, (0.3, 0.5, 0.7)),
    *((Spec("clip", (("clip_norm", c),)),) for c in (2.0, 8.0)),
    *((Spec("gaussian_noise", (("noise_std", s),)),) for s in (0.001, 0.01, 0.1)),
    *((Spec("local_aggregation", (("steps", k), ("learning_rate", 0.01))),) for k in (3, 5)),
)
"""Those of the paper's table 2."""
PRUNED_FEATURES = "pruned-features"
"""The part that claim 2-5 rests on."""
PRUNED_BATCHES = (1, 2)
PRUNED = _prune(0.7)
PRUNED_LABEL = "prune 0.7"
"""The smallest pruning rate whose features have large errors in table 2, at each batch size."""
SOTERIA = (Spec("soteria", (("rate", 0.8), ("layer", "inner"))),)

HONEST = ("deep prior + features", "strong matching", "inverting gradients", "features first")
"""The attacks of an honest server's plan, in its order."""
MALICIOUS = ("deep prior + tensor features", "robbing the fed", "trap weights")
PUBLISHED = "published"
"""The part with an attack as published, by a server that does not know the defense."""
AS_PUBLISHED = "robbing the fed, as published"
TENSORS = {
    "tensor": "leakbound_reproductions.attacks.tensor:TensorMethod",
    "tensor_fit": "leakbound_reproductions.attacks.tensor:fitted",
}
"""The methods that find the features of a malicious head, as `features` names them."""
FAMILIES = (
    "none",
    "clip",
    "gradient_dropout",
    "gaussian_noise",
    "magnitude_pruning",
    "local_aggregation",
)
"""The paper's defenses; a plan's others are measured in `FEW` rounds."""
BEHIND_CLAIMS = ("honest", "malicious", PUBLISHED, "ablation", PRUNED_FEATURES)
FURTHER = ("variants", "others", "others-malicious")
"""The parts of further defenses and variants."""
LONGER = "longer"
LONGER_ABLATION = "longer-ablation"
"""The parts with `TIMES` the steps of the plan, which then decide claims."""
TIMES = 4
LENGTHENED = "cpu"
"""How much longer, and at which scale."""
LONG = f"{HONEST[0]}, longer"
LONGER_DEFENSES: dict[str, tuple[tuple[Spec, ...], ...]] = {
    DIGITS: (_dropout(0.9), _prune(0.9), _prune(0.99)),
    COLOR: (*map(_dropout, (0.3, 0.5, 0.7, 0.9)), *map(_prune, (0.3, 0.5, 0.7, 0.9, 0.99))),
}
"""Where the first attack's error with the plan's steps is less than twice that of the strongest
considered attack. Only there could more steps change which attack is the strongest."""
COMPARED = 2
"""Variants of the ablation that a claim compares: the first ones."""
ABLATION: dict[str, dict[str, Any]] = {
    HONEST[0]: {},
    "without features": {"features": "none"},
    "without reweighting": {"distance": "cosine"},
    "without features and reweighting": {"features": "none", "distance": "cosine"},
    "without total variation": {"total_variation": 0.0, "noise_variation": 0.0},
    "pixels for the deep prior": {"image": "pixels", "signed": True, "learning_rate": 0.1},
}
"""The first attack with one part changed (the paper's table 6 has the first, second and fourth)."""


@dataclass(frozen=True)
class Part:
    """One audit of the study and what its attacks are called."""

    data: str
    name: str
    plan: Plan
    attacks: dict[str, str]


PAPER = SCALES[2]
EPOCHS = (0, 1, 2, 3)
"""How long the paper's attacked models are trained (appendix I)."""
EPOCH_BATCH = 64
"""The examples of one of the `train_steps`, as many as in the paper's training."""
GIAS = "GIAS"
PARTLY = "leakbound_reproductions.attacks.tensor:partly_random"
"""The paper's head: 2,048 hidden units stay as they are, and the others are random."""
PLACES = {
    "tensors": "table 2",
    PRUNED_FEATURES: "claim 2-5",
    PUBLISHED: "table 4: Robbing the Fed",
    "trained": "appendix I: 0 to 3 epochs",
    "large-batches": "tables 3 and 6",
    "ablation": "tables 6 and 8, B = 4; claim 2-7",
    "malicious": "tables 4 and 7: the paper's attack",
    "honest": "tables 4 and 5, figure 3: the other attacks",
    "features": "beyond the paper: table 2 by an honest server",
    "fits": "beyond the paper: table 2 with a fit",
    "variants": "beyond the paper: more variants",
    "others": "beyond the paper: more defenses",
    "others-malicious": "beyond the paper: more defenses",
    "floors": "beyond the paper: lower bounds",
}
"""What of the paper each part of its own scale measures, in the order in which they run."""


def base(scale: str) -> Plan:
    """The plan of a scale's file: the honest server on digits.

    Raises:
        ValueError: no such scale.
    """
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; give one of {', '.join(SCALES)}")
    text = resources.files(__package__).joinpath(f"{scale}.toml").read_text("utf-8")
    return audit.parse(tomllib.loads(text))


def parts(
    scale: str,
    color: str,
    *,
    steps: int | None = None,
    seeds: int | None = None,
    lpips_weights: str | None = None,
) -> list[Part]:
    """Every audit of the study, digits first; `color` is the source of 32 x 32 color images.

    At `minutes`, only those that claims rest on. At `cpu`, further defenses and variants, on digits
    only. Longer searches exist only at `cpu`: those of `minutes` are not judged, and those of
    `paper` have the paper's steps. At `paper`, color images only, as in the paper; the other
    arguments are for this scale.

    Args:
        scale: one of `SCALES`.
        color: the data source.
        steps: of every search; None: as in the plan.
        seeds: rounds, at most the plan's; None: all.
        lpips_weights: a file of LPIPS weights.
    """
    if scale == PAPER:
        whole = base(scale)
        plan = replace(
            whole,
            data=replace(whole.data, source=color),
            seeds=whole.seeds[:seeds],
            attacks=tuple(shortened(attack, steps) for attack in whole.attacks),
            lpips_weights=lpips_weights,
        )
        every = _of(plan) | _paper_only(plan, steps)
        return [_part(COLOR, name, *every[name]) for name in PLACES]
    found = []
    for data in (DIGITS, COLOR):
        plan = base(scale)
        if data == COLOR:
            plan = replace(plan, data=DataSpec(color, size=32, limit=5000))
        every = _of(plan) | (_longer(plan, LONGER_DEFENSES[data]) if scale == LENGTHENED else {})
        for name, (own, labels) in every.items():
            if scale == SCALES[0] and name not in BEHIND_CLAIMS:
                continue
            if (scale, data) == (LENGTHENED, COLOR) and name in FURTHER:
                continue
            found.append(_part(data, name, own, labels))
    return found


def _part(data: str, name: str, plan: Plan, labels: tuple[str, ...]) -> Part:
    hashes = (attack_info(spec).hash for spec in plan.attacks)
    return Part(data, name, plan, dict(zip(hashes, labels, strict=True)))


def _of(plan: Plan) -> dict[str, tuple[Plan, tuple[str, ...]]]:
    """Each audit with the names of its attacks."""
    strongest = plan.attacks[0]
    still = replace(plan, utility=UtilitySpec(rounds=0))
    planted = (
        _changed(strongest, {"features": TENSORS["tensor_fit"]}),
        Spec("robbing_the_fed"),
        Spec("trap_weights"),
    )
    threat = replace(plan.threat, server=Server.MALICIOUS)
    evil = replace(still, threat=threat, attacks=planted)
    ours = tuple(own for own in plan.defenses if defense_name(own) in FAMILIES)
    unaware = replace(evil, threat=replace(threat, defense_known=False), attacks=planted[1:2])
    others = (*(own for own in plan.defenses if own not in ours), SOTERIA)
    first = plan.seeds[:FEW]
    noises = tuple((Spec("gaussian_noise", (("noise_std", s),)),) for s in NOISES)
    few = replace(still, defenses=FEATURE_DEFENSES, batch_sizes=FEATURE_BATCHES, seeds=first)
    reading = replace(few, attacks=(_reading("cocktail_party"),))
    tensors = replace(few, threat=threat, attacks=tuple(map(_reading, TENSORS.values())))
    pruned = replace(
        still,
        threat=threat,
        attacks=(_reading(TENSORS["tensor"]),),
        defenses=((), PRUNED),
        batch_sizes=PRUNED_BATCHES,
    )
    floors = replace(
        still,
        attacks=(strongest, plan.attacks[2]),
        defenses=noises,
        batch_sizes=(1,),
        error_bound=ErrorBoundSpec(),
    )
    apart = tuple(_changed(strongest, change) for change in ABLATION.values())
    ablation = replace(still, defenses=ABLATED, batch_sizes=(4,))
    labels = tuple(ABLATION)
    return {
        "honest": (replace(plan, defenses=ours), HONEST),
        "malicious": (replace(evil, defenses=ours), MALICIOUS),
        PUBLISHED: (replace(unaware, defenses=ours), (AS_PUBLISHED,)),
        "ablation": (replace(ablation, attacks=apart[:COMPARED]), labels[:COMPARED]),
        PRUNED_FEATURES: (pruned, ("tensor",)),
        "variants": (replace(ablation, attacks=apart[COMPARED:], seeds=first), labels[COMPARED:]),
        "others": (replace(plan, defenses=others, seeds=first), HONEST),
        "others-malicious": (replace(evil, defenses=others, seeds=first), MALICIOUS),
        "floors": (floors, (HONEST[0], HONEST[2])),
        "features": (reading, ("cocktail_party",)),
        "tensors": (tensors, tuple(TENSORS)),
    }


def _paper_only(plan: Plan, steps: int | None) -> dict[str, tuple[Plan, tuple[str, ...]]]:
    """What only the paper's own scale has; some parts replace those of the other scales."""
    (model,) = plan.models
    still = replace(plan, utility=UtilitySpec(rounds=0))
    threat = replace(plan.threat, server=Server.MALICIOUS)
    evil = replace(still, threat=threat, defenses=((),))
    ours, plain, *_ = (
        _changed(plan.attacks[0], {"features": PARTLY} | change) for change in ABLATION.values()
    )
    neither = _changed(plain, ABLATION["without features and reweighting"])
    gias = shortened(Spec("gias", (("latent_steps", 3000), ("weight_steps", 7000))), steps)
    large = (plan.attacks[2], gias, ours, plain, neither)
    words = (HONEST[2], GIAS, MALICIOUS[0], "without features", "without features and reweighting")
    public = len(audit.PlanContext(plan.data).splits["public"])
    epoch = math.ceil(public / EPOCH_BATCH)
    models = tuple(replace(model, train_steps=epochs * epoch) for epochs in EPOCHS)
    few = replace(evil, defenses=FEATURE_DEFENSES, batch_sizes=FEATURE_BATCHES)
    few = replace(few, seeds=plan.seeds[:FEW])
    smooth = replace(model, settings=tuple((dict(model.settings) | {"activation": "gelu"}).items()))
    floors, labels = _of(replace(plan, models=(smooth,)))["floors"]
    return {
        "tensors": (replace(few, attacks=(_reading(PARTLY),)), ("tensor",)),
        "fits": (replace(few, attacks=(_reading(TENSORS["tensor_fit"]),)), ("tensor_fit",)),
        "trained": (replace(evil, models=models, batch_sizes=(2,), attacks=(ours,)), MALICIOUS[:1]),
        "large-batches": (replace(evil, batch_sizes=(8, 16, 32), attacks=large), words),
        "floors": (floors, labels),
    }


def shortened(attack: Spec, steps: int | None) -> Spec:
    """The attack with `steps` in all, split among its stages as before."""
    whole = {key: value for key, value in attack.parameters.items() if key.endswith("steps")}
    if steps is None or not whole:
        return attack
    total = sum(whole.values())
    return _changed(attack, {key: max(1, steps * own // total) for key, own in whole.items()})


def _longer(plan: Plan, defenses: tuple[tuple[Spec, ...], ...]) -> dict[str, Any]:
    """The searches that decide claims, with more steps."""
    steps = TIMES * plan.attacks[0].parameters["steps"]
    still = replace(plan, utility=UtilitySpec(rounds=0))
    whole, without = (
        _changed(plan.attacks[0], change | {"steps": steps})
        for change in tuple(ABLATION.values())[:COMPARED]
    )
    pair = replace(still, attacks=(whole, without), defenses=ABLATED[1:], batch_sizes=(4,))
    return {
        LONGER: (replace(still, attacks=(whole,), defenses=defenses), (LONG,)),
        LONGER_ABLATION: (pair, tuple(ABLATION)[:COMPARED]),
    }


def _changed(spec: Spec, change: Mapping[str, Any]) -> Spec:
    return Spec(spec.name, tuple((spec.parameters | dict(change)).items()))


def _reading(features: str) -> Spec:
    """Only the features: one step of the search that follows."""
    return Spec("gradient_matching", (("features", features), ("steps", 1)))
