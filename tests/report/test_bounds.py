"""Lower bounds on the error and leak maps: what the page says about them, what it refuses."""

from __future__ import annotations

import re

import msgspec
import pytest
from msgspec.structs import replace

from leakbound.assess.record import ON_AVERAGE
from leakbound.report import tables, write
from leakbound.report.template import brief


def _row(text, defense):
    """The cells of one line of the verdict table."""
    table = re.search(r'aria-label="Verdicts".*?</table>', text, re.DOTALL).group()
    (line,) = [r for r in re.findall(r"<tr>.*?</tr>", table, re.DOTALL) if f">{defense}<" in r]
    return line


def test_every_verdict_is_counted_explained_and_offered(tmp_path, make_bounded):
    text = write(make_bounded(tmp_path / "run")).read_text()
    summary = re.sub(r"<[^>]+>", "", text[text.index("were attacked:") :][:400])
    assert (
        "4 exposed, 1 undecided, 1 protected on average and 1 protected from strangers." in summary
    )
    for word in ("exposed", "undecided", "protected on average", "protected from strangers"):
        style = word.replace(" ", "-")
        assert f'<option value="{word}">' in text
        mark = r'<span aria-hidden="true">\S</span>'
        assert re.search(rf'<span class="badge {style}">{mark} {word}</span>', text)
        assert re.search(rf"\.badge\.{style}[ ,]", text)
    assert 'class="badge protected on' not in text
    assert f'data-verdict="{ON_AVERAGE}"' in text
    assert text.count("single example can still leak") == 1
    assert "on average over examples like the public ones" in text


def test_upper_bound_stands_beside_the_attacks_with_its_prior(
    tmp_path, make_assessment, make_bound, make_run, make_defense
):
    given = make_defense("gaussian_noise", std=1)
    bounded = [
        make_assessment(seed=i, defense=given, psnr=[10.0, 20.0], bounds=[make_bound(level)])
        for i, level in enumerate((17.0, 18.0, 25.0))
    ]
    text = write(make_run(tmp_path / "run", [*bounded, make_assessment()])).read_text()
    line = _row(text, "gaussian_noise std=1")
    assert '>18.0, 12.6<br><small><a href="#bound-1">bound 1</a></small>' in line
    assert 'title="trace bound; prior: N(mean, covariance) in 32 of 784 directions"' in line
    # 12.6: the PSNR of the mean of 0.1 and 0.01
    assert ">20.0<" in line  # the best example, above the bound, is shown as well
    assert "bound-1" not in _row(text, "no defense")
    foot = re.search(r'<li id="bound-1">.*?</ol>', text, re.DOTALL).group()
    assert "N(mean, covariance) in 32 of 784 directions" in foot
    assert "rests on this prior" in foot
    assert "law is smooth in x" in foot
    assert "It says nothing about a single example." in text


def test_the_strongest_bound_is_taken_and_kinds_are_not_mixed(make_assessment, make_bound):
    full = {"name": "full", "prior": "other"}
    own = [
        make_assessment(seed=0, bounds=[make_bound(22.0), make_bound(19.0, **full)]),
        make_assessment(seed=1, bounds=[make_bound(23.0), make_bound(21.0, **full)]),
        make_assessment(seed=2, bounds=[make_bound(24.0)]),
    ]
    found = tables.strongest_bound(own, tables.Theorems(own))
    assert (found.psnr, found.experiments, found.of_experiments) == (20.0, 2, 3)
    assert (found.name, found.prior, found.theorem) == ("full", "other", 2)


@pytest.mark.parametrize(
    "changes", [{"covers": "unbiased"}, {"covers": "estimate"}, {"psnr": None}]
)
def test_bounds_that_do_not_hold_for_all_enter_no_column(
    tmp_path, make_assessment, make_bound, make_run, changes
):
    own = [make_assessment(bounds=[replace(make_bound(9.0), **changes)])]
    assert tables.strongest_bound(own, tables.Theorems(own)) is None
    text = write(make_run(tmp_path / "run", own)).read_text()
    assert "Mean error as PSNR: bound, attacks" not in text
    assert ("covers only unbiased attackers" in text) == (changes.get("covers") == "unbiased")
    assert ("estimate of a lower bound" in text) == (changes.get("covers") == "estimate")
    assert "estimate attackers" not in text


