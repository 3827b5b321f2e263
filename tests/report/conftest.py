"""Run folders made up for the report: small, complete, with real PNG files."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
BLIND = 11.0
TALL = {"width": 1280, "height": 900}
DP_SGD = {
    "name": "dp_sgd",
    "parameters": {},
    "settings": "ClipExamples(clip_norm=2.0) → Mean() → GaussianMechanism(noise_multiplier=0.5)",
    "guarantee": "differential privacy",
    "data_dependent_law": False,
}


def defense(name: str, **parameters: Any) -> dict[str, Any]:
    settings = f"{name}({', '.join(f'{k}={v}' for k, v in parameters.items())})"
    known = "known noise distribution" if "noise" in name else "none"
    return {"name": name, "parameters": parameters, "settings": settings, "guarantee": known}


def cell(**changes: Any) -> dict[str, Any]:
    """One good record; keyword arguments replace its fields, `psnr` its values."""
    psnr = changes.pop("psnr", [31.0, 12.0])
    attack = changes.pop("attack", "inverting_gradients")
    record: dict[str, Any] = {
        "schema": 1,
        "attack": {"name": attack, "settings": f"GradientMatching({attack!r})", "hash": "ab" * 6},
        "defense": defense("none"),
        "model": {
            "name": "mlp",
            "parameters": {"hidden": [128]},
            "size": 101770,
            "train_steps": 0,
            "weights": None,
        },
        "data": {"source": "mnist5k", "shape": [1, 28, 28], "classes": 10},
        "batch_size": 2,
        "clients": 1,
        "seed": 0,
        "threat": {"labels_known": True, "defense_known": True, "server": "honest"},
        "status": "ok",
        "reason": None,
        "problem": None,
        "objective": {"start": 1.02, "end": 0.0003},
        "release": {"law": "Gaussian", "private": False, "withheld": 0.0},
        "metrics": {"psnr": psnr, "ssim": [0.5] * len(psnr), "identification": [1.0] * len(psnr)},
        "blind": {"psnr": [BLIND] * len(psnr)},
        "threshold": {"metric": "psnr", "value": 20.0},
        "bounds": [],
        "verdict": "exposed" if max(psnr) >= 20 else "undecided",
        "pictures": None,
    }
    record |= changes
    if record["status"] != "ok":
        record |= dict.fromkeys(("metrics", "blind", "objective", "release", "pictures"))
        record["verdict"] = "undecided" if record["status"] == "failed" else None
    whole = json.dumps(record, sort_keys=True).encode()
    return {"cell": hashlib.sha256(whole).hexdigest()[:16], **record}


def bound(psnr: float | None = 19.1, **changes: Any) -> dict[str, Any]:
    """A floor as records hold it; keyword arguments replace its fields."""
    return {
        "name": "trace",
        "value": 0.0 if psnr is None else 10 ** (-psnr / 10),
        "psnr": psnr,
        "prior": "N(mean, covariance) in 32 of 784 directions",
        "rests_on_prior": True,
        "covers": "all",
        "excludes_threshold": False,
        "on_average": psnr is not None and psnr < 20,
        "equation": "paper A, eq. (1)",
        "assumptions": ["the release's law is smooth in x"],
        "standard_error": 0.0004,
    } | changes


def training(
    given: dict[str, Any], seed: int, accuracy: float | None, **changes: Any
) -> dict[str, Any]:
    record = {
        "schema": 1,
        "model": cell()["model"],
        "defense": given,
        "seed": seed,
        "rounds": 30,
        "status": "failed" if accuracy is None else "ok",
        "reason": None if accuracy is not None else "RuntimeError: loss is NaN",
        "training_loss": 0.4,
        "accuracy": accuracy,
        **changes,
    }
    whole = json.dumps(record, sort_keys=True).encode()
    return {"unit": hashlib.sha256(whole).hexdigest()[:16], **record}


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
    records: list[dict[str, Any]],
    trainings: list[dict[str, Any]] | None = None,
    /,
    **header: Any,
) -> Path:
    """Write a run folder."""
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
        "cells": len(records),
        "own_data": False,
    }
    (folder / "run.json").write_text(json.dumps(run | header), encoding="utf-8")
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "records.jsonl").write_text(lines, encoding="utf-8")
    if trainings is not None:
        lines = "".join(json.dumps(record) + "\n" for record in trainings)
        (folder / "utility.jsonl").write_text(lines, encoding="utf-8")
    return folder


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
    cells, trainings = [], []
    for place, given in enumerate(defenses):
        clients = 2 if given["name"] == "secure_aggregation" else 1
        count, drop = batch_size * clients, [0, 1, 5, 14, 24, 2, 8, 18, 20, 4, 9][place]
        for turn, attack in enumerate(attacks):
            for seed in range(seeds):
                common = {"defense": given, "attack": attack, "seed": seed, "clients": clients}
                common["batch_size"] = batch_size
                rng = np.random.default_rng([place, turn, seed])
                if turn == 2 and place >= 8:
                    why = f"needs the gradient of one client {HOSTILE}"
                    cells.append(cell(**common, status="not_applicable", reason=why))
                    continue
                if turn == 1 and place == 3 and seed == 0:
                    why = f"RuntimeError: loss is NaN {HOSTILE}"
                    cells.append(cell(**common, status="failed", reason=why))
                    continue
                level = max(34 - drop - 4 * turn, 6)
                psnr = [round(float(v), 6) for v in level + rng.normal(0, 1.5, count)]
                bad = "objective did not fall: 1.02 to 1.01" if level < 10 else None
                files = pictures(folder, seed, count, 10 ** (-level / 20), 100 * place + turn, side)
                cells.append(cell(**common, psnr=psnr, problem=bad, pictures=files))
        accuracies = [0.9 - 0.02 * drop + 0.01 * s for s in range(3)]
        trainings += [training(given, s, round(a, 3)) for s, a in enumerate(accuracies)]
    return save(folder, cells, trainings)


def floored(folder: Path, *, seeds: int = 3, strengths: int = 4, hostile: str = "") -> Path:
    """An audit with floors, leak maps, private laws, training curves and every verdict."""
    folder.mkdir(exist_ok=True)
    prior = f"N(mean, covariance) in 32 of 784 directions{hostile}"
    stds = [round(0.003 * 10 ** (i / max(strengths - 1, 1) * 2), 6) for i in range(strengths)]
    defenses = [
        defense("none"),
        *(defense("gaussian_noise", noise_std=std) for std in stds),
        defense("adaptive_noise", budget=1.0) | {"data_dependent_law": True},
        defense("bounded_noise", level=2.0),
    ]
    cells, trainings = [], []
    for place, given in enumerate(defenses):
        noisy, strength = "gaussian" in given["name"], place / (strengths + 2)
        best = 34 - 28 * strength
        for turn, attack in enumerate(("inverting_gradients", "dlg")):
            for seed in range(seeds):
                level, rng = max(best - 3 * turn, 7), np.random.default_rng([place, seed])
                psnr = [round(float(v), 3) for v in level + rng.normal(0, 0.7, 2)]
                files = pictures(folder, seed, 2, 10 ** (-level / 20), 10 * place + turn)
                made = cell(defense=given, attack=attack, seed=seed, psnr=psnr, pictures=files)
                made["bounds_note"] = None
                if noisy:
                    top = 36 - 26 * strength + 0.1 * seed
                    made["bounds"] = [bound(top, prior=prior, assumptions=[f"one{hostile}"])]
                    made["pictures"]["leak_map"] = leak_map(folder, seed, 2, 1 - strength)
                    kept = {"first_order": None, "second_order": 0.01 * place}
                    made["release"] = made["release"] | {"utility": kept}
                    if made["verdict"] != "exposed" and made["bounds"][0]["on_average"]:
                        made["verdict"] = "protected on average"
                elif place:
                    made["bounds_note"] = f"the release has no Gaussian noise{hostile}"
                if given["name"] == "bounded_noise":
                    made["verdict"] = "protected"
                cells.append(made)
        for seed in range(2):
            rounds = [0, 5, 10, 20, 40, 60]
            losses = [2.3 - (2.1 - 1.5 * strength) * (1 - 0.93**r) + 0.02 * seed for r in rounds]
            curve = [[r, round(v, 4)] for r, v in zip(rounds, losses, strict=True)]
            kept = {"optimizer": f"adam{hostile}", "curve": curve}
            trainings.append(training(given, seed, round(0.9 - 0.5 * strength, 3), **kept))
    return save(folder, cells, trainings)


def leak_map(folder: Path, seed: int, count: int, scale: float) -> str:
    """A made-up leak map: bright in the middle."""
    grid = np.linspace(-1, 1, 28)
    x, y = np.meshgrid(grid, grid)
    shift = 0.1 * seed
    return strip(folder, np.stack([scale * np.exp(-3 * ((x - shift) ** 2 + y**2))] * count))


@pytest.fixture
def make_bound() -> Callable[..., dict[str, Any]]:
    return bound


@pytest.fixture
def make_floored() -> Callable[..., Path]:
    return floored


@pytest.fixture
def make_cell() -> Callable[..., dict[str, Any]]:
    return cell


@pytest.fixture
def make_training() -> Callable[..., dict[str, Any]]:
    return training


@pytest.fixture
def dp_sgd() -> dict[str, Any]:
    """A defense of a record that claims differential privacy."""
    return dict(DP_SGD)


@pytest.fixture
def make_defense() -> Callable[..., dict[str, Any]]:
    return defense


@pytest.fixture
def make_pictures() -> Callable[..., dict[str, str]]:
    return pictures


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return save


@pytest.fixture
def make_grid() -> Callable[..., Path]:
    return grid


@pytest.fixture
def hostile() -> str:
    return HOSTILE


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page; afterwards it must have been silent and must have asked for nothing else."""
    pages, trouble, requests = [], [], []

    def open_page(path: Path, anchor: str = "", **settings: Any) -> Any:
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
        return page

    yield open_page
    for page, _ in pages:
        page.wait_for_timeout(100)
        page.context.close()
    assert trouble == []
    own = tuple(f"{address.rpartition('/')[0]}/pictures/" for _, address in pages)
    outside = [url for url in requests if not url.startswith(("data:", *own))]
    assert outside == [address for _, address in pages]
