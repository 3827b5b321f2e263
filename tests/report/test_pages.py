"""Large runs: several pages, long tables cut, pictures beside; nothing lost, nothing in memory."""

from __future__ import annotations

import re
import subprocess
import sys
import tracemalloc

import pytest

from leakbound.report import gallery, write
from leakbound.report.folder import read


def pages(folder):
    """The text of each page of a folder, the first one first."""
    names = ["report.html", *(f"report-{n}.html" for n in range(2, 99))]
    return {name: (folder / name).read_text() for name in names if (folder / name).exists()}


def verdicts_of(page):
    """Its table of verdicts."""
    table = page[page.index('aria-label="Verdicts"') :]
    return table[: table.index("</table>")]


def experiments_on(page):
    return re.findall(r"experiment <code>([0-9a-f]{16})</code>", page)


@pytest.fixture
def few(monkeypatch):
    """Pages of 20 experiments."""
    monkeypatch.setattr(gallery, "EXPERIMENTS", 20)


def test_a_small_run_is_one_file_that_holds_its_pictures(tmp_path, make_grid):
    folder = make_grid(tmp_path / "run", seeds=2)
    write(folder)
    assert list(pages(folder)) == ["report.html"]
    assert "Pages of experiments" not in pages(folder)["report.html"]
    assert 'src="data:image/png' in pages(folder)["report.html"]


def test_every_experiment_stands_on_one_page(tmp_path, few, make_grid):
    folder = make_grid(tmp_path / "run", seeds=2)
    assert write(folder) == folder / "report.html"
    found = pages(folder)
    run = read(folder)
    shown = [a.experiment for a in run.assessments if a.status != "not_applicable"]
    assert len(found) == -(-len(shown) // 18) > 2  # three attacks on a batch: six cards a page
    assert sorted(one for page in found.values() for one in experiments_on(page)) == sorted(shown)
    assert all(len(experiments_on(page)) <= 20 for page in found.values())
    for name, page in found.items():
        ids = re.findall(r'<[^>]*? id="([^"]+)"', page)
        assert len(ids) == len(set(ids))
        assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids), name
        for file, anchor in re.findall(r'href="(report(?:-\d+)?\.html)#([^"]+)"', page):
            assert f'id="{anchor}"' in found[file]
        assert (folder / name).stat().st_mode & 0o777 == 0o600


def test_pictures_of_large_runs_lie_beside_the_pages(tmp_path, few, make_grid):
    folder = make_grid(tmp_path / "run", seeds=2)
    write(folder)
    for page in pages(folder).values():
        sources = re.findall(r'<img src="([^"]+)"', page)
        assert sources
        assert all((folder / source).is_file() for source in sources)
        assert all(re.fullmatch(r"pictures/[0-9a-f]{16}\.png", source) for source in sources)
    write(folder, images=False)
    assert not any("<img" in page for page in pages(folder).values())


def test_a_further_page_has_the_rows_of_its_configurations(tmp_path, few, make_grid):
    folder = make_grid(tmp_path / "run", seeds=2, hostile=False)
    write(folder)
    rows = set()
    for name, page in pages(folder).items():
        own = re.findall(r'<tr><th scope="row">([^<]+)</th>', verdicts_of(page))
        cards = set(re.findall(r"<h3>([^<]+)</h3>\n<p class=.where", page))
        if name != "report.html":
            assert set(own) == cards
            rows |= cards
    assert len(rows) > 3


def test_long_tables_show_what_matters_most(
    tmp_path, monkeypatch, make_assessment, make_defense, make_run
):
    monkeypatch.setattr("leakbound.report.page.ROWS", 4)
    cells = [
        make_assessment(defense=make_defense("prune", rate=i / 100), seed=0, psnr=[10.0 + i])
        for i in range(1, 21)
    ]
    failed = [
        make_assessment(
            defense=make_defense("prune", rate=i / 100), seed=1, status="failed", reason="x"
        )
        for i in range(1, 8)
    ]
    page = write(make_run(tmp_path / "run", cells + failed)).read_text()
    assert "20 configurations of model, batch size and defense were attacked" in page
    assert "The 4 most exposed are here" in page
    rates = re.findall(r'<tr><th scope="row">prune rate=([0-9.]+)', verdicts_of(page))
    assert rates == ["0.2", "0.19", "0.18", "0.17"]
    assert "And 3 more, in <code>records.jsonl</code>" in page
    assert "7 of 27 experiments failed" in page


