"""Run folders made up for the report: small, complete, with real PNG files."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
BLIND = 11.0


def defense(name: str, **parameters: Any) -> dict[str, Any]:
    settings = f"{name}({', '.join(f'{k}={v}' for k, v in parameters.items())})"
    known = "known release law" if "noise" in name else "none"
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


def training(given: dict[str, Any], seed: int, accuracy: float | None) -> dict[str, Any]:
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


@pytest.fixture
def make_cell() -> Callable[..., dict[str, Any]]:
    return cell


@pytest.fixture
def make_training() -> Callable[..., dict[str, Any]]:
    return training


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
