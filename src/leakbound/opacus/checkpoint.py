"""What a checkpoint says of a training beside its history: seeds, sampling, shape, the question."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from leakbound._util import files

FLAGS = ("experiment_only", "poisson_sampling", "shaped")
KEY = "leakbound"
"""Where in Opacus' checkpoint it is."""


def opened(path: Any, **settings: Any) -> tuple[io.BytesIO, dict[str, Any]]:
    """A checkpoint's bytes, and what `RiskEngine.save_checkpoint` put into it.

    Nothing in the file is run: it is read as tensors and plain values first.

    Args:
        path: a file's name, or a file that is open for reading bytes.
        settings: of `torch.load`.

    Raises:
        ValueError: a file that holds other things, or no word on seeds, sampling and shape.
    """
    whole = io.BytesIO(path.read() if hasattr(path, "read") else files.read(Path(path)))
    try:
        checkpoint = torch.load(whole, **settings, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"path is {path!r}, which is no checkpoint of tensors and plain values alone "
            f"({str(error).splitlines()[0][:200]}); leave other things out of checkpoint_dict"
        ) from None
    whole.seek(0)
    held = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    if not isinstance(held, dict) or any(type(held.get(flag)) is not bool for flag in FLAGS):
        raise ValueError(
            f"path is {path!r}, which does not say whether its noise was seeded and its batches "
            "were Poisson samples, so no risk could be stated; take one that "
            "RiskEngine.save_checkpoint wrote"
        )
    return whole, held
