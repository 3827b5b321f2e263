"""The names that PEFT gives tensors in files, and those in the model that it built."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def is_of_peft(model: nn.Module) -> bool:
    """Whether PEFT built a model around its base."""
    return isinstance(getattr(model, "peft_config", None), Mapping)


def names_in_files(model: nn.Module) -> dict[str, str]:
    """By names in PEFT's files, names in its model: of the same numbers in memory.

    Raises:
        ValueError: the adapter is of a kind that no attack reads.
    """
    import peft

    for config in model.peft_config.values():  # type: ignore[operator]
        if config.is_prompt_learning:
            raise ValueError(
                f"model holds an adapter of the kind {config.peft_type.value}, which puts trained "
                "rows before the tokens; no attack here reads those: ask `leakbound bound`"
            )
    held = {
        (value.data_ptr(), value.shape): name
        for name, value in model.state_dict().items()
        if value.numel()
    }
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    places = {key: held.get((value.data_ptr(), value.shape)) for key, value in saved.items()}
    return {key: name for key, name in places.items() if name is not None}


def renamed(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of PEFT's files by their names in its model; others keep theirs."""
    names = names_in_files(model)
    return {names.get(key, key): value for key, value in named.items()}
