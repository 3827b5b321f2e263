"""What `leakbound attack --update model.json --kind xgboost` does: a client's trees."""

from __future__ import annotations

import json
import math
from typing import Any

from leakbound import trees
from leakbound.captured.capture import BEFORE
from leakbound.cli import options
from leakbound.cli.shared import plural, write_files
from leakbound.cli.terminal import brief, console, table
from leakbound.trees import LeafCount, Revealed, TreeMeasure

SHOWN = 12
"""Features and leaves on the screen; --json and --out have all of them."""


def attack(command: options.AttackOptions) -> int:
    if (path := command.update) is None:
        raise ValueError("--kind xgboost needs a model; give --update model.json")
    options.refuse_unused(command, options.OF_TREES)
    after = trees.read(path)
    before = command.before
    if before is None and path.suffix == ".safetensors" and (path.parent / BEFORE).is_file():
        before = path.parent / BEFORE
    received = None if before is None else trees.read(before)
    seen = trees.revealed(after, received, eta=command.learning_rate)
    measure = None
    if command.truth is not None:
        public = None if command.public is None else trees.load_rows(command.public, after)
        measure = trees.measured(seen, trees.load_rows(command.truth, after), public)
    record = json.dumps(_record(seen, measure), indent=1, allow_nan=False)
    if command.json:
        print(record)
    else:
        _show(path.name, seen, measure)
    if command.out is not None:
        write_files(command.out, {"trees.json": record.encode()})
    return 0


def _record(seen: Revealed, measure: TreeMeasure | None) -> dict[str, Any]:
    """What was found, as JSON has it."""
    shares = measure.shares if measure else {}
    return {
        "trees": len(seen.trees),
        "trees_before": len(seen.before),
        "objective": seen.model.objective,
        "eta": seen.eta,
        "lambda": seen.reg_lambda,
        # By their text: a float32 gains digits when it becomes a double.
        "thresholds": {
            seen.model.name(j): [float(str(x)) for x in t] for j, t in seen.thresholds.items()
        },
        "leaves": [
            {
                "tree": leaf.tree,
                "rows": leaf.rows,
                "targets": leaf.targets,
                "region": _region(seen, leaf),
            }
            for leaf in seen.counts
        ],
        "measured": {
            what: {"hits": s.hits, "n": s.n, "share": s.value, "interval_95": s.interval}
            for what, s in shares.items()
        },
        "notes": seen.notes,
    }


def _region(seen: Revealed, leaf: LeafCount) -> list[str]:
    """A leaf's region in words: one condition for each feature."""
    conditions = []
    for j, (low, high) in seen.trees[leaf.tree].region(leaf.leaf).items():
        least = "" if low == -math.inf else f"{low:.7g} <= "
        conditions.append(
            f"{least}{seen.model.name(j)}" + ("" if high == math.inf else f" < {high:.7g}")
        )
    return conditions


def _show(
    name: str,
    seen: Revealed,
    measure: TreeMeasure | None,
) -> None:
    console.say(
        f"[bold]{brief(name)}[/bold]: {plural(len(seen.trees), 'tree')} of the client, "
        f"{len(seen.before)} received before; {brief(seen.model.objective or 'objective unknown')}"
    )
    shown = table("feature", right=["distinct thresholds", "lowest", "highest"])
    ordered = sorted(seen.thresholds.items(), key=lambda pair: -len(pair[1]))
    for j, t in ordered[:SHOWN]:
        shown.add_row(brief(seen.model.name(j)), str(len(t)), f"{t[0]:.7g}", f"{t[-1]:.7g}")
    console.print(shown)
    if seen.counts:
        shown = table("region of a leaf", right=["tree", "rows if weight 1", "targets"])
        for leaf in seen.counts[:SHOWN]:
            targets = "unknown" if leaf.targets is None else f"{leaf.targets:.7g}"
            words = brief(", ".join(_region(seen, leaf)) or "all rows")
            shown.add_row(words, str(leaf.tree), str(leaf.rows), targets)
        console.print(shown)
    console.print(
        f"thresholds of {plural(len(ordered), 'feature')}, rows of {len(seen.counts)} leaves; "
        "--json prints all of them"
    )
    for note in seen.notes:
        console.say(f"note: {brief(note)}")
    if measure is None:
        console.print("To measure what is known of the rows, give --truth and --public.")
        return
    shown = table("measured with the truth", right=["share", "95 % interval", "n"])
    for what, share in measure.shares.items():
        low, high = share.interval
        shown.add_row(what, f"{share.value:.3f}", f"{low:.3f} to {high:.3f}", str(share.n))
    console.print(shown)
    console.print(
        "For the share of entries known, give --public: other rows of the same kind."
        if measure.entries is None
        else "Entries and rows known: if the leaf of each row is known, as to an auditor. For "
        "attackers this is an upper bound."
    )
