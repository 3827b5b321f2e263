"""What an update adds for three attackers, in a sentence for each defense setting."""

from __future__ import annotations

from collections.abc import Sequence

from leakbound._util.formats import format_upper
from leakbound._util.groups import grouped
from leakbound.assess.record import Assessment, AttackerRow
from leakbound.report.tables import RunSummary

MOST = 3
"""Settings of which the first page says it; those that add the least come first."""


def attacker_sentences(summary: RunSummary) -> tuple[str, ...]:
    """One sentence a setting: stranger, intruder and anyone; the worst of all its experiments.

    Example:
        >>> from leakbound.assess.record import AttackerRow
        >>> stranger = AttackerRow(attacker="stranger", goal="20 dB", bound=0.02, gain=0.01)
        >>> anyone = AttackerRow(attacker="anyone", goal="any goal", gain=0.08)
        >>> sentence("noise 5", [stranger, anyone]).partition(". ")[2]
        'For anyone, whatever they know, one update adds 0.08 at most.'
    """
    names = summary.names
    rows = grouped((names.defense(a), row) for a in summary.assessments for row in a.attackers)
    least = sorted(rows.items(), key=lambda pair: max(row.gain for row in pair[1]))
    return tuple(sentence(defense, known) for defense, known in least)


def audience(assessments: Sequence[Assessment]) -> str:
    """Of whom the bounds of a run are: who has parts of the examples, or nothing of them."""
    return "intruder" if any(one.threat.known for one in assessments) else "stranger"


def sentence(defense: str, rows: Sequence[AttackerRow]) -> str:
    """What the rows of a setting's experiments say together."""
    of = grouped((row.attacker, row) for row in rows)
    said = []
    for row in _worst(of.get("stranger", ())):
        said.append(f"a stranger reconstructs {row.goal} with a probability of {_upper(row)}")
    for row in _worst(of.get("intruder", ())):
        said.append(
            f"who has {row.knows} reconstructs {row.goal} of the rest with a probability of "
            f"{_upper(row)}{_measured(row)}"
        )
    gain = format_upper(max(row.gain for row in of["anyone"]))
    anyone = f"For anyone, whatever they know, one update adds {gain} at most."
    return f"{defense}: {'; '.join(said)}. {anyone}" if said else f"{defense}: {anyone}"


def _worst(rows: Sequence[AttackerRow]) -> list[AttackerRow]:
    return [max(rows, key=lambda row: row.bound or 0.0)] if rows else []


def _upper(row: AttackerRow) -> str:
    if row.bound is not None and row.bound >= 0.5:
        # Nearly unique values: no sample excludes that they determine the rest.
        return "1 at most (public examples do not exclude that the known parts determine the rest)"
    return f"{format_upper(row.bound)} at most"


def _measured(row: AttackerRow) -> str:
    if row.measured is None or row.from_measured is None:
        return ""
    return (
        f" ({row.measured.imputer}: {row.measured.matched} of {row.measured.total} without the "
        f"update; if nobody completes more, {format_upper(row.from_measured)} at most with it)"
    )
