"""Galleries of reconstructions, from an audit that really ran."""

import csv

import numpy as np
import pytest
from matplotlib.image import imread
from msgspec.structs import replace

from leakbound import audit
from leakbound_reproductions.gallery import Strip, draw
from leakbound_reproductions.optimal_defenses.points import Key, first_records

EXACT, LOUD = Key("none"), Key("gaussian_noise", "noise_std", 1.0)


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """The folder of an audit: an exact attack without a defense, and under much noise."""
    folder = tmp_path_factory.mktemp("gallery") / "run"
    plan = audit.parse(
        {
            "name": "gallery",
            "data": {"source": "digits"},
            "models": [{"name": "mlp", "hidden": [32]}],
            "attacks": [{"name": "linear_inversion"}],
            "defenses": [{"name": "none"}, {"name": "gaussian_noise", "noise_std": 1.0}],
            "seeds": [4, 2],
            "batch_sizes": [1],
            "error_bound": {"kind": "none"},
        }
    )
    audit.audit(plan, folder)
    return folder


def _strips(folder):
    records = first_records(folder)
    return [Strip("exact", records[EXACT], folder), Strip("loud", records[LOUD], folder)]


def test_the_first_round_is_shown(audited):
    assert {record.seed for record in first_records(audited).values()} == {2}


def test_a_gallery_shows_the_image_then_each_reconstruction(audited, tmp_path):
    path = tmp_path / "gallery.png"
    assert draw({"linear": _strips(audited)}, path)
    shown = imread(path)[..., :3].mean(-1)
    third = len(shown) // 3
    truth, exact, loud = (shown[at * third : (at + 1) * third] for at in range(3))
    # Below the titles: what an exact attack found looks like the image, what noise left does not.
    body = slice(third // 3, None)
    assert np.abs(truth[body] - exact[body]).mean() < 0.03
    assert np.abs(truth[body] - loud[body]).mean() > 0.05


def test_its_values_are_the_scores_of_each_image(audited, tmp_path):
    draw({"linear": _strips(audited)}, tmp_path / "gallery.png")
    with (tmp_path / "gallery.values.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    exact, loud = first_records(audited)[EXACT], first_records(audited)[LOUD]
    found = [(row["panel"], row["series"], float(row["y"])) for row in rows]
    assert found == [("linear", "exact", exact.scores[0]), ("linear", "loud", loud.scores[0])]


def test_nothing_is_drawn_without_pictures(audited, tmp_path):
    bare = [Strip(s.label, replace(s.record, pictures={}), s.audit) for s in _strips(audited)]
    assert not draw({"linear": bare}, tmp_path / "gallery.png")
    assert not draw({}, tmp_path / "gallery.png")
    assert not [*tmp_path.iterdir()]
