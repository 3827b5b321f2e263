"""The user's own models: built by their code, with weights from their file."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from leakbound import check
from leakbound._util import copies, files, user_code
from leakbound.domains import TableDomain
from leakbound.domains.arguments import TakesRows

# What `build` may take or leave.
_OFFERED = ("input_shape", "classes", "generator", "domain")


def adapted(
    model: nn.Module,
    domain: TableDomain,
    *,
    form: str = "split",
    names: Sequence[str] = (),
) -> nn.Module:
    """A copy of a model of a table's columns that takes stored rows (N, n).

    `Task.of` does this by itself for the default form if the domain has columns with encoding
    "code" or "embedding". Names of weights do not change.

    Args:
        model: the model as the clients train it. A level's code is its place in the column's
            `levels`, and a missing value has the last. Each embedding sees columns alone.
        domain: the columns. Those with encoding "embedding" are passed as int64 codes.
        form: how the model is called. "split": `model(numbers (N, a), codes (N, b))`, where numbers
            are all other columns in order, a single code as one number; without columns of one
            kind, the argument is left out. "keywords": `model(age=..., city=...)`, by column.
            "dictionary": the same as one dictionary. A column is then (N, 1) for a number or a
            single code, (N, 2) with a flag for missing values, (N, L) for shares and (N,) for an
            embedding.
        names: for "split", the names of the two arguments if the order is another.

    Example:
        >>> import torch
        >>> from leakbound.domains import Column
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.city, self.out = nn.Embedding(3, 2), nn.Linear(3, 2)
        ...     def forward(self, x_cat, x_num):
        ...         return self.out(torch.cat([self.city(x_cat[:, 0]), x_num], 1))
        >>> city = Column("city", "categorical", levels=("a", "b", "c"), encoding="embedding")
        >>> domain = TableDomain((Column("age", "integer", 0, 100), city))
        >>> adapted(Net(), domain, names=("x_num", "x_cat"))(torch.eye(4)).shape
        torch.Size([4, 2])
    """
    taking_rows = copies.duplicate(model)
    vars(taking_rows)["forward"] = TakesRows(taking_rows.forward, domain, form, names)
    return taking_rows


def joined(
    model: nn.Module,
    parts: Mapping[str, Sequence[int]],
    *,
    form: str = "arguments",
) -> nn.Module:
    """A copy of a model of several inputs, such as an image and a table, that takes one (B, n).

    Its input holds the numbers of all parts in their order, so attacks search for all of them.
    Parts that the attacker has are known places (`--known places:0-8`). Names of weights do not
    change. A data set of your code (`data = "package.module:name"`) joins the parts of its items.

    Args:
        model: the model as the clients train it.
        parts: the shape of each input of one example, without the batch, by name.
        form: how the model is called. "arguments": `model(image, table)`. "keywords":
            `model(image=..., table=...)`. "dictionary": `model({"image": ..., "table": ...})`.
            "tuple": `model((image, table))`.

    Example:
        >>> import torch
        >>> class Net(nn.Linear):
        ...     def forward(self, image, table):
        ...         return super().forward(torch.cat([image.flatten(1), table], 1))
        >>> joined(Net(9, 2), {"image": (1, 2, 2), "table": (5,)})(torch.ones(3, 9)).shape
        torch.Size([3, 2])
    """
    check.one_of(JOINED, form=form)
    if len(parts) < 2:
        raise ValueError(f"parts is {dict(parts)!r}; give the shapes of two inputs or more")
    taking_parts = copies.duplicate(model)
    shapes = {name: tuple(shape) for name, shape in parts.items()}
    vars(taking_parts)["forward"] = TakesParts(taking_parts.forward, shapes, form)
    return taking_parts


JOINED = (
    "arguments",
    "keywords",
    "dictionary",
    "tuple",
)


@dataclass(frozen=True)
class TakesParts:
    """The forward pass of a model of several inputs, for all of their numbers (B, n)."""

    forward: Callable[..., Any]
    shapes: Mapping[str, tuple[int, ...]]
    form: str

    def __call__(self, inputs: Tensor) -> Any:
        """The model's output."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        if inputs.ndim != 2 or inputs.shape[1] != sum(sizes):
            raise ValueError(
                f"inputs have shape {tuple(inputs.shape)}; the parts {dict(self.shapes)} joined "
                f"have ({sum(sizes)},) for each example"
            )
        named = {}
        for (name, shape), part in zip(
            self.shapes.items(),
            torch.split(inputs, sizes, 1),
            strict=True,
        ):
            named[name] = part.reshape(-1, *shape)
        if self.form == "keywords":
            return self.forward(**named)
        if self.form == "dictionary":
            return self.forward(named)
        values = tuple(named.values())
        return self.forward(values) if self.form == "tuple" else self.forward(*values)


