"""The recipe of Inverting Gradients, written again (its code is in no package index).

Per step: the gradient of the candidate with `create_graph`, one minus the cosine over all tensors,
`.backward()`, which fills the gradients of the weights as well as the candidate's, signs, Adam at
rate 0.1 (x 0.1 at 3/8, 5/8 and 7/8 of the steps), box. The result is the last candidate.

Source: Geiping et al. 2020, section 4 and appendix.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from figures.setting import Setting
from torch import Tensor, nn


class Recipe:
    """Its steps on one setting."""

    def __init__(self, given: Setting) -> None:
        self.given, self.seen = given, given.seen
        self.model = copy.deepcopy(given.model).eval().requires_grad_(True)
        self.loss = nn.CrossEntropyLoss()

    def _mismatch(self, guess: Tensor) -> Tensor:
        """1 - cosine of the candidate's gradient and the observed one."""
        self.model.zero_grad()
        loss = self.loss(self.model(guess), self.given.labels)
        own = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
        product = torch.stack([(a * b).sum() for a, b in zip(own, self.seen, strict=True)]).sum()
        mine = torch.stack([a.pow(2).sum() for a in own]).sum().sqrt()
        theirs = torch.stack([b.pow(2).sum() for b in self.seen]).sum().sqrt()
        return 1 - product / (mine * theirs)

    def closure(self) -> tuple[Callable[[], Tensor], Tensor]:
        """One evaluation with its backward pass, and the candidate whose gradient it fills."""
        guess = self.given.start.clone().requires_grad_()

        def run() -> Tensor:
            guess.grad = None
            value = self._mismatch(guess)
            value.backward()  # type: ignore[no-untyped-call]
            return value.detach()

        return run, guess

    def run(self, steps: int) -> tuple[Tensor, list[float], list[float]]:
        """A whole attack: its result, the objective at every step, seconds since the call."""
        began, values, times = time.perf_counter(), list[float](), list[float]()
        evaluate, guess = self.closure()
        optimizer = torch.optim.Adam([guess], lr=0.1)
        marks = [steps // 2.667, steps // 1.6, steps // 1.142]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, gamma=0.1)
        low, high = self.given.task.input_range
        for _ in range(steps):
            value = evaluate()
            assert guess.grad is not None
            guess.grad.sign_()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                guess.clamp_(low, high)
            values.append(float(value))
            times.append(time.perf_counter() - began)
        return guess.detach(), values, times
