"""Measure the claims of paper E at a scale; finished seeds are stored in the folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from leakbound import data
from leakbound.audit.context import one_thread
from leakbound_reproductions.kept import Parts, note_data, page
from leakbound_reproductions.outcome import Outcome, Tell
from leakbound_reproductions.practical_feasibility import claims, study

SCALES = {"minutes": (2, 40), "cpu": (2, 120), "paper": (12, 1000)}
"""Seeds and attack steps."""
TABLE = "configurations.md"


def reproduce(scale: str, folder: Path, *, workers: int, color: str, tell: Tell) -> Outcome:
    """Claims 5-1 to 5-8; see `leakbound reproduce`.

    Args:
        scale: a name of `SCALES`.
        folder: for the finished seeds and the table of all configurations.
        workers: not used; everything runs in this process.
        color: not used; the images are digits.
        tell: called as the run goes on.
    """
    seeds, steps = SCALES[scale]
    note_data(folder, "digits", data.load("digits"))
    parts = Parts(folder / "parts")
    found = []
    with one_thread():
        for seed in range(2 * seeds):
            cells = study.cells() if seed < seeds else study.repeated()
            make = partial(_seed, cells, seed, steps, tell)
            found.append(parts.once(f"seed-{seed}", make))
    results = {}
    for cell in study.cells():
        rounds = [own[study.name(cell)] for own in found if study.name(cell) in own]
        results[cell] = claims.Scores(*([own[k] for own in rounds] for k in range(2)))
    page(folder / TABLE, claims.table(results))
    return Outcome(claims.all_claims(results), (), _settings(seeds, steps), (TABLE,))


def _seed(
    cells: list[study.Cell], seed: int, steps: int, tell: Tell
) -> dict[str, tuple[float, float]]:
    found = {}
    for number, cell in enumerate(cells):
        tell(f"seed {seed}", number, len(cells))
        found[study.name(cell)] = study.score(cell, seed, steps)
    tell(f"seed {seed}", len(cells), len(cells))
    return found


def _settings(seeds: int, steps: int) -> str:
    return (
        f"{len(study.cells())} configurations on scikit-learn's digits (8 x 8, gray), each with "
        f"{seeds} seeds (twice as many for the designs of claims 5-2 and 5-7). Weights, batch and "
        "start are drawn anew for each seed, design, batch size and kind of weights; modes, "
        "dropout and knowledge are compared on the same draws. The rules were written after a "
        "pilot on other images. Small networks with GELU and 8 x 8 images replace the "
        "paper's vision models. There are residual networks with batch norm (1 or 3 blocks of 32 "
        "or 8 channels, with or without skip connections, norm and activation before or after each "
        "convolution). A ConvNeXt and a transformer have 3 blocks. Batches of 1 and 4; random "
        f"weights, and weights after {study.TRAINED} steps of Adam on public images. One attack "
        f"everywhere: gradient matching (cosine, signed Adam, total variation 1e-4, {steps} steps, "
        "one start, labels known), which simulates training mode with the statistics of its own "
        f"candidate. A success is an image of at least {study.MATCHED:g} dB PSNR."
    )
