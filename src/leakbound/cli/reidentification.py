"""`leakbound reidentify`: whose are the reconstructions of a run?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
from rich.markup import escape

from leakbound._util import user_code
from leakbound._util.text import printable
from leakbound.assess.reidentification import NEAREST, Matcher, embedded
from leakbound.audit.reidentification import reidentify_run
from leakbound.cli import options, shared
from leakbound.cli.terminal import brief, console


def reidentify(command: options.Reidentify) -> int:
    from leakbound import report as reports
    from leakbound.report import folder, sentences
    from leakbound.report.tables import SHOWN, RunSummary

    reports.check_installed()
    matcher: str | Matcher = command.matcher
    if command.embedding is not None:
        if command.matcher != NEAREST:
            raise ValueError(
                f"matcher is {command.matcher!r} and embedding {command.embedding!r}; give one"
            )
        embed = user_code.find("embedding", command.embedding)
        matcher = embedded(embed, command.embedding)
    with shared.Bar(console, "experiments") as bar:
        results = reidentify_run(
            command.folder,
            matcher,
            by_person=command.by_person,
            candidates=command.candidates,
            name=command.embedding,
            watch=partial(bar, current="is it this person?"),
        )
    run = folder.read(command.folder)
    # Only of this matcher, which the page shows beside others.
    own = [
        msgspec.structs.replace(a, reidentified=(results[a.experiment],))
        for a in run.assessments
        if a.experiment in results
    ]
    rows = RunSummary(replace(run, assessments=own)).configurations
    for line in sentences.is_it_this_person(rows, own[0].criterion)[:SHOWN]:
        console.print(f"- {escape(printable(line))}")
    page = reports.write(command.folder, images=run.info.pictures)
    console.say(f"report: {brief(page)}")
    return 0
