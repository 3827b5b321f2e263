"""Which optimizers an update shows, over simulated clients: docs/results/optimizer_traces.json.

Each client draws its data (MNIST, or a table of normal and binary columns), its model, batch,
number of local steps, learning rate, whether the steps share a batch, whether it starts from
trained weights, and whether its weights are stored in bfloat16. About 6 minutes in two processes.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakbound import captured, data, tensors
from leakbound._util.intervals import clopper_pearson
from leakbound.captured import decay, optimizer, proofs
from leakbound.captured.capture import Capture
from leakbound.core import Task
from leakbound.randomness import stream

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

CLIENTS = 1000
WARM = 30
"""Steps of training before the round, for a third of the clients."""
COLUMNS = 20
"""Columns of a table, of which half are binary."""
Make = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_((0.9 * mean + 0.1 * p.grad).sign(), alpha=group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with weight decay .01."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(weights, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                square = self.state[p].setdefault("square", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad, alpha=0.1)
                square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                root = (square / (1 - 0.999**self.count)).sqrt()
                step = mean / (1 - 0.9**self.count) / (root + 1e-6) + 0.01 * p
                sizes = float(p.norm()), float(step.norm())
                trust = sizes[0] / sizes[1] if all(sizes) else 1.0
                p.sub_(step, alpha=group["lr"] * trust)


class Lars(torch.optim.Optimizer):
    """You et al. 2017, algorithm 1: momentum .9, a trust of .001."""

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        lr: float,
        decay: float = 1e-4,
    ) -> None:
        super().__init__(weights, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                sizes = float(p.norm()), float(p.grad.norm())
                decay = group["decay"]
                trust = 1e-3 * sizes[0] / (sizes[1] + decay * sizes[0]) if all(sizes) else 1.0
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad + decay * p, alpha=group["lr"] * trust)
                p.sub_(mean)


SGD = {"sgd"}
LIKE_ADAM = {"equal", "adaptive"}
KINDS: dict[str, tuple[Make, Sequence[float], set[str]]] = {
    "SGD": (lambda p, lr: torch.optim.SGD(p, lr), (1.0, 0.1, 0.01), SGD),
    "SGD, momentum .9": (lambda p, lr: torch.optim.SGD(p, lr, 0.9), (0.1, 0.01), SGD),
    "SGD, momentum .9, decay .001": (
        lambda p, lr: torch.optim.SGD(p, lr, 0.9, weight_decay=1e-3),
        (0.1, 0.01),
        SGD,
    ),
    "Adam": (lambda p, lr: torch.optim.Adam(p, lr), (1e-2, 1e-3, 1e-4), LIKE_ADAM),
    "Adam, decay .0001": (
        lambda p, lr: torch.optim.Adam(p, lr, weight_decay=1e-4),
        (1e-3, 1e-4),
        LIKE_ADAM,
    ),
    "AdamW, decay .01": (
        lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.01),
        (1e-3, 1e-4),
        LIKE_ADAM,
    ),
    "RMSprop": (lambda p, lr: torch.optim.RMSprop(p, lr), (1e-2, 1e-3), LIKE_ADAM),
    "Adagrad": (lambda p, lr: torch.optim.Adagrad(p, lr), (1e-1, 1e-2), LIKE_ADAM),
    "Lion": (Lion, (1e-3, 1e-4), LIKE_ADAM),
    "LARS": (Lars, (1.0, 10.0), SGD),
    "LAMB": (Lamb, (1e-2, 1e-3), {*LIKE_ADAM, "layer-wise"}),
}
"""How each optimizer is made, its learning rates, and the families that name it rightly.

