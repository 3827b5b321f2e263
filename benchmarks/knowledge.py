"""What one step adds for who knows a part of each example: writes docs/results/knowledge.json.

Public examples bound what an intruder reaches without the update, and with it. Imputers measure the
first from below, attacks on held-out examples the second. Each held-out example is attacked once
with each noise. About a quarter of an hour on one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leakbound import data, models
from leakbound._util.intervals import clopper_pearson
from leakbound.assess.attackers import Intruder, rows_of, with_known_parts
from leakbound.assess.criterion import Criterion, distance_of
from leakbound.assess.imputers import prior_of_intruder
from leakbound.assess.record import AttackerRow, Completed
from leakbound.attacks import SpanDecoding, TokenMatching
from leakbound.attacks.base import Attack
from leakbound.attacks.imputers import assembled, completions
from leakbound.attacks.knowing import with_known
from leakbound.bounds.counting import PublicSample, gaussian_lift
from leakbound.client import example_gradients
from leakbound.core import Batch, NotApplicable, Observation, Task, ThreatModel
from leakbound.defenses import Defense, GaussianNoise, NoDefense, Quantization
from leakbound.domains import Column, Domain, TableDomain
from leakbound.protocol import play
from leakbound.randomness import permutation, stream

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import stored

NOISES = (0.5, 1.0, 2.0, 5.0)
SIZES = (1, 2, 3, 4, 8, 16, 32, 64)
"""Answers among which a malicious server's model lets the update choose."""
TUNED = 300
"""Public examples on which an intruder chooses how many answers there are."""
DONORS = 80
"""Public examples whose known part is nearest; their unknown parts are candidates."""
MIXES = 100
"""Candidates whose unknown parts come from different ones of the NEAREST donors."""
NEAREST = 10
TRIED = 60
"""Candidates whose gradients are compared with the update, the likeliest first."""
LEAST = 0.1
"""The least weight of all candidates that are no completion, before weights sum to 1."""
PEOPLE = 50_000
"""Rows of the table of patients."""
Array = NDArray[np.float64]


# --- patients, generated: no package contains a table of this size


@cache
def patients() -> tuple[TableDomain, Tensor, Tensor]:
    """Sex, birth year and postal code, 17 clinical columns, and a diagnosis that 4 % have.

    A patient's age, area and four latent conditions decide the clinical columns.
    """
    draw = np.random.default_rng(2025)
    male = draw.random(PEOPLE) < 0.47
    age = np.clip(90 * draw.beta(2.2, 1.6, PEOPLE) + 5, 18, 94).round()
    areas = 1 / np.arange(1, 101)
    area = draw.choice(100, PEOPLE, p=areas / areas.sum())
    poverty = draw.standard_normal(100)[area]
    years = (age - 55) / 15
    heart, sugar, lung, mind = draw.standard_normal((4, PEOPLE))
    heart = heart + 0.9 * years + 0.4 * male
    sugar = sugar + 0.5 * years + 0.5 * poverty + 0.4 * heart
    lung = lung + 0.6 * poverty + 0.3 * years
    smokes = np.digitize(lung + draw.standard_normal(PEOPLE), [0.6, 1.8])

    def flag(score: Array, share: float) -> NDArray[np.int64]:
        """Those with the highest scores, after noise of their own."""
        noisy = score + 0.5 * draw.standard_normal(PEOPLE)
        return (noisy > np.quantile(noisy, 1 - share)).astype(np.int64)

    flags = {
        "hypertension": flag(heart, 0.35),
        "coronary_disease": flag(heart + 0.3 * smokes, 0.10),
        "heart_failure": flag(1.2 * heart, 0.06),
        "stroke": flag(heart + sugar, 0.04),
        "diabetes": flag(sugar, 0.14),
        "kidney_disease": flag(sugar + heart, 0.08),
        "copd": flag(lung + 0.8 * smokes, 0.08),
        "asthma": flag(lung - years, 0.07),
        "cancer": flag(years + 0.3 * smokes, 0.06),
        "depression": flag(mind + 0.3 * poverty, 0.12),
        "pregnant": flag(3 * (~male & (age < 45)) - 0.1 * np.abs(age - 30), 0.03),
    }
    coded = {
        "smoking": (smokes, 3),
        "admission": (np.digitize(heart + draw.standard_normal(PEOPLE), [-0.5, 1.0, 2.5]), 4),
        "blood_group": (draw.choice(4, PEOPLE, p=[0.42, 0.37, 0.15, 0.06]), 4),
        **{name: (values, 2) for name, values in flags.items()},
    }
    numbers = {
        "bmi": (26 + 2.5 * sugar + 2 * draw.standard_normal(PEOPLE), 14, 50, 2),
        "systolic": (125 + 9 * heart + 8 * draw.standard_normal(PEOPLE), 80, 220, 10),
        "creatinine": (80 + 15 * (sugar + heart) + 10 * draw.standard_normal(PEOPLE), 30, 300, 15),
    }
    columns = []
    parts = []

    def category(name: str, values: Array | NDArray[np.int64], count: int) -> None:
        columns.append(Column(name, "categorical", levels=tuple(map(str, range(count)))))
        parts.append(np.eye(count)[values])

    def number(
        name: str, values: Array, low: float, high: float, tolerance: float | None = None
    ) -> None:
        columns.append(Column(name, "integer", low, high, tolerance=tolerance))
        parts.append((np.clip(values.round(), low, high) - low)[:, None] / (high - low))

    category("sex", male.astype(np.int64), 2)
    number("birth_year", 2025 - age, 1930, 2008)
    category("postal_code", area, 100)
    for name, (values, count) in coded.items():
        category(name, values, count)
    for name, measured in numbers.items():
        number(name, *measured)
    severe = heart + sugar + lung + 2 * draw.standard_normal(PEOPLE)
    ill = severe > np.quantile(severe, 0.96)
    return (
        TableDomain(tuple(columns)),
        torch.from_numpy(np.concatenate(parts, 1)).float(),
        torch.from_numpy(ill.astype(np.int64)),
    )


