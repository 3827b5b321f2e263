"""Make untrusted text safe to print on one line of a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Untrusted text on one line that no terminal interprets as a command."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