def load_user_model(path: str, **kwargs: Any) -> nn.Module:
    """Import "package.module:build" and call `build` with the keyword arguments that it takes.

    This runs the user's code. `build` gets those of `input_shape`, `classes`, `generator` and
    `domain` that its signature names. PyTorch's global random state is seeded from `generator` for
    the call and then restored, so a `build` without a generator is reproducible too.
    """
    build = user_code.find("model", path)
    arguments = _accepted(path, build, kwargs)
    try:
        with user_code.seeded(kwargs.get("generator")):
            model = build(**arguments)
    except Exception as error:
        raise ValueError(f"model {path!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model {path!r} returned a {type(model).__name__}; return a torch.nn.Module"
        )
    try:
        copies.refuse(model)
    except ValueError as error:
        raise ValueError(f"model {path!r}: {error}") from error
    return model


def missing_arguments(build: Callable[..., Any]) -> list[str] | None:
    """The arguments that `load_user_model` would have to be given for a function or a class.

    Returns:
        Their names; None if its path is none that can be imported again.

    Example:
        >>> missing_arguments(nn.Flatten), missing_arguments(nn.Linear)
        ([], ['in_features', 'out_features'])
    """
    # Nested functions, and those of a script, cannot be imported by their names.
    if "." in build.__qualname__ or build.__module__ in ("__main__", "__mp_main__"):
        return None
    parameters = inspect.signature(build).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
    return [name for name in needed if name not in _OFFERED]


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy a safetensors state dict into `model`; change nothing if a tensor does not fit."""
    model.load_state_dict(read_weights(path, lambda shapes: model.state_dict()))


def read_weights(
    path: Path,
    choose: Callable[[dict[str, tuple[int, ...]]], Mapping[str, Tensor]],
    *,
    name: str = "weights",
    ignored: Collection[str] = (),
) -> dict[str, Tensor]:
    """The tensors of a safetensors file, read only after every name, shape and kind fits.

    `choose` gives the wanted tensors (only shape and type count) from the file's names and shapes.
    `ignored` may be in the file and are not read. `name` is the file's name in errors.
    """
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{name} is {str(path)!r}; give a .safetensors file. Pickled files (.pt, .pth, .bin) "
            "can run code when opened and are refused: convert with safetensors.torch."
            "save_file(model.state_dict(), ...), or save_model(model, ...) for shared tensors"
        )
    files.check_regular(path, name)
    try:
        with safe_open(path, framework="pt") as file:
            # Slices read the header alone: no tensor is loaded before all shapes fit.
            stored = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            shapes = {key: tuple(part.get_shape()) for key, part in stored.items()}
            floats = {key: part.get_dtype().startswith(("F", "BF")) for key, part in stored.items()}
            wanted = choose(shapes)
            problem = _mismatch(wanted, shapes, floats, ignored)
            if problem:
                raise ValueError(f"{name} {str(path)!r} do not fit the model: {problem}")
            return {key: file.get_tensor(key) for key in wanted}
    except SafetensorError as error:
        raise ValueError(
            f"{name} {str(path)!r} is not a valid safetensors file: {error}"
        ) from error


def _mismatch(
    wanted: Mapping[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    floats: dict[str, bool],
    ignored: Collection[str],
) -> str:
    for name, tensor in wanted.items():
        if name not in shapes:
            return f"{name} {tuple(tensor.shape)} is missing from the file"
        if shapes[name] != tuple(tensor.shape):
            return f"{name} is {shapes[name]} in the file and {tuple(tensor.shape)} in the model"
        if floats[name] != tensor.is_floating_point():
            kinds = ("floats", "integers") if floats[name] else ("integers", "floats")
            return f"{name} holds {kinds[0]} in the file and {kinds[1]} in the model"
    unknown = [name for name in shapes if name not in wanted and name not in ignored]
    return f"{unknown[0]} is in the file but not in the model" if unknown else ""


def _accepted(
    path: str,
    build: Callable[..., Any],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError) as error:
        raise ValueError(f"model {path!r} has no readable signature; wrap it in a def") from error
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    # What the user gave is always passed, so that a misspelled name is an error.
    arguments = {k: v for k, v in kwargs.items() if takes_all or k in named or k not in _OFFERED}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"model {path!r} cannot be called with ({', '.join(arguments)}): {error}"
        ) from error
    return arguments
