"""Presets by name: what they build, and hashes that only move when their meaning does."""

import inspect

import pytest

from leakbound import attacks
from leakbound.attacks import (
    Attack,
    GradientMatching,
    LinearInversion,
    published_inverting_gradients,
    settings_hash,
)
from leakbound.registry import build

HASHES = {
    "dlg": "bf24d7d29555",
    "gradient_matching": "94e345ee5271",
    "idlg": "84e4c172174c",
    "inverting_gradients": "1cfab6ed68f6",
    "inverting_gradients_large_steps": "14a1123ade6d",
    "linear_inversion": "97058adaff9d",
    "matching_over_rounds": "23717c32c255",
    "published_inverting_gradients": "dcd7ec80350d",
    "sparse_gradient_inversion": "94540cee2635",
    "sparse_gradient_inversion_paper": "62551f7d3b6d",
    "strong_matching": "3ebb9f9fed23",
}


@pytest.mark.parametrize("name", HASHES)
def test_a_preset_keeps_its_meaning(name):
    """A changed hash means that records of earlier versions are of another attack: say so."""
    attack = build("attack", name, {})
    assert isinstance(attack, Attack)
    assert settings_hash(attack) == HASHES[name]


PUBLISHED = {
    "breaching": "3f389e32b62e",
    "chen": "1a29c608eb0e",
    "geiping_cli": "dcd7ec80350d",
    "geiping_library": "99014879444a",
    "gradattack": "e2623b76a6c2",
}


@pytest.mark.parametrize("source", PUBLISHED)
def test_published_settings_keep_their_meaning(source):
    assert settings_hash(published_inverting_gradients(source)) == PUBLISHED[source]


def test_the_table_names_every_attack_and_no_two_are_alike():
    presets = {n for n in attacks.__all__ if inspect.isfunction(getattr(attacks, n))}
    presets -= {
        "infer",
        "infer_labels",
        "label_accuracy",
        "label_totals",
        "load_prior",
        "save_prior",
        "settings_hash",
        "train_prior",
    }
    assert presets | {"gradient_matching", "linear_inversion"} == set(HASHES)
    assert len(set(HASHES.values())) == len(HASHES)


def test_every_setting_moves_the_hash():
    base = settings_hash(GradientMatching())
    changed = [
        {"distance": "euclidean"},
        {"total_variation": 0.1},
        {"noise_variation": 0.1},
        {"optimizer": "lbfgs"},
        {"learning_rate": 0.2},
        {"steps": 2},
        {"signed": False},
        {"schedule": "cosine"},
        {"schedule": "stages"},
        {"schedule": "stages", "smoothing": 0.1},
        {"only_images": True},
        {"initialization": "uniform"},
        {"box": False},
        {"labels": "joint"},
        {"enough": 0.1},
        {"image": "deep_prior"},
        {"width": 8},
        {"batch_norm": 0.1},
        {"statistics": "proxy"},
        {"first_norm": 10.0},
        {"features": "package:tensor"},
        {"feature_weight": 1.0},
        {"feature_form": "span"},
        {"size": 0.1},
        {"prior": "a:b"},
        {"prior_weight": 1.0},
    ]
    assert len({settings_hash(GradientMatching(**c)) for c in changed} - {base}) == len(changed)
    assert settings_hash(LinearInversion(0.1)) != settings_hash(LinearInversion())


def test_restarts_wrap_the_search():
    assert attacks.inverting_gradients(restarts=3) == attacks.base.BestOf(
        attacks.inverting_gradients(), 3
    )
    assert isinstance(attacks.dlg(restarts=1), GradientMatching)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distance": "cosin"}, "did you mean 'cosine'"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'"),
        ({"schedule": "x"}, "schedule is 'x'"),
        ({"initialization": "x"}, "initialization is 'x'"),
        ({"labels": "true"}, "labels is 'true'"),
        ({"steps": 0}, "steps is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"total_variation": -1.0}, "total_variation is -1.0"),
        ({"noise_variation": -1.0}, "noise_variation is -1.0"),
        ({"enough": -1.0}, "enough is -1.0"),
        ({"smoothing": -1.0}, "smoothing is -1.0"),
        ({"smoothing": 0.1}, "smoothing is 0.1 and schedule 'step'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GradientMatching(**settings)