def test_measure_of_attacks_is_that_of_the_bound(make_assessment):
    own = [make_assessment(psnr=[10.0, 20.0]), make_assessment(seed=1, psnr=[20.0, 40.0])]
    (row,) = tables.configurations(own, tables.Names(own))
    assert 10 ** (-row.mean_error / 10) == pytest.approx((0.1 + 0.01 + 0.01 + 0.0001) / 4)
    assert tables.mean_error([]) is None
    assert tables.mean_error([-1e299, 1e299]) == pytest.approx(-297, abs=0.1)


def test_missing_bounds_are_explained(tmp_path, make_assessment, make_run, make_defense, hostile):
    why = f"the release has no Gaussian noise {hostile}"
    own = [make_assessment(defense=make_defense(n), bounds_note=why) for n in ("prune", "round")]
    text = write(make_run(tmp_path / "run", own)).read_text()
    assert (
        "A bound is missing for prune and round: the release has no Gaussian noise &lt;img" in text
    )
    assert hostile not in text


def test_a_data_dependent_law_stands_beside_the_guarantee(
    tmp_path, make_assessment, make_run, make_defense
):
    one = make_defense("a_noise")
    two = replace(make_defense("b_noise"), data_dependent_law=True)
    own = [make_assessment(defense=one), make_assessment(defense=two)]
    text = write(make_run(tmp_path / "run", own)).read_text()
    assert "depends on the private batch" not in _row(text, "a_noise")
    assert "known noise distribution<br><small>depends on the private batch" in _row(
        text, "b_noise"
    )
    assert text.count("known noise distribution, but it depends on the private batch") == 1
    assert "leaks information about the batch itself" in text


def test_leak_map_stands_between_truth_and_reconstruction_once_a_batch(tmp_path, make_bounded):
    folder = make_bounded(tmp_path / "run", seeds=2)
    text = write(folder).read_text()
    card = re.search(r"<article [^>]*>\s*<h3>gaussian.*?</article>", text, re.DOTALL).group()
    order = [
        "True examples",
        "Leak map of the batch",
        "of the prior’s uncertainty is removed",
        "Reconstructed by inverting",
        "Reconstructed by dlg",
    ]
    places = [card.index(words) for words in order]
    assert places == sorted(places)
    assert card.count("Leak map of the batch") == 1
    assert text.count("of the prior’s uncertainty is removed") == 8
    assert "Leak map of the batch" not in write(folder, images=False).read_text()


def test_utility_of_a_release(tmp_path, make_assessment, make_run):
    known = {"law": "Exact", "data_dependent": False, "withheld": 0.0, "unit": "client"}
    both = known | {"utility": {"first_order": 0.83, "second_order": 0.012}}
    text = write(make_run(tmp_path / "run", [make_assessment(release=both)])).read_text()
    shown = "Utility of this release: 83\N{NO-BREAK SPACE}% of first order kept; "
    assert shown + "second-order cost of noise 0.012" in text
    none = known | {"utility": {"first_order": None, "second_order": None}}
    text = write(make_run(tmp_path / "old", [make_assessment(release=none)])).read_text()
    assert "Utility of this release" not in text


def test_upper_bound_stands_in_the_heatmap_where_there_is_one(tmp_path, make_bounded, make_grid):
    text = write(make_bounded(tmp_path / "run")).read_text()
    (heat,) = re.findall(r'<table class="heat">.*?</table>', text, re.DOTALL)
    assert ">bound</th>" in heat
    lines = re.findall(r"<tr>.*?</tr>", heat, re.DOTALL)
    bounded = [line for line in lines if "gaussian_noise" in line]
    assert len(bounded) == 4
    assert all(re.search(r"<td class=\"n\">\d\d\.\d</td></tr>$", line) for line in bounded)
    assert text.count("an upper bound on the PSNR of every attacker’s mean error") == 1
    old = write(make_grid(tmp_path / "old", seeds=1)).read_text()
    assert ">bound</th>" not in old


