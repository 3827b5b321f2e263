"""What the study of paper D runs: parts of a plan file, each a list of experiments."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from leakbound.check import closest
from leakbound_reproductions.outcome import SCALES

SCHEMES = ("random", "snip", "synflow", "grasp", "fed_dst", "prune_fl")
TABLE = ("prune_fl", "fed_dst", "synflow", "snip")
PAPER = {
    "prune_fl": (5, 15, 2e-5),
    "fed_dst": (10, 8, 2e-5),
    "synflow": (10, 1, 2e-6),
    "snip": (10, 1, 2e-6),
}
"""The paper's l_acc, l_pri and l_sha for FEMNIST (appendix D.3)."""
VERSION = 1
"""Raise it if a code change alters records; journals then start again."""
FEDERATED_WEIGHTS = 6_603_710
"""Weights of the paper's Conv-2, for which its l_sha are printed."""


@dataclass(frozen=True)
class Cell:
    """One federated training, with attacks on one client (number 0) in some of its rounds.

    Attributes:
        part: the part of the study.
        target: images of client 0, who takes part in all rounds with all of them.
        marks: the rounds that are attacked.
        attacks: by the names of `cell.ATTACKS`.
        dense_server: the attacker does not know the base mask: the server sent the dense model and
            the client pruned it.
        clients: how many there are, client 0 included.
        shared: images of a local step of the others.
        skew: how images are distributed: "equal", "class" (one class per client) or a Dirichlet
            concentration as text, "writer" (one or several writers per client).
    """

    part: str
    seed: int
    data: str
    size: int
    model: str
    pruning: str
    defense: str = "none"
    target: int = 1
    rounds: int = 1
    marks: tuple[int, ...] = (1,)
    attacks: tuple[str, ...] = ("sgi",)
    steps: int = 400
    dense_server: bool = False
    clients: int = 10
    shared: int = 16
    images: int = 4000
    learning_rate: float = 0.5
    skew: str = "equal"
    aggregation: str = "masked"

    @property
    def id(self) -> str:
        """Twelve hex digits of all settings except the part."""
        own = {k: v for k, v in asdict(self).items() if k != "part"}
        named = repr((VERSION, sorted(own.items())))
        return hashlib.sha256(named.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Study:
    """A plan file, read: see `cpu.toml` for the keys."""

    base: Mapping[str, Any]
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @staticmethod
    def read(name: str, data: str = "") -> Study:
        """The built-in plan of that name, or the file at that path, on its data or others."""
        path = resources.files(__package__).joinpath(f"{name}.toml")
        if not path.is_file() and not Path(name).is_file():
            raise ValueError(
                f"plan {name!r} is no file; give its path, or one of {', '.join(SCALES)}"
            )
        text = path.read_text("utf-8") if path.is_file() else Path(name).read_text("utf-8")
        whole = tomllib.loads(text)
        base = whole.get("base", {})
        parts = whole.get("parts", {})
        settings = {f.name for f in fields(Cell)} - {
            "part",
            "seed",
            "pruning",
            "defense",
            "attacks",
        }
        for kind, names, known in (("part", parts, _PARTS), ("base", base, {*settings, "every"})):
            for name in names:
                if name not in known:
                    raise ValueError(f"{kind} {name!r} is not known; {closest(name, known)}")
        if missing := {"data", "size", "model", "every"} - set(base):
            raise ValueError(f"base lacks {min(missing)!r}; see cpu.toml for the keys")
        return Study(base | ({"data": data} if data else {}), parts)

    def cells(self, only: Sequence[str] = ()) -> list[Cell]:
        """All experiments of all parts, or of some; those in two parts are listed in both."""
        for name in only:
            if name not in self.parts:
                raise ValueError(f"part {name!r} is not in the plan; it has {sorted(self.parts)}")
        return [cell for name in only or self.parts for cell in self._cells(name)]

    def _cells(self, part: str) -> list[Cell]:
        try:
            return list(_PARTS[part](self, self.parts[part]))
        except KeyError as error:
            raise ValueError(f"part {part!r} lacks {error}; see cpu.toml") from None

    def cell(self, part: str, seed: int, rate: float = 0.3, scheme: str = "prune_fl") -> Cell:
        """An experiment with the plan's base settings."""
        plain = {k: v for k, v in self.base.items() if k != "every"}
        marks = tuple(plain.pop("marks", (1,)))
        cell = Cell(part, seed, pruning=self.pruning(scheme, rate), **plain)
        return replace(cell, marks=tuple(m for m in marks if m <= cell.rounds))

    def pruning(self, scheme: str, rate: float) -> str:
        """The scheme's spec at a rate, with the plan's interval for adaptive schemes."""
        adapts = scheme in ("prune_fl", "fed_dst")
        return f"{scheme},rate={rate}" + (f",every={self.base['every']}" if adapts else "")

    def price(self, share: float, weights: int) -> float:
        """l_sha for a model with this many weights, from the paper's value for its Conv-2."""
        return share * FEDERATED_WEIGHTS / weights

    def terms(self, accuracy: float, privacy: float, share: float, weights: int) -> str:
        """PriPrune's spec with the paper's weights of the three terms."""
        price = self.price(share, weights)
        return f"pri_prune,accuracy={accuracy},privacy={privacy},sharing={price:.4g}"


def _rate(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    """Privacy against rate, six schemes; SGI and GI, by servers that know the base mask or not."""
    for seed, scheme, rate in product(range(own["seeds"]), SCHEMES, own["rates"]):
        cell = study.cell("rate", seed, rate, scheme)
        yield replace(cell, rounds=1, marks=(1,), attacks=("sgi", "gi"))
        blind = ("sgi_pruned", "gi")
        yield replace(cell, rounds=1, marks=(1,), attacks=blind, dense_server=True)


def _rate_again(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    """SGI by rate if the mask is shared, on separate seeds."""
    for seed, scheme, rate in product(_fresh(own), SCHEMES, own["rates"]):
        cell = study.cell("rate_again", seed, rate, scheme)
        yield replace(cell, rounds=1, marks=(1,))


def _kept_again(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    """Only the accuracy of real and of pseudo-pruning, on separate seeds."""
    for seed, defense in product(_fresh(own), own["defenses"]):
        cell = study.cell("kept_again", seed)
        yield replace(cell, defense=defense, marks=(), attacks=())


def _fresh(own: Mapping[str, Any]) -> range:
    return range(own["first"], own["first"] + own["seeds"])


def _batch(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    for seed, scheme, size in product(range(own["seeds"]), SCHEMES, own["sizes"]):
        cell = study.cell("batch", seed, scheme=scheme)
        yield replace(cell, rounds=1, marks=(1,), target=size)


def _size(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    return _sizes(study, "size", range(own["seeds"]), own["models"])


def _size_again(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    return _sizes(study, "size_again", _fresh(own), own["models"])


def _sizes(study: Study, part: str, seeds: range, models: Sequence[str]) -> Iterator[Cell]:
    for seed, scheme, model in product(seeds, SCHEMES, models):
        cell = study.cell(part, seed, scheme=scheme)
        yield replace(cell, rounds=1, marks=(1,), model=model)


def _rounds(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    for seed, scheme in product(range(own["seeds"]), SCHEMES):
        yield study.cell("rounds", seed, scheme=scheme)


def _defended(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    """Fixed rates and PriPrune on PruneFL; `more` defenses for fewer seeds.

    All attackers; after `strong_seeds` only those of one round, which cost a quarter.
    """
    pairs = [*product(range(own["seeds"]), own["defenses"])]
    pairs += product(range(own.get("more_seeds", 0)), own.get("more", ()))
    for seed, defense in pairs:
        cell = study.cell("defended", seed)
        attacks: tuple[str, ...] = ("sgi",)
        if "largest" in defense:
            attacks = (*attacks, "ordered")
        if not _strong(own, seed):
            pass
        elif "pri_prune" in defense and "last" not in defense:
            attacks = (*attacks, "mixed")
        elif "pseudo=false" not in defense and defense != "none":
            attacks = (*attacks, "rounds")
        yield replace(cell, defense=defense, attacks=attacks)


def _table(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    """Table 2: four schemes without PriPrune, and with the paper's weights for each."""
    for seed, scheme in product(range(own["seeds"]), TABLE):
        cell = study.cell("table", seed, scheme=scheme)
        terms = study.terms(*PAPER[scheme], own["weights"]) + own.get("settings", "")
        for defense in ("none", terms):
            yield replace(cell, defense=defense, attacks=_with_mixed(own, seed))


def _search(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    """Table A1: weights of the three terms."""
    for seed, acc, pri, sha in product(
        range(own["seeds"]), own["accuracy"], own["privacy"], own["sharing"]
    ):
        spec = study.terms(acc, pri, sha, own["weights"]) + own.get("settings", "")
        cell = study.cell("search", seed)
        attacks = _with_mixed(own, seed)
        yield replace(cell, defense=spec, marks=cell.marks[-2:], attacks=attacks)


def _chain(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    """PriPrune with noise and with secure aggregation."""
    for seed, defense in product(range(own["seeds"]), own["defenses"]):
        cell = study.cell(
            "chain", seed, scheme="magnitude"
        )  # others report what the noise must hide
        cell = replace(
            cell, defense=defense, marks=(1, *cell.marks[-2:-1]), attacks=("sgi", "mixed")
        )
        if "secure_aggregation" in defense:
            cell = replace(cell, aggregation="unchanged", shared=own["shared"], attacks=("sgi",))
        yield cell


def _skew(study: Study, own: Mapping[str, Any]) -> Iterator[Cell]:
    """Accuracy if clients' images differ; no attacks."""
    for seed, skew, defense in product(range(own["seeds"]), own["skews"], own["defenses"]):
        yield replace(study.cell("skew", seed), defense=defense, skew=skew, marks=(), attacks=())


def _with_mixed(own: Mapping[str, Any], seed: int) -> tuple[str, ...]:
    return ("sgi", "mixed") if _strong(own, seed) else ("sgi",)


def _strong(own: Mapping[str, Any], seed: int) -> bool:
    """Whether attackers of several rounds attack this seed: yes, unless a part says no."""
    return bool(seed < own.get("strong_seeds", own["seeds"]))


_PARTS = {
    "rate": _rate,
    "rate_again": _rate_again,
    "batch": _batch,
    "size": _size,
    "size_again": _size_again,
    "rounds": _rounds,
    "defended": _defended,
    "kept_again": _kept_again,
    "table": _table,
    "search": _search,
    "chain": _chain,
    "skew": _skew,
}
