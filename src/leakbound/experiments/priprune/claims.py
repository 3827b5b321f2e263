"""Claims 4-1 to 4-9 of paper D, each judged as the paper judged it.

The paper's attacker is SGI, its measure NMI, beside it PSNR where it shows both (over the rate);
the differences are between cells of one seed, which have the same weights, images and draws. NMI
and accuracy are means over the attacked rounds and over the schemes that a claim is about. Where
PriPrune is compared, only the rounds count in which its masks can withhold: how it starts is not
printed, and over the paper's thousands of rounds does not matter. What a stronger attacker gets is
a remark: the paper claims nothing of him. All other comparisons are on the results' page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from leakbound.experiments.by_seed import Part, claimed, looked
from leakbound.experiments.claim import POSITIVE, Claim
from leakbound.experiments.priprune.comparisons import arm, arms, at_rate, by_scheme
from leakbound.experiments.priprune.idle import acting, started
from leakbound.experiments.priprune.measured import (
    BySeed,
    Measured,
    average,
    difference,
    less,
    rate_of,
)
from leakbound.experiments.priprune.remarks import lost, remark, strongest, told

REPEATED = 0.025
"""The largest standard deviation of NMI among repetitions in the paper's table 2: what is closer
counts as equal."""
POINT = 1.0
"""How many points of accuracy count as closely aligned."""
MOST = 0.75
"""The part of the reduction by Largest 60 % that counts as comparable to it: what its table 2 may
move by chance, 0.025, is a quarter of the 0.10 that PriPrune gains there."""
FIRST = "SGI in the first round, at random weights"
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
    old, found = found.where(part="rate"), again(found, "rate_again", "rate")
    rates = sorted({rate_of(cell) for cell, _ in found.pairs})
    parts, first_look = [], []
    for measure, name, unit in (("nmi", "NMI", ""), ("psnr", "PSNR", "dB")):
        at = {rate: at_rate(found, rate).leak("sgi", measure) for rate in rates}
        low, high = (at[rates[0]], at[rates[-1]]) if rates else ({}, {})
        text = f"{name} falls from the lowest rate to the highest"
        parts.append(Part(text, less(low, high), POSITIVE, unit=unit))
        if measure == "nmi":  # the paper's "clearer" is said of NMI alone
            middle = at.get(0.5, {})
            first, second = difference(low, middle), difference(middle, high)
            text = f"{name} falls more from 0.5 on than up to 0.5"
            parts.append(Part(text, less(second, first), POSITIVE))
            if old.pairs != found.pairs:
                before = [at_rate(old, r).leak("sgi", "nmi") for r in (rates[0], 0.5, rates[-1])]
                first, second = difference(*before[:2]), difference(*before[1:])
                first_look.append(f"{text} {told(second, first)}")
    statement = "A higher pruning rate leaks less, and clearly so above one half."
    where = _scale(found, n, FIRST)
    return claimed(
        "4-1",
        statement,
        "section 4.2.4, figures 2, 4 and A2",
        where,
        parts,
        looked("", first_look),
    )


def sparse_beats_blind(found: Measured, n: str) -> Claim:
    """4-2: SGI infers more "at each pruning rate level, across all tested pruning methods".

    Of a client who prunes a dense model, the setting of the paper's reason: only there does the
    mask tell the server something that it does not have.
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
        "SGI rebuilds more than GI at each rate and for each method.",
        "section 4.2.3, figure 3",
        _scale(found, n, f"{FIRST}; each rate by its mean over methods, each method over rates"),
        parts,
        "Where server and client share the base mask, both attacks see the same numbers and reach "
        "the same: reading the mask tells something only to a server that does not have it",
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
    return claimed("4-3", statement, source, where, parts, "; ".join(why))


def size_raises(found: Measured, n: str) -> Claim:
    """4-4: deeper models leak more, and not in proportion to their weights.

    As in the paper the models differ in depth. "Not linear", as further weights of large models add
    little: the middle model lies above the line from the smallest to the largest.
    """
    old, found = found.where(part="size"), again(found, "size_again", "size")
    weights = in_depth({cell.model: record["weights"] for cell, record in found.pairs})
    parts, why = [], ""
    if len(weights) > 2:
        small, *middle, large = sorted(weights, key=lambda model: weights[model])
        own = {model: _nmi(found.where(model=model)) for model in weights}
        text = f"NMI of {weights[large]:,} weights is above that of {weights[small]:,}"
        parts.append(Part(text, less(own[large], own[small]), POSITIVE))
        for model in middle:
            share = (weights[model] - weights[small]) / (weights[large] - weights[small])
            line = {
                seed: (1 - share) * own[small][seed] + share * own[large][seed]
                for seed in set(own[small]) & set(own[large])
            }
            text = f"NMI of {weights[model]:,} weights is above the line between them"
            parts.append(Part(text, less(own[model], line), POSITIVE))
        ends = (found.where(model=model).leak("sgi", "psnr") for model in (large, small))
        why = f"PSNR of the largest less that of the smallest: {told(*ends)} dB"
        first = told(*(_nmi(old.where(model=model)) for model in (large, small)))
        if first and old.pairs != found.pairs:
            why = f"{looked('', [f'NMI of the largest less that of the smallest {first}'])}. {why}"
    statement = "Larger models leak more, not in proportion: further weights add less and less."
    where = _scale(found, n, FIRST)
    return claimed("4-4", statement, "section 4.2.4, figure 5a", where, parts, why)


