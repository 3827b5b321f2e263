"""What people need who use a keyboard, a screen reader or other colors, in a real Chromium."""

from __future__ import annotations

import itertools
import math
import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe
from msgspec.structs import replace

from leakbound.report import evidence, write
from leakbound.report.compare import write_comparison
from leakbound.report.evidence.parts import Epsilons
from leakbound.report.folder import read
from leakbound_reproductions import pages
from leakbound_reproductions.claim import Claim, Finding
from leakbound_reproductions.outcome import Figure, Outcome
from leakbound_reproductions.reproductions import REPRODUCTIONS
from leakbound_reproductions.results import Results

pytestmark = pytest.mark.browser

NAMELESS = """
() => [...document.querySelectorAll("a[href], button, select, summary, input, [tabindex='0']")]
  .filter((e) => !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim()
    || e.title)).map((e) => e.outerHTML.slice(0, 80))
"""
LEVELS = """
() => [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map((e) => Number(e.tagName[1]))
"""
CONTRAST = """
() => {
  const parse = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith("color(srgb") ? numbers.map((v, i) => (i < 3 ? 255 * v : v)) : numbers;
  };
  const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => {
    const p = rgb[i] / 255;
    return sum + w * (p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4);
  }, 0);
  const ground = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color[3] === undefined || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest("svg, script, noscript, :disabled") || !e.checkVisibility()) continue;
    const [a, b] = [parse(getComputedStyle(e).color), ground(e)].map(light).sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(e.outerHTML.slice(0, 100));
  }
  return found;
}
"""
STOPS = """
() => [...document.querySelectorAll("a[href], button, select, summary, input, [tabindex='0']")]
  .filter((e) => e.checkVisibility()).length
"""
MOVING = """
() => [...document.querySelectorAll("*")].filter((e) => {
  const style = getComputedStyle(e);
  return style.animationName !== "none" || parseFloat(style.transitionDuration) > 0
    || style.scrollBehavior === "smooth";
}).length
"""


SORTED = ["grid", "rows", "bounds", "compare"]
"""Pages with scripts: their tables are sorted, their cards filtered."""
SMALL = {"seeds": 1, "strengths": 2}
"""More rows of the same kind cost axe seconds and break no other rule."""


@pytest.fixture
def make_page(
    tmp_path,
    make_captured,
    make_grid,
    make_bounded,
    make_clinic,
    make_run,
    make_assessment,
    make_training,
    dp_sgd,
):
    """The file of one page by its name."""

    def evidences(draw):
        cells = [make_assessment(defense=one) for one in (dp_sgd, replace(dp_sgd, name="other"))]
        plain = make_assessment().defense
        trainings = [make_training(one, 0, 0.9) for one in (plain, dp_sgd)]
        folders = [
            make_bounded(tmp_path / "run", **SMALL),
            make_run(tmp_path / "private", [*cells, make_assessment()], trainings),
            make_captured(tmp_path / "captured"),
            make_clinic(tmp_path / "clinic"),
        ]
        runs = [read(folder) for folder in folders]
        known = Epsilons(1e-5, 1.0, 2.0)
        subjects = [evidence.of_run(one, {}, lambda noise: known, images=True) for one in runs]
        path = tmp_path / "evidence.html"
        path.write_text(draw(evidence.document(subjects, images=True), runs), "utf-8")
        return path

    def results(folder):
        strip = folder / "pictures"
        name = next(strip.iterdir()).name
        held = Finding("a is above b", 1.5, (1.0, 2.0), (0.5, 2.5), (0.0, math.inf), 7)
        outcome = Outcome(
            (
                Claim("1-1", "a beats b", "table 1", "small", (held, held)),
                Claim("1-2", "d", "table 3", "small", (), "no such data"),
                Claim("1-3", "c", "table 4", "small", (held,), "A remark."),
            ),
            (Figure(name, "a plot of what was found", "figure 2"),),
            "Some settings.",
        )
        own = Results(REPRODUCTIONS["mean_to_extreme"], "cpu", outcome, {}, {}, {"threads": 1})
        path = folder / "results.html"
        path.write_text(pages.html(own, strip), "utf-8")
        return path

    def make(name):
        if name == "sign-off":
            return evidences(lambda content, _: evidence.page(content))
        if name == "annex":
            return evidences(evidence.annex)
        if name == "grid":
            return write(make_grid(tmp_path / "run", seeds=1))
        if name == "utility":
            return write(make_grid(tmp_path / "run", seeds=2, attacks=("inverting_gradients",)))
        if name == "rows":
            return write(make_clinic(tmp_path / "run"))
        first = make_bounded(tmp_path / "run", **SMALL)
        if name == "results":
            return results(first)
        if name == "bounds":
            return write(first)
        second = shutil.copytree(first, tmp_path / "other")
        write_comparison(read(first), read(second), second / "compare.html")
        return second / "compare.html"

    return make


@pytest.fixture(scope="module")
def made():
    """The pages that were made, by name: no test changes one."""
    return {}


@pytest.fixture
def page_of(make_page, made):
    """The file of one page by its name, made once."""

    def find(name):
        if name not in made:
            made[name] = make_page(name)
        return made[name]

    return find


