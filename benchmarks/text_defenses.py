"""What defenses leave of text: a table, and docs/images/text_defenses.svg with a curve for each.

The built-in decoder (2 blocks, width 64) on sentences of Python's help texts, 16 words each, two
in a batch, one step of training, labels not known. Every attack on text runs; the best counts,
sequence by sequence, so the attacker chooses well. About 40 minutes, 1 thread.

    python benchmarks/text_defenses.py [--seeds 6] [--points FILE]

Points go to FILE (JSON lines), and settings that it holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from leakbound.audit import parse, run

ATTACKS: tuple[dict[str, Any], ...] = (
    {"name": "token_rows"},
    {"name": "token_span"},
    {"name": "adapter_pursuit"},
    {"name": "token_matching", "steps": 200, "restarts": 2},
)
FAMILIES: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "none": [("", {}, {"name": "none"})],
    "Gaussian noise": [
        (f"{std:g}", {}, {"name": "gaussian_noise", "noise_std": std})
        for std in (1e-5, 1e-4, 3e-4, 1e-3, 1e-2)
    ],
    "DP-SGD": [
        (f"{noise:g}", {}, {"name": "dp_sgd", "noise_multiplier": noise})
        for noise in (0.001, 0.01, 0.1, 1.0)
    ],
    "pruning": [
        (f"{rate:.1%}", {}, {"name": "top_k", "rate": rate}) for rate in (0.9, 0.99, 0.999)
    ],
    "quantization": [
        (f"{bits} bits", {}, {"name": "quantization", "bits": bits}) for bits in (8, 4, 2)
    ],
    "sign": [("1 bit", {}, {"name": "sign"})],
    "frozen embeddings": [("", {"embeddings": "frozen"}, {"name": "none"})],
    "LoRA": [(f"rank {rank}", {"adapters": rank}, {"name": "none"}) for rank in (16, 4, 2, 1)],
}
IMAGE = Path(__file__).parent.parent / "docs" / "images" / "text_defenses.svg"


@dataclass(frozen=True)
class Point:
    """A setting: per sequence the percent of tokens right, of the best attack and of the baseline;
    the attack that is best most often; and the smallest bound on the probability, if any.
    """

    family: str
    setting: str
    best: tuple[float, ...]
    baseline: tuple[float, ...]
    attack: str
    bound: float | None

    @property
    def interval(self) -> tuple[float, float, float]:
        """The mean, with a 95 % bootstrap interval over sequences."""
        values, source = np.array(self.best), np.random.default_rng(0)
        means = source.choice(values, (2000, len(values))).mean(1)
        return float(values.mean()), *(float(v) for v in np.quantile(means, (0.025, 0.975)))

    @property
    def matched(self) -> int:
        """The number of sequences with 90 % of their tokens right."""
        return sum(value >= 90 - 1e-9 for value in self.best)


def measured(family: str, setting: str, model: Any, defense: Any, seeds: int) -> Point:
    plan = parse(
        {
            "data": {"source": "topics"},
            "models": [{"name": "decoder", **model}],
            "attacks": list(ATTACKS),
            "defenses": [defense],
            "seeds": list(range(seeds)),
            "batch_sizes": [2],
            "criterion": {"share": 0.9},
        }
    )
    scores: dict[tuple[int, int], dict[str, float]] = {}
    blind: dict[tuple[int, int], float] = {}
    bounds = []
    for result in run(plan, workers=1):
        own = result.record
        bounds += [b.probability for b in own.bounds if b.probability is not None]
        if own.status != "ok":
            continue
        for k, score in enumerate(own.scores):
            scores.setdefault((own.seed, k), {})[own.attack.name] = score or 0.0
            blind[own.seed, k] = (own.baseline or (0.0,) * 2)[k] or 0.0
    winners = [max(each, key=each.__getitem__) for each in scores.values()]
    return Point(
        family,
        setting,
        tuple(max(each.values()) for each in scores.values()),
        tuple(blind.values()),
        max(set(winners), key=winners.count) if winners else "–",
        min(bounds, default=None),
    )


def line(point: Point) -> str:
    mean, low, high = point.interval
    cells = [
        f"{point.family} {point.setting}".strip(),
        f"{mean:.0f} ({low:.0f} to {high:.0f})",
        f"{np.mean(point.baseline):.0f}",
        f"{point.matched} of {len(point.best)}",
        f"`{point.attack}`",
        "–" if point.bound is None else f"{point.bound:.2g}",
    ]
    return "| " + " | ".join(cells) + " |"


def draw(points: Sequence[Point]) -> None:
    """One panel per family; all have the same axis."""
    families = list(dict.fromkeys(point.family for point in points))
    widths = [max(2, sum(p.family == name for p in points)) for name in families]
    figure = Figure(figsize=(11, 3.6), facecolor="white", layout="constrained")
    axes = figure.subplots(1, len(families), sharey=True, width_ratios=widths)
    for axis, name in zip(axes, families, strict=True):
        own = [point for point in points if point.family == name]
        middle, low, high = np.array([point.interval for point in own]).T
        places = np.arange(len(own))
        axis.errorbar(places, middle, [middle - low, high - middle], fmt="o-", color="#0072b2")
        axis.plot(places, [np.mean(p.baseline) for p in own], "s--", color="#777777", markersize=3)
        axis.set_xticks(places, [point.setting for point in own], rotation=60, fontsize=8)
        axis.set_xlim(-0.5, len(own) - 0.5)
        axis.set_title(name.replace(" ", "\n"), fontsize=9)
        axis.grid(axis="y", color="#dddddd")
    axes[0].set_ylim(-3, 103)
    axes[0].set_ylabel("tokens right, percent")
    figure.savefig(IMAGE, metadata={"Date": None})
    print(IMAGE)


def main() -> None:
    """Print the table, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--points", type=Path, default=Path("text_defenses.jsonl"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = given.points.read_text("utf-8").splitlines() if given.points.exists() else []
    known = {(own["family"], own["setting"]): Point(**own) for own in map(json.loads, lines)}
    print("| defense | tokens right, % | baseline, % | sequences | by | bound |")
    print("|---|--:|--:|--:|---|--:|")
    points = []
    for family in given.families:
        for setting, model, defense in FAMILIES[family]:
            own = known.get((family, setting))
            if own is None:
                own = measured(family, setting, model, defense, given.seeds)
                with given.points.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(own)) + "\n")
            points.append(own)
            print(line(own), flush=True)
    if given.families == list(FAMILIES):
        draw(points)


if __name__ == "__main__":
    main()
