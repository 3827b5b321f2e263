"""The help of the command line: one screen for each command, 80 columns wide at most."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping

from leakbound.cli.parser import Argument, arguments, first

WIDEST, INDENT, NAMES = 80, 2, 26
"""Columns of the help, of its indent and of the names of options."""
PROGRAM = "leakbound "
GROUPS = {
    "Measure": ("audit", "attack", "capture", "train"),
    "Bound and choose noise": ("bound", "calibrate"),
    "Read and report": ("report", "compare", "evidence", "list"),
}


def overview(known: Mapping[str, tuple[type, str]]) -> str:
    """What `leakbound --help` prints: every command in a line."""
    lines = [
        "usage: leakbound COMMAND [OPTIONS]",
        "",
        *_wrapped("Measure how much training data federated updates leak, and bound it."),
    ]
    grouped = {name for names in GROUPS.values() for name in names}
    more = {"More": tuple(name for name in known if name not in grouped)}
    for title, names in (GROUPS | more).items():
        if names:
            lines += ["", f"{title}:"]
        for name in names:
            lines += _row(name, first(summary(known[name][0])[0]), 12)
    lines += ["", "Start here:"]
    lines += _row("leakbound audit --quick", "a first report, in under a minute", NAMES + 2)
    lines += _row("leakbound COMMAND --help", "the options of a command", NAMES + 2)
    lines += _row("leakbound list attacks", "all attacks (also: defenses, models, ...)", NAMES + 2)
    lines += _row("leakbound --version", "the version", NAMES + 2)
    return "\n".join(lines)


def help_of(verb: str, options: type, *, all_options: bool = False) -> str:
    """What `leakbound VERB --help` prints, or `--help-all`: also rare options, and full texts."""
    known = arguments(options)
    positional = [_usage(a) for a in known.values() if a.positional]
    named = [a for a in known.values() if a.required and not a.positional]
    required = [f"{a.option} {a.metavar}" for a in named]
    lines = [" ".join(["usage: leakbound", verb, *positional, *required, "[OPTIONS]"])]
    for paragraph in summary(options):
        lines += ["", paragraph]
    rare = set() if all_options else set(getattr(options, "RARE", "").split())
    for title, names in _groups(options, known):
        rows = [known[name] for name in names if name not in rare]
        lines += ["", f"{title}:"] if rows else []
        for argument in rows:
            lines += _row(_name(argument), _text(argument, all_options), NAMES)
    shorter = any(first(a.text) != a.text for a in known.values())
    if rare or (shorter and not all_options):
        many = f"{len(rare)} more option{'' if len(rare) == 1 else 's'}, and " if rare else ""
        lines += ["", *_row("--help-all", f"{many}all details", NAMES)]
    return "\n".join(lines)


def summary(options: type) -> list[str]:
    """The paragraphs of an options class's docstring, wrapped; example commands are indented."""
    paragraphs = (inspect.getdoc(options) or "").strip().split("\n\n")
    return [
        textwrap.indent(textwrap.dedent(text), "  ")
        if text.lstrip().startswith(PROGRAM)
        else "\n".join(_wrapped(" ".join(text.split())))
        for text in paragraphs
    ]


def _groups(options: type, known: Mapping[str, Argument]) -> Iterator[tuple[str, list[str]]]:
    """The titled groups of an options class, and "Options" for fields in none of them."""
    groups = {title: text.split() for title, text in getattr(options, "GROUPS", {}).items()}
    named = {name for names in groups.values() for name in names}
    rest = [name for name in known if name not in named]
    yield from groups.items()
    if rest:
        yield "Options", rest


def _usage(argument: Argument) -> str:
    return argument.metavar if argument.required else f"[{argument.metavar}]"


def _name(argument: Argument) -> str:
    if argument.positional or argument.flag:
        return argument.option
    return f"{argument.option} {argument.metavar}"


def _text(argument: Argument, whole: bool) -> str:
    text = argument.text if whole else first(argument.text)
    if argument.required:
        return f"{text} (required)"
    default = argument.default
    if default is None or default is False or default in ((), ""):
        return text
    values = default if isinstance(default, tuple) else (default,)
    shown = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
    return f"{text} (default: {shown})"


def _row(name: str, text: str, width: int) -> list[str]:
    """A name and its text beside it; a long name stands on a line of its own."""
    columns = _columns()
    shown = textwrap.wrap(text, columns - INDENT - width, break_on_hyphens=False) or [""]
    head, blank = f"{'':{INDENT}}{name}", " " * (INDENT + width)
    if len(name) > width - 2:
        heads = textwrap.wrap(head, columns, subsequent_indent="    ")
        return [*heads, *(blank + line for line in shown)]
    return [f"{head:{INDENT + width}}{shown[0]}", *(blank + line for line in shown[1:])]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _columns(), break_on_hyphens=False, break_long_words=False)


def _columns() -> int:
    return max(40, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
