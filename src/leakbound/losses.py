"""The losses that clients train on: what a label is, and the derivative in the model's outputs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from leakbound import check
from leakbound._util import copies, user_code
from leakbound._util.text import row_of_text

__all__ = [
    "LOSSES",
    "UNSCORED",
    "NamedLoss",
    "dice",
    "named",
    "next_labels",
    "next_token",
    "token_cross_entropy",
]

Function = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class NamedLoss:
    """A loss of outputs (B, ...) and labels, the mean over all examples and terms, as a scalar.

    Attributes:
        name: its name in `LOSSES`; of other functions, their own name.
        targets: what a label is. "classes": a number (B,) of int64. "binary": 0 or 1 as a float,
            "real": any number, "count": a number from 0 on; one per output, (B,) for a single one.
            "class map": (B, H, W) of int64. "mask": 0 or 1 as a float, shaped as the output.
            "tokens": (B, n) of int64, UNSCORED where no output counts.
            "any": of a function that leakbound does not know.
        mean: the label at which an output is right; the derivative in the outputs is then
            scale * (mean(output) - label) / (B * terms). None: it has another form.
        slope: the derivative of `mean`, as a function of the mean.
        coded: labels are class numbers (B,), which are turned into a 0 or 1 per output.
        flags: labels are a 0 or 1 for each of several classes, (B, L).
        assumed: of functions that leakbound does not know: `targets` is the form of labels that
            the function took in a call (`fitted`), so their range is not checked.

    Example:
        >>> bce, outputs, labels = LOSSES["bce"], torch.zeros(2, 1), torch.tensor([0.0, 1.0])
        >>> bce(outputs, labels), bce.of_data(labels.long())(outputs, labels.long())
        (tensor(0.6931), tensor(0.6931))
    """

    name: str
    function: Function
    targets: str = "any"
    mean: Callable[[Tensor], Tensor] | None = None
    slope: Callable[[Tensor], Tensor] | None = None
    scale: float = 1.0
    coded: bool = False
    flags: bool = False
    assumed: bool = False

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        return self.function(output, self.target(output, labels))

    @property
    def by_class(self) -> bool:
        """Whether labels are class numbers, or probabilities of classes."""
        return self.coded or self.targets in ("classes", "any")

    @property
    def elementwise(self) -> bool:
        """Whether each output has a label of its own, and `mean` and `slope` are known."""
        return self.slope is not None

    @property
    def dense(self) -> bool:
        """Whether every pixel has a label."""
        return self.targets in ("class map", "mask")

    @property
    def of_inputs(self) -> bool:
        """Whether labels are the input's own tokens: who knows them knows the input."""
        return self.targets == "tokens"

    @property
    def has_classes(self) -> bool:
        """Whether labels are numbers of classes, of examples or of pixels."""
        return self.by_class or self.targets in ("class map", "tokens")

    def target(self, output: Tensor, labels: Tensor) -> Tensor:
        """The labels as the function takes them; as in `output` where each output has its own."""
        if self.coded and not labels.is_floating_point():
            width = output[0].numel()
            hot = labels if width == 1 else labels[:, None] == torch.arange(width).to(labels)
            return hot.to(output.dtype).reshape(output.shape)
        if self.coded and output[0].numel() == 1:  # probabilities of both classes
            return labels[:, 1].reshape(output.shape)
        if self.targets == "class map" and labels.ndim == output.ndim and labels.shape[1] == 1:
            return labels.squeeze(1)  # MONAI's class maps keep the channel
        if self.has_classes or labels.shape == output.shape:
            return labels
        if labels.numel() != output.numel():
            raise ValueError(
                f"labels has shape {tuple(labels.shape)} and the model's output "
                f"{tuple(output.shape)}; the loss {self.name!r} takes one {self.targets} label for "
                "each output"
            )
        return labels.reshape(output.shape)

    def of_data(self, labels: Tensor) -> NamedLoss:
        """The loss on a data set's labels: numbers (N,), class numbers (N,), a float of 0 or 1 for
        each class (N, L), or class maps.

        Raises:
            ValueError: it does not take such labels, nor others that can be made of them.
        """
        if self.targets == "any":
            return self
        elements = self.targets in ("binary", "real", "count")
        several = labels.ndim == 2 and labels.is_floating_point()
        if several and self.name == "cross_entropy":
            return replace(LOSSES["bce"], flags=True)
        if labels.ndim > 1 and self.name == "cross_entropy":
            return LOSSES["next_token" if labels.ndim == 2 else "dense_cross_entropy"]
        if several:
            what = "a 0 or 1 for each class"
            fits = elements
            fitting = "bce, mse, l1, poisson"
        elif labels.ndim == 2:
            what = "tokens"
            fits = self.of_inputs
            fitting = "next_token, token_cross_entropy"
        elif labels.ndim > 2:
            what = "class maps"
            fits = self.dense or self.targets == "binary"
            fitting = "dense_cross_entropy, dice, bce"
        elif labels.is_floating_point():
            what = "numbers"
            fits = elements
            fitting = "mse, l1, poisson"
        else:
            what = "class numbers"
            fits = self.by_class or elements
            fitting = "cross_entropy, bce, mse, l1, poisson"
        if not fits:
            raise ValueError(
                f"loss is {self.name!r}, but the data's labels are {what}; give one of {fitting}"
            )
        coded = what == "class numbers" and elements
        return replace(self, coded=coded, flags=several) if coded or several else self

    def outputs(self, classes: int) -> int:
        """Outputs of a model for this many classes, 0 for labels that are numbers; per pixel."""
        both = self.targets == "binary" and classes == 2 and not self.flags
        return 1 if both or not classes or self.targets == "mask" else classes

    def misfit(self, output: Tensor, count: int) -> str | None:
        """Why a model's output for this many examples does not fit the loss; None if it does."""
        forms = {
            "classes": (2, 2, "one row of class scores (B, K)"),
            "any": (2, 5, "one row of outputs (B, K)"),
            "class map": (3, 5, "scores of classes for each pixel, (B, K, H, W)"),
            "mask": (1, 5, "one number for each pixel, (B, 1, H, W)"),
            "tokens": (3, 3, "scores of tokens for each place, (B, n, V)"),
        }
        least, most, form = forms.get(self.targets, (1, 5, "one row of outputs (B, K)"))
        if least <= output.ndim <= most and len(output) == count:
            return None
        return (
            f"the model returns {tuple(output.shape)}, and the loss {self.name!r} takes {form}; "
            "give another loss (--loss), or a model that returns this"
        )

    def check(self, labels: Tensor, classes: int | None) -> None:
        """Reject labels of another type or range; `classes` as in `Task`.

        Raises:
            ValueError: labels do not fit the loss.
        """
        whole = "give one class number per pixel, (B, H, W) of torch.int64"
        if self.assumed or (
            self.targets == "any" and (labels.ndim > 1 or labels.is_floating_point())
        ):
            check.finite("labels", labels)  # such as a mask: only the function knows
        elif self.by_class:
            if classes is not None and labels.ndim == 3 and self.targets == "classes":
                raise ValueError(
                    f"labels has shape {tuple(labels.shape)}; for class maps give "
                    'loss="dense_cross_entropy"'
                )
            check.labels(labels, classes)
        elif self.targets == "tokens":
            scored = labels[labels != UNSCORED]
            if labels.ndim != 2 or labels.dtype != torch.int64 or not len(scored):
                raise ValueError(
                    f"labels has shape {tuple(labels.shape)} and type {labels.dtype}; give tokens "
                    f"(B, n) of torch.int64, {UNSCORED} where none counts, and some that count"
                )
            check.labels(scored, classes)
        elif self.targets == "class map":
            if labels.ndim < 2 or labels.dtype != torch.int64:
                raise ValueError(
                    f"labels has shape {tuple(labels.shape)} and type {labels.dtype}; {whole}"
                )
            check.labels(labels.flatten(), classes)
        elif not labels.is_floating_point():
            raise ValueError(
                f"labels has type {labels.dtype}, but the loss {self.name!r} takes {self.targets} "
                "labels as floats; give labels.float()"
            )
        else:
            check.finite("labels", labels)
            low, high = (float(v) for v in labels.aminmax())
            most = 1.0 if self.targets in ("binary", "mask") else float("inf")
            if self.targets != "real" and not 0 <= low <= high <= most:
                raise ValueError(
                    f"labels run from {low:g} to {high:g}, but the loss {self.name!r} takes "
                    f"{self.targets} labels, from 0 {'to 1' if most == 1 else 'on'}"
                )

    def searched(self, free: Tensor) -> Tensor:
        """Labels for the free numbers that a search moves: (B, K) for classes, else as outputs."""
        if self.has_classes:
            return free.softmax(1)
        if self.targets in ("binary", "mask"):
            return free.sigmoid()
        return functional.softplus(free) if self.targets == "count" else free

    def decided(self, free: Tensor) -> Tensor:
        """The labels that such numbers stand for."""
        if self.has_classes:
            return free.argmax(1)
        labels = self.searched(free)
        return labels.round() if self.targets in ("binary", "mask") else labels

    def classified(
        self,
        output: Tensor,
        labels: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Predicted and true classes (N,) of outputs (B, K, ...): of all examples, pixels of a
        mask, or scored tokens.
        """
        if self.targets == "tokens":
            if self.name == "next_token":
                output = output[:, :-1]
                labels = labels[:, 1:]
            scored = labels != UNSCORED
            return output.argmax(-1)[scored], labels[scored]
        one = output[0].numel() == labels[0].numel()
        predicted = output.reshape(labels.shape) > 0 if one else output.argmax(1)
        return predicted.long().flatten(), labels.long().flatten()


def check_fit(
    loss: NamedLoss,
    output: Tensor,
    labels: Tensor,
) -> None:
    """Reject labels that the function does not take for such outputs.

    Raises:
        ValueError: it fails, or returns no scalar.
    """
    mend = "give labels in the form that the client's loss takes"
    form = f"labels has shape {tuple(labels.shape)} and type {labels.dtype}"
    try:
        with torch.no_grad():
            value = loss(output, labels)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{form}, and the loss {loss.name!r} raised {said!r}; {mend}") from error
    if not isinstance(value, Tensor) or value.ndim:
        raise ValueError(
            f"the loss {loss.name!r} returns no scalar for the model's output; give a loss "
            "that returns the mean over all examples, such as by reduction='mean'"
        )


@dataclass(frozen=True)
class OutputParts:
    """A function on a dict, tuple or list of outputs, from all of them as one row (B, K).

    `form` is what `torch.utils._pytree` knows of it; `shapes` are those of its parts without the
    batch.
    """

    function: Function
    form: Any
    shapes: tuple[torch.Size, ...]

    @staticmethod
    def of(
        function: Function,
        output: Any,
        count: int,
    ) -> OutputParts:
        """The form of this output for `count` examples.

        Raises:
            ValueError: it has other parts than tensors of floats with a row for each example.
        """
        parts, form = pytree.tree_flatten(output)
        for part in parts:
            tensor = isinstance(part, Tensor)
            if not tensor or not part.is_floating_point() or part.shape[:1] != (count,):
                held = f"shape {tuple(part.shape)}, {part.dtype}" if tensor else f"{part!r}"[:60]
                raise ValueError(
                    f"the model returns a {type(output).__name__} with a part ({held}) that is no "
                    "tensor of floats with a row for each example; return only such parts"
                )
        return OutputParts(function, form, tuple(part.shape[1:] for part in parts))

    def joined(self, output: Any) -> Tensor:
        """All parts of a model's output as one row (B, K)."""
        parts, _ = pytree.tree_flatten(output)
        return torch.cat([part.reshape(len(part), -1) for part in parts], 1)

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        rows = torch.split(output, [shape.numel() for shape in self.shapes], 1)
        parts = [
            row.reshape(len(output), *shape) for row, shape in zip(rows, self.shapes, strict=True)
        ]
        return self.function(pytree.tree_unflatten(parts, self.form), labels)


@dataclass(frozen=True)
class ClassMaps:
    """A function on class maps: numbers (B, *S), or probabilities (B, K, *S) if it has a soft form.

    `channel`: the function takes numbers as (B, 1, *S).
    """

    function: Function
    channel: bool
    soft: Function | None

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        if labels.shape == output.shape and self.soft is not None:
            return self.soft(output, labels)
        whole = labels.long()
        return self.function(output, whole.unsqueeze(1) if self.channel else whole)


def fitted(loss: NamedLoss, output: Tensor) -> NamedLoss:
    """The loss with the form of labels that it takes for outputs (B, K, *S) of pixels or voxels.

    Only calls show what a function takes that leakbound does not know: class maps (B, 1, *S) or
    (B, *S), or a number for each output. Probabilities of classes count as taken, and a search may
    use them, if they give the value that class maps give. Other losses stay as they are.

    Example:
        >>> own = named(lambda output, mask: dice(output, mask))
        >>> fitted(own, torch.zeros(1, 1, 4, 4)).targets, fitted(own, torch.zeros(1, 5)).targets
        ('mask', 'any')
    """
    if loss.targets != "any" or output.ndim < 3:
        return loss
    classes, *places = output.shape[1:]
    # A number of examples that is not that of classes: labels must not expand to the outputs.
    count = 2 if classes != 2 else 3
    output = output[:1].expand(count, *output.shape[1:])
    whole = torch.arange(count * output[0, 0].numel(), device=output.device) % classes
    whole = whole.reshape(count, *places)
    if classes > 1:
        for channel in (False, True):
            taken = ClassMaps(loss.function, channel, None)
            value = _value(taken, output, whole)
            spread = channel and _expands(loss.function, output, whole, value)
            if value is not None and not spread:
                soft = _soft(loss.function, output, whole, value)
                function = replace(taken, soft=soft)
                return replace(loss, function=function, targets="class map", assumed=True)
    if _value(loss.function, output, torch.zeros_like(output)) is None:
        return loss
    return replace(loss, targets="mask", assumed=True)


def _soft(
    function: Function,
    output: Tensor,
    whole: Tensor,
    value: Tensor,
) -> Function | None:
    """The function on probabilities of classes, if it has such a form, else None."""
    hot = functional.one_hot(whole, output.shape[1]).movedim(-1, 1).to(output)
    forms = [function]
    if isinstance(function, nn.Module):
        # MONAI's losses make the probabilities themselves unless this is off.
        open_form = copies.duplicate(function)
        for module in open_form.modules():
            if hasattr(module, "to_onehot_y"):
                vars(module)["to_onehot_y"] = False
        forms.append(open_form)
    for form in forms:
        same = _value(form, output, hot)
        if same is not None and torch.allclose(same, value, rtol=1e-3):
            return form
    return None


def _expands(
    function: Function,
    output: Tensor,
    whole: Tensor,
    value: Tensor | None,
) -> bool:
    """Whether the function takes a class map as the same number for every class's output."""
    if value is None:
        return False
    wide = whole.unsqueeze(1).expand_as(output).to(output)
    same = _value(function, output, wide)
    return same is not None and torch.allclose(same, value, rtol=1e-3)


def _value(
    function: Function,
    output: Tensor,
    labels: Tensor,
) -> Tensor | None:
    """The function's value, a scalar; None if it does not take such labels, or only warns."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # PyTorch only warns of labels that it expands to the outputs' shape.
            warnings.filterwarnings("error", message=".*target size.*")
            value = function(output, labels)
    except Exception:  # the user's function may raise anything
        return None
    return value if isinstance(value, Tensor) and not value.ndim else None


def dice(output: Tensor, mask: Tensor) -> Tensor:
    """The mean of 1 - (2 sum p y + 1) / (sum p + sum y + 1), p the sigmoid of the outputs.

    Outputs and masks are (B, ...); the sums run over all of an example.

    Source: Milletari et al. 2016 (V-Net), with 1 added so that empty masks have a value.

    Example:
        >>> dice(torch.full((1, 2, 2), 40.0), torch.ones(1, 2, 2))
        tensor(0.)
    """
    p = output.sigmoid().flatten(1)
    y = mask.flatten(1)
    return (1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)).mean()


UNSCORED = -100
"""The label of a place whose output does not count, as in PyTorch and transformers."""


def next_token(output: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of outputs (B, n, V) for the token after each place, as of causal models.

    The mean runs over all scored tokens of the batch: with unequal lengths it is not the mean of
    the sequences' losses.

    Example:
        >>> next_token(torch.zeros(1, 3, 4), torch.tensor([[0, 2, UNSCORED]]))
        tensor(1.3863)
    """
    return token_cross_entropy(output[:, :-1], labels[:, 1:])


def next_labels(tokens: Tensor, padding: int | None) -> Tensor:
    """The labels of `next_token`: the tokens (B, n) themselves, UNSCORED in padding.

    Example:
        >>> next_labels(torch.tensor([[3, 0]]), 0).tolist()
        [[3, -100]]
    """
    return tokens if padding is None else tokens.where(tokens != padding, UNSCORED)


def token_cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of outputs (B, n, V) for the labels (B, n) of their own places."""
    return functional.cross_entropy(
        output.flatten(0, 1),
        labels.flatten(),
        ignore_index=UNSCORED,
    )


def _softmax(output: Tensor) -> Tensor:
    return output.softmax(1)


def _same(output: Tensor) -> Tensor:
    return output


def _of_sigmoid(mean: Tensor) -> Tensor:
    return mean * (1 - mean)


_BCE = functional.binary_cross_entropy_with_logits
LOSSES: dict[str, NamedLoss] = {
    one.name: one
    for one in (
        NamedLoss("cross_entropy", functional.cross_entropy, "classes", _softmax),
        NamedLoss("bce", _BCE, "binary", torch.sigmoid, _of_sigmoid),
        NamedLoss("mse", functional.mse_loss, "real", _same, torch.ones_like, 2.0),
        NamedLoss("l1", functional.l1_loss, "real"),
        NamedLoss("poisson", functional.poisson_nll_loss, "count", torch.exp, _same),
        NamedLoss("dense_cross_entropy", functional.cross_entropy, "class map", _softmax),
        NamedLoss("dice", dice, "mask"),
        NamedLoss("next_token", next_token, "tokens"),
        NamedLoss("token_cross_entropy", token_cross_entropy, "tokens"),
    )
}
"""Losses by name; "bce" takes logits, "poisson" the logarithm of the rate."""
_MODULES: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.BCEWithLogitsLoss: "bce",
    nn.MSELoss: "mse",
    nn.L1Loss: "l1",
    nn.PoissonNLLLoss: "poisson",
}


def is_code(loss: str) -> bool:
    """Whether a text names the user's own code, whose import runs it.

    Example:
        >>> is_code("monai.losses:DiceLoss,sigmoid=true"), is_code("dice")
        (True, False)
    """
    return ":" in loss.partition(",")[0]


def _imported(text: str) -> NamedLoss:
    """The loss behind "package.module:name,key=value": a function, or what builds one."""
    settings = row_of_text("loss", text)
    found = user_code.find("loss", settings.pop("name"))
    try:
        loss = named(found(**settings) if settings or _builds(found) else found)
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"loss {text!r} raised {said[:300]}; give a function of outputs and labels, or a class "
            "or function that builds one, and its settings, as in my.losses:Dice,sigmoid=true"
        ) from error
    return loss if loss.name in LOSSES else replace(loss, name=text)


def _builds(found: Callable[..., Any]) -> bool:
    """Whether this builds a loss: a class, or a function that needs no argument.

    A loss itself needs outputs and labels.
    """
    if isinstance(found, type):
        return True
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # such as of functions that are written in C
        return False
    return not any(
        p.kind is p.VAR_POSITIONAL or (p.default is p.empty and p.kind is not p.VAR_KEYWORD)
        for p in parameters
    )


def named(loss: str | Function) -> NamedLoss:
    """A loss by name, as PyTorch's module or function, or as a function of outputs and labels.

    A module with other settings than PyTorch's, such as weights, is taken as it is: updates and
    searches use them, and labels are not inferred. So is a function that is not in `LOSSES`.
    "package.module:name" imports the user's own: a loss, or a class or function that builds one,
    with settings after commas.

    Raises:
        ValueError: no loss has this name, or the loss returns no scalar.

    Example:
        >>> named("bce") is named(nn.BCEWithLogitsLoss()) is named(_BCE)
        True
        >>> named(nn.CrossEntropyLoss(label_smoothing=0.1)).name
        'CrossEntropyLoss(label_smoothing=0.1)'
    """
    if isinstance(loss, NamedLoss):
        return loss
    if isinstance(loss, str) and is_code(loss):
        return _imported(loss)
    if isinstance(loss, str):
        check.one_of(LOSSES, loss=loss)
        return LOSSES[loss]
    if not callable(loss):
        raise ValueError(f"loss is {loss!r}; give one of {', '.join(LOSSES)}, or a function")
    if getattr(loss, "reduction", "mean") == "none":
        raise ValueError(f"loss is {loss!r} with reduction 'none'; give reduction='mean'")
    for one in LOSSES.values():
        if loss is one.function:
            return one
    if (kind := type(loss)) in _MODULES:
        changed = {k: v for k, v in _settings(loss).items() if not _equal(v, _settings(kind())[k])}
        if not changed:
            return LOSSES[_MODULES[kind]]
        settings = (f"{k}={'...' if isinstance(v, Tensor) else v}" for k, v in changed.items())
        name = f"{kind.__name__}({', '.join(settings)})"
        return NamedLoss(name, loss, LOSSES[_MODULES[kind]].targets)
    return NamedLoss(f"the function {getattr(loss, '__name__', kind.__name__)}", loss)


def _settings(module: Any) -> dict[str, Any]:
    hidden = ("training", "eps")
    shown = {k: v for k, v in vars(module).items() if not k.startswith("_") and k not in hidden}
    return {**shown, **module._buffers}


def _equal(a: Any, b: Any) -> bool:
    # No default is a tensor, so weights always count as a changed setting.
    return a is b or (not isinstance(a, Tensor) and bool(a == b))
