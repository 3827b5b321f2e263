"""Optimal DP-SGD against the same clamp with equal noise.

Prints a table of docs/results/optimal_defenses_results.json. The long version of paper A compares
these two at an equal root mean square of the noise. MNIST at 14 x 14 pixels, a perceptron, batches
of one image, labels and defense known. The cost is the training loss after 30 rounds of 4 clients
with 16 images. About a minute of CPU time.
"""

from __future__ import annotations

from statistics import fmean, median

from leakbound import audit
from leakbound.assess.record import Assessment, Training
from leakbound.report.tables import mean_of

SEEDS = 12
CLAMP = 0.01
LEVELS = (0.001, 0.01, 0.1)
"""Root mean square of the noise's standard deviations."""


def plan() -> audit.Plan:
    """Both defenses at each level, under one attack and one short training."""
    equal = [
        {
            "links": [
                {"name": "clip_coordinates", "limit": CLAMP},
                {"name": "gaussian_noise", "noise_std": level},
            ]
        }
        for level in LEVELS
    ]
    optimal = {"name": "optimal_dp_sgd", "clamp": CLAMP, "noise_std": list(LEVELS)}
    table = {
        "data": {"source": "mnist5k", "size": 14},
        "models": [{"name": "mlp"}],
        "attacks": [{"name": "inverting_gradients", "steps": 150}],
        "defenses": [*equal, optimal],
        "seeds": list(range(SEEDS)),
        "utility": {"rounds": 30, "repeats": SEEDS},
        "error_bound": {"kind": "none"},
        "risk": {"probability": 0},
    }
    return audit.parse(table, name="coordinate clip")


def main() -> None:
    """Run and print."""
    found = [result.record for result in audit.run(plan(), workers=2, pictures=False)]
    losses: dict[tuple[str, float], dict[int, float]] = {}
    scores: dict[tuple[str, float], list[float]] = {}
    for record in found:
        name = record.defense.name
        (level,) = (v for k, v in record.defense.parameters.items() if k.endswith("noise_std"))
        key = "equal" if name.startswith("clip") else "optimal", level
        if isinstance(record, Training) and record.training_loss is not None:
            losses.setdefault(key, {})[record.seed] = record.training_loss
        if isinstance(record, Assessment) and record.scores and record.scores[0] is not None:
            scores.setdefault(key, []).append(record.scores[0])
    print("| noise | loss, equal | loss, optimal | optimal minus equal | PSNR, dB |")
    print("|---|---|---|---|---|")
    for level in LEVELS:
        equal, optimal = (losses[name, level] for name in ("equal", "optimal"))
        gain = mean_of([optimal[seed] - equal[seed] for seed in sorted(equal)])
        assert gain is not None
        assert gain.low is not None
        assert gain.high is not None
        shown = " / ".join(f"{median(scores[name, level]):.1f}" for name in ("equal", "optimal"))
        print(
            f"| {level:g} | {fmean(equal.values()):.3f} | {fmean(optimal.values()):.3f} | "
            f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}], n = {gain.n} | {shown} |"
        )


if __name__ == "__main__":
    main()
