"""Keys of deployment files: one that is missing counts as its worst value, in random files."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from leakbound.risk.deployment import Deployment, laws_of, parse

from .test_deployment import leaves, without

KAPPAS = np.log([1e-3, 1e-6])
ROUNDS = (1, 4, 8)
FACTORS = ("none", "tree", "band:4")


def some(draw, share, **values):
    """Each key with one of its values, or without it."""
    return {key: draw.choice(own) for key, own in values.items() if draw.random() < share}


def table_of(draw):
    """Random keys with random values; many contradict each other."""
    share = draw.choice((0.97, 1.0, 1.0))
    at = draw.choice(("client", "share", "share", "server", "server", "optimizer"))
    if draw.random() < 0.05:
        at = draw.choice(("none", "rounded-share"))
    kind = "example" if at == "optimizer" else draw.choice(("l2", "l2", "adaptive", "per-layer"))
    clip = some(draw, share, kind=(kind,), norm=(0.5, 1.0), at=(*["client"] * 5, "server"))
    if kind == "adaptive":
        clip["adaptive"] = some(
            draw, share, bit_noise=(1.0, 5.0), quantile=(0.5, 0.9), rate=(0.0, 0.2),
            faults=(False, True),
        )  # fmt: skip
    if kind == "per-layer":
        clip |= some(draw, share, norms=([1.0, 2.0],))
    level = {
        "multiplier": some(draw, share, multiplier=(1.0, 3.0)),
        "std": some(draw, share, std=(1.0, 3.0)),
        "classical": some(draw, share, epsilon=(1.0,), delta=(1e-5,), sensitivity=(0.5, 1.0)),
        "pure": some(draw, share, pure_epsilon=(0.5,)),
    }[draw.choice((*["multiplier"] * 4, "std", "std", "classical", "pure"))]
    noise = some(draw, share, at=(at,), seeded=(*[False] * 9, True), on=("sum", "mean"))
    law = draw.choice(
        ("all", "server-picks", "fixed-size", "poisson", "cyclic", "balls-in-bins", "shuffled")
    )
    who = some(
        draw, share, law=(law,), cohort=(10,), population=(10, 40), replies=(2, 8, 10),
        rate=(0.1, 0.25, 1.0), bins=(2, 4), min_separation=(1, 2, 4), hidden=(False, True),
    )  # fmt: skip
    for key in ("rate", "cohort", "replies"):
        if draw.random() < (0.1 if key == "cohort" and at in ("share", "server") else 0.4):
            who.pop(key, None)
    if law in ("all", "poisson", "fixed-size"):
        who.pop("min_separation", None)
    if law in ("poisson", "fixed-size", "cyclic"):
        who.pop(draw.choice(("rate", "population")), None)
    if law == "shuffled":
        who.pop("population", None)
    hidden = some(
        draw, share, on=(False, True), kind=("secagg", "homomorphic"), colluding=(0, 1, 3),
        dropouts=(0, 2, 8), shared_key=(False, True),
    )  # fmt: skip
    if hidden.get("kind") == "secagg":
        hidden.pop("shared_key", None)
    if law in ("all", "server-picks", "fixed-size"):
        hidden.pop("dropouts", None) if draw.random() < 0.5 else who.pop("replies", None)
    local = some(
        draw, share, epochs=(1, 2), batch=(7, 10, 50), steps=(1, 2, 10, 20), examples=(10, 100),
        rate=(0.07, 0.1, 0.5), sampler=("poisson", "poisson", "shuffled"),
        normalizer=("expected", "expected", "realized"), coupled=(False, False, False, True),
        new_engine=(False, True),
    )  # fmt: skip
    for key in ("steps", "rate"):
        if draw.random() < 0.7:
            local.pop(key, None)
    top = some(
        draw, share, unit=("client", "example"), weights=("uniform", "examples"), rounds=ROUNDS,
        sizes=([100] * 9 + [500], [50] * 10), max_weight=(0.1, 0.3, 0.6),
        correlation=("none", "none", *FACTORS), sends=([], ["batch size"], ["metrics"]),
    )  # fmt: skip
    top.pop(draw.choice(("sizes", "max_weight")), None)
    record = some(draw, share, examples_per_client=(500,), dim=(32,), norm=(2.0,))
    parts = {
        "clip": clip, "noise": noise | level, "participation": who,
        "secure_aggregation": hidden, "local": local, "record": record,
    }  # fmt: skip
    return top | {name: own for name, own in parts.items() if draw.random() < 0.95}


def laws_by_row(table):
    """The law of each audience and unit; None if the file contradicts itself."""
    try:
        return {(one.audience, one.unit): one for one in laws_of(parse(table))}
    except ValueError:
        return None


def key_of(law):
    """All that enters its numbers."""
    return law.unit, law.setting, law.pure, law.copies, law.summed, law.beyond, law.special is None


KNOWN = {}
"""Numbers by the law's key."""


