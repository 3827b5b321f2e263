"""Which rounds of a training were attacked, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from leakbound.assess.record import Assessment
from leakbound.report.folder import Run
from leakbound.report.tables import SHOWN, Names, grouped
from leakbound.report.template import brief, plural


def attacked_rounds(run: Run, names: Names) -> list[str]:
    """One sentence for each defense that was attacked in a later round than the first.

    Of one that had no effect in the attacked round, the sentence says so.
    """
    ran = [a for a in run.assessments if a.release is not None and a.release.round is not None]
    chosen = run.info.plan.get("round") is not None
    by_defense = grouped((names.defense(a), a) for a in ran)
    said = [_sentence(defense, own, chosen) for defense, own in by_defense.items()]
    found = [text for text in said if text]
    more = [f"{plural(len(found) - SHOWN, 'more defense')}: see the records."]
    return found[:SHOWN] + more * (len(found) > SHOWN)


def _sentence(defense: str, own: Sequence[Assessment], chosen: bool) -> str:
    releases = [a.release for a in own if a.release is not None]
    rounds = sorted({release.round for release in releases if release.round is not None})
    idle = sum(not release.effective for release in releases)
    if rounds == [1] and not idle:
        return ""
    first = rounds[0]
    last = rounds[-1]
    where = f"round {first}" if first == last else f"rounds {first} to {last}"
    text = f"{brief(defense)} was attacked in {where} of a training"
    if not chosen:
        return (
            f"{text}, the first in which it has an effect. Earlier rounds have no protection. "
            f"Other defenses were attacked in round 1; `round = {last}` in the plan attacks this "
            "round of all."
        )
    if idle:
        return f"{text}. It had no effect yet in {idle} of {plural(len(releases), 'experiment')}."
    return f"{text}. No other round was tested."
