"""Claims 4-1 to 4-9 of paper D, each judged as in the paper.

The paper's attacker is SGI and its measure NMI, with PSNR where it shows both (by rate).
Differences are between experiments of one seed, which have the same weights, images and draws. NMI
and accuracy are means over the attacked rounds and over the schemes that a claim is about. For
PriPrune, only the rounds count in which its masks can withhold. The paper does not say how it
starts, which does not matter over its thousands of rounds. Results of a stronger attacker are
remarks, because the paper claims nothing about them. All other comparisons are on the results page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from leakbound_reproductions.by_seed import Part, claimed, remarks, repeated
from leakbound_reproductions.claim import POSITIVE, Claim
from leakbound_reproductions.priprune.comparisons import arm, arms, at_rate, by_scheme
from leakbound_reproductions.priprune.idle import acting, started
from leakbound_reproductions.priprune.measured import (
    BySeed,
    Measured,
    average,
    difference,
    less,
    rate_of,
)
from leakbound_reproductions.priprune.remarks import lost, remark, strongest, told

REPEATED = 0.025
"""The largest standard deviation of NMI among repetitions in the paper's table 2: what is closer
counts as equal."""
POINT = 1.0
"""How many points of accuracy count as closely aligned."""
MOST = 0.75
"""The share of the reduction by Largest 60 % that counts as comparable. The largest deviation in
table 2, 0.025, is a quarter of PriPrune's gain of 0.10 there."""
FIRST = "SGI in the first round, with random weights"
EACH = "SGI, mean over the attacked rounds"
NEAR = f"NMI closer than {REPEATED:g}, the largest deviation in table 2, counts as equal"
TABLE_2 = {
    "prune_fl": "0.22 - 0.12 = 0.10, CIFAR-10 0.05",
    "fed_dst": "0.21 - 0.13 = 0.08, CIFAR-10 0.07",
    "synflow": "0.22 - 0.15 = 0.07, CIFAR-10 0.04",
    "snip": "0.23 - 0.13 = 0.10, CIFAR-10 0.02",
}
TABLE_A1 = {(1.0, 10.0): "0.152 - 0.132 = 0.020", (1.0, 15.0): "0.152 - 0.138 = 0.014"}
RULES = ("largest", "mix", "random")


def claims(found: Measured, n: str) -> list[Claim]:
    """All nine; `n` says the scale."""
    defended = found.where(part="defended")
    return [
        rate_lowers(found.where(dense_server=False), n),
        sparse_beats_blind(found.where(part="rate", dense_server=True), n),
        batch_lowers(found.where(part="batch"), n),
        size_raises(found, n),
        rules(defended, n),
        pseudo_raises(defended, found.where(part="kept_again"), n),
        as_base(defended, n),
        table(found.where(part="table"), n),
        privacy_weight(found.where(part="search"), n),
    ]


def rate_lowers(found: Measured, n: str) -> Claim:
    """4-1: "a higher pruning rate generally leads to a decrease", "clearer ... above 0.5"."""
    both = [found.where(part=part) for part in ("rate", "rate_again")]
    used = repeated(*map(_over_rates, both))
    return claimed(
        "4-1",
        "A higher pruning rate leaks less, and clearly so above one half.",
        "section 4.2.4, figures 2, 4 and A2",
        _scale(both[used.second], n, FIRST),
        used.parts,
        used.told,
    )


def _over_rates(found: Measured) -> list[Part]:
    """The comparisons of 4-1 in one part of the plan; may be none."""
    rates = sorted({rate_of(cell) for cell, _ in found.pairs})
    parts = []
    for measure, name, unit in (("nmi", "NMI", ""), ("psnr", "PSNR", "dB")):
        at = {rate: at_rate(found, rate).leak("sgi", measure) for rate in rates}
        low, high = (at[rates[0]], at[rates[-1]]) if rates else ({}, {})
        text = f"{name} falls from the lowest rate to the highest"
        parts.append(Part(text, less(low, high), POSITIVE, unit=unit, paper="falls (figure 4)"))
        if measure == "nmi":  # the paper says "clearer" only about NMI
            middle = at.get(0.5, {})
            first = difference(low, middle)
            second = difference(middle, high)
            text = f"{name} falls more from 0.5 on than up to 0.5"
            parts.append(Part(text, less(second, first), POSITIVE, paper="clearer (section 4.2.4)"))
    return parts if found.pairs else []


