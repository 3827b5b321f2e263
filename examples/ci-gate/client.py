"""A client of a small federation: it trains, clips its update, adds noise, and sends it."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

ROUNDS, BATCH, RATE = 5, 16, 0.5
CLIP, NOISE = 0.25, 2.0
SOURCE = torch.Generator()
SOURCE.seed()


def build():
    """The model that the server sends."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def train(model, inputs, labels):
    """How far the weights move in two local steps."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
        loss = cross_entropy(model(inputs[half]), labels[half])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for value, gradient in zip(model.parameters(), gradients, strict=True):
                value -= RATE * gradient
    return {name: value.detach() - before[name] for name, value in model.named_parameters()}


def update(inputs, labels):
    """What leaves for the server."""
    change = train(build(), inputs, labels)
    norm = torch.stack([value.norm() for value in change.values()]).norm()
    factor = min(1.0, CLIP / float(norm))
    sent = {}
    for name, value in change.items():
        noise = torch.randn(value.shape, generator=SOURCE)
        sent[name] = factor * value + NOISE * CLIP * noise
    return sent


def facts():
    """The settings as a deployment file names them."""
    return {
        "rounds": ROUNDS,
        "clip": {"norm": CLIP, "kind": "l2", "at": "client"},
        "noise": {"multiplier": NOISE, "at": "client"},
        "local": {"batch": BATCH},
    }
