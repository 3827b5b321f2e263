"""Run your own plan, or some parts: `python -m leakbound_reproductions.priprune --scale PLAN`.

The built-in plans run by `leakbound reproduce priprune`, which judges the claims as well.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from leakbound_reproductions.outcome import SMALL
from leakbound_reproductions.priprune import page, run
from leakbound_reproductions.priprune.study import Study


def main() -> None:
    """Run what is not done yet, draw, and write tables.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", default="cpu", help="the path of a plan, or a built-in one")
    parser.add_argument("--parts", default="", help="only these parts, between commas")
    parser.add_argument("--data", default="", help="another data source, such as zip:PATH")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0 takes one a core")
    parser.add_argument("--out", type=Path, default=Path("runs/priprune"))
    given = parser.parse_args()
    try:
        study = Study.read(given.scale, given.data)
        parts = [name for name in given.parts.split(",") if name]
        cells = study.cells(parts)
        with Progress(console=Console(stderr=True)) as progress:
            bar = progress.add_task("cells", total=len(cells))
            found = run.records(
                cells,
                given.out,
                given.workers or os.cpu_count() or 1,
                lambda _, done, total: progress.update(bar, completed=done, total=total),
            )
    except KeyboardInterrupt:
        raise SystemExit("stopped; run the same command again to go on") from None
    except (ValueError, OSError) as error:
        raise SystemExit(f"leakbound: {error}") from None
    print(f"results: {page.write(study, cells, found, given.out, small=given.scale == SMALL)}")


if __name__ == "__main__":
    main()
