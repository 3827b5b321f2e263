"""Thousands of experiments in one folder, their records made of a few real ones."""

from __future__ import annotations

import re
from itertools import chain

import pytest
from msgspec.structs import replace

from leakbound import audit, report
from leakbound._util import files
from leakbound.assess.record import encode
from leakbound.audit.experiment import died
from leakbound.audit.run_file import claim, header

SHAPES = {
    "few digits": ("mnist5k", 32, [0, 1], {"name": "inverting_gradients", "steps": 1}),
    "digits": ("mnist5k", 32, [0, 1], {"name": "inverting_gradients", "steps": [1, 2, 3, 4]}),
    "rows": ("breast_cancer", 4, [0, 1, 2, 3, 4], {"name": "mean_image"}),
}
"""Source, batch size, seeds and the second attack: many configurations, and long pages."""


def plan_of(shape, settings):
    source, size, seeds, attack = SHAPES[shape]
    noise = [i / 1000 for i in range(1, settings + 1)]
    table = {
        "name": "scale",
        "seeds": seeds,
        "batch_sizes": [size],
        "data": {"source": source},
        "models": [{"name": "mlp", "hidden": [16]}],
        "attacks": [{"name": "linear_inversion"}, attack],
        "defenses": [{"name": "gaussian_noise", "noise_std": noise}],
    }
    return audit.parse(table)


@pytest.fixture(
    scope="module",
    params=[
        ("few digits", 510),  # more than a page shows
        pytest.param(("digits", 1000), marks=pytest.mark.slow),
        pytest.param(("rows", 1000), marks=pytest.mark.slow),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def folder(request, tmp_path_factory):
    """A finished run; returns also its plan and the bytes of one experiment's pictures."""
    place = tmp_path_factory.mktemp("scale") / "run"
    shape, settings = request.param
    real, plan = plan_of(shape, 1), plan_of(shape, settings)
    context = audit.PlanContext(plan.data)
    ran = list(audit.run(real, context=context))
    known = {(one.record.attack.hash, one.record.seed): one.record for one in ran}

    def lines():
        for unit in plan.experiments():
            own = died(unit, context).record
            base = known[own.attack.hash, own.seed]
            yield encode(replace(base, experiment=own.experiment, defense=own.defense))

    files.folder(place, "pictures")
    claim(place, header(plan, context, True))
    files.write(place / "records.jsonl", lines(), key="experiment")
    for name, content in chain(*(one.pictures.items() for one in ran)):
        files.write(place / "pictures" / name, content)
    pictures = sum(len(content) for one in ran for content in one.pictures.values()) / len(ran)
    return place, plan, pictures


def test_a_whole_folder_runs_nothing_again(folder):
    place, plan, _ = folder
    count = len(plan.experiments())
    before = (place / "records.jsonl").read_bytes()

    def run(plan, done, **more):
        assert len(done) == count
        yield from ()

    found = audit.audit(plan, place, run=run)
    assert (found.experiments, found.failed) == (count, 0)
    assert (place / "records.jsonl").read_bytes() == before


def test_pages_stay_small_and_show_each_experiment_once(folder):
    """Under 5 MB a page and 500 MB for 10,000, though the most that a page shows is here."""
    place, plan, pictures = folder
    count = len(plan.experiments())
    report.write(place)
    pages = sorted(place.glob("report*.html"))
    assert max(page.stat().st_size for page in pages) < 5e6
    shown = [one for p in pages for one in re.findall(r"experiment <code>(\w+)<", p.read_text())]
    assert sorted(shown) == sorted(unit.id for unit in plan.experiments())
    first = (place / "report.html").read_text()
    assert "The 500 most exposed are here" in first
    assert f"The 500 defenses with the highest scores are here, of {len(plan.defenses)}." in first
    written = sum(p.stat().st_size for p in place.iterdir() if p.is_file())
    assert written + count * pictures < 500e6 * count / 10_000
