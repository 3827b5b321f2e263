"""The command line. Heavy imports happen inside the commands."""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, subcommand

from leakbound.options import (
    Attack,
    Audit,
    Bound,
    Calibrate,
    Capture,
    Compare,
    Evidence,
    List,
    Report,
    Reproduce,
    Train,
)
from leakbound.text import printable

USAGE, FAILED, STOPPED = 2, 1, 130
TOO_LARGE = re.compile(r"not enough memory|can't allocate|out of memory|calculation overflowed")

Command = (
    Annotated[Audit, subcommand("audit")]
    | Annotated[Attack, subcommand("attack")]
    | Annotated[Capture, subcommand("capture")]
    | Annotated[Bound, subcommand("bound")]
    | Annotated[Calibrate, subcommand("calibrate")]
    | Annotated[Train, subcommand("train")]
    | Annotated[Reproduce, subcommand("reproduce")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Compare, subcommand("compare")]
    | Annotated[Evidence, subcommand("evidence")]
    | Annotated[List, subcommand("list")]
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `leakbound` command; exits with 0, 1 (cells failed), 2 or 130."""
    given = sys.argv[1:] if arguments is None else arguments
    if given in (["--version"], ["-V"]):
        from importlib.metadata import version

        print(f"leakbound {version('leakbound')}")
        return
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal lacks is no crash
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    command: Command | None = None
    try:
        command = _parsed(given)
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = _run(command)
    except KeyboardInterrupt:
        on = "; nothing is lost: run the same command again to go on"
        _say("stopped" + (on if isinstance(command, Audit | Train | Reproduce) else ""))
        code = STOPPED
    except BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except (ValueError, OSError) as error:
        _say(str(error))
        code = USAGE
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not TOO_LARGE.search(str(error)):
            raise
        _say(
            "there is not enough memory for what was asked; take a smaller model, input_shape or "
            f"batch size ({str(error).splitlines()[0][:200] if str(error) else 'out of memory'})"
        )
        code = USAGE
    sys.exit(code)


def _parsed(arguments: list[str]) -> Command:
    return tyro.cli(
        Command,
        prog="leakbound",
        description="How much training data do federated updates leak, and what bounds it? "
        "(leakbound --version tells the version.)",
        args=arguments,
        config=(FlagCreatePairsOff,),
    )


def _run(command: Command) -> int:
    if isinstance(command, Bound | Calibrate):
        from leakbound import commands_risk

        if isinstance(command, Bound):
            return commands_risk.bound(command)
        return commands_risk.calibration(command)
    if isinstance(command, Capture) or (isinstance(command, Attack) and command.update is not None):
        from leakbound import commands_captured

        if isinstance(command, Capture):
            return commands_captured.capture(command)
        return commands_captured.attack(command)
    if isinstance(command, Train):
        from leakbound import commands_train

        return commands_train.train(command)
    if isinstance(command, Reproduce):
        from leakbound import commands_reproduce

        return commands_reproduce.reproduce(command)
    if isinstance(command, Compare):
        from leakbound import commands_compare

        return commands_compare.compare(command)
    if isinstance(command, Evidence):
        from leakbound import commands_evidence

        return commands_evidence.evidence(command)
    if isinstance(command, Report):
        from leakbound import commands_report

        return commands_report.report(command)
    from leakbound import commands

    if isinstance(command, Audit):
        return commands.audit(command)
    if isinstance(command, Attack):
        return commands.attack(command)
    return commands.listing(command)


def _say(text: str) -> None:
    print(f"leakbound: {printable(text)}", file=sys.stderr, flush=True)


def _warn(message: Warning | str, category: object, *rest: object, **more: object) -> None:
    if not issubclass(category if isinstance(category, type) else Warning, DeprecationWarning):
        _say(f"warning: {message}")


if __name__ == "__main__":
    main()
