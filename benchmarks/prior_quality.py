"""What a learned prior adds to the built-in attacks.

Writes a section of docs/results/attack_quality.json. The prior is learned from the public split,
and batches are of the private split of an audit. The attack's settings were chosen on examples of
the test split. Every setting has 12 batches, each with its own weights and noise, which all attacks
share. About three hours on one thread; with arguments DATA/MODEL/DEFENSE, only these, and other
lines of the table stay. Scores are kept in a file (`--kept FILE`), so it continues.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import nn

from leakbound import data, models, registry
from leakbound.assess.measure import guesses
from leakbound.audit.context import SPLITS
from leakbound.core import Batch, NotApplicable, Reconstruction, Task
from leakbound.data.splits import split, without_copies
from leakbound.pairing import pair
from leakbound.protocol import play
from leakbound.randomness import permutation, stream, uniform

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

FIRST, SEEDS = 200, 12
"""Seeds of the reported batches: none was seen while the attack was made."""
IMAGES = ("inverting_gradients", "strong_matching", "linear_inversion")
TABLES = ("inverting_gradients", "tab_leak", "linear_inversion")
NOISE = tuple(f"gaussian_noise,noise_std={s}" for s in (0.003, 0.01, 0.03, 0.1))
HEAVY = ("magnitude_pruning,rate=0.99", "local_optimal_pruning,rate=0.99")
SETTINGS = tuple(
    f"{name}/{model}/{defense}"
    for name, model, defenses in (
        ("mnist5k", "simple_convnet", (*NOISE, *HEAVY)),
        ("mnist5k", "mlp", NOISE),
        ("photos", "simple_convnet", (*NOISE, *HEAVY)),
        ("photos", "mlp", NOISE),
        ("german", "mlp", NOISE),
        ("breast_cancer", "mlp", NOISE),
    )
    for defense in defenses
)
PRIORS: Path | None = None
"""Where priors of `leakbound train-prior` are, `DATA.safetensors`; else each is trained here."""
DATA = frozenset(setting.split("/")[0] for setting in SETTINGS)
HEADING = "## A learned prior"


@cache
def scene(name: str):
    """A data set, its public batch, and the indices of private examples."""
    held = data.load(name)
    parts = split(len(held.labels), SPLITS, seed=0, name="audit")
    if held.domain.copies_count_once:
        parts = without_copies(parts, held.inputs)
    public = held.batch(parts["public"])
    return held, held.domain.fitted(public.inputs), public, parts


def played(setting: str, seed: int, part: str = "private"):
    """One batch of one example, and what the attacker sees of its update."""
    name, kind, defense = setting.split("/")
    held, domain, public, parts = scene(name)
    own = parts[part]
    at = own[permutation(len(own), stream(seed, "prior quality", part))[:1]]
    kind, _, steps = kind.partition("+")
    shape = tuple(held.inputs.shape[1:])
    model = getattr(models, kind)(
        input_shape=shape, classes=held.classes, generator=stream(seed, "model")
    )
    trained(model, public, int(steps or 0), seed)
    task = Task.of(model, domain=domain, classes=held.classes)
    built = made("defense", defense)
    sources = [stream(seed, "defense", k) for k in range(2)]
    batch = held.batch(at)
    return batch, domain, play(task, [batch], built, sources, auxiliary=public).observation


def made(kind: str, text: str):
    return registry.parse(kind, text)


def trained(model: nn.Module, public: Batch, steps: int, seed: int) -> None:
    source, optimizer = stream(seed, "training"), torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        at = (uniform((64,), source) * public.size).long()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(public.inputs[at]), public.labels[at]).backward()
        optimizer.step()


def score(domain, batch: Batch, found: torch.Tensor) -> float:
    """PSNR in dB; of a table the percentage of columns that are right."""
    own = pair(batch, Reconstruction(found), domain.costs).inputs
    if domain.distance_is_rmse:
        return float(domain.score(batch.inputs, own).mean())
    return 100 * float((~domain.misses(batch.inputs, domain.hard(own))).double().mean())


class Kept:
    """Scores by setting, attack and seed, in a file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.held = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def get(self, key: str, make: Callable[[], list[float]]) -> list[float]:
        if key not in self.held:
            self.held[key] = make()
            if self.path is not None:
                self.path.write_text(json.dumps(self.held))
        return self.held[key]


