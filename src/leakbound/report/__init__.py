"""The report of a run: one HTML page that works offline, written from the records alone."""

from leakbound.report.html import check_installed, write

__all__ = ["check_installed", "write"]
