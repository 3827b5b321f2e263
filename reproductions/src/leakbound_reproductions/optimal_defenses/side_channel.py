"""Does the noise itself identify the example? Identification among candidates at very large noise.

The threat model is explicit: the attacker has a gallery of images, one of which is the client's.
This is not a reconstruction, and no verdict of an audit uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy import stats

from leakbound.attacks.data_dependent_law import replay, score
from leakbound.audit import PlanContext
from leakbound.audit.plan import DataSpec, ModelSpec
from leakbound.core import Batch
from leakbound.defenses import Defense, GaussianNoise, LocalOptimalNoise, OptimalNoise
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

DROWNING = 1e4
DEFENSES: dict[str, Defense] = {
    "local_optimal_noise": LocalOptimalNoise(DROWNING),
    "local_optimal_noise, one variance a tensor": LocalOptimalNoise(DROWNING, layers=True),
    "gaussian_noise": GaussianNoise(DROWNING),
    "optimal_noise (public)": OptimalNoise(DROWNING),
    "optimal_noise (public, layers)": OptimalNoise(DROWNING, rule="energy", correlation="layers"),
}


@dataclass(frozen=True)
class Found:
    """How often the example was identified: hits of n, with the 95 % Wilson interval."""

    defense: str
    model: str
    hits: int
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """The Wilson interval of the share."""
        found = stats.binomtest(self.hits, self.n).proportion_ci(method="wilson")
        return float(found.low), float(found.high)


def identify(
    model: str, defense: Defense, *, trials: int = 100, candidates: int = 200, name: str = ""
) -> Found:
    """Identify the client's image among `candidates` from one update, `trials` times.

    One model (seed 0) and one gallery of public images; each trial has its own example, directions
    and noise. The attacker replays the defense with their own directions.
    """
    bench = PlanContext(DataSpec())
    task = bench.task(ModelSpec(model), 0)
    public = bench.public
    assert public is not None  # mnist5k has 1,000 public images
    gallery = Batch(public.inputs[:candidates], public.labels[:candidates])
    order = permutation(candidates, stream(0, "identify"))[:trials]
    replays = None
    hits = 0
    for trial, index in enumerate(order.tolist()):
        one = Batch(gallery.inputs[index : index + 1], gallery.labels[index : index + 1])
        sources = [stream(trial, "identify", side) for side in ("client", "server")]
        seen = play(task, [one], defense, sources).observation
        if replays is None:  # the same for all updates of one model and defense
            replays = replay(seen, gallery, stream(0, "identify", "attacker"))
        hits += int(torch.argmax(score(seen, replays)) == index)
    return Found(name or repr(defense), model, hits, len(order))


def table(trials: int = 100) -> list[str]:
    """The rows of the results page."""
    lines = ["| defense | model | identified | 95 % interval |", "|---|---|--:|--:|"]
    for model in ("mlp", "simple_convnet"):
        for name, defense in DEFENSES.items():
            found = identify(model, defense, trials=trials, name=name)
            low, high = found.interval
            lines.append(
                f"| {name} | {model} | {found.hits} of {found.n} | "
                f"[{100 * low:.1f}, {100 * high:.1f}] % |"
            )
    return lines
