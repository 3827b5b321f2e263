"""What attacks reconstruct of tables: writes the first part of docs/results/table_quality.json.

A perceptron with 100 and 100 units at initial weights, 30 % of the rows public, labels known. Every
line has six batches, each with its own weights. About an hour on one thread.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from leakbound import data, models
from leakbound.assess.criterion import Criterion
from leakbound.assess.measure import guesses
from leakbound.attacks import Attack, LinearInversion, SpanDecoding, TabLeak, TouchedRows
from leakbound.core import Batch, LocalPlan, NotApplicable, Reconstruction, Task
from leakbound.defenses import NoDefense
from leakbound.domains import Column, TableDomain
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

SEEDS, LOOSE = 6, 0.319
SIZES = (1, 8, 32)
PLANS = {
    "FedSGD": LocalPlan(),
    "3 epochs, SGD 0.05": LocalPlan(3, 0.05, 8),
    "3 epochs, Adam 0.001": LocalPlan(3, 0.001, 8, "adam"),
}
ATTACKS = ("linear_inversion", "touched_rows", "span_decoding", "tab_leak")
KEPT = "What these numbers say:"


class Scene:
    """A table, its public rows, and rounds of one client."""

    def __init__(self, name: str) -> None:
        table = data.load(name)
        assert table.columns is not None
        self.name, self.labels = name, table.labels
        order = permutation(len(self.labels), stream(0, "split"))
        part = 3 * len(order) // 10
        columns, self.inputs = _standardized(table.domain, table.inputs, order[:part])
        self.public, self.private = self.batch(order[:part]), order[part:]
        self.domain = TableDomain(columns).fitted(self.public.inputs)

    def batch(self, at: Tensor) -> Batch:
        return Batch(self.inputs[at], self.labels[at])

    def loose(self, truth: Tensor, found: Tensor) -> float:
        """The share of columns that are right if numbers may be LOOSE standard deviations off."""
        right = []
        deviation = self.inputs.std(0)
        for column, start, stop in self.domain.placed:
            a, b = truth[:, start:stop], found[:, start:stop]
            near = (a - b).abs()[:, 0] <= LOOSE * deviation[start]
            right.append(a.argmax(1) == b.argmax(1) if column.categorical else near)
        return float(torch.stack(right).double().mean())

    def line(self, size: int, training: str) -> str:
        """One line of the page."""
        plan = PLANS[training]
        epochs = max(1, -(-size // (plan.batch_size or size))) * plan.steps
        plan = LocalPlan(epochs, plan.learning_rate, plan.batch_size, plan.optimizer)
        short = {} if training == "FedSGD" else {"steps": 600, "restarts": 4}
        attacks = LinearInversion(), TouchedRows(), SpanDecoding(), TabLeak(**short)
        every = [self.played(size, seed, plan, attacks) for seed in range(SEEDS)]
        cells = [_cell([one[k] for one in every]) for k in range(len(attacks) + 1)]
        loose = " / ".join(_mean([one[k][2] for one in every]) for k in (0, 4))
        took = statistics.median(one[4][3] for one in every)
        return "| " + " | ".join([training, str(size), *cells, loose, f"{took:.2g}"]) + " |"

    def played(
        self, size: int, seed: int, plan: LocalPlan, attacks: tuple[Attack, ...]
    ) -> list[tuple[float, float, float, float]]:
        """The share of columns, of rows, of columns within LOOSE, and seconds: of the prior-only
        baseline and of each attack; NaN where one does not apply.
        """
        at = self.private[permutation(len(self.private), stream(seed, "batch"))[:size]]
        batch, classes = self.batch(at), int(self.labels.max()) + 1
        model = models.mlp(
            input_shape=self.domain.shape,
            classes=classes,
            hidden=(100, 100),
            activation="relu",
            generator=stream(seed, "model"),
        )
        task = Task.of(model, domain=self.domain, classes=classes, plan=plan)
        sources = [stream(seed, "defense", k) for k in range(2)]
        seen = play(task, [batch], NoDefense(), sources, auxiliary=self.public).observation
        found = [(*self.right(batch, guesses(self.domain, batch, self.public)), 0.0)]
        for attack in attacks:
            start = time.process_time()
            try:
                answer = attack(seen, stream(seed, "attack")).inputs
            except NotApplicable:
                found.append((float("nan"),) * 4)
                continue
            found.append((*self.right(batch, answer), time.process_time() - start))
        return found

    def right(self, batch: Batch, found: Tensor) -> tuple[float, float, float]:
        held = self.domain.hard(pair(batch, Reconstruction(found), self.domain.costs).inputs)
        wrong = self.domain.misses(batch.inputs, held)
        within = Criterion.of(self.domain, share=0.9).within
        rows = float((wrong.sum(1) <= within).double().mean())
        return float((~wrong).double().mean()), rows, self.loose(batch.inputs, held)


def _standardized(
    domain: TableDomain, inputs: Tensor, public: Tensor
) -> tuple[tuple[Column, ...], Tensor]:
    """The columns and rows with numbers in standard deviations of public rows from their mean."""
    columns, found = [], inputs.clone()
    for column, start, _ in domain.placed:
        if not column.categorical:
            values = column.origin + column.unit_length * inputs[:, start].double()
            center, scale = (float(f(values[public])) for f in (torch.mean, torch.std))
            found[:, start] = ((values - center) / scale).to(found)
            column = replace(column, center=center, scale=scale)
        columns.append(column)
    return tuple(columns), found


def _mean(values: list[float]) -> str:
    """The mean in percent with its 95 % t interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{100 * np.mean(values):.0f} ± {100 * half:.0f}"


