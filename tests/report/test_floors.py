"""Floors, leak maps and private laws: what the page says of them, and what it refuses."""

from __future__ import annotations

import re

import pytest

from leakbound.assess.record import ON_AVERAGE
from leakbound.report import floors, html, tables, write

NEW = ("protected on average", "ceiling", "leak map", "depends on the private", "Training under")


def _row(text, defense):
    """The cells of one line of the verdict table."""
    table = re.search(r'aria-label="Verdicts".*?</table>', text, re.DOTALL).group()
    (line,) = [r for r in re.findall(r"<tr>.*?</tr>", table, re.DOTALL) if f">{defense}<" in r]
    return line


def test_older_records_show_nothing_new(tmp_path, make_cell, make_run, make_training, make_defense):
    old = make_cell()
    del old["bounds"]
    del old["release"]
    units = [make_training(make_defense("none"), 0, 0.9)]
    body = write(make_run(tmp_path / "run", [old], units)).read_text()
    page = body[body.index("<body>") : body.index("<script>")]
    assert "1 exposed" in page
    assert not [words for words in NEW if words in page]


def test_every_verdict_is_counted_explained_and_offered(tmp_path, make_floored):
    text = write(make_floored(tmp_path / "run")).read_text()
    summary = re.sub(r"<[^>]+>", "", text[text.index("were attacked:") :][:400])
    assert "4 exposed, 1 undecided, 1 protected on average and 1 protected." in summary
    for word in ("exposed", "undecided", "protected on average", "protected"):
        style = word.replace(" ", "-")
        assert f'<option value="{word}">' in text
        mark = r'<span aria-hidden="true">\S</span>'
        assert re.search(rf'<span class="badge {style}">{mark} {word}</span>', text)
        assert f".badge.{style} {{" in text
    assert 'class="badge protected on' not in text
    assert f'data-verdict="{ON_AVERAGE}"' in text
    assert text.count("single lucky example is not excluded") == 2
    assert "the floor rests on the named prior" in text


def test_ceiling_stands_beside_the_attacks_with_its_prior(
    tmp_path, make_cell, make_bound, make_run, make_defense
):
    given = make_defense("gaussian_noise", std=1)
    floored = [
        make_cell(seed=i, defense=given, psnr=[10.0, 20.0], bounds=[make_bound(level)])
        for i, level in enumerate((17.0, 18.0, 25.0))
    ]
    text = write(make_run(tmp_path / "run", [*floored, make_cell()])).read_text()
    line = _row(text, "gaussian_noise")
    assert ">18.0<sup><a href=" in line
    assert 'title="trace floor; prior: N(mean, covariance) in 32 of 784 directions"' in line
    assert ">12.6<" in line  # the PSNR of the mean of 0.1 and 0.01
    assert ">20.0<" in line  # the best single image, above the ceiling, is shown as well
    assert "<sup>" not in _row(text, "no defense")
    foot = re.search(r'<li id="floor-1">.*?</ol>', text, re.DOTALL).group()
    assert "N(mean, covariance) in 32 of 784 directions" in foot
    assert "rests on this prior" in foot
    assert "law is smooth in x" in foot
    assert "It says nothing of a single example." in text


def test_the_strongest_floor_is_taken_and_kinds_are_not_mixed(make_cell, make_bound):
    full = {"name": "full", "prior": "other"}
    cells = [
        make_cell(seed=0, bounds=[make_bound(22.0), make_bound(19.0, **full)]),
        make_cell(seed=1, bounds=[make_bound(23.0), make_bound(21.0, **full)]),
        make_cell(seed=2, bounds=[make_bound(24.0)]),
    ]
    found = floors.ceiling(cells, floors.Sources(cells))
    assert (found.psnr, found.n, found.cells) == (20.0, 2, 3)
    assert (found.source.name, found.source.prior, found.source.number) == ("full", "other", 2)


