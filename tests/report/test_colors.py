"""The page's colors: contrast in both schemes, and lines told apart by the color-blind.

Nothing here shares code with the report: colors are read from the style sheet as text.
"""

from __future__ import annotations

import itertools
import re
from importlib import resources

import numpy as np
import pytest

from leakbound.report.figures import COLORS

TEMPLATES = resources.files("leakbound.report") / "templates"
SHARED = "".join((TEMPLATES / name).read_text("utf-8") for name in ("page.css", "screen.css"))
CSS = (TEMPLATES / "report.css").read_text("utf-8")
VARIABLES = {
    name: {"light": light, "dark": dark}
    for name, light, dark in re.findall(
        r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS
    )
}
SCHEMES = ("light", "dark")
TEXT = [
    *((ink, ground) for ink in ("ink", "quiet", "link") for ground in ("ground", "card")),
    *((word, ground) for word in ("exposed", "undecided", "average", "protected", "danger")
      for ground in (f"{word}-ground", "card", "ground")),
]  # fmt: skip
LINES = [name for name in VARIABLES if name.startswith("line-")]
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHTS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
     [0.0193339, 0.1191920, 0.9503041]]
)  # fmt: skip


def linear(color):
    parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """As WCAG 2 defines it."""
    dark, light = sorted(float(XYZ[1] @ linear(color)) for color in (one, other))
    return (light + 0.05) / (dark + 0.05)


def lab(rgb):
    """CIE L*a*b* of linear RGB under D65."""
    ratio = XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest(colors, sight):
    seen = [lab(SIGHTS[sight] @ linear(color)) for color in colors]
    return min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))


def test_the_measures_are_the_known_ones():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # a WCAG example
    assert lab(linear("#ffffff")) == pytest.approx([100, 0, 0], abs=0.02)
    assert lab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("ink", "ground"), TEXT)
def test_text_has_contrast(scheme, ink, ground):
    assert contrast(VARIABLES[ink][scheme], VARIABLES[ground][scheme]) >= 4.5


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", [*LINES, "control"])
def test_lines_and_controls_have_contrast(scheme, name):
    for ground in ("card", "ground"):
        assert contrast(VARIABLES[name][scheme], VARIABLES[ground][scheme]) >= 3


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sight", SIGHTS)
def test_lines_are_told_apart_by_everyone(scheme, sight):
    """At least 30 in CIE 1976 units; the palette of Okabe and Ito has 9.7 with its gray."""
    assert nearest([VARIABLES[name][scheme] for name in LINES], sight) > 30


def test_drawings_take_the_colors_of_the_page():
    assert tuple(VARIABLES[name]["light"] for name in LINES) == COLORS


def test_a_palette_of_red_and_green_would_fail():
    assert nearest(["#c03a00", "#5a7a00"], "normal") > 50
    assert nearest(["#c03a00", "#5a7a00"], "deuteranopia") < 30


def test_every_color_of_the_page_is_one_of_these():
    """No rule sets a color of its own, but for print and the shade behind a dialog."""
    rules = SHARED + CSS[CSS.index("[hidden]") : CSS.index("@media print")]
    assert set(re.findall(r"#[0-9a-f]{3,6}\b", rules)) <= {"#808080"}
