"""The command line. Heavy imports happen inside the commands."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from leakbound._util.text import printable, version
from leakbound.check import closest
from leakbound.cli import usage
from leakbound.cli.options import VERBS
from leakbound.cli.parser import parse

USAGE, STOPPED, CLOSED, TERMINATED = 2, 130, 141, 143
TOO_LARGE = re.compile(r"not enough memory|can't allocate|out of memory|calculation overflowed")

GROUP = "leakbound.commands"
"""Entry points of verbs from elsewhere: each as in `VERBS`, a dataclass of options with the name of
the function ("package.module:function") that takes them and returns the exit code."""

APART = {"reproduce": "pip install ./reproductions"}
"""Verbs of our other distributions, and how to install them."""

HELP, HELP_ALL = ("--help", "-h"), "--help-all"

Verb = tuple[type, str]


def main(arguments: list[str] | None = None) -> None:
    """Exits with 0, 1 (experiments failed), 2 (a mistake), 130 (Ctrl-C), 143 (SIGTERM) or 141 (the
    reader of the output is gone).
    """
    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal lacks is no crash
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _terminable():
            code = _ended(given)
    except BrokenPipeError:
        code = CLOSED
    sys.exit(_flushed(code))


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the program as Ctrl-C does."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Workers are ended and files closed on SIGTERM too; a second one does not disturb that."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _flushed(code: int) -> int:
    """The exit code once all output is written; what Python flushes at its end cannot fail then."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            closed = isinstance(error, BrokenPipeError)
            if not closed and not code:  # since Python 3.12 argparse does not let it through
                _say(str(error))
            code = CLOSED if closed else USAGE
    return code


def _ended(arguments: list[str]) -> int:
    """The exit code of a command; whatever stopped it is said on stderr."""
    command: object = None
    try:
        if arguments in (["--version"], ["-V"]):
            print(f"leakbound {version('leakbound')}")
            return 0
        known = verbs(arguments)
        if not arguments or arguments[0] in (*HELP, HELP_ALL):
            print(usage.overview(known))
            return 0 if arguments else USAGE
        verb, rest = _verb(arguments[0], known), arguments[1:]
        if asked := [word for word in rest if word in (*HELP, HELP_ALL)]:
            print(usage.help_of(verb, known[verb][0], all_options=HELP_ALL in asked))
            return 0
        command = parse(known[verb][0], rest, verb)
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            return _run(command, known)
    except KeyboardInterrupt as stop:
        on = "; nothing is lost: run the same command again to go on"
        _say("stopped" + (on if getattr(command, "RESUMES", False) else ""))
        return TERMINATED if isinstance(stop, _Terminated) else STOPPED
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        _say(str(error))
        return USAGE
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not TOO_LARGE.search(str(error)):
            raise
        _say(
            "there is not enough memory for what was asked; take a smaller model, input_shape or "
            f"batch size ({str(error).splitlines()[0][:200] if str(error) else 'out of memory'})"
        )
        return USAGE


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
    found = dict(VERBS)
    if arguments and arguments[0] in found:
        return found
    for point in entry_points(group=GROUP):
        try:
            kind, where = point.load()
            found.setdefault(point.name, (kind, where))
        except Exception as error:
            _say(
                f"warning: the command {point.name!r} does not load: {error}; repair or uninstall "
                "its package"
            )
    return found


def _say(text: str) -> None:
    print(f"leakbound: {printable(text)}", file=sys.stderr, flush=True)


def _warn(message: Warning | str, category: object, *rest: object, **more: object) -> None:
    if not issubclass(category if isinstance(category, type) else Warning, DeprecationWarning):
        _say(f"warning: {message}")
