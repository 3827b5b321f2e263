"""The global random generators, which models may use: whether they drew, and other draws."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def states() -> bytes:
    """The states of the global generators of Python, NumPy and PyTorch, to be compared."""
    # Only where CUDA runs already: to ask for its states would start it, and a fork could not.
    runs = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if runs else []
    tensors = [state.numpy().tobytes() for state in (torch.get_rng_state(), *cuda)]
    return pickle.dumps((random.getstate(), _of_numpy(), tensors))


@contextmanager
def other_draws(device: torch.device, seed: int) -> Iterator[None]:
    """Other draws of the global generators, which are as before afterwards."""
    before = random.getstate(), _of_numpy()
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        # `torch.manual_seed` keeps a traceback for CUDA in every call, which takes a millisecond.
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


def _of_numpy() -> Any:
    return np.random.get_state()  # noqa: NPY002
