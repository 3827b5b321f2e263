"""Claims 4-1 to 4-9 of paper D, each with what was measured and a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from leakbound.experiments.paired import Gain, paired
from leakbound.experiments.priprune.measured import BySeed, Measured, rate_of, scheme_of

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
MEASURES = (("psnr", "dB"), ("corrected", "NMI above chance"))


@dataclass(frozen=True)
class Claim:
    """One claim, what was measured for it, and the word."""

    number: str
    statement: str
    measured: str
    word: str


def claims(found: Measured) -> list[Claim]:
    """All claims for which there are cells."""
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
    """The cells of each scheme."""
    names = list(dict.fromkeys(scheme_of(cell) for cell, _ in found.pairs))
    return {n: Measured([p for p in found.pairs if scheme_of(p[0]) == n]) for n in names}


def at_rate(found: Measured, rate: float) -> Measured:
    """The cells of one base rate."""
    return Measured([p for p in found.pairs if rate_of(p[0]) == rate])


def rate_lowers(found: Measured) -> Iterator[Claim]:
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


def sparse_beats_blind(found: Measured) -> Iterator[Claim]:
    """4-2: SGI at least as good as GI at every rate and scheme."""
    for dense in (False, True):
        part = found.where(dense_server=dense)
        name = "sgi_pruned" if dense else "sgi"
        for measure, unit in MEASURES:
            gains = {}
            for scheme, own in by_scheme(part).items():
                for rate in sorted({rate_of(cell) for cell, _ in own.pairs}):
                    at = at_rate(own, rate)
                    gain = _difference(at.leak(name, measure), at.leak("gi", measure))
                    if gain is not None:
                        gains[f"{scheme} {rate:g}"] = gain
            who = "does not know" if dense else "knows"
            if gains:
                text = f"SGI over GI where the server {who} the base mask ({unit})"
                yield _many("4-2", text, gains)


def batch_lowers(found: Measured) -> Iterator[Claim]:
    """4-3: larger batches leak less."""
    sizes = sorted(found.values("target"))
    for measure, unit in MEASURES if len(sizes) > 1 else ():
        gains = {
            name: _between(own.where(target=sizes[0]), own.where(target=sizes[-1]), measure)
            for name, own in by_scheme(found).items()
        }
        yield _many("4-3", f"B = {sizes[-1]} leaks less than {sizes[0]} (SGI, {unit})", gains)


def size_raises(found: Measured) -> Iterator[Claim]:
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


def rules(found: Measured) -> Iterator[Claim]:
    """4-5: of the fixed rules, the largest hides most and costs most, random ones least."""
    for pseudo in (False, True):
        arms = {rule: _arm(found, rule, 0.3, pseudo) for rule in ("largest", "random")}
        if not all(own.pairs for own in arms.values()):
            continue
        name = "pseudo" if pseudo else "real"
        late = _late(found)
        hidden = {
            f"round {r}": gain
            for r in late
            if (
                gain := _difference(
                    *(arms[k].leak("sgi", "psnr", r) for k in ("random", "largest"))
                )
            )
        }
        yield _many("4-5", f"{name}: the largest leak less than random ones (SGI, dB)", hidden)
        cost = _difference(arms["random"].accuracy(), arms["largest"].accuracy())
        yield _many("4-5", f"{name}: the largest cost more accuracy (points)", {"": cost})


def pseudo_raises(found: Measured) -> Iterator[Claim]:
    """4-6: keeping what is withheld raises accuracy, at the same privacy."""
    for rule in ("largest", "random", "mix"):
        real, kept = (_arm(found, rule, 0.3, pseudo) for pseudo in (False, True))
        if not real.pairs or not kept.pairs:
            continue
        gain = _difference(kept.accuracy(), real.accuracy())
        yield _many("4-6", f"{rule}: pseudo is more accurate than real (points)", {"": gain})
        for round_ in _late(found):
            ours, theirs = kept.strongest(round_), real.strongest(round_)
            gain = _difference(theirs[1], ours[1])
            text = (
                f"{rule}, round {round_}: pseudo leaks less than real to the strongest attacker "
                f"({ours[0]} on pseudo, {theirs[0]} on real; dB)"
            )
            yield _many("4-6", text, {"": gain})


def as_base(found: Measured) -> Iterator[Claim]:
    """4-7: PriPrune is as accurate as its base, and as private as the largest 60 %."""
    base, strict = found.where(defense="none"), _arm(found, "largest", 0.6, True)
    for defense in found.values("defense"):
        if not defense.startswith("pri_prune"):
            continue
        own = found.where(defense=defense)
        gain = _difference(own.accuracy(), base.accuracy())
        if gain is None:
            continue
        word = UNDECIDED
        if gain.low > -1:
            word = HOLDS
        elif gain.high < -1:
            word = FAILS
        text = f"{defense}: accuracy within 1 point of PruneFL's"
        yield Claim("4-7", text, f"{spoken(gain)} points", word)
        for round_ in _late(found):
            name, reached = own.strongest(round_)
            for other, theirs in (("PruneFL alone", base), ("largest 60 % (pseudo)", strict)):
                if not theirs.pairs:
                    continue
                gain = _difference(theirs.strongest(round_)[1], reached)
                text = f"{defense}, round {round_}: leaks less than {other} ({name}; dB)"
                yield _many("4-7", text, {"": gain})


def table(found: Measured) -> Iterator[Claim]:
    """4-8: PriPrune leaks less on every scheme, to the paper's attacker in all rounds."""
    for measure, unit in (("nmi", "raw NMI"), *MEASURES):
        gains = {}
        for name, own in by_scheme(found).items():
            arms = own.values("defense")
            if len(arms) == 2:
                plain, ours = (own.where(defense=arm).leak("sgi", measure) for arm in arms)
                gains[name] = _difference(plain, ours)
        if gains:
            yield _many("4-8", f"PriPrune leaks less than the base (SGI, {unit})", gains)