def in_depth(weights: Mapping[str, int]) -> dict[str, int]:
    """Of models with their weights, the largest group that differs in depth alone.

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
    """4-5: of the fixed rules at 30 %, figure 6's oval of real pruning and appendix D.1.

    "Largest" has "the best privacy and the worst model accuracy", random the highest accuracy; that
    mix lies between them in privacy, up to what repetitions differ by, is read from the figure.
    """
    own = {rule: arm(found, rule, 0.3, False) for rule in RULES}
    nmi = {rule: _nmi(some) for rule, some in own.items()}
    right = {rule: some.accuracy() for rule, some in own.items()}
    parts = [
        Part(
            f"NMI under {other} less that under largest", less(nmi[other], nmi["largest"]), POSITIVE
        )
        for other in ("random", "mix")
    ]
    text, near = "NMI under random less that under mix", (-REPEATED, math.inf)
    parts.append(Part(text, less(nmi["random"], nmi["mix"]), near))
    for more, fewer in (("random", "largest"), ("mix", "largest"), ("random", "mix")):
        text = f"accuracy under {more} less that under {fewer}"
        parts.append(Part(text, less(right[more], right[fewer]), POSITIVE, unit="points"))
    return claimed(
        "4-5",
        "Withholding the largest gradients hides most and costs most, random ones least; a mix "
        "lies between.",
        "section 5.1, figure 6, appendix D.1",
        _scale(found, n, f"{EACH}; {NEAR}"),
        parts,
    )


def again(found: Measured, new: str, first: str) -> Measured:
    """The cells of a part that is measured again, where the plan has it, else of the first."""
    fresh = found.where(part=new)
    return fresh if fresh.pairs else found.where(part=first)


def pseudo_raises(found: Measured, new: Measured, n: str) -> Claim:
    """4-6: keeping what is withheld: "notably better" accuracy, no more NMI, with the same rule.

    `new`: a rule's cells that were measured again, for its accuracy.
    """
    parts, remarks, first = [], [], []
    for rule in RULES:
        real, kept = (arm(found, rule, 0.3, pseudo) for pseudo in (False, True))
        text = f"{rule}: accuracy with pseudo-pruning less that of real pruning"
        right = less(kept.accuracy(), real.accuracy())
        both = [arm(new, rule, 0.3, pseudo).accuracy() for pseudo in (True, False)]
        if all(both):
            first.append(f"{rule} {told(kept.accuracy(), real.accuracy())}")
            right = less(*both)
        parts.append(Part(text, right, POSITIVE, unit="points"))
        text = f"{rule}: NMI under real pruning less that under pseudo-pruning"
        parts.append(Part(text, less(_nmi(real), _nmi(kept)), (-REPEATED, math.inf)))
        remarks += strongest(f"{rule}", real, kept)
    return claimed(
        "4-6",
        "Pseudo-pruning is more accurate than real pruning with the same rule, no less private.",
        "section 5.1, figure 6",
        _scale(found, n, f"{EACH}; {NEAR}"),
        parts,
        ". ".join(filter(None, (looked("points of accuracy", first), remark(remarks)))),
    )


def as_base(found: Measured, n: str) -> Claim:
    """4-7: PriPrune with the paper's ratio of weights beside PruneFL and Largest (Pseudo) 60 %."""
    names = [name for name in found.values("defense") if name.startswith("pri_prune")]
    own, base = found.where(defense=names[0] if names else ""), found.where(defense="none")
    most = arm(found, "largest", 0.6, True)
    plain, ours, theirs = (_nmi_of(some, acting(own)) for some in (base, own, most))
    gained, possible = difference(plain, ours), difference(plain, theirs)
    enough = {seed: MOST * value for seed, value in possible.items()}
    parts = [
        Part(
            "accuracy less that of PruneFL",
            less(own.accuracy(), base.accuracy()),
            (-POINT, math.inf),
            unit="points",
        ),
        Part(
            "NMI of PruneFL less that with PriPrune",
            list(gained.values()),
            POSITIVE,
            paper="0.22 - 0.12 = 0.10 (table 2)",
        ),
        Part(
            f"that difference less {MOST:g} of the one by Largest (Pseudo) 60 %",
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
            f"{_rounds(own)}; {MOST:g} of the reduction counts as comparable: 0.025, "
            "the largest deviation in table 2, is a quarter of PriPrune's 0.10 there",
        ),
        parts,
        ". ".join(filter(None, (started(own), remark(strongest("PriPrune", base, own))))),
    )


def table(found: Measured, n: str) -> Claim:
    """4-8: "consistently reduces NMI", with the paper's weights for each scheme."""
    parts, remarks, right = [], [], []
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
            Part(f"{name}: NMI without PriPrune less that with it", values, POSITIVE, paper=paper)
        )
        remarks += strongest(name, *both)
    return claimed(
        "4-8",
        "PriPrune lowers the NMI of every base method.",
        "table 2, figure 9",
        _scale(found, n, _rounds(ours)),
        parts,
        ". ".join(filter(None, (started(ours), lost(right), remark(remarks)))),
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
    statement = "A larger weight of privacy l_pri lowers NMI."
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
