"""A noisy copy of each example, used in all rounds, against fresh noise in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leakbound import audit
from leakbound.assess import Training
from leakbound.audit.experiment import run_training
from leakbound.audit.plan import DataSpec, ModelSpec, TrainingUnit, UtilitySpec
from leakbound.bounds import from_scratch, identification
from leakbound.registry import Spec

ROUNDS = (1, 40, 1000)
SEEDS = (0, 1, 2)
PSNR = 20.0


@dataclass(frozen=True)
class Copied:
    """One defense: an upper bound on the probability of 20 dB by rounds, and accuracy."""

    name: str
    risks: tuple[float, ...]
    accuracies: tuple[float, ...]


def compared() -> list[Copied]:
    """Noisy copies of three strengths, DP-SGD of three, and no defense."""
    bench = audit.PlanContext(DataSpec())
    flat = bench.dataset.inputs.flatten(1).double()
    norm = float(flat.norm(dim=1).min())
    dim = flat.shape[1]
    eta = 10 ** (-PSNR / 10)
    blind = identification.log_kappa_sphere(dim=dim, eta=eta, norm=norm)
    rows = [_row("none", (), (1.0,) * len(ROUNDS), bench)]
    for std in (0.1, 0.3, 1.0):
        risk = float(from_scratch.exact(std / norm, dim=dim, eta=eta, norm=norm))
        links = (Spec("noisy_copy", (("noise_std", std),)),)
        rows.append(_row(f"noisy copy, std {std:g}", links, (risk,) * len(ROUNDS), bench))
    for noise in (0.05, 0.3, 1.0):
        links = (Spec("dp_sgd", (("clip_norm", 1.0), ("noise_multiplier", noise))),)
        risks = tuple(
            float(identification.gaussian(noise, log_kappa=blind, steps=steps)) for steps in ROUNDS
        )
        rows.append(_row(f"DP-SGD, noise multiplier {noise:g}", links, risks, bench))
    return rows


def table(rows: Sequence[Copied]) -> list[str]:
    """Markdown lines."""
    heads = [f"risk after {n} rounds" for n in ROUNDS]
    lines = [
        "| defense | " + " | ".join(heads) + f" | accuracy after 40 rounds (n = {len(SEEDS)}) |",
        "|---|" + "---|" * (len(heads) + 1),
    ]
    for row in rows:
        risks = " | ".join(f"{risk:.3g}" for risk in row.risks)
        low = min(row.accuracies)
        high = max(row.accuracies)
        mean = float(np.mean(row.accuracies))
        lines.append(f"| {row.name} | {risks} | {mean:.3f} ({low:.3f} to {high:.3f}) |")
    return lines


def _row(
    name: str, links: tuple[Spec, ...], risks: tuple[float, ...], bench: audit.PlanContext
) -> Copied:
    spec = UtilitySpec(rounds=40, learning_rate=0.002)
    found = []
    for seed in SEEDS:
        cell = TrainingUnit(DataSpec(), ModelSpec("simple_convnet"), links, seed, spec)
        record = run_training(cell, bench).record
        assert isinstance(record, Training)
        found.append(record.accuracy or 0.0)
    return Copied(name, risks, tuple(found))
