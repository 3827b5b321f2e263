"""What the bounds on an update rest on, as `leakbound attack` shows it."""

from __future__ import annotations

from collections.abc import Sequence

from leakbound.assess.record import ESTIMATE, Bound
from leakbound.cli.terminal import brief, console, safe


def show_scope(bounds: Sequence[Bound], *, explain: bool) -> None:
    """What the bounds rest on; without `explain` only where to find it."""
    if not bounds:
        return
    if not explain:
        covers = ", ".join(dict.fromkeys(map(_covered, bounds)))
        priors = "; ".join(dict.fromkeys(bound.prior for bound in bounds))
        console.print(
            f"[dim]bounds cover: {covers}; prior: {brief(priors)}; unit: one update of this batch. "
            "Assumptions: --explain[/dim]"
        )
        return
    for bound in bounds:
        source = f" \\[{safe(bound.equation)}]" if bound.equation else ""
        console.print(
            f"[bold]{safe(bound.name)}[/bold]: covers {_covered(bound)}; prior: "
            f"{safe(bound.prior)}; unit: one update of this batch{source}"
        )
        for assumption in bound.assumptions:
            console.print(f"  - {safe(assumption)}")


def _covered(bound: Bound) -> str:
    return "nothing (an estimate)" if bound.covers == ESTIMATE else f"{bound.covers} attackers"