# --- settings


@dataclass(frozen=True)
class Setting:
    """Examples, the part that intruders know, and what counts as reconstructed of the rest.

    Attributes:
        public, held: numbers of public examples, and of others that are attacked.
    """

    words: str
    load: Callable[[], tuple[Domain, Tensor, Tensor]]
    known: str
    knows: str
    public: int
    held: int
    psnr: float = 20.0
    share: float = 0.9


class Scene:
    """A setting with its examples in two parts, and a model at random weights."""

    def __init__(self, setting: Setting) -> None:
        self.domain, self.inputs, self.labels = setting.load()
        self.setting = setting
        self.criterion = Criterion.of(
            self.domain, psnr=setting.psnr, share=setting.share, known=setting.known
        )
        order = permutation(len(self.inputs), stream(0, "split", setting.words))
        self.public = self.batch(order[: setting.public])
        self.held = self.batch(order[setting.public :][: setting.held])
        self.task = Task.of(self.model(), domain=self.domain, **self.loss)

    def batch(self, places: Tensor) -> Batch:
        return Batch(self.inputs[places], self.labels[places])

    @property
    def loss(self) -> dict[str, str]:
        return {} if self.domain.vocabulary is None else {"loss": "next_token"}

    def model(self) -> nn.Module:
        source = stream(0, "model")
        if self.domain.vocabulary is None:
            return models.mlp(
                input_shape=self.domain.shape,
                classes=int(self.labels.max()) + 1,
                hidden=(32,),
                generator=source,
            )
        return models.decoder(
            input_shape=self.domain.shape,
            classes=self.domain.vocabulary,
            width=8,
            layers=1,
            heads=2,
            generator=source,
        )

    def completed(self) -> tuple[Completed, ...]:
        """What each imputer completes without the update, on other public examples."""
        known = self.criterion.known
        assert known is not None
        return prior_of_intruder(self.public.inputs, known, self.criterion.within)

    def rows(self, completed: Completed) -> list[tuple[AttackerRow, ...]]:
        """The statements for stranger, intruder and anyone, for each noise."""
        whole = self.criterion.of_stranger
        assert whole is not None
        flat = self.public.inputs.flatten(1).double().numpy()
        stranger = PublicSample(flat, distance=distance_of(self.domain))
        sample = with_known_parts(stranger, self.criterion.known)
        intruder = Intruder(self.criterion, sample, completed)
        return [rows_of(gaussian_lift(noise), whole, stranger, intruder) for noise in NOISES]


# --- intruders


@dataclass(frozen=True)
class Law:
    """What an intruder believes of the unknown part of one example.

    Attributes:
        rest: (K, *shape) candidates.
        weights: (K,) their probabilities.
        near: (K, K) which candidate, as an answer, matches which.
        hit: (K,) which candidate matches the truth; for the count alone.
        labels: (K, ...) of the public examples that they come from.
    """

    rest: Tensor
    weights: Array
    near: NDArray[np.bool_]
    hit: NDArray[np.bool_]
    labels: Tensor


