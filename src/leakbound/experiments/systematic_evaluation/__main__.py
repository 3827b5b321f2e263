"""Run it: `python -m leakbound.experiments.systematic_evaluation theory [--out DIR] [--quick]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from leakbound.experiments.systematic_evaluation.theory import study


def main() -> None:
    """Measure, draw, and write the results' page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("theory",))
    parser.add_argument("--out", type=Path, default=Path("runs/systematic_evaluation"))
    parser.add_argument("--quick", action="store_true", help="few widths and seeds")
    given = parser.parse_args()
    try:
        found = study(given.out, quick=given.quick)
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {given.out}", file=sys.stderr)
        raise SystemExit(130) from None
    for claim in found:
        print(f"{claim.number} {claim.word}: {claim.statement}")
    print(f"results: {given.out / 'theory.md'}")


if __name__ == "__main__":
    main()
