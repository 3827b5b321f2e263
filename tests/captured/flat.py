"""Attack a captured update with flat settings, as most tests name them."""

from dataclasses import fields

from leakbound import captured
from leakbound.captured import Output, Settings, TrainingInfo

TRAINING = {own.name for own in fields(TrainingInfo)}


def attack_update(update, model, *, before=None, kind="auto", truth=None, **given):
    """As `captured.attack_update`: every setting goes to the object that holds it."""
    if not isinstance(update, captured.Capture):
        update = captured.load(update, before, kind=kind)
    names = {"out": "folder", "name": "model", "pictures": "pictures"}
    output = Output(**{names[key]: given.pop(key) for key in [*given] if key in names})
    training = TrainingInfo(**{key: given.pop(key) for key in [*given] if key in TRAINING})
    settings = Settings(**given)
    return captured.attack_update(update, model, settings, training, truth=truth, output=output)
