"""What commands share of the terminal: where they write, and strangers' text on it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leakbound._util.text import printable

LONGEST = 300  # characters of a stranger's text on the screen


class _Console(Console):
    """Rich's own ends with 1 when the reader is gone, which means failed experiments here."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def say(self, text: str) -> None:
        """Print a line that the terminal may break anywhere, so that paths can be copied."""
        self.print(text, soft_wrap=True)


console = _Console(highlight=False)
errors = _Console(highlight=False, stderr=True)


def table(*left: str, right: Sequence[str] = ()) -> Table:
    """A table whose cells fold; of its columns those to the `right` are flush right."""
    made = Table(show_edge=False)
    for head in (*left, *right):
        made.add_column(
            head,
            justify="right" if head in right else "left",
            overflow="fold",
        )
    return made


def as_json(value: object) -> str:
    """A result as a command prints it with --json: equal results have equal bytes."""
    plain = msgspec.to_builtins
    return json.dumps(
        value,
        default=plain,
        indent=1,
        sort_keys=True,
        allow_nan=False,
    )


def safe(text: object) -> str:
    """A stranger's text for the screen: one line, no control characters, no markup."""
    return escape(printable(str(text)))


def brief(text: object) -> str:
    """The same of what may be long: its first `LONGEST` characters."""
    line = printable(str(text))
    # Cut before it is escaped: half of an escape would be markup.
    return escape(line if len(line) <= LONGEST else line[:LONGEST] + "...")
