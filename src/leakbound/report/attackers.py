"""What an update adds for three attackers, in a sentence for each defense setting."""

from __future__ import annotations

from collections.abc import Sequence

from leakbound._util.formats import format_upper
from leakbound._util.groups import grouped
from leakbound.assess.record import Assessment, AttackerRow
from leakbound.report.sentences import NAME, shortened
from leakbound.report.tables import RunSummary

NOTHING = 0.99
"""From this gain on, nothing is excluded: the table says so."""
MOST = 3
"""Settings of which the first page says it; those that add the least come first."""


def attacker_sentences(summary: RunSummary) -> tuple[str, ...]:
    """One sentence a setting: stranger, intruder and anyone; the worst of all its experiments.

    Settings that exclude nothing, or have an experiment without a limit, are left out.

    Example:
        >>> from leakbound.assess.record import AttackerRow
        >>> stranger = AttackerRow(attacker="stranger", goal="20 dB", bound=0.02, gain=0.01)
        >>> anyone = AttackerRow(attacker="anyone", goal="any goal", gain=0.08)
        >>> sentence("noise 5", [stranger, anyone]).partition(". ")[2]
        'For anyone, whatever they know, one update adds 0.08 at most.'
    """
    names = summary.names
    gains = []
    ran = grouped((names.defense(a), a) for a in summary.assessments if a.status == "ok")
    for defense, some in ran.items():
        rows = [row for a in some for row in a.attackers]
        # What holds for one model does not hold for another that has no limit.
        if all(a.attackers for a in some) and max(row.gain for row in rows) < NOTHING:
            gains.append((max(row.gain for row in rows), sentence(defense, rows)))
    return tuple(said for _, said in sorted(gains))


def audience(assessments: Sequence[Assessment]) -> str:
    """Of whom the bounds of a run are: who has parts of the examples, or nothing of them."""
    return "intruder" if any(one.threat.known for one in assessments) else "stranger"


def sentence(defense: str, rows: Sequence[AttackerRow]) -> str:
    """What the rows of a setting's experiments say together."""
    of = grouped((row.attacker, row) for row in rows)
    said = []
    # Where a test doubts the public examples, only the row for anyone is there.
    of = {who: some for who, some in of.items() if len(some) == len(of["anyone"])}
    for row in _worst(of.get("stranger", ())):
        said.append(f"a stranger reaches {row.goal} with a probability of {_upper(row)}")
    for row in _worst(of.get("intruder", ())):
        said.append(
            f"who has {shortened(row.knows, NAME)} reaches {row.goal} of the rest with a "
            f"probability of {_upper(row)}"
        )
    gain = format_upper(max(row.gain for row in of["anyone"]))
    anyone = f"For anyone, whatever they know, one update adds {gain} at most."
    name = shortened(defense, NAME)
    # The table shows one model and batch size: its numbers are smaller.
    if any(len({(row.bound, row.gain) for row in some}) > 1 for some in of.values()):
        name += ", in the worst of its configurations"
    return f"{name}: {'; '.join(said)}. {anyone}" if said else f"{name}: {anyone}"


def _worst(rows: Sequence[AttackerRow]) -> list[AttackerRow]:
    return [max(rows, key=lambda row: row.bound or 0.0)] if rows else []


def _upper(row: AttackerRow) -> str:
    remarks = []
    limit = format_upper(row.bound)
    if row.attacker == "intruder" and row.without is not None and row.without >= 0.5:
        # Nearly unique values: no sample excludes that they determine the rest.
        limit = "1"
        remarks.append("public examples do not exclude that the known parts determine the rest")
    if row.measured is not None and row.from_measured is not None:
        remarks += [
            f"{row.measured.imputer}: {row.measured.matched} of {row.measured.total} without the "
            "update",
            f"if nobody completes more, {format_upper(row.from_measured)} at most with it",
        ]
    return f"{limit} at most ({'; '.join(remarks)})" if remarks else f"{limit} at most"
