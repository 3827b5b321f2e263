"""Data sets that the user's code builds: their items, labels, and what is refused."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from leakbound.data import load
from leakbound.data.sources import is_code

CODE = """
import numpy as np
import torch
from PIL import Image

WHOLE = np.arange(3 * 2 * 4 * 5).reshape(3, 2, 4, 5)

class Items(torch.utils.data.Dataset):
    def __init__(self, form="dictionary", count=3):
        self.form, self.count = form, count

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        image = torch.from_numpy(WHOLE[at]).float() / 255
        if self.form == "dictionary":
            return {"image": image, "label": torch.tensor([at]), "path": "x"}
        if self.form == "tuple":
            return image, at
        if self.form == "alone":
            return image
        if self.form == "mask":
            return {"image": image, "label": (image[:1] > 0.1).float()}
        if self.form == "flags":
            return image, np.array([at == 0, at > 0])
        if self.form == "number":
            return image, 0.5 * at
        if self.form == "volume":
            return image[None], at
        raise OSError("the disk is gone")

def stream():
    yield from ((torch.zeros(1, 4, 4), at % 2) for at in range(1000))

class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return stream()

def pictures():
    return [(Image.fromarray(np.full((4, 6, 3), 51 * at, np.uint8)), at) for at in range(3)]

def loader():
    return torch.utils.data.DataLoader(Items("tuple"))

class Random(Items):
    def __getitem__(self, at):
        return torch.rand(1, 4, 4), at

def of(*items):
    return list(items)

def bright(): return of((torch.full((1, 4, 4), 7.0), 0))
def uneven(): return of((torch.rand(1, 4, 4), 0), (torch.rand(1, 5, 4), 1))
def flat(): return of((torch.rand(4), 0))
def parts():
    first = {"a": torch.full((1, 2, 2), 51, dtype=torch.uint8), "b": torch.tensor([0.5, 1.0])}
    return of((first, 1), ((torch.zeros(1, 2, 2), torch.ones(2)), 0))
def keys(): return of({"scan": torch.rand(1, 4, 4)})
def three(): return of((torch.rand(1, 4, 4), 0, 1))
def words(): return of(("a text", 0))
def named(): return of((torch.rand(1, 4, 4), "cat"))
def empty(): return of()
def boxes(): return of((torch.rand(1, 4, 4), torch.rand(3, 2)))
def twos(): return of((torch.rand(1, 4, 4), torch.tensor([0, 2])))
"""


@pytest.fixture(autouse=True)
def _code(tmp_path, monkeypatch):
    (tmp_path / "own_items.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_items", None)


@pytest.mark.parametrize("form", ["dictionary", "tuple", "alone"])
def test_items_of_three_forms(form):
    data = load(f"own_items:Items,form={form}")
    whole = np.arange(3 * 2 * 4 * 5).reshape(3, 2, 4, 5)
    assert np.allclose(data.inputs.numpy() * 255, whole, atol=1e-4)
    assert data.labels.tolist() == ([0, 0, 0] if form == "alone" else [0, 1, 2])
    assert data.domain.name == "images"
    assert data.fingerprint == load(f"own_items:Items,form={form}").fingerprint


def test_labels_of_every_kind():
    mask = load("own_items:Items,form=mask")
    assert mask.labels.shape == (3, 4, 5)
    assert mask.labels.dtype == torch.int64
    assert mask.classes == 2
    several = load("own_items:Items,form=flags")
    assert several.labels.tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    assert several.class_names == ("0", "1")
    number = load("own_items:Items,form=number")
    assert (number.labels.tolist(), number.classes) == ([0.0, 0.5, 1.0], 0)
    assert load("own_items:Items,form=volume").domain.name == "volumes"


def test_the_limit_ends_a_stream_and_the_size_resizes():
    assert load("own_items:Streamed", limit=5).labels.tolist() == [0, 1, 0, 1, 0]
    assert load("own_items:stream", limit=2, size=8).inputs.shape == (2, 1, 8, 8)


def test_pictures_have_their_channels_first():
    data = load("own_items:pictures")
    assert data.inputs.shape == (3, 3, 4, 6)
    assert data.inputs[2].unique().tolist() == pytest.approx([0.4])
    assert Image.__name__ == "PIL.Image"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Items,form=none", "its code raised OSError: the disk is gone"),
        ("Items,size=3", "its code raised TypeError"),
        ("loader", "a DataLoader, whose items are batches; return its data set"),
        ("Random", "item 0 is another at the second reading; leave random transforms"),
        ("bright", "item 0 has values from 7 to 7; give uint8, or scale"),
        ("uneven", "item 1 has shape .*; resize all to one size"),
        ("flat", r"input of shape \(4,\); give \(C, H, W\)"),
        ("keys", "item 0 has the keys scan; give its input under"),
        ("three", "item 0 has 3 parts; give an input and a label"),
        ("words", "item 0 has an input of type str; give a tensor"),
        ("named", "labels differ in shape, or are no numbers"),
        ("empty", "it holds no item"),
        ("boxes", r"labels have shape \(1, 3, 2\); give a class number"),
        ("twos", "hold 2; for several classes at once give a 0 or 1"),
        ("missing", "module 'own_items' has no 'missing'"),
    ],
)
def test_what_is_no_data_set_is_named(name, words):
    with pytest.raises(ValueError, match=f"data source 'own_items:{name}.*{words}"):
        load(f"own_items:{name}")


def test_parts_of_an_input_are_joined():
    data = load("own_items:parts")
    assert data.domain.name == "values"
    assert torch.allclose(data.inputs[0], torch.tensor([0.2, 0.2, 0.2, 0.2, 0.5, 1.0]))
    assert data.inputs[1].tolist() == [0, 0, 0, 0, 1, 1]


def test_what_names_code():
    assert is_code("my.module:build,root=/x")
    assert load("own_items:Items,form=tuple", limit=1).labels.tolist() == [0]
    with pytest.raises(ValueError, match="its code raised TypeError"):
        load("own_items:Items,file=a.npz")
    assert not any(map(is_code, ("folder:x", "foldr:x", "digits", "C:/x.npz", "./a:b")))
    with pytest.raises(ValueError, match=r"there is no module 'no_such'; install it or add"):
        load("no_such:build")
