"""Tables of scikit-learn, and attacks on their records."""

import sys

import pytest
import torch
from sklearn import datasets

from leakbound import models
from leakbound.attacks import ConstantImage, GradientMatching, LinearInversion, dlg
from leakbound.data import load
from leakbound.data.packaged import TABLES, table
from leakbound.data.raw import Options
from leakbound.defenses import ClipExamples, GaussianNoise, NoDefense, chain
from leakbound.domains import Column, column_errors
from leakbound.metrics import evaluate
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.random import stream
from leakbound.types import Batch, NotApplicable, Task

SIZES = {
    "breast_cancer": (569, 30, 2),
    "diabetes": (442, 10, 2),
    "iris": (150, 4, 3),
    "wine": (178, 13, 3),
}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables_are_scikit_learns_in_unit_columns(name):
    ours = load(name)
    inputs = ours.inputs.flatten(1)
    count, width, classes = SIZES[name]
    assert ours.inputs.shape == (count, 1, 1, width)
    assert (inputs.dtype, ours.labels.dtype) == (torch.float32, torch.int64)
    assert ours.classes == classes
    assert set(ours.labels.tolist()) == set(range(classes))
    assert (inputs.amin(0) == 0).all()
    assert (inputs.amax(0) == 1).all()
    options = {"scaled": False} if name == "diabetes" else {}
    theirs = getattr(datasets, f"load_{name}")(**options)
    low, wide = (torch.tensor([getattr(c, f) for c in ours.columns]) for f in ("low", "width"))
    original = low + wide * inputs.double()
    assert torch.allclose(original, torch.from_numpy(theirs.data), atol=1e-3, rtol=1e-6)
    assert [column.name for column in ours.columns] == [str(n) for n in theirs.feature_names]
    if name != "diabetes":
        assert ours.labels.tolist() == theirs.target.tolist()
    else:
        assert 0.45 < ours.labels.double().mean() < 0.55
    for k, column in enumerate(ours.columns):
        assert column.whole == bool((theirs.data[:, k] == theirs.data[:, k].round()).all())


def _see(name, size, seed, defense=None, **settings):
    table = load(name)
    width = len(table.columns)
    model = models.mlp(
        input_shape=(1, 1, width), classes=table.classes, generator=stream(seed), **settings
    )
    order = torch.randperm(len(table.inputs), generator=stream(seed, "batch"))[:size]
    sources = [stream(seed, "defense", i) for i in range(2)]
    task = Task.of(model, classes=table.classes)
    batch = Batch(table.inputs[order].flatten(1), table.labels[order])
    return table, play(task, [batch], defense or NoDefense(), sources)


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_record_is_read_off_the_first_layer_to_the_last_digit(name):
    for seed in range(5):
        table, played = _see(name, 1, seed)
        answer = LinearInversion()(played.observation, stream(seed))
        assert answer.problem is None
        assert answer.inputs.shape == (1, len(table.columns))
        found = column_errors(table.columns, played.truth.inputs, answer.inputs)
        widths = [column.width for column in table.columns]
        assert all(e.worst <= 1e-4 * width for e, width in zip(found, widths, strict=True))


def test_whole_numbers_of_several_records_are_known():
    """Ages, sexes and laboratory values of diabetes, 4 records at once."""
    right, known = [], []
    for seed in range(5):
        table, played = _see("diabetes", 4, seed, hidden=(1024,))
        paired = pair(played.truth, LinearInversion()(played.observation, stream(seed)))
        columns = [column for column in table.columns if column.whole]
        at = [k for k, column in enumerate(table.columns) if column.whole]
        found = column_errors(columns, played.truth.inputs[:, at], paired.inputs[:, at])
        known += [error.matched for error in found]
        right += evaluate(paired, data_range=1.0)["psnr"]
    share = sum(known) / len(known)
    print(f"\ndiabetes, 4 records: {share:.0%} of the whole numbers")
    assert share >= 0.5


@pytest.mark.parametrize(
    "attack",
    [ConstantImage(0.5), GradientMatching(steps=5), dlg(3, restarts=1), LinearInversion()],
    ids=repr,
)
@pytest.mark.parametrize("defense", [None, GaussianNoise(0.01), chain(ClipExamples(0.1))], ids=repr)
def test_attacks_and_metrics_take_records_without_a_side(attack, defense):
    _, played = _see("wine", 2, 0, defense)
    answer = attack(played.observation, stream(0))
    assert answer.inputs.shape == (2, 13)
    found = evaluate(pair(played.truth, answer), data_range=1.0)
    assert all(value is not None for value in found["psnr"])
    assert found["ssim"] == [None, None]


def test_total_variation_needs_images():
    _, played = _see("wine", 2, 0)
    with pytest.raises(NotApplicable, match="needs images"):
        GradientMatching(steps=5, total_variation=0.1)(played.observation, stream(0))


def test_odd_input(monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'iris'"):
        table("irises", Options())
    with pytest.raises(ValueError, match="no size or channels"):
        load("iris", size=8)
    with pytest.raises(ValueError, match="runs from 1 to 1"):
        Column("flat", 1, 1)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match="needs the package scikit-learn"):
        load("iris")
