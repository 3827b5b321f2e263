"""A section for a model card, in Markdown: what the sign-off page says, as text to be pasted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from leakbound._util.text import markdown
from leakbound.assess.record import GUESSABLE, RECOVERABLE
from leakbound.assess.verdict import meanings
from leakbound.report.evidence.parts import EvidenceReport, Subject
from leakbound.report.evidence.sign_off import chance
from leakbound.report.settings import SettingRow
from leakbound.report.tables import SHOWN
from leakbound.report.template import brief, decimal, lower_percent, plural

HEADS = ("Defense setting", "Verdict", "Examples reconstructed", "No attacker exceeds")
COST = "Accuracy lost"
UNIT = (
    "One example in one update of one client. A probability is an average over examples; it does "
    "not cover one given example."
)
READING = (
    "Each row is the worst over all models and batch sizes tested. Examples reconstructed: by the "
    "best attack, with a 95 % interval. No attacker exceeds: the probability that an example is "
    "reconstructed, by a theorem."
)


def card(content: EvidenceReport) -> str:
    """The section, one for each run. Texts of strangers, such as names, are escaped."""
    blocks = [block for one in content.subjects for block in _blocks(one, content.leakbound)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _blocks(subject: Subject, version: str) -> Iterator[str]:
    page = subject.sign_off
    again = subject.rerun
    yield f"## Reconstruction risk in training: {markdown(subject.name)}"
    yield f"**{markdown(page.answer)}** {markdown(page.advice)}"
    failed = [one for one in subject.checks if one.holds is False]
    yield _bullets([*(f"Does not hold: {c.words} ({c.detail})." for c in failed), *subject.notices])
    priors = [f"{one.name}: {one.prior}" for one in subject.bounded.theorems if one.covers_all]
    facts = {
        "Tested": page.tested,
        "Attacker": page.attacker,
        "Attacks": brief(list(dict.fromkeys(row.attack for row in subject.measured.attacks))),
        "Threshold": page.criterion,
        **({} if subject.training is None else {"Training": subject.training.says}),
        "Unit": UNIT,
        "Priors of the bounds": "; ".join(priors[:SHOWN]) or "no bound covers all attackers",
    }
    yield _table(("", ""), facts.items())
    rows = page.rows[:SHOWN]
    more = len(page.rows) - SHOWN
    heads = (*HEADS, COST) if subject.utility else HEADS
    yield markdown(READING + f" {plural(more, 'more setting')} in the annex." * (more > 0))
    yield _table(heads, (_result(row)[: len(heads)] for row in rows))
    words = meanings(truth_known=not subject.measured.captured)
    yield _bullets(f"{word}: {words[word]}" for word in dict.fromkeys(row.verdict for row in rows))
    yield "This does not cover:"
    yield _bullets(page.not_covered)
    made = [f"{name} {number}" for name, number in subject.provenance.versions.items()]
    made += [f"records of {page.date} (UTC)"] * bool(page.date)
    yield markdown(f"Made with {', '.join(made)}; written by leakbound {version}.")
    marks = f"plan {again.plan_hash}, SHA-256 of the records {again.records_sha256}"
    yield markdown(f"To repeat it ({'; '.join(filter(None, [marks, again.why_not]))}):")
    yield f"```sh\n{again.command}\n```"


def _result(row: SettingRow) -> tuple[str, ...]:
    measured = row.measured
    if row.attained and row.verdict in (RECOVERABLE, GUESSABLE):
        measured += f"; an attack can reach {lower_percent(row.attained)} or more"
    limits = [
        f"at most {chance(one.probability)} {one.condition}".strip() for one in row.told_limits
    ]
    if row.cost is not None:
        ends = [decimal(100 * end) for end in (row.cost.low, row.cost.high) if end is not None]
        between = " to ".join(ends) or "no interval"
        lost = f"{decimal(100 * row.cost.mean)} points ({between}, n = {row.cost.n})"
    elif row.undefended:
        lost = decimal(None)
    elif row.unskilled:
        lost = "unknown: the undefended training did not beat the majority class"
    else:
        lost = "not measured"
    return row.defense, row.verdict, measured, "; ".join(limits) or "not known", lost


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ("---",) * len(heads), *(map(markdown, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bullets(texts: Iterable[str]) -> str:
    return "\n".join(f"- {markdown(text)}" for text in texts)