def laws(
    scene: Scene, public: Batch, targets: Tensor, measured: Sequence[Completed]
) -> Iterator[Law]:
    """For each target: imputers' completions, and what public examples with a near known part hold.

    A completion has the probability with which its imputer was right; the others share the rest.
    """
    known = scene.criterion.known
    assert known is not None
    draw = np.random.default_rng(1)
    by_name = dict(completions(public.inputs, known, targets))
    filled = torch.stack(list(by_name.values()), 1)
    shares = {one.imputer: max(one.share, 1 / one.total) for one in measured}
    right = np.array([shares[name] for name in by_name])
    truth = known.unknown(targets)
    rest = known.unknown(public.inputs)
    values = known.values(public.inputs)
    domain = known.rest
    for place, target in enumerate(targets):
        apart = known.part.costs(known.values(target[None]), values)[0]
        near = apart.topk(min(DONORS, len(values)), largest=False).indices
        parts = [filled[place], rest[near]]
        from_public = [near[:1].expand(filled.shape[1]), near]
        if domain.parts is not None:
            few = near[:NEAREST].numpy()
            donors = few[draw.integers(0, len(few), (MIXES, domain.parts))]
            parts.append(assembled(domain.spans, rest, donors))
            from_public.append(torch.from_numpy(donors[:, 0]))
        candidates = torch.cat(parts)
        others = len(candidates) - len(right)
        left = max(1 - right.sum(), LEAST)
        weights = np.concatenate([right, np.full(others, left / others)])
        weights /= weights.sum()
        within = scene.criterion.within
        yield Law(
            candidates,
            weights,
            near=(domain.distances(candidates, candidates) <= within).numpy(),
            hit=(domain.distances(truth[place][None], candidates)[0] <= within).numpy(),
            labels=public.labels[torch.cat(from_public)],
        )


def by_gradient(
    scene: Scene, law: Law, victim: Batch, draw: np.random.Generator
) -> NDArray[np.bool_]:
    """For each noise, whether the answer from the gradient of an honest server's model matches.

    Gradients are clipped to less than any norm, so that each has the full one. The answer is the
    candidate in whose ball the posterior has most mass.
    """
    known = scene.criterion.known
    assert known is not None
    rest = law.rest[:TRIED]
    values = known.values(victim.inputs).expand(len(rest), *known.part.shape)
    whole = torch.cat([victim.inputs, known.joined(values, rest).to(victim.inputs)])
    labels = torch.cat([victim.labels, law.labels[:TRIED]])
    rows = nn.functional.normalize(example_gradients(scene.task, whole, labels)).numpy()
    sent, candidates = rows[0], rows[1:]
    alike = candidates @ sent
    noise = candidates @ draw.standard_normal(len(sent), np.float32)
    right = []
    for std in NOISES:
        logs = np.log(law.weights[:TRIED]) + (alike + std * noise) / std**2
        posterior = np.exp(logs - logs.max())
        right.append(law.hit[(law.near[:, :TRIED] @ posterior).argmax()])
    return np.array(right)


def by_answer(law: Law, draw: np.random.Generator) -> NDArray[np.bool_]:
    """(noises, sizes) whether the answer from a malicious server's model matches.

    Its gradient names the first of a few answers that matches the example, as a corner of a simplex
    with the full norm; an example that none matches sends nothing.
    """
    words, shares = likeliest(law)
    right = np.zeros((len(NOISES), len(SIZES)), bool)
    for place, size in enumerate(SIZES):
        size = min(size, len(words))
        matched = law.hit[words[:size]]
        if size == 1:
            right[:, place] = matched[0]
            continue
        corner = np.sqrt(size / (size - 1)) * (np.eye(size) - 1 / size)
        sent = corner[matched.argmax()] if matched.any() else np.zeros(size)
        drawn = draw.standard_normal(size)
        for row, std in enumerate(NOISES):
            logs = np.log(shares[:size]) + corner @ (sent + std * drawn) / std**2
            right[row, place] = matched[logs.argmax()]
    return right


def likeliest(law: Law) -> tuple[NDArray[np.int64], Array]:
    """Answers that cover most of the law, and the share that each covers first."""
    left = law.weights.copy()
    words = []
    shares = []
    while len(words) < max(SIZES) and left.any():
        gains = law.near @ left
        best = int(gains.argmax())
        words.append(best)
        shares.append(float(gains[best]))
        left[law.near[best]] = 0.0
    return np.array(words), np.array(shares)