def _cell(values: list[tuple[float, float, float, float]]) -> str:
    """Columns, and rows."""
    if any(one[0] != one[0] for one in values):
        return "–"
    return f"{_mean([one[0] for one in values])}; {100 * np.mean([one[1] for one in values]):.0f}"


def main() -> None:
    """Print the tables and write the page."""
    torch.set_num_threads(1)
    lines = [
        "# What the built-in attacks reconstruct of tables",
        "",
        "A perceptron with 100 and 100 units at initial weights. 30 % of the rows are public, "
        "labels are known, and numbers are standardized by public rows. Every line has six "
        "batches, each with its own weights. An entry has the share of columns that are right, in "
        "percent with its 95 % t interval over batches; and the share of rows with at least 90 % "
        "of their columns right. Numbers are right within 0.05 standard deviations, whole numbers "
        "if they are equal. *0.319 sd* is TabLeak's tolerance: "
        "the share of columns for the prior-only baseline / for `tab_leak`. Local training takes "
        "minibatches of 8 in turn; `tab_leak` then has 4 searches of 600 steps in place of 8 of "
        f"1,500. Seconds are medians of `tab_leak` on one thread ({_cpu()}). A dash: the attack "
        "does not apply. `benchmarks/table_quality.py` writes this part.",
    ]
    names = "".join(f" `{name}` |" for name in ATTACKS)
    for name in ("german", "breast_cancer"):
        scene = Scene(name)
        columns = scene.domain.columns
        many = sum(column.categorical for column in columns)
        lines += [
            *("", f"## {name}: {len(columns)} columns, {many} of them categories", ""),
            f"| training | batch | prior-only |{names} 0.319 sd | s |",
            "|---|" + "--:|" * (len(ATTACKS) + 4),
        ]
        for training in PLANS:
            for size in SIZES:
                lines.append(scene.line(size, training))
                print(lines[-1], flush=True)
    if "--print" not in sys.argv:
        stored.keep("table_quality", "\n".join(lines))


def _cpu() -> str:
    return torch.backends.cpu.get_cpu_capability()


if __name__ == "__main__":
    main()
