"""The page of the systematic evaluation: claims, and paper B's tables 2, 4, 5 and 6."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from leakbound.report.best_attack import BASELINE, BestAttackError
from leakbound_reproductions.comparison import shown
from leakbound_reproductions.paired import Gain, gain, logs, paired
from leakbound_reproductions.systematic_evaluation.comparisons import comparisons
from leakbound_reproductions.systematic_evaluation.measured import (
    ANY,
    HONEST,
    Measured,
    chances,
    failed,
    pruned_features,
)
from leakbound_reproductions.systematic_evaluation.parts import (
    ABLATION,
    FEATURE_BATCHES,
    FEW,
    LONG,
    MALICIOUS,
    TENSORS,
    TIMES,
)
from leakbound_reproductions.systematic_evaluation.parts import HONEST as ATTACKS

BUDGETS = (1.02, 1.1, 1.25, 1.5)
"""Training losses that a user may accept, as multiples of the undefended one."""
METHODS = ("cocktail_party", *TENSORS)


def page(found: Measured, color: str, *, small: bool = False) -> list[str]:
    """The lines of the page: all comparisons, then the tables that were measured.

    The comparisons of a `small` run refute nothing.
    """
    more = any(found.features(data, METHODS[0]) for data in found.data)
    longer = _longer(found)
    short = (
        " Searches in the tables have the plan's steps, except in rows 2-7, which use longer "
        'ones. Claims also use longer ones if they could change a comparison ("How far the '
        'searches came").'
    )
    return [
        "# Systematic evaluation of defenses: all comparisons and tables",
        "",
        f"Digits are mnist5k, color images {named(color)}, 32 x 32. Errors are RMSE on [0, 1] "
        "over a batch, means over rounds, each with its own random weights, batch and noise. S_D "
        "is the smallest of the attacks' mean errors, with the prior-only baseline among them; "
        "its 95 % interval allows for the choice. The oracle takes the best attack for each "
        "image, which needs the truth."
        + (f" What no claim rests on (further defenses and variants) has {FEW} rounds." * more)
        + (short if longer else ""),
        "",
        *_heads(("claim", "comparison", "measured", "verdict"), "---"),
        *(
            _line((c.number, c.statement, c.measured, c.word))
            for c in shown(comparisons(found), small=small)
        ),
        "",
        "Each verdict rests on one 95 % interval; of many, some are wrong by chance. The claims "
        "are judged elsewhere, each by a few comparisons that the paper names. At equal loss, a "
        "family counts with its largest error at that cost; families with one level (clip, "
        "mixup, Soteria) have no such curve. Rows 2-8 and 2-10 differ from the claims' own "
        "comparisons: here Robbing the Fed knows mask and noise, and searches have the plan's "
        "steps. There it runs as published, against longer searches. Attacks and training runs "
        f"that crashed: {failed(found)}.",
        *_best(found),
        *_costs(found),
        *_preferred(found),
        *(_features(found) if more else ()),
        *_pruned(found),
        *_apart(found),
        *longer,
        *(_floors(found) if more else ()),
    ]


def _best(found: Measured) -> list[str]:
    lines = [
        "",
        "## The best attack (table 4)",
        "",
        "Bold: the smallest mean error of an honest server's attacks, and of all attacks. The "
        "last three attacks change the model first, so only a malicious server runs them. Every "
        "attack knows the defense: it simulates local steps and rounding, leaves out what a mask "
        "withholds, and expects mixed examples. It does not know random draws that stay with the "
        "client. The oracle is over all attacks.",
    ]
    for data in found.data:
        for batch in found.batches(data):
            honest = found.strengths(data, batch, HONEST)
            every = found.strengths(data, batch, ANY)
            if not honest:
                continue
            n = "/".join(str(n) for n in sorted({own.n for own in honest.values()}))
            blind = fmean(own.baseline for own in honest.values())
            lines += [
                "",
                f"**{data}, B = {batch}**, n = {n} rounds; prior-only baseline {blind:.3f}",
                "",
                *_heads(
                    ("defense", *ATTACKS, "S_D, honest server", *MALICIOUS, "S_D, any", "oracle")
                ),
            ]
            for defense, own in honest.items():
                more = every.get(defense, own)
                cells = [_mean(more, name, own.attack) for name in ATTACKS]
                cells += [_interval(own)]
                cells += [_mean(more, name, more.attack) for name in MALICIOUS]
                lines.append(_line((defense, *cells, _interval(more), f"{more.oracle:.3f}")))
            lines += [
                f"\n{defense}: without {', '.join(own.missing)}, which failed or has not run."
                for defense, own in found.rounds(data, batch, ANY).items()
                if own.missing
            ]
    return lines


def _costs(found: Measured) -> list[str]:
    lines = ["", "## What a defense costs (table 5)", ""]
    losses = {data: found.trained(data) for data in found.data}
    accuracies = {data: found.trained(data, "accuracy") for data in found.data}
    rounds = max((unit.rounds for rows in found.trainings.values() for unit in rows), default=0)
    heads = [f"{data}: {what}" for data in found.data for what in ("loss", "accuracy")]
    lines += [
        f"Training loss and test accuracy after {rounds} rounds of four clients with 16 images "
        "each (Adam), means with 95 % t intervals; seeds pair the draws. Unlike the paper's "
        "models, these are far from convergence.",
        "",
        *_heads(("defense", *heads)),
    ]
    for defense in losses[found.data[0]]:
        cells = [
            _around(table[data].get(defense, {}).values())
            for data in found.data
            for table in (losses, accuracies)
        ]
        lines.append(_line((defense, *cells)))
    return lines


def _preferred(found: Measured) -> list[str]:
    """The defense of the largest S_D among those whose mean loss is within the budget."""
    lines = [
        "",
        "## Which defense, at which cost (figure 3)",
        "",
        "![Error of the strongest attack, against training loss](evaluation.png)",
        "",
        "The defense with the largest S_D among those whose mean training loss is at most this "
        "many times the undefended loss. It summarizes the tables above, whose intervals often "
        "overlap.",
        "",
        *_heads(("data", "B", "server", *(f"{budget:g} times" for budget in BUDGETS)), "---"),
    ]
    for data in found.data:
        losses = {d: fmean(own.values()) for d, own in found.trained(data).items() if own}
        for batch in found.batches(data):
            for server in (HONEST, ANY):
                strengths = found.strengths(data, batch, server)
                cells = []
                for budget in BUDGETS:
                    least = losses.get("none", math.nan)
                    within = [d for d in losses if losses[d] <= budget * least and d in strengths]
                    best = max(within, key=lambda d: strengths[d].rmse, default=None)
                    cells.append(f"{best} {_interval(strengths[best])}" if best else "–")
                lines.append(_line((data, str(batch), server, *cells)))
    return lines


def _features(found: Measured) -> list[str]:
    lines = [
        "",
        "## Features (table 2)",
        "",
        f"Share of the true features outside the span of those found, means of {FEW} rounds. The "
        "cocktail party attack uses the first linear layer of an honest server's model; the "
        "tensor methods use a head that a malicious server has initialized. A random span of B "
        "in n dimensions misses a share of sqrt(1 - B/n).",
    ]
    for data in found.data:
        tables = {method: found.features(data, method) for method in METHODS}
        heads = [f"{method}, B = {size}" for method in METHODS for size in FEATURE_BATCHES]
        lines += ["", f"**{data}**", "", *_heads(("defense", *heads))]
        for defense in tables[METHODS[0]]:
            cells = [
                _small(tables[method][defense].get(size, []))
                for method in METHODS
                for size in FEATURE_BATCHES
            ]
            lines.append(_line((defense, *cells)))
    return lines


def _pruned(found: Measured) -> list[str]:
    lines = [
        "",
        "## Features under pruning (claim 2-5)",
        "",
        "The tensor method on a head that a malicious server has initialized, in every round: "
        "share of the true features outside the span of those found, means over the rounds that "
        "can be evaluated.",
        "",
        *_heads(("data", "B", "defense", "share", "n"), "---"),
    ]
    for data in found.data:
        for (size, defense), own in pruned_features(found, data).items():
            read = [share for share in own.values() if share is not None]
            lines.append(_line((data, str(size), defense, _small(read), str(len(read)))))
    return lines


def _apart(found: Measured) -> list[str]:
    lines = [
        "",
        "## Deep prior + features, without its parts (table 6)",
        "",
        "B = 4. RMSE; in parentheses, by how many dB the squared error is worse than with all "
        "parts, paired, with 95 % intervals.",
    ]
    for data in found.data:
        tables = found.ablation(data)
        lines += ["", f"**{data}**", "", *_heads(("variant", *tables))]
        known = [variant for variant in ABLATION if any(variant in t for t in tables.values())]
        for variant in known:
            cells = []
            for own in tables.values():
                errors = own.get(variant, {})
                base = own.get(ATTACKS[0], {})
                if not errors:
                    cells.append("–")
                    continue
                value = f"{fmean(math.sqrt(error) for error in errors.values()):.3f}"
                if errors is not base and len(set(errors) & set(base)) > 1:
                    worse = paired(logs(errors), logs(base))
                    value += f" ({worse.mean:+.1f} [{worse.low:+.1f}, {worse.high:+.1f}])"
                cells.append(value)
            lines.append(_line((variant, *cells)))
    return lines


def _longer(found: Measured) -> list[str]:
    """How far the searches of the plan came; empty if none was longer."""
    rows = []
    for data in found.data:
        for batch in found.batches(data):
            for defense, own in found.rounds(data, batch, HONEST, longest=True).items():
                short, long = (_squared(own.attacks.get(a, {})) for a in (ATTACKS[0], LONG))
                rows += _gained(f"{data}, B = {batch}", defense, ATTACKS[0], short, long)
        longest = found.ablation(data, longest=True)
        for defense, table in found.ablation(data).items():
            for variant, long in longest.get(defense, {}).items():
                short = table.get(variant, {})
                if long != short:
                    rows += _gained(f"{data}, B = 4", defense, variant, short, long)
    if not rows:
        return []
    return [
        "",
        "## How far the searches came",
        "",
        f"RMSE after the plan's steps and after {TIMES} times as many, same rounds. Last column: "
        "by how many dB the squared error is lower, with 95 % intervals.",
        "",
        *_heads(("images", "defense", "attack", "steps", f"{TIMES} x steps", "lower by"), "---"),
        *rows,
    ]


def _gained(
    images: str, defense: str, name: str, short: Mapping[int, float], long: Mapping[int, float]
) -> list[str]:
    """One row, if both ran."""
    if len(set(short) & set(long)) < 2:
        return []
    less = paired(logs(short), logs(long))
    roots = [f"{fmean(math.sqrt(own[s]) for s in own):.3f}" for own in (short, long)]
    value = f"{less.mean:+.1f} [{less.low:+.1f}, {less.high:+.1f}] dB, n = {less.n}"
    return [_line((images, defense, name, *roots, value))]


def _squared(rounds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {seed: fmean(own) for seed, own in rounds.items()}


def _floors(found: Measured) -> list[str]:
    lines = [
        "",
        "## Errors and lower bounds (tightness)",
        "",
        "Single images under noise: Cramér-Rao lower bounds with the Gaussian prior of public "
        "images. They are estimated from sampled images, so they are not proved. Tightness is "
        "the attack's RMSE divided by the root of the lower bound.",
        "",
        *_heads(("data", "noise", "attack", "RMSE", "lower bound", "tightness"), "---"),
    ]
    for data in found.data:
        for floor in found.floors(data):
            error = math.sqrt(fmean(floor.errors.values())) if floor.errors else math.nan
            least = math.sqrt(fmean(floor.floors.values())) if floor.floors else math.nan
            cells = (f"{error:.4f}", f"{least:.4f}", f"{error / least:.2f}")
            lines.append(_line((data, f"{floor.noise_std:g}", floor.attack, *cells)))
    told = [
        f"{data}, B = {batch}, {defense}: at most {chance:.2g}"
        for data in found.data
        for batch in found.batches(data)
        for defense, chance in chances(found, data, batch).items()
    ]
    if told:
        lines += [
            "",
            "Probability that any attacker reaches the plan's threshold under a differentially "
            "private release, for images of the prior (Gaussians fitted to public images): "
            + "; ".join(told)
            + ".",
        ]
    return lines


def _mean(own: BestAttackError, name: str, best: str) -> str:
    if name not in own.means:
        return "–"
    value = f"{own.means[name]:.3f}"
    return f"**{value}**" if name == best else value


def _interval(own: BestAttackError) -> str:
    blind = ", baseline" if own.attack == BASELINE else ""
    return f"{own.rmse:.3f} [{own.low:.3f}, {own.high:.3f}]{blind}"


def _around(values: Iterable[float]) -> str:
    known = list(values)
    if len(known) < 2:
        return "–"
    found: Gain = gain(known)
    return f"{found.mean:.3f} ± {found.high - found.mean:.3f}"


def _small(values: Sequence[float]) -> str:
    return f"{fmean(values):.2g}" if values else "–"


def named(source: str) -> str:
    """The name of a source without its folder."""
    kind, colon, path = source.partition(":")
    return f"`{kind}{colon}{path.replace(chr(92), '/').rpartition('/')[2]}`"


def _heads(cells: Sequence[str], rest: str = "--:") -> list[str]:
    """The first two lines of a table: its first column is text, the `rest` numbers or text."""
    return [_line(cells), _line(["---", *[rest] * (len(cells) - 1)])]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
