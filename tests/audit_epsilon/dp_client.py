"""A small DP-SGD client with switches for bugs that no accountant sees."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


@dataclass(frozen=True)
class DpClient:
    """Steps of DP-SGD on a model; the update is the change of the weights.

    The noisy sum is divided by the constant `lot`. `bug` is "" or one of `BUGS`.
    """

    model: nn.Module
    noise: float = 1.0
    clip: float = 1.0
    rate: float = 1.0
    steps: int = 1
    learning_rate: float = 0.1
    lot: int = 8
    bug: str = ""
    momentum: float = 0.0
    layers: bool = False  # clip every tensor to its share of the clip norm
    normalize: bool = False  # all gradients get the clip norm
    extra: float = 0.0  # more noise on the whole update
    loss: Any = nn.functional.cross_entropy

    def __call__(self, weights, batch, seed):
        names = [name for name, _ in self.model.named_parameters()]
        draws = torch.Generator().manual_seed(0 if self.bug == "fixed seed" else seed)
        now = {name: weights[name].clone() for name in names}
        speed = {name: torch.zeros_like(now[name]) for name in names}
        for _ in range(self.steps):
            taken = torch.rand(len(batch.labels), generator=draws) < self.rate
            if self.bug == "no Poisson sampling":
                taken[:] = True
            sent = self._noisy(now, batch.inputs[taken], batch.labels[taken], draws)
            for name in names:
                speed[name] = self.momentum * speed[name] + sent[name]
                now[name] = now[name] - self.learning_rate * speed[name]
        return {
            name: now[name]
            - weights[name]
            + self.extra * torch.randn(now[name].shape, generator=draws)
            for name in names
        }

    def _noisy(self, now, inputs, labels, draws):
        if len(labels):
            each = self._gradients(now, inputs, labels)
        else:
            each = {name: torch.zeros(0, *value.shape) for name, value in now.items()}
        first, last = next(iter(now)), list(now)[-2]
        clip = self.clip * (2 if self.bug == "clip norm doubled in code" else 1)
        if self.bug == "clip after averaging":
            each = {name: value.sum(0, keepdim=True) / self.lot for name, value in each.items()}
        each = self._clipped(each, clip, last)
        std, lot = self.noise * self.clip, self.lot
        if self.bug == "half the noise":
            std /= 2
        if self.bug in ("noise divided by the batch twice", "noise of the mean on the sum"):
            std /= lot
        if self.bug in ("noise of the mean on the sum", "clip after averaging"):
            lot = 1
        if self.bug == "clip after averaging":
            std /= self.lot
        sent = {}
        for name, value in each.items():
            noise = std * torch.randn(value.shape[1:], generator=draws)
            if self.bug == "noise on the first layer only" and name != first:
                noise.zero_()
            if self.bug == "noise on every other entry":
                noise.view(-1)[1::2] = 0
            if self.bug == "noise is uniform on [0, std)":
                noise = std * torch.rand(value.shape[1:], generator=draws)
            sent[name] = (value.sum(0) + noise) / lot
        return sent

    def _gradients(self, now, inputs, labels):
        """Of each example; one pass forward costs less than `vmap` of the whole."""
        own = {name: value.detach().requires_grad_() for name, value in now.items()}
        outputs = functional_call(self.model, own, inputs)
        losses = [self.loss(outputs[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]
        each = torch.autograd.grad(
            torch.stack(losses),
            [*own.values()],
            torch.eye(len(labels)),
            is_grads_batched=True,
        )
        return dict(zip(own, each, strict=True))

    def _clipped(self, each, clip, last):
        norms = {name: value.flatten(1).norm(dim=1) for name, value in each.items()}
        if self.bug == "no clip on the last layer":
            kept = {name: own for name, own in norms.items() if name != last}
            whole = torch.stack(list(kept.values())).norm(dim=0)
        else:
            whole = torch.stack(list(norms.values())).norm(dim=0)
        found = {}
        for name, value in each.items():
            norm, own = whole, clip
            if self.layers or self.bug == "clip norm for each tensor":
                norm = norms[name]
                own = clip / len(each) ** 0.5 if self.layers else clip
            factor = own / norm.clamp_min(1e-12)
            if not self.normalize:
                factor = factor.clamp_max(1.0)
            if self.bug == "no clip on the last layer" and name == last:
                factor = torch.ones_like(factor)
            found[name] = value * factor.reshape(-1, *[1] * (value.ndim - 1))
        return found


BUGS = (
    "half the noise",
    "clip after averaging",
    "no clip on the last layer",
    "noise divided by the batch twice",
    "fixed seed",
    "noise on the first layer only",
    "clip norm doubled in code",
    "noise of the mean on the sum",
    "noise on every other entry",
    "no Poisson sampling",
    "clip norm for each tensor",
    "noise is uniform on [0, std)",
)
