"""What `leakbound capture` saw in an app, as text in an update's metadata and back.

Norms and noise are in units of the weights, so they hold for every learning rate. Metadata are not
trusted: only clips and noise with finite numbers are read, and nothing in them is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from leakbound.captured.capture import Capture
from leakbound.defenses import (
    Chain,
    Clip,
    ClipCoordinates,
    ClipExamples,
    Defense,
    GaussianMechanism,
    GaussianNoise,
    LaplaceNoise,
    Mean,
    chain,
)

KEY = "defense"
FROM = "defense_from"
NOTE = "defense_note"
OPTIMIZER = "optimizer"
OPTIMIZER_NOTE = "optimizer_note"
LINKS: dict[str, tuple[type[Defense], str | None]] = {
    "clip": (Clip, "clip_norm"),
    "clip_coordinates": (ClipCoordinates, "limit"),
    "clip_examples": (ClipExamples, "clip_norm"),
    "mean": (Mean, None),
    "gaussian_mechanism": (GaussianMechanism, None),
    "gaussian_noise": (GaussianNoise, "noise_std"),
    "laplace_noise": (LaplaceNoise, "noise_std"),
}
"""What can be declared, and the setting that has the update's unit."""
MOST = 4096
"""Characters of a declared defense."""


def scaled(link: Defense, factor: float) -> Defense:
    """The link for rows that are `factor` times as large.

    Raises:
        ValueError: it is none of `LINKS`.

    Example:
        >>> scaled(Clip(2.0), 0.5)
        Clip(clip_norm=1.0)
    """
    for kind, unit in LINKS.values():
        if type(link) is kind:
            return replace(link, **{unit: getattr(link, unit) * factor}) if unit else link
    raise ValueError(f"{link!r} is neither a clip nor noise of a fixed level; give --defense")


def text_of(links: Sequence[Defense]) -> str:
    """A chain as text.

    Example:
        >>> text_of([Clip(0.5), GaussianNoise(0.1)])
        '[{"name": "clip", "clip_norm": 0.5}, {"name": "gaussian_noise", "noise_std": 0.1}]'
    """
    names = {kind: name for name, (kind, _) in LINKS.items()}
    plain = [
        {"name": names[type(link)], **{f.name: getattr(link, f.name) for f in fields(link)}}
        for link in links
    ]
    return json.dumps(plain)


def optimizer_text(row: Mapping[str, Any]) -> str:
    """An optimizer and its settings as text.

    Example:
        >>> optimizer_text({"name": "adam", "betas": [0.9, 0.99]})
        'adam,betas=[0.9, 0.99]'
    """
    settings = [f"{key}={json.dumps(value)}" for key, value in row.items() if key != "name"]
    return ",".join([row["name"], *settings])


def words_of(about: Mapping[str, str]) -> str:
    """What metadata declare, in a sentence; empty if nothing."""
    words = [about[name] for name in (NOTE, OPTIMIZER_NOTE) if name in about]
    if OPTIMIZER in about:
        words.insert(0, f"the client trained with {about[OPTIMIZER]}")
    if KEY in about:
        words.insert(0, f"declared defense: {about[KEY]} ({about.get(FROM, 'the metadata')})")
    return "; ".join(words)


def of(capture: Capture, rate: float) -> Chain | None:
    """What a capture's metadata declare, for rows (change of the weights) / rate; None: nothing.

    Raises:
        ValueError: the metadata hold something else.
    """
    text = capture.about.get(KEY)
    if text is None:
        return None
    try:
        if len(text) > MOST:
            raise ValueError(f"it has over {MOST} characters")
        return chain(*(scaled(_link(row), 1 / rate) for row in json.loads(text)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{capture.name}: the metadata declare the defense {text[:60]!r}, which cannot be read "
            f"({type(error).__name__}: {str(error)[:100]}); give --defense (none if there is none)"
        ) from None


def _link(row: Any) -> Defense:
    values = dict(row)
    kind, _ = LINKS[values.pop("name")]  # no other class is found by name
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is no number")
    return kind(**values)