@pytest.mark.parametrize(
    "changes", [{"covers": "unbiased"}, {"covers": "unproved"}, {"psnr": None}]
)
def test_floors_that_do_not_hold_for_all_are_no_ceiling(
    tmp_path, make_cell, make_bound, make_run, changes
):
    cells = [make_cell(bounds=[make_bound(9.0) | changes])]
    assert floors.ceiling(cells, floors.Sources(cells)) is None
    text = write(make_run(tmp_path / "run", cells)).read_text()
    assert "ceiling (mean)" not in text
    assert ("covers only unbiased attackers" in text) == (changes.get("covers") == "unbiased")
    assert ("is not proved here" in text) == (changes.get("covers") == "unproved")
    assert "unproved attackers" not in text


def test_measure_of_attacks_is_that_of_the_ceiling(make_cell):
    cells = [make_cell(psnr=[10.0, 20.0]), make_cell(seed=1, psnr=[20.0, 40.0])]
    (row,) = tables.verdicts(cells, tables.Names(cells))
    assert 10 ** (-row.mean_error / 10) == pytest.approx((0.1 + 0.01 + 0.01 + 0.0001) / 4)
    assert floors.of_mean_error([]) is None
    assert floors.of_mean_error([-1e299, 1e299]) == pytest.approx(-297, abs=0.1)


def test_missing_floors_are_explained(tmp_path, make_cell, make_run, make_defense, hostile):
    why = f"the release has no Gaussian noise {hostile}"
    cells = [make_cell(defense=make_defense(n), bounds_note=why) for n in ("prune", "round")]
    text = write(make_run(tmp_path / "run", cells)).read_text()
    assert "No floor for prune and round: the release has no Gaussian noise &lt;img" in text
    assert hostile not in text


def test_private_law_stands_beside_the_guarantee(tmp_path, make_cell, make_run, make_defense):
    one, two = make_defense("a_noise"), make_defense("b_noise") | {"data_dependent_law": True}
    cells = [make_cell(defense=one), make_cell(defense=two)]
    text = write(make_run(tmp_path / "run", cells)).read_text()
    assert "depends on the private batch" not in _row(text, "a_noise")
    assert "known noise distribution<br><small>depends on the private batch" in _row(
        text, "b_noise"
    )
    assert text.count("known noise distribution, but it depends on the private batch") == 1
    assert "tells of the batch itself" in text


def test_leak_map_stands_between_truth_and_rebuilt_once_a_batch(tmp_path, make_floored):
    folder = make_floored(tmp_path / "run", seeds=2)
    text = write(folder).read_text()
    card = re.search(r"<article [^>]*>\s*<h3>gaussian.*?</article>", text, re.DOTALL).group()
    order = [
        "True examples",
        "Leak map of the batch",
        "Bright pixels leak;",
        "Rebuilt by inverting",
        "Rebuilt by dlg",
    ]
    places = [card.index(words) for words in order]
    assert places == sorted(places)
    assert card.count("Leak map of the batch") == 1
    assert text.count("Bright pixels leak;") == 8
    assert "Leak map of the batch" not in write(folder, images=False).read_text()


def test_utility_of_a_release(tmp_path, make_cell, make_run):
    both = {"law": "Exact", "utility": {"first_order": 0.83, "second_order": 0.012}}
    text = write(make_run(tmp_path / "run", [make_cell(release=both)])).read_text()
    shown = "Utility of this release: 83\N{NO-BREAK SPACE}% of first order kept; "
    assert shown + "second-order cost of noise 0.0120" in text
    none = {"utility": {"first_order": None, "second_order": None}}
    text = write(make_run(tmp_path / "old", [make_cell(release=none)])).read_text()
    assert "Utility of this release" not in text


def test_ceiling_is_drawn_where_there_is_one(tmp_path, make_floored, make_grid):
    text = write(make_floored(tmp_path / "run")).read_text()
    plots = re.findall(r'<figure class="plot".*?</figure>', text, re.DOTALL)
    marked = ["stroke: currentColor" in plot for plot in plots if "PSNR in dB by" in plot]
    assert marked == [True, False]
    assert text.count("ceiling of every attacker’s mean error") == 1
    assert "#010203" not in text
    old = write(make_grid(tmp_path / "old", seeds=1)).read_text()
    assert "ceiling of every" not in old
    assert "stroke: currentColor" not in old


