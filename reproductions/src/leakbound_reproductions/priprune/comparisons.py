"""All comparisons behind claims 4-1 to 4-9 of paper D, for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from scipy import stats

from leakbound_reproductions.comparison import FAILS, HOLDS, UNDECIDED, Comparison
from leakbound_reproductions.paired import Gain, paired
from leakbound_reproductions.priprune.cell import LONGEST
from leakbound_reproductions.priprune.measured import BySeed, Measured, rate_of, scheme_of

Pair = tuple[BySeed, BySeed]
MEASURES = (("psnr", "dB"), ("adjusted_mi", "AMI"))
MARGIN = {"psnr": 1.0, "adjusted_mi": 0.02}
"""How far SGI may be below GI and still count as at least as good."""


def comparisons(found: Measured) -> list[Comparison]:
    """All for which there are experiments."""
    return [
        *rate_lowers(found.where(part="rate", dense_server=False)),
        *sparse_beats_blind(found.where(part="rate")),
        *batch_lowers(found.where(part="batch")),
        *size_raises(found.where(part="size")),
        *rules(found.where(part="defended")),
        *pseudo_raises(found.where(part="defended")),
        *as_base(found.where(part="defended")),
        *table(found.where(part="table")),
        *privacy_weight(found.where(part="search")),
    ]


def by_scheme(found: Measured) -> dict[str, Measured]:
    """The experiments of each scheme."""
    names = list(dict.fromkeys(scheme_of(cell) for cell, _ in found.pairs))
    return {n: Measured([p for p in found.pairs if scheme_of(p[0]) == n]) for n in names}


def at_rate(found: Measured, rate: float) -> Measured:
    """The experiments of one base rate."""
    return Measured([p for p in found.pairs if rate_of(p[0]) == rate])


def rate_lowers(found: Measured) -> Iterator[Comparison]:
    """4-1: higher rates leak less, strongly above one half."""
    rates = sorted({rate_of(cell) for cell, _ in found.pairs})
    if len(rates) < 2:
        return
    spans = [(rates[0], rates[-1])]
    if 0.5 in rates and rates[0] < 0.5 < rates[-1]:
        spans = [(rates[0], 0.5), (0.5, rates[-1])]
    for low, high in spans:
        for measure, unit in MEASURES:
            gains = {
                name: _between(at_rate(own, low), at_rate(own, high), measure)
                for name, own in by_scheme(found).items()
            }
            text = f"rate {high:g} leaks less than {low:g} (SGI, {unit})"
            yield _many("4-1", text, gains)


def sparse_beats_blind(found: Measured) -> Iterator[Comparison]:
    """4-2: SGI at least as good as GI at every rate and scheme."""
    for dense in (False, True):
        part = found.where(dense_server=dense)
        name = "sgi_pruned" if dense else "sgi"
        for measure, unit in MEASURES:
            gains = {}
            for scheme, own in by_scheme(part).items():
                for rate in sorted({rate_of(cell) for cell, _ in own.pairs}):
                    at = at_rate(own, rate)
                    gains[f"{scheme} {rate:g}"] = at.leak(name, measure), at.leak("gi", measure)
            who = "does not know" if dense else "knows"
            if gains:
                least = MARGIN[measure]
                text = (
                    f"SGI at least as good as GI, to {least:g}, where the server {who} the base "
                    f"mask ({unit})"
                )
                yield _many("4-2", text, gains, margin=least)


def batch_lowers(found: Measured) -> Iterator[Comparison]:
    """4-3: larger batches leak less."""
    sizes = sorted(found.values("target"))
    for measure, unit in MEASURES if len(sizes) > 1 else ():
        gains = {
            name: _between(own.where(target=sizes[0]), own.where(target=sizes[-1]), measure)
            for name, own in by_scheme(found).items()
        }
        yield _many("4-3", f"B = {sizes[-1]} leaks less than {sizes[0]} (SGI, {unit})", gains)


def size_raises(found: Measured) -> Iterator[Comparison]:
    """4-4: larger models leak more: the largest of each depth against the smallest."""
    weights = {cell.model: record["weights"] for cell, record in found.pairs}
    deep = [m for m in weights if "depth=2" in m]
    if len(deep) < 2:
        return
    small, large = (pick(deep, key=lambda m: weights[m]) for pick in (min, max))
    for measure, unit in MEASURES:
        gains = {
            name: _between(own.where(model=large), own.where(model=small), measure)
            for name, own in by_scheme(found).items()
        }
        text = f"{weights[large]:,} weights leak more than {weights[small]:,} (SGI, {unit})"
        yield _many("4-4", text, gains)


def rules(found: Measured) -> Iterator[Comparison]:
    """4-5: among the fixed rules, the largest hides and costs the most, random the least."""
    for pseudo in (False, True):
        own_arms = {rule: arm(found, rule, 0.3, pseudo) for rule in ("largest", "mix", "random")}
        if not all(own.pairs for own in own_arms.values()):
            continue
        name = "pseudo" if pseudo else "real"
        for round_ in late(found):
            of = {rule: own.strongest(round_) for rule, own in own_arms.items()}
            for less, more in (("largest", "random"), ("largest", "mix"), ("mix", "random")):
                text = f"{name}, round {round_}: {less} leaks less than {more} (strongest; dB)"
                yield _one("4-5", text, of[more][1], of[less][1])
        costs = own_arms["random"].accuracy(), own_arms["largest"].accuracy()
        yield _one("4-5", f"{name}: the largest cost more accuracy (points)", *costs)


def pseudo_raises(found: Measured) -> Iterator[Comparison]:
    """4-6: keeping what is withheld raises accuracy, at the same privacy."""
    for rule in ("largest", "random", "mix"):
        real, kept = (arm(found, rule, 0.3, pseudo) for pseudo in (False, True))
        if not real.pairs or not kept.pairs:
            continue
        text = f"{rule}: pseudo is more accurate than real (points)"
        yield _one("4-6", text, kept.accuracy(), real.accuracy())
        for round_ in late(found):
            ours = kept.strongest(round_)
            theirs = real.strongest(round_)
            text = (
                f"{rule}, round {round_}: pseudo leaks less than real to the strongest attacker "
                f"({ours[0]} on pseudo, {theirs[0]} on real; dB)"
            )
            yield _one("4-6", text, theirs[1], ours[1])


def as_base(found: Measured) -> Iterator[Comparison]:
    """4-7: PriPrune is as accurate as its base, and as private as the largest 60 %."""
    base = found.where(defense="none")
    others = {
        "PruneFL alone": base,
        "largest 60 % (pseudo)": arm(found, "largest", 0.6, True),
        "random 30 % (pseudo)": arm(found, "random", 0.3, True),
    }
    for defense in found.values("defense"):
        if not defense.startswith("pri_prune"):
            continue
        own = found.where(defense=defense)
        gain = _difference((own.accuracy(), base.accuracy()))
        if gain is None:
            continue
        word = UNDECIDED
        if gain.low > -1:
            word = HOLDS
        elif gain.high < -1:
            word = FAILS
        text = f"{defense}: accuracy within 1 point of PruneFL's (points)"
        yield Comparison("4-7", text, spoken(gain), word)
        for round_ in late(found):
            single = base.leak("sgi", "psnr", round_), own.leak("sgi", "psnr", round_)
            text = f"{defense}, round {round_}: leaks less than PruneFL alone (SGI on both; dB)"
            yield _one("4-7", text, *single)
            name, reached = own.strongest(round_)
            for other, theirs in others.items():
                if theirs.pairs:
                    text = f"{defense}, round {round_}: leaks less than {other} (strongest: {name}"
                    yield _one("4-7", f"{text}; dB)", theirs.strongest(round_)[1], reached)
        worst = own.worst()
        text = f"{defense}: leaks less than PruneFL alone in the worst round ({worst[0]}; dB)"
        yield _one("4-7", text, base.worst()[1], worst[1])


def table(found: Measured) -> Iterator[Comparison]:
    """4-8: PriPrune leaks less on every scheme, to the paper's attacker in all rounds."""
    for measure, unit in (("nmi", "raw NMI"), *MEASURES):
        gains = {}
        for name, own in by_scheme(found).items():
            both = arms(own)
            if both:
                gains[name] = both[0].leak("sgi", measure), both[1].leak("sgi", measure)
        if gains:
            yield _many("4-8", f"PriPrune leaks less than the base (SGI, {unit})", gains)
    for round_ in late(found):
        gains = {
            name: (both[0].strongest(round_)[1], both[1].strongest(round_)[1])
            for name, own in by_scheme(found).items()
            if (both := arms(own))
        }
        text = f"round {round_}: PriPrune leaks less than the base (strongest; dB)"
        yield _many("4-8", text, gains)