def test_many_settings_are_folded(tmp_path, make_assessment, make_defense, make_run):
    cells = [
        make_assessment(defense=make_defense("prune", rate=i / 1000), seed=0, psnr=[10.0])
        for i in range(1, 301)
    ]
    page = write(make_run(tmp_path / "run", cells)).read_text()
    assert "<summary>284 more settings</summary>" in page
    assert len(page) < 2e6


def test_charts_and_tables_of_attacks_share_their_lines(
    tmp_path, monkeypatch, make_assessment, make_defense, make_run
):
    """48 lines in all: 24 for each of two batch sizes, those with the highest scores."""
    monkeypatch.setattr("leakbound.report.page.ROWS", 48)
    cells = [
        make_assessment(
            defense=make_defense("prune", rate=i / 100), batch_size=size, psnr=[10.0 + i / 4] * size
        )
        for size in (1, 2)
        for i in range(40)
    ]
    page = write(make_run(tmp_path / "run", cells)).read_text()
    assert page.count("<summary>24 more settings</summary>") == 2
    assert page.count("The 24 most exposed are here") == 2
    for table in page.split('<table class="heat">')[1:]:
        rates = re.findall(r'<tr><th scope="row">prune rate=([0-9.]+)', table.split("</table>")[0])
        assert rates == [f"{i / 100:g}" for i in range(39, 15, -1)]
        assert "The 24 defenses with the highest scores are here, of 40." in table


def test_wide_rows_get_more_pages(tmp_path, few, make_table, make_run):
    """An experiment of 31 columns counts as two; the first of several pages shows half as many."""
    right = {f"column {i}": [True] for i in range(31)}
    values = {name: (["1"], ["1"]) for name in right}
    cells = [make_table(right, values=values, seed=seed) for seed in range(20)]
    folder = make_run(tmp_path / "run", cells)
    write(folder)
    counts = [len(experiments_on(page)) for page in pages(folder).values()]
    assert counts == [5, 10, 5]


def test_what_many_records_hold_alike_is_held_once(tmp_path, make_assessment, make_bound, make_run):
    """A record of these took 12 kB when each had its own."""
    bounds = [make_bound(assumptions=[f"{i}: " + "x" * 200 for i in range(5)])]
    cells = [make_assessment(seed=s, bounds=bounds, psnr=[1.0 + s] * 4) for s in range(500)]
    folder = make_run(tmp_path / "run", cells)
    del cells
    tracemalloc.start()
    try:
        run = read(folder)
        assert len(run.assessments) == 500
        assert tracemalloc.get_traced_memory()[1] / 500 < 6000
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.linux
def test_a_report_of_ten_thousand_experiments(
    tmp_path, make_assessment, make_bound, make_defense, make_run
):
    """The command's peak stays below 200 MB, its first page below 5 MB."""
    defenses = [make_defense("gaussian_noise", noise_std=i / 100) for i in range(20)]
    cells = [
        make_assessment(
            defense=given,
            attack=attack,
            seed=seed,
            psnr=[10.0 + seed / 9] * 4,
            bounds=[make_bound()],
        )
        for given in defenses
        for attack in ("dlg", "idlg", "inverting_gradients", "linear_inversion", "mean_image")
        for seed in range(100)
    ]
    folder = make_run(tmp_path / "run", cells)
    code = (
        "import re, sys; from leakbound.cli import main\n"
        "try: main(['report', sys.argv[1]])\n"
        "except SystemExit as end: assert end.code in (None, 0)\n"
        "peak = re.search('VmHWM:[^0-9]*([0-9]+) kB', open('/proc/self/status').read())\n"
        "print(peak[1], 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    peak, torch = done.stdout.split()[-2:]
    assert torch == "False"
    assert int(peak) < 200_000
    assert len(pages(folder)) == 21
    assert all(len(page) < 5e6 for page in pages(folder).values())