def test_hostile_floors_do_no_harm(tmp_path, make_floored, hostile):
    text = write(make_floored(tmp_path / "run", hostile=hostile)).read_text()
    assert hostile not in text
    assert text.count("<script") == 1
    assert "<img src=x" not in text
    assert text.count("784 directions&lt;img src=x") >= 5  # titles and the footnote
    assert "adam&lt;img src=x" in text
    ids = re.findall(r'<[^>]*? id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', text)) <= set(ids)


def test_huge_lists_are_cut(tmp_path, make_cell, make_bound, make_run, make_defense):
    many = [make_bound(19.0, prior=f"prior {i}") for i in range(2000)]
    many[0]["assumptions"] = ["x" * 100_000, *map(str, range(5000))]
    cells = [
        make_cell(defense=make_defense("noise", std=i), bounds_note=f"why {i}", bounds=many[-1:])
        for i in range(60)
    ]
    cells[0]["bounds"] = many
    text = write(make_run(tmp_path / "run", cells)).read_text()
    assert text.count('<li id="floor-') == floors.SHOWN
    assert "1,970 more floors of other names or priors are in the records" in text
    assert text.count("No floor for") == floors.SHOWN
    assert "30 more reasons" in text
    assert "x" * (floors.LONGEST + 1) not in text
    assert html.brief([str(i) for i in range(40)]).endswith("29 and 10 more")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bounds": {"a": 1}}, "bounds is"),
        ({"bounds": ["trace"]}, "a bound is 'trace'"),
        ({"bounds": [{"prior": 3}]}, "prior is '3'"),
        ({"bounds": [{"name": None}]}, "name is 'None'"),
        ({"bounds": [{"value": True}]}, "value is 'True'"),
        ({"bounds": [{"value": -0.1}]}, "a bound has value -0.1"),
        ({"bounds": [{"value": 10**301}]}, "it holds the number 1000"),
        ({"bounds": [{"psnr": "19"}]}, "psnr is '19'"),
        ({"bounds": [{"psnr": 1e200}]}, r"a bound has .*psnr 1e\+200"),
        ({"bounds": [{"covers": ["all"]}]}, "covers is"),
        ({"bounds": [{"on_average": 1}]}, "bounds.on_average is '1'"),
        ({"bounds": [{"equation": 4}]}, "bounds.equation is '4'"),
        ({"bounds": [{"assumptions": "one"}]}, "bounds.assumptions is 'one'"),
        ({"bounds": [{"assumptions": [{}]}]}, "bounds.assumptions is not a list of texts"),
        ({"bounds": [{"standard_error": "x"}]}, "bounds.standard_error is 'x'"),
        ({"bounds_note": ["no"]}, "bounds_note is"),
        ({"verdict": "protected on the whole"}, "verdict is 'protected on the whole'"),
        ({"release": {"utility": {"first_order": "0.8"}}}, "release.utility is not a table of n"),
        ({"release": {"utility": [1]}}, "utility is"),
        ({"release": 7}, "release is '7'"),
        ({"pictures": ["a"]}, "pictures is"),
        ({"pictures": {"leak_map": "../x.png"}}, "'../x.png' is no name of a picture"),
    ],
)
def test_damaged_fields_are_refused(tmp_path, make_cell, make_bound, make_run, changes, message):
    if isinstance(changes.get("bounds"), list) and isinstance(changes["bounds"][0], dict):
        changes = {"bounds": [make_bound() | changes["bounds"][0]]}
    with pytest.raises(ValueError, match=f"line 1 is damaged: {message}"):
        write(make_run(tmp_path / "run", [make_cell() | changes]))


def test_damaged_private_law_is_refused(tmp_path, make_cell, make_defense, make_run):
    given = make_defense("none") | {"data_dependent_law": "yes"}
    with pytest.raises(ValueError, match=r"defense\.data_dependent_law is 'yes'"):
        write(make_run(tmp_path / "run", [make_cell(defense=given)]))
