"""TabLeak's own code beside ours, on the same gradients.

Prints a table of docs/results/table_quality.json. `python benchmarks/tableak_peer.py CLONE
[ROUNDS]`, with a clone of github.com/eth-sri/tableak. The data are those of the clone, the model is
its perceptron with 100 and 100 units at initial weights. Both attackers know labels and scales. The
metric is TabLeak's: the share of columns that are right, numbers within 0.319 standard deviations.
Every round runs all attacks on one batch, on one thread. The prior-only baseline is the median and
most frequent level, as in leakbound.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from leakbound.attacks import SpanDecoding, TabLeak
from leakbound.core import Batch, Task
from leakbound.defenses import NoDefense
from leakbound.domains import Column, TableDomain
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

SIZES = (1, 8, 32)


def domain_of(table: Any) -> TableDomain:
    """The columns of one of TabLeak's data sets, before its scaling."""
    every = torch.cat([table.get_Xtrain(), table.get_Xtest()])
    columns, start = [], 0
    for name, levels in table.train_features.items():
        if levels is not None:
            columns.append(Column(str(name), "categorical", levels=tuple(map(str, levels))))
            start += len(levels)
            continue
        low, high = (float(edge) for edge in (every[:, start].min(), every[:, start].max()))
        spread = float(table.std[start])
        given = {"center": 0.0, "scale": 1.0, "tolerance": 0.319 * spread, "spread": spread}
        columns.append(Column(str(name), "continuous", low, high, typical=low, **given))
        start += 1
    return TableDomain(tuple(columns)).fitted(every)


def accuracy(table: Any, utils: Any, truth: Tensor, found: Tensor) -> float:
    """TabLeak's metric of rows before its scaling, by TabLeak's code."""
    rows = [table.decode_batch(x, standardized=False) for x in (truth, found)]
    errors = utils.match_reconstruction_ground_truth(*rows, table.create_tolerance_map())[1]
    return float(100 * (1 - np.mean(errors)))


def round_of(name: str, size: int, seed: int) -> dict[str, tuple[float, float]]:
    """The accuracy and the seconds of each attack on one batch."""
    import datasets
    import utils

    import attacks
    import models as theirs

    inversion: Any = sys.modules["attacks.gradient_inversion_attack"]
    bounded = utils.continuous_sigmoid_bound  # today's torch refuses to change a leaf in place
    inversion.continuous_sigmoid_bound = lambda x, dataset: bounded(1.0 * x, dataset)
    table = getattr(datasets, name)()
    rows, labels = table.get_Xtrain(), table.get_ytrain()
    domain = domain_of(table)
    torch.manual_seed(seed)
    net = theirs.FullyConnected(rows.shape[1], [100, 100, 2])
    at = permutation(len(rows), stream(seed, "batch", size))[:size]
    truth, label = rows[at], labels[at]
    scaled = (truth - table.mean) / table.std
    loss = nn.CrossEntropyLoss()
    gradient = torch.autograd.grad(loss(net(scaled), label), [*net.parameters()])

    scaling = nn.BatchNorm1d(rows.shape[1], affine=False, eps=0.0)
    scaling.running_mean, scaling.running_var = table.mean.clone(), table.std.square()
    task = Task.of(nn.Sequential(scaling, net).eval(), domain=domain, classes=2)
    sources = [stream(seed, "defense", k) for k in range(2)]
    public = Batch(rows[-300:], labels[-300:])
    seen = play(task, [Batch(truth, label)], NoDefense(), sources, auxiliary=public).observation
    same = torch.cat([part.flatten() for part in gradient])
    torch.testing.assert_close(seen.update.rows[0], same, rtol=1e-3, atol=1e-6)

    found = {}
    for mine in (SpanDecoding(), TabLeak()):
        start = time.process_time()
        answer = mine(seen, stream(seed, "attack")).inputs
        spent = time.process_time() - start
        found[type(mine).__name__] = accuracy(table, utils, truth, answer), spent
    table.standardize()
    torch.manual_seed(seed)
    start = time.process_time()
    answer = attacks.invert_grad(
        net=net,
        training_criterion=loss,
        true_grad=[part.detach() for part in gradient],
        true_label=label,
        true_data=scaled,
        reconstruction_loss="cosine_sim",
        dataset=table,
        max_iterations=1500,
        post_selection=30,
        softmax_trick=True,
        sigmoid_trick=True,
        pooling="median+softmax",
    )
    spent = time.process_time() - start
    answer = answer.detach() * table.std + table.mean
    found["peer"] = accuracy(table, utils, truth, answer), spent
    blind = domain.blind(public.inputs).expand(size, -1)
    found["prior"] = accuracy(table, utils, truth, blind), 0.0
    return found


def interval(values: list[float]) -> str:
    """The mean with its 95 % t interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.1f} ± {half:.1f}"


def main(clone: str, rounds: int = 4) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    os.chdir(clone)
    sys.path.insert(0, clone)
    names = {"prior": "prior-only baseline", "peer": "TabLeak's code"}
    names |= {"TabLeak": "`tab_leak`", "SpanDecoding": "`span_decoding`"}
    print("| data | batch | n | " + " | ".join(names.values()) + " | seconds: each |")
    print("|---|--:|--:|" + "--:|" * (len(names) + 1))
    for name in ("ADULT", "German"):
        for size in SIZES:
            each = [round_of(name, size, seed) for seed in range(rounds)]
            cells = [interval([one[key][0] for one in each]) for key in names]
            times = [f"{np.median([one[key][1] for one in each]):.2g}" for key in [*names][1:]]
            line = (name, size, rounds, *cells, ", ".join(times))
            print("| " + " | ".join(map(str, line)) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