def test_hostile_bounds_do_no_harm(tmp_path, make_bounded, hostile):
    text = write(make_bounded(tmp_path / "run", hostile=hostile)).read_text()
    assert hostile not in text
    assert text.count("<script") == 1
    assert "<img src=x" not in text
    assert text.count("784 directions&lt;img src=x") >= 5  # titles and the footnote
    assert "adam&lt;img src=x" in text
    ids = re.findall(r'<[^>]*? id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', text)) <= set(ids)


def test_huge_lists_are_cut(tmp_path, make_assessment, make_bound, make_run, make_defense):
    many = [make_bound(19.0, prior=f"prior {i}") for i in range(2000)]
    many[0] = replace(many[0], assumptions=("x" * 100_000, *map(str, range(5000))))
    own = [
        make_assessment(
            defense=make_defense("noise", std=i), bounds_note=f"why {i}", bounds=many[-1:]
        )
        for i in range(60)
    ]
    own[0] = replace(own[0], bounds=tuple(many))
    text = write(make_run(tmp_path / "run", own)).read_text()
    assert text.count('<li id="bound-') == tables.SHOWN
    assert "1,970 more bounds of other names or priors are in the records" in text
    assert text.count("A bound is missing for") == tables.SHOWN
    assert "30 more reasons" in text
    assert "x" * (tables.LONGEST + 1) not in text
    assert brief([str(i) for i in range(40)]).endswith("29 and 10 more")


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"bounds": {"a": 1}}, "bounds"),
        ({"bounds": ["trace"]}, "bounds[0]"),
        ({"bounds": [{"prior": 3}]}, "bounds[0].prior"),
        ({"bounds": [{"name": None}]}, "bounds[0].name"),
        ({"bounds": [{"value": True}]}, "bounds[0].value"),
        ({"bounds": [{"value": -0.1}]}, "bounds[0].value"),
        ({"bounds": [{"value": 10**301}]}, "bounds[0].value"),
        ({"bounds": [{"psnr": "19"}]}, "bounds[0].psnr"),
        ({"bounds": [{"psnr": 1e200}]}, "bounds[0].psnr"),
        ({"bounds": [{"covers": ["all"]}]}, "bounds[0].covers"),
        ({"bounds": [{"on_average": 1}]}, "bounds[0].on_average"),
        ({"bounds": [{"equation": 4}]}, "bounds[0].equation"),
        ({"bounds": [{"assumptions": "one"}]}, "bounds[0].assumptions"),
        ({"bounds": [{"assumptions": [{}]}]}, "bounds[0].assumptions[0]"),
        ({"bounds": [{"standard_error": "x"}]}, "bounds[0].standard_error"),
        ({"bounds_note": ["no"]}, "bounds_note"),
        ({"verdict": "protected on the whole"}, "verdict"),
        ({"release": {"utility": {"first_order": "0.8"}}}, "release.utility[...]"),
        ({"release": {"utility": [1]}}, "release.utility"),
        ({"release": 7}, "release"),
        ({"pictures": ["a"]}, "pictures"),
        ({"pictures": {"leak_map": "../x.png"}}, "pictures[...]"),
        ({"defense": {"data_dependent_law": "yes"}}, "defense.data_dependent_law"),
    ],
)
def test_damaged_fields_are_refused(
    tmp_path, make_assessment, make_bound, make_run, changes, place
):
    fields = msgspec.to_builtins(make_assessment())
    for name, value in changes.items():
        if name == "bounds" and isinstance(value, list) and isinstance(value[0], dict):
            value = [msgspec.to_builtins(make_bound()) | value[0]]
        elif isinstance(value, dict) and name != "pictures":
            value = (fields[name] if isinstance(fields[name], dict) else {}) | value
        fields[name] = value
    with pytest.raises(ValueError, match=rf"line 1 is damaged: .* - at `\$\.{re.escape(place)}`"):
        write(make_run(tmp_path / "run", [fields]))