def privacy_weight(found: Measured) -> Iterator[Claim]:
    """4-9: a larger l_pri leaks less: over the pairs of cells that differ in it alone."""
    arms: dict[tuple[str, ...], dict[float, Measured]] = {}
    for defense in found.values("defense"):
        parts = dict(pair.split("=") for pair in defense.split(",")[1:])
        key = (parts["accuracy"], parts["sharing"])
        arms.setdefault(key, {})[float(parts["privacy"])] = found.where(defense=defense)
    for measure, unit in (("nmi", "raw NMI"), *MEASURES) if arms else ():
        lower, rose = [], 0
        for own in arms.values():
            least, most = own[min(own)], own[max(own)]
            both = least.leak("sgi", measure), most.leak("sgi", measure)
            lower += [both[0][s] - both[1][s] for s in set(both[0]) & set(both[1])]
            means = [fmean(own[k].leak("sgi", measure).values()) for k in sorted(own)]
            rose += any(b > a for a, b in pairwise(means))
        if len(lower) > 1:
            gain = paired(dict(enumerate(lower)), dict.fromkeys(range(len(lower)), 0.0))
            text = f"the largest l_pri leaks less than the smallest (SGI, {unit})"
            said = f"{spoken(gain)} pairs; it rose on the way in {rose} of {len(arms)}"
            yield Claim("4-9", text, said, gain.word)


def spoken(found: Gain) -> str:
    """A difference with its interval."""
    return f"{found.mean:+.3g} [{found.low:+.3g}, {found.high:+.3g}], n = {found.n}"


def _arm(found: Measured, rule: str, rate: float, pseudo: bool) -> Measured:
    tail = "" if pseudo else ",pseudo=false"
    return found.where(defense=f"withhold,rule={rule},rate={rate}{tail}")


def _late(found: Measured) -> list[int]:
    """The rounds that were attacked, but for the first, in which every defense starts."""
    marks = {mark for cell, _ in found.pairs for mark in cell.marks}
    return sorted(marks - {1})


def _between(higher: Measured, lower: Measured, measure: str) -> Gain | None:
    return _difference(higher.leak("sgi", measure), lower.leak("sgi", measure))


def _difference(ours: BySeed, theirs: BySeed) -> Gain | None:
    return paired(ours, theirs) if len(set(ours) & set(theirs)) > 1 else None


def _many(number: str, statement: str, gains: Mapping[str, Gain | None]) -> Claim:
    """One claim over several comparisons: it holds where no interval is on the other side."""
    known = {name: gain for name, gain in gains.items() if gain is not None}
    words = [gain.word for gain in known.values()]
    if len(known) == 1:
        (only,) = known.values()
        return Claim(number, statement, spoken(only), only.word)
    if not known:
        return Claim(number, statement, "not measured", UNDECIDED)
    word = UNDECIDED
    if words.count(HOLDS) == len(words):
        word = HOLDS
    elif FAILS in words:
        word = FAILS
    means = [gain.mean for gain in known.values()]
    count = ", ".join(f"{words.count(w)} {w}" for w in (HOLDS, UNDECIDED, FAILS) if w in words)
    wrong = [name for name, gain in known.items() if gain.word == FAILS]
    said = f"{min(means):+.3g} to {max(means):+.3g}, of {len(words)}: {count}"
    return Claim(number, statement, said + (f" ({', '.join(wrong)})" if wrong else ""), word)