@dataclass(frozen=True)
class Counts:
    """Matches of n attacked examples: without the update, and of two servers for each noise."""

    n: int
    without: int
    honest: NDArray[np.int64]
    malicious: NDArray[np.int64]


def attacked(scene: Scene, measured: Sequence[Completed]) -> Counts:
    """Both attacks on every held-out example; public ones choose the number of answers."""
    half = scene.public.size // 2
    places = permutation(scene.public.size, stream(0, "halves"))
    first, second = (
        Batch(scene.public.inputs[some], scene.public.labels[some])
        for some in (places[:half], places[half:][:TUNED])
    )
    draw = np.random.default_rng(2)
    tuned: Any = sum(by_answer(law, draw) for law in laws(scene, first, second.inputs, measured))
    best = np.argmax(tuned, 1)
    honest = np.zeros(len(NOISES), np.int64)
    malicious = np.zeros(len(NOISES), np.int64)
    held = scene.held
    without = 0
    for place, law in enumerate(laws(scene, scene.public, held.inputs, measured)):
        victim = Batch(held.inputs[place : place + 1], held.labels[place : place + 1])
        without += int(law.hit[likeliest(law)[0][0]])
        honest += by_gradient(scene, law, victim, draw)
        malicious += by_answer(law, draw)[np.arange(len(NOISES)), best]
    return Counts(held.size, without, honest, malicious)


# --- attacks that use known parts


