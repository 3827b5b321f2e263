"""The gallery of a report: every batch under every defense, and what each attack made of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from leakbound._util.groups import grouped
from leakbound.assess.record import Assessment, CaptureInfo, Explained
from leakbound.report.columns import MOST, RowTable, row_of
from leakbound.report.folder import Run, Strip
from leakbound.report.rerun import Rerun, reruns
from leakbound.report.tables import AttackKey, Names, mean_value

EXAMPLE_SIDE = 64
EXPERIMENTS = 500
"""How many experiments a page shows one by one; the first of several pages shows half as many."""
CELLS = 30
"""The columns or tokens of a row from which on an experiment counts as several."""
ROWS = 5000
"""How many lines of numbers (one example, one attack) a page holds; large batches are cut."""
BASELINE = "baseline"
"""The column of the prior-only baseline."""
IDENTIFIED = "identified"
"""The column of the first matcher: whether it names the example among others."""
_NEXT = ("rmse", "mse", "ssim", "ms_ssim", "lpips", "ncc")
CardKey = tuple[str, int, int, str, int]
"""Model, batch size, clients, defense and seed."""


@dataclass(frozen=True)
class CapturedUpdate:
    """What an assessment says of the captured update behind it.

    `explained`: the share of the update that the reconstruction explains, None where not known;
    `scaled`: it is the best over all lengths of the update.
    """

    label: str
    own: CaptureInfo
    explained: float | None
    scaled: bool

    @staticmethod
    def of(assessment: Assessment) -> CapturedUpdate | None:
        capture = assessment.capture
        if capture is None:
            return None
        parts = [capture.name]
        parts += [f"round {capture.round}"] * bool(capture.round)
        parts += [f"client {capture.client}"] * bool(capture.client)
        known = capture.explained or Explained(share=None, direction=None, scale=None)
        scaled = known.share is None
        share = known.direction if scaled else known.share
        return CapturedUpdate(", ".join(parts), capture, share, scaled)


@dataclass(frozen=True)
class GalleryEntry:
    """One experiment of the gallery.

    `truth` and `leak_map` are set where they differ from those of the entry before. `row`: of a
    table, the best reconstructed one.
    """

    own: Assessment
    attack: str
    captured: CapturedUpdate | None
    truth: Strip | None
    leak_map: Strip | None
    picture: Strip | None
    row: RowTable | None
    rerun: Rerun | None

    @property
    def note(self) -> str | None:
        return self.own.problem if self.own.status == "ok" else self.own.reason

    @property
    def mean(self) -> float | None:
        return mean_value(self.own)

    @property
    def reaches(self) -> bool:
        """Whether an example meets the criterion, if only by chance."""
        # The tolerance of the criterion itself, for scores that were rounded.
        limit = self.own.criterion.value - 1e-9
        return any(score is not None and score >= limit for score in self.own.scores)

    @property
    def scale(self) -> int:
        """How many pixels of the page one pixel of a picture takes."""
        strip = self.picture or self.truth or self.leak_map
        count = len(self.own.scores) or (1 if self.own.truth_known else self.own.batch_size)
        wide = strip.width / count if strip else EXAMPLE_SIDE
        return max(1, round(EXAMPLE_SIDE / wide))


@dataclass(frozen=True)
class ExampleTable:
    """The examples of one card: for each, by attack, a value a column and whether it matched.

    `more`: how many examples of the batch are not shown.
    """

    columns: tuple[str, ...]
    examples: tuple[tuple[tuple[str, tuple[float | None, ...], bool], ...], ...]
    more: int


@dataclass(frozen=True)
class Card:
    """One batch under one defense: the truth and what each attack made of it.

    `number` is its place on all pages. `cost`: the share of first-order utility kept, and the noise
    of equal second-order cost.
    """

    number: int
    model: str
    batch_size: int
    clients: int
    defense: str
    seed: int
    entries: tuple[GalleryEntry, ...]
    cost: tuple[float | None, float | None]
    table: ExampleTable

    @property
    def captured(self) -> CapturedUpdate | None:
        """The captured update that is attacked, where it is none of the audit's own."""
        return self.entries[0].captured


@dataclass(frozen=True)
class CardSource:
    """The experiments of one card, and the card's place on all pages."""

    number: int
    key: CardKey
    experiments: tuple[Assessment, ...]


def captured_updates(
    assessments: Iterable[Assessment], names: Names
) -> list[list[tuple[str, CapturedUpdate, Assessment]]]:
    """For each captured update the attacks on it, in the order of the records."""
    known = [(a, CapturedUpdate.of(a)) for a in assessments]
    by_update = grouped(
        ((a.seed, update.own.digest), (names.attack(a), update, a)) for a, update in known if update
    )
    return list(by_update.values())


