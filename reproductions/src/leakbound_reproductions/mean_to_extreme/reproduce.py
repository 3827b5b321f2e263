"""Measure paper C's claims at a scale; finished parts are stored in the folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from leakbound import data
from leakbound.audit.context import one_thread
from leakbound_reproductions.kept import Parts, note_data, page
from leakbound_reproductions.mean_to_extreme import (
    batch_mates,
    claims,
    copies,
    draws,
    figures,
    grid,
    rivals,
    tables,
    trap,
)
from leakbound_reproductions.mean_to_extreme.settings import SETTINGS, Setting
from leakbound_reproductions.outcome import Figure, Outcome, Tell

FURTHER = "further.md"
SIDE = 224
"""Pixels per side of figure 2's image."""


def reproduce(scale: str, folder: Path, *, workers: int, color: str, tell: Tell) -> Outcome:
    """Claims 3-1 to 3-9, IV.3 and IV.6; see `leakbound reproduce`.

    Args:
        scale: a name of `SETTINGS`.
        folder: for the parts, figures and pages.
        workers: not used; everything is drawn in this process.
        color: a data source of color images.
        tell: called as the run goes on.
    """
    run = _Run(SETTINGS[scale], Parts(folder / "parts"), folder, color, tell)
    with one_thread():
        boxes = run.boxes()
        measured = run.measured()
        found = [grid.Certificate(**row) for row in measured["certificates"]]
        pages = run.pages(found)
    return Outcome(
        claims.all_claims(measured, boxes),
        _figures(measured["rows"], boxes, found, run.picture(), folder),
        _settings(run.setting, color),
        pages,
    )