def arms(found: Measured) -> tuple[Measured, Measured] | None:
    """The experiments without a defense and with one; None if one is missing."""
    ours = [defense for defense in found.values("defense") if defense != "none"]
    plain = found.where(defense="none")
    return (plain, found.where(defense=ours[0])) if plain.pairs and len(ours) == 1 else None


def privacy_weight(found: Measured) -> Iterator[Comparison]:
    """4-9: a larger l_pri leaks less, over pairs of experiments that differ only in it."""
    arms: dict[tuple[str, ...], dict[float, Measured]] = {}
    for defense in found.values("defense"):
        parts = dict(pair.split("=") for pair in defense.split(",")[1:])
        key = (parts["accuracy"], parts["sharing"])
        arms.setdefault(key, {})[float(parts["privacy"])] = found.where(defense=defense)
    for measure, unit in (("nmi", "raw NMI"), *MEASURES) if arms else ():
        least = dict[int, list[float]]()
        most = dict[int, list[float]]()
        lower = 0
        for own in arms.values():
            both = [own[pick(own)].leak("sgi", measure) for pick in (min, max)]
            lower += fmean(both[1].values()) < fmean(both[0].values())
            for into, values in zip((least, most), both, strict=True):
                for seed, value in values.items():
                    into.setdefault(seed, []).append(value)
        text = f"the largest l_pri leaks less than the smallest (SGI, {unit})"
        pair = tuple({s: fmean(v) for s, v in into.items()} for into in (least, most))
        gain = _difference((pair[0], pair[1]))
        said = f"lower in {lower} of {len(arms)} pairs"
        said += f", {spoken(gain)}" if gain else f", {len(pair[0])} seed"
        yield Comparison("4-9", text, said, gain.word if gain else UNDECIDED)


