"""Turns command-line words into a dataclass of options.

Each field is an option: `batch_size: int = 1` is `--batch-size INT`. The docstring below a field is
its help text. A bool is a flag; a field without a default is required.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from leakbound.check import closest

__all__ = ["Option"]  # what a command of another package needs

T = TypeVar("T")
NUMBER = re.compile(r"-(\d|\.\d|inf|nan)")


@dataclasses.dataclass(frozen=True)
class Option:
    """How a field appears on the command line: `Annotated[Path, Option("DIR", positional=True)]`.

    `metavar` stands for the value in the help; `positional`: the value has no `--name` before it.
    """

    metavar: str = ""
    positional: bool = False


@dataclasses.dataclass(frozen=True)
class Argument:
    """A field of an options class, as the parser and the help need it. `nargs` is argparse's."""

    field: str
    kind: type
    choices: tuple[str, ...]
    nargs: int | str | None
    metavar: str
    positional: bool
    default: Any
    text: str

    @property
    def option(self) -> str:
        return self.metavar if self.positional else "--" + self.field.replace("_", "-")

    @property
    def shown(self) -> str:
        """The option with its values, as the help shows it."""
        bare = self.positional or self.flag
        return self.option if bare else f"{self.option} {self.metavar}"

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def flag(self) -> bool:
        return self.kind is bool


def arguments(options: type) -> dict[str, Argument]:
    """Every field of an options class by name."""
    hints = typing.get_type_hints(options, include_extras=True)
    texts = _texts(options)
    return {
        field.name: _argument(field, hints[field.name], texts.get(field.name, ""))
        for field in dataclasses.fields(options)
    }


def parse(
    options: type[T],
    words: Sequence[str],
    verb: str,
) -> T:
    """The options that the words give.

    Raises:
        ValueError: an unknown option, a missing value or a wrong one; the message says what to do.
    """
    known = arguments(options)
    given = argparse.Namespace()
    rest = list(words)
    try:  # options first, so that other values can stand before, after and between them
        for positional in (False, True):
            parser = _parser(a for a in known.values() if a.positional == positional)
            _, rest = parser.parse_known_args(rest, given)
    except argparse.ArgumentError as error:
        name = (error.argument_name or "").partition("/")[0]
        action = next(a for a in known.values() if a.option == name)
        raise ValueError(f"{name}: {error.message}; write {action.shown}") from None
    if rest:
        raise ValueError(_unknown(rest, [a.option for a in known.values()], verb))
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(given).items()}
    for argument in known.values():
        if values[argument.field] is dataclasses.MISSING:
            raise ValueError(
                f"{argument.option} is not given; {verb} needs it: {first(argument.text)}"
            )
    return options(**values)


def _parser(known: Iterable[Argument]) -> argparse.ArgumentParser:
    # argparse would end the process with its own text; an abbreviation may become ambiguous.
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        add_help=False,
        exit_on_error=False,
    )
    parser._negative_number_matcher = NUMBER  # argparse's own takes -1e-3 for an option
    for argument in known:
        names = [argument.field]
        if not argument.positional:
            # Both forms: messages write the field's name, with underscores.
            names = list(dict.fromkeys([argument.option, "--" + argument.field]))
        more: dict[str, Any] = {"action": "store_true"}
        if not argument.flag:
            more = {"type": argument.kind, "nargs": argument.nargs, "metavar": argument.metavar}
            more["choices"] = argument.choices or None
            if argument.nargs == "*":
                more["action"] = _Several
        parser.add_argument(*names, default=argument.default, **more)
    return parser


class _Several(argparse.Action):
    """An option of several values that is named again adds values."""

    def __call__(
        self,
        parser: Any,
        namespace: Any,
        values: Any,
        option: Any = None,
    ) -> None:
        held = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(() if held is self.default else held), *values])


def _unknown(
    rest: Sequence[str],
    known: Sequence[str],
    verb: str,
) -> str:
    options = [word for word in rest if word.startswith("-") and not NUMBER.match(word)]
    if not options:
        return (
            f"{verb} does not take {rest[0]!r}; an option begins with --, and `leakbound {verb} "
            "--help` shows them"
        )
    name = options[0].partition("=")[0]
    near = closest(name, [option for option in known if option.startswith("-")], "")
    return (
        f"{verb} has no option {name}; {near}{' ' if near else ''}`leakbound {verb} --help-all` "
        "shows all options"
    )


def _argument(
    field: dataclasses.Field[Any],
    hint: Any,
    text: str,
) -> Argument:
    shown = Option()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
        shown = next((note for note in notes if isinstance(note, Option)), shown)
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
    nargs: int | str | None = "?" if shown.positional else None
    choices: tuple[str, ...] = ()
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        nargs = "*" if inner[-1] is Ellipsis else len(inner)
        hint = inner[0]
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        hint = str
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    metavar = shown.metavar or _metavar(field.name, hint, choices, nargs, shown.positional)
    return Argument(field.name, hint, choices, nargs, metavar, shown.positional, default, text)


def _metavar(
    name: str,
    kind: type,
    choices: Sequence[str],
    nargs: int | str | None,
    positional: bool,
) -> str:
    if choices:
        return "{" + ",".join(choices) + "}"
    known = {int: "INT", float: "FLOAT", Path: "PATH"}
    one = name.upper() if positional else known.get(kind, "STR")
    return (
        f"{one} ..."
        if nargs == "*"
        else " ".join([one] * nargs if isinstance(nargs, int) else [one])
    )


def first(text: str) -> str:
    """The first sentence of a text."""
    return re.split(r"(?<=[.?!]) ", text, maxsplit=1)[0] or "see its help."


@cache
def _texts(options: type) -> dict[str, str]:
    """The docstring below each field, in one line."""
    names: dict[str, str] = {}
    for kind in reversed(options.__mro__):
        if not dataclasses.is_dataclass(kind):
            continue
        (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(made, ast.ClassDef)
        for field, below in zip(made.body, made.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = getattr(getattr(below, "value", None), "value", None)
                if isinstance(below, ast.Expr) and isinstance(text, str):
                    names[field.target.id] = " ".join(text.split())
    return names
