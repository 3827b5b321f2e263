"""What an assessment is about: attack, defense, model and attacker as records name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from leakbound import registry
from leakbound._util.text import plain
from leakbound.assess.criterion import Criterion
from leakbound.assess.record import (
    Assessment,
    AttackInfo,
    DataInfo,
    DefenseInfo,
    ModelInfo,
    Threat,
)
from leakbound.attacks import settings_hash
from leakbound.attacks.base import Attack
from leakbound.core import Observation, Task, ThreatModel
from leakbound.defenses import Chain
from leakbound.losses import named
from leakbound.registry import Spec


def header(
    experiment: str,
    attack: AttackInfo,
    defense: DefenseInfo,
    model: ModelInfo,
    observation: Observation,
    criterion: Criterion,
    *,
    source: str,
    seed: int,
) -> Assessment:
    """An assessment without results, of an attack on an update in memory.

    `source` names the data, and `seed` every draw for the bounds.
    """
    return Assessment(
        experiment=experiment,
        attack=attack,
        defense=defense,
        model=model,
        data=DataInfo(
            source=source,
            domain=criterion.whole.name,
            shape=tuple(observation.input_shape),
            classes=observation.task.label_range,
        ),
        batch_size=observation.cohort[0],
        clients=len(observation.cohort),
        seed=seed,
        threat=threat_info(observation.threat),
        criterion=criterion.info,
    )


def attack_info(attack: Attack, name: str | None = None) -> AttackInfo:
    """An attack by its name in the registry, or by that of its class."""
    name = name or type(attack).__name__
    return AttackInfo(
        name=name,
        settings=repr(attack),
        hash=settings_hash(attack),
    )


def defense_info(
    defense: Chain,
    links: Sequence[Spec] | None = None,
) -> DefenseInfo:
    """A defense by the names and settings of its links; by default those of their classes."""
    links = links_of(defense) if links is None else links
    return DefenseInfo(
        name=defense_name(links),
        parameters=plain(defense_parameters(links)),
        settings=repr(defense),
        guarantee=defense.guarantee.value,
        data_dependent_law=defense.data_dependent_law,
    )


def links_of(defense: Chain) -> tuple[Spec, ...]:
    return tuple(
        Spec(
            registry.snake(type(link).__name__),
            tuple((f.name, plain(getattr(link, f.name))) for f in fields(link) if f.init),
        )
        for link in defense.links
    )


def defense_name(links: Sequence[Spec]) -> str:
    """`none`, a link's name, or several joined by `+`."""
    return "+".join(link.name for link in links) or "none"


def defense_parameters(links: Sequence[Spec]) -> dict[str, Any]:
    """All settings of a chain, with their link's name if there are several links."""
    if len(links) == 1:
        return links[0].parameters
    names = [link.name for link in links]
    parameters: dict[str, Any] = {}
    for i, link in enumerate(links):
        name = link.name if names.count(link.name) == 1 else f"{link.name}[{i}]"
        parameters |= {f"{name}.{key}": value for key, value in link.settings}
    return parameters


def model_info(name: str, task: Task) -> ModelInfo:
    """A model in memory."""
    size = len(task.parameters)
    return ModelInfo(
        name=name,
        parameters={},
        size=size,
        loss=named(task.loss).name,
    )


def threat_info(threat: ThreatModel) -> Threat:
    return Threat(**plain(threat))
