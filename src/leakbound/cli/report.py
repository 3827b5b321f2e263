"""What `leakbound report` does; without torch, which takes seconds and 200 MB to import."""

from __future__ import annotations

from leakbound.cli import options
from leakbound.cli.terminal import brief, console


def report(command: options.Report) -> int:
    from leakbound import report as reports

    if command.log is not None:
        from leakbound import loggers

        loggers.check_installed(command.log)
    page = reports.write(command.folder, images=not command.no_examples)
    console.say(f"report: {brief(page)}")
    if command.log is not None:
        console.say(f"logged: {command.log} run {loggers.LOGGERS[command.log](command.folder)}")
    return 0