def pages_of(
    assessments: Iterable[Assessment],
    names: Names,
) -> list[list[CardSource]]:
    """Experiments that apply, by batch and defense, on pages of at most `EXPERIMENTS`; one or more.

    Batches with a certificate come first.
    """
    by_card = grouped(
        ((names.model(a), a.batch_size, a.clients, names.defense(a), a.seed), a)
        for a in assessments
        if a.status != "not_applicable"
    )
    pages: list[list[CardSource]] = [[]]
    sizes = {key: sum(map(_size, experiments)) for key, experiments in by_card.items()}
    # The first of several pages also has the tables.
    left = EXPERIMENTS if sum(sizes.values()) <= EXPERIMENTS else EXPERIMENTS // 2
    certified_first = sorted(
        by_card.items(), key=lambda one: not any(a.certificate for a in one[1])
    )
    for number, (key, experiments) in enumerate(certified_first, 1):
        # A card that is larger than a page still needs one.
        if pages[-1] and sizes[key] > left:
            pages.append([])
            left = EXPERIMENTS
        pages[-1].append(CardSource(number, key, tuple(experiments)))
        left -= sizes[key]
    return pages


def _size(experiments: Assessment) -> int:
    """As how many experiments it counts: a wide row takes the room of several."""
    wide = len(experiments.columns or ()) or max(
        (len(s.reconstruction) for s in experiments.sequences or ()), default=0
    )
    return max(1, math.ceil(min(wide, MOST) / CELLS))


def cards_of(
    run: Run,
    names: Names,
    page: Sequence[CardSource],
    *,
    images: bool,
    inline: bool,
) -> list[Card]:
    load = cache(partial(run.picture, inline=inline))
    most = room(page)
    commands = reruns(run.info.plan, _experiments(page))

    def entries(experiments: Iterable[Assessment]) -> Iterable[GalleryEntry]:
        last: dict[str, str] = {}
        for a in experiments:
            files = a.pictures if images else {}
            shared = {n: file for n, file in files.items() if n != "reconstruction"}
            new = {n: file for n, file in shared.items() if file != last.get(n)}
            last |= new
            # A truth that several attacks share is drawn once.
            strips = {n: load(file) for n, file in new.items()}
            guess = files.get("reconstruction")
            yield GalleryEntry(
                a,
                names.attack(a),
                CapturedUpdate.of(a),
                strips.get("truth"),
                strips.get("leak_map"),
                load(guess) if guess else None,
                row_of(a) if images else None,
                commands.get(a.experiment),
            )

    cards = []
    for source in page:
        experiments = source.experiments
        parts = (
            tuple(entries(experiments)),
            _cost(experiments),
            example_table(experiments, names, most),
        )
        cards.append(Card(source.number, *source.key, *parts))
    return cards


def best_examples(
    pages: Iterable[Sequence[CardSource]], names: Names
) -> dict[AttackKey, tuple[int, str]]:
    """By configuration and attack, page and anchor of the example that it reconstructed best."""
    best: dict[AttackKey, tuple[float, int, str]] = {}
    for number, page in enumerate(pages):
        most = room(page)
        for source in page:
            for a in source.experiments:
                key = names.attack_key(a)
                for i, score in enumerate(a.scores, 1):
                    if score is not None and (key not in best or score > best[key][0]):
                        anchor = f"example-{source.number}-{i}" if i <= most else ""
                        best[key] = (score, number, anchor)
    return {key: (page, anchor) for key, (_, page, anchor) in best.items() if anchor}


def room(page: Sequence[CardSource]) -> int:
    """How many examples of each batch a page has room for."""
    ran = sum(a.status == "ok" for a in _experiments(page))
    return max(1, ROWS // max(1, ran))


def example_table(
    experiments: Iterable[Assessment],
    names: Names,
    most: int,
) -> ExampleTable:
    ran = [a for a in experiments if a.status == "ok" and a.metrics]
    count = max((len(a.scores) for a in ran), default=0)
    held = {n for a in ran for n, values in a.metrics.items() if set(values) != {None}}
    first = [ran[0].criterion.metric] if ran else []
    known = [name for name in (*first, *_NEXT) if name in held]
    columns = (*known[:1], BASELINE, *known[1:], *sorted(held - set(known))) if held else ()
    columns += (IDENTIFIED,) * any(a.reidentified for a in ran)

    def row(
        a: Assessment,
        i: int,
    ) -> tuple[str, tuple[float | None, ...], bool]:
        right = [*map(float, a.reidentified[0].right)] if a.reidentified else None
        more = {BASELINE: a.baseline, IDENTIFIED: right}
        values = [more[c] if c in more else a.metrics.get(c) for c in columns]
        return names.attack(a), tuple(v[i] if v else None for v in values), a.matched[i]

    shown = range(min(count, most))
    examples = tuple(tuple(row(a, i) for a in ran if i < len(a.matched)) for i in shown)
    return ExampleTable(columns, examples, count - len(examples))


def _experiments(page: Iterable[CardSource]) -> list[Assessment]:
    return [a for source in page for a in source.experiments]


def _cost(experiments: Iterable[Assessment]) -> tuple[float | None, float | None]:
    """First- and second-order utility of a release, from the first experiment that knows it."""
    for a in experiments:
        kept: Mapping[str, float | None] = a.release.utility if a.release else {}
        values = kept.get("first_order"), kept.get("second_order")
        if values != (None, None):
            return values
    return None, None
