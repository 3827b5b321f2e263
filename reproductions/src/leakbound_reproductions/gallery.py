"""Reconstructions of a batch as an audit stored them, below the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from leakbound.assess import Assessment
from leakbound_reproductions import kept
from leakbound_reproductions.figure_values import Value

TRUTH = "truth"
FOUND = "reconstruction"
"""What a record calls its pictures."""


@dataclass(frozen=True)
class Strip:
    """What an attack made of a batch under a defense.

    Attributes:
        label: the defense.
        record: of an audit that stored pictures.
        audit: its folder.
    """

    label: str
    record: Assessment
    audit: Path


def draw(columns: Mapping[str, Sequence[Strip]], path: Path) -> bool:
    """A column for each attack: the images, then what it made of them under each defense.

    The values beside the picture are the PSNR (dB) of each image. False without reconstructions.
    """
    columns = {attack: shown for attack, strips in columns.items() if (shown := _shown(strips))}
    if not columns:
        return False
    most = max(map(len, columns.values()))
    with matplotlib.rc_context():
        figure = Figure(figsize=(5 * len(columns), 1.2 * (1 + most)), layout="constrained")
        panels = figure.subplots(1 + most, len(columns), squeeze=False)
        for axes in panels.flat:
            axes.set_axis_off()
        for place, (attack, strips) in enumerate(columns.items()):
            first, *others = panels[:, place]
            _show(first, attack, strips[0], TRUTH)
            for axes, strip in zip(others, strips, strict=False):
                title = f"{strip.label}: {fmean(_scores(strip)):.1f} dB"
                _show(axes, title, strip, FOUND)
        values = [
            Value(attack, strip.label, number, score)
            for attack, strips in columns.items()
            for strip in strips
            for number, score in enumerate(_scores(strip))
        ]
        kept.figure(figure, path, 100, values)
    return True


def _shown(strips: Sequence[Strip]) -> list[Strip]:
    """Those with a reconstruction: an attack may not apply under a defense."""
    return [strip for strip in strips if FOUND in strip.record.pictures and _scores(strip)]


def _scores(strip: Strip) -> list[float]:
    return [score for score in strip.record.scores if score is not None]


def _show(
    axes: Axes,
    title: str,
    strip: Strip,
    which: str,
) -> None:
    picture = imread(strip.audit / "pictures" / strip.record.pictures[which])
    axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize=8)
