"""What `leakbound report` does; without torch, which takes seconds and 200 MB to import."""

from __future__ import annotations

from leakbound.cli import options
from leakbound.cli.terminal import brief, console


def report(command: options.Report) -> int:
    from leakbound import report as reports

    page = reports.write(command.folder, images=not command.no_examples)
    console.say(f"report: {brief(page)}")
    return 0
