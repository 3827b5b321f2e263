"""Time one call over a grid against a loop, and cached results against new ones.

    python benchmarks/bounds.py [--rounds 9]

All cases run in turn in every round, so that load on the machine affects all of them. A matrix
product is the control for that load. Values are processor milliseconds, medians and ranges. The
minimum is the time of the arithmetic alone: the special functions on as many numbers, or the two
Fourier transforms of that length. Prints a Markdown table.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import fft, special

from leakbound.bounds import composition, conversions, from_scratch
from leakbound.bounds.identification import gaussian
from leakbound.bounds.privacy_loss import CACHE, curve
from leakbound.risk import TrainingSetting, calibrate_setting
from leakbound_reproductions.mean_to_extreme.edgeworth import cumulants, edgeworth

Run = Callable[[], object]
TARGET = "psnr>=20 with probability<=0.001"
NOISE = np.linspace(0.3, 5.0, 400)
KAPPA = np.geomspace(1e-6, 0.5, 400)
SAMPLED = {"sampling_rate": 0.01, "steps": 1000}
HIDDEN = TrainingSetting(
    1.0, dim=784, norm=9.0, steps=1000, sampling_rate=0.01, participation="hidden"
)


@dataclass(frozen=True)
class Case:
    """What is timed: one way, the other, and the arithmetic of the first."""

    name: str
    fast: Run
    slow: Run
    minimum: Run
    says: str


def cold(run: Run) -> Run:
    """The same without cached results."""

    def again() -> object:
        CACHE.clear()
        composition._sampled_steps.cache_clear()
        return run()

    return again


def loop(function: Callable[..., object], first: np.ndarray, **given: np.ndarray | float) -> Run:
    """One call for each number; arrays are passed on."""

    def run() -> object:
        found = []
        for place, number in enumerate(first.tolist()):
            own = {k: v[place] if isinstance(v, np.ndarray) else v for k, v in given.items()}
            found.append(function(number, **own))
        return found

    return run


def grids() -> list[Case]:
    """One call against a loop."""
    few, cells = np.zeros((400, 60)), np.full((400, 480), -1.0)
    epsilons, gammas = np.linspace(0.1, 8, 400), np.linspace(0.05, 0.9, 64)
    step = {"dim": 3072, "eta": 0.037 / 3072}

    def composed_epsilon(noise: float, delta: np.ndarray | float) -> object:
        return conversions.epsilon(noise, delta=delta, **SAMPLED)

    def cones(times: int, rows: int) -> Run:
        return lambda: [special.log_ndtr(cells[:rows]) for _ in range(times)]

    return [
        Case(
            "`gaussian`, 400 noises",
            lambda: gaussian(NOISE, kappa=KAPPA),
            loop(gaussian, NOISE, kappa=KAPPA),
            lambda: special.log_ndtr(special.ndtri_exp(np.log(KAPPA)) + 1 / NOISE),
            "400 values of two special functions",
        ),
        Case(
            "`visible`, 400 noises, 1,000 steps",
            lambda: composition.visible(NOISE, kappa=KAPPA, **SAMPLED),
            loop(composition.visible, NOISE, kappa=KAPPA, **SAMPLED),
            lambda: np.exp(special.log_ndtr(few)),
            "400 x 60 values of log Phi and exp",
        ),
        Case(
            "`visible.noise_for`, 64 gammas",
            lambda: composition.visible.noise_for(gammas, kappa=0.01, **SAMPLED),
            loop(composition.visible.noise_for, gammas, kappa=0.01, **SAMPLED),
            lambda: [np.exp(special.log_ndtr(few[:64])) for _ in range(10)],
            "ten times 64 x 60 such values",
        ),
        Case(
            "`subsampled`, 400 kappas, 1,000 steps",
            lambda: composition.subsampled(1.0, kappa=KAPPA, **SAMPLED),
            lambda: [composition.subsampled(1.0, kappa=k, **SAMPLED) for k in KAPPA.tolist()],
            lambda: np.exp(special.log_ndtr(few)),
            "as `visible`; the curve is kept",
        ),
        Case(
            "`conversions.epsilon`, 400 deltas, sampled",
            lambda: composed_epsilon(1.0, KAPPA / 2),
            lambda: [composed_epsilon(1.0, d) for d in (KAPPA / 2).tolist()],
            lambda: [special.erfcx(epsilons) for _ in range(128)],
            "64 halvings of 400 values, two special functions",
        ),
        Case(
            "`exact` (gamma*), 400 noises",
            lambda: from_scratch.exact(NOISE / 500, **step),
            loop(from_scratch.exact, NOISE / 500, **step),
            cones(1, 400),
            "400 x 480 values of log Phi",
        ),
        Case(
            "`exact.noise_for`, 64 gammas",
            lambda: from_scratch.exact.noise_for(gammas, **step),
            loop(from_scratch.exact.noise_for, gammas, **step),
            cones(12, 64),
            "twelve times 64 x 480 such values",
        ),
        Case(
            "`edgeworth`, 64 kappas",
            lambda: edgeworth(1.0, kappa=KAPPA[::7][:64], **SAMPLED),
            lambda: [edgeworth(1.0, kappa=k, **SAMPLED) for k in KAPPA[::7][:64].tolist()],
            lambda: cumulants(1.0, 0.01),
            "the cumulants, once",
        ),
    ]


def transforms(noise: float, q: float, steps: int) -> Run:
    """The two transforms of a curve, and the special functions of one step."""
    found = curve(noise, q, steps)
    assert found is not None
    row = np.zeros(fft.next_fast_len(len(found.delta), real=True))
    row[: len(row) // 2] = 1.0
    half = row[: max(1, min(len(row), int(30 / found.interval)))]

    def run() -> object:
        return fft.irfft(fft.rfft(row), len(row)), special.ndtr(half), special.log_ndtr(half)

    return run


def kept() -> list[Case]:
    """Cached results against new ones, and a calibration with both."""

    def calibration() -> object:
        return calibrate_setting(TARGET, HIDDEN, prior=None)

    noise = calibrate_setting(TARGET, HIDDEN, prior=None).noise_multiplier

    return [
        Case(
            "curve of 1,000 steps, noise 1",
            lambda: curve(1.0, 0.01, 1000),
            cold(lambda: curve(1.0, 0.01, 1000)),
            transforms(1.0, 0.01, 1000),
            "two transforms, the tails of one step (to the second column)",
        ),
        Case(
            f"curve of 1,000 steps, noise {noise:.3g}",
            lambda: curve(noise, 0.01, 1000),
            cold(lambda: curve(noise, 0.01, 1000)),
            transforms(noise, 0.01, 1000),
            "the same on 2 million places",
        ),
        Case(
            "`calibrate`, 1,000 hidden steps",
            calibration,
            cold(calibration),
            transforms(noise, 0.01, 1000),
            "one curve, as the answer has to be checked (to the second column)",
        ),
    ]


def milliseconds(run: Run) -> float:
    """Processor milliseconds for one call; short calls are repeated."""
    times, taken = 1, 0.0
    while True:
        began = time.process_time()
        for _ in range(times):
            run()
        taken = time.process_time() - began
        if taken > 0.02 or times >= 1000:
            return 1000 * taken / times
        times *= 5


def main() -> None:
    """Time all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    matrix = np.random.default_rng(0).normal(size=(300, 300))
    many, few = grids(), kept()
    control: list[float] = []
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        control.append(milliseconds(lambda: matrix @ matrix))
        for case in (*many, *few):
            for way in ("minimum", "slow", "fast"):  # fast last: what it needs is cached by then
                run: Run = getattr(case, way)
                taken.setdefault((case.name, way), []).append(milliseconds(run))
    print(
        f"Control (300 x 300 product): {statistics.median(control):.3f} ms, "
        f"{min(control):.3f} to {max(control):.3f}; {rounds} rounds\n"
    )
    for title, cases in (("one call | loop", many), ("cached | new", few)):
        print(f"| what | {title} | ratio (range) | minimum | what the minimum is |")
        print("|---|---:|---:|---:|---:|---|")
        for case in cases:
            fast, slow, least = (taken[case.name, way] for way in ("fast", "slow", "minimum"))
            ratios = [a / b for a, b in zip(fast, slow, strict=True)]
            print(
                f"| {case.name} | {statistics.median(fast):.3f} | {statistics.median(slow):.2f} | "
                f"{statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f}) | "
                f"{statistics.median(least):.3f} | {case.says} |"
            )
        print()


if __name__ == "__main__":
    main()
