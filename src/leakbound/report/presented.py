"""What the objects that the five verbs return have in common: `.verdict`, `.plot()`, `.to_html`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from leakbound.assess.record import Verdict
from leakbound.report.template import check_installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Presented:
    """A result with a verdict, a figure, a form in notebooks and a page of its own."""

    @property
    def verdict(self) -> Verdict:
        """The verdict in a word (docs/evidence.md)."""
        raise NotImplementedError

    def _figure(self) -> Figure:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def plot(self) -> Figure:
        """The result as a matplotlib figure.

        Raises:
            ValueError: there is nothing to draw, or `leakbound[report]` is not installed.
        """
        check_installed()
        return self._figure()

    def to_html(self, path: Path | str) -> Path:
        """Write the result as a page: one file that loads nothing; its path.

        Raises:
            ValueError: it cannot be written, or would replace a file that leakbound did not write.
        """
        check_installed()
        from leakbound.report.figures import save_page

        return save_page(path, f"leakbound: {self.verdict}", self._repr_html_())