def sparse_beats_blind(found: Measured, n: str) -> Claim:
    """4-2: SGI infers more "at each pruning rate level, across all tested pruning methods".

    For a client who prunes a dense model, the setting of the paper's reason: only there does the
    mask give the server new information.
    """
    ways = {
        f"rate {rate:g}": at_rate(found, rate)
        for rate in sorted({rate_of(cell) for cell, _ in found.pairs})
    }
    ways |= by_scheme(found)
    parts = [
        Part(
            f"{name}: SGI has a higher NMI than GI",
            less(_nmi(own, "sgi_pruned"), _nmi(own, "gi")),
            POSITIVE,
        )
        for name, own in ways.items()
    ]
    return claimed(
        "4-2",
        "SGI reconstructs more than GI at each rate and for each method.",
        "section 4.2.3, figure 3",
        _scale(
            found, n, f"{FIRST}; each rate is a mean over methods, each method a mean over rates"
        ),
        parts,
        "Where server and client share the base mask, both attacks see the same numbers and get "
        "the same result. Reading the mask helps only a server that does not have it",
    )


def batch_lowers(found: Measured, n: str) -> Claim:
    """4-3: "increasing the batch size B contributes to reducing information leakage"."""
    sizes = sorted(found.values("target"))
    parts = []
    if len(sizes) > 1:
        few, many = (_nmi(found.where(target=size)) for size in (sizes[0], sizes[-1]))
        text = f"NMI falls from B = {sizes[0]} to {sizes[-1]}"
        parts = [Part(text, less(few, many), POSITIVE)]
    why = [
        f"{name} falls from B = {a} to {b} by {text}"
        for a, b in pairwise(sizes)
        for name, measure in (("NMI", "nmi"), ("NMI above chance", "corrected"), ("PSNR", "psnr"))
        if (text := told(*(found.where(target=s).leak("sgi", measure) for s in (a, b))))
    ]
    statement = "Larger batches leak less."
    where = _scale(found, n, FIRST)
    source = "section 4.2.4, figures 4b and 4d"
    return claimed("4-3", statement, source, where, parts, remarks(*why))


def size_raises(found: Measured, n: str) -> Claim:
    """4-4: deeper models leak more, and not in proportion to their weights.

    As in the paper, the models differ in depth. "Not linear" means that further weights of large
    models add little: the middle model lies above the line from the smallest to the largest.
    """
    both = [found.where(part=part) for part in ("size", "size_again")]
    used = repeated(*map(_over_sizes, both))
    found = both[used.second]
    why = used.told
    if models := _by_size(found):
        ends = (found.where(model=m).leak("sgi", "psnr") for m in (models[-1], models[0]))
        psnr = f"PSNR of the largest minus that of the smallest: {told(*ends)} dB"
        why = remarks(why, psnr)
    statement = "Larger models leak more, but not in proportion: each further weight adds less."
    where = _scale(found, n, FIRST)
    return claimed("4-4", statement, "section 4.2.4, figure 5a", where, used.parts, why)


def _by_size(found: Measured) -> list[str]:
    """The models that differ in depth, from smallest to largest; none if fewer than 3."""
    weights = in_depth({cell.model: record["weights"] for cell, record in found.pairs})
    return sorted(weights, key=lambda model: weights[model]) if len(weights) > 2 else []


def _over_sizes(found: Measured) -> list[Part]:
    """The comparisons of 4-4 in one part of the plan; may be none."""
    models = _by_size(found)
    parts = []
    if not models:
        return []
    weights = {cell.model: record["weights"] for cell, record in found.pairs}
    small, *middle, large = models
    own = {model: _nmi(found.where(model=model)) for model in models}
    text = f"NMI of {weights[large]:,} weights is above that of {weights[small]:,}"
    parts.append(Part(text, less(own[large], own[small]), POSITIVE, paper="above (figure 5a)"))
    for model in middle:
        share = (weights[model] - weights[small]) / (weights[large] - weights[small])
        line = {
            seed: (1 - share) * own[small][seed] + share * own[large][seed]
            for seed in set(own[small]) & set(own[large])
        }
        text = f"NMI of {weights[model]:,} weights is above the line between them"
        parts.append(Part(text, less(own[model], line), POSITIVE, paper="not linear (figure 5a)"))
    return parts


