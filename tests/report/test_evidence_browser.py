"""The evidence in a real Chromium: silent, alone, printable, and nothing cut off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leakbound.report import evidence
from leakbound.report.evidence.parts import Epsilons
from leakbound.report.folder import read

pytestmark = pytest.mark.browser

A4 = 688
"""Pixels between the margins of an A4 page."""
CUT = """() => [...document.querySelectorAll("table, pre, img, svg, .card, .facts")]
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture
def path(tmp_path, make_bounded):
    run = read(make_bounded(tmp_path / "run", hostile="<b>" + "long" * 60))
    known = Epsilons(1e-5, 1.0, 2.0)
    subject = evidence.of_run(run, {}, lambda noise: known, images=True)
    page = tmp_path / "evidence.html"
    page.write_text(evidence.page(evidence.document([subject], images=True), [run]), "utf-8")
    return page


@pytest.fixture
def show(browser, path) -> Iterator[object]:
    """Open the page; afterwards it must have been silent and must have asked for nothing else."""
    contexts, trouble, requests = [], [], []

    def open_page(**settings):
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []
    assert {url for url in requests if not url.startswith("data:")} == {path.as_uri()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_wide_screen(show, scheme):
    page = show(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    assert page.evaluate(CUT) == []
    assert page.evaluate("[...document.images].every(i => i.naturalWidth > 0)")


def test_a_narrow_screen_scrolls_tables_and_not_the_page(show):
    page = show(viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_print_is_whole(show):
    page = show(viewport={"width": A4, "height": 900})
    page.emulate_media(media="print")
    assert page.evaluate(CUT) == []
    assert page.evaluate("getComputedStyle(document.querySelector('thead')).display") == (
        "table-header-group"
    )
    assert page.evaluate("getComputedStyle(document.querySelector('tr')).breakInside") == "avoid"
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")


def test_contrast_of_what_nobody_states(show):
    """At least 4.5 to 1 on its own ground, in both schemes (WCAG's formula, written anew)."""
    for scheme in ("light", "dark"):
        page = show(color_scheme=scheme)
        style = "getComputedStyle(document.querySelector('.status.unstated'))"
        colors = [page.evaluate(f"{style}.{name}") for name in ("color", "backgroundColor")]
        light, dark = sorted(map(_luminance, colors), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, scheme


def _luminance(color):
    values = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
