"""Words of the command line as options, and options as a page of help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest

from leakbound.cli import usage
from leakbound.cli.parser import Option, arguments, parse


@dataclass(frozen=True, kw_only=True)
class Common:
    """What several commands take."""

    seed: int = 0
    """Seed of everything."""


@dataclass(frozen=True, kw_only=True)
class Made(Common):
    """Make a thing.

    It takes all kinds of options, and this paragraph is long enough that its lines are wrapped.

    leakbound make a b --rate 1
    """

    GROUPS: ClassVar = {"Input": "files rate", "Rest": "span"}
    RARE: ClassVar = "span"

    files: Annotated[tuple[Path, ...], Option("FILE ...", positional=True)] = ()
    """Files to read."""
    rate: float
    """A rate. It has details."""
    span: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest value."""
    words: tuple[str, ...] = ("a",)
    """Words."""
    kind: Literal["one", "two"] | None = None
    """Which kind."""
    loud: bool = False
    """Say more."""


def test_every_kind_of_value():
    words = [
        "a",
        "b",
        "--rate",
        "-1e-3",
        "--span",
        "-1",
        ".5",
        "--words",
        "x",
        "y",
        "--kind",
        "two",
        "--loud",
        "--seed=7",
    ]
    assert parse(Made, words, "make") == Made(
        files=(Path("a"), Path("b")),
        rate=-1e-3,
        span=(-1.0, 0.5),
        words=("x", "y"),
        kind="two",
        loud=True,
        seed=7,
    )


def test_values_that_look_like_options():
    assert parse(Made, ["--rate", "1", "--words=--x"], "make").words == ("--x",)
    assert parse(Made, ["--rate=-inf", "--", "--x"], "make").files == (Path("--x"),)
    assert parse(Made, ["--rate", "1", "--words"], "make").words == ()
    assert parse(Made, ["--rate", "1", "--rate", "2"], "make").rate == 2
    assert parse(Made, ["--rate", "1", "--words", "-1", "-inf"], "make").words == ("-1", "-inf")


def test_values_without_a_name_stand_anywhere():
    words = "a --rate 1 b --loud -- --c -- -d"
    made = parse(Made, words.split(), "make")
    assert made.files == tuple(map(Path, ("a", "b", "--c", "--", "-d")))
    assert (made.rate, made.loud) == (1, True)


def test_names_may_have_underscores():
    @dataclass(frozen=True)
    class Sized:
        batch_size: int = 1

    for name in ("--batch-size", "--batch_size"):
        assert parse(Sized, [name, "3"], "size").batch_size == 3
        with pytest.raises(ValueError, match=r"^--batch-size: invalid int value: 'x'"):
            parse(Sized, [f"{name}=x"], "size")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("", "--rate is not given; make needs it: A rate."),
        ("--rate", "--rate: expected one argument; write --rate FLOAT"),
        ("--rate fast", "--rate: invalid float value: 'fast'; write --rate FLOAT"),
        ("--rate 1 --kind three", "--kind: invalid choice: 'three' .*; write --kind {one,two}"),
        ("--rate 1 --span 1", "--span: expected 2 arguments; write --span FLOAT FLOAT"),
        ("--rate 1 --lod", "make has no option --lod; did you mean '--loud'"),
        ("--rate 1 -x", "make has no option -x; `leakbound make --help-all`"),
        ("--rate 1 --loud=yes", "--loud: ignored explicit argument 'yes'; write --loud"),
        ("--rate 1 --seed 1.5", "--seed: invalid int value: '1.5'; write --seed INT"),
        ("--rate 1 --kin one", "make has no option --kin; did you mean '--kind'"),
    ],
)
def test_mistakes(words, error):
    with pytest.raises(ValueError, match=f"^{error}"):
        parse(Made, words.split(), "make")


def test_help_is_short_and_grouped(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = usage.help_of("make", Made).splitlines()
    assert shown[0] == "usage: leakbound make [FILE ...] --rate FLOAT [OPTIONS]"
    assert "  leakbound make a b --rate 1" in shown
    assert "  --rate FLOAT      A rate. (required)" in shown
    assert shown.index("Input:") < shown.index("Options:")
    assert "Rest:" not in shown
    assert not [line for line in shown if "--span" in line]
    assert shown[-2:] == ["More:", "  --help-all        1 more option, and all details"]
    whole = "\n".join(usage.help_of("make", Made, all_options=True).splitlines())
    assert "It has details." in whole
    assert "--span FLOAT FLOAT  Lowest and highest value. (default: 0 1)" in whole
    assert "--seed INT          Seed of everything. (default: 0)" in whole


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_keeps_to_the_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = usage.help_of("make", Made, all_options=True).splitlines()[1:]
    assert max(map(len, shown)) <= min(columns, 80)


def test_inherited_docstrings_are_texts():
    assert {name: a.text for name, a in arguments(Made).items()}["seed"] == "Seed of everything."