def numbers(law):
    """Success at KAPPAS and epsilon."""
    key = key_of(law)
    if key not in KNOWN or law.special is not None:
        KNOWN[key] = np.append(law.bound(KAPPAS), law.epsilon(1e-5))
    return KNOWN[key]


def smaller(law, other):
    """Whether another law states less."""
    if law.special is None and key_of(law) == key_of(other):
        return False
    return bool((numbers(other) < numbers(law) * (1 - 1e-9)).any())


def decreases(seed, files, most=None):
    """(audience and unit, deleted key, file) where a bound became smaller.

    `most`: how many keys of a file are tried, by default all.
    """
    draw, found, count = random.Random(seed), [], 0
    while count < files:
        table = table_of(draw)
        whole = laws_by_row(table)
        if whole is None:
            continue
        count += 1
        paths = list(leaves(table))
        for path in paths if most is None else draw.sample(paths, most):
            fewer = laws_by_row(without(table, path)) or {}
            found += [
                (who, path, table)
                for who, law in fewer.items()
                if who in whole and smaller(whole[who], law)
            ]
    return found


def test_a_key_that_is_deleted_never_lowers_a_bound_in_random_files():
    assert decreases(0, 500, most=4) == []


@pytest.mark.slow
def test_any_key_that_is_deleted_never_lowers_a_bound_in_random_files():
    assert decreases(1, 1000) == []


CLIP = {"norm": 1.0, "kind": "l2", "at": "client"}
WHOLE = {"clip": CLIP, "weights": "uniform", "rounds": 1, "correlation": "none"}
ALL = {"law": "all", "cohort": 10}


def table(**parts):
    return WHOLE | parts


def noise(at, **own):
    return {"multiplier": 1.0, "at": at, "seeded": False} | own


WORST = {
    ("noise", "on"): table(
        noise=noise("server"), weights="examples", sizes=[100] * 10,
        participation=ALL | {"replies": 10},
    ),
    ("clip", "at"): table(
        noise=noise("client"), clip={"norm": 1.0, "kind": "l2"}, participation=ALL
    ),
    ("secure_aggregation", "colluding"): table(
        noise=noise("share"), participation=ALL, secure_aggregation={"dropouts": 0}
    ),
    ("participation", "replies"): table(
        noise=noise("share"), participation={"law": "poisson", "cohort": 10},
        secure_aggregation={"on": True, "kind": "secagg", "colluding": 0, "dropouts": 0},
    ),
    ("opacus", "poisson_sampling"): {
        "opacus": {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": 10,
                   "sample_size": 1000, "epochs": 1},
        "noise": {"seeded": False}, "local": {"coupled": False}, "sends": [], "rounds": 1,
    },
    ("tf_privacy", "num_microbatches"): {
        "tf_privacy": {"noise_multiplier": 1.0, "l2_norm_clip": 1.0, "batch_size": 10,
                       "n": 1000, "epochs": 1},
        "noise": {"seeded": False}, "local": {"coupled": False}, "sends": [], "rounds": 1,
    },
    ("pfl", "mechanism"): {
        "pfl": {"noise_multiplier": 1.0, "clipping_bound": 1.0, "cohort_size": 10,
                "noise_cohort_size": 10, "num_rounds": 8, "min_separation": 1},
        "noise": {"seeded": False},
    },
    ("pfl", "min_separation"): {
        "pfl": {"noise_multiplier": 1.0, "clipping_bound": 1.0, "cohort_size": 10,
                "noise_cohort_size": 10, "num_rounds": 8, "mechanism": "none",
                "population": 1000},
        "noise": {"seeded": False},
    },
}  # fmt: skip
"""Files without one key, whose worst value an earlier form did not count."""
VALUES = {
    ("noise", "on"): ("sum", "mean"),
    ("clip", "at"): ("server", "client"),
    ("secure_aggregation", "colluding"): (0, 9),
    ("participation", "replies"): (1, 10),
    ("opacus", "poisson_sampling"): (True, False),
    ("tf_privacy", "num_microbatches"): (1, 10),
    ("pfl", "mechanism"): ("none", "tree"),
    ("pfl", "min_separation"): (1, 4),
}


