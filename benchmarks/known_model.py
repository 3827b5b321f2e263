"""How much less noise an honest server's model needs than an arbitrary model.

    python benchmarks/known_model.py

Finds the smallest noise multiplier of one full-batch step at which no attacker reconstructs an
example with more than a given probability. One value holds for every model, by a count of public
examples (`bounds.counting.PublicSample`). The other holds for the update of one model with random
weights (`bounds.known_model`). Both use the same public examples, with labels not known, at 95 %
confidence. The clip norm is the median gradient norm of other examples.
"""

import numpy as np
import torch
from scipy import optimize

from leakbound import data, models, stream
from leakbound.assess.success import known_model
from leakbound.bounds.counting import PublicSample
from leakbound.channel import clipped_gram
from leakbound.core import Batch, Task

CASES = (
    ("mnist5k", "mlp", (22.0, 25.5, 30.0), (0.05, 0.02)),
    ("mnist5k", "lenet", (22.0, 25.5, 30.0), (0.05, 0.02)),
    ("digits", "mlp", (25.0, 30.0), (0.1, 0.05)),
    ("breast_cancer", "mlp", (30.0, 35.0), (0.2, 0.1)),
)
MOST = 100.0


def median_norm(task: Task, batch: Batch) -> float:
    squares = clipped_gram(task, batch, 1e6).diagonal()
    return float(np.sqrt(np.median(squares)) * 1e6)


def any_model(sample: PublicSample, gamma: float, eta: float) -> float | None:
    def excess(noise: float) -> float:
        return float(sample.success_bound(noise, eta)[0][0]) - gamma

    return None if excess(MOST) > 0 else float(optimize.brentq(excess, 0.02, MOST, xtol=1e-3))


def main() -> None:
    print("| data | model | n | dB | probability | any model | this model | less noise |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for source, name, decibels, chances in CASES:
        known = data.load(source)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(known.labels)))
        count = min(1500, 3 * len(order) // 4)
        public, others = known.batch(order[:count]), known.batch(order[count : count + 500])
        shape = tuple(public.inputs.shape[1:])
        model = getattr(models, name)(
            input_shape=shape, classes=known.classes, generator=stream(0, "model")
        )
        task = Task.of(model)
        own = known_model(task, public, clip_norm=median_norm(task, others), labels_known=False)
        sample = PublicSample(own.examples)
        for psnr in decibels:
            eta = 10 ** (-psnr / 10)
            for gamma in chances:
                general = any_model(sample, gamma, eta)
                try:
                    mine: float | None = own.noise_for(gamma, eta)
                except ValueError:
                    mine = None
                saved = "" if None in (general, mine) else f"{1 - mine / general:.0%}"
                shown = ["none" if v is None else f"{v:.2f}" for v in (general, mine)]
                print(
                    f"| {source} | {name} | {own.n} | {psnr:g} | {gamma:g} | {shown[0]} | "
                    f"{shown[1]} | {saved} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
