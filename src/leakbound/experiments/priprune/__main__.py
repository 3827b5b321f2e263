"""Run the study of paper D: `python -m leakbound.experiments.priprune [--scale NAME]`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from leakbound.experiments.priprune import page, run
from leakbound.experiments.priprune.study import Study


def main() -> None:
    """Run what is not done yet, draw, and write results.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scale", default="two_cores", help="two_cores, minutes, paper, or the path of a plan"
    )
    parser.add_argument("--parts", default="", help="only these parts, between commas")
    parser.add_argument("--data", default="", help="another data source, such as zip:PATH")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0 takes one a core")
    parser.add_argument("--out", type=Path, default=Path("runs/priprune"))
    given = parser.parse_args()
    try:
        study = Study.read(given.scale, given.data)
        parts = [name for name in given.parts.split(",") if name]
        cells = study.cells(parts)
        found = run.records(cells, given.out, given.workers or os.cpu_count() or 1)
    except KeyboardInterrupt:
        raise SystemExit("stopped; run the same command again to go on") from None
    except (ValueError, OSError) as error:
        raise SystemExit(f"leakbound: {error}") from None
    print(f"results: {page.write(study, cells, found, given.out)}")


if __name__ == "__main__":
    main()
