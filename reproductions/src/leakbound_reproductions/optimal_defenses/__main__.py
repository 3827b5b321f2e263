"""Run the study: `python -m leakbound_reproductions.optimal_defenses [--out DIR] [--workers N]`."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch

from leakbound import audit
from leakbound.audit.plan import Plan
from leakbound.defenses import LocalOptimalNoise
from leakbound.protocol import send
from leakbound.randomness import stream
from leakbound.registry import Spec
from leakbound_reproductions import kept
from leakbound_reproductions.optimal_defenses import claims, figures, points, side_channel
from leakbound_reproductions.optimal_defenses.settings import PAPER


def plans() -> dict[str, Plan]:
    """The three audits: the paper's naive attacker, attackers who know, and training by SGD."""
    text = resources.files(__package__).joinpath("plan.toml").read_text("utf-8")
    aware = audit.parse(tomllib.loads(text))
    still = replace(aware.utility, rounds=0)
    chen = (Spec(PAPER, (("source", "chen"), ("steps", 300))),)
    threat = replace(aware.threat, defense_known=False)
    nothing = (Spec("linear_inversion"),)
    rate = replace(aware.utility, optimizer="sgd", learning_rate=0.1)
    none = replace(aware.error_bound, kind="none")
    seeds = aware.seeds[: aware.utility.repeats]
    return {
        "naive": replace(aware, attacks=chen, threat=threat, utility=still, error_bound=none),
        "aware": aware,
        "sgd": replace(aware, attacks=nothing, utility=rate, seeds=seeds, error_bound=none),
    }


def noise_by_layer(plan: Plan) -> tuple[dict[str, float], dict[str, int]]:
    """RMS of the local form's noise (0.02) in each tensor, mean over the plan's seeds."""
    bench = audit.PlanContext(plan.data)
    total: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for seed in plan.seeds:
        task = bench.task(plan.models[0], seed)
        (batch,) = bench.batches(16, 1, seed)
        law = send(task, batch, LocalOptimalNoise(0.02), stream(seed, "layers")).law
        variances = task.unflatten(torch.as_tensor(law.covariance).flatten())  # type: ignore[union-attr]
        for name, value in variances.items():
            own = float(value.mean().sqrt()) / len(plan.seeds)
            total[name] = total.get(name, 0.0) + own
            sizes[name] = value.numel()
    return total, sizes


def report(folder: Path, study: claims.Study, plan: Plan) -> Path:
    """Write results.md and its figures."""
    stds, sizes = noise_by_layer(plan)
    for kind in ("noise", "pruning"):
        figures.scatter(study, kind, folder)
        figures.errors(study, kind, folder)
    figures.layers(stds, sizes, folder)
    spread = max(stds.values()) / min(stds.values())
    seeds = len(plan.seeds)
    lines = [
        "# Optimal defenses: what was measured",
        "",
        f"SimpleConvNet with random weights on MNIST, batches of {plan.batch_sizes[0]}, {seeds} "
        f"paired seeds for errors, {plan.utility.repeats} for losses; 95 % t intervals of paired "
        "differences. Errors are compared in dB of mean squared error (higher is more private). "
        "Naive is the paper's attack; aware is the best of all attacks that know the defense.",
        "",
        "| claim | comparison | attacker | measured | verdict |",
        "|---|---|---|---|---|",
    ]
    for row in claims.rows(study):
        cells = (row.claim, row.statement, row.attacker, row.measured, row.verdict)
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(
        "| 0-5 | noise of all tensors, weights and biases together | | largest over smallest RMS "
        f"{spread:.0f} | not judged |"
    )
    lines += [
        "",
        "## Does the noise identify the example?",
        "",
        "200 candidates (chance 0.5 %), batch 1, noise of RMS 1e4, Wilson intervals.",
        "",
        *side_channel.table(),
    ]
    page = folder / "results.md"
    kept.page(page, lines)
    return page


def main() -> None:
    """Run what is missing of the study, then write its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/optimal_defenses"))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    found = {}
    for name, plan in plans().items():
        folder = given.out / name
        told = -1

        def watch(now: audit.Progress, name: str = name) -> None:
            nonlocal told
            percent = 100 * now.done // max(1, now.total)
            if percent >= told + 5:
                told = percent
                print(f"{name}: {now.done} of {now.total}", flush=True)

        audit.audit(plan, folder, workers=given.workers, pictures=False, watch=watch)
        found[name] = points.read(folder)
    study = claims.Study(found["naive"], found["aware"], found["sgd"])
    print(f"results: {report(given.out, study, plans()['aware'])}")


if __name__ == "__main__":
    main()
