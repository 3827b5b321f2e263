"""Malformed files for every format that leakbound reads.

    python tests/fuzz --seconds 3600 --seed 1       # or `make fuzz`

Each file is a valid one with some mutations. Reading it may succeed, or raise what the command line
turns into one line (ValueError, OSError, "not applicable"). Anything else is a fault: another
exception, a warning from a library, more than SECONDS. The input of a fault is kept in --keep.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from targets import TARGETS, fuzz


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--seconds", type=float, default=60.0, help="how long")
    options.add_argument("--seed", type=int, default=0, help="names the inputs")
    options.add_argument("--only", choices=sorted(TARGETS), help="one format")
    options.add_argument("--keep", type=Path, help="folder for inputs that fail")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(Path(folder), given.seconds, given.seed, given.only, given.keep)
    for fault in found.faults:
        print(f"\n{fault.target}, input {fault.number}:\n{fault.trace}")
    total = sum(found.counts.values())
    each = ", ".join(f"{name} {found.counts[name]} ({found.read[name]})" for name in found.counts)
    print(f"{total} inputs, {len(found.faults)} faults; inputs (that were read): {each}")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
