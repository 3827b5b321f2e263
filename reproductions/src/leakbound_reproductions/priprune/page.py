"""The results page of the study: claims, tables in the forms of paper D, figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from leakbound.core import Guarantee
from leakbound.defenses import GaussianMechanism
from leakbound_reproductions import kept
from leakbound_reproductions.comparison import shown
from leakbound_reproductions.paired import paired
from leakbound_reproductions.priprune import cell as cells
from leakbound_reproductions.priprune import comparisons, figures, paper_figures, theory
from leakbound_reproductions.priprune.cell import Record
from leakbound_reproductions.priprune.comparisons import at_rate, by_scheme
from leakbound_reproductions.priprune.measured import (
    ATTACKS,
    CAP,
    BySeed,
    Measured,
    gave_up,
    rate_of,
)
from leakbound_reproductions.priprune.study import Cell, Study

FILE = "tables.md"


def write(
    study: Study,
    wanted: Sequence[Cell],
    records: Mapping[str, Record],
    folder: Path,
    *,
    small: bool = False,
) -> Path:
    """Write tables.md and its pictures. The comparisons of a `small` run refute nothing."""
    found = Measured.of(wanted, records)
    figures.draw(found, folder)
    paper_figures.draw(found, folder)
    path = folder / FILE
    kept.page(path, lines(study, found, small=small))
    return path


def lines(study: Study, found: Measured, *, small: bool = False) -> list[str]:
    """The page, with one section for every part of the plan."""
    base = study.base
    rows = shown(comparisons.comparisons(found), small=small)
    made = [
        "# Pruned federated learning and PriPrune: all comparisons and tables",
        "",
        f"Data: {base['data']}, {base['size']} x {base['size']}; model: {base['model']}. Client 0 "
        "holds one image (unless stated otherwise) and trains on it in every round; nine others "
        f"share the rest. PSNR in dB (each image's is capped at {CAP:g}) and NMI are those of "
        "client 0's images: means over seeds with their standard deviations. Every arm of a seed "
        "has the same weights, images and draws. Defenses of PruneFL are judged by the strongest "
        "attacker up to round 20, other parts by SGI. Attackers: `sgi` infers the mask from "
        "zeros; `gi` ignores the mask; `ordered` also uses that the largest were withheld. "
        "`rounds` uses all rounds of the client together and knows that it continues from its "
        "own weights. `mixed` uses this round and those before, and infers which weights the "
        "client started from. The last two attack the first seeds where the plan says so "
        "(`strong_seeds`). The strongest attacker is judged on the seeds that all attackers have.",
        "",
        *_table(
            ("claim", "comparison", "measured", "verdict"),
            ((c.number, c.statement, c.measured, c.word) for c in rows),
        ),
        "",
        "Each row has one 95 % interval; of many rows, some are wrong by chance. The claims are "
        "judged elsewhere, each by a few comparisons that the paper names. A row over several "
        "schemes or rates is judged by their mean. It does not hold if a single one contradicts "
        "it by an interval widened for their number.",
    ]
    makers = {
        "rate": _rates,
        "batch": lambda own: _by(own, "target", "Batch size", "B"),
        "size": lambda own: _by(own, "model", "Model size", "model"),
        "rounds": _rounds,
        "defended": _defended,
        "table": _two,
        "search": _search,
        "chain": _chains,
        "skew": _skews,
    }
    for part, make in makers.items():
        own = found.where(part=part)
        if own.pairs:
            made += ["", *make(own)]
    if found.pairs:
        made += ["", *_linear(found), "", *_theory(study)]
    return made


def _rates(found: Measured) -> list[str]:
    rates = sorted({rate_of(cell) for cell, _ in found.pairs})
    rows = []
    for scheme, own in by_scheme(found).items():
        for rate in rates:
            at = at_rate(own, rate)
            knows = at.where(dense_server=False)
            dense = at.where(dense_server=True)
            rows.append(
                (
                    scheme,
                    f"{rate:g}",
                    _mean(knows.leak("sgi")),
                    _mean(knows.leak("gi")),
                    _mean(dense.leak("sgi_pruned")),
                    _mean(dense.leak("gi")),
                    *(_mean(knows.leak("sgi", m), 3) for m in ("nmi", "corrected", "adjusted_mi")),
                )
            )
    head = ("scheme", "rate", "SGI", "GI", "SGI, dense", "GI, dense", "NMI", "above chance", "AMI")
    return [
        "## Rate (figure 4a)",
        "",
        "First round, one image. SNIP and GraSP choose their masks with public images. SGI and "
        "GI start from the same draws. Dense: the server sends the dense model and the client "
        "prunes it; SGI infers the mask from the zeros and optimizes its candidates on the "
        "pruned model. Otherwise server and client share the mask, and both attacks see the same "
        "numbers except gradients that are exactly zero. NMI columns: SGI.",
        "",
        *_table(head, rows),
        "",
        "![Leakage against rate](rate.png)",
    ]


def _by(found: Measured, key: str, title: str, name: str) -> list[str]:
    rows = []
    for value in found.values(key):
        for scheme, own in by_scheme(found.where(**{key: value})).items():
            weights = own.pairs[0][1]["weights"]
            measures = (("psnr", 1), ("ssim", 2), ("nmi", 3), ("corrected", 3), ("adjusted_mi", 3))
            numbers = (_mean(own.leak("sgi", m), digits) for m, digits in measures)
            rows.append((str(value), f"{weights:,}", scheme, *numbers))
    head = (name, "weights", "scheme", "PSNR", "SSIM", "NMI", "above chance", "AMI")
    return [f"## {title}", "", "First round, rate 0.3, SGI.", "", *_table(head, rows)]


def _rounds(found: Measured) -> list[str]:
    marks = sorted({m for cell, _ in found.pairs for m in cell.marks})
    rows = [
        (scheme, _mean(own.accuracy()), *(_mean(own.leak("sgi", "psnr", m)) for m in marks))
        for scheme, own in by_scheme(found).items()
    ]
    head = ("scheme", "accuracy", *(f"round {m}" for m in marks))
    return ["## Rounds", "", "Rate 0.3, SGI on that round alone, dB.", "", *_table(head, rows)]


def _defended(found: Measured) -> list[str]:
    marks = sorted({m for cell, _ in found.pairs for m in cell.marks})
    rows = []
    for defense in found.values("defense"):
        own = found.where(defense=defense)
        last = own.by_seed(lambda r: 100 * fmean(r["rates"][str(max(map(int, r["rates"])))]))
        bits = own.by_seed(lambda r: r["rounds"][-1]["mask_bits"] / 8 if r["rounds"] else None)
        reached = []
        for mark in marks:
            each = {a: own.leak(a, "psnr", mark) for a in ATTACKS}
            each = {a: v for a, v in each.items() if v}
            reached.append(", ".join(f"{a} {_mean(v)}" for a, v in each.items()))
            reached[-1] += f" ({gave_up(own, mark):.0%} gave up)"
        where, worst = own.worst()
        rows.append(
            (
                f"`{defense}`",
                _mean(own.accuracy()),
                _mean(own.accuracy("own_accuracy")),
                _mean(last),
                _mean(bits, 0),
                *reached,
                f"{where} {_mean(worst)}",
            )
        )
    head = (
        "defense",
        "accuracy",
        "own model",
        "withheld %",
        "mask, bytes",
        *(f"round {m}" for m in marks),
        "worst round",
    )
    return [
        "## Fixed rates and PriPrune on PruneFL (figures 6 to 8)",
        "",
        "Own model: accuracy of the weights that clients continue with, the new weights and "
        "their own where they withheld. Withheld: in the last round, mean over clients. Mask: "
        "the most that the target's last mask can leak in addition to the weights sent. Worst "
        "round: the round and attack with the highest mean, which counts for a client with the "
        "same images in all rounds. Gave up: attacks that report their own failure, which is no "
        f"evidence of safety. Servers remember {cells.LONGEST} rounds here. `rounds` needs all "
        "rounds so far and is not run later, so later results are against weaker attackers, and "
        "no claim rests on them. A round in which the base scheme changes its mask is attacked "
        "as any other; the reports that clients also send are not used.",
        "",
        *_table(head, rows),
        "",
        "![Accuracy against leakage](tradeoff.png)",
        "",
        "![Reconstructions](gallery.png)",
    ]


def _two(found: Measured) -> list[str]:
    rows = []
    for scheme, own in by_scheme(found).items():
        for defense in own.values("defense"):
            arm = own.where(defense=defense)
            rows.append(
                (
                    scheme,
                    "base" if defense == "none" else "+ PriPrune",
                    _mean(arm.accuracy()),
                    *(_mean(arm.leak("sgi", m), 3) for m in ("nmi", "permuted", "corrected")),
                    _mean(arm.leak("sgi", "adjusted_mi"), 3),
                    _mean(arm.leak("sgi")),
                    _mean(arm.leak("mixed")),
                )
            )
    head = (
        "scheme",
        "",
        "accuracy",
        "NMI",
        "chance",
        "above chance",
        "AMI",
        "PSNR, SGI",
        "PSNR, mixed",
    )
    text = (
        "Means over the attacked rounds, SGI unless stated otherwise. Chance: NMI of the "
        "shuffled reconstruction."
    )
    return ["## Table 2", "", text, "", *_table(head, rows)]


def _search(found: Measured) -> list[str]:
    rows = []
    for defense in found.values("defense"):
        own = found.where(defense=defense)
        parts = dict(pair.split("=") for pair in defense.split(",")[1:])
        last = own.by_seed(lambda r: 100 * r["rounds"][-1]["rate"])
        rows.append(
            (
                *(parts[k] for k in ("accuracy", "privacy", "sharing")),
                _mean(last),
                _mean(own.accuracy()),
                *(_mean(own.leak("sgi", m), 3) for m in ("nmi", "corrected")),
                _mean(own.leak("sgi")),
                _mean(own.leak("mixed")),
            )
        )
    head = ("l_acc", "l_pri", "l_sha", "withheld %", "accuracy", "NMI", "above chance")
    text = (
        "The paper's l_sha are scaled by the number of weights, so that l_pri / (l_sha N) is the "
        "paper's. One round of the target is attacked; 'withheld' is its rate in that round."
    )
    return ["## Table A1", "", text, "", *_table((*head, "PSNR, SGI", "PSNR, mixed"), rows)]


def _chains(found: Measured) -> list[str]:
    marks = sorted({m for cell, _ in found.pairs for m in cell.marks})
    rows = []
    for defense in found.values("defense"):
        own = found.where(defense=defense)
        promise = _promise(defense, own.pairs[0][0].rounds)
        reached = (_mean(own.strongest(m)[1]) for m in marks)
        rows.append((f"`{defense}`", promise, _mean(own.accuracy()), *reached))
    head = ("defense", "guarantee", "accuracy", *(f"PSNR, round {m}" for m in marks))
    text = (
        "With a mask by magnitude, because adaptive schemes report in the clear; the strongest "
        "of the attacks tried. For DP-SGD, the guarantee over all rounds is Gaussian DP's mu; "
        "far above 10 it means nothing. Under secure aggregation the attack sees the sum of all "
        "clients and reconstructs all of their images (their local batches are smaller there). "
        "The assignment may give client 0 the best of them."
    )
    return ["## With noise and with secure aggregation", "", text, "", *_table(head, rows)]


def _promise(defense: str, rounds: int) -> str:
    whole = cells.defense(defense)
    noise = [link for link in whole.links if isinstance(link, GaussianMechanism)]
    if whole.guarantee is not Guarantee.DIFFERENTIAL_PRIVACY or not noise:
        return whole.guarantee.value
    return f"{whole.guarantee.value}, mu = {rounds**0.5 / noise[0].noise_multiplier:.3g}"


def _skews(found: Measured) -> list[str]:
    skews = found.values("skew")
    rows = []
    for defense in found.values("defense"):
        own = found.where(defense=defense)
        pairs = (
            f"{_mean(at.accuracy())} / {_mean(at.accuracy('own_accuracy'))}"
            for at in (own.where(skew=skew) for skew in skews)
        )
        rows.append((f"`{defense}`", *pairs))
    names = {"equal": "equal", "class": "one class per client", "writer": "by writer"}
    head = ("defense", *(names.get(s, f"Dirichlet {s}") for s in skews))
    text = (
        "Accuracy of the global model / of the clients' own models, by how images are "
        "distributed over clients."
    )
    return ["## Clients that differ", "", text, "", *_table(head, rows)]


def _linear(found: Measured) -> list[str]:
    firsts = {cell.seed: cell for cell, _ in found.pairs if cell.rounds > 1}
    if not firsts:
        return []
    reached = {seed: 100 * cells.linear(cell) for seed, cell in firsts.items()}
    said = f"A linear model (logistic regression on all images at once): {_mean(reached)} %"
    base = found.where(part="defended", defense="none").accuracy()
    if len(set(base) & set(reached)) > 1:
        said += (
            f"; PruneFL alone is above it by {comparisons.spoken(paired(base, reached))} (points)"
        )
    return [f"{said}."]


def _theory(study: Study) -> list[str]:
    head = (
        "rate",
        "weights kept",
        "rank",
        "printed (mixed units)",
        "corrected (bits)",
        "channel, data-dependent mask",
        "channel, public mask",
        "bits of the message or image",
    )
    rows = (
        (
            f"{row.rate:g}",
            f"{row.coordinates:,}",
            str(row.rank),
            *(f"{v:,.0f}" for v in (row.printed, row.corrected, row.private, row.public)),
            f"{row.precision:,.0f}",
        )
        for row in theory.rows(study)
    )
    return [
        "## Theorem 4.1 in numbers",
        "",
        f"One image, one round, first weights, Sigma of {theory.IMAGES} test images; in bits, "
        "except the printed form. The printed and the corrected form bound nothing "
        "(docs/information.md). The Gaussian channel (noise of standard deviation "
        f"{theory.NOISE:g} on the gradient) would be a bound with the true Sigma. With the Sigma "
        f"of a sample, whose rank is at most {theory.IMAGES - 1}, it is an estimate from below. "
        "Only the last column is a bound.",
        "",
        *_table(head, rows),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


def _mean(values: BySeed, digits: int = 1) -> str:
    """Mean over seeds and their standard deviation."""
    if not values:
        return "—"
    numbers = list(values.values())
    spread = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):.{digits}f}{spread}"