@pytest.fixture(params=[*SORTED, "utility", "sign-off", "annex", "results"])
def page_path(request, page_of):
    return page_of(request.param)


def test_names_ids_headings_and_tables(show, page_path):
    page = show(page_path)
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate("document.title.length") > 5
    assert page.evaluate("() => [...document.images].every((i) => i.alt.length > 9)")
    assert page.evaluate(NAMELESS) == []
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate(
        "() => [...document.querySelectorAll('[tabindex]')].every((e) => e.tabIndex < 1)"
    )
    levels = page.evaluate(LEVELS)
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for table in page.locator("table").all():
        assert len(table.locator("caption").text_content().strip()) > 5
        heads = table.locator("th")
        assert heads.evaluate_all("(all) => all.every((e) => e.scope)")
        assert table.locator("tbody tr").evaluate_all(
            "(all) => all.every((r) => r.querySelector('th'))"
        )
    labels = page.locator("main [role=region]").evaluate_all("(all) => all.map((e) => e.ariaLabel)")
    assert all(labels)
    assert len(labels) == len(set(labels))
    for role in ("main", "banner"):
        assert page.get_by_role(role).count() == 1


def test_every_text_has_contrast(show, page_path):
    page = show(page_path)
    page.evaluate("() => document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST) == [], scheme


STRUCTURE = {"resultTypes": ["violations"], "rules": {"color-contrast": {"enabled": False}}}
"""Four fifths of axe's time is its contrast of texts; the test above measures it more strictly."""
EVERY_RULE = {"resultTypes": ["violations"]}
OF_COLORS = {**EVERY_RULE, "runOnly": ["link-in-text-block"]}
"""What else depends on the scheme."""


def violations(page, rules):
    """What axe finds: the rule, and the first element that breaks it."""
    found = Axe().run(page, options=rules).response["violations"]
    return [(one["id"], one["nodes"][0]["html"][:200]) for one in found]


def test_axe_finds_no_violation(show, page_path):
    """WCAG 2.1 A and AA and axe-core's best practices, with every section unfolded."""
    page = show(page_path, color_scheme="light")
    assert violations(page, STRUCTURE) == []
    page.emulate_media(color_scheme="dark")
    assert violations(page, OF_COLORS) == []


def test_axe_measures_contrast_as_we_do(show, page_of):
    page = show(page_of("results"), color_scheme="light")
    assert violations(page, EVERY_RULE) == []
    page.evaluate("() => { document.querySelector('h1').style.color = '#999'; }")
    assert [rule for rule, _ in violations(page, EVERY_RULE)] == ["color-contrast"]
    assert len(page.evaluate(CONTRAST)) == 1


def test_axe_sees_a_picture_without_words(show, page_of):
    page = show(page_of("results"))
    page.evaluate("() => document.querySelector('img').removeAttribute('alt')")
    assert "image-alt" in {rule for rule, _ in violations(page, STRUCTURE)}


def test_the_measure_of_contrast_sees_a_faint_text(show, page_of):
    page = show(page_of("results"))
    for scheme, faint in (("light", "#999"), ("dark", "#666")):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST) == []
        page.evaluate(f"() => {{ document.querySelector('h1').style.color = '{faint}'; }}")
        assert len(page.evaluate(CONTRAST)) == 1
        page.evaluate("() => { document.querySelector('h1').style.color = ''; }")


def test_nothing_moves_and_verdicts_are_words_and_shapes(show, page_path):
    page = show(page_path)
    assert page.evaluate(MOVING) == 0
    texts = set(page.locator(".badge").evaluate_all("(all) => all.map((e) => e.textContent)"))
    words = {"▲ exposed", "▲ exposed (certified)", "? undecided", "≈ protected on average"}
    assert texts <= {*words, "✓ protected from strangers"}


def test_focus_goes_in_reading_order_and_the_first_stop_skips_to_the_content(show, page_path):
    page = show(page_path)
    tops = []
    for place in range(min(25, page.evaluate(STOPS))):
        page.keyboard.press("Tab")
        at = page.locator(":focus-visible")
        if place == 0:
            assert at.inner_text().startswith("Skip to the")
            assert at.bounding_box()["width"] > 50
        style = at.evaluate("(e) => getComputedStyle(e).outlineStyle")
        assert style not in ("none", "")
        tops.append(at.evaluate("(e) => e.getBoundingClientRect().top + scrollY"))
    later = tops[3:]
    assert all(after > before - 60 for before, after in itertools.pairwise(later))
    page.get_by_text("Skip to the").first.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"


@pytest.mark.parametrize("name", SORTED)
def test_sorting_is_told(show, page_of, name):
    page = show(page_of(name))
    head = page.locator("table.sortable").first.locator("th[scope=col]").first
    button = head.get_by_role("button")
    assert head.get_attribute("aria-sort") is None
    button.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert page.locator("p[role=status]").first.inner_text() == "sorted by Defense, ascending"
    button.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    assert page.locator("p[role=status]").first.inner_text() == "sorted by Defense, descending"


def test_a_narrow_window_scrolls_in_one_direction(show, page_path):
    page = show(page_path, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
