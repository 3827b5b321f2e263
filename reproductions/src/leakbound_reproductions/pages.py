"""The page of one reproduction: claims, findings and figures, as Markdown and as HTML."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from leakbound.cli import kit
from leakbound_reproductions import words
from leakbound_reproductions.claim import Claim, Finding
from leakbound_reproductions.outcome import SMALL
from leakbound_reproductions.results import Results

HEADS = ("finding", "paper", "measured", "95 % interval", "true if", "n", "verdict")
RULE = (
    "A finding holds if its 95 % interval lies where the statement is true (the tolerance). A "
    "claim holds if all its findings hold. A claim does not hold if one finding is excluded by an "
    "interval that allows for all findings of the claim (Bonferroni). Otherwise it is undecided. "
    "Intervals over seeds are Student's; with fewer than six seeds they assume normal differences. "
    "If all seeds tie at the limit of a tolerance, the finding is undecided. A number of draws (n: "
    "seeds or images) *might decide it* if the measured value were the true one."
)


def markdown(results: Results) -> str:
    """The page `results.md`."""
    about = results.about
    paper = results.about.paper
    lines = [
        f"# {paper.title}, reproduced",
        "",
        f"Paper {about.letter}: {paper}. Scale: `{results.scale}`.",
        "",
        results.outcome.settings,
        "",
        f"{tally(results)} {rule_of(results)}",
        "",
        *overview(results.outcome.claims),
        *details(results.outcome.claims),
        *pictures(results),
        *more(results),
        "",
        known(results),
    ]
    return "\n".join(lines) + "\n"


def rule_of(results: Results) -> str:
    """How the verdicts of a run follow from its findings."""
    small = f" At the scale {SMALL} no claim is refuted, except theorems and identities."
    return RULE + small * (results.scale == SMALL)


def tally(results: Results) -> str:
    """How many claims have which verdict, in a sentence.

    Undecided claims and those that cannot be tested are named too.
    """
    counts = results.counts()
    if not counts:
        return "No claim is judged: what claims rest on has not run."
    decided = counts.get("holds", 0) + counts.get("does not hold", 0)
    each = ", ".join(f"{word}: {n}" for word, n in counts.items())
    more = [f"{claim.number} {claim.verdict}" for claim in results.split()[1]]
    further = f" Further statements: {', '.join(more)}." if more else ""
    return f"{decided} of {sum(counts.values())} claims are decided ({each}).{further}"


def overview(claims: Iterable[Claim]) -> list[str]:
    """A table with one row per claim."""
    rows = [(c.number, c.statement, c.source, f"**{c.verdict}**{beside(c)}") for c in claims]
    return [*table(("claim", "the paper says", "where", "verdict"), rows), ""]


def beside(claim: Claim) -> str:
    """The marks of the verdict, in parentheses, as they follow it."""
    return words.verdict(claim).removeprefix(str(claim.verdict))


def details(claims: Iterable[Claim], level: int = 2) -> list[str]:
    """One section per claim, with its findings.

    Args:
        claims: all of them.
        level: of the headings.
    """
    lines = []
    for claim in claims:
        lines += [f"{'#' * level} {claim.number}: {claim.verdict}", ""]
        lines += [f"{claim.statement} ({claim.source})", ""]
        if claim.findings:
            lines += [f"Verdict: **{claim.verdict}** ({words.basis(claim)}).", ""]
            lines += [*table(HEADS, [row(finding) for finding in claim.findings]), ""]
        lines += [f"Tested: {ended(claim.scale)}", ""]
        if claim.why:
            lines += ["Remarks:", "", *(f"- {ended(one)}" for one in claim.why.split("\n")), ""]
    return lines


def ended(text: str) -> str:
    """The text with a period at its end.

    Example:
        >>> ended("one seed"), ended("One seed.")
        ('one seed.', 'One seed.')
    """
    return text if text.endswith(".") else f"{text}."


def row(finding: Finding) -> tuple[str, ...]:
    """A finding as a row of the table."""
    return (
        finding.statement,
        finding.paper or "no number",
        words.measured(finding),
        words.interval(finding.interval),
        words.region(finding.region),
        f"{finding.n:,}",
        f"{finding.verdict}{_more(finding)}",
    )


def _more(finding: Finding) -> str:
    """About how many draws would decide a finding that is open, in two digits."""
    needed = finding.needed
    return "" if needed is None else f"; n = {float(f'{needed:.2g}'):,.0f} might decide it"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table; bars in table cells are escaped.

    Example:
        >>> for line in table(("a", "b"), [("1", "2")]):
        ...     print(line)
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    heads = list(heads)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for cells in rows:
        safe = (cell.replace("|", r"\|").replace("\n", " ") for cell in cells)
        lines.append("| " + " | ".join(safe) + " |")
    return lines


def pictures(results: Results, base: str = "", level: int = 2) -> list[str]:
    """The figures with their captions.

    Args:
        results: whose figures.
        base: path of their folder, with a slash at its end.
        level: of the heading.
    """
    lines = [f"{'#' * level} Figures", ""] if results.outcome.figures else []
    for figure in results.outcome.figures:
        redrawn = f" Redrawn in the form of {figure.paper}." if figure.paper else ""
        lines += [
            f"![{figure.caption}]({base}{figure.file})",
            "",
            f"{ended(figure.caption)}{redrawn}",
            "",
        ]
    return lines


def more(results: Results) -> list[str]:
    """Links to further pages."""
    return [f"- [{Path(name).stem}]({name})" for name in results.outcome.pages]


def known(results: Results) -> str:
    """Versions and machine in a line."""
    versions = ", ".join(f"{name} {value}" for name, value in results.versions.items())
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    return f"Versions: {versions}. Machine: {machine}."


TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width"><title>{{ paper.title }}, reproduced</title>
<style>body{font:16px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em;
background:#fff;color:#000;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}th,td{padding:.3em .6em;text-align:left;
vertical-align:top;overflow-wrap:normal}
tr{border-bottom:1px solid #8884}img{max-width:100%;background:#fff}
.word{font-weight:bold;white-space:nowrap}section{margin-top:2em}tbody th{font-weight:normal}
.scroll{overflow-x:auto}:focus-visible{outline:2px solid;outline-offset:2px}main:focus{outline:0}
.hidden,.skip:not(:focus){position:absolute;width:1px;height:1px;margin:-1px;padding:0;
overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.skip:focus{position:fixed;top:.5em;left:.5em;padding:.5em;background:inherit}
@media print{.skip{display:none}.scroll{overflow:visible}}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#9cf}}</style></head>
<body><a class="skip" href="#content">Skip to the claims</a>
<header><h1>{{ paper.title }}, reproduced</h1></header><main id="content" tabindex="-1">
<p>Paper {{ results.about.letter }}: {{ paper }}. Scale: {{ results.scale }}.</p>
<p>{{ results.outcome.settings|plain }}</p><p>{{ tally }} {{ rule }}</p>
<div class="scroll" role="region" aria-label="Claims and verdicts" tabindex="0"><table>
<caption class="hidden">Claims and verdicts</caption><thead><tr><th scope="col">claim</th>
<th scope="col">the paper says</th><th scope="col">where</th><th scope="col">verdict</th>
</tr></thead><tbody>{% for claim in claims %}<tr>
<th scope="row"><a href="#c{{ claim.number }}">{{ claim.number }}</a></th>
<td>{{ claim.statement }}</td><td>{{ claim.source }}</td>
<td><span class="word">{{ claim.verdict }}</span>{{ beside(claim) }}</td>
</tr>{% endfor %}</tbody></table></div>
{% for claim in claims %}<section id="c{{ claim.number }}">
<h2>{{ claim.number }}: {{ claim.verdict }}</h2><p>{{ claim.statement }} ({{ claim.source }})</p>
{% if claim.findings %}<p>Verdict: <b>{{ claim.verdict }}</b> ({{ basis(claim) }}).</p>{% endif %}
<p>Tested: {{ ended(claim.scale)|plain }}</p>
{% if claim.why %}<p>Remarks:</p><ul>{% for one in claim.why.split("\n") %}
<li>{{ ended(one)|plain }}</li>{% endfor %}</ul>{% endif %}
{% if claim.findings %}{% set name = "Findings of claim " ~ claim.number %}
<div class="scroll" role="region" aria-label="{{ name }}" tabindex="0"><table>
<caption class="hidden">{{ name }}</caption>
<thead><tr>{% for head in heads %}<th scope="col">{{ head }}</th>{% endfor %}</tr></thead><tbody>
{% for finding in claim.findings %}<tr>{% for value in row(finding) %}
{% if loop.first %}<th scope="row">{{ value }}</th>{% else %}<td>{{ value }}</td>{% endif %}
{% endfor %}</tr>{% endfor %}</tbody></table></div>{% endif %}</section>{% endfor %}
{% for figure, data in figures %}<figure><img alt="{{ figure.caption }}" src="{{ data }}">
<figcaption>{{ ended(figure.caption) }}{% if figure.paper %}
Redrawn in the form of {{ figure.paper }}.{% endif %}</figcaption></figure>{% endfor %}
<p>{{ known }}</p></main></body></html>
"""


def html(results: Results, folder: Path) -> str:
    """The same as one HTML page that holds its figures and needs no network."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["plain"] = lambda text: text.replace("`", "")
    return environment.from_string(TEMPLATE).render(
        results=results,
        paper=results.about.paper,
        claims=results.outcome.claims,
        tally=tally(results),
        rule=rule_of(results),
        heads=HEADS,
        row=row,
        basis=words.basis,
        ended=ended,
        beside=beside,
        figures=[(figure, _embedded(folder / figure.file)) for figure in results.outcome.figures],
        known=known(results),
    )


def _embedded(path: Path) -> str:
    kind = {".svg": "svg+xml"}.get(path.suffix, "png")
    return f"data:image/{kind};base64,{base64.b64encode(kit.read(path)).decode()}"
