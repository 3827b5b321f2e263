"""The command line. Heavy imports happen inside the commands."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from leakbound._util import stops
from leakbound._util.text import printable, version
from leakbound.check import closest
from leakbound.cli import usage
from leakbound.cli.options import VERBS
from leakbound.cli.parser import parse

USAGE = 2
CRASHED = 70
CLOSED = 141
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes. No verdict of a command uses one of them but `USAGE`, which then says that it cannot
tell: Python's own code for a crash is 1, which says "exposed", "broken" or "leaks more"."""
TOO_LARGE = re.compile(r"not enough memory|can't allocate|out of memory|calculation overflowed")

GROUP = "leakbound.commands"
"""Entry points of verbs from elsewhere: each as in `VERBS`, a dataclass of options with the name of
the function ("package.module:function") that takes them and returns the exit code."""

APART = {"reproduce": "pip install ./reproductions"}
"""Verbs of our other distributions, and how to install them."""

HELP = ("--help", "-h")
HELP_ALL = "--help-all"

Verb = tuple[type, str]


def main(arguments: list[str] | None = None) -> None:
    """Exits with 0, 1 (the command's own meaning), 2 (a mistake), 70 (a fault of leakbound, with
    its traceback), 130 (Ctrl-C), 143 (SIGTERM) or 141 (the reader of the output is gone).
    """
    words = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal lacks is no crash
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with stops.noted(_cut, until_exit=arguments is None):
            code = _ended(words)
    except BrokenPipeError:
        code = CLOSED
    sys.exit(_flushed(code))


def _cut(number: int) -> None:
    """End the process at once: a stop came, and native code does not let the program end."""
    for worker in multiprocessing.active_children():
        worker.kill()
    text = f"leakbound: {printable(stops.last_words())}\n"
    if sys.stderr is not None and sys.stderr.isatty():
        text += "\x1b[?25h"  # a progress bar hid the cursor
    os.write(2, text.encode("utf-8", "backslashreplace"))  # no lock, which a thread may hold
    os._exit(STOPPED[signal.Signals(number)])


def _flushed(code: int) -> int:
    """The exit code once all output is written; what Python flushes at its end cannot fail then."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            # Python flushes again at its end, which cannot fail on the null device.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            closed = isinstance(error, BrokenPipeError)
            if not closed and not code:  # since Python 3.12 argparse does not let it through
                _say(str(error))
            code = CLOSED if closed else USAGE
    return code


def _ended(arguments: list[str]) -> int:
    """The exit code of a command; whatever stopped it is said on stderr."""
    try:
        try:
            return _answered(arguments)
        except Exception as error:
            stops.reraise(error)
            raise
    except KeyboardInterrupt as stop:
        _say(stops.last_words())
        terminated = isinstance(stop, stops.Terminated)
        number = stops.came() or (signal.SIGTERM if terminated else signal.SIGINT)
        return STOPPED[signal.Signals(number)]
    except BrokenPipeError:
        raise  # an OSError with an exit code of its own
    except (ValueError, OSError) as error:
        _say(str(error))
        return USAGE
    except (Exception, SystemExit) as error:  # the code of a user or a library may call sys.exit
        memory = isinstance(error, MemoryError)
        if not memory and not (isinstance(error, RuntimeError) and TOO_LARGE.search(str(error))):
            traceback.print_exc()
            _say("this is a fault of leakbound, or of the code that it ran, and no result")
            return CRASHED
        _say(
            "there is not enough memory for what was asked; take a smaller model, input_shape or "
            f"batch size ({str(error).splitlines()[0][:200] if str(error) else 'out of memory'})"
        )
        return USAGE


def _answered(arguments: list[str]) -> int:
    """The exit code of a command that comes to its own end."""
    stops.last_words(stops.STOPPED)
    if arguments in (["--version"], ["-V"]):
        print(f"leakbound {version('leakbound')}")
        return 0
    known = verbs(arguments)
    if not arguments or arguments[0] in (*HELP, HELP_ALL):
        print(usage.overview(known))
        return 0 if arguments else USAGE
    verb = _verb(arguments[0], known)
    rest = arguments[1:]
    if asked := [word for word in rest if word in (*HELP, HELP_ALL)]:
        print(
            usage.help_of(
                verb,
                known[verb][0],
                all_options=HELP_ALL in asked,
            )
        )
        return 0
    command: object = parse(known[verb][0], rest, verb)
    if getattr(command, "RESUMES", False):
        on = "nothing is lost: run the same command again to go on"
        stops.last_words(f"{stops.STOPPED}; {on}")
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        return _run(command, known)


def _verb(word: str, known: Mapping[str, Verb]) -> str:
    """The command that a word names.

    Raises:
        ValueError: there is no such command; the message suggests one.
    """
    if word in known:
        return word
    if word in APART:
        raise ValueError(f"{word} is a separate package; install it: {APART[word]}")
    shown = printable(word)
    if word.startswith("-"):
        raise ValueError(f"{shown} comes before the command; see `leakbound --help`")
    raise ValueError(f"there is no command {shown!r}; {closest(word, known, 'leakbound --help')}")


def _run(command: object, known: Mapping[str, Verb]) -> int:
    where = next(where for kind, where in known.values() if type(command) is kind)
    module, _, name = where.partition(":")
    return cast(int, getattr(import_module(module), name)(command))


def verbs(arguments: list[str]) -> dict[str, Verb]:
    """Our verbs and other packages'; the latter are imported only where they may be asked for."""
    commands = dict(VERBS)
    if arguments and arguments[0] in commands:
        return commands
    for point in entry_points(group=GROUP):
        try:
            kind, where = point.load()
            commands.setdefault(point.name, (kind, where))
        except Exception as error:  # another package must not break ours
            _say(
                f"warning: the command {point.name!r} does not load: {error}; repair or uninstall "
                "its package"
            )
    return commands


def _say(text: str) -> None:
    print(f"leakbound: {printable(text)}", file=sys.stderr, flush=True)


def _warn(
    message: Warning | str,
    category: object,
    *rest: object,
    **more: object,
) -> None:
    if not issubclass(category if isinstance(category, type) else Warning, DeprecationWarning):
        _say(f"warning: {message}")
