"""How long one evaluation of the risk bounds and one calibration take.

    python benchmarks/risk.py

Prints processor milliseconds, medians. The control is a matrix product of 300 x 300, which shows
the load on the machine.
"""

import statistics
import time

import numpy as np

from leakbound.bounds import composition, from_scratch
from leakbound.bounds.privacy_loss import CACHE
from leakbound.risk import TrainingSetting, calibrate_setting

ROUNDS = 9
TARGET = "psnr>=20 with probability<=0.001"


def sampled(participation: str) -> None:
    CACHE.clear()
    setting = TrainingSetting(
        1.0, dim=784, norm=9.0, steps=1000, sampling_rate=0.01, participation=participation
    )
    calibrate_setting(TARGET, setting, examples=5000, prior=None)


def composed() -> None:
    CACHE.clear()
    composition.subsampled(1.0, sampling_rate=0.01, steps=1000, kappa=1e-3)


def main() -> None:
    matrix = np.random.default_rng(0).normal(size=(300, 300))
    cases = {
        "control: 300 x 300 product": lambda: matrix @ matrix,
        "gamma*, N = 3,072": lambda: from_scratch.exact(0.0036, dim=3072, eta=0.037 / 3072),
        "gamma*, N = 150,528": lambda: from_scratch.exact(5e-4, dim=150528, eta=0.037 / 150528),
        "gamma*, 1,000 at once (each)": lambda: from_scratch.exact(
            np.linspace(0.002, 0.01, 1000), dim=3072, eta=0.037 / 3072
        ),
        "1,000 sampled steps": composed,
        "calibrate, one full step": lambda: calibrate_setting(
            TARGET, TrainingSetting(1.0, dim=784, norm=9.0), prior=None
        ),
        "calibrate, 1,000 visible sampled steps": lambda: sampled("visible"),
        "calibrate, 1,000 hidden sampled steps": lambda: sampled("hidden"),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):  # interleaved, so that a busy minute falls on all
        for name, run in cases.items():
            began = time.process_time()
            run()
            taken[name].append(1000 * (time.process_time() - began))
    for name, values in taken.items():
        share = 1000 if "each" in name else 1
        print(f"{name:42} {statistics.median(values) / share:10.3f} ms")


if __name__ == "__main__":
    main()
