"""PyTorch's optimizers without its compiler, whose import takes a second in each process."""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch

Rule = TypeVar("Rule", bound=torch.optim.Optimizer)


def _light(rule: type[Rule]) -> type[Rule]:
    """The optimizer; its methods are those below the decorators that import `torch._dynamo`."""
    names = ("add_param_group", "zero_grad")
    methods = {name: inspect.unwrap(getattr(rule, name)) for name in names}
    return type(
        rule.__name__, (rule,), {**methods, "step": torch.no_grad()(inspect.unwrap(rule.step))}
    )


Adam = _light(torch.optim.Adam)
AdamW = _light(torch.optim.AdamW)
LBFGS = _light(torch.optim.LBFGS)
SGD = _light(torch.optim.SGD)
