"""The evidence in a real Chromium: silent, alone, printable, and nothing cut off.

The sign-off page is one sheet of A4 or Letter, whatever the run holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from leakbound.assess.record import VERDICTS
from leakbound.report import evidence
from leakbound.report.evidence import STATEMENTS
from leakbound.report.evidence.parts import EpsilonPart, Epsilons, Item
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
    audits = [audited("<b>" + "long" * 60)]
    subject = evidence.of_run(run, {}, lambda noise: known, images=True, audited=audits)
    page = tmp_path / "evidence-annex.html"
    page.write_text(evidence.annex(evidence.document([subject], images=True), [run]), "utf-8")
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


OPTIONS = {
    "a4": {"prefer_css_page_size": True},
    "letter": {"format": "Letter", "margin": dict.fromkeys(("top", "bottom"), "11mm")
               | dict.fromkeys(("left", "right"), "13mm")},
}  # fmt: skip
SMALLEST = """() => Math.min(...[...document.querySelectorAll("body *")]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
  .map(e => parseFloat(getComputedStyle(e).fontSize)))"""
BROKEN = """() => [...document.querySelectorAll(".w")].flatMap(e => [...e.childNodes])
  .filter(n => n.nodeType === 3).filter(n => {
    const range = document.createRange();
    range.selectNodeContents(n);
    return new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1;
  }).map(n => n.textContent)"""
OUTSIDE = """() => [...document.querySelectorAll(".sheet *")]
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1
    || e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display === "table-cell")
  .filter(e => !e.closest(".hidden")).map(e => e.outerHTML.slice(0, 80))"""


def many(folder, make_assessment, make_run, make_training, make_bound, make_defense):
    """Sixty settings of twenty defenses with long names, on two models, with every verdict."""
    own, costs = [], []
    for place in range(60):
        name = f"a_rather_long_name_of_a_defense_{place % 20:02d}"
        given = make_defense(name, noise_standard_deviation=0.001 * (place + 1), clip_norm=1.5)
        word = VERDICTS[place % len(VERDICTS)]
        shown = "exposed" in word
        bounds = [
            make_bound(None, name=basis, basis=basis, probability=0.1 / 7**turn, accepted=0.001)
            for turn, basis in enumerate(("sample", "known model", "fitted model"))
        ]
        for size in (1, 4):
            own.append(
                make_assessment(
                    defense=given,
                    batch_size=size,
                    psnr=[31.0 if shown else 12.0] * size,
                    verdict=word,
                    bounds=bounds,
                )
            )
        costs += [make_training(given, seed, 0.5 + 0.1 * seed) for seed in range(2)]
    plain = make_assessment().defense
    costs += [make_training(plain, seed, 0.9) for seed in range(2)]
    return make_run(folder, own, costs)


def worst(folder, make_run, hostile, **parts):
    """The same under names as long as they may be, unfinished, failed and damaged."""
    path = many(folder, make_run=make_run, **parts)
    run, name = read(path), "long_" * 200
    own = [
        replace(
            a,
            model=replace(a.model, name=f"{name}{place % 9}"),
            data=replace(a.data, source=name),
            verdict="protected from strangers" if a.verdict == "exposed" else a.verdict,
            defense=replace(a.defense, name=f"{name}{a.defense.name}"),
        )
        for place, a in enumerate(run.assessments)
    ]
    own[0] = replace(own[0], status="failed", verdict="undecided", reason=hostile)
    return make_run(path, own, experiments=4000, plan={"name": name, "psnr": 20.0})


def audited(name):
    """An audit of a client of this name that found more than is claimed."""
    lines = [("declared", "1", "declared"), ("bounded", "4.38", "computed")]
    lines += [("found, at least", value, "measured") for value in ("5.1", "6.2")]
    items = tuple(Item(one, one, value, status, name) for one, value, status in lines)
    words = f"the program leaks more than it claims: epsilon is at least 6.2 (assumes: {name})"
    return EpsilonPart(name, 1e-5, 0.95, False, words, items)


@pytest.fixture
def sheet(tmp_path, request, browser):
    """The sign-off page of a run by the name of its kind, in Chromium."""
    pages = []

    def made(kind):
        needed = ("make_assessment", "make_run", "make_training", "make_bound", "make_defense")
        parts = {name: request.getfixturevalue(name) for name in needed}
        folder, said, audits = tmp_path / "run", {}, ()
        if kind == "many":
            folder, audits = many(folder, **parts), [audited("my_app.client:update")]
        elif kind == "worst":
            said = dict.fromkeys(STATEMENTS, "said_" * 80)
            folder = worst(folder, hostile=request.getfixturevalue("hostile"), **parts)
            audits = [audited("long " * 200)] * 2
        else:
            folder = request.getfixturevalue(f"make_{kind}")(folder)
        known = Epsilons(1e-5, 1.0, 2.0)
        subject = evidence.of_run(
            read(folder), said, lambda noise: known, images=True, audited=audits
        )
        names = "run.json", "records.jsonl", "utility.jsonl", "signed-annex.html", "report.json"
        files = dict.fromkeys((*names, "evidence-12.toml"), "0123456789abcdef" * 4)
        path = tmp_path / "evidence.html"
        path.write_text(evidence.page(evidence.document([subject], images=True), [files]), "utf-8")
        page = browser.new_context(viewport={"width": 695, "height": 1000}).new_page()
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield made
    for page in pages:
        page.context.close()


KINDS = ["grid", "bounded", "captured", "clinic", "many", "worst"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_sign_off_page_is_one_sheet_with_nothing_cut_off(sheet, kind):
    page = sheet(kind)
    for paper, options in OPTIONS.items():
        assert _sheets(page.pdf(**options)) == 1, paper
    page.emulate_media(media="print")
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(SMALLEST) >= 12  # pixels: 9 pt
    if kind not in ("grid", "worst"):  # their names have words that no line holds
        assert page.evaluate(BROKEN) == []


def test_the_sign_off_page_fits_a_phone(sheet):
    page = sheet("many")
    page.set_viewport_size({"width": 420, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    assert page.evaluate("getComputedStyle(document.querySelector('td')).display") == "grid"


def test_every_subject_has_a_sheet_of_its_own(tmp_path, browser, make_bounded, make_captured):
    runs = [read(make_bounded(tmp_path / "run")), read(make_captured(tmp_path / "captured"))]
    known = Epsilons(1e-5, 1.0, 2.0)
    subjects = [evidence.of_run(run, {}, lambda noise: known, images=True) for run in runs]
    path = tmp_path / "evidence.html"
    path.write_text(evidence.page(evidence.document(subjects, images=True)), "utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    assert _sheets(page.pdf(prefer_css_page_size=True)) == 2
    page.close()


def _sheets(pdf):
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


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
