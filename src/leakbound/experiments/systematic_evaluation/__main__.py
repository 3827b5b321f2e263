"""Run it: `python -m leakbound.experiments.systematic_evaluation {theory,evaluation}`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from leakbound.experiments.systematic_evaluation.evaluation import evaluate
from leakbound.experiments.systematic_evaluation.parts import SCALES
from leakbound.experiments.systematic_evaluation.theory import study


def main() -> None:
    """Measure, draw, and write the results' page."""
    parser = argparse.ArgumentParser(description=__doc__)
    ways = parser.add_subparsers(dest="part", required=True)
    theory = ways.add_parser("theory", help="the two-layer network: orders, floors, claims")
    theory.add_argument("--quick", action="store_true", help="few widths and seeds")
    tables = ways.add_parser("evaluation", help="attacks against defenses: tables 2 and 4 to 6")
    tables.add_argument("--scale", choices=SCALES, default="ten_minutes")
    tables.add_argument("--color", default="photos", help="32 x 32 color images, any data source")
    tables.add_argument("--workers", type=int, default=2)
    tables.add_argument("--device", default="cpu", help="cpu, or cuda for a GPU")
    for way in (theory, tables):
        way.add_argument("--out", type=Path, default=Path("runs/systematic_evaluation"))
    given = parser.parse_args()
    page = given.out / f"{given.part}.md"
    try:
        if given.part == "theory":
            found = study(given.out, quick=given.quick)
        else:
            found = evaluate(
                given.out,
                scale=given.scale,
                color=given.color,
                workers=given.workers,
                device=given.device,
            )
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {given.out}", file=sys.stderr)
        raise SystemExit(130) from None
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    for claim in found:
        print(f"{claim.number} {claim.word}: {claim.statement}")
    print(f"results: {page}")


if __name__ == "__main__":
    main()
