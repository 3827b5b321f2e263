"""Files of low-rank adapters, as PEFT writes them: read without pickle and without PEFT."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from torch import Tensor, nn

from leakbound import tensors
from leakbound._util import copies, files
from leakbound.captured.peft_models import HEADER, values_of, with_values
from leakbound.models.transformers import AdapterLayer
from leakbound.tensors.peft_names import is_of_peft

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MOST_JSON = 2**20
"""The most bytes of a configuration."""
MOST_RANK = 2**14
"""The largest rank that is accepted from a file."""
_PREFIX = "base_model.model."
_LONG = (
    (".lora_A.default.", ".lora_A."),
    (".lora_B.default.", ".lora_B."),
    (".lora_magnitude_vector.default.weight", ".lora_magnitude_vector"),
    (".modules_to_save.default.", "."),
)
"""Names with the adapter's own name, as of a model's state dict, and as in files."""
_CHANGED = {
    "use_qalora": "QALoRA pools the inputs of quantized weights",
    "use_bdlora": "its adapters are block-diagonal",
    "lora_bias": "its adapters add a bias",
    "layer_replication": "it repeats layers of the base",
    "alora_invocation_tokens": "it is active only after some tokens",
    "trainable_token_indices": "it trains single rows of the word table",
    "target_parameters": "it adapts parameters, not layers",
    "arrow_config": "it mixes several adapters",
    "kasa_config": "it changes the weights of the base",
    "monteclora_config": "its adapters are random",
    "velora_config": "it changes how gradients are computed",
    "megatron_config": "its layers are split over devices",
    "ensure_weight_tying": "it ties trained weights",
}
Rank = Annotated[int, Meta(ge=1, le=MOST_RANK)]
Alpha = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Name = Annotated[str, Meta(pattern=r"^[\w.]+\Z")]
_RANK = f"a rank from 1 to {MOST_RANK}"
_ALPHA = "a finite number above 0"
_PLAIN = "an object of plain module names, without regular expressions, each with"
_READ: dict[str, tuple[Any, str]] = {
    "r": (Rank, _RANK),
    "lora_alpha": (Alpha, _ALPHA),
    "use_rslora": (bool | None, "true or false"),
    "use_dora": (bool | None, "true or false"),
    "target_modules": (tuple[str, ...] | str | None, "a list of module names"),
    "modules_to_save": (tuple[str, ...] | None, "a list of module names"),
    "rank_pattern": (dict[Name, Rank] | None, f"{_PLAIN} {_RANK}"),
    "alpha_pattern": (dict[Name, Alpha] | None, f"{_PLAIN} {_ALPHA}"),
}
"""What is read of a configuration: its type, and what to give instead of another."""
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the weights of the base as they are."""