LAMB's rates are equal where few tensors move.
"""


@dataclass(frozen=True)
class Client:
    """A model before its local training, the weights before and after, and the local steps."""

    model: nn.Module
    capture: Capture
    steps: int
    halves: bool


@cache
def _digits() -> tuple[Tensor, Tensor]:
    source = data.load("mnist5k")
    return source.inputs, source.labels


def _examples(kind: str, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    if kind == "table":
        inputs = torch.randn(count, COLUMNS, generator=draw)
        inputs[:, COLUMNS // 2 :] = (inputs[:, COLUMNS // 2 :] > 0.8).float()
        return inputs, (torch.rand(count, generator=draw) < 0.2).long()
    inputs, labels = _digits()
    at = torch.randint(0, len(labels), (count,), generator=draw)
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "raw": lambda x: x,
        "normalized": lambda x: (x - 0.1307) / 0.3081,
        "binary": lambda x: (x > 0.5).float(),
    }
    return change[kind](inputs[at]), labels[at]


def _model(kind: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    size = math.prod(shape)
    if kind == "logistic regression":
        return nn.Sequential(nn.Flatten(), nn.Linear(size, classes))
    if kind == "perceptron":
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, classes))
    if kind == "deep":
        hidden = nn.Linear(size, 48), nn.Tanh(), nn.Linear(48, 48), nn.GELU()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(48, classes))
    if kind == "layer norm":
        hidden = nn.Linear(size, 48), nn.LayerNorm(48), nn.ReLU()  # type: ignore[assignment]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(48, classes))
    layers: list[nn.Module] = []
    for inside, outside in ((1, 8), (8, 16)):
        layers.append(nn.Conv2d(inside, outside, 3, stride=2, padding=1))
        if kind == "batch norm":
            layers.append(nn.BatchNorm2d(outside))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 49, classes))


def client(kind: str, seed: int) -> Client:
    """One simulated client of an optimizer."""
    draw = stream(seed, "client", kind)

    def pick(options: Sequence[Any]) -> Any:
        return options[int(torch.randint(0, len(options), (1,), generator=draw))]

    make, rates, _ = KINDS[kind]
    form = pick(("raw", "normalized", "binary", "table"))
    layers = ["logistic regression", "perceptron", "deep", "layer norm"]
    shape, classes = ((COLUMNS,), 2) if form == "table" else ((1, 28, 28), 10)
    name = pick(layers if form == "table" else [*layers, "convolutions", "batch norm"])
    count = max(pick((1, 2, 4, 8, 16, 32)), 2 if name == "batch norm" else 1)
    steps = pick((1, 1, 1, 2, 5, 10, 20))
    rate = pick(rates)
    own = pick((False, True))
    halves = pick((False, False, False, True))
    torch.manual_seed(int(torch.randint(0, 2**31, (1,), generator=draw)))
    model = _model(name, shape, classes)
    if pick((False, False, True)):
        _train(model, torch.optim.SGD(model.parameters(), 0.05), form, 32, WARM, True, False, draw)
    if halves:
        _round(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    _train(model, make(model.parameters(), rate), form, count, steps, own, halves, draw)
    after = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(before)
    return Client(model, captured.load(after, before, kind="weights"), steps, halves)


def _train(
    model: nn.Module,
    rule: torch.optim.Optimizer,
    form: str,
    count: int,
    steps: int,
    own: bool,
    halves: bool,
    draw: torch.Generator,
) -> None:
    inputs, labels = _examples(form, count * (steps if own else 1), draw)
    for step in range(steps):
        part = slice(step * count, (step + 1) * count) if own else slice(None)
        rule.zero_grad()
        nn.functional.cross_entropy(model(inputs[part]), labels[part]).backward()
        rule.step()
        if halves:
            _round(model)


@torch.no_grad()
def _round(model: nn.Module) -> None:
    for p in model.parameters():
        p.copy_(p.bfloat16().float())


def family(one: Client) -> str | None:
    """What the client's update shows, as in a captured update; None: not known."""
    task = Task.of(one.model)
    update = one.capture
    change = task.parameters - tensors.flat(task, update.update, what="update")
    if not bool(change.any()):
        return None
    spread = proofs.spread(update, task, None)
    shrunk = decay.detected(task, change, spread)
    if shrunk is not None:
        change = shrunk.subtracted(task, change, spread)
    trace = optimizer.detected(task, change, spread)
    return None if trace is None else trace.family


def _line(kind: str) -> list[str]:
    torch.set_num_threads(1)
    found = Counter(family(client(kind, seed)) for seed in range(CLIENTS))
    right = KINDS[kind][2]
    wrong = sum(count for name, count in found.items() if name is not None and name not in right)
    _, most = clopper_pearson(wrong, CLIENTS, 0.025)
    row = [kind, *(str(found[name]) for name in ("sgd", "equal", "adaptive", "layer-wise", None))]
    row += [f"{wrong} (at most {100 * most:.2g} %)"]
    print(" | ".join(row), flush=True)
    return row


def main() -> int:
    """Simulate all clients and write the page."""
    with multiprocessing.Pool(int(sys.argv[1]) if len(sys.argv) > 1 else 2) as pool:
        table = pool.map(_line, KINDS, chunksize=1)
    heads = ["client", "SGD", "equal sizes", "adaptive", "a rate a tensor", "not known", "wrong"]
    page = {
        "title": "Which optimizer an update shows",
        "sections": [{"body": [WORDS, {"columns": heads, "align": "lrrrrrr", "rows": table}]}],
    }
    (stored.FOLDER / "optimizer_traces.json").write_text(stored.dumps(page), "utf-8")
    return 0


WORDS = (
    f"{CLIENTS:,} simulated clients of each kind. Models are logistic regression, perceptrons, "
    "layer norm, convolutions and batch norm. Batches have 1 to 32 examples of digits (raw, "
    "normalized, binary) or of a table, and 1 to 20 local steps see one batch or others. A quarter "
    "has weights in bfloat16, a third starts from trained weights. "
    "No threshold was fitted to these clients. *Equal sizes*, *adaptive* and "
    "*a rate a tensor* all name Adam or another optimizer that divides gradients by their size; "
    "*SGD* also names LARS, whose updates are sums of gradients in each tensor. "
    "The last column counts names of the other kind, with the upper end of a 95 % interval "
    "(Clopper and Pearson)."
)

if __name__ == "__main__":
    sys.exit(main())
