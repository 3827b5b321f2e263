"""Turns command-line words into a dataclass of options.

Each field is an option: `batch_size: int = 1` is `--batch-size INT`. The docstring below a field is
its help text. A bool is a flag; a field without a default is required.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from leakbound.check import closest

__all__ = ["Option"]  # what a command of another package needs

T = TypeVar("T")
NUMBER = re.compile(r"-(\d|\.\d|inf|nan)")
WORDS = {int: "a whole number", float: "a number", Path: "a path", str: "a text"}


@dataclasses.dataclass(frozen=True)
class Option:
    """How a field appears on the command line: `Annotated[Path, Option("DIR", positional=True)]`.

    `metavar` stands for the value in the help; `positional`: the value has no `--name` before it.
    """

    metavar: str = ""
    positional: bool = False


@dataclasses.dataclass(frozen=True)
class Argument:
    """A field of an options class, as the parser and the help need it.

    `least` and `most` are the numbers of values that it takes; `most` None is any number.
    """

    field: str
    kind: type
    choices: tuple[str, ...]
    least: int
    most: int | None
    metavar: str
    positional: bool
    default: Any
    text: str

    @property
    def option(self) -> str:
        return self.metavar if self.positional else "--" + self.field.replace("_", "-")

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def flag(self) -> bool:
        return self.kind is bool


def arguments(options: type) -> dict[str, Argument]:
    """Every field of an options class by name."""
    hints, texts = typing.get_type_hints(options, include_extras=True), _texts(options)
    return {
        field.name: _argument(field, hints[field.name], texts.get(field.name, ""))
        for field in dataclasses.fields(options)
    }


def parse(options: type[T], words: Sequence[str], verb: str) -> T:
    """The options that the words give.

    Raises:
        ValueError: an unknown option, a missing value or a wrong one; the message says what to do.
    """
    known = arguments(options)
    named = {a.option: a for a in known.values() if not a.positional}
    given: dict[str, Any] = {}
    loose: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            loose += rest
            break
        if not _is_option(word):
            loose.append(word)
            continue
        name, assigned, value = word.partition("=")
        found = named.get(name.replace("_", "-"))
        if found is None:
            raise ValueError(
                f"{verb} has no option {name}; {_near(name, list(named))}`leakbound {verb} "
                "--help-all` shows all options"
            )
        given[found.field] = _values(found, [value] if assigned else _taken(found, rest), assigned)
    given |= _positionals(known, loose, verb)
    for argument in known.values():
        if argument.required and argument.field not in given:
            raise ValueError(
                f"{argument.option} is not given; {verb} needs it: {first(argument.text)}"
            )
    return options(**given)


def _near(name: str, known: list[str]) -> str:
    said = closest(name, known, "")
    return f"{said} " if said else ""


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not NUMBER.match(word)


def _taken(argument: Argument, rest: list[str]) -> list[str]:
    """The values that follow an option; they are removed from the words."""
    most = len(rest) if argument.most is None else argument.most
    taken: list[str] = []
    while rest and len(taken) < most and not (_is_option(rest[0]) or rest[0] == "--"):
        taken.append(rest.pop(0))
    return taken


def _values(argument: Argument, words: list[str], assigned: str = "") -> Any:
    if argument.flag:
        if assigned:
            raise ValueError(f"{argument.option} is {words[0]!r}, but it takes no value; leave it")
        return True
    if len(words) < argument.least:
        wanted = "a value" if argument.least == 1 else f"{argument.least} values"
        raise ValueError(f"{argument.option} needs {wanted}: {argument.option} {argument.metavar}")
    made = tuple(_converted(argument, word) for word in words)
    return made if _is_many(argument) else made[0]


def _is_many(argument: Argument) -> bool:
    return argument.most != 1


def _converted(argument: Argument, word: str) -> Any:
    if argument.choices and word not in argument.choices:
        raise ValueError(f"{argument.option} is {word!r}; {closest(word, argument.choices)}")
    try:
        return argument.kind(word)
    except ValueError:
        raise ValueError(
            f"{argument.option} is {word!r}; give {WORDS.get(argument.kind, 'another value')}"
        ) from None


def _positionals(known: Mapping[str, Argument], loose: list[str], verb: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for argument in known.values():
        if argument.positional and loose:
            count = len(loose) if argument.most is None else argument.most
            taken, loose = loose[:count], loose[count:]
            given[argument.field] = _values(argument, taken)
    if loose:
        raise ValueError(
            f"{verb} does not take {loose[0]!r}; an option begins with --, and `leakbound {verb} "
            "--help` shows them"
        )
    return given


def _argument(field: dataclasses.Field[Any], hint: Any, text: str) -> Argument:
    shown = Option()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
        shown = next((note for note in notes if isinstance(note, Option)), shown)
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
    least, choices = 1, ()
    most: int | None = 1
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        many = inner[-1] is Ellipsis
        least, most, hint = (0, None, inner[0]) if many else (len(inner), len(inner), inner[0])
    if typing.get_origin(hint) is Literal:
        choices, hint = typing.get_args(hint), str
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    metavar = shown.metavar or _metavar(field.name, hint, choices, most, shown.positional)
    kinds = (hint, choices, least, most)
    return Argument(field.name, *kinds, metavar, shown.positional, default, text)


def _metavar(
    name: str, kind: type, choices: Sequence[str], most: int | None, positional: bool
) -> str:
    if choices:
        return "{" + ",".join(choices) + "}"
    known = {int: "INT", float: "FLOAT", Path: "PATH"}
    one = name.upper() if positional else known.get(kind, "STR")
    return f"{one} ..." if most is None else " ".join([one] * most)


def first(text: str) -> str:
    """The first sentence of a text."""
    return re.split(r"(?<=[.?!]) ", text, maxsplit=1)[0] or "see its help."


@cache
def _texts(options: type) -> dict[str, str]:
    """The docstring below each field, in one line."""
    found: dict[str, str] = {}
    for kind in reversed(options.__mro__):
        if not dataclasses.is_dataclass(kind):
            continue
        (made,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(made, ast.ClassDef)
        for field, below in zip(made.body, made.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = getattr(getattr(below, "value", None), "value", None)
                if isinstance(below, ast.Expr) and isinstance(text, str):
                    found[field.target.id] = " ".join(text.split())
    return found