@dataclass(frozen=True)
class AdapterConfig:
    """What a configuration file says of an adapter.

    `ranks` and `alphas` hold exceptions from `rank` and `alpha`, by the end of a module's name.
    `root`: rank-stabilized, `dora`: with a magnitude for each output.
    """

    rank: int
    alpha: float
    root: bool
    dora: bool
    targets: tuple[str, ...]
    saved: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def may_adapt(self, module: str) -> bool:
        """Whether a module is a target; without names of targets every one is."""
        return not self.targets or any(_ends(module, target) for target in self.targets)

    def rank_of(self, module: str) -> int:
        """The rank at a module."""
        return next((r for key, r in self.ranks.items() if _ends(module, key)), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B A at a module: alpha / r, or alpha / sqrt(r) of rank-stabilized LoRA."""
        alpha = next((a for key, a in self.alphas.items() if _ends(module, key)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.root else rank)


def read_config(path: Path) -> AdapterConfig:
    """The configuration of a LoRA adapter, `adapter_config.json`.

    Raises:
        ValueError: it is missing, too large, no JSON, or of an adapter that is not a plain LoRA.
    """
    what = repr(str(path))
    settings = files.read_json(path, f"adapter config {what}", most=MOST_JSON)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"{what}: peft_type is {kind!r}; this and other adapters than LoRA need PEFT's own "
            "model, as get_peft_model returns it, in place of the base"
        )
    for name, why in _CHANGED.items():
        if settings.get(name):
            raise ValueError(f"{what}: {name} is set ({why}); give an adapter without it")
    start = settings.get("init_lora_weights", True)
    if not any(start is one or start == one for one in _INITIAL):
        raise ValueError(
            f"{what}: init_lora_weights is {start!r}, which changes the base or is unknown; give "
            "PEFT's own model, as get_peft_model returns it, in place of the base"
        )
    if settings.get("bias", "none") != "none":
        raise ValueError(f"{what}: bias is {settings['bias']!r}; give an adapter with bias 'none'")
    values = dict[str, Any]()
    for name, (form, mend) in _READ.items():
        value = settings.get(name)
        try:
            values[name] = msgspec.convert(value, form)
        except msgspec.ValidationError:
            shown = repr(value)[:60]
            raise ValueError(f"{what}: {name} is {shown}; give {mend}") from None
    targets = values["target_modules"]
    return AdapterConfig(
        values["r"],
        values["lora_alpha"],
        bool(values["use_rslora"]),
        bool(values["use_dora"]),
        # A text is a pattern, which is never run: the file's tensors then show the targets.
        targets if isinstance(targets, tuple) else (),
        values["modules_to_save"] or (),
        values["rank_pattern"] or {},
        values["alpha_pattern"] or {},
    )


def read_adapter(
    adapter: Path | str,
    base: nn.Module,
    *,
    update: Path | str | None = None,
) -> nn.Module:
    """The model that clients train: the base with an adapter from PEFT's files.

    `adapter` is the folder that `save_pretrained` wrote, or its `adapter_model.safetensors`, with
    `adapter_config.json` next to it. The result is a model of its own that shares the values of the
    base's weights, in evaluation mode. Its adapters and the modules
    in `modules_to_save` are trained, everything else is frozen: `Task.of` takes it. A target module
    without tensors in the file has no adapter. `update` is what a client sent, in the same form:
    tensors that are missing there were not sent, and are frozen.

    Of LoRA and DoRA, `base` is the base. Of any other kind it is PEFT's own model, such as
    `get_peft_model` returns; its configuration counts, and none is read.

    Sizes are checked before memory is allocated. Patterns in the configuration are compared with
    the ends of module names, and are never run as regular expressions.

    Raises:
        ValueError: a file is damaged or too large, the adapter belongs to another base, is of a
            kind that is not read, or the base is quantized.

    Example:
        >>> import tempfile, torch
        >>> base = nn.Sequential(nn.Linear(3, 2))
        >>> config = '{"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["0"]}'
        >>> names = "base_model.model.0.lora_A.weight", "base_model.model.0.lora_B.weight"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tensors.write(
        ...         Path(folder) / WEIGHTS,
        ...         dict(zip(names, (torch.ones(1, 3), torch.zeros(2, 1)), strict=True)))
        ...     _ = (Path(folder) / CONFIG).write_text(config)
        ...     model = read_adapter(folder, base)
        >>> model[0].scale, [name for name, p in model.named_parameters() if p.requires_grad]
        (2.0, ['0.lora_A.weight', '0.lora_B.weight'])
    """
    path = _located(adapter, "adapter")
    _refuse_quantized(base)
    model = with_values(path, base) if is_of_peft(base) else _with_layers(path, base)
    if update is not None:
        sent = sent_tensors(update, base)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name in sent)
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"update is {str(update)!r}, which has no tensor of the adapter")
    return model


def _with_layers(path: Path, base: nn.Module) -> nn.Module:
    """A copy of the base with layers of ours around those that a LoRA adapts."""
    config = read_config(path.with_name(CONFIG))
    named = _read(path, config, base)
    for key, value in named.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"{str(path)!r}: {key} is not finite; give the adapter as it was sent")
    model = copies.duplicate(base, lent=base.parameters()).requires_grad_(False).eval()
    for module in sorted({key.rpartition(".lora_")[0] for key in named if ".lora_" in key}):
        names = ["lora_A.weight", "lora_B.weight"]
        if config.dora:
            names.append("lora_magnitude_vector")
        parts = [named.get(f"{module}.{name}") for name in names]
        for name, part in zip(names, parts, strict=True):
            if part is None:
                raise ValueError(
                    f"{str(path)!r} lacks {name.removesuffix('.weight')} of {module}; give the "
                    "whole adapter that the server sent as adapter, and what the client sent as "
                    "update"
                )
        down, up, *magnitude = [part for part in parts if part is not None]
        layer = AdapterLayer(
            model.get_submodule(module),
            down,
            up,
            config.scale_of(module),
            *magnitude,
        )
        model.set_submodule(module, layer.eval())
    for key, value in named.items():
        if ".lora_" not in key:
            owner, _, name = key.rpartition(".")
            saved: nn.Module = model.get_submodule(owner)
            if name in saved._parameters:
                setattr(saved, name, nn.Parameter(value.clone()))
            else:
                saved.register_buffer(name, value.clone())
    return model


def sent_tensors(update: Path | str, base: nn.Module) -> dict[str, Tensor]:
    """The tensors that a client sent in PEFT's files, named as in `read_adapter`'s model.

    Missing tensors were not sent. `leakbound.captured.load` takes the result.

    Raises:
        ValueError: as `read_adapter`.
    """
    path = _located(update, "update")
    if is_of_peft(base):
        return values_of(path, base)
    return _read(path, read_config(path.with_name(CONFIG)), base)


def _located(place: Path | str, what: str) -> Path:
    path = Path(place)
    path = path / WEIGHTS if path.is_dir() else path
    pickled = path if path.exists() else path.with_suffix(".bin")
    if pickled.suffix == ".bin" and pickled.exists():
        raise ValueError(
            f"{what} is {str(pickled)!r}, a pickle that can run code when opened; save it with "
            "save_pretrained(..., safe_serialization=True)"
        )
    steps = sorted(path.parent.glob(f"checkpoint-*/{WEIGHTS}")) if not path.exists() else []
    if steps:
        raise ValueError(
            f"{what} is {str(place)!r}, a folder of a trainer; give one of its checkpoints, such "
            f"as {str(steps[-1].parent)!r}"
        )
    files.check_regular(path, what)
    if path.suffix != ".safetensors":
        raise ValueError(f"{what} is {str(path)!r}; give a folder or a .safetensors file")
    return path


def _read(
    path: Path,
    config: AdapterConfig,
    base: nn.Module,
) -> dict[str, Tensor]:
    """The file's tensors by their names in the adapted model, checked against the base."""
    layers = dict(base.named_modules())
    for target in config.targets:
        if any(_ends(name, target) for name in layers):
            continue
        raise ValueError(
            f"{str(path)!r}: target_modules names {target!r}, which the base does not have; "
            "give the base that the adapter belongs to"
        )
    numbers = HEADER // 8
    for name, layer in layers.items():
        if (shape := _shape(layer)) and config.may_adapt(name):
            numbers += config.rank_of(name) * sum(shape) + shape[0]
        if any(_ends(name, one) for one in config.saved):
            numbers += sum(value.numel() for value in layer.state_dict().values())
    # A number has at most 8 bytes: a file that is larger than its configuration needs is not read.
    most = min(tensors.files.MOST_BYTES, 8 * numbers)
    named: dict[str, Tensor] = {}
    for key, value in tensors.read(path, most=most)[0].items():
        name = key.removeprefix(_PREFIX)
        for long, short in _LONG:
            name = name.replace(long, short)
        _check(path, name, value, config, layers)
        named[name] = value
    return named


def _check(
    path: Path,
    name: str,
    value: Tensor,
    config: AdapterConfig,
    layers: Mapping[str, nn.Module],
) -> None:
    """Reject a tensor that does not fit the base and the configuration."""
    module, _, part = name.partition(".lora_")
    what = f"{str(path)!r}: {name}"
    shape = tuple(value.shape)
    parts = ["", "A.weight", "B.weight"]
    if config.dora:
        parts.append("magnitude_vector")
    if part not in parts:
        raise ValueError(f"{what} is no weight of a linear layer's LoRA; give adapters of those")
    if part:
        layer = layers.get(module)
        if layer is None:
            raise ValueError(
                f"{what} belongs to a module that the base does not have; give the adapter's base"
            )
        size = _shape(layer)
        rank = config.rank_of(module)
        if size is None:
            raise ValueError(
                f"{what} adapts a {type(layer).__name__}; adapters of linear layers alone are read"
            )
        if not config.may_adapt(module):
            raise ValueError(f"{what} is not among target_modules; give the adapter's own config")
        wanted: tuple[int, ...] = (size[0], rank)
        if part == "A.weight":
            wanted = (rank, size[1])
        elif part == "magnitude_vector":
            wanted = (size[0],)
        if shape != wanted or not value.is_floating_point():
            raise ValueError(
                f"{what} is {shape} of {value.dtype}; rank {rank} and the base ask {wanted} of "
                "floats: give the config and the base of this adapter"
            )
        return
    owner, _, leaf = name.rpartition(".")
    held = layers[owner].state_dict().get(leaf) if owner in layers else None
    # The module is one of these names, or lies within one.
    saved = any(f".{name}." in f".{owner}." for name in config.saved)
    if held is None or not saved:
        raise ValueError(f"{what} is neither a LoRA weight nor in modules_to_save of the base")
    if shape != tuple(held.shape) or value.is_floating_point() != held.is_floating_point():
        raise ValueError(
            f"{what} is {shape} of {value.dtype}, in the base {tuple(held.shape)} of {held.dtype}; "
            "give the adapter's base"
        )


def _shape(layer: nn.Module) -> tuple[int, int] | None:
    """(outputs, inputs) of a linear layer; transformers' Conv1D holds its weight as inputs first.

    None for other layers.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    if isinstance(layer, nn.Linear):
        return weight.shape[0], weight.shape[1]
    return (weight.shape[1], weight.shape[0]) if type(layer).__name__ == "Conv1D" else None


def _refuse_quantized(base: nn.Module) -> None:
    signs = list[str]()
    for name, module in base.named_modules():
        kind = type(module).__name__
        if any(word in kind for word in ("4bit", "8bit", "Quant")):
            signs.append(f"{name} is a {kind}")
    for name, weight in base.named_parameters():
        if not weight.is_floating_point():
            signs.append(f"{name} is of {weight.dtype}")
    if getattr(getattr(base, "config", None), "quantization_config", None):
        signs.append("its config says so")
    if signs:
        raise ValueError(f"base is quantized ({signs[0]}); give it with weights as floats")


def _ends(module: str, name: str) -> bool:
    # With the point, as in PEFT: `v` must not match `conv`.
    return module == name or module.endswith(f".{name}")
