"""The help of the command line: one screen for each command, 80 columns wide at most.

argparse lays it out. Each line of the help is an argument of a parser that parses nothing.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from leakbound.cli.parser import Argument, arguments, first

WIDEST = 80
NAMES = 28
"""Columns of the help, and of its names."""
PROGRAM = "leakbound "
GROUPS = {
    "Measure": ("schema", "audit", "attack", "capture", "train", "train-prior"),
    "Bound and choose noise": ("bound", "calibrate", "audit-epsilon"),
    "Read and report": (
        "report",
        "reidentify",
        "compare",
        "evidence",
        "check",
        "ledger",
        "list",
    ),
}
START = {
    "leakbound audit --quick": "a first report, in 15 seconds",
    "leakbound COMMAND --help": "the options of a command",
    "leakbound list attacks": "all attacks (also: defenses, models, ...)",
    "leakbound --version": "the version",
}

Rows = Mapping[str, str]


class _Layout(argparse.RawDescriptionHelpFormatter):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given, max_help_position=NAMES, width=_columns())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # --an-option stays whole


def overview(known: Mapping[str, tuple[type, str]]) -> str:
    """What `leakbound --help` prints: every command in a line."""
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "More": tuple(name for name in known if name not in grouped)}
    said = {title: _commands(known, names) for title, names in groups.items()}
    about = "Measure how much training data federated updates leak, and bound it."
    return _page("leakbound COMMAND [OPTIONS]", [about], said | {"Start here": START})


def help_of(
    verb: str,
    options: type,
    *,
    all_options: bool = False,
) -> str:
    """What `leakbound VERB --help` prints, or `--help-all`: also rare options, and full texts."""
    known = arguments(options)
    positional = [
        a.option if a.required else f"[{a.option}]" for a in known.values() if a.positional
    ]
    required = [a.shown for a in known.values() if a.required and not a.positional]
    rare = set() if all_options else set(getattr(options, "RARE", "").split())
    groups = {title: text.split() for title, text in getattr(options, "GROUPS", {}).items()}
    grouped = {name for names in groups.values() for name in names}
    groups["Options"] = [name for name in known if name not in grouped]
    said = {
        title: {known[n].shown: _text(known[n], all_options) for n in names if n not in rare}
        for title, names in groups.items()
    }
    if rare or (not all_options and any(first(a.text) != a.text for a in known.values())):
        many = f"{len(rare)} more option{'' if len(rare) == 1 else 's'}, and " if rare else ""
        said["More"] = {"--help-all": f"{many}all details"}
    usage = " ".join([PROGRAM + verb, *positional, *required, "[OPTIONS]"])
    return _page(usage, summary(options), said)


def summary(options: type) -> list[str]:
    """The paragraphs of an options class's docstring, wrapped; example commands are indented."""
    paragraphs = (inspect.getdoc(options) or "").strip().split("\n\n")
    return [
        textwrap.indent(textwrap.dedent(text), "  ")
        if text.lstrip().startswith(PROGRAM)
        else textwrap.fill(
            " ".join(text.split()), _columns(), break_on_hyphens=False, break_long_words=False
        )
        for text in paragraphs
    ]


def _page(
    usage: str,
    about: Iterable[str],
    groups: Mapping[str, Rows],
) -> str:
    page = argparse.ArgumentParser(
        usage=usage,
        description="\n\n".join(about),
        formatter_class=_Layout,
        add_help=False,
    )
    for title, rows in groups.items():
        group = page.add_argument_group(title)
        for name, text in rows.items():
            # argparse formats help texts with %.
            group.add_argument(
                "row",
                metavar=name,
                help=text.replace("%", "%%"),
            )
    return page.format_help().strip("\n")


def _commands(
    known: Mapping[str, tuple[type, str]],
    names: Iterable[str],
) -> Rows:
    return {name: first(summary(known[name][0])[0]).replace("\n", " ") for name in names}


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


def _columns() -> int:
    return max(40, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