def in_depth(weights: Mapping[str, int]) -> dict[str, int]:
    """From models with their weights, the largest group that differs only in depth.

    Example:
        >>> in_depth({"conv,depth=1": 10, "conv,depth=2": 20, "conv,depth=2,width=2.0": 40})
        {'conv,depth=1': 10, 'conv,depth=2': 20}
    """
    groups: dict[str, dict[str, int]] = {}
    for model, size in weights.items():
        rest = ",".join(word for word in model.split(",") if not word.startswith("depth="))
        groups.setdefault(rest, {})[model] = size
    return max(groups.values(), key=len, default={})


def rules(found: Measured, n: str) -> Claim:
    """4-5: the fixed rules at 30 %, figure 6's oval of real pruning and appendix D.1.

    "Largest" has "the best privacy and the worst model accuracy", random the highest accuracy. The
    figure shows that mix lies between them in privacy, up to differences between repetitions.
    """
    own = {rule: arm(found, rule, 0.3, False) for rule in RULES}
    nmi = {rule: _nmi(some) for rule, some in own.items()}
    right = {rule: some.accuracy() for rule, some in own.items()}
    parts = [
        Part(
            f"NMI under {other} minus that under largest",
            less(nmi[other], nmi["largest"]),
            POSITIVE,
        )
        for other in ("random", "mix")
    ]
    text = "NMI under random minus that under mix"
    near = (-REPEATED, math.inf)
    parts.append(Part(text, less(nmi["random"], nmi["mix"]), near))
    for more, fewer in (("random", "largest"), ("mix", "largest"), ("random", "mix")):
        text = f"accuracy under {more} minus that under {fewer}"
        parts.append(Part(text, less(right[more], right[fewer]), POSITIVE, unit="points"))
    return claimed(
        "4-5",
        "Withholding the largest gradients hides the most and costs the most, random ones the "
        "least; a mix lies between.",
        "section 5.1, figure 6, appendix D.1",
        _scale(found, n, f"{EACH}; {NEAR}"),
        parts,
    )


def pseudo_raises(found: Measured, new: Measured, n: str) -> Claim:
    """4-6: keeping withheld weights gives "notably better" accuracy and no more NMI, with the same
    rule.

    `new`: a rule's experiments that were measured again, for its accuracy.
    """
    parts = []
    hidden = []
    second = []
    for rule in RULES:
        real, kept = (arm(found, rule, 0.3, pseudo) for pseudo in (False, True))
        text = f"{rule}: accuracy with pseudo-pruning minus that of real pruning"
        right = less(kept.accuracy(), real.accuracy())
        part = Part(text, right, POSITIVE, unit="points", paper="notably better (section 5.1)")
        parts.append(part)
        both = [arm(new, rule, 0.3, pseudo).accuracy() for pseudo in (True, False)]
        second += [replace(part, values=less(*both))] if all(both) else []
        text = f"{rule}: NMI under real pruning minus that under pseudo-pruning"
        parts.append(Part(text, less(_nmi(real), _nmi(kept)), (-REPEATED, math.inf)))
        hidden += strongest(f"{rule}", real, kept)
    used = repeated(parts, second)
    where = _scale(found, n, f"{EACH}; {NEAR}")
    if used.second:
        where += f", {len(second[0].values)} others for the accuracy of one rule"
    return claimed(
        "4-6",
        "Pseudo-pruning is more accurate than real pruning with the same rule, and no less "
        "private.",
        "section 5.1, figure 6",
        where,
        used.parts,
        remarks(used.told, remark(hidden)),
    )


