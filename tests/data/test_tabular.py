"""Tables of scikit-learn, and attacks on their records."""

import sys

import pytest
import torch
from sklearn import datasets

from leakbound import models
from leakbound.attacks import ConstantImage, GradientMatching, LinearInversion, dlg
from leakbound.data.raw import Options
from leakbound.data.tabular import TABLES, Column, Table, as_images, load_table
from leakbound.defenses import ClipExamples, GaussianNoise, NoDefense, chain
from leakbound.domains import column_errors
from leakbound.metrics import evaluate
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.random import stream
from leakbound.types import NotApplicable, Task

SIZES = {
    "breast_cancer": (569, 30, 2),
    "diabetes": (442, 10, 2),
    "iris": (150, 4, 3),
    "wine": (178, 13, 3),
}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables_are_scikit_learns_in_unit_columns(name):
    table = load_table(name)
    count, width, classes = SIZES[name]
    assert table.inputs.shape == (count, width)
    assert (table.inputs.dtype, table.labels.dtype) == (torch.float32, torch.int64)
    assert table.classes == classes
    assert set(table.labels.tolist()) == set(range(classes))
    assert (table.inputs.amin(0) == 0).all()
    assert (table.inputs.amax(0) == 1).all()
    options = {"scaled": False} if name == "diabetes" else {}
    theirs = getattr(datasets, f"load_{name}")(**options)
    original = table.original(table.inputs)
    assert torch.allclose(original, torch.from_numpy(theirs.data), atol=1e-3, rtol=1e-6)
    assert [column.name for column in table.columns] == [str(n) for n in theirs.feature_names]
    if name != "diabetes":
        assert table.labels.tolist() == theirs.target.tolist()
    else:
        assert 0.45 < table.labels.double().mean() < 0.55
    for k, column in enumerate(table.columns):
        assert column.whole == bool((theirs.data[:, k] == theirs.data[:, k].round()).all())


def _see(name, size, seed, defense=None, **settings):
    table = load_table(name)
    width = len(table.columns)
    model = models.mlp(
        input_shape=(1, 1, width), classes=table.classes, generator=stream(seed), **settings
    )
    order = torch.randperm(len(table.inputs), generator=stream(seed, "batch"))[:size]
    sources = [stream(seed, "defense", i) for i in range(2)]
    task = Task.of(model, classes=table.classes)
    return table, play(task, [table.batch(order)], defense or NoDefense(), sources)


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


def test_images_of_one_row():
    raw = as_images("iris")(Options(None, None, None))
    assert raw.images.shape == (150, 1, 1, 4)
    assert torch.equal(raw.images.flatten(1), load_table("iris").inputs)
    with pytest.raises(ValueError, match="neither size nor channels"):
        as_images("iris")(Options(8, None, None))


def test_odd_input(monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'iris'"):
        load_table("irises")
    with pytest.raises(ValueError, match="runs from 1 to 1"):
        Column("flat", 1, 1)
    columns = (Column("a", 0, 1),)
    with pytest.raises(ValueError, match="there are 1 columns"):
        Table("t", torch.zeros(2, 2), torch.zeros(2).long(), ("x",), columns)
    with pytest.raises(ValueError, match="labels holds 1"):
        Table("t", torch.zeros(2, 1), torch.zeros(1).long(), ("x",), columns)
    with pytest.raises(ValueError, match="labels run from 0 to 2"):
        Table("t", torch.zeros(2, 1), torch.tensor([0, 2]), ("x",), columns)
    kept = load_table("iris").subset(torch.tensor([3]))
    assert kept.batch(torch.tensor([0])).size == 1
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match="needs the package scikit-learn"):
        load_table("iris")
