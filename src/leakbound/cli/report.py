"""What `leakbound report` does; without torch, which takes seconds and 200 MB to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leakbound.cli.terminal import brief, console

if TYPE_CHECKING:
    from leakbound.cli import options


def report(command: options.Report) -> int:
    """Write a run's report again."""
    from leakbound import report as reports

    page = reports.write(command.folder, images=not command.no_images)
    console.print(f"report: {brief(page)}", soft_wrap=True)
    return 0
