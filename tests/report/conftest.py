"""Run folders made up for the report: small, complete, with real PNG files."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from leakbound.assess.record import Assessment, Bound, DefenseInfo, Training, encode, read
from leakbound.report.rerun import digest

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
BASELINE = 11.0
TALL = {"width": 1280, "height": 900}


def defense(name: str, **parameters: Any) -> DefenseInfo:
    settings = f"{name}({', '.join(f'{k}={v}' for k, v in parameters.items())})"
    known = "known noise distribution" if "noise" in name else "none"
    return DefenseInfo(
        name=name,
        parameters=parameters,
        settings=settings,
        guarantee=known,
        data_dependent_law=False,
    )


DP_SGD = replace(
    defense("dp_sgd"),
    settings="ClipExamples(clip_norm=2.0) → Mean() → GaussianMechanism(noise_multiplier=0.5)",
    guarantee="differential privacy",
)
THREAT = {
    "labels_known": True, "defense_known": True, "server": "honest", "statistics_known": False
}  # fmt: skip


def assessment(**changes: Any) -> Assessment:
    """One good record; keyword arguments replace its fields, `psnr` its values.

    An attack is given by its name, parts of a record as JSON values or as what they are.
    """
    psnr = changes.pop("psnr", [31.0, 12.0])
    name = changes.pop("attack", "inverting_gradients")
    ran = changes.get("status", "ok") == "ok"
    reached = max((value for value in psnr if value is not None), default=0) >= 20
    fields: dict[str, Any] = {
        "attack": {"name": name, "settings": f"GradientMatching({name!r})", "hash": "ab" * 6},
        "defense": defense("none"),
        "model": {"name": "mlp", "parameters": {"hidden": [128]}, "size": 101770},
        "data": {"source": "mnist5k", "domain": "images", "shape": [1, 28, 28], "classes": 10},
        "batch_size": 2,
        "clients": 1,
        "seed": 0,
        "threat": THREAT,
        "criterion": {"value": 20.0, "within": 0.1},
    }
    if ran:
        count = len(psnr)
        fields |= {
            "objective": {"start": 1.02, "end": 0.0003},
            "release": RELEASE,
            "metrics": {"psnr": psnr, "ssim": [0.5] * count},
            "baseline": [BASELINE] * count,
            "verdict": "exposed" if reached else "undecided",
        }
    elif changes["status"] == "failed":
        fields["verdict"] = "undecided"
    measured = ("metrics", "baseline", "matched") if not ran else ()
    fields |= {key: value for key, value in changes.items() if key not in measured}
    if "matched" not in fields and ran:
        limit = plain(fields["criterion"])["value"]
        pairs = zip(fields["metrics"]["psnr"], fields["baseline"], strict=True)
        fields["matched"] = [
            own is not None and own >= limit and (other is None or own > other)
            for own, other in pairs
        ]
    if "reidentified" not in fields and ran:
        right = [False] * len(fields["matched"])
        fields["reidentified"] = [{"matcher": "nearest", "right": right, "candidates": 100}]
    fields = plain(fields)
    if "experiment" not in fields:
        fields["experiment"] = named(fields)
    return msgspec.convert(fields, Assessment)


def table(
    right: dict[str, list[bool]],
    baseline: dict[str, list[bool]] | None = None,
    values: dict[str, tuple[list[str], list[str]]] | None = None,
    sensitive: tuple[str, ...] = (),
    **changes: Any,
) -> Assessment:
    """A record of rows of a table: by column which rows are right, and true and guessed values."""
    count, blind = len(right), baseline or {}
    rows = len(next(iter(right.values())))
    never, same = [False] * rows, {"unit": "years"}
    columns = [
        {"name": name, "matched": own, "baseline": blind.get(name, never), **same}
        | {"sensitive": name in sensitive}
        | dict(zip(("truth", "reconstruction"), (values or {}).get(name, ()), strict=False))
        for name, own in right.items()
    ]

    def score(own: dict[str, list[bool]]) -> list[float]:
        hits = [sum(hit[row] for hit in own.values()) for row in range(rows)]
        return [100 * hit / count for hit in hits]

    fewest = -(-9 * count // 10)
    chance = changes.pop("chance", {"p_value": 0.002, "decoys": 499, "level": 0.01})
    p_value = 1.0 if chance is None else chance["p_value"]
    counts = chance["closer"] if p_value is None else p_value <= chance["level"]
    met = [counts and value >= 100 * fewest / count - 1e-9 for value in score(right)]
    fields: dict[str, Any] = {
        "metrics": {"columns": score(right)},
        "baseline": score({name: blind.get(name, never) for name in right}),
        "matched": met,
        "verdict": "exposed" if any(met) else "undecided",
        "criterion": {
            "metric": "columns",
            "value": 100 * fewest / count,
            "within": count - fewest,
            "of": count,
        },
        "data": {"source": "clinic", "domain": "table", "shape": [count], "classes": 2},
        "batch_size": rows,
        "columns": columns,
        "chance": chance,
    }
    return assessment(**fields | changes)


RELEASE = {"law": "Gaussian", "data_dependent": False, "withheld": 0.0, "unit": "client"}


def plain(value: Any) -> Any:
    """JSON values of records and what they consist of."""
    return json.loads(json.dumps(msgspec.to_builtins(value)))


def named(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def bound(psnr: float | None = 19.1, **changes: Any) -> Bound:
    """A lower bound on the error; keyword arguments replace its fields."""
    fields: dict[str, Any] = {
        "name": "trace",
        "value": 0.0 if psnr is None else 10 ** (-psnr / 10),
        "psnr": psnr,
        "prior": "N(mean, covariance) in 32 of 784 directions",
        "rests_on_prior": True,
        "covers": "all",
        "excludes_threshold": False,
        "on_average": psnr is not None and psnr < 20,
        "basis": "sample",
        "equation": "paper A, section 2.2",
        "assumptions": ["the release's law is smooth in x"],
        "standard_error": 0.0004,
    }
    return msgspec.convert(fields | changes, Bound)


def training(given: DefenseInfo, seed: int, accuracy: float | None, **changes: Any) -> Training:
    fields: dict[str, Any] = {
        "model": assessment().model,
        "defense": given,
        "seed": seed,
        "rounds": 30,
        "optimizer": "adam",
        "status": "failed" if accuracy is None else "ok",
        "reason": None if accuracy is not None else "RuntimeError: loss is NaN",
        "training_loss": 0.4,
        "accuracy": accuracy,
        **changes,
    }
    fields = plain(fields)
    return msgspec.convert({"training": named(fields), **fields}, Training)


def strip(folder: Path, images: np.ndarray[Any, Any]) -> str:
    """Images (B, H, W) in 0..1 as a PNG strip; returns its file name."""
    count, height, width = images.shape
    canvas = np.ones((height, count * (width + 2) - 2))
    for i, image in enumerate(images):
        canvas[:, i * (width + 2) : i * (width + 2) + width] = image
    buffer = io.BytesIO()
    Image.fromarray((canvas * 255).round().astype(np.uint8)).save(buffer, format="PNG")
    name = f"{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.png"
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures" / name).write_bytes(buffer.getvalue())
    return name


def pictures(
    folder: Path, seed: int, count: int, noise: float, mark: int, side: int = 28
) -> dict[str, str]:
    """A truth of smooth blobs and a guess that is off by noise."""
    rng = np.random.default_rng(seed)
    grid = np.linspace(-1, 1, side)
    x, y = np.meshgrid(grid, grid)
    centers = rng.uniform(-0.5, 0.5, (count, 2))
    truth = np.stack([np.exp(-12 * ((x - a) ** 2 + (y - b) ** 2)) for a, b in centers])
    draws = np.random.default_rng([seed, mark]).normal(size=truth.shape)
    guess = (truth + noise * draws).clip(0, 1)
    return {"truth": strip(folder, truth), "reconstruction": strip(folder, guess)}


def save(
    folder: Path,
    records: list[Assessment | dict[str, Any]],
    trainings: list[Training | dict[str, Any]] | None = None,
    /,
    **info: Any,
) -> Path:
    """Write a run folder; a record that is a dictionary is written as it is."""
    folder.mkdir(exist_ok=True)
    run: dict[str, Any] = {
        "schema": 1,
        "plan": {"name": "demo", "seeds": [0]},
        "plan_hash": "0123456789abcdef",
        "data": {
            "source": "mnist5k",
            "fingerprint": "fedcba",
            "examples": 5000,
            "shape": [1, 28, 28],
            "classes": 10,
        },
        "versions": {"leakbound": "0.1.0", "torch": "2.13.0"},
        "machine": {"processor": "x86_64", "threads": 1},
        "pictures": True,
        "experiments": len(records),
        "own_data": False,
    }
    (folder / "run.json").write_text(json.dumps(run | info), encoding="utf-8")
    for name, rows in (("records.jsonl", records), ("utility.jsonl", trainings)):
        if rows is not None:
            lines = [
                json.dumps(row).encode() + b"\n" if isinstance(row, dict) else encode(row)
                for row in rows
            ]
            (folder / name).write_bytes(b"".join(lines))
    return folder


def changed(folder: Path, edit: Callable[[Any], Any], kind: Any = Assessment) -> None:
    """Put every record of a run through `edit`, which gives its fields; None drops it."""
    path = folder / ("records.jsonl" if kind is Assessment else "utility.jsonl")
    own = list(read(path, kind))
    kept = [(one, edit(one)) for one in own]
    lines = [encode(replace(one, **fields)) for one, fields in kept if fields is not None]
    path.write_bytes(b"".join(lines))


def grid(
    folder: Path,
    *,
    seeds: int = 6,
    batch_size: int = 4,
    attacks: tuple[str, ...] = ("inverting_gradients", "dlg", "linear_inversion"),
    hostile: bool = True,
    side: int = 28,
) -> Path:
    """A whole audit: strengths, failures, inapplicable attacks, hostile names, utility."""
    folder.mkdir(exist_ok=True)
    stds = (0.0001, 0.001, 0.01, 0.1)
    defenses = [
        defense("none"),
        *(defense("gaussian_noise", noise_std=std) for std in stds),
        *(defense("top_k_pruning", rate=rate) for rate in (0.5, 0.9, 0.99)),
        defense("secure_aggregation", clients=2),
    ]
    if hostile:
        defenses.append(defense(HOSTILE, **{"$x_$ <b>": 0.5}))
        defenses.append(defense(HOSTILE, **{"$x_$ <b>": 0.7}))
    experiments, trainings = [], []
    for place, given in enumerate(defenses):
        clients = 2 if given.name == "secure_aggregation" else 1
        count, drop = batch_size * clients, [0, 1, 5, 14, 24, 2, 8, 18, 20, 4, 9][place]
        for turn, attack in enumerate(attacks):
            for seed in range(seeds):
                common = {"defense": given, "attack": attack, "seed": seed, "clients": clients}
                common["batch_size"] = batch_size
                rng = np.random.default_rng([place, turn, seed])
                if turn == 2 and place >= 8:
                    why = f"needs the gradient of one client {HOSTILE}"
                    experiments.append(assessment(**common, status="not_applicable", reason=why))
                    continue
                if turn == 1 and place == 3 and seed == 0:
                    why = f"RuntimeError: loss is NaN {HOSTILE}"
                    experiments.append(assessment(**common, status="failed", reason=why))
                    continue
                level = max(34 - drop - 4 * turn, 6)
                psnr = [round(float(v), 6) for v in level + rng.normal(0, 1.5, count)]
                bad = "objective did not fall: 1.02 to 1.01" if level < 10 else None
                files = pictures(folder, seed, count, 10 ** (-level / 20), 100 * place + turn, side)
                experiments.append(assessment(**common, psnr=psnr, problem=bad, pictures=files))
        accuracies = [0.9 - 0.02 * drop + 0.01 * s for s in range(3)]
        trainings += [training(given, s, round(a, 3)) for s, a in enumerate(accuracies)]
    return save(folder, experiments, trainings)


def bounded(folder: Path, *, seeds: int = 3, strengths: int = 4, hostile: str = "") -> Path:
    """An audit with bounds, leak maps, training curves and every verdict."""
    folder.mkdir(exist_ok=True)
    prior = f"N(mean, covariance) in 32 of 784 directions{hostile}"
    stds = [round(0.003 * 10 ** (i / max(strengths - 1, 1) * 2), 6) for i in range(strengths)]
    defenses = [
        defense("none"),
        *(defense("gaussian_noise", noise_std=std) for std in stds),
        replace(defense("adaptive_noise", budget=1.0), data_dependent_law=True),
        defense("bounded_noise", level=2.0),
    ]
    experiments, trainings = [], []
    for place, given in enumerate(defenses):
        noisy, strength = "gaussian" in given.name, place / (strengths + 2)
        best = 34 - 28 * strength
        for turn, attack in enumerate(("inverting_gradients", "dlg")):
            for seed in range(seeds):
                level, rng = max(best - 3 * turn, 7), np.random.default_rng([place, seed])
                psnr = [round(float(v), 3) for v in level + rng.normal(0, 0.7, 2)]
                files = pictures(folder, seed, 2, 10 ** (-level / 20), 10 * place + turn)
                own: dict[str, Any] = {"pictures": files}
                exposed = max(psnr) >= 20
                if noisy:
                    top = 36 - 26 * strength + 0.1 * seed
                    own["bounds"] = [bound(top, prior=prior, assumptions=[f"one{hostile}"])]
                    files["leak_map"] = leak_map(folder, seed, 2, 1 - strength)
                    kept = {"first_order": None, "second_order": 0.01 * place}
                    own["release"] = RELEASE | {"utility": kept}
                    if not exposed and top < 20:
                        own["verdict"] = "protected on average"
                elif place:
                    own["bounds_note"] = f"the release has no Gaussian noise{hostile}"
                if given.name == "bounded_noise":
                    own["verdict"] = "protected from strangers"
                common = {"defense": given, "attack": attack, "seed": seed, "psnr": psnr}
                experiments.append(assessment(**common, **own))
        for seed in range(2):
            rounds = [0, 5, 10, 20, 40, 60]
            losses = [2.3 - (2.1 - 1.5 * strength) * (1 - 0.93**r) + 0.02 * seed for r in rounds]
            curve = [[r, round(v, 4)] for r, v in zip(rounds, losses, strict=True)]
            kept = {"optimizer": f"adam{hostile}", "curve": curve}
            trainings.append(training(given, seed, round(0.9 - 0.5 * strength, 3), **kept))
    return save(folder, experiments, trainings)


def captured(folder: Path) -> Path:
    """One captured update whose truth is not known; it proves that the reconstruction is right."""
    rows = [
        ("learning rate", "unknown", "not known: the update's direction counts", False),
        ("batch size", "1", "given", True),
        ("labels", "1", "7 of 7 rules agree", True),
    ]
    own = assessment(
        status="ok",
        attack="linear_inversion",
        batch_size=1,
        metrics={},
        baseline=[],
        matched=[],
        verdict="exposed (certified)",
        threat=THREAT | {"labels_known": False},
        bounds_note="no noise of a known law was declared: the update itself bounds no attacker",
        capture={
            "name": "update",
            "kind": "weights",
            "digest": "a29bb7217f976909",
            "truth": False,
            "findings": [
                {"name": name, "value": value, "how": how, "sure": sure}
                for name, value, how, sure in rows
            ],
            "notes": ["taken for the weights after training"],
            "explained": {"share": None, "direction": 1.0, "scale": 0.1},
        },
        certificate="this is the input as the model was fed it, up to rounding",
    )
    plan = {"name": "captured updates", "attacks": [], "public": None, "psnr": 20.0}
    data = {"source": "captured updates", "fingerprint": "67", "examples": 1, "shape": [1, 4, 4]}
    more = {"plan": plan, "data": data, "pictures": False, "own_data": True}
    return save(folder, [own], **more, plan_hash=digest(plan))


def clinic(folder: Path) -> Path:
    """Rows of a table. Of the first row, no defense keeps a column; of the second, none is right.

    The names of a column and of a level are hostile.
    """
    level, formula = "<script>alert(3)</script>", '=HYPERLINK("http://x")'
    values = {
        "age": (["41 years", "72.5 years"], ["41 years", "30 years"]),
        formula: ([level, "b"], [level, "c"]),
        "hiv": (["positive", "secret-truth"], ["positive", "secret-guess"]),
    }
    kept: dict[str, Any] = {"values": values, "sensitive": ("hiv",)}
    kept |= {"baseline": {"age": [True, True]}}
    noise = defense("gaussian_noise", noise_std=0.1)
    own = [table({name: [True, False] for name in values}, seed=s, **kept) for s in range(2)]
    wrong = {name: [False, False] for name in values}
    own += [table(wrong, defense=noise, problem="no descent", **kept)]
    trainings = [training(own[0].defense, 0, 0.9), training(noise, 0, 0.8)]
    data = {"source": "clinic", "fingerprint": "ab", "examples": 400, "shape": [3], "classes": 2}
    plan = {"name": "clinic", "share": 0.9, "data": {"source": "clinic"}}
    return save(folder, own, trainings, data=data, plan=plan, plan_hash=digest(plan))


def leak_map(folder: Path, seed: int, count: int, scale: float) -> str:
    """A made-up leak map: bright in the middle."""
    grid = np.linspace(-1, 1, 28)
    x, y = np.meshgrid(grid, grid)
    shift = 0.1 * seed
    return strip(folder, np.stack([scale * np.exp(-3 * ((x - shift) ** 2 + y**2))] * count))


@pytest.fixture
def make_bound() -> Callable[..., Bound]:
    return bound


@pytest.fixture
def make_bounded() -> Callable[..., Path]:
    return bounded


@pytest.fixture
def make_assessment() -> Callable[..., Assessment]:
    return assessment


@pytest.fixture
def make_table() -> Callable[..., Assessment]:
    return table


@pytest.fixture
def make_training() -> Callable[..., Training]:
    return training


@pytest.fixture
def dp_sgd() -> DefenseInfo:
    """A defense of a record that claims differential privacy."""
    return DP_SGD


@pytest.fixture
def make_defense() -> Callable[..., DefenseInfo]:
    return defense


@pytest.fixture
def make_pictures() -> Callable[..., dict[str, str]]:
    return pictures


@pytest.fixture
def change() -> Callable[..., None]:
    return changed


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return save


@pytest.fixture
def make_captured() -> Callable[[Path], Path]:
    return captured


@pytest.fixture
def make_clinic() -> Callable[[Path], Path]:
    return clinic


@pytest.fixture
def make_grid() -> Callable[..., Path]:
    return grid


@pytest.fixture
def hostile() -> str:
    return HOSTILE


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page and unfold its sections; it must be silent and must ask for nothing else."""
    pages, trouble, requests = [], [], []

    def open_page(path: Path, anchor: str = "", *, folded: bool = False, **settings: Any) -> Any:
        page = browser.new_context(**{"viewport": TALL} | settings).new_page()
        page.on("console", lambda message: trouble.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri() + anchor)
        pages.append((page, path.as_uri()))
        filled = page.locator("script").count() and page.locator(".card").count()
        if settings.get("java_script_enabled", True) and filled:
            page.locator("html[data-whole]").wait_for(state="attached")
        if not folded:
            page.locator("details.fold").evaluate_all(
                "(all) => all.forEach((e) => (e.open = true))"
            )
        return page

    yield open_page
    for page, _ in pages:
        page.wait_for_timeout(100)
        page.context.close()
    assert trouble == []
    own = tuple(f"{address.rpartition('/')[0]}/pictures/" for _, address in pages)
    outside = [url for url in requests if not url.startswith(("data:", *own))]
    assert outside == [address for _, address in pages]
