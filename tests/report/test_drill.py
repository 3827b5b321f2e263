"""One example at a time, in a real Chromium: what is shown is what the records and strips hold."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from leakbound.report import write
from leakbound.report.folder import read

pytestmark = pytest.mark.browser


@pytest.fixture
def run(tmp_path, make_grid):
    folder = make_grid(tmp_path / "run", seeds=2, hostile=False)
    write(folder)
    return folder


def assessments(folder):
    return read(folder).assessments


def pixels(folder, name, image):
    strip = np.asarray(Image.open(folder / "pictures" / name)).astype(float)
    return strip[:, image * 30 : image * 30 + 28]


def seen(figure):
    """The 28 x 28 values that the browser draws, read off its screenshot."""
    shot = Image.open(io.BytesIO(figure.locator("img").screenshot())).convert("L")
    array = np.asarray(shot).astype(float)
    at = ((np.arange(28) + 0.5) * (array.shape[0] / 28)).astype(int)
    return array[np.ix_(at, at)]


def opened(page):
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    return dialog


def test_it_shows_the_image_and_every_guess(show, run):
    page = show(run / "report.html")
    page.locator("#card-3 .entry").first.locator(".scores a").nth(2).click()
    dialog = opened(page)
    own = [
        a
        for a in assessments(run)
        if (a.seed, a.defense.parameters.get("noise_std")) == (0, 0.0001)
    ]
    assert dialog.get_by_role("heading").inner_text() == (
        "Example 3 of 4: gaussian_noise noise_std=0.0001"
    )
    figures = dialog.locator("figure")
    assert figures.count() == 1 + len(own) == 4
    assert (
        np.abs(seen(figures.nth(0)) - pixels(run, own[0].pictures["truth"], 2))[2:-2, 2:-2].max()
        < 4
    )
    for i, a in enumerate(own, 1):
        psnr = f"{a.scores[2]:.1f} dB"
        name = a.attack.name
        guess = pixels(run, a.pictures["reconstruction"], 2)
        assert np.abs(seen(figures.nth(i)) - guess)[2:-2, 2:-2].max() < 4
        assert f"{name}\n{psnr}" in figures.nth(i).inner_text()
        alt = figures.nth(i).locator("img").get_attribute("alt")
        assert alt.startswith(f"example 3 as {name} reconstructed it: PSNR {psnr}")
        assert a.experiment in dialog.locator(".facts-list").inner_text()
        assert a.attack.hash in dialog.locator(".facts-list").inner_text()
    rows = dialog.locator("tbody tr")
    assert rows.count() == 3
    assert "objective went from 1.02 to 0.0003" in dialog.inner_text()


def test_the_keyboard_alone_is_enough(show, run):
    page = show(run / "report.html")
    link = page.locator("#card-1 .scores a").nth(1)
    link.focus()
    page.keyboard.press("Enter")
    heading = opened(page).get_by_role("heading")
    assert heading.inner_text().startswith("Example 2 of 4")
    assert page.evaluate("document.activeElement.id") == "drill-title"
    for key, number in (
        *(("ArrowRight", 3), ("ArrowRight", 4), ("ArrowRight", 4)),
        *(("Home", 1), ("ArrowLeft", 1), ("End", 4), ("ArrowLeft", 3)),
    ):
        page.keyboard.press(key)
        assert heading.inner_text().startswith(f"Example {number} of 4"), key
    visited = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        at = page.evaluate(
            "() => [document.activeElement.closest('dialog, body').tagName, "
            "document.activeElement.textContent]"
        )
        assert at[0] == "DIALOG" or at[1] == page.locator("body").text_content()
        visited.add(at[1])
    assert {"← example before", "example after →", "close (Esc)"} <= visited
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0
    assert link.evaluate("(e) => e === document.activeElement")


def test_the_same_batch_under_the_next_defense(show, run):
    page = show(run / "report.html")
    page.locator("#card-1 .scores a").nth(3).click()
    dialog = opened(page)
    where = dialog.locator(".where").inner_text()
    dialog.get_by_role("button", name="defense after").click()
    assert dialog.get_by_role("heading").inner_text() == (
        "Example 4 of 4: gaussian_noise noise_std=0.0001"
    )
    assert dialog.locator(".where").inner_text() == where
    assert page.evaluate("document.activeElement.dataset.key") == "after"
    dialog.get_by_role("button", name="defense before").click()
    assert dialog.get_by_role("heading").inner_text() == "Example 4 of 4: no defense"
    assert dialog.get_by_role("button", name="defense before").is_disabled()
    dialog.get_by_role("button", name="close").click()
    assert page.get_by_role("dialog").count() == 0


def test_a_verdict_leads_to_its_best_image(show, run):
    page = show(run / "report.html")
    link = page.locator("#verdicts-fold tbody tr").first.get_by_role("link").first
    best = max(v for a in assessments(run) if a.defense.name == "none" for v in a.scores)
    link.click()
    dialog = opened(page)
    assert f"{best:.1f} dB" in dialog.locator("figure").nth(1).inner_text()
    assert "no defense" in dialog.get_by_role("heading").inner_text()


def test_an_address_leads_to_an_image(show, run):
    page = show(run / "report.html", "#example-2-3")
    assert opened(page).get_by_role("heading").inner_text() == "Example 3 of 4: no defense"
    for anchor in ("#example-999-1", "#example-0-0", "#example-1-", "#<b>"):
        assert show(run / "report.html", anchor).get_by_role("dialog").count() == 0


def test_a_click_on_a_strip_opens_what_is_under_it(show, run):
    page = show(run / "report.html")
    strip = page.locator("#card-1 .entry .strip img").first
    box = strip.bounding_box()
    strip.click(position={"x": box["width"] * 0.6, "y": 10})
    assert opened(page).get_by_role("heading").inner_text().startswith("Example 3 of 4")


def test_without_scripts_the_images_are_rows_that_anchors_reach(show, run):
    page = show(run / "report.html", java_script_enabled=False)
    assert page.get_by_role("dialog").count() == 0
    page.locator("#card-1 .scores a").nth(2).click()
    row = page.locator("#example-1-3 tr").first
    psnr = assessments(run)[0].scores[2]
    assert f"{psnr:.1f}" in row.text_content()
    assert page.url.endswith("#example-1-3")
    assert page.locator("#card-1 .facts-list").is_visible()


def test_without_pictures_the_numbers_remain(show, run):
    page = show(write(run, images=False))
    page.locator("#card-1 .scores a").first.click()
    dialog = opened(page)
    assert dialog.locator("img").count() == 0
    assert dialog.locator("tbody tr").count() == 3
    assert page.content().count("data:image") == 0


def test_large_batches_are_cut_and_that_is_said(
    show, tmp_path, make_assessment, make_run, monkeypatch
):
    monkeypatch.setattr("leakbound.report.gallery.ROWS", 6)
    cell = [make_assessment(seed=s, psnr=[20.0 + i for i in range(5)]) for s in range(2)]
    page = show(write(make_run(tmp_path / "run", cell)))
    first = page.locator("#card-1")
    assert first.locator(".scores li").count() == 5
    assert first.locator(".scores a").count() == 3
    assert "2 more examples of this batch are in the records only" in first.inner_html()
    assert page.locator("#verdicts-fold tbody a").count() == 0


def test_it_shows_the_values_of_the_best_row(show, tmp_path, make_clinic):
    page = show(write(make_clinic(tmp_path / "run")))
    page.locator(".shots-strip a").first.click()
    dialog = opened(page)
    cells = dialog.locator("table.row tbody tr").first.locator("th, td").all_inner_texts()
    assert [cell.split("\n")[0] for cell in cells[:3]] == ["hiv sensitive", "positive", "positive"]
    assert "3 of 3" in dialog.locator("table.examples").inner_text()
    page.keyboard.press("ArrowRight")  # the other row, which is not the best
    assert dialog.locator("table.row").count() == 0