def spoken(found: Gain) -> str:
    """A difference with its interval; rounding errors become 0."""
    mean, low, high = (0.0 if abs(v) < 1e-9 else v for v in (found.mean, found.low, found.high))
    return f"{mean:+.3g} [{low:+.3g}, {high:+.3g}], n = {found.n}"


def arm(found: Measured, rule: str, rate: float, pseudo: bool) -> Measured:
    """The experiments that withhold by a rule at a rate."""
    tail = "" if pseudo else ",pseudo=false"
    return found.where(defense=f"withhold,rule={rule},rate={rate}{tail}")


def late(found: Measured) -> list[int]:
    """The rounds that `rounds` attacked, except the first, where all start."""
    marks = {mark for cell, _ in found.pairs for mark in cell.marks}
    return sorted(mark for mark in marks if 1 < mark <= LONGEST)


def _between(higher: Measured, lower: Measured, measure: str) -> Pair:
    return higher.leak("sgi", measure), lower.leak("sgi", measure)


def _difference(pair: Pair) -> Gain | None:
    ours, theirs = pair
    return paired(ours, theirs) if len(set(ours) & set(theirs)) > 1 else None


def _one(number: str, statement: str, ours: BySeed, theirs: BySeed) -> Comparison:
    gain = _difference((ours, theirs))
    if gain is None:
        return Comparison(number, statement, "not measured", UNDECIDED)
    return Comparison(number, statement, spoken(gain), gain.word)


def _many(
    number: str, statement: str, pairs: Mapping[str, Pair], *, margin: float = 0.0
) -> Comparison:
    """One claim over several comparisons, judged by their mean and by each.

    It holds if the mean over all comparisons does and no single one contradicts it. It does not
    hold if a single one does, by an interval widened for their number. A contradiction smaller than
    the margin counts as equal.
    """
    pairs = {k: ({s: v + margin for s, v in a.items()}, b) for k, (a, b) in pairs.items()}
    gains = {name: gain for name, own in pairs.items() if (gain := _difference(own)) is not None}
    shared = [set(pairs[k][0]) & set(pairs[k][1]) for k in gains]
    seeds = set.intersection(*shared) if shared else set()
    if len(seeds) < 2:
        return Comparison(number, statement, "not measured", UNDECIDED)
    ours, theirs = ({s: fmean(pairs[k][i][s] for k in gains) for s in seeds} for i in (0, 1))
    whole = paired(ours, theirs)
    wide = {name: _widened(gain, len(gains)) for name, gain in gains.items()}
    wrong = [name for name, gain in wide.items() if gain.word == FAILS]
    word = FAILS if wrong else whole.word
    means = [round(gain.mean - margin, 9) for gain in gains.values()]
    right = sum(gain.word == HOLDS for gain in wide.values())
    plain = Gain(whole.mean - margin, whole.low - margin, whole.high - margin, whole.n)
    said = (
        f"mean {spoken(plain)}; singles {min(means):+.3g} to {max(means):+.3g}, {right} of "
        f"{len(gains)} hold alone"
    )
    return Comparison(
        number, statement, said + (f", against: {', '.join(wrong)}" if wrong else ""), word
    )


def _widened(gain: Gain, count: int) -> Gain:
    """The interval at a level that holds for `count` of them together (Bonferroni)."""
    plain, wide = (float(stats.t.ppf(1 - 0.025 / k, gain.n - 1)) for k in (1, count))
    half = (gain.high - gain.mean) * wide / plain
    return Gain(gain.mean, gain.mean - half, gain.mean + half, gain.n)
