"""Run the study: `python -m leakbound.experiments.mean_to_extreme [--out DIR]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from leakbound.audit.bench import one_thread
from leakbound.experiments.mean_to_extreme import claims, copies, figures, grid, trap


def main() -> None:
    """Measure, draw, and write results.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/mean_to_extreme"))
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    with one_thread():
        _tell("gradients of 500 images beside three models")
        records = grid.gather()
        _tell("figures 4 and 5")
        rows = grid.boxes(records)
        _tell("certificates")
        promised = grid.certificates()
        _tell("attacks against edges")
        beaten = grid.beaten(records)
        _tell("claims")
        found = _claims(rows, records)
        _tell("noisy copies")
        copied = copies.compared()
    _tell("figures")
    figures.calibration(folder)
    figures.surface(folder)
    figures.certificates(promised, folder)
    for dim in trap.DIMS:
        figures.boxes(rows, dim, folder)
    page = folder / "results.md"
    text = [*_head(found), *_promises(promised), *_edges(beaten), "", *_copies(copied)]
    page.write_text("\n".join(text) + "\n", encoding="utf-8")
    print(f"results: {page}")


def _claims(
    rows: Sequence[grid.Row], records: dict[tuple[int, str], trap.Records]
) -> list[claims.Claim]:
    found = claims.of_boxes(rows)
    found += [claims.rows_of_trap(), *claims.limits(), claims.sightings()]
    found += [claims.batches(records[3072, "optimal"]), claims.other_attacks()]
    return sorted(found, key=lambda claim: claim.number)


def _head(found: Sequence[claims.Claim]) -> list[str]:
    lines = [
        "# From mean to extreme: what was claimed and what was measured",
        "",
        f"{trap.IMAGES} tiles of photographs, gray 2 x 2 (N = 4) and color 32 x 32 (N = 3,072), "
        f"scaled to norm {trap.NORM}; clip norm 1, one trap row.",
        "",
        "| claim | statement | measured | verdict |",
        "|---|---|---|---|",
    ]
    for claim in found:
        cells = (claim.number, claim.statement, claim.measured, claim.word)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _promises(rows: Sequence[grid.Certificate]) -> list[str]:
    lines = [
        "",
        "## The certificate and who beats it",
        "",
        "At the eta of which paper C says that at most the promised share of reconstructions is "
        "below it: how often the estimator that knows the norm is, in uniform directions.",
        "",
        "| N | noise multiplier | promised | measured | gamma* | no attacker exceeds |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.dim} | {row.noise:g} | {row.promised:g} | {row.hits} of {row.n} | "
            f"{row.exact:.4g} | {row.upper:.4g} |"
        )
    broken = sum(row.hits / row.n > row.promised * 1.1 for row in rows)
    lines += ["", f"Beaten by more than a tenth in {broken} of {len(rows)} settings."]
    return lines


def _edges(found: grid.Beaten) -> list[str]:
    lines = [
        "",
        "## Does an attack beat the edge that covers it?",
        "",
        f"{found.compared} comparisons with gamma*, {len(found.above)} above it by more than "
        f"{grid.TOLERANCE:g} standard errors; the largest {found.worst:.2f}.",
    ]
    return lines + [f"- {line}" for line in found.above]


def _copies(rows: Sequence[copies.Copied]) -> list[str]:
    return [
        "## A noisy copy of each record, or fresh noise in each round",
        "",
        "SimpleConvNet on MNIST, 4 clients x 16 images, Adam; the risk is the probability of 20 dB "
        "that no attacker exceeds, for a uniform direction and the least norm of the data. Images "
        "are no uniform directions: where a model learns to read the copies, so may an attacker.",
        "",
        *copies.table(rows),
    ]


def _tell(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    main()