@dataclass(frozen=True)
class Held:
    """An attack on batches of which a part is known: with it, and without it until the end."""

    words: str
    load: Callable[[], tuple[Domain, Tensor, Tensor]]
    known: str
    knows: str
    attack: Attack
    defense: Defense
    sent: str
    batch: int
    runs: int

    def seen(self, run: int) -> tuple[Observation, Tensor]:
        """What the attacker sees of one update, and the true inputs."""
        domain, inputs, _ = self.load()
        order = permutation(len(inputs), stream(0, "split", self.words))
        public, held = order[: len(order) // 2], order[len(order) // 2 :]
        rows = inputs[held[permutation(len(held), stream(run, "batch"))[: self.batch]]]
        batch = Batch(rows, torch.arange(self.batch) % 2)
        given: dict[str, Any] = {"input_shape": domain.shape, "classes": 2}
        given["generator"] = stream(run, "model")
        if domain.vocabulary is None:
            model = models.mlp(hidden=(40,), activation="relu", **given)
        else:
            model = models.encoder(vocabulary=domain.vocabulary, width=48, heads=2, **given)
        round_ = play(
            Task.of(model.eval(), domain=domain, classes=2),
            [batch],
            self.defense,
            [stream(run, "defense", k) for k in range(2)],
            threat=ThreatModel(known=self.known),
            auxiliary=Batch(inputs[public], torch.arange(len(public)) % 2),
        )
        return round_.observation, rows

    def right(self, run: int, *, known: bool) -> float:
        """Percent of the unknown columns or words that are right; 0 if no attack applies."""
        seen, rows = self.seen(run)
        assert seen.known is not None
        parts = seen.known.parts
        observation = seen if known else replace(seen, known=None)
        try:
            answer = self.attack(observation, stream(run, "attack"))
        except NotApplicable:
            return 0.0
        whole = with_known(seen, answer).inputs
        return float(parts.rest.score(parts.unknown(rows), parts.unknown(whole)).mean())


def held_line(held: Held) -> list[str]:
    """Means over batches, and their difference with its 95 % interval of paired batches."""
    runs = range(held.runs)
    without, used = (
        np.array([held.right(run, known=known) for run in runs]) for known in (False, True)
    )
    apart = used - without
    spread = 1.96 * apart.std(ddof=1) / np.sqrt(held.runs)
    return [
        *(held.words, held.sent, held.knows, str(held.batch), str(held.runs)),
        *(f"{values.mean():.1f} %" for values in (without, used)),
        f"{apart.mean():+.1f} ± {spread:.1f}",
    ]


# --- the page


def share(hits: int, n: int) -> str:
    """A count with its 95 % interval."""
    low, high = clopper_pearson(hits, n, 0.025)
    return f"{hits} of {n} ({percent(low)} to {percent(high)} %)"


def percent(value: float) -> str:
    """Two digits, or a whole number."""
    return f"{100 * value:.2g}" if value < 0.1 else f"{100 * value:.0f}"


Lines = tuple[list[str], list[list[str]]]
"""What is known without the update, and the lines of each noise."""


def measured_lines(setting: Setting) -> Lines:
    """The line of what is known without the update, and those of each noise."""
    scene = Scene(setting)
    measured = scene.completed()
    best = measured[0]
    rows = scene.rows(best)
    counts = attacked(scene, measured)
    stranger, intruder, _ = rows[0]
    assert stranger.without is not None
    assert intruder.without is not None
    without = [
        *(setting.words, setting.knows, intruder.goal, str(scene.public.size)),
        *(f"{percent(stranger.without)} %", f"{percent(intruder.without)} %"),
        f"{share(best.matched, best.total)}, {best.imputer}",
        share(counts.without, counts.n),
    ]
    # If nothing was completed, one more would have been the first.
    q = max(best.share, counts.without / counts.n, 1 / best.total)
    lines = []
    for place, (noise, (_, knows, anyone)) in enumerate(zip(NOISES, rows, strict=True)):
        assert knows.bound is not None
        hits = int(counts.honest[place]), int(counts.malicious[place])
        lifted = float(gaussian_lift(noise)(np.log(q)))
        lines.append(
            [
                *(setting.words, setting.knows, f"{noise:g}"),
                *(share(count, counts.n) for count in hits),
                f"{percent(lifted)} %",
                f"{percent(knows.bound)} %",
                f"{100 * (lifted - q):.1f}",
                f"{100 * anyone.gain:.1f}",
            ]
        )
        # An attack that is above a limit for certain is a fault of one of them.
        assert all(clopper_pearson(count, counts.n, 1e-4)[0] <= knows.bound for count in hits)
    return without, lines


def from_package(name: str) -> Callable[[], tuple[Domain, Tensor, Tensor]]:
    """A data set that comes with a package."""

    @cache
    def load() -> tuple[Domain, Tensor, Tensor]:
        found = data.load(name)
        # The next words are the labels of text.
        return found.domain.fitted(found.inputs), found.inputs, found.labels

    return load


def columns_of(name: str, wanted: Callable[[str], bool], most: int | None = None) -> str:
    """The first columns of a built-in table whose name is wanted."""
    domain = data.load(name).domain
    assert isinstance(domain, TableDomain)
    return ",".join([one.name for one in domain.columns if wanted(one.name)][:most])


GERMAN = from_package("german")
TUMORS = from_package("breast_cancer")
DIGITS = from_package("mnist5k")
TOPICS = from_package("topics")
PERSON = "sex,birth_year"
SETTINGS = (
    Setting(
        "german",
        GERMAN,
        "personal_status_and_sex,foreign_worker",
        "2 of 20 columns",
        public=600,
        held=400,
        share=0.7,
    ),
    Setting(
        "german",
        GERMAN,
        columns_of("german", lambda name: True, 14),
        "14 of 20 columns",
        public=600,
        held=400,
    ),
    Setting(
        "breast cancer",
        TUMORS,
        columns_of("breast_cancer", lambda name: not name.startswith("worst")),
        "20 of 30 columns",
        public=269,
        held=300,
        share=0.3,
    ),
    Setting(
        "breast cancer",
        TUMORS,
        columns_of("breast_cancer", lambda name: "radius" not in name),
        "27 of 30 columns",
        public=269,
        held=300,
    ),
    Setting("patients", patients, PERSON, "sex, birth year", public=20_000, held=300),
    Setting(
        "patients",
        patients,
        f"{PERSON},postal_code",
        "sex, birth year, postal code",
        public=20_000,
        held=300,
    ),
    Setting("MNIST", DIGITS, "region:top", "upper half, 20 dB", public=4000, held=300),
    Setting("MNIST", DIGITS, "region:top", "upper half, 15 dB", public=4000, held=300, psnr=15.0),
    Setting("topics", TOPICS, "prefix:1", "first word of 16", public=2000, held=300, share=0.5),
    Setting("topics", TOPICS, "prefix:8", "first 8 words", public=2000, held=300),
    Setting(
        "topics",
        TOPICS,
        "places:0-4,6-9,11-15",
        "a form with 2 blanks",
        public=2000,
        held=300,
    ),
)
SEARCH = TokenMatching(restarts=1)
HELD = (
    *(
        Held(
            "german",
            GERMAN,
            columns_of("german", lambda name: True, count),
            f"{count} of 20 columns",
            SpanDecoding(),
            defense,
            sent,
            batch=8,
            runs=runs,
        )
        for count, defense, sent, runs in (
            (10, GaussianNoise(0.003), "Gaussian noise 0.003", 24),
            *((count, Quantization(8), "8-bit quantization", 150) for count in (2, 10, 14)),
        )
    ),
    *(
        Held("topics", TOPICS, places, knows, SEARCH, NoDefense(), "the gradient", 2, 12)
        for places, knows in (
            ("prefix:8", "first 8 of 16 words"),
            ("places:0,2,4,6,8,10,12,14", "every second word"),
        )
    ),
)
USED = (
    "An attack may use the known part in its search, or search as a stranger and fill it in at the "
    "end. The last columns count right unknown columns or words of a batch, on average over "
    "batches, each with weights of its own; the difference is in points, with a 95 % interval over "
    "batches. `span_decoding` reads rows behind a perceptron of 40 units, "
    "`token_matching` with one start sequences behind an encoder of two layers."
)
GOAL = (
    "An intruder knows the part of an example that the second column names. The rest counts as "
    "reconstructed if so many of its columns or words are right, or from so many decibels. *At "
    "most* is a limit with 95 % confidence from a count of public examples. It is 100 % where "
    "almost every public example has a known part of its own: no count then excludes that this "
    "part determines the rest. *Best imputer* is fitted on half of the public examples and counted "
    "on others (of 2,000 at most). *Intruder's answer* uses all public examples, on the held-out "
    "ones that are attacked below. Intervals are those of Clopper and Pearson, 95 %."
)
STEP = (
    "One full-batch step: the gradient of an example is clipped, and noise of σ times the clip "
    "norm is added. The other examples of the batch are known. Each held-out example is attacked "
    "once with each noise. The intruder's candidates are the imputers' completions, the unknown "
    "parts of the public examples whose known part is nearest, and mixes of these parts. The model "
    "of the *honest* server has random weights (a perceptron with 32 hidden units; for text a "
    f"decoder of one layer), and {TRIED} candidates are compared with the update. The model of the "
    f"*malicious* server names one of up to {max(SIZES)} answers by gradients that are far apart; "
    "how many, is chosen on public examples. *F(q)* is the limit if nobody completes more without "
    "the update than the better of the last two columns above. *At most* is the limit from public "
    "examples. Gains are in percentage points: F(q) − q, and the largest for anyone, whatever they "
    "know."
)
PATIENTS = (
    f"The table *patients* is generated: {PEOPLE:,} rows with sex, birth year, postal code and 17 "
    "clinical columns, which four latent conditions, age and area decide. The label is a diagnosis "
    "that 4 % have. The other data come with packages."
)


def page(measured: Sequence[Lines], held: Sequence[list[str]]) -> stored.Page:
    """All tables, from the lines of every setting."""
    before = {
        "columns": [
            *("data", "known", "counts as reconstructed", "public examples"),
            *("stranger, at most", "intruder, at most", "best imputer", "intruder's answer"),
        ],
        "align": "lllrrrll",
        "rows": [line for line, _ in measured],
    }
    after = {
        "columns": [
            *("data", "known", "σ", "honest server", "malicious server"),
            *("F(q)", "at most", "gain", "gain of anyone"),
        ],
        "align": "llrllrrrr",
        "rows": [line for _, lines in measured for line in lines],
    }
    return {
        "title": "What one step adds for who knows a part",
        "sections": [
            {"heading": "Without the update", "body": [GOAL, PATIENTS, before]},
            {"heading": "With one step", "body": [STEP, after]},
            used(held),
        ],
    }


def used(held: Sequence[list[str]]) -> dict[str, Any]:
    """The section on attacks that use known parts."""
    table = {
        "columns": [
            *("data", "sent", "known", "batch", "batches"),
            *("filled in", "used", "difference"),
        ],
        "align": "lllrrrrr",
        "rows": [*held],
    }
    return {"heading": "Attacks that use known parts", "body": [USED, table]}


def main() -> int:
    """Measure every setting and write the page."""
    measured = []
    for setting in SETTINGS:
        start = time.perf_counter()
        measured.append(measured_lines(setting))
        line, lines = measured[-1]
        took = f"{time.perf_counter() - start:.0f} s"
        print("\n".join(" | ".join(cells) for cells in ([*line, took], *lines)), flush=True)
    held = []
    for one in HELD:
        held.append(held_line(one))
        print(" | ".join(held[-1]), flush=True)
    # What a person reads in the numbers stays.
    stored.keep("knowledge", stored.markdown(page(measured, held)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