@pytest.mark.parametrize("path", WORST, ids=".".join)
def test_a_missing_key_is_the_worst_of_its_values(path):
    given, (part, key) = WORST[path], path
    missing = laws_by_row(given)
    for value in VALUES[path]:
        stated = laws_by_row(given | {part: given.get(part, {}) | {key: value}})
        for row, law in missing.items():
            assert not smaller(stated[row], law), (row, value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"local": {"rate": 1e-4, "batch": 50, "examples": 100}},
         "local.rate is 0.0001, but a batch of 50 of 100 examples has a rate of 0.5"),
        ({"local": {"steps": 3, "epochs": 2, "batch": 50, "examples": 100}},
         "local.steps is 3, but 2 epochs of 100 examples in batches of 50 have 4"),
        ({"local": {"examples": 9}, "record": {"examples_per_client": 3}},
         "local.examples is 9, more than record.examples_per_client, 3"),
        ({"sizes": [5, 9], "record": {"examples_per_client": 3}}, "a client of 9 examples"),
        ({"sizes": [5], "participation": {"replies": 2}}, "sizes has 1 numbers"),
        ({"max_weight": 0.01, "participation": {"replies": 10}}, "weighs at least 1/10"),
        ({"participation": {"law": "fixed-size", "cohort": 1, "population": 2, "rate": 0.1}},
         "1 of 2 clients are a rate of 0.5"),
        ({"participation": {"law": "shuffled", "cohort": 1, "population": 20, "bins": 2}},
         "makes 10 a round"),
        ({"participation": {"law": "cyclic", "cohort": 9, "population": 20, "bins": 2}
          | {"rate": 0.1}}, "makes 1 a round"),
        ({"participation": ALL | {"replies": 2}, "secure_aggregation": {"dropouts": 0}},
         "0 dropouts leaves 10"),
        ({"clip": CLIP | {"adaptive": {"rate": 0.2}}}, "clip.adaptive is given, but"),
        ({"clip": CLIP | {"norms": [1.0]}}, "clip.norms is given, but"),
        ({"clip": CLIP | {"kind": "example", "at": "server"}}, "a server cannot clip"),
        ({"secure_aggregation": {"kind": "secagg", "shared_key": True}}, "no common key"),
        ({"noise": {"multiplier": 1.0},
          "clip": {"kind": "adaptive", "adaptive": {"bit_noise": 0.5}}}, "bit_noise above 0.5"),
        ({"opacus": {"poisson_sampling": 1}}, "give true or false"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        parse(given)


PAGE = Path(__file__).parents[2] / "docs/federated_privacy.md"


def test_the_page_has_every_key():
    rows = PAGE.read_text("utf-8").partition("## Keys")[2].partition("###")[0].splitlines()
    named = set()
    for row in rows:
        for key in re.findall(r"`([\w.]+)`", row.split("|")[1]) if row.startswith("|") else ():
            named.add(key.rpartition(".")[2])
    assert named >= set(keys_of(Deployment))


def keys_of(kind):
    """The names of all keys, also of the tables inside."""
    for field in msgspec.structs.fields(kind):
        inner = [one for one in (field.type, *get_args(field.type)) if isinstance(one, type)]
        inner = [one for one in inner if issubclass(one, msgspec.Struct)]
        if inner:
            yield from keys_of(inner[0])
        else:
            yield field.name