def as_base(found: Measured, n: str) -> Claim:
    """4-7: PriPrune with the paper's ratio of weights, PruneFL and Largest (Pseudo) 60 %."""
    names = [name for name in found.values("defense") if name.startswith("pri_prune")]
    own = found.where(defense=names[0] if names else "")
    base = found.where(defense="none")
    most = arm(found, "largest", 0.6, True)
    plain, ours, theirs = (_nmi_of(some, acting(own)) for some in (base, own, most))
    gained = difference(plain, ours)
    possible = difference(plain, theirs)
    enough = {seed: MOST * value for seed, value in possible.items()}
    parts = [
        Part(
            "accuracy minus that of PruneFL",
            less(own.accuracy(), base.accuracy()),
            (-POINT, math.inf),
            unit="points",
        ),
        Part(
            "NMI of PruneFL minus that with PriPrune",
            list(gained.values()),
            POSITIVE,
            paper="0.22 - 0.12 = 0.10 (table 2)",
        ),
        Part(
            f"that difference minus {MOST:g} of that by Largest (Pseudo) 60 %",
            less(gained, enough),
            POSITIVE,
        ),
    ]
    return claimed(
        "4-7",
        "PriPrune is as accurate as PruneFL, and about as private as withholding the largest 60 %.",
        "section 6.2, figures 8a and 8b",
        _scale(
            found,
            n,
            f"{_rounds(own)}; {MOST:g} of the reduction counts as comparable, because 0.025, the "
            "largest deviation in table 2, is a quarter of PriPrune's 0.10 there",
        ),
        parts,
        remarks(started(own), remark(strongest("PriPrune", base, own))),
    )


def table(found: Measured, n: str) -> Claim:
    """4-8: "consistently reduces NMI", with the paper's weights for each scheme."""
    parts = []
    hidden = []
    right = []
    ours = Measured([p for p in found.pairs if p[0].defense != "none"])
    for name, own in by_scheme(found).items():
        both = arms(own)
        if both is None:
            continue
        rounds = acting(both[1])
        values = less(*(_nmi_of(arm, rounds) for arm in both))
        right.append(f"{name} {told(*(arm.accuracy() for arm in both))}")
        paper = f"{TABLE_2[name]} (table 2)" if name in TABLE_2 else ""
        parts.append(
            Part(f"{name}: NMI without PriPrune minus that with it", values, POSITIVE, paper=paper)
        )
        hidden += strongest(name, *both)
    return claimed(
        "4-8",
        "PriPrune lowers the NMI of every base method.",
        "table 2, figure 9",
        _scale(found, n, _rounds(ours)),
        parts,
        remarks(started(ours), lost(right), remark(hidden)),
    )


def privacy_weight(found: Measured, n: str) -> Claim:
    """4-9: "when we increase" l_pri NMI falls: from the smallest to each larger one."""
    own: dict[float, list[BySeed]] = {}
    for defense in found.values("defense"):
        settings = dict(pair.split("=") for pair in defense.split(",")[1:])
        cell = found.where(defense=defense)
        own.setdefault(float(settings["privacy"]), []).append(_nmi_of(cell, acting(found)))
    means = {privacy: average(each) for privacy, each in sorted(own.items())}
    parts = []
    for larger in list(means)[1:]:
        least = min(means)
        text = f"NMI at l_pri = {least:g} less that at {larger:g}, means over l_acc and l_sha"
        paper = TABLE_A1.get((least, larger), "")
        paper += " (means of table A1)" if paper else ""
        parts.append(Part(text, less(means[least], means[larger]), POSITIVE, paper=paper))
    statement = "A larger privacy weight l_pri lowers NMI."
    where = _scale(found, n, _rounds(found))
    return claimed("4-9", statement, "appendix D.3, table A1", where, parts, started(found))


def _rounds(found: Measured) -> str:
    return f"SGI in round {' and '.join(map(str, acting(found)))}" if found.pairs else "SGI"


def _nmi_of(found: Measured, rounds: Sequence[int]) -> BySeed:
    each = [found.leak("sgi", "nmi", round_) for round_ in rounds]
    return average(each) if each else {}


def _nmi(found: Measured, attack: str = "sgi") -> BySeed:
    return found.leak(attack, "nmi")


def _scale(found: Measured, n: str, how: str) -> str:
    seeds = len(found.values("seed"))
    return f"{n}; {how}; {seeds} seeds"