def measured(kept: Kept, setting: str, name: str, seed: int) -> list[float]:
    """Score and seconds of one attack on one batch."""

    def make() -> list[float]:
        batch, domain, seen = played(setting, seed)
        start = time.process_time()
        if name == "prior only":
            return [
                score(domain, batch, guesses(domain, batch, scene(setting.split("/")[0])[2])),
                0.0,
            ]
        attack = made("attack", name)
        file = PRIORS and PRIORS / f"{setting.split('/')[0]}.safetensors"
        if name == "learned_prior" and file and file.exists():
            attack = replace(attack, prior=str(file))
        try:
            found = attack(seen, stream(seed, "attack")).inputs
        except NotApplicable:
            return [float("nan"), 0.0]
        return [score(domain, batch, found), time.process_time() - start]

    return kept.get(f"{setting}|{name}|{seed}", make)


def key(setting: str) -> tuple[str, ...]:
    """Data, model and defense, as its line of the table says them."""
    name, model, defense = setting.split("/")
    text = defense.replace("gaussian_noise,noise_std=", "noise ").replace(",rate=", " ")
    return name, model, text.replace("_", " ")


def line(kept: Kept, setting: str) -> str:
    """One line of the table."""
    table = not scene(setting.split("/")[0])[1].distance_is_rmse
    others = TABLES if table else IMAGES
    found = {
        attack: np.array(
            [measured(kept, setting, attack, seed) for seed in range(FIRST, FIRST + SEEDS)]
        )
        for attack in ("prior only", *others, "learned_prior")
    }
    means = {attack: values[:, 0].mean() for attack, values in found.items()}
    best = max((a for a in others if means[a] == means[a]), key=lambda a: means[a])
    apart = found["learned_prior"][:, 0] - found[best][:, 0]
    half = float(stats.t.ppf(0.975, SEEDS - 1) * apart.std(ddof=1) / SEEDS**0.5)
    cells = (
        *key(setting),
        f"{means['prior only']:.1f}",
        f"{best} {means[best]:.1f}",
        f"{means['learned_prior']:.1f}",
        f"{apart.mean():+.1f} ± {half:.1f}",
        int((apart < 0).sum()),
        f"{np.median(found['learned_prior'][:, 1]):.0f} / {np.median(found[best][:, 1]):.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "The attack `learned_prior` against the best of {others} in the same setting. The prior "
    "is learned from the public split with the defaults of `leakbound train-prior`; private "
    "batches are of the private split. The settings of the attack were chosen on examples of "
    "the test split. All attacks of a setting share batches, weights and noise (one example, "
    "labels and defense known). Values are PSNR in dB, of tables the percentage of right "
    "columns, means over n = {n} batches. The difference is paired, with its 95 % t interval; "
    "*worse* counts batches. *Prior only* is the closest of the public mean, the public mean "
    "of the class, and constants. `benchmarks/prior_quality.py` writes this section."
)
COLUMNS = (
    "| data | model | defense | prior only | best other attack | learned prior | difference "
    "| worse | CPU s, both |\n|---|---|---|--:|--:|--:|--:|--:|--:|\n"
)
NAMES = "`inverting_gradients`, `strong_matching` (tables: `tab_leak`) and `linear_inversion`"


def written(lines: list[str]) -> None:
    """Put lines into the table of their section; other lines of it stay."""
    [section] = stored.parse(f"{HEADING}\n\n{COLUMNS}" + "\n".join(lines))["sections"]
    new = section["body"][0]["rows"]
    page = stored.read("attack_quality")
    old = [one for one in page["sections"] if one.get("heading") == HEADING[3:]]
    rows = [row for one in old for table in one["body"][1:] for row in table["rows"]]
    held = {tuple(row[:3]): row for row in (*rows, *new)}
    shown = ["| " + " | ".join(held[k]) + " |" for s in SETTINGS if (k := key(s)) in held]
    head = HEAD.format(others=NAMES, n=SEEDS)
    stored.keep("attack_quality", f"{HEADING}\n\n{head}\n\n{COLUMNS}" + "\n".join(shown))


def main() -> None:
    """Print the table and write the section."""
    global PRIORS
    torch.set_num_threads(1)
    given = sys.argv[1:]
    kept = Kept(Path(given[given.index("--kept") + 1]) if "--kept" in given else None)
    if "--priors" in given:
        PRIORS = Path(given[given.index("--priors") + 1])
    asked = tuple(a for a in given if a.split("/")[0] in DATA)
    lines = []
    for setting in asked or SETTINGS:
        lines.append(line(kept, setting))
        print(lines[-1], flush=True)
    if "--print" not in given:
        written(lines)


if __name__ == "__main__":
    main()