@dataclass(frozen=True)
class _Run:
    """One run and where it is stored."""

    setting: Setting
    parts: Parts
    folder: Path
    color: str
    tell: Tell

    def boxes(self) -> list[grid.Box]:
        """All boxes of figures 4 and 5."""
        found: list[grid.Box] = []
        total = len(trap.DIMS) * len(trap.KINDS)
        for dim in trap.DIMS:
            for kind in trap.KINDS:
                self.tell("figures 4 and 5", len(found) // len(trap.NOISES), total)
                kept = self.parts.once(f"boxes-{dim}-{_file(kind)}", self._boxes(dim, kind))
                found += [_box(one) for one in kept]
        self.tell("figures 4 and 5", total, total)
        return found

    def _boxes(self, dim: int, kind: str) -> Callable[[], list[dict[str, Any]]]:
        def make() -> list[dict[str, Any]]:
            records = self.records(dim, kind)
            repeats = self.setting.repeats
            return [asdict(grid.box(records, dim, kind, at, repeats)) for at in trap.NOISES]

        return make

    def records(self, dim: int, kind: str) -> trap.Records:
        """The images of a size, with the gradients of parameters other than the linear trap's."""
        size, channels = {4: (2, 1), 3072: (32, 3)}[dim]
        setting = self.setting
        source = data.load(self.color, size=size, channels=channels, limit=setting.tiles)
        note_data(self.folder, f"{self.color} {size} x {size} x {channels}", source)
        inputs = trap.images(source, setting.images)
        norms = self.parts.once(
            f"rest-{dim}-{_file(kind)}",
            lambda: trap.rest(inputs, kind, side=setting.side).tolist(),
        )
        return trap.Records(inputs, torch.tensor(norms, dtype=torch.float64))

    def measured(self) -> dict[str, Any]:
        """What the claims need in addition to the boxes."""
        setting = self.setting
        thousands = 1000 * setting.chances
        makers: dict[str, Callable[[], Any]] = {
            "rows": lambda: draws.rows(setting.rows),
            "limits": lambda: draws.limits(thousands // 5),
            "crossing": lambda: draws.crossing(thousands),
            "sightings": lambda: draws.sightings(setting.sighted),
            "batches": lambda: draws.batches(self.color, setting.trials),
            "company": lambda: batch_mates.errors(self.color, setting.trials),
            "certificates": lambda: [asdict(row) for row in grid.certificates(thousands // 10)],
        }
        found: dict[str, Any] = {}
        for name, make in makers.items():
            self.tell("claims 3-2 to 3-8", len(found), len(makers))
            found[name] = self.parts.once(name, make)
        self.tell("claims 3-2 to 3-8", len(makers), len(makers))
        return found | {"rivals": self.rivals()}

    def picture(self) -> torch.Tensor:
        """The image of figure 2, in the paper's size."""
        source = data.load(self.color, size=SIDE, channels=3, limit=1)
        note_data(self.folder, f"{self.color} {SIDE} x {SIDE} x 3", source)
        image: torch.Tensor = source.inputs[0].double()
        return image

    def rivals(self) -> dict[str, dict[str, list[float | None]]]:
        """Errors by noise and attack (claims 3-9 and IV.3)."""
        bench = rivals.bench_of(self.setting, self.color)
        note_data(self.folder, bench.spec.source, bench.dataset)
        jobs = [(at, name) for at in rivals.NOISES for name in (rivals.OURS, rivals.ZERO)]
        jobs += [(at, name) for at in rivals.NOISES[:2] for name in rivals.RIVALS]
        found: dict[str, dict[str, list[float | None]]] = {}
        for number, (at, name) in enumerate(jobs):
            self.tell("attacks of claim 3-9", number, len(jobs))
            found.setdefault(repr(at), {})[name] = self.parts.once(
                f"attack-{at}-{_file(name)}",
                partial(rivals.errors, name, at, self.setting, bench),
            )
        self.tell("attacks of claim 3-9", len(jobs), len(jobs))
        return found

    def pages(self, promised: list[grid.Certificate]) -> tuple[str, ...]:
        """Further tables, which no claim needs."""
        lines = tables.certificates(promised)
        if self.setting.more:
            self.tell("further tables", 0, 2)
            edges = self.parts.once("edges", lambda: asdict(grid.beaten(self._all_records())))
            self.tell("further tables", 1, 2)
            copied = self.parts.once("copies", lambda: [asdict(row) for row in copies.compared()])
            lines += tables.edges(grid.Beaten(**edges))
            lines += tables.noisy_copies([copies.Copied(**row) for row in copied])
            self.tell("further tables", 2, 2)
        page(self.folder / FURTHER, lines)
        return (FURTHER,)

    def _all_records(self) -> grid.Found:
        return {(d, kind): self.records(d, kind) for d in trap.DIMS for kind in trap.KINDS}


def _box(kept: dict[str, Any]) -> grid.Box:
    pairs = {name: tuple(kept[name]) for name in ("quantiles", "excess", "raised", "spreads")}
    return grid.Box(**kept | pairs)


def _file(name: str) -> str:
    return name.lower().replace(" ", "-")


def _figures(
    rows: dict[str, list[float]],
    boxes: list[grid.Box],
    promised: list[grid.Certificate],
    picture: torch.Tensor,
    folder: Path,
) -> tuple[Figure, ...]:
    figures.calibration(folder)
    figures.rows(rows, folder)
    figures.pictured(picture, folder)
    figures.surface(folder)
    figures.certificates(promised, folder)
    for dim in trap.DIMS:
        figures.boxes(boxes, dim, folder)
    return (
        Figure(
            "noise_over_eta.png",
            "Noise for a risk of 10 % against eta: paper C, identification and gamma*.",
            "figure 1",
        ),
        Figure(
            "rows_pictured.png",
            "An image of 224 x 224 pixels, read from one row and from 1,000, at noise 0.0005 and "
            "clip norm 5,000; PSNR by rows.",
            "figure 2",
        ),
        Figure(
            "trap_rows.png",
            "Variance of the reconstruction relative to its minimum, by rows of the linear trap, "
            "at C / |X| = 5, as in the caption of figure 2.",
        ),
        Figure("risk_surface.png", "The risk by noise and eta.", "figure 3"),
        Figure(
            "errors_4.png",
            "Errors of gray 2 x 2 tiles against noise, without and with other parameters. The "
            "bands are 50 % and 95 % of the distribution.",
            "figure 4",
        ),
        Figure("errors_3072.png", "The same for color tiles of 32 x 32.", "figure 5"),
        Figure(
            "certificates.png",
            "What corollary IV.6 promises (dotted), what an attacker who knows the norm reaches "
            "(points), and gamma* (lines).",
        ),
    )


def _settings(setting: Setting, color: str) -> str:
    attacked = f"{color} of 32 x 32" if setting.color_attacked else "MNIST"
    return (
        f"{setting.images} images of `{color}` for the distributions (gray 2 x 2, N = 4, and "
        f"color 32 x 32, N = 3,072; norm {trap.NORM}, clip norm {trap.CLIP:g}); the paper uses "
        f"CIFAR-10. ResNet-18 with group norm on {setting.side} x {setting.side} pixels replaces "
        f"its ResNet-101. MNIST for rows and sightings; {setting.attacked} images of {attacked} "
        f"under all attacks (DLG {rivals.DLG_STEPS} steps, Inverting Gradients {setting.steps} "
        f"steps, {setting.restarts} starts)."
    )
