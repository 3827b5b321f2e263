"""Records of tables that come inside scikit-learn: columns scaled into [0, 1], with their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbound import check
from leakbound.data.raw import Options, Raw
from leakbound.domains import Column
from leakbound.types import Batch

TABLES: dict[str, str] = {
    "breast_cancer": "569 tumors, 30 measurements, 2 classes (package scikit-learn)",
    "diabetes": "442 patients, 10 columns, progression up to or above the median (scikit-learn)",
    "iris": "150 flowers, 4 measurements, 3 classes (package scikit-learn)",
    "wine": "178 wines, 13 measurements, 3 classes (package scikit-learn)",
}
"""Table -> one line on what it holds."""


@dataclass(frozen=True, eq=False)
class Table:
    """Records with class labels.

    Shapes: inputs (N, n) float32 in [0, 1], labels (N,) int64.
    Assumptions: the columns' ranges are public; an attacker may use them.
    """

    name: str
    inputs: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if self.inputs.ndim != 2 or self.inputs.shape[1] != len(self.columns):
            raise ValueError(
                f"inputs has shape {tuple(self.inputs.shape)} and there are {len(self.columns)} "
                "columns; give (N, n) and one column for each of the n"
            )
        if len(self.labels) != len(self.inputs):
            raise ValueError(
                f"labels holds {len(self.labels)} numbers for {len(self.inputs)} records; "
                "give one for each"
            )
        check.finite("inputs", self.inputs)
        check.labels(self.labels, self.classes)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    def batch(self, indices: Tensor) -> Batch:
        """The records at the given indices as what one client holds."""
        return Batch(self.inputs[indices], self.labels[indices])

    def subset(self, indices: Tensor) -> Table:
        """The records at the given indices, scaled as before."""
        return replace(self, inputs=self.inputs[indices], labels=self.labels[indices])

    def original(self, values: Tensor) -> Tensor:
        """Scaled records (..., n) in the columns' own units, float64 on the CPU."""
        low = torch.tensor([column.low for column in self.columns], dtype=torch.float64)
        width = torch.tensor([column.width for column in self.columns], dtype=torch.float64)
        return low + width * values.detach().cpu().double()


def load_table(name: str) -> Table:
    """A table of `TABLES`, in its own order; every column's least value is 0, its greatest 1.

    Raises:
        ValueError: no such table, or scikit-learn is not installed.

    Example:
        >>> table = load_table("iris")
        >>> tuple(table.inputs.shape), table.columns[0].name, table.columns[0].high
        ((150, 4), 'sepal length (cm)', 7.9)
    """
    check.one_of(TABLES, table=name)
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ValueError(
            f"table {name!r} needs the package scikit-learn; install it with: "
            "pip install 'leakbound[data]'"
        ) from error
    options = {"scaled": False} if name == "diabetes" else {}
    found: Any = getattr(datasets, f"load_{name}")(**options)
    values = np.asarray(found.data, dtype=np.float64)
    labels = np.asarray(found.target)
    if name == "diabetes":
        labels = labels > np.median(labels)
        names: tuple[str, ...] = ("up to the median", "above the median")
    else:
        names = tuple(str(word) for word in found.target_names)
    columns = tuple(
        Column(str(word), float(part.min()), float(part.max()), bool((part % 1 == 0).all()))
        for word, part in zip(found.feature_names, values.T, strict=True)
    )
    low, high = values.min(0), values.max(0)
    inputs = torch.from_numpy((values - low) / (high - low)).to(torch.float32)
    return Table(name, inputs, torch.from_numpy(labels.astype(np.int64)), names, columns)


def as_images(name: str) -> Callable[[Options], Raw]:
    """The table as a source of images of one row, (N, 1, 1, n), for what asks for images."""

    def read(options: Options) -> Raw:
        if options.size is not None or options.channels is not None:
            raise ValueError(
                f"table {name!r} has neither size nor channels to change; leave both out"
            )
        table = load_table(name)
        images = table.inputs[:, None, None, :]
        return Raw(images, table.labels, table.class_names, table.columns)

    return read
