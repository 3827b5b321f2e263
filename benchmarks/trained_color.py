"""Optimal noise against equal noise at equal utility, on a trained network and color images.

    python benchmarks/trained_color.py                           # photos, about 6 minutes of CPU
    python benchmarks/trained_color.py --part noise              # noise at an equal cost, 4 minutes
    python benchmarks/trained_color.py --data zip:cifar10.zip    # your images

A perceptron is trained first, on public images. Then single images are attacked by attacks that
know the defense, and the training goes on under it. Writes a section of
docs/results/optimal_defenses_results.json unless called with --print.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from leakbound import audit
from leakbound.report.equal_utility import EqualCost, FamilyPair
from leakbound.report.tables import MeanInterval

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import stored

SEEDS = 6
TRAINED = 300
STEPS = 150
ROUNDS = 40
TRAINING = {"optimizer": "sgd", "learning_rate": 0.05}
LEVELS = (0.02, 0.06, 0.2, 0.6)
OPTIMAL = {"name": "optimal_noise", "rule": "energy", "correlation": "layers", "refresh": 10}
RULES = [OPTIMAL, {"name": "optimal_noise", "rule": "utility", "refresh": 10}]
"""Least information at equal energy of the noise, and at equal second-order utility."""
OWN = ", ".join(f"{key} = {value}" for key, value in OPTIMAL.items() if key != "name")
MATCHED = 0.2
NAMES = {"photos": "`photos`", "zip": "CIFAR-10 (5,000 of its test images)"}


def plan(data: str, defenses: Sequence[dict[str, Any]]) -> audit.Plan:
    """The defenses under two attacks and one training."""
    table: dict[str, Any] = {
        "name": "trained color",
        "data": {"source": data, "size": 32, "limit": 5000},
        "models": [{"name": "mlp", "hidden": [64], "train_steps": TRAINED}],
        "attacks": [
            {"name": "linear_inversion"},
            {"name": "inverting_gradients", "steps": STEPS},
        ],
        "defenses": list(defenses),
        "seeds": list(range(SEEDS)),
        "utility": {"rounds": ROUNDS, "repeats": SEEDS, **TRAINING},
        "error_bound": {"kind": "none"},
        "risk": {"probability": 0},
    }
    return audit.parse(table)


def _number(found: MeanInterval, digits: int = 3) -> str:
    low, high = found.low or 0.0, found.high or 0.0
    return f"{found.mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _levels(at_loss: EqualCost) -> list[str]:
    lines = ["| defense | training loss | error of the attack |", "|---|--:|--:|"]
    rows = {level.defense: level for family in at_loss.families for level in family.levels}
    for name, level in rows.items():
        lines.append(f"| {name} | {_number(level.cost)} | {_number(level.error)} |")
    return lines


def _compared(pair: FamilyPair, cost: str) -> str:
    digits = 3 if "loss" in cost else 1
    return (
        f"| {cost}, {pair.low:.{digits}f} to {pair.high:.{digits}f} | {pair.first} | "
        f"{_number(pair.first_error)} | {_number(pair.second_error)} | "
        f"{_number(pair.difference)} | {pair.difference.n} |"
    )


def section(data: str, folder: Path) -> str:
    """Run the plan, and its tables as Markdown."""
    families = ({"name": "gaussian_noise"}, OPTIMAL)
    defenses = [{"name": "none"}, *(one | {"noise_std": list(LEVELS)} for one in families)]
    found = audit.audit(plan(data, defenses), folder, workers=1, pictures=False)
    (result,) = found.at_equal_utility()
    pairs = [
        "| equal cost | more error under | its error | the other's | difference | seeds |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for comparison in result.comparisons:
        pairs += [_compared(pair, comparison.cost) for pair in comparison.pairs]
        pairs += [
            f"| {comparison.cost} | not compared: {one.why} | | | | |"
            for one in comparison.not_compared
        ]
    return "\n\n".join(
        [
            f"## A trained network and color images: {NAMES[data.partition(':')[0]]}",
            f"{setting()} Single images are attacked by `linear_inversion` and "
            f"`inverting_gradients` ({STEPS} steps), which know the defense and the label; then "
            f"{ROUNDS} rounds of SGD (rate {TRAINING['learning_rate']}) go on under the defense. "
            f"Optimal noise is the public form ({OWN}). Errors are root mean squared errors of the "
            f"best attack (1 is the inputs' range; {result.baseline:.3f} without an update), "
            f"{SEEDS} seeds, 95 % intervals. Written by `benchmarks/trained_color.py`.",
            "\n".join(_levels(result.comparisons[0])),
            "\n".join(pairs),
            *(
                f"At equal training loss {'a' if pair.seen else 'no'} difference is seen."
                for pair in result.comparisons[0].pairs
            ),
        ]
    )


def setting() -> str:
    """The network, as a sentence."""
    return f"A perceptron with 64 hidden units, trained for {TRAINED} steps on public images."


def calibrated(data: str) -> str:
    """Optimal noises at the cost of one equal noise."""
    found = audit.noise_at_utility(plan(data, RULES), f"noise<={MATCHED}")
    lines = ["| defense | noise_std | rise of the loss | information |", "|---|--:|--:|--:|"]
    for one in found.noises:
        bought = "unknown" if one.information is None else _number(one.information)
        lines.append(f"| {one.defense} | {one.noise_std:g} | {_number(one.cost, 4)} | {bought} |")
    return "\n\n".join(
        [
            f"## Noise at the cost of equal noise: {NAMES[data.partition(':')[0]]}",
            f"{setting()} `noise_at_utility` finds the noise whose {ROUNDS} rounds of SGD (rate "
            f"{TRAINING['learning_rate']}) lose as much as under equal noise of {MATCHED}, over "
            f"{SEEDS} seeds (95 % intervals). Information is the trace of the Fisher information "
            "of a client's update about its 16 images, relative to that under equal noise. Written "
            "by `benchmarks/trained_color.py --part noise`.",
            "\n".join(lines),
        ]
    )


def main() -> None:
    """Run and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=("audit", "noise"), default="audit")
    parser.add_argument("--data", default="photos")
    parser.add_argument("--out", type=Path, help="folder of the audit, which continues in it")
    parser.add_argument("--print", action="store_true", help="store nothing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        folder = given.out or Path(spare) / "run"
        text = section(given.data, folder) if given.part == "audit" else calibrated(given.data)
    print(text)
    if not given.print:
        title = stored.read("optimal_defenses_results")["title"]
        stored.keep("optimal_defenses_results", f"# {title}\n\n{text}")


if __name__ == "__main__":
    main()
